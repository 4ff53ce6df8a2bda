// jit_cache.h: compiled kernels on disk.  Private to jit*.c.
//
//   CACHEDIR.TAG
//   <2 hex>/<62 hex>.swk   an entry: header, then the shared object.  The hex digits are its key
//   <2 hex>/<62 hex>.bad   an entry that was found damaged, moved aside
//   <2 hex>/<62 hex>.lock  held (flock) by whoever compiles that key; gone when it is done
//   compilers/<name>       notes: what a compiler said about itself
//   origins/<32 hex>       notes: the key of the binary that a kernel's origin led to
//   tidied                 its time is that of the last sw_jit_cache_tidy
//
// An entry's time of modification is that of its last use, give or take an hour.
//
// Whoever can write here runs code in every process that reads here, so the directory must be the
// user's own and writable by nobody else.  Nothing here fails: a cache that cannot serve is a miss,
// one that cannot be written is one warning.
#ifndef SW_JIT_CACHE_H
#define SW_JIT_CACHE_H

#include "error.h"

struct sw_jit_cache;

// `directory` as swathe_options.cache says.  Creates nothing.
enum swathe_status sw_jit_cache_open(const char *directory, struct sw_jit_cache **cache);
void sw_jit_cache_close(struct sw_jit_cache *cache);

const char *sw_jit_cache_directory(struct sw_jit_cache *cache);  // "": memory only
const char *sw_jit_cache_problem(const struct sw_jit_cache *cache); // why it is memory only, or ""
bool sw_jit_cache_writable(struct sw_jit_cache *cache);
// Creates the directory if need be.  False, with a warning, if it cannot be used.
bool sw_jit_cache_prepare(struct sw_jit_cache *cache);

// *bytes is to be freed.  False is a miss; a damaged entry is moved aside and is a miss.
bool sw_jit_cache_read(struct sw_jit_cache *cache, const char *key, unsigned char **bytes,
                       size_t *size);
void sw_jit_cache_move_aside(struct sw_jit_cache *cache, const char *key, const char *why);

// What the header says beside key and payload; for people.
struct sw_jit_cache_label { const char *name, *isa, *compiler; };
bool sw_jit_cache_write(struct sw_jit_cache *cache, const char *key,
                        const struct sw_jit_cache_label *label, const unsigned char *bytes,
                        size_t size);

// Once a day for each cache, whoever calls: removes what killed processes left and, as long as the
// entries exceed $SWATHE_CACHE_MIB, the one that was used last longest ago; never one of the last
// day.  Others may read and write meanwhile.
void sw_jit_cache_tidy(struct sw_jit_cache *cache);

struct sw_jit_cache_size {
  int64_t kernels, bytes;
  int64_t most_bytes;       // INT64_MAX: no bound
};
void sw_jit_cache_measure(struct sw_jit_cache *cache, struct sw_jit_cache_size *size);

// The right to compile `key`, among all threads and processes.  `lock` >= 0 when held.
enum sw_jit_cache_turn { SW_JIT_CACHE_HELD, SW_JIT_CACHE_BUSY, SW_JIT_CACHE_NO_LOCKS };
enum sw_jit_cache_turn sw_jit_cache_try_lock(struct sw_jit_cache *cache, const char *key,
                                             int *lock);
void sw_jit_cache_unlock(struct sw_jit_cache *cache, const char *key, int lock);

// A text of at most `size` - 1 bytes, whole or not at all.
bool sw_jit_cache_read_note(struct sw_jit_cache *cache, const char *name, char *text, size_t size);
void sw_jit_cache_write_note(struct sw_jit_cache *cache, const char *name, const char *text);

#endif
