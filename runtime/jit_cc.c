// jit_cc.c: source text -> shared object, by a process of the system's C compiler.
//
// A compiler is a guest: it is started without forking this (possibly huge) process, gets none of
// its files, works at low priority in a private directory, and its whole process group dies at the
// deadline.
#include "jit_cc.h"

#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum {
  WORDS = 32,               // of a compiler command
  LOG_BYTES = 256 * 1024,   // of the compiler's output that are kept
  PRIORITY = 10,            // nice value of a compiler: training comes first
  WAKE_MS = 50,             // longest sleep while a compiler runs
  LEFT_S = 24 * 3600,       // a directory that changed within this time is left alone
};
static const size_t binary_bytes = (size_t)256 << 20;  // more is no kernel of ours

struct sw_jit_cc {
  char *text;               // what `words` point into
  char *words[WORDS];       // words[0] is replaced by `path` when it is run
  int word_count;
  char *arguments;
  char path[PATH_MAX];
  char stamp[2 * PATH_MAX];
};

struct sw_jit_cc_run {
  pid_t process;
  int output;               // the reading end of its stdout and stderr; -1 after the end
  bool ended;
  int wait_status;          // 0 when somebody else reaped our child: its output must speak for it
  double started, seconds;
  char *log;                // [LOG_BYTES + 1]
  size_t log_bytes;
  bool log_cut;
  char directory[PATH_MAX]; // private, ""  if none
  int owner;                // its file `owner`, locked; -1: none
  char name[64];
  char command[256];        // for words
};

double sw_jit_cc_now(void)
{
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

// ---- Finding the compiler ----------------------------------------------------------------------

static bool is_program(const char *path)
{
  struct stat file;
  return stat(path, &file) == 0 && S_ISREG(file.st_mode) && access(path, X_OK) == 0;
}

// The absolute path of a program: as it stands when it holds a slash, else through PATH, of which
// only absolute directories count.  A symbolic link is not followed: a program may go by its name,
// as ccache's do.  `path` has PATH_MAX bytes.
static bool find_program(const char *word, char *path)
{
  if (strchr(word, '/')) {
    char here[PATH_MAX] = "";
    if (*word != '/' && !getcwd(here, sizeof here)) return false;
    return snprintf(path, PATH_MAX, "%s%s%s", here, *here ? "/" : "", word) < PATH_MAX &&
           is_program(path);
  }

  const char *from = getenv("PATH");
  if (!from || !*from) from = "/usr/local/bin:/usr/bin:/bin";
  while (*from) {
    const int length = (int)strcspn(from, ":");
    if (*from == '/') {
      const int written = snprintf(path, PATH_MAX, "%.*s/%s", length, from, word);
      if (written < PATH_MAX && is_program(path)) return true;
    }
    from += length;
    if (*from) from++;
  }
  return false;
}

// "gcc", or the "gcc" of "ccache gcc": each program's replacement must be seen.
static void write_stamp(struct sw_jit_cc *cc)
{
  size_t used = 0;
  for (int i = 0; i < cc->word_count; i++) {
    char path[PATH_MAX];
    struct stat file;
    if (cc->words[i][0] == '-' || !find_program(cc->words[i], path) || stat(path, &file)) continue;
    const int written = snprintf(cc->stamp + used, sizeof cc->stamp - used,
                                 "%s size=%lld mtime=%lld.%09ld inode=%llu\n", path,
                                 (long long)file.st_size, (long long)file.st_mtim.tv_sec,
                                 file.st_mtim.tv_nsec, (unsigned long long)file.st_ino);
    if ((size_t)written >= sizeof cc->stamp - used) return;
    used += (size_t)written;
  }
}

// The program a command names is as many of its leading words as are one: a path may hold spaces.
// Cuts the command behind it and returns the rest; NULL if there is none.
static char *cut_program(char *command, char *path)
{
  for (char *end = command + strlen(command);;) {
    const char cut = *end;
    *end = 0;
    if (find_program(command, path)) return cut ? end + 1 : end;
    char *space = strrchr(command, ' ');
    if (!space) return NULL;
    *end = cut;
    end = space;
  }
}

enum swathe_status sw_jit_cc_find(const char *command, struct sw_jit_cc **cc_out)
{
  enum swathe_status status;
  struct sw_jit_cc *cc = calloc(1, sizeof *cc);
  if (!cc) return sw_fail(SWATHE_NO_MEMORY, "no memory for a compiler's command");
  command += strspn(command, " ");
  cc->text = strdup(command);
  char *rest = cc->text ? cut_program(cc->text, cc->path) : NULL;
  cc->arguments = strdup(rest ? rest + strspn(rest, " ") : "");
  if (!cc->text || !cc->arguments) {
    status = sw_fail(SWATHE_NO_MEMORY, "no memory for a compiler's command");
    goto free_cc;
  }
  if (!rest) {
    status = sw_fail(SWATHE_COMPILE,
                     "no C compiler: '%s' is no program (install one, or name it in SWATHE_CC)",
                     command);
    goto free_cc;
  }
  cc->words[cc->word_count++] = cc->text;
  for (char *word; (word = strtok_r(rest, " ", &rest)) != NULL;) {
    if (cc->word_count == WORDS - 1) {
      status =
          sw_fail(SWATHE_COMPILE, "the compiler '%s' has more than %d words", command, WORDS - 1);
      goto free_cc;
    }
    cc->words[cc->word_count++] = word;
  }
  write_stamp(cc);
  *cc_out = cc;
  return SWATHE_OK;
free_cc:
  sw_jit_cc_free(cc);
  return status;
}

void sw_jit_cc_free(struct sw_jit_cc *cc)
{
  if (!cc) return;
  free(cc->text);
  free(cc->arguments);
  free(cc);
}

const char *sw_jit_cc_path(const struct sw_jit_cc *cc) { return cc->path; }
const char *sw_jit_cc_arguments(const struct sw_jit_cc *cc) { return cc->arguments; }
const char *sw_jit_cc_stamp(const struct sw_jit_cc *cc) { return cc->stamp; }

// ---- The private directory ---------------------------------------------------------------------
//
// Its file `owner` is locked as long as the process lives that made it, so that one which was
// killed and one at work can be told apart.  A lock may not reach other hosts: what is removed must
// be old, too.

static const char pattern[] = "swathe-cc-XXXXXX";

static bool make_directory(const char *parent, char *directory)
{
  if (!parent || *parent != '/') return false;
  if (snprintf(directory, PATH_MAX, "%s/%s", parent, pattern) >= PATH_MAX) return false;
  return mkdtemp(directory) != NULL;
}

// Without a lock the directory does as well; it is only never removed by another process.
static void take_possession(struct sw_jit_cc_run *run)
{
  char path[PATH_MAX + 8];
  snprintf(path, sizeof path, "%s/owner", run->directory);
  run->owner = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (run->owner >= 0) flock(run->owner, LOCK_EX | LOCK_NB);
}

static enum swathe_status enter_directory(struct sw_jit_cc_run *run, const char *last_resort)
{
  bool entered = make_directory(getenv("TMPDIR"), run->directory) ||
                 make_directory("/tmp", run->directory);
  const int error = errno;
  if (!entered) entered = make_directory(last_resort, run->directory);
  if (entered) {
    take_possession(run);
    return SWATHE_OK;
  }
  run->directory[0] = 0;
  return sw_fail(SWATHE_COMPILE, "no temporary directory to compile in: /tmp: %s", strerror(error));
}

static int remove_one(const char *path, const struct stat *file, int kind, struct FTW *place)
{
  (void)file, (void)kind, (void)place;
  remove(path);
  return 0;
}

static void remove_tree(const char *directory)
{
  nftw(directory, remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

static void leave_directory(struct sw_jit_cc_run *run)
{
  if (run->directory[0]) remove_tree(run->directory);
  if (run->owner >= 0) close(run->owner);
}

// Removes a private directory whose owner is gone.
static void remove_left(const char *directory)
{
  char path[PATH_MAX + 8];
  struct stat file;
  if (lstat(directory, &file) || !S_ISDIR(file.st_mode) || file.st_uid != geteuid()) return;
  if (time(NULL) - file.st_mtime < LEFT_S) return;
  snprintf(path, sizeof path, "%s/owner", directory);
  const int owner = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  if (owner < 0) {
    rmdir(directory);  // killed before it had one: there is nothing else in it, or it is not ours
    return;
  }
  if (flock(owner, LOCK_EX | LOCK_NB) == 0) remove_tree(directory);
  close(owner);
}

static void tidy_below(const char *parent)
{
  const size_t fixed = strcspn(pattern, "X");
  DIR *directory = opendir(parent);
  if (!directory) return;
  for (struct dirent *entry; (entry = readdir(directory)) != NULL;) {
    char path[PATH_MAX];
    const char *name = entry->d_name;
    if (strncmp(name, pattern, fixed) || strlen(name) != strlen(pattern)) continue;
    if (snprintf(path, sizeof path, "%s/%s", parent, name) < (int)sizeof path) remove_left(path);
  }
  closedir(directory);
}

void sw_jit_cc_tidy(const char *last_resort)
{
  const char *parents[] = { getenv("TMPDIR"), "/tmp", last_resort };
  for (size_t i = 0; i < sizeof parents / sizeof *parents; i++)
    if (parents[i] && *parents[i] == '/') tidy_below(parents[i]);
}

static enum swathe_status write_source(const struct sw_jit_cc_run *run, const char *source)
{
  char path[PATH_MAX + 80];
  snprintf(path, sizeof path, "%s/%s.c", run->directory, run->name);
  FILE *file = fopen(path, "wxe");
  if (!file) return sw_fail(SWATHE_COMPILE, "cannot write %s: %s", path, strerror(errno));
  fputs(source, file);
  const bool failed = ferror(file) != 0;
  if (fclose(file) || failed)
    return sw_fail(SWATHE_COMPILE, "cannot write %s: %s", path, strerror(errno));
  return SWATHE_OK;
}

// ---- One process -------------------------------------------------------------------------------

extern char **environ;

// This process's environment, but messages in plain C and temporary files in the private directory.
// NULL without memory; `temporary` holds the text of TMPDIR and must live as long.
static char **make_environment(const char *directory, char *temporary, size_t size)
{
  size_t count = 0, kept = 0;
  while (environ && environ[count]) count++;
  char **environment = calloc(count + 3, sizeof *environment);
  if (!environment) return NULL;
  for (size_t i = 0; i < count; i++) {
    const char *entry = environ[i];
    if (!strncmp(entry, "LC_ALL=", 7) || !strncmp(entry, "LANGUAGE=", 9)) continue;
    if (*directory && !strncmp(entry, "TMPDIR=", 7)) continue;
    environment[kept++] = environ[i];
  }
  environment[kept++] = (char *)(uintptr_t) "LC_ALL=C";
  if (*directory) {
    snprintf(temporary, size, "TMPDIR=%s", directory);
    environment[kept] = temporary;
  }
  return environment;
}

// What the child does between its birth and exec.
static int describe_child(posix_spawn_file_actions_t *actions, posix_spawnattr_t *attributes,
                          const char *directory, int output, bool with_stderr)
{
  sigset_t none, all;
  sigemptyset(&none);
  sigfillset(&all);
  posix_spawnattr_setflags(attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK |
                                           POSIX_SPAWN_SETSIGDEF);
  posix_spawnattr_setpgroup(attributes, 0);
  posix_spawnattr_setsigmask(attributes, &none);
  posix_spawnattr_setsigdefault(attributes, &all);

  int error = posix_spawn_file_actions_addopen(actions, 0, "/dev/null", O_RDONLY, 0);
  if (!error) error = posix_spawn_file_actions_adddup2(actions, output, 1);
  if (!error && with_stderr) error = posix_spawn_file_actions_adddup2(actions, output, 2);
  if (!error && !with_stderr)
    error = posix_spawn_file_actions_addopen(actions, 2, "/dev/null", O_WRONLY, 0);
  if (!error && *directory) error = posix_spawn_file_actions_addchdir_np(actions, directory);
#if __GLIBC_PREREQ(2, 34)
  // files that the host program opened without close-on-exec: sockets, GPUs
  if (!error) error = posix_spawn_file_actions_addclosefrom_np(actions, 3);
#endif
  return error;
}

// Starts `argv` as the run's process, its output piped to the run.
static enum swathe_status spawn(struct sw_jit_cc_run *run, const char *path, char *const *argv,
                                bool with_stderr)
{
  char temporary[PATH_MAX + 8];
  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  int ends[2];
  char **environment = make_environment(run->directory, temporary, sizeof temporary);
  run->log = malloc(LOG_BYTES + 1);
  if (!environment || !run->log) {
    free(environment);
    return sw_fail(SWATHE_NO_MEMORY, "no memory to start a compiler");
  }
  if (pipe2(ends, O_CLOEXEC)) {
    free(environment);
    return sw_fail(SWATHE_COMPILE, "cannot start %s: no pipe: %s", path, strerror(errno));
  }
  fcntl(ends[0], F_SETFL, O_NONBLOCK);

  posix_spawn_file_actions_init(&actions);
  posix_spawnattr_init(&attributes);
  run->started = sw_jit_cc_now();
  int error = describe_child(&actions, &attributes, run->directory, ends[1], with_stderr);
  if (!error) error = posix_spawn(&run->process, path, &actions, &attributes, argv, environment);
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  free(environment);
  close(ends[1]);
  if (error) {
    run->process = 0;
    close(ends[0]);
    return sw_fail(SWATHE_COMPILE, "cannot start the compiler %s: %s", path, strerror(error));
  }
  setpriority(PRIO_PGRP, (id_t)run->process, PRIORITY);  // a wish; its own children inherit it
  run->output = ends[0];
  return SWATHE_OK;
}

// Takes what the process has written so far; what the log cannot hold is dropped.
static void drain(struct sw_jit_cc_run *run)
{
  char dropped[4096];
  while (run->output >= 0) {
    const size_t room = LOG_BYTES - run->log_bytes;
    const ssize_t got = room ? read(run->output, run->log + run->log_bytes, room)
                             : read(run->output, dropped, sizeof dropped);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) {
      close(run->output);
      run->output = -1;
    } else if (room) {
      run->log_bytes += (size_t)got;
    } else {
      run->log_cut = true;
    }
  }
}

// `flags` are those of waitpid.
static void reap(struct sw_jit_cc_run *run, int flags)
{
  pid_t reaped;
  do reaped = waitpid(run->process, &run->wait_status, flags);
  while (reaped < 0 && errno == EINTR);
  if (reaped == 0) return;
  run->ended = true;
  run->seconds = sw_jit_cc_now() - run->started;
}

bool sw_jit_cc_done(struct sw_jit_cc_run *run)
{
  if (run->ended) return true;
  drain(run);
  reap(run, WNOHANG);
  if (run->ended) drain(run);
  return run->ended;
}

static _Thread_local const volatile int *heeded;

const volatile int *sw_jit_cc_heed(const volatile int *stop)
{
  const volatile int *before = heeded;
  heeded = stop;
  return before;
}

bool sw_jit_cc_stopped(void) { return heeded && *heeded; }

// The end of the output wakes us at once; a grandchild that keeps it open (a compiler cache's
// server) only costs WAKE_MS.
static void wait_until(struct sw_jit_cc_run *run, double end)
{
  while (!sw_jit_cc_done(run) && !sw_jit_cc_stopped()) {
    const double left = end - sw_jit_cc_now();
    if (!(left > 0)) return;
    struct pollfd output = { .fd = run->output, .events = POLLIN };
    const int most = left * 1e3 < WAKE_MS ? (int)(left * 1e3) + 1 : WAKE_MS;
    if (run->output >= 0) poll(&output, 1, most);
    else poll(NULL, 0, 1);
  }
}

static void end_run(struct sw_jit_cc_run *run)
{
  if (run->process && !run->ended) {
    kill(-run->process, SIGKILL);
    reap(run, 0);
  }
  if (run->output >= 0) close(run->output);
  leave_directory(run);
  free(run->log);
  free(run);
}

static struct sw_jit_cc_run *new_run(const struct sw_jit_cc *cc, const char *last_word)
{
  struct sw_jit_cc_run *run = calloc(1, sizeof *run);
  if (!run) return NULL;
  run->output = run->owner = -1;
  snprintf(run->command, sizeof run->command, "%.120s%s%.60s %.60s", cc->path,
           *cc->arguments ? " " : "", cc->arguments, last_word);
  return run;
}

// SWATHE_OK when the process came to a good end.
static enum swathe_status judge(const struct sw_jit_cc_run *run)
{
  if (!run->ended && sw_jit_cc_stopped())
    return sw_fail(SWATHE_INTERRUPTED, "stopped while '%s' ran", run->command);
  if (!run->ended)
    return sw_fail(SWATHE_TIMEOUT, "'%s' did not end within %.1f s and was killed", run->command,
                   sw_jit_cc_now() - run->started);
  if (WIFSIGNALED(run->wait_status))
    return sw_fail(SWATHE_COMPILE, "'%s' was killed by signal %d (%s)", run->command,
                   WTERMSIG(run->wait_status), strsignal(WTERMSIG(run->wait_status)));
  if (WEXITSTATUS(run->wait_status))
    return sw_fail(SWATHE_COMPILE, "'%s' failed with exit status %d", run->command,
                   WEXITSTATUS(run->wait_status));
  return SWATHE_OK;
}

enum swathe_status sw_jit_cc_ask(const struct sw_jit_cc *cc, const char *option, double deadline_s,
                                 char *line, size_t size)
{
  char *argv[WORDS + 2] = { NULL };
  struct sw_jit_cc_run *run = new_run(cc, option);
  if (!run) return sw_fail(SWATHE_NO_MEMORY, "no memory to start a compiler");
  memcpy(argv, cc->words, sizeof cc->words);
  argv[0] = (char *)(uintptr_t)cc->path;
  argv[cc->word_count] = (char *)(uintptr_t)option;

  enum swathe_status status = spawn(run, cc->path, argv, false);
  if (!status) {
    wait_until(run, run->started + deadline_s);
    status = judge(run);
  }
  if (!status) {
    run->log[run->log_bytes] = 0;
    snprintf(line, size, "%.*s", (int)strcspn(run->log, "\r\n"), run->log);
    if (!*line) status = sw_fail(SWATHE_COMPILE, "'%s' printed nothing", run->command);
  }
  end_run(run);
  return status;
}

// ---- One compilation ---------------------------------------------------------------------------

// words... flags... -o NAME.so NAME.c -l...
// Libraries stand last, where every linker looks at them.  `text` is cut.  NULL without memory.
static char **make_arguments(const struct sw_jit_cc *cc, char *text, char *object, char *source)
{
  const size_t most = (size_t)cc->word_count + strlen(text) / 2 + 6;
  char **argv = calloc(most, sizeof *argv);
  char **libraries = calloc(most, sizeof *libraries);
  if (!argv || !libraries) goto no_memory;
  size_t count = 0, library_count = 0;
  argv[count++] = (char *)(uintptr_t)cc->path;
  for (int i = 1; i < cc->word_count; i++) argv[count++] = cc->words[i];
  char *rest = text;
  for (char *word; (word = strtok_r(rest, " ", &rest)) != NULL;) {
    if (!strncmp(word, "-l", 2)) libraries[library_count++] = word;
    else argv[count++] = word;
  }
  argv[count++] = (char *)(uintptr_t) "-o";
  argv[count++] = object;
  argv[count++] = source;
  memcpy(argv + count, libraries, library_count * sizeof *argv);
  free(libraries);
  return argv;
no_memory:
  free(argv);
  free(libraries);
  return NULL;
}

enum swathe_status sw_jit_cc_start(const struct sw_jit_cc *cc, const char *name, const char *source,
                                   const char *flags, const char *last_resort,
                                   struct sw_jit_cc_run **run_out)
{
  char source_name[80], object_name[80];
  assert(*name && !strchr(name, '/') && strlen(name) < sizeof((struct sw_jit_cc_run *)0)->name);
  snprintf(source_name, sizeof source_name, "%s.c", name);
  snprintf(object_name, sizeof object_name, "%s.so", name);

  struct sw_jit_cc_run *run = new_run(cc, source_name);
  char *text = strdup(flags);
  char **argv = text ? make_arguments(cc, text, object_name, source_name) : NULL;
  enum swathe_status status;
  if (!run || !argv) {
    status = sw_fail(SWATHE_NO_MEMORY, "no memory to start a compiler");
    goto free_text;
  }
  strcpy(run->name, name);
  status = enter_directory(run, last_resort);
  if (!status) status = write_source(run, source);
  if (!status) status = spawn(run, cc->path, argv, true);
  if (!status) {
    *run_out = run;
    run = NULL;
  }
free_text:
  if (run) end_run(run);
  free(argv);
  free(text);
  return status;
}

// The shared object the compiler left.
static enum swathe_status read_object(const struct sw_jit_cc_run *run, unsigned char **bytes,
                                      size_t *size)
{
  char path[PATH_MAX + 80];
  struct stat file;
  snprintf(path, sizeof path, "%s/%s.so", run->directory, run->name);
  const int object = open(path, O_RDONLY | O_CLOEXEC);
  if (object < 0 || fstat(object, &file) || !S_ISREG(file.st_mode) || file.st_size <= 0 ||
      (size_t)file.st_size > binary_bytes) {
    if (object >= 0) close(object);
    return sw_fail(SWATHE_COMPILE, "'%s' left %s", run->command,
                   object < 0 ? "no output" : file.st_size > 0 ? "no kernel" : "an empty file");
  }
  const size_t wanted = (size_t)file.st_size;
  unsigned char *content = malloc(wanted);
  size_t got = 0;
  while (content && got < wanted) {
    const ssize_t part = read(object, content + got, wanted - got);
    if (part < 0 && errno == EINTR) continue;
    if (part <= 0) break;
    got += (size_t)part;
  }
  close(object);
  if (!content)
    return sw_fail(SWATHE_NO_MEMORY, "no memory for a compiled kernel of %zu bytes", wanted);
  if (got < wanted) {
    free(content);
    return sw_fail(SWATHE_COMPILE, "cannot read what '%s' left: %s", run->command, strerror(errno));
  }
  *bytes = content;
  *size = wanted;
  return SWATHE_OK;
}

static char *take_log(struct sw_jit_cc_run *run)
{
  static const char cut[] = "\n[the rest of the compiler's output was not kept]\n";
  const size_t most = LOG_BYTES - sizeof cut;
  if (run->log_cut && run->log_bytes > most) run->log_bytes = most;
  run->log[run->log_bytes] = 0;
  if (run->log_cut) memcpy(run->log + run->log_bytes, cut, sizeof cut);
  char *log = run->log;
  run->log = NULL;
  return log;
}

enum swathe_status sw_jit_cc_finish(struct sw_jit_cc_run *run, double deadline_s,
                                    unsigned char **bytes, size_t *size, double *seconds,
                                    char **log)
{
  wait_until(run, sw_jit_cc_now() + deadline_s);
  enum swathe_status status = judge(run);
  if (!status) status = read_object(run, bytes, size);
  *seconds = run->seconds;
  if (log) *log = status ? take_log(run) : NULL;
  end_run(run);
  return status;
}

void sw_jit_cc_kill(struct sw_jit_cc_run *run)
{
  end_run(run);
}
