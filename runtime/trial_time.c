// trial_time.c: how long candidates take: one rank's share, with nobody to talk to, launched again
// and again; several candidates in turn, in a child that lives for many rounds.
#include "trial_bench.h"

#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

// One timing takes about this long: launches are repeated until then.  A launch is made to take
// about as long on a processor that does this many multiply-adds and adds a second with each of
// its threads.  Long enough to time, short enough for many rounds.
static const double timing_us = 20000, thread_flops_per_s = 1e11;
enum { MOST_LAUNCHES = 32 };

// A round is noisy when its process got less than this share of what it got in the best round.
static const double quiet_share = 0.95;

// ---- A transport that only copies -------------------------------------------------------------

enum { PIECE = 1 << 16 };

static enum swathe_status alone_post(struct swathe_transport *transport,
                                     const struct sw_transport_message *messages, int32_t count)
{
  struct sw_trial_alone *alone = (struct sw_trial_alone *)transport;
  alone->next = alone->count = 0;
  alone->done_bytes = 0;
  if (!alone->loaded || !count) return SWATHE_OK;
  struct sw_transport_message *kept =
      realloc(alone->messages, (size_t)count * sizeof *alone->messages);
  if (!kept) return sw_fail(SWATHE_NO_MEMORY, "no memory for %" PRId32 " messages", count);
  memcpy(kept, messages, (size_t)count * sizeof *kept);
  alone->messages = kept;
  alone->count = count;
  return SWATHE_OK;
}

static enum swathe_status alone_test(struct swathe_transport *transport, bool *done)
{
  struct sw_trial_alone *alone = (struct sw_trial_alone *)transport;
  if (alone->next < alone->count) {
    const struct sw_transport_message *message = &alone->messages[alone->next];
    const size_t left = message->bytes - alone->done_bytes, piece = left < PIECE ? left : PIECE;
    char *at = (char *)message->data + alone->done_bytes;
    memcpy(message->send ? alone->elsewhere : at, message->send ? at : alone->elsewhere, piece);
    alone->done_bytes += piece;
    if (alone->done_bytes == message->bytes) alone->next++, alone->done_bytes = 0;
  }
  *done = alone->next == alone->count;
  return SWATHE_OK;
}

static enum swathe_status alone_wait(struct swathe_transport *transport)
{
  for (bool done = false; !done;) alone_test(transport, &done);
  return SWATHE_OK;
}

static enum swathe_status alone_gather(struct swathe_transport *transport, const void *mine,
                                       size_t bytes, void *all)
{
  for (int32_t r = 0; r < transport->ranks; r++)
    memcpy((char *)all + (size_t)r * bytes, mine, bytes);
  return SWATHE_OK;
}

// On a device nothing is moved: what the wire costs there is no kernel's business.
static enum swathe_status alone_enqueue(struct swathe_transport *transport,
                                        const struct sw_transport_message *messages, int32_t count,
                                        void *stream)
{
  (void)transport, (void)messages, (void)count, (void)stream;
  return SWATHE_OK;
}

static const struct sw_transport_operations alone_operations = { .post = alone_post,
                                                                 .test = alone_test,
                                                                 .wait = alone_wait,
                                                                 .gather = alone_gather,
                                                                 .enqueue = alone_enqueue };

// ---- What is timed ----------------------------------------------------------------------------

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Tokens and key heads to time on: as few as give a launch its time and its threads enough to
// do.  A few windows of tokens are wanted, so that what lies at the share's ends keeps about its
// weight; fewer only if a single head would take too long.
static void choose_timed(struct sw_trial_bench *bench)
{
  enum { UNIT = 512, LEAST_TOKENS = 2048 };
  const struct swathe_problem *p = &bench->problem;
  const int64_t threads = bench->context->threads, all = p->tokens_per_rank * p->ranks;
  const double keys =
      1 + (double)smaller(p->window_left, all) + (double)smaller(p->window_right, all);
  const double flops = 2 * keys * (p->head_dim_qk + p->head_dim_v) * p->q_heads / p->kv_heads *
                       (bench->direction == SWATHE_BACKWARD ? 2.5 : 1);
  const double wanted = 1e-6 * timing_us * thread_flops_per_s * (double)threads / flops;
  const double windows = fmax(LEAST_TOKENS, 2 * keys);
  if (bench->cuda) {  // a whole share is little for a device, and a little much for an emulated one
    bench->timed = *p;
    if (bench->emulated) bench->timed.kv_heads = 1;
    if (bench->emulated) bench->timed.q_heads = p->q_heads / p->kv_heads;
    if (bench->emulated) bench->timed.tokens_per_rank = smaller(p->tokens_per_rank, UNIT);
    bench->scale = (double)p->tokens_per_rank * p->kv_heads /
                   ((double)bench->timed.tokens_per_rank * bench->timed.kv_heads);
    return;
  }
  int64_t tokens = smaller(p->tokens_per_rank, windows < 1e15 ? (int64_t)windows : INT64_MAX);
  int64_t heads = smaller(p->kv_heads, (int64_t)(wanted / (double)tokens));

  if (heads < 1) heads = 1;
  if (wanted < (double)tokens) tokens = smaller(tokens, wanted > UNIT ? (int64_t)wanted : UNIT);
  while (heads < p->kv_heads && heads * (tokens + UNIT - 1) / UNIT < 2 * threads) heads++;
  if (heads * (tokens + UNIT - 1) / UNIT < 2 * threads)
    tokens = smaller(p->tokens_per_rank, 2 * threads * UNIT / heads);
  bench->timed = *p;
  bench->timed.tokens_per_rank = tokens;
  bench->timed.kv_heads = (int32_t)heads;
  bench->timed.q_heads = p->q_heads / p->kv_heads * (int32_t)heads;
  bench->scale = (double)p->tokens_per_rank * p->kv_heads / ((double)tokens * (double)heads);
}

struct swathe_sharding sw_trial_time_share(const struct sw_trial_bench *bench)
{
  const struct swathe_problem *p = &bench->timed;
  return (struct swathe_sharding){ .layout = p->layout == SWATHE_SPANS ? SWATHE_CONTIGUOUS
                                                                       : p->layout,
                                   .ranks = p->ranks,
                                   .batch = 1,
                                   .tokens = p->tokens_per_rank * p->ranks };
}

enum swathe_status sw_trial_time_prepare(struct sw_trial_bench *bench)
{
  bench->alone.transport = (struct swathe_transport){ .operations = &alone_operations,
                                                      .name = "alone",
                                                      .rank = bench->problem.ranks / 2,
                                                      .ranks = bench->problem.ranks };
  bench->alone.elsewhere = calloc(1, PIECE);
  if (!bench->alone.elsewhere) return sw_fail(SWATHE_NO_MEMORY, "no memory to tune");
  choose_timed(bench);
  // all heads, for the distance between rows; layouts may give up to the two chunks' remainders
  // more
  return sw_trial_tensors_make(&bench->share, bench->cuda ? &bench->timed : &bench->problem,
                               bench->timed.tokens_per_rank + 2);
}

void sw_trial_time_free(struct sw_trial_bench *bench)
{
  sw_trial_end_racers(bench);
  sw_trial_tensors_free(&bench->share);
  free(bench->alone.elsewhere);
  free(bench->alone.messages);
}

// ---- Time -------------------------------------------------------------------------------------

static double clock_s(clockid_t clock)
{
  struct timespec time;
  clock_gettime(clock, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

// What a child needs on its device to time there.
static enum swathe_status set_up_device(struct sw_trial_bench *bench)
{
  enum swathe_status status =
      sw_trial_tensors_place(bench->context, &bench->share, &bench->placed_share);

  if (!status) status = sw_context_device(bench->context, &bench->device);
  if (!status) status = sw_device_cuda_enter(bench->device);
  if (status) return status;
  bench->flushed_bytes = 2 * (size_t)sw_device_cuda_cache_bytes(bench->device);
  if (bench->emulated) bench->flushed_bytes = 0;
  status = sw_device_cuda_allocate(bench->device, bench->flushed_bytes, &bench->flushed);
  if (!status) status = sw_device_cuda_event(bench->device, true, &bench->begin);
  if (!status) status = sw_device_cuda_event(bench->device, true, &bench->end);
  sw_device_cuda_leave(bench->device);
  return status;
}

// One launch on the device's clock, with its inputs out of the cache.
static enum swathe_status time_on_device(struct sw_trial_bench *bench, struct swathe_layer *layer,
                                         double *us)
{
  enum swathe_status status = bench->device ? SWATHE_OK : set_up_device(bench);

  if (!status) status = sw_device_cuda_enter(bench->device);
  if (status) return status;
  status = sw_device_cuda_fill(bench->device, bench->flushed, 0, bench->flushed_bytes / 4, NULL);
  if (!status) status = sw_device_cuda_record(bench->device, bench->begin, NULL);
  if (!status) status = sw_trial_run(layer, bench->direction, &bench->placed_share.call);
  if (!status) status = sw_device_cuda_record(bench->device, bench->end, NULL);
  if (!status) status = sw_device_cuda_wait_event(bench->device, bench->end);
  if (!status) status = sw_device_cuda_elapsed(bench->device, bench->begin, bench->end, us);
  *us *= bench->scale;
  sw_device_cuda_leave(bench->device);
  return status;
}

// One launch; its time scaled to the whole share.  A single thread is timed by the processor time
// it got, which is the same on a quiet machine and bears being interrupted.
static enum swathe_status time_once(struct sw_trial_bench *bench, struct swathe_layer *layer,
                                    double *us)
{
  if (bench->cuda) return time_on_device(bench, layer, us);
  const struct swathe_tensors call = sw_trial_tensors_call(&bench->share);
  struct swathe_timing timing;
  const double begin = clock_s(CLOCK_THREAD_CPUTIME_ID);
  const enum swathe_status status = sw_trial_run(layer, bench->direction, &call);
  if (status) return status;
  const double processor_us = 1e6 * (clock_s(CLOCK_THREAD_CPUTIME_ID) - begin);
  swathe_layer_timing(layer, &timing);
  const double took_us = bench->context->threads == 1 ? processor_us : timing.total_us;
  *us = took_us * bench->scale;
  return SWATHE_OK;
}

static int ascending(const void *a, const void *b)
{
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

// Launches for about timing_us; their median.
static enum swathe_status time_long(struct sw_trial_bench *bench, struct swathe_layer *layer,
                                    double *us)
{
  double all[MOST_LAUNCHES];
  int count = 0;
  const double begin = sw_layer_now_s();
  do {
    const enum swathe_status status = time_once(bench, layer, &all[count++]);
    if (status) return status;
  } while (count < MOST_LAUNCHES && 1e6 * (sw_layer_now_s() - begin) < 0.75 * timing_us);
  qsort(all, (size_t)count, sizeof *all, ascending);
  *us = all[count / 2];
  return SWATHE_OK;
}

enum swathe_status sw_trial_time_default(struct sw_trial_bench *bench, const char *default_config)
{
  struct swathe_layer *layer;
  enum swathe_status status = sw_trial_layer(bench, false, default_config, &layer);
  if (status) return status;
  for (int i = 0; i < 2 && !status; i++) status = time_once(bench, layer, &bench->default_us);
  swathe_layer_destroy(layer);
  return status;
}

// ---- Racers -----------------------------------------------------------------------------------

// What the parent asks for, followed by the configs; and what it hears for each of them.
struct order {
  int32_t count;
  bool loaded;
};

struct lap {
  double us, processor_s, wall_s;
  enum sw_verdict verdict;
  char words[SW_TRIAL_WORDS];
};

// The layers that the child has made so far.
struct stable {
  struct swathe_layer *layers[SW_SEARCH_MOST_SLOTS];
  char configs[SW_SEARCH_MOST_SLOTS][SW_CONFIG_TEXT];
  int count;
};

static enum swathe_status find_layer(struct sw_trial_bench *bench, struct stable *stable,
                                     const char *config, struct swathe_layer **layer)
{
  for (int i = 0; i < stable->count; i++)
    if (!strcmp(stable->configs[i], config)) {
      *layer = stable->layers[i];
      return SWATHE_OK;
    }
  double warm_us;
  if (stable->count == SW_SEARCH_MOST_SLOTS)
    while (stable->count > 0) swathe_layer_destroy(stable->layers[--stable->count]);
  enum swathe_status status = sw_trial_layer(bench, false, config, layer);
  if (status) return status;
  status = time_once(bench, *layer, &warm_us);
  if (status) {
    swathe_layer_destroy(*layer);
    return status;
  }
  snprintf(stable->configs[stable->count], SW_CONFIG_TEXT, "%s", config);
  stable->layers[stable->count++] = *layer;
  return SWATHE_OK;
}

static void run_lap(struct sw_trial_bench *bench, struct stable *stable, const char *config,
                    struct lap *lap)
{
  struct swathe_layer *layer;
  enum swathe_status status = find_layer(bench, stable, config, &layer);
  const double wall = sw_layer_now_s(), processor = clock_s(CLOCK_PROCESS_CPUTIME_ID);
  if (!status) status = time_long(bench, layer, &lap->us);
  lap->wall_s = sw_layer_now_s() - wall;
  lap->processor_s = clock_s(CLOCK_PROCESS_CPUTIME_ID) - processor;
  if (!status) return;
  lap->verdict = SW_VERDICT_WRONG;
  snprintf(lap->words, sizeof lap->words, "%s", swathe_error());
}

static void race_in_child(struct sw_trial_bench *bench, const char *unused, int end)
{
  static struct stable stable;
  char config[SW_CONFIG_TEXT];
  struct order order;
  (void)unused;

  while (sw_trial_child_receive(end, &order, sizeof order)) {
    bool failed = false;
    bench->alone.loaded = order.loaded;
    for (int32_t i = 0; i < order.count; i++) {
      struct lap lap = { .verdict = SW_VERDICT_OK };
      if (!sw_trial_child_receive(end, config, sizeof config)) return;
      if (failed) continue;
      run_lap(bench, &stable, config, &lap);
      failed = lap.verdict != SW_VERDICT_OK;
      if (!sw_trial_child_send(end, &lap, sizeof lap)) return;
    }
  }
}

static void forget_racers(struct sw_trial_bench *bench)
{
  if (bench->racers) close(bench->racers_end);
  bench->racers = 0;
}

void sw_trial_end_racers(struct sw_trial_bench *bench)
{
  if (!bench->racers) return;
  kill(bench->racers, SIGKILL);
  sw_trial_child_reap(bench->racers);
  forget_racers(bench);
}

static bool send_order(const struct sw_trial_bench *bench, const struct sw_trial_slot *slots,
                       int32_t count, bool loaded)
{
  struct order order;
  memset(&order, 0, sizeof order);
  order.count = count;
  order.loaded = loaded;
  bool sent = sw_trial_child_send(bench->racers_end, &order, sizeof order);
  for (int32_t i = 0; i < count && sent; i++) {
    char config[SW_CONFIG_TEXT] = { 0 };
    snprintf(config, sizeof config, "%s", slots[i].config);
    sent = sw_trial_child_send(bench->racers_end, config, sizeof config);
  }
  return sent;
}

enum swathe_status sw_trial_round(struct sw_trial_bench *bench, struct sw_trial_slot *slots,
                                  int32_t count, bool loaded, const volatile int *stop, bool *noisy)
{
  double processor_s = 0, wall_s = 0;
  enum swathe_status status = SWATHE_OK;

  for (int32_t i = 0; i < count; i++) slots[i].verdict = SW_VERDICT_UNTRIED, slots[i].words[0] = 0;
  if (!bench->racers)
    status = sw_trial_child_start(bench, "", race_in_child, &bench->racers, &bench->racers_end);
  if (status) {
    bench->racers = 0;
    return status;
  }
  send_order(bench, slots, count, loaded);  // to a child that is gone: hearing it tells
  for (int32_t i = 0; i < count; i++) {
    struct lap lap;
    status = sw_trial_child_hear(bench, bench->racers, bench->racers_end, &lap, sizeof lap, stop,
                                 &slots[i].verdict, slots[i].words);
    if (status || slots[i].verdict) {
      forget_racers(bench);
      return status;
    }
    slots[i].us = lap.us;
    slots[i].verdict = lap.verdict;
    memcpy(slots[i].words, lap.words, sizeof lap.words);
    if (lap.verdict) {
      sw_trial_end_racers(bench);
      return SWATHE_OK;
    }
    processor_s += lap.processor_s;
    wall_s += lap.wall_s;
  }
  *noisy = false;
  if (bench->cuda) return SWATHE_OK;  // the processors' share says nothing about the device
  const double share = processor_s / (wall_s * bench->context->threads);
  if (share > bench->best_share) bench->best_share = share;
  *noisy = share < quiet_share * bench->best_share;
  return SWATHE_OK;
}

// ---- What must be done at least ---------------------------------------------------------------

// Pairs of query and key that see each other, of the rank's tokens in one document.
static double visible_pairs(const struct sw_trial_bench *bench, double *keys)
{
  enum { SPANS = 4 };
  const struct swathe_problem *p = &bench->timed;
  const struct swathe_sharding share = sw_trial_time_share(bench);
  struct swathe_span spans[SPANS];
  int64_t count = 0;
  double pairs = 0;

  *keys = 0;
  if (swathe_sharding_spans(&share, bench->alone.transport.rank, spans, SPANS, &count) ||
      count > SPANS)
    return 0;
  for (int64_t s = 0; s < count; s++) {
    const int64_t begin = spans[s].position, end = begin + spans[s].tokens;
    for (int64_t at = begin; at < end; at++)
      pairs += (double)(1 + smaller(p->window_left, at) +
                        smaller(p->window_right, share.tokens - 1 - at));
    *keys += (double)(end - begin) + (double)smaller(p->window_left, begin);
  }
  return pairs;
}

void sw_trial_work(const struct sw_trial_bench *bench, double *flops, double *bytes)
{
  const struct swathe_problem *p = &bench->timed;
  const double qk = p->head_dim_qk, v = p->head_dim_v, tokens = (double)p->tokens_per_rank;
  const double elem = (double)sw_problem_elem_bytes(p);
  double keys;
  const double pairs = visible_pairs(bench, &keys) * p->q_heads;

  // forward: scores and output; backward: scores, dP, dV, dQ and dK
  *flops = 2 * pairs * (bench->direction == SWATHE_FORWARD ? qk + v : 3 * qk + 2 * v);
  *bytes = elem * (tokens * p->q_heads * (qk + v) + keys * p->kv_heads * (qk + v));
  *flops *= bench->scale;
  *bytes *= bench->scale;
  if (bench->direction == SWATHE_BACKWARD) *bytes *= 2;  // q, out, dout, dq; k, v, dk, dv
}
