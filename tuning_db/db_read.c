// db_read.c: rows come out.  A file may have been written by anyone, so each row is judged before
// it is handed on; a bad one is named in a warning and skipped.  Every order is by content, never
// by row number, so that two files with the same rows give the same answers.
#include "db_rows.h"
#include "db_schema.h"

#include <ctype.h>
#include <inttypes.h>
#include <locale.h>
#include <stdlib.h>
#include <string.h>

// ---- Judging a row ------------------------------------------------------------------------------

// A row under judgement: `bad` is the first reason against it.
struct judged {
  sqlite3_stmt *row;
  const char *bad;
};

// A text of at most `most` bytes; "" and a reason if it is something else.  Borrowed until the next
// step.
static const char *take_text(struct judged *judged, int column, size_t most, bool lines)
{
  if (sqlite3_column_type(judged->row, column) != SQLITE_TEXT) {
    judged->bad = "a text is of another type";
    return "";
  }
  const char *text = (const char *)sqlite3_column_text(judged->row, column);
  const size_t bytes = (size_t)sqlite3_column_bytes(judged->row, column);
  if (!text || bytes > most) {
    judged->bad = "a text is too long";
    return "";
  }
  for (size_t i = 0; i < bytes; i++) {
    const unsigned char c = (unsigned char)text[i];
    if ((c < ' ' && !(lines && c == '\n')) || c == 0x7f) {
      judged->bad = "a text holds control characters";
      return "";
    }
  }
  return text;
}

// A number from `least` to 1e15.
static double take_number(struct judged *judged, int column, double least)
{
  const int type = sqlite3_column_type(judged->row, column);
  const double value = sqlite3_column_double(judged->row, column);
  if ((type != SQLITE_FLOAT && type != SQLITE_INTEGER) || !(value >= least && value <= 1e15)) {
    judged->bad = "a number is out of its range";
    return 0;
  }
  return value;
}

static int64_t take_integer(struct judged *judged, int column, int64_t least, int64_t most)
{
  const int64_t value = sqlite3_column_int64(judged->row, column);
  if (sqlite3_column_type(judged->row, column) != SQLITE_INTEGER || value < least || value > most) {
    judged->bad = "a number is out of its range";
    return least;
  }
  return value;
}

// Timings of the walk's current row; one buffer for all of its rows.
struct runs {
  double *us;
  int64_t capacity;
  locale_t plain;  // "C": rows are written with '.' whatever the caller's locale
};

// A list as sw_db_put_sample writes it, [12.5,12.75], of exactly `count` numbers.  Borrowed until
// the next row.
static const double *take_runs(struct judged *judged, int column, int64_t count, struct runs *runs)
{
  enum { MOST_DIGITS = 24 };  // of a number, with sign, point and exponent
  const char *text = take_text(judged, column, 2 + (size_t)count * (MOST_DIGITS + 1), false);
  if (judged->bad) return NULL;
  if (count > runs->capacity) {
    double *grown = realloc(runs->us, (size_t)count * sizeof *grown);
    if (!grown) {
      judged->bad = "there is no memory for its timings";
      return NULL;
    }
    runs->us = grown;
    runs->capacity = count;
  }
  bool good = *text++ == '[';
  for (int64_t i = 0; good && i < count; i++) {
    char *end = NULL;
    good = isdigit((unsigned char)*text);
    if (good) runs->us[i] = strtod_l(text, &end, runs->plain);
    good = good && *end == (i + 1 < count ? ',' : ']') && runs->us[i] <= 1e15;
    if (good) text = end + (i + 1 < count);
  }
  if (!good || strcmp(text, "]")) judged->bad = "its timings are not a list of its runs";
  return runs->us;
}

// A time as strftime wrote it: 2026-01-31T23:59:59Z.
static const char *take_when(struct judged *judged, int column)
{
  static const char shape[] = "0000-00-00T00:00:00Z";
  const char *when = take_text(judged, column, sizeof shape - 1, false);
  for (size_t i = 0; i < sizeof shape - 1 && !judged->bad; i++)
    if (shape[i] == '0' ? !isdigit((unsigned char)when[i]) : when[i] != shape[i])
      judged->bad = "its time is not of the form 2026-01-31T23:59:59Z";
  return when;
}

// A problem's text: valid and canonical.
static const char *take_problem(struct judged *judged, int column, struct swathe_problem *problem)
{
  char canonical[SW_PROBLEM_TEXT];
  const char *text = take_text(judged, column, SW_PROBLEM_TEXT - 1, false);
  if (judged->bad) return text;
  swathe_problem_init(problem);
  if (swathe_problem_parse(text, problem)) {
    judged->bad = "its problem cannot be served";
  } else {
    swathe_problem_format(problem, canonical, sizeof canonical);
    if (strcmp(canonical, text)) judged->bad = "its problem is not written in the canonical way";
  }
  return text;
}

// Columns text, isa, processor, threads from `column` on: the text is made of the others.
static const char *take_environment(struct judged *judged, int column)
{
  char canonical[SW_DB_ENVIRONMENT_BYTES + 1];
  const char *text = take_text(judged, column, SW_DB_ENVIRONMENT_BYTES, false);
  const struct sw_db_environment environment = {
    .isa = take_text(judged, column + 1, SW_DB_ISA_BYTES, false),
    .processor = take_text(judged, column + 2, SW_DB_PROCESSOR_BYTES, false),
    .threads = (int32_t)take_integer(judged, column + 3, 1, 1000000),
  };
  if (judged->bad) return "";
  sw_db_environment_format(&environment, canonical, sizeof canonical);
  if (strcmp(canonical, text)) judged->bad = "its environment's text does not match its columns";
  return text;
}

// The row's id is column 0.
static bool sound(const struct sw_db *db, const struct judged *judged, const char *table)
{
  if (judged->bad)
    sw_warn("the tuning database %s: %s %" PRId64 " is skipped: %s", db->path, table,
            (int64_t)sqlite3_column_int64(judged->row, 0), judged->bad);
  return !judged->bad;
}

// ---- Find ---------------------------------------------------------------------------------------

// Parameters: 1 family, 2 kernel, 3 isa, 4 tokens per rank, 5 problem, 6 threads, 7 processor, 8
// generator. The joins' order is given so that rows come from the index on (family,
// tokens_per_rank) one by one and a visitor that stops early has not paid for the rest.
#define FOUND                                                                                  \
  "SELECT k.id, p.text, e.text, e.isa, e.processor, e.threads, k.config, k.ratio, k.complete," \
  " k.written_at, (e.threads <> ?6) * 4 + (e.processor <> ?7) * 2 + (k.generator <> ?8) AS "   \
  "strange"                                                                                    \
  " FROM problem p CROSS JOIN pick k ON k.problem = p.id AND k.kernel = ?2"                    \
  " CROSS JOIN environment e ON e.id = k.environment AND e.isa = ?3 WHERE p.family = ?1"
static const char exact_sql[] =
    FOUND " AND p.tokens_per_rank = ?4 AND p.text = ?5 AND e.threads = ?6"
          " ORDER BY strange, e.text";
static const char up_sql[] =
    FOUND " AND p.tokens_per_rank >= ?4 AND NOT (p.text = ?5 AND e.threads = ?6)"
          " ORDER BY p.tokens_per_rank, strange, p.text, e.text";
static const char down_sql[] = FOUND " AND p.tokens_per_rank < ?4"
                                     " ORDER BY p.tokens_per_rank DESC, strange, p.text, e.text";

struct question {
  struct sw_db_rows_problem problem;
  struct sw_db_rows_environment environment;
  int64_t tokens;
};

// Picks in the order of one statement; `row` tells whether there is one in `found`.
struct cursor {
  sqlite3_stmt *statement;
  bool row;
  double distance;  // tokens_per_rank as a multiple of the question's, or its inverse; >= 1
  int64_t strange;  // how much else differs
  char problem[SW_PROBLEM_TEXT];
  struct sw_db_found found;
};

static bool judge_found(struct sw_db *db, const struct question *question, struct cursor *cursor)
{
  struct judged judged = { cursor->statement, NULL };
  struct sw_db_found *found = &cursor->found;
  struct sw_db_rows_problem stored;

  const char *problem = take_problem(&judged, 1, &found->problem);
  const char *environment = take_environment(&judged, 2);
  const char *config = take_text(&judged, 6, SW_DB_CONFIG_BYTES, false);
  found->ratio = take_number(&judged, 7, 1e-15);
  found->complete = take_integer(&judged, 8, 0, 1) == 1;
  const char *when = take_when(&judged, 9);
  if (!judged.bad && (sw_db_rows_problem(&found->problem, &stored) ||
                      strcmp(stored.family, question->problem.family)))
    judged.bad = "its problem is filed under another family";
  if (!sound(db, &judged, "pick")) return false;

  const double tokens = (double)found->problem.tokens_per_rank, asked = (double)question->tokens;
  cursor->distance = tokens > asked ? tokens / asked : asked / tokens;
  cursor->strange = sqlite3_column_int64(cursor->statement, 10);
  strcpy(cursor->problem, problem);
  strcpy(found->config, config);
  strcpy(found->environment, environment);
  strcpy(found->when, when);
  return true;
}

// On to the next sound row.
static enum swathe_status advance(struct sw_db *db, const struct question *question,
                                  struct cursor *cursor)
{
  enum swathe_status status;
  do status = sw_db_sql_step(db, cursor->statement, &cursor->row);
  while (!status && cursor->row && !judge_found(db, question, cursor));
  return status;
}

static enum swathe_status start(struct sw_db *db, const struct question *question,
                                const char *kernel, const char *sql, struct cursor *cursor)
{
  const struct sw_db_rows_environment *e = &question->environment;
  cursor->statement = NULL;
  const enum swathe_status status = sw_db_sql_begin(
      db, &cursor->statement, sql, "tttititt", question->problem.family, kernel, e->isa,
      question->tokens, question->problem.text, e->threads, e->processor, e->generator);
  return status ? status : advance(db, question, cursor);
}

static enum swathe_status find_exact(struct sw_db *db, const struct question *question,
                                     const char *kernel, sw_db_found_visit *visit, void *arg,
                                     bool *more)
{
  struct cursor cursor;
  enum swathe_status status = start(db, question, kernel, exact_sql, &cursor);
  while (!status && cursor.row && *more) {
    cursor.found.exact = true;
    *more = visit(arg, &cursor.found);
    if (*more) status = advance(db, question, &cursor);
  }
  return sw_db_sql_end(cursor.statement, status);
}

static bool nearer(const struct cursor *a, const struct cursor *b)
{
  if (a->distance != b->distance) return a->distance < b->distance;
  if (a->strange != b->strange) return a->strange < b->strange;
  const int order = strcmp(a->problem, b->problem);
  return order ? order < 0 : strcmp(a->found.environment, b->found.environment) < 0;
}

// Merges the picks of more tokens, ascending, with those of fewer, descending.
static enum swathe_status find_near(struct sw_db *db, const struct question *question,
                                    const char *kernel, sw_db_found_visit *visit, void *arg,
                                    bool more)
{
  struct cursor up, down = { .statement = NULL };
  enum swathe_status status = start(db, question, kernel, up_sql, &up);
  if (!status) status = start(db, question, kernel, down_sql, &down);
  while (!status && more && (up.row || down.row)) {
    struct cursor *next = !down.row || (up.row && nearer(&up, &down)) ? &up : &down;
    next->found.exact = false;
    more = visit(arg, &next->found);
    if (more) status = advance(db, question, next);
  }
  sw_db_sql_end(up.statement, status);
  return sw_db_sql_end(down.statement, status);
}

enum swathe_status sw_db_find(struct sw_db *db, const struct swathe_problem *problem,
                              const char *kernel, const struct sw_db_environment *environment,
                              sw_db_found_visit *visit, void *arg)
{
  struct question question = { .tokens = problem->tokens_per_rank };
  bool more = true;
  enum swathe_status status = sw_db_rows_problem(problem, &question.problem);
  if (!status) status = sw_db_rows_environment(environment, &question.environment);
  if (status || !db->connection) return status;
  pthread_mutex_lock(&db->mutex);
  status = find_exact(db, &question, kernel, visit, arg, &more);
  if (!status && more) status = find_near(db, &question, kernel, visit, arg, more);
  pthread_mutex_unlock(&db->mutex);
  return status;
}

// ---- Known, list, samples -----------------------------------------------------------------------

enum swathe_status sw_db_known(struct sw_db *db, const struct sw_db_row *row,
                               sw_db_known_visit *visit, void *arg)
{
  // The newest sample of each config, made from these very texts: older kernels say nothing about
  // ours.
  static const char sql[] =
      "SELECT max(s.id), s.config, s.verdict, s.median_us, s.ratio FROM sample s"
      " JOIN problem p ON p.id = s.problem JOIN environment e ON e.id = s.environment"
      " WHERE p.text = ? AND s.kernel = ? AND e.text = ? AND s.generator = ? GROUP BY s.config "
      "ORDER BY s.config";
  struct sw_db_rows_problem problem;
  struct sw_db_rows_environment environment;
  sqlite3_stmt *statement = NULL;
  bool more = false;

  enum swathe_status status = sw_db_rows_problem(row->problem, &problem);
  if (!status) status = sw_db_rows_environment(row->environment, &environment);
  if (status || !db->connection) return status;
  pthread_mutex_lock(&db->mutex);
  status = sw_db_sql_begin(db, &statement, sql, "tttt", problem.text, row->kernel, environment.text,
                           environment.generator);
  while (!status && !(status = sw_db_sql_step(db, statement, &more)) && more) {
    struct judged judged = { statement, NULL };
    const char *config = take_text(&judged, 1, SW_DB_CONFIG_BYTES, false);
    const char *verdict = take_text(&judged, 2, 16, false);
    const double median_us = take_number(&judged, 3, 0), ratio = take_number(&judged, 4, 0);
    if (sound(db, &judged, "sample")) visit(arg, config, verdict, median_us, ratio);
  }
  sw_db_sql_end(statement, status);
  pthread_mutex_unlock(&db->mutex);
  return status;
}

enum swathe_status sw_db_held(struct sw_db *db, const struct sw_db_row *row,
                              struct sw_db_held *held)
{
  static const char sql[] =
      "SELECT k.id, k.config, k.ratio, k.complete, coalesce(s.noisy, 1), k.limit_share,"
      " k.generator = ?4, coalesce(t.budget_s, 0) FROM pick k"
      " JOIN problem p ON p.id = k.problem JOIN environment e ON e.id = k.environment"
      " LEFT JOIN sample s ON s.id = k.sample LEFT JOIN session t ON t.id = k.session"
      " WHERE p.text = ?1 AND k.kernel = ?2 AND e.text = ?3";
  struct sw_db_rows_problem problem;
  struct sw_db_rows_environment environment;
  sqlite3_stmt *statement = NULL;
  bool there = false;

  *held = (struct sw_db_held){ .found = false };
  enum swathe_status status = sw_db_rows_problem(row->problem, &problem);
  if (!status) status = sw_db_rows_environment(row->environment, &environment);
  if (status || !db->connection) return status;
  pthread_mutex_lock(&db->mutex);
  status = sw_db_sql_begin(db, &statement, sql, "tttt", problem.text, row->kernel, environment.text,
                           environment.generator);
  if (!status) status = sw_db_sql_step(db, statement, &there);
  if (!status && there) {
    struct judged judged = { statement, NULL };
    strcpy(held->config, take_text(&judged, 1, SW_DB_CONFIG_BYTES, false));
    held->ratio = take_number(&judged, 2, 1e-15);
    held->complete = take_integer(&judged, 3, 0, 1) == 1;
    held->limit_share = take_number(&judged, 5, 0);
    held->current = take_integer(&judged, 6, 0, 1) == 1;
    held->quiet = take_integer(&judged, 4, 0, 1) == 0 && held->current;
    held->budget_s = take_number(&judged, 7, 0);
    held->found = sound(db, &judged, "pick");
  }
  sw_db_sql_end(statement, status);
  pthread_mutex_unlock(&db->mutex);
  return status;
}

enum swathe_status sw_db_list(struct sw_db *db, swathe_pick_visit *visit, void *arg)
{
  static const char sql[] =
      "SELECT k.id, p.text, e.text, e.isa, e.processor, e.threads, k.kernel, k.config, k.best_us,"
      " k.default_us, k.ratio, k.written_at, (SELECT count(*) FROM sample s WHERE s.problem = "
      "k.problem AND"
      " s.kernel = k.kernel AND s.environment = k.environment), k.generator, k.limit_share"
      " FROM pick k JOIN problem p ON p.id = k.problem JOIN environment e ON e.id = k.environment"
      " ORDER BY p.text, k.kernel, e.text";
  sqlite3_stmt *statement = NULL;
  bool more = false;
  if (!db->connection) return SWATHE_OK;
  pthread_mutex_lock(&db->mutex);
  enum swathe_status status = sw_db_sql_begin(db, &statement, sql, "");
  while (!status && !(status = sw_db_sql_step(db, statement, &more)) && more) {
    struct judged judged = { statement, NULL };
    struct swathe_problem problem;
    const struct swathe_pick pick = {
      .problem = take_problem(&judged, 1, &problem),
      .environment = take_environment(&judged, 2),
      .kernel = take_text(&judged, 6, SW_DB_KERNEL_BYTES, false),
      .config = take_text(&judged, 7, SW_DB_CONFIG_BYTES, false),
      .best_us = take_number(&judged, 8, 1e-15),
      .default_us = take_number(&judged, 9, 1e-15),
      .ratio = take_number(&judged, 10, 1e-15),
      .when = take_when(&judged, 11),
      .samples = take_integer(&judged, 12, 0, INT64_MAX),
      .generator = take_text(&judged, 13, SW_DB_GENERATOR_BYTES, false),
      .limit_share = take_number(&judged, 14, 0),
    };
    if (sound(db, &judged, "pick")) visit(arg, &pick);
  }
  sw_db_sql_end(statement, status);
  pthread_mutex_unlock(&db->mutex);
  return status;
}

// Rows of one problem, best first; and of all, as they were measured.  Times are whole seconds, so
// the second order ends with the row's number: nothing is chosen by it.
#define SAMPLES                                                                                \
  "SELECT s.id, p.text, e.text, e.isa, e.processor, e.threads, s.kernel, s.config, s.verdict," \
  " s.words, s.median_us, s.ratio, s.runs, s.runs_us, s.written_at, s.generator, s.noisy"      \
  " FROM problem p JOIN sample s ON s.problem = p.id JOIN environment e ON e.id = s.environment"
static const char best_first_sql[] =
    SAMPLES " WHERE p.text = ? ORDER BY s.kernel, s.verdict <> 'ok', s.ratio = 0, s.ratio,"
            " s.config, e.text, s.written_at, s.median_us, s.runs_us";
static const char as_measured_sql[] =
    SAMPLES " ORDER BY p.text, s.kernel <> 'forward', s.kernel, e.text, s.generator, s.written_at,"
            " s.id";

static enum swathe_status visit_samples(struct sw_db *db, sqlite3_stmt *statement,
                                        swathe_sample_visit *visit, void *arg)
{
  struct runs runs = { .plain = newlocale(LC_ALL_MASK, "C", (locale_t)0) };
  struct swathe_problem problem;
  bool more = false;
  enum swathe_status status = SWATHE_OK;

  if (!runs.plain) return sw_fail(SWATHE_NO_MEMORY, "no memory for the C locale");
  while (!status && !(status = sw_db_sql_step(db, statement, &more)) && more) {
    struct judged judged = { statement, NULL };
    struct swathe_sample sample = {
      .problem = take_problem(&judged, 1, &problem),
      .environment = take_environment(&judged, 2),
      .kernel = take_text(&judged, 6, SW_DB_KERNEL_BYTES, false),
      .config = take_text(&judged, 7, SW_DB_CONFIG_BYTES, false),
      .verdict = take_text(&judged, 8, 16, false),
      .words = take_text(&judged, 9, SW_DB_WORDS_BYTES, true),
      .median_us = take_number(&judged, 10, 0),
      .ratio = take_number(&judged, 11, 0),
      .runs = take_integer(&judged, 12, 0, 1000000),
      .when = take_when(&judged, 14),
      .generator = take_text(&judged, 15, SW_DB_GENERATOR_BYTES, false),
    };
    sample.noisy = take_integer(&judged, 16, 0, 1) == 1;
    sample.runs_us = take_runs(&judged, 13, sample.runs, &runs);
    if (sound(db, &judged, "sample")) visit(arg, &sample);
  }
  free(runs.us);
  freelocale(runs.plain);
  return status;
}

enum swathe_status sw_db_samples(struct sw_db *db, const struct swathe_problem *problem,
                                 swathe_sample_visit *visit, void *arg)
{
  struct sw_db_rows_problem asked;
  sqlite3_stmt *statement = NULL;
  enum swathe_status status = problem ? sw_db_rows_problem(problem, &asked) : SWATHE_OK;

  if (status || !db->connection) return status;
  pthread_mutex_lock(&db->mutex);
  if (problem) status = sw_db_sql_begin(db, &statement, best_first_sql, "t", asked.text);
  else status = sw_db_sql_begin(db, &statement, as_measured_sql, "");
  if (!status) status = visit_samples(db, statement, visit, arg);
  sw_db_sql_end(statement, status);
  pthread_mutex_unlock(&db->mutex);
  return status;
}

enum swathe_status sw_db_state(struct sw_db *db, struct sw_db_state *state)
{
  struct sw_db_state found = { 0, 0, 0 };
  int64_t version = 0;
  if (!db->connection) {
    *state = found;
    return SWATHE_OK;
  }
  pthread_mutex_lock(&db->mutex);
  enum swathe_status status = sw_db_schema_sound(db);
  if (!status) status = sw_db_sql_number(db, "PRAGMA user_version", &version);
  if (!status) status = sw_db_sql_number(db, "SELECT count(*) FROM pick", &found.picks);
  if (!status) status = sw_db_sql_number(db, "SELECT count(*) FROM sample", &found.samples);
  pthread_mutex_unlock(&db->mutex);
  found.schema_version = (int32_t)version;
  if (!status) *state = found;
  return status;
}
