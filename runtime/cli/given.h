// given.h: what the options give a verb to work on: a context, a problem, and the sequence with its
// sharding.  Options that contradict each other are refused here, once for all verbs.
#ifndef CLI_GIVEN_H
#define CLI_GIVEN_H

#include "args.h"

// What files say about a sequence; their heads and tokens take the place of options.
struct cli_given_files {
  int64_t batch, tokens;
  int32_t q_heads, kv_heads, head_dim_qk, head_dim_v;
  bool sink;
};

struct cli_given {
  struct swathe_context *context;
  struct swathe_problem problem;
  struct swathe_sharding sharding;  // its document_starts belong to this struct
  int64_t *document_starts;
  int32_t threads;                  // compute threads of each rank; 0: all processors
};

// Opens the context that the options name.  `threads` 0: --threads, else all processors.
enum cli_exit cli_given_open(const struct cli_args *args, int32_t threads, struct cli_given *given);

// The same, and the problem and sequence.  `share_processors`: --threads defaults to the processors
// that each rank gets when all ranks run here.  `files` may be NULL.
enum cli_exit cli_given_read(const struct cli_args *args, bool share_processors,
                             const struct cli_given_files *files, struct cli_given *given);

// After a failure too; a zeroed struct is fine.
void cli_given_close(struct cli_given *given);

// Processors this process may run on.
int32_t cli_given_processors(void);

#endif
