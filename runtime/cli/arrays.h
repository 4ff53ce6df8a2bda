// arrays.h: the tensors of a whole sequence, unsharded, as the files of `run` and the reference see
// them: float, packed [batch][tokens][heads][dim] in sequence order.
#ifndef CLI_ARRAYS_H
#define CLI_ARRAYS_H

#include "given.h"

enum cli_array {
  CLI_ARRAY_Q, CLI_ARRAY_K, CLI_ARRAY_V, CLI_ARRAY_SINK, CLI_ARRAY_DOUT,  // inputs
  CLI_ARRAY_OUT, CLI_ARRAY_LSE, CLI_ARRAY_DQ, CLI_ARRAY_DK, CLI_ARRAY_DV, CLI_ARRAY_DSINK,
  CLI_ARRAY_COUNT
};

struct cli_arrays {
  int64_t batch, tokens;
  bool batch_axis;                   // files have [batch, ...]
  bool backward;                     // the gradients are there
  int32_t heads[CLI_ARRAY_COUNT];    // 1 for none
  int32_t dims[CLI_ARRAY_COUNT];
  float *data[CLI_ARRAY_COUNT];      // NULL: not part of this run
};

const char *cli_arrays_name(enum cli_array array);

// Elements of one token: heads * dim.  Sink and dsink have no tokens; theirs is the whole array.
int64_t cli_arrays_row(const struct cli_arrays *arrays, enum cli_array array);

// Reads the files of --q, --k, --v, --sink and --dout, checks that they fit together and says what
// they hold.
enum cli_exit cli_arrays_read(const struct cli_args *args, struct cli_arrays *arrays,
                              struct cli_given_files *files);

// Fills q, k, v, sink (if the problem has sinks) and dout (if backward) with numbers like N(0,1):
// the same for the same seed, whatever the machine.
enum cli_exit cli_arrays_random(const struct cli_given *given, bool backward, uint64_t seed,
                                struct cli_arrays *arrays);

// Rounds q, k, v and dout to a dtype of 16 bits, and makes room for the outputs: 0, lse -inf.
enum cli_exit cli_arrays_prepare(const struct swathe_problem *problem, struct cli_arrays *arrays);

// Writes the outputs to `directory`/out.npy and so on; makes the directory if need be.
enum cli_exit cli_arrays_write(const struct cli_arrays *arrays, const char *directory);

void cli_arrays_free(struct cli_arrays *arrays);

// Well-mixed bits of a counter.
uint64_t cli_arrays_mix(uint64_t counter);

// Nearest bf16 or f16, ties to even, as 16 bits; and back.
uint16_t cli_arrays_narrow(enum swathe_dtype dtype, float value);
float cli_arrays_widen(enum swathe_dtype dtype, uint16_t bits);

#endif
