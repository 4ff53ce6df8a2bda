// measure.h: what the benches of kernels share: compile a text, clock a thread, and the peak of
// this core that a kernel's speed is told as a part of.  A failure ends the program with words.
#ifndef MEASURE_H
#define MEASURE_H

#include "runtime/gen.h"
#include "runtime/jit.h"

// Seconds of processor time of this thread.
double measure_cpu_s(void);

void measure_stop_on(enum swathe_status status, const char *what);

void *measure_symbol(struct sw_jit_image *image, const char *name);

// `compile_s` may be NULL.
struct sw_jit_image *measure_compile(struct sw_jit *jit, const char *name, const char *source,
                                     const char *flags, const char *isa, double *compile_s);

// Flops per second of multiply-adds in registers, with the flags a kernel was compiled with: of
// floats, or of pairs of bfloat16.  One of ten short tries surpasses it, for on a shared machine
// the clock of a thread now and then misses some of its time.
double measure_peak(struct sw_jit *jit, const char *flags, const char *isa, bool pairs);

#endif
