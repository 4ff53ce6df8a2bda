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
  // NULL or a count that goes down by one when the message has finished, at the latest in the test
  // or wait that follows.  A transport may leave it alone: what it says of all holds anyway.
  _Atomic int32_t *left;
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
  // Starts all messages, of device memory, in the order of the stream; they are done when the
  // stream is.  NULL where data must lie in host memory.
  enum swathe_status (*enqueue)(struct swathe_transport *,
                                const struct sw_transport_message *messages, int32_t count,
                                void *stream);
  // From now on a sleeping thread lets posted messages progress every `interval_us`, beside the
  // calls; 0: no longer.  Cheap; may be called before every phase.  NULL: there is no such thread.
  // Where one is impossible, a warning says so and messages progress in the calls alone.
  enum swathe_status (*progress_thread)(struct swathe_transport *, int32_t interval_us);
  // Tells the ranks that wait for this one, now or later, that it gave up, and why.  NULL: they
  // find out by their deadline.
  void (*abort)(struct swathe_transport *, const char *why);
};

struct swathe_transport {
  const struct sw_transport_operations *operations;
  const char *name;
  int32_t rank, ranks;
  // Set by a failure that left messages with the system, which may still read and write their
  // memory: nobody may free it or use it again while the process lives.
  bool holds_memory;
};

// SWATHE_BAD_USE if the message names no peer or has no bytes.
enum swathe_status sw_transport_check(const struct swathe_transport *transport,
                                      const struct sw_transport_message *message);

#endif
