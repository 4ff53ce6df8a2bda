// tune.h: what the tuners of kernels and of the exchange share of their caller's wishes.
#ifndef SW_TUNE_H
#define SW_TUNE_H

#include "error.h"

// SWATHE_BAD_USE: a number that is none, or below 0.
enum swathe_status sw_tune_check_options(const struct swathe_tune_options *options);

#endif
