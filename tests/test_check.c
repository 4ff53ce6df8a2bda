// test_check.c: the check behind `swathe run --check` passes right results and catches a single
// wrong number wherever it promises to look.  The results it is given here are the reference's own.
#include "../runtime/cli/fail.c"
#include "../runtime/cli/args.c"
#include "../runtime/cli/ranks.c"
#include "../runtime/cli/given.c"
#include "../runtime/cli/npy.c"
#include "../runtime/cli/arrays.c"
#include "../runtime/cli/check.c"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

// A problem, its data and the reference's results as a run would have left them.
struct scene {
  struct cli_given given;
  struct cli_arrays arrays;
};

static void set_results(struct scene *scene)
{
  const struct swathe_problem *p = &scene->given.problem;
  struct cli_arrays *arrays = &scene->arrays;
  const int64_t rows = arrays->batch * arrays->tokens, heads = p->q_heads;
  const struct swathe_sequence sequence = {
    .batch = arrays->batch,
    .tokens = arrays->tokens,
    .documents = scene->given.sharding.documents,
    .document_starts = scene->given.sharding.document_starts,
    .q = arrays->data[CLI_ARRAY_Q],
    .k = arrays->data[CLI_ARRAY_K],
    .v = arrays->data[CLI_ARRAY_V],
    .sink = arrays->data[CLI_ARRAY_SINK],
    .dout = arrays->data[CLI_ARRAY_DOUT],
  };
  double *lse = calloc((size_t)(rows * heads), sizeof *lse);
  double *delta = calloc((size_t)(rows * heads), sizeof *delta);
  double first[64], second[64], dsink[8] = { 0 };

  for (int64_t row = 0; row < rows; row++) {
    swathe_reference_query(p, &sequence, row / arrays->tokens, row % arrays->tokens, first,
                           lse + row * heads, delta + row * heads);
    for (int64_t i = 0; i < heads * p->head_dim_v; i++)
      arrays->data[CLI_ARRAY_OUT][row * heads * p->head_dim_v + i] = (float)first[i];
    for (int64_t h = 0; h < heads; h++)
      arrays->data[CLI_ARRAY_LSE][row * heads + h] = (float)lse[row * heads + h];
  }
  for (int64_t row = 0; row < rows; row++) {
    const int64_t k_row = p->kv_heads * p->head_dim_qk, v_row = p->kv_heads * p->head_dim_v;
    swathe_reference_dq(p, &sequence, lse, delta, row / arrays->tokens, row % arrays->tokens, first,
                        p->sinks ? dsink : NULL);
    for (int64_t i = 0; i < heads * p->head_dim_qk; i++)
      arrays->data[CLI_ARRAY_DQ][row * heads * p->head_dim_qk + i] = (float)first[i];
    swathe_reference_dkv(p, &sequence, lse, delta, row / arrays->tokens, row % arrays->tokens,
                         first, second);
    for (int64_t i = 0; i < k_row; i++)
      arrays->data[CLI_ARRAY_DK][row * k_row + i] = (float)first[i];
    for (int64_t i = 0; i < v_row; i++)
      arrays->data[CLI_ARRAY_DV][row * v_row + i] = (float)second[i];
  }
  for (int64_t h = 0; p->sinks && h < heads; h++)
    arrays->data[CLI_ARRAY_DSINK][h] = (float)dsink[h];
  free(lse);
  free(delta);
}

static void make_scene(struct scene *scene, int32_t ranks, enum swathe_layout layout, int64_t batch,
                       int64_t tokens, int64_t window_left, bool sinks)
{
  *scene = (struct scene){ 0 };
  swathe_problem_init(&scene->given.problem);
  scene->given.problem.q_heads = 2;
  scene->given.problem.head_dim_qk = 4;
  scene->given.problem.head_dim_v = 6;
  scene->given.problem.window_left = window_left;
  scene->given.problem.sinks = sinks;
  scene->given.problem.ranks = ranks;
  scene->given.sharding = (struct swathe_sharding){
    .layout = layout, .ranks = ranks, .batch = (int32_t)batch, .tokens = tokens
  };
  assert_int_equal(cli_arrays_random(&scene->given, true, 7, &scene->arrays), CLI_OK);
  assert_int_equal(cli_arrays_prepare(&scene->given.problem, &scene->arrays), CLI_OK);
  set_results(scene);
}

static struct cli_check check_scene(const struct scene *scene)
{
  struct cli_check check = { .given = &scene->given, .arrays = &scene->arrays, .seed = 3 };
  if (cli_check_run(&check)) fail_msg("%s", cli_fail_words());
  return check;
}

// Puts `wrong` in place of one number and expects the check to name that array and place.
static void expect_caught(struct scene *scene, enum cli_array array, int64_t row, int64_t element,
                          float wrong)
{
  const int64_t first = (row < 0 ? 0 : row) * cli_arrays_row(&scene->arrays, array);
  float *number = &scene->arrays.data[array][first + element];
  const float right = *number;

  *number = wrong;
  const struct cli_check check = check_scene(scene);
  *number = right;
  if (check.passed) fail_msg("%s row %lld: not caught", cli_arrays_name(array), (long long)row);
  const struct cli_check_error *error = &check.errors[array];
  assert_false(error->error <= error->limit);
  assert_int_equal(error->row, row);
  assert_int_equal(error->element, element);
}

static void whole_sequences_are_checked_whole(void **state)
{
  (void)state;
  struct scene scene;
  make_scene(&scene, 3, SWATHE_ZIGZAG, 2, 150, 9, true);
  const struct cli_check check = check_scene(&scene);
  assert_true(check.passed);
  assert_false(check.own_lse);
  assert_false(check.dsink_left);
  assert_int_equal(check.tokens_checked, 300);
  assert_int_equal(check.tokens_held, 300);
  for (int a = CLI_ARRAY_OUT; a < CLI_ARRAY_DSINK; a++)
    assert_int_equal(check.errors[a].elements,
                     300 * cli_arrays_row(&scene.arrays, (enum cli_array)a));
  assert_int_equal(check.errors[CLI_ARRAY_DSINK].elements, 2);

  for (int a = CLI_ARRAY_OUT; a < CLI_ARRAY_DSINK; a++) {
    const int64_t last = cli_arrays_row(&scene.arrays, (enum cli_array)a) - 1;
    const float right = scene.arrays.data[a][173 * (last + 1) + last];
    expect_caught(&scene, (enum cli_array)a, 173, last, right + 0.01f);
    expect_caught(&scene, (enum cli_array)a, 0, 0, NAN);
    expect_caught(&scene, (enum cli_array)a, 299, 1, INFINITY);
  }
  expect_caught(&scene, CLI_ARRAY_DSINK, -1, 1, scene.arrays.data[CLI_ARRAY_DSINK][1] + 0.1f);
  cli_arrays_free(&scene.arrays);
}

// Just above and just below the limit, at a reference value large enough for errors to be relative.
static void limits_are_relative_above_one(void **state)
{
  (void)state;
  struct scene scene;
  make_scene(&scene, 1, SWATHE_CONTIGUOUS, 1, 40, 5, true);
  float *lse = &scene.arrays.data[CLI_ARRAY_LSE][22];
  for (int i = 0; i < 40 * 2 * 4; i++) scene.arrays.data[CLI_ARRAY_Q][i] *= 20;
  set_results(&scene);
  const float right = *lse;
  assert_true(fabsf(right) > 3);
  *lse = right * (1 + 1.7e-5f);
  assert_true(check_scene(&scene).passed);
  *lse = right * (1 + 2.3e-5f);
  assert_false(check_scene(&scene).passed);
  cli_arrays_free(&scene.arrays);
}

// Long sequences: a sample of each rank, always with the first and last token of each span.
static void samples_hold_the_edges_of_spans(void **state)
{
  (void)state;
  enum { TOKENS = 9001, RANKS = 3 };
  static const enum swathe_layout layouts[] = { SWATHE_CONTIGUOUS, SWATHE_ZIGZAG };
  for (int i = 0; i < 2; i++) {
    struct scene scene;
    make_scene(&scene, RANKS, layouts[i], 1, TOKENS, 20, i == 0);
    const struct cli_check check = check_scene(&scene);
    assert_true(check.passed);
    assert_int_equal(check.tokens_held, TOKENS);
    assert_in_range(check.tokens_checked, 256 * RANKS, 2 * 256 * RANKS);
    assert_int_equal(check.errors[CLI_ARRAY_DSINK].elements, i == 0 ? 2 : 0);
    for (int32_t rank = 0; rank < RANKS; rank++) {
      struct swathe_span spans[2];
      int64_t count = 0;
      assert_int_equal(swathe_sharding_spans(&scene.given.sharding, rank, spans, 2, &count), 0);
      for (int64_t s = 0; s < count; s++) {
        const enum cli_array array = CLI_ARRAY_OUT + (enum cli_array)((rank + s) % 5);
        expect_caught(&scene, array, spans[s].token, 1, 77);
        expect_caught(&scene, array, spans[s].token + spans[s].tokens - 1, 0, 77);
      }
    }
    cli_arrays_free(&scene.arrays);
  }
}

// How many tokens of each rank a sample holds, for shares of all sizes, batches and many spans.
static void samples_are_large_enough(void **state)
{
  (void)state;
  static const struct {
    int32_t ranks, batch;
    int64_t tokens, documents;
    enum swathe_layout layout;
  } rows[] = {
    { 2, 1, 5000, 0, SWATHE_CONTIGUOUS },    { 7, 3, 2000, 0, SWATHE_ZIGZAG },
    { 16, 1, 4099, 0, SWATHE_CONTIGUOUS },   { 4, 1, 20000, 64, SWATHE_ZIGZAG_DOCUMENT },
    { 3, 5, 1000, 200, SWATHE_ZIGZAG },
  };
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    int64_t starts[201], tokens = rows[i].tokens;
    for (int64_t d = 0; d <= rows[i].documents; d++)
      starts[d] = rows[i].documents ? d * tokens / rows[i].documents : 0;
    struct cli_given given = { .sharding = { .layout = rows[i].layout, .ranks = rows[i].ranks,
                                             .batch = rows[i].batch, .tokens = tokens,
                                             .documents = rows[i].documents,
                                             .document_starts = starts } };
    struct cli_check check = { .given = &given, .seed = 11 };
    struct comparison c = { .check = &check, .rows = rows[i].batch * tokens,
                            .sequence = { .batch = rows[i].batch, .tokens = tokens } };
    c.marks = calloc((size_t)c.rows, 1);
    assert_int_equal(choose_rows(&c), CLI_OK);
    for (int32_t rank = 0; rank < rows[i].ranks; rank++) {
      struct share share;
      int64_t chosen = 0;
      assert_int_equal(read_share(&given.sharding, rank, &share), CLI_OK);
      for (int64_t b = 0; b < rows[i].batch; b++)
        for (int64_t s = 0; s < share.count; s++)
          for (int64_t t = 0; t < share.spans[s].tokens; t++) {
            const bool edge = t == 0 || t == share.spans[s].tokens - 1;
            const int mark = c.marks[b * tokens + share.spans[s].token + t] & CHOSEN;
            chosen += mark;
            assert_true(mark || !edge);
          }
      const int64_t held = share.tokens * rows[i].batch;
      assert_true(chosen >= (held < 256 ? held : 256));
      free(share.spans);
    }
    assert_int_equal(check.tokens_held, c.rows);
    free(c.marks);
  }
}

// A window over everything: the readers' lse and delta are the run's own, and the check says so,
// and still catches a wrong gradient.
static void wide_windows_use_the_runs_own_lse(void **state)
{
  (void)state;
  struct scene scene;
  make_scene(&scene, 2, SWATHE_CONTIGUOUS, 1, 4500, SWATHE_UNLIMITED, true);
  // 4500 tokens of this toy are affordable; the plan of a real layer is looked at without running
  // it.
  struct cli_check check = { .given = &scene.given, .arrays = &scene.arrays, .seed = 3 };
  struct swathe_problem large = scene.given.problem;
  large.q_heads = 64;
  large.head_dim_qk = large.head_dim_v = 128;
  struct comparison c = { .check = &check, .problem = &large, .rows = 4500,
                          .sequence = { .batch = 1, .tokens = 4500 } };
  c.marks = calloc(4500, 1);
  assert_int_equal(choose_rows(&c), CLI_OK);
  plan_work(&c);
  assert_true(check.own_lse);
  assert_true(check.dsink_left);
  int64_t own = 0;
  for (int64_t row = 0; row < 4500; row++) own += (c.marks[row] & (OWN | NEEDED)) == OWN;
  assert_int_equal(own, 4500 - check.tokens_checked);

  // The same marks over the toy: right results pass, a wrong dk is caught.
  c.problem = &scene.given.problem;
  c.sequence.q = scene.arrays.data[CLI_ARRAY_Q];
  c.sequence.k = scene.arrays.data[CLI_ARRAY_K];
  c.sequence.v = scene.arrays.data[CLI_ARRAY_V];
  c.sequence.sink = scene.arrays.data[CLI_ARRAY_SINK];
  c.sequence.dout = scene.arrays.data[CLI_ARRAY_DOUT];
  c.lse = calloc(4500 * 2, sizeof(double));
  c.delta = calloc(4500 * 2, sizeof(double));
  set_limits(&check);
  assert_int_equal(run_workers(&c), CLI_OK);
  assert_true(check.passed);
  scene.arrays.data[CLI_ARRAY_DK][0] += 0.01f;
  assert_int_equal(run_workers(&c), CLI_OK);
  assert_false(check.passed);
  free(c.lse);
  free(c.delta);
  free(c.marks);
  cli_arrays_free(&scene.arrays);
}

static float nearest(enum swathe_dtype dtype, float value)
{
  return cli_arrays_widen(dtype, cli_arrays_narrow(dtype, value));
}

// bf16: to nearest, ties to even; what is bf16 already stays, and so do infinities and NaN.
static void bf16_rounds_to_even(void **state)
{
  (void)state;
  static const struct { float value, wanted; } rows[] = {
    { 1, 1 }, { -2.5f, -2.5f }, { 0, 0 }, { INFINITY, INFINITY }, { -INFINITY, -INFINITY },
    { 0x1.010p0f, 0x1.000p0f },   // half way: to even, below
    { 0x1.030p0f, 0x1.040p0f },   // half way: to even, above
    { 0x1.0101p0f, 0x1.020p0f },  // just above half way
    { 0x1.00ffp0f, 0x1.000p0f },
    { 0x1.fffffep127f, INFINITY },
  };
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
    assert_true(nearest(SWATHE_BF16, rows[i].value) == rows[i].wanted);
  assert_true(isnan(nearest(SWATHE_BF16, NAN)));
}

// f16: the same, with steps of 2^-24 near 0 and infinity from 65520 on.
static void f16_rounds_to_even(void **state)
{
  (void)state;
  static const struct { float value, wanted; } rows[] = {
    { 1, 1 }, { -2.5f, -2.5f }, { 0, 0 }, { INFINITY, INFINITY }, { -INFINITY, -INFINITY },
    { 0x1.002p0f, 0x1.000p0f },   // half way: to even, below
    { 0x1.006p0f, 0x1.008p0f },   // half way: to even, above
    { 0x1.00201p0f, 0x1.004p0f }, // just above half way
    { 0x1.ffep-1f, 1 },
    { 65504, 65504 }, { 65519.99f, 65504 }, { 65520, INFINITY }, { -1e30f, -INFINITY },
    { 0x1p-14f, 0x1p-14f }, { 0x1.ff8p-15f, 0x1.ff8p-15f }, { 0x1.ffcp-15f, 0x1p-14f },
    { -0x1p-24f, -0x1p-24f }, { 0x1p-25f, 0 }, { 0x1.8p-24f, 0x1p-23f },
  };
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
    if (nearest(SWATHE_F16, rows[i].value) != rows[i].wanted)
      fail_msg("%a became %a", (double)rows[i].value, (double)nearest(SWATHE_F16, rows[i].value));
  assert_true(isnan(nearest(SWATHE_F16, NAN)));
  for (unsigned bits = 0; bits < 65536; bits++) {
    const float value = cli_arrays_widen(SWATHE_F16, (uint16_t)bits);
    if (!isnan(value)) assert_int_equal(cli_arrays_narrow(SWATHE_F16, value), bits);
  }
}

// The reference sees the inputs as the kernels do; sinks and outputs stay as they are.
static void bf16_inputs_are_rounded_on_entry(void **state)
{
  (void)state;
  static const enum cli_array rounded[] = { CLI_ARRAY_Q, CLI_ARRAY_K, CLI_ARRAY_V, CLI_ARRAY_DOUT };
  struct scene scene;
  make_scene(&scene, 1, SWATHE_CONTIGUOUS, 1, 10, 5, true);
  scene.given.problem.dtype = SWATHE_BF16;
  for (int i = 0; i < CLI_ARRAY_DOUT + 1; i++) scene.arrays.data[i][1] = 1.001f;
  for (int i = CLI_ARRAY_OUT; i < CLI_ARRAY_COUNT; i++) {
    free(scene.arrays.data[i]);
    scene.arrays.data[i] = NULL;
  }
  assert_int_equal(cli_arrays_prepare(&scene.given.problem, &scene.arrays), CLI_OK);
  for (int i = 0; i < 4; i++) assert_true(scene.arrays.data[rounded[i]][1] == 1.0f);
  assert_true(scene.arrays.data[CLI_ARRAY_SINK][1] == 1.001f);
  cli_arrays_free(&scene.arrays);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(whole_sequences_are_checked_whole),
    cmocka_unit_test(limits_are_relative_above_one),
    cmocka_unit_test(samples_hold_the_edges_of_spans),
    cmocka_unit_test(samples_are_large_enough),
    cmocka_unit_test(wide_windows_use_the_runs_own_lse),
    cmocka_unit_test(bf16_rounds_to_even),
    cmocka_unit_test(f16_rounds_to_even),
    cmocka_unit_test(bf16_inputs_are_rounded_on_entry),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
