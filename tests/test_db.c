// test_db.c: the tuning database: what is kept, what is found, in which order, and what is refused.
//
// Files that anyone may have written are planted with sqlite3 itself; everything else goes through
// db.h.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <sqlite3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../tuning_db/db.h"

// ---- A place for files --------------------------------------------------------------------------

static char place[256];

static const char *in_place(const char *name)
{
  static char paths[64][512];
  static int next;
  char *path = paths[next++ % 64];
  snprintf(path, sizeof paths[0], "%s/%s", place, name);
  return path;
}

static int make_place(void **state)
{
  (void)state;
  // In memory if there is such a place: hundreds of puts wait for the disk otherwise.
  const char *temporary = getenv("TMPDIR");
  if (!temporary) temporary = access("/dev/shm", W_OK | X_OK) ? "/tmp" : "/dev/shm";
  snprintf(place, sizeof place, "%s/swathe_db_XXXXXX", temporary);
  return mkdtemp(place) ? 0 : -1;
}

static int remove_place(void **state)
{
  (void)state;
  char command[600];
  snprintf(command, sizeof command, "chmod -R u+rwx '%s' && rm -r '%s'", place, place);
  return system(command);
}

static bool exists(const char *path) { return !access(path, F_OK); }

// The library asks statfs whether a file is on a network; a test may say that it is.
static bool pretend_network;
int statfs(const char *path, struct statfs *found)
{
  const int result = (int)syscall(SYS_statfs, path, found);
  if (!result && pretend_network) found->f_type = 0x6969;
  return result;
}

// SQLite locks files with fcntl; a test may say that the file system cannot.
static bool pretend_no_locks;
static int fcntl_or_not(int file, int command, void *argument)
{
  if (pretend_no_locks && command == F_SETLK) {
    errno = ENOLCK;
    return -1;
  }
  return (int)syscall(SYS_fcntl, file, command, argument);
}
int fcntl(int file, int command, ...)
{
  va_list arguments;
  va_start(arguments, command);
  void *argument = va_arg(arguments, void *);
  va_end(arguments);
  return fcntl_or_not(file, command, argument);
}
int fcntl64(int file, int command, ...)
{
  va_list arguments;
  va_start(arguments, command);
  void *argument = va_arg(arguments, void *);
  va_end(arguments);
  return fcntl_or_not(file, command, argument);
}

// Bytes of a file; free with free.
static char *read_bytes(const char *path, size_t *size)
{
  FILE *file = fopen(path, "rb");
  assert_non_null(file);
  char *bytes = calloc(1, 1 << 22);
  *size = fread(bytes, 1, 1 << 22, file);
  fclose(file);
  return bytes;
}

static void write_bytes(const char *path, const char *bytes, size_t size)
{
  FILE *file = fopen(path, "wb");
  assert_non_null(file);
  assert_int_equal(fwrite(bytes, 1, size, file), size);
  fclose(file);
}

static void copy_file(const char *from, const char *to)
{
  size_t size;
  char *bytes = read_bytes(from, &size);
  write_bytes(to, bytes, size);
  free(bytes);
}

// Runs SQL on a file as another program would, checks and all safety off.
static void plant(const char *path, const char *sql)
{
  sqlite3 *connection;
  assert_int_equal(sqlite3_open(path, &connection), SQLITE_OK);
  sqlite3_busy_timeout(connection, 5000);
  sqlite3_exec(connection, "PRAGMA ignore_check_constraints = 1; PRAGMA foreign_keys = 0", 0, 0, 0);
  if (sqlite3_exec(connection, sql, NULL, NULL, NULL))
    fail_msg("%s: %s", sql, sqlite3_errmsg(connection));
  sqlite3_close(connection);
}

static int64_t ask(const char *path, const char *sql)
{
  sqlite3 *connection;
  sqlite3_stmt *statement;
  assert_int_equal(sqlite3_open(path, &connection), SQLITE_OK);
  assert_int_equal(sqlite3_prepare_v2(connection, sql, -1, &statement, NULL), SQLITE_OK);
  assert_int_equal(sqlite3_step(statement), SQLITE_ROW);
  const int64_t number = sqlite3_column_int64(statement, 0);
  sqlite3_finalize(statement);
  sqlite3_close(connection);
  return number;
}

// ---- Rows ---------------------------------------------------------------------------------------

static const struct sw_db_environment here = {
  .isa = "avx2", .processor = "A CPU, at 2 GHz", .threads = 4, .generator = "g1"
};

static struct swathe_problem problem_of(const char *text)
{
  struct swathe_problem problem;
  swathe_problem_init(&problem);
  if (swathe_problem_parse(text, &problem)) fail_msg("%s", swathe_error());
  return problem;
}

static struct sw_db *open_db(const char *path, enum sw_db_access access)
{
  struct sw_db *db = NULL;
  if (sw_db_open(path, access, &db)) fail_msg("%s", swathe_error());
  return db;
}

static int64_t session_of(struct sw_db *db)
{
  int64_t session = 0;
  if (sw_db_session_begin(db, "swathe tune", 60, &session)) fail_msg("%s", swathe_error());
  return session;
}

static void put_pick(struct sw_db *db, const char *problem_text,
                     const struct sw_db_environment *environment, const char *config)
{
  const struct swathe_problem problem = problem_of(problem_text);
  const struct sw_db_row row = { &problem, "forward", environment, config };
  const struct sw_db_pick pick = { 80, 100, 0.8, .limit_share = 0.75, .complete = true };
  if (sw_db_put_pick(db, session_of(db), &row, &pick)) fail_msg("%s", swathe_error());
}

static enum swathe_status put_sample(struct sw_db *db, const char *config, const char *verdict,
                                     double ratio)
{
  const struct swathe_problem problem = problem_of("");
  const struct sw_db_row row = { &problem, "forward", &here, config };
  const double runs[] = { 1.5, 2.25, 1e-3 };
  const struct sw_db_sample sample = { verdict, "why\n\x1b[31m", runs, runs, 3, 1.5, ratio, false };
  return sw_db_put_sample(db, session_of(db), &row, &sample);
}

// Configs found, separated by spaces; the exact ones in brackets.
struct listing {
  char text[4096];
  int most;
};

static bool note_found(void *arg, const struct sw_db_found *found)
{
  struct listing *listing = arg;
  char one[600];
  snprintf(one, sizeof one, found->exact ? "[%s] " : "%s ", found->config);
  strcat(listing->text, one);
  return --listing->most != 0;
}

static const char *find(struct sw_db *db, const char *problem_text,
                        const struct sw_db_environment *environment)
{
  static struct listing listing;
  const struct swathe_problem problem = problem_of(problem_text);
  listing = (struct listing){ .most = 100 };
  if (sw_db_find(db, &problem, "forward", environment, note_found, &listing))
    fail_msg("%s", swathe_error());
  return listing.text;
}

static void note_pick(void *arg, const struct swathe_pick *pick)
{
  struct listing *listing = arg;
  snprintf(listing->text + strlen(listing->text), 600, "%s/%s ", pick->config, pick->kernel);
  listing->most += (int)pick->samples;
}

static const char *list(struct sw_db *db)
{
  static struct listing listing;
  listing = (struct listing){ .most = 0 };
  if (sw_db_list(db, note_pick, &listing)) fail_msg("%s", swathe_error());
  return listing.text;
}

// ---- Opening and creating -----------------------------------------------------------------------

static void a_missing_file_answers_nothing_and_is_not_made(void **state)
{
  (void)state;
  const char *paths[] = { in_place("missing.db"), in_place("no/such/place/missing.db") };
  for (int i = 0; i < 2; i++) {
    struct sw_db *db = open_db(paths[i], SW_DB_READ);
    struct sw_db_state found;
    assert_string_equal(find(db, "", &here), "");
    assert_string_equal(list(db), "");
    assert_int_equal(sw_db_state(db, &found), SWATHE_OK);
    assert_int_equal(found.schema_version, 0);
    sw_db_close(db);
    assert_false(exists(paths[i]));
  }
}

static void writing_makes_directories_for_the_owner_only(void **state)
{
  (void)state;
  struct stat found;
  sw_db_close(open_db(in_place("deep/er/tuning.db"), SW_DB_WRITE));
  assert_int_equal(stat(in_place("deep"), &found), 0);
  assert_int_equal(found.st_mode & 0777, 0700);
  assert_int_equal(stat(in_place("deep/er"), &found), 0);
  assert_int_equal(found.st_mode & 0777, 0700);
  assert_int_equal(stat(in_place("deep/er/tuning.db"), &found), 0);
}

static void names_are_only_names(void **state)
{
  (void)state;
  static const char *const names[] = { "a?mode=ro#b%20c.db", ":memory:", "file:x.db", "it's.db" };
  char before[512];
  assert_non_null(getcwd(before, sizeof before));
  assert_int_equal(chdir(place), 0);
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
    struct sw_db *db = open_db(names[i], SW_DB_WRITE);
    put_pick(db, "", &here, "a=1");
    sw_db_close(db);
    assert_true(exists(in_place(names[i])));
    db = open_db(in_place(names[i]), SW_DB_READ);
    assert_string_equal(find(db, "", &here), "[a=1] ");
    sw_db_close(db);
  }
  assert_int_equal(chdir(before), 0);
}

static void journal_is_write_ahead_unless_on_a_network(void **state)
{
  (void)state;
  const char *path = in_place("journal.db");
  size_t size;
  for (int i = 0; i < 3; i++) {
    pretend_network = i == 1;
    sw_db_close(open_db(path, SW_DB_WRITE));
    pretend_network = false;
    char *bytes = read_bytes(path, &size);
    assert_int_equal(bytes[18], i == 1 ? 1 : 2);
    free(bytes);
  }
}

static bool same_row(void *arg, const struct sw_db_found *found)
{
  const struct swathe_problem *problem = arg;
  char a[SW_PROBLEM_TEXT], b[SW_PROBLEM_TEXT];
  swathe_problem_format(problem, a, sizeof a);
  swathe_problem_format(&found->problem, b, sizeof b);
  assert_string_equal(a, b);
  assert_string_equal(found->config, "tile_q=16,pack=8");
  assert_true(found->exact);
  assert_true(found->complete);
  assert_true(found->ratio == 0.8);
  assert_string_equal(found->environment, "isa=avx2,processor=A CPU  at 2 GHz,threads=4");
  assert_int_equal(strlen(found->when), 20);
  return true;
}

static void a_pick_comes_back_as_it_went_in(void **state)
{
  (void)state;
  static const char text[] =
      "q_heads=8,kv_heads=2,head_dim_qk=192,head_dim_v=128,window_left=127,softcap=30.1,"
      "sinks=1,dtype=bf16,layout=zigzag,ranks=8,tokens_per_rank=8192";
  struct swathe_problem problem = problem_of(text);
  struct sw_db *db = open_db(in_place("back.db"), SW_DB_WRITE);
  put_pick(db, text, &here, "tile_q=16,pack=8");
  sw_db_close(db);
  db = open_db(in_place("back.db"), SW_DB_READ);
  assert_int_equal(sw_db_find(db, &problem, "forward", &here, same_row, &problem), SWATHE_OK);
  assert_string_equal(find(db, text, &here), "[tile_q=16,pack=8] ");
  struct listing listing = { .most = 10 };
  assert_int_equal(sw_db_find(db, &problem, "backward", &here, note_found, &listing), SWATHE_OK);
  assert_string_equal(listing.text, "");
  sw_db_close(db);
}

// ---- The order of answers -----------------------------------------------------------------------

static const struct sw_db_environment eight = { "avx2", "A CPU, at 2 GHz", 8, "g1" };
static const struct sw_db_environment other = { "avx2", "Another CPU", 4, "g1" };
static const struct sw_db_environment wide = { "avx512", "A CPU, at 2 GHz", 4, "g1" };

static const struct {
  const char *problem;
  const struct sw_db_environment *environment;
} stored[] = {
  { "tokens_per_rank=4096", &here },                // 0
  { "tokens_per_rank=4096", &other },               // 1
  { "tokens_per_rank=4096", &eight },               // 2
  { "tokens_per_rank=4096", &wide },                // 3: another isa, never
  { "tokens_per_rank=8192", &here },                // 4
  { "tokens_per_rank=2048", &here },                // 5
  { "tokens_per_rank=1024", &here },                // 6
  { "tokens_per_rank=65536", &here },               // 7
  { "tokens_per_rank=4096,ranks=4", &here },        // 8
  { "tokens_per_rank=4096,layout=zigzag", &here },  // 9
  { "tokens_per_rank=4096,head_dim_v=128", &here }, // 10: another family, never
  { "tokens_per_rank=4096,window_left=7", &here },  // 11: another family, never
  { "tokens_per_rank=8192", &eight },               // 12
};
enum { STORED = sizeof stored / sizeof stored[0] };

static void answers_come_nearest_first_whatever_the_order_of_insertion(void **state)
{
  (void)state;
  static const struct {
    const char *problem;
    const struct sw_db_environment *environment;
    const char *answer;
  } cases[] = {
    { "tokens_per_rank=4096", &here, "[0] [1] 8 9 2 5 4 12 6 7 " },
    { "tokens_per_rank=4096", &other, "[1] [0] 8 9 2 5 4 12 6 7 " },
    { "tokens_per_rank=4096", &eight, "[2] 0 8 9 1 12 5 4 6 7 " },
    { "tokens_per_rank=4096,ranks=4", &here, "[8] 0 9 1 2 5 4 12 6 7 " },
    { "tokens_per_rank=100000,ranks=2", &here, "7 4 12 0 8 9 1 2 5 6 " },
    { "tokens_per_rank=1", &here, "6 5 0 8 9 1 2 4 12 7 " },
    { "tokens_per_rank=4096", &wide, "[3] " },
    { "tokens_per_rank=4096,head_dim_qk=128", &here, "" },
  };
  for (int round = 0; round < 4; round++) {
    char name[32], config[8];
    snprintf(name, sizeof name, "order%d.db", round);
    struct sw_db *db = open_db(in_place(name), SW_DB_WRITE);
    for (int i = 0; i < STORED; i++) {
      const int step[] = { 1, STORED - 1, 5, 7 }; // all relatively prime to 13: each row once
      const int which = i * step[round] % STORED;
      snprintf(config, sizeof config, "%d", which);
      put_pick(db, stored[which].problem, stored[which].environment, config);
    }
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
      assert_string_equal(find(db, cases[i].problem, cases[i].environment), cases[i].answer);
    assert_string_equal(list(db),
                        "10/forward 11/forward 6/forward 5/forward 0/forward 2/forward 1/forward "
                        "3/forward 7/forward 4/forward 12/forward 8/forward 9/forward ");
    sw_db_close(db);
  }
}

static void equally_near_answers_come_in_order_of_their_text(void **state)
{
  (void)state;
  struct sw_db *db = open_db(in_place("ties.db"), SW_DB_WRITE);
  put_pick(db, "tokens_per_rank=25", &here, "fewer");
  put_pick(db, "tokens_per_rank=100", &here, "more"); // "100" < "25" as texts
  assert_string_equal(find(db, "tokens_per_rank=50", &here), "more fewer ");
  sw_db_close(db);
}

static void a_visitor_may_stop(void **state)
{
  (void)state;
  struct sw_db *db = open_db(in_place("order0.db"), SW_DB_READ);
  const struct swathe_problem problem = problem_of("tokens_per_rank=4096");
  static const char *const answers[] = { "[0] ", "[0] [1] ", "[0] [1] 8 " };
  for (int most = 1; most <= 3; most++) {
    struct listing listing = { .most = most };
    assert_int_equal(sw_db_find(db, &problem, "forward", &here, note_found, &listing), SWATHE_OK);
    assert_string_equal(listing.text, answers[most - 1]);
  }
  sw_db_close(db);
}

static void *find_often(void *arg)
{
  struct sw_db *db = arg;
  struct swathe_problem problem;
  swathe_problem_init(&problem);
  for (int i = 0; i < 300; i++) {
    struct listing listing = { .most = 100 };
    if (sw_db_find(db, &problem, "forward", &here, note_found, &listing) ||
        strcmp(listing.text, "[0] [1] 8 9 2 5 4 12 6 7 "))
      return db;
  }
  return NULL;
}

static void threads_may_share_a_database(void **state)
{
  (void)state;
  pthread_t threads[4];
  struct sw_db *db = open_db(in_place("order0.db"), SW_DB_READ);
  for (int i = 0; i < 4; i++)
    assert_int_equal(pthread_create(&threads[i], NULL, find_often, db), 0);
  for (int i = 0; i < 4; i++) {
    void *failed = db;
    pthread_join(threads[i], &failed);
    assert_null(failed);
  }
  sw_db_close(db);
}

// ---- Picks, samples -----------------------------------------------------------------------------

static void a_pick_replaces_the_one_before_and_knows_its_sample(void **state)
{
  (void)state;
  const char *path = in_place("replace.db");
  struct sw_db *db = open_db(path, SW_DB_WRITE);
  assert_int_equal(put_sample(db, "a=1", "ok", 1), SWATHE_OK);
  assert_int_equal(put_sample(db, "a=2", "ok", 0.9), SWATHE_OK);
  assert_int_equal(put_sample(db, "a=2", "crash", 0), SWATHE_OK);
  put_pick(db, "", &here, "a=1");
  put_pick(db, "", &here, "a=2");
  assert_string_equal(find(db, "", &here), "[a=2] ");
  struct sw_db_state found;
  assert_int_equal(sw_db_state(db, &found), SWATHE_OK);
  assert_int_equal(found.schema_version, 3);
  assert_int_equal(found.picks, 1);
  assert_int_equal(found.samples, 3);
  sw_db_close(db);
  assert_int_equal(ask(path, "SELECT sample FROM pick"), 2);
  assert_int_equal(
      ask(path, "SELECT runs_us = '[1.5,2.25,0.001]' AND default_runs_us = runs_us FROM sample"),
      1);
  assert_int_equal(ask(path, "SELECT count(*) FROM pragma_foreign_key_check"), 0);
  assert_int_equal(
      ask(path, "SELECT abs(julianday(written_at) - julianday('now')) < 0.01 FROM pick"), 1);
}

static void note_sample(void *arg, const struct swathe_sample *sample)
{
  struct listing *listing = arg;
  snprintf(listing->text + strlen(listing->text), 600, "%s:%s ", sample->config, sample->verdict);
  assert_string_equal(sample->words, "why\n [31m");
  assert_int_equal(sample->runs, 3);
}

static void note_known(void *arg, const char *config, const char *verdict, double median_us,
                       double ratio)
{
  struct listing *listing = arg;
  assert_true(median_us == 1.5);
  snprintf(listing->text + strlen(listing->text), 600, "%s:%s:%g ", config, verdict, ratio);
}

static void samples_come_best_first_and_are_known_on_resuming(void **state)
{
  (void)state;
  static const struct {
    const char *config, *verdict;
    double ratio;
  } put[] = {
    { "d=1", "timeout", 0 }, { "b=1", "ok", 0.9 }, { "a=1", "ok", 1 },      { "c=1", "ok", 0 },
    { "e=1", "wrong", 0 },   { "b=2", "ok", 0.9 }, { "e=2", "compile", 0 }, { "d=1", "ok", 2 },
  };
  struct sw_db *db = open_db(in_place("samples.db"), SW_DB_WRITE);
  struct swathe_problem problem = problem_of("");
  struct listing listing = { .most = 0 }, known = { .most = 0 }, stale = { .most = 0 };
  for (size_t i = 0; i < sizeof put / sizeof put[0]; i++)
    assert_int_equal(put_sample(db, put[i].config, put[i].verdict, put[i].ratio), SWATHE_OK);

  assert_int_equal(sw_db_samples(db, &problem, note_sample, &listing), SWATHE_OK);
  assert_string_equal(listing.text,
                      "b=1:ok b=2:ok a=1:ok d=1:ok c=1:ok d=1:timeout e=1:wrong e=2:compile ");
  const struct sw_db_row row = { &problem, "forward", &here, NULL };
  assert_int_equal(sw_db_known(db, &row, note_known, &known), SWATHE_OK);
  assert_string_equal(
      known.text, "a=1:ok:1 b=1:ok:0.9 b=2:ok:0.9 c=1:ok:0 d=1:ok:2 e=1:wrong:0 e=2:compile:0 ");

  struct sw_db_environment changed = here;
  changed.generator = "g2";
  const struct sw_db_row newer = { &problem, "forward", &changed, NULL };
  assert_int_equal(sw_db_known(db, &newer, note_known, &stale), SWATHE_OK);
  assert_string_equal(stale.text, "");
  sw_db_close(db);
}

static void texts_that_look_like_sql_are_texts(void **state)
{
  (void)state;
  static const char *const texts[] = {
    "'; DROP TABLE pick; --", "\"a\"=1", "%s%n", "../../x", "?1", ""
  };
  struct sw_db *db = open_db(in_place("texts.db"), SW_DB_WRITE);
  for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
    char expected[64];
    put_pick(db, "", &here, texts[i]);
    snprintf(expected, sizeof expected, "[%s] ", texts[i]);
    assert_string_equal(find(db, "", &here), expected);
  }
  sw_db_close(db);
}

static void senseless_puts_are_refused(void **state)
{
  (void)state;
  static char long_text[600];
  memset(long_text, 'a', sizeof long_text - 1);
  const struct swathe_problem good = problem_of("");
  struct swathe_problem bad = good;
  bad.kv_heads = 0;
  const struct sw_db_environment nowhere = { .isa = "", .threads = 1 };
  const struct {
    struct sw_db_row row;
    double best_us;
    enum swathe_status status;
    double limit_share;
  } cases[] = {
    { { &good, "forward", &here, "a=1" }, 1, SWATHE_OK, 0 },
    { { &good, "forward", &here, "a=1" }, 1, SWATHE_BAD_USE, -0.5 },
    { { &good, "forward", &here, "a=1" }, 1, SWATHE_BAD_USE, NAN },
    { { &good, "forward", &here, "a=1" }, NAN, SWATHE_BAD_USE, 0 },
    { { &good, "forward", &here, "a=1" }, INFINITY, SWATHE_BAD_USE, 0 },
    { { &good, "forward", &here, "a=1" }, 0, SWATHE_BAD_USE, 0 },
    { { &good, "forward", &here, NULL }, 1, SWATHE_BAD_USE, 0 },
    { { &good, "forward", &here, "a=1\n" }, 1, SWATHE_BAD_USE, 0 },
    { { &good, "forward", &here, long_text }, 1, SWATHE_BAD_USE, 0 },
    { { &good, "", &here, "a=1" }, 1, SWATHE_BAD_USE, 0 },
    { { &good, "forward", &nowhere, "a=1" }, 1, SWATHE_BAD_USE, 0 },
    { { &bad, "forward", &here, "a=1" }, 1, SWATHE_BAD_PROBLEM, 0 },
  };
  struct sw_db *db = open_db(in_place("senseless.db"), SW_DB_WRITE);
  const int64_t session = session_of(db);
  const struct sw_db_pick ones = { 1, 1, 1, .complete = true };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    const struct sw_db_pick pick = { cases[i].best_us, 1, 1, cases[i].limit_share, true };
    assert_int_equal(sw_db_put_pick(db, session, &cases[i].row, &pick), cases[i].status);
  }
  assert_int_equal(sw_db_put_pick(db, session + 9, &cases[0].row, &ones), SWATHE_DATABASE);
  assert_int_equal(put_sample(db, "a=1", "fast", 1), SWATHE_DATABASE);
  assert_int_equal(put_sample(db, "a=1", "ok", NAN), SWATHE_BAD_USE);
  sw_db_close(db);

  db = open_db(in_place("senseless.db"), SW_DB_READ);
  assert_int_equal(sw_db_put_pick(db, session, &cases[0].row, &ones), SWATHE_BAD_USE);
  sw_db_close(db);
}

// ---- What others may have written ---------------------------------------------------------------

// stderr of one call; the caller puts it back.
static char *captured(struct sw_db *db, const char *(*call)(struct sw_db *))
{
  static char text[4096];
  fflush(stderr);
  const int before = dup(2), file = open(in_place("stderr"), O_RDWR | O_CREAT | O_TRUNC, 0600);
  dup2(file, 2);
  const char *answer = call(db);
  dup2(before, 2);
  close(before);
  const ssize_t size = pread(file, text, sizeof text - 1, 0);
  close(file);
  text[size > 0 ? size : 0] = 0;
  assert_string_equal(answer, "");
  return text;
}

static const char *find_here(struct sw_db *db) { return find(db, "", &here); }

static void a_bad_row_is_named_and_skipped(void **state)
{
  (void)state;
  static const struct {
    const char *sql, *warning;
    bool find_only;
  } cases[] = {
    { "UPDATE pick SET config = 7.5", NULL, false }, // has the column's affinity: the text "7.5"
    { "UPDATE pick SET config = x'0001'", "another type", false },
    { "UPDATE pick SET config = 'a' || char(0) || 'b'", "control", false },
    { "UPDATE pick SET config = char(27) || '[31m'", "control", false },
    { "UPDATE pick SET config = printf('%.*c', 512, 'x')", "too long", false },
    { "UPDATE pick SET config = printf('%.*c', 3000000, 'x')", "too long", false },
    { "UPDATE pick SET ratio = -1", "out of its range", false },
    { "UPDATE pick SET ratio = 9e999", "out of its range", false },
    { "UPDATE pick SET ratio = 'fast'", "out of its range", false },
    { "UPDATE pick SET complete = 2", "out of its range", true },
    { "UPDATE pick SET written_at = 'yesterday'", "its time", false },
    { "UPDATE problem SET text = text || ',q_heads=x'", "cannot be served", false },
    { "UPDATE problem SET text = 'q_heads=1'", "canonical", false },
    { "UPDATE problem SET text = replace(text, 'head_dim_v=64', 'head_dim_v=32')", "another family",
      true },
    { "UPDATE environment SET threads = 5", "does not match", false },
    { "UPDATE environment SET threads = 'many'", "out of its range", false },
    { "UPDATE environment SET text = printf('%.*c', 256, 'x')", "too long", false },
  };
  const char *good = in_place("good.db");
  struct sw_db *db = open_db(good, SW_DB_WRITE);
  put_pick(db, "", &here, "a=1");
  sw_db_close(db);
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    char name[32];
    snprintf(name, sizeof name, "row%zu.db", i); // a name of its own: each warning is said once
    copy_file(in_place("good.db"), in_place(name));
    plant(in_place(name), cases[i].sql);
    db = open_db(in_place(name), SW_DB_READ);
    if (!cases[i].warning) {
      assert_string_equal(find_here(db), "[7.5] ");
    } else {
      const char *warning = captured(db, find_here);
      if (!strstr(warning, cases[i].warning) || !strstr(warning, "pick 1"))
        fail_msg("%s: '%s'", cases[i].sql, warning);
      if (!cases[i].find_only) assert_string_equal(list(db), "");
    }
    sw_db_close(db);
  }
}

// The file as it is refused must be the file as it was.
static void assert_refused(const char *path, const char *words)
{
  static const enum sw_db_access accesses[] = { SW_DB_READ, SW_DB_WRITE };
  size_t size, size_after;
  char *before = read_bytes(path, &size);
  for (int i = 0; i < 2; i++) {
    struct sw_db *db = NULL;
    assert_int_equal(sw_db_open(path, accesses[i], &db), SWATHE_DATABASE);
    assert_null(db);
    if (!strstr(swathe_error(), words)) fail_msg("no '%s' in: %s", words, swathe_error());
    char *after = read_bytes(path, &size_after);
    assert_int_equal(size, size_after);
    assert_memory_equal(before, after, size);
    free(after);
  }
  free(before);
}

static void files_that_are_not_ours_are_refused_and_left_alone(void **state)
{
  (void)state;
  static const struct {
    const char *sql, *words;
  } cases[] = {
    { "CREATE TRIGGER t AFTER INSERT ON session BEGIN DELETE FROM pick; END", "trigger 't'" },
    { "CREATE VIEW v AS SELECT * FROM pick", "view 'v'" },
    { "ALTER TABLE pick RENAME TO pick2; CREATE VIEW pick AS SELECT * FROM pick2", "pick" },
    { "CREATE TABLE extra (x)", "table 'extra'" },
    { "CREATE INDEX extra ON pick (config)", "index 'extra'" },
    { "CREATE INDEX extra ON pick (abs(ratio))", "index 'extra'" },
    { "CREATE VIRTUAL TABLE extra USING fts5(x)", "table 'extra" },
    { "DROP INDEX sample_by_session", "lacks" },
    { "PRAGMA foreign_keys = 0; DROP TABLE sample", "lacks" },
    { "ALTER TABLE pick ADD COLUMN g AS (abs(ratio))", "table 'pick'" },
    { "PRAGMA application_id = 7", "another program" },
    { "PRAGMA application_id = 0", "another program" },
    { "PRAGMA user_version = 0", "version 0" },
    { "PRAGMA user_version = -3", "version -3" },
    { "PRAGMA user_version = 4; UPDATE meta SET value = 'swathe 7.1.0'",
      "written by swathe 7.1.0" },
    { "PRAGMA user_version = 4; DROP TABLE meta; CREATE VIEW meta AS SELECT 'written_by' AS name, "
      "'x' AS value",
      "a newer swathe" },
    { "PRAGMA writable_schema = 1; UPDATE sqlite_schema SET sql = 'CREATE TABLE pick (x)' WHERE "
      "name = 'pick'",
      "" },
    { "PRAGMA writable_schema = 1; UPDATE sqlite_schema SET rootpage = 9999 WHERE name = 'pick'",
      "damaged" },
  };
  struct sw_db *db = open_db(in_place("ours.db"), SW_DB_WRITE);
  put_pick(db, "", &here, "a=1");
  sw_db_close(db);
  for (int wal = 0; wal < 2; wal++)
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
      char name[32];
      snprintf(name, sizeof name, "hostile%d_%zu.db", wal, i);
      copy_file(in_place("ours.db"), in_place(name));
      if (!wal) plant(in_place(name), "PRAGMA journal_mode = DELETE");
      plant(in_place(name), cases[i].sql);
      assert_refused(in_place(name), cases[i].words);
    }
}

static void files_that_are_no_databases_are_refused_and_left_alone(void **state)
{
  (void)state;
  char text[5000];
  memset(text, 'x', sizeof text);
  write_bytes(in_place("text5"), text, 5);
  assert_refused(in_place("text5"), "not a database");
  write_bytes(in_place("text"), text, sizeof text);
  assert_refused(in_place("text"), "not a database");
  plant(in_place("foreign"), "CREATE TABLE a (x); INSERT INTO a VALUES (1)");
  assert_refused(in_place("foreign"), "another program");
  struct sw_db *db = NULL;
  assert_int_equal(sw_db_open(place, SW_DB_READ, &db), SWATHE_DATABASE);
  assert_int_equal(mkfifo(in_place("fifo"), 0600), 0);
  assert_int_equal(sw_db_open(in_place("fifo"), SW_DB_WRITE, &db), SWATHE_DATABASE);
  assert_int_equal(sw_db_open(in_place("text/tuning.db"), SW_DB_WRITE, &db), SWATHE_DATABASE);
  assert_int_equal(sw_db_open("", SW_DB_READ, &db), SWATHE_BAD_USE);
}

// Reads everything; whatever comes is fine as long as nothing crashes.
static void read_all(struct sw_db *db)
{
  struct listing listing = { .most = 0 };
  const struct swathe_problem problem = problem_of("");
  struct sw_db_state found;
  (void)!sw_db_find(db, &problem, "forward", &here, note_found, &listing);
  memset(&listing, 0, sizeof listing);
  (void)!sw_db_list(db, note_pick, &listing);
  (void)!sw_db_state(db, &found);
}

static void damaged_files_are_refused_by_writers_and_harmless_to_readers(void **state)
{
  (void)state;
  size_t size;
  struct sw_db *db = open_db(in_place("sound.db"), SW_DB_WRITE);
  for (int i = 0; i < 20; i++) {
    char text[64];
    snprintf(text, sizeof text, "tokens_per_rank=%d", i + 1);
    put_pick(db, text, &here, "a=1");
  }
  sw_db_close(db);
  char *sound = read_bytes(in_place("sound.db"), &size);
  char *bytes = malloc(size);
  int refused = 0;
  srand(7);
  for (int round = 0; round < 200; round++) {
    size_t length = size;
    memcpy(bytes, sound, size);
    if (round % 4 == 0)
      length = 100 + (size_t)rand() % (size - 100);
    else if (round % 4 == 1)
      memset(bytes + 4096 * ((size_t)rand() % (size / 4096)), 0xff, 4096);
    else
      for (int i = 0; i < 1 << (round % 8); i++) bytes[(size_t)rand() % size] = (char)rand();
    write_bytes(in_place("damaged.db"), bytes, length);
    db = NULL;
    if (!sw_db_open(in_place("damaged.db"), SW_DB_READ, &db)) read_all(db);
    sw_db_close(db);
    db = NULL;
    if (sw_db_open(in_place("damaged.db"), SW_DB_WRITE, &db))
      refused++;
    else
      read_all(db);
    sw_db_close(db);
  }
  assert_true(refused >= 100); // cut or overwritten: all of them; single bytes may hit free space
  free(sound);
  free(bytes);
}

static void writers_look_at_every_page(void **state)
{
  (void)state;
  const char *path = in_place("page.db");
  size_t size;
  struct sw_db *db = open_db(path, SW_DB_WRITE);
  put_pick(db, "", &here, "a=1");
  sw_db_close(db);
  const int64_t page =
      ask(path, "SELECT rootpage FROM sqlite_schema WHERE name = 'sample_by_session'");
  char *bytes = read_bytes(path, &size);
  memset(bytes + 4096 * (page - 1), 0xff, 4096);
  write_bytes(path, bytes, size);
  free(bytes);
  db = NULL;
  assert_int_equal(sw_db_open(path, SW_DB_WRITE, &db), SWATHE_DATABASE);
  assert_non_null(strstr(swathe_error(), "damaged"));
}

static void readers_leave_what_a_killed_writer_left(void **state)
{
  (void)state;
  size_t size, size_after;
  struct sw_db *db = open_db(in_place("alive.db"), SW_DB_WRITE);
  put_pick(db, "", &here, "a=1");
  copy_file(in_place("alive.db"), in_place("left.db"));
  copy_file(in_place("alive.db-wal"), in_place("left.db-wal"));
  sw_db_close(db);
  char *before = read_bytes(in_place("left.db"), &size);
  db = open_db(in_place("left.db"), SW_DB_READ);
  assert_string_equal(find(db, "", &here), "[a=1] ");
  sw_db_close(db);
  char *after = read_bytes(in_place("left.db"), &size_after);
  assert_int_equal(size, size_after);
  assert_memory_equal(before, after, size);
  assert_true(exists(in_place("left.db-wal")));
  free(before);
  free(after);
}

static void an_empty_file_is_version_0_and_is_brought_up(void **state)
{
  (void)state;
  static const char *const plants[] = {
    NULL, "VACUUM", "PRAGMA application_id = 1398232136; VACUUM",
    "PRAGMA journal_mode = WAL; CREATE TABLE t (x); DROP TABLE t"
  };
  for (int i = 0; i < 4; i++) {
    char name[32];
    snprintf(name, sizeof name, "empty%d.db", i);
    if (plants[i])
      plant(in_place(name), plants[i]);
    else
      write_bytes(in_place(name), "", 0);
    struct sw_db *db = open_db(in_place(name), SW_DB_READ);
    assert_string_equal(find(db, "", &here), "");
    sw_db_close(db);
    db = open_db(in_place(name), SW_DB_WRITE);
    put_pick(db, "", &here, "a=1");
    sw_db_close(db);
    assert_int_equal(ask(in_place(name), "PRAGMA user_version"), 3);
  }
}

// What versions 2 and 1 had in place of today's picks and samples, with the rows that are there.
static const char back_to_version_2[] =
    "CREATE TABLE kept AS SELECT * FROM pick; DROP TABLE pick;"
    "CREATE TABLE pick (id INTEGER PRIMARY KEY NOT NULL,"
    " problem INTEGER NOT NULL REFERENCES problem (id),"
    " kernel TEXT NOT NULL CHECK (length(kernel) BETWEEN 1 AND 63),"
    " environment INTEGER NOT NULL REFERENCES environment (id), generator TEXT NOT NULL,"
    " config TEXT NOT NULL CHECK (length(config) <= 511),"
    " best_us REAL NOT NULL CHECK (best_us > 0 AND best_us <= 1e15),"
    " default_us REAL NOT NULL CHECK (default_us > 0 AND default_us <= 1e15),"
    " ratio REAL NOT NULL CHECK (ratio > 0 AND ratio <= 1e15),"
    " complete INTEGER NOT NULL CHECK (complete IN (0, 1)),"
    " session INTEGER NOT NULL REFERENCES session (id), sample INTEGER REFERENCES sample (id),"
    " written_at TEXT NOT NULL, UNIQUE (problem, kernel, environment));"
    "INSERT INTO pick SELECT id, problem, kernel, environment, generator, config, best_us,"
    " default_us, ratio, complete, session, sample, written_at FROM kept;"
    "DROP TABLE kept; PRAGMA user_version = 2";
static const char back_to_version_1[] =
    "CREATE TABLE kept AS SELECT * FROM sample; DROP TABLE sample;"
    "CREATE TABLE sample (id INTEGER PRIMARY KEY NOT NULL,"
    " session INTEGER NOT NULL REFERENCES session (id),"
    " problem INTEGER NOT NULL REFERENCES problem (id),"
    " kernel TEXT NOT NULL CHECK (length(kernel) BETWEEN 1 AND 63),"
    " environment INTEGER NOT NULL REFERENCES environment (id), generator TEXT NOT NULL,"
    " config TEXT NOT NULL CHECK (length(config) <= 511),"
    " verdict TEXT NOT NULL CHECK (verdict IN ('ok', 'wrong', 'compile', 'crash', 'timeout')),"
    " words TEXT NOT NULL, runs_us TEXT NOT NULL, default_runs_us TEXT,"
    " runs INTEGER NOT NULL CHECK (runs BETWEEN 0 AND 1000000),"
    " median_us REAL NOT NULL CHECK (median_us BETWEEN 0 AND 1e15),"
    " ratio REAL NOT NULL CHECK (ratio BETWEEN 0 AND 1e15), written_at TEXT NOT NULL);"
    "CREATE INDEX sample_by_config ON sample (problem, kernel, environment, config);"
    "CREATE INDEX sample_by_session ON sample (session);"
    "INSERT INTO sample SELECT id, session, problem, kernel, environment, generator, config,"
    " verdict, words, runs_us, default_runs_us, runs, median_us, ratio, written_at FROM kept;"
    "DROP TABLE kept; PRAGMA user_version = 1";

static void bring_up(int version)
{
  char name[32], words[32];
  snprintf(name, sizeof name, "version%d.db", version);
  snprintf(words, sizeof words, "has version %d", version);
  const char *path = in_place(name);
  struct sw_db *db = open_db(path, SW_DB_WRITE);
  assert_int_equal(put_sample(db, "a=2", "crash", 0), SWATHE_OK);
  assert_int_equal(put_sample(db, "a=1", "ok", 1), SWATHE_OK);
  put_pick(db, "", &here, "a=1");
  sw_db_close(db);
  plant(path, back_to_version_2);
  if (version == 1) plant(path, back_to_version_1);

  assert_int_equal(sw_db_open(path, SW_DB_READ, &db), SWATHE_DATABASE);
  assert_non_null(strstr(swathe_error(), words));
  assert_int_equal(ask(path, "PRAGMA user_version"), version);

  db = open_db(path, SW_DB_WRITE);
  assert_string_equal(find(db, "", &here), "[a=1] ");
  assert_int_equal(put_sample(db, "a=3", "oom", 0), SWATHE_OK);
  sw_db_close(db);
  assert_int_equal(ask(path, "PRAGMA user_version"), 3);
  assert_int_equal(ask(path, "SELECT count(*) FROM sample WHERE noisy = 0"), 3);
  assert_int_equal(
      ask(path, "SELECT s.config = 'a=1' FROM pick k JOIN sample s ON s.id = k.sample"), 1);
  assert_int_equal(ask(path, "SELECT count(*) FROM pick WHERE limit_share = 0"), 1);
  assert_int_equal(ask(path, "SELECT count(*) FROM pragma_foreign_key_check"), 0);
}

static void older_versions_are_brought_up_by_a_writer(void **state)
{
  (void)state;
  bring_up(1);
  bring_up(2);
}

// A pick rests on the newest good sample of its config.
static void a_pick_is_as_quiet_as_its_sample(void **state)
{
  (void)state;
  struct sw_db *db = open_db(in_place("quiet.db"), SW_DB_WRITE);
  const struct swathe_problem problem = problem_of("");
  const double us = 1;
  const struct sw_db_row row = {
    .problem = &problem, .kernel = "forward", .environment = &here, .config = "a=1"
  };
  struct sw_db_held held;
  assert_int_equal(sw_db_held(db, &row, &held), SWATHE_OK);
  assert_false(held.found);
  for (int noisy = 1; noisy >= 0; noisy--) {
    const struct sw_db_sample sample = { .verdict = "ok", .words = "", .runs_us = &us, .runs = 1,
                                         .median_us = 1, .ratio = 1, .noisy = noisy };
    assert_int_equal(sw_db_put_sample(db, session_of(db), &row, &sample), SWATHE_OK);
    put_pick(db, "", &here, "a=1");
    assert_int_equal(sw_db_held(db, &row, &held), SWATHE_OK);
    assert_true(held.found && held.complete);
    assert_string_equal(held.config, "a=1");
    assert_int_equal(held.quiet, !noisy);
    assert_true(held.limit_share == 0.75);
  }
  sw_db_close(db);
}

// ---- Places that cannot be written --------------------------------------------------------------

// Runs in a child without root's powers; the child's exit status tells.
static int as_somebody(int (*call)(const char *), const char *path)
{
  int result;
  const pid_t child = fork();
  assert_true(child >= 0);
  if (!child) {
    if (!geteuid() && setuid(65534)) _exit(99);
    _exit(call(path));
  }
  assert_int_equal(waitpid(child, &result, 0), child);
  assert_true(WIFEXITED(result));
  return WEXITSTATUS(result);
}

static int read_there(const char *path)
{
  struct sw_db *db = NULL;
  struct listing listing = { .most = 10 };
  struct swathe_problem problem;
  swathe_problem_init(&problem);
  if (sw_db_open(path, SW_DB_READ, &db)) return strstr(swathe_error(), "-wal") ? 1 : 2;
  const enum swathe_status status =
      sw_db_find(db, &problem, "forward", &here, note_found, &listing);
  sw_db_close(db);
  return status || strcmp(listing.text, "[a=1] ") ? 3 : 0;
}

static int write_there(const char *path)
{
  struct sw_db *db = NULL;
  const enum swathe_status status = sw_db_open(path, SW_DB_WRITE, &db);
  sw_db_close(db);
  return status == SWATHE_DATABASE ? 0 : 1;
}

static void read_only_places_can_be_read(void **state)
{
  (void)state;
  struct sw_db *db;
  assert_int_equal(chmod(place, 0755), 0);
  assert_int_equal(mkdir(in_place("sealed"), 0755), 0);
  const char *path = in_place("sealed/tuning.db");
  db = open_db(path, SW_DB_WRITE);
  put_pick(db, "", &here, "a=1");

  // A writer is at work: its newest rows are in the -wal file.
  assert_true(exists(in_place("sealed/tuning.db-wal")));
  copy_file(path, in_place("sealed/copy.db"));
  copy_file(in_place("sealed/tuning.db-wal"), in_place("sealed/copy.db-wal"));
  assert_int_equal(chmod(in_place("sealed"), 0555), 0);
  assert_int_equal(as_somebody(read_there, path), 0); // through the writer's -shm
  assert_int_equal(as_somebody(read_there, in_place("sealed/copy.db")),
                   1); // no -shm: said, with a hint
  sw_db_close(db);

  // The writer is gone, and took the -wal file along.
  assert_int_equal(chmod(in_place("sealed"), 0755), 0);
  sw_db_close(open_db(path, SW_DB_WRITE));
  assert_false(exists(in_place("sealed/tuning.db-wal")));
  assert_int_equal(chmod(in_place("sealed"), 0555), 0);
  assert_int_equal(as_somebody(read_there, path), 0);
  assert_int_equal(as_somebody(write_there, path), 0);
  assert_false(exists(in_place("sealed/tuning.db-wal")));
  assert_false(exists(in_place("sealed/tuning.db-shm")));
  assert_int_equal(chmod(in_place("sealed"), 0755), 0);
}

static void a_network_without_locks_can_be_read(void **state)
{
  (void)state;
  const char *path = in_place("unlocked.db");
  for (int wal = 0; wal < 2; wal++) {
    pretend_network = !wal;
    struct sw_db *db = open_db(path, SW_DB_WRITE);
    put_pick(db, "", &here, "a=1");
    sw_db_close(db);
    pretend_network = pretend_no_locks = true;
    db = open_db(path, SW_DB_READ);
    assert_string_equal(find(db, "", &here), "[a=1] ");
    sw_db_close(db);
    pretend_network = pretend_no_locks = false;
  }
}

// ---- Failing and dying writers ------------------------------------------------------------------

static void a_full_disk_is_said_and_leaves_the_file_sound(void **state)
{
  (void)state;
  const char *path = in_place("full.db");
  sw_db_close(open_db(path, SW_DB_WRITE));
  int result;
  const pid_t child = fork();
  if (!child) {
    const struct rlimit limit = { 200000, 200000 };
    struct sw_db *db = NULL;
    int64_t session = 0;
    const struct swathe_problem problem = problem_of("");
    const struct sw_db_row row = { &problem, "forward", &here, "a=1" };
    static double runs[2000];
    const struct sw_db_sample sample = { "ok", "", runs, NULL, 2000, 1, 1, false };
    enum swathe_status status = SWATHE_OK;
    signal(SIGXFSZ, SIG_IGN);
    if (setrlimit(RLIMIT_FSIZE, &limit) || sw_db_open(path, SW_DB_WRITE, &db)) _exit(98);
    if (sw_db_session_begin(db, "tune", 1, &session)) _exit(97);
    int good = 0;
    while (!(status = sw_db_put_sample(db, session, &row, &sample)) && good < 1000) good++;
    if (status != SWATHE_DATABASE || !strstr(swathe_error(), "disk")) _exit(96);
    sw_db_close(db);
    _exit(good);
  }
  assert_int_equal(waitpid(child, &result, 0), child);
  assert_true(WIFEXITED(result));
  const int good = WEXITSTATUS(result);
  assert_in_range(good, 1, 90);
  assert_int_equal(ask(path, "SELECT count(*) FROM sample"), good);
  struct sw_db *db = open_db(path, SW_DB_WRITE);
  put_pick(db, "", &here, "a=1");
  sw_db_close(db);
}

// Puts picks of ever more tokens and reports each through the pipe once it is kept.
static void put_and_report(const char *path, int pipe_end, int from, int count)
{
  struct sw_db *db = NULL;
  int64_t session = 0;
  struct swathe_problem problem;
  swathe_problem_init(&problem);
  if (sw_db_open(path, SW_DB_WRITE, &db) || sw_db_session_begin(db, "tune", 1, &session)) {
    fprintf(stderr, "%s\n", swathe_error());
    _exit(1);
  }
  for (int i = from; i < from + count; i++) {
    const struct sw_db_row row = { &problem, "forward", &here, "a=1" };
    problem.tokens_per_rank = i + 1;
    const struct sw_db_pick pick = { 1, 1, 1, .complete = true };
    if (sw_db_put_pick(db, session, &row, &pick)) {
      fprintf(stderr, "%s\n", swathe_error());
      _exit(2);
    }
    if (write(pipe_end, &i, sizeof i) != sizeof i) _exit(3);
  }
  sw_db_close(db);
  _exit(0);
}

static bool first_exact(void *arg, const struct sw_db_found *found)
{
  *(bool *)arg = found->exact;
  return false;
}

static bool is_kept(struct sw_db *db, int which)
{
  struct swathe_problem problem = problem_of("");
  bool exact = false;
  problem.tokens_per_rank = which + 1;
  assert_int_equal(sw_db_find(db, &problem, "forward", &here, first_exact, &exact), SWATHE_OK);
  return exact;
}

static void no_pick_is_lost_when_writers_are_killed(void **state)
{
  (void)state;
  const char *path = in_place("killed.db");
  int reported = 0, next = 0;
  static int kept[100000];
  srand(11);
  for (int round = 0; round < 50; round++) {
    int ends[2], which;
    assert_int_equal(pipe(ends), 0);
    const pid_t child = fork();
    if (!child) put_and_report(path, ends[1], next, 1000);
    close(ends[1]);
    const struct timespec pause = { 0, rand() % 60 * 1000000L };
    nanosleep(&pause, NULL);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    while (read(ends[0], &which, sizeof which) == sizeof which) {
      kept[reported++] = which;
      next = which + 1;
    }
    close(ends[0]);
    next++; // the one under way when the child died may be there or not
  }
  struct sw_db *db = open_db(path, SW_DB_WRITE);
  assert_true(reported > 50);
  for (int i = 0; i < reported; i++) assert_true(is_kept(db, kept[i]));
  struct sw_db_state found;
  assert_int_equal(sw_db_state(db, &found), SWATHE_OK);
  sw_db_close(db);
}

static void no_pick_is_lost_among_eight_writers(void **state)
{
  (void)state;
  enum { WRITERS = 8, PUTS = 50 };
  for (int network = 0; network < 2; network++) {
    const char *path = in_place(network ? "eight_delete.db" : "eight_wal.db");
    const int count = network ? 10 : PUTS;
    int silent = open("/dev/null", O_WRONLY);
    pid_t children[WRITERS];
    pretend_network = network;
    for (int i = 0; i < WRITERS; i++) {
      children[i] = fork();
      if (!children[i]) put_and_report(path, silent, i * count, count);
    }
    pretend_network = false;
    for (int i = 0; i < WRITERS; i++) {
      int result;
      waitpid(children[i], &result, 0);
      assert_int_equal(result, 0);
    }
    close(silent);
    struct sw_db *db = open_db(path, SW_DB_READ);
    for (int i = 0; i < WRITERS * count; i++) assert_true(is_kept(db, i));
    sw_db_close(db);
  }
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(a_missing_file_answers_nothing_and_is_not_made),
    cmocka_unit_test(writing_makes_directories_for_the_owner_only),
    cmocka_unit_test(names_are_only_names),
    cmocka_unit_test(journal_is_write_ahead_unless_on_a_network),
    cmocka_unit_test(a_pick_comes_back_as_it_went_in),
    cmocka_unit_test(answers_come_nearest_first_whatever_the_order_of_insertion),
    cmocka_unit_test(equally_near_answers_come_in_order_of_their_text),
    cmocka_unit_test(a_visitor_may_stop),
    cmocka_unit_test(threads_may_share_a_database),
    cmocka_unit_test(a_pick_replaces_the_one_before_and_knows_its_sample),
    cmocka_unit_test(samples_come_best_first_and_are_known_on_resuming),
    cmocka_unit_test(texts_that_look_like_sql_are_texts),
    cmocka_unit_test(senseless_puts_are_refused),
    cmocka_unit_test(a_bad_row_is_named_and_skipped),
    cmocka_unit_test(files_that_are_not_ours_are_refused_and_left_alone),
    cmocka_unit_test(files_that_are_no_databases_are_refused_and_left_alone),
    cmocka_unit_test(damaged_files_are_refused_by_writers_and_harmless_to_readers),
    cmocka_unit_test(writers_look_at_every_page),
    cmocka_unit_test(readers_leave_what_a_killed_writer_left),
    cmocka_unit_test(an_empty_file_is_version_0_and_is_brought_up),
    cmocka_unit_test(older_versions_are_brought_up_by_a_writer),
    cmocka_unit_test(a_pick_is_as_quiet_as_its_sample),
    cmocka_unit_test(read_only_places_can_be_read),
    cmocka_unit_test(a_network_without_locks_can_be_read),
    cmocka_unit_test(a_full_disk_is_said_and_leaves_the_file_sound),
    cmocka_unit_test(no_pick_is_lost_when_writers_are_killed),
    cmocka_unit_test(no_pick_is_lost_among_eight_writers),
  };
  return cmocka_run_group_tests(tests, make_place, remove_place);
}
