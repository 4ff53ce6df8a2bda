// jit.h: source -> cached binary -> loaded image.
//
// The cache is content-addressed: an entry's name is the SHA-256 of source + flags + compiler
// identity + isa.  One file per entry with a header that holds the payload's digest; verified
// before every load; published by rename from a temporary file in the same directory.  Any defect
// is a miss and the entry is moved aside.  A cache that cannot be written is a warning, and the
// binary is used from memory.  Whoever compiles tidies up: what killed processes left, and entries
// beyond the bound that were not used for longest.
#ifndef SW_JIT_H
#define SW_JIT_H

#include "error.h"

struct sw_jit;
struct sw_jit_image;

// `directory` as swathe_options.cache says, `compiler` likewise; NVRTC is what SWATHE_LIBNVRTC
// names, else the one that is installed.  Nothing is created or opened before it is needed, nothing
// is compiled; a machine without a compiler can still load what the cache holds.
enum swathe_status sw_jit_open(const char *directory, const char *compiler, struct sw_jit **jit);
void sw_jit_close(struct sw_jit *jit);  // images stay valid

// Who compiles: the system's C compiler, or NVRTC.  NVRTC's runs are threads of low priority in
// this process: at a deadline they are given up, not killed.
enum sw_jit_compiler { SW_JIT_CC, SW_JIT_NVRTC };
enum { SW_JIT_COMPILERS = 2, SW_JIT_KERNELS = 8 };

struct sw_jit_request {
  const char *name;    // for words and the entry's header: "forward"
  const char *source;  // C or CUDA C text
  const char *flags;   // separated by single spaces, as the generator gave them
  const char *isa;     // the flags say it, too
  enum sw_jit_compiler compiler;
};

// From now on this thread gives up waiting for a compiler (SWATHE_INTERRUPTED) once *stop is not 0;
// NULL: it does not look.  Returns what it looked at before.
const volatile int *sw_jit_heed(const volatile int *stop);

// What one CUDA kernel uses, as its compiler said.
struct sw_jit_resources {
  char kernel[32];
  int32_t registers;   // of a thread
  int32_t spill_bytes; // of a thread, stores and loads; -1: not known
  int32_t stack_bytes; // of a thread, spilled registers among them
  int32_t static_shared_bytes, barriers;  // of a block
};

struct sw_jit_report {
  bool cached;         // nothing was compiled
  double compile_s;    // 0 when cached
  size_t binary_bytes;
  char key[65];        // hexadecimal digest, the entry's name
  int32_t kernel_count;                              // of a CUDA image, also when cached
  struct sw_jit_resources kernels[SW_JIT_KERNELS];
};

// Finds the binary in the cache or compiles it; loads it.  Calls for one key from several threads
// or processes compile once where the file system can lock, and never wait longer than `deadline_s`
// for each other.  `log` may be NULL; SWATHE_COMPILE leaves the compiler's output there, to be
// freed, anything else NULL.
enum swathe_status sw_jit_load(struct sw_jit *jit, const struct sw_jit_request *request,
                               double deadline_s, struct sw_jit_image **image,
                               struct sw_jit_report *report, char **log);
// A shortcut for warm starts, which need not make the source again: `origin` is a text that decides
// source, flags and isa.  sw_jit_remember notes that its binary is the one under `key` of a report;
// sw_jit_recall loads it.  SWATHE_NOT_FOUND if nothing was noted for this compiler, or the entry is
// gone.
void sw_jit_remember(struct sw_jit *jit, enum sw_jit_compiler compiler, const char *origin,
                     const char *key);
enum swathe_status sw_jit_recall(struct sw_jit *jit, enum sw_jit_compiler compiler,
                                 const char *origin, const char *name, struct sw_jit_image **image,
                                 struct sw_jit_report *report);

// The same without loading: for other isas and for warming a cache.
enum swathe_status sw_jit_warm(struct sw_jit *jit, const struct sw_jit_request *request,
                               double deadline_s, struct sw_jit_report *report, char **log);

// Compilation in the background, for the tuner.  A job is one compiler process, or NVRTC's thread,
// of low priority.
struct sw_jit_job;
enum swathe_status sw_jit_job_start(struct sw_jit *jit, const struct sw_jit_request *request,
                                    struct sw_jit_job **job);
// *done without waiting.
enum swathe_status sw_jit_job_poll(struct sw_jit_job *job, bool *done);
// Waits at most `deadline_s`, kills the compiler (gives NVRTC's thread up) after that, publishes to
// the cache; frees the job.
enum swathe_status sw_jit_job_finish(struct sw_jit_job *job, double deadline_s, char **log);
void sw_jit_job_kill(struct sw_jit_job *job);  // and frees it

// The address of an exported symbol; of a CUDA image that of a variable's initial value, here in
// the host's memory, until the image is unloaded (NVRTC makes no variable visible to a driver).
// SWATHE_LOAD if there is none.
enum swathe_status sw_jit_symbol(const struct sw_jit_image *image, const char *name,
                                 void **address);
// The initial value of a CUDA image's variable, which has exactly that many bytes.
enum swathe_status sw_jit_variable(const struct sw_jit_image *image, const char *name, void *value,
                                   size_t bytes);
void sw_jit_unload(struct sw_jit_image *image);

// A CUDA image, for the driver: machine code for one architecture, and the PTX (zero-terminated)
// that a driver may translate itself where it has no use for that.  Borrowed until the image is
// unloaded.
enum swathe_status sw_jit_cuda(const struct sw_jit_image *image, const void **cubin,
                               size_t *cubin_bytes, const char **ptx);

// The cache directory, "" if memory only.  Borrowed until close.  Asks no compiler.
const char *sw_jit_directory(struct sw_jit *jit);

// For doctor: the cache directory ("" if memory only), whether it can be written, how many kernels
// it holds, their bytes and how many it is to hold at most (INT64_MAX: no bound); the compiler's
// path ("" if none) and its first line of --version.  Borrowed until close.
struct sw_jit_state {
  const char *directory, *compiler, *compiler_version, *problem;
  bool writable;
  int64_t kernels, bytes, most_bytes;
};
void sw_jit_state(struct sw_jit *jit, struct sw_jit_state *state);

// For doctor, too: NVRTC's path ("" if none), "nvrtc 13.0", the architectures it compiles for
// separated by spaces, and why there is none.  Borrowed until close.
struct sw_jit_nvrtc_state {
  const char *path, *version, *isas, *problem;
};
void sw_jit_nvrtc_state(struct sw_jit *jit, struct sw_jit_nvrtc_state *state);

#endif
