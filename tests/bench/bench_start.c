// bench_start.c: what a trainer waits for at start-up: from swathe_open to a layer that is ready
// for its first launch, with the config in the database and the kernels in the cache.
//
//   bench_start [PROBLEM]    PROBLEM as swathe_problem_parse reads it; one process is one start, so
//                            run it several times
#include <stdio.h>
#include <time.h>

#include "swathe.h"

static double now_ms(void)
{
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return 1e3 * (double)time.tv_sec + 1e-6 * (double)time.tv_nsec;
}

static int failed(void)
{
  fprintf(stderr, "bench_start: %s\n", swathe_error());
  return 1;
}

int main(int count, char **arguments)
{
  const char *text = count > 1 ? arguments[1]
                               : "q_heads=64,kv_heads=8,window_left=127,dtype=bf16,sinks=1,"
                                 "layout=zigzag,ranks=8,tokens_per_rank=4096";
  const struct swathe_options options = { .threads = 1 };
  struct swathe_problem problem;
  struct swathe_context *context = NULL;
  struct swathe_layer *layer = NULL;
  char config[512], why[512];
  int64_t compiled = 0, loaded = 0;

  swathe_problem_init(&problem);
  if (swathe_problem_parse(text, &problem)) return failed();
  const double begin = now_ms();
  if (swathe_open(&options, &context)) return failed();
  const double opened = now_ms();
  if (swathe_layer_create(context, &problem, NULL, &layer)) return failed();
  const struct swathe_sharding sharding = { .layout = problem.layout,
                                            .ranks = 1,
                                            .batch = 1,
                                            .tokens = problem.tokens_per_rank };
  if (swathe_layer_shard(layer, &sharding)) return failed();
  const double ready = now_ms();
  if (swathe_db_best(context, &problem, SWATHE_FORWARD, config, sizeof config, why, sizeof why))
    return failed();
  const double looked_up = now_ms();

  swathe_kernel_counts(context, &compiled, &loaded);
  printf("open %.2f ms, layer %.2f ms, in all %.2f ms; %lld compiled, %lld from the cache; "
         "look-up %.0f us (%s)\n",
         opened - begin, ready - opened, ready - begin, (long long)compiled, (long long)loaded,
         1e3 * (looked_up - ready), why);
  swathe_layer_destroy(layer);
  swathe_close(context);
  return 0;
}
