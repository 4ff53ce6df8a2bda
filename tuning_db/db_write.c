// db_write.c: sessions, samples and picks go in.  Each put is one transaction, so a killed process
// leaves whole rows or none, and the rows of a put that returned SWATHE_OK stay.
#include "db_rows.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#define NOW "strftime('%Y-%m-%dT%H:%M:%SZ', 'now')"

// ---- What is stored -----------------------------------------------------------------------------

// Copies at most `bytes`; what is not printable ASCII becomes '?', commas and spaces alike ' '.
static void copy_name(char *copy, size_t bytes, const char *name)
{
  size_t length = 0;
  for (; name && name[length] && length < bytes; length++) {
    const unsigned char c = (unsigned char)name[length];
    copy[length] = c == ',' || c == '\t' ? ' ' : c < ' ' || c >= 0x7f ? '?' : (char)c;
  }
  copy[length] = 0;
}

// Copies a compiler's or a check's words as far as there is room, whole characters only.
static void copy_words(char copy[SW_DB_WORDS_BYTES + 1], const char *words)
{
  size_t length = 0;
  for (; words && words[length] && length < SW_DB_WORDS_BYTES; length++) {
    const unsigned char c = (unsigned char)words[length];
    copy[length] = (c < ' ' && c != '\n') || c == 0x7f ? ' ' : (char)c;
  }
  if (words && words[length])  // cut short: not within a character of several bytes
    while (length && ((unsigned char)words[length] & 0xc0) == 0x80) length--;
  copy[length] = 0;
}

size_t sw_db_environment_format(const struct sw_db_environment *environment, char *text,
                                size_t size)
{
  char isa[SW_DB_ISA_BYTES + 1], processor[SW_DB_PROCESSOR_BYTES + 1];
  copy_name(isa, SW_DB_ISA_BYTES, environment->isa);
  copy_name(processor, SW_DB_PROCESSOR_BYTES, environment->processor);
  const int length = snprintf(text, size, "isa=%s,processor=%s,threads=%" PRId32, isa, processor,
                              environment->threads);
  return length < 0 ? 0 : (size_t)length;
}

enum swathe_status sw_db_rows_environment(const struct sw_db_environment *environment,
                                          struct sw_db_rows_environment *stored)
{
  if (!environment->isa || !*environment->isa || environment->threads < 1)
    return sw_fail(SWATHE_BAD_USE, "a tuning environment needs an isa and at least one thread");
  copy_name(stored->isa, SW_DB_ISA_BYTES, environment->isa);
  copy_name(stored->processor, SW_DB_PROCESSOR_BYTES, environment->processor);
  copy_name(stored->generator, SW_DB_GENERATOR_BYTES, environment->generator);
  stored->threads = environment->threads;
  const size_t length = sw_db_environment_format(environment, stored->text, sizeof stored->text);
  assert(length < sizeof stored->text);
  (void)length;
  return SWATHE_OK;
}

enum swathe_status sw_db_rows_problem(const struct swathe_problem *problem,
                                      struct sw_db_rows_problem *stored)
{
  struct swathe_problem family = *problem;
  family.tokens_per_rank = 1;
  family.ranks = 1;
  family.layout = SWATHE_CONTIGUOUS;
  if (swathe_problem_format(problem, stored->text, sizeof stored->text) >= sizeof stored->text ||
      swathe_problem_format(&family, stored->family, sizeof stored->family) >=
          sizeof stored->family)
    return sw_fail(SWATHE_BAD_PROBLEM, "the problem's text is longer than %d bytes",
                   SW_PROBLEM_TEXT - 1);
  return SWATHE_OK;
}

static enum swathe_status check_text(const char *what, const char *text, size_t most)
{
  if (!text) return sw_fail(SWATHE_BAD_USE, "a row of the tuning database needs a %s", what);
  for (size_t i = 0; text[i]; i++)
    if (i >= most || text[i] < ' ' || text[i] == 0x7f)
      return sw_fail(SWATHE_BAD_USE, "the %s of a row must be at most %zu printable characters",
                     what, most);
  return SWATHE_OK;
}

static enum swathe_status check_row(const struct sw_db_row *row)
{
  enum swathe_status status = swathe_problem_check(row->problem);
  if (!status) status = check_text("kernel", row->kernel, SW_DB_KERNEL_BYTES);
  if (!status && !*row->kernel) status = sw_fail(SWATHE_BAD_USE, "a row needs a kernel's name");
  if (!status) status = check_text("config", row->config, SW_DB_CONFIG_BYTES);
  return status;
}

// ---- Transactions -------------------------------------------------------------------------------

static enum swathe_status begin(struct sw_db *db)
{
  if (db->access != SW_DB_WRITE)
    return sw_fail(SWATHE_BAD_USE, "the tuning database %s is open for reading only", db->path);
  pthread_mutex_lock(&db->mutex);
  const enum swathe_status status = sw_db_sql_run(db, "BEGIN IMMEDIATE");
  if (status) pthread_mutex_unlock(&db->mutex);
  return status;
}

// Commits if all went well, and takes everything back if not, or if the commit fails.
static enum swathe_status end(struct sw_db *db, enum swathe_status status)
{
  if (!status) status = sw_db_sql_run(db, "COMMIT");
  if (status) sqlite3_exec(db->connection, "ROLLBACK", NULL, NULL, NULL);
  pthread_mutex_unlock(&db->mutex);
  return status;
}

// Steps a statement that gives no rows, and ends it.
static enum swathe_status finish(struct sw_db *db, sqlite3_stmt *statement,
                                 enum swathe_status status)
{
  bool row = false;
  if (!status) status = sw_db_sql_step(db, statement, &row);
  return sw_db_sql_end(statement, status);
}

// Steps a statement that gives one number (0: null or none), and ends it.
static enum swathe_status finish_number(struct sw_db *db, sqlite3_stmt *statement,
                                        enum swathe_status status, int64_t *number)
{
  bool row = false;
  if (!status) status = sw_db_sql_step(db, statement, &row);
  if (!status) *number = row ? sqlite3_column_int64(statement, 0) : 0;
  return sw_db_sql_end(statement, status);
}

// The rows that a sample or a pick refers to, made where they are missing.
struct key {
  int64_t problem, environment;
  struct sw_db_rows_environment stored;
};

static enum swathe_status key_problem(struct sw_db *db, const struct swathe_problem *problem,
                                      int64_t *id)
{
  static const char insert[] =
      "INSERT INTO problem (text, family, tokens_per_rank) VALUES (?, ?, ?)"
      " ON CONFLICT (text) DO NOTHING";
  static const char find[] = "SELECT id FROM problem WHERE text = ?";
  struct sw_db_rows_problem stored;
  sqlite3_stmt *statement = NULL;
  enum swathe_status status = sw_db_rows_problem(problem, &stored);
  if (status) return status;
  status = sw_db_sql_begin(db, &statement, insert, "tti", stored.text, stored.family,
                           problem->tokens_per_rank);
  status = finish(db, statement, status);
  if (status) return status;
  statement = NULL;
  status = sw_db_sql_begin(db, &statement, find, "t", stored.text);
  return finish_number(db, statement, status, id);
}

static enum swathe_status key_environment(struct sw_db *db,
                                          const struct sw_db_rows_environment *stored, int64_t *id)
{
  static const char insert[] =
      "INSERT INTO environment (text, isa, processor, threads) VALUES (?, ?, ?, ?)"
      " ON CONFLICT (text) DO NOTHING";
  static const char find[] = "SELECT id FROM environment WHERE text = ?";
  sqlite3_stmt *statement = NULL;
  enum swathe_status status = sw_db_sql_begin(db, &statement, insert, "ttti", stored->text,
                                              stored->isa, stored->processor, stored->threads);
  status = finish(db, statement, status);
  if (status) return status;
  statement = NULL;
  status = sw_db_sql_begin(db, &statement, find, "t", stored->text);
  return finish_number(db, statement, status, id);
}

static enum swathe_status make_key(struct sw_db *db, const struct sw_db_row *row, struct key *key)
{
  enum swathe_status status = key_problem(db, row->problem, &key->problem);
  if (!status) status = key_environment(db, &key->stored, &key->environment);
  return status;
}

// ---- Puts ---------------------------------------------------------------------------------------

enum swathe_status sw_db_session_begin(struct sw_db *db, const char *command, double budget_s,
                                       int64_t *session)
{
  static const char insert[] = "INSERT INTO session (command, budget_s, written_by, started_at)"
                               " VALUES (?, ?, 'swathe " SWATHE_VERSION "', " NOW ")";
  char words[SW_DB_WORDS_BYTES + 1];
  sqlite3_stmt *statement = NULL;
  int64_t id = 0;

  copy_words(words, command);
  if (!(budget_s >= 0 && budget_s <= 1e12))
    return sw_fail(SWATHE_BAD_USE, "a tuning session's budget of %g s makes no sense", budget_s);
  enum swathe_status status = begin(db);
  if (status) return status;
  status = sw_db_sql_begin(db, &statement, insert, "tr", words, budget_s);
  status = finish(db, statement, status);
  if (!status) id = sqlite3_last_insert_rowid(db->connection);
  status = end(db, status);
  if (!status) *session = id;
  return status;
}

// "[12.5,12.75]", NULL for NULL; free with sqlite3_free.  SQLite prints '.' in any locale.
static char *format_runs(const double *runs_us, int64_t runs)
{
  if (!runs_us) return NULL;
  sqlite3_str *text = sqlite3_str_new(NULL);
  sqlite3_str_appendchar(text, 1, '[');
  for (int64_t i = 0; i < runs; i++) sqlite3_str_appendf(text, i ? ",%.9g" : "%.9g", runs_us[i]);
  sqlite3_str_appendchar(text, 1, ']');
  return sqlite3_str_finish(text);
}

static enum swathe_status check_sample(const struct sw_db_sample *sample)
{
  enum { MOST_RUNS = 1000000 };
  enum swathe_status status = check_text("verdict", sample->verdict, 16);
  if (status) return status;
  if (sample->runs < 0 || sample->runs > MOST_RUNS || (sample->runs && !sample->runs_us))
    return sw_fail(SWATHE_BAD_USE, "a sample of %" PRId64 " runs: 0 to %d, with their timings",
                   sample->runs, MOST_RUNS);
  if (!(sample->median_us >= 0 && sample->median_us <= 1e15 && sample->ratio >= 0 &&
        sample->ratio <= 1e15))
    return sw_fail(SWATHE_BAD_USE,
                   "a sample's median of %g us and ratio of %g must be finite and not negative",
                   sample->median_us, sample->ratio);
  for (int64_t i = 0; i < sample->runs; i++)
    if (!isfinite(sample->runs_us[i]) ||
        (sample->default_runs_us && !isfinite(sample->default_runs_us[i])))
      return sw_fail(SWATHE_BAD_USE, "run %" PRId64 " of a sample is not a finite time", i);
  return SWATHE_OK;
}

enum swathe_status sw_db_put_sample(struct sw_db *db, int64_t session, const struct sw_db_row *row,
                                    const struct sw_db_sample *sample)
{
  static const char insert[] = "INSERT INTO sample (session, problem, kernel, environment, "
                               "generator, config, verdict, words, runs_us,"
                               " default_runs_us, runs, median_us, ratio, noisy, written_at)"
                               " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, " NOW ")";
  struct key key;
  char words[SW_DB_WORDS_BYTES + 1];
  sqlite3_stmt *statement = NULL;

  enum swathe_status status = check_row(row);
  if (!status) status = check_sample(sample);
  if (!status) status = sw_db_rows_environment(row->environment, &key.stored);
  if (!status) status = begin(db);
  if (status) return status;
  copy_words(words, sample->words);
  char *runs = sample->runs ? format_runs(sample->runs_us, sample->runs) : NULL;
  char *paired = sample->runs ? format_runs(sample->default_runs_us, sample->runs) : NULL;

  status = make_key(db, row, &key);
  if (!status && sample->runs && (!runs || (sample->default_runs_us && !paired)))
    status = sw_fail(SWATHE_NO_MEMORY, "no memory for %" PRId64 " timings", sample->runs);
  if (!status)
    status =
        sw_db_sql_begin(db, &statement, insert,
                        "iitit"
                        "ttttt"
                        "irri",
                        session, key.problem, row->kernel, key.environment, key.stored.generator,
                        row->config, sample->verdict, words, sample->runs ? runs : "[]", paired,
                        sample->runs, sample->median_us, sample->ratio, (int64_t)sample->noisy);
  status = finish(db, statement, status);
  sqlite3_free(runs);
  sqlite3_free(paired);
  return end(db, status);
}

// The newest good sample of this very config; 0: none.
static enum swathe_status newest_sample(struct sw_db *db, const struct sw_db_row *row,
                                        const struct key *key, int64_t *sample)
{
  static const char find[] =
      "SELECT max(id) FROM sample WHERE problem = ? AND kernel = ? AND environment = ?"
      " AND config = ? AND verdict = 'ok'";
  sqlite3_stmt *statement = NULL;
  const enum swathe_status status = sw_db_sql_begin(db, &statement, find, "itit", key->problem,
                                                    row->kernel, key->environment, row->config);
  return finish_number(db, statement, status, sample);
}

enum swathe_status sw_db_put_pick(struct sw_db *db, int64_t session, const struct sw_db_row *row,
                                  const struct sw_db_pick *pick)
{
  static const char insert[] =
      "INSERT INTO pick (problem, kernel, environment, generator, config, best_us, default_us, "
      "ratio, limit_share, complete, session, sample, written_at)"
      " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, nullif(?, 0), " NOW ")"
      " ON CONFLICT (problem, kernel, environment) DO UPDATE SET generator = excluded.generator,"
      " config = excluded.config, best_us = excluded.best_us, default_us = excluded.default_us,"
      " ratio = excluded.ratio, limit_share = excluded.limit_share, complete = excluded.complete,"
      " session = excluded.session, sample = excluded.sample, written_at = excluded.written_at";
  struct key key;
  sqlite3_stmt *statement = NULL;
  int64_t sample = 0;

  enum swathe_status status = check_row(row);
  if (status) return status;
  if (!(pick->best_us > 0 && pick->best_us <= 1e15 && pick->default_us > 0 &&
        pick->default_us <= 1e15 && pick->ratio > 0 && pick->ratio <= 1e15))
    return sw_fail(SWATHE_BAD_USE,
                   "a pick's times of %g and %g us and ratio of %g must be finite and positive",
                   pick->best_us, pick->default_us, pick->ratio);
  if (!(pick->limit_share >= 0 && pick->limit_share <= 1e15))
    return sw_fail(SWATHE_BAD_USE,
                   "a pick's share of the limit, %g, must be finite and not negative",
                   pick->limit_share);
  status = sw_db_rows_environment(row->environment, &key.stored);
  if (!status) status = begin(db);
  if (status) return status;
  status = make_key(db, row, &key);
  if (!status) status = newest_sample(db, row, &key, &sample);
  if (!status)
    status = sw_db_sql_begin(db, &statement, insert,
                             "ititt"
                             "rrrr"
                             "iii",
                             key.problem, row->kernel, key.environment, key.stored.generator,
                             row->config, pick->best_us, pick->default_us, pick->ratio,
                             pick->limit_share, (int64_t)pick->complete, session, sample);
  return end(db, finish(db, statement, status));
}
