// jit_nvrtc.c: CUDA C text -> CUBIN and PTX, by NVRTC in a thread of this process.
//
// No header of CUDA: what is called is declared here, and looked up when the first kernel is
// compiled.  A child process would be a better guest, as the C compiler is, but a library has no
// program of its own to start, and a fork of a process with threads may not call into a library.
// So a run that takes too long is told to stop at NVRTC's next step (where this NVRTC asks) and
// left to itself; closing waits for it, so that nothing is compiling while the process goes down.
#include "jit_nvrtc.h"

#include "jit_cc.h"
#include "jit_cuda.h"

#include <assert.h>
#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

enum {
  PRIORITY = 10,                // nice value of the thread: training comes first
  STACK_BYTES = 16 << 20,       // whatever the process gives its threads
  WORDS = 64,                   // options of one compilation
};

// ---- The library -------------------------------------------------------------------------------

// As in nvrtc.h: 0 is success, a program is a pointer to what only NVRTC knows.
typedef void *program;
typedef int callback(void *arg, void *unused);
#define NVRTC_FUNCTIONS(X)                                                                        \
  X(nvrtcVersion, int, (int *major, int *minor), true)                                            \
  X(nvrtcGetErrorString, const char *, (int result), true)                                        \
  X(nvrtcGetNumSupportedArchs, int, (int *count), true)                                           \
  X(nvrtcGetSupportedArchs, int, (int *archs), true)                                              \
  X(nvrtcCreateProgram, int,                                                                      \
    (program *made, const char *source, const char *name, int headers, const char *const *texts,  \
     const char *const *names), true)                                                             \
  X(nvrtcCompileProgram, int, (program made, int count, const char *const *options), true)        \
  X(nvrtcDestroyProgram, int, (program *made), true)                                              \
  X(nvrtcGetProgramLogSize, int, (program made, size_t *size), true)                              \
  X(nvrtcGetProgramLog, int, (program made, char *log), true)                                     \
  X(nvrtcGetCUBINSize, int, (program made, size_t *size), true)                                   \
  X(nvrtcGetCUBIN, int, (program made, char *bytes), true)                                        \
  X(nvrtcGetPTXSize, int, (program made, size_t *size), true)                                     \
  X(nvrtcGetPTX, int, (program made, char *text), true)                                           \
  X(nvrtcSetFlowCallback, int, (program made, callback *ask, void *arg), false)

struct sw_jit_nvrtc {
#define DECLARE(name, type, arguments, needed) type(*name) arguments;
  NVRTC_FUNCTIONS(DECLARE)
#undef DECLARE
  char path[PATH_MAX], version[32], isas[512];
  pthread_mutex_t mutex;
  struct sw_jit_nvrtc_run *given_up;  // with `mutex`: runs that nobody waits for any more
};

static const char *const usual_places[] = {
  "libnvrtc.so.13", "libnvrtc.so.12",
  "/usr/local/cuda/lib64/libnvrtc.so.13", "/usr/local/cuda/lib64/libnvrtc.so.12",
};

static void *open_library(char *tried, size_t size)
{
  const char *wanted = getenv("SWATHE_LIBNVRTC");
  const bool named = wanted && *wanted;
  const size_t count = named ? 1 : sizeof usual_places / sizeof *usual_places;
  *tried = 0;
  for (size_t i = 0; i < count; i++) {
    const char *place = named ? wanted : usual_places[i];
    void *library = dlopen(place, RTLD_NOW | RTLD_LOCAL);
    if (library) return library;
    const char *why = dlerror();
    if (named) snprintf(tried, size, "SWATHE_LIBNVRTC: %s", why ? why : place);
  }
  if (!named) snprintf(tried, size, "there is neither libnvrtc.so.13 nor libnvrtc.so.12");
  return NULL;
}

static bool look_up(struct sw_jit_nvrtc *nvrtc, void *library, const char **missing)
{
  void *address;
  *missing = NULL;
#define LOOK_UP(name, type, arguments, needed)                 \
  address = dlsym(library, #name);                             \
  if (!address && needed && !*missing) *missing = #name;       \
  memcpy(&nvrtc->name, &address, sizeof address);
  NVRTC_FUNCTIONS(LOOK_UP)
#undef LOOK_UP
  return !*missing;
}

static void describe(struct sw_jit_nvrtc *nvrtc)
{
  int major = 0, minor = 0, count = 0;
  Dl_info info;
  void *address;
  nvrtc->nvrtcVersion(&major, &minor);
  snprintf(nvrtc->version, sizeof nvrtc->version, "nvrtc %d.%d", major, minor);
  memcpy(&address, &nvrtc->nvrtcVersion, sizeof address);
  if (dladdr(address, &info) && info.dli_fname)
    snprintf(nvrtc->path, sizeof nvrtc->path, "%s", info.dli_fname);

  nvrtc->nvrtcGetNumSupportedArchs(&count);
  int *archs = calloc(count > 0 ? (size_t)count : 1, sizeof *archs);
  if (archs && count > 0) nvrtc->nvrtcGetSupportedArchs(archs);
  for (int i = 0; archs && i < count; i++) {
    const size_t used = strlen(nvrtc->isas);
    snprintf(nvrtc->isas + used, sizeof nvrtc->isas - used, "%ssm_%d", i ? " " : "", archs[i]);
  }
  free(archs);
}

enum swathe_status sw_jit_nvrtc_open(struct sw_jit_nvrtc **nvrtc_out)
{
  char tried[512];
  const char *missing;
  void *library = open_library(tried, sizeof tried);
  if (!library)
    return sw_fail(SWATHE_COMPILE,
                   "NVRTC was not found: %s; install CUDA's nvrtc package or set SWATHE_LIBNVRTC "
                   "to the library", tried);
  struct sw_jit_nvrtc *nvrtc = calloc(1, sizeof *nvrtc);
  if (!nvrtc) return sw_fail(SWATHE_NO_MEMORY, "no memory for NVRTC");
  if (!look_up(nvrtc, library, &missing)) {
    free(nvrtc);
    return sw_fail(SWATHE_COMPILE, "this NVRTC is too old, or none: it has no %s", missing);
  }
  pthread_mutex_init(&nvrtc->mutex, NULL);
  describe(nvrtc);
  *nvrtc_out = nvrtc;
  return SWATHE_OK;  // the library stays open for good: others of the process may use it
}

const char *sw_jit_nvrtc_path(const struct sw_jit_nvrtc *nvrtc) { return nvrtc->path; }
const char *sw_jit_nvrtc_version(const struct sw_jit_nvrtc *nvrtc) { return nvrtc->version; }
const char *sw_jit_nvrtc_isas(const struct sw_jit_nvrtc *nvrtc) { return nvrtc->isas; }

// ---- One compilation, in its thread ------------------------------------------------------------

struct sw_jit_nvrtc_run {
  struct sw_jit_nvrtc_run *next;  // of those that were given up
  struct sw_jit_nvrtc *nvrtc;
  pthread_t thread;
  char *source, *flags;         // flags are cut into words
  char name[80], isa[32];       // name: "forward.cu"
  double started;
  atomic_bool stop;

  pthread_mutex_t mutex;
  pthread_cond_t ends;
  bool ended;
  enum swathe_status status;    // what came of it, from here on
  char words[1024];
  char *log;
  unsigned char *bytes;
  size_t size;
  double seconds;
};

static void free_run(struct sw_jit_nvrtc_run *run)
{
  pthread_mutex_destroy(&run->mutex);
  pthread_cond_destroy(&run->ends);
  free(run->source);
  free(run->flags);
  free(run->log);
  free(run->bytes);
  free(run);
}

static int asked_to_stop(void *arg, void *unused)
{
  struct sw_jit_nvrtc_run *run = arg;
  (void)unused;
  return atomic_load(&run->stop);
}

// What NVRTC gives in two calls, for the size and for the text; "" without memory or text.
static char *take(program made, int (*size_of)(program, size_t *), int (*get)(program, char *),
                  size_t *size)
{
  if (size_of(made, size)) *size = 0;
  char *bytes = calloc(1, *size + 1);
  if (bytes && *size && get(made, bytes)) *bytes = 0;
  return bytes;
}

// The assembler means lines of the PTX, which nobody sees: they are quoted beside its message.
static char *quote_ptx(char *log, const char *ptx)
{
  char *text = NULL;
  size_t bytes = 0;
  FILE *out = strstr(log, "ptx input, line ") ? open_memstream(&text, &bytes) : NULL;
  if (!out) return log;
  for (const char *rest = log; *rest;) {
    const size_t length = strcspn(rest, "\n");
    const char *place = strstr(rest, "ptx input, line ");
    fprintf(out, "%.*s\n", (int)length, rest);
    if (place && place < rest + length) {
      const char *line = ptx;
      for (long n = strtol(place + strlen("ptx input, line "), NULL, 10); n > 1 && line; n--) {
        line = strchr(line, '\n');
        if (line) line++;
      }
      if (line) line += strspn(line, " \t");
      if (line) fprintf(out, "    %.*s\n", (int)strcspn(line, "\n"), line);
    }
    rest += length + (rest[length] == '\n');
  }
  if (fclose(out)) {
    free(text);
    return log;
  }
  free(log);
  return text;
}

// The assembler's advisories C7500 to C7599: it changed or serialized what the source asked for.
static bool was_changed(const char *log)
{
  for (const char *at = log; (at = strstr(at, "(C75")) != NULL; at++)
    if (strspn(at + 4, "0123456789") == 2 && at[6] == ')') return true;
  return false;
}

static enum swathe_status judge(struct sw_jit_nvrtc_run *run, int result, const char *cubin,
                                size_t cubin_bytes, const char *ptx)
{
  const struct sw_jit_nvrtc *nvrtc = run->nvrtc;
  if (result)
    return sw_fail(SWATHE_COMPILE, "%s rejected %s for %s: %s", nvrtc->version, run->name, run->isa,
                   nvrtc->nvrtcGetErrorString(result));
  if (was_changed(run->log))
    return sw_fail(SWATHE_COMPILE, "the assembler of %s did not take %s for %s as it stands",
                   nvrtc->version, run->name, run->isa);
  return sw_jit_cuda_pack(cubin, cubin_bytes, ptx, run->log, &run->bytes, &run->size);
}

static enum swathe_status compile(struct sw_jit_nvrtc_run *run)
{
  const struct sw_jit_nvrtc *nvrtc = run->nvrtc;
  const char *options[WORDS] = { NULL };
  program made = NULL;
  int count = 0;
  options[count++] = "--ptxas-options=-v";
  char *rest = run->flags;
  for (char *word; count < WORDS && (word = strtok_r(rest, " ", &rest)) != NULL;)
    options[count++] = word;

  int result = nvrtc->nvrtcCreateProgram(&made, run->source, run->name, 0, NULL, NULL);
  if (result)
    return sw_fail(SWATHE_COMPILE, "%s made no program of %s: %s", nvrtc->version, run->name,
                   nvrtc->nvrtcGetErrorString(result));
  if (nvrtc->nvrtcSetFlowCallback) nvrtc->nvrtcSetFlowCallback(made, asked_to_stop, run);
  result = nvrtc->nvrtcCompileProgram(made, count, options);
  size_t cubin_bytes = 0, ptx_bytes = 0, log_bytes = 0;
  run->log = take(made, nvrtc->nvrtcGetProgramLogSize, nvrtc->nvrtcGetProgramLog, &log_bytes);
  char *cubin = take(made, nvrtc->nvrtcGetCUBINSize, nvrtc->nvrtcGetCUBIN, &cubin_bytes);
  char *ptx = take(made, nvrtc->nvrtcGetPTXSize, nvrtc->nvrtcGetPTX, &ptx_bytes);
  enum swathe_status status;
  if (!run->log || !cubin || !ptx)
    status = sw_fail(SWATHE_NO_MEMORY, "no memory for what NVRTC made of %s", run->name);
  else
    status = judge(run, result, cubin, cubin_bytes, ptx);
  if (status == SWATHE_COMPILE) run->log = quote_ptx(run->log, ptx);
  nvrtc->nvrtcDestroyProgram(&made);
  free(cubin);
  free(ptx);
  return status;
}

static void *work(void *arg)
{
  struct sw_jit_nvrtc_run *run = arg;
  setpriority(PRIO_PROCESS, 0, PRIORITY);  // on Linux of this thread alone; a wish
  const enum swathe_status status = compile(run);

  pthread_mutex_lock(&run->mutex);
  run->status = status;
  if (status) snprintf(run->words, sizeof run->words, "%s", swathe_error());
  run->seconds = sw_jit_cc_now() - run->started;
  run->ended = true;
  pthread_cond_signal(&run->ends);
  pthread_mutex_unlock(&run->mutex);
  return NULL;
}

// ---- One compilation, from outside -------------------------------------------------------------

bool sw_jit_nvrtc_done(struct sw_jit_nvrtc_run *run)
{
  pthread_mutex_lock(&run->mutex);
  const bool ended = run->ended;
  pthread_mutex_unlock(&run->mutex);
  return ended;
}

// Waits for the thread's very end: what NVRTC keeps for a thread is gone then, too.
static void join(struct sw_jit_nvrtc_run *run)
{
  pthread_join(run->thread, NULL);
  free_run(run);
}

// Frees runs that were given up: those that have ended, or all.
static void reap(struct sw_jit_nvrtc *nvrtc, bool all)
{
  pthread_mutex_lock(&nvrtc->mutex);
  for (struct sw_jit_nvrtc_run **link = &nvrtc->given_up, *run; (run = *link) != NULL;) {
    if (!all && !sw_jit_nvrtc_done(run)) {
      link = &run->next;
      continue;
    }
    *link = run->next;
    join(run);
  }
  pthread_mutex_unlock(&nvrtc->mutex);
}

void sw_jit_nvrtc_close(struct sw_jit_nvrtc *nvrtc)
{
  if (!nvrtc) return;
  reap(nvrtc, true);
  pthread_mutex_destroy(&nvrtc->mutex);
  free(nvrtc);
}

// With every signal blocked: the process' handlers are not for it.
static int start_thread(struct sw_jit_nvrtc_run *run)
{
  pthread_attr_t attributes;
  sigset_t all, before;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, STACK_BYTES);
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const int error = pthread_create(&run->thread, &attributes, work, run);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  pthread_attr_destroy(&attributes);
  return error;
}

// "sm_90a" is for processors that "sm_90" stands for in the list.
static bool compiles_for(const struct sw_jit_nvrtc *nvrtc, const char *isa)
{
  const size_t length = strcspn(isa, "af");
  for (const char *at = nvrtc->isas; *at; at += strspn(at, " ")) {
    const size_t next = strcspn(at, " ");
    if (next == length && !strncmp(at, isa, length)) return true;
    at += next;
  }
  return false;
}

enum swathe_status sw_jit_nvrtc_start(struct sw_jit_nvrtc *nvrtc, const char *name,
                                      const char *source, const char *flags, const char *isa,
                                      struct sw_jit_nvrtc_run **run_out)
{
  pthread_condattr_t monotonic;
  if (!compiles_for(nvrtc, isa))
    return sw_fail(SWATHE_COMPILE, "%s does not compile for %s; it does for %s", nvrtc->version,
                   isa, nvrtc->isas);
  reap(nvrtc, false);
  struct sw_jit_nvrtc_run *run = calloc(1, sizeof *run);
  if (!run) return sw_fail(SWATHE_NO_MEMORY, "no memory to compile %s", name);
  pthread_mutex_init(&run->mutex, NULL);
  pthread_condattr_init(&monotonic);
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_cond_init(&run->ends, &monotonic);
  pthread_condattr_destroy(&monotonic);
  run->nvrtc = nvrtc;
  run->source = strdup(source);
  run->flags = strdup(flags);
  snprintf(run->name, sizeof run->name, "%.64s.cu", name);
  snprintf(run->isa, sizeof run->isa, "%s", isa);
  run->started = sw_jit_cc_now();
  const int error = run->source && run->flags ? start_thread(run) : 0;
  if (!run->source || !run->flags || error) {
    free_run(run);
    return error ? sw_fail(SWATHE_COMPILE, "no thread to compile %s: %s", name, strerror(error))
                 : sw_fail(SWATHE_NO_MEMORY, "no memory to compile %s", name);
  }
  *run_out = run;
  return SWATHE_OK;
}

// The caller's part is over: what has not ended is told to, and waits in a list for its end.
static void leave(struct sw_jit_nvrtc_run *run)
{
  struct sw_jit_nvrtc *nvrtc = run->nvrtc;
  if (sw_jit_nvrtc_done(run)) {
    join(run);
    return;
  }
  atomic_store(&run->stop, true);
  pthread_mutex_lock(&nvrtc->mutex);
  run->next = nvrtc->given_up;
  nvrtc->given_up = run;
  pthread_mutex_unlock(&nvrtc->mutex);
}

enum swathe_status sw_jit_nvrtc_finish(struct sw_jit_nvrtc_run *run, double deadline_s,
                                       unsigned char **bytes, size_t *size, double *seconds,
                                       char **log)
{
  const double end = sw_jit_cc_now() + deadline_s;
  const struct timespec until = { .tv_sec = (time_t)end,
                                  .tv_nsec = (long)(1e9 * (end - (double)(time_t)end)) };
  int error = 0;
  pthread_mutex_lock(&run->mutex);
  while (!run->ended && !error) error = pthread_cond_timedwait(&run->ends, &run->mutex, &until);
  const bool ended = run->ended;
  pthread_mutex_unlock(&run->mutex);

  enum swathe_status status;
  if (log) *log = NULL;
  *seconds = ended ? run->seconds : sw_jit_cc_now() - run->started;
  if (!ended) {
    status = sw_fail(SWATHE_TIMEOUT, "%s did not end with %s within %.1f s and was given up",
                     run->nvrtc->version, run->name, *seconds);
  } else if (run->status) {
    status = sw_fail(run->status, "%s", run->words);
    if (log && run->status == SWATHE_COMPILE) {
      *log = run->log;
      run->log = NULL;
    }
  } else {
    status = SWATHE_OK;
    *bytes = run->bytes;
    *size = run->size;
    run->bytes = NULL;
  }
  leave(run);
  return status;
}

void sw_jit_nvrtc_kill(struct sw_jit_nvrtc_run *run)
{
  leave(run);
}
