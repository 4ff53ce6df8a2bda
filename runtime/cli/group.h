// group.h: runs a layer over ranks: shard, forward, backward, gather.
#ifndef CLI_GROUP_H
#define CLI_GROUP_H

#include "arrays.h"
#include "ranks.h"

struct cli_group {
  const struct cli_args *args;
  const struct cli_given *given;
  struct cli_arrays *arrays;  // inputs are read, outputs filled
  int64_t repeat;             // >= 1

  struct cli_ranks ranks;     // connected by cli_group_run, until cli_group_free
  // Filled by cli_group_run where rank 0 is; [repeat] of the slowest rank, [ranks] of the last
  // repetition.
  double *forward_us, *backward_us;
  double *forward_wait_us, *backward_wait_us;  // longest of any rank; NaN: not measured
  struct swathe_timing *forward, *backward;
  int64_t *memory_bytes;                       // [ranks] of the layers beside the tensors
  char explain[4096];                          // rank 0's
  struct swathe_traffic *traffic;              // [ranks] as planned
  int64_t compiled, loaded;                    // kernels
};

// Outputs come to where rank 0 is.  The words of a failure are those of its first cause, whichever
// rank it was.
enum cli_exit cli_group_run(struct cli_group *group);
void cli_group_free(struct cli_group *group);

#endif
