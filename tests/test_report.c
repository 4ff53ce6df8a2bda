// test_report.c: what users see of a tuning database: the page of `swathe db report`, that nothing
// from a database becomes markup or moves a cursor, how large it grows, which problems are chosen;
// and the screens of `db show` and `db list`.  The binary is $TEST_COMMAND.
#include "../runtime/cli/fail.c"
#include "../runtime/cli/history.c"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>
#include <sqlite3.h>

#include "../tuning_db/db.h"
#include "scratch.h"

static const char *binary;

static int make_directory(void **state)
{
  (void)state;
  binary = scratch_home("report");
  return binary ? 0 : -1;
}

// ---- Databases and pages ------------------------------------------------------------------------

static const struct sw_db_environment here = {
  .isa = "avx2", .processor = "A CPU <at> 2 GHz", .threads = 4, .generator = "g1"
};

static struct sw_db *create(const char *path)
{
  struct sw_db *db = NULL;
  unlink(path);
  if (sw_db_open(path, SW_DB_WRITE, &db)) fail_msg("%s", swathe_error());
  return db;
}

static void put(struct sw_db *db, const char *problem_text, const char *kernel, const char *config,
                const char *verdict, const char *words, double ratio)
{
  const double runs[] = { 90 * ratio, 100 * ratio, 110 * ratio, 120 * ratio };
  const int64_t count = ratio > 0 ? 4 : 0;
  struct swathe_problem problem;
  int64_t session = 0;
  swathe_problem_init(&problem);
  assert_int_equal(swathe_problem_parse(problem_text, &problem), SWATHE_OK);
  assert_int_equal(sw_db_session_begin(db, "tune", 60, &session), SWATHE_OK);
  const struct sw_db_row row = { &problem, kernel, &here, config };
  const struct sw_db_sample sample = { .verdict = verdict,
                                       .words = words,
                                       .runs_us = runs,
                                       .runs = count,
                                       .median_us = 105 * ratio,
                                       .ratio = ratio };
  if (sw_db_put_sample(db, session, &row, &sample)) fail_msg("%s", swathe_error());
}

static void put_pick(struct sw_db *db, const char *config, double ratio)
{
  struct swathe_problem problem;
  int64_t session = 0;
  swathe_problem_init(&problem);
  assert_int_equal(sw_db_session_begin(db, "tune", 60, &session), SWATHE_OK);
  const struct sw_db_row row = { &problem, "forward", &here, config };
  const struct sw_db_pick pick = { 105 * ratio, 105, ratio, 0.625, .complete = true };
  if (sw_db_put_pick(db, session, &row, &pick))
    fail_msg("%s", swathe_error());
}

// Runs SQL as another program would, checks off.
static void plant(const char *path, const char *sql)
{
  sqlite3 *connection;
  assert_int_equal(sqlite3_open(path, &connection), SQLITE_OK);
  sqlite3_exec(connection, "PRAGMA ignore_check_constraints = 1", 0, 0, 0);
  if (sqlite3_exec(connection, sql, NULL, NULL, NULL))
    fail_msg("%s: %s", sql, sqlite3_errmsg(connection));
  sqlite3_close(connection);
}

// `swathe db WORDS`; its exit status.
static int run_db(const char *words)
{
  char command[8192];
  snprintf(command, sizeof command, "'%s' db %s >stdout 2>stderr", binary, words);
  const int status = system(command);
  assert_true(WIFEXITED(status));
  return WEXITSTATUS(status);
}

static int run(const char *words)
{
  char more[8000];
  snprintf(more, sizeof more, "report %s", words);
  return run_db(more);
}

// The page that WORDS make; free with free.
static char *page_of(const char *words)
{
  char more[4096];
  snprintf(more, sizeof more, "%s --output page.html", words);
  const int status = run(more);
  char *err = scratch_read("stderr");
  if (status) fail_msg("db report %s: exit %d: %s", words, status, err);
  free(err);
  return scratch_read("page.html");
}

static int64_t count_of(const char *page, const char *text)
{
  int64_t count = 0;
  for (const char *at = page; (at = strstr(at, text)); at += strlen(text)) count++;
  return count;
}

static void expect_text(const char *page, const char *text, bool there)
{
  if (!strstr(page, text) == there)
    fail_msg("'%s' %s on the page:\n%.20000s", text, there ? "is not" : "is", page);
}

// Every "<" opens a tag that the template has, whose attributes are quoted and closed, and none of
// them runs anything or asks the network.
static void expect_harmless(const char *page)
{
  static const char *const tags[] = {
    "!DOCTYPE", "html",   "head",       "meta",    "title",   "style",   "body",  "h1",
    "h2",       "h3",     "p",          "b",       "a",       "br",      "code",  "div",
    "svg",      "circle", "line",       "path",    "text",    "g",       "table", "thead",
    "tbody",    "tr",     "th",         "td",      "span",    "section", "ul",    "li",
    "wbr",      "figure", "figcaption", "caption", "details", "summary",
  };
  static const char *const never[] = { "<script", "javascript:", "url(",
                                       "http://", "https://",    "@import" };
  for (size_t i = 0; i < sizeof never / sizeof never[0]; i++) expect_text(page, never[i], false);
  for (const char *at = page; (at = strchr(at, '<')); at++) {
    const char *name = at + 1 + (at[1] == '/');
    const size_t length = strcspn(name, " \n>/");
    bool known = false;
    for (size_t t = 0; t < sizeof tags / sizeof tags[0]; t++)
      known |= strlen(tags[t]) == length && !strncmp(name, tags[t], length);
    if (!known) fail_msg("a tag that the template lacks: %.60s", at);
    for (at = name + length; *at && *at != '>'; at++) {
      if (*at == '<') fail_msg("a tag within a tag: %.60s", name - 1);
      if (*at == '"') at = strchr(at + 1, '"');
      if (!at) fail_msg("a quote that never ends: %.60s", name - 1);
      if (!strncmp(at, " on", 3) || !strncmp(at, " src", 4))
        fail_msg("a tag that acts: %.60s", name - 1);
    }
  }
}

// ---- What stands there --------------------------------------------------------------------------

static void an_empty_database_makes_a_page(void **state)
{
  (void)state;
  char *page = page_of("--database nowhere.db");
  expect_text(page, "Nothing tuned yet", true);
  expect_text(page, "</html>", true);
  expect_harmless(page);
  free(page);
  assert_int_equal(access("nowhere.db", F_OK), -1);

  // Picks may come without their samples.
  struct sw_db *db = create("picks.db");
  put_pick(db, "tile=4", 0.8);
  sw_db_close(db);
  page = page_of("--database picks.db");
  expect_text(page, "Nothing tuned yet", false);
  expect_text(page, "Picks without samples", true);
  expect_text(page, "tile=4", true);
  free(page);
}

static void a_section_has_dots_line_table_and_reasons(void **state)
{
  (void)state;
  struct sw_db *db = create("some.db");
  put(db, "", "forward", "tile=4,pack=1", "ok", "", 1);
  put(db, "", "forward", "tile=8,pack=1", "ok", "", 0.75);
  put(db, "", "forward", "tile=16,pack=1", "wrong", "row 7 is 0.5, not 0.25", 0);
  put(db, "", "forward", "tile=4,pack=2", "ok", "", 0.875);
  put(db, "", "forward", "tile=4,pack=4", "ok", "", 9);
  put(db, "", "backward", "tile=4", "crash", "signal 11", 0);
  put_pick(db, "tile=8,pack=1", 0.75);
  sw_db_close(db);

  char *page = page_of("--database some.db");
  expect_harmless(page);
  expect_text(page, "Samples: 6, of 2 kernels of 1 problems", true);
  assert_int_equal(count_of(page, "<circle class=\"ok\""), 4);
  assert_int_equal(count_of(page, "<circle class=\"wrong\""), 1);
  assert_int_equal(count_of(page, "<circle class=\"crash\""), 1);
  assert_int_equal(count_of(page, "<circle class=\"pick\""), 1);
  assert_int_equal(count_of(page, "<path class=\"best\""), 1);
  assert_int_equal(count_of(page, "<line class=\"default\""), 2);
  expect_text(page, "<li class=\"ok\">4 ok</li><li class=\"wrong\">1 wrong</li>", true);
  expect_text(page, "the default, 105.0 us", true);
  expect_text(page, "1 of the dots lie beyond the scale", true);
  expect_text(page, "1 samples were rejected", true);
  expect_text(page, "row 7 is 0.5, not 0.25", true);
  expect_text(page, "<span class=\"badge\">in use</span> <code>tile=8,", true);
  expect_text(page, "<li>0.62 of the machine's multiply-add or memory peak</li>", true);
  // 110 us of 105 us, as a share of 0.875
  expect_text(page, "<td class=\"number\">0.833 to 0.917</td>", true);
  expect_text(page, "<b>tile=4</b>,<wbr><b>pack=2</b>", true);
  expect_text(page, "No config was measured and found right", true);
  expect_text(page, "A CPU &lt;at&gt; 2 GHz", true);
  expect_text(page, "are drawn", false);
  free(page);
}

// What counts is a config's newest sample, and what was right once may be wrong later.
static void the_newest_sample_of_a_config_counts(void **state)
{
  (void)state;
  static const struct {
    const char *config, *verdict;
    double ratio, best;
  } rows[] = {
    { "a", "crash", 0, 0 },    { "b", "ok", 1, 1 },        { "c", "ok", 0.5, 0.5 },
    { "d", "ok", 0.75, 0.5 },  { "c", "ok", 0.875, 0.75 }, { "c", "ok", 0.625, 0.625 },
    { "c", "wrong", 0, 0.75 }, { "e", "odd", 0.1, 0.75 },  { "f", "ok", 0, 0.75 },
  };
  struct cli_history history = { 0 };
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    const struct swathe_sample sample = {
      .problem = "p",
      .kernel = "k",
      .environment = "e",
      .config = rows[i].config,
      .generator = "g",
      .verdict = rows[i].verdict,
      .words = "",
      .when = "",
      .median_us = rows[i].ratio,
      .ratio = rows[i].ratio,
    };
    assert_true(cli_history_takes(&history, &sample));
    assert_int_equal(cli_history_add(&history, &sample), CLI_OK);
  }
  assert_int_equal(history.count, 7);  // nobody knows the verdict "odd", and f was not measured
  assert_int_equal(cli_history_settle(&history), CLI_OK);
  for (int64_t i = 0; i < history.count; i++) assert_true(history.samples[i].best == rows[i].best);
  assert_int_equal(history.ranked, 2);
  assert_int_equal(history.ranking[0], 3);
  assert_int_equal(history.ranking[1], 1);
  assert_true(cli_history_default_us(&history) == 1);
  const struct swathe_sample other = {
    .problem = "p", .kernel = "k", .environment = "e", .generator = "g2"
  };
  assert_false(cli_history_takes(&history, &other));
  cli_history_clear(&history);
}

// ---- What must not happen -----------------------------------------------------------------------

static void texts_never_become_markup(void **state)
{
  (void)state;
  static const char *const texts[] = {
    "<script>alert(1)</script>",
    "</title></svg></code></td><script src=x>",
    "\" onload=\"alert(1)",
    "' onmouseover='alert(1)",
    "]]>",
    "<!--",
    "-->",
    "<!--@ page -->",
    "$(ratio)$(config)",
    "&lt;&amp",
    "<style>*{display:none}",
    "\\u003cscript",
    "a,b,<b>,=,",
    ",,,",
  };
  enum { TEXTS = sizeof texts / sizeof texts[0] };
  struct sw_db *db = create("hostile.db");
  for (int i = 0; i < TEXTS; i++) {
    put(db, "", "forward", texts[i], "ok", "", 1 - 0.01 * i);
    put(db, "", "forward", texts[i], "wrong", texts[i], 0);
    put(db, "", texts[i], "tile=1", "crash", texts[i], 0);
  }
  put(db, "", "backward", "tile=1", "crash", "caf\xc3\xa9", 0);
  put_pick(db, texts[0], 0.5);
  sw_db_close(db);
  plant("hostile.db",
        "UPDATE sample SET generator = '<script>g</script>' WHERE kernel = 'forward'");
  char *page = page_of("--database hostile.db");
  expect_harmless(page);
  expect_text(page, "&lt;script&gt;alert(1)&lt;/script&gt;", true);
  expect_text(page, "&quot; onload=&quot;alert(1)", true);
  expect_text(page, "$(ratio)$(config)", true);
  expect_text(page, "&amp;lt;&amp;amp", true);
  expect_text(page, "caf\xc3\xa9", true);
  assert_int_equal(count_of(page, "<!DOCTYPE"), 1);
  free(page);
}

// Not UTF-8, beyond Unicode, halves of pairs, and what turns the direction of writing.
static void strange_characters_are_replaced(void **state)
{
  (void)state;
  static const char *const hex[] = { "ff",       "c0af", "e28082e280ae", "eda080",
                                     "f4908080", "c285", "e2",           "f09f98" };
  struct sw_db *db = create("strange.db");
  for (size_t i = 0; i < sizeof hex / sizeof hex[0]; i++)
    put(db, "", "forward", "tile=1", "wrong", "x", 0);
  sw_db_close(db);
  for (size_t i = 0; i < sizeof hex / sizeof hex[0]; i++) {
    char sql[256];
    snprintf(sql, sizeof sql, "UPDATE sample SET words = CAST(X'5b%s5d' AS TEXT) WHERE id = %zu",
             hex[i], i + 1);
    plant("strange.db", sql);
  }
  char *page = page_of("--database strange.db");
  assert_int_equal(system("iconv -f UTF-8 -t UTF-8 page.html >/dev/null 2>&1"), 0);
  expect_text(page, "[\xef\xbf\xbd]", true);
  expect_text(page, "\xe2\x80\xae", false);
  expect_text(page, "\xc2\x85", false);
  free(page);
}

// The database refuses such rows with a warning; the page stands without them.
static void rows_that_make_no_sense_are_left_out(void **state)
{
  (void)state;
  static const char *const changes[] = {
    "runs_us = '[1,2,3]'",
    "runs_us = '[1,2,3,4'",
    "runs_us = '[1,2,3,nan]'",
    "runs_us = '[1,2,3,4]]'",
    "runs_us = '1,2,3,4'",
    "runs_us = '[1,2,3,-4]'",
    "runs_us = x'00'",
    "runs_us = '[1,2,,4]'",
    "ratio = -1",
    "generator = 'a' || char(27)",
    "config = 'a' || char(0) || 'b'",
  };
  for (size_t i = 0; i < sizeof changes / sizeof changes[0]; i++) {
    struct sw_db *db = create("senseless.db");
    put(db, "", "forward", "tile=1", "ok", "", 1);
    put(db, "", "forward", "tile=2", "ok", "", 0.5);
    sw_db_close(db);
    char sql[256];
    snprintf(sql, sizeof sql, "UPDATE sample SET %s WHERE id = 2", changes[i]);
    plant("senseless.db", sql);
    char *page = page_of("--database senseless.db"), *err = scratch_read("stderr");
    if (!strstr(page, "Samples: 1,")) fail_msg("%s: the row counts", changes[i]);
    if (!strstr(err, "sample 2 is skipped")) fail_msg("%s: no warning", changes[i]);
    free(page);
    free(err);
  }
}

// Ten thousand samples more of one kernel, and a thousand other problems with ten each.
static void a_page_of_many_samples_stays_small(void **state)
{
  (void)state;
  struct sw_db *db = create("large.db");
  put(db, "tokens_per_rank=1", "forward", "tile=1", "ok", "", 1);
  sw_db_close(db);
  plant("large.db",
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 9999) "
        "INSERT INTO sample SELECT 1 + i, session, problem, kernel, environment, generator, "
        "'tile=' || (i % 977) || ',pack=16,block=128,ring=64,prefetch=8,stream=0', "
        "CASE i % 37 WHEN 5 THEN 'wrong' ELSE 'ok' END, '', '[9,9,9]', NULL, 3, 9, "
        "2 - i / 10000.0, i % 3 = 0, written_at FROM sample, n WHERE id = 1");
  char *page = page_of("--database large.db");
  expect_text(page, "of 10000 samples are drawn", true);
  expect_text(page, "3333 noisy: others used the machine meanwhile", true);
  expect_text(page, "<circle class=\"ok noisy\"", true);
  assert_in_range(count_of(page, "<circle"), 500, 2000);
  assert_in_range(strlen(page), 1, 1 << 20);
  expect_harmless(page);
  free(page);

  plant("large.db",
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 1000) "
        "INSERT INTO problem SELECT 1 + i, replace(text, 'tokens_per_rank=1', 'tokens_per_rank=' "
        "|| (1 + i)), family, 1 + i FROM problem, n WHERE id = 1");
  plant(
      "large.db",
      "INSERT INTO sample SELECT 100000 * p.id + s.id, session, p.id, kernel, environment, "
      "generator, config, verdict, words, runs_us, NULL, runs, median_us, ratio, noisy, written_at "
      "FROM sample s, problem p WHERE s.id BETWEEN 2 AND 11 AND p.id > 1");
  page = page_of("--database large.db");
  expect_text(page, "Samples: 20000, of 1001 kernels", true);
  expect_text(page, "The page is full", true);
  assert_in_range(strlen(page), 1 << 20, 5 << 20);
  free(page);
}

// ---- The verb -----------------------------------------------------------------------------------

static void options_choose_problems(void **state)
{
  (void)state;
  static const char model[] = "q_heads=64,kv_heads=8,head_dim_qk=64,head_dim_v=64,window_left=127,"
                              "window_right=0,dtype=bf16,sinks=1,ranks=%d,tokens_per_rank=%d";
  static const struct {
    const char *words;
    int problems;
  } rows[] = {
    { "", 4 },
    { "--model gpt-oss-20b", 2 },
    { "--model gpt-oss-20b --ranks 8", 1 },
    { "--model gpt-oss-20b --ranks 8 --tokens 32768", 1 },
    { "--model gpt-oss-20b --ranks 8 --tokens 800", 0 },
    { "--model gpt-oss-20b --dtype f32", 0 },
    { "--problem q_heads=64", 2 },
    { "--problem q_heads=1", 2 },
    { "--problem ranks=2,tokens_per_rank=7", 1 },
    { "--window 128", 3 },
    { "--layout zigzag", 0 },
  };
  char text[256];
  struct sw_db *db = create("chosen.db");
  snprintf(text, sizeof text, model, 8, 4096);
  put(db, text, "forward", "tile=1", "ok", "", 1);
  snprintf(text, sizeof text, model, 4, 1024);
  put(db, text, "forward", "tile=1", "ok", "", 1);
  put(db, "window_left=127,window_right=0", "forward", "tile=1", "ok", "", 1);
  put(db, "ranks=2,tokens_per_rank=7", "forward", "tile=1", "ok", "", 1);
  sw_db_close(db);
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    char words[256], said[64];
    snprintf(words, sizeof words, "--database chosen.db --json %s", rows[i].words);
    char *page = page_of(words), *out = scratch_read("stdout");
    snprintf(said, sizeof said, "\"problems\": %d,", rows[i].problems);
    if (!strstr(out, said)) fail_msg("%s: not %s in %s", words, said, out);
    if (!rows[i].problems) expect_text(page, "Nothing tuned yet", true);
    free(page);
    free(out);
  }
}

static void says_where_it_wrote_or_why_not(void **state)
{
  (void)state;
  assert_int_equal(run("--database nowhere.db --output page.html"), 0);
  char *out = scratch_read("stdout");
  assert_non_null(strstr(out, "page.html\n  problems 0, kernels 0, samples 0, bytes "));
  free(out);
  assert_int_equal(run("--database nowhere.db"), 0);
  out = scratch_read("stdout");
  assert_non_null(strstr(out, "<!DOCTYPE html>"));
  free(out);
  assert_int_equal(run("--database nowhere.db --output missing/page.html"), 1);
  out = scratch_read("stderr");
  assert_non_null(strstr(out, "missing/page.html cannot be written: "));
  free(out);
  assert_int_equal(run("--tokens 4096"), 2);
  out = scratch_read("stderr");
  assert_non_null(strstr(out, "--tokens needs --ranks too"));
  free(out);
}

// ---- Screens ------------------------------------------------------------------------------------

static void expect_screen(const char *words, const char *text, bool there)
{
  assert_int_equal(run_db(words), 0);
  char *out = scratch_read("stdout");
  if (!strstr(out, text) == there)
    fail_msg("db %s: '%s' %s in\n%s", words, text, there ? "is not" : "is", out);
  free(out);
}

static void show_gives_the_best_in_full_and_then_differences(void **state)
{
  (void)state;
  struct sw_db *db = create("shown.db");
  put(db, "", "forward", "tile=4,pack=1,block=64", "ok", "", 1);
  put(db, "", "forward", "tile=8,pack=1,block=64", "ok", "", 0.75);
  put(db, "", "forward", "tile=8,pack=2,block=32", "ok", "", 0.875);
  put(db, "", "forward", "tile=4,pack=2,block=64", "wrong", "row 7\nis off", 0);
  put_pick(db, "tile=8,pack=1,block=64", 0.75);
  sw_db_close(db);
  expect_screen("show --database shown.db", "  best  tile=8,pack=1,block=64\n", true);
  expect_screen("show --database shown.db", "0.875     4   1  pack=2,block=32\n", true);
  expect_screen("show --database shown.db", "1.000     4   1  tile=4\n", true);
  expect_screen("show --database shown.db", "  wrong  tile=4,pack=2\n         row 7 is off\n",
                true);
  expect_screen("show --database shown.db",
                "on 1: isa=avx2,processor=A CPU <at> 2 GHz,threads=4, "
                "generator g1\n",
                true);
  expect_screen("show --database shown.db", "others used the machine", false);
  expect_screen("list --database shown.db", "78.8 us, 0.750 of the default's 105.0 us, 0.62 of "
                "the machine's peak\n", true);
  plant("shown.db", "UPDATE sample SET noisy = 1 WHERE id = 3");
  expect_screen("show --database shown.db", "~: others used the machine meanwhile\n", true);
  // Another machine's samples stand in the same table, but say so.
  plant("shown.db",
        "INSERT INTO environment SELECT 2, replace(text, '=4', '=8'), isa, processor, 8 "
        "FROM environment; UPDATE sample SET environment = 2 WHERE id = 3");
  expect_screen("show --database shown.db", "0.875     4   2  pack=2,block=32\n", true);
}

// Words may hold what controls a terminal, or no UTF-8, which JSON cannot hold.
static void screens_replace_strange_characters(void **state)
{
  (void)state;
  struct sw_db *db = create("screen.db");
  put(db, "", "forward", "tile=4", "wrong", "x", 0);
  sw_db_close(db);
  plant("screen.db", "UPDATE sample SET words = CAST(X'5bc29b316dff5d' AS TEXT)");
  expect_screen("show --database screen.db", "[??1m?]\n", true);
  expect_screen("show --database screen.db --json",
                "\"words\": \"[\xef\xbf\xbd\xef\xbf\xbd"
                "1m\xef\xbf\xbd]\"",
                true);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(an_empty_database_makes_a_page),
    cmocka_unit_test(a_section_has_dots_line_table_and_reasons),
    cmocka_unit_test(the_newest_sample_of_a_config_counts),
    cmocka_unit_test(texts_never_become_markup),
    cmocka_unit_test(strange_characters_are_replaced),
    cmocka_unit_test(rows_that_make_no_sense_are_left_out),
    cmocka_unit_test(a_page_of_many_samples_stays_small),
    cmocka_unit_test(options_choose_problems),
    cmocka_unit_test(says_where_it_wrote_or_why_not),
    cmocka_unit_test(show_gives_the_best_in_full_and_then_differences),
    cmocka_unit_test(screens_replace_strange_characters),
  };
  return cmocka_run_group_tests(tests, make_directory, scratch_remove);
}
