// sequence.c: inputs, shares and comparisons for tests of sharded attention; see sequence.h.
#include "sequence.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Poison is a NaN with a payload nobody computes.
static const uint32_t poison_f32 = 0x7fc0dead;
static const uint16_t poison_half = 0x7fdd;  // NaN as bf16 and as f16

enum { GUARD_ROWS = 5 };  // poisoned rows before and after each batch row (and head) of a share

static const char *const array_names[] = {
  [SEQUENCE_Q] = "q",     [SEQUENCE_K] = "k",     [SEQUENCE_V] = "v",
  [SEQUENCE_DOUT] = "dout", [SEQUENCE_OUT] = "out", [SEQUENCE_LSE] = "lse",
  [SEQUENCE_DQ] = "dq",   [SEQUENCE_DK] = "dk",   [SEQUENCE_DV] = "dv",
};

const char *sequence_array_name(enum sequence_array array)
{
  return array_names[array];
}

// Aligned to cache lines, as a trainer's tensors are, so that kernels may write whole ones past the
// cache; gaps between rows and heads make the others.
static void *grab(size_t count, size_t bytes)
{
  const size_t whole = (count * bytes + 64) / 64 * 64;
  void *memory = aligned_alloc(64, whole);
  if (!memory) abort();
  return memset(memory, 0, whole);
}

uint16_t sequence_to_bf16(float value)
{
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if (isnan(value)) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float sequence_from_bf16(uint16_t bits)
{
  const uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

uint16_t sequence_to_f16(float value)
{
  const uint16_t sign = signbit(value) ? 0x8000 : 0;
  const double size = fabs((double)value);
  if (isnan(value)) return sign | 0x7e00;
  int exponent = size > 0 ? ilogb(size) : -14;
  if (exponent < -14) exponent = -14;
  if (exponent > 15) exponent = 15;
  // in units of the last place; rounding up into the next exponent carries by itself
  const double units = nearbyint(ldexp(fmin(size, 65536), 10 - exponent));
  const int bits = (exponent + 14) * 1024 + (int)units;
  return sign | (uint16_t)(bits > 0x7c00 ? 0x7c00 : bits);
}

float sequence_from_f16(uint16_t bits)
{
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double size = exponent == 31  ? (fraction ? (double)NAN : (double)INFINITY)
                      : exponent == 0 ? ldexp(fraction, -24)
                                      : ldexp(1024 + fraction, exponent - 25);
  return (float)(bits & 0x8000 ? -size : size);
}

static uint16_t narrow(enum swathe_dtype dtype, float value)
{
  return dtype == SWATHE_F16 ? sequence_to_f16(value) : sequence_to_bf16(value);
}

static float widen(enum swathe_dtype dtype, uint16_t bits)
{
  return dtype == SWATHE_F16 ? sequence_from_f16(bits) : sequence_from_bf16(bits);
}

// ---- Shapes ------------------------------------------------------------------------------------

static int heads_of(const struct swathe_problem *problem, enum sequence_array array)
{
  switch (array) {
  case SEQUENCE_K: case SEQUENCE_V: case SEQUENCE_DK: case SEQUENCE_DV: return problem->kv_heads;
  default: return problem->q_heads;
  }
}

static int dims_of(const struct swathe_problem *problem, enum sequence_array array)
{
  switch (array) {
  case SEQUENCE_LSE: return 1;
  case SEQUENCE_Q: case SEQUENCE_K: case SEQUENCE_DQ: case SEQUENCE_DK: return problem->head_dim_qk;
  default: return problem->head_dim_v;
  }
}

static bool is_output(enum sequence_array array)
{
  return array >= SEQUENCE_OUT;
}

static bool is_backward(enum sequence_array array)
{
  return array >= SEQUENCE_DQ;
}

// Elements of one token.
static size_t token_elems(const struct swathe_problem *problem, enum sequence_array array)
{
  return (size_t)heads_of(problem, array) * (size_t)dims_of(problem, array);
}

static size_t total_elems(const struct sequence *sequence, enum sequence_array array)
{
  return (size_t)(sequence->view.batch * sequence->view.tokens) *
         token_elems(&sequence->problem, array);
}

// Index in a whole array, [batch][tokens][heads][dims].
static size_t place(const struct sequence *sequence, enum sequence_array array, int64_t batch,
                    int64_t token, int head, int dim)
{
  const int64_t heads = heads_of(&sequence->problem, array);
  const int64_t dims = dims_of(&sequence->problem, array);
  return (size_t)(((batch * sequence->view.tokens + token) * heads + head) * dims + dim);
}

size_t sequence_row(const struct sequence *sequence, enum sequence_array array, int64_t batch,
                    int64_t token, size_t *elems)
{
  *elems = token_elems(&sequence->problem, array);
  return place(sequence, array, batch, token, 0, 0);
}

static bool is_padding(const struct sequence *sequence, int64_t token)
{
  const struct swathe_sequence *view = &sequence->view;
  if (!view->documents) return false;
  for (int64_t d = 0; d < view->documents; d++) {
    const int64_t begin =
        view->document_starts_padded ? view->document_starts_padded[d] : view->document_starts[d];
    const int64_t tokens = view->document_starts[d + 1] - view->document_starts[d];
    if (token >= begin && token < begin + tokens) return false;
  }
  return true;
}

// ---- Random inputs -----------------------------------------------------------------------------

// splitmix64 (Steele, Lea, Flood 2014): uniform 64 bits.
static uint64_t random_bits(uint64_t *state)
{
  uint64_t z = *state += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

// Box-Muller, one of the pair.
static double random_normal(uint64_t *state)
{
  const double radius = ((double)(random_bits(state) >> 11) + 1) * 0x1p-53;  // (0, 1]
  const double angle = (double)(random_bits(state) >> 11) * 0x1p-53;
  return sqrt(-2 * log(radius)) * cos(6.283185307179586 * angle);
}

static void fill_given(struct sequence *sequence, enum sequence_array array, uint64_t *state,
                       double gain)
{
  const size_t elems = token_elems(&sequence->problem, array);
  float *values = sequence->given[array] = grab(total_elems(sequence, array), sizeof *values);

  for (int64_t batch = 0; batch < sequence->view.batch; batch++)
    for (int64_t token = 0; token < sequence->view.tokens; token++) {
      const bool padding = is_padding(sequence, token);
      for (size_t i = 0; i < elems; i++) {
        const float value = (float)(gain * random_normal(state));
        float *cell = &values[place(sequence, array, batch, token, 0, 0) + i];
        if (padding) *cell = NAN;
        else if (sequence->problem.dtype != SWATHE_F32)
          *cell = widen(sequence->problem.dtype, narrow(sequence->problem.dtype, value));
        else *cell = value;
      }
    }
}

struct sequence *sequence_make(const struct swathe_problem *problem,
                               const struct swathe_sharding *sharding, uint64_t seed, double gain)
{
  const size_t heads = (size_t)problem->q_heads;
  struct sequence *sequence = grab(1, sizeof *sequence);

  sequence->problem = *problem;
  sequence->view = (struct swathe_sequence){
    .batch = sharding->batch,
    .tokens = sharding->tokens,
    .documents = sharding->documents,
    .document_starts = sharding->document_starts,
    .document_starts_padded = sharding->document_starts_padded,
  };
  for (enum sequence_array array = SEQUENCE_Q; array <= SEQUENCE_DOUT; array++)
    fill_given(sequence, array, &seed, array == SEQUENCE_Q ? gain : 1);
  for (enum sequence_array array = SEQUENCE_OUT; array < SEQUENCE_ARRAYS; array++) {
    sequence->want[array] = grab(total_elems(sequence, array), sizeof(double));
    sequence->got[array] = grab(total_elems(sequence, array), sizeof(float));
  }
  sequence->want_dsink = grab(heads, sizeof(double));
  sequence->got_dsink = grab(heads, sizeof(double));
  if (problem->sinks) {
    sequence->sink = grab(heads, sizeof(float));
    for (size_t head = 0; head < heads; head++) sequence->sink[head] = (float)random_normal(&seed);
  }
  sequence->view.q = sequence->given[SEQUENCE_Q];
  sequence->view.k = sequence->given[SEQUENCE_K];
  sequence->view.v = sequence->given[SEQUENCE_V];
  sequence->view.dout = sequence->given[SEQUENCE_DOUT];
  sequence->view.sink = sequence->sink;
  sequence_forget(sequence);
  return sequence;
}

void sequence_free(struct sequence *sequence)
{
  if (!sequence) return;
  for (enum sequence_array array = SEQUENCE_Q; array < SEQUENCE_ARRAYS; array++) {
    free(sequence->given[array]);
    free(sequence->want[array]);
    free(sequence->got[array]);
  }
  free(sequence->sink);
  free(sequence->want_dsink);
  free(sequence->got_dsink);
  free(sequence);
}

void sequence_forget(struct sequence *sequence)
{
  for (enum sequence_array array = SEQUENCE_OUT; array < SEQUENCE_ARRAYS; array++)
    for (size_t i = 0; i < total_elems(sequence, array); i++) sequence->got[array][i] = NAN;
  for (int head = 0; head < sequence->problem.q_heads; head++) sequence->got_dsink[head] = 0;
}

// ---- The reference's answers -------------------------------------------------------------------

// delta [heads] of one query from `out` as bf16 holds it.
static void sum_rounded(const struct sequence *sequence, int64_t batch, int64_t token,
                        double *delta)
{
  const int dims = sequence->problem.head_dim_v;
  const size_t row = place(sequence, SEQUENCE_OUT, batch, token, 0, 0);
  for (int head = 0; head < sequence->problem.q_heads; head++) {
    delta[head] = 0;
    for (int d = 0; d < dims; d++) {
      const size_t at = row + (size_t)(head * dims + d);
      const float out = (float)sequence->want[SEQUENCE_OUT][at];
      const enum swathe_dtype dtype = sequence->problem.dtype;
      delta[head] += (double)widen(dtype, narrow(dtype, out)) *
                     (double)sequence->given[SEQUENCE_DOUT][at];
    }
  }
}

static void solve(struct sequence *sequence, bool rounded)
{
  const struct swathe_problem *problem = &sequence->problem;
  const struct swathe_sequence *view = &sequence->view;
  double *const *want = sequence->want, *lse = want[SEQUENCE_LSE];
  double *delta = grab(total_elems(sequence, SEQUENCE_LSE), sizeof *delta);

  for (int64_t batch = 0; batch < view->batch; batch++)
    for (int64_t token = 0; token < view->tokens; token++) {
      const size_t row = place(sequence, SEQUENCE_LSE, batch, token, 0, 0);
      swathe_reference_query(problem, view, batch, token,
                             want[SEQUENCE_OUT] + place(sequence, SEQUENCE_OUT, batch, token, 0, 0),
                             lse + row, delta + row);
      if (rounded && !is_padding(sequence, token)) sum_rounded(sequence, batch, token, delta + row);
    }
  for (int head = 0; head < problem->q_heads; head++) sequence->want_dsink[head] = 0;
  for (int64_t batch = 0; batch < view->batch; batch++)
    for (int64_t token = 0; token < view->tokens; token++) {
      swathe_reference_dq(problem, view, lse, delta, batch, token,
                          want[SEQUENCE_DQ] + place(sequence, SEQUENCE_DQ, batch, token, 0, 0),
                          sequence->want_dsink);
      swathe_reference_dkv(problem, view, lse, delta, batch, token,
                           want[SEQUENCE_DK] + place(sequence, SEQUENCE_DK, batch, token, 0, 0),
                           want[SEQUENCE_DV] + place(sequence, SEQUENCE_DV, batch, token, 0, 0));
    }
  free(delta);
}

void sequence_solve(struct sequence *sequence)
{
  solve(sequence, false);
}

void sequence_solve_rounded(struct sequence *sequence)
{
  solve(sequence, sequence->problem.dtype != SWATHE_F32);
}

// ---- Comparison --------------------------------------------------------------------------------

// |got - want| / max(1, |want|); equal infinities are no error, NaN on either side is infinite.
static double error_of(double got, double want)
{
  if (got == want) return 0;
  const double error = fabs(got - want) / fmax(1, fabs(want));
  return isnan(error) ? INFINITY : error;
}

struct sequence_error sequence_measure(const struct sequence *sequence, enum sequence_array array)
{
  const int heads = heads_of(&sequence->problem, array), dims = dims_of(&sequence->problem, array);
  struct sequence_error error = { .worst = -1 };
  double squares = 0, count = 0;

  for (int64_t token = 0; token < sequence->view.tokens; token++) {
    if (is_padding(sequence, token)) continue;
    for (int64_t batch = 0; batch < sequence->view.batch; batch++)
      for (int i = 0; i < heads * dims; i++) {
        const size_t at = place(sequence, array, batch, token, 0, 0) + (size_t)i;
        const double got = (double)sequence->got[array][at], want = sequence->want[array][at];
        const double off = error_of(got, want);
        squares += off * off;
        count++;
        if (off > error.worst)
          error = (struct sequence_error){ off, 0, batch, token, i / dims, i % dims, got, want };
      }
  }
  if (error.worst < 0) error.worst = 0;
  error.rms = count > 0 ? sqrt(squares / count) : 0;
  return error;
}

static bool compare_dsink(const struct sequence *sequence, double tolerance, char *words,
                          size_t size)
{
  for (int head = 0; sequence->problem.sinks && head < sequence->problem.q_heads; head++) {
    const double got = sequence->got_dsink[head], want = sequence->want_dsink[head];
    if (error_of(got, want) <= tolerance) continue;
    snprintf(words, size, "dsink at head %d: got %.9g, want %.9g, error %.3g above %.3g", head, got,
             want, error_of(got, want), tolerance);
    return false;
  }
  return true;
}

bool sequence_compare(const struct sequence *sequence, bool backward,
                      struct sequence_tolerance tolerance, char *words, size_t size)
{
  for (enum sequence_array array = SEQUENCE_OUT; array < SEQUENCE_ARRAYS; array++) {
    if (is_backward(array) && !backward) continue;
    const struct sequence_error error = sequence_measure(sequence, array);
    const double most = array == SEQUENCE_OUT ? tolerance.out
                        : array == SEQUENCE_LSE ? tolerance.lse : tolerance.gradient;
    if (error.worst <= most) continue;
    snprintf(words, size,
             "%s at batch %" PRId64 ", token %" PRId64 ", head %d, dim %d: got %.9g, want %.9g, "
             "error %.3g above %.3g",
             array_names[array], error.batch, error.token, error.head, error.dim, error.got,
             error.want, error.worst, most);
    return false;
  }
  return !backward || compare_dsink(sequence, tolerance.gradient, words, size);
}

// ---- Shares ------------------------------------------------------------------------------------

static bool is_half(const struct sequence *sequence, enum sequence_array array)
{
  return sequence->problem.dtype != SWATHE_F32 && array != SEQUENCE_LSE;
}

static struct swathe_tensor *tensor_of(struct swathe_tensors *tensors, enum sequence_array array)
{
  switch (array) {
  case SEQUENCE_Q: return &tensors->q;
  case SEQUENCE_K: return &tensors->k;
  case SEQUENCE_V: return &tensors->v;
  case SEQUENCE_DOUT: return &tensors->dout;
  case SEQUENCE_OUT: return &tensors->out;
  case SEQUENCE_LSE: return &tensors->lse;
  case SEQUENCE_DQ: return &tensors->dq;
  case SEQUENCE_DK: return &tensors->dk;
  default: return &tensors->dv;
  }
}

// Rows in memory of one batch row: guards around the share's own.
static int64_t memory_rows(const struct share *share)
{
  return GUARD_ROWS + share->rows + GUARD_ROWS;
}

static size_t memory_elems(const struct sequence *sequence, const struct share *share,
                           enum sequence_array array)
{
  const int64_t width = dims_of(&sequence->problem, array) + share->form.gap;
  return (size_t)(sequence->view.batch * memory_rows(share) * heads_of(&sequence->problem, array) *
                  width);
}

// Index in memory of element `dim` (dims and up: in the gap) of `row` (negative: in a guard).
static size_t memory_place(const struct sequence *sequence, const struct share *share,
                           enum sequence_array array, int64_t batch, int64_t row, int head,
                           int64_t dim)
{
  const int64_t heads = heads_of(&sequence->problem, array), rows = memory_rows(share);
  const int64_t width = dims_of(&sequence->problem, array) + share->form.gap;
  const int64_t line = share->form.head_major ? (batch * heads + head) * rows + row + GUARD_ROWS
                                              : (batch * rows + row + GUARD_ROWS) * heads + head;
  return (size_t)(line * width + dim);
}

static uint32_t bits_at(const struct sequence *sequence, const struct share *share,
                        enum sequence_array array, size_t at)
{
  if (is_half(sequence, array)) return ((const uint16_t *)share->memory[array])[at];
  return ((const uint32_t *)share->memory[array])[at];
}

static uint32_t poison_of(const struct sequence *sequence, enum sequence_array array)
{
  return is_half(sequence, array) ? poison_half : poison_f32;
}

static uint32_t bits_of(const struct sequence *sequence, enum sequence_array array, float value)
{
  uint32_t bits;
  if (is_half(sequence, array)) return narrow(sequence->problem.dtype, value);
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static float value_of(const struct sequence *sequence, enum sequence_array array, uint32_t bits)
{
  float value;
  if (is_half(sequence, array)) return widen(sequence->problem.dtype, (uint16_t)bits);
  memcpy(&value, &bits, sizeof value);
  return value;
}

static void set_bits(const struct sequence *sequence, struct share *share,
                     enum sequence_array array, size_t at, uint32_t bits)
{
  if (is_half(sequence, array)) ((uint16_t *)share->memory[array])[at] = (uint16_t)bits;
  else ((uint32_t *)share->memory[array])[at] = bits;
}

static void poison_array(const struct sequence *sequence, struct share *share,
                         enum sequence_array array)
{
  const size_t elems = memory_elems(sequence, share, array);
  for (size_t at = 0; at < elems; at++)
    set_bits(sequence, share, array, at, poison_of(sequence, array));
}

size_t share_bytes(const struct sequence *sequence, const struct share *share,
                   enum sequence_array array)
{
  return memory_elems(sequence, share, array) * (is_half(sequence, array) ? 2 : 4);
}

void share_poison(const struct sequence *sequence, struct share *share)
{
  for (enum sequence_array array = SEQUENCE_OUT; array < SEQUENCE_ARRAYS; array++)
    poison_array(sequence, share, array);
  for (int head = 0; head < sequence->problem.q_heads; head++) share->dsink[head] = NAN;
}

// Visits every element of the share's memory that lies in a row some span covers, gaps left out.
typedef void covered_visit(struct sequence *sequence, struct share *share,
                           enum sequence_array array, size_t in_memory, size_t in_sequence);

static void each_covered(struct sequence *sequence, struct share *share, enum sequence_array array,
                         covered_visit *visit)
{
  const int heads = heads_of(&sequence->problem, array), dims = dims_of(&sequence->problem, array);
  for (int64_t batch = 0; batch < sequence->view.batch; batch++)
    for (int64_t row = 0; row < share->rows; row++)
      for (int i = 0; share->token_of_row[row] >= 0 && i < heads * dims; i++)
        visit(sequence, share, array,
              memory_place(sequence, share, array, batch, row, i / dims, i % dims),
              place(sequence, array, batch, share->token_of_row[row], i / dims, i % dims));
}

static void bring_in(struct sequence *sequence, struct share *share, enum sequence_array array,
                     size_t in_memory, size_t in_sequence)
{
  const float value = sequence->given[array][in_sequence];
  set_bits(sequence, share, array, in_memory, bits_of(sequence, array, value));
}

static void bring_back(struct sequence *sequence, struct share *share, enum sequence_array array,
                       size_t in_memory, size_t in_sequence)
{
  const uint32_t bits = bits_at(sequence, share, array, in_memory);
  sequence->got[array][in_sequence] = value_of(sequence, array, bits);
}

void share_gather(struct sequence *sequence, const struct share *share, bool backward)
{
  for (enum sequence_array array = SEQUENCE_OUT; array < SEQUENCE_ARRAYS; array++)
    if (backward || !is_backward(array))
      each_covered(sequence, (struct share *)share, array, bring_back);
  if (!backward || !sequence->problem.sinks) return;
  for (int head = 0; head < sequence->problem.q_heads; head++)
    sequence->got_dsink[head] += (double)share->dsink[head];
}

// Which token of the packed row each row of the rank's tensors holds.
static bool map_rows(struct share *share, const struct swathe_sharding *sharding)
{
  struct swathe_span *spans;
  int64_t count = 0;

  if (swathe_sharding_rows(sharding, share->rank, &share->rows)) return false;
  if (swathe_sharding_spans(sharding, share->rank, NULL, 0, &count)) return false;
  spans = grab((size_t)count, sizeof *spans);
  if (swathe_sharding_spans(sharding, share->rank, spans, count, &count)) {
    free(spans);
    return false;
  }
  share->token_of_row = grab((size_t)share->rows, sizeof *share->token_of_row);
  for (int64_t row = 0; row < share->rows; row++) share->token_of_row[row] = -1;
  for (int64_t s = 0; s < count; s++)
    for (int64_t i = 0; i < spans[s].tokens; i++)
      share->token_of_row[spans[s].row + i] = spans[s].token + i;
  free(spans);
  return true;
}

struct share *share_make(const struct sequence *sequence, const struct swathe_sharding *sharding,
                         int32_t rank, struct share_form form)
{
  struct share *share = grab(1, sizeof *share);

  share->rank = rank;
  share->form = form;
  if (!map_rows(share, sharding)) {
    share_free(share);
    return NULL;
  }
  for (enum sequence_array array = SEQUENCE_Q; array < SEQUENCE_ARRAYS; array++) {
    const size_t bytes = is_half(sequence, array) ? 2 : 4;
    const size_t first = memory_place(sequence, share, array, 0, 0, 0, 0);
    const int64_t width = dims_of(&sequence->problem, array) + form.gap;
    const int64_t heads = heads_of(&sequence->problem, array), rows = memory_rows(share);

    share->memory[array] = grab(memory_elems(sequence, share, array), bytes);
    poison_array(sequence, share, array);
    if (!is_output(array)) each_covered((struct sequence *)sequence, share, array, bring_in);
    *tensor_of(&share->tensors, array) = (struct swathe_tensor){
      .data = (char *)share->memory[array] + first * bytes,
      .token_stride = form.head_major ? width : heads * width,
      .head_stride = form.head_major ? rows * width : width,
      .batch_stride = rows * heads * width,
    };
  }
  share->dsink = grab((size_t)sequence->problem.q_heads, sizeof *share->dsink);
  share->tensors.sink = sequence->sink;
  share->tensors.dsink = sequence->problem.sinks ? share->dsink : NULL;
  share_poison(sequence, share);
  return share;
}

void share_free(struct share *share)
{
  if (!share) return;
  for (enum sequence_array array = SEQUENCE_Q; array < SEQUENCE_ARRAYS; array++)
    free(share->memory[array]);
  free(share->token_of_row);
  free(share->dsink);
  free(share);
}

// What an element must hold after a launch; false if that is for the comparison to judge.
static bool fixed_bits(const struct sequence *sequence, const struct share *share,
                       enum sequence_array array, bool backward, int64_t batch, int64_t row,
                       int head, int dim, uint32_t *bits)
{
  const bool inside = row >= 0 && row < share->rows && dim < dims_of(&sequence->problem, array);
  const int64_t token = inside ? share->token_of_row[row] : -1;

  *bits = poison_of(sequence, array);
  if (!inside || (is_backward(array) && !backward)) return true;
  if (is_output(array)) {
    *bits = bits_of(sequence, array, array == SEQUENCE_LSE ? -INFINITY : 0);
    return token < 0;
  }
  if (token >= 0) {
    const float given = sequence->given[array][place(sequence, array, batch, token, head, dim)];
    *bits = bits_of(sequence, array, given);
  }
  return true;
}

static bool check_array(const struct sequence *sequence, const struct share *share,
                        enum sequence_array array, bool backward, char *words, size_t size)
{
  const int heads = heads_of(&sequence->problem, array);
  const int width = dims_of(&sequence->problem, array) + (int)share->form.gap;

  for (int64_t batch = 0; batch < sequence->view.batch; batch++)
    for (int64_t row = -GUARD_ROWS; row < share->rows + GUARD_ROWS; row++)
      for (int i = 0; i < heads * width; i++) {
        const int head = i / width, dim = i % width;
        const size_t at = memory_place(sequence, share, array, batch, row, head, dim);
        const uint32_t found = bits_at(sequence, share, array, at);
        uint32_t bits;
        if (!fixed_bits(sequence, share, array, backward, batch, row, head, dim, &bits)) continue;
        if (found == bits) continue;
        snprintf(words, size,
                 "rank %d: %s at batch %" PRId64 ", row %" PRId64 " of %" PRId64 ", head %d, "
                 "dim %d is %g (bits %#" PRIx32 "), must be %g (bits %#" PRIx32 ")",
                 share->rank, array_names[array], batch, row, share->rows, head, dim,
                 (double)value_of(sequence, array, found), found,
                 (double)value_of(sequence, array, bits), bits);
        return false;
      }
  return true;
}

bool share_check(const struct sequence *sequence, const struct share *share, bool backward,
                 char *words, size_t size)
{
  for (enum sequence_array array = SEQUENCE_Q; array < SEQUENCE_ARRAYS; array++)
    if (!check_array(sequence, share, array, backward, words, size)) return false;
  return true;
}
