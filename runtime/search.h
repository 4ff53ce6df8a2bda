// search.h: which candidate to try next, which to believe, and when to end.  Pure: it knows no
// process, no clock and no kernel, only the operations it is given, so it is tested on a
// simulated device.
//
// Candidates are tried in heats: a few are made ready, then run against the best so far in rounds
// (each runs once, in random order), and the slower half leaves again and again.  The near ones
// meet in a final; the pick changes hands only if its winner beats the present holder in a last
// match of paired runs.
#ifndef SW_SEARCH_H
#define SW_SEARCH_H

#include "error.h"

// What is known of a candidate.  UNTRIED is never stored.
enum sw_verdict {
  SW_VERDICT_OK,
  SW_VERDICT_WRONG,  // its result differs from the reference
  SW_VERDICT_CRASH,
  SW_VERDICT_TIMEOUT,
  SW_VERDICT_COMPILE,
  SW_VERDICT_OOM,  // it would need more memory than it may have; never run
  SW_VERDICT_UNTRIED,
};
const char *sw_verdict_name(enum sw_verdict verdict);

struct sw_search_candidate {
  const char *config;  // canonical text: "name=value,..."; borrowed
  double bound_us;     // no run can be faster; 0: not known
  int64_t bytes;       // that it works in; of equals the one with fewer is picked
  enum sw_verdict verdict;
  bool ready;    // prepared in this search
  bool settled;  // lost a final
  double ratio;  // to the default, by all that is known; 0: never timed
};

// Alone: the kernel by itself.  Loaded: as it will be used, the exchange running beside it.
enum sw_search_stage { SW_SEARCH_ALONE, SW_SEARCH_LOADED };

enum {
  SW_SEARCH_MOST_HEAT = 24,
  SW_SEARCH_MOST_SLOTS = SW_SEARCH_MOST_HEAT + 4,
  SW_SEARCH_MOST_RUNS = 48
};

// One round: `order` names candidates, the first and the last are the same.
struct sw_search_round {
  const int64_t *order;
  int32_t count;
  enum sw_search_stage stage;
  double us[SW_SEARCH_MOST_SLOTS];                 // out
  enum sw_verdict verdicts[SW_SEARCH_MOST_SLOTS];  // out: not OK: failed now; UNTRIED: not reached
  bool noisy;                                      // out: others used the machine meanwhile
};

// Times of one candidate beside those of another, run by run.
struct sw_search_runs {
  int64_t candidate, beside;
  int32_t runs, noisy;  // noisy: of these, how many
  double us[SW_SEARCH_MOST_RUNS], beside_us[SW_SEARCH_MOST_RUNS];
  double ratio;  // to the default
};

// Whatever fails ends the search with that status and its best so far.
struct sw_search_operations {
  // Compiles the candidates and checks each by itself; fills their verdicts (UNTRIED: the time
  // was up). Keeps the words of failures.
  enum swathe_status (*prepare)(void *arg, const int64_t *candidates, int32_t count,
                                enum sw_verdict *verdicts);
  // Runs prepared candidates; keeps the words of those that fail.
  enum swathe_status (*measure)(void *arg, struct sw_search_round *round);
  // A candidate's times, to be stored.
  enum swathe_status (*note)(void *arg, const struct sw_search_runs *runs);
  // search->best changed: what to use if nothing more is known.
  enum swathe_status (*lead)(void *arg);
  double (*now_s)(void *arg);
};

struct sw_search {
  const struct sw_search_operations *operations;
  void *arg;
  struct sw_search_candidate
      *candidates;  // [0] is the default; others may have verdicts from before
  int64_t count;
  int64_t holder;      // has the pick already: the default, or what an earlier search found
  bool holder_quiet;   // and was measured on a quiet machine: a noisy match cannot replace it
  double end_s;        // on the clock of now_s
  double good_enough;  // the search ends when the best of all bounds is this share of the best
                       // time; 0: never
  int32_t heat;        // candidates that are prepared together, at most SW_SEARCH_MOST_HEAT
  int64_t patience;    // candidates in a row without gain that end the search; 0: all are tried
  uint64_t seed;       // of the order within rounds

  // results, from the first lead on
  int64_t best;       // at the end: the pick
  double best_ratio;  // to the default
  double default_us;
  int64_t tried;    // with a verdict, earlier ones included
  bool noisy;       // what the pick was decided by
  bool ended_good;  // by good_enough

  // inside
  struct sw_search_knobs *knobs;
  double least_bound_us;                // of all that did not fail; 0: not known
  double trust;                         // times this bounds hold, as far as was seen; at most 1
  int64_t since_gain, pace_rounds;
  double pace_us;                       // what the default takes, by all rounds so far
  double noise;                         // share of noisy rounds, lately
  double begin_s, slot_s;                  // slot_s: a run of a round
  double candidate_s, prepare_s;           // a candidate of a heat, and of that, to prepare it
};

// Runs the search.  SWATHE_WRONG_RESULT: the default fails.  Results hold whatever comes back.
enum swathe_status sw_search_run(struct sw_search *search);

// Seconds until the search ends, as far as can be told: what is untried, or the budget.
double sw_search_left_s(const struct sw_search *search);

// Median; reorders `values`.  0 of none.
double sw_search_median(double *values, int32_t count);

#endif
