// gen.h: the generator as C sees it.  Only gen.c includes lua.h.
//
// A sw_gen holds one Lua state and is used by one thread at a time.  A kernel is named as its
// template and space are: "forward", "backward".  An isa is a row of targets.lua: "avx512bf16",
// "avx512", "avx2", "neon", "generic"; for cuda "sm_80" and so on.  A config is text,
// "name=value,...", in the order its space declares; everything that enters from outside is
// validated by the same predicate that enumeration uses.
#ifndef SW_GEN_H
#define SW_GEN_H

#include "problem.h"

enum { SW_CONFIG_TEXT = 512 };

struct sw_gen;

// `directory` holds generator/ and templates/; NULL: the texts built into the library.
enum swathe_status sw_gen_open(const char *directory, struct sw_gen **gen);
void sw_gen_close(struct sw_gen *gen);

// Which texts these are: a digest of the built-in ones; of a directory's, when they last changed.
// Borrowed until close.
const char *sw_gen_digest(const struct sw_gen *gen);

enum swathe_status sw_gen_models(struct sw_gen *gen, swathe_model_visit *visit, void *arg);

// What every question below is about.
struct sw_gen_request {
  const struct swathe_problem *problem;
  const char *kernel, *isa;
};

// The rule-of-thumb config; exists for every valid problem.  `config` has SW_CONFIG_TEXT bytes.
enum swathe_status sw_gen_default(struct sw_gen *gen, const struct sw_gen_request *request,
                                  char *config);

// Validates `text` and writes its canonical form.  SWATHE_BAD_CONFIG and the reason otherwise.
enum swathe_status sw_gen_check(struct sw_gen *gen, const struct sw_gen_request *request,
                                const char *text, char *config);

// Lazy walk over the space; `exhaustive` includes what `prefer` rules turn away.
struct sw_gen_walk;
enum swathe_status sw_gen_walk_begin(struct sw_gen *gen, const struct sw_gen_request *request,
                                     bool exhaustive, struct sw_gen_walk **walk);
// SWATHE_NOT_FOUND (no words) after the last one.
enum swathe_status sw_gen_walk_next(struct sw_gen_walk *walk, char *config);
// For each rule that turned points away so far.
void sw_gen_walk_refused(struct sw_gen_walk *walk, swathe_refused_visit *visit, void *arg);
void sw_gen_walk_end(struct sw_gen_walk *walk);

// The derived sizes of a valid config, by their names in spaces.lua: what it costs, as far as that
// is known before it is compiled.  Then the isa's most_shared_bytes and most_registers of a block,
// where it has them.
typedef void sw_gen_size_visit(void *arg, const char *name, int64_t value);
enum swathe_status sw_gen_sizes(struct sw_gen *gen, const struct sw_gen_request *request,
                                const char *config, sw_gen_size_visit *visit, void *arg);

struct sw_gen_source {
  char *text;       // the whole source, zero-terminated
  char *flags;      // compiler flags, separated by single spaces
  char *origins;    // "file:line" of the template per emitted line, newline-separated
};
enum swathe_status sw_gen_emit(struct sw_gen *gen, const struct sw_gen_request *request,
                               const char *config, struct sw_gen_source *source);
void sw_gen_source_free(struct sw_gen_source *source);

// Rewrites "…:LINE:COL:" of a compiler log, where LINE is a line of the emitted text, into the
// template's own file:line.  Returns a new text (free with free), or NULL without memory.
char *sw_gen_map_log(const struct sw_gen_source *source, const char *log);

// Visits the isas of a target, the best first.
typedef void sw_gen_isa_visit(void *arg, const char *isa, const char *flags);
enum swathe_status sw_gen_isas(struct sw_gen *gen, enum swathe_target target,
                               sw_gen_isa_visit *visit, void *arg);

#endif
