// contest.h: ways of sharing one layer, side by side on the same tensors: every strategy in turn,
// with its exchange and without, round after round.
#ifndef CLI_CONTEST_H
#define CLI_CONTEST_H

#include "given.h"
#include "ranks.h"

enum { CLI_CONTEST_MOST = SWATHE_RING_ALL + 1 };

struct cli_contestant {
  enum swathe_strategy strategy;
  char refused[512];           // why the problem cannot be shared like that; "": it can
  double *us[2], *mute_us[2];  // [rounds], by direction: the slowest rank, with its exchange and
                               // without
  double *wait_us[2];          // [rounds], by direction: the longest wait of a rank for the wire
  int64_t received_bytes[2];   // by direction: the most that a rank received
  int64_t memory_bytes;        // the most that a rank's layer holds, with the halo that is kept for
                               // backward
  double difference;           // largest of out, dq, dk and dv to the first contestant's results,
                               // divided by max(1, |value|)
};

struct cli_contest {
  const struct cli_given *given;
  int64_t rounds, seed;
  bool backward;
  int count;
  struct cli_contestant contestants[CLI_CONTEST_MOST];
};

// Makes room for results of `rounds`.
enum cli_exit cli_contest_begin(struct cli_contest *contest);
// The part of the ranks that are here.  The outcome is in the process that has rank 0.
enum cli_exit cli_contest_play(struct cli_contest *contest, const struct cli_ranks *ranks);
void cli_contest_free(struct cli_contest *contest);

#endif
