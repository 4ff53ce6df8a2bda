// machine.c: the processor by name, and by what one of its cores can multiply and add.
#include "machine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#if defined __AVX512F__
enum { VECTOR_BYTES = 64 };
#define REGISTER "+v"
#elif defined __AVX2__
enum { VECTOR_BYTES = 32 };
#define REGISTER "+x"
#elif defined __aarch64__
enum { VECTOR_BYTES = 16 };
#define REGISTER "+w"
#else
enum { VECTOR_BYTES = 16 };
#define REGISTER "+x"
#endif
typedef float vector __attribute__((vector_size(VECTOR_BYTES)));
enum { SUMS = 10, LANES = VECTOR_BYTES / 4 };

static void print_extensions(char *flags)
{
  static const char *const known[] = {
    "avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16" };
  char *rest = flags;
  printf(" ");
  for (char *flag; (flag = strtok_r(rest, " \t\n", &rest));)
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
      if (!strcmp(flag, known[i])) printf(" %s", flag);
  putchar('\n');
}

void machine_print(void)
{
  char line[4096];
  double load = -1;
  FILE *file = fopen("/proc/cpuinfo", "r");
  int have_name = 0, have_flags = 0;
  while (file && fgets(line, sizeof line, file)) {
    char *value = strchr(line, ':');
    if (!value) continue;
    if (!have_name && !strncmp(line, "model name", 10))
      have_name = printf("processor:%s", value + 1);
    if (!have_flags && (!strncmp(line, "flags", 5) || !strncmp(line, "Features", 8))) {
      have_flags = 1;
      print_extensions(value + 1);
    }
  }
  if (file) fclose(file);
  if (getloadavg(&load, 1) < 1) load = -1;
  printf("%ld processors, load %.1f, compiler %s\n", sysconf(_SC_NPROCESSORS_ONLN), load,
         __VERSION__);
}

double machine_peak_gflops(void)
{
  enum { ROUNDS = 1 << 20 };
  vector x = (vector){ 0 } + 1e-3f, y = (vector){ 0 } + 0.5f, sums[SUMS] = { { 0 } };
  struct timespec begin, end;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &begin);
  for (int round = 0; round < ROUNDS; round++)
    #pragma GCC unroll 10
    for (int i = 0; i < SUMS; i++) {
      sums[i] += x * y;
      // keeps each in its register
      __asm__ volatile("" : REGISTER(sums[i]), REGISTER(x), REGISTER(y));
    }
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &end);
  const double spent_s =
    (double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec);
  return 2e-9 * LANES * SUMS * ROUNDS / spent_s;
}
