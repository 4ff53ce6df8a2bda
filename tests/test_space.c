// test_space.c: every config of a small space against the reference, not only defaults and picks:
// forward and backward, of every dtype, for every isa that this machine runs.
//
// The spaces are those of spaces.lua with a few values for each knob, the rules that only say what
// is unlikely to win left out.  Kernels are compiled side by side.  TEST_CACHE_DIR keeps them.
#include <inttypes.h>
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

// Groups of three heads, dims that are no whole vectors, a band on both sides, sinks.
#define PROBLEM                                                                           \
  "q_heads=6,kv_heads=2,head_dim_qk=20,head_dim_v=32,window_left=40,window_right=2,sinks=1," \
  "ranks=2,tokens_per_rank=96"

static const char spaces[] =
    "local spaces = require 'spaces_real'\n"
    "local small = {\n"
    "  forward  = { vectors = { 1, 3 }, pack = { 1, 3 }, strip = { 1, 2 }, rows_k = { 4, 8 },\n"
    "               rows_d = { 4 }, block_k = { 48 }, ring_blocks = { 16 }, prefetch = { 8 } },\n"
    "  backward = { vectors = { 1, 2 }, pack = { 1, 3 }, panels = { 3 }, rows_k = { 4 },\n"
    "               rows_d = { 4 }, rows_j = { 4, 8 }, block_k = { 48 }, ring_blocks = { 32 },\n"
    "               vectors_d = { 1, 2 } },\n"
    "}\n"
    "for name, values in pairs(small) do\n"
    "  local known = 0\n"
    "  for _, knob in ipairs(spaces.cpu[name].tune) do\n"
    "    if values[knob[1]] then known, knob[2] = known + 1, values[knob[1]] end\n"
    "  end\n"
    "  for _ in pairs(values) do known = known - 1 end\n"
    "  if known ~= 0 then error('a knob of the small space is gone', 0) end\n"
    "end\n"
    "return spaces\n";

static const char *const isas[] = { "avx512bf16", "avx512", "avx2", "neon", "generic" };
static const char *const dtypes[] = { "f32", "bf16" };

enum { MOST_CONFIGS = 64, LEAST_CONFIGS = 4 };

struct configs {
  char of[MOST_CONFIGS][512];
  int count;
};

static const char *scratch;
static char generator[64], cache[64];

static int set_up(void **state)
{
  const char *source = getenv("TEST_SOURCE_DIR"), *kept = getenv("TEST_CACHE_DIR");
  char path[96];
  (void)state;
  if (!source || !(scratch = scratch_make("space"))) return -1;
  snprintf(generator, sizeof generator, "%s/gen", scratch);
  snprintf(cache, sizeof cache, "%s/cache", scratch);
  if (kept) snprintf(cache, sizeof cache, "%s", kept);
  scratch_shell("mkdir %s && cp -r '%s/generator' '%s/templates' %s", generator, source, source,
                generator);
  scratch_shell("mv %s/generator/spaces.lua %s/generator/spaces_real.lua", generator, generator);
  snprintf(path, sizeof path, "%s/generator/spaces.lua", generator);
  FILE *file = fopen(path, "w");
  assert_non_null(file);
  assert_true(fputs(spaces, file) >= 0);
  assert_int_equal(fclose(file), 0);
  return 0;
}

static bool add_config(void *arg, const char *config)
{
  struct configs *configs = arg;
  assert_in_range(configs->count, 0, MOST_CONFIGS - 1);
  snprintf(configs->of[configs->count++], sizeof configs->of[0], "%s", config);
  return true;
}

static void ignore_refused(void *arg, const char *rule, int64_t points)
{
  (void)arg, (void)rule, (void)points;
}

// ---- Compile ------------------------------------------------------------------------------------

// All configs of both directions, taken in turn by a thread a processor.
struct work {
  struct swathe_context *context;
  const struct swathe_problem *problem;
  const struct configs *configs;  // [2]
  pthread_mutex_t mutex;
  int next;
  char words[1024];
};

static void *compile(void *arg)
{
  struct work *work = arg;
  for (;;) {
    pthread_mutex_lock(&work->mutex);
    const int i = work->next++;
    pthread_mutex_unlock(&work->mutex);
    const int direction = i >= work->configs[0].count, at = i - direction * work->configs[0].count;
    struct swathe_compiled compiled;
    if (at >= work->configs[direction].count) return NULL;
    if (!swathe_compile(work->context, work->problem, (enum swathe_direction)direction, NULL,
                        work->configs[direction].of[at], &compiled))
      continue;
    pthread_mutex_lock(&work->mutex);
    snprintf(work->words, sizeof work->words, "%s: %s", work->configs[direction].of[at],
             swathe_error());
    pthread_mutex_unlock(&work->mutex);
  }
}

static void compile_all(struct swathe_context *context, const struct swathe_problem *problem,
                        const struct configs *configs)
{
  enum { MOST_THREADS = 16 };
  struct work work = { .context = context, .problem = problem, .configs = configs };
  pthread_t threads[MOST_THREADS];
  const long processors = sysconf(_SC_NPROCESSORS_ONLN);
  const int count = processors < MOST_THREADS ? (int)processors : MOST_THREADS;

  pthread_mutex_init(&work.mutex, NULL);
  for (int i = 0; i < count; i++)
    assert_int_equal(pthread_create(&threads[i], NULL, compile, &work), 0);
  for (int i = 0; i < count; i++) pthread_join(threads[i], NULL);
  pthread_mutex_destroy(&work.mutex);
  if (*work.words) fail_msg("%s", work.words);
}

// ---- Check --------------------------------------------------------------------------------------

static void check_all(struct swathe_context *context, const struct swathe_problem *problem,
                      const struct configs *configs)
{
  const bool narrow = problem->dtype == SWATHE_BF16;
  const struct sequence_tolerance tolerance =
      narrow ? (struct sequence_tolerance){ 2e-2, 1e-3, 3e-2 }
             : (struct sequence_tolerance){ 2e-5, 2e-5, 1e-4 };
  const struct swathe_sharding sharding = { .layout = SWATHE_CONTIGUOUS,
                                            .ranks = problem->ranks,
                                            .batch = 1,
                                            .tokens = problem->tokens_per_rank * problem->ranks };
  struct sequence *sequence = sequence_make(problem, &sharding, 7, 1);
  const int most = configs[0].count > configs[1].count ? configs[0].count : configs[1].count;

  if (narrow) sequence_solve_rounded(sequence);
  else sequence_solve(sequence);
  for (int i = 0; i < most; i++) {
    const char *both[2] = { configs[0].of[i % configs[0].count],
                            configs[1].of[i % configs[1].count] };
    const struct group_case group = { .context = context,
                                      .problem = problem,
                                      .sharding = &sharding,
                                      .configs = both,
                                      .script = "fb" };
    char words[1024];
    sequence_forget(sequence);
    if (group_run(&group, sequence, NULL, words, sizeof words))
      fail_msg("%s and %s: %s", both[0], both[1], words);
    if (!sequence_compare(sequence, true, tolerance, words, sizeof words))
      fail_msg("%s and %s: %s", both[0], both[1], words);
  }
  sequence_free(sequence);
}

static void every_config_of_a_small_space_is_right(void **state)
{
  static struct configs configs[2];
  char database[64];
  int isas_run = 0;
  (void)state;
  snprintf(database, sizeof database, "%s/tuning.db", scratch);
  for (size_t i = 0; i < sizeof isas / sizeof *isas; i++) {
    const struct swathe_options options = {
      .database = database, .cache = cache, .threads = 1, .generator = generator, .isa = isas[i]
    };
    struct swathe_context *context;
    if (swathe_open(&options, &context)) {
      print_message("%s: not checked: %s\n", isas[i], swathe_error());
      continue;
    }
    isas_run++;
    for (size_t t = 0; t < sizeof dtypes / sizeof *dtypes; t++) {
      struct swathe_problem problem;
      char text[256];
      swathe_problem_init(&problem);
      snprintf(text, sizeof text, PROBLEM ",dtype=%s", dtypes[t]);
      assert_int_equal(swathe_problem_parse(text, &problem), SWATHE_OK);
      for (int d = 0; d < 2; d++) {
        configs[d].count = 0;
        if (swathe_configs(context, &problem, (enum swathe_direction)d, NULL, true, add_config,
                           ignore_refused, &configs[d]))
          fail_msg("%s", swathe_error());
        assert_true(configs[d].count >= LEAST_CONFIGS);
      }
      compile_all(context, &problem, configs);
      check_all(context, &problem, configs);
      print_message("%s, %s: %d configs of forward, %d of backward\n", isas[i], dtypes[t],
                    configs[0].count, configs[1].count);
    }
    swathe_close(context);
  }
  assert_true(isas_run >= 1);  // generic runs anywhere
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(every_config_of_a_small_space_is_right),
  };
  return cmocka_run_group_tests(tests, set_up, scratch_remove);
}
