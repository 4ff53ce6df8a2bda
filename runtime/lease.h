// lease.h: one tuner at a time measures into a database, for two would disturb each other's
// timings.
#ifndef SW_LEASE_H
#define SW_LEASE_H

#include "error.h"

struct sw_lease {
  int file;  // -1: none
};

// Takes the lease beside the database at `path`, waiting at most `wait_s`; SWATHE_TIMEOUT then,
// with the owner's process in the words.  SWATHE_INTERRUPTED when *stop (or NULL) becomes
// nonzero.  Released by sw_lease_give_back, or when the process ends however it ends.
enum swathe_status sw_lease_take(const char *path, double wait_s, const volatile int *stop,
                                 struct sw_lease *lease);
void sw_lease_give_back(struct sw_lease *lease);

#endif
