// sequence.h: what a test of sharded attention needs around the library: random inputs for a whole
// sequence, the reference's answers, each rank's share of both, and a comparison that says where.
//
//   sequence_make, sequence_solve
//   per rank: share_make, swathe_layer_forward ..., share_check, share_gather, share_free
//   sequence_compare, sequence_free
//
// Knows the public header only.  Everything outside the contract (padding, rows no span covers,
// guard rows around each tensor, gaps between heads) is poisoned with NaN: reading it spoils a
// result, writing it is seen.  Running out of memory ends the test.
#ifndef SEQUENCE_H
#define SEQUENCE_H

#include "swathe.h"

// The arrays of a layer, [batch][tokens][heads][dim]; lse has dim 1.
enum sequence_array {
  SEQUENCE_Q, SEQUENCE_K, SEQUENCE_V, SEQUENCE_DOUT,              // given
  SEQUENCE_OUT, SEQUENCE_LSE, SEQUENCE_DQ, SEQUENCE_DK, SEQUENCE_DV,  // computed
  SEQUENCE_ARRAYS,
};
const char *sequence_array_name(enum sequence_array array);

// A whole, unsharded sequence.
struct sequence {
  struct swathe_problem problem;
  struct swathe_sequence view;       // of `given`, for the reference
  float *given[SEQUENCE_ARRAYS];     // q, k, v, dout; on padding NaN
  float *sink;                       // [q_heads], or NULL
  double *want[SEQUENCE_ARRAYS];     // out ... dv, after sequence_solve
  double *want_dsink;                // [q_heads]
  float *got[SEQUENCE_ARRAYS];       // out ... dv, NaN until share_gather brings them
  double *got_dsink;                 // [q_heads], the sum over the ranks gathered
};

// Inputs near N(0,1), the same for the same seed; q is multiplied by `gain`.  With a dtype of 16
// bits, q, k, v and dout are values that it holds.  Of the sharding only batch, tokens and
// documents matter here; its document arrays are borrowed until sequence_free.
struct sequence *sequence_make(const struct swathe_problem *problem,
                               const struct swathe_sharding *sharding, uint64_t seed, double gain);
void sequence_free(struct sequence *sequence);

// Fills `want` from the reference: once, after the test has had its way with `given` and `sink`.
void sequence_solve(struct sequence *sequence);
// The same, but with a dtype of 16 bits the gradients follow from `out` rounded to it, which is
// what a backward pass is given: large scores magnify that rounding, and it is not backward's
// error.
void sequence_solve_rounded(struct sequence *sequence);

// Index of a token's first element in one of the whole arrays; `elems`: how many it has.
size_t sequence_row(const struct sequence *sequence, enum sequence_array array, int64_t batch,
                    int64_t token, size_t *elems);

// Forgets what was gathered.
void sequence_forget(struct sequence *sequence);

// Where one array is farthest from the reference.
struct sequence_error {
  double worst, rms;                 // of |got - want| / max(1, |want|); infinite for a NaN
  int64_t batch, token;
  int head, dim;
  double got, want;                  // at the worst place
};
// Padding takes no part: the ranks' rows of padding are share_check's business.
struct sequence_error sequence_measure(const struct sequence *sequence, enum sequence_array array);

// The largest `worst` that passes, by kind of array.
struct sequence_tolerance { double out, lse, gradient; };

// Compares out and lse, and with `backward` also dq, dk, dv and dsink.  False: `words` names the
// worst place of the first array that is off.
bool sequence_compare(const struct sequence *sequence, bool backward,
                      struct sequence_tolerance tolerance, char *words, size_t size);

// How a share lies in memory.
struct share_form {
  bool head_major;                   // [batch][heads][rows][dim], not [batch][rows][heads][dim]
  int64_t gap;                       // poisoned elements after each head's dims
};

// One rank's tensors.
struct share {
  struct swathe_tensors tensors;     // ready for swathe_layer_forward and _backward
  int32_t rank;
  int64_t rows;
  int64_t *token_of_row;             // [rows]; in the packed row, -1: no span covers the row
  void *memory[SEQUENCE_ARRAYS];
  float *dsink;
  struct share_form form;
};

// Scatters the sequence by swathe_sharding_spans.  NULL if the library refuses the sharding;
// swathe_error() has its words.
struct share *share_make(const struct sequence *sequence, const struct swathe_sharding *sharding,
                         int32_t rank, struct share_form form);
void share_free(struct share *share);

// Bytes of one array's memory, guards and gaps included.
size_t share_bytes(const struct sequence *sequence, const struct share *share,
                   enum sequence_array array);

// Poisons the outputs again, as before the first launch.
void share_poison(const struct sequence *sequence, struct share *share);

// True if the inputs and everything outside the contract are as they were, and output rows that no
// span covers hold 0 (lse: -inf).  Without `backward`, backward's outputs must be untouched.
// False: `words` says where.
bool share_check(const struct sequence *sequence, const struct share *share, bool backward,
                 char *words, size_t size);

// Brings the rank's outputs to `sequence->got`.  One rank at a time: dsink is summed.
void share_gather(struct sequence *sequence, const struct share *share, bool backward);

// bfloat16: the upper half of a float, rounded to nearest even.
uint16_t sequence_to_bf16(float value);
float sequence_from_bf16(uint16_t bits);
// IEEE half precision, rounded to nearest even; what is too large becomes infinite.
uint16_t sequence_to_f16(float value);
float sequence_from_f16(uint16_t bits);

#endif
