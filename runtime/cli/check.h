// check.h: compares what a run gave with the reference: every token of a short sequence, of a long
// one a sample of each rank that always holds the first and last tokens of every span.
#ifndef CLI_CHECK_H
#define CLI_CHECK_H

#include "arrays.h"

// The largest error of one array, where it is, and the limit.  Errors are divided by max(1,
// |wanted|).
struct cli_check_error {
  int64_t elements;  // compared; 0: the array was not checked
  double error, limit;
  double got, wanted;
  int64_t row;       // batch row * tokens + token; -1: the array has no tokens
  int64_t element;   // head * dim + d
};

struct cli_check {
  const struct cli_given *given;
  const struct cli_arrays *arrays;
  uint64_t seed;  // of the sample

  int64_t tokens_checked, tokens_held;  // batch included; padding is held by nobody
  bool own_lse;      // lse and delta of queries around sampled keys were the run's own
  bool dsink_left;   // dsink was too much work to check
  bool passed;
  struct cli_check_error errors[CLI_ARRAY_COUNT];  // outputs only
};

// Fills the second half.  An array above its limit is no failure of this call.
enum cli_exit cli_check_run(struct cli_check *check);

#endif
