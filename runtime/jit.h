// jit.h: source -> cached binary -> loaded image.
//
// The cache is content-addressed: an entry's name is the SHA-256 of source + flags + compiler
// identity + isa.  One file per entry with a header that holds the payload's digest; verified
// before every load; published by rename from a temporary file in the same directory.  Any defect
// is a miss and the entry is moved aside.  A cache that cannot be written is a warning, and the
// binary is used from memory.
#ifndef SW_JIT_H
#define SW_JIT_H

#include "error.h"

struct sw_jit;
struct sw_jit_image;

// `directory` as swathe_options.cache says, `compiler` likewise.  Nothing is created before it is
// needed, nothing is compiled; a machine without a compiler can still load what the cache holds.
enum swathe_status sw_jit_open(const char *directory, const char *compiler, struct sw_jit **jit);
void sw_jit_close(struct sw_jit *jit);  // images stay valid

struct sw_jit_request {
  const char *name;    // for words and the entry's header: "forward"
  const char *source;  // C text
  const char *flags;   // separated by single spaces, as the generator gave them
  const char *isa;
};

struct sw_jit_report {
  bool cached;         // nothing was compiled
  double compile_s;    // 0 when cached
  size_t binary_bytes;
  char key[65];        // hexadecimal digest, the entry's name
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
void sw_jit_remember(struct sw_jit *jit, const char *origin, const char *key);
enum swathe_status sw_jit_recall(struct sw_jit *jit, const char *origin, const char *name,
                                 struct sw_jit_image **image, struct sw_jit_report *report);

// The same without loading: for other isas and for warming a cache.
enum swathe_status sw_jit_warm(struct sw_jit *jit, const struct sw_jit_request *request,
                               double deadline_s, struct sw_jit_report *report, char **log);

// Compilation in the background, for the tuner.  A job is one compiler process of low priority.
struct sw_jit_job;
enum swathe_status sw_jit_job_start(struct sw_jit *jit, const struct sw_jit_request *request,
                                    struct sw_jit_job **job);
// *done without waiting.
enum swathe_status sw_jit_job_poll(struct sw_jit_job *job, bool *done);
// Waits at most `deadline_s`, kills the compiler after that, publishes to the cache; frees the job.
enum swathe_status sw_jit_job_finish(struct sw_jit_job *job, double deadline_s, char **log);
void sw_jit_job_kill(struct sw_jit_job *job);  // and frees it

// The address of an exported symbol.  SWATHE_LOAD if there is none.
enum swathe_status sw_jit_symbol(const struct sw_jit_image *image, const char *name,
                                 void **address);
void sw_jit_unload(struct sw_jit_image *image);

// The cache directory, "" if memory only.  Borrowed until close.  Asks no compiler.
const char *sw_jit_directory(struct sw_jit *jit);

// For doctor: the cache directory ("" if memory only), whether it can be written, the compiler's
// path ("" if none) and its first line of --version.  Borrowed until close.
struct sw_jit_state {
  const char *directory, *compiler, *compiler_version, *problem;
  bool writable;
};
void sw_jit_state(struct sw_jit *jit, struct sw_jit_state *state);

#endif
