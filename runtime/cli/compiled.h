// compiled.h: what came of a compilation, in words and in JSON, for the verb `compile` and its walk
// over a space.
#ifndef CLI_COMPILED_H
#define CLI_COMPILED_H

#include "report.h"

extern const char *const cli_compiled_directions[2];  // by enum swathe_direction

json_t *cli_compiled_json(enum swathe_direction direction, const struct swathe_compiled *compiled);

// Paragraph of one kernel; of a CUDA image with a table of what its kernels use.
void cli_compiled_print(enum swathe_direction direction, const struct swathe_compiled *compiled);

// The most that any kernel of the image uses; spills of all.
struct swathe_kernel_use cli_compiled_most(const struct swathe_compiled *compiled);

#endif
