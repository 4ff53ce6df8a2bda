// transport.h: how the ranks of a group reach each other.  A transport fills in the operations; the
// rest of the library sees only this.  One thread at a time uses a rank's transport.
#ifndef SW_TRANSPORT_H
#define SW_TRANSPORT_H

#include "error.h"

struct sw_transport_message {
  void *data;        // read until done if sent, written until done if received
  size_t bytes;      // > 0; both ends give the same number, else SWATHE_DISAGREE on both
  int32_t peer;      // never the own rank
  bool send;
};

struct sw_transport_operations {
  // Starts all messages of one phase, without waiting.  Between two ranks, messages pair up in
  // order: the n-th send of one with the n-th receive of the other.  The array need not outlive
  // the call.
  enum swathe_status (*post)(struct swathe_transport *, const struct sw_transport_message *messages,
                             int32_t count);
  // Lets messages progress; *done when all that were posted have finished.  Cheap; never waits.
  enum swathe_status (*test)(struct swathe_transport *, bool *done);
  // Waits for all that were posted, at most until the deadline (SWATHE_TIMEOUT names the peer).
  enum swathe_status (*wait)(struct swathe_transport *);
  // all[r * bytes ...] = what rank r gave as `mine`.  Every rank calls it with the same `bytes`.
  enum swathe_status (*gather)(struct swathe_transport *, const void *mine, size_t bytes,
                               void *all);
  void (*destroy)(struct swathe_transport *);
};

struct swathe_transport {
  const struct sw_transport_operations *operations;
  const char *name;
  int32_t rank, ranks;
};

#endif
