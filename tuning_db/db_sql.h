// db_sql.h: one connection and its prepared statements; shared by the files of tuning_db/ only.
#ifndef SW_DB_SQL_H
#define SW_DB_SQL_H

#include <pthread.h>
#include <sqlite3.h>

#include "db.h"

enum { SW_DB_STATEMENTS = 32, SW_DB_BUSY_MS = 5000 };

struct sw_db {
  sqlite3 *connection; // NULL: the file is not there or empty, and every answer is empty
  char *path;
  enum sw_db_access access;
  pthread_mutex_t mutex; // one call at a time
  struct {
    const char *sql; // compared by address
    sqlite3_stmt *statement;
  } kept[SW_DB_STATEMENTS];
};

// The words of a failed SQLite call on this database; `code` is extended.
enum swathe_status sw_db_sql_fail(struct sw_db *db, int code, const char *doing);

// Runs statements that have no parameters and whose rows nobody wants.
enum swathe_status sw_db_sql_run(struct sw_db *db, const char *sql);

// The prepared statement of `sql` (kept until close; pass the same constant each time) with its
// parameters bound in order.  `kinds` has a letter for each: t const char * (NULL: null), i
// int64_t, r double.  Texts are borrowed until sw_db_sql_end.
enum swathe_status sw_db_sql_begin(struct sw_db *db, sqlite3_stmt **statement, const char *sql,
                                   const char *kinds, ...);
// *row: there is one.
enum swathe_status sw_db_sql_step(struct sw_db *db, sqlite3_stmt *statement, bool *row);
// Passes `status` on.
enum swathe_status sw_db_sql_end(sqlite3_stmt *statement, enum swathe_status status);

// For statements that give one number.
enum swathe_status sw_db_sql_number(struct sw_db *db, const char *sql, int64_t *number);

// Closes the statements and the connection.
void sw_db_sql_close(struct sw_db *db);

#endif
