// trial_bench.h: what the trials of one problem share, and what the files that run them give one
// another.  Private to trial*.c.
#ifndef SW_TRIAL_BENCH_H
#define SW_TRIAL_BENCH_H

#include "trial.h"
#include "trial_tensors.h"

#include <sys/types.h>

// The reference's answers for some rows of the small problem.
struct sw_trial_answers {
  bool *query, *key;  // [tokens]: which are checked
  bool dsink_known;
  double *out, *lse, *delta, *dq, *dk, *dv, *dsink;
};

// One rank of a group whose others are not there.  Loaded, it moves as many bytes as the halo
// has, a piece at a time when the launch lets it, as a transport within one machine would; what
// arrives is not the neighbours' keys, but costs the same.  A timing that covers a part of the
// share moves that part.
struct sw_trial_alone {
  struct swathe_transport transport;
  bool loaded;
  char *elsewhere;  // a piece: stands for the wire
  struct sw_transport_message *messages;
  int32_t count, next;
  size_t done_bytes;  // of messages[next]
};

struct sw_trial_bench {
  struct swathe_context *context;
  struct swathe_problem problem;
  enum swathe_direction direction;
  bool cuda, emulated;
  double default_us, trial_s;
  int64_t memory_bytes;

  // to be checked on: the small problem, which lies in two pieces with a gap between
  struct sw_trial_tensors small;
  struct swathe_span spans[2];
  int64_t rank_spans[2], small_rows, small_tokens;
  struct sw_trial_answers answers;

  // to be timed on: the problem with fewer tokens and key heads
  struct swathe_problem timed;
  double scale;  // how much longer the whole share takes
  struct sw_trial_tensors share;
  struct sw_trial_alone alone;
  pid_t racers;       // the process that times; 0: none
  int racers_end;     // of its socket
  double best_share;  // of the processors, that a round got
  // of a child on CUDA: the share on its device, what is read between timings so that none finds
  // its inputs in the cache, and the events around a timing
  struct sw_trial_placed placed_share;
  struct sw_device_cuda *device;
  void *flushed, *begin, *end;
  size_t flushed_bytes;
};

// ---- trial.c ----------------------------------------------------------------------------------

// A layer of the small problem, or of the share that is timed, with this config.
enum swathe_status sw_trial_layer(struct sw_trial_bench *bench, bool small, const char *config,
                                  struct swathe_layer **layer);
enum swathe_status sw_trial_run(struct swathe_layer *layer, enum swathe_direction direction,
                                const struct swathe_tensors *call);

// ---- trial_check.c ----------------------------------------------------------------------------

// The small problem and the reference's answers.
enum swathe_status sw_trial_check_prepare(struct sw_trial_bench *bench);
void sw_trial_check_free(struct sw_trial_bench *bench);
// Forward's results for backward to start from: the reference's where known, else the default
// kernel's, which the forward trials check.
void sw_trial_check_start_backward(struct sw_trial_bench *bench);

// ---- trial_time.c -----------------------------------------------------------------------------

// What is timed, and the tensors of it.
enum swathe_status sw_trial_time_prepare(struct sw_trial_bench *bench);
void sw_trial_time_free(struct sw_trial_bench *bench);
struct swathe_sharding sw_trial_time_share(const struct sw_trial_bench *bench);
// What the default takes, for deadlines.
enum swathe_status sw_trial_time_default(struct sw_trial_bench *bench, const char *default_config);

// ---- trial_child.c ----------------------------------------------------------------------------

// Starts a child that runs `work` and ends; *end is the parent's end of their socket, -1 without.
enum swathe_status sw_trial_child_start(struct sw_trial_bench *bench, const char *config,
                                        void (*work)(struct sw_trial_bench *, const char *,
                                                     int end),
                                        pid_t *pid, int *end);
// Reads what a child reports, until the deadline.  Without a whole report the child is ended and
// *verdict and the words tell how it came to that.
enum swathe_status sw_trial_child_hear(const struct sw_trial_bench *bench, pid_t pid, int end,
                                       void *report, size_t size, const volatile int *stop,
                                       enum sw_verdict *verdict, char words[SW_TRIAL_WORDS]);
// Waits for its end; returns its state, as waitpid has it.
int sw_trial_child_reap(pid_t pid);

bool sw_trial_child_send(int end, const void *bytes, size_t size);
// For a child, which has no reason to stop waiting.
bool sw_trial_child_receive(int end, void *bytes, size_t size);

#endif
