// property.h: one random case of the property test: what is in it, how it is drawn, its one line
// of text and how a failing one is made small.  Pure; running a case is test_property.c's
// business.
//
// Everything is a whole number, so that one table serves text and shrinking.
#ifndef PROPERTY_H
#define PROPERTY_H

#include "swathe.h"

enum { PROPERTY_DOCUMENTS = 8, PROPERTY_RANKS = 64, PROPERTY_TEXT = 2048 };

enum property_isa { PROPERTY_BEST, PROPERTY_AVX2, PROPERTY_GENERIC, PROPERTY_ISAS };
extern const char *const property_isas[PROPERTY_ISAS];  // "best", "avx2", "generic"

extern const char *const property_scripts[];  // see group.h

// What is done beside the comparison with the reference.
enum property_probe {
  PROPERTY_PLAIN,
  PROPERTY_ISOLATE,      // one document's inputs change: the others' results stay bit-equal
  PROPERTY_THREADS,      // 1 to 3 compute threads: bit-equal
  PROPERTY_DIFFERENCES,  // the reference's gradients against its own finite differences
  PROPERTY_PROBES,
};
extern const char *const property_probes[PROPERTY_PROBES];

struct property {
  // what a kernel is made from
  int64_t gqa, dim_qk, dim_v;
  int64_t left, right;     // windows; -1: unlimited
  int64_t bf16, sinks;     // 0 or 1
  int64_t softcap;         // 0: off; kernels depend on whether, not on how much
  int64_t config;          // 0: the default; else which of the space's configs
  int64_t isa, optimised;  // optimised 0: compiled without optimisation
  int64_t cuda;            // 1: for that target, where f32 means f16
  // what else the problem says
  int64_t kv_heads;
  int64_t narrow_home;  // 1: the halo's gradients travel as bf16
  int64_t scale;        // thousandths; 0: the problem's default
  // what a layer is given
  int64_t gain, sink;  // factor of q; sinks are uniform in [-sink, sink]
  int64_t batch, layout, ranks;
  int64_t documents;  // 0: the row is one document of `tail` tokens
  int64_t lengths[PROPERTY_DOCUMENTS],
      paddings[PROPERTY_DOCUMENTS];  // padding stands behind its document
  int64_t tail;                      // tokens of padding behind the last document
  int64_t pieces,
      row_gap;  // SWATHE_SPANS: most pieces of a document, most padding rows before a piece
  int64_t head_major, gap;  // see struct share_form
  int64_t keep_halo, script, probe;
  int64_t before;  // 1: the layer ran another layout of the same documents first
  int64_t seed;    // of the values and of how spans are cut and dealt
};

// Uniform in [0, below).
int64_t property_random(uint64_t *state, int64_t below);

// Draws what a kernel is made from; then, any number of times, what else a problem says (heads,
// scale, how much softcap); then, any number of times, everything else.
void property_draw_kernel(uint64_t *state, struct property *property);
void property_draw_problem(uint64_t *state, struct property *property);
void property_draw_data(uint64_t *state, struct property *property);

int64_t property_tokens(const struct property *property);
// Its ranks, layout and tokens, which only guide tuning, are always the same: a layer is made
// quickly then.
struct swathe_problem property_problem(const struct property *property);

// A sharding and the arrays it points to; free with property_sharding_free.
struct property_sharding {
  struct swathe_sharding view;
  int64_t starts[PROPERTY_DOCUMENTS + 1], padded[PROPERTY_DOCUMENTS + 1];
  struct swathe_span *spans;
  int64_t *rank_spans, *rank_rows;
};
struct property_sharding *property_sharding_make(const struct property *property);
void property_sharding_free(struct property_sharding *sharding);

// "gqa=4 dim_qk=24 ...": only what is not as simple as can be; parse is the inverse, false with
// words.
void property_format(const struct property *property, char *text, size_t size);
bool property_parse(const char *text, struct property *property, char *words, size_t size);

// Makes a failing case smaller for as long as `fails` says it still does, at most `attempts`
// questions. Returns how many were asked.
int property_shrink(struct property *property,
                    bool (*fails)(void *arg, const struct property *property), void *arg,
                    int attempts);

#endif
