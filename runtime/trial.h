// trial.h: candidates of the tuner, run in processes of their own that can crash, hang and be
// killed.
#ifndef SW_TRIAL_H
#define SW_TRIAL_H

#include "layer.h"
#include "search.h"

enum { SW_TRIAL_WORDS = 256 };

// What every trial of one problem and direction shares: inputs of a small problem with the
// answers of the reference, and inputs of one rank's share to be timed on.  Forked trials read
// it.
struct sw_trial_bench;
struct sw_trial_options {
  const char *default_config;
  double trial_s;        // as swathe_tune_options has it
  int64_t memory_bytes;  // a candidate whose threads' workspaces are larger is not run
};
enum swathe_status sw_trial_prepare(struct swathe_context *context,
                                    const struct swathe_problem *problem,
                                    enum swathe_direction direction,
                                    const struct sw_trial_options *options,
                                    struct sw_trial_bench **bench);
void sw_trial_free(struct sw_trial_bench *bench);

// Checks one candidate against the reference in a process that is its own.  `words` say why the
// verdict is not OK.  SWATHE_INTERRUPTED when *stop (or NULL) becomes nonzero, like
// sw_trial_round.
enum swathe_status sw_trial_check(struct sw_trial_bench *bench, const char *config,
                                  const volatile int *stop, enum sw_verdict *verdict,
                                  char words[SW_TRIAL_WORDS]);

// A process that times checked candidates in turn; it lives until it fails or is ended.
struct sw_trial_slot {
  const char *config;
  double us;                // out: scaled to the rank's whole share
  enum sw_verdict verdict;  // out: UNTRIED after one that failed
  char words[SW_TRIAL_WORDS];
};
// Runs the slots in order, each for some milliseconds, beside the exchange's copying if `loaded`.
// `noisy`: the process got less of the processors than before.  Started when first needed.
enum swathe_status sw_trial_round(struct sw_trial_bench *bench, struct sw_trial_slot *slots,
                                  int32_t count, bool loaded, const volatile int *stop,
                                  bool *noisy);
// Ends the process: what is compiled after its start it may not find.
void sw_trial_end_racers(struct sw_trial_bench *bench);

// Useful floating-point operations of the share, and bytes that must be read or written at least
// once.
void sw_trial_work(const struct sw_trial_bench *bench, double *flops, double *bytes);

#endif
