// test_problem.c: a layer's shape: its canonical text and back, each refusal with its words, names
// and derived sizes.
#include "problem.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define COUNT(array) (sizeof(array) / sizeof(array)[0])

static struct swathe_problem fresh(void)
{
  struct swathe_problem problem;
  memset(&problem, 0, sizeof problem);  // padding bytes too, as problems are compared whole
  swathe_problem_init(&problem);
  return problem;
}

static void assert_same(const struct swathe_problem *a, const struct swathe_problem *b)
{
  assert_int_equal(a->q_heads, b->q_heads);
  assert_int_equal(a->kv_heads, b->kv_heads);
  assert_int_equal(a->head_dim_qk, b->head_dim_qk);
  assert_int_equal(a->head_dim_v, b->head_dim_v);
  assert_int_equal(a->window_left, b->window_left);
  assert_int_equal(a->window_right, b->window_right);
  assert_int_equal(a->dtype, b->dtype);
  assert_int_equal(a->sinks, b->sinks);
  assert_true(a->softcap == b->softcap);
  assert_true(a->scale == b->scale);
  assert_int_equal(a->halo_gradient, b->halo_gradient);
  assert_int_equal(a->target, b->target);
  assert_int_equal(a->layout, b->layout);
  assert_int_equal(a->ranks, b->ranks);
  assert_int_equal(a->tokens_per_rank, b->tokens_per_rank);
}

// ---- Canonical text ----------------------------------------------------------------------------

static void init_is_what_the_header_says(void **state)
{
  struct swathe_problem problem = fresh();
  char text[SW_PROBLEM_TEXT];

  (void)state;
  assert_int_equal(swathe_problem_check(&problem), SWATHE_OK);
  swathe_problem_format(&problem, text, sizeof text);
  assert_string_equal(text, "q_heads=1,kv_heads=1,head_dim_qk=64,head_dim_v=64,"
                            "window_left=unlimited,window_right=0,dtype=f32,sinks=0,softcap=0,"
                            "scale=0,halo_gradient=f32,target=cpu,layout=contiguous,ranks=1,"
                            "tokens_per_rank=4096");
}

// Each field by itself, and the text it must give.
static void every_field_is_read_and_written(void **state)
{
  static const struct { const char *text; struct swathe_problem want; } rows[] = {
#define ROW(text, member) { text, { .member } }
    ROW("q_heads=6", q_heads = 6),
    ROW("head_dim_qk=192", head_dim_qk = 192),
    ROW("head_dim_v=1", head_dim_v = 1),
    ROW("window_left=0", window_left = 0),
    ROW("window_left=127", window_left = 127),
    ROW("window_left=2147483647", window_left = INT32_MAX),
    ROW("window_left=unlimited", window_left = SWATHE_UNLIMITED),
    ROW("window_right=64", window_right = 64),
    ROW("window_right=unlimited", window_right = SWATHE_UNLIMITED),
    ROW("dtype=bf16", dtype = SWATHE_BF16),
    ROW("dtype=f16", dtype = SWATHE_F16),
    ROW("sinks=1", sinks = true),
    ROW("softcap=50", softcap = 50),
    ROW("softcap=0.1", softcap = 0.1),
    ROW("scale=-0.7", scale = -0.7),
    ROW("scale=0", scale = -0.0),
    ROW("scale=0.33333333333333331", scale = 1.0 / 3),
    ROW("halo_gradient=bf16", halo_gradient = SWATHE_BF16),
    ROW("target=cuda", target = SWATHE_CUDA),
    ROW("layout=zigzag-doc", layout = SWATHE_ZIGZAG_DOCUMENT),
    ROW("ranks=65536", ranks = 65536),
    ROW("tokens_per_rank=5000000000", tokens_per_rank = 5000000000),
#undef ROW
  };

  (void)state;
  for (size_t i = 0; i < COUNT(rows); i++) {
    const struct swathe_problem before = fresh();
    struct swathe_problem problem = fresh();
    char text[SW_PROBLEM_TEXT + 2] = ",", field[64];

    assert_int_equal(swathe_problem_parse(rows[i].text, &problem), SWATHE_OK);
    swathe_problem_format(&problem, text + 1, SW_PROBLEM_TEXT);
    strcat(text, ",");
    snprintf(field, sizeof field, ",%s,", rows[i].text);
    if (!strstr(text, field)) fail_msg("%s is not in %s", field, text);

    // The field named holds what the row wants, the others what they held before.
#define CHECK_FIELD(name)                                           \
  do {                                                              \
    const bool named = !strncmp(rows[i].text, #name "=", sizeof #name); \
    assert_true(problem.name == (named ? rows[i].want.name : before.name)); \
  } while (0)
    CHECK_FIELD(q_heads);
    CHECK_FIELD(kv_heads);
    CHECK_FIELD(head_dim_qk);
    CHECK_FIELD(head_dim_v);
    CHECK_FIELD(window_left);
    CHECK_FIELD(window_right);
    CHECK_FIELD(dtype);
    CHECK_FIELD(sinks);
    CHECK_FIELD(softcap);
    CHECK_FIELD(scale);
    CHECK_FIELD(halo_gradient);
    CHECK_FIELD(target);
    CHECK_FIELD(layout);
    CHECK_FIELD(ranks);
    CHECK_FIELD(tokens_per_rank);
#undef CHECK_FIELD
  }
}

// Numerical Recipes' 64-bit congruential step; the upper bits are good enough to pick shapes with.
static int64_t pick(uint64_t *state, int64_t below)
{
  *state = *state * 6364136223846793005u + 1442695040888963407u;
  return (int64_t)(*state >> 33) % below;
}

static int64_t pick_window(uint64_t *state)
{
  switch (pick(state, 4)) {
  case 0: return SWATHE_UNLIMITED;
  case 1: return 0;
  case 2: return pick(state, (int64_t)INT32_MAX + 1);
  default: return pick(state, 4096);
  }
}

static double pick_real(uint64_t *state)
{
  switch (pick(state, 3)) {
  case 0: return 0;
  case 1: return (double)pick(state, 1000) / 8;
  default: return (double)pick(state, INT32_MAX) * 1e-9 / 3;
  }
}

static struct swathe_problem pick_problem(uint64_t *state)
{
  struct swathe_problem problem = fresh();
  problem.kv_heads = 1 + (int32_t)pick(state, 16);
  problem.q_heads = problem.kv_heads * (1 + (int32_t)pick(state, 20));
  problem.head_dim_qk = 1 + (int32_t)pick(state, 256);
  problem.head_dim_v = 1 + (int32_t)pick(state, 256);
  problem.window_left = pick_window(state);
  problem.window_right = pick_window(state);
  problem.dtype = (enum swathe_dtype)pick(state, 2);
  problem.sinks = pick(state, 2) == 1;
  problem.softcap = pick_real(state);
  problem.scale = pick_real(state) * (pick(state, 2) ? 1 : -1);
  problem.halo_gradient = (enum swathe_dtype)pick(state, 2);
  problem.target = (enum swathe_target)pick(state, 2);
  problem.layout = (enum swathe_layout)pick(state, 4);
  problem.ranks = 1 + (int32_t)pick(state, 65536);
  problem.tokens_per_rank = 1 + pick(state, INT32_MAX) * pick(state, 1000);
  return problem;
}

static void text_goes_round(void **state)
{
  uint64_t random = 1;
  (void)state;
  for (int i = 0; i < 2000; i++) {
    const struct swathe_problem problem = pick_problem(&random);
    struct swathe_problem back = pick_problem(&random);
    char text[SW_PROBLEM_TEXT], again[SW_PROBLEM_TEXT];

    assert_true(swathe_problem_format(&problem, text, sizeof text) < sizeof text);
    if (swathe_problem_parse(text, &back)) fail_msg("%s: %s", text, swathe_error());
    assert_same(&problem, &back);
    swathe_problem_format(&back, again, sizeof again);
    assert_string_equal(text, again);
  }
}

// The heads are judged together, after the whole text: the order of the fields must not matter.
static void any_order_gives_one_text(void **state)
{
  static const char *const texts[] = {
    "q_heads=8,kv_heads=2,window_left=127,softcap=30",
    "softcap=30,window_left=127,kv_heads=2,q_heads=8",
    "kv_heads=2,softcap=30,window_left=127,q_heads=8",
    "softcap=30.0,window_left=127,kv_heads=2,q_heads=8,",
    "q_heads=4,softcap=3e1,window_left=127,kv_heads=2,q_heads=8",  // the last one counts
  };
  char first[SW_PROBLEM_TEXT];

  (void)state;
  for (size_t i = 0; i < COUNT(texts); i++) {
    struct swathe_problem problem = fresh();
    char text[SW_PROBLEM_TEXT];
    assert_int_equal(swathe_problem_parse(texts[i], &problem), SWATHE_OK);
    swathe_problem_format(&problem, i ? text : first, SW_PROBLEM_TEXT);
    if (i) assert_string_equal(text, first);
  }
}

static void a_text_is_read_over_what_is_there(void **state)
{
  uint64_t random = 3;
  struct swathe_problem problem = pick_problem(&random), before = problem;

  (void)state;
  assert_int_equal(swathe_problem_parse("", &problem), SWATHE_OK);
  assert_same(&problem, &before);
  before.window_left = 5;
  assert_int_equal(swathe_problem_parse("window_left=5", &problem), SWATHE_OK);
  assert_same(&problem, &before);
}

static void format_tells_the_length_and_keeps_to_it(void **state)
{
  const struct swathe_problem problem = fresh();
  char whole[SW_PROBLEM_TEXT];
  const size_t length = swathe_problem_format(&problem, whole, sizeof whole);

  (void)state;
  assert_int_equal(strlen(whole), length);
  assert_int_equal(swathe_problem_format(&problem, NULL, 0), length);
  for (size_t size = 1; size <= length + 1; size++) {
    char *text = test_malloc(size);
    assert_int_equal(swathe_problem_format(&problem, text, size), length);
    assert_int_equal(strlen(text), size - 1);
    assert_memory_equal(text, whole, size - 1);
    test_free(text);
  }
}

// Every key of the longest values must fit what rooms reserve for it.
static void the_longest_text_fits(void **state)
{
  struct swathe_problem problem = fresh();
  (void)state;
  problem.q_heads = problem.kv_heads = 1 << 20;
  problem.head_dim_qk = problem.head_dim_v = 256;
  problem.window_left = problem.window_right = INT32_MAX;
  problem.dtype = SWATHE_BF16;
  problem.softcap = 1.0 / 3e-5;
  problem.scale = -1e-300 / 3;
  problem.target = SWATHE_CUDA;
  problem.layout = SWATHE_CONTIGUOUS;
  problem.ranks = 1 << 16;
  problem.tokens_per_rank = INT64_MAX;
  assert_int_equal(swathe_problem_check(&problem), SWATHE_OK);
  assert_true(swathe_problem_format(&problem, NULL, 0) < SW_PROBLEM_TEXT);
}

// ---- Refusals ----------------------------------------------------------------------------------

enum { BAD = SWATHE_BAD_PROBLEM, ABSENT = SWATHE_NOT_FOUND };

struct refusal {
  const char *text;
  int status;
  const char *words;  // the whole of swathe_error()
};

#define FIELD_NAMES                                                                          \
  "q_heads kv_heads head_dim_qk head_dim_v window_left window_right dtype sinks softcap scale " \
  "halo_gradient " \
  "target layout ranks tokens_per_rank"

static const struct refusal refusals[] = {
  // heads and dims
  { "q_heads=0", BAD, "0 query heads and 1 key heads: each must be from 1 to 1048576" },
  { "kv_heads=0", BAD, "1 query heads and 0 key heads: each must be from 1 to 1048576" },
  { "q_heads=-4,kv_heads=-2", BAD,
    "-4 query heads and -2 key heads: each must be from 1 to 1048576" },
  { "q_heads=2097152", BAD,
    "2097152 query heads and 1 key heads: each must be from 1 to 1048576" },
  { "q_heads=8,kv_heads=3", BAD, "8 query heads cannot share 3 key heads evenly" },
  { "q_heads=2,kv_heads=4", BAD, "2 query heads cannot share 4 key heads evenly" },
  { "head_dim_qk=0", BAD, "head dims 0 and 64: each must be from 1 to 256" },
  { "head_dim_qk=257", BAD, "head dims 257 and 64: each must be from 1 to 256" },
  { "head_dim_v=0", BAD, "head dims 64 and 0: each must be from 1 to 256" },
  { "head_dim_v=257", BAD, "head dims 64 and 257: each must be from 1 to 256" },
  // windows: never a sentinel below 0
  { "window_left=-1", BAD,
    "window_left is -1: a window counts tokens beside the query's own, from 0 on; say "
    "'unlimited' for none" },
  { "window_right=-3", BAD,
    "window_right is -3: a window counts tokens beside the query's own, from 0 on; say "
    "'unlimited' for none" },
  { "window_left=2147483648", BAD,
    "window_left is 2147483648: above 2^31-1 say 'unlimited'" },
  { "window_right=9223372036854775806", BAD,
    "window_right is 9223372036854775806: above 2^31-1 say 'unlimited'" },
  { "window_left=Unlimited", BAD, "window_left=Unlimited: not a whole number" },
  { "window_left=9223372036854775808", BAD,
    "window_left=9223372036854775808: not a whole number" },
  // numbers
  { "q_heads=", BAD, "q_heads=: not a whole number" },
  { "q_heads=4x", BAD, "q_heads=4x: not a whole number" },
  { "q_heads= 4", BAD, "q_heads= 4: not a whole number" },
  { "q_heads=1.5", BAD, "q_heads=1.5: not a whole number" },
  { "q_heads=4294967297", BAD, "q_heads=4294967297: too large" },
  { "ranks=-4294967297", BAD, "ranks=-4294967297: too large" },
  { "ranks=0", BAD, "0 ranks: from 1 to 65536" },
  { "ranks=65537", BAD, "65537 ranks: from 1 to 65536" },
  { "tokens_per_rank=0", BAD, "0 tokens per rank: at least 1" },
  { "sinks=2", BAD, "sinks=2: 0 or 1" },
  { "sinks=true", BAD, "sinks=true: 0 or 1" },
  { "sinks=", BAD, "sinks=: 0 or 1" },
  { "softcap=-1", BAD, "softcap -1: it must be 0 (off) or positive and below 1e6" },
  { "softcap=1e6", BAD, "softcap 1e+06: it must be 0 (off) or positive and below 1e6" },
  { "softcap=inf", BAD, "softcap inf: it must be 0 (off) or positive and below 1e6" },
  { "softcap=nan", BAD, "softcap nan: it must be 0 (off) or positive and below 1e6" },
  { "softcap=5,0", BAD, "'0' in the problem is not name=value" },
  { "softcap=", BAD, "softcap=: not a number" },
  { "softcap=1.5.2", BAD, "softcap=1.5.2: not a number" },
  { "scale=inf", BAD, "scale inf: it must be finite; 0 means 1/sqrt(head_dim_qk)" },
  { "scale=nan", BAD, "scale nan: it must be finite; 0 means 1/sqrt(head_dim_qk)" },
  { "scale=-1e6", BAD, "scale -1e+06: it must be finite; 0 means 1/sqrt(head_dim_qk)" },
  // names
  { "dtype=fp16", ABSENT, "no dtype is called 'fp16'; there are f32, bf16, f16\n  in dtype" },
  { "halo_gradient=f16", BAD,
    "halo_gradient f16: sums travel as f32 or bf16; f16 would overflow where a sum does not" },
  { "target=gpu", ABSENT, "no target is called 'gpu'; there are cpu, cuda\n  in target" },
  { "layout=ring", ABSENT,
    "no layout is called 'ring'; there are contiguous, zigzag, zigzag-doc, spans\n  in layout" },
  // the text itself
  { "window=128", BAD, "a problem has no field 'window'; there are " FIELD_NAMES },
  { "q_heads=4,Q_heads=4", BAD,
    "a problem has no field 'Q_heads'; there are " FIELD_NAMES },
  { "=4", BAD, "a problem has no field ''; there are " FIELD_NAMES },
  { "q_heads", BAD, "'q_heads' in the problem is not name=value" },
  { ",q_heads=4", BAD, "'' in the problem is not name=value" },
  { "q_heads=4,,ranks=2", BAD, "'' in the problem is not name=value" },
};

static void refusals_have_their_words_and_change_nothing(void **state)
{
  (void)state;
  for (size_t i = 0; i < COUNT(refusals); i++) {
    struct swathe_problem problem = fresh(), before = fresh();
    const int status = (int)swathe_problem_parse(refusals[i].text, &problem);
    if (status != refusals[i].status) fail_msg("%s: status %d", refusals[i].text, status);
    if (strcmp(swathe_error(), refusals[i].words))
      fail_msg("%s: said \"%s\"", refusals[i].text, swathe_error());
    assert_same(&problem, &before);
  }
}

static void an_overlong_text_is_refused(void **state)
{
  char text[SW_PROBLEM_TEXT + 1];
  struct swathe_problem problem = fresh();

  (void)state;
  memset(text, ' ', sizeof text);
  memcpy(text, "q_heads=", 8);
  memset(text + 8, '0', SW_PROBLEM_TEXT - 9);
  text[SW_PROBLEM_TEXT - 2] = '7';
  text[SW_PROBLEM_TEXT - 1] = 0;
  assert_int_equal(swathe_problem_parse(text, &problem), SWATHE_OK);  // the longest there may be
  assert_int_equal(problem.q_heads, 7);

  text[SW_PROBLEM_TEXT - 1] = '0';
  text[SW_PROBLEM_TEXT] = 0;
  assert_int_equal(swathe_problem_parse(text, &problem), SWATHE_BAD_PROBLEM);
  assert_string_equal(swathe_error(), "the problem's text is longer than 511 bytes");
  assert_int_equal(problem.q_heads, 7);
}

// Values that no text can say.
static void check_refuses_what_is_no_enum(void **state)
{
  struct swathe_problem problem = fresh();
  (void)state;
  problem.dtype = (enum swathe_dtype)7;
  assert_int_equal(swathe_problem_check(&problem), SWATHE_BAD_PROBLEM);
  assert_string_equal(swathe_error(), "dtype 7 is not one of enum swathe_dtype");
  problem = fresh();
  problem.target = (enum swathe_target)2;
  assert_int_equal(swathe_problem_check(&problem), SWATHE_BAD_PROBLEM);
  assert_string_equal(swathe_error(), "target 2 is not one of enum swathe_target");
  problem = fresh();
  problem.layout = (enum swathe_layout)4;
  assert_int_equal(swathe_problem_check(&problem), SWATHE_BAD_PROBLEM);
  assert_string_equal(swathe_error(), "layout 4 is not one of enum swathe_layout");
}

static void edges_are_let_through(void **state)
{
  static const char *const texts[] = {
    "q_heads=1048576", "q_heads=5,kv_heads=5", "head_dim_qk=256,head_dim_v=1", "window_left=0",
    "window_left=2147483647", "window_right=2147483647", "ranks=65536", "softcap=999999",
    "scale=-999999", "tokens_per_rank=9223372036854775807",
  };
  (void)state;
  for (size_t i = 0; i < COUNT(texts); i++) {
    struct swathe_problem problem = fresh();
    if (swathe_problem_parse(texts[i], &problem)) fail_msg("%s: %s", texts[i], swathe_error());
  }
}

// ---- Names and sizes ---------------------------------------------------------------------------

static void names_go_round(void **state)
{
  (void)state;
  for (enum swathe_dtype i = SWATHE_F32; i <= SWATHE_F16; i++) {
    enum swathe_dtype dtype = (enum swathe_dtype)9;
    assert_int_equal(swathe_dtype_parse(swathe_dtype_name(i), &dtype), SWATHE_OK);
    assert_int_equal(dtype, i);
  }
  for (enum swathe_target i = SWATHE_CPU; i <= SWATHE_CUDA; i++) {
    enum swathe_target target = (enum swathe_target)9;
    assert_int_equal(swathe_target_parse(swathe_target_name(i), &target), SWATHE_OK);
    assert_int_equal(target, i);
  }
  for (enum swathe_layout i = SWATHE_CONTIGUOUS; i <= SWATHE_SPANS; i++) {
    enum swathe_layout layout = (enum swathe_layout)9;
    assert_int_equal(swathe_layout_parse(swathe_layout_name(i), &layout), SWATHE_OK);
    assert_int_equal(layout, i);
  }
  assert_string_equal(swathe_dtype_name((enum swathe_dtype)3), "?");
  assert_string_equal(swathe_target_name((enum swathe_target)-1), "?");
  assert_string_equal(swathe_layout_name((enum swathe_layout)4), "?");
}

static void unknown_names_leave_the_output_alone(void **state)
{
  enum swathe_dtype dtype = SWATHE_BF16;
  (void)state;
  assert_int_equal(swathe_dtype_parse("", &dtype), SWATHE_NOT_FOUND);
  assert_string_equal(swathe_error(), "no dtype is called ''; there are f32, bf16, f16");
  assert_int_equal(swathe_dtype_parse("bf161", &dtype), SWATHE_NOT_FOUND);
  assert_int_equal(dtype, SWATHE_BF16);
}

static void sizes_follow_from_the_problem(void **state)
{
  struct swathe_problem problem = fresh();
  (void)state;
  assert_true(sw_problem_scale(&problem) == 0.125);
  assert_int_equal(sw_problem_elem_bytes(&problem), 4);
  assert_int_equal(sw_problem_token_bytes(&problem), 4 * 128);
  problem.q_heads = 40;
  problem.kv_heads = 8;
  problem.head_dim_qk = 192;
  problem.head_dim_v = 128;
  problem.dtype = SWATHE_BF16;
  problem.scale = -0.5;
  assert_true(sw_problem_scale(&problem) == -0.5);
  assert_int_equal(sw_problem_elem_bytes(&problem), 2);
  assert_int_equal(sw_problem_token_bytes(&problem), 2 * 8 * (192 + 128));
  problem.q_heads = problem.kv_heads = 1 << 20;
  problem.head_dim_qk = problem.head_dim_v = 256;
  problem.dtype = SWATHE_F32;
  assert_true(sw_problem_token_bytes(&problem) == (int64_t)1 << 31);  // past 32 bits
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(init_is_what_the_header_says),
    cmocka_unit_test(every_field_is_read_and_written),
    cmocka_unit_test(text_goes_round),
    cmocka_unit_test(any_order_gives_one_text),
    cmocka_unit_test(a_text_is_read_over_what_is_there),
    cmocka_unit_test(format_tells_the_length_and_keeps_to_it),
    cmocka_unit_test(the_longest_text_fits),
    cmocka_unit_test(refusals_have_their_words_and_change_nothing),
    cmocka_unit_test(an_overlong_text_is_refused),
    cmocka_unit_test(check_refuses_what_is_no_enum),
    cmocka_unit_test(edges_are_let_through),
    cmocka_unit_test(names_go_round),
    cmocka_unit_test(unknown_names_leave_the_output_alone),
    cmocka_unit_test(sizes_follow_from_the_problem),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
