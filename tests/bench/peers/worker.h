// worker.h: what every C worker of this bench shares.  A worker is one peer in a process of its
// own: it takes one case from the command line, says what it is, and then does as it is told on
// stdin.
//
//   WORKER TASK DTYPE TOKENS WINDOW DIM Q_HEADS KV_HEADS DATA RESULTS [its own arguments]
//
//   it says   ready WORDS      or   absent WORDS   and ends
//   it hears  run              ->   the seconds of CPU time that one whole pass took
//             save             ->   saved, after writing the results of the last pass to RESULTS
//
// DATA holds float q [tokens][q_heads][dim], k and v [tokens][kv_heads][dim], dout as q; every
// value is a bfloat16 too.  RESULTS takes float out (forward), or dq, dk, dv (backward), in that
// layout.
#ifndef PEERS_WORKER_H
#define PEERS_WORKER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct worker_case {
  bool backward, bf16;
  int64_t tokens, window;            // keys a query sees, its own included; causal
  int dim, q_heads, kv_heads;
  size_t q_count, kv_count;          // floats of q and of k
  const float *q, *k, *v, *dout;     // in memory of this process, 64-byte aligned, already touched
  const char *results;               // path
};

// Reads the command line; ends the process if it makes no sense.
void worker_open(int argc, char **argv, struct worker_case *given);

// Says why this peer does not take part, and ends the process.
_Noreturn void worker_absent(const char *words, ...) __attribute__((format(printf, 1, 2)));

// 64-byte aligned memory, touched; ends the process if there is none.
void *worker_memory(size_t bytes);

// CPU seconds of the whole process, all of its threads.
double worker_cpu_s(void);

// Which of `count` shapes does the last 512 tokens fastest, best of 2.
// `pass(arg, shape, first, last)` works on the queries [first, last).
typedef void worker_pass(void *arg, int shape, int64_t first, int64_t last);
int worker_best_shape(const struct worker_case *given, worker_pass *pass, void *arg, int count);

// Appends `count` floats to the results file; from inside `save`.
void worker_write(const float *values, size_t count);

// Says "ready WORDS" and serves until stdin ends.
void worker_serve(const struct worker_case *given, void (*run)(void *arg), void (*save)(void *arg),
                  void *arg, const char *words);

#endif
