// db_sql.c: SQLite calls with statuses and words.  Below every other file of tuning_db/.
#include "db_sql.h"

#include <assert.h>
#include <stdarg.h>

// What a person can do about it.
static const char *hint(int code)
{
  switch (code & 0xff) {
  case SQLITE_BUSY:
  case SQLITE_LOCKED:
    return "; another process has kept it locked for 5 s, or its file system cannot lock";
  case SQLITE_NOTADB:
    return "; it is not a tuning database, give another path";
  case SQLITE_CORRUPT:
    return "; the file is damaged, move it aside and restore a copy or tune again";
  case SQLITE_FULL:
    return "; the disk or the quota is full, nothing of this write was kept";
  case SQLITE_IOERR:
    return "; the disk may be full or the file system may not lock files";
  case SQLITE_PROTOCOL:
    return "; the file system does not lock files, keep the database on a local disk";
  case SQLITE_TOOBIG:
    return "; it holds a value of more than 16 MiB and was not written by swathe";
  default:
    return "";
  }
}

enum swathe_status sw_db_sql_fail(struct sw_db *db, int code, const char *doing)
{
  if ((code & 0xff) == SQLITE_NOMEM) return sw_fail(SWATHE_NO_MEMORY, "no memory while %s", doing);
  return sw_fail(SWATHE_DATABASE, "the tuning database %s: %s while %s%s", db->path,
                 db->connection ? sqlite3_errmsg(db->connection) : sqlite3_errstr(code), doing,
                 hint(code));
}

enum swathe_status sw_db_sql_run(struct sw_db *db, const char *sql)
{
  const int code = sqlite3_exec(db->connection, sql, NULL, NULL, NULL);
  return code ? sw_db_sql_fail(db, code, "working on it") : SWATHE_OK;
}

static int find_or_prepare(struct sw_db *db, sqlite3_stmt **statement, const char *sql)
{
  int slot = 0;
  while (slot < SW_DB_STATEMENTS && db->kept[slot].sql && db->kept[slot].sql != sql) slot++;
  assert(slot < SW_DB_STATEMENTS);
  if (!db->kept[slot].sql) {
    const int code = sqlite3_prepare_v3(db->connection, sql, -1, SQLITE_PREPARE_PERSISTENT,
                                        &db->kept[slot].statement, NULL);
    if (code) return code;
    db->kept[slot].sql = sql;
  }
  *statement = db->kept[slot].statement;
  return SQLITE_OK;
}

enum swathe_status sw_db_sql_begin(struct sw_db *db, sqlite3_stmt **statement, const char *sql,
                                   const char *kinds, ...)
{
  sqlite3_stmt *prepared = NULL;
  int code = find_or_prepare(db, &prepared, sql);
  va_list args;

  va_start(args, kinds);
  for (int i = 0; kinds[i] && !code; i++) {
    switch (kinds[i]) {
    case 't':
      code = sqlite3_bind_text(prepared, i + 1, va_arg(args, const char *), -1, NULL);
      break;
    case 'i':
      code = sqlite3_bind_int64(prepared, i + 1, va_arg(args, int64_t));
      break;
    case 'r':
      code = sqlite3_bind_double(prepared, i + 1, va_arg(args, double));
      break;
    default:
      assert(false && "a letter of t, i, r");
    }
  }
  va_end(args);
  if (code) return sw_db_sql_end(prepared, sw_db_sql_fail(db, code, "preparing a question"));
  *statement = prepared;
  return SWATHE_OK;
}

enum swathe_status sw_db_sql_step(struct sw_db *db, sqlite3_stmt *statement, bool *row)
{
  const int code = sqlite3_step(statement);
  *row = code == SQLITE_ROW;
  if (code == SQLITE_ROW || code == SQLITE_DONE) return SWATHE_OK;
  return sw_db_sql_fail(db, code, sqlite3_stmt_readonly(statement) ? "reading" : "writing");
}

enum swathe_status sw_db_sql_end(sqlite3_stmt *statement, enum swathe_status status)
{
  if (statement) {
    sqlite3_reset(statement);
    sqlite3_clear_bindings(statement);
  }
  return status;
}

enum swathe_status sw_db_sql_number(struct sw_db *db, const char *sql, int64_t *number)
{
  sqlite3_stmt *statement = NULL;
  bool row = false;
  enum swathe_status status = sw_db_sql_begin(db, &statement, sql, "");
  if (status) return status;
  status = sw_db_sql_step(db, statement, &row);
  if (!status) *number = row ? sqlite3_column_int64(statement, 0) : 0;
  return sw_db_sql_end(statement, status);
}

void sw_db_sql_close(struct sw_db *db)
{
  for (int i = 0; i < SW_DB_STATEMENTS; i++) {
    sqlite3_finalize(db->kept[i].statement);
    db->kept[i].sql = NULL;
    db->kept[i].statement = NULL;
  }
  sqlite3_close(db->connection);
  db->connection = NULL;
}
