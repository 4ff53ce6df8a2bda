// trial.c: checks a candidate, and times several in turn, in child processes.  A child shares the
// parent's inputs by fork, reports through a socket, and dies with its parent.  The parent leaves
// CUDA to its children, which copy the inputs to their device.
#include "trial.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

// One timing takes about this long: launches are repeated until then.  A launch is made to take
// about as long on a processor that does this many multiply-adds and adds a second with each of
// its threads.  Long enough to time, short enough for many rounds.
static const double timing_us = 20000, thread_flops_per_s = 1e11;
enum { MOST_LAUNCHES = 32 };

// A round is noisy when its process got less than this share of what it got in the best round.
static const double quiet_share = 0.95;

// A trial is killed after this long (if the caller says nothing), plus many times what the
// default takes.
static const double default_trial_s = 20;

// A key window up to this is checked at its far edge too; beyond it the reference would take too
// long.
enum { MOST_CHECKED_WINDOW = 4096 };

// Tensors of one problem, rows packed [row][head][dim].
struct tensors {
  struct swathe_problem problem;
  int64_t rows;
  void *q, *k, *v, *out, *dout, *dq, *dk, *dv;  // elem
  float *lse, *sink, *dsink;
};

enum { ARRAYS = 11 };

// Tensors where the target's kernels read and write them: on the CPU where they are.
struct placed {
  struct tensors *host;
  struct swathe_tensors call;
  void *memory[ARRAYS];  // of the device
};

// The reference's answers for some rows of the small problem.
struct answers {
  bool *query, *key;  // [tokens]: which are checked
  bool dsink_known;
  double *out, *lse, *delta, *dq, *dk, *dv, *dsink;
};

// One rank of a group whose others are not there.  Loaded, it moves as many bytes as the halo
// has, a piece at a time when the launch lets it, as a transport within one machine would; what
// arrives is not the neighbours' keys, but costs the same.  A timing that covers a part of the
// share moves that part.
struct alone {
  struct swathe_transport transport;
  bool loaded;
  char *elsewhere;  // PIECE bytes: stands for the wire
  struct sw_transport_message *messages;
  int32_t count, next;
  size_t done_bytes;  // of messages[next]
};

struct sw_trial_bench {
  struct swathe_context *context;
  struct swathe_problem problem;
  enum swathe_direction direction;
  struct tensors small, share;
  struct swathe_span spans[2];  // the small problem lies in two pieces with a gap between
  int64_t rank_spans[2], small_rows, small_tokens;
  struct answers answers;
  struct alone alone;
  struct swathe_problem timed;  // the problem with fewer tokens and key heads, to be timed on
  double scale;                 // how much longer the whole share takes
  double default_us, trial_s;
  int64_t memory_bytes;
  pid_t racers;       // the process that times; 0: none
  int racers_end;     // of its socket
  double best_share;  // of the processors, that a round got
  bool cuda, emulated;
  // of a child on CUDA: the share on its device, what is read between timings so that none finds
  // its inputs in the cache, and the events around a timing
  struct placed placed_share;
  struct sw_device_cuda *device;
  void *flushed, *begin, *end;
  size_t flushed_bytes;
};

// ---- A transport that only copies -------------------------------------------------------------

enum { PIECE = 1 << 16 };

static enum swathe_status alone_post(struct swathe_transport *transport,
                                     const struct sw_transport_message *messages, int32_t count)
{
  struct alone *alone = (struct alone *)transport;
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
  struct alone *alone = (struct alone *)transport;
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

// ---- Tensors ----------------------------------------------------------------------------------

// xorshift64* (Vigna 2016): uniform in [-sqrt 3, sqrt 3), so of variance 1.
static float next_random(uint64_t *state)
{
  *state ^= *state >> 12;
  *state ^= *state << 25;
  *state ^= *state >> 27;
  const uint64_t bits = (*state * 2685821657736338717u) >> 40;
  return ((float)bits / 8388608.0f - 1.0f) * 1.7320508f;
}

static double element(const struct swathe_problem *problem, const void *data, int64_t index)
{
  return problem->dtype == SWATHE_F32
             ? (double)((const float *)data)[index]
             : (double)sw_problem_widen(problem->dtype, ((const uint16_t *)data)[index]);
}

static void *make(const struct swathe_problem *problem, int64_t elements, uint64_t seed)
{
  const size_t size = sw_problem_elem_bytes(problem);
  void *data = calloc((size_t)(elements ? elements : 1), size);
  if (!data || !seed) return data;
  for (int64_t i = 0; i < elements; i++) {
    const float value = next_random(&seed);
    if (problem->dtype == SWATHE_F32) ((float *)data)[i] = value;
    else ((uint16_t *)data)[i] = sw_problem_narrow(problem->dtype, value);
  }
  return data;
}

static void free_tensors(struct tensors *t)
{
  void *const all[] = { t->q,  t->k,  t->v,   t->out,  t->dout, t->dq,
                        t->dk, t->dv, t->lse, t->sink, t->dsink };
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

static enum swathe_status make_tensors(struct tensors *t, const struct swathe_problem *problem,
                                       int64_t rows)
{
  const int64_t q = rows * problem->q_heads * problem->head_dim_qk;
  const int64_t o = rows * problem->q_heads * problem->head_dim_v;
  const int64_t k = rows * problem->kv_heads * problem->head_dim_qk;
  const int64_t v = rows * problem->kv_heads * problem->head_dim_v;
  struct swathe_problem floats = *problem;

  floats.dtype = SWATHE_F32;
  *t = (struct tensors){
    .problem = *problem,
    .rows = rows,
    .q = make(problem, q, 11),
    .k = make(problem, k, 12),
    .v = make(problem, v, 13),
    .dout = make(problem, o, 14),
    .sink = make(&floats, problem->q_heads, 15),
    .out = make(problem, o, 0),
    .dq = make(problem, q, 0),
    .dk = make(problem, k, 0),
    .dv = make(problem, v, 0),
    .lse = make(&floats, rows * problem->q_heads, 0),
    .dsink = make(&floats, problem->q_heads, 0),
  };
  if (t->q && t->k && t->v && t->dout && t->sink && t->out && t->dq && t->dk && t->dv && t->lse &&
      t->dsink)
    return SWATHE_OK;
  return sw_fail(SWATHE_NO_MEMORY, "no memory for %" PRId64 " rows to tune on", rows);
}

static struct swathe_tensor packed(void *data, int32_t heads, int32_t dim)
{
  return (struct swathe_tensor){ data, (int64_t)heads * dim, dim, 0 };
}

static struct swathe_tensors call_of(struct tensors *t)
{
  const struct swathe_problem *p = &t->problem;
  return (struct swathe_tensors){
    .q = packed(t->q, p->q_heads, p->head_dim_qk),
    .k = packed(t->k, p->kv_heads, p->head_dim_qk),
    .v = packed(t->v, p->kv_heads, p->head_dim_v),
    .out = packed(t->out, p->q_heads, p->head_dim_v),
    .lse = packed(t->lse, p->q_heads, 1),
    .dout = packed(t->dout, p->q_heads, p->head_dim_v),
    .dq = packed(t->dq, p->q_heads, p->head_dim_qk),
    .dk = packed(t->dk, p->kv_heads, p->head_dim_qk),
    .dv = packed(t->dv, p->kv_heads, p->head_dim_v),
    .sink = p->sinks ? t->sink : NULL,
    .dsink = p->sinks ? t->dsink : NULL,
  };
}

// ---- On the target ----------------------------------------------------------------------------

struct array {
  void *host;
  void **called;  // its place in the call; NULL: not part of it
  size_t bytes;
  bool written;
};

static void list_arrays(struct tensors *t, struct swathe_tensors *call, struct array *arrays)
{
  const struct swathe_problem *p = &t->problem;
  const size_t elem = sw_problem_elem_bytes(p), rows = (size_t)t->rows;
  const size_t heads = (size_t)p->q_heads, kv = (size_t)p->kv_heads;
  const size_t qk = (size_t)p->head_dim_qk * elem, v = (size_t)p->head_dim_v * elem;
  const struct array all[ARRAYS] = {
    { t->q, &call->q.data, rows * heads * qk, false },
    { t->k, &call->k.data, rows * kv * qk, false },
    { t->v, &call->v.data, rows * kv * v, false },
    { t->dout, &call->dout.data, rows * heads * v, false },
    { t->out, &call->out.data, rows * heads * v, true },
    { t->dq, &call->dq.data, rows * heads * qk, true },
    { t->dk, &call->dk.data, rows * kv * qk, true },
    { t->dv, &call->dv.data, rows * kv * v, true },
    { t->lse, &call->lse.data, rows * heads * sizeof(float), true },
    { t->sink, call->sink ? (void **)&call->sink : NULL, heads * sizeof(float), false },
    { t->dsink, call->dsink ? (void **)&call->dsink : NULL, heads * sizeof(float), true },
  };
  memcpy(arrays, all, sizeof all);
}

static enum swathe_status place(struct sw_trial_bench *bench, struct tensors *t,
                                struct placed *placed)
{
  struct array arrays[ARRAYS];
  enum swathe_status status = SWATHE_OK;

  *placed = (struct placed){ .host = t, .call = call_of(t) };
  list_arrays(t, &placed->call, arrays);
  for (int i = 0; i < ARRAYS && bench->cuda && !status; i++) {
    if (!arrays[i].called) continue;
    status = swathe_memory_allocate(bench->context, SWATHE_CUDA, arrays[i].bytes,
                                    &placed->memory[i]);
    if (!status)
      status = swathe_memory_write(bench->context, SWATHE_CUDA, placed->memory[i], arrays[i].host,
                                   arrays[i].bytes);
    *arrays[i].called = placed->memory[i];
  }
  return status;
}

// Brings what kernels wrote to the host.
static enum swathe_status fetch(struct sw_trial_bench *bench, struct placed *placed)
{
  struct array arrays[ARRAYS];
  enum swathe_status status = SWATHE_OK;

  list_arrays(placed->host, &placed->call, arrays);
  for (int i = 0; i < ARRAYS && bench->cuda && !status; i++)
    if (arrays[i].called && arrays[i].written)
      status = swathe_memory_read(bench->context, SWATHE_CUDA, arrays[i].host, placed->memory[i],
                                  arrays[i].bytes);
  return status;
}

static void unplace(struct sw_trial_bench *bench, struct placed *placed)
{
  for (int i = 0; i < ARRAYS && bench->cuda; i++)
    swathe_memory_free(bench->context, SWATHE_CUDA, placed->memory[i]);
}

// ---- The small problem and the reference's answers --------------------------------------------

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// A row of the small problem in the sequence's order, as floats: the token lies behind the gap or
// before.
static float *sequence_of(const struct sw_trial_bench *bench, const void *data, int32_t heads,
                          int32_t dim)
{
  const int64_t row = (int64_t)heads * dim;
  float *floats = calloc((size_t)(bench->small_tokens * row), sizeof *floats);
  for (int s = 0; floats && s < 2; s++)
    for (int64_t i = 0; i < bench->spans[s].tokens * row; i++)
      floats[bench->spans[s].position * row + i] =
          (float)element(&bench->small.problem, data, bench->spans[s].row * row + i);
  return floats;
}

static int64_t small_row(const struct sw_trial_bench *bench, int64_t token)
{
  const int s = token >= bench->spans[1].position;
  return bench->spans[s].row + token - bench->spans[s].position;
}

// Which rows are checked: all of a cheap problem; else both ends, both sides of the window's far
// edge and of the gap, and the keys that few queries see.
static void choose_rows(struct sw_trial_bench *bench)
{
  const int64_t n = bench->small_tokens, left = bench->small.problem.window_left;
  const double pairs = (double)n * (double)smaller(n, left);
  const bool all = pairs * bench->small.problem.q_heads * bench->small.problem.head_dim_qk < 3e8;

  for (int64_t t = 0; t < n; t++) {
    const bool near_gap = llabs(t - bench->spans[1].position) < 4;
    const bool near_edge = left < n && t >= left - 2 && t < left + 6;
    bench->answers.query[t] = all || t < 4 || t >= n - 16 || near_gap || near_edge;
    bench->answers.key[t] = all || t >= n - 16;
  }
  bench->answers.dsink_known = all;
}

static void answer(struct sw_trial_bench *bench, const struct swathe_sequence *sequence)
{
  const struct swathe_problem *p = &bench->small.problem;
  struct answers *a = &bench->answers;

  for (int64_t t = 0; t < bench->small_tokens; t++)
    if (a->query[t])
      swathe_reference_query(p, sequence, 0, t, a->out + t * p->q_heads * p->head_dim_v,
                             a->lse + t * p->q_heads, a->delta + t * p->q_heads);
  if (bench->direction == SWATHE_FORWARD) return;
  for (int64_t t = 0; t < bench->small_tokens; t++) {
    if (a->query[t])
      swathe_reference_dq(p, sequence, a->lse, a->delta, 0, t,
                          a->dq + t * p->q_heads * p->head_dim_qk, a->dsink);
    if (a->key[t])
      swathe_reference_dkv(p, sequence, a->lse, a->delta, 0, t,
                           a->dk + t * p->kv_heads * p->head_dim_qk,
                           a->dv + t * p->kv_heads * p->head_dim_v);
  }
}

static void free_answers(struct answers *a)
{
  void *const all[] = { a->query, a->key, a->out, a->lse, a->delta, a->dq, a->dk, a->dv, a->dsink };
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

static enum swathe_status prepare_answers(struct sw_trial_bench *bench)
{
  const struct swathe_problem *p = &bench->small.problem;
  const size_t n = (size_t)bench->small_tokens, heads = (size_t)p->q_heads,
               kv = (size_t)p->kv_heads;
  const size_t qk = (size_t)p->head_dim_qk, v = (size_t)p->head_dim_v;
  struct answers *a = &bench->answers;
  float *const floats[] = {
    sequence_of(bench, bench->small.q, p->q_heads, p->head_dim_qk),
    sequence_of(bench, bench->small.k, p->kv_heads, p->head_dim_qk),
    sequence_of(bench, bench->small.v, p->kv_heads, p->head_dim_v),
    sequence_of(bench, bench->small.dout, p->q_heads, p->head_dim_v),
  };
  *a = (struct answers){
    .query = calloc(n, sizeof(bool)),
    .key = calloc(n, sizeof(bool)),
    .out = calloc(n * heads * v, sizeof(double)),
    .lse = calloc(n * heads, sizeof(double)),
    .delta = calloc(n * heads, sizeof(double)),
    .dq = calloc(n * heads * qk, sizeof(double)),
    .dk = calloc(n * kv * qk, sizeof(double)),
    .dv = calloc(n * kv * v, sizeof(double)),
    .dsink = calloc(heads, sizeof(double)),
  };
  const bool memory = a->query && a->key && a->out && a->lse && a->delta && a->dq && a->dk &&
                      a->dv && a->dsink && floats[0] && floats[1] && floats[2] && floats[3];
  if (memory) {
    const struct swathe_sequence sequence = { .batch = 1,
                                              .tokens = bench->small_tokens,
                                              .q = floats[0],
                                              .k = floats[1],
                                              .v = floats[2],
                                              .dout = floats[3],
                                              .sink = p->sinks ? bench->small.sink : NULL };
    choose_rows(bench);
    answer(bench, &sequence);
  }
  for (int i = 0; i < 4; i++) free(floats[i]);
  return memory ? SWATHE_OK : sw_fail(SWATHE_NO_MEMORY, "no memory for the reference's answers");
}

// ---- Check ------------------------------------------------------------------------------------

struct limits {
  double out, lse, gradient;
};

static struct limits limits_of(enum swathe_dtype dtype)
{
  return dtype == SWATHE_F32 ? (struct limits){ 2e-5, 2e-5, 1e-4 }
                             : (struct limits){ 2e-2, 1e-3, 2e-2 };
}

// Compares `count` values at `row` of a packed tensor; false with words at the first that is too
// far off.
static bool compare(const struct swathe_problem *problem, const char *name, const void *data,
                    int64_t row, int64_t count, const double *expected, double limit, int64_t token,
                    char words[256])
{
  for (int64_t i = 0; i < count; i++) {
    const double got = element(problem, data, row * count + i), want = expected[i];
    if (fabs(got - want) <= limit * fmax(1, fabs(want))) continue;
    snprintf(words, 256,
             "%s of token %" PRId64 ", element %" PRId64 ": %.7g, the reference has %.7g", name,
             token, i, got, want);
    return false;
  }
  return true;
}

static bool compare_token(struct sw_trial_bench *bench, int64_t token, char words[256])
{
  const struct swathe_problem *p = &bench->small.problem;
  const struct limits limits = limits_of(p->dtype);
  const struct tensors *t = &bench->small;
  const struct answers *a = &bench->answers;
  const int64_t row = small_row(bench, token);
  const int64_t q = (int64_t)p->q_heads * p->head_dim_qk, o = (int64_t)p->q_heads * p->head_dim_v;
  const int64_t k = (int64_t)p->kv_heads * p->head_dim_qk, v = (int64_t)p->kv_heads * p->head_dim_v;
  struct swathe_problem floats = *p;

  floats.dtype = SWATHE_F32;
  if (bench->direction == SWATHE_FORWARD)
    return !a->query[token] ||
           (compare(p, "out", t->out, row, o, a->out + token * o, limits.out, token, words) &&
            compare(&floats, "lse", t->lse, row, p->q_heads, a->lse + token * p->q_heads,
                    limits.lse, token, words));
  if (a->query[token] &&
      !compare(p, "dq", t->dq, row, q, a->dq + token * q, limits.gradient, token, words))
    return false;
  return !a->key[token] ||
         (compare(p, "dk", t->dk, row, k, a->dk + token * k, limits.gradient, token, words) &&
          compare(p, "dv", t->dv, row, v, a->dv + token * v, limits.gradient, token, words));
}

// Forward's results for backward to start from: the reference's where known, else the default
// kernel's, which the forward trials check.
static void start_backward(struct sw_trial_bench *bench)
{
  const struct swathe_problem *p = &bench->small.problem;
  for (int64_t token = 0; token < bench->small_tokens; token++)
    for (int32_t h = 0; bench->answers.query[token] && h < p->q_heads; h++)
      bench->small.lse[small_row(bench, token) * p->q_heads + h] =
          (float)bench->answers.lse[token * p->q_heads + h];
}

static void poison(const struct swathe_problem *problem, void *data, int64_t elements)
{
  memset(data, 0xff, (size_t)elements * sw_problem_elem_bytes(problem));
}

static enum swathe_status run(struct swathe_layer *layer, enum swathe_direction direction,
                              const struct swathe_tensors *call)
{
  return direction == SWATHE_FORWARD ? swathe_layer_forward(layer, call, NULL)
                                     : swathe_layer_backward(layer, call, NULL);
}

static enum swathe_status make_layer(struct sw_trial_bench *bench, bool small, const char *config,
                                     struct swathe_layer **layer)
{
  const char *configs[SW_CONFIGS] = { config, config };
  const struct swathe_problem *p = small ? &bench->small.problem : &bench->timed;
  const struct swathe_sharding two_pieces = { .layout = SWATHE_SPANS,
                                              .ranks = 1,
                                              .batch = 1,
                                              .tokens = bench->small_tokens,
                                              .spans = bench->spans,
                                              .rank_spans = bench->rank_spans,
                                              .rank_rows = &bench->small_rows };
  const struct swathe_sharding share = { .layout = p->layout == SWATHE_SPANS ? SWATHE_CONTIGUOUS
                                                                             : p->layout,
                                         .ranks = p->ranks,
                                         .batch = 1,
                                         .tokens = p->tokens_per_rank * p->ranks };
  enum swathe_status status =
      sw_layer_create(bench->context, p, small ? NULL : &bench->alone.transport, configs,
                      1u << bench->direction, layer);
  if (status) return status;
  status = swathe_layer_shard(*layer, small ? &two_pieces : &share);
  if (status) swathe_layer_destroy(*layer);
  return status;
}

// What one check comes to.
struct result {
  enum sw_verdict verdict;
  char words[SW_TRIAL_WORDS];
};

static bool fits_memory(struct sw_trial_bench *bench, const struct swathe_layer *layer,
                        struct result *result)
{
  const struct sw_kernel *kernel = layer->kernels[bench->direction];
  if (bench->cuda) return true;  // its kernels have no workspace
  const int64_t each = kernel->workspace(layer->work[bench->direction].max_keys);
  const int64_t threads = bench->context->threads;
  if (each <= bench->memory_bytes / threads) return true;
  result->verdict = SW_VERDICT_OOM;
  snprintf(result->words, sizeof result->words,
           "%" PRId64 " threads want a workspace of %.1f MB each, %.1f MB in all are allowed",
           threads, (double)each / 1e6, (double)bench->memory_bytes / 1e6);
  return false;
}

static bool share_fits_memory(struct sw_trial_bench *bench, const char *config,
                              struct result *result)
{
  struct swathe_layer *layer;
  if (make_layer(bench, false, config, &layer)) return true;  // the check itself will say why
  const bool fits = fits_memory(bench, layer, result);
  swathe_layer_destroy(layer);
  return fits;
}

static void check(struct sw_trial_bench *bench, const char *config, struct result *result)
{
  const struct swathe_problem *p = &bench->small.problem;
  struct tensors *t = &bench->small;
  struct placed placed;
  struct swathe_layer *layer;

  if (!bench->cuda && !share_fits_memory(bench, config, result)) return;
  enum swathe_status status = make_layer(bench, true, config, &layer);
  if (!status) {
    if (bench->direction == SWATHE_FORWARD) {
      poison(p, t->out, t->rows * p->q_heads * p->head_dim_v);
      memset(t->lse, 0xff, (size_t)(t->rows * p->q_heads) * sizeof(float));
    } else {
      poison(p, t->dq, t->rows * p->q_heads * p->head_dim_qk);
      poison(p, t->dk, t->rows * p->kv_heads * p->head_dim_qk);
      poison(p, t->dv, t->rows * p->kv_heads * p->head_dim_v);
    }
    status = place(bench, t, &placed);
    if (!status) status = run(layer, bench->direction, &placed.call);
    if (!status) status = fetch(bench, &placed);
    unplace(bench, &placed);
    swathe_layer_destroy(layer);
  }
  if (status) {
    result->verdict = SW_VERDICT_WRONG;
    snprintf(result->words, sizeof result->words, "%s", swathe_error());
    return;
  }
  for (int64_t token = 0; token < bench->small_tokens; token++)
    if (!compare_token(bench, token, result->words)) {
      result->verdict = SW_VERDICT_WRONG;
      return;
    }
  if (bench->direction == SWATHE_FORWARD || !p->sinks || !bench->answers.dsink_known) return;
  struct swathe_problem floats = *p;
  floats.dtype = SWATHE_F32;
  if (!compare(&floats, "dsink", t->dsink, 0, p->q_heads, bench->answers.dsink,
               limits_of(p->dtype).gradient, -1, result->words))
    result->verdict = SW_VERDICT_WRONG;
}

// ---- Time -------------------------------------------------------------------------------------

static double clock_s(clockid_t clock)
{
  struct timespec time;
  clock_gettime(clock, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static double now_s(void) { return clock_s(CLOCK_MONOTONIC); }

// What a child needs on its device to time there.
static enum swathe_status set_up_device(struct sw_trial_bench *bench)
{
  enum swathe_status status = place(bench, &bench->share, &bench->placed_share);

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
  if (!status) status = run(layer, bench->direction, &bench->placed_share.call);
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
  const struct swathe_tensors call = call_of(&bench->share);
  struct swathe_timing timing;
  const double begin = clock_s(CLOCK_THREAD_CPUTIME_ID);
  const enum swathe_status status = run(layer, bench->direction, &call);
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
  const double begin = now_s();
  do {
    const enum swathe_status status = time_once(bench, layer, &all[count++]);
    if (status) return status;
  } while (count < MOST_LAUNCHES && 1e6 * (now_s() - begin) < 0.75 * timing_us);
  qsort(all, (size_t)count, sizeof *all, ascending);
  *us = all[count / 2];
  return SWATHE_OK;
}

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

// What the default takes, for deadlines.
static enum swathe_status time_default(struct sw_trial_bench *bench, const char *default_config)
{
  struct swathe_layer *layer;
  enum swathe_status status = make_layer(bench, false, default_config, &layer);
  if (status) return status;
  for (int i = 0; i < 2 && !status; i++) status = time_once(bench, layer, &bench->default_us);
  swathe_layer_destroy(layer);
  return status;
}

// ---- Children ---------------------------------------------------------------------------------

static bool send_all(int end, const void *bytes, size_t size)
{
  for (size_t sent = 0; sent < size;) {
    const ssize_t n = send(end, (const char *)bytes + sent, size - sent, MSG_NOSIGNAL);
    if (n < 0 && errno != EINTR) return false;
    if (n > 0) sent += (size_t)n;
  }
  return true;
}

// For a child, which has no reason to stop waiting.
static bool receive_all(int end, void *bytes, size_t size)
{
  for (size_t got = 0; got < size;) {
    const ssize_t n = read(end, (char *)bytes + got, size - got);
    if (n == 0 || (n < 0 && errno != EINTR)) return false;
    if (n > 0) got += (size_t)n;
  }
  return true;
}

// Starts a child that runs `work` and ends; *end is the parent's end of their socket, -1 without.
static enum swathe_status start_child(struct sw_trial_bench *bench, const char *config,
                                      void (*work)(struct sw_trial_bench *, const char *, int end),
                                      pid_t *pid, int *end)
{
  int ends[2];
  *pid = -1;
  *end = -1;
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends))
    return sw_fail(SWATHE_DEVICE, "no socket for a trial: %s", strerror(errno));
  fflush(NULL);
  const pid_t parent = getpid();
  *pid = fork();
  if (*pid < 0) {
    close(ends[0]);
    close(ends[1]);
    return sw_fail(SWATHE_DEVICE, "no process for a trial: %s", strerror(errno));
  }
  if (*pid == 0) {
    // a candidate that crashes must end here, whatever handlers the host program has
    static const int fatal[] = { SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT };
    for (size_t i = 0; i < sizeof fatal / sizeof *fatal; i++) signal(fatal[i], SIG_DFL);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(0);
    signal(SIGINT, SIG_IGN);
    bench->context->db = NULL;  // the parent's connection; SQLite forbids using it here
    bench->context->apart.on = false;
    close(ends[0]);
    work(bench, config, ends[1]);
    _exit(0);
  }
  close(ends[1]);
  *end = ends[0];
  return SWATHE_OK;
}

static double deadline_s(const struct sw_trial_bench *bench)
{
  return (bench->trial_s > 0 ? bench->trial_s : default_trial_s) + 200 * bench->default_us * 1e-6;
}

// Reads what a child reports, until the deadline.  Without a whole report the child is ended and
// *verdict and the words tell how it came to that.
static enum swathe_status hear(const struct sw_trial_bench *bench, pid_t pid, int end, void *report,
                               size_t size, const volatile int *stop, enum sw_verdict *verdict,
                               char words[SW_TRIAL_WORDS])
{
  const double limit_s = deadline_s(bench), until = now_s() + limit_s;
  size_t got = 0;
  bool closed = false, stopped = false;
  int state = 0;

  while (got < size && !closed && !stopped && now_s() < until) {
    struct pollfd ready = { .fd = end, .events = POLLIN };
    stopped = stop && *stop;
    if (stopped || poll(&ready, 1, 50) <= 0) continue;
    const ssize_t n = read(end, (char *)report + got, size - got);
    if (n > 0) got += (size_t)n;
    closed = n == 0 || (n < 0 && errno != EINTR);
  }
  *verdict = SW_VERDICT_OK;
  if (got == size) return SWATHE_OK;
  if (!closed) kill(pid, SIGKILL);
  while (waitpid(pid, &state, 0) < 0 && errno == EINTR) continue;
  if (stopped) return sw_fail(SWATHE_INTERRUPTED, "stopped during a trial");
  *verdict = closed ? SW_VERDICT_CRASH : SW_VERDICT_TIMEOUT;
  if (closed && WIFSIGNALED(state))
    snprintf(words, SW_TRIAL_WORDS, "killed by signal %d (%s)", WTERMSIG(state),
             strsignal(WTERMSIG(state)));
  else if (closed) snprintf(words, SW_TRIAL_WORDS, "ended with status %d", WEXITSTATUS(state));
  else snprintf(words, SW_TRIAL_WORDS, "not finished after %.0f s", limit_s);
  return SWATHE_OK;
}

static void check_in_child(struct sw_trial_bench *bench, const char *config, int end)
{
  struct result result = { .verdict = SW_VERDICT_OK };
  check(bench, config, &result);
  send_all(end, &result, sizeof result);
}

enum swathe_status sw_trial_check(struct sw_trial_bench *bench, const char *config,
                                  const volatile int *stop, enum sw_verdict *verdict,
                                  char words[SW_TRIAL_WORDS])
{
  struct result result = { .verdict = SW_VERDICT_OK };
  pid_t pid;
  int end;
  enum swathe_status status = start_child(bench, config, check_in_child, &pid, &end);
  if (status) return status;
  words[0] = 0;
  status = hear(bench, pid, end, &result, sizeof result, stop, verdict, words);
  close(end);
  if (status || *verdict) return status;
  while (waitpid(pid, NULL, 0) < 0 && errno == EINTR) continue;
  *verdict = result.verdict;
  memcpy(words, result.words, SW_TRIAL_WORDS);
  return SWATHE_OK;
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
  enum swathe_status status = make_layer(bench, false, config, layer);
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
  const double wall = now_s(), processor = clock_s(CLOCK_PROCESS_CPUTIME_ID);
  if (!status) status = time_long(bench, layer, &lap->us);
  lap->wall_s = now_s() - wall;
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

  while (receive_all(end, &order, sizeof order)) {
    bool failed = false;
    bench->alone.loaded = order.loaded;
    for (int32_t i = 0; i < order.count; i++) {
      struct lap lap = { .verdict = SW_VERDICT_OK };
      if (!receive_all(end, config, sizeof config)) return;
      if (failed) continue;
      run_lap(bench, &stable, config, &lap);
      failed = lap.verdict != SW_VERDICT_OK;
      if (!send_all(end, &lap, sizeof lap)) return;
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
  while (waitpid(bench->racers, NULL, 0) < 0 && errno == EINTR) continue;
  forget_racers(bench);
}

static bool send_order(const struct sw_trial_bench *bench, const struct sw_trial_slot *slots,
                       int32_t count, bool loaded)
{
  struct order order;
  memset(&order, 0, sizeof order);
  order.count = count;
  order.loaded = loaded;
  bool sent = send_all(bench->racers_end, &order, sizeof order);
  for (int32_t i = 0; i < count && sent; i++) {
    char config[SW_CONFIG_TEXT] = { 0 };
    snprintf(config, sizeof config, "%s", slots[i].config);
    sent = send_all(bench->racers_end, config, sizeof config);
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
    status = start_child(bench, "", race_in_child, &bench->racers, &bench->racers_end);
  if (status) {
    bench->racers = 0;
    return status;
  }
  send_order(bench, slots, count, loaded);  // to a child that is gone: hear() tells
  for (int32_t i = 0; i < count; i++) {
    struct lap lap;
    status = hear(bench, bench->racers, bench->racers_end, &lap, sizeof lap, stop,
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

// ---- Prepare ----------------------------------------------------------------------------------

// One or two key heads are enough to find a kernel wrong; the kernel is the same.
static struct swathe_problem small_problem(const struct swathe_problem *problem)
{
  struct swathe_problem small = *problem;
  small.kv_heads = problem->kv_heads < 2 ? 1 : 2;
  small.q_heads = problem->q_heads / problem->kv_heads * small.kv_heads;
  small.ranks = 1;
  small.layout = SWATHE_SPANS;
  return small;
}

static void place_small(struct sw_trial_bench *bench)
{
  enum { GAP_ROWS = 3 };
  const int64_t left = bench->problem.window_left;
  const int64_t n = left <= MOST_CHECKED_WINDOW ? left + 161 : 517, cut = n / 2 + 1;

  bench->small_tokens = n;
  bench->small_rows = n + GAP_ROWS;
  bench->spans[0] = (struct swathe_span){ .position = 0, .tokens = cut, .row = 0, .token = 0 };
  bench->spans[1] = (struct swathe_span){
    .position = cut, .tokens = n - cut, .row = cut + GAP_ROWS, .token = cut
  };
  bench->rank_spans[0] = 0;
  bench->rank_spans[1] = 2;
}

static enum swathe_status default_forward(struct sw_trial_bench *bench, char *config)
{
  struct sw_aim aim;
  enum swathe_status status = sw_context_aim(bench->context, &bench->problem, NULL, &aim);
  const struct sw_gen_request request = { .problem = &bench->problem,
                                          .kernel = "forward",
                                          .isa = aim.isa };
  if (status) return status;
  pthread_mutex_lock(&bench->context->mutex);
  status = sw_gen_default(bench->context->gen, &request, config);
  pthread_mutex_unlock(&bench->context->mutex);
  return status;
}

// Runs the default forward kernel on the small problem, so that backward has outputs and lse to
// start from.  The share is timed without: its zeros give sums of the usual size in the usual time.
static enum swathe_status run_forward(struct sw_trial_bench *bench)
{
  char config[SW_CONFIG_TEXT];
  struct swathe_layer *layer;
  struct placed placed;
  enum swathe_status status = default_forward(bench, config);

  if (status) return status;
  bench->direction = SWATHE_FORWARD;
  status = make_layer(bench, true, config, &layer);
  bench->direction = SWATHE_BACKWARD;
  if (status) return status;
  status = place(bench, &bench->small, &placed);
  if (!status) status = swathe_layer_forward(layer, &placed.call, NULL);
  if (!status) status = fetch(bench, &placed);
  unplace(bench, &placed);
  swathe_layer_destroy(layer);
  return status;
}

// ---- Prepare where only children may use the device -------------------------------------------

// What a child that prepares something reports, followed by the small problem's out and lse.
struct prepared {
  enum swathe_status status;
  char words[SW_TRIAL_WORDS];
  double default_us;
};

static size_t out_bytes(const struct sw_trial_bench *bench)
{
  const struct swathe_problem *p = &bench->small.problem;
  return (size_t)(bench->small.rows * p->q_heads * p->head_dim_v) * sw_problem_elem_bytes(p);
}

static size_t lse_bytes(const struct sw_trial_bench *bench)
{
  return (size_t)(bench->small.rows * bench->small.problem.q_heads) * sizeof(float);
}

static void prepare_in_child(struct sw_trial_bench *bench, const char *default_config, int end)
{
  struct prepared prepared;
  memset(&prepared, 0, sizeof prepared);
  if (bench->direction == SWATHE_BACKWARD) prepared.status = run_forward(bench);
  if (!prepared.status) prepared.status = time_default(bench, default_config);
  prepared.default_us = bench->default_us;
  if (prepared.status) snprintf(prepared.words, sizeof prepared.words, "%s", swathe_error());
  send_all(end, &prepared, sizeof prepared);
  send_all(end, bench->small.out, out_bytes(bench));
  send_all(end, bench->small.lse, lse_bytes(bench));
}

static enum swathe_status hear_prepared(struct sw_trial_bench *bench, pid_t pid, int end)
{
  const size_t bytes = sizeof(struct prepared) + out_bytes(bench) + lse_bytes(bench);
  char *report = malloc(bytes), words[SW_TRIAL_WORDS] = "";
  enum sw_verdict verdict;
  struct prepared prepared;

  if (!report) return sw_fail(SWATHE_NO_MEMORY, "no %zu bytes to tune", bytes);
  enum swathe_status status = hear(bench, pid, end, report, bytes, NULL, &verdict, words);
  if (!status && verdict) status = sw_fail(SWATHE_DEVICE, "the default kernel: %s", words);
  if (!status) {
    while (waitpid(pid, NULL, 0) < 0 && errno == EINTR) continue;
    memcpy(&prepared, report, sizeof prepared);
    if (prepared.status) status = sw_fail(prepared.status, "%s", prepared.words);
    bench->default_us = prepared.default_us;
    memcpy(bench->small.out, report + sizeof prepared, out_bytes(bench));
    memcpy(bench->small.lse, report + sizeof prepared + out_bytes(bench), lse_bytes(bench));
  }
  free(report);
  return status;
}

// The kernels are made here, where the compiler is; they run in a child.
static enum swathe_status prepare_apart(struct sw_trial_bench *bench, const char *default_config)
{
  char config[SW_CONFIG_TEXT];
  struct swathe_compiled compiled;
  const char *isa = bench->context->apart.isa;
  pid_t pid;
  int end;
  enum swathe_status status = swathe_compile(bench->context, &bench->problem, bench->direction, isa,
                                             default_config, &compiled);

  if (!status && bench->direction == SWATHE_BACKWARD) {
    status = default_forward(bench, config);
    if (!status)
      status = swathe_compile(bench->context, &bench->problem, SWATHE_FORWARD, isa, config,
                              &compiled);
  }
  if (!status) status = start_child(bench, default_config, prepare_in_child, &pid, &end);
  if (status) return status;
  status = hear_prepared(bench, pid, end);
  close(end);
  return status;
}

static enum swathe_status prepare_inputs(struct sw_trial_bench *bench, const char *default_config)
{
  const struct swathe_problem small = small_problem(&bench->problem);
  place_small(bench);
  choose_timed(bench);
  enum swathe_status status = make_tensors(&bench->small, &small, bench->small_rows);
  // all heads, for the distance between rows; layouts may give up to the two chunks' remainders
  // more
  if (!status)
    status = make_tensors(&bench->share, bench->cuda ? &bench->timed : &bench->problem,
                          bench->timed.tokens_per_rank + 2);
  if (!status) status = prepare_answers(bench);
  if (!status && bench->cuda) status = prepare_apart(bench, default_config);
  if (!status && !bench->cuda && bench->direction == SWATHE_BACKWARD) status = run_forward(bench);
  if (!status && bench->direction == SWATHE_BACKWARD) start_backward(bench);
  return status || bench->cuda ? status : time_default(bench, default_config);
}

enum swathe_status sw_trial_prepare(struct swathe_context *context,
                                    const struct swathe_problem *problem,
                                    enum swathe_direction direction,
                                    const struct sw_trial_options *options,
                                    struct sw_trial_bench **bench_out)
{
  struct sw_trial_bench *bench = calloc(1, sizeof *bench);
  enum swathe_status status = SWATHE_OK;

  if (!bench) return sw_fail(SWATHE_NO_MEMORY, "no memory to tune");
  bench->context = context;
  bench->problem = *problem;
  bench->direction = direction;
  bench->cuda = problem->target == SWATHE_CUDA;
  bench->emulated = bench->cuda && strstr(context->apart.device, "emulated");
  bench->trial_s = options->trial_s;
  bench->memory_bytes = options->memory_bytes;
  bench->alone.transport = (struct swathe_transport){ .operations = &alone_operations,
                                                      .name = "alone",
                                                      .rank = problem->ranks / 2,
                                                      .ranks = problem->ranks };
  bench->alone.elsewhere = calloc(1, PIECE);
  if (!bench->alone.elsewhere) status = sw_fail(SWATHE_NO_MEMORY, "no memory to tune");
  if (!status) status = prepare_inputs(bench, options->default_config);
  if (status) {
    sw_trial_free(bench);
    return sw_within(status, "while preparing to tune %s", sw_context_kernel_name(direction));
  }
  *bench_out = bench;
  return SWATHE_OK;
}

void sw_trial_free(struct sw_trial_bench *bench)
{
  if (!bench) return;
  sw_trial_end_racers(bench);
  free_tensors(&bench->small);
  free_tensors(&bench->share);
  free_answers(&bench->answers);
  free(bench->alone.elsewhere);
  free(bench->alone.messages);
  free(bench);
}

// ---- What must be done at least ---------------------------------------------------------------

// Pairs of query and key that see each other, of the rank's tokens in one document.
static double visible_pairs(const struct sw_trial_bench *bench, double *keys)
{
  enum { SPANS = 4 };
  const struct swathe_problem *p = &bench->timed;
  const struct swathe_sharding share = { .layout = p->layout == SWATHE_SPANS ? SWATHE_CONTIGUOUS
                                                                             : p->layout,
                                         .ranks = p->ranks,
                                         .batch = 1,
                                         .tokens = p->tokens_per_rank * p->ranks };
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
