// measure.c: the clock and the peak of the benches of kernels.
#include "measure.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "runtime/limit.h"

double measure_cpu_s(void)
{
  struct timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

void measure_stop_on(enum swathe_status status, const char *what)
{
  if (!status) return;
  fprintf(stderr, "%s: %s\n", what, swathe_error());
  exit(1);
}

void *measure_symbol(struct sw_jit_image *image, const char *name)
{
  void *address;
  measure_stop_on(sw_jit_symbol(image, name, &address), name);
  return address;
}

struct sw_jit_image *measure_compile(struct sw_jit *jit, const char *name, const char *source,
                                     const char *flags, const char *isa, double *compile_s)
{
  const struct sw_jit_request request = {
    .name = name, .source = source, .flags = flags, .isa = isa
  };
  struct sw_jit_report report;
  struct sw_jit_image *image;
  measure_stop_on(sw_jit_load(jit, &request, 60, &image, &report, NULL), name);
  if (compile_s) *compile_s = report.compile_s;
  return image;
}

static int compare_doubles(const void *a, const void *b)
{
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

double measure_peak(struct sw_jit *jit, const char *flags, const char *isa, bool pairs)
{
  enum { ITEMS = 20, TRIES = 300 };
  char *source = NULL;
  if (asprintf(&source, "%s%s", pairs ? sw_limit_pairs : "", sw_limit_source) < 0) exit(1);
  struct sw_jit_image *image = measure_compile(jit, "peak", source, flags, isa, NULL);
  const void *address = measure_symbol(image, "multiply");
  const long step_flops = *(const long *)measure_symbol(image, "step_flops");
  void (*multiply)(const void *, long, long, void *);
  double speeds[TRIES];
  float out = 0;

  memcpy(&multiply, &address, sizeof multiply);
  for (int i = 0; i < TRIES; i++) {
    const double begin = measure_cpu_s();
    multiply(&out, 0, ITEMS, NULL);
    speeds[i] = (double)step_flops * SW_LIMIT_STEPS * ITEMS / (measure_cpu_s() - begin);
  }
  sw_jit_unload(image);
  free(source);
  qsort(speeds, TRIES, sizeof *speeds, compare_doubles);
  return speeds[TRIES * 9 / 10];
}
