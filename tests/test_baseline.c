// test_baseline.c: the other ways of sharing: every result as with the halo, whatever the layout,
// the group and the documents; what they move and hold; what they refuse.
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "group.h"
#include "property.h"
#include "scratch.h"

enum { STRATEGIES = SWATHE_RING_ALL + 1, MOST_RANKS = PROPERTY_RANKS };

static struct swathe_context *context;
static const char *scratch;

static int set_up(void **state)
{
  char database[64];
  (void)state;
  scratch = scratch_make("baseline");
  if (!scratch) return -1;
  snprintf(database, sizeof database, "%s/tuning.db", scratch);
  const char *cache = getenv("TEST_CACHE_DIR");
  const struct swathe_options options = { .database = database, .cache = cache ? cache : scratch,
                                          .threads = 1 };
  if (swathe_open(&options, &context)) fail_msg("%s", swathe_error());
  return 0;
}

static int tear_down(void **state)
{
  swathe_close(context);
  return scratch_remove(state);
}

static struct swathe_problem problem_of(const char *text)
{
  struct swathe_problem problem;
  swathe_problem_init(&problem);
  if (swathe_problem_parse(text, &problem)) fail_msg("%s: %s", text, swathe_error());
  return problem;
}

static bool divides_heads(const struct swathe_problem *problem, int32_t ranks)
{
  return problem->q_heads % ranks == 0 && problem->kv_heads % ranks == 0;
}

// The limits of `swathe run --check`; sums that are rounded at every rank on their way home may be
// off by a rounding of each.
static struct sequence_tolerance tolerance_of(const struct swathe_problem *problem, int32_t ranks)
{
  const bool narrow = problem->halo_gradient == SWATHE_BF16;
  struct sequence_tolerance tolerance = { 2e-5, 2e-5, 1e-4 };
  if (problem->dtype == SWATHE_BF16) tolerance = (struct sequence_tolerance){ 2e-2, 1e-3, 2e-2 };
  if (narrow) tolerance.gradient = 2e-2 + 4e-3 * ranks;
  return tolerance;
}

// Bytes that every rank receives in one forward and one backward, by the formulas of swathe.h.
static void expect_bytes(const struct group_case *group, const int64_t *moved)
{
  const struct swathe_problem *p = group->problem;
  const struct swathe_sharding *sharding = group->sharding;
  const int64_t elem = p->dtype == SWATHE_BF16 ? 2 : 4;
  const int64_t sum = p->halo_gradient == SWATHE_BF16 ? 2 : 4;
  const int64_t token = p->kv_heads * (p->head_dim_qk + p->head_dim_v) * (int64_t)sharding->batch;
  const int64_t times = group->keep_halo ? 1 : 2;  // keys travel
  struct swathe_traffic traffic[MOST_RANKS];
  int64_t all_rows = 0, ring_rows = 0, home_bytes = 0;

  assert_int_equal(swathe_plan(p, sharding, NULL, NULL, traffic), SWATHE_OK);
  for (int32_t r = 0; r < sharding->ranks; r++) all_rows += traffic[r].rows;
  for (int32_t r = 0; r < sharding->ranks; r++) {
    const struct swathe_traffic *t = &traffic[r];
    switch (group->strategy) {
    case SWATHE_RING:
      ring_rows += t->ring_bytes / (token * elem);
      home_bytes += moved[r] - times * t->ring_bytes;
      break;
    case SWATHE_A2A: {
      // q, k, v go in and out and lse come back; dout goes in and dq, dk, dv, which are as large as
      // q, k, v, come back; what forward did not keep goes in again, all rows of it
      const int64_t ranks = sharding->ranks, batch = sharding->batch, others = all_rows - t->rows;
      const int64_t q = p->q_heads / ranks * p->head_dim_qk * elem * batch;
      const int64_t kv = token / ranks * elem, lse = p->q_heads / ranks * 4 * batch;
      const int64_t out = p->q_heads / ranks * p->head_dim_v * elem * batch;
      const int64_t back = t->rows * (ranks - 1);
      int64_t want = t->a2a_bytes + back * lse + others * out + back * (q + kv);
      if (!group->keep_halo) want += others * (q + kv + out + lse);
      assert_int_equal(moved[r], want);
      break;
    }
    default:
      // home come the blocks of all ranks but the next, whose way begins here
      assert_int_equal(moved[r],
                       times * t->all_gather_bytes +
                           (all_rows - traffic[(r + 1) % sharding->ranks].rows) * token * sum);
    }
  }
  // a block comes home as far as it went
  if (group->strategy == SWATHE_RING) assert_int_equal(home_bytes, ring_rows * token * sum);
}

static void expect_right(const struct group_case *group, const struct sequence_tolerance *tolerance,
                         struct sequence *sequence, int64_t *moved, const char *line)
{
  const struct swathe_problem *problem = group->problem;
  const int32_t ranks = group->sharding->ranks;
  char words[1024] = "", text[512];

  const enum swathe_status status = group_run(group, sequence, moved, words, sizeof words);
  if (group->strategy == SWATHE_A2A && !divides_heads(problem, ranks)) {
    assert_int_equal(status, SWATHE_UNSUPPORTED);
    assert_non_null(strstr(words, "do not divide by"));
    return;
  }
  if (!status && sequence_compare(sequence, true, *tolerance, words, sizeof words)) return;
  swathe_problem_format(problem, text, sizeof text);
  fail_msg("%s: %s\n  %s, %d ranks, %lld tokens, batch %d\n  %s\n  %s",
           swathe_strategy_name(group->strategy), words,
           swathe_layout_name(group->sharding->layout), ranks, (long long)group->sharding->tokens,
           group->sharding->batch, text, line);
}

// ---- Results ------------------------------------------------------------------------------------

// Windows around shares, one hop and many, both sides, both layouts, groups of 1 to 4 and 8.
static void results_equal_the_reference(void **state)
{
  static const char *const texts[] = {
    "q_heads=8,kv_heads=8,head_dim_qk=16,head_dim_v=16,window_left=7",
    "q_heads=24,kv_heads=12,head_dim_qk=16,head_dim_v=8,window_left=40,window_right=5,dtype=bf16,"
    "sinks=1",
    "q_heads=4,kv_heads=4,head_dim_qk=16,head_dim_v=16,window_left=unlimited",
    "q_heads=8,kv_heads=8,head_dim_qk=16,head_dim_v=16,window_left=21,window_right=21,"
    "halo_gradient=bf16",
    "q_heads=5,kv_heads=1,head_dim_qk=16,head_dim_v=16,window_left=0",
  };
  static const int32_t groups[] = { 1, 2, 3, 4, 8 };
  int64_t refused = 0;
  (void)state;

  for (size_t t = 0; t < sizeof texts / sizeof *texts; t++)
    for (size_t g = 0; g < sizeof groups / sizeof *groups; g++)
      for (int layout = 0; layout < 2; layout++) {
        struct swathe_problem problem = problem_of(texts[t]);
        problem.ranks = groups[g];
        const struct swathe_sharding sharding = { .layout = (enum swathe_layout)layout,
                                                  .ranks = groups[g],
                                                  .batch = 1 + layout,
                                                  .tokens = 61 };
        const struct sequence_tolerance tolerance = tolerance_of(&problem, groups[g]);
        struct sequence *sequence = sequence_make(&problem, &sharding, 7, 1);
        sequence_solve(sequence);
        for (int s = SWATHE_ALL_GATHER; s < STRATEGIES; s++) {
          const bool keep = (s + layout) % 2;
          const struct group_case group = {
            .context = context, .problem = &problem, .sharding = &sharding,
            .form = { .head_major = g % 2, .gap = layout }, .script = "fb",
            .strategy = (enum swathe_strategy)s, .keep_halo = keep
          };
          int64_t moved[MOST_RANKS] = { 0 };
          expect_right(&group, &tolerance, sequence, moved, "");
          if (s == SWATHE_A2A && !divides_heads(&problem, groups[g])) refused++;
          else if (layout == SWATHE_CONTIGUOUS) expect_bytes(&group, moved);
        }
        sequence_free(sequence);
      }
  assert_int_equal(refused, 2 * (1 + 1 + 2 + 1 + 4));
}

// Documents, padding, uneven and empty shares, spans in any order, batches, strides, shardings that
// change: what the property test draws for the halo.
static void random_cases_are_right(void **state)
{
  enum { KERNELS = 8, CASES = 12 };
  uint64_t random = 20;
  (void)state;

  for (int k = 0; k < KERNELS; k++) {
    struct property property;
    property_draw_kernel(&random, &property);
    property.isa = PROPERTY_BEST;
    property.config = 0;
    for (int c = 0; c < CASES; c++) {
      property_draw_problem(&random, &property);
      property_draw_data(&random, &property);
      property.gain = 1;
      property.scale = 0;
      struct property other = property;
      other.layout = property.layout == SWATHE_CONTIGUOUS ? SWATHE_ZIGZAG : SWATHE_CONTIGUOUS;
      struct property_sharding *sharding = property_sharding_make(&property);
      struct property_sharding *before = property_sharding_make(&other);
      const struct swathe_problem problem = property_problem(&property);
      const struct sequence_tolerance tolerance = tolerance_of(&problem, (int32_t)property.ranks);
      struct sequence *sequence =
          sequence_make(&problem, &sharding->view, (uint64_t)property.seed, 1);
      char line[PROPERTY_TEXT];

      property_format(&property, line, sizeof line);
      sequence_solve_rounded(sequence);
      for (int s = SWATHE_ALL_GATHER; s < STRATEGIES; s++) {
        const struct group_case group = {
          .context = context, .problem = &problem, .sharding = &sharding->view,
          .before = property.before ? &before->view : NULL,
          .form = { property.head_major != 0, property.gap },
          .script = property_scripts[property.script],
          .strategy = (enum swathe_strategy)s, .keep_halo = property.keep_halo != 0
        };
        int64_t moved[MOST_RANKS] = { 0 };
        expect_right(&group, &tolerance, sequence, moved, line);
      }
      sequence_free(sequence);
      property_sharding_free(sharding);
      property_sharding_free(before);
    }
  }
}

// ---- Bits, memory, words ------------------------------------------------------------------------

static struct swathe_problem small_problem(int32_t ranks)
{
  struct swathe_problem problem =
      problem_of("q_heads=8,kv_heads=4,head_dim_qk=16,head_dim_v=16,window_left=15,sinks=1");
  problem.ranks = ranks;
  return problem;
}

// What one run computed, as bits.
static float *keep_bits(const struct sequence *sequence, size_t *bytes)
{
  const size_t rows = (size_t)(sequence->view.batch * sequence->view.tokens);
  float *kept = NULL;
  *bytes = 0;
  for (enum sequence_array a = SEQUENCE_OUT; a < SEQUENCE_ARRAYS; a++) {
    size_t elems;
    sequence_row(sequence, a, 0, 0, &elems);
    kept = realloc(kept, *bytes + rows * elems * sizeof(float));
    memcpy((char *)kept + *bytes, sequence->got[a], rows * elems * sizeof(float));
    *bytes += rows * elems * sizeof(float);
  }
  return kept;
}

static bool same_bits(const struct sequence *sequence, const float *kept)
{
  size_t bytes;
  float *now = keep_bits(sequence, &bytes);
  const bool same = !memcmp(now, kept, bytes);
  free(now);
  return same;
}

// A second run has the bits of the first, and so has a muted one over the same inputs, which moves
// nothing.  (Dealt heads never reach the caller's tensors in a muted run.)
static void results_are_bit_equal(void **state)
{
  const struct swathe_problem problem = small_problem(4);
  const struct swathe_sharding sharding = { .layout = SWATHE_ZIGZAG, .ranks = 4, .batch = 2,
                                            .tokens = 211 };
  (void)state;
  for (int s = 0; s < STRATEGIES; s++) {
    static const char *const scripts[] = { "fb", "fbpfb", "fbpmfb" };
    struct sequence *sequence = sequence_make(&problem, &sharding, 3, 1);
    int64_t once[4] = { 0 };
    float *kept = NULL;
    for (int i = 0; i < (s == SWATHE_A2A ? 2 : 3); i++) {
      const struct group_case group = { .context = context, .problem = &problem,
                                        .sharding = &sharding, .script = scripts[i],
                                        .strategy = (enum swathe_strategy)s, .keep_halo = true };
      int64_t moved[4] = { 0 };
      char words[1024] = "";
      size_t bytes;
      if (group_run(&group, sequence, moved, words, sizeof words)) fail_msg("%s", words);
      if (!kept) {
        kept = keep_bits(sequence, &bytes);
        memcpy(once, moved, sizeof once);
      }
      assert_true(same_bits(sequence, kept));
      for (int r = 0; r < 4; r++) assert_int_equal(moved[r], once[r] * (i == 1 ? 2 : 1));
    }
    free(kept);
    sequence_free(sequence);
  }
}

static int64_t forward_memory(enum swathe_strategy strategy, int64_t tokens)
{
  const struct swathe_problem problem = small_problem(4);
  const struct swathe_sharding sharding = { .layout = SWATHE_CONTIGUOUS, .ranks = 4, .batch = 1,
                                            .tokens = tokens };
  struct sequence *sequence = sequence_make(&problem, &sharding, 3, 1);
  int64_t memory[4] = { 0 }, most = 0;
  const struct group_case group = { .context = context, .problem = &problem,
                                    .sharding = &sharding, .script = "f", .strategy = strategy,
                                    .memory_bytes = memory };
  char words[1024] = "";
  if (group_run(&group, sequence, NULL, words, sizeof words)) fail_msg("%s", words);
  sequence_free(sequence);
  for (int r = 0; r < 4; r++)
    if (memory[r] > most) most = memory[r];
  return most;
}

// The halo's buffers hold what comes and what goes, whatever the length; the others' hold shares.
static void memory_is_what_the_strategy_needs(void **state)
{
  const int64_t token = 4 * (16 + 16) * 4, halo = 2 * 15 * token;
  (void)state;
  for (int64_t tokens = 256; tokens <= 1024; tokens *= 4) {
    const int64_t share = tokens / 4 * token;
    assert_int_equal(forward_memory(SWATHE_HALO, tokens), halo);
    assert_int_equal(forward_memory(SWATHE_ALL_GATHER, tokens), halo + 4 * share + 2 * share);
    assert_int_equal(forward_memory(SWATHE_RING, tokens), halo + 2 * share);
    assert_int_equal(forward_memory(SWATHE_RING_ALL, tokens), halo + 2 * share);
    // all tokens' q, k, v, out and lse of a quarter of the heads, and a stage of q, k and v
    const int64_t q = 8 * 16 * 4, lse = 8 * 4;
    assert_true(forward_memory(SWATHE_A2A, tokens) >=
                tokens * (2 * q + token + lse) / 4 + tokens / 4 * (q + token));
  }
}

struct maker {
  struct swathe_transport *transport;
  struct swathe_problem problem;
  enum swathe_strategy strategy;
  enum swathe_status status;
  char words[512];
};

static void *make_layer(void *arg)
{
  struct maker *maker = arg;
  struct swathe_layer *layer = NULL;
  maker->status = swathe_layer_create_strategy(context, &maker->problem, maker->transport,
                                               maker->strategy, &layer);
  snprintf(maker->words, sizeof maker->words, "%s", swathe_error());
  swathe_layer_destroy(layer);
  return NULL;
}

static void ranks_agree_on_a_strategy(void **state)
{
  struct swathe_threads *threads = NULL;
  struct maker makers[2];
  pthread_t ids[2];
  (void)state;
  assert_int_equal(swathe_threads_create(2, 20, &threads), SWATHE_OK);
  for (int r = 0; r < 2; r++) {
    makers[r] = (struct maker){ .transport = swathe_threads_rank(threads, r),
                                .problem = small_problem(2),
                                .strategy = r ? SWATHE_RING : SWATHE_ALL_GATHER };
    pthread_create(&ids[r], NULL, make_layer, &makers[r]);
  }
  for (int r = 0; r < 2; r++) pthread_join(ids[r], NULL);
  swathe_threads_destroy(threads);
  for (int r = 0; r < 2; r++) {
    assert_int_equal(makers[r].status, SWATHE_DISAGREE);
    assert_non_null(strstr(makers[r].words, "ring"));
    assert_non_null(strstr(makers[r].words, "all_gather"));
  }
}

static void what_cannot_be_is_refused_in_words(void **state)
{
  struct maker cuda = { .problem = small_problem(1), .strategy = SWATHE_RING };
  struct maker unknown = { .problem = small_problem(1), .strategy = (enum swathe_strategy)99 };
  enum swathe_strategy strategy = SWATHE_HALO;
  (void)state;

  cuda.problem.target = SWATHE_CUDA;
  cuda.problem.dtype = SWATHE_BF16;
  make_layer(&cuda);
  assert_int_not_equal(cuda.status, SWATHE_OK);
  make_layer(&unknown);
  assert_int_equal(unknown.status, SWATHE_BAD_USE);
  assert_non_null(strstr(unknown.words, "99"));
  for (int s = 0; s < STRATEGIES; s++) {
    assert_int_equal(swathe_strategy_parse(swathe_strategy_name((enum swathe_strategy)s),
                                           &strategy), SWATHE_OK);
    assert_int_equal(strategy, s);
  }
  assert_int_equal(swathe_strategy_parse("ulysses", &strategy), SWATHE_NOT_FOUND);
  assert_non_null(strstr(swathe_error(), "a2a"));
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(results_equal_the_reference),
    cmocka_unit_test(random_cases_are_right),
    cmocka_unit_test(results_are_bit_equal),
    cmocka_unit_test(memory_is_what_the_strategy_needs),
    cmocka_unit_test(ranks_agree_on_a_strategy),
    cmocka_unit_test(what_cannot_be_is_refused_in_words),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
