// db_open.c: from a path to a connection that may be trusted.  The world's databases come through
// here: from other teams, from killed writers, from read-only and network file systems.
//
// Readers take whatever is there without changing it.  Writers first look at the file as readers
// do, so that a file which is not a tuning database is refused before anything could be written to
// it.
#include "db_schema.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/vfs.h>
#endif

// ---- Paths --------------------------------------------------------------------------------------

// SQLite's URI of a path, with a query; free with free.  A relative path gets "./" so that no name
// (":memory:") is special.
static char *make_uri(const char *path, const char *query)
{
  static const char hex[] = "0123456789abcdef";
  char *uri = malloc(3 * strlen(path) + strlen(query) + 16), *end;
  if (!uri) return NULL;
  end = stpcpy(uri, *path == '/' ? "file://" : "file:./");
  for (; *path; path++) {
    const unsigned char c = (unsigned char)*path;
    if (c == '%' || c == '?' || c == '#' || c < ' ') {
      *end++ = '%';
      *end++ = hex[c >> 4];
      *end++ = hex[c & 15];
    } else {
      *end++ = (char)c;
    }
  }
  *end++ = '?';
  strcpy(end, query);
  return uri;
}

// The directory part; free with free.
static char *directory_of(const char *path)
{
  const char *slash = strrchr(path, '/');
  if (!slash) return strdup(".");
  return slash == path ? strdup("/") : strndup(path, (size_t)(slash - path));
}

static enum swathe_status make_directories(const char *path)
{
  char *directory = directory_of(path);
  enum swathe_status status = SWATHE_OK;
  if (!directory) return sw_fail(SWATHE_NO_MEMORY, "no memory for the path %s", path);
  for (char *slash = directory; slash && !status;) {
    slash = strchr(slash + 1, '/');
    if (slash) *slash = 0;
    if (mkdir(directory, 0700) && errno != EEXIST && access(directory, F_OK))
      status = sw_fail(SWATHE_DATABASE, "cannot make the directory %s for the tuning database: %s",
                       directory, strerror(errno));
    if (slash) *slash = '/';
  }
  free(directory);
  return status;
}

static bool directory_writable(const char *path)
{
  char *directory = directory_of(path);
  const bool writable = directory && !access(directory, W_OK | X_OK);
  free(directory);
  return writable;
}

// Bytes of the file beside the database that `suffix` names; 0 if there is none.
static int64_t side_bytes(const char *path, const char *suffix)
{
  struct stat found;
  char *side = malloc(strlen(path) + strlen(suffix) + 1);
  if (!side) return 0;
  stpcpy(stpcpy(side, path), suffix);
  const int64_t bytes = stat(side, &found) ? 0 : (int64_t)found.st_size;
  free(side);
  return bytes;
}

// Write-ahead logging needs memory shared by all who have the file open, so one machine.
static bool on_network(const char *path)
{
#ifdef __linux__
  // f_type of NFS, SMB, CIFS, SMB2, Lustre, GPFS, Ceph, BeeGFS, AFS, FUSE, 9P, Coda (statfs(2),
  // linux/magic.h).
  static const uint32_t network[] = {
    0x6969,     0x517b,     0xff534d42, 0xfe534d42, 0x0bd00bd0, 0x47504653,
    0x00c36400, 0x19830326, 0x5346414f, 0x65735546, 0x01021997, 0x73757245,
  };
  struct statfs found;
  if (statfs(path, &found)) return false;
  for (size_t i = 0; i < sizeof network / sizeof network[0]; i++)
    if ((uint32_t)found.f_type == network[i]) return true;
#else
  (void)path;
#endif
  return false;
}

// ---- Connections --------------------------------------------------------------------------------

// What a file that anyone may have written must not be able to do to us.
static int harden(sqlite3 *connection)
{
  static const struct {
    int option, value;
  } options[] = {
    { SQLITE_DBCONFIG_DEFENSIVE, 1 },
    { SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0 },
    { SQLITE_DBCONFIG_ENABLE_TRIGGER, 0 },
    { SQLITE_DBCONFIG_ENABLE_VIEW, 0 },
    { SQLITE_DBCONFIG_ENABLE_LOAD_EXTENSION, 0 },
    { SQLITE_DBCONFIG_ENABLE_FKEY, 1 },
  };
  static const struct {
    int limit, value;
  } limits[] = {
    { SQLITE_LIMIT_LENGTH, 16 << 20 }, { SQLITE_LIMIT_SQL_LENGTH, 100000 },
    { SQLITE_LIMIT_COLUMN, 100 },      { SQLITE_LIMIT_EXPR_DEPTH, 50 },
    { SQLITE_LIMIT_ATTACHED, 0 },      { SQLITE_LIMIT_WORKER_THREADS, 0 },
    { SQLITE_LIMIT_VDBE_OP, 25000 },   { SQLITE_LIMIT_TRIGGER_DEPTH, 1 },
  };
  int code = SQLITE_OK;
  for (size_t i = 0; i < sizeof options / sizeof options[0] && !code; i++)
    code = sqlite3_db_config(connection, options[i].option, options[i].value, NULL);
  for (size_t i = 0; i < sizeof limits / sizeof limits[0]; i++)
    sqlite3_limit(connection, limits[i].limit, limits[i].value);
  if (!code) code = sqlite3_busy_timeout(connection, SW_DB_BUSY_MS);
  if (!code)
    code = sqlite3_exec(connection, "PRAGMA cell_size_check = ON; PRAGMA mmap_size = 0", NULL, NULL,
                        NULL);
  return code;
}

static enum swathe_status connect_to(struct sw_db *db, int flags, const char *query)
{
  char *uri = make_uri(db->path, query);
  if (!uri) return sw_fail(SWATHE_NO_MEMORY, "no memory for the path %s", db->path);
  int code =
      sqlite3_open_v2(uri, &db->connection,
                      flags | SQLITE_OPEN_URI | SQLITE_OPEN_NOMUTEX | SQLITE_OPEN_EXRESCODE, NULL);
  free(uri);
  if (!code) code = harden(db->connection);
  if (!code) return SWATHE_OK;
  const enum swathe_status status = sw_db_sql_fail(db, code, "opening it");
  sw_db_sql_close(db);
  return status;
}

// Byte 18 of a database tells how it is written.  It is read through SQLite's own file, because
// closing another descriptor of the file would drop this process's locks on it.
static bool write_ahead(sqlite3 *connection)
{
  sqlite3_file *file = NULL;
  char mode = 0;
  sqlite3_file_control(connection, "main", SQLITE_FCNTL_FILE_POINTER, &file);
  return file && file->pMethods && !file->pMethods->xRead(file, &mode, 1, 18) && mode == 2;
}

static enum swathe_status read_as_it_stands(struct sw_db *db, int32_t *version)
{
  sw_db_sql_close(db);
  const enum swathe_status status = connect_to(db, SQLITE_OPEN_READONLY, "mode=ro&immutable=1");
  return status ? status : sw_db_schema_check(db, version);
}

// With write-ahead logging even a reader needs a -shm file, and networks may not lock.  Where no
// -shm can be made or locks mean nothing, and no rows wait in a -wal file, the file is read as it
// stands.
static enum swathe_status connect_and_check(struct sw_db *db, int32_t *version)
{
  const bool network = on_network(db->path);
  const bool wal_waits = side_bytes(db->path, "-wal") > 0 || side_bytes(db->path, "-shm") > 0;
  const bool sealed = network || !directory_writable(db->path);
  enum swathe_status status = connect_to(db, SQLITE_OPEN_READONLY, "mode=ro");
  if (status) return status;
  if (sealed && !wal_waits && write_ahead(db->connection)) return read_as_it_stands(db, version);

  status = sw_db_schema_check(db, version);
  if (!status || !sealed) return status;
  if (wal_waits)
    return sw_within(status,
                     "its newest rows are in %s-wal, which cannot be read here without writing; "
                     "open it for writing once where its directory can be written, for example "
                     "with swathe tune",
                     db->path);
  if (side_bytes(db->path, "-journal") > 0)
    return sw_within(status, "a writer was killed half-way; open it for writing once");
  return network ? read_as_it_stands(db, version) : status;
}

// *version 0: the file holds nothing yet.
static enum swathe_status open_reading(struct sw_db *db, int32_t *version)
{
  const enum swathe_status status = connect_and_check(db, version);
  if (status) sw_db_sql_close(db);
  return status;
}

// *bytes is 0 for a file that is not there.
static enum swathe_status look_at(const char *path, int64_t *bytes)
{
  struct stat found;
  *bytes = 0;
  if (stat(path, &found)) {
    if (errno == ENOENT || errno == ENOTDIR) return SWATHE_OK;
    return sw_fail(SWATHE_DATABASE, "the tuning database %s: %s", path, strerror(errno));
  }
  if (!S_ISREG(found.st_mode))
    return sw_fail(SWATHE_DATABASE, "the tuning database %s is not a regular file", path);
  *bytes = (int64_t)found.st_size;
  return SWATHE_OK;
}

static enum swathe_status open_for_read(struct sw_db *db)
{
  int64_t bytes = 0;
  int32_t version = 0;
  enum swathe_status status = look_at(db->path, &bytes);
  if (status || !bytes) return status;
  status = open_reading(db, &version);
  if (status) return status;
  if (!version) sw_db_sql_close(db);
  if (version && version < SW_DB_SCHEMA_VERSION) {
    sw_db_sql_close(db);
    return sw_fail(SWATHE_DATABASE,
                   "the tuning database %s has version %d, this swathe reads version %d; open it "
                   "for writing once, for example with swathe tune",
                   db->path, version, SW_DB_SCHEMA_VERSION);
  }
  return SWATHE_OK;
}

// ---- Writing ------------------------------------------------------------------------------------

// SQLite does not wait for the lock that a change of the journal needs, so we do.
static enum swathe_status set_journal(struct sw_db *db, const char *pragma)
{
  const struct timespec pause = { 0, 5000000 };
  int code = SQLITE_BUSY;
  for (int waited_ms = 0; code == SQLITE_BUSY && waited_ms < SW_DB_BUSY_MS; waited_ms += 5) {
    code = sqlite3_exec(db->connection, pragma, NULL, NULL, NULL) & 0xff;
    if (code == SQLITE_BUSY || code == SQLITE_LOCKED) {
      code = SQLITE_BUSY;
      nanosleep(&pause, NULL);
    }
  }
  return code ? sw_db_sql_fail(db, code, "setting its journal") : SWATHE_OK;
}

// Write-ahead logging where it works: readers do not hold up the writer.  Elsewhere a rollback
// journal.
static enum swathe_status choose_journal(struct sw_db *db)
{
  if (on_network(db->path)) return set_journal(db, "PRAGMA journal_mode = DELETE");
  if (!set_journal(db, "PRAGMA journal_mode = WAL")) return SWATHE_OK;
  return set_journal(db, "PRAGMA journal_mode = DELETE");
}

// Refuses what is not ours while the connection cannot write.
static enum swathe_status look_before_writing(struct sw_db *db)
{
  int64_t bytes = 0;
  int32_t version = 0;
  enum swathe_status status = look_at(db->path, &bytes);
  if (status || !bytes || side_bytes(db->path, "-journal") > 0)
    return status; // a journal is rolled back first
  status = open_reading(db, &version);
  if (!status) status = sw_db_schema_sound(db);
  sw_db_sql_close(db);
  return status;
}

static enum swathe_status open_for_write(struct sw_db *db)
{
  enum swathe_status status = make_directories(db->path);
  if (!status) status = look_before_writing(db);
  if (!status) status = connect_to(db, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE, "mode=rwc");
  if (status) return status;
  if (sqlite3_db_readonly(db->connection, "main") == 1)
    status = sw_fail(SWATHE_DATABASE,
                     "the tuning database %s cannot be written; mind its permissions or give "
                     "another path",
                     db->path);
  // EXTRA: what a put answered is on the disk, whatever fails next.  It costs a few milliseconds
  // beside a candidate's compilation and measurement of hundreds.
  if (!status) status = sw_db_sql_run(db, "PRAGMA synchronous = EXTRA");
  if (!status) status = sw_db_schema_migrate(db);
  if (!status) status = choose_journal(db);
  if (status) sw_db_sql_close(db);
  return status;
}

enum swathe_status sw_db_open(const char *path, enum sw_db_access access, struct sw_db **db_out)
{
  if (!path || !*path) return sw_fail(SWATHE_BAD_USE, "a tuning database needs a path");
  struct sw_db *db = calloc(1, sizeof *db);
  if (!db || !(db->path = strdup(path))) {
    free(db);
    return sw_fail(SWATHE_NO_MEMORY, "no memory for the tuning database %s", path);
  }
  db->access = access;
  pthread_mutex_init(&db->mutex, NULL);
  const enum swathe_status status = access == SW_DB_WRITE ? open_for_write(db) : open_for_read(db);
  if (status) {
    sw_db_close(db);
    return status;
  }
  *db_out = db;
  return SWATHE_OK;
}

void sw_db_close(struct sw_db *db)
{
  if (!db) return;
  sw_db_sql_close(db);
  pthread_mutex_destroy(&db->mutex);
  free(db->path);
  free(db);
}
