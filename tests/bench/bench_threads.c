// bench_threads.c: how much faster layers are with more threads, beside what the machine gives:
// multiply-adds in registers by as many threads, in the same rounds.
//
//   bench_threads [N [PROBLEM]]    default: 2 threads, every problem of a table
//
// Wall time.  A round is one pass each of: the peak, both directions and the peak again, by one
// thread and by N.  A layer's ratio means something only where the peak's is near N: elsewhere
// others had the processors (of one thread, where it is above N).  So only rounds count where both
// peaks are within 5% of N; told are the medians of nine such, or of those of 60 rounds.
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "measure.h"
#include "runtime/limit.h"
#include "runtime/search.h"

enum { WANTED = 9, MOST_ROUNDS = 60, MOST_THREADS = 64, TOKENS = 8192, PEAK_ITEMS = 20000 };
enum { PEAK, FORWARD, BACKWARD, PEAK_AGAIN, PARTS };

static const double quiet_share = 0.05;

typedef void multiply_kernel(const void *, long, long, void *);

static double wall_s(void)
{
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

// ---- The peak ----------------------------------------------------------------------------------

struct multiplying {
  multiply_kernel *multiply;
  pthread_barrier_t *gate;
  pthread_t thread;
};

static void *multiply_once(void *arg)
{
  const struct multiplying *mine = arg;
  float sink = 0;
  pthread_barrier_wait(mine->gate);
  mine->multiply(&sink, 0, PEAK_ITEMS, NULL);
  return NULL;
}

// So much by each of `threads`: seconds of one item.
static double time_peak(multiply_kernel *multiply, int threads)
{
  struct multiplying all[MOST_THREADS];
  pthread_barrier_t gate;
  pthread_barrier_init(&gate, NULL, (unsigned)threads + 1);
  for (int i = 0; i < threads; i++) {
    all[i] = (struct multiplying){ .multiply = multiply, .gate = &gate };
    if (pthread_create(&all[i].thread, NULL, multiply_once, &all[i])) exit(1);
  }
  pthread_barrier_wait(&gate);
  const double begin = wall_s();
  for (int i = 0; i < threads; i++) pthread_join(all[i].thread, NULL);
  const double spent = wall_s() - begin;
  pthread_barrier_destroy(&gate);
  return spent / threads / PEAK_ITEMS;
}

// ---- Layers ------------------------------------------------------------------------------------

// `elem`: of each element.
static struct swathe_tensor make_tensor(int heads, int dim, size_t elem)
{
  const size_t count = (size_t)TOKENS * (size_t)heads * (size_t)dim;
  struct swathe_tensor tensor = { malloc(count * elem), (int64_t)heads * dim, dim, 0 };
  uint32_t state = 1;
  if (!tensor.data) exit(1);
  for (size_t i = 0; i < count; i++) {
    state = state * 1664525u + 1013904223u;
    const float x = 1.7f * ((float)(state >> 8) / 8388608.0f - 1);
    memcpy((char *)tensor.data + elem * i, (const char *)&x + sizeof x - elem, elem);  // truncated
  }
  return tensor;
}

static struct swathe_tensors make_tensors(const struct swathe_problem *p)
{
  const size_t elem = p->dtype == SWATHE_F32 ? 4 : 2;
  const int heads = p->q_heads, kv = p->kv_heads, qk = p->head_dim_qk, v = p->head_dim_v;
  return (struct swathe_tensors){
    .q = make_tensor(heads, qk, elem),    .k = make_tensor(kv, qk, elem),
    .v = make_tensor(kv, v, elem),        .out = make_tensor(heads, v, elem),
    .lse = make_tensor(heads, 1, 4),      .dout = make_tensor(heads, v, elem),
    .dq = make_tensor(heads, qk, elem),   .dk = make_tensor(kv, qk, elem),
    .dv = make_tensor(kv, v, elem),       .sink = calloc((size_t)heads, sizeof(float)),
    .dsink = calloc((size_t)heads, sizeof(float)),
  };
}

static void free_tensors(struct swathe_tensors *t)
{
  void *const all[] = { t->q.data,    t->k.data,  t->v.data,  t->out.data, t->lse.data,
                        t->dout.data, t->dq.data, t->dk.data, t->dv.data,
                        (void *)(uintptr_t)t->sink, t->dsink };
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

struct side {
  int threads;
  struct swathe_context *context;
  struct swathe_layer *layer;
};

static void open_side(struct side *side, int threads, const struct swathe_problem *problem)
{
  const struct swathe_options options = { .database = "/nonexistent/tuning.db",
                                          .threads = threads };
  const struct swathe_sharding sharding = {
    .layout = SWATHE_CONTIGUOUS, .ranks = 1, .batch = 1, .tokens = TOKENS
  };
  side->threads = threads;
  measure_stop_on(swathe_open(&options, &side->context), "open");
  measure_stop_on(swathe_layer_create(side->context, problem, NULL, &side->layer), "layer");
  measure_stop_on(swathe_layer_shard(side->layer, &sharding), "sharding");
}

static void close_side(struct side *side)
{
  swathe_layer_destroy(side->layer);
  swathe_close(side->context);
}

static double time_part(int part, const struct side *side, multiply_kernel *multiply,
                        const struct swathe_tensors *tensors)
{
  if (part == PEAK || part == PEAK_AGAIN) return time_peak(multiply, side->threads);
  const double begin = wall_s();
  if (part == FORWARD) measure_stop_on(swathe_layer_forward(side->layer, tensors, NULL), "forward");
  else measure_stop_on(swathe_layer_backward(side->layer, tensors, NULL), "backward");
  return wall_s() - begin;
}

static void measure(multiply_kernel *multiply, int threads, const char *text)
{
  struct swathe_problem problem;
  struct side sides[2];
  double ratios[PARTS][WANTED], highest = 0;
  int quiet = 0, round = -1;  // the first only warms up

  swathe_problem_init(&problem);
  measure_stop_on(swathe_problem_parse(text, &problem), text);
  problem.tokens_per_rank = TOKENS;
  open_side(&sides[0], 1, &problem);
  open_side(&sides[1], threads, &problem);
  struct swathe_tensors tensors = make_tensors(&problem);
  if (!problem.sinks) free((void *)(uintptr_t)tensors.sink), tensors.sink = NULL;
  for (; round < MOST_ROUNDS && quiet < WANTED; round++) {
    double ratio[PARTS];
    for (int part = 0; part < PARTS; part++) {
      double s[2];
      for (int i = 0; i < 2; i++) {
        const int which = (i + round) & 1;
        s[which] = time_part(part, &sides[which], multiply, &tensors);
      }
      ratio[part] = s[0] / s[1];
    }
    if (ratio[PEAK] > highest) highest = ratio[PEAK];
    if (round < 0 || fabs(ratio[PEAK] / threads - 1) > quiet_share ||
        fabs(ratio[PEAK_AGAIN] / threads - 1) > quiet_share)
      continue;
    for (int part = 0; part < PARTS; part++) ratios[part][quiet] = ratio[part];
    quiet++;
  }
  if (quiet)
    printf("peak %.2f  forward %.2f  backward %.2f  (%d quiet rounds of %d)  %s\n",
           sw_search_median(ratios[PEAK], quiet), sw_search_median(ratios[FORWARD], quiet),
           sw_search_median(ratios[BACKWARD], quiet), quiet, round, text);
  else
    printf("not told: of %d rounds none was quiet, the peak's highest ratio was %.2f  %s\n", round,
           highest, text);
  fflush(stdout);
  free_tensors(&tensors);
  for (int i = 0; i < 2; i++) close_side(&sides[i]);
}

int main(int argc, char **argv)
{
  static const char *const table[] = {
    "q_heads=4,kv_heads=4,head_dim_qk=64,head_dim_v=64,window_left=127",
    "q_heads=8,kv_heads=1,head_dim_qk=64,head_dim_v=64,window_left=127,dtype=bf16",
    "q_heads=8,kv_heads=2,head_dim_qk=128,head_dim_v=128,window_left=1023",
    "q_heads=8,kv_heads=2,head_dim_qk=256,head_dim_v=256,window_left=1023,dtype=bf16",
    "q_heads=4,kv_heads=1,head_dim_qk=256,head_dim_v=256,window_left=4095",
  };
  const int threads = argc > 1 ? atoi(argv[1]) : 2;
  multiply_kernel *multiply;
  struct sw_jit *jit;

  if (threads < 2 || threads > MOST_THREADS) {
    fprintf(stderr, "bench_threads [N [PROBLEM]]: N from 2 to %d\n", MOST_THREADS);
    return 2;
  }
  measure_stop_on(sw_jit_open(NULL, NULL, &jit), "jit");
  struct sw_jit_image *image = measure_compile(jit, "limit", sw_limit_source,
                                               "-O2 -fPIC -shared -march=native", "native", NULL);
  const void *address = measure_symbol(image, "multiply");
  memcpy(&multiply, &address, sizeof multiply);
  printf("%d threads over one:\n", threads);
  if (argc > 2) measure(multiply, threads, argv[2]);
  for (size_t i = 0; argc <= 2 && i < sizeof table / sizeof *table; i++)
    measure(multiply, threads, table[i]);
  sw_jit_unload(image);
  sw_jit_close(jit);
  return 0;
}
