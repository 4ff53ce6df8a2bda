// test_choose.c: which config a layer takes from the tuning database, and which it passes over.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

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

// B41: one database with a pick for each of two isas, as of two kinds of machines: each finds its
// own; one that the file does not know yet takes the default.
static void each_isa_finds_its_own_pick(void **state)
{
  const struct swathe_problem problem = problem_of(256);
  const char *const isas[2] = { NULL, "generic" };  // NULL: the best of this machine
  char path[96], best[32], first[512], configs[2][512], chosen[512], why[512];
  (void)state;

  isa_of(NULL, best);
  if (!strcmp(best, "generic")) {
    print_message("this machine has one isa\n");
    skip();
  }
  snprintf(path, sizeof path, "%s/%d.db", root, databases++);
  for (int i = 0; i < 2; i++) {
    struct swathe_context *context = open_for(path, isas[i]);
    struct nth nth = { .left = 2 + i };
    struct sw_db_environment environment;
    struct sw_aim aim;
    struct sw_db *db = NULL;
    int64_t session;
    assert_int_equal(swathe_db_best(context, &problem, SWATHE_FORWARD, first, sizeof first, why,
                                    sizeof why), SWATHE_OK);
    expect_why(why, "default");  // of what the other isa has nothing is taken
    assert_int_equal(swathe_configs(context, &problem, SWATHE_FORWARD, NULL, false, take_nth, NULL,
                                    &nth), SWATHE_OK);
    snprintf(configs[i], sizeof configs[i], "%s", nth.config);
    assert_string_not_equal(configs[i], first);
    assert_int_equal(sw_context_aim(context, &problem, NULL, &aim), SWATHE_OK);
    sw_context_environment(context, &aim, &environment);
    assert_int_equal(sw_db_open(path, SW_DB_WRITE, &db), SWATHE_OK);
    assert_int_equal(sw_db_session_begin(db, "a test", 1, &session), SWATHE_OK);
    const struct sw_db_row row = { &problem, "forward", &environment, configs[i] };
    const struct sw_db_pick pick = { 1, 2, 0.5, .complete = true };
    assert_int_equal(sw_db_put_pick(db, session, &row, &pick), SWATHE_OK);
    sw_db_close(db);
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
    cmocka_unit_test(configs_the_generator_refuses_are_passed_over),
    cmocka_unit_test(hops_follow_from_window_and_shares),
  };
  return cmocka_run_group_tests(tests, set_up, scratch_remove);
}
