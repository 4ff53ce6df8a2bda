// test_reference.c: the reference itself, since everything else is checked by it.  Three judges
// that share nothing with it: a dense masked softmax over whole matrices, finite differences of the
// loss by every input, and key counts that can be told by hand.
#include "sequence.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

enum { MOST_DOCUMENTS = 6 };

// A problem and its documents.  Of the windows, -1 says unlimited.
struct layer_case {
  const char *name;
  int q_heads, kv_heads, dim_qk, dim_v;
  int64_t left, right;
  int64_t batch, tokens;
  int64_t documents, lengths[MOST_DOCUMENTS];
  int64_t gap;               // padding tokens after each document; the row's rest is padding too
  double softcap, scale, gain;
  int sinks;                 // number of values in `sink`, which go to the heads in turn
  float sink[4];
};

static const struct layer_case cases[] = {
  { "one token", 1, 1, 4, 4, 0, 0, 1, 1, .gain = 1 },
  { "only itself", 2, 1, 4, 3, 0, 0, 1, 6, .gain = 1 },
  { "one before", 2, 1, 4, 3, 1, 0, 1, 6, .gain = 1 },
  { "two before, batch of two", 2, 2, 5, 3, 2, 0, 2, 7, .gain = 1 },
  { "full causal", 2, 1, 4, 4, -1, 0, 1, 9, .gain = 1 },
  { "both sides unlimited", 2, 1, 4, 4, -1, -1, 1, 8, .gain = 1 },
  { "left bound, all the future", 1, 1, 4, 4, 2, -1, 1, 9, .gain = 1 },
  { "four before, none after", 1, 1, 4, 4, 4, 0, 1, 19, .gain = 1 },
  { "none before, two after", 1, 1, 4, 4, 0, 2, 1, 19, .gain = 1 },
  { "three before, two after", 2, 2, 4, 4, 3, 2, 1, 19, .gain = 1 },
  { "five queries to one key head", 5, 1, 3, 2, 6, 0, 1, 12, .gain = 1 },
  { "six to two", 6, 2, 3, 2, 3, 1, 2, 9, .gain = 1 },
  { "seventeen to one, twice", 34, 2, 3, 3, 3, 0, 1, 6, .gain = 1 },
  { "dims of one", 1, 1, 1, 1, 3, 0, 1, 9, .gain = 1 },
  { "wide keys, narrow values", 2, 1, 24, 9, 4, 0, 1, 8, .gain = 1 },
  { "narrow keys, wide values", 2, 1, 3, 17, 4, 0, 1, 8, .gain = 1 },
  { "window of three key loads", 2, 1, 4, 4, 40, 0, 1, 60, .gain = 2 },
  { "scale of its own", 2, 1, 4, 4, 3, 0, 1, 9, .scale = 0.3, .gain = 1 },
  { "negative scale", 1, 1, 4, 4, 3, 0, 1, 9, .scale = -0.7, .gain = 1 },
  { "softcap", 2, 1, 4, 4, 7, 0, 1, 20, .softcap = 5, .gain = 12 },
  { "softcap with a sink", 2, 1, 4, 4, 3, 2, 1, 9, .softcap = 2, .gain = 4,
    .sinks = 1, .sink = { 1 } },
  { "sinks around the scores", 4, 2, 4, 4, 3, 0, 1, 9, .gain = 1,
    .sinks = 4, .sink = { -2, 0, 3, 8 } },
  { "sinks far away", 4, 1, 4, 4, 3, 0, 1, 9, .gain = 1,
    .sinks = 4, .sink = { -1e4f, 0, 30, 100 } },
  { "documents shorter than the window", 2, 1, 4, 4, 3, 0, 1, 8, 4, { 0, 1, 5, 2 }, .gain = 1 },
  { "the same, two-sided, padding behind, sinks", 2, 1, 4, 4, 3, 2, 2, 11, 4, { 0, 1, 5, 2 },
    .gain = 1, .sinks = 2, .sink = { 0, 1 } },
  { "padding between documents", 2, 1, 4, 4, 2, 0, 1, 16, 4, { 3, 1, 0, 5 }, 1, .gain = 1 },
  { "padding between, unlimited, sinks", 2, 2, 4, 4, -1, -1, 2, 14, 3, { 4, 1, 4 }, 1, .gain = 1,
    .sinks = 1, .sink = { 0.5f } },
  { "no document at all", 1, 1, 4, 4, 2, 0, 1, 3, 1, { 0 }, .gain = 1,
    .sinks = 1, .sink = { 0.5f } },
};

// Larger than finite differences can take.
static const struct layer_case large_cases[] = {
  { "three documents at odd places", 1, 1, 32, 32, -1, 0, 1, 256, 3, { 76, 34, 146 }, .gain = 1 },
  { "the same, windowed", 1, 1, 32, 32, 9, 0, 1, 256, 3, { 76, 34, 146 }, .gain = 1 },
  { "64 on each side", 2, 1, 16, 16, 64, 64, 1, 300, .gain = 1 },
  { "gain of 12 under a cap of 5", 2, 1, 64, 64, 7, 0, 1, 40, .softcap = 5, .gain = 12 },
  { "multi-head latent dims", 2, 2, 192, 128, 20, 0, 1, 40, .gain = 1 },
  { "largest dims", 1, 1, 256, 256, 20, 0, 1, 40, .gain = 1 },
  { "scores in the hundreds", 2, 1, 64, 64, 15, 0, 1, 64, .gain = 100,
    .sinks = 2, .sink = { 0, 100 } },
};

static int64_t bound(int64_t window)
{
  return window < 0 ? SWATHE_UNLIMITED : window;
}

struct fixture {
  struct swathe_problem problem;
  struct swathe_sharding sharding;
  int64_t starts[MOST_DOCUMENTS + 1], padded[MOST_DOCUMENTS + 1];
  struct sequence *sequence;
};

static void set_up(const struct layer_case *row, struct fixture *fixture)
{
  struct swathe_problem *problem = &fixture->problem;

  swathe_problem_init(problem);
  problem->q_heads = row->q_heads;
  problem->kv_heads = row->kv_heads;
  problem->head_dim_qk = row->dim_qk;
  problem->head_dim_v = row->dim_v;
  problem->window_left = bound(row->left);
  problem->window_right = bound(row->right);
  problem->softcap = row->softcap;
  problem->scale = row->scale;
  problem->sinks = row->sinks > 0;
  problem->dtype = SWATHE_BF16;  // inputs of 8 significant bits: steps on them are exact
  assert_int_equal(swathe_problem_check(problem), SWATHE_OK);

  fixture->starts[0] = fixture->padded[0] = 0;
  for (int64_t d = 0; d < row->documents; d++) {
    fixture->starts[d + 1] = fixture->starts[d] + row->lengths[d];
    fixture->padded[d + 1] = fixture->padded[d] + row->lengths[d] + row->gap;
  }
  fixture->sharding = (struct swathe_sharding){
    .layout = SWATHE_CONTIGUOUS,
    .ranks = 1,
    .batch = (int32_t)row->batch,
    .tokens = row->tokens,
    .documents = row->documents,
    .document_starts = row->documents ? fixture->starts : NULL,
    .document_starts_padded = row->gap ? fixture->padded : NULL,
  };
  fixture->sequence = sequence_make(problem, &fixture->sharding, 7, row->gain);
  for (int head = 0; row->sinks && head < row->q_heads; head++)
    fixture->sequence->sink[head] = row->sink[head % row->sinks];
}

// ---- First judge: whole matrices ---------------------------------------------------------------

// Every document of the packed row by its number, -1 for padding, told by walking the row.
static void number_documents(const struct layer_case *row, int64_t *document)
{
  int64_t token = 0;
  for (int64_t i = 0; i < row->tokens; i++) document[i] = row->documents ? -1 : 0;
  for (int64_t d = 0; d < row->documents; d++) {
    for (int64_t i = 0; i < row->lengths[d]; i++) document[token++] = d;
    token += row->gap;
  }
}

static bool sees(const struct layer_case *row, const int64_t *document, int64_t i, int64_t j)
{
  return document[i] >= 0 && document[i] == document[j] && (row->left < 0 || i - j <= row->left) &&
         (row->right < 0 || j - i <= row->right);
}

// Dense results, the arrays of struct sequence in double.
struct dense {
  double *values[SEQUENCE_ARRAYS], *dsink;
  double *weights, *bends;  // [tokens][tokens] of one head: softmax, and the cap's derivative
};

static double *numbers(size_t count)
{
  double *values = test_calloc(count + 1, sizeof *values);
  assert_non_null(values);
  return values;
}

// Softmax matrix of one head of one batch row; lse [tokens] at a stride of q_heads.
static void weigh(const struct layer_case *row, const int64_t *document, const struct sequence *s,
                  int64_t batch, int head, struct dense *dense)
{
  const int kv_head = head / (row->q_heads / row->kv_heads);
  const double scale = row->scale != 0 ? row->scale : 1 / sqrt(row->dim_qk);
  const int64_t n = row->tokens;

  for (int64_t i = 0; i < n; i++) {
    double *weight = dense->weights + i * n, total = 0, top = -INFINITY;
    double *lse = dense->values[SEQUENCE_LSE] + (batch * n + i) * row->q_heads + head;
    const float *q = s->view.q + ((batch * n + i) * row->q_heads + head) * row->dim_qk;

    if (row->sinks) top = (double)s->sink[head];
    for (int64_t j = 0; j < n; j++) {
      const float *k = s->view.k + ((batch * n + j) * row->kv_heads + kv_head) * row->dim_qk;
      double x = 0;
      weight[j] = -INFINITY;
      dense->bends[i * n + j] = 1;
      if (!sees(row, document, i, j)) continue;
      for (int d = 0; d < row->dim_qk; d++) x += (double)q[d] * (double)k[d];
      x *= scale;
      if (row->softcap > 0) {
        dense->bends[i * n + j] = 1 / pow(cosh(x / row->softcap), 2);
        x = row->softcap * tanh(x / row->softcap);
      }
      weight[j] = x;
      top = fmax(top, x);
    }
    for (int64_t j = 0; j < n; j++) total += exp(weight[j] - top);
    if (row->sinks) total += exp((double)s->sink[head] - top);
    for (int64_t j = 0; j < n; j++) weight[j] = document[i] < 0 ? 0 : exp(weight[j] - top) / total;
    *lse = document[i] < 0 ? -INFINITY : top + log(total);
  }
}

// Adds one head's part of out and of every gradient.
static void spread(const struct layer_case *row, const int64_t *document, const struct sequence *s,
                   int64_t batch, int head, struct dense *dense)
{
  const int kv_head = head / (row->q_heads / row->kv_heads);
  const double scale = row->scale != 0 ? row->scale : 1 / sqrt(row->dim_qk);
  const int64_t n = row->tokens;

  for (int64_t i = 0; i < n; i++) {
    const int64_t at = (batch * n + i) * row->q_heads + head;
    const float *dout = s->view.dout + at * row->dim_v;
    double *out = dense->values[SEQUENCE_OUT] + at * row->dim_v;
    double *dweight = numbers((size_t)n), mean = 0;

    for (int64_t j = 0; j < n; j++) {
      const int64_t key = (batch * n + j) * row->kv_heads + kv_head;
      for (int d = 0; sees(row, document, i, j) && d < row->dim_v; d++) {
        const double v = (double)s->view.v[key * row->dim_v + d];
        const double weight = dense->weights[i * n + j];
        out[d] += weight * v;
        dweight[j] += (double)dout[d] * v;
        dense->values[SEQUENCE_DV][key * row->dim_v + d] += weight * (double)dout[d];
      }
      mean += dense->weights[i * n + j] * dweight[j];
    }
    for (int64_t j = 0; j < n; j++) {
      const int64_t key = (batch * n + j) * row->kv_heads + kv_head;
      const double dscore =
          dense->weights[i * n + j] * (dweight[j] - mean) * dense->bends[i * n + j] * scale;
      for (int d = 0; sees(row, document, i, j) && d < row->dim_qk; d++) {
        dense->values[SEQUENCE_DQ][at * row->dim_qk + d] +=
            dscore * (double)s->view.k[key * row->dim_qk + d];
        dense->values[SEQUENCE_DK][key * row->dim_qk + d] +=
            dscore * (double)s->view.q[at * row->dim_qk + d];
      }
    }
    if (row->sinks && document[i] >= 0) {
      double rest = 1;  // the sink's own weight is what the keys leave, where that can be told
      for (int64_t j = 0; j < n; j++) rest -= dense->weights[i * n + j];
      if (fabs(rest) < 1e-6)
        rest = exp((double)s->sink[head] - dense->values[SEQUENCE_LSE][at]);
      dense->dsink[head] -= rest * mean;
    }
    test_free(dweight);
  }
}

static size_t elems_of(const struct layer_case *row, enum sequence_array array)
{
  const size_t rows = (size_t)(row->batch * row->tokens);
  switch (array) {
  case SEQUENCE_LSE: return rows * (size_t)row->q_heads;
  case SEQUENCE_Q: case SEQUENCE_DQ: return rows * (size_t)(row->q_heads * row->dim_qk);
  case SEQUENCE_K: case SEQUENCE_DK: return rows * (size_t)(row->kv_heads * row->dim_qk);
  case SEQUENCE_V: case SEQUENCE_DV: return rows * (size_t)(row->kv_heads * row->dim_v);
  default: return rows * (size_t)(row->q_heads * row->dim_v);
  }
}

static void assert_near(const char *name, const char *what, size_t at, double got, double want,
                        double most)
{
  if (got == want || fabs(got - want) <= most) return;
  fail_msg("%s: %s[%zu] is %.17g, want %.17g within %.3g", name, what, at, got, want, most);
}

static void check_dense(const struct layer_case *row)
{
  const double tolerance = 1e-12 * fmax(1, row->gain);
  struct fixture fixture;
  struct dense dense;
  int64_t *document = test_calloc((size_t)row->tokens, sizeof *document);

  set_up(row, &fixture);
  sequence_solve(fixture.sequence);
  number_documents(row, document);
  for (enum sequence_array array = SEQUENCE_OUT; array < SEQUENCE_ARRAYS; array++)
    dense.values[array] = numbers(elems_of(row, array));
  dense.dsink = numbers((size_t)row->q_heads);
  dense.weights = numbers((size_t)(row->tokens * row->tokens));
  dense.bends = numbers((size_t)(row->tokens * row->tokens));
  for (int64_t batch = 0; batch < row->batch; batch++)
    for (int head = 0; head < row->q_heads; head++) {
      weigh(row, document, fixture.sequence, batch, head, &dense);
      spread(row, document, fixture.sequence, batch, head, &dense);
    }

  for (enum sequence_array array = SEQUENCE_OUT; array < SEQUENCE_ARRAYS; array++)
    for (size_t i = 0; i < elems_of(row, array); i++) {
      const double want = dense.values[array][i];
      assert_near(row->name, sequence_array_name(array), i, fixture.sequence->want[array][i], want,
                  tolerance * fmax(1, fabs(want)));
    }
  for (int head = 0; head < row->q_heads; head++)
    assert_near(row->name, "dsink", (size_t)head, fixture.sequence->want_dsink[head],
                dense.dsink[head], 1e-9 * fmax(1e-6, fabs(dense.dsink[head])));

  for (enum sequence_array array = SEQUENCE_OUT; array < SEQUENCE_ARRAYS; array++)
    test_free(dense.values[array]);
  test_free(dense.dsink);
  test_free(dense.weights);
  test_free(dense.bends);
  test_free(document);
  sequence_free(fixture.sequence);
}

static void equals_whole_matrices(void **state)
{
  (void)state;
  for (size_t i = 0; i < COUNT(cases); i++) check_dense(&cases[i]);
  for (size_t i = 0; i < COUNT(large_cases); i++) check_dense(&large_cases[i]);
}

// ---- Second judge: finite differences ----------------------------------------------------------

// Sum of out * dout over the sequence, of one query head.  `size` (or NULL): sum of the magnitudes.
static double loss_of(const struct sequence *sequence, int head, double *size)
{
  const struct swathe_problem *problem = &sequence->problem;
  const int heads = problem->q_heads, dims = problem->head_dim_v;
  double *out = numbers((size_t)(heads * dims)), *lse = numbers((size_t)heads), loss = 0, sum = 0;

  for (int64_t batch = 0; batch < sequence->view.batch; batch++)
    for (int64_t token = 0; token < sequence->view.tokens; token++) {
      const int64_t row = (batch * sequence->view.tokens + token) * heads + head;
      swathe_reference_query(problem, &sequence->view, batch, token, out, lse, NULL);
      for (int d = 0; !isinf(lse[head]) && d < dims; d++) {
        const double term = out[head * dims + d] * (double)sequence->view.dout[row * dims + d];
        loss += term;
        sum += fabs(term);
      }
    }
  if (size) *size = sum;
  test_free(out);
  test_free(lse);
  return loss;
}

static double loss_after(const struct sequence *sequence, int head, float *input, double step)
{
  const float was = *input;
  *input = (float)((double)was + step);
  const double loss = loss_of(sequence, head, NULL);
  *input = was;
  return loss;
}

// The loss's derivative by one input, up to terms of step^4.
static double slope(const struct sequence *sequence, int head, float *input)
{
  const double step = 0x1p-9;
  const double near =
      loss_after(sequence, head, input, step) - loss_after(sequence, head, input, -step);
  const double far =
      loss_after(sequence, head, input, 2 * step) - loss_after(sequence, head, input, -2 * step);
  return (8 * near - far) / (12 * step);
}

// dq and dsink, head by head: a head under a large sink has tiny gradients that must be right too.
static void check_query_slopes(const char *name, struct sequence *s, int head)
{
  const int heads = s->problem.q_heads, dims = s->problem.head_dim_qk;
  const int64_t rows = s->view.batch * s->view.tokens;
  double largest = 0, size;

  loss_of(s, head, &size);
  for (int64_t row = 0; row < rows; row++)
    for (int d = 0; d < dims; d++)
      largest = fmax(largest, fabs(s->want[SEQUENCE_DQ][(row * heads + head) * dims + d]));
  for (int64_t row = 0; row < rows; row++)
    for (int d = 0; d < dims; d++) {
      const int64_t at = (row * heads + head) * dims + d;
      float *input = &s->given[SEQUENCE_Q][at];
      assert_near(name, "dq", (size_t)at, s->want[SEQUENCE_DQ][at],
                  isnan(*input) ? 0 : slope(s, head, input), 1e-6 * largest + 1e-11 * size);
    }
  if (!s->sink) return;
  const double want = slope(s, head, &s->sink[head]);
  assert_near(name, "dsink", (size_t)head, s->want_dsink[head], want,
              1e-6 * fabs(want) + 1e-11 * size);
}

// dk or dv, whose loss is the sum over the query heads.
static void check_key_slopes(const char *name, struct sequence *s, enum sequence_array input_array,
                             enum sequence_array gradient_array, size_t count)
{
  const double *gradients = s->want[gradient_array];
  double largest = 0;

  for (size_t i = 0; i < count; i++) largest = fmax(largest, fabs(gradients[i]));
  for (size_t i = 0; i < count; i++) {
    float *input = &s->given[input_array][i];
    double want = 0;
    for (int head = 0; !isnan(*input) && head < s->problem.q_heads; head++)
      want += slope(s, head, input);
    assert_near(name, sequence_array_name(gradient_array), i, gradients[i], want,
                1e-6 * largest + 1e-11);
  }
}

static void equals_finite_differences(void **state)
{
  (void)state;
  for (size_t i = 0; i < COUNT(cases); i++) {
    const struct layer_case *row = &cases[i];
    struct fixture fixture;

    if (row->tokens > 20 || row->q_heads > 6) continue;  // slow; the same code as the others
    set_up(row, &fixture);
    sequence_solve(fixture.sequence);
    for (int head = 0; head < row->q_heads; head++)
      check_query_slopes(row->name, fixture.sequence, head);
    check_key_slopes(row->name, fixture.sequence, SEQUENCE_K, SEQUENCE_DK,
                     elems_of(row, SEQUENCE_DK));
    check_key_slopes(row->name, fixture.sequence, SEQUENCE_V, SEQUENCE_DV,
                     elems_of(row, SEQUENCE_DV));
    sequence_free(fixture.sequence);
  }
}

// ---- Third judge: counting ---------------------------------------------------------------------

// With q = k = 0 every visible key weighs the same, and a one-hot value says which key it was.
static void check_counts(int64_t left, int64_t right, int64_t tokens)
{
  const int dims = tokens < 256 ? (int)tokens : 256;
  const struct layer_case row = { "counting", 1, 1, 1, dims, left, right, 1, tokens, .gain = 1 };
  double *out = numbers((size_t)dims), lse;
  struct fixture fixture;

  set_up(&row, &fixture);
  struct sequence *s = fixture.sequence;
  for (int64_t i = 0; i < tokens; i++) {
    s->given[SEQUENCE_Q][i] = s->given[SEQUENCE_K][i] = 0;
    for (int d = 0; d < dims; d++) s->given[SEQUENCE_V][i * dims + d] = i % dims == d;
  }
  for (int64_t i = 0; i < tokens; i++) {
    const int64_t begin = left < 0 || i < left ? 0 : i - left;
    const int64_t end = right < 0 || i + right >= tokens ? tokens : i + right + 1;
    const double share = 1 / (double)(end - begin);

    assert_true(end - begin <= dims);
    swathe_reference_query(&fixture.problem, &s->view, 0, i, out, &lse, NULL);
    assert_near("counting", "lse", (size_t)i, lse, log((double)(end - begin)), 1e-15);
    for (int d = 0; d < dims; d++) {
      bool visible = false;
      for (int64_t j = begin; j < end; j++) visible |= j % dims == d;
      assert_near("counting", "out", (size_t)(i * dims + d), out[d], visible ? share : 0, 0);
    }
  }
  sequence_free(s);
  test_free(out);
}

static void counts_keys_exactly(void **state)
{
  static const struct { int64_t left, right, tokens; } rows[] = {
    { 2, 0, 6 }, { 0, 0, 6 }, { 1, 0, 6 }, { 5, 0, 6 }, { 6, 0, 6 }, { 4, 0, 19 }, { 0, 2, 19 },
    { 3, 2, 19 }, { -1, 0, 40 }, { -1, -1, 33 }, { 64, 64, 300 }, { 127, 0, 300 }, { 15, 16, 70 },
  };
  (void)state;
  for (size_t i = 0; i < COUNT(rows); i++)
    check_counts(rows[i].left, rows[i].right, rows[i].tokens);
}

// ---- What the judges do not see ----------------------------------------------------------------

static void windows_past_the_sequence_are_all_the_same(void **state)
{
  static const int64_t lefts[] = { 16, 17, 1000, INT32_MAX, -1 };
  struct layer_case row = { "past the start", 2, 1, 8, 8, 16, 0, 1, 17, .gain = 1 };
  struct fixture first, other;

  (void)state;
  set_up(&row, &first);
  sequence_solve(first.sequence);
  for (size_t i = 0; i < COUNT(lefts); i++) {
    row.left = lefts[i];
    set_up(&row, &other);
    sequence_solve(other.sequence);
    for (enum sequence_array array = SEQUENCE_OUT; array < SEQUENCE_ARRAYS; array++)
      assert_memory_equal(other.sequence->want[array], first.sequence->want[array],
                          elems_of(&row, array) * sizeof(double));
    sequence_free(other.sequence);
  }
  row.left = 15;
  set_up(&row, &other);
  sequence_solve(other.sequence);
  assert_memory_not_equal(other.sequence->want[SEQUENCE_OUT], first.sequence->want[SEQUENCE_OUT],
                          elems_of(&row, SEQUENCE_OUT) * sizeof(double));
  sequence_free(other.sequence);
  sequence_free(first.sequence);
}

// A key of NaN spoils the queries that see it, all of them and no others, in either direction.
static void only_visible_keys_are_read(void **state)
{
  (void)state;
  for (size_t i = 0; i < COUNT(cases); i++) {
    const struct layer_case *row = &cases[i];
    int64_t *document = test_calloc((size_t)row->tokens, sizeof *document);
    double *out = numbers((size_t)(row->q_heads * row->dim_v));
    double *lse = numbers((size_t)row->q_heads);
    struct fixture fixture;

    set_up(row, &fixture);
    number_documents(row, document);
    const struct swathe_sequence *view = &fixture.sequence->view;
    for (int64_t j = 0; j < row->tokens; j++) {
      float *key = &fixture.sequence->given[SEQUENCE_K][j * row->kv_heads * row->dim_qk];
      const float was = *key;
      int64_t begin, end;

      *key = NAN;
      swathe_reference_seen_by(&fixture.problem, view, j, &begin, &end);
      for (int64_t q = 0; q < row->tokens; q++) {
        swathe_reference_query(&fixture.problem, view, 0, q, out, lse, NULL);
        assert_int_equal(isnan(lse[0]) != 0, sees(row, document, q, j));
        assert_int_equal(isnan(out[0]) != 0, sees(row, document, q, j));
        assert_int_equal(q >= begin && q < end, sees(row, document, q, j));
      }
      *key = was;
    }
    sequence_free(fixture.sequence);
    test_free(document);
    test_free(out);
    test_free(lse);
  }
}

static void padding_gets_zeros(void **state)
{
  const struct layer_case row = { "padding", 2, 1, 4, 4, 2, 0, 1, 10, 2, { 3, 2 }, 2, .gain = 1,
                                  .sinks = 2, .sink = { 0.5f, 2 } };
  static const bool padding[10] = { 0, 0, 0, 1, 1, 0, 0, 1, 1, 1 };
  struct fixture fixture;

  (void)state;
  set_up(&row, &fixture);
  sequence_solve(fixture.sequence);
  double *const *want = fixture.sequence->want;
  for (int token = 0; token < 10; token++)
    for (int i = 0; i < 8; i++) {
      assert_int_equal(want[SEQUENCE_OUT][token * 8 + i] == 0, padding[token]);
      assert_int_equal(want[SEQUENCE_DQ][token * 8 + i] == 0, padding[token]);
      assert_int_equal(want[SEQUENCE_LSE][token * 2 + i / 4] == (double)-INFINITY, padding[token]);
      if (i < 4) assert_int_equal(want[SEQUENCE_DK][token * 4 + i] == 0, padding[token]);
      if (i < 4) assert_int_equal(want[SEQUENCE_DV][token * 4 + i] == 0, padding[token]);
    }
  assert_true(isfinite(fixture.sequence->want_dsink[0]) && fixture.sequence->want_dsink[0] != 0);
  sequence_free(fixture.sequence);
}

// A sink far above every score takes all the weight, one far below takes none; neither overflows.
static void sinks_far_away_stay_finite(void **state)
{
  const struct layer_case with = { "far", 3, 1, 4, 4, 3, 0, 1, 9, .gain = 1,
                                   .sinks = 3, .sink = { -1e4f, 1e4f, -INFINITY } };
  struct layer_case without = with;
  struct fixture sunk, plain;

  (void)state;
  without.sinks = 0;
  set_up(&with, &sunk);
  set_up(&without, &plain);
  memcpy(plain.sequence->given[SEQUENCE_Q], sunk.sequence->given[SEQUENCE_Q],
         elems_of(&with, SEQUENCE_Q) * sizeof(float));
  sequence_solve(sunk.sequence);
  sequence_solve(plain.sequence);
  for (int token = 0; token < 9; token++)
    for (int head = 0; head < 3; head++) {
      const int row = token * 3 + head;
      const double lse = plain.sequence->want[SEQUENCE_LSE][row];
      assert_near("far", "lse", (size_t)row, sunk.sequence->want[SEQUENCE_LSE][row],
                  head == 1 ? 1e4 : lse, 1e-14);
      for (int at = row * 4; at < row * 4 + 4; at++)
        assert_near("far", "out", (size_t)at, sunk.sequence->want[SEQUENCE_OUT][at],
                    head == 1 ? 0 : plain.sequence->want[SEQUENCE_OUT][at], 1e-14);
    }
  for (int head = 0; head < 3; head++) assert_true(sunk.sequence->want_dsink[head] == 0);
  sequence_free(sunk.sequence);
  sequence_free(plain.sequence);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(equals_whole_matrices),
    cmocka_unit_test(equals_finite_differences),
    cmocka_unit_test(counts_keys_exactly),
    cmocka_unit_test(windows_past_the_sequence_are_all_the_same),
    cmocka_unit_test(only_visible_keys_are_read),
    cmocka_unit_test(padding_gets_zeros),
    cmocka_unit_test(sinks_far_away_stay_finite),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
