// limit.h: what this machine can do at best, so that a search knows when little is left to win.
#ifndef SW_LIMIT_H
#define SW_LIMIT_H

#include "layer.h"

struct sw_limit {
  double flops_per_s, bytes_per_s;  // of all the context's threads together; 0: not known
};

// The C text of what is measured, for benches that clock it in their own way.  An item of its
// `multiply` is SW_LIMIT_STEPS multiply-adds of vectors, each of `step_flops` operations; behind
// sw_limit_pairs they are of pairs of bfloat16 where the isa has them.
extern const char sw_limit_source[], sw_limit_pairs[];
enum { SW_LIMIT_STEPS = 12 * 1000 };

// Measures multiply-adds in registers, of the kind that a kernel of this dtype uses, and reading
// from memory: some tenths of a second.  `flags` are the compiler's for the context's isa.
enum swathe_status sw_limit_measure(struct swathe_context *context, enum swathe_dtype dtype,
                                    const char *flags, struct sw_limit *limit);

#endif
