// bench_plan.c: what re-sharding costs one rank, warm: its halo plan, and with it the work lists of
// forward and backward.  Best of many, in CPU time of the thread.
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "layer.h"

static double thread_us(void)
{
  struct timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return (double)now.tv_sec * 1e6 + (double)now.tv_nsec * 1e-3;
}

struct shape {
  const char *name;
  enum swathe_layout layout;   // SWATHE_SPANS: the spans of zigzag-doc, given as a list
  int32_t ranks;
  int64_t documents, document_tokens, window;
};

// The spans of every rank of another sharding, as a caller would list them.
static void list_spans(struct swathe_sharding *sharding)
{
  const int64_t most = 2 * sharding->documents * sharding->ranks;
  struct swathe_span *spans = calloc((size_t)most, sizeof *spans);
  int64_t *rank_spans = calloc((size_t)sharding->ranks + 1, sizeof *rank_spans), count = 0;
  if (!spans || !rank_spans) exit(1);
  sharding->layout = SWATHE_ZIGZAG_DOCUMENT;
  for (int32_t r = 0; r < sharding->ranks; r++) {
    if (swathe_sharding_spans(sharding, r, spans + rank_spans[r], most - rank_spans[r], &count))
      exit(1);
    rank_spans[r + 1] = rank_spans[r] + count;
  }
  sharding->layout = SWATHE_SPANS;
  sharding->spans = spans;
  sharding->rank_spans = rank_spans;
}

static void measure(const struct shape *shape)
{
  struct swathe_problem problem;
  struct sw_halo_planner *planner = NULL;
  const struct sw_halo_plan *plan = NULL;
  const int32_t rank = shape->ranks / 2;
  int64_t *starts = calloc((size_t)shape->documents + 1, sizeof *starts);
  if (!starts || sw_halo_planner_create(&planner)) exit(1);
  for (int64_t d = 0; d < shape->documents; d++) starts[d + 1] = starts[d] + shape->document_tokens;
  struct swathe_sharding sharding = { .layout = shape->layout, .ranks = shape->ranks, .batch = 1,
                                      .tokens = starts[shape->documents],
                                      .documents = shape->documents, .document_starts = starts };
  swathe_problem_init(&problem);
  problem.window_left = shape->window - 1;
  if (shape->layout == SWATHE_SPANS) list_spans(&sharding);

  struct sw_work work[2] = { { .units = NULL } };
  double best_us = 1e30, best_all_us = 1e30;
  for (int i = 0; i < 300; i++) {
    const double begin_us = thread_us();
    if (sw_halo_plan(planner, &problem, &sharding, rank, &plan)) {
      fprintf(stderr, "%s\n", swathe_error());
      exit(1);
    }
    const double us = thread_us() - begin_us;
    if (us < best_us) best_us = us;
    for (int d = 0; d < 2; d++)
      if (sw_work_build(&work[d], &problem, plan, (enum swathe_direction)d, 4, INT64_MAX)) exit(1);
    const double all_us = thread_us() - begin_us;
    if (all_us < best_all_us) best_all_us = all_us;
  }
  printf("%-24s %5d ranks %4lld documents of %7lld, window %5lld: %7.1f us, with work %7.1f us  "
         "(%lld spans, %lld needs, %lld sends, %lld peers)\n",
         shape->name, shape->ranks, (long long)shape->documents, (long long)shape->document_tokens,
         (long long)shape->window, best_us, best_all_us, (long long)plan->span_count,
         (long long)plan->need_count, (long long)plan->send_count,
         (long long)plan->receive_message_count);
  for (int d = 0; d < 2; d++) sw_work_free(&work[d]);
  sw_halo_planner_destroy(planner);
  free((void *)(uintptr_t)sharding.spans);
  free((void *)(uintptr_t)sharding.rank_spans);
  free(starts);
}

int main(void)
{
  static const struct shape shapes[] = {
    { "contiguous", SWATHE_CONTIGUOUS, 32, 1, 1 << 20, 1024 },
    { "zigzag", SWATHE_ZIGZAG, 32, 1, 1 << 20, 1024 },
    { "contiguous, packed", SWATHE_CONTIGUOUS, 32, 64, 16384, 1024 },
    { "zigzag, packed", SWATHE_ZIGZAG, 32, 64, 16384, 1024 },
    { "zigzag-doc, long", SWATHE_ZIGZAG_DOCUMENT, 32, 64, 65536, 1024 },
    { "zigzag-doc", SWATHE_ZIGZAG_DOCUMENT, 32, 64, 16384, 1024 },
    { "zigzag-doc, short", SWATHE_ZIGZAG_DOCUMENT, 32, 64, 4096, 128 },
    { "spans of zigzag-doc", SWATHE_SPANS, 32, 64, 16384, 1024 },
    { "contiguous", SWATHE_CONTIGUOUS, 4096, 1, 1 << 24, 1024 },
    { "zigzag-doc", SWATHE_ZIGZAG_DOCUMENT, 1024, 64, 1 << 20, 1024 },
  };
  for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) measure(&shapes[i]);
  return 0;
}
