// jit_cache.c: where the cache of compiled kernels is, and its files.
//
// Every file is written under a temporary name in its own directory, synced and renamed, so a
// reader sees a whole file or none; what a reader sees is checked against its digest all the same.
#include "jit_cache.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <sha256.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { KEY_DIGITS = 64, NOTE_BYTES = 4096, NAME_BYTES = 128, BUCKETS = 256, MIB_DIGITS = 12 };
enum { HOUR_S = 3600, DAY_S = 24 * HOUR_S };
static const int64_t default_mib = 512;  // of all entries; a kernel has some 20 KiB
static const size_t entry_bytes = (size_t)256 << 20;  // a larger file is no entry

struct sw_jit_cache {
  char path[PATH_MAX];   // absolute; "" is memory only
  int64_t most_bytes;    // of all entries
  bool in_temporary;     // made by us where others may write too: no symlink, mode 0700
  pthread_mutex_t mutex; // of the rest
  int directory;         // -1 until it exists; never changes after that
  bool refused;
  char problem[PATH_MAX + 128];
};

// The head of an entry, in this machine's byte order, as its payload is.
struct header {
  char magic[8];
  uint32_t header_bytes, reserved;
  unsigned char key[SHA256_DIGEST_LENGTH];
  unsigned char payload_digest[SHA256_DIGEST_LENGTH];
  uint64_t payload_bytes;
  char name[64], isa[32], compiler[256];
  unsigned char header_digest[SHA256_DIGEST_LENGTH];  // of everything above
};
static const char magic[8] = { 'S', 'W', 'A', 'T', 'H', 'E', 'K', '1' };

static void digest(const void *bytes, size_t size, unsigned char *result)
{
  SHA256_CTX context;
  SHA256Init(&context);
  SHA256Update(&context, bytes, size);
  SHA256Final(result, &context);
}

// ---- Where it is -------------------------------------------------------------------------------

// Whether this process may write into the directory, or into the nearest one above it that exists.
static bool may_be_written(const char *path)
{
  char ancestor[PATH_MAX];
  struct stat file;
  snprintf(ancestor, sizeof ancestor, "%s", path);
  while (stat(ancestor, &file)) {
    char *slash = strrchr(ancestor, '/');
    if (errno != ENOENT || !slash) return false;
    if (slash == ancestor) slash++;
    *slash = 0;
  }
  return S_ISDIR(file.st_mode) && faccessat(AT_FDCWD, ancestor, W_OK | X_OK, AT_EACCESS) == 0;
}

// Takes parent/tail as the cache if it is there or can be.  No parent but an absolute path other
// than "/" will do.
static bool choose_below(struct sw_jit_cache *cache, const char *parent, const char *tail)
{
  struct stat file;
  if (!parent || parent[0] != '/' || parent[strspn(parent, "/")] == 0) return false;
  if (snprintf(cache->path, sizeof cache->path, "%s/%s", parent, tail) >= (int)sizeof cache->path)
    return false;
  return lstat(cache->path, &file) == 0 || may_be_written(cache->path);
}

// A directory somebody named; a relative one is taken from where we are now, not where we will be.
static bool choose_named(struct sw_jit_cache *cache, const char *directory)
{
  char here[PATH_MAX] = "";
  if (!directory || !*directory) return false;
  if (*directory != '/' && !getcwd(here, sizeof here)) return false;
  const int length =
      snprintf(cache->path, sizeof cache->path, "%s%s%s", here, *here ? "/" : "", directory);
  return length < (int)sizeof cache->path;
}

// The order that swathe_options.cache promises.  Never the current directory.
static void choose(struct sw_jit_cache *cache, const char *directory)
{
  char private_name[64];
  if (choose_named(cache, directory)) return;
  if (choose_named(cache, getenv("SWATHE_CACHE_DIR"))) return;
  if (choose_below(cache, getenv("XDG_CACHE_HOME"), "swathe")) return;
  if (choose_below(cache, getenv("HOME"), ".cache/swathe")) return;

  cache->in_temporary = true;
  snprintf(private_name, sizeof private_name, "swathe-cache-%u", (unsigned)geteuid());
  if (choose_below(cache, getenv("TMPDIR"), private_name)) return;
  if (choose_below(cache, "/tmp", private_name)) return;
  cache->path[0] = 0;
  snprintf(cache->problem, sizeof cache->problem,
           "no directory for it: neither a home nor /tmp is usable");
}

static int64_t read_bound(void)
{
  const char *text = getenv("SWATHE_CACHE_MIB");
  if (!text || !*text) return default_mib << 20;
  const size_t digits = strspn(text, "0123456789");
  if (text[digits] || digits > MIB_DIGITS) {
    sw_warn("SWATHE_CACHE_MIB is '%s', no number of MiB: the bound is %lld", text,
            (long long)default_mib);
    return default_mib << 20;
  }
  const int64_t mib = strtoll(text, NULL, 10);
  return mib ? mib << 20 : INT64_MAX;
}

// ---- Whose it is -------------------------------------------------------------------------------

static void refuse(struct sw_jit_cache *cache, const char *why)
{
  snprintf(cache->problem, sizeof cache->problem, "%s %s", cache->path, why);
  sw_warn("the kernel cache %s: it is not used, kernels are compiled again in each process",
          cache->problem);
  cache->refused = true;
}

// Opens the directory if it exists and looks whose it is.  Under the mutex.
static void open_directory(struct sw_jit_cache *cache)
{
  struct stat file;
  const int follow = cache->in_temporary ? O_NOFOLLOW : 0;
  const mode_t foreign = cache->in_temporary ? S_IRWXG | S_IRWXO : S_IWGRP | S_IWOTH;
  if (!cache->path[0] || cache->refused || cache->directory >= 0) return;

  const int directory = open(cache->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | follow);
  if (directory < 0) {
    if (cache->in_temporary && (errno == ELOOP || errno == ENOTDIR))
      refuse(cache, "is not a directory of ours");
    return;
  }
  if (fstat(directory, &file)) file.st_mode = 07777;
  if (file.st_uid != geteuid()) refuse(cache, "belongs to another user");
  else if (file.st_mode & foreign)
    refuse(cache, cache->in_temporary ? "is open to other users (wanted: chmod 0700)"
                                      : "can be written by other users (wanted: chmod go-w)");
  if (cache->refused) close(directory);
  else cache->directory = directory;
}

static void warn_unwritable(const struct sw_jit_cache *cache, int error)
{
  sw_warn("the kernel cache %s cannot be written (%s): kernels are compiled again in each process",
          cache->path, strerror(error));
}

// mkdir -p, 0700 each.  Returns 0 or an errno.
static int create_directories(const char *path)
{
  char partial[PATH_MAX];
  snprintf(partial, sizeof partial, "%s", path);
  for (char *slash = strchr(partial + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
    *slash = 0;
    if (mkdir(partial, 0700) && errno != EEXIST && errno != EROFS && errno != EACCES) return errno;
    *slash = '/';
  }
  return mkdir(partial, 0700) && errno != EEXIST ? errno : 0;
}

static void write_tag(struct sw_jit_cache *cache);

bool sw_jit_cache_prepare(struct sw_jit_cache *cache)
{
  int error = 0;
  bool created = false;
  pthread_mutex_lock(&cache->mutex);
  open_directory(cache);
  if (cache->path[0] && !cache->refused && cache->directory < 0) {
    error = create_directories(cache->path);
    open_directory(cache);
    created = cache->directory >= 0;
    if (!created && !error) error = errno;
  }
  const bool usable = cache->directory >= 0;
  const bool wanted = cache->path[0] && !cache->refused;
  pthread_mutex_unlock(&cache->mutex);
  if (wanted && !usable) warn_unwritable(cache, error);
  if (created) write_tag(cache);
  return usable;
}

enum swathe_status sw_jit_cache_open(const char *directory, struct sw_jit_cache **cache_out)
{
  struct sw_jit_cache *cache = calloc(1, sizeof *cache);
  if (!cache) return sw_fail(SWATHE_NO_MEMORY, "no memory for the kernel cache");
  pthread_mutex_init(&cache->mutex, NULL);
  cache->directory = -1;
  cache->most_bytes = read_bound();
  choose(cache, directory);
  open_directory(cache);
  *cache_out = cache;
  return SWATHE_OK;
}

void sw_jit_cache_close(struct sw_jit_cache *cache)
{
  if (!cache) return;
  if (cache->directory >= 0) close(cache->directory);
  pthread_mutex_destroy(&cache->mutex);
  free(cache);
}

const char *sw_jit_cache_directory(struct sw_jit_cache *cache)
{
  pthread_mutex_lock(&cache->mutex);
  const bool refused = cache->refused;
  pthread_mutex_unlock(&cache->mutex);
  return refused ? "" : cache->path;
}

const char *sw_jit_cache_problem(const struct sw_jit_cache *cache) { return cache->problem; }

bool sw_jit_cache_writable(struct sw_jit_cache *cache)
{
  const char *directory = sw_jit_cache_directory(cache);
  return *directory && may_be_written(directory);
}

// ---- Files -------------------------------------------------------------------------------------

// The directory's descriptor once it exists, else -1.
static int root_of(struct sw_jit_cache *cache)
{
  pthread_mutex_lock(&cache->mutex);
  open_directory(cache);
  const int directory = cache->directory;
  pthread_mutex_unlock(&cache->mutex);
  return directory;
}

static void entry_name(const char *key, const char *suffix, char *name)
{
  snprintf(name, NAME_BYTES, "%.2s/%s.%s", key, key + 2, suffix);
}

// A whole regular file of at most `most` bytes.  False if there is none or it cannot be read;
// *wrong says whether something else stands in its place.
static bool read_file(int root, const char *name, size_t most, unsigned char **bytes, size_t *size,
                      bool *wrong)
{
  struct stat file;
  *wrong = false;
  const int from = openat(root, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (from < 0) {
    *wrong = errno == ELOOP;
    return false;
  }
  if (fstat(from, &file) || !S_ISREG(file.st_mode) || (uint64_t)file.st_size > most) {
    close(from);
    *wrong = true;
    return false;
  }
  const size_t wanted = (size_t)file.st_size;
  unsigned char *content = malloc(wanted + 1);
  size_t got = 0;
  while (content && got < wanted) {
    const ssize_t part = read(from, content + got, wanted - got);
    if (part < 0 && errno == EINTR) continue;
    if (part <= 0) break;
    got += (size_t)part;
  }
  close(from);
  if (!content || got < wanted) {
    free(content);
    return false;
  }
  *bytes = content;
  *size = wanted;
  return true;
}

static bool write_all(int to, const void *bytes, size_t size)
{
  const char *rest = bytes;
  while (size) {
    const ssize_t part = write(to, rest, size);
    if (part < 0 && errno == EINTR) continue;
    if (part < 0) return false;
    rest += part;
    size -= (size_t)part;
  }
  return true;
}

// head then body under a temporary name beside `name`, synced, renamed over it.  A warning if it
// fails.
static bool write_file(struct sw_jit_cache *cache, const char *name, const void *head,
                       size_t head_bytes, const void *body, size_t body_bytes)
{
  char temporary[NAME_BYTES + 32], directory[NAME_BYTES];
  uint64_t random = 0;
  if (!sw_jit_cache_prepare(cache)) return false;
  if (getrandom(&random, sizeof random, 0) < 0) random = (uint64_t)getpid();
  snprintf(temporary, sizeof temporary, "%s.%016llx.tmp", name, (unsigned long long)random);
  snprintf(directory, sizeof directory, "%.*s", (int)strcspn(name, "/"), name);

  if (strchr(name, '/') && mkdirat(cache->directory, directory, 0700) && errno != EEXIST)
    goto failed;
  const int to = openat(cache->directory, temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (to < 0) goto failed;
  bool written =
      write_all(to, head, head_bytes) && write_all(to, body, body_bytes) && fsync(to) == 0;
  int error = errno;
  if (close(to) && written) {
    written = false;
    error = errno;
  }
  if (written && renameat(cache->directory, temporary, cache->directory, name) == 0) return true;
  if (written) error = errno;
  unlinkat(cache->directory, temporary, 0);
  errno = error;
failed:
  warn_unwritable(cache, errno);
  return false;
}

static void write_tag(struct sw_jit_cache *cache)
{
  static const char tag[] =
      "Signature: 8a477f597d28d172789f06886806bc55\n"
      "# Compiled kernels of swathe; they are made again when missing.\n"
      "# About this file: https://bford.info/cachedir/\n";
  if (faccessat(cache->directory, "CACHEDIR.TAG", F_OK, 0))
    write_file(cache, "CACHEDIR.TAG", tag, sizeof tag - 1, "", 0);
}

// ---- Entries -----------------------------------------------------------------------------------

static void key_bytes(const char *key, unsigned char *bytes)
{
  for (int i = 0; i < SHA256_DIGEST_LENGTH; i++) {
    const char pair[3] = { key[2 * i], key[2 * i + 1], 0 };
    bytes[i] = (unsigned char)strtoul(pair, NULL, 16);
  }
}

// NULL if the file is the whole entry of `key`, else what is wrong with it.
static const char *find_defect(const char *key, const unsigned char *file, size_t size)
{
  struct header header;
  unsigned char wanted[SHA256_DIGEST_LENGTH];
  if (size < sizeof header) return "is shorter than its header";
  memcpy(&header, file, sizeof header);
  if (memcmp(header.magic, magic, sizeof magic)) return "is not an entry of this version";
  if (header.header_bytes != sizeof header) return "has a header of another size";
  digest(&header, offsetof(struct header, header_digest), wanted);
  if (memcmp(header.header_digest, wanted, sizeof wanted)) return "has a damaged header";
  key_bytes(key, wanted);
  if (memcmp(header.key, wanted, sizeof wanted)) return "holds another kernel";
  if (header.payload_bytes != size - sizeof header || size == sizeof header)
    return "is cut or too long";
  digest(file + sizeof header, size - sizeof header, wanted);
  if (memcmp(header.payload_digest, wanted, sizeof wanted)) return "is damaged";
  return NULL;
}

static bool is_older(const struct stat *file, time_t seconds)
{
  return time(NULL) - file->st_mtime > seconds;
}

// Many ranks at once: the time is written once an hour.  No harm where it may not be.
static void note_use(int root, const char *name)
{
  struct stat file;
  if (fstatat(root, name, &file, AT_SYMLINK_NOFOLLOW) == 0 && is_older(&file, HOUR_S))
    utimensat(root, name, NULL, AT_SYMLINK_NOFOLLOW);
}

bool sw_jit_cache_read(struct sw_jit_cache *cache, const char *key, unsigned char **bytes,
                       size_t *size)
{
  char name[NAME_BYTES];
  unsigned char *file = NULL;
  size_t file_bytes = 0;
  bool wrong = false;
  const int root = root_of(cache);
  if (root < 0) return false;

  entry_name(key, "swk", name);
  const bool found = read_file(root, name, entry_bytes, &file, &file_bytes, &wrong);
  const char *defect = wrong ? "is no regular file" : NULL;
  if (found) defect = find_defect(key, file, file_bytes);
  if (defect) sw_jit_cache_move_aside(cache, key, defect);
  if (!found || defect) {
    free(file);
    return false;
  }
  note_use(root, name);
  *size = file_bytes - sizeof(struct header);
  memmove(file, file + sizeof(struct header), *size);
  *bytes = file;
  return true;
}

void sw_jit_cache_move_aside(struct sw_jit_cache *cache, const char *key, const char *why)
{
  char name[NAME_BYTES], aside[NAME_BYTES];
  const int root = root_of(cache);
  if (root < 0) return;
  entry_name(key, "swk", name);
  entry_name(key, "bad", aside);
  sw_warn("%s/%s %s: moved aside and compiled again", cache->path, name, why);
  if (renameat(root, name, root, aside) && errno != ENOENT) unlinkat(root, name, 0);
}

bool sw_jit_cache_write(struct sw_jit_cache *cache, const char *key,
                        const struct sw_jit_cache_label *label, const unsigned char *bytes,
                        size_t size)
{
  char name[NAME_BYTES];
  struct header header;
  memset(&header, 0, sizeof header);
  memcpy(header.magic, magic, sizeof magic);
  header.header_bytes = sizeof header;
  key_bytes(key, header.key);
  digest(bytes, size, header.payload_digest);
  header.payload_bytes = size;
  snprintf(header.name, sizeof header.name, "%s", label->name);
  snprintf(header.isa, sizeof header.isa, "%s", label->isa);
  snprintf(header.compiler, sizeof header.compiler, "%s", label->compiler);
  digest(&header, offsetof(struct header, header_digest), header.header_digest);

  entry_name(key, "swk", name);
  return write_file(cache, name, &header, sizeof header, bytes, size);
}

// ---- Locks -------------------------------------------------------------------------------------

enum sw_jit_cache_turn sw_jit_cache_try_lock(struct sw_jit_cache *cache, const char *key, int *lock)
{
  char name[NAME_BYTES];
  struct stat held, named;
  *lock = -1;
  if (!sw_jit_cache_prepare(cache)) return SW_JIT_CACHE_NO_LOCKS;
  entry_name(key, "lock", name);
  const char bucket[3] = { key[0], key[1], 0 };
  mkdirat(cache->directory, bucket, 0700);
  const int file = openat(cache->directory, name, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (file < 0) return SW_JIT_CACHE_NO_LOCKS;
  if (flock(file, LOCK_EX | LOCK_NB)) {
    const bool busy = errno == EWOULDBLOCK || errno == EINTR;
    close(file);
    return busy ? SW_JIT_CACHE_BUSY : SW_JIT_CACHE_NO_LOCKS;
  }
  // The one before us removes the file while it holds it: a lock on a removed file is none.
  if (fstat(file, &held) || fstatat(cache->directory, name, &named, AT_SYMLINK_NOFOLLOW) ||
      held.st_ino != named.st_ino || held.st_dev != named.st_dev) {
    close(file);
    return SW_JIT_CACHE_BUSY;
  }
  *lock = file;
  return SW_JIT_CACHE_HELD;
}

void sw_jit_cache_unlock(struct sw_jit_cache *cache, const char *key, int lock)
{
  char name[NAME_BYTES];
  if (lock < 0) return;
  entry_name(key, "lock", name);
  unlinkat(cache->directory, name, 0);
  close(lock);
}

// ---- Notes -------------------------------------------------------------------------------------

// A note's first line is the digest of the rest.
static void digest_line(const char *text, size_t size, char *line)
{
  unsigned char bytes[SHA256_DIGEST_LENGTH];
  digest(text, size, bytes);
  for (int i = 0; i < SHA256_DIGEST_LENGTH; i++) snprintf(line + 2 * i, 3, "%02x", bytes[i]);
  line[KEY_DIGITS] = '\n';
}

bool sw_jit_cache_read_note(struct sw_jit_cache *cache, const char *name, char *text, size_t size)
{
  char line[KEY_DIGITS + 1];
  unsigned char *file = NULL;
  size_t file_bytes = 0;
  bool wrong = false;
  const int root = root_of(cache);
  if (root < 0 || !read_file(root, name, NOTE_BYTES, &file, &file_bytes, &wrong)) return false;

  bool whole = file_bytes >= sizeof line && file_bytes - sizeof line < size;
  if (whole) {
    const size_t length = file_bytes - sizeof line;
    digest_line((const char *)file + sizeof line, length, line);
    whole = !memcmp(file, line, sizeof line);
    memcpy(text, file + sizeof line, length);
    text[length] = 0;
  }
  free(file);
  return whole;
}

void sw_jit_cache_write_note(struct sw_jit_cache *cache, const char *name, const char *text)
{
  char line[KEY_DIGITS + 1];
  digest_line(text, strlen(text), line);
  write_file(cache, name, line, sizeof line, text, strlen(text));
}

// ---- Tidying -----------------------------------------------------------------------------------
//
// Nobody is waited for.  A file that goes while another process reads it is whole for that one and
// a miss for the next.

struct entry {
  char name[NAME_BYTES];
  time_t used;
  int64_t bytes;
};

struct entries {
  struct entry *all;  // owned
  size_t count, room;
  int64_t bytes;
};

// `name` from the cache's directory.
typedef void visit_file(struct sw_jit_cache *cache, const char *name, const struct stat *file,
                        void *arg);

static void visit_files(struct sw_jit_cache *cache, const char *directory, visit_file *visit,
                        void *arg)
{
  const int opened =
      openat(cache->directory, directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
  if (opened < 0) return;
  DIR *stream = fdopendir(opened);
  if (!stream) {
    close(opened);
    return;
  }
  for (struct dirent *entry; (entry = readdir(stream)) != NULL;) {
    char name[NAME_BYTES];
    struct stat file;
    const int length = snprintf(name, sizeof name, "%s/%s", directory, entry->d_name);
    if (length < NAME_BYTES &&
        fstatat(cache->directory, name, &file, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(file.st_mode))
      visit(cache, name, &file, arg);
  }
  closedir(stream);
}

static void visit_entries(struct sw_jit_cache *cache, visit_file *visit, void *arg)
{
  for (int bucket = 0; bucket < BUCKETS; bucket++) {
    char directory[3];
    snprintf(directory, sizeof directory, "%02x", (unsigned)bucket % BUCKETS);
    visit_files(cache, directory, visit, arg);
  }
}

static bool ends(const char *name, const char *suffix)
{
  const size_t length = strlen(name), wanted = strlen(suffix);
  return length >= wanted && !strcmp(name + length - wanted, suffix);
}

static void add_entry(struct entries *entries, const char *name, const struct stat *file)
{
  if (entries->count == entries->room) {
    const size_t room = entries->room ? 2 * entries->room : 256;
    struct entry *all = realloc(entries->all, room * sizeof *all);
    if (!all) return;
    entries->all = all;
    entries->room = room;
  }
  struct entry *entry = &entries->all[entries->count++];
  strcpy(entry->name, name);
  entry->used = file->st_mtime;
  entry->bytes = file->st_size;
  entries->bytes += file->st_size;
}

// The lock file of whoever was killed while compiling.
static void remove_lock(struct sw_jit_cache *cache, const char *name)
{
  char key[KEY_DIGITS + 1];
  int lock;
  snprintf(key, sizeof key, "%.2s%.62s", name, name + 3);
  if (sw_jit_cache_try_lock(cache, key, &lock) == SW_JIT_CACHE_HELD)
    sw_jit_cache_unlock(cache, key, lock);
}

static void remove_temporary(struct sw_jit_cache *cache, const char *name,
                             const struct stat *file, void *arg)
{
  (void)arg;
  if (ends(name, ".tmp") && is_older(file, DAY_S)) unlinkat(cache->directory, name, 0);
}

static void sort_out(struct sw_jit_cache *cache, const char *name, const struct stat *file,
                     void *arg)
{
  if (ends(name, ".swk") || ends(name, ".bad")) add_entry(arg, name, file);
  else if (ends(name, ".lock") && is_older(file, DAY_S)) remove_lock(cache, name);
  else remove_temporary(cache, name, file, NULL);
}

// A note that leads to no entry.
static void forget_origin(struct sw_jit_cache *cache, const char *name, const struct stat *file,
                          void *arg)
{
  char key[KEY_DIGITS + 1], entry[NAME_BYTES];
  (void)arg;
  if (!is_older(file, DAY_S)) return;
  if (sw_jit_cache_read_note(cache, name, key, sizeof key)) {
    entry_name(key, "swk", entry);
    if (faccessat(cache->directory, entry, F_OK, AT_SYMLINK_NOFOLLOW) == 0) return;
  }
  unlinkat(cache->directory, name, 0);
}

static int by_use(const void *left, const void *right)
{
  const struct entry *a = left, *b = right;
  return (a->used > b->used) - (a->used < b->used);
}

// True if any went.
static bool forget_entries(struct sw_jit_cache *cache, struct entries *entries)
{
  const time_t now = time(NULL);
  size_t i = 0;
  if (entries->bytes <= cache->most_bytes) return false;
  qsort(entries->all, entries->count, sizeof *entries->all, by_use);
  for (; i < entries->count && entries->bytes > cache->most_bytes; i++) {
    if (now - entries->all[i].used <= DAY_S) break;
    unlinkat(cache->directory, entries->all[i].name, 0);
    entries->bytes -= entries->all[i].bytes;
  }
  return i > 0;
}

void sw_jit_cache_tidy(struct sw_jit_cache *cache)
{
  struct entries entries = { NULL, 0, 0, 0 };
  struct stat file;
  const int root = root_of(cache);
  if (root < 0) return;
  const int stamp = openat(root, "tidied", O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (stamp < 0) return;
  const bool due = fstat(stamp, &file) == 0 && is_older(&file, DAY_S) && futimens(stamp, NULL) == 0;
  close(stamp);
  if (!due) return;

  visit_entries(cache, sort_out, &entries);
  visit_files(cache, "compilers", remove_temporary, NULL);
  visit_files(cache, "origins", remove_temporary, NULL);
  if (forget_entries(cache, &entries)) visit_files(cache, "origins", forget_origin, NULL);
  free(entries.all);
}

static void count_kernel(struct sw_jit_cache *cache, const char *name, const struct stat *file,
                         void *arg)
{
  struct sw_jit_cache_size *size = arg;
  (void)cache;
  if (!ends(name, ".swk")) return;
  size->kernels++;
  size->bytes += file->st_size;
}

void sw_jit_cache_measure(struct sw_jit_cache *cache, struct sw_jit_cache_size *size)
{
  *size = (struct sw_jit_cache_size){ .most_bytes = cache->most_bytes };
  if (root_of(cache) >= 0) visit_entries(cache, count_kernel, size);
}
