// group.h: a group of ranks as threads, each with a layer over its share of one sequence.
//
// Knows the public header, sequence.h and of the library's inside how a layer is given its configs.
#ifndef GROUP_H
#define GROUP_H

#include "sequence.h"

// One step of every rank, in order; a group's script is a string of them:
//   'f' forward   'b' backward   'p' poison the outputs again   's' shard anew (same sharding)
//   'm' mute the layer
struct group_case {
  struct swathe_context *context;
  struct swathe_context *const *contexts;  // [ranks], or NULL: the one for all
  const struct swathe_problem *problem;
  const struct swathe_sharding *sharding;
  const struct swathe_sharding *before;  // or NULL: a forward and a backward under it come first
  struct share_form form;
  const char *const *configs;  // [2] by direction, or NULL: what the layer chooses
  const char *exchange;        // config, or NULL
  const char *script;
  enum swathe_strategy strategy;
  bool keep_halo;     // pass a halo buffer from forward to backward
  int64_t *memory_bytes;  // [ranks] of the layers at the end, or NULL
  double deadline_s;  // 0: 20 s
  struct wires *wires;  // or NULL: messages are device memory and move by these
  bool nccl;          // each rank has a device of its own, and its messages go by NCCL
};

// Runs the script on all ranks and gathers the results into the sequence.  Not OK: `words` has the
// first rank's failure.  `moved`: [ranks] bytes each rank received over all steps, or NULL.
enum swathe_status group_run(const struct group_case *group, struct sequence *sequence,
                             int64_t *moved, char *words, size_t size);

#endif
