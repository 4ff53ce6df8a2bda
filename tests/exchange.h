// exchange.h: random messages and gathers between the ranks of any transport, checked byte by byte.
#ifndef EXCHANGE_H
#define EXCHANGE_H

#include "transport.h"

enum { EXCHANGE_MOST_RANKS = 8 };

// Four rounds, the same for all ranks by `seed`.  False: what failed.
bool exchange_randomly(struct swathe_transport *transport, uint64_t seed, char *failure,
                       size_t size);

uint64_t exchange_mix(uint64_t x);
int exchange_below(uint64_t *seed, int bound);

#endif
