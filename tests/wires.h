// wires.h: ranks as threads whose messages are device memory and move in the order of streams, as
// they do with a transport between GPUs: the host only queues them.
//
// Of the driver that SWATHE_LIBCUDA names.  What else a transport does is left to another.
#ifndef WIRES_H
#define WIRES_H

#include "swathe.h"

struct wires;
struct wires *wires_make(int32_t ranks);
// The rank's transport, over `inner` for what moves no messages; both live until wires_free.
struct swathe_transport *wires_rank(struct wires *wires, int32_t rank,
                                    struct swathe_transport *inner);
// How many messages the ranks queued.
int64_t wires_count(const struct wires *wires);
void wires_free(struct wires *wires);

#endif
