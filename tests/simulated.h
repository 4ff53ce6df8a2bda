// simulated.h: a device that runs nothing: a cost for every candidate, and all that makes real
// timings hard to believe.  Its clock only moves when something is prepared or run, so a search
// of a minute takes milliseconds, and the truth is known.
#ifndef SIMULATED_H
#define SIMULATED_H

#include "search.h"

enum { SIMULATED_EVENTS = 16 };

// A stretch of time in which everything takes `factor` times as long.
struct simulated_event {
  double begin_s, end_s, factor;
  bool seen;  // the device's own measure of quiet notices
};

struct simulated {
  // the truth, by candidate
  int64_t count;
  double *alone_us;        // of a run by itself
  double *loaded_us;       // beside the exchange; NULL: the same
  int64_t *bytes;          // that it works in; NULL: all in as many
  enum sw_verdict *fault;  // what preparing it comes to; NULL: all are OK
  enum sw_verdict *late;   // what running it comes to; NULL: all are OK
  int64_t late_launches;   // only from so many launches of the device on
  // what a run shows
  double noise;           // standard deviation of the logarithm
  double drift, drift_s;  // the speed swings by this share, with this period
  double
      cold;  // a run after another candidate's takes up to this share longer, differently each time
  double outliers;  // share of the runs that take 1.1 to 1.5 times as long
  double ramp_s;    // until then the clock rises from half its speed
  struct simulated_event events[SIMULATED_EVENTS];
  // for spell_s of every spell_every_s others use the machine: runs get so much more noise
  double spell_s, spell_every_s, spell_noise;
  bool spell_seen;
  double tilt;  // the last run of a round takes this share longer than the first
  // what it costs
  double prepare_s;  // of a candidate
  double hang_s;     // of one that hangs
  double round_s;    // of a round, beside its runs
  // what happened
  double clock_s;
  uint64_t random;
  int64_t last;  // candidate that ran last
  int64_t prepared, launches, loaded_launches, notes, noisy_notes, leads;
  int64_t interrupt_after;  // prepared candidates, then SWATHE_INTERRUPTED; 0: never
  int32_t *times_prepared;  // [count]
  // what the search foretold when a tenth of its candidates, or of its budget, was used
  const struct sw_search *search;
  double foretold_at_s, foretold_left_s;
};

extern const struct sw_search_operations simulated_operations;

// `count` candidates with a random order of costs: `near` of them evenly within 5% of the best,
// the best included, the others 6 to 60% slower.  [0] is one of the others.  Free with
// simulated_free.
void simulated_shuffled(struct simulated *device, int64_t count, int64_t near, uint64_t seed);

// A surface over `knobs` knobs of `values` values: every value has a factor, neighbours interact
// a little.
void simulated_surface(struct simulated *device, int knobs, int values, uint64_t seed);

// The candidates of the device, named by knobs; free with simulated_free_candidates.
struct sw_search_candidate *simulated_candidates(const struct simulated *device);
void simulated_free_candidates(const struct simulated *device,
                               struct sw_search_candidate *candidates);
void simulated_free(struct simulated *device);

// Uniform in [0, 1).
double simulated_uniform(uint64_t *random);

// How much slower than the best: 0 for the best.
double simulated_regret(const struct simulated *device, int64_t candidate, bool loaded);

#endif
