// test_cases.c: what public reports of other implementations got wrong, one test a report.
//
// Values are such that dropping the feature shows: where that is the report, the reference itself,
// asked without the feature, must be off by more than ten times the tolerance.  The reports that
// need a GPU or something else that does not exist here are listed at the end.
//
//   test_cases cuda  the same on the CUDA target, in bf16, on the emulated driver
//   TEST_CACHE_DIR   a directory for compiled kernels that is kept, instead of a temporary one
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "group.h"
#include "layer.h"
#include "scratch.h"

enum { MOST_RANKS = 16 };

// Two heads of 16 dims: small enough for a table of them.
#define SMALL "q_heads=2,head_dim_qk=16,head_dim_v=16"

static struct swathe_context *context;
static const char *temporary;
static const char *cache;
static bool cuda;

// ---- Around every case --------------------------------------------------------------------------

static struct swathe_context *open_context(const char *database)
{
  const struct swathe_options options = { .cache = cache, .threads = 1, .database = database };
  struct swathe_context *opened = NULL;
  if (swathe_open(&options, &opened)) fail_msg("%s", swathe_error());
  return opened;
}

static int set_up(void **state)
{
  const char *kept = getenv("TEST_CACHE_DIR");
  (void)state;
  temporary = scratch_make("cases");
  if (!temporary) return -1;
  cache = kept && *kept ? kept : temporary;
  context = open_context("");
  return 0;
}

static int tear_down(void **state)
{
  swathe_close(context);
  return scratch_remove(state);
}

// A whole sequence and who holds it.
struct scene {
  struct swathe_problem problem;
  struct swathe_sharding sharding;
  struct sequence *sequence;
  double gain;
};

static struct scene scene_of(const char *text, struct swathe_sharding sharding, double gain)
{
  struct scene scene = { .sharding = sharding, .gain = gain };
  if (!scene.sharding.batch) scene.sharding.batch = 1;
  swathe_problem_init(&scene.problem);
  if (swathe_problem_parse(text, &scene.problem)) fail_msg("%s: %s", text, swathe_error());
  if (cuda) scene.problem.target = SWATHE_CUDA;
  if (cuda && scene.problem.dtype == SWATHE_F32) scene.problem.dtype = SWATHE_BF16;
  scene.problem.ranks = scene.sharding.ranks;
  scene.problem.layout = scene.sharding.layout;
  scene.sequence = sequence_make(&scene.problem, &scene.sharding, 7, gain);
  return scene;
}

static struct sequence_tolerance tolerance_of(const struct scene *scene)
{
  return scene->problem.dtype != SWATHE_F32
             ? (struct sequence_tolerance){ 2e-2, 1e-3, 2e-2 }
             : (struct sequence_tolerance){ 2e-5 * scene->gain, 2e-5 * scene->gain,
                                            1e-4 * scene->gain };
}

static void run_scene(struct scene *scene, const char *script)
{
  const struct group_case group = { .context = context,
                                    .problem = &scene->problem,
                                    .form = { .gap = 1 },
                                    .sharding = &scene->sharding,
                                    .script = script };
  char words[1024] = "";
  if (group_run(&group, scene->sequence, NULL, words, sizeof words)) fail_msg("%s", words);
}

// Out, lse and every gradient equal the reference; rows outside the contract are as they must be.
static void expect_right(struct scene *scene)
{
  char words[1024] = "", text[512];
  sequence_solve(scene->sequence);
  run_scene(scene, "fb");
  swathe_problem_format(&scene->problem, text, sizeof text);
  if (!sequence_compare(scene->sequence, true, tolerance_of(scene), words, sizeof words))
    fail_msg("%s\n  %s, %d ranks, %lld tokens\n  %s", words,
             swathe_layout_name(scene->sharding.layout), scene->sharding.ranks,
             (long long)scene->sharding.tokens, text);
}

static void expect_right_of(const char *text, struct swathe_sharding sharding)
{
  struct scene scene = scene_of(text, sharding, 1);
  expect_right(&scene);
  sequence_free(scene.sequence);
}

static size_t elements_of(const struct sequence *sequence, enum sequence_array array)
{
  const struct swathe_problem *p = &sequence->problem;
  const int dims[SEQUENCE_ARRAYS] = {
    [SEQUENCE_Q] = p->head_dim_qk,   [SEQUENCE_K] = p->head_dim_qk,  [SEQUENCE_V] = p->head_dim_v,
    [SEQUENCE_DOUT] = p->head_dim_v, [SEQUENCE_OUT] = p->head_dim_v, [SEQUENCE_LSE] = 1,
    [SEQUENCE_DQ] = p->head_dim_qk,  [SEQUENCE_DK] = p->head_dim_qk, [SEQUENCE_DV] = p->head_dim_v,
  };
  const bool keys =
      array == SEQUENCE_K || array == SEQUENCE_V || array == SEQUENCE_DK || array == SEQUENCE_DV;
  return (size_t)(sequence->view.batch * sequence->view.tokens * (keys ? p->kv_heads : p->q_heads) *
                  dims[array]);
}

// The reference for the same inputs, but `text` for the problem, is far from the scene's in
// `array`: so taking the one for the other would have been seen.  After expect_right.
static void expect_other(const struct scene *scene, const char *text, enum sequence_array array)
{
  struct scene other = scene_of(text, scene->sharding, scene->gain);
  const struct sequence_tolerance most = tolerance_of(scene);
  const double tolerance = array == SEQUENCE_OUT   ? most.out
                           : array == SEQUENCE_LSE ? most.lse
                                                   : most.gradient;
  double worst = 0;

  if (cuda) {  // bf16 tells less apart; that the case can fail is shown on the CPU
    sequence_free(other.sequence);
    return;
  }
  for (enum sequence_array a = SEQUENCE_Q; a <= SEQUENCE_DOUT; a++)
    memcpy(other.sequence->given[a], scene->sequence->given[a],
           elements_of(scene->sequence, a) * sizeof(float));
  sequence_solve(other.sequence);
  for (size_t i = 0; i < elements_of(scene->sequence, array); i++) {
    const double want = scene->sequence->want[array][i], got = other.sequence->want[array][i];
    if (want != got) worst = fmax(worst, fabs(got - want) / fmax(1, fabs(want)));
  }
  if (!(worst > 10 * tolerance))
    fail_msg("%s of %s is only %g away: this case cannot fail", sequence_array_name(array), text,
             worst);
  sequence_free(other.sequence);
}

// Every computed bit of both sequences.
static void expect_same_bits(const struct sequence *a, const struct sequence *b, const char *what)
{
  for (enum sequence_array array = SEQUENCE_OUT; array < SEQUENCE_ARRAYS; array++)
    if (memcmp(a->got[array], b->got[array], elements_of(a, array) * sizeof(float)))
      fail_msg("%s of %s is not bit-equal", sequence_array_name(array), what);
  if (memcmp(a->got_dsink, b->got_dsink, (size_t)a->problem.q_heads * sizeof(double)))
    fail_msg("dsink of %s is not bit-equal", what);
}

// The group's traffic, without running it.
static struct swathe_traffic traffic_of(const struct scene *scene, int32_t rank)
{
  struct swathe_traffic traffic[MOST_RANKS];
  assert_int_equal(swathe_plan(&scene->problem, &scene->sharding, NULL, NULL, traffic), SWATHE_OK);
  return traffic[rank];
}

// ---- The window ---------------------------------------------------------------------------------

// huggingface/transformers#39408, NVIDIA/TransformerEngine#1197: one backend counts the query's own
// key into the window and another does not, so a window of W showed W+1 keys, or W-1.
static void b01_a_window_shows_exactly_its_keys(void **state)
{
  static const int windows[] = { 1, 2, 3 };
  (void)state;
  for (int w = 0; w < 3; w++)
    for (int32_t ranks = 1; ranks <= 4; ranks++) {
      char text[128];
      snprintf(text, sizeof text, "head_dim_qk=6,head_dim_v=6,window_left=%d", windows[w] - 1);
      struct scene scene =
          scene_of(text, (struct swathe_sharding){ .ranks = ranks, .tokens = 6 }, 1);
      memset(scene.sequence->given[SEQUENCE_Q], 0, 36 * sizeof(float));
      memset(scene.sequence->given[SEQUENCE_K], 0, 36 * sizeof(float));
      for (int i = 0; i < 36; i++) scene.sequence->given[SEQUENCE_V][i] = i / 6 == i % 6;
      expect_right(&scene);
      for (int i = 0; i < 6; i++)
        for (int j = 0; j < 6; j++) {
          const int keys = i + 1 < windows[w] ? i + 1 : windows[w];
          const double want = j <= i && j > i - windows[w] ? 1.0 / keys : 0;
          assert_true(fabs((double)scene.sequence->got[SEQUENCE_OUT][i * 6 + j] - want) <
                      (cuda ? 1e-3 : 1e-6));
        }
      sequence_free(scene.sequence);
    }
}

// jax-ml/jax#39576: a window with a left bound and right bound 0, not marked causal, saw all the
// future.
static void b02_each_side_is_bounded_by_itself(void **state)
{
  static const int sides[][2] = { { 4, 0 }, { 0, 2 }, { 3, 2 }, { 0, 0 } };
  const struct swathe_sharding sharding = { .ranks = 3, .tokens = 19 };
  (void)state;
  for (int i = 0; i < 4; i++) {
    char text[128];
    snprintf(text, sizeof text, SMALL ",window_left=%d,window_right=%d", sides[i][0], sides[i][1]);
    struct scene scene = scene_of(text, sharding, 1);
    expect_right(&scene);
    snprintf(text, sizeof text, SMALL ",window_left=%d,window_right=unlimited", sides[i][0]);
    expect_other(&scene, text, SEQUENCE_OUT);
    snprintf(text, sizeof text, SMALL ",window_left=unlimited,window_right=%d", sides[i][1]);
    expect_other(&scene, text, SEQUENCE_DV);
    sequence_free(scene.sequence);
  }
}

// Dao-AILab/flash-attention#1133, unslothai/unsloth#8253: a window as long as the sequence was not
// the causal result, and a window of 0 or less meant "off" in one place and "nothing is visible" in
// another.
static void b03_whole_windows_are_causal_and_none_is_refused(void **state)
{
  static const int64_t windows[] = { 17, 18, 1000, INT32_MAX };
  static const int64_t refused[] = { 0, -1, -3 };
  const struct swathe_sharding sharding = { .ranks = 2, .tokens = 17 };
  struct scene causal = scene_of("head_dim_qk=16,head_dim_v=16,window_left=unlimited", sharding, 1);
  (void)state;
  expect_right(&causal);
  for (int i = 0; i < 4; i++) {
    char text[128];
    snprintf(text, sizeof text, "head_dim_qk=16,head_dim_v=16,window_left=%lld",
             (long long)windows[i] - 1);
    struct scene scene = scene_of(text, sharding, 1);
    run_scene(&scene, "fb");
    expect_same_bits(scene.sequence, causal.sequence, text);
    sequence_free(scene.sequence);
  }
  for (int i = 0; i < 3; i++) {
    struct swathe_layer *layer = NULL;
    causal.problem.window_left = refused[i] - 1;
    assert_int_equal(swathe_layer_create(context, &causal.problem, NULL, &layer),
                     SWATHE_BAD_PROBLEM);
    assert_non_null(strstr(swathe_error(), "window_left"));
    assert_null(layer);
  }
  sequence_free(causal.sequence);
}

// Dao-AILab/flash-attention#443, pytorch/pytorch#41508: a row, or a whole tile, that sees nothing
// gave NaN, and one such row spoilt every gradient.  The documents are the reported ones.
static void b05_what_sees_nothing_spoils_nothing(void **state)
{
  static const int64_t starts[] = { 0, 76, 110, 256 }, padded[] = { 0, 80, 120, 270 };
  const char *text = "head_dim_qk=32,head_dim_v=32,window_left=1";
  (void)state;
  for (int32_t ranks = 1; ranks <= 3; ranks++) {
    expect_right_of(text,
                    (struct swathe_sharding){
                        .ranks = ranks, .tokens = 256, .documents = 3, .document_starts = starts });
    expect_right_of(text, (struct swathe_sharding){ .ranks = ranks,
                                                    .tokens = 280,
                                                    .documents = 3,
                                                    .document_starts = starts,
                                                    .document_starts_padded = padded });
    expect_right_of(text, (struct swathe_sharding){ .ranks = ranks, .tokens = 33 });
  }
}

// huggingface/accelerate#4177, PrimeIntellect-ai/prime-rl#2828: the window was dropped when context
// parallelism was switched on, and full attention was trained.
static void b17_the_window_is_never_dropped(void **state)
{
  (void)state;
  for (int layout = SWATHE_CONTIGUOUS; layout <= SWATHE_ZIGZAG_DOCUMENT; layout++)
    for (int32_t ranks = 1; ranks <= 4; ranks++) {
      struct scene scene =
          scene_of(SMALL ",window_left=3",
                   (struct swathe_sharding){
                       .layout = (enum swathe_layout)layout, .ranks = ranks, .tokens = 64 },
                   1);
      expect_right(&scene);
      for (int a = SEQUENCE_OUT; a < SEQUENCE_ARRAYS; a++)
        expect_other(&scene, SMALL, (enum sequence_array)a);
      sequence_free(scene.sequence);
    }
}

// huggingface/transformers#43030: a two-sided window printed as 128 is 64 + itself + 64: 129 keys.
// With q = 0 the lse is the logarithm of the number of keys.
static void b33_two_sides_show_one_key_more(void **state)
{
  struct scene scene = scene_of("head_dim_qk=16,head_dim_v=16,window_left=64,window_right=64",
                                (struct swathe_sharding){ .ranks = 4, .tokens = 300 }, 0);
  (void)state;
  scene.gain = 1;
  expect_right(&scene);
  for (int i = 0; i < 300; i++) {
    const int before = i < 64 ? i : 64, after = 299 - i < 64 ? 299 - i : 64;
    assert_true(fabs((double)scene.sequence->got[SEQUENCE_LSE][i] - log(before + 1 + after)) <
                1e-5);
  }
  for (int32_t r = 0; r < 4; r++) {
    assert_int_equal(traffic_of(&scene, r).peers, r == 0 || r == 3 ? 1 : 2);
    assert_int_equal(traffic_of(&scene, r).halo_tokens, r == 0 || r == 3 ? 64 : 128);
  }
  sequence_free(scene.sequence);
}

// open-lm-engine/lm-engine#447: windows at and around a multiple of the block were wrong.
static void b34_windows_around_a_multiple_of_the_share(void **state)
{
  static const int windows[] = { 15, 16, 17, 31, 32, 33 };
  (void)state;
  for (int w = 0; w < 6; w++)
    for (int32_t ranks = 2; ranks <= 4; ranks++) {
      char text[128];
      snprintf(text, sizeof text, SMALL ",window_left=%d", windows[w] - 1);
      expect_right_of(text, (struct swathe_sharding){ .ranks = ranks, .tokens = 16 * ranks });
    }
}

// ---- Sinks and softcap --------------------------------------------------------------------------

// Dao-AILab/flash-attention#2752: a sink that took no part in the running maximum gave an infinite
// lse when it was large, and NaN where there was no key.
static void b06_a_sink_of_any_size_joins_the_maximum(void **state)
{
  static const float sinks[] = { -1e4f, 0, 0.5f, 30, 100 };
  static const int64_t starts[] = { 0, 0, 20, 20, 33 };  // two of the documents are empty
  (void)state;
  for (int32_t ranks = 1; ranks <= 2; ranks++) {
    struct scene scene =
        scene_of("q_heads=5,head_dim_qk=16,head_dim_v=16,window_left=7,sinks=1",
                 (struct swathe_sharding){
                     .ranks = ranks, .tokens = 40, .documents = 4, .document_starts = starts },
                 1);
    memcpy(scene.sequence->sink, sinks, sizeof sinks);
    expect_right(&scene);
    for (int i = 0; i < 33; i++)
      assert_true(fabs((double)scene.sequence->got[SEQUENCE_LSE][i * 5 + 4] - 100) < 1e-4);
    sequence_free(scene.sequence);
  }
}

// Sinks that matter to the result, from none to nearly all of the weight.
static struct scene scene_with_sinks(int32_t ranks)
{
  static const float sinks[] = { -2, 0, 3, 8, 30 };
  struct scene scene = scene_of("q_heads=5,head_dim_qk=16,head_dim_v=16,window_left=7,sinks=1",
                                (struct swathe_sharding){ .ranks = ranks, .tokens = 40 }, 1);
  memcpy(scene.sequence->sink, sinks, sizeof sinks);
  return scene;
}

// NVIDIA/TransformerEngine#2541: the learnable sink was dropped between ranks; its gradient was
// exactly 0, and a sink initialised to 0 hid it.
static void b07_a_sink_is_applied_once_per_row(void **state)
{
  static const int32_t ranks[] = { 1, 2, 4 };
  (void)state;
  for (int i = 0; i < 3; i++) {
    struct scene scene = scene_with_sinks(ranks[i]);
    expect_right(&scene);
    for (int a = SEQUENCE_OUT; a < SEQUENCE_ARRAYS; a++)
      expect_other(&scene, "q_heads=5,head_dim_qk=16,head_dim_v=16,window_left=7",
                   (enum sequence_array)a);
    sequence_free(scene.sequence);
  }
}

// NVIDIA/Megatron-LM#7452: the sinks' gradients were counted wrongly across ranks.  Each rank gives
// its part.
static void b35_the_sinks_gradients_add_up(void **state)
{
  static const int32_t ranks[] = { 1, 2, 4 };
  (void)state;
  for (int i = 0; i < 3; i++) {
    struct scene scene = scene_with_sinks(ranks[i]);
    expect_right(&scene);
    int large = 0;
    for (int h = 0; h < 5; h++) {
      const double want = scene.sequence->want_dsink[h];
      assert_true(fabs(scene.sequence->got_dsink[h] - want) <= 1e-4 * fmax(1, fabs(want)));
      large += fabs(want) > 0.1;  // twice, or not at all, would be seen
    }
    assert_true(large >= 3);
    sequence_free(scene.sequence);
  }
}

// sgl-project/sglang#33915: the softcap was dropped on one path.  Queries are twelve times as long
// here, so that most scores are far beyond the cap.
static void b27_a_softcap_is_applied_and_differentiated(void **state)
{
  (void)state;
  for (int32_t ranks = 1; ranks <= 3; ranks += 2) {
    struct scene scene =
        scene_of("q_heads=4,kv_heads=2,head_dim_qk=16,head_dim_v=16,window_left=7,softcap=5",
                 (struct swathe_sharding){ .ranks = ranks, .tokens = 40 }, 12);
    expect_right(&scene);
    for (int a = SEQUENCE_OUT; a < SEQUENCE_ARRAYS; a++)
      expect_other(&scene, "q_heads=4,kv_heads=2,head_dim_qk=16,head_dim_v=16,window_left=7",
                   (enum sequence_array)a);
    sequence_free(scene.sequence);
  }
}

// ---- Shares of any size -------------------------------------------------------------------------

// ISEEKYAN/mbridge#158, NovaSky-AI/SkyRL#1407: documents shorter than twice the ranks crashed.
static void b10_documents_may_be_shorter_than_the_group(void **state)
{
  static const int64_t three[] = { 0, 2, 4, 5 }, nine[] = { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 };
  static const int64_t two[] = { 0, 2 }, many[] = { 0, 38 };
  static const char *const text = "q_heads=5,kv_heads=1,window_left=2";
  (void)state;
  for (int layout = SWATHE_CONTIGUOUS; layout <= SWATHE_ZIGZAG_DOCUMENT; layout++)
    for (int32_t ranks = 2; ranks <= 4; ranks += 2) {
      struct swathe_sharding sharding = { .layout = (enum swathe_layout)layout, .ranks = ranks };
      const struct {
        int64_t tokens, documents;
        const int64_t *starts;
      } rows[] = { { 5, 3, three }, { 9, 9, nine },   { 2, 1, two },
                   { 8, 1, two },   { 128, 1, many }, { 7, 0, NULL } };
      for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        sharding.tokens = rows[i].tokens;
        sharding.documents = rows[i].documents;
        sharding.document_starts = rows[i].starts;
        expect_right_of(text, sharding);
      }
    }
}

// fla-org/flash-linear-attention#1092, jzhang38/EasyContext#47: tokens that do not divide by the
// ranks were lost, or divided by zero.
static void b11_no_token_is_lost_to_a_remainder(void **state)
{
  static const struct {
    int64_t tokens;
    int32_t ranks;
  } rows[] = { { 10, 3 }, { 2, 3 }, { 2999, 4 } };
  (void)state;
  for (int i = 0; i < 3; i++)
    for (int layout = SWATHE_CONTIGUOUS; layout <= SWATHE_ZIGZAG; layout++) {
      const struct swathe_sharding sharding = { .layout = (enum swathe_layout)layout,
                                                .batch = 1,
                                                .ranks = rows[i].ranks,
                                                .tokens = rows[i].tokens };
      int64_t sum = 0;
      for (int32_t r = 0; r < sharding.ranks; r++) {
        int64_t held = 0;
        assert_int_equal(swathe_sharding_rows(&sharding, r, &held), SWATHE_OK);
        sum += held;
      }
      assert_int_equal(sum, sharding.tokens);
      expect_right_of(SMALL ",window_left=7", sharding);
    }
}

// tenstorrent/tt-metal#57422, PaddlePaddle/PaddleFleet#2053: only the next rank's keys could be
// fetched, so a window longer than a share was rejected, or cut.
static void b13_a_halo_may_come_from_several_shares_away(void **state)
{
  static const int windows[] = { 8, 9, 10, 17, 64, 65 };
  (void)state;
  for (int w = 0; w < 6; w++)
    for (int form = 0; form < 3; form++) {
      char text[128];
      snprintf(text, sizeof text, SMALL ",window_left=%d", windows[w] - 1);
      struct scene scene = scene_of(
          text,
          (struct swathe_sharding){ .layout = form == 2 ? SWATHE_ZIGZAG : SWATHE_CONTIGUOUS,
                                    .ranks = 8,
                                    .tokens = form == 1 ? 61 : 64 },
          1);
      expect_right(&scene);
      const int hops = (windows[w] - 1 + 7) / 8;
      if (form == 0) assert_int_equal(traffic_of(&scene, 7).hops, hops < 7 ? hops : 7);
      sequence_free(scene.sequence);
    }
}

// fla-org/flash-linear-attention#1140: where a share was shorter than the halo, gradients went to
// the wrong rows; forward was exact.  Shares of 2, 1, 1 and 1 tokens, and a document that begins
// with a share of 1.
static void b14_gradients_pass_over_short_shares(void **state)
{
  static const struct swathe_span spans[] = {
    { 0, 0, 2, 0, 0 }, { 0, 2, 1, 0, 2 }, { 0, 3, 1, 0, 3 }, { 0, 4, 1, 0, 4 }
  };
  static const int64_t rank_spans[] = { 0, 1, 2, 3, 4 }, starts[] = { 0, 3, 16 };
  static const char *const text = SMALL ",window_left=3";
  (void)state;
  expect_right_of(text, (struct swathe_sharding){ .layout = SWATHE_SPANS,
                                                  .ranks = 4,
                                                  .tokens = 5,
                                                  .spans = spans,
                                                  .rank_spans = rank_spans });
  expect_right_of(text, (struct swathe_sharding){ .ranks = 4, .tokens = 5 });
  expect_right_of(text, (struct swathe_sharding){
                            .ranks = 4, .tokens = 16, .documents = 2, .document_starts = starts });
}

// vllm-project/vllm-omni#5716, hiyouga/LlamaFactory#10794: heads that do not divide by the ranks
// were padded apart, or limited the ranks.
static void b15_heads_need_not_divide_by_ranks(void **state)
{
  static const struct {
    int q_heads, kv_heads, ranks;
  } rows[] = { { 5, 1, 4 }, { 28, 7, 8 }, { 40, 8, 16 }, { 6, 2, 3 } };
  (void)state;
  for (int i = 0; i < 4; i++) {
    char text[128];
    snprintf(text, sizeof text, "q_heads=%d,kv_heads=%d,head_dim_qk=16,head_dim_v=16,window_left=6",
             rows[i].q_heads, rows[i].kv_heads);
    expect_right_of(text, (struct swathe_sharding){ .ranks = rows[i].ranks, .tokens = 48 });
  }
}

// ---- Backward -----------------------------------------------------------------------------------

// huggingface/diffusers#14265, NVIDIA/TransformerEngine#1557: forward was right and backward was
// not: it used its own keys for another rank's block, or another mask.  Each rank's keys are of
// another size here.
static void b18_backward_uses_forwards_keys_and_mask(void **state)
{
  static const char *const text = SMALL ",window_left=5";
  static const int64_t cut_at_ranks[] = { 0, 6, 12, 18, 24 };
  struct scene scene = scene_of(text, (struct swathe_sharding){ .ranks = 4, .tokens = 24 }, 1);
  (void)state;
  for (int i = 0; i < 24 * 16; i++)
    scene.sequence->given[SEQUENCE_K][i] *= (float)(1 + i / (6 * 16));
  scene.gain = 4;
  expect_right(&scene);
  expect_other(&scene, SMALL, SEQUENCE_DK);

  // the rows that other ranks see, by themselves: what comes home to them is a good part of the
  // gradient
  struct scene alone = scene;
  alone.sharding.documents = 4;
  alone.sharding.document_starts = cut_at_ranks;
  expect_other(&alone, text, SEQUENCE_DK);
  expect_other(&alone, text, SEQUENCE_DV);
  sequence_free(scene.sequence);

  // longer, so that the largest score of a row grows from block to block of its keys
  scene =
      scene_of(SMALL ",window_left=149", (struct swathe_sharding){ .ranks = 4, .tokens = 400 }, 1);
  for (int i = 0; i < 400 * 16; i++)
    scene.sequence->given[SEQUENCE_K][i] *= (float)(1 + 3 * (i / (100 * 16)));
  scene.gain = 10;
  expect_right(&scene);
  sequence_free(scene.sequence);
}

struct two_batches {
  const struct scene *scenes;
  struct swathe_threads *threads;
  struct share *shares[2];
  int32_t number;
  enum swathe_status status;
};

static void *interleave(void *arg)
{
  struct two_batches *rank = arg;
  struct swathe_layer *layer = NULL;
  rank->status = swathe_layer_create(context, &rank->scenes[0].problem,
                                     swathe_threads_rank(rank->threads, rank->number), &layer);
  if (!rank->status) rank->status = swathe_layer_shard(layer, &rank->scenes[0].sharding);
  for (int i = 0; i < 2 && !rank->status; i++)
    rank->status = swathe_layer_forward(layer, &rank->shares[i]->tensors, NULL);
  for (int i = 0; i < 2 && !rank->status; i++)
    rank->status = swathe_layer_backward(layer, &rank->shares[i]->tensors, NULL);
  swathe_layer_destroy(layer);
  return NULL;
}

// The same report's cause, stale keys: two micro-batches go forward before the first goes backward.
static void b18_backward_fetches_its_own_micro_batchs_keys(void **state)
{
  enum { RANKS = 3 };
  static const char *const text = SMALL ",window_left=5";
  struct scene scenes[2];
  struct two_batches ranks[RANKS];
  struct swathe_threads *threads = NULL;
  pthread_t ids[RANKS];
  char words[1024];
  (void)state;
  assert_int_equal(swathe_threads_create(RANKS, 20, &threads), SWATHE_OK);
  for (int i = 0; i < 2; i++) {
    scenes[i] = scene_of(text, (struct swathe_sharding){ .ranks = RANKS, .tokens = 24 }, 1);
    for (int j = 0; i && j < 24 * 16; j++) scenes[i].sequence->given[SEQUENCE_K][j] *= -2;
    sequence_solve(scenes[i].sequence);
  }
  for (int32_t r = 0; r < RANKS; r++) {
    ranks[r] = (struct two_batches){ .scenes = scenes, .threads = threads, .number = r };
    for (int i = 0; i < 2; i++)
      ranks[r].shares[i] =
          share_make(scenes[i].sequence, &scenes[i].sharding, r, (struct share_form){ .gap = 0 });
  }
  for (int32_t r = 0; r < RANKS; r++) pthread_create(&ids[r], NULL, interleave, &ranks[r]);
  for (int32_t r = 0; r < RANKS; r++) pthread_join(ids[r], NULL);
  for (int32_t r = 0; r < RANKS; r++)
    for (int i = 0; i < 2; i++) {
      assert_int_equal(ranks[r].status, SWATHE_OK);
      share_gather(scenes[i].sequence, ranks[r].shares[i], true);
      share_free(ranks[r].shares[i]);
    }
  for (int i = 0; i < 2; i++) {
    if (!sequence_compare(scenes[i].sequence, true, tolerance_of(&scenes[i]), words, sizeof words))
      fail_msg("micro-batch %d: %s", i, words);
    sequence_free(scenes[i].sequence);
  }
  swathe_threads_destroy(threads);
}

// NVIDIA/TransformerEngine#821, Dao-AILab/flash-attention#2723: sums that crossed ranks were kept
// in bf16 and lost precision with every hop.
static void b19_the_error_does_not_grow_with_ranks(void **state)
{
  double rms[2][SEQUENCE_ARRAYS], least[SEQUENCE_ARRAYS];
  (void)state;
  for (int many = 0; many < 2; many++) {
    struct scene scene =
        scene_of("q_heads=3,kv_heads=1,head_dim_qk=128,head_dim_v=128,window_left=511,dtype=bf16",
                 (struct swathe_sharding){ .ranks = many ? 8 : 1, .tokens = 512 }, 1);
    expect_right(&scene);
    for (enum sequence_array a = SEQUENCE_OUT; a < SEQUENCE_ARRAYS; a++)
      rms[many][a] = sequence_measure(scene.sequence, a).rms;
    for (enum sequence_array a = SEQUENCE_OUT; a < SEQUENCE_ARRAYS; a++) {
      for (size_t i = 0; i < elements_of(scene.sequence, a); i++)
        scene.sequence->got[a][i] =
            sequence_from_bf16(sequence_to_bf16((float)scene.sequence->want[a][i]));
      least[a] = sequence_measure(scene.sequence, a).rms;
    }
    sequence_free(scene.sequence);
  }
  for (enum sequence_array a = SEQUENCE_OUT; a < SEQUENCE_ARRAYS; a++)
    if (rms[1][a] > 1.2 * rms[0][a])
      fail_msg("%s: error %g at 1 rank, %g at 8", sequence_array_name(a), rms[0][a], rms[1][a]);
  // sums are fp32: what is left is one rounding at the end (and, in dq and dk, that of out);
  // forward on pairs rounds P too, but sums in bf16 would be off by many times that
  for (enum sequence_array a = SEQUENCE_OUT; a < SEQUENCE_ARRAYS; a++)
    if (a != SEQUENCE_LSE) {
      print_message("%s: error %.3g at 1 rank, %.3g of rounding the reference\n",
                    sequence_array_name(a), rms[0][a], least[a]);
      assert_true(rms[0][a] <= (a == SEQUENCE_OUT ? 1.5 : 1.2) * least[a]);
    }
}

static double thread_seconds(void)
{
  struct timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

// Seconds of the calling thread, which does all the work, of one backward; best of five.
static double time_backward(const char *text, int64_t tokens)
{
  struct scene scene = scene_of(text, (struct swathe_sharding){ .ranks = 1, .tokens = tokens }, 1);
  struct share *share =
      share_make(scene.sequence, &scene.sharding, 0, (struct share_form){ .gap = 0 });
  struct swathe_layer *layer = NULL;
  double best = INFINITY;

  assert_int_equal(swathe_layer_create(context, &scene.problem, NULL, &layer), SWATHE_OK);
  assert_int_equal(swathe_layer_shard(layer, &scene.sharding), SWATHE_OK);
  assert_int_equal(swathe_layer_forward(layer, &share->tensors, NULL), SWATHE_OK);
  for (int i = 0; i < 5; i++) {
    const double begin = thread_seconds();
    assert_int_equal(swathe_layer_backward(layer, &share->tensors, NULL), SWATHE_OK);
    best = fmin(best, thread_seconds() - begin);
  }
  swathe_layer_destroy(layer);
  share_free(share);
  sequence_free(scene.sequence);
  return best;
}

// NVIDIA/cudnn-frontend#866, Dao-AILab/flash-attention#1972: a fixed order of sums waited for tiles
// that the window skips; backward went over all queries and took 75 times as long.
static void b20_backward_repeats_its_bits_and_visits_the_window_only(void **state)
{
  // one window within a share, and one whose gradients come home from several ranks
  static const char *const texts[] = { SMALL ",window_left=7", SMALL ",window_left=399" };
  (void)state;
  for (int i = 0; i < 2; i++) {
    struct scene scene =
        scene_of(texts[i], (struct swathe_sharding){ .ranks = 5, .tokens = 512 }, 1);
    struct scene again = scene_of(texts[i], scene.sharding, 1);
    expect_right(&scene);
    for (int run = 0; run < 20; run++) {
      run_scene(&again, "fb");
      expect_same_bits(again.sequence, scene.sequence, "another run");
    }
    sequence_free(again.sequence);
    sequence_free(scene.sequence);
  }

  const char *text = "head_dim_qk=64,head_dim_v=64,window_left=127";
  const double half = time_backward(text, 8192), whole = time_backward(text, 16384);
  print_message("backward: %.1f ms at 8k tokens, %.1f ms at 16k\n", 1e3 * half, 1e3 * whole);
  assert_true(whole <= 3 * half);
}

// ---- Between ranks ------------------------------------------------------------------------------

// A rank with a context and a pace of its own.
struct rank {
  const struct scene *scene;
  struct swathe_context *context;
  struct swathe_threads *threads;
  struct share *share;
  int32_t number;
  unsigned pace;  // seed of its delays; 0: none
  enum swathe_status status;
  char words[512], explained[2048];
};

static void dawdle(struct rank *rank)
{
  if (rank->pace) usleep((useconds_t)(rand_r(&rank->pace) % 20000));
}

static void *be_rank(void *arg)
{
  struct rank *rank = arg;
  struct swathe_layer *layer = NULL;
  dawdle(rank);
  rank->status = swathe_layer_create(rank->context, &rank->scene->problem,
                                     swathe_threads_rank(rank->threads, rank->number), &layer);
  if (!rank->status) rank->status = swathe_layer_shard(layer, &rank->scene->sharding);
  for (int run = 0; run < 2 && !rank->status; run++) {
    dawdle(rank);
    rank->status = swathe_layer_forward(layer, &rank->share->tensors, NULL);
    dawdle(rank);
    if (!rank->status) rank->status = swathe_layer_backward(layer, &rank->share->tensors, NULL);
  }
  if (rank->status)
    snprintf(rank->words, sizeof rank->words, "%s", swathe_error());
  else
    swathe_layer_explain(layer, rank->explained, sizeof rank->explained);
  swathe_layer_destroy(layer);
  return NULL;
}

// Runs the scene on ranks with these contexts and paces, against a dog of ten seconds, and
// compares.
static void run_ranks(struct scene *scene, struct rank *ranks,
                      struct swathe_context *const *contexts, unsigned pace)
{
  struct swathe_threads *threads = NULL;
  pthread_t ids[MOST_RANKS];
  const int32_t count = scene->sharding.ranks;
  char words[1024];

  sequence_solve(scene->sequence);
  sequence_forget(scene->sequence);
  assert_int_equal(swathe_threads_create(count, 10, &threads), SWATHE_OK);
  for (int32_t r = 0; r < count; r++) {
    ranks[r] = (struct rank){ .scene = scene,
                              .context = contexts ? contexts[r] : context,
                              .threads = threads,
                              .number = r,
                              .pace = pace ? pace * 100 + (unsigned)r : 0 };
    ranks[r].share =
        share_make(scene->sequence, &scene->sharding, r, (struct share_form){ .gap = 1 });
    assert_non_null(ranks[r].share);
  }
  alarm(pace ? 10 : 0);  // kernels are warm by then, unless a caller brings contexts
  for (int32_t r = 0; r < count; r++) pthread_create(&ids[r], NULL, be_rank, &ranks[r]);
  for (int32_t r = 0; r < count; r++) pthread_join(ids[r], NULL);
  alarm(0);
  for (int32_t r = 0; r < count; r++) {
    if (ranks[r].status) fail_msg("rank %d: %s", r, ranks[r].words);
    share_gather(scene->sequence, ranks[r].share, true);
    share_free(ranks[r].share);
  }
  if (!sequence_compare(scene->sequence, true, tolerance_of(scene), words, sizeof words))
    fail_msg("%s", words);
  swathe_threads_destroy(threads);
}

// NVIDIA/nccl#479, pytorch/pytorch#174288, zhuzilin/ring-flash-attention#39: messages in an unlucky
// order hung. Three hops, a rank that receives nothing, a document that ends at a rank's edge,
// ranks that come late.
static void b21_no_order_of_ranks_hangs(void **state)
{
  static const int32_t counts[] = { 1, 2, 3, 5, 8 };
  static const char *const text = SMALL ",window_left=23";
  (void)state;
  for (int i = 0; i < 5; i++)
    for (int documents = 0; documents < 2; documents++) {
      const int64_t starts[] = { 0, 8 * (counts[i] / 2), 8 * counts[i] };
      struct scene scene = scene_of(text,
                                    (struct swathe_sharding){ .ranks = counts[i],
                                                              .tokens = 8 * counts[i],
                                                              .documents = documents ? 2 : 0,
                                                              .document_starts = starts },
                                    1);
      struct rank ranks[MOST_RANKS];
      assert_int_equal(traffic_of(&scene, 0).halo_tokens, 0);
      if (!documents && counts[i] > 3) assert_int_equal(traffic_of(&scene, 3).hops, 3);
      expect_right(&scene);
      for (unsigned pace = 1; pace <= 3; pace++) run_ranks(&scene, ranks, NULL, pace);
      sequence_free(scene.sequence);
    }
}

struct configs {
  char of[8][512];
  int count;
};

static bool note_config(void *arg, const char *config)
{
  struct configs *configs = arg;
  snprintf(configs->of[configs->count++], sizeof configs->of[0], "%s", config);
  return configs->count < 8;
}

// A database whose pick for both kernels of the problem is its `which`-th config.
static void write_picks(const char *path, const struct swathe_problem *problem, int which,
                        char config[2][512])
{
  struct sw_db_environment environment;
  struct sw_aim aim;
  struct sw_db *db = NULL;
  int64_t session;
  assert_int_equal(sw_context_aim(context, problem, NULL, &aim), SWATHE_OK);
  sw_context_environment(context, &aim, &environment);
  assert_int_equal(sw_db_open(path, SW_DB_WRITE, &db), SWATHE_OK);
  assert_int_equal(sw_db_session_begin(db, "a test", 1, &session), SWATHE_OK);
  for (int d = 0; d < 2; d++) {
    const char *kernel = sw_context_kernel_name((enum swathe_direction)d);
    struct configs configs = { .count = 0 };
    assert_int_equal(swathe_configs(context, problem, (enum swathe_direction)d, NULL, false,
                                    note_config, NULL, &configs),
                     SWATHE_OK);
    const struct sw_db_row row = { problem, kernel, &environment, configs.of[which] };
    snprintf(config[d], 512, "%s", configs.of[which]);
    const struct sw_db_pick pick = { 1, 2, 0.5, .complete = true };
    assert_int_equal(sw_db_put_pick(db, session, &row, &pick), SWATHE_OK);
  }
  sw_db_close(db);
}

// flashinfer-ai/flashinfer#3186, pytorch/pytorch#193043: ranks picked different tuned configs, or
// one had none, and their messages did not fit.  Rank 0 has a pick, 1 the same, 2 an empty
// database, 3 another pick, and 4 a file that is no database.
static void b25_rank_0_decides_whatever_the_databases_say(void **state)
{
  struct scene scene =
      scene_of(SMALL ",window_left=11", (struct swathe_sharding){ .ranks = 5, .tokens = 70 }, 1);
  char paths[5][96], picks[2][512], others[2][512];
  struct swathe_context *contexts[5];
  struct rank ranks[MOST_RANKS];
  (void)state;
  for (int r = 0; r < 5; r++) snprintf(paths[r], sizeof paths[r], "%s/rank%d.db", temporary, r);
  write_picks(paths[0], &scene.problem, 1, picks);
  write_picks(paths[1], &scene.problem, 1, picks);
  write_picks(paths[3], &scene.problem, 2, others);
  assert_string_not_equal(picks[0], others[0]);
  assert_string_not_equal(picks[1], others[1]);
  FILE *file = fopen(paths[4], "w");
  assert_non_null(file);
  for (int i = 0; i < 10000; i++) fputs("this is no database, ", file);
  assert_int_equal(fclose(file), 0);

  for (int r = 0; r < 5; r++) contexts[r] = open_context(paths[r]);
  run_ranks(&scene, ranks, contexts, 0);
  for (int r = 0; r < 5; r++) {
    assert_non_null(strstr(ranks[r].explained, picks[0]));
    assert_non_null(strstr(ranks[r].explained, picks[1]));
    if (r >= 2) assert_non_null(strstr(ranks[r].explained, "rank 0's choice"));
    swathe_close(contexts[r]);
  }
  sequence_free(scene.sequence);
}

// ---- Memory -------------------------------------------------------------------------------------

// Tensors that share one sparse region: tokens are 2^30 elements apart, so the fourth row is 3 *
// 2^30 elements (12 GiB) behind the first.  Only pages that hold a row are ever touched.
enum { FAR_ROWS = 4, FAR_HEADS = 2, FAR_DIM = 16, FAR_TENSOR = FAR_HEADS * FAR_DIM };
static const int64_t far_stride = (int64_t)1 << 30;
static const size_t far_bytes = ((size_t)12 << 30) + (1 << 20);

struct far_rank {
  struct scene *scene;
  struct swathe_threads *threads;
  int32_t number;
  float *memory, dsink[FAR_HEADS];
  enum swathe_status status;
  char words[512];
};

static float *far_at(const struct far_rank *rank, enum sequence_array array, int64_t row)
{
  return rank->memory + 64 + (int64_t)array * FAR_TENSOR + row * far_stride;
}

static struct swathe_tensor far_tensor(const struct far_rank *rank, enum sequence_array array)
{
  return (struct swathe_tensor){ far_at(rank, array, 0), far_stride,
                                 array == SEQUENCE_LSE ? 1 : FAR_DIM, 0 };
}

static size_t far_elements(enum sequence_array array)
{
  return array == SEQUENCE_LSE ? FAR_HEADS : FAR_TENSOR;
}

static void *be_far_rank(void *arg)
{
  struct far_rank *rank = arg;
  struct swathe_layer *layer = NULL;
  const struct swathe_tensors tensors = {
    .q = far_tensor(rank, SEQUENCE_Q),
    .k = far_tensor(rank, SEQUENCE_K),
    .v = far_tensor(rank, SEQUENCE_V),
    .out = far_tensor(rank, SEQUENCE_OUT),
    .lse = far_tensor(rank, SEQUENCE_LSE),
    .dout = far_tensor(rank, SEQUENCE_DOUT),
    .dq = far_tensor(rank, SEQUENCE_DQ),
    .dk = far_tensor(rank, SEQUENCE_DK),
    .dv = far_tensor(rank, SEQUENCE_DV),
    .sink = rank->scene->sequence->sink,
    .dsink = rank->dsink,
  };
  struct swathe_transport *transport =
      rank->threads ? swathe_threads_rank(rank->threads, rank->number) : NULL;
  rank->status = swathe_layer_create(context, &rank->scene->problem, transport, &layer);
  if (!rank->status) rank->status = swathe_layer_shard(layer, &rank->scene->sharding);
  if (!rank->status) rank->status = swathe_layer_forward(layer, &tensors, NULL);
  if (!rank->status) rank->status = swathe_layer_backward(layer, &tensors, NULL);
  if (rank->status) snprintf(rank->words, sizeof rank->words, "%s", swathe_error());
  swathe_layer_destroy(layer);
  return NULL;
}

// Between the whole arrays of the sequence and the far rows of the rank's, whose tokens follow each
// other.
static void copy_far(struct far_rank *rank, bool in)
{
  struct sequence *sequence = rank->scene->sequence;
  for (enum sequence_array a = SEQUENCE_Q; a < SEQUENCE_ARRAYS; a++)
    for (int64_t row = 0; row < FAR_ROWS; row++) {
      const size_t elements = far_elements(a);
      float *whole = a <= SEQUENCE_DOUT ? sequence->given[a] : sequence->got[a];
      float *token = whole + (size_t)(rank->number * FAR_ROWS + row) * elements;
      if (in && a <= SEQUENCE_DOUT) memcpy(far_at(rank, a, row), token, elements * sizeof(float));
      if (!in && a > SEQUENCE_DOUT) memcpy(token, far_at(rank, a, row), elements * sizeof(float));
    }
  for (int h = 0; !in && h < FAR_HEADS; h++) sequence->got_dsink[h] += (double)rank->dsink[h];
}

// fla-org/flash-linear-attention#1080, sgl-project/sglang#20389: offsets beyond 2^31 elements
// wrapped: first wrong output, then an illegal access.
static void b23_offsets_go_past_2_to_the_31(void **state)
{
  char words[1024];
  (void)state;
  for (int32_t ranks = 1; ranks <= 2; ranks++) {
    struct scene scene =
        scene_of("q_heads=2,kv_heads=2,head_dim_qk=16,head_dim_v=16,window_left=5,sinks=1",
                 (struct swathe_sharding){ .ranks = ranks, .tokens = ranks * FAR_ROWS }, 1);
    struct far_rank members[2];
    struct swathe_threads *threads = NULL;
    pthread_t ids[2];
    sequence_solve(scene.sequence);
    if (ranks > 1) assert_int_equal(swathe_threads_create(ranks, 10, &threads), SWATHE_OK);
    for (int32_t r = 0; r < ranks; r++) {
      members[r] = (struct far_rank){ .scene = &scene, .threads = threads, .number = r };
      members[r].memory = mmap(NULL, far_bytes, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (members[r].memory == MAP_FAILED) {
        print_message("no 12 GiB of addresses to be had: skipped\n");
        skip();
      }
      copy_far(&members[r], true);
    }
    for (int32_t r = 0; r < ranks; r++) pthread_create(&ids[r], NULL, be_far_rank, &members[r]);
    for (int32_t r = 0; r < ranks; r++) pthread_join(ids[r], NULL);
    for (int32_t r = 0; r < ranks; r++) {
      if (members[r].status) fail_msg("rank %d: %s", r, members[r].words);
      copy_far(&members[r], false);
      munmap(members[r].memory, far_bytes);
    }
    if (!sequence_compare(scene.sequence, true, tolerance_of(&scene), words, sizeof words))
      fail_msg("%s", words);
    swathe_threads_destroy(threads);
    sequence_free(scene.sequence);
  }
}

// zhuzilin/ring-flash-attention#46: the lse's layout changed under its readers.  Here it is
// [token][head], as swathe.h says, for documents too; the values are compared, not only what they
// lead to.
static void b26_lse_keeps_one_layout_with_documents(void **state)
{
  static const int64_t starts[] = { 0, 3, 20 };
  struct scene scene =
      scene_of(SMALL,
               (struct swathe_sharding){
                   .ranks = 2, .tokens = 20, .documents = 2, .document_starts = starts },
               0);
  (void)state;
  scene.gain = 1;
  expect_right(&scene);
  for (int i = 0; i < 20; i++)
    for (int h = 0; h < 2; h++)  // q is 0: the logarithm of the number of keys
      assert_true(fabs((double)scene.sequence->got[SEQUENCE_LSE][2 * i + h] -
                       log(i < 3 ? i + 1 : i - 2)) < 1e-5);
  sequence_free(scene.sequence);
}

// Dao-AILab/flash-attention#1541, SHI-Labs/NATTEN 0.20.1: head dims of keys and values that differ,
// or that are no multiple of 16, were unsupported or scaled by the padded dim.
static void b28_head_dims_are_free_and_the_scale_is_the_true_dims(void **state)
{
  static const int dims[][2] = { { 192, 128 }, { 64, 32 }, { 40, 40 }, { 72, 72 }, { 1, 1 } };
  (void)state;
  for (int i = 0; i < 5; i++) {
    char text[128];
    snprintf(text, sizeof text, "q_heads=2,head_dim_qk=%d,head_dim_v=%d,window_left=6", dims[i][0],
             dims[i][1]);
    struct scene scene = scene_of(text, (struct swathe_sharding){ .ranks = 2, .tokens = 37 }, 1);
    expect_right(&scene);
    if (dims[i][0] % 16) {
      const int rounded = (dims[i][0] + 15) / 16 * 16;
      snprintf(text + strlen(text), sizeof text - strlen(text), ",scale=%.9g", 1 / sqrt(rounded));
      expect_other(&scene, text, SEQUENCE_LSE);
    }
    sequence_free(scene.sequence);
  }
}

// fla-org/flash-linear-attention#955: documents together with a batch gave silently wrong
// gradients.
static void b29_a_batch_may_have_documents(void **state)
{
  static const int64_t starts[] = { 0, 5, 19, 32 };
  static const char *const text = SMALL ",window_left=4";
  (void)state;
  expect_right_of(text, (struct swathe_sharding){
                            .layout = SWATHE_ZIGZAG, .ranks = 2, .batch = 3, .tokens = 32 });
  for (int layout = SWATHE_CONTIGUOUS; layout <= SWATHE_ZIGZAG_DOCUMENT; layout++)
    expect_right_of(text, (struct swathe_sharding){ .layout = (enum swathe_layout)layout,
                                                    .ranks = 3,
                                                    .batch = 2,
                                                    .tokens = 32,
                                                    .documents = 3,
                                                    .document_starts = starts });
}

// Dao-AILab/flash-attention#2333: spare tiles read past the end of the documents' starts.  They end
// at a page that cannot be read here.
static void b31_nothing_is_read_behind_the_documents(void **state)
{
  const size_t page = (size_t)sysconf(_SC_PAGESIZE);
  char *pages = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  (void)state;
  assert_ptr_not_equal(pages, MAP_FAILED);
  assert_int_equal(mprotect(pages + page, page, PROT_NONE), 0);
  int64_t *starts = (int64_t *)(void *)(pages + page) - 2;
  starts[0] = 0;
  starts[1] = 700;
  for (int32_t ranks = 1; ranks <= 3; ranks++)
    expect_right_of("head_dim_qk=16,head_dim_v=16,window_left=7",
                    (struct swathe_sharding){
                        .ranks = ranks, .tokens = 700, .documents = 1, .document_starts = starts });
  munmap(pages, 2 * page);
}

// fla-org/flash-linear-attention#892, ROCm/flash-attention#175: rows behind the last document kept
// whatever was there, and gave NaN gradients.  Inputs and outputs hold NaN before; outputs must
// hold 0 afterwards.
static void b32_rows_behind_the_documents_become_zero(void **state)
{
  static const int64_t starts[] = { 0, 20 };
  (void)state;
  for (int32_t ranks = 1; ranks <= 3; ranks++)
    for (int layout = SWATHE_CONTIGUOUS; layout <= SWATHE_ZIGZAG; layout++)
      expect_right_of(SMALL ",window_left=4",
                      (struct swathe_sharding){ .layout = (enum swathe_layout)layout,
                                                .ranks = ranks,
                                                .tokens = 32,
                                                .documents = 1,
                                                .document_starts = starts });
}

static void note_compiler(void *arg, const struct swathe_finding *finding)
{
  if (!strcmp(finding->what, "cuda compiler")) *(bool *)arg = finding->health == SWATHE_HEALTHY;
}

static bool has_nvrtc(void)
{
  struct swathe_context *opened = NULL;
  bool found = false;
  if (swathe_open(&(struct swathe_options){ .database = "" }, &opened)) return false;
  swathe_doctor(opened, note_compiler, &found);
  swathe_close(opened);
  return found;
}

// What shows in results alone, of inputs that bf16 holds and to its precision; the rest is about a
// host that both targets share, or about what fp32 tells apart.
static int run_on_cuda(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(b01_a_window_shows_exactly_its_keys),
    cmocka_unit_test(b02_each_side_is_bounded_by_itself),
    cmocka_unit_test(b03_whole_windows_are_causal_and_none_is_refused),
    cmocka_unit_test(b05_what_sees_nothing_spoils_nothing),
    cmocka_unit_test(b06_a_sink_of_any_size_joins_the_maximum),
    cmocka_unit_test(b07_a_sink_is_applied_once_per_row),
    cmocka_unit_test(b10_documents_may_be_shorter_than_the_group),
    cmocka_unit_test(b11_no_token_is_lost_to_a_remainder),
    cmocka_unit_test(b13_a_halo_may_come_from_several_shares_away),
    cmocka_unit_test(b14_gradients_pass_over_short_shares),
    cmocka_unit_test(b15_heads_need_not_divide_by_ranks),
    cmocka_unit_test(b17_the_window_is_never_dropped),
    cmocka_unit_test(b26_lse_keeps_one_layout_with_documents),
    cmocka_unit_test(b28_head_dims_are_free_and_the_scale_is_the_true_dims),
    cmocka_unit_test(b29_a_batch_may_have_documents),
    cmocka_unit_test(b31_nothing_is_read_behind_the_documents),
    cmocka_unit_test(b32_rows_behind_the_documents_become_zero),
    cmocka_unit_test(b33_two_sides_show_one_key_more),
    cmocka_unit_test(b34_windows_around_a_multiple_of_the_share),
  };
  const char *driver = getenv("TEST_LIBCUDA");
  if (!driver || !has_nvrtc()) {
    printf("test_cases cuda: skipped, there is no NVRTC, or TEST_LIBCUDA names no driver\n");
    return 0;
  }
  setenv("SWATHE_LIBCUDA", driver, 1);
  cuda = true;
  return cmocka_run_group_tests(tests, set_up, tear_down);
}

int main(int argc, char **argv)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(b01_a_window_shows_exactly_its_keys),
    cmocka_unit_test(b02_each_side_is_bounded_by_itself),
    cmocka_unit_test(b03_whole_windows_are_causal_and_none_is_refused),
    cmocka_unit_test(b05_what_sees_nothing_spoils_nothing),
    cmocka_unit_test(b06_a_sink_of_any_size_joins_the_maximum),
    cmocka_unit_test(b07_a_sink_is_applied_once_per_row),
    cmocka_unit_test(b10_documents_may_be_shorter_than_the_group),
    cmocka_unit_test(b11_no_token_is_lost_to_a_remainder),
    cmocka_unit_test(b13_a_halo_may_come_from_several_shares_away),
    cmocka_unit_test(b14_gradients_pass_over_short_shares),
    cmocka_unit_test(b15_heads_need_not_divide_by_ranks),
    cmocka_unit_test(b17_the_window_is_never_dropped),
    cmocka_unit_test(b18_backward_uses_forwards_keys_and_mask),
    cmocka_unit_test(b18_backward_fetches_its_own_micro_batchs_keys),
    cmocka_unit_test(b19_the_error_does_not_grow_with_ranks),
    cmocka_unit_test(b20_backward_repeats_its_bits_and_visits_the_window_only),
    cmocka_unit_test(b21_no_order_of_ranks_hangs),
    cmocka_unit_test(b23_offsets_go_past_2_to_the_31),
    cmocka_unit_test(b25_rank_0_decides_whatever_the_databases_say),
    cmocka_unit_test(b26_lse_keeps_one_layout_with_documents),
    cmocka_unit_test(b27_a_softcap_is_applied_and_differentiated),
    cmocka_unit_test(b28_head_dims_are_free_and_the_scale_is_the_true_dims),
    cmocka_unit_test(b29_a_batch_may_have_documents),
    cmocka_unit_test(b31_nothing_is_read_behind_the_documents),
    cmocka_unit_test(b32_rows_behind_the_documents_become_zero),
    cmocka_unit_test(b33_two_sides_show_one_key_more),
    cmocka_unit_test(b34_windows_around_a_multiple_of_the_share),
    cmocka_unit_test(b35_the_sinks_gradients_add_up),
  };
  if (argc > 1 && !strcmp(argv[1], "cuda")) return run_on_cuda();
  return cmocka_run_group_tests(tests, set_up, tear_down);
}

// Left out:
//   B05, in part   queries and keys of different lengths (cu_seqlens_q, cu_seqlens_k): a layer
//                  attends to itself, so that only padding sees nothing
//   B06, in part   a limit on the keys of a call (seqused_k): there is none
//   B17, in part   the other back ends: there is one; what it lacks is refused (test_layer.c)
//   B20, in part   a relay of dq between tiles that may spin: there is none
//   B21, in part   more than 256 operations in one NCCL group: the emulated NCCL has no such limit
//   B23, in part   a GPU's 32-bit offsets; shapes of 2^31 elements are planned in test_halo.c
//   B25, in part   ranks on several machines, one of them compiling cold; writers at the same time
//                  are in test_db.c
