// trial_check.c: whether a candidate is right: it runs on a small problem, in a child, and is
// compared with the reference's answers.
#include "trial_bench.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// A key window up to this is checked at its far edge too; beyond it the reference would take too
// long.
enum { MOST_CHECKED_WINDOW = 4096 };

// ---- The small problem ------------------------------------------------------------------------

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

// ---- The reference's answers ------------------------------------------------------------------

// A row of the small problem in the sequence's order, as floats: the token lies behind the gap or
// before.
static float *sequence_of(const struct sw_trial_bench *bench, const void *data, int32_t heads,
                          int32_t dim)
{
  const int64_t row = (int64_t)heads * dim;
  float *floats = calloc((size_t)(bench->small_tokens * row), sizeof *floats);
  for (int s = 0; floats && s < 2; s++)
    for (int64_t i = 0; i < bench->spans[s].tokens * row; i++)
      floats[bench->spans[s].position * row + i] = (float)sw_trial_tensors_element(
          &bench->small.problem, data, bench->spans[s].row * row + i);
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
  const double pairs = (double)n * (double)(n < left ? n : left);
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
  struct sw_trial_answers *a = &bench->answers;

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

static enum swathe_status prepare_answers(struct sw_trial_bench *bench)
{
  const struct swathe_problem *p = &bench->small.problem;
  const size_t n = (size_t)bench->small_tokens, heads = (size_t)p->q_heads,
               kv = (size_t)p->kv_heads;
  const size_t qk = (size_t)p->head_dim_qk, v = (size_t)p->head_dim_v;
  struct sw_trial_answers *a = &bench->answers;
  float *const floats[] = {
    sequence_of(bench, bench->small.q, p->q_heads, p->head_dim_qk),
    sequence_of(bench, bench->small.k, p->kv_heads, p->head_dim_qk),
    sequence_of(bench, bench->small.v, p->kv_heads, p->head_dim_v),
    sequence_of(bench, bench->small.dout, p->q_heads, p->head_dim_v),
  };
  *a = (struct sw_trial_answers){
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

enum swathe_status sw_trial_check_prepare(struct sw_trial_bench *bench)
{
  const struct swathe_problem small = small_problem(&bench->problem);
  place_small(bench);
  const enum swathe_status status = sw_trial_tensors_make(&bench->small, &small, bench->small_rows);
  return status ? status : prepare_answers(bench);
}

void sw_trial_check_free(struct sw_trial_bench *bench)
{
  struct sw_trial_answers *a = &bench->answers;
  void *const all[] = { a->query, a->key, a->out, a->lse, a->delta, a->dq, a->dk, a->dv, a->dsink };
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
  sw_trial_tensors_free(&bench->small);
}

void sw_trial_check_start_backward(struct sw_trial_bench *bench)
{
  const struct swathe_problem *p = &bench->small.problem;
  for (int64_t token = 0; token < bench->small_tokens; token++)
    for (int32_t h = 0; bench->answers.query[token] && h < p->q_heads; h++)
      bench->small.lse[small_row(bench, token) * p->q_heads + h] =
          (float)bench->answers.lse[token * p->q_heads + h];
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
    const double got = sw_trial_tensors_element(problem, data, row * count + i), want = expected[i];
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
  const struct sw_trial_tensors *t = &bench->small;
  const struct sw_trial_answers *a = &bench->answers;
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

static void poison(const struct swathe_problem *problem, void *data, int64_t elements)
{
  memset(data, 0xff, (size_t)elements * sw_problem_elem_bytes(problem));
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
  if (sw_trial_layer(bench, false, config, &layer)) return true;  // the check itself will say why
  const bool fits = fits_memory(bench, layer, result);
  swathe_layer_destroy(layer);
  return fits;
}

static void check(struct sw_trial_bench *bench, const char *config, struct result *result)
{
  const struct swathe_problem *p = &bench->small.problem;
  struct sw_trial_tensors *t = &bench->small;
  struct sw_trial_placed placed;
  struct swathe_layer *layer;

  if (!bench->cuda && !share_fits_memory(bench, config, result)) return;
  enum swathe_status status = sw_trial_layer(bench, true, config, &layer);
  if (!status) {
    if (bench->direction == SWATHE_FORWARD) {
      poison(p, t->out, t->rows * p->q_heads * p->head_dim_v);
      memset(t->lse, 0xff, (size_t)(t->rows * p->q_heads) * sizeof(float));
    } else {
      poison(p, t->dq, t->rows * p->q_heads * p->head_dim_qk);
      poison(p, t->dk, t->rows * p->kv_heads * p->head_dim_qk);
      poison(p, t->dv, t->rows * p->kv_heads * p->head_dim_v);
    }
    status = sw_trial_tensors_place(bench->context, t, &placed);
    if (!status) status = sw_trial_run(layer, bench->direction, &placed.call);
    if (!status) status = sw_trial_tensors_fetch(bench->context, &placed);
    sw_trial_tensors_unplace(bench->context, &placed);
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

static void check_in_child(struct sw_trial_bench *bench, const char *config, int end)
{
  struct result result = { .verdict = SW_VERDICT_OK };
  check(bench, config, &result);
  sw_trial_child_send(end, &result, sizeof result);
}

enum swathe_status sw_trial_check(struct sw_trial_bench *bench, const char *config,
                                  const volatile int *stop, enum sw_verdict *verdict,
                                  char words[SW_TRIAL_WORDS])
{
  struct result result = { .verdict = SW_VERDICT_OK };
  pid_t pid;
  int end;
  enum swathe_status status = sw_trial_child_start(bench, config, check_in_child, &pid, &end);
  if (status) return status;
  words[0] = 0;
  status = sw_trial_child_hear(bench, pid, end, &result, sizeof result, stop, verdict, words);
  close(end);
  if (status || *verdict) return status;
  sw_trial_child_reap(pid);
  *verdict = result.verdict;
  memcpy(words, result.words, SW_TRIAL_WORDS);
  return SWATHE_OK;
}
