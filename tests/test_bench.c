// test_bench.c: `swathe bench` and `swathe plan --link` from outside: counts against the formulas,
// times on paper against hand calculation, the page, and what is refused.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include <cmocka.h>

#include "scratch.h"
#include "swathe.h"

static const char *binary;

static int make_directory(void **state)
{
  (void)state;
  const char *cache = getenv("TEST_CACHE_DIR");
  if (cache) setenv("SWATHE_CACHE_DIR", cache, 1);
  binary = scratch_home("bench");
  return binary ? 0 : -1;
}

static int run(const char *words)
{
  char command[2048];
  snprintf(command, sizeof command, "'%s' %s >stdout 2>stderr", binary, words);
  const int status = system(command);
  if (!WIFEXITED(status)) fail_msg("swathe %s: ended by signal %d", words, WTERMSIG(status));
  return WEXITSTATUS(status);
}

// What it prints; free with free.
static char *output_of(const char *words)
{
  const int status = run(words);
  char *err = scratch_read("stderr");
  if (status) fail_msg("swathe %s: exit %d: %s", words, status, err);
  free(err);
  return scratch_read("stdout");
}

static const char *after(const char *text, const char *word)
{
  const char *found = strstr(text, word);
  if (!found) fail_msg("no '%s' in:\n%.4000s", word, text);
  return found + strlen(word);
}

// The object of a strategy in a JSON document, and the number called `key` after `where` in it.
static const char *strategy_in(const char *json, const char *name)
{
  char word[64];
  snprintf(word, sizeof word, "\"strategy\": \"%s\"", name);
  return after(json, word);
}

static double number_in(const char *json, const char *where, const char *key)
{
  char word[64];
  snprintf(word, sizeof word, "\"%s\": ", key);
  return strtod(after(where ? after(json, where) : json, word), NULL);
}

// ---- Bench --------------------------------------------------------------------------------------

static void bytes_are_the_formulas(void **state)
{
  struct swathe_problem problem;
  struct swathe_traffic traffic[4];
  const struct swathe_sharding sharding = { .layout = SWATHE_ZIGZAG, .ranks = 4, .batch = 2,
                                            .tokens = 250 };
  int64_t halo[2] = { 0 }, gather = 0, ring = 0;
  (void)state;

  swathe_problem_init(&problem);
  assert_int_equal(swathe_problem_parse("q_heads=8,kv_heads=4,head_dim_qk=16,head_dim_v=16,"
                                        "window_left=9,layout=zigzag,ranks=4", &problem),
                   SWATHE_OK);
  assert_int_equal(swathe_plan(&problem, &sharding, NULL, NULL, traffic), SWATHE_OK);
  for (int r = 0; r < 4; r++) {
    if (traffic[r].receive_bytes > halo[0]) halo[0] = traffic[r].receive_bytes;
    if (traffic[r].send_bytes > halo[1]) halo[1] = traffic[r].send_bytes;
    if (traffic[r].all_gather_bytes > gather) gather = traffic[r].all_gather_bytes;
    if (traffic[r].ring_bytes > ring) ring = traffic[r].ring_bytes;
  }
  char *json = output_of("bench --problem q_heads=8,kv_heads=4,head_dim_qk=16,head_dim_v=16 "
                         "--window 10 --layout zigzag --ranks 4 --tokens 250 --batch 2 --rounds 2 "
                         "--json");
  const char *object = strategy_in(json, "halo");
  assert_int_equal(number_in(object, "\"forward\"", "received_bytes"), halo[0]);
  assert_int_equal(number_in(object, "\"backward\"", "received_bytes"), halo[1]);
  assert_int_equal(number_in(object, NULL, "received_bytes"), halo[0] + halo[1]);
  assert_int_equal(number_in(object, NULL, "planned_bytes"), halo[0] + halo[1]);
  assert_true(number_in(object, NULL, "difference") == 0);
  const double halo_memory = number_in(object, NULL, "memory_bytes");
  object = strategy_in(json, "all_gather");
  assert_int_equal(number_in(object, "\"forward\"", "received_bytes"), gather);
  assert_true(number_in(object, NULL, "memory_bytes") >= halo_memory + (double)gather);
  assert_int_equal(number_in(strategy_in(json, "ring"), "\"forward\"", "received_bytes"), ring);
  object = strategy_in(json, "ring_all");
  assert_int_equal(number_in(object, "\"forward\"", "received_bytes"), gather);
  static const char *const names[] = { "halo", "all_gather", "a2a", "ring", "ring_all" };
  for (int i = 0; i < 5; i++) {
    object = strategy_in(json, names[i]);
    assert_true(number_in(object, NULL, "difference") < 1e-4);
    assert_true(number_in(object, NULL, "total_us") > 0);
    assert_true(number_in(object, NULL, "compute_us") > 0);
  }
  free(json);
}

static void refusals_are_rows(void **state)
{
  (void)state;
  char *text = output_of("bench --problem q_heads=4,kv_heads=2,head_dim_qk=16,head_dim_v=16 "
                         "--window 10 --ranks 3 --tokens 60 --rounds 1 --forward "
                         "--strategies a2a,halo");
  assert_non_null(strstr(text, "4 query and 2 key heads do not divide by 3 ranks"));
  assert_non_null(strstr(text, "halo"));
  assert_null(strstr(text, "ring"));
  free(text);
  text = output_of("bench --problem q_heads=4,kv_heads=2,head_dim_qk=16,head_dim_v=16 "
                   "--window 10 --ranks 3 --tokens 60 --rounds 1 --strategies a2a,halo --json");
  assert_non_null(strstr(strategy_in(text, "a2a"), "do not divide by 3 ranks"));
  free(text);
}

static int count_of(const char *text, const char *word)
{
  int count = 0;
  for (const char *at = text; (at = strstr(at, word)); at += strlen(word)) count++;
  return count;
}

// A bar of each strategy in each of three panels, in time one more on top; nothing left unfilled.
static void the_page_has_every_bar(void **state)
{
  (void)state;
  free(output_of("bench --problem q_heads=4,kv_heads=4,head_dim_qk=16,head_dim_v=16 --window 10 "
                 "--ranks 3 --tokens 60 --rounds 1 --html page.html"));
  char *page = scratch_read("page.html");
  assert_int_equal(count_of(page, "<rect class=\"halo\""), 3);
  assert_int_equal(count_of(page, "<rect class=\"ring_all\""), 3);
  assert_int_equal(count_of(page, "<rect class=\"exposed\""), 4);
  assert_int_equal(count_of(page, "<rect class=\"a2a\""), 0);
  assert_int_equal(count_of(page, "do not divide by 3 ranks"), 1);
  assert_int_equal(count_of(page, "<svg"), count_of(page, "</svg>"));
  assert_int_equal(count_of(page, "<tr>"), count_of(page, "</tr>"));
  assert_null(strstr(page, "$("));
  assert_null(strstr(page, "nan"));
  assert_null(strstr(page, "width=\"-"));
  free(page);
}

// ---- On paper -----------------------------------------------------------------------------------

static void expect_near(double got, double want)
{
  if (!(fabs(got - want) <= 1e-6 * fabs(want))) fail_msg("%.9g, not %.9g", got, want);
}

// gpt-oss over 8 ranks of one node: 127 tokens of 2048 bytes come; shares are 16384 tokens.
static void times_follow_the_formulas(void **state)
{
  (void)state;
  char *json = output_of("plan --model gpt-oss-20b --tokens 131072 --ranks 8 --json "
                         "--link '50,20;intra:450,8,8' --tflops 500");
  const char *paper = after(json, "\"paper\"");
  const double share = 16384. * 2048, pairs = 16384. * 128;
  expect_near(number_in(strategy_in(paper, "halo"), "\"forward\"", "time_us"),
              8 + 127 * 2048 / 450e3);
  expect_near(number_in(strategy_in(paper, "halo"), "\"backward\"", "time_us"),
              8 + 127 * 4096 / 450e3);
  expect_near(number_in(strategy_in(paper, "halo"), "\"forward\"", "exposed_us"), 0);
  expect_near(number_in(strategy_in(paper, "all_gather"), "\"forward\"", "time_us"),
              7 * (8 + share / 450e3));
  expect_near(number_in(strategy_in(paper, "ring"), "\"forward\"", "time_us"), 8 + share / 450e3);
  expect_near(number_in(strategy_in(paper, "ring_all"), "\"backward\"", "time_us"),
              7 * (8 + 2 * share / 450e3));
  expect_near(number_in(paper, NULL, "attention_forward_us"), 2 * pairs * 64 * 128 / 500e6);
  expect_near(number_in(paper, NULL, "attention_backward_us"), 2 * pairs * 64 * 320 / 500e6);
  expect_near(number_in(paper, NULL, "hideable"), 1 - 127. / 16384);
  // what is longer than the hidden part of attention shows
  expect_near(number_in(strategy_in(paper, "all_gather"), "\"forward\"", "exposed_us"),
              7 * (8 + share / 450e3) - (1 - 127. / 16384) * 2 * pairs * 64 * 128 / 500e6);
  free(json);
}

// Bytes on paper are those that ranks count.
static void the_paper_counts_what_travels(void **state)
{
  static const char *const names[] = { "halo", "all_gather", "a2a", "ring", "ring_all" };
  static const char *const passes[] = { "\"forward\"", "\"backward\"" };
  static const char *const layers[] = {
    "--problem q_heads=8,kv_heads=4,head_dim_qk=16,head_dim_v=24 --window 10 --ranks 4 "
    "--tokens 256",
    "--problem q_heads=4,kv_heads=4,head_dim_qk=32,head_dim_v=32 --window 100 --ranks 4 "
    "--tokens 256 --batch 2 --dtype bf16 --halo-gradient bf16",
    "--problem q_heads=4,kv_heads=2,head_dim_qk=16,head_dim_v=16 --window 9 --ranks 2 "
    "--tokens 128 --layout zigzag",
  };
  char words[512];
  (void)state;
  for (size_t l = 0; l < sizeof layers / sizeof layers[0]; l++) {
    snprintf(words, sizeof words, "bench %s --rounds 1 --json", layers[l]);
    char *counted = output_of(words);
    snprintf(words, sizeof words, "plan %s --link 10,5 --json", layers[l]);
    char *planned = output_of(words);
    const char *paper = after(planned, "\"paper\"");
    for (int i = 0; i < 5; i++)
      for (int d = 0; d < 2; d++) {
        const double got = number_in(strategy_in(counted, names[i]), passes[d], "received_bytes");
        const double want = number_in(strategy_in(paper, names[i]), passes[d], "received_bytes");
        if (!(fabs(got - want) < 0.5))
          fail_msg("%s, %s of %s: %.0f counted, %.0f on paper", layers[l], passes[d], names[i], got,
                   want);
      }
    free(counted);
    free(planned);
  }
}

// A share as short as the window hides nothing; between nodes the slow link counts.
static void short_shares_are_exposed(void **state)
{
  (void)state;
  char *json = output_of("plan --window 129 --dtype bf16 --tokens 2048 --ranks 16 --json "
                         "--link '50,20;intra:450,8,8' --attention-us 5");
  const char *paper = after(json, "\"paper\"");
  const double halo_us = 20 + 128 * 256 / 50e3;
  expect_near(number_in(strategy_in(paper, "halo"), "\"forward\"", "time_us"), halo_us);
  expect_near(number_in(strategy_in(paper, "halo"), "\"forward\"", "exposed_us"), halo_us);
  expect_near(number_in(paper, NULL, "attention_backward_us"), 12.5);
  free(json);
}

static void where_the_halo_matters_is_said(void **state)
{
  (void)state;
  char *text = output_of("plan --model gpt-oss-20b --tokens 131072 --ranks 16 --tflops 500 "
                         "--link '50,20;intra:450,8,8'");
  assert_non_null(strstr(text, "With 16 ranks the halo matters"));
  assert_non_null(strstr(text, "a2a is refused"));
  assert_non_null(strstr(text, "does not matter"));  // with 2
  free(text);
  text = output_of("plan --tokens 4096 --ranks 1 --link 10,5");
  assert_non_null(strstr(text, "nothing has to travel"));
  free(text);
}

// ---- Words --------------------------------------------------------------------------------------

static void bad_use_is_refused(void **state)
{
  static const struct { const char *words, *err; } rows[] = {
    { "bench --strategies ulysses", "there are halo, all_gather, a2a, ring, ring_all" },
    { "bench --strategies halo,halo", "halo stands there twice" },
    { "bench --strategies halo,", "ends in a comma" },
    { "bench --rounds 0", "--rounds 0: at least 1" },
    { "plan --link fast", "--link fast: not GB/s,us" },
    { "plan --link 50", "--link 50: not GB/s,us" },
    { "plan --link 50,20,3", "not GB/s,us" },
    { "plan --link 50,-1", "not GB/s,us" },
    { "plan --link 0,20", "a link needs some bandwidth" },
    { "plan --link '50,20;450,8,8'", "not GB/s,us" },
    { "plan --link '50,20;intra:450,8'", "not GB/s,us" },
    { "plan --link '50,20;intra:450,8,1'", "1 ranks per node; a whole number from 2 on" },
    { "plan --link '50,20;intra:450,8,2.5'", "2.5 ranks per node" },
    { "plan --tflops 500", "--tflops needs --link too" },
    { "plan --link 50,20 --tflops 0", "--tflops 0: more than 0" },
    { "plan --link 50,20 --attention-us -3", "--attention-us -3: more than 0" },
    { "plan --link 50,20 --tflops 1 --attention-us 1", "do not go together" },
  };
  (void)state;
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    const int status = run(rows[i].words);
    char *err = scratch_read("stderr");
    if (status != 2 || !strstr(err, rows[i].err))
      fail_msg("swathe %s: exit %d, no '%s' in: %s", rows[i].words, status, rows[i].err, err);
    free(err);
  }
  assert_int_equal(run("bench --window 8 --tokens 32 --ranks 2 --rounds 1 --html no/page.html"), 1);
  char *err = scratch_read("stderr");
  assert_non_null(strstr(err, "no/page.html cannot be written"));
  free(err);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(bytes_are_the_formulas),
    cmocka_unit_test(refusals_are_rows),
    cmocka_unit_test(the_page_has_every_bar),
    cmocka_unit_test(times_follow_the_formulas),
    cmocka_unit_test(the_paper_counts_what_travels),
    cmocka_unit_test(short_shares_are_exposed),
    cmocka_unit_test(where_the_halo_matters_is_said),
    cmocka_unit_test(bad_use_is_refused),
  };
  return cmocka_run_group_tests(tests, make_directory, scratch_remove);
}
