// worker.c: the part of a worker that is the same for every peer written in C; see worker.h.
#include "worker.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static FILE *results_file;

_Noreturn void worker_absent(const char *words, ...)
{
  va_list list;
  va_start(list, words);
  fputs("absent ", stdout);
  vprintf(words, list);
  putchar('\n');
  va_end(list);
  fflush(stdout);
  exit(0);
}

void *worker_memory(size_t bytes)
{
  void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
  if (!memory) worker_absent("out of memory (%zu bytes)", bytes);
  memset(memory, 0, bytes);
  return memory;
}

double worker_cpu_s(void)
{
  struct timespec now;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static const float *read_floats(FILE *file, size_t count)
{
  float *values = worker_memory(count * sizeof *values);
  if (fread(values, sizeof *values, count, file) != count) worker_absent("the data file is short");
  return values;
}

void worker_open(int argc, char **argv, struct worker_case *given)
{
  if (argc < 10) {
    fputs("made to be started by peers; see worker.h\n", stderr);
    exit(2);
  }
  *given = (struct worker_case){
    .backward = !strcmp(argv[1], "backward"), .bf16 = !strcmp(argv[2], "bf16"),
    .tokens = atoll(argv[3]), .window = atoll(argv[4]), .dim = atoi(argv[5]),
    .q_heads = atoi(argv[6]), .kv_heads = atoi(argv[7]), .results = argv[9] };
  given->q_count = (size_t)given->tokens * (size_t)given->q_heads * (size_t)given->dim;
  given->kv_count = (size_t)given->tokens * (size_t)given->kv_heads * (size_t)given->dim;
  FILE *data = fopen(argv[8], "rb");
  if (!data) worker_absent("%s cannot be read", argv[8]);
  given->q = read_floats(data, given->q_count);
  given->k = read_floats(data, given->kv_count);
  given->v = read_floats(data, given->kv_count);
  given->dout = read_floats(data, given->q_count);
  fclose(data);
}

int worker_best_shape(const struct worker_case *given, worker_pass *pass, void *arg, int count)
{
  const int64_t first = given->tokens > 512 ? given->tokens - 512 : 0;
  double best_s = 1e30;
  int best = 0;
  for (int round = 0; round < 2; round++)
    for (int shape = 0; shape < count; shape++) {
      const double begin_s = worker_cpu_s();
      pass(arg, shape, first, given->tokens);
      const double spent_s = worker_cpu_s() - begin_s;
      if (spent_s < best_s) best_s = spent_s, best = shape;
    }
  return best;
}

void worker_write(const float *values, size_t count)
{
  if (fwrite(values, sizeof *values, count, results_file) != count) exit(1);
}

void worker_serve(const struct worker_case *given, void (*run)(void *arg), void (*save)(void *arg),
                  void *arg, const char *words)
{
  char line[64];
  printf("ready %s\n", words);
  fflush(stdout);
  while (fgets(line, sizeof line, stdin)) {
    if (!strcmp(line, "run\n")) {
      const double begin_s = worker_cpu_s();
      run(arg);
      printf("%.9f\n", worker_cpu_s() - begin_s);
    } else if (!strcmp(line, "save\n")) {
      results_file = fopen(given->results, "wb");
      if (!results_file) exit(1);
      save(arg);
      if (fclose(results_file)) exit(1);
      puts("saved");
    }
    fflush(stdout);
  }
}
