// ranks.h: where the ranks of a verb are: threads of this process, or, with --transport mpi, one
// process each.  A verb runs a thread per rank that is here, and prints where rank 0 is.  With
// --transport nccl they are either, and layers have a transport of their own.
#ifndef CLI_RANKS_H
#define CLI_RANKS_H

#include "args.h"

struct cli_ranks {
  int32_t ranks, first, count;         // [first, first + count) are here
  struct swathe_threads *threads;
  struct swathe_transport *transport;  // of the one rank that is here; NULL: threads
  bool nccl;                           // of layers
  double deadline_s;
};

// CLI_BAD_USE for a --transport that there is not, or a --deadline that makes no sense.  `devices`:
// the verb can have ranks that are devices.
enum cli_exit cli_ranks_check(const struct cli_args *args, bool devices);

// Connects them.  From here on only the process of rank 0 prints failures.
enum cli_exit cli_ranks_open(const struct cli_args *args, int32_t ranks, struct cli_ranks *opened);

// Borrowed; of a rank that is here.
struct swathe_transport *cli_ranks_transport(const struct cli_ranks *ranks, int32_t rank);

// The transport for the layer of a rank that is here, called by the rank's thread.  It is that of
// above, or with --transport nccl one to be destroyed; the rank's device is the thread's then.
enum swathe_status cli_ranks_link(const struct cli_ranks *ranks, struct swathe_context *context,
                                  int32_t rank, struct swathe_transport **link);

// Waits for the other processes, whose rank 0 may still be busy; a zeroed struct is fine.
void cli_ranks_close(struct cli_ranks *ranks);

// How many ranks share the `processors` that this process may use.
int32_t cli_ranks_sharing(const struct cli_args *args, int32_t ranks, int32_t processors);

// False in a process whose words would only repeat those of rank 0.
bool cli_ranks_speak(const struct cli_args *args, enum cli_exit code);

#endif
