// trial.c: check a candidate, then time it in turn with the incumbent, in a child process.  The child
// shares the parent's inputs by fork, reports through a pipe, and dies with its parent.
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
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

// Useful floating-point operations of one timed launch, at most about this many (one item at least per
// thread): long enough to time, short enough to repeat.
static const double launch_flops = 4e9;

// A trial is killed after this long (if the caller says nothing), plus many times what the default takes.
static const double default_trial_s = 20;

// A key window up to this is checked at its far edge too; beyond it the reference would take too long.
enum { MOST_CHECKED_WINDOW = 4096 };

// Tensors of one problem, rows packed [row][head][dim].
struct tensors {
  struct swathe_problem problem;
  int64_t rows;
  void *q, *k, *v, *out, *dout, *dq, *dk, *dv;  // elem
  float *lse, *sink, *dsink;
};

// The reference's answers for some rows of the small problem.
struct answers {
  bool *query, *key;                 // [tokens]: which are checked
  bool dsink_known;
  double *out, *lse, *delta, *dq, *dk, *dv, *dsink;
};

struct sw_trial_bench {
  struct swathe_context *context;
  struct swathe_problem problem;
  enum swathe_direction direction;
  struct tensors small, share;
  struct swathe_span spans[2];       // the small problem lies in two pieces with a gap between
  int64_t rank_spans[2], small_rows, small_tokens;
  struct answers answers;
  struct swathe_transport alone;
  int64_t share_tokens;              // query tokens times key heads of the whole share
  double default_us, trial_s;
};

// ---- A transport that moves nothing --------------------------------------------------------------

static enum swathe_status alone_post(struct swathe_transport *transport,
                                     const struct sw_transport_message *messages, int32_t count)
{
  (void)transport, (void)messages, (void)count;
  return SWATHE_OK;
}

static enum swathe_status alone_test(struct swathe_transport *transport, bool *done)
{
  (void)transport;
  *done = true;
  return SWATHE_OK;
}

static enum swathe_status alone_wait(struct swathe_transport *transport)
{
  (void)transport;
  return SWATHE_OK;
}

static enum swathe_status alone_gather(struct swathe_transport *transport, const void *mine, size_t bytes,
                                       void *all)
{
  for (int32_t r = 0; r < transport->ranks; r++) memcpy((char *)all + (size_t)r * bytes, mine, bytes);
  return SWATHE_OK;
}

// One rank of a group whose others are not there: kernels are timed on its share, with whatever the halo's
// buffer holds.
static const struct sw_transport_operations alone_operations = {
  .post = alone_post, .test = alone_test, .wait = alone_wait, .gather = alone_gather
};

// ---- Tensors -------------------------------------------------------------------------------------

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
  return problem->dtype == SWATHE_BF16 ? (double)sw_problem_from_bf16(((const uint16_t *)data)[index])
                                       : (double)((const float *)data)[index];
}

static void *make(const struct swathe_problem *problem, int64_t elements, uint64_t seed)
{
  const size_t size = sw_problem_elem_bytes(problem);
  void *data = calloc((size_t)(elements ? elements : 1), size);
  if (!data || !seed) return data;
  for (int64_t i = 0; i < elements; i++) {
    const float value = next_random(&seed);
    if (problem->dtype == SWATHE_BF16) ((uint16_t *)data)[i] = sw_problem_to_bf16(value);
    else ((float *)data)[i] = value;
  }
  return data;
}

static void free_tensors(struct tensors *t)
{
  void *const all[] = { t->q, t->k, t->v, t->out, t->dout, t->dq, t->dk, t->dv, t->lse, t->sink, t->dsink };
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

static enum swathe_status make_tensors(struct tensors *t, const struct swathe_problem *problem, int64_t rows)
{
  const int64_t q = rows * problem->q_heads * problem->head_dim_qk;
  const int64_t o = rows * problem->q_heads * problem->head_dim_v;
  const int64_t k = rows * problem->kv_heads * problem->head_dim_qk;
  const int64_t v = rows * problem->kv_heads * problem->head_dim_v;
  struct swathe_problem floats = *problem;

  floats.dtype = SWATHE_F32;
  *t = (struct tensors){
    .problem = *problem, .rows = rows,
    .q = make(problem, q, 11), .k = make(problem, k, 12), .v = make(problem, v, 13),
    .dout = make(problem, o, 14), .sink = make(&floats, problem->q_heads, 15),
    .out = make(problem, o, 0), .dq = make(problem, q, 0), .dk = make(problem, k, 0),
    .dv = make(problem, v, 0), .lse = make(&floats, rows * problem->q_heads, 0),
    .dsink = make(&floats, problem->q_heads, 0),
  };
  if (t->q && t->k && t->v && t->dout && t->sink && t->out && t->dq && t->dk && t->dv && t->lse && t->dsink)
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

// ---- The small problem and the reference's answers -----------------------------------------------

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// A row of the small problem in the sequence's order, as floats: the token lies behind the gap or before.
static float *sequence_of(const struct sw_trial_bench *bench, const void *data, int32_t heads, int32_t dim)
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

// Which rows are checked: all of a cheap problem; else both ends, both sides of the window's far edge and
// of the gap, and the keys that few queries see.
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
      swathe_reference_dq(p, sequence, a->lse, a->delta, 0, t, a->dq + t * p->q_heads * p->head_dim_qk,
                          a->dsink);
    if (a->key[t])
      swathe_reference_dkv(p, sequence, a->lse, a->delta, 0, t, a->dk + t * p->kv_heads * p->head_dim_qk,
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
  const size_t n = (size_t)bench->small_tokens, heads = (size_t)p->q_heads, kv = (size_t)p->kv_heads;
  const size_t qk = (size_t)p->head_dim_qk, v = (size_t)p->head_dim_v;
  struct answers *a = &bench->answers;
  float *const floats[] = {
    sequence_of(bench, bench->small.q, p->q_heads, p->head_dim_qk),
    sequence_of(bench, bench->small.k, p->kv_heads, p->head_dim_qk),
    sequence_of(bench, bench->small.v, p->kv_heads, p->head_dim_v),
    sequence_of(bench, bench->small.dout, p->q_heads, p->head_dim_v),
  };
  *a = (struct answers){
    .query = calloc(n, sizeof(bool)), .key = calloc(n, sizeof(bool)),
    .out = calloc(n * heads * v, sizeof(double)), .lse = calloc(n * heads, sizeof(double)),
    .delta = calloc(n * heads, sizeof(double)), .dq = calloc(n * heads * qk, sizeof(double)),
    .dk = calloc(n * kv * qk, sizeof(double)), .dv = calloc(n * kv * v, sizeof(double)),
    .dsink = calloc(heads, sizeof(double)),
  };
  const bool memory = a->query && a->key && a->out && a->lse && a->delta && a->dq && a->dk && a->dv &&
                      a->dsink && floats[0] && floats[1] && floats[2] && floats[3];
  if (memory) {
    const struct swathe_sequence sequence = {
      .batch = 1, .tokens = bench->small_tokens, .q = floats[0], .k = floats[1], .v = floats[2],
      .dout = floats[3], .sink = p->sinks ? bench->small.sink : NULL
    };
    choose_rows(bench);
    answer(bench, &sequence);
  }
  for (int i = 0; i < 4; i++) free(floats[i]);
  return memory ? SWATHE_OK : sw_fail(SWATHE_NO_MEMORY, "no memory for the reference's answers");
}

// ---- Check ---------------------------------------------------------------------------------------

struct limits {
  double out, lse, gradient;
};

static struct limits limits_of(enum swathe_dtype dtype)
{
  return dtype == SWATHE_BF16 ? (struct limits){ 2e-2, 1e-3, 2e-2 } : (struct limits){ 2e-5, 2e-5, 1e-4 };
}

// Compares `count` values at `row` of a packed tensor; false with words at the first that is too far off.
static bool compare(const struct swathe_problem *problem, const char *name, const void *data, int64_t row,
                    int64_t count, const double *expected, double limit, int64_t token, char words[256])
{
  for (int64_t i = 0; i < count; i++) {
    const double got = element(problem, data, row * count + i), want = expected[i];
    if (fabs(got - want) <= limit * fmax(1, fabs(want))) continue;
    snprintf(words, 256, "%s of token %" PRId64 ", element %" PRId64 ": %.7g, the reference has %.7g", name,
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
            compare(&floats, "lse", t->lse, row, p->q_heads, a->lse + token * p->q_heads, limits.lse, token,
                    words));
  if (a->query[token] &&
      !compare(p, "dq", t->dq, row, q, a->dq + token * q, limits.gradient, token, words))
    return false;
  return !a->key[token] ||
         (compare(p, "dk", t->dk, row, k, a->dk + token * k, limits.gradient, token, words) &&
          compare(p, "dv", t->dv, row, v, a->dv + token * v, limits.gradient, token, words));
}

// Forward's results for backward to start from: the reference's where known, else the default kernel's,
// which the forward trials check.
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
  const char *configs[2] = { config, config };
  const struct swathe_problem *p = small ? &bench->small.problem : &bench->problem;
  const struct swathe_sharding two_pieces = {
    .layout = SWATHE_SPANS, .ranks = 1, .batch = 1, .tokens = bench->small_tokens, .spans = bench->spans,
    .rank_spans = bench->rank_spans, .rank_rows = &bench->small_rows
  };
  const struct swathe_sharding share = {
    .layout = p->layout == SWATHE_SPANS ? SWATHE_CONTIGUOUS : p->layout, .ranks = p->ranks, .batch = 1,
    .tokens = p->tokens_per_rank * p->ranks
  };
  enum swathe_status status = sw_layer_create(bench->context, p, small ? NULL : &bench->alone, configs,
                                              1u << bench->direction, layer);
  if (status) return status;
  status = swathe_layer_shard(*layer, small ? &two_pieces : &share);
  if (status) swathe_layer_destroy(*layer);
  return status;
}

static void check(struct sw_trial_bench *bench, const char *config, struct sw_trial_result *result)
{
  const struct swathe_problem *p = &bench->small.problem;
  struct tensors *t = &bench->small;
  const struct swathe_tensors call = call_of(t);
  struct swathe_layer *layer;

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
    status = run(layer, bench->direction, &call);
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

// ---- Time ----------------------------------------------------------------------------------------

// Limits a launch to about launch_flops, in whole rounds of the threads.
static int64_t items_to_time(const struct sw_trial_bench *bench)
{
  const struct swathe_problem *p = &bench->problem;
  const int64_t reach = smaller(p->window_left, p->tokens_per_rank) + 1;
  const int64_t unit = smaller(p->tokens_per_rank, 512);
  const double flops = 2.0 * (double)reach * (double)unit * (p->head_dim_qk + p->head_dim_v) * p->q_heads /
                       p->kv_heads * (bench->direction == SWATHE_BACKWARD ? 2.5 : 1);
  const int64_t threads = bench->context->threads;
  const int64_t rounds = (int64_t)ceil(launch_flops / flops / (double)threads);
  return threads * (rounds > 1 ? rounds : 1);
}

// One launch; its time scaled to the whole share.
static enum swathe_status time_once(struct sw_trial_bench *bench, struct swathe_layer *layer,
                                    const struct swathe_tensors *call, double *us)
{
  struct swathe_timing timing;
  const enum swathe_status status = run(layer, bench->direction, call);
  if (status) return status;
  swathe_layer_timing(layer, &timing);
  *us = timing.total_us * (double)bench->share_tokens / (double)sw_layer_computed(layer);
  return SWATHE_OK;
}

// Pairs in turn, the order alternating; ends early when the candidate is clearly slower.
static enum swathe_status time_pairs(struct sw_trial_bench *bench, struct swathe_layer *layers[2],
                                     int32_t most_runs, struct sw_trial_result *result)
{
  static const double clearly_slower = 1.04;
  const struct swathe_tensors call = call_of(&bench->share);
  double warm;
  enum swathe_status status = SWATHE_OK;

  for (int i = 0; i < 2 && !status; i++) {
    sw_layer_limit(layers[i], items_to_time(bench));
    status = time_once(bench, layers[i], &call, &warm);
  }
  while (!status && result->runs < most_runs) {
    const int n = result->runs;
    for (int i = 0; i < 2 && !status; i++) {
      const bool candidate = (n + i) % 2 == 0;
      status = time_once(bench, layers[!candidate], &call,
                         candidate ? &result->candidate_us[n] : &result->incumbent_us[n]);
    }
    if (!status) result->runs++;
    if (result->runs >= 3 && sw_trial_ratio(result) > clearly_slower) break;
  }
  return status;
}

static void time_candidate(struct sw_trial_bench *bench, const char *candidate, const char *incumbent,
                           int32_t most_runs, struct sw_trial_result *result)
{
  struct swathe_layer *layers[2] = { NULL, NULL };
  enum swathe_status status = make_layer(bench, false, candidate, &layers[0]);

  if (!status) status = make_layer(bench, false, incumbent, &layers[1]);
  if (!status) status = time_pairs(bench, layers, most_runs, result);
  if (status) {
    result->verdict = SW_VERDICT_WRONG;
    snprintf(result->words, sizeof result->words, "%s", swathe_error());
  }
  for (int i = 0; i < 2; i++)
    if (layers[i]) swathe_layer_destroy(layers[i]);
}

// ---- The child -----------------------------------------------------------------------------------

static void child(struct sw_trial_bench *bench, const char *candidate, const char *incumbent,
                  int32_t most_runs, int pipe_end)
{
  struct sw_trial_result result = { .verdict = SW_VERDICT_OK };

  // a candidate that crashes must end here, whatever handlers the host program has
  static const int fatal[] = { SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT };
  for (size_t i = 0; i < sizeof fatal / sizeof *fatal; i++) signal(fatal[i], SIG_DFL);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  signal(SIGINT, SIG_IGN);
  bench->context->db = NULL;  // the parent's connection; SQLite forbids using it here
  check(bench, candidate, &result);
  if (!result.verdict) time_candidate(bench, candidate, incumbent, most_runs, &result);
  const char *bytes = (const char *)&result;
  for (size_t sent = 0; sent < sizeof result;) {
    const ssize_t n = write(pipe_end, bytes + sent, sizeof result - sent);
    if (n < 0 && errno != EINTR) break;
    if (n > 0) sent += (size_t)n;
  }
  _exit(0);
}

static double now_s(void)
{
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

// Reads the child's report; fills the verdict itself when there is none.
static enum swathe_status collect(pid_t pid, int pipe_end, double deadline_s, const volatile int *stop,
                                  struct sw_trial_result *result)
{
  const double end = now_s() + deadline_s;
  size_t got = 0;
  bool closed = false, stopped = false;

  while (got < sizeof *result && !closed && !stopped && now_s() < end) {
    struct pollfd ready = { .fd = pipe_end, .events = POLLIN };
    stopped = stop && *stop;
    if (stopped || poll(&ready, 1, 50) <= 0) continue;
    const ssize_t n = read(pipe_end, (char *)result + got, sizeof *result - got);
    if (n > 0) got += (size_t)n;
    closed = n == 0 || (n < 0 && errno != EINTR);
  }
  int state = 0;
  const bool complete = got == sizeof *result;
  if (!complete && !closed) kill(pid, SIGKILL);
  while (waitpid(pid, &state, 0) < 0 && errno == EINTR) continue;
  if (complete) return SWATHE_OK;
  memset(result, 0, sizeof *result);
  if (stopped) return sw_fail(SWATHE_INTERRUPTED, "stopped during a trial");
  result->verdict = closed ? SW_VERDICT_CRASH : SW_VERDICT_TIMEOUT;
  if (closed && WIFSIGNALED(state))
    snprintf(result->words, sizeof result->words, "killed by signal %d (%s)", WTERMSIG(state),
             strsignal(WTERMSIG(state)));
  else if (closed)
    snprintf(result->words, sizeof result->words, "ended with status %d", WEXITSTATUS(state));
  else
    snprintf(result->words, sizeof result->words, "not finished after %.0f s", deadline_s);
  return SWATHE_OK;
}

enum swathe_status sw_trial_run(struct sw_trial_bench *bench, const char *candidate, const char *incumbent,
                                int32_t most_runs, const volatile int *stop,
                                struct sw_trial_result *result)
{
  int ends[2];
  const double least_s = bench->trial_s > 0 ? bench->trial_s : default_trial_s;
  const double deadline_s = least_s + 200 * bench->default_us * 1e-6;

  memset(result, 0, sizeof *result);
  if (most_runs > SW_TRIAL_RUNS) most_runs = SW_TRIAL_RUNS;
  if (pipe2(ends, O_CLOEXEC))
    return sw_fail(SWATHE_DEVICE, "no pipe for a trial: %s", strerror(errno));
  fflush(NULL);
  const pid_t pid = fork();
  if (pid < 0) {
    close(ends[0]);
    close(ends[1]);
    return sw_fail(SWATHE_DEVICE, "no process for a trial: %s", strerror(errno));
  }
  if (pid == 0) {
    close(ends[0]);
    child(bench, candidate, incumbent, most_runs, ends[1]);
  }
  close(ends[1]);
  const enum swathe_status status = collect(pid, ends[0], deadline_s, stop, result);
  close(ends[0]);
  return status;
}

// ---- Prepare -------------------------------------------------------------------------------------

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
  bench->spans[1] =
      (struct swathe_span){ .position = cut, .tokens = n - cut, .row = cut + GAP_ROWS, .token = cut };
  bench->rank_spans[0] = 0;
  bench->rank_spans[1] = 2;
}

// Runs the default forward kernel so that backward has outputs and lse to start from.
static enum swathe_status run_forward(struct sw_trial_bench *bench, bool small)
{
  struct sw_choice choice;
  struct swathe_layer *layer;
  const struct swathe_tensors call = call_of(small ? &bench->small : &bench->share);
  const struct sw_gen_request request = {
    .problem = &bench->problem, .kernel = "forward", .isa = bench->context->isa
  };
  pthread_mutex_lock(&bench->context->mutex);
  enum swathe_status status = sw_gen_default(bench->context->gen, &request, choice.config);
  pthread_mutex_unlock(&bench->context->mutex);
  if (status) return status;
  bench->direction = SWATHE_FORWARD;
  status = make_layer(bench, small, choice.config, &layer);
  bench->direction = SWATHE_BACKWARD;
  if (status) return status;
  status = swathe_layer_forward(layer, &call, NULL);
  swathe_layer_destroy(layer);
  return status;
}

enum swathe_status sw_trial_prepare(struct swathe_context *context, const struct swathe_problem *problem,
                                    enum swathe_direction direction, const char *default_config,
                                    double trial_s, struct sw_trial_bench **bench_out)
{
  struct sw_trial_bench *bench = calloc(1, sizeof *bench);
  const struct swathe_problem small = small_problem(problem);
  struct swathe_layer *layer;
  enum swathe_status status;

  if (!bench) return sw_fail(SWATHE_NO_MEMORY, "no memory to tune");
  bench->context = context;
  bench->problem = *problem;
  bench->direction = direction;
  bench->trial_s = trial_s;
  bench->alone = (struct swathe_transport){
    .operations = &alone_operations, .name = "alone", .rank = problem->ranks / 2, .ranks = problem->ranks
  };
  bench->share_tokens = problem->tokens_per_rank * problem->kv_heads;
  place_small(bench);
  status = make_tensors(&bench->small, &small, bench->small_rows);
  // uneven layouts round a share up by at most the two chunks' remainders
  if (!status) status = make_tensors(&bench->share, problem, problem->tokens_per_rank + 2);
  if (!status) status = prepare_answers(bench);
  if (!status && direction == SWATHE_BACKWARD) {
    status = run_forward(bench, true);
    if (!status) status = run_forward(bench, false);
    if (!status) start_backward(bench);
  }
  if (!status) status = make_layer(bench, false, default_config, &layer);
  if (!status) {
    const struct swathe_tensors call = call_of(&bench->share);
    sw_layer_limit(layer, items_to_time(bench));
    for (int i = 0; i < 2 && !status; i++) status = time_once(bench, layer, &call, &bench->default_us);
    swathe_layer_destroy(layer);
  }
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
  free_tensors(&bench->small);
  free_tensors(&bench->share);
  free_answers(&bench->answers);
  free(bench);
}

// ---- Statistics ----------------------------------------------------------------------------------

static int ascending(const void *a, const void *b)
{
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

double sw_trial_median(double *values, int32_t count)
{
  if (count == 0) return 0;
  qsort(values, (size_t)count, sizeof *values, ascending);
  return count % 2 ? values[count / 2] : (values[count / 2 - 1] + values[count / 2]) / 2;
}

double sw_trial_ratio(const struct sw_trial_result *result)
{
  double ratios[SW_TRIAL_RUNS];
  for (int32_t i = 0; i < result->runs; i++) ratios[i] = result->candidate_us[i] / result->incumbent_us[i];
  return sw_trial_median(ratios, result->runs);
}
