// test_sequence.c: the bench that tests of sharded attention stand on.  A pretended layer copies
// the reference's answers into the shares; that must pass, and each way to spoil it must be seen.
#include "sequence.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

enum { RANKS = 3 };

// Three documents with padding between and behind them, zigzag over the whole row, batch of two.
static const int64_t starts[] = { 0, 5, 6, 13 }, padded[] = { 0, 7, 8, 17 };
static const struct swathe_sharding sharding = {
  .layout = SWATHE_ZIGZAG, .ranks = RANKS, .batch = 2, .tokens = 20, .documents = 3,
  .document_starts = starts, .document_starts_padded = padded,
};

static struct swathe_problem make_problem(enum swathe_dtype dtype)
{
  struct swathe_problem problem;
  swathe_problem_init(&problem);
  problem.q_heads = 4;
  problem.kv_heads = 2;
  problem.head_dim_qk = 6;
  problem.head_dim_v = 5;
  problem.window_left = 3;
  problem.window_right = 1;
  problem.sinks = true;
  problem.dtype = dtype;
  return problem;
}

// ---- A pretended layer -------------------------------------------------------------------------

static struct swathe_tensor tensor_of(const struct share *share, enum sequence_array array)
{
  switch (array) {
  case SEQUENCE_Q: return share->tensors.q;
  case SEQUENCE_K: return share->tensors.k;
  case SEQUENCE_V: return share->tensors.v;
  case SEQUENCE_DOUT: return share->tensors.dout;
  case SEQUENCE_OUT: return share->tensors.out;
  case SEQUENCE_LSE: return share->tensors.lse;
  case SEQUENCE_DQ: return share->tensors.dq;
  case SEQUENCE_DK: return share->tensors.dk;
  default: return share->tensors.dv;
  }
}

// Writes as a kernel does: through base pointer and strides.
static void put(const struct share *share, enum sequence_array array, bool half, int64_t batch,
                int64_t row, int64_t head, int64_t dim, float value)
{
  const struct swathe_tensor tensor = tensor_of(share, array);
  const int64_t at = batch * tensor.batch_stride + row * tensor.token_stride +
                     head * tensor.head_stride + dim;
  if (half) ((uint16_t *)tensor.data)[at] = sequence_to_bf16(value);
  else ((float *)tensor.data)[at] = value;
}

static void put_row(const struct sequence *sequence, const struct share *share,
                    enum sequence_array array, int64_t batch, int64_t row)
{
  const struct swathe_problem *p = &sequence->problem;
  const bool of_keys = array == SEQUENCE_DK || array == SEQUENCE_DV;
  const bool of_q = array == SEQUENCE_DQ || array == SEQUENCE_DK;
  const int64_t heads = of_keys ? p->kv_heads : p->q_heads, token = share->token_of_row[row];
  const int64_t dims = array == SEQUENCE_LSE ? 1 : of_q ? p->head_dim_qk : p->head_dim_v;
  const bool half = p->dtype == SWATHE_BF16 && array != SEQUENCE_LSE;

  for (int64_t head = 0; head < heads; head++)
    for (int64_t dim = 0; dim < dims; dim++) {
      const int64_t at = ((batch * sequence->view.tokens + token) * heads + head) * dims + dim;
      const float gap = array == SEQUENCE_LSE ? -INFINITY : 0;
      put(share, array, half, batch, row, head, dim,
          token < 0 ? gap : (float)sequence->want[array][at]);
    }
}

static void pretend(const struct sequence *sequence, const struct share *share, bool backward)
{
  const enum sequence_array end = backward ? SEQUENCE_ARRAYS : SEQUENCE_DQ;
  for (enum sequence_array array = SEQUENCE_OUT; array < end; array++)
    for (int64_t batch = 0; batch < sequence->view.batch; batch++)
      for (int64_t row = 0; row < share->rows; row++) put_row(sequence, share, array, batch, row);
  for (int head = 0; backward && head < sequence->problem.q_heads; head++)
    share->dsink[head] = (float)(sequence->want_dsink[head] / RANKS);
}

struct bench {
  struct sequence *sequence;
  struct share *shares[RANKS];
  bool half;
};

static void open_bench(struct bench *bench, enum swathe_dtype dtype, struct share_form form)
{
  const struct swathe_problem problem = make_problem(dtype);
  bench->half = dtype == SWATHE_BF16;
  bench->sequence = sequence_make(&problem, &sharding, 11, 1);
  sequence_solve(bench->sequence);
  for (int rank = 0; rank < RANKS; rank++) {
    bench->shares[rank] = share_make(bench->sequence, &sharding, rank, form);
    assert_non_null(bench->shares[rank]);
  }
}

static void close_bench(struct bench *bench)
{
  for (int rank = 0; rank < RANKS; rank++) share_free(bench->shares[rank]);
  sequence_free(bench->sequence);
}

static void fill_bench(struct bench *bench, bool backward)
{
  for (int rank = 0; rank < RANKS; rank++) {
    share_poison(bench->sequence, bench->shares[rank]);
    pretend(bench->sequence, bench->shares[rank], backward);
  }
}

// What the bench says of it: "" if all is well.
static void judge(struct bench *bench, bool backward, char words[300])
{
  const struct sequence_tolerance tight = { 1e-6, 1e-6, 1e-6 }, loose = { 4e-3, 1e-6, 4e-3 };
  words[0] = 0;
  sequence_forget(bench->sequence);
  for (int rank = 0; rank < RANKS; rank++) {
    if (!share_check(bench->sequence, bench->shares[rank], backward, words, 300)) return;
    share_gather(bench->sequence, bench->shares[rank], backward);
  }
  sequence_compare(bench->sequence, backward, bench->half ? loose : tight, words, 300);
}

// ---- What must pass ----------------------------------------------------------------------------

static void right_answers_pass(void **state)
{
  static const struct share_form forms[] = { { false, 0 }, { true, 0 }, { false, 3 }, { true, 2 } };
  char words[300];

  (void)state;
  for (size_t i = 0; i < COUNT(forms); i++)
    for (enum swathe_dtype dtype = SWATHE_F32; dtype <= SWATHE_BF16; dtype++) {
      struct bench bench;
      open_bench(&bench, dtype, forms[i]);
      for (int backward = 0; backward < 2; backward++) {
        fill_bench(&bench, backward);
        judge(&bench, backward, words);
        assert_string_equal(words, "");
      }
      close_bench(&bench);
    }
}

static void every_token_is_on_one_rank(void **state)
{
  int holders[20] = { 0 };
  struct bench bench;

  (void)state;
  open_bench(&bench, SWATHE_F32, (struct share_form){ 0 });
  for (int rank = 0; rank < RANKS; rank++)
    for (int64_t row = 0; row < bench.shares[rank]->rows; row++)
      if (bench.shares[rank]->token_of_row[row] >= 0)
        holders[bench.shares[rank]->token_of_row[row]]++;
  for (int token = 0; token < 20; token++) {
    const bool padding = token == 5 || token == 6 || token >= 15;
    assert_int_equal(holders[token], !padding);
    assert_int_equal(isnan(bench.sequence->given[SEQUENCE_Q][token * 24]) != 0, padding);
  }
  close_bench(&bench);
}

static void a_refused_sharding_gives_no_share(void **state)
{
  struct swathe_sharding wrong = sharding;
  struct bench bench;

  (void)state;
  open_bench(&bench, SWATHE_F32, (struct share_form){ 0 });
  assert_null(share_make(bench.sequence, &wrong, RANKS, (struct share_form){ 0 }));
  wrong.tokens = 3;
  assert_null(share_make(bench.sequence, &wrong, 0, (struct share_form){ 0 }));
  close_bench(&bench);
}

// ---- What must be seen -------------------------------------------------------------------------

// One element of rank 0 is written where it should not be, or with what it should not hold.
// `row`: from -1 down before the share, from 100 up after it.
struct spoiler {
  enum sequence_array array;
  int row, head, dim;
  float value;
  const char *words;  // how the judgement begins
};

static void spoilt_answers_are_seen(void **state)
{
  static const struct spoiler rows[] = {
    { SEQUENCE_OUT, 1, 3, 4, 7, "out at batch 1, token 1, head 3, dim 4: got 7" },
    { SEQUENCE_OUT, 1, 0, 0, NAN, "out at batch 1, token 1, head 0, dim 0: got nan" },
    { SEQUENCE_OUT, 1, 0, 0, INFINITY, "out at batch 1, token 1, head 0, dim 0: got inf" },
    { SEQUENCE_LSE, 2, 3, 0, -INFINITY, "lse at batch 1, token 2, head 3, dim 0: got -inf" },
    { SEQUENCE_DQ, 0, 1, 5, -7, "dq at batch 1, token 0, head 1, dim 5: got -7" },
    { SEQUENCE_DK, 0, 1, 5, 70, "dk at batch 1, token 0, head 1, dim 5: got 70" },
    { SEQUENCE_DV, 2, 0, 3, -70, "dv at batch 1, token 2, head 0, dim 3: got -70" },
    { SEQUENCE_OUT, -1, 0, 0, 0, "rank 0: out at batch 1, row -1" },
    { SEQUENCE_DK, -5, 1, 0, 0, "rank 0: dk at batch 1, row -5" },
    { SEQUENCE_DV, 100, 1, 0, 0, "rank 0: dv at batch 1, row" },
    { SEQUENCE_LSE, 104, 0, 0, 0, "rank 0: lse at batch 1, row" },
    { SEQUENCE_DQ, 0, 0, 6, 0, "rank 0: dq at batch 1, row 0 of " },  // into the gap
    { SEQUENCE_Q, 1, 0, 0, 0, "rank 0: q at batch 1, row 1" },        // an input
    { SEQUENCE_K, -2, 0, 0, 0, "rank 0: k at batch 1, row -2" },
    { SEQUENCE_V, 1, 1, 1, 0, "rank 0: v at batch 1, row 1" },
    { SEQUENCE_DOUT, 1, 1, 1, 0, "rank 0: dout at batch 1, row 1" },
  };
  static const struct share_form forms[] = { { false, 3 }, { true, 2 } };
  char words[300];

  (void)state;
  for (size_t f = 0; f < COUNT(forms); f++)
    for (enum swathe_dtype dtype = SWATHE_F32; dtype <= SWATHE_BF16; dtype++)
      for (size_t i = 0; i < COUNT(rows); i++) {
        struct bench bench;
        open_bench(&bench, dtype, forms[f]);
        fill_bench(&bench, true);
        const int64_t row =
            rows[i].row < 100 ? rows[i].row : bench.shares[0]->rows + rows[i].row - 100;
        put(bench.shares[0], rows[i].array, bench.half && rows[i].array != SEQUENCE_LSE, 1, row,
            rows[i].head, rows[i].dim, rows[i].value);
        judge(&bench, true, words);
        if (strncmp(words, rows[i].words, strlen(rows[i].words)))
          fail_msg("wanted \"%s\", got \"%s\"", rows[i].words, words);
        close_bench(&bench);
      }
}

static void rows_without_a_span_must_be_cleared(void **state)
{
  char words[300];
  struct bench bench;

  (void)state;
  open_bench(&bench, SWATHE_F32, (struct share_form){ 0 });
  for (enum sequence_array array = SEQUENCE_OUT; array < SEQUENCE_ARRAYS; array++) {
    int found = 0;
    for (int rank = 0; rank < RANKS; rank++)
      for (int64_t row = 0; row < bench.shares[rank]->rows; row++) {
        if (bench.shares[rank]->token_of_row[row] >= 0) continue;
        fill_bench(&bench, true);
        put(bench.shares[rank], array, false, 0, row, 0, 0, array == SEQUENCE_LSE ? 0 : 1);
        judge(&bench, true, words);
        assert_non_null(strstr(words, sequence_array_name(array)));
        assert_non_null(strstr(words, "must be"));
        found++;
      }
    assert_true(found > 0);
  }
  close_bench(&bench);
}

static void what_was_not_written_is_seen(void **state)
{
  char words[300];
  struct bench bench;

  (void)state;
  open_bench(&bench, SWATHE_F32, (struct share_form){ 0 });
  fill_bench(&bench, false);
  judge(&bench, true, words);  // no backward
  assert_string_not_equal(words, "");
  fill_bench(&bench, true);
  judge(&bench, false, words);  // backward's outputs written by forward
  assert_non_null(strstr(words, "dq"));

  fill_bench(&bench, true);  // a rank whose dsink is lost
  bench.shares[1]->dsink[2] = 0;
  judge(&bench, true, words);
  assert_non_null(strstr(words, "dsink at head 2"));

  fill_bench(&bench, true);  // a rank that is not gathered
  sequence_forget(bench.sequence);
  share_gather(bench.sequence, bench.shares[0], true);
  share_gather(bench.sequence, bench.shares[2], true);
  assert_false(sequence_compare(bench.sequence, true, (struct sequence_tolerance){ 1, 1, 1 }, words,
                                sizeof words));
  close_bench(&bench);
}

static void measure_finds_the_worst_place(void **state)
{
  struct bench bench;

  (void)state;
  open_bench(&bench, SWATHE_F32, (struct share_form){ 0 });
  for (size_t i = 0; i < 2 * 20 * 4 * 5; i++)
    bench.sequence->got[SEQUENCE_OUT][i] = (float)bench.sequence->want[SEQUENCE_OUT][i];
  assert_true(sequence_measure(bench.sequence, SEQUENCE_OUT).worst < 1e-6);
  bench.sequence->want[SEQUENCE_OUT][((1 * 20 + 9) * 4 + 2) * 5 + 3] = 100;
  bench.sequence->got[SEQUENCE_OUT][((1 * 20 + 9) * 4 + 2) * 5 + 3] = 98;
  const struct sequence_error error = sequence_measure(bench.sequence, SEQUENCE_OUT);
  assert_true(fabs(error.worst - 0.02) < 1e-12);
  assert_int_equal(error.batch, 1);
  assert_int_equal(error.token, 9);
  assert_int_equal(error.head, 2);
  assert_int_equal(error.dim, 3);
  assert_true(fabs(error.rms - 0.02 / sqrt(2 * 13 * 4 * 5)) < 1e-7);  // 13 tokens are no padding
  close_bench(&bench);
}

static void bf16_rounds_to_nearest_even(void **state)
{
  static const struct { float value; uint16_t bits; } rows[] = {
    { 0, 0x0000 }, { -0.0f, 0x8000 }, { 1, 0x3f80 }, { -2, 0xc000 },
    { 1 + 0x1p-8f, 0x3f80 },               // halfway, to even
    { 1 + 3 * 0x1p-8f, 0x3f82 },           // halfway, to even
    { 1 + 0x1p-8f + 0x1p-20f, 0x3f81 },    // just above
    { 1 + 0x1p-8f - 0x1p-20f, 0x3f80 },    // just below
    { 0x1.fffffep127f, 0x7f80 },           // overflows
    { INFINITY, 0x7f80 }, { -INFINITY, 0xff80 }, { 0x1p-133f, 0x0001 },
  };
  const uint32_t small_nan = 0x7f800001;
  float value;

  (void)state;
  for (size_t i = 0; i < COUNT(rows); i++)
    assert_int_equal(sequence_to_bf16(rows[i].value), rows[i].bits);
  memcpy(&value, &small_nan, sizeof value);
  assert_true(isnan(sequence_from_bf16(sequence_to_bf16(value))));
  for (uint32_t bits = 0; bits < 0x10000; bits++) {
    value = sequence_from_bf16((uint16_t)bits);
    if (!isnan(value)) assert_int_equal(sequence_to_bf16(value), bits);
  }
}

static void f16_rounds_to_nearest_even(void **state)
{
  static const struct { float value; uint16_t bits; } rows[] = {
    { 0, 0x0000 }, { -0.0f, 0x8000 }, { 1, 0x3c00 }, { -2, 0xc000 },
    { 1 + 0x1p-11f, 0x3c00 },              // halfway, to even
    { 1 + 3 * 0x1p-11f, 0x3c02 },          // halfway, to even
    { 1 + 0x1p-11f + 0x1p-20f, 0x3c01 },   // just above
    { 65504, 0x7bff }, { 65519, 0x7bff }, { 65520, 0x7c00 }, { 1e9f, 0x7c00 },
    { INFINITY, 0x7c00 }, { -INFINITY, 0xfc00 }, { 0x1p-24f, 0x0001 }, { 0x1p-25f, 0x0000 },
    { 0x1.ff8p-15f, 0x03ff }, { 0x1.ffcp-15f, 0x0400 },
  };

  (void)state;
  for (size_t i = 0; i < COUNT(rows); i++)
    assert_int_equal(sequence_to_f16(rows[i].value), rows[i].bits);
  assert_true(isnan(sequence_from_f16(sequence_to_f16(NAN))));
  for (uint32_t bits = 0; bits < 0x10000; bits++) {
    const float value = sequence_from_f16((uint16_t)bits);
    if (!isnan(value)) assert_int_equal(sequence_to_f16(value), bits);
  }
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(right_answers_pass),
    cmocka_unit_test(every_token_is_on_one_rank),
    cmocka_unit_test(a_refused_sharding_gives_no_share),
    cmocka_unit_test(spoilt_answers_are_seen),
    cmocka_unit_test(rows_without_a_span_must_be_cleared),
    cmocka_unit_test(what_was_not_written_is_seen),
    cmocka_unit_test(measure_finds_the_worst_place),
    cmocka_unit_test(bf16_rounds_to_nearest_even),
    cmocka_unit_test(f16_rounds_to_nearest_even),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
