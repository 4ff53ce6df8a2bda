// trial.h: one candidate of the tuner, tried in a process of its own that can crash, hang and be killed.
#ifndef SW_TRIAL_H
#define SW_TRIAL_H

#include "layer.h"
#include "search.h"

enum { SW_TRIAL_RUNS = 12 };

struct sw_trial_result {
  enum sw_verdict verdict;
  char words[256];                    // why it is not ok
  int32_t runs;                       // pairs measured
  double candidate_us[SW_TRIAL_RUNS]; // scaled to the rank's whole share
  double incumbent_us[SW_TRIAL_RUNS];
};

// What every trial of one problem and direction shares: inputs of a small problem with the answers of the
// reference, and inputs of one rank's share to be timed on.  Forked trials read it.  `trial_s`: as
// swathe_tune_options has it.
struct sw_trial_bench;
enum swathe_status sw_trial_prepare(struct swathe_context *context, const struct swathe_problem *problem,
                                    enum swathe_direction direction, const char *default_config,
                                    double trial_s, struct sw_trial_bench **bench);
void sw_trial_free(struct sw_trial_bench *bench);

// Checks the candidate against the reference, then times it in turn with the incumbent.  Stops early when
// it is clearly slower; `most_runs` pairs otherwise.  SWATHE_INTERRUPTED when *stop becomes nonzero.
enum swathe_status sw_trial_run(struct sw_trial_bench *bench, const char *candidate, const char *incumbent,
                                int32_t most_runs, const volatile int *stop,
                                struct sw_trial_result *result);

// Median; reorders `values`.  0 of none.
double sw_trial_median(double *values, int32_t count);
// Median of candidate / incumbent over the result's pairs.
double sw_trial_ratio(const struct sw_trial_result *result);

#endif
