// db_schema.h: is this file a tuning database, and of which version.
#ifndef SW_DB_SCHEMA_H
#define SW_DB_SCHEMA_H

#include "db_sql.h"

enum { SW_DB_SCHEMA_VERSION = 3 };

// Reads only.  *version is 0 for a file that holds nothing yet.  SWATHE_DATABASE: of another
// program, from a newer swathe, or its tables are not exactly those of its version.
enum swathe_status sw_db_schema_check(struct sw_db *db, int32_t *version);

// Reads every page.
enum swathe_status sw_db_schema_sound(struct sw_db *db);

// Brings a checked file from its version to this one, or creates it, in one transaction.
enum swathe_status sw_db_schema_migrate(struct sw_db *db);

#endif
