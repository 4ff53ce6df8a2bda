// compile_space.h: every config of a kernel's space, compiled: `swathe compile --space`.
#ifndef CLI_COMPILE_SPACE_H
#define CLI_COMPILE_SPACE_H

#include "given.h"

// For each of the isas (NULL: the context's own) and wanted directions.  Reads --budget, --most,
// --exhaustive and --threads.
enum cli_exit cli_compile_space(const struct cli_args *args, const struct cli_given *given,
                                const bool wanted[2], const char *const *isas, int32_t isa_count);

#endif
