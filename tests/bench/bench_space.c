// bench_space.c: how long the walk over a space takes: the 6^12-point space of the generator's
// fixtures, of which 10 000 points are valid, and the whole space of each real kernel.
//
//   TEST_SOURCE_DIR=<top of the sources> bench_space
//
// Prints thread CPU time, best of three, and the process's peak memory.
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <time.h>

#include "runtime/gen.h"

static double cpu_ms(void)
{
  struct timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

static void stop(const char *what)
{
  fprintf(stderr, "%s: %s\n", what, swathe_error());
  exit(1);
}

static void measure(struct sw_gen *gen, const char *kernel)
{
  struct swathe_problem problem;
  const struct sw_gen_request request = { &problem, kernel, "avx2" };
  double first_ms = 1e9, all_ms = 1e9;
  int64_t count = 0;

  swathe_problem_init(&problem);
  if (swathe_problem_parse("q_heads=8,window_left=1023", &problem)) stop("problem");
  for (int repeat = 0; repeat < 3; repeat++) {
    struct sw_gen_walk *walk;
    char config[SW_CONFIG_TEXT];
    const double begin = cpu_ms();
    if (sw_gen_walk_begin(gen, &request, true, &walk)) stop(kernel);
    if (sw_gen_walk_next(walk, config)) stop(kernel);
    const double first = cpu_ms() - begin;
    for (count = 1; !sw_gen_walk_next(walk, config);) count++;
    const double all = cpu_ms() - begin;
    sw_gen_walk_end(walk);
    if (first < first_ms) first_ms = first;
    if (all < all_ms) all_ms = all;
  }
  printf("%-10s first config %8.3f ms, all %8" PRId64 " configs %8.1f ms\n", kernel, first_ms,
         count, all_ms);
}

int main(void)
{
  const char *source = getenv("TEST_SOURCE_DIR");
  char directory[] = "/tmp/swathe_bench_XXXXXX", command[2048];
  struct sw_gen *fixtures, *real;

  if (!source) source = ".";
  if (!mkdtemp(directory)) return 1;
  snprintf(command, sizeof command,
           "cp -r '%s/generator' '%s/templates' '%s' && cp -r '%s/tests/fixtures/generator/.' '%s'",
           source, source, directory, source, directory);
  if (system(command)) return 1;
  if (sw_gen_open(directory, &fixtures) || sw_gen_open(NULL, &real)) stop("open");
  measure(fixtures, "huge");
  measure(real, "forward");
  measure(real, "backward");
  sw_gen_close(fixtures);
  sw_gen_close(real);

  struct rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  printf("peak memory %.1f MiB\n", (double)usage.ru_maxrss / 1024);
  snprintf(command, sizeof command, "rm -rf '%s'", directory);
  return system(command) != 0;
}
