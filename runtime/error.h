// error.h: the words of a failure.  The first function to know an error writes them, those above
// add where.  They are kept per thread; swathe_error() returns them.
#ifndef SW_ERROR_H
#define SW_ERROR_H

#include "swathe.h"

// Sets the thread's words and returns `status`, so that `return sw_fail(...)` reads as it acts.
enum swathe_status sw_fail(enum swathe_status status, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

// Adds a line saying where, and returns `status`.
enum swathe_status sw_within(enum swathe_status status, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

// A warning to stderr, for what is no failure of the caller: once per distinct text and process.
void sw_warn(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
