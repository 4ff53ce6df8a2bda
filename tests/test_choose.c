// test_choose.c: which config a layer takes from the tuning database, which it passes over, and
// what ranks of several isas take.
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "group.h"
#include "layer.h"
#include "scratch.h"

static const char *root;
static int databases;

static int set_up(void **state)
{
  (void)state;
  root = scratch_make("choose");
  return root ? 0 : -1;
}

static struct swathe_context *open_for(const char *database, const char *isa)
{
  const struct swathe_options options = {
    .cache = root, .threads = 2, .database = database, .isa = isa
  };
  struct swathe_context *context = NULL;
  if (swathe_open(&options, &context)) fail_msg("%s", swathe_error());
  return context;
}

static struct swathe_context *open_context(const char *database)
{
  return open_for(database, NULL);
}

static struct swathe_problem problem_of(int64_t tokens_per_rank)
{
  struct swathe_problem problem;
  swathe_problem_init(&problem);
  problem.window_left = 127;
  problem.ranks = 4;
  problem.tokens_per_rank = tokens_per_rank;
  return problem;
}

struct nth {
  int left;
  char config[512];
};

static bool take_nth(void *arg, const char *config)
{
  struct nth *nth = arg;
  snprintf(nth->config, sizeof nth->config, "%s", config);
  return nth->left-- > 0;
}

// A config that is not the default.
static void another_config(const struct swathe_problem *problem, char config[512])
{
  struct swathe_context *context = open_context(NULL);
  char fallback[512], why[512];
  struct nth nth = { .left = 0 };
  assert_int_equal(
      swathe_db_best(context, problem, SWATHE_FORWARD, fallback, sizeof fallback, why, sizeof why),
      SWATHE_OK);
  do {
    nth.left++;
    const int wanted = nth.left;
    assert_int_equal(swathe_configs(context, problem, SWATHE_FORWARD, NULL, false, take_nth, NULL,
                                    &nth),
                     SWATHE_OK);
    nth.left = wanted;
  } while (!strcmp(nth.config, fallback));
  snprintf(config, 512, "%s", nth.config);
  swathe_close(context);
}

// What a layer of `asked` takes from a database that has `config` for `stored`; `why` says why.
static void best_of(const struct swathe_problem *stored, const char *config,
                    const struct swathe_problem *asked, char chosen[512], char why[512])
{
  char path[96];
  snprintf(path, sizeof path, "%s/%d.db", root, databases++);
  struct swathe_context *context = open_context(path);
  struct sw_db_environment environment;
  struct sw_aim aim;
  struct sw_db *db = NULL;
  int64_t session;

  assert_int_equal(sw_context_aim(context, stored, NULL, &aim), SWATHE_OK);
  sw_context_environment(context, &aim, &environment);
  assert_int_equal(sw_db_open(path, SW_DB_WRITE, &db), SWATHE_OK);
  assert_int_equal(sw_db_session_begin(db, "a test", 1, &session), SWATHE_OK);
  const struct sw_db_row row = { stored, "forward", &environment, config };
  const struct sw_db_pick pick = { 1, 2, 0.5, .complete = true };
  assert_int_equal(sw_db_put_pick(db, session, &row, &pick), SWATHE_OK);
  sw_db_close(db);
  sw_context_reopen_database(context);
  assert_int_equal(swathe_db_best(context, asked, SWATHE_FORWARD, chosen, 512, why, 512),
                   SWATHE_OK);
  swathe_close(context);
}

static void expect_why(const char *why, const char *words)
{
  if (!strstr(why, words)) fail_msg("'%s' is not in: %s", words, why);
}

// The ladder: exact, then near: within a factor of 4 in tokens per rank, and only if the farthest
// visible key is as many shares away.  A window of 128 reaches one share of 256 or 512 tokens, but
// two of 100.
static void near_picks_have_the_same_hops_and_about_the_size(void **state)
{
  static const struct {
    int64_t stored;
    bool used;
    const char *why;
  } rows[] = {
    { 256, true, "exact pick" },
    { 512, true, "near pick" },
    { 1024, true, "near pick" },
    { 127, true, "near pick" },
    { 126, false, "has 2 hops, this has 1" },
    { 100, false, "has 2 hops, this has 1" },
    { 1025, false, "beyond the bound of 4x" },
    { 1000000, false, "beyond the bound of 4x" },
  };
  const struct swathe_problem asked = problem_of(256);
  char config[512], chosen[512], why[512];
  (void)state;
  another_config(&asked, config);
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    const struct swathe_problem stored = problem_of(rows[i].stored);
    best_of(&stored, config, &asked, chosen, why);
    expect_why(why, rows[i].why);
    if (rows[i].used)
      assert_string_equal(chosen, config);
    else
      assert_string_not_equal(chosen, config);
  }
}

// The isa that a context takes.
static void isa_of(const char *isa, char name[32])
{
  const struct swathe_problem problem = problem_of(256);
  struct swathe_context *context = open_for(NULL, isa);
  struct sw_aim aim;
  assert_int_equal(sw_context_aim(context, &problem, NULL, &aim), SWATHE_OK);
  snprintf(name, 32, "%s", aim.isa);
  swathe_close(context);
}

// The isa of this machine that is not "generic", or a skipped test.
static void need_two_isas(char best[32])
{
  isa_of(NULL, best);
  if (strcmp(best, "generic")) return;
  print_message("this machine has one isa\n");
  skip();
}

// Stores a pick as the context would have measured it.
static void store(struct swathe_context *context, const char *path, const struct sw_db_row *row)
{
  const struct sw_db_pick pick = { 1, 2, 0.5, .complete = true };
  struct sw_db *db = NULL;
  int64_t session;
  assert_int_equal(sw_db_open(path, SW_DB_WRITE, &db), SWATHE_OK);
  assert_int_equal(sw_db_session_begin(db, "a test", 1, &session), SWATHE_OK);
  assert_int_equal(sw_db_put_pick(db, session, row, &pick), SWATHE_OK);
  sw_db_close(db);
  sw_context_reopen_database(context);
}

// The forward config number `n` of its space becomes the pick of the context's isa.
static void store_nth(struct swathe_context *context, const char *path,
                      const struct swathe_problem *problem, int n, char config[512])
{
  struct nth nth = { .left = n };
  struct sw_db_environment environment;
  struct sw_aim aim;
  assert_int_equal(swathe_configs(context, problem, SWATHE_FORWARD, NULL, false, take_nth, NULL,
                                  &nth), SWATHE_OK);
  snprintf(config, 512, "%s", nth.config);
  assert_int_equal(sw_context_aim(context, problem, NULL, &aim), SWATHE_OK);
  sw_context_environment(context, &aim, &environment);
  store(context, path, &(struct sw_db_row){ problem, "forward", &environment, config });
}

// B41: one database with a pick for each of two isas, as of two kinds of machines: each finds its
// own; one that the file does not know yet takes the default.
static void each_isa_finds_its_own_pick(void **state)
{
  const struct swathe_problem problem = problem_of(256);
  const char *const isas[2] = { NULL, "generic" };  // NULL: the best of this machine
  char path[96], best[32], first[512], configs[2][512], chosen[512], why[512];
  (void)state;

  need_two_isas(best);
  snprintf(path, sizeof path, "%s/%d.db", root, databases++);
  for (int i = 0; i < 2; i++) {
    struct swathe_context *context = open_for(path, isas[i]);
    assert_int_equal(swathe_db_best(context, &problem, SWATHE_FORWARD, first, sizeof first, why,
                                    sizeof why), SWATHE_OK);
    expect_why(why, "default");  // of what the other isa has nothing is taken
    store_nth(context, path, &problem, 2 + i, configs[i]);
    assert_string_not_equal(configs[i], first);
    swathe_close(context);
  }
  for (int i = 0; i < 2; i++) {
    struct swathe_context *context = open_for(path, isas[i]);
    assert_int_equal(swathe_db_best(context, &problem, SWATHE_FORWARD, chosen, sizeof chosen, why,
                                    sizeof why), SWATHE_OK);
    expect_why(why, "exact pick");
    assert_string_equal(chosen, configs[i]);
    swathe_close(context);
  }
}

// ---- A group of two isas ------------------------------------------------------------------------

enum { RANKS = 3 };

struct explained {
  struct swathe_context *context;
  struct swathe_transport *transport;
  const struct swathe_problem *problem;
  enum swathe_status status;
  char text[2048];
};

static void *explain(void *arg)
{
  struct explained *rank = arg;
  struct swathe_layer *layer = NULL;
  rank->status = swathe_layer_create(rank->context, rank->problem, rank->transport, &layer);
  if (rank->status) snprintf(rank->text, sizeof rank->text, "%s", swathe_error());
  else swathe_layer_explain(layer, rank->text, sizeof rank->text);
  swathe_layer_destroy(layer);
  return NULL;
}

static void explain_all(struct swathe_context *const contexts[RANKS],
                        const struct swathe_problem *problem, struct explained ranks[RANKS])
{
  struct swathe_threads *threads = NULL;
  pthread_t ids[RANKS];
  assert_int_equal(swathe_threads_create(RANKS, 20, &threads), SWATHE_OK);
  for (int r = 0; r < RANKS; r++) {
    ranks[r] = (struct explained){ .context = contexts[r],
                                   .transport = swathe_threads_rank(threads, r),
                                   .problem = problem };
    pthread_create(&ids[r], NULL, explain, &ranks[r]);
  }
  for (int r = 0; r < RANKS; r++) pthread_join(ids[r], NULL);
  for (int r = 0; r < RANKS; r++)
    if (ranks[r].status) fail_msg("rank %d: %s", r, ranks[r].text);
  swathe_threads_destroy(threads);
}

static void expect_words(const struct explained *rank, const char *words)
{
  if (!strstr(rank->text, words)) fail_msg("%s\n  lacks '%s'", rank->text, words);
}

// B41: machines of two kinds in one group: kernels by each one's isa and its own pick, and one
// exchange for all, which is what rank 0's machine has for it.
static void kernels_are_each_ranks_own_and_the_exchange_is_one(void **state)
{
  static const char exchange[] = "overlap=2,chunks=2,together=0,order=1,poll=4,progress=200";
  char path[96], best[32], configs[2][512], isa[64];
  struct swathe_problem problem = problem_of(256);
  struct explained ranks[RANKS];
  (void)state;

  need_two_isas(best);
  problem.ranks = RANKS;
  for (int first = 0; first < 2; first++) {  // the isa of rank 0
    snprintf(path, sizeof path, "%s/%d.db", root, databases++);
    struct swathe_context *two[2] = { open_for(path, best), open_for(path, "generic") };
    struct swathe_context *const contexts[RANKS] = { two[first], two[!first], two[first] };
    for (int i = 0; i < 2; i++) store_nth(two[i], path, &problem, 2 + i, configs[i]);
    const struct sw_db_environment environment = {
      .isa = isa, .processor = "any", .threads = 2, .generator = ""
    };
    snprintf(isa, sizeof isa, "%s+threads", first ? "generic" : best);
    store(two[first], path, &(struct sw_db_row){ &problem, "exchange", &environment, exchange });
    explain_all(contexts, &problem, ranks);
    for (int r = 0; r < RANKS; r++) {
      const int mine = r == 1 ? !first : first;
      snprintf(isa, sizeof isa, "isa %s,", mine ? "generic" : best);
      expect_words(&ranks[r], isa);
      expect_words(&ranks[r], configs[mine]);
      expect_words(&ranks[r], exchange);
    }
    for (int i = 0; i < 2; i++) swathe_close(two[i]);
  }
}

// And what they compute together is right, however the keys are shared.
static void a_group_of_two_isas_computes_the_same(void **state)
{
  static const struct {
    const char *problem;
    enum swathe_layout layout;
    enum swathe_strategy strategy;
  } rows[] = {
    { "q_heads=6,kv_heads=3,window_left=90,sinks=1", SWATHE_CONTIGUOUS, SWATHE_HALO },
    { "q_heads=6,kv_heads=3,window_left=90,window_right=20,softcap=5", SWATHE_ZIGZAG, SWATHE_HALO },
    { "q_heads=6,kv_heads=3,window_left=90,dtype=bf16,halo_gradient=bf16", SWATHE_ZIGZAG,
      SWATHE_HALO },
    { "q_heads=6,kv_heads=3,window_left=90", SWATHE_CONTIGUOUS, SWATHE_ALL_GATHER },
    { "q_heads=6,kv_heads=3,window_left=90", SWATHE_ZIGZAG, SWATHE_RING },
    { "q_heads=6,kv_heads=3,window_left=90", SWATHE_CONTIGUOUS, SWATHE_A2A },
  };
  char best[32], words[1024];
  (void)state;

  need_two_isas(best);
  struct swathe_context *two[2] = { open_for("", best), open_for("", "generic") };
  struct swathe_context *const contexts[RANKS] = { two[0], two[1], two[0] };
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    const struct swathe_sharding sharding = { .layout = rows[i].layout, .ranks = RANKS,
                                              .batch = 1, .tokens = 500 };
    struct swathe_problem problem = problem_of(256);
    assert_int_equal(swathe_problem_parse(rows[i].problem, &problem), SWATHE_OK);
    problem.ranks = RANKS;
    problem.layout = rows[i].layout;
    const bool bf16 = problem.dtype == SWATHE_BF16;
    const struct sequence_tolerance tolerance =
        bf16 ? (struct sequence_tolerance){ 2e-2, 1e-3, 2e-2 }
             : (struct sequence_tolerance){ 2e-5, 2e-5, 1e-4 };
    struct sequence *sequence = sequence_make(&problem, &sharding, 5, 1);
    const struct group_case group = { .context = two[0], .contexts = contexts,
                                      .problem = &problem, .sharding = &sharding,
                                      .script = "fb", .strategy = rows[i].strategy };
    sequence_solve(sequence);
    if (group_run(&group, sequence, NULL, words, sizeof words) ||
        !sequence_compare(sequence, true, tolerance, words, sizeof words))
      fail_msg("%s by %s: %s", rows[i].problem, swathe_strategy_name(rows[i].strategy), words);
    sequence_free(sequence);
  }
  for (int i = 0; i < 2; i++) swathe_close(two[i]);
}

// A database is only data: what the generator would not have made is not used, and the reason is
// said.
static void configs_the_generator_refuses_are_passed_over(void **state)
{
  static const char *const refused[] = { "", "tile_q=3", "sabotage=1", "no config at all",
                                         "tile_tokens=99999999" };
  const struct swathe_problem problem = problem_of(256);
  char chosen[512], why[512];
  (void)state;
  for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
    best_of(&problem, refused[i], &problem, chosen, why);
    expect_why(why, "default: a pick was refused");
    assert_string_not_equal(chosen, refused[i]);
  }
}

// What the farthest key's distance is, by layout.
static void hops_follow_from_window_and_shares(void **state)
{
  static const struct {
    int64_t window, tokens;
    int32_t ranks, hops;
    enum swathe_layout layout;
  } rows[] = {
    { 0, 100, 4, 0, SWATHE_CONTIGUOUS },
    { 100, 100, 4, 1, SWATHE_CONTIGUOUS },
    { 101, 100, 4, 2, SWATHE_CONTIGUOUS },
    { 1000000, 100, 4, 3, SWATHE_CONTIGUOUS },
    { SWATHE_UNLIMITED, 100, 4, 3, SWATHE_CONTIGUOUS },
    { 50, 100, 4, 1, SWATHE_ZIGZAG },
    { 51, 100, 4, 2, SWATHE_ZIGZAG },
    { 51, 100, 1, 1, SWATHE_ZIGZAG },
    { 5, 100, 1, 0, SWATHE_CONTIGUOUS },
  };
  (void)state;
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    struct swathe_problem problem = problem_of(rows[i].tokens);
    problem.window_left = rows[i].window;
    problem.ranks = rows[i].ranks;
    problem.layout = rows[i].layout;
    assert_int_equal(sw_choose_hops(&problem), rows[i].hops);
  }
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(near_picks_have_the_same_hops_and_about_the_size),
    cmocka_unit_test(each_isa_finds_its_own_pick),
    cmocka_unit_test(kernels_are_each_ranks_own_and_the_exchange_is_one),
    cmocka_unit_test(a_group_of_two_isas_computes_the_same),
    cmocka_unit_test(configs_the_generator_refuses_are_passed_over),
    cmocka_unit_test(hops_follow_from_window_and_shares),
  };
  return cmocka_run_group_tests(tests, set_up, scratch_remove);
}
