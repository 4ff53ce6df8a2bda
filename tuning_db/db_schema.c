// db_schema.c: what tables a tuning database has.  A file that anyone may have written is used only
// after its whole schema was compared with schema.sql: a trigger would run our statements against
// other tables even with trusted_schema off, and a view may stand in for a table.
#include "db_schema.h"

#include <ctype.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { APPLICATION_ID = 0x53575448 };  // "SWTH"

// schema.sql, embedded by the build.
struct sw_embedded {
  const char *name;
  const char *text;
  size_t size;
};
extern const struct sw_embedded sw_schema_texts[];

// Version 2: samples may be noisy, and candidates may want too much memory.  What picks refer to
// is gone for a moment and comes back under the same ids.
static const char to_version_2[] =
    "PRAGMA defer_foreign_keys = 1; "
    "CREATE TEMP TABLE sample_before AS SELECT * FROM main.sample; "
    "DROP TABLE main.sample; "
    "CREATE TABLE sample ( "
    "id INTEGER PRIMARY KEY NOT NULL, "
    "session INTEGER NOT NULL REFERENCES session (id), "
    "problem INTEGER NOT NULL REFERENCES problem (id), "
    "kernel TEXT NOT NULL CHECK (length(kernel) BETWEEN 1 AND 63), "
    "environment INTEGER NOT NULL REFERENCES environment (id), "
    "generator TEXT NOT NULL, "
    "config TEXT NOT NULL CHECK (length(config) <= 511), "
    "verdict TEXT NOT NULL CHECK (verdict IN ('ok', 'wrong', 'compile', 'crash', 'timeout', "
    "'oom')), "
    "words TEXT NOT NULL, "
    "runs_us TEXT NOT NULL, "
    "default_runs_us TEXT, "
    "runs INTEGER NOT NULL CHECK (runs BETWEEN 0 AND 1000000), "
    "median_us REAL NOT NULL CHECK (median_us BETWEEN 0 AND 1e15), "
    "ratio REAL NOT NULL CHECK (ratio BETWEEN 0 AND 1e15), "
    "noisy INTEGER NOT NULL CHECK (noisy IN (0, 1)), "
    "written_at TEXT NOT NULL "
    "); "
    "CREATE INDEX sample_by_config ON sample (problem, kernel, environment, config); "
    "CREATE INDEX sample_by_session ON sample (session);"
    "INSERT INTO main.sample SELECT id, session, problem, kernel, environment, generator, config, "
    "verdict,"
    " words, runs_us, default_runs_us, runs, median_us, ratio, 0, written_at FROM sample_before; "
    "DROP TABLE sample_before; "
    "PRAGMA user_version = 2;";

// Version 3: picks say how near they are to the machine's peak.  Nobody refers to them.
static const char to_version_3[] =
    "CREATE TEMP TABLE pick_before AS SELECT * FROM main.pick; "
    "DROP TABLE main.pick; "
    "CREATE TABLE pick ( "
    "id INTEGER PRIMARY KEY NOT NULL, "
    "problem INTEGER NOT NULL REFERENCES problem (id), "
    "kernel TEXT NOT NULL CHECK (length(kernel) BETWEEN 1 AND 63), "
    "environment INTEGER NOT NULL REFERENCES environment (id), "
    "generator TEXT NOT NULL, "
    "config TEXT NOT NULL CHECK (length(config) <= 511), "
    "best_us REAL NOT NULL CHECK (best_us > 0 AND best_us <= 1e15), "
    "default_us REAL NOT NULL CHECK (default_us > 0 AND default_us <= 1e15), "
    "ratio REAL NOT NULL CHECK (ratio > 0 AND ratio <= 1e15), "
    "limit_share REAL NOT NULL CHECK (limit_share BETWEEN 0 AND 1e15), "
    "complete INTEGER NOT NULL CHECK (complete IN (0, 1)), "
    "session INTEGER NOT NULL REFERENCES session (id), "
    "sample INTEGER REFERENCES sample (id), "
    "written_at TEXT NOT NULL, "
    "UNIQUE (problem, kernel, environment) "
    "); "
    "INSERT INTO main.pick SELECT id, problem, kernel, environment, generator, config, best_us, "
    "default_us, ratio, 0, complete, session, sample, written_at FROM pick_before; "
    "DROP TABLE pick_before; "
    "PRAGMA user_version = 3;";

// upgrades[v] leads from version v to a later one and sets user_version.  From 0 it is schema.sql
// itself.
static const char *const upgrades[SW_DB_SCHEMA_VERSION] = { NULL, to_version_2,
                                                             to_version_3 };

// ---- Comparing --------------------------------------------------------------------------------

// SQL without comments and with single spaces; free with free.  NULL without memory.
static char *normalize(const char *sql)
{
  char *text = malloc(strlen(sql) + 1), *end = text;
  if (!text) return NULL;
  for (; *sql; sql++) {
    if (sql[0] == '-' && sql[1] == '-') {
      while (sql[1] && sql[1] != '\n') sql++;
    } else if (!isspace((unsigned char)*sql)) {
      *end++ = *sql;
    } else if (end > text && end[-1] != ' ' && end[-1] != ';') {
      *end++ = ' ';
    }
  }
  *end = 0;
  return text;
}

// Is `sql` one of the statements of `script`?  Both normalized, the script's end in ';'.
static bool has_statement(const char *script, const char *sql)
{
  const size_t length = strlen(sql);
  for (const char *at = script; at && *at; at = strchr(at, ';') ? strchr(at, ';') + 1 : NULL)
    if (!strncmp(at, sql, length) && at[length] == ';') return true;
  return false;
}

static int64_t count_creates(const char *script)
{
  int64_t count = 0;
  for (const char *at = script; at && *at; at = strchr(at, ';') ? strchr(at, ';') + 1 : NULL)
    count += !strncmp(at, "CREATE ", 7);
  return count;
}

// A name from the file, safe to print.
static void print_name(const unsigned char *name, char text[64])
{
  size_t length = 0;
  for (; name && name[length] && length < 63; length++)
    text[length] = name[length] >= ' ' && name[length] < 0x7f ? (char)name[length] : '?';
  text[length] = 0;
}

// One row of sqlite_schema: type, name, sql.  `script` NULL: an older version, only tables and
// indexes may be.
static enum swathe_status check_object(struct sw_db *db, sqlite3_stmt *row, const char *script,
                                       int64_t *known)
{
  const char *type = (const char *)sqlite3_column_text(row, 0);
  const char *sql = (const char *)sqlite3_column_text(row, 2);
  char name[64];
  print_name(sqlite3_column_text(row, 1), name);

  if (!type || (strcmp(type, "table") && strcmp(type, "index")))
    return sw_fail(SWATHE_DATABASE,
                   "the tuning database %s holds a %s '%s'; swathe never writes one and "
                   "does not use the file",
                   db->path, type && !strcmp(type, "view") ? "view" : "trigger", name);
  if (!sql && !strcmp(type, "index") && !strncmp(name, "sqlite_autoindex_", 17)) return SWATHE_OK;
  char *text = normalize(sql ? sql : "");
  if (!text) return sw_fail(SWATHE_NO_MEMORY, "no memory to compare the schema of %s", db->path);
  const bool same = !script || has_statement(script, text);
  free(text);
  if (!same)
    return sw_fail(SWATHE_DATABASE,
                   "the tuning database %s holds a %s '%s' that is not as swathe makes it; "
                   "the file is not used",
                   db->path, type, name);
  (*known)++;
  return SWATHE_OK;
}

static enum swathe_status check_objects(struct sw_db *db, const char *script)
{
  sqlite3_stmt *statement = NULL;
  int64_t known = 0;
  bool row = false;
  enum swathe_status status = sw_db_sql_begin(
      db, &statement, "SELECT type, name, sql FROM sqlite_schema ORDER BY name", "");
  if (status) return status;
  while (!(status = sw_db_sql_step(db, statement, &row)) && row)
    if ((status = check_object(db, statement, script, &known))) break;
  if (!status && script && known != count_creates(script))
    status =
        sw_fail(SWATHE_DATABASE,
                "the tuning database %s lacks some of its tables; the file is not used", db->path);
  return sw_db_sql_end(statement, status);
}

// ---- Versions ---------------------------------------------------------------------------------

// Which swathe wrote a newer file; its meta table is read only if it is a table just like ours.
static enum swathe_status refuse_newer(struct sw_db *db, const char *script, int64_t version)
{
  char writer[64] = "a newer swathe";
  sqlite3_stmt *statement = NULL;
  bool row = false;
  char *sql = NULL;

  if (!sw_db_sql_begin(db, &statement,
                       "SELECT sql FROM sqlite_schema WHERE type = 'table' AND name = 'meta'",
                       "") &&
      !sw_db_sql_step(db, statement, &row) && row && sqlite3_column_text(statement, 0))
    sql = normalize((const char *)sqlite3_column_text(statement, 0));
  sw_db_sql_end(statement, SWATHE_OK);
  statement = NULL;
  if (sql && has_statement(script, sql) &&
      !sw_db_sql_begin(db, &statement, "SELECT value FROM meta WHERE name = 'written_by'", "") &&
      !sw_db_sql_step(db, statement, &row) && row)
    print_name(sqlite3_column_text(statement, 0), writer);
  sw_db_sql_end(statement, SWATHE_OK);
  free(sql);
  return sw_fail(SWATHE_DATABASE,
                 "the tuning database %s has version %" PRId64 ", written by %s; this is "
                 "swathe " SWATHE_VERSION
                 " and reads up to version %d: use the newer one or another file",
                 db->path, version, writer, SW_DB_SCHEMA_VERSION);
}

static enum swathe_status check_version(struct sw_db *db, const char *script, int32_t *version)
{
  int64_t application = 0, written = 0, objects = 0;
  enum swathe_status status = sw_db_sql_number(db, "PRAGMA application_id", &application);
  if (!status) status = sw_db_sql_number(db, "PRAGMA user_version", &written);
  if (!status) status = sw_db_sql_number(db, "SELECT count(*) FROM sqlite_schema", &objects);
  if (status) return status;

  if (!objects && !written && (!application || application == APPLICATION_ID)) {
    *version = 0;
    return SWATHE_OK;
  }
  if (application != APPLICATION_ID)
    return sw_fail(SWATHE_DATABASE, "%s is a database of another program; give another path",
                   db->path);
  if (written > SW_DB_SCHEMA_VERSION) return refuse_newer(db, script, written);
  if (written < 1)
    return sw_fail(SWATHE_DATABASE,
                   "the tuning database %s has version %" PRId64 " and yet holds tables; "
                   "the file is not used",
                   db->path, written);
  status = check_objects(db, written == SW_DB_SCHEMA_VERSION ? script : NULL);
  if (!status) *version = (int32_t)written;
  return status;
}

enum swathe_status sw_db_schema_check(struct sw_db *db, int32_t *version)
{
  char *script = normalize(sw_schema_texts[0].text);
  if (!script) return sw_fail(SWATHE_NO_MEMORY, "no memory to check %s", db->path);
  const enum swathe_status status = check_version(db, script, version);
  free(script);
  return status;
}

enum swathe_status sw_db_schema_sound(struct sw_db *db)
{
  sqlite3_stmt *statement = NULL;
  bool row = false;
  enum swathe_status status = sw_db_sql_begin(db, &statement, "PRAGMA quick_check(1)", "");
  if (!status) status = sw_db_sql_step(db, statement, &row);
  if (!status && row) {
    const char *found = (const char *)sqlite3_column_text(statement, 0);
    if (!found || strcmp(found, "ok"))
      status = sw_fail(SWATHE_DATABASE,
                       "the tuning database %s is damaged (%.200s); move it aside and "
                       "restore a copy or tune again",
                       db->path, found ? found : "");
  }
  return sw_db_sql_end(statement, status);
}

static enum swathe_status run_steps(struct sw_db *db, int32_t version)
{
  enum swathe_status status = SWATHE_OK;
  sqlite3_stmt *statement = NULL;
  int64_t reached = version;
  bool row = false;

  while (!status && reached < SW_DB_SCHEMA_VERSION) {
    status = sw_db_sql_run(db, reached ? upgrades[reached] : sw_schema_texts[0].text);
    if (!status) status = sw_db_sql_number(db, "PRAGMA user_version", &reached);
  }
  if (!status)
    status =
        sw_db_sql_begin(db, &statement, "INSERT OR REPLACE INTO meta (name, value) VALUES (?, ?)",
                        "tt", "written_by", "swathe " SWATHE_VERSION);
  if (!status) status = sw_db_sql_step(db, statement, &row);
  return sw_db_sql_end(statement, status);
}

enum swathe_status sw_db_schema_migrate(struct sw_db *db)
{
  int32_t version = 0;
  enum swathe_status status = sw_db_sql_run(db, "BEGIN IMMEDIATE");
  if (status) return status;
  status = sw_db_schema_check(db, &version);
  if (!status && version < SW_DB_SCHEMA_VERSION) {
    status = run_steps(db, version);
    if (!status)
      status = sw_db_schema_check(db, &version);  // however it came there, it is schema.sql now
  }
  if (!status) status = sw_db_sql_run(db, "COMMIT");
  if (status) sqlite3_exec(db->connection, "ROLLBACK", NULL, NULL, NULL);
  return status;
}
