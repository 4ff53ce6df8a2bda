// test_jit.c: compile once, keep it, never trust what was kept.
//
// Most tests use a fake compiler: a script that counts how often it is run and copies a shared
// object made once by the real one, so that hundreds of compilations take seconds.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "gen.h"
#include "jit.h"

// ---- The world, as the tests want it -----------------------------------------------------------

// These stand before the C library's: faults on demand.
static bool refuse_memfd;
static int fsync_error;
int memfd_create(const char *name, unsigned flags)
{
  if (refuse_memfd) {
    errno = ENOSYS;
    return -1;
  }
  return (int)syscall(SYS_memfd_create, name, flags);
}
int fsync(int file)
{
  if (fsync_error) {
    errno = fsync_error;
    return -1;
  }
  return (int)syscall(SYS_fsync, file);
}

// Between the opening of a lock file and its lock, somebody else removes it, makes a new one and
// locks that; `stolen` holds the new one.
static bool steal_lock;
static int stolen = -1;
int flock(int file, int operation)
{
  if (steal_lock) {
    char link[64], path[512] = "";
    steal_lock = false;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    if (readlink(link, path, sizeof path - 1) < 0 || unlink(path)) return -1;
    stolen = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    syscall(SYS_flock, stolen, LOCK_EX);
  }
  return (int)syscall(SYS_flock, file, operation);
}

static char root[64];               // of everything the tests write
static char cache[128], compiler[128], here[4096];

// No temporary directory anywhere but in the cache.
static bool refuse_temporary;
char *mkdtemp(char *name)
{
  char *(*real)(char *);
  void *address = dlsym(RTLD_NEXT, "mkdtemp");
  memcpy(&real, &address, sizeof real);
  if (!refuse_temporary || !strncmp(name, cache, strlen(cache))) return real(name);
  errno = ENOSPC;
  return NULL;
}

static const double plenty_s = 120;

static const char *in_root(const char *name)
{
  static char paths[8][512];
  static int turn;
  char *path = paths[turn++ % 8];
  snprintf(path, sizeof paths[0], "%s/%s", root, name);
  return path;
}

static void write_text(const char *path, const char *text, mode_t mode)
{
  const int file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, mode);
  assert_true(file >= 0);
  assert_int_equal(write(file, text, strlen(text)), (ssize_t)strlen(text));
  close(file);
}

static char *read_text(const char *path, size_t *size)
{
  struct stat info;
  const int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return NULL;
  assert_int_equal(fstat(file, &info), 0);
  char *text = calloc(1, (size_t)info.st_size + 1);
  assert_int_equal(read(file, text, (size_t)info.st_size), info.st_size);
  close(file);
  if (size) *size = (size_t)info.st_size;
  return text;
}

static bool exists(const char *path)
{
  struct stat info;
  return lstat(path, &info) == 0;
}

static int remove_one(const char *path, const struct stat *info, int kind, struct FTW *place)
{
  (void)info, (void)kind, (void)place;
  return remove(path);
}

static void remove_tree(const char *path)
{
  if (exists(path)) nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

static const char *counted_suffix;
static int counted;
static int count_one(const char *path, const struct stat *info, int kind, struct FTW *place)
{
  const size_t length = strlen(path), wanted = strlen(counted_suffix);
  (void)info, (void)kind, (void)place;
  counted += length >= wanted && !strcmp(path + length - wanted, counted_suffix);
  return 0;
}

// How many files of the cache end so.
static int entries_with(const char *suffix)
{
  counted_suffix = suffix;
  counted = 0;
  nftw(cache, count_one, 16, FTW_PHYS);
  return counted;
}

static int directory_entries(const char *path)
{
  int count = 0;
  DIR *directory = opendir(path);
  assert_non_null(directory);
  while (readdir(directory)) count++;
  closedir(directory);
  return count - 2;
}

static double now(void)
{
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void nap(double seconds)
{
  nanosleep(&(struct timespec){ .tv_sec = (time_t)seconds,
                                .tv_nsec = (long)(1e9 * (seconds - (double)(time_t)seconds)) },
            NULL);
}

// ---- The fake compiler -------------------------------------------------------------------------

// `body` is what it does to compile; $out is where the object goes, $R the tests' directory.
static void make_compiler(const char *path, const char *version, const char *body)
{
  char text[2048];
  snprintf(text, sizeof text,
           "#!/bin/sh\n"
           "R=%s\n"
           "for last; do :; done\n"  // options come last, after the words of the command
           "case \"$last\" in\n"
           "--version) echo x >>$R/asked; echo '%s'; echo 'second line'; exit 0;;\n"
           "-dumpmachine) echo x >>$R/asked; echo test-machine; exit 0;;\n"
           "esac\n"
           "echo x >>$R/compiled\n"
           "while [ $# -gt 0 ]; do case \"$1\" in -o) out=$2;; esac; shift; done\n"
           "%s\n", root, version, body);
  unlink(path);
  write_text(path, text, 0755);
}

static const char good[] = "cat $R/answer.so >$out";

static long times(const char *what)
{
  struct stat info;
  return stat(in_root(what), &info) ? 0 : (long)info.st_size / 2;
}

static const struct sw_jit_request request = {
  .name = "forward", .source = "int answer(void) { return 42; }\n", .flags = "-O1 -fPIC -shared",
  .isa = "generic",
};

static struct sw_jit *open_jit(void)
{
  struct sw_jit *jit = NULL;
  assert_int_equal(sw_jit_open(cache, compiler, &jit), SWATHE_OK);
  return jit;
}

static int answer_of(const struct sw_jit_image *image)
{
  void *address = NULL;
  int (*answer)(void);
  assert_int_equal(sw_jit_symbol(image, "answer", &address), SWATHE_OK);
  memcpy(&answer, &address, sizeof answer);
  return answer();
}

static enum swathe_status load_with(struct sw_jit *jit, const struct sw_jit_request *what,
                                    bool *cached)
{
  struct sw_jit_image *image = NULL;
  struct sw_jit_report report;
  const enum swathe_status status = sw_jit_load(jit, what, plenty_s, &image, &report, NULL);
  if (status) return status;
  assert_int_equal(answer_of(image), 42);
  assert_true(report.binary_bytes > 0);
  sw_jit_unload(image);
  if (cached) *cached = report.cached;
  return SWATHE_OK;
}

// One load by a program that starts: SWATHE_OK, or the status.
static enum swathe_status load_once(bool *cached)
{
  struct sw_jit *jit = open_jit();
  const enum swathe_status status = load_with(jit, &request, cached);
  sw_jit_close(jit);
  return status;
}

static void entry_path(const char *suffix, char *path, size_t size)
{
  struct sw_jit *jit = open_jit();
  struct sw_jit_report report;
  assert_int_equal(sw_jit_warm(jit, &request, plenty_s, &report, NULL), SWATHE_OK);
  sw_jit_close(jit);
  snprintf(path, size, "%s/%.2s/%.62s.%s", cache, report.key, report.key + 2, suffix);
}

static int begin(void **state)
{
  (void)state;
  remove_tree(cache);
  unlink(in_root("asked"));
  unlink(in_root("compiled"));
  make_compiler(compiler, "fake cc 1.0", good);
  setenv("TMPDIR", in_root("tmp"), 1);
  refuse_memfd = false;
  fsync_error = 0;
  return 0;
}

// Nothing is ever left in the temporary directory, nothing written where we stand.
static int end(void **state)
{
  (void)state;
  if (directory_entries(in_root("tmp")) || directory_entries(here)) return -1;
  return 0;
}

static int begin_all(void **state)
{
  (void)state;
  strcpy(root, "/tmp/swathe-test-jit-XXXXXX");
  if (!mkdtemp(root)) return -1;
  snprintf(cache, sizeof cache, "%s/cache", root);
  snprintf(compiler, sizeof compiler, "%s/cc", root);
  snprintf(here, sizeof here, "%s/here", root);
  mkdir(in_root("tmp"), 0700);
  mkdir(here, 0700);
  unsetenv("SWATHE_CC");
  unsetenv("CC");
  unsetenv("SWATHE_CACHE_DIR");
  unsetenv("SWATHE_CACHE_MIB");
  unsetenv("XDG_CACHE_HOME");
  if (chdir(here)) return -1;

  write_text(in_root("answer.c"), request.source, 0600);
  char command[256];
  snprintf(command, sizeof command, "cc -shared -fPIC -o %s/answer.so %s/answer.c", root, root);
  return system(command);
}

static int end_all(void **state)
{
  (void)state;
  if (chdir("/")) return -1;
  remove_tree(root);
  return 0;
}

// ---- Cold and warm -----------------------------------------------------------------------------

static void cold_compiles_and_warm_starts_nothing(void **state)
{
  struct stat info;
  bool cached = true;
  const int open_files = directory_entries("/proc/self/fd");
  (void)state;
  struct sw_jit *jit = open_jit();
  assert_string_equal(sw_jit_directory(jit), cache);
  assert_false(exists(cache));  // opening writes nothing and asks nobody
  assert_int_equal(times("asked"), 0);
  assert_int_equal(load_with(jit, &request, &cached), SWATHE_OK);
  assert_false(cached);
  assert_int_equal(load_with(jit, &request, &cached), SWATHE_OK);
  assert_true(cached);
  sw_jit_close(jit);
  assert_int_equal(times("compiled"), 1);
  assert_int_equal(times("asked"), 2);

  double best_s = 1e9;
  for (int i = 0; i < 5; i++) {
    const double start = now();
    assert_int_equal(load_once(&cached), SWATHE_OK);
    assert_true(cached);
    if (now() - start < best_s) best_s = now() - start;
  }
  assert_int_equal(directory_entries("/proc/self/fd"), open_files);
  print_message("warm start: %.2f ms\n", 1e3 * best_s);
  assert_int_equal(times("compiled"), 1);
  assert_int_equal(times("asked"), 2);

  assert_int_equal(stat(cache, &info), 0);
  assert_int_equal(info.st_mode & 0777, 0700);
  assert_int_equal(entries_with("CACHEDIR.TAG"), 1);
  assert_int_equal(entries_with(".swk"), 1);
  assert_int_equal(entries_with(".tmp") + entries_with(".lock") + entries_with(".bad"), 0);
}

static void real_compiler_and_images_outlive_the_jit(void **state)
{
  const struct sw_jit_request other = {
    .name = "other", .source = "int answer(void) { return 7; }\n", .flags = "-O1 -fPIC -shared -lm",
    .isa = "generic",
  };
  struct sw_jit *jit;
  struct sw_jit_image *first, *second;
  struct sw_jit_report report;
  void *address;
  (void)state;
  assert_int_equal(sw_jit_open(cache, "cc -DUNUSED=1", &jit), SWATHE_OK);
  assert_int_equal(sw_jit_load(jit, &request, plenty_s, &first, &report, NULL), SWATHE_OK);
  assert_true(report.compile_s > 0);
  assert_int_equal(strlen(report.key), 64);
  assert_int_equal(answer_of(first), 42);
  // two at a time are two; and an image under the number of one that went is still itself
  assert_int_equal(sw_jit_load(jit, &other, plenty_s, &second, NULL, NULL), SWATHE_OK);
  assert_int_equal(answer_of(second), 7);
  assert_int_equal(answer_of(first), 42);
  sw_jit_unload(second);
  for (int i = 0; i < 3; i++) {
    sw_jit_unload(first);
    assert_int_equal(sw_jit_load(jit, &other, plenty_s, &second, NULL, NULL), SWATHE_OK);
    assert_int_equal(answer_of(second), 7);
    sw_jit_unload(second);
    assert_int_equal(sw_jit_load(jit, &request, plenty_s, &first, &report, NULL), SWATHE_OK);
    assert_int_equal(answer_of(first), 42);
  }
  assert_int_equal(sw_jit_symbol(first, "question", &address), SWATHE_LOAD);
  assert_non_null(strstr(swathe_error(), "question"));
  sw_jit_close(jit);
  assert_int_equal(answer_of(first), 42);
  sw_jit_unload(first);
}

static void key_of(const char *command, const struct sw_jit_request *what, char *key)
{
  struct sw_jit *jit;
  struct sw_jit_report report;
  assert_int_equal(sw_jit_open(cache, command, &jit), SWATHE_OK);
  assert_int_equal(sw_jit_warm(jit, what, plenty_s, &report, NULL), SWATHE_OK);
  strcpy(key, report.key);
  sw_jit_close(jit);
}

// A random problem: of each field one of a few values, so that many pairs share a kernel.
static void random_problem(uint32_t *random, struct swathe_problem *problem)
{
  static const char *const fields[][3] = {
    { "q_heads=4,kv_heads=2", "q_heads=8,kv_heads=4", "q_heads=4,kv_heads=1" },
    { "head_dim_qk=64", "head_dim_qk=64", "head_dim_qk=72" },
    { "head_dim_v=64", "head_dim_v=64", "head_dim_v=40" },
    { "window_left=127", "window_left=127", "window_left=128" },
    { "window_right=0", "window_right=0", "window_right=3" },
    { "dtype=f32", "dtype=f32", "dtype=bf16" },
    { "sinks=0", "sinks=0", "sinks=1" },
    { "softcap=0", "softcap=30", "softcap=50" },
    { "scale=0", "scale=0.5", "scale=2" },
    { "ranks=1", "ranks=2", "ranks=8" },
    { "layout=contiguous", "layout=zigzag", "layout=contiguous" },
    { "tokens_per_rank=1024", "tokens_per_rank=4096", "tokens_per_rank=8192" },
  };
  char text[512] = "";
  for (size_t f = 0; f < sizeof fields / sizeof *fields; f++) {
    *random = *random * 1664525 + 1013904223;
    if (f) strcat(text, ",");
    strcat(text, fields[f][(*random >> 16) % 3]);
  }
  swathe_problem_init(problem);
  if (swathe_problem_parse(text, problem)) fail_msg("%s: %s", text, swathe_error());
}

// B12: of 10 000 pairs of emitted kernels those that differ in anything have different keys, and
// no others; problems that need different kernels are different rows of a tuning database.
static void keys_follow_what_is_compiled(void **state)
{
  enum { COUNT = 143 };
  static struct { struct sw_gen_source source; char key[65], problem[512]; } all[COUNT];
  struct sw_gen *gen;
  uint32_t random = 1;
  int64_t pairs = 0, same = 0;
  (void)state;

  assert_int_equal(sw_gen_open(NULL, &gen), SWATHE_OK);
  for (int i = 0; i < COUNT; i++) {
    const char *isa = i % 3 ? "avx2" : "generic";
    struct swathe_problem problem;
    char config[SW_CONFIG_TEXT];
    random_problem(&random, &problem);
    const struct sw_gen_request about = { &problem, i % 2 ? "forward" : "backward", isa };
    if (sw_gen_default(gen, &about, config) || sw_gen_emit(gen, &about, config, &all[i].source))
      fail_msg("%s", swathe_error());
    swathe_problem_format(&problem, all[i].problem, sizeof all[i].problem);
    const struct sw_jit_request what = { .name = about.kernel, .source = all[i].source.text,
                                         .flags = all[i].source.flags, .isa = isa };
    key_of(compiler, &what, all[i].key);
  }
  for (int i = 0; i < COUNT; i++)
    for (int j = 0; j < i; j++, pairs++) {
      const bool equal = !strcmp(all[i].source.text, all[j].source.text) &&
                         !strcmp(all[i].source.flags, all[j].source.flags);
      same += equal;
      if (equal == (strcmp(all[i].key, all[j].key) != 0))
        fail_msg("%s and %s: %s texts, %s keys", all[i].problem, all[j].problem,
                 equal ? "equal" : "different", equal ? "different" : "equal");
      if (!equal && i % 6 == j % 6) assert_string_not_equal(all[i].problem, all[j].problem);
    }
  for (int i = 0; i < COUNT; i++) sw_gen_source_free(&all[i].source);
  sw_gen_close(gen);
  print_message("%lld pairs, %lld of the same kernel\n", (long long)pairs, (long long)same);
  assert_true(pairs >= 10000 && same >= 20);
}

static void key_holds_everything(void **state)
{
  char keys[7][65], more[160];
  struct sw_jit_request changed[4] = { request, request, request, request };
  (void)state;
  changed[0].source = "int answer(void) { return 42; } \n";
  changed[1].flags = "-O1 -fPIC  -shared";
  changed[2].isa = "avx2";
  changed[3].source = "int answer(void) { return 42; }\n-O1";  // moved from the next field
  changed[3].flags = " -fPIC -shared";
  key_of(compiler, &request, keys[0]);
  for (int i = 0; i < 4; i++) key_of(compiler, &changed[i], keys[1 + i]);
  snprintf(more, sizeof more, "%s -more", compiler);
  key_of(more, &request, keys[5]);
  make_compiler(compiler, "fake cc 1.1", good);  // an upgrade in place
  key_of(compiler, &request, keys[6]);
  for (int i = 0; i < 7; i++)
    for (int j = 0; j < i; j++) assert_string_not_equal(keys[i], keys[j]);

  make_compiler(compiler, "fake cc 1.0", good);
  struct sw_jit_request renamed = request;
  renamed.name = "backward";
  key_of(compiler, &renamed, keys[1]);
  assert_string_equal(keys[0], keys[1]);
  assert_int_equal(times("compiled"), 7);
}

static void compiler_is_chosen_in_order(void **state)
{
  static const char *const names[] = { "first", "second", "third", "cc" };
  char path[256], *old = strdup(getenv("PATH"));
  (void)state;
  mkdir(in_root("bin"), 0700);
  for (int i = 0; i < 4; i++) {
    snprintf(path, sizeof path, "%s/bin/%s", root, names[i]);
    make_compiler(path, names[i], good);
  }
  make_compiler(in_root("here/first"), "where we stand", good);  // never looked at
  snprintf(path, sizeof path, ".::%s/bin:%s", root, old);
  setenv("PATH", path, 1);
  setenv("SWATHE_CC", "  second  -x ", 1);
  setenv("CC", "third", 1);
  for (int i = 0; i < 4; i++) {
    struct sw_jit *jit;
    struct sw_jit_state found;
    if (i == 2) unsetenv("SWATHE_CC");
    if (i == 3) setenv("CC", "", 1);
    assert_int_equal(sw_jit_open(cache, i == 0 ? "first" : NULL, &jit), SWATHE_OK);
    sw_jit_state(jit, &found);
    snprintf(path, sizeof path, "%s/bin/%s", root, names[i]);
    assert_string_equal(found.compiler, path);
    assert_string_equal(found.compiler_version, names[i]);
    assert_true(found.writable);
    assert_string_equal(found.directory, cache);
    assert_string_equal(found.problem, "");
    sw_jit_close(jit);
  }
  setenv("PATH", old, 1);
  unlink(in_root("here/first"));
  unsetenv("CC");
  free(old);
}

// A path may hold spaces; what follows the program are arguments.  A link is called by its name.
static void path_of_a_compiler_may_hold_spaces(void **state)
{
  static const struct { const char *command, *called; } cases[] = {
    { "%s/my tools/cc", "/my tools/cc -O1 " },
    { "  %s/my tools/cc -x", "/my tools/cc -x -O1 " },
    { "%s/my tools/cc  -x  -y ", "/my tools/cc -x -y -O1 " },
    { "%s/my", "/my -O1 " },
    { "%s/my own -x", "/my own -x -O1 " },
    { "../my tools/cc -x", "/my tools/cc -x -O1 " },
    { "%s/my tools/linked cc -x", "/my tools/linked cc -x -O1 " },
    { "linked cc -x", "/my tools/linked cc -x -O1 " },
  };
  static const char body[] = "tr '\\0' ' ' </proc/$$/cmdline >$R/called; cat $R/answer.so >$out";
  char path[4096], *old = strdup(getenv("PATH"));
  (void)state;
  mkdir(in_root("my tools"), 0700);
  make_compiler(in_root("my tools/cc"), "in my tools", body);
  make_compiler(in_root("my"), "short", body);
  assert_int_equal(symlink("cc", in_root("my tools/linked cc")), 0);
  snprintf(path, sizeof path, "%s/my tools:%s", root, old);
  setenv("PATH", path, 1);
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    struct sw_jit *jit;
    char command[256];
    remove_tree(cache);
    const char *place = strstr(cases[i].command, "%s");
    snprintf(command, sizeof command, "%.*s%s%s",
             place ? (int)(place - cases[i].command) : 0, cases[i].command, place ? root : "",
             place ? place + 2 : cases[i].command);
    assert_int_equal(sw_jit_open(cache, command, &jit), SWATHE_OK);
    if (load_with(jit, &request, NULL)) fail_msg("'%s': %s", command, swathe_error());
    sw_jit_close(jit);
    char *called = read_text(in_root("called"), NULL);
    assert_non_null(called);
    if (!strstr(called, cases[i].called)) fail_msg("'%s' called %s", command, called);
    free(called);
  }
  setenv("PATH", old, 1);
  free(old);
}

// ---- Damage ------------------------------------------------------------------------------------

// The entry is not what it was: it must be a miss, moved aside, compiled again, and then be whole.
static void expect_recovery(const char *path)
{
  char aside[256];
  bool cached = true;
  const long before = times("compiled");
  snprintf(aside, sizeof aside, "%.*sbad", (int)strlen(path) - 3, path);
  remove_tree(aside);
  assert_int_equal(load_once(&cached), SWATHE_OK);
  assert_false(cached);
  assert_int_equal(times("compiled"), before + 1);
  assert_true(exists(aside));
  remove_tree(aside);
}

static void write_bytes(const char *path, const char *bytes, size_t size)
{
  const int file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  assert_true(file >= 0);
  assert_int_equal(write(file, bytes, size), (ssize_t)size);
  close(file);
}

static void silence(int *saved)
{
  fflush(stderr);
  *saved = dup(2);
  const int nowhere = open("/dev/null", O_WRONLY | O_CLOEXEC);
  dup2(nowhere, 2);
  close(nowhere);
}

static void speak(int saved)
{
  fflush(stderr);
  dup2(saved, 2);
  close(saved);
}

static void every_damage_is_a_miss(void **state)
{
  char path[256];
  size_t size = 0;
  int saved;
  bool cached = false;
  (void)state;
  entry_path("swk", path, sizeof path);
  char *whole = read_text(path, &size);
  assert_non_null(whole);
  silence(&saved);
  for (size_t length = 0; length < size; length += length < 600 ? 37 : 2999) {
    write_bytes(path, whole, length);
    expect_recovery(path);
  }
  write_bytes(path, whole, size - 1);
  expect_recovery(path);
  char *longer = calloc(1, size + 1);
  memcpy(longer, whole, size);
  write_bytes(path, longer, size + 1);
  expect_recovery(path);
  free(longer);
  for (size_t at = 0; at < size; at += at < 600 ? 11 : 1777) {
    char *flipped = malloc(size);
    memcpy(flipped, whole, size);
    flipped[at] ^= (char)(1 << at % 8);
    write_bytes(path, flipped, size);
    expect_recovery(path);
    free(flipped);
  }
  unlink(path);
  assert_int_equal(mkdir(path, 0700), 0);
  expect_recovery(path);
  unlink(path);
  assert_int_equal(symlink("/etc/passwd", path), 0);
  expect_recovery(path);
  assert_int_equal(load_once(&cached), SWATHE_OK);
  assert_true(cached);
  speak(saved);
  free(whole);
}

// A start that knows where a kernel comes from needs neither its source nor the compiler.
static void origins_are_remembered(void **state)
{
  struct sw_jit_image *image = NULL;
  struct sw_jit_report report, recalled;
  char path[256];
  int saved;
  (void)state;
  struct sw_jit *jit = open_jit();
  assert_int_equal(sw_jit_recall(jit, SW_JIT_CC, "here", "forward", &image, &recalled),
                   SWATHE_NOT_FOUND);
  assert_int_equal(sw_jit_load(jit, &request, plenty_s, &image, &report, NULL), SWATHE_OK);
  sw_jit_unload(image);
  sw_jit_remember(jit, SW_JIT_CC, "here", report.key);
  sw_jit_close(jit);

  jit = open_jit();
  assert_int_equal(sw_jit_recall(jit, SW_JIT_CC, "there", "forward", &image, &recalled),
                   SWATHE_NOT_FOUND);
  assert_int_equal(sw_jit_recall(jit, SW_JIT_CC, "here", "forward", &image, &recalled),
                   SWATHE_OK);
  assert_int_equal(answer_of(image), 42);
  assert_true(recalled.cached);
  assert_string_equal(recalled.key, report.key);
  assert_int_equal(recalled.binary_bytes, report.binary_bytes);
  sw_jit_unload(image);
  assert_int_equal(times("compiled"), 1);

  entry_path("swk", path, sizeof path);
  silence(&saved);
  write_bytes(path, "damaged", 7);
  assert_int_equal(sw_jit_recall(jit, SW_JIT_CC, "here", "forward", &image, &recalled),
                   SWATHE_NOT_FOUND);
  sw_jit_close(jit);

  // another compiler's binary is another one
  make_compiler(compiler, "fake cc 2.0", good);
  jit = open_jit();
  sw_jit_remember(jit, SW_JIT_CC, "elsewhere", "not a key");
  assert_int_equal(sw_jit_recall(jit, SW_JIT_CC, "elsewhere", "forward", &image, &recalled),
                   SWATHE_NOT_FOUND);
  assert_int_equal(sw_jit_recall(jit, SW_JIT_CC, "here", "forward", &image, &recalled),
                   SWATHE_NOT_FOUND);
  sw_jit_close(jit);
  speak(saved);
}

static void anothers_entry_is_a_miss(void **state)
{
  char path[256], other_path[256], key[65];
  struct sw_jit_request other = request;
  size_t size = 0;
  int saved;
  (void)state;
  entry_path("swk", path, sizeof path);
  other.isa = "avx2";
  key_of(compiler, &other, key);
  snprintf(other_path, sizeof other_path, "%s/%.2s/%s.swk", cache, key, key + 2);
  char *bytes = read_text(other_path, &size);
  assert_non_null(bytes);
  write_bytes(path, bytes, size);
  free(bytes);
  silence(&saved);
  expect_recovery(path);
  speak(saved);
}

// B13
static void entry_that_does_not_load_is_compiled_once_more(void **state)
{
  char path[256], aside[256];
  bool cached = true;
  int saved;
  (void)state;
  make_compiler(compiler, "fake cc 1.0",
                "if [ -e $R/garbage ]; then echo garbage >$out; else cat $R/answer.so >$out; fi");
  write_text(in_root("garbage"), "", 0600);
  entry_path("swk", path, sizeof path);
  snprintf(aside, sizeof aside, "%.*sbad", (int)strlen(path) - 3, path);
  assert_int_equal(times("compiled"), 1);
  silence(&saved);
  assert_int_equal(load_once(&cached), SWATHE_LOAD);  // once more, no better
  assert_int_equal(times("compiled"), 2);
  unlink(in_root("garbage"));
  assert_int_equal(load_once(&cached), SWATHE_OK);
  speak(saved);
  assert_false(cached);
  assert_int_equal(times("compiled"), 3);
  assert_true(exists(aside));
  assert_int_equal(load_once(&cached), SWATHE_OK);
  assert_true(cached);
}

static void loads_without_memory_files(void **state)
{
  bool cached;
  (void)state;
  refuse_memfd = true;
  assert_int_equal(load_once(&cached), SWATHE_OK);
  assert_int_equal(load_once(&cached), SWATHE_OK);
  assert_true(cached);
}

static void no_compiler_but_a_warm_cache(void **state)
{
  struct sw_jit *jit;
  struct sw_jit_state found;
  struct sw_jit_request other = request;
  bool cached = false;
  (void)state;
  assert_int_equal(load_once(&cached), SWATHE_OK);
  assert_int_equal(sw_jit_open(cache, "no-such-compiler", &jit), SWATHE_OK);
  assert_int_equal(load_with(jit, &request, &cached), SWATHE_OK);
  assert_true(cached);
  other.source = "int answer(void) { return 41 + 1; }\n";
  assert_int_equal(load_with(jit, &other, &cached), SWATHE_COMPILE);
  assert_non_null(strstr(swathe_error(), "no-such-compiler"));
  sw_jit_state(jit, &found);
  assert_string_equal(found.compiler, "");
  assert_string_equal(found.compiler_version, "fake cc 1.0");
  assert_non_null(strstr(found.problem, "no-such-compiler"));
  sw_jit_close(jit);

  remove_tree(cache);
  assert_int_equal(sw_jit_open(cache, "no-such-compiler", &jit), SWATHE_OK);
  assert_int_equal(load_with(jit, &request, &cached), SWATHE_COMPILE);
  assert_non_null(strstr(swathe_error(), "no-such-compiler"));
  assert_false(exists(cache));
  sw_jit_close(jit);
}

static void damaged_note_is_asked_again(void **state)
{
  char path[512] = "", name[256];
  bool cached = false;
  (void)state;
  assert_int_equal(load_once(&cached), SWATHE_OK);
  DIR *notes = opendir(in_root("cache/compilers"));
  assert_non_null(notes);
  for (struct dirent *entry; (entry = readdir(notes)) != NULL;)
    if (strlen(entry->d_name) == 32) {
      snprintf(name, sizeof name, "cache/compilers/%.32s", entry->d_name);
      snprintf(path, sizeof path, "%s", in_root(name));
    }
  closedir(notes);
  char *text = read_text(path, NULL);
  assert_non_null(text);
  char *version = strstr(text, "fake cc");
  assert_non_null(version);
  version[0] = 'F';
  write_text(path, text, 0600);
  free(text);
  assert_int_equal(times("asked"), 2);
  assert_int_equal(load_once(&cached), SWATHE_OK);
  assert_true(cached);
  assert_int_equal(times("asked"), 4);
}

// ---- One at a time -----------------------------------------------------------------------------

static const char slow[] = "sleep 0.3; cat $R/answer.so >$out";

struct crowd { struct sw_jit *jit; pthread_barrier_t barrier; };
static void *join_crowd(void *arg)
{
  struct crowd *crowd = arg;
  struct sw_jit_report report;
  pthread_barrier_wait(&crowd->barrier);
  if (sw_jit_warm(crowd->jit, &request, plenty_s, &report, NULL)) return NULL;
  return report.cached ? "cached" : "compiled";
}

static void threads_compile_once(void **state)
{
  (void)state;
  make_compiler(compiler, "fake cc 1.0", slow);
  for (int memory_only = 0; memory_only < 2; memory_only++) {
    struct crowd crowd;
    pthread_t threads[6];
    int compiled = 0, cached = 0, saved;
    const long before = times("compiled");
    silence(&saved);
    assert_int_equal(sw_jit_open(memory_only ? "/proc/no/cache" : cache, compiler, &crowd.jit),
                     SWATHE_OK);
    pthread_barrier_init(&crowd.barrier, NULL, 6);
    for (int i = 0; i < 6; i++)
      assert_int_equal(pthread_create(&threads[i], NULL, join_crowd, &crowd), 0);
    for (int i = 0; i < 6; i++) {
      void *what;
      pthread_join(threads[i], &what);
      assert_non_null(what);
      compiled += !strcmp(what, "compiled");
      cached += !strcmp(what, "cached");
    }
    pthread_barrier_destroy(&crowd.barrier);
    sw_jit_close(crowd.jit);
    speak(saved);
    assert_int_equal(compiled, 1);
    assert_int_equal(cached, 5);
    assert_int_equal(times("compiled"), before + 1);
  }
}

static void processes_compile_once(void **state)
{
  pid_t children[6];
  int gate[2];
  (void)state;
  make_compiler(compiler, "fake cc 1.0", slow);
  assert_int_equal(pipe(gate), 0);
  for (int i = 0; i < 6; i++) {
    children[i] = fork();
    if (children[i] == 0) {
      struct sw_jit *jit;
      struct sw_jit_report report;
      char byte;
      close(gate[1]);
      if (read(gate[0], &byte, 1)) _exit(9);  // the end of file is the start of the race
      if (sw_jit_open(cache, compiler, &jit)) _exit(8);
      _exit(sw_jit_warm(jit, &request, plenty_s, &report, NULL) ? 7 : report.cached);
    }
  }
  close(gate[0]);
  close(gate[1]);
  int compiled = 0;
  for (int i = 0; i < 6; i++) {
    int status;
    assert_int_equal(waitpid(children[i], &status, 0), children[i]);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) <= 1);
    compiled += WEXITSTATUS(status) == 0;
  }
  assert_int_equal(compiled, 1);
  assert_int_equal(times("compiled"), 1);
  assert_int_equal(entries_with(".lock"), 0);
}

// A child that holds the lock and compiles for `seconds`.
static pid_t start_holder(const char *seconds)
{
  char body[128];
  snprintf(body, sizeof body, "if [ ! -e $R/quick ]; then echo $$ >$R/slow; sleep %s; fi; %s",
           seconds, good);
  make_compiler(compiler, "fake cc 1.0", body);
  unlink(in_root("quick"));
  unlink(in_root("slow"));
  const pid_t holder = fork();
  if (holder == 0) {
    struct sw_jit *jit;
    struct sw_jit_report report;
    setenv("TMPDIR", in_root("tmp-killed"), 1);  // who is killed cannot tidy up
    if (sw_jit_open(cache, compiler, &jit)) _exit(8);
    _exit(sw_jit_warm(jit, &request, plenty_s, &report, NULL) != 0);
  }
  for (int i = 0; i < 20000 && !exists(in_root("slow")); i++) nap(1e-3);
  write_text(in_root("quick"), "", 0600);
  return holder;
}

static void end_holder(pid_t holder)
{
  char *compiler_process = read_text(in_root("slow"), NULL);
  assert_non_null(compiler_process);
  kill(-atoi(compiler_process), SIGKILL);
  free(compiler_process);
  kill(holder, SIGKILL);
  waitpid(holder, NULL, 0);
  unlink(in_root("quick"));
  remove_tree(in_root("tmp-killed"));
}

static void killed_holder_leaves_no_lock(void **state)
{
  (void)state;
  for (int twice = 0; twice < 2; twice++) {
    bool cached = true;
    mkdir(in_root("tmp-killed"), 0700);
    remove_tree(cache);
    const pid_t holder = start_holder("60");
    kill(holder, SIGKILL);  // mid-compile
    assert_int_equal(waitpid(holder, NULL, 0), holder);
    assert_int_equal(entries_with(".lock"), 1);
    const double start = now();
    assert_int_equal(load_once(&cached), SWATHE_OK);
    assert_false(cached);
    assert_true(now() - start < 20);
    assert_int_equal(entries_with(".lock"), 0);
    end_holder(holder);
  }
}

// Gives a file or a directory the age of so many hours.
static void age(const char *path, int hours)
{
  const struct timespec then = { .tv_sec = time(NULL) - 3600 * hours };
  const struct timespec times[2] = { then, then };
  assert_int_equal(utimensat(AT_FDCWD, path, times, AT_SYMLINK_NOFOLLOW), 0);
}

// The one directory of a compilation below `parent`.
static void directory_of_run(const char *parent, char *path, size_t size)
{
  DIR *directory = opendir(parent);
  *path = 0;
  assert_non_null(directory);
  for (struct dirent *entry; (entry = readdir(directory)) != NULL;)
    if (!strncmp(entry->d_name, "swathe-cc-", 10))
      snprintf(path, size, "%s/%.64s", parent, entry->d_name);
  closedir(directory);
  assert_int_not_equal(*path, 0);
}

// A compilation by a program that starts.
static void compile_anew(void)
{
  bool cached = true;
  struct sw_jit_request other = request;
  static char source[64];
  static int turn;
  snprintf(source, sizeof source, "// compiled anew %d", turn++);
  other.source = source;
  struct sw_jit *jit = open_jit();
  assert_int_equal(load_with(jit, &other, &cached), SWATHE_OK);
  assert_false(cached);
  sw_jit_close(jit);
}

// Where a killed process compiled nobody comes back: its directory goes, but not before it is old,
// and never that of a process at work.
static void what_the_killed_left_is_removed(void **state)
{
  (void)state;
  for (int in_cache = 0; in_cache < 2; in_cache++) {
    char parent[256], left[512];
    snprintf(parent, sizeof parent, "%s", in_cache ? cache : in_root("tmp-killed"));
    remove_tree(cache);
    mkdir(in_root("tmp-killed"), 0700);
    refuse_temporary = in_cache;
    const pid_t holder = start_holder("60");
    refuse_temporary = false;
    setenv("TMPDIR", in_root("tmp-killed"), 1);
    directory_of_run(parent, left, sizeof left);

    age(left, 30 * 24);
    compile_anew();
    assert_true(exists(left));  // at work
    kill(holder, SIGKILL);
    assert_int_equal(waitpid(holder, NULL, 0), holder);
    age(left, 23);
    compile_anew();
    assert_true(exists(left));
    age(left, 25);
    assert_int_equal(load_once(NULL), SWATHE_OK);  // compiles what the killed one did not
    assert_false(exists(left));
    end_holder(holder);
  }
}

// What only has such a name is not touched.
static void what_others_left_stays(void **state)
{
  (void)state;
  const char *const names[] = { "tmp/swathe-cc-full01", "tmp/swathe-cc-owned12",
                                "tmp/swathe-cd-owned1" };
  mkdir(in_root("tmp/swathe-cc-empty1"), 0700);
  age(in_root("tmp/swathe-cc-empty1"), 48);
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    char path[512], inside[600];
    snprintf(path, sizeof path, "%s", in_root(names[i]));
    mkdir(path, 0700);
    snprintf(inside, sizeof inside, "%s/%s", path, i ? "owner" : "other");
    write_text(inside, "", 0600);
    age(path, 48);
  }
  write_text(in_root("tmp/swathe-cc-afile1"), "", 0600);
  age(in_root("tmp/swathe-cc-afile1"), 48);
  compile_anew();
  assert_false(exists(in_root("tmp/swathe-cc-empty1")));
  assert_true(exists(in_root("tmp/swathe-cc-afile1")));
  unlink(in_root("tmp/swathe-cc-afile1"));
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    assert_true(exists(in_root(names[i])));
    remove_tree(in_root(names[i]));
  }
}

static void waiting_for_another_is_bounded(void **state)
{
  struct sw_jit_report report;
  (void)state;
  mkdir(in_root("tmp-killed"), 0700);
  const pid_t holder = start_holder("60");
  struct sw_jit *jit = open_jit();
  const double start = now();
  assert_int_equal(sw_jit_warm(jit, &request, 1.0, &report, NULL), SWATHE_OK);
  assert_false(report.cached);
  assert_true(now() - start > 0.9);
  assert_true(now() - start < 20);
  sw_jit_close(jit);
  end_holder(holder);
}

static void lock_on_a_removed_file_is_none(void **state)
{
  struct sw_jit_report report;
  (void)state;
  struct sw_jit *jit = open_jit();
  steal_lock = true;
  const double start = now();
  assert_int_equal(sw_jit_warm(jit, &request, 0.5, &report, NULL), SWATHE_OK);
  assert_true(now() - start > 0.4);  // it waited for the new file's holder
  assert_true(stolen >= 0);
  close(stolen);
  sw_jit_close(jit);
}

// ---- Compilers that misbehave ------------------------------------------------------------------

static void bad_ends_are_compile_failures(void **state)
{
  static const struct { const char *body, *words; } cases[] = {
    { "echo 'forward.c:1:5: error: no such thing' >&2; exit 3", "exit status 3" },
    { "kill -SEGV $$", "signal 11" },
    { "exit 0", "left no output" },
    { ": >$out", "an empty file" },
    { "mkdir $out", "no kernel" },
  };
  (void)state;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    struct sw_jit_report report;
    char *log = NULL;
    make_compiler(compiler, "fake cc 1.0", cases[i].body);
    struct sw_jit *jit = open_jit();
    assert_int_equal(sw_jit_warm(jit, &request, plenty_s, &report, &log), SWATHE_COMPILE);
    assert_non_null(strstr(swathe_error(), cases[i].words));
    assert_non_null(strstr(swathe_error(), compiler));
    assert_non_null(log);
    if (i == 0) assert_string_equal(log, "forward.c:1:5: error: no such thing\n");
    free(log);
    sw_jit_close(jit);
    assert_int_equal(entries_with(".swk"), 0);
  }
}

static void real_errors_name_the_line(void **state)
{
  struct sw_jit *jit;
  struct sw_jit_report report;
  struct sw_jit_request wrong = request;
  char *log = NULL;
  (void)state;
  wrong.source = "int answer(void)\n{\n  return unknown;\n}\n";
  assert_int_equal(sw_jit_open(cache, "cc", &jit), SWATHE_OK);
  assert_int_equal(sw_jit_warm(jit, &wrong, plenty_s, &report, &log), SWATHE_COMPILE);
  assert_non_null(strstr(log, "forward.c:3:10: error: "));
  free(log);
  log = (char *)(uintptr_t)"not set";
  assert_int_equal(sw_jit_warm(jit, &request, plenty_s, &report, &log), SWATHE_OK);
  assert_null(log);
  sw_jit_close(jit);
}

static void log_is_bounded(void **state)
{
  struct sw_jit_report report;
  char *log = NULL;
  (void)state;
  make_compiler(compiler, "fake cc 1.0",
                "echo first >&2; head -c 1000000 /dev/zero | tr '\\0' x >&2; exit 1");
  struct sw_jit *jit = open_jit();
  assert_int_equal(sw_jit_warm(jit, &request, plenty_s, &report, &log), SWATHE_COMPILE);
  assert_non_null(log);
  assert_true(strlen(log) <= 256 * 1024);
  assert_true(strlen(log) > 200 * 1024);
  assert_int_equal(strncmp(log, "first\nxxx", 9), 0);
  assert_non_null(strstr(log, "was not kept]"));
  free(log);
  sw_jit_close(jit);
}

static void hanging_compiler_dies_with_its_children(void **state)
{
  struct sw_jit_report report;
  char *log = NULL;
  (void)state;
  make_compiler(compiler, "fake cc 1.0", "sleep 60 & echo $! >$R/child; echo waiting >&2; wait");
  struct sw_jit *jit = open_jit();
  const double start = now();
  assert_int_equal(sw_jit_warm(jit, &request, 0.5, &report, &log), SWATHE_TIMEOUT);
  assert_true(now() - start < 20);
  assert_non_null(strstr(swathe_error(), " s and was killed"));
  assert_string_equal(log, "waiting\n");
  free(log);
  sw_jit_close(jit);

  char *child = read_text(in_root("child"), NULL);
  assert_non_null(child);
  bool gone = false;
  for (int i = 0; i < 5000 && !gone; i++) {  // its new parent may take a moment to bury it
    char path[64], *status;
    snprintf(path, sizeof path, "/proc/%d/stat", atoi(child));
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    char text[256] = "";
    if (file >= 0 && read(file, text, sizeof text - 1) < 0) text[0] = 0;
    if (file >= 0) close(file);
    status = strrchr(text, ')');
    gone = !status || status[2] == 'Z' || status[2] == 'X';
    if (!gone) nap(1e-3);
  }
  assert_true(gone);
  free(child);
}

static void hanging_version_is_bounded(void **state)
{
  struct sw_jit_report report;
  (void)state;
  write_text(compiler, "#!/bin/sh\nsleep 60\n", 0755);
  struct sw_jit *jit = open_jit();
  const double start = now();
  assert_int_equal(sw_jit_warm(jit, &request, 0.3, &report, NULL), SWATHE_TIMEOUT);
  assert_true(now() - start < 15);
  sw_jit_close(jit);
}

static void compiler_is_a_guest(void **state)
{
  (void)state;
  make_compiler(compiler, "fake cc 1.0",
                "ls /proc/$$/fd >$R/fds; pwd >$R/pwd; echo \"$LC_ALL $TMPDIR\" >$R/env; "
                "cut -d' ' -f19 /proc/$$/stat >$R/nice; readlink /proc/self/fd/0 >$R/stdin; "
                "cat $R/answer.so >$out");
  const int ours = open("/dev/null", O_RDONLY);  // not close-on-exec, as careless libraries do
  const int high = dup2(ours, 77);
  bool cached;
  assert_int_equal(load_once(&cached), SWATHE_OK);
  close(ours);
  close(high);
  char *fds = read_text(in_root("fds"), NULL), *pwd = read_text(in_root("pwd"), NULL);
  char *environment = read_text(in_root("env"), NULL),
       *nice_value = read_text(in_root("nice"), NULL);
  char *input = read_text(in_root("stdin"), NULL), wanted[256];
  assert_null(strstr(fds, "77"));
  assert_string_equal(input, "/dev/null\n");
  assert_true(atoi(nice_value) >= 10);
  assert_int_equal(strncmp(pwd, in_root("tmp/swathe-"), strlen(in_root("tmp/swathe-"))), 0);
  snprintf(wanted, sizeof wanted, "C %s", pwd);
  assert_string_equal(environment, wanted);
  free(fds), free(pwd), free(environment), free(nice_value), free(input);
}

// Whether the last compilation took place below `directory` (a prefix of its path).
static bool compiled_in(const char *directory)
{
  char *pwd = read_text(in_root("pwd"), NULL);
  assert_non_null(pwd);
  const bool below = !strncmp(pwd, directory, strlen(directory));
  free(pwd);
  return below;
}

static void temporary_directory_need_not_be_usable(void **state)
{
  static const char *const directories[] = { NULL, "", "relative", "/no/such/place" };
  (void)state;
  make_compiler(compiler, "fake cc 1.0", "pwd >$R/pwd; cat $R/answer.so >$out");
  for (size_t i = 0; i < sizeof directories / sizeof *directories; i++) {
    bool cached = true;
    remove_tree(cache);
    if (directories[i]) setenv("TMPDIR", directories[i], 1);
    else unsetenv("TMPDIR");
    assert_int_equal(load_once(&cached), SWATHE_OK);
    assert_false(cached);
    assert_true(compiled_in("/tmp/swathe-"));
    assert_false(compiled_in(root));  // the cache is the last resort
  }
  remove_tree(cache);
  refuse_temporary = true;
  assert_int_equal(load_once(NULL), SWATHE_OK);
  refuse_temporary = false;
  assert_true(compiled_in(in_root("cache/swathe-")));
  assert_int_equal(entries_with("forward.c"), 0);
}

static void ignored_child_signals_do_no_harm(void **state)
{
  bool cached;
  (void)state;
  signal(SIGCHLD, SIG_IGN);
  const enum swathe_status fine = load_once(&cached);
  make_compiler(compiler, "fake cc 1.0", "exit 1");
  remove_tree(cache);
  const enum swathe_status failing = load_once(&cached);
  signal(SIGCHLD, SIG_DFL);
  assert_int_equal(fine, SWATHE_OK);
  assert_int_equal(failing, SWATHE_COMPILE);
}

// As in a daemon.  The compiler's messages come all the same.
static void closed_standard_streams_do_no_harm(void **state)
{
  int status;
  (void)state;
  make_compiler(compiler, "fake cc 1.0", "echo words; echo more >&2; exit 1");
  const pid_t child = fork();
  if (child == 0) {
    struct sw_jit *jit;
    struct sw_jit_report report;
    char *log = NULL;
    for (int file = 0; file < 3; file++) close(file);
    if (sw_jit_open(cache, compiler, &jit)) _exit(1);
    if (sw_jit_warm(jit, &request, plenty_s, &report, &log) != SWATHE_COMPILE) _exit(2);
    _exit(log && !strcmp(log, "words\nmore\n") ? 0 : 3);
  }
  assert_int_equal(waitpid(child, &status, 0), child);
  assert_true(WIFEXITED(status));
  assert_int_equal(WEXITSTATUS(status), 0);
}

// ---- Where the cache is ------------------------------------------------------------------------

static void directory_matrix(void **state)
{
  // paths are below the tests' root; `relative` ones are given as they stand
  static const struct {
    const char *named, *swathe, *xdg, *home, *expected;
  } cases[] = {
    { "/a", "/b", "/c", "/d", "/a" },
    { NULL, "/b", "/c", "/d", "/b" },
    { "", "", "/c", "/d", "/c/swathe" },
    { NULL, NULL, "relative", "/d", "/d/.cache/swathe" },
    { NULL, NULL, "", "/d", "/d/.cache/swathe" },
    { NULL, NULL, NULL, "relative", "/tmp/private" },
    { NULL, NULL, NULL, "", "/tmp/private" },
    { NULL, NULL, NULL, NULL, "/tmp/private" },
    { NULL, NULL, NULL, "slash", "/tmp/private" },
    { NULL, NULL, NULL, "/file/below", "/tmp/private" },  // a home that cannot be
    { "relative", NULL, NULL, "/d", "/here/relative" },   // made absolute when it is opened
  };
  static const char *const variables[] = { "SWATHE_CACHE_DIR", "XDG_CACHE_HOME", "HOME" };
  char *home = getenv("HOME") ? strdup(getenv("HOME")) : NULL, expected[256], named[256];
  (void)state;
  write_text(in_root("file"), "", 0600);
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const char *const values[] = { cases[i].swathe, cases[i].xdg, cases[i].home };
    struct sw_jit *jit;
    struct sw_jit_state found;
    for (int v = 0; v < 3; v++) {
      if (!values[v]) unsetenv(variables[v]);
      else if (!strcmp(values[v], "slash")) setenv(variables[v], "/", 1);
      else setenv(variables[v], *values[v] == '/' ? in_root(values[v] + 1) : values[v], 1);
    }
    const char *name = cases[i].named;
    if (!name) name = "";
    snprintf(named, sizeof named, "%s", *name == '/' ? in_root(name + 1) : name);
    if (!strcmp(cases[i].expected, "/tmp/private"))
      snprintf(expected, sizeof expected, "%s/tmp/swathe-cache-%u", root, (unsigned)geteuid());
    else
      snprintf(expected, sizeof expected, "%s", in_root(cases[i].expected + 1));
    assert_int_equal(sw_jit_open(cases[i].named ? named : NULL, compiler, &jit), SWATHE_OK);
    assert_int_equal(chdir("/"), 0);
    sw_jit_state(jit, &found);
    assert_string_equal(found.directory, expected);
    assert_false(exists(expected));
    assert_int_equal(load_with(jit, &request, NULL), SWATHE_OK);
    assert_true(exists(expected));
    sw_jit_close(jit);
    assert_int_equal(chdir(here), 0);
    remove_tree(expected);
  }
  unsetenv("SWATHE_CACHE_DIR");
  unsetenv("XDG_CACHE_HOME");
  if (home) setenv("HOME", home, 1);
  free(home);
  unlink(in_root("file"));
}

// Runs loads in a child and returns how many warnings it gave; it exits 0 if all of them worked and
// `expected` is how many were compiled.
static int warnings_of_child(void (*prepare)(void), const char *directory, int expected)
{
  const char *words = in_root("stderr");
  int status, warnings = 0;
  const pid_t child = fork();
  if (child == 0) {
    const int file = open(words, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    dup2(file, 2);
    int compiled = 0;
    if (prepare) prepare();
    for (int i = 0; i < 3; i++) {
      struct sw_jit *jit;
      struct sw_jit_report report;
      struct sw_jit_image *image;
      if (sw_jit_open(directory, compiler, &jit)) _exit(100);
      for (int twice = 0; twice < 2; twice++) {
        if (sw_jit_load(jit, &request, plenty_s, &image, &report, NULL)) _exit(101);
        compiled += !report.cached;
        sw_jit_unload(image);
      }
      sw_jit_close(jit);
    }
    _exit(compiled == expected ? 0 : 102);
  }
  assert_int_equal(waitpid(child, &status, 0), child);
  char *text = read_text(words, NULL);
  assert_true(WIFEXITED(status));
  if (WEXITSTATUS(status)) fail_msg("exit %d, stderr: %s", WEXITSTATUS(status), text);
  for (const char *at = text; (at = strstr(at, "warning: the kernel cache")) != NULL; at++)
    warnings++;
  free(text);
  unlink(words);
  return warnings;
}

static void disk_is_full(void) { fsync_error = ENOSPC; }
static void become_stranger(void)
{
  if (setegid(12345) || seteuid(12345)) _exit(110);
}

// Three programs' starts in a process that cannot write: three compilations, one warning, no error.
static void unwritable_cache_is_one_warning(void **state)
{
  (void)state;
  assert_int_equal(warnings_of_child(NULL, "/proc/no/such", 3), 1);
  assert_int_equal(warnings_of_child(NULL, "/dev/null/cache", 3), 1);
  assert_int_equal(warnings_of_child(disk_is_full, cache, 3), 1);
  assert_int_equal(entries_with(".tmp") + entries_with(".swk"), 0);
  assert_int_equal(warnings_of_child(NULL, cache, 1), 0);
}

static void strangers_directories_are_refused(void **state)
{
  static const struct { mode_t mode; int compiled, warnings; } cases[] = {
    { 0777, 3, 1 }, { 0770, 3, 1 }, { 0707, 3, 1 }, { 01777, 3, 1 }, { 0755, 1, 0 }, { 0700, 1, 0 },
  };
  (void)state;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    remove_tree(cache);
    assert_int_equal(mkdir(cache, 0700), 0);
    assert_int_equal(chmod(cache, cases[i].mode), 0);
    assert_int_equal(warnings_of_child(NULL, cache, cases[i].compiled), cases[i].warnings);
    if (cases[i].warnings) assert_int_equal(directory_entries(cache), 0);
  }
  if (geteuid() != 0) return;  // the rest needs to be somebody else
  chmod(root, 0711);
  chmod(in_root("tmp"), 01777);
  chmod(in_root("asked"), 0666);
  chmod(in_root("compiled"), 0666);
  write_text(in_root("stderr"), "", 0666);
  chmod(in_root("answer.so"), 0644);
  remove_tree(cache);
  assert_int_equal(mkdir(cache, 0755), 0);
  assert_int_equal(warnings_of_child(become_stranger, cache, 3), 1);   // ours, not theirs
  assert_int_equal(directory_entries(cache), 0);
  remove_tree(cache);
  assert_int_equal(warnings_of_child(become_stranger, cache, 3), 1);   // cannot be created
  assert_int_equal(mkdir(cache, 0700), 0);
  assert_int_equal(chown(cache, 12345, 12345), 0);
  assert_int_equal(warnings_of_child(NULL, cache, 3), 1);              // theirs, not ours
  assert_int_equal(directory_entries(cache), 0);
}

// The name in the temporary directory is known to everybody: only a directory of ours will do.
static void planted_private_directory_is_refused(void **state)
{
  char path[256], *home = getenv("HOME") ? strdup(getenv("HOME")) : NULL;
  (void)state;
  snprintf(path, sizeof path, "%s/tmp/swathe-cache-%u", root, (unsigned)geteuid());
  unsetenv("HOME");
  mkdir(in_root("elsewhere"), 0700);
  assert_int_equal(symlink(in_root("elsewhere"), path), 0);
  assert_int_equal(warnings_of_child(NULL, NULL, 3), 1);
  assert_int_equal(directory_entries(in_root("elsewhere")), 0);
  unlink(path);
  mkdir(path, 0700);
  chmod(path, 0755);
  assert_int_equal(warnings_of_child(NULL, NULL, 3), 1);
  chmod(path, 0700);
  assert_int_equal(warnings_of_child(NULL, NULL, 1), 0);
  remove_tree(path);
  if (home) setenv("HOME", home, 1);
  free(home);
}

// ---- How much it holds -------------------------------------------------------------------------

enum { FILE_KIB = 400 };

// A file of that age in the first bucket of the cache.
static const char *plant(const char *name, int hours)
{
  char path[256];
  snprintf(path, sizeof path, "cache/00/%s", name);
  const char *planted = in_root(path);
  write_text(planted, "", 0600);
  assert_int_equal(truncate(planted, FILE_KIB * 1024), 0);
  age(planted, hours);
  return planted;
}

static bool planted(const char *name)
{
  char path[256];
  snprintf(path, sizeof path, "cache/00/%s", name);
  return exists(in_root(path));
}

static void start_cache(const char *mib)
{
  remove_tree(cache);
  if (mib) setenv("SWATHE_CACHE_MIB", mib, 1);
  else unsetenv("SWATHE_CACHE_MIB");
  compile_anew();
  mkdir(in_root("cache/00"), 0700);
  assert_int_equal(entries_with(".swk"), 1);
  assert_true(exists(in_root("cache/tidied")));
  age(in_root("cache/tidied"), 25);
}

// Those not used for longest go, whatever they are, but none of the last day; not before the cache
// exceeds its bound, and once a day.
static void entries_beyond_the_bound_go(void **state)
{
  static const struct { const char *mib; int hours[4]; const char *stay; } cases[] = {
    { "1", { 90, 30, 60, 2 }, "nyny" },  // four of 400 KiB: two too many
    { "1", { 30, 60, 2, 90 }, "ynyn" },
    { "1", { 10, 20, 23, 26 }, "yyyn" },
    { "2", { 90, 30, 60, 2 }, "yyyy" },
    { "0", { 90, 30, 60, 2 }, "yyyy" },
    { NULL, { 90, 30, 60, 2 }, "yyyy" },
    { "few", { 90, 30, 60, 2 }, "yyyy" },
  };
  static const char *const names[] = { "a.swk", "b.swk", "c.bad", "d.swk" };
  (void)state;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    int saved;
    silence(&saved);
    start_cache(cases[i].mib);
    for (int f = 0; f < 4; f++) plant(names[f], cases[i].hours[f]);
    assert_int_equal(load_once(NULL), SWATHE_OK);
    for (int f = 0; f < 4; f++)
      if (planted(names[f]) != (cases[i].stay[f] == 'y'))
        fail_msg("case %zu: %s %s", i, names[f], planted(names[f]) ? "stayed" : "went");
    // the next one today looks at nothing
    plant("e.swk", 99);
    compile_anew();
    assert_true(planted("e.swk"));
    speak(saved);
  }
  unsetenv("SWATHE_CACHE_MIB");
}

// An entry that is loaded counts as used now; who only loads removes nothing.
static void use_keeps_an_entry(void **state)
{
  char path[256];
  struct sw_jit_report report;
  (void)state;
  start_cache("1");
  entry_path("swk", path, sizeof path);  // of `request`
  age(in_root("cache/tidied"), 25);
  struct sw_jit *jit = open_jit();
  assert_int_equal(sw_jit_warm(jit, &request, plenty_s, &report, NULL), SWATHE_OK);
  sw_jit_remember(jit, SW_JIT_CC, "kept", report.key);
  sw_jit_remember(jit, SW_JIT_CC, "forgotten", "00aa");
  sw_jit_close(jit);
  assert_int_equal(directory_entries(in_root("cache/origins")), 2);
  DIR *origins = opendir(in_root("cache/origins"));
  for (struct dirent *entry; (entry = readdir(origins)) != NULL;) {
    char name[300];
    snprintf(name, sizeof name, "%s/cache/origins/%.200s", root, entry->d_name);
    if (entry->d_name[0] != '.') age(name, 30);
  }
  closedir(origins);
  age(path, 99);
  plant("a.swk", 50), plant("b.swk", 60), plant("c.swk", 70);
  bool cached = false;
  assert_int_equal(load_once(&cached), SWATHE_OK);
  assert_true(cached);
  assert_true(planted("c.swk"));
  compile_anew();
  assert_false(planted("c.swk"));
  assert_true(planted("a.swk"));
  assert_true(exists(path));
  assert_int_equal(directory_entries(in_root("cache/origins")), 1);
  unsetenv("SWATHE_CACHE_MIB");
}

// Files of writers and holders of locks that were killed.
static void leftovers_in_the_cache_go(void **state)
{
  char lock[128], held[128];
  (void)state;
  start_cache(NULL);
  snprintf(lock, sizeof lock, "%062d.lock", 1);
  snprintf(held, sizeof held, "%062d.lock", 2);
  plant("x.swk.0123456789abcdef.tmp", 25);
  plant("y.swk.0123456789abcdef.tmp", 23);
  plant(lock, 25);
  const int file = open(plant(held, 25), O_RDWR | O_CLOEXEC);
  assert_int_equal(flock(file, LOCK_EX | LOCK_NB), 0);
  compile_anew();
  assert_false(planted("x.swk.0123456789abcdef.tmp"));
  assert_true(planted("y.swk.0123456789abcdef.tmp"));
  assert_false(planted(lock));
  assert_true(planted(held));
  close(file);
}

static void state_tells_the_size(void **state)
{
  struct sw_jit_state found;
  (void)state;
  start_cache("3");
  plant("a.swk", 1), plant("b.bad", 1);
  struct sw_jit *jit = open_jit();
  sw_jit_state(jit, &found);
  assert_int_equal(found.kernels, 2);
  assert_true(found.bytes > FILE_KIB * 1024);
  assert_true(found.bytes < 2 * FILE_KIB * 1024);
  assert_int_equal(found.most_bytes, 3 << 20);
  sw_jit_close(jit);
  unsetenv("SWATHE_CACHE_MIB");
}

// ---- Jobs --------------------------------------------------------------------------------------

static void jobs_run_in_the_background(void **state)
{
  struct sw_jit_job *jobs[4];
  struct sw_jit_request requests[4];
  char sources[4][64];
  bool cached = false;
  (void)state;
  make_compiler(compiler, "fake cc 1.0", slow);
  for (int memory_only = 0; memory_only < 2; memory_only++) {
    struct sw_jit *jit;
    int saved;
    silence(&saved);
    assert_int_equal(sw_jit_open(memory_only ? "/proc/no/cache" : cache, compiler, &jit),
                     SWATHE_OK);
    const double start = now();
    for (int i = 0; i < 4; i++) {
      requests[i] = request;
      snprintf(sources[i], sizeof sources[i], "// %d", i);
      requests[i].source = sources[i];
      assert_int_equal(sw_jit_job_start(jit, &requests[i], &jobs[i]), SWATHE_OK);
    }
    bool done = true;
    assert_int_equal(sw_jit_job_poll(jobs[3], &done), SWATHE_OK);
    if (now() - start < 0.25) assert_false(done);
    for (int i = 0; i < 4; i++) {
      char *log = NULL;
      for (done = false; !done; nap(1e-3))
        assert_int_equal(sw_jit_job_poll(jobs[i], &done), SWATHE_OK);
      assert_int_equal(sw_jit_job_finish(jobs[i], 0, &log), SWATHE_OK);
      assert_null(log);
    }
    for (int i = 0; i < 4; i++) {
      assert_int_equal(load_with(jit, &requests[i], &cached), SWATHE_OK);
      assert_true(cached);
    }
    assert_int_equal(sw_jit_job_start(jit, &requests[0], &jobs[0]), SWATHE_OK);  // nothing to do
    assert_int_equal(sw_jit_job_poll(jobs[0], &done), SWATHE_OK);
    assert_true(done);
    assert_int_equal(sw_jit_job_finish(jobs[0], 0, NULL), SWATHE_OK);
    sw_jit_close(jit);
    speak(saved);
  }
  assert_int_equal(times("compiled"), 8);
}

static void jobs_end_when_told(void **state)
{
  struct sw_jit_job *job;
  char *log = NULL;
  (void)state;
  make_compiler(compiler, "fake cc 1.0", "echo hello; sleep 60");
  struct sw_jit *jit = open_jit();
  const double start = now();
  assert_int_equal(sw_jit_job_start(jit, &request, &job), SWATHE_OK);
  assert_int_equal(directory_entries(in_root("tmp")), 1);
  sw_jit_job_kill(job);
  assert_int_equal(directory_entries(in_root("tmp")), 0);
  assert_int_equal(sw_jit_job_start(jit, &request, &job), SWATHE_OK);
  assert_int_equal(sw_jit_job_finish(job, 0.3, &log), SWATHE_TIMEOUT);
  assert_string_equal(log, "hello\n");
  free(log);
  assert_true(now() - start < 20);
  sw_jit_close(jit);

  make_compiler(compiler, "fake cc 1.0", "echo wrong >&2; exit 1");
  jit = open_jit();
  assert_int_equal(sw_jit_job_start(jit, &request, &job), SWATHE_OK);
  assert_int_equal(sw_jit_job_finish(job, plenty_s, &log), SWATHE_COMPILE);
  assert_string_equal(log, "wrong\n");
  free(log);
  sw_jit_close(jit);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, begin, end)

int main(void)
{
  const struct CMUnitTest tests[] = {
    TEST(cold_compiles_and_warm_starts_nothing),
    TEST(origins_are_remembered),
    TEST(real_compiler_and_images_outlive_the_jit),
    TEST(key_holds_everything),
    TEST(keys_follow_what_is_compiled),
    TEST(compiler_is_chosen_in_order),
    TEST(path_of_a_compiler_may_hold_spaces),
    TEST(every_damage_is_a_miss),
    TEST(anothers_entry_is_a_miss),
    TEST(entry_that_does_not_load_is_compiled_once_more),
    TEST(loads_without_memory_files),
    TEST(no_compiler_but_a_warm_cache),
    TEST(damaged_note_is_asked_again),
    TEST(processes_compile_once),
    TEST(killed_holder_leaves_no_lock),
    TEST(what_the_killed_left_is_removed),
    TEST(what_others_left_stays),
    TEST(waiting_for_another_is_bounded),
    TEST(lock_on_a_removed_file_is_none),
    TEST(bad_ends_are_compile_failures),
    TEST(real_errors_name_the_line),
    TEST(log_is_bounded),
    TEST(hanging_compiler_dies_with_its_children),
    TEST(hanging_version_is_bounded),
    TEST(compiler_is_a_guest),
    TEST(temporary_directory_need_not_be_usable),
    TEST(ignored_child_signals_do_no_harm),
    TEST(closed_standard_streams_do_no_harm),
    TEST(directory_matrix),
    TEST(unwritable_cache_is_one_warning),
    TEST(strangers_directories_are_refused),
    TEST(planted_private_directory_is_refused),
    TEST(entries_beyond_the_bound_go),
    TEST(use_keeps_an_entry),
    TEST(leftovers_in_the_cache_go),
    TEST(state_tells_the_size),
    TEST(jobs_run_in_the_background),
    TEST(jobs_end_when_told),
    TEST(threads_compile_once),  // last: the others fork, and want no threads about
  };
  return cmocka_run_group_tests(tests, begin_all, end_all);
}
