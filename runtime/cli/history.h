// history.h: what was measured of one kernel of one problem on one kind of machine, in order: the
// matter of one section of `db report`.
#ifndef CLI_HISTORY_H
#define CLI_HISTORY_H

#include "fail.h"

enum cli_verdict {
  CLI_RIGHT,
  CLI_WRONG,
  CLI_COMPILE,
  CLI_CRASH,
  CLI_TIMEOUT,
  CLI_OOM,
  CLI_VERDICT_COUNT
};
// As in the database: "ok", "wrong", ...
const char *cli_history_verdict_name(enum cli_verdict verdict);

struct cli_history_sample {
  char *config, *words;
  enum cli_verdict verdict;
  double ratio, median_us;  // 0: not measured
  double low, high;         // quartiles of the timings, as ratios to the default
  int64_t runs;
  bool noisy;  // others used the machine meanwhile
  char when[24];
  int64_t rival;  // index of its config among the different ones
  double best;    // ratio of the best config so far, this sample included; 0: none yet
};

struct cli_history {
  char *problem, *kernel, *environment, *generator;
  struct cli_history_sample *samples;
  int64_t count, capacity;
  int64_t verdicts[CLI_VERDICT_COUNT];
  // After cli_history_settle: each config's newest sample if that one is right, best first.
  int64_t *ranking, ranked;
};

// Whether the sample belongs to the history; an empty one takes any.
bool cli_history_takes(const struct cli_history *history, const struct swathe_sample *sample);
// Appends a copy.  A sample without a number or with a verdict that nobody knows is left out.
enum cli_exit cli_history_add(struct cli_history *history, const struct swathe_sample *sample);
// Fills what depends on all of them.  What counts for a config is its newest sample: one that did
// well by luck loses its place when it is measured again.
enum cli_exit cli_history_settle(struct cli_history *history);
// Median time of the default in us; 0: not known.
double cli_history_default_us(const struct cli_history *history);
// Frees the samples; the history is empty again.
void cli_history_clear(struct cli_history *history);

#endif
