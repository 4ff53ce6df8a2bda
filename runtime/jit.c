// jit.c: source -> cached binary -> loaded image.
//
// The order of a load: who is the compiler (its identity is part of the key, and is itself
// remembered in the cache, so that a warm start starts no process) -> cache -> the right to compile
// -> cache again -> compile -> publish -> dlopen from memory (a CUDA image stays bytes, for the
// driver).  What was compiled is used from memory and never read back.
#include "jit.h"

#include "jit_cache.h"
#include "jit_cc.h"
#include "jit_cuda.h"
#include "jit_nvrtc.h"

#include <assert.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <sha256.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#ifndef MFD_EXEC
#define MFD_EXEC 0x10u  // Linux 6.3, uapi/linux/memfd.h
#endif

enum { KEY_TEXT = 65, LINE = 256 };
static const double ask_s = 20;          // for --version, at the most
static const double longest_wait_s = 1e8;  // a deadline beyond that is none
static const double shortest_nap_s = 1e-3, longest_nap_s = 20e-3;  // between tries for a lock

struct binary {
  unsigned char *bytes;  // owned
  size_t size;
};

// A binary that the disk did not take: what a cache in memory holds.
struct kept {
  struct kept *next;
  char key[KEY_TEXT];
  struct binary binary;
};

// A key some thread of this process is busy with.
struct flight {
  struct flight *next;
  char key[KEY_TEXT];
};

// One of the compilers; `identity` stands still once `identified`.
struct compiler {
  bool identified, recorded;
  bool present;                     // else the identity is the last that the cache has seen
  char version[LINE], problem[1024];
  char *identity;                   // the C compiler's: version, machine and arguments, a line each
};

struct sw_jit {
  struct sw_jit_cache *cache;
  char *command;                    // of the C compiler
  pthread_mutex_t mutex;            // of kept, flights and tidied
  pthread_cond_t landed;
  struct kept *kept;
  struct flight *flights;
  bool tidied;

  pthread_mutex_t compiler_mutex;   // of the rest
  struct compiler compilers[SW_JIT_COMPILERS];
  struct sw_jit_cc *cc;             // NULL: none here
  struct sw_jit_nvrtc *nvrtc;       // likewise
  char path[PATH_MAX], machine[LINE];  // of the C compiler
};

struct sw_jit_image {
  unsigned char *bytes;             // of a CUDA image, owned; else NULL
  struct sw_jit_cuda_parts parts;   // point into them
  void *handle;
  int memory;                       // open as long as the image: glibc knows it by /proc/self/fd/N
  char name[64];
};

// A compilation under way, by one of the two; none: both are NULL.
struct run {
  struct sw_jit_cc_run *cc;
  struct sw_jit_nvrtc_run *nvrtc;
};

struct sw_jit_job {
  struct sw_jit *jit;
  struct run run;                   // none: the binary was there already
  enum sw_jit_compiler compiler;
  char key[KEY_TEXT], name[64], isa[32];
};

// ---- Open and close ----------------------------------------------------------------------------

static const char *choose_compiler(const char *compiler)
{
  if (!compiler || !*compiler) compiler = getenv("SWATHE_CC");
  if (!compiler || !*compiler) compiler = getenv("CC");
  return compiler && *compiler ? compiler : "cc";
}

enum swathe_status sw_jit_open(const char *directory, const char *compiler, struct sw_jit **jit_out)
{
  pthread_condattr_t monotonic;
  struct sw_jit *jit = calloc(1, sizeof *jit);
  if (!jit) return sw_fail(SWATHE_NO_MEMORY, "no memory for the kernel cache");
  pthread_condattr_init(&monotonic);
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_cond_init(&jit->landed, &monotonic);
  pthread_condattr_destroy(&monotonic);
  pthread_mutex_init(&jit->mutex, NULL);
  pthread_mutex_init(&jit->compiler_mutex, NULL);

  enum swathe_status status = sw_jit_cache_open(directory, &jit->cache);
  jit->command = strdup(choose_compiler(compiler));
  if (!status && !jit->command)
    status = sw_fail(SWATHE_NO_MEMORY, "no memory for the kernel cache");
  if (status) {
    sw_jit_close(jit);
    return status;
  }
  *jit_out = jit;
  return SWATHE_OK;
}

void sw_jit_close(struct sw_jit *jit)
{
  if (!jit) return;
  assert(!jit->flights);
  while (jit->kept) {
    struct kept *next = jit->kept->next;
    free(jit->kept->binary.bytes);
    free(jit->kept);
    jit->kept = next;
  }
  sw_jit_cache_close(jit->cache);
  sw_jit_cc_free(jit->cc);
  sw_jit_nvrtc_close(jit->nvrtc);
  for (int i = 0; i < SW_JIT_COMPILERS; i++) free(jit->compilers[i].identity);
  free(jit->command);
  pthread_cond_destroy(&jit->landed);
  pthread_mutex_destroy(&jit->mutex);
  pthread_mutex_destroy(&jit->compiler_mutex);
  free(jit);
}

// ---- Who the compiler is -----------------------------------------------------------------------

static void digest_text(const char *text, char *hex)
{
  unsigned char bytes[SHA256_DIGEST_LENGTH];
  SHA256_CTX context;
  SHA256Init(&context);
  SHA256Update(&context, (const unsigned char *)text, strlen(text));
  SHA256Final(bytes, &context);
  for (int i = 0; i < SHA256_DIGEST_LENGTH; i++) snprintf(hex + 2 * i, 3, "%02x", bytes[i]);
}

// The note about the compiler as it is installed now.
static void note_name(const struct sw_jit *jit, char *name, size_t size)
{
  char hex[KEY_TEXT], *text = NULL;
  if (asprintf(&text, "%s%s", sw_jit_cc_stamp(jit->cc), sw_jit_cc_arguments(jit->cc)) < 0)
    text = NULL;
  digest_text(text ? text : "", hex);
  free(text);
  snprintf(name, size, "compilers/%.32s", hex);
}

static enum swathe_status adopt_identity(struct compiler *compiler, const char *identity)
{
  compiler->identity = strdup(identity);
  if (!compiler->identity) return sw_fail(SWATHE_NO_MEMORY, "no memory for a compiler's name");
  const size_t line = strcspn(identity, "\n");
  snprintf(compiler->version, sizeof compiler->version, "%.*s", (int)line, identity);
  return SWATHE_OK;
}

const volatile int *sw_jit_heed(const volatile int *stop) { return sw_jit_cc_heed(stop); }

// Asks the C compiler, unless the cache remembers what this very compiler said.
static enum swathe_status identify_found(struct sw_jit *jit, double deadline_s)
{
  struct compiler *compiler = &jit->compilers[SW_JIT_CC];
  char name[64], text[2048];
  note_name(jit, name, sizeof name);
  if (!sw_jit_cache_read_note(jit->cache, name, text, sizeof text)) {
    enum swathe_status status =
        sw_jit_cc_ask(jit->cc, "--version", deadline_s, compiler->version, LINE);
    if (status) return status;
    status = sw_jit_cc_ask(jit->cc, "-dumpmachine", deadline_s, jit->machine, LINE);
    if (status == SWATHE_INTERRUPTED) return status;
    if (status) strcpy(jit->machine, "unknown machine");
    snprintf(text, sizeof text, "%s\n%s\n%.1024s\n", compiler->version, jit->machine,
             sw_jit_cc_arguments(jit->cc));
  }
  return adopt_identity(compiler, text);
}

static enum swathe_status find_cc(struct sw_jit *jit, double deadline_s)
{
  struct compiler *compiler = &jit->compilers[SW_JIT_CC];
  enum swathe_status status = sw_jit_cc_find(jit->command, &jit->cc);
  if (status) return status;
  snprintf(jit->path, sizeof jit->path, "%s", sw_jit_cc_path(jit->cc));
  status = identify_found(jit, deadline_s);
  compiler->present = status == SWATHE_OK;
  if (!status) return SWATHE_OK;
  sw_jit_cc_free(jit->cc);
  jit->cc = NULL;
  return status;
}

static enum swathe_status find_nvrtc(struct sw_jit *jit)
{
  struct compiler *compiler = &jit->compilers[SW_JIT_NVRTC];
  enum swathe_status status = SWATHE_OK;
  if (!jit->nvrtc) status = sw_jit_nvrtc_open(&jit->nvrtc);
  compiler->present = status == SWATHE_OK;
  return status ? status : adopt_identity(compiler, sw_jit_nvrtc_version(jit->nvrtc));
}

static const char *last_note(enum sw_jit_compiler which)
{
  return which == SW_JIT_CC ? "compilers/last" : "compilers/last-nvrtc";
}

// Under compiler_mutex.  A failure is not remembered: a compiler may be installed meanwhile.
static enum swathe_status identify_locked(struct sw_jit *jit, enum sw_jit_compiler which,
                                          double deadline_s)
{
  struct compiler *compiler = &jit->compilers[which];
  char text[2048];
  if (compiler->identified) return SWATHE_OK;
  enum swathe_status status = which == SW_JIT_CC ? find_cc(jit, deadline_s) : find_nvrtc(jit);
  if (status) snprintf(compiler->problem, sizeof compiler->problem, "%s", swathe_error());
  const bool absent = which == SW_JIT_CC ? !*jit->path : !jit->nvrtc;
  if (status == SWATHE_COMPILE && absent &&
      sw_jit_cache_read_note(jit->cache, last_note(which), text, sizeof text))
    status = adopt_identity(compiler, text);
  compiler->identified = status == SWATHE_OK;
  return status;
}

static enum swathe_status identify(struct sw_jit *jit, enum sw_jit_compiler which,
                                   double deadline_s)
{
  pthread_mutex_lock(&jit->compiler_mutex);
  const enum swathe_status status =
      identify_locked(jit, which, deadline_s < ask_s ? deadline_s : ask_s);
  pthread_mutex_unlock(&jit->compiler_mutex);
  return status;
}

// After the first binary of this compiler is in the cache: what it said, for warm starts; and that
// it was the last one, for machines that have the cache but no compiler.
static void record_compiler(struct sw_jit *jit, enum sw_jit_compiler which)
{
  struct compiler *compiler = &jit->compilers[which];
  char name[64];
  pthread_mutex_lock(&jit->compiler_mutex);
  const bool recorded = compiler->recorded;
  compiler->recorded = true;
  pthread_mutex_unlock(&jit->compiler_mutex);
  if (recorded) return;
  if (which == SW_JIT_CC) {
    note_name(jit, name, sizeof name);
    sw_jit_cache_write_note(jit->cache, name, compiler->identity);
  }
  sw_jit_cache_write_note(jit->cache, last_note(which), compiler->identity);
}

const char *sw_jit_directory(struct sw_jit *jit)
{
  return sw_jit_cache_directory(jit->cache);
}

void sw_jit_state(struct sw_jit *jit, struct sw_jit_state *state)
{
  const bool identified = identify(jit, SW_JIT_CC, ask_s) == SWATHE_OK;
  const struct compiler *compiler = &jit->compilers[SW_JIT_CC];
  const char *problem = sw_jit_cache_problem(jit->cache);
  struct sw_jit_cache_size size;
  sw_jit_cache_measure(jit->cache, &size);
  *state = (struct sw_jit_state){
    .directory = sw_jit_cache_directory(jit->cache),
    .compiler = jit->path,
    .compiler_version = identified ? compiler->version : "",
    .problem = *problem ? problem : compiler->problem,
    .writable = sw_jit_cache_writable(jit->cache),
    .kernels = size.kernels,
    .bytes = size.bytes,
    .most_bytes = size.most_bytes,
  };
}

void sw_jit_nvrtc_state(struct sw_jit *jit, struct sw_jit_nvrtc_state *state)
{
  identify(jit, SW_JIT_NVRTC, ask_s);
  const struct compiler *compiler = &jit->compilers[SW_JIT_NVRTC];
  *state = (struct sw_jit_nvrtc_state){
    .path = compiler->present ? sw_jit_nvrtc_path(jit->nvrtc) : "",
    .version = compiler->present ? compiler->version : "",
    .isas = compiler->present ? sw_jit_nvrtc_isas(jit->nvrtc) : "",
    .problem = compiler->problem,
  };
}

// ---- Keys --------------------------------------------------------------------------------------

static void add_field(SHA256_CTX *context, const char *text)
{
  char length[32];
  const int digits = snprintf(length, sizeof length, "%zu:", strlen(text));
  SHA256Update(context, (const unsigned char *)length, (size_t)digits);
  SHA256Update(context, (const unsigned char *)text, strlen(text));
}

// Every field with its length before it, so that no two requests give the same bytes.
static void make_key(const struct sw_jit *jit, const struct sw_jit_request *request, char *key)
{
  unsigned char bytes[SHA256_DIGEST_LENGTH];
  SHA256_CTX context;
  SHA256Init(&context);
  add_field(&context, request->source);
  add_field(&context, request->flags);
  add_field(&context, jit->compilers[request->compiler].identity);
  add_field(&context, request->isa);
  SHA256Final(bytes, &context);
  for (int i = 0; i < SHA256_DIGEST_LENGTH; i++) snprintf(key + 2 * i, 3, "%02x", bytes[i]);
}

// ---- The cache, on disk and in memory ----------------------------------------------------------

static bool find_kept(struct sw_jit *jit, const char *key, struct binary *binary)
{
  bool found = false;
  pthread_mutex_lock(&jit->mutex);
  for (const struct kept *kept = jit->kept; kept && !found; kept = kept->next) {
    if (strcmp(kept->key, key)) continue;
    binary->bytes = malloc(kept->binary.size);
    binary->size = kept->binary.size;
    if (binary->bytes) memcpy(binary->bytes, kept->binary.bytes, binary->size);
    found = binary->bytes != NULL;
  }
  pthread_mutex_unlock(&jit->mutex);
  return found;
}

static bool look_for(struct sw_jit *jit, const char *key, struct binary *binary)
{
  return find_kept(jit, key, binary) ||
         sw_jit_cache_read(jit->cache, key, &binary->bytes, &binary->size);
}

// Removes what the caches hold under `key`: it was verified, and yet it does not load.
static void reject(struct sw_jit *jit, const char *key)
{
  pthread_mutex_lock(&jit->mutex);
  for (struct kept **link = &jit->kept; *link;) {
    struct kept *kept = *link;
    if (strcmp(kept->key, key)) {
      link = &kept->next;
      continue;
    }
    *link = kept->next;
    free(kept->binary.bytes);
    free(kept);
  }
  pthread_mutex_unlock(&jit->mutex);
  sw_jit_cache_move_aside(jit->cache, key, "does not load");
}

static bool find(struct sw_jit *jit, enum sw_jit_compiler compiler, const char *key,
                 struct binary *binary)
{
  struct sw_jit_cuda_parts parts;
  if (!look_for(jit, key, binary)) return false;
  if (compiler == SW_JIT_CC || sw_jit_cuda_unpack(binary->bytes, binary->size, &parts)) return true;
  free(binary->bytes);
  reject(jit, key);
  return false;
}

// A CUDA binary says what its kernels use.
static void report_use(const struct binary *binary, struct sw_jit_report *report)
{
  struct sw_jit_cuda_parts parts;
  if (!sw_jit_cuda_unpack(binary->bytes, binary->size, &parts)) return;
  report->kernel_count = parts.kernel_count;
  memcpy(report->kernels, parts.kernels, sizeof parts.kernels);
}

// Onto the disk, else into memory.  Neither can fail the caller, who has the bytes.
static void publish(struct sw_jit *jit, enum sw_jit_compiler compiler, const char *key,
                    const char *name, const char *isa, const struct binary *binary)
{
  const struct sw_jit_cache_label label = {
    .name = name, .isa = isa, .compiler = jit->compilers[compiler].version
  };
  if (sw_jit_cache_write(jit->cache, key, &label, binary->bytes, binary->size)) {
    record_compiler(jit, compiler);
    return;
  }
  struct kept *kept = calloc(1, sizeof *kept);
  unsigned char *bytes = malloc(binary->size);
  if (!kept || !bytes) {
    free(kept);
    free(bytes);
    return;
  }
  memcpy(bytes, binary->bytes, binary->size);
  strcpy(kept->key, key);
  kept->binary = (struct binary){ .bytes = bytes, .size = binary->size };
  pthread_mutex_lock(&jit->mutex);
  kept->next = jit->kept;
  jit->kept = kept;
  pthread_mutex_unlock(&jit->mutex);
}

// ---- Single flight -----------------------------------------------------------------------------

static bool in_flight(const struct sw_jit *jit, const char *key)
{
  for (const struct flight *flight = jit->flights; flight; flight = flight->next)
    if (!strcmp(flight->key, key)) return true;
  return false;
}

// Waits while another thread is busy with the key, until `end` at the most; then enters `flight`.
static void take_off(struct sw_jit *jit, const char *key, double end, struct flight *flight)
{
  const struct timespec until = { .tv_sec = (time_t)end,
                                  .tv_nsec = (long)(1e9 * (end - (double)(time_t)end)) };
  int error = 0;
  strcpy(flight->key, key);
  pthread_mutex_lock(&jit->mutex);
  while (in_flight(jit, key) && !error)
    error = pthread_cond_timedwait(&jit->landed, &jit->mutex, &until);
  flight->next = jit->flights;
  jit->flights = flight;
  pthread_mutex_unlock(&jit->mutex);
}

static void land(struct sw_jit *jit, struct flight *flight)
{
  pthread_mutex_lock(&jit->mutex);
  struct flight **link = &jit->flights;
  while (*link != flight) link = &(*link)->next;
  *link = flight->next;
  pthread_cond_broadcast(&jit->landed);
  pthread_mutex_unlock(&jit->mutex);
}

// The right to compile, among processes.  -1: after `end`, or where locks do not work; then compile
// anyway.
static int wait_for_lock(struct sw_jit *jit, const char *key, double end)
{
  double nap_s = shortest_nap_s;
  for (;;) {
    int lock;
    const enum sw_jit_cache_turn turn = sw_jit_cache_try_lock(jit->cache, key, &lock);
    if (turn != SW_JIT_CACHE_BUSY) return lock;
    if (!(sw_jit_cc_now() + nap_s < end) || sw_jit_cc_stopped()) return -1;
    const struct timespec nap = { .tv_nsec = (long)(1e9 * nap_s) };
    nanosleep(&nap, NULL);
    nap_s = nap_s * 2 < longest_nap_s ? nap_s * 2 : longest_nap_s;
  }
}

// ---- Compile -----------------------------------------------------------------------------------

// Once, while a compiler is at work: nobody waits for it, and who only loads is not kept.
static void tidy(struct sw_jit *jit, const char *last_resort)
{
  pthread_mutex_lock(&jit->mutex);
  const bool tidied = jit->tidied;
  jit->tidied = true;
  pthread_mutex_unlock(&jit->mutex);
  if (tidied) return;
  sw_jit_cc_tidy(last_resort);
  sw_jit_cache_tidy(jit->cache);
}

static enum swathe_status start_compiler(struct sw_jit *jit, const struct sw_jit_request *request,
                                         struct run *run)
{
  const struct compiler *compiler = &jit->compilers[request->compiler];
  *run = (struct run){ NULL, NULL };
  if (!compiler->present) return sw_fail(SWATHE_COMPILE, "%s", compiler->problem);
  // the cache is the last resort for temporary files, too
  const char *last_resort =
      sw_jit_cache_prepare(jit->cache) ? sw_jit_cache_directory(jit->cache) : NULL;
  const enum swathe_status status =
      request->compiler == SW_JIT_NVRTC
          ? sw_jit_nvrtc_start(jit->nvrtc, request->name, request->source, request->flags,
                               request->isa, &run->nvrtc)
          : sw_jit_cc_start(jit->cc, request->name, request->source, request->flags, last_resort,
                            &run->cc);
  tidy(jit, last_resort);
  return status;
}

static enum swathe_status finish_run(const struct run *run, double deadline_s,
                                     struct binary *binary, double *seconds, char **log)
{
  if (run->nvrtc)
    return sw_jit_nvrtc_finish(run->nvrtc, deadline_s, &binary->bytes, &binary->size, seconds, log);
  return sw_jit_cc_finish(run->cc, deadline_s, &binary->bytes, &binary->size, seconds, log);
}

static enum swathe_status compile(struct sw_jit *jit, const struct sw_jit_request *request,
                                  double deadline_s, struct binary *binary,
                                  struct sw_jit_report *report, char **log)
{
  struct run run;
  enum swathe_status status = start_compiler(jit, request, &run);
  if (!status) status = finish_run(&run, deadline_s, binary, &report->compile_s, log);
  if (status) return sw_within(status, "while compiling %s for %s", request->name, request->isa);
  publish(jit, request->compiler, report->key, request->name, request->isa, binary);
  return SWATHE_OK;
}

// The binary of a request, with the report about it.  `fresh`: what is cached is not to be trusted.
static enum swathe_status obtain(struct sw_jit *jit, const struct sw_jit_request *request,
                                 double deadline_s, bool fresh, struct binary *binary,
                                 struct sw_jit_report *report, char **log)
{
  struct flight flight;
  int lock = -1;
  if (log) *log = NULL;
  *report = (struct sw_jit_report){ .cached = false };
  if (deadline_s > longest_wait_s) deadline_s = longest_wait_s;
  enum swathe_status status = identify(jit, request->compiler, deadline_s);
  if (status) return sw_within(status, "while compiling %s for %s", request->name, request->isa);
  make_key(jit, request, report->key);

  const double end = sw_jit_cc_now() + deadline_s;
  take_off(jit, report->key, end, &flight);
  report->cached = !fresh && find(jit, request->compiler, report->key, binary);
  if (!report->cached && jit->compilers[request->compiler].present) {
    lock = wait_for_lock(jit, report->key, end);
    report->cached = !fresh && lock >= 0 && find(jit, request->compiler, report->key, binary);
  }
  if (!report->cached) status = compile(jit, request, deadline_s, binary, report, log);
  sw_jit_cache_unlock(jit->cache, report->key, lock);
  land(jit, &flight);
  if (status) return status;
  report->binary_bytes = binary->size;
  if (request->compiler == SW_JIT_NVRTC) report_use(binary, report);
  return SWATHE_OK;
}

// ---- Load --------------------------------------------------------------------------------------

static bool write_all(int to, const struct binary *binary)
{
  size_t done = 0;
  while (done < binary->size) {
    const ssize_t part = write(to, binary->bytes + done, binary->size - done);
    if (part < 0 && errno == EINTR) continue;
    if (part <= 0) return false;
    done += (size_t)part;
  }
  return true;
}

static enum swathe_status open_image(const char *path, void **handle)
{
  *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (*handle) return SWATHE_OK;
  const char *why = dlerror();
  return sw_fail(SWATHE_LOAD, "%s", why ? why : "dlopen failed");
}

// No file at all: the image lives in memory only.
static enum swathe_status load_from_memory(const struct binary *binary, const char *name,
                                           void **handle, int *memory_out)
{
  char path[64];
  int memory = memfd_create(name, MFD_CLOEXEC | MFD_EXEC);
  if (memory < 0 && errno == EINVAL) memory = memfd_create(name, MFD_CLOEXEC);
  if (memory < 0) return sw_fail(SWATHE_LOAD, "memfd_create: %s", strerror(errno));
  enum swathe_status status = SWATHE_OK;
  if (!write_all(memory, binary)) status = sw_fail(SWATHE_LOAD, "memfd: %s", strerror(errno));
  snprintf(path, sizeof path, "/proc/self/fd/%d", memory);
  if (!status) status = open_image(path, handle);
  if (status) close(memory);
  else *memory_out = memory;
  return status;
}

// Where memory files are refused: a private file, gone as soon as it is loaded.
static enum swathe_status load_from_file(const struct binary *binary, const char *directory,
                                         void **handle)
{
  char path[PATH_MAX];
  if (snprintf(path, sizeof path, "%s/swathe-XXXXXX", directory) >= (int)sizeof path)
    return sw_fail(SWATHE_LOAD, "%s: the name is too long", directory);
  const int file = mkostemp(path, O_CLOEXEC);
  if (file < 0) return sw_fail(SWATHE_LOAD, "%s: %s", path, strerror(errno));
  enum swathe_status status = SWATHE_OK;
  if (!write_all(file, binary)) status = sw_fail(SWATHE_LOAD, "%s: %s", path, strerror(errno));
  close(file);
  if (!status) status = open_image(path, handle);
  unlink(path);
  return status;
}

static enum swathe_status open_anywhere(struct sw_jit *jit, const struct binary *binary,
                                        const char *name, struct sw_jit_image *image)
{
  const char *cache = sw_jit_cache_directory(jit->cache);
  const char *places[] = { getenv("TMPDIR"), "/tmp", cache };  // any of them may forbid execution
  enum swathe_status status = load_from_memory(binary, name, &image->handle, &image->memory);
  for (size_t i = 0; status && i < sizeof places / sizeof *places; i++)
    if (places[i] && *places[i] == '/') status = load_from_file(binary, places[i], &image->handle);
  return status;
}

// Nothing is opened: the bytes are for the driver.
static enum swathe_status keep_bytes(const struct binary *binary, struct sw_jit_image *image)
{
  image->bytes = malloc(binary->size);
  if (!image->bytes)
    return sw_fail(SWATHE_NO_MEMORY, "no memory for a kernel of %zu bytes", binary->size);
  memcpy(image->bytes, binary->bytes, binary->size);
  if (sw_jit_cuda_unpack(image->bytes, binary->size, &image->parts)) return SWATHE_OK;
  free(image->bytes);
  return sw_fail(SWATHE_LOAD, "the binary is no CUDA kernel of this version");
}

static enum swathe_status load(struct sw_jit *jit, enum sw_jit_compiler compiler,
                               const struct binary *binary, const char *name,
                               struct sw_jit_image **image_out)
{
  struct sw_jit_image *image = calloc(1, sizeof *image);
  if (!image) return sw_fail(SWATHE_NO_MEMORY, "no memory for a kernel's image");
  snprintf(image->name, sizeof image->name, "%s", name);
  image->memory = -1;
  const enum swathe_status status = compiler == SW_JIT_NVRTC
                                        ? keep_bytes(binary, image)
                                        : open_anywhere(jit, binary, name, image);
  if (status) {
    free(image);
    return sw_within(status, "while loading %s", name);
  }
  *image_out = image;
  return SWATHE_OK;
}

enum swathe_status sw_jit_load(struct sw_jit *jit, const struct sw_jit_request *request,
                               double deadline_s, struct sw_jit_image **image,
                               struct sw_jit_report *report, char **log)
{
  struct binary binary = { NULL, 0 };
  struct sw_jit_report own;
  if (!report) report = &own;
  enum swathe_status status = obtain(jit, request, deadline_s, false, &binary, report, log);
  if (status) return status;
  status = load(jit, request->compiler, &binary, request->name, image);
  free(binary.bytes);
  if (!status || !report->cached) return status;

  reject(jit, report->key);
  status = obtain(jit, request, deadline_s, true, &binary, report, log);
  if (status) return status;
  status = load(jit, request->compiler, &binary, request->name, image);
  free(binary.bytes);
  return status;
}

// The note that says under which key the binary of an origin is, by this compiler.
static bool origin_name(struct sw_jit *jit, enum sw_jit_compiler compiler, const char *origin,
                        char *name, size_t size)
{
  char hex[KEY_TEXT], *text = NULL;
  if (identify(jit, compiler, ask_s) ||
      asprintf(&text, "%s\n%s", jit->compilers[compiler].identity, origin) < 0)
    return false;
  digest_text(text, hex);
  free(text);
  snprintf(name, size, "origins/%.32s", hex);
  return true;
}

void sw_jit_remember(struct sw_jit *jit, enum sw_jit_compiler compiler, const char *origin,
                     const char *key)
{
  char name[64], known[KEY_TEXT];
  if (!origin_name(jit, compiler, origin, name, sizeof name)) return;
  if (sw_jit_cache_read_note(jit->cache, name, known, sizeof known) && !strcmp(known, key)) return;
  if (sw_jit_cache_writable(jit->cache)) sw_jit_cache_write_note(jit->cache, name, key);
}

enum swathe_status sw_jit_recall(struct sw_jit *jit, enum sw_jit_compiler compiler,
                                 const char *origin, const char *name, struct sw_jit_image **image,
                                 struct sw_jit_report *report)
{
  struct binary binary = { NULL, 0 };
  char note[64], key[KEY_TEXT];
  if (!origin_name(jit, compiler, origin, note, sizeof note) ||
      !sw_jit_cache_read_note(jit->cache, note, key, sizeof key) ||
      strspn(key, "0123456789abcdef") != KEY_TEXT - 1 ||
      !find(jit, compiler, key, &binary))
    return sw_fail(SWATHE_NOT_FOUND, "the kernel cache has no note about %s", name);
  const enum swathe_status status = load(jit, compiler, &binary, name, image);
  if (!status) {
    *report = (struct sw_jit_report){ .cached = true, .binary_bytes = binary.size };
    strcpy(report->key, key);
    if (compiler == SW_JIT_NVRTC) report_use(&binary, report);
  }
  free(binary.bytes);
  // an entry that does not load is sw_jit_load's to mend
  return status ? SWATHE_NOT_FOUND : SWATHE_OK;
}

enum swathe_status sw_jit_warm(struct sw_jit *jit, const struct sw_jit_request *request,
                               double deadline_s, struct sw_jit_report *report, char **log)
{
  struct binary binary = { NULL, 0 };
  struct sw_jit_report own;
  if (!report) report = &own;
  const enum swathe_status status = obtain(jit, request, deadline_s, false, &binary, report, log);
  if (!status) free(binary.bytes);
  return status;
}

enum swathe_status sw_jit_symbol(const struct sw_jit_image *image, const char *name, void **address)
{
  size_t bytes;
  void *found = image->bytes ? (void *)(uintptr_t)sw_jit_cuda_variable(&image->parts, name, &bytes)
                             : dlsym(image->handle, name);
  if (!found) return sw_fail(SWATHE_LOAD, "the compiled %s has no symbol '%s'", image->name, name);
  *address = found;
  return SWATHE_OK;
}

enum swathe_status sw_jit_variable(const struct sw_jit_image *image, const char *name, void *value,
                                   size_t bytes)
{
  size_t found_bytes = 0;
  const void *found =
      image->bytes ? sw_jit_cuda_variable(&image->parts, name, &found_bytes) : NULL;
  if (!found)
    return sw_fail(SWATHE_LOAD, "the compiled %s has no variable '%s'", image->name, name);
  if (found_bytes != bytes)
    return sw_fail(SWATHE_LOAD, "%s has %zu bytes in the image, %zu here", name, found_bytes,
                   bytes);
  memcpy(value, found, bytes);
  return SWATHE_OK;
}

void sw_jit_unload(struct sw_jit_image *image)
{
  char path[64];
  if (!image) return;
  if (image->handle) dlclose(image->handle);
  if (image->memory >= 0) {
    // An image that chose to stay keeps its number: the next one under it would be taken for it.
    snprintf(path, sizeof path, "/proc/self/fd/%d", image->memory);
    void *stayed = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
    if (stayed) dlclose(stayed);
    else close(image->memory);
  }
  free(image->bytes);
  free(image);
}

enum swathe_status sw_jit_cuda(const struct sw_jit_image *image, const void **cubin,
                               size_t *cubin_bytes, const char **ptx)
{
  if (!image->bytes)
    return sw_fail(SWATHE_LOAD, "the compiled %s is code for the host, not for a GPU", image->name);
  *cubin = image->parts.cubin;
  *cubin_bytes = image->parts.cubin_bytes;
  *ptx = image->parts.ptx;
  return SWATHE_OK;
}

// ---- Jobs --------------------------------------------------------------------------------------

enum swathe_status sw_jit_job_start(struct sw_jit *jit, const struct sw_jit_request *request,
                                    struct sw_jit_job **job_out)
{
  struct binary binary = { NULL, 0 };
  enum swathe_status status = identify(jit, request->compiler, ask_s);
  if (status) return sw_within(status, "while compiling %s for %s", request->name, request->isa);
  struct sw_jit_job *job = calloc(1, sizeof *job);
  if (!job) return sw_fail(SWATHE_NO_MEMORY, "no memory for a compilation");
  job->jit = jit;
  job->compiler = request->compiler;
  snprintf(job->name, sizeof job->name, "%s", request->name);
  snprintf(job->isa, sizeof job->isa, "%s", request->isa);
  make_key(jit, request, job->key);
  if (find(jit, job->compiler, job->key, &binary)) {
    free(binary.bytes);
  } else {
    status = start_compiler(jit, request, &job->run);
    if (status) {
      free(job);
      return sw_within(status, "while compiling %s for %s", request->name, request->isa);
    }
  }
  *job_out = job;
  return SWATHE_OK;
}

static bool running(const struct run *run) { return run->cc || run->nvrtc; }

enum swathe_status sw_jit_job_poll(struct sw_jit_job *job, bool *done)
{
  const struct run *run = &job->run;
  *done = !running(run) || (run->cc && sw_jit_cc_done(run->cc)) ||
          (run->nvrtc && sw_jit_nvrtc_done(run->nvrtc));
  return SWATHE_OK;
}

enum swathe_status sw_jit_job_finish(struct sw_jit_job *job, double deadline_s, char **log)
{
  struct binary binary = { NULL, 0 };
  double seconds;
  enum swathe_status status = SWATHE_OK;
  if (log) *log = NULL;
  if (running(&job->run)) {
    status = finish_run(&job->run, deadline_s, &binary, &seconds, log);
    if (status) sw_within(status, "while compiling %s for %s", job->name, job->isa);
    else publish(job->jit, job->compiler, job->key, job->name, job->isa, &binary);
  }
  free(binary.bytes);
  free(job);
  return status;
}

void sw_jit_job_kill(struct sw_jit_job *job)
{
  if (!job) return;
  if (job->run.cc) sw_jit_cc_kill(job->run.cc);
  if (job->run.nvrtc) sw_jit_nvrtc_kill(job->run.nvrtc);
  free(job);
}
