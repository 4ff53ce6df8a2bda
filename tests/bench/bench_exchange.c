// bench_exchange.c: how much of the exchange stays exposed, by its config.
//
//   bench_exchange [PROBLEM [MBIT [US]]]    default: layers of gpt-oss and Gemma 3, 1000, 50
//
// Two ranks as threads.  Messages arrive when a link of that speed and latency would have brought
// them and cost no processor time, so what is told is the pipeline's doing alone: for each config
// the time the slower rank waits with nothing left to compute, of forward and of backward, as part
// of that of overlap=0.  Medians of interleaved runs.
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "layer.h"
#include "measure.h"
#include "search.h"
#include "transport.h"

enum { RANKS = 2, MOST_MESSAGES = 256, ROUNDS = 5 };

static const char *const configs[] = {
  "overlap=0,chunks=1,together=1,order=0,poll=1,progress=0",
  "overlap=1,chunks=1,together=1,order=0,poll=1,progress=0",
  "overlap=2,chunks=1,together=1,order=0,poll=1,progress=0",
  "overlap=2,chunks=4,together=1,order=0,poll=1,progress=0",
  "overlap=2,chunks=8,together=1,order=1,poll=1,progress=0",
};
enum { CONFIGS = sizeof configs / sizeof *configs };

// ---- A slow link -------------------------------------------------------------------------------

struct link {
  struct swathe_transport transport;
  struct swathe_transport *inner;
  double bytes_per_us, latency_us;
  double due_us[MOST_MESSAGES];         // of received messages, on the clock
  _Atomic int32_t *left[MOST_MESSAGES];
  int32_t count, handed;
  double free_us;                       // when the link has brought what was posted
};

static enum swathe_status link_post(struct swathe_transport *transport,
                                    const struct sw_transport_message *messages, int32_t count)
{
  struct link *link = (struct link *)transport;
  struct sw_transport_message passed[2 * MOST_MESSAGES];
  const double now = sw_layer_now_us();

  link->count = link->handed = 0;
  link->free_us = now + link->latency_us;
  if (count > MOST_MESSAGES) exit(1);
  for (int32_t i = 0; i < count; i++) {
    passed[i] = messages[i];
    passed[i].left = NULL;
    if (messages[i].send) continue;
    link->free_us += (double)messages[i].bytes / link->bytes_per_us;
    link->due_us[link->count] = link->free_us;
    link->left[link->count++] = messages[i].left;
  }
  // the bytes cross at once; what is late is the news of them
  const enum swathe_status status = link->inner->operations->post(link->inner, passed, count);
  return status ? status : link->inner->operations->wait(link->inner);
}

static enum swathe_status link_test(struct swathe_transport *transport, bool *done)
{
  struct link *link = (struct link *)transport;
  const double now = sw_layer_now_us();
  for (; link->handed < link->count && link->due_us[link->handed] <= now; link->handed++)
    if (link->left[link->handed]) --*link->left[link->handed];
  *done = link->handed == link->count;
  return SWATHE_OK;
}

static enum swathe_status link_wait(struct swathe_transport *transport)
{
  struct link *link = (struct link *)transport;
  bool done = false;
  for (link_test(transport, &done); !done; link_test(transport, &done)) {
    const double rest_us = link->due_us[link->handed] - sw_layer_now_us();
    if (rest_us > 0) nanosleep(&(struct timespec){ .tv_nsec = (long)(rest_us * 1000) % 900000000 },
                               NULL);
  }
  return SWATHE_OK;
}

static enum swathe_status link_gather(struct swathe_transport *transport, const void *mine,
                                      size_t bytes, void *all)
{
  struct link *link = (struct link *)transport;
  return link->inner->operations->gather(link->inner, mine, bytes, all);
}

static const struct sw_transport_operations link_operations = {
  .post = link_post, .test = link_test, .wait = link_wait, .gather = link_gather
};

// ---- Ranks -------------------------------------------------------------------------------------

struct rank {
  struct swathe_context *context;
  const struct swathe_problem *problem;
  struct link link;
  double wait_us[2][CONFIGS][ROUNDS], total_us[2][CONFIGS][ROUNDS];  // by direction
};

static void *zeros(int64_t rows, int64_t row, size_t elem)
{
  void *data = calloc((size_t)(rows * row) + 1, elem);
  if (!data) exit(1);
  return data;
}

static struct swathe_tensor tensor(int64_t rows, int32_t heads, int32_t dim, size_t elem)
{
  return (struct swathe_tensor){ zeros(rows, (int64_t)heads * dim, elem), (int64_t)heads * dim, dim,
                                 0 };
}

static void *run_rank(void *arg)
{
  struct rank *self = arg;
  const struct swathe_problem *p = self->problem;
  const size_t elem = sw_problem_elem_bytes(p);
  const int64_t rows = p->tokens_per_rank;
  const struct swathe_sharding sharding = { .ranks = RANKS, .batch = 1, .tokens = RANKS * rows };
  char came[RANKS];
  struct swathe_layer *layer;
  struct swathe_transport *link = &self->link.transport;

  measure_stop_on(swathe_layer_create(self->context, p, link, &layer), "create");
  measure_stop_on(swathe_layer_shard(layer, &sharding), "shard");
  const struct swathe_tensors call = {
    .q = tensor(rows, p->q_heads, p->head_dim_qk, elem),
    .k = tensor(rows, p->kv_heads, p->head_dim_qk, elem),
    .v = tensor(rows, p->kv_heads, p->head_dim_v, elem),
    .out = tensor(rows, p->q_heads, p->head_dim_v, elem),
    .lse = tensor(rows, p->q_heads, 1, sizeof(float)),
    .dout = tensor(rows, p->q_heads, p->head_dim_v, elem),
    .dq = tensor(rows, p->q_heads, p->head_dim_qk, elem),
    .dk = tensor(rows, p->kv_heads, p->head_dim_qk, elem),
    .dv = tensor(rows, p->kv_heads, p->head_dim_v, elem),
    .sink = p->sinks ? zeros(1, p->q_heads, sizeof(float)) : NULL,
    .dsink = p->sinks ? zeros(1, p->q_heads, sizeof(float)) : NULL,
  };
  for (int round = -1; round < ROUNDS; round++)
    for (int c = 0; c < CONFIGS; c++) {
      measure_stop_on(swathe_layer_set_exchange(layer, configs[c]), configs[c]);
      for (int d = 0; d < 2; d++) {
        struct swathe_timing timing;
        measure_stop_on(link->operations->gather(link, "", 1, came), "meet");
        measure_stop_on(d ? swathe_layer_backward(layer, &call, NULL)
                          : swathe_layer_forward(layer, &call, NULL), "pass");
        swathe_layer_timing(layer, &timing);
        if (round < 0) continue;
        self->wait_us[d][c][round] = timing.wait_us;
        self->total_us[d][c][round] = timing.total_us;
      }
    }
  measure_stop_on(link->operations->gather(link, "", 1, came), "meet");
  swathe_layer_destroy(layer);  // the tensors go with the process
  return NULL;
}

// Of each round the slower rank, of those the median.
static double median_us(struct rank *ranks, int direction, int config, bool wait)
{
  double us[ROUNDS];
  for (int round = 0; round < ROUNDS; round++) {
    us[round] = 0;
    for (int r = 0; r < RANKS; r++) {
      const struct rank *rank = &ranks[r];
      const double of_rank = wait ? rank->wait_us[direction][config][round]
                                  : rank->total_us[direction][config][round];
      if (of_rank > us[round]) us[round] = of_rank;
    }
  }
  return sw_search_median(us, ROUNDS);
}

static void measure(const char *text, double mbit, double latency_us)
{
  static struct rank ranks[RANKS];
  struct swathe_problem problem;
  struct swathe_threads *threads;
  struct swathe_context *context;
  pthread_t ids[RANKS];
  double alone[2];

  swathe_problem_init(&problem);
  measure_stop_on(swathe_problem_parse(text, &problem), text);
  measure_stop_on(swathe_open(&(struct swathe_options){ .threads = 1 }, &context), "open");
  measure_stop_on(swathe_threads_create(RANKS, 60, &threads), "threads");
  for (int r = 0; r < RANKS; r++) {
    struct swathe_transport *inner = swathe_threads_rank(threads, r);
    ranks[r] = (struct rank){ .context = context, .problem = &problem };
    ranks[r].link = (struct link){ .transport = *inner, .inner = inner,
                                   .bytes_per_us = mbit / 8, .latency_us = latency_us };
    ranks[r].link.transport.operations = &link_operations;
    if (pthread_create(&ids[r], NULL, run_rank, &ranks[r])) exit(1);
  }
  for (int r = 0; r < RANKS; r++) pthread_join(ids[r], NULL);
  printf("%s\n  %g Mbit/s, %g us; forward, backward: ms, of them exposed, part of overlap=0\n",
         text, mbit, latency_us);
  for (int c = 0; c < CONFIGS; c++) {
    printf("  %-58s", configs[c]);
    for (int d = 0; d < 2; d++) {
      const double wait = median_us(ranks, d, c, true);
      if (c == 0) alone[d] = wait;
      printf("  %8.2f %8.3f %5.1f%%", median_us(ranks, d, c, false) / 1e3, wait / 1e3,
             alone[d] > 0 ? 100 * wait / alone[d] : 0);
    }
    printf("\n");
  }
  swathe_threads_destroy(threads);
  swathe_close(context);
}

int main(int argc, char **argv)
{
  const double mbit = argc > 2 ? atof(argv[2]) : 1000, latency_us = argc > 3 ? atof(argv[3]) : 50;
  if (argc > 1) {
    measure(argv[1], mbit, latency_us);
    return 0;
  }
  measure("q_heads=64,kv_heads=8,window_left=127,sinks=1,dtype=bf16,ranks=2,tokens_per_rank=8192",
          mbit, latency_us);
  measure("q_heads=32,kv_heads=16,head_dim_qk=128,head_dim_v=128,window_left=1023,dtype=bf16,"
          "ranks=2,tokens_per_rank=8192", mbit, latency_us);
  return 0;
}
