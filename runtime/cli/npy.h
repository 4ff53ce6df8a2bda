// npy.h: NumPy's .npy files: float32, little endian, C order; everything else is refused with
// words.
#ifndef CLI_NPY_H
#define CLI_NPY_H

#include "fail.h"

enum { CLI_NPY_MOST_AXES = 8 };

struct cli_npy {
  int axes;                          // 0: a single number
  int64_t shape[CLI_NPY_MOST_AXES];  // none is 0
  int64_t elements;
  float *data;                       // owned by the reader's caller; free()
};

// Reads a whole file (format versions 1, 2 and 3).  The words name the file and what is wrong with
// it.
enum cli_exit cli_npy_read(const char *path, struct cli_npy *array);

// Writes version 1 under a temporary name in the same directory, then renames it to `path`.
enum cli_exit cli_npy_write(const char *path, const struct cli_npy *array);

// "[4096, 64, 128]".
struct cli_npy_shape { char text[192]; };
struct cli_npy_shape cli_npy_shape(const struct cli_npy *array);

#endif
