// test_layer.c: the layer over ranks: every result against the reference, whatever the layout;
// bytes on the wire; bit-equal results; replay; disagreement and misuse.
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "group.h"
#include "scratch.h"

// Counts allocations; a sanitizer brings an allocator of its own, and then this one stays away.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define COUNTS_ALLOCATIONS 1
static _Thread_local int64_t allocations;
void *__libc_malloc(size_t bytes);
void *__libc_realloc(void *memory, size_t bytes);
void *malloc(size_t bytes)
{
  allocations++;
  return __libc_malloc(bytes);
}
void *realloc(void *memory, size_t bytes)
{
  allocations++;
  return __libc_realloc(memory, bytes);
}
#endif

static struct swathe_context *context;
static const char *scratch;
static const char *cache;  // of compiled kernels: $TEST_CACHE_DIR, kept, or in `scratch`

static struct swathe_context *open_context(int32_t threads, enum swathe_mode mode)
{
  char database[64];
  snprintf(database, sizeof database, "%s/tuning.db", scratch);
  const struct swathe_options options = { .database = database, .cache = cache, .threads = threads,
                                          .mode = mode };
  struct swathe_context *opened = NULL;
  if (swathe_open(&options, &opened)) fail_msg("%s", swathe_error());
  return opened;
}

static int set_up(void **state)
{
  (void)state;
  scratch = scratch_make("layer");
  if (!scratch) return -1;
  cache = getenv("TEST_CACHE_DIR");
  if (!cache) cache = scratch;
  context = open_context(1, SWATHE_REPLAY);
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

// The limits of `swathe run --check`; large scores (gain on q) carry their fp32 rounding along.
static struct sequence_tolerance tolerance_of(const struct swathe_problem *problem, double gain)
{
  return problem->dtype == SWATHE_BF16
             ? (struct sequence_tolerance){ 2e-2, 1e-3, 2e-2 }
             : (struct sequence_tolerance){ 2e-5 * gain, 2e-5 * gain, 1e-4 * gain };
}

// Runs one problem and compares everything.
static void expect_right(const struct swathe_problem *problem,
                         const struct swathe_sharding *sharding, struct share_form form,
                         bool keep_halo, double gain)
{
  char words[1024] = "", text[512];
  struct sequence *sequence = sequence_make(problem, sharding, 7, gain);
  const struct group_case group = { .context = context, .problem = problem, .sharding = sharding,
                                    .form = form, .script = "fb", .keep_halo = keep_halo };
  int64_t moved[64] = { 0 };

  swathe_problem_format(problem, text, sizeof text);
  sequence_solve(sequence);
  if (group_run(&group, sequence, moved, words, sizeof words) ||
      !sequence_compare(sequence, true, tolerance_of(problem, gain), words, sizeof words))
    fail_msg("%s\n  %s, %d ranks, %lld tokens, batch %d\n  %s", words,
             swathe_layout_name(sharding->layout), sharding->ranks, (long long)sharding->tokens,
             sharding->batch, text);

  // forward moves the halo once; backward its gradients, and the halo again if it was not kept
  struct swathe_traffic traffic[64];
  assert_int_equal(swathe_plan(problem, sharding, NULL, NULL, traffic), SWATHE_OK);
  for (int32_t r = 0; r < sharding->ranks; r++) {
    const int64_t dims = problem->kv_heads * (problem->head_dim_qk + problem->head_dim_v);
    const int64_t elem = problem->dtype == SWATHE_BF16 ? 2 : 4;
    const int64_t halo = traffic[r].halo_tokens * sharding->batch * dims * elem;
    const int64_t home = traffic[r].send_tokens * sharding->batch * dims *
                         (problem->halo_gradient == SWATHE_BF16 ? 2 : 4);
    assert_int_equal(traffic[r].receive_bytes, halo);
    assert_int_equal(moved[r], halo * (keep_halo ? 1 : 2) + home);
  }
  sequence_free(sequence);
}

// The matrix users replay: 64 tokens, windows around tiles and shares, both layouts, small groups.
static void results_equal_the_reference(void **state)
{
  static const char *const heads[] = { "q_heads=28,kv_heads=7", "q_heads=5,kv_heads=1" };
  static const int64_t windows[] = { 0, 1, 6, 7, 8, 15, 63, 200 };
  static const int32_t ranks[] = { 1, 2, 3, 4, 8 };
  (void)state;
  for (size_t h = 0; h < 2; h++)
    for (size_t w = 0; w < 8; w++)
      for (int dtype = 0; dtype < 2; dtype++) {
        struct swathe_problem problem = problem_of(heads[h]);
        problem.window_left = windows[w];
        problem.head_dim_qk = problem.head_dim_v = 16;
        problem.dtype = (enum swathe_dtype)dtype;
        for (size_t r = 0; r < 5; r++)
          for (int layout = 0; layout < 2; layout++) {
            problem.ranks = ranks[r];
            problem.layout = (enum swathe_layout)layout;
            problem.tokens_per_rank = (64 + ranks[r] - 1) / ranks[r];
            const struct swathe_sharding sharding = {
              .layout = problem.layout, .ranks = ranks[r], .batch = 1, .tokens = 64
            };
            expect_right(&problem, &sharding, (struct share_form){ .gap = layout }, r % 2, 1);
          }
      }
}

struct shape {
  const char *problem;
  enum swathe_layout layout;
  int32_t ranks, batch;
  int64_t tokens;
  double gain;
};

// Real models' heads at few tokens, odd dims, sinks, both sides, softcap, batch, uneven shares and
// empty ones.
static void shapes_of_real_models(void **state)
{
  static const struct shape shapes[] = {
    { "q_heads=64,kv_heads=8,window_left=127,sinks=1,dtype=bf16", SWATHE_ZIGZAG, 4, 1, 700, 1 },
    { "q_heads=8,kv_heads=2,window_left=127,dtype=bf16,halo_gradient=bf16",
      SWATHE_ZIGZAG, 4, 1, 700, 1 },
    { "q_heads=16,kv_heads=2,head_dim_qk=192,head_dim_v=128,window_left=127,sinks=1,dtype=bf16",
      SWATHE_CONTIGUOUS, 3, 1, 500, 1 },
    { "q_heads=4,kv_heads=1,head_dim_qk=256,head_dim_v=256,window_left=511",
      SWATHE_ZIGZAG, 2, 1, 900, 1 },
    { "q_heads=4,kv_heads=2,head_dim_qk=256,head_dim_v=256,window_left=100,softcap=50,scale=0.0625",
      SWATHE_CONTIGUOUS, 3, 1, 300, 12 },
    { "q_heads=3,kv_heads=3,window_left=64,window_right=64", SWATHE_ZIGZAG, 3, 1, 700, 1 },
    { "q_heads=2,kv_heads=1,window_left=unlimited,window_right=0", SWATHE_ZIGZAG, 3, 1, 200, 1 },
    { "q_heads=2,kv_heads=2,window_left=5,window_right=unlimited", SWATHE_CONTIGUOUS, 2, 1, 90, 1 },
    { "q_heads=3,kv_heads=1,head_dim_qk=40,head_dim_v=72,window_left=9",
      SWATHE_ZIGZAG, 5, 2, 57, 1 },
    { "q_heads=1,kv_heads=1,head_dim_qk=1,head_dim_v=1,window_left=3",
      SWATHE_CONTIGUOUS, 8, 3, 5, 1 },
    { "q_heads=4,kv_heads=2,head_dim_qk=8,head_dim_v=8,window_left=2999",
      SWATHE_CONTIGUOUS, 4, 1, 2999, 1 },
  };
  (void)state;
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
    struct swathe_problem problem = problem_of(shapes[i].problem);
    const struct swathe_sharding sharding = { .layout = shapes[i].layout,
                                              .ranks = shapes[i].ranks,
                                              .batch = shapes[i].batch,
                                              .tokens = shapes[i].tokens };
    problem.ranks = sharding.ranks;
    problem.layout = sharding.layout;
    expect_right(&problem, &sharding, (struct share_form){ .head_major = i % 2, .gap = 3 }, i % 2,
                 shapes[i].gain);
  }
}

// Backward on pairs of bf16 is no default; where the processor has them, it is right too.
static void backward_on_pairs_is_right(void **state)
{
  const struct swathe_problem problem =
      problem_of("q_heads=14,kv_heads=2,head_dim_qk=72,head_dim_v=40,window_left=90,"
                 "window_right=3,sinks=1,dtype=bf16,ranks=3");
  const struct swathe_sharding sharding = { .layout = SWATHE_ZIGZAG,
                                            .ranks = 3,
                                            .batch = 1,
                                            .tokens = 500 };
  static const char *const configs[2] = {
    NULL, "vectors=2,pack=7,panels=2,rows_k=6,rows_d=4,rows_j=6,vectors_d=1,block_k=96,"
          "ring_blocks=128,pairs=1" };
  struct sequence *sequence = sequence_make(&problem, &sharding, 6, 1);
  const struct group_case group = { .context = context,
                                    .problem = &problem,
                                    .sharding = &sharding,
                                    .configs = configs,
                                    .script = "fb" };
  char words[1024] = "";
  (void)state;

  sequence_solve(sequence);
  const enum swathe_status status = group_run(&group, sequence, NULL, words, sizeof words);
  const struct sequence_tolerance tolerance = tolerance_of(&problem, 1);
  const bool right =
      !status && sequence_compare(sequence, true, tolerance, words, sizeof words);
  sequence_free(sequence);
  if (status == SWATHE_BAD_CONFIG && strstr(words, "pairs are for bf16")) skip();
  if (!right) fail_msg("%s", words);
}

// A strip of tiles, also one that starts amid the groups of heads of a tile, takes the keys in the
// order in which each of its tiles would alone: the same bits.
static void strips_change_no_bit(void **state)
{
  static const char *const forwards[2] = {
    "vectors=2,pack=1,strip=1,rows_k=4,rows_d=4,block_k=48,ring_blocks=64,prefetch=8,stream=0",
    "vectors=2,pack=1,strip=4,rows_k=4,rows_d=4,block_k=48,ring_blocks=64,prefetch=8,stream=0",
  };
  const struct swathe_problem problem =
      problem_of("q_heads=6,kv_heads=2,head_dim_qk=24,head_dim_v=16,window_left=70,"
                 "window_right=2,sinks=1,ranks=2");
  const struct swathe_sharding sharding = {
    .layout = SWATHE_ZIGZAG, .ranks = 2, .batch = 1, .tokens = 500
  };
  struct sequence *sequences[2];
  char words[1024] = "";
  (void)state;
  for (int i = 0; i < 2; i++) {
    const char *const configs[2] = { forwards[i], NULL };
    const struct group_case group = { .context = context, .problem = &problem,
                                      .sharding = &sharding, .configs = configs, .script = "f" };
    sequences[i] = sequence_make(&problem, &sharding, 6, 1);
    sequence_solve(sequences[i]);
    if (group_run(&group, sequences[i], NULL, words, sizeof words) ||
        !sequence_compare(sequences[i], false, tolerance_of(&problem, 1), words, sizeof words))
      fail_msg("%s: %s", forwards[i], words);
  }
  const size_t rows = 500 * 6 * sizeof(float);
  assert_memory_equal(sequences[0]->got[SEQUENCE_OUT], sequences[1]->got[SEQUENCE_OUT],
                      rows * 16);
  assert_memory_equal(sequences[0]->got[SEQUENCE_LSE], sequences[1]->got[SEQUENCE_LSE], rows);
  for (int i = 0; i < 2; i++) sequence_free(sequences[i]);
}

// Out of narrow windows goes past the cache where an isa can, in whole cache lines; heads whose
// rows do not start one take the other way.
static void out_goes_past_the_cache(void **state)
{
  static const char *const isas[] = { "avx2", "avx512", "avx512bf16" };
  const struct swathe_sharding sharding = {
    .layout = SWATHE_ZIGZAG, .ranks = 2, .batch = 1, .tokens = 150
  };
  struct swathe_context *best = context;
  (void)state;
  for (size_t i = 0; i < sizeof isas / sizeof *isas; i++) {
    const struct swathe_options options = {
      .database = "/nonexistent/tuning.db", .cache = cache, .threads = 1, .isa = isas[i]
    };
    if (swathe_open(&options, &context)) continue;   // not of this machine
    for (int gap = 0; gap < 2; gap++) {
      const struct swathe_problem problem = problem_of(
          i == 2 ? "q_heads=4,kv_heads=2,head_dim_v=32,window_left=20,ranks=2,dtype=bf16"
                 : "q_heads=4,kv_heads=2,head_dim_v=32,window_left=20,ranks=2");
      expect_right(&problem, &sharding, (struct share_form){ .gap = 3 * gap }, false, 1);
    }
    swathe_close(context);
  }
  context = best;
}

// A tile sees more blocks of keys than a thread keeps: sums are left and taken up again, and none
// of them may be final before that.
static void backward_sees_more_than_it_keeps(void **state)
{
  const struct swathe_problem problem =
      problem_of("q_heads=2,kv_heads=1,head_dim_qk=8,head_dim_v=8,window_left=unlimited");
  const struct swathe_sharding sharding = { .ranks = 1, .batch = 1, .tokens = 2600 };
  static const char *const configs[2] = {
    NULL, "vectors=1,pack=1,panels=1,rows_k=4,rows_d=4,rows_j=4,vectors_d=1,block_k=48,"
          "ring_blocks=32,pairs=0" };
  struct sequence *sequence = sequence_make(&problem, &sharding, 4, 1);
  const struct group_case group = { .context = context,
                                    .problem = &problem,
                                    .sharding = &sharding,
                                    .configs = configs,
                                    .script = "fb" };
  char words[1024] = "";
  (void)state;

  sequence_solve(sequence);
  if (group_run(&group, sequence, NULL, words, sizeof words) ||
      !sequence_compare(sequence, true, tolerance_of(&problem, 1), words, sizeof words))
    fail_msg("%s", words);
  sequence_free(sequence);
}

// Memory beyond the caller's tensors goes by the window: it stays when the share grows, and is a
// part of it.
static void memory_goes_by_the_window(void **state)
{
  const struct swathe_problem problem =
      problem_of("q_heads=2,kv_heads=2,head_dim_qk=8,head_dim_v=8,window_left=63,dtype=bf16");
  size_t bytes[2];
  (void)state;
  for (int longer = 0; longer < 2; longer++) {
    const struct swathe_sharding sharding = { .ranks = 1, .batch = 1,
                                              .tokens = longer ? 524288 : 131072 };
    struct swathe_layer *layer = NULL;
    assert_int_equal(swathe_layer_create(context, &problem, NULL, &layer), SWATHE_OK);
    assert_int_equal(swathe_layer_shard(layer, &sharding), SWATHE_OK);
    uint16_t *data = calloc((size_t)sharding.tokens * 2 * 8 * 6, sizeof *data);
    float *lse = calloc((size_t)sharding.tokens * 2, sizeof *lse);
    struct swathe_tensor tensors[7];
    for (int i = 0; i < 7; i++)
      tensors[i] = (struct swathe_tensor){ data + (i < 6 ? i : 5) * sharding.tokens * 16, 16, 8,
                                           0 };
    const struct swathe_tensors call = { .q = tensors[0], .k = tensors[0], .v = tensors[1],
                                         .out = tensors[2], .lse = { lse, 2, 1, 0 },
                                         .dout = tensors[2], .dq = tensors[3], .dk = tensors[4],
                                         .dv = tensors[5] };
    if (swathe_layer_backward(layer, &call, NULL)) fail_msg("%s", swathe_error());
    bytes[longer] = swathe_layer_memory_bytes(layer);
    if (!longer) assert_true(bytes[0] < (size_t)sharding.tokens * 2 * 16 * sizeof(float) / 2);
    swathe_layer_destroy(layer);
    free(data);
    free(lse);
  }
  print_message("%zu bytes at 131072 tokens, %zu at 524288\n", bytes[0], bytes[1]);
  assert_true(bytes[0] > 0);
  assert_int_equal(bytes[1], bytes[0]);
}

// Copies of everything that was computed, to compare bits.
struct bits {
  float *arrays[SEQUENCE_ARRAYS];
  double *dsink;
};

static size_t array_size(const struct sequence *sequence, int array)
{
  const struct swathe_problem *p = &sequence->problem;
  const int q_dims[] = { [SEQUENCE_OUT] = p->head_dim_v,
                         [SEQUENCE_LSE] = 1,
                         [SEQUENCE_DQ] = p->head_dim_qk,
                         [SEQUENCE_DK] = p->head_dim_qk,
                         [SEQUENCE_DV] = p->head_dim_v };
  const int heads = array == SEQUENCE_DK || array == SEQUENCE_DV ? p->kv_heads : p->q_heads;
  return (size_t)(sequence->view.batch * sequence->view.tokens * heads * q_dims[array]) *
         sizeof(float);
}

static struct bits keep_bits(const struct sequence *sequence)
{
  struct bits bits = { .dsink = NULL };
  for (int a = SEQUENCE_OUT; a < SEQUENCE_ARRAYS; a++) {
    bits.arrays[a] = malloc(array_size(sequence, a));
    memcpy(bits.arrays[a], sequence->got[a], array_size(sequence, a));
  }
  bits.dsink = malloc((size_t)sequence->problem.q_heads * sizeof(double));
  memcpy(bits.dsink, sequence->got_dsink, (size_t)sequence->problem.q_heads * sizeof(double));
  return bits;
}

static void expect_bits(const struct sequence *sequence, const struct bits *bits, const char *what)
{
  for (int a = SEQUENCE_OUT; a < SEQUENCE_ARRAYS; a++)
    if (memcmp(bits->arrays[a], sequence->got[a], array_size(sequence, a)))
      fail_msg("%s of %s is not bit-equal", sequence_array_name((enum sequence_array)a), what);
  if (memcmp(bits->dsink, sequence->got_dsink, (size_t)sequence->problem.q_heads * sizeof(double)))
    fail_msg("dsink of %s is not bit-equal", what);
}

static void free_bits(struct bits *bits)
{
  for (int a = SEQUENCE_OUT; a < SEQUENCE_ARRAYS; a++) free(bits->arrays[a]);
  free(bits->dsink);
}

// 20 runs, thread counts, a forward replayed, a halo kept or fetched again, another shard.
static void results_are_bit_equal(void **state)
{
  struct swathe_problem problem = problem_of("q_heads=8,kv_heads=2,head_dim_qk=32,head_dim_v=32,"
                                             "window_left=150,sinks=1,ranks=3,layout=zigzag");
  const struct swathe_sharding sharding = {
    .layout = SWATHE_ZIGZAG, .ranks = 3, .batch = 2, .tokens = 2500
  };
  struct sequence *sequence = sequence_make(&problem, &sharding, 3, 1);
  struct group_case group = {
    .context = context, .problem = &problem, .sharding = &sharding, .script = "fb"
  };
  char words[1024];
  (void)state;

  if (group_run(&group, sequence, NULL, words, sizeof words)) fail_msg("%s", words);
  struct bits first = keep_bits(sequence);
  for (int run = 0; run < 20; run++) {
    struct swathe_context *other = open_context(1 + run % 4, SWATHE_REPLAY);
    group.context = other;
    group.script = run % 3 == 0 ? "ffpfb" : run % 3 == 1 ? "fbpsfbb" : "fb";
    group.keep_halo = run % 2;
    if (group_run(&group, sequence, NULL, words, sizeof words)) fail_msg("%s", words);
    expect_bits(sequence, &first, group.script);
    swathe_close(other);
  }
  free_bits(&first);
  sequence_free(sequence);
}

// Accuracy at 8 ranks is that of 1.
static void error_does_not_grow_with_ranks(void **state)
{
  (void)state;
  for (int dtype = 0; dtype < 2; dtype++) {
    double rms[2][SEQUENCE_ARRAYS];
    for (int many = 0; many < 2; many++) {
      struct swathe_problem problem = problem_of("q_heads=4,kv_heads=1,window_left=511");
      const struct swathe_sharding sharding = { .ranks = many ? 8 : 1, .batch = 1, .tokens = 512 };
      char words[1024];
      problem.dtype = (enum swathe_dtype)dtype;
      problem.ranks = sharding.ranks;
      struct sequence *sequence = sequence_make(&problem, &sharding, 5, 1);
      const struct group_case group = {
        .context = context, .problem = &problem, .sharding = &sharding, .script = "fb"
      };
      sequence_solve(sequence);
      if (group_run(&group, sequence, NULL, words, sizeof words)) fail_msg("%s", words);
      for (int a = SEQUENCE_OUT; a < SEQUENCE_ARRAYS; a++)
        rms[many][a] = sequence_measure(sequence, (enum sequence_array)a).rms;
      sequence_free(sequence);
    }
    for (int a = SEQUENCE_OUT; a < SEQUENCE_ARRAYS; a++) {
      print_message("%s %s: error %.3g at 1 rank, %.3g at 8, ratio %.3f\n", dtype ? "bf16" : "f32",
                    sequence_array_name((enum sequence_array)a), rms[0][a], rms[1][a],
                    rms[1][a] / rms[0][a]);
      assert_true(rms[1][a] <= 1.2 * rms[0][a]);
    }
  }
}

// Two layers of different problems, forward and backward interleaved, in one context.
static void layers_interleave(void **state)
{
  struct swathe_problem problems[2] = {
    problem_of("q_heads=4,kv_heads=2,head_dim_qk=16,head_dim_v=16,window_left=20"),
    problem_of("q_heads=4,kv_heads=2,head_dim_qk=16,head_dim_v=16,window_left=unlimited"),
  };
  const struct swathe_sharding sharding = { .ranks = 1, .batch = 1, .tokens = 130 };
  struct swathe_layer *layers[2];
  struct sequence *sequences[2];
  struct share *shares[2];
  char words[1024];
  (void)state;

  for (int i = 0; i < 2; i++) {
    assert_int_equal(swathe_layer_create(context, &problems[i], NULL, &layers[i]), SWATHE_OK);
    assert_int_equal(swathe_layer_shard(layers[i], &sharding), SWATHE_OK);
    sequences[i] = sequence_make(&problems[i], &sharding, 9 + (uint64_t)i, 1);
    sequence_solve(sequences[i]);
    shares[i] = share_make(sequences[i], &sharding, 0, (struct share_form){ .gap = 0 });
  }
  for (int i = 0; i < 2; i++)
    assert_int_equal(swathe_layer_forward(layers[i], &shares[i]->tensors, NULL), SWATHE_OK);
  for (int i = 1; i >= 0; i--)
    assert_int_equal(swathe_layer_backward(layers[i], &shares[i]->tensors, NULL), SWATHE_OK);
  for (int i = 0; i < 2; i++) {
    share_gather(sequences[i], shares[i], true);
    if (!sequence_compare(sequences[i], true, tolerance_of(&problems[i], 1), words, sizeof words))
      fail_msg("layer %d: %s", i, words);
    share_free(shares[i]);
    sequence_free(sequences[i]);
    swathe_layer_destroy(layers[i]);
  }
}

// Layers that differ only in what no kernel depends on share the loaded kernels; softcap's value is
// not in them, whether there is one is.
static void layers_share_kernels(void **state)
{
  static const char *const same[] = {
    "q_heads=4,kv_heads=2,head_dim_qk=8,head_dim_v=8,window_left=3,softcap=30",
    "q_heads=8,kv_heads=4,head_dim_qk=8,head_dim_v=8,window_left=3,softcap=50,scale=0.5,ranks=1,"
    "layout=zigzag,tokens_per_rank=99,halo_gradient=bf16",
  };
  struct swathe_context *own = open_context(1, SWATHE_REPLAY);
  struct swathe_layer *layer = NULL;
  int64_t compiled = 0, loaded = 0;
  (void)state;

  for (int i = 0; i < 2; i++) {
    const struct swathe_problem problem = problem_of(same[i]);
    assert_int_equal(swathe_layer_create(own, &problem, NULL, &layer), SWATHE_OK);
    swathe_layer_destroy(layer);
    swathe_kernel_counts(own, &compiled, &loaded);
    assert_int_equal(compiled + loaded, 2);
  }
  const struct swathe_problem other =
      problem_of("q_heads=4,kv_heads=2,head_dim_qk=8,head_dim_v=8,window_left=3");
  assert_int_equal(swathe_layer_create(own, &other, NULL, &layer), SWATHE_OK);
  swathe_layer_destroy(layer);
  swathe_kernel_counts(own, &compiled, &loaded);
  assert_int_equal(compiled + loaded, 4);
  swathe_close(own);
}

// A window at or beyond the sequence is the causal result, bit for bit.
static void wide_windows_are_causal(void **state)
{
  static const char *const windows[] = { "16", "17", "999", "2147483647", "unlimited" };
  const struct swathe_sharding sharding = { .ranks = 2, .batch = 1, .tokens = 17 };
  struct bits first = { .dsink = NULL };
  char words[1024], text[128];
  (void)state;

  for (int i = 4; i >= 0; i--) {
    snprintf(text, sizeof text, "q_heads=2,kv_heads=1,ranks=2,window_left=%s", windows[i]);
    struct swathe_problem problem = problem_of(text);
    struct sequence *sequence = sequence_make(&problem, &sharding, 1, 1);
    const struct group_case group = {
      .context = context, .problem = &problem, .sharding = &sharding, .script = "fb"
    };
    if (group_run(&group, sequence, NULL, words, sizeof words)) fail_msg("%s", words);
    if (i == 4) first = keep_bits(sequence);
    expect_bits(sequence, &first, windows[i]);
    sequence_free(sequence);
  }
  free_bits(&first);
}

// The largest score of each head, from its definition.
static double largest_score(const struct sequence *sequence, int32_t head)
{
  const struct swathe_problem *p = &sequence->problem;
  const int64_t n = sequence->view.tokens, dim = p->head_dim_qk;
  const int32_t key_head = head / (p->q_heads / p->kv_heads);
  double largest = -1e300;

  for (int64_t b = 0; b < sequence->view.batch; b++)
    for (int64_t i = 0; i < n; i++)
      for (int64_t j = i > p->window_left ? i - p->window_left : 0; j <= i; j++) {
        double score = 0;
        for (int64_t d = 0; d < dim; d++)
          score +=
              (double)sequence->given[SEQUENCE_Q][((b * n + i) * p->q_heads + head) * dim + d] *
              (double)sequence->given[SEQUENCE_K][((b * n + j) * p->kv_heads + key_head) * dim + d];
        score /= sqrt((double)dim);
        if (p->softcap > 0) score = p->softcap * tanh(score / p->softcap);
        if (score > largest) largest = score;
      }
  return largest;
}

static void max_logits_are_the_largest_scores(void **state)
{
  static const char *const problems[] = {
    "q_heads=6,kv_heads=2,head_dim_qk=24,head_dim_v=8,window_left=7,sinks=1",
    "q_heads=6,kv_heads=2,head_dim_qk=24,head_dim_v=8,window_left=7,softcap=3",
    "q_heads=6,kv_heads=2,head_dim_qk=24,head_dim_v=8,window_left=7,dtype=bf16",
  };
  const struct swathe_sharding sharding = { .ranks = 1, .batch = 2, .tokens = 150 };
  (void)state;

  for (size_t i = 0; i < 3; i++) {
    const struct swathe_problem problem = problem_of(problems[i]);
    struct sequence *sequence = sequence_make(&problem, &sharding, 4, 3);
    struct swathe_layer *layer = NULL;
    float largest[6];
    if (problem.sinks) sequence->sink[0] = 1000;  // a sink is no score
    struct share *share = share_make(sequence, &sharding, 0, (struct share_form){ .gap = 0 });
    assert_int_equal(swathe_layer_create(context, &problem, NULL, &layer), SWATHE_OK);
    assert_int_equal(swathe_layer_shard(layer, &sharding), SWATHE_OK);
    share->tensors.max_logits = largest;
    if (swathe_layer_forward(layer, &share->tensors, NULL)) fail_msg("%s", swathe_error());
    for (int32_t h = 0; h < 6; h++) {
      const double want = largest_score(sequence, h);
      if (!(fabs(largest[h] - want) <= 1e-5 * fabs(want)))
        fail_msg("%s: head %d: %.9g, want %.9g", problems[i], h, (double)largest[h], want);
    }
    swathe_layer_destroy(layer);
    share_free(share);
    sequence_free(sequence);
  }
}

// ---- Dynamic context parallelism ----------------------------------------------------------------

struct dynamic_rank {
  struct swathe_threads *four, *pair;
  struct sequence *long_row, *short_row;   // over four ranks; over each pair
  const struct swathe_sharding *over_four, *over_two;
  struct share *long_share, *short_share;
  int32_t rank;
  enum swathe_status status;
  char words[1024];
  enum swathe_strategy strategy;
};

// Four ranks, then two groups of two with other documents, then four again, with one layer each.
static void *change_groups(void *arg)
{
  struct dynamic_rank *self = arg;
  struct swathe_transport *four = swathe_threads_rank(self->four, self->rank);
  struct swathe_transport *pair = swathe_threads_rank(self->pair, self->rank % 2);
  struct swathe_layer *layer = NULL;
  enum swathe_status status = swathe_layer_create_strategy(
      context, &self->long_row->problem, four, self->strategy, &layer);

  for (int turn = 0; turn < 3 && !status; turn++) {
    const bool all = turn != 1;
    struct share *share = all ? self->long_share : self->short_share;
    share_poison(all ? self->long_row : self->short_row, share);
    swathe_layer_regroup(layer, all ? four : pair);
    status = swathe_layer_shard(layer, all ? self->over_four : self->over_two);
    if (!status) status = swathe_layer_forward(layer, &share->tensors, NULL);
    if (!status) status = swathe_layer_backward(layer, &share->tensors, NULL);
  }
  self->status = status;
  snprintf(self->words, sizeof self->words, "%s", swathe_error());
  swathe_layer_destroy(layer);
  return NULL;
}

static void change_by(enum swathe_strategy strategy)
{
  const struct swathe_problem problem =
      problem_of("q_heads=8,kv_heads=4,head_dim_qk=16,head_dim_v=16,window_left=9,ranks=4");
  static const int64_t long_documents[] = { 0, 50, 51, 120 }, short_documents[] = { 0, 33, 60 };
  const struct swathe_sharding over_four = { .layout = SWATHE_ZIGZAG_DOCUMENT,
                                             .ranks = 4,
                                             .batch = 1,
                                             .tokens = 120,
                                             .documents = 3,
                                             .document_starts = long_documents };
  const struct swathe_sharding over_two = { .layout = SWATHE_CONTIGUOUS, .ranks = 2, .batch = 1,
                                            .tokens = 60, .documents = 2,
                                            .document_starts = short_documents };
  struct swathe_threads *four = NULL, *pairs[2] = { NULL, NULL };
  struct sequence *long_row = sequence_make(&problem, &over_four, 1, 1), *short_rows[2];
  struct dynamic_rank ranks[4];
  pthread_t ids[4];
  char words[1024];

  sequence_solve(long_row);
  assert_int_equal(swathe_threads_create(4, 20, &four), SWATHE_OK);
  for (int g = 0; g < 2; g++) {
    assert_int_equal(swathe_threads_create(2, 20, &pairs[g]), SWATHE_OK);
    short_rows[g] = sequence_make(&problem, &over_two, 2 + (uint64_t)g, 1);
    sequence_solve(short_rows[g]);
  }
  for (int r = 0; r < 4; r++) {
    ranks[r] = (struct dynamic_rank){ .four = four, .pair = pairs[r / 2], .long_row = long_row,
                                      .short_row = short_rows[r / 2], .over_four = &over_four,
                                      .over_two = &over_two, .rank = r, .strategy = strategy };
    ranks[r].long_share = share_make(long_row, &over_four, r, (struct share_form){ .gap = 0 });
    ranks[r].short_share =
        share_make(short_rows[r / 2], &over_two, r % 2, (struct share_form){ .gap = 1 });
    pthread_create(&ids[r], NULL, change_groups, &ranks[r]);
  }
  for (int r = 0; r < 4; r++) {
    pthread_join(ids[r], NULL);
    if (ranks[r].status)
      fail_msg("%s, rank %d: %s", swathe_strategy_name(strategy), r, ranks[r].words);
    share_gather(long_row, ranks[r].long_share, true);
    share_gather(short_rows[r / 2], ranks[r].short_share, true);
  }
  struct sequence *const all[] = { long_row, short_rows[0], short_rows[1] };
  for (int i = 0; i < 3; i++) {
    if (!sequence_compare(all[i], true, tolerance_of(&problem, 1), words, sizeof words))
      fail_msg("%s, row %d: %s", swathe_strategy_name(strategy), i, words);
    sequence_free(all[i]);
  }
  for (int r = 0; r < 4; r++) share_free(ranks[r].long_share), share_free(ranks[r].short_share);
  for (int g = 0; g < 2; g++) swathe_threads_destroy(pairs[g]);
  swathe_threads_destroy(four);
}

static void groups_and_documents_change(void **state)
{
  (void)state;
  for (int s = 0; s <= SWATHE_RING_ALL; s++) change_by((enum swathe_strategy)s);
}

// Every micro-batch brings other documents; once the largest was seen, sharding allocates nothing.
static void sharding_anew_allocates_nothing(void **state)
{
#ifndef COUNTS_ALLOCATIONS
  (void)state;
  skip();
#else
  const struct swathe_problem problem =
      problem_of("q_heads=2,kv_heads=1,head_dim_qk=16,head_dim_v=16,window_left=15,ranks=32");
  struct swathe_layer *layer = NULL;
  struct swathe_threads *threads = NULL;
  int64_t starts[65] = { 0 };
  struct swathe_sharding sharding = { .layout = SWATHE_ZIGZAG_DOCUMENT, .ranks = 32, .batch = 1,
                                      .documents = 64, .document_starts = starts };
  (void)state;

  assert_int_equal(swathe_layer_create(context, &problem, NULL, &layer), SWATHE_OK);
  assert_int_equal(swathe_threads_create(32, 1, &threads), SWATHE_OK);
  swathe_layer_regroup(layer, swathe_threads_rank(threads, 13));
  for (int batch = 0; batch < 40; batch++) {
    for (int d = 0; d < 64; d++)
      starts[d + 1] = starts[d] + (d * 577 + batch % 20 * 131) % 4096;
    sharding.tokens = starts[64];
    const int64_t before = allocations;
    assert_int_equal(swathe_layer_shard(layer, &sharding), SWATHE_OK);
    if (batch >= 20) assert_int_equal(allocations - before, 0);
  }
  assert_true(allocations > 0);
  swathe_layer_destroy(layer);
  swathe_threads_destroy(threads);
#endif
}

// ---- Refusals -----------------------------------------------------------------------------------

static void expect_words(enum swathe_status got, enum swathe_status want, const char *words)
{
  if (got != want)
    fail_msg("status %s, not %s: %s", swathe_status_text(got), swathe_status_text(want),
             swathe_error());
  if (!strstr(swathe_error(), words)) fail_msg("'%s' is not in: %s", words, swathe_error());
}

static void misuse_is_refused_in_words(void **state)
{
  struct swathe_problem problem = problem_of("q_heads=2,kv_heads=1,sinks=1,window_left=3");
  const struct swathe_sharding sharding = { .ranks = 1, .batch = 1, .tokens = 20 };
  const struct swathe_sharding two = { .ranks = 2, .batch = 1, .tokens = 20 };
  struct swathe_layer *layer = NULL;
  (void)state;

  assert_int_equal(swathe_layer_create(context, &problem, NULL, &layer), SWATHE_OK);
  struct sequence *sequence = sequence_make(&problem, &sharding, 1, 1);
  struct share *share = share_make(sequence, &sharding, 0, (struct share_form){ .gap = 0 });
  struct swathe_tensors tensors = share->tensors;
  expect_words(swathe_layer_forward(layer, &tensors, NULL), SWATHE_BAD_USE, "no sharding");
  expect_words(swathe_layer_shard(layer, &two), SWATHE_BAD_SHARDING, "2 ranks");
  assert_int_equal(swathe_layer_shard(layer, &sharding), SWATHE_OK);
  tensors.k.data = NULL;
  expect_words(swathe_layer_forward(layer, &tensors, NULL), SWATHE_BAD_TENSOR, "k has no data");
  tensors = share->tensors;
  tensors.out.token_stride = 0;
  expect_words(swathe_layer_forward(layer, &tensors, NULL), SWATHE_BAD_TENSOR, "out is written");
  tensors = share->tensors;
  tensors.sink = NULL;
  expect_words(swathe_layer_forward(layer, &tensors, NULL), SWATHE_BAD_TENSOR, "sink is NULL");
  expect_words(swathe_layer_forward(layer, &share->tensors, &tensors), SWATHE_BAD_USE, "stream");
  swathe_layer_destroy(layer);
  problem.target = SWATHE_CUDA;
  expect_words(swathe_layer_create(context, &problem, NULL, &layer), SWATHE_UNSUPPORTED, "cuda");
  problem.target = SWATHE_CPU;
  problem.window_left = -1;
  expect_words(swathe_layer_create(context, &problem, NULL, &layer), SWATHE_BAD_PROBLEM,
               "window_left");
  share_free(share);
  sequence_free(sequence);
}

static void require_mode_refuses_a_miss(void **state)
{
  const struct swathe_problem problem = problem_of("q_heads=2,kv_heads=1,window_left=3");
  struct swathe_context *strict = open_context(1, SWATHE_REQUIRE);
  struct swathe_layer *layer = NULL;
  (void)state;
  expect_words(swathe_layer_create(strict, &problem, NULL, &layer), SWATHE_NOT_FOUND,
               "swathe tune --problem");
  swathe_close(strict);
}

struct disagreeing {
  struct swathe_threads *threads;
  struct swathe_problem problem;
  int32_t rank;
  enum swathe_status status;
  char words[1024];
};

static void *create_layer(void *arg)
{
  struct disagreeing *self = arg;
  struct swathe_layer *layer = NULL;
  self->status = swathe_layer_create(context, &self->problem,
                                     swathe_threads_rank(self->threads, self->rank), &layer);
  snprintf(self->words, sizeof self->words, "%s", swathe_error());
  swathe_layer_destroy(layer);
  return NULL;
}

static void ranks_that_disagree_are_told(void **state)
{
  struct swathe_threads *threads = NULL;
  struct disagreeing ranks[2];
  pthread_t ids[2];
  (void)state;

  assert_int_equal(swathe_threads_create(2, 10, &threads), SWATHE_OK);
  for (int r = 0; r < 2; r++) {
    ranks[r] = (struct disagreeing){ .threads = threads, .rank = r };
    ranks[r].problem = problem_of(r ? "window_left=7,ranks=2" : "window_left=8,ranks=2");
    pthread_create(&ids[r], NULL, create_layer, &ranks[r]);
  }
  for (int r = 0; r < 2; r++) {
    pthread_join(ids[r], NULL);
    assert_int_equal(ranks[r].status, SWATHE_DISAGREE);
    assert_non_null(strstr(ranks[r].words, "window_left=7"));
  }
  swathe_threads_destroy(threads);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(results_equal_the_reference),
    cmocka_unit_test(shapes_of_real_models),
    cmocka_unit_test(backward_on_pairs_is_right),
    cmocka_unit_test(strips_change_no_bit),
    cmocka_unit_test(out_goes_past_the_cache),
    cmocka_unit_test(backward_sees_more_than_it_keeps),
    cmocka_unit_test(memory_goes_by_the_window),
    cmocka_unit_test(results_are_bit_equal),
    cmocka_unit_test(error_does_not_grow_with_ranks),
    cmocka_unit_test(layers_interleave),
    cmocka_unit_test(layers_share_kernels),
    cmocka_unit_test(wide_windows_are_causal),
    cmocka_unit_test(max_logits_are_the_largest_scores),
    cmocka_unit_test(groups_and_documents_change),
    cmocka_unit_test(sharding_anew_allocates_nothing),
    cmocka_unit_test(misuse_is_refused_in_words),
    cmocka_unit_test(require_mode_refuses_a_miss),
    cmocka_unit_test(ranks_that_disagree_are_told),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
