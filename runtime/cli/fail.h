// fail.h: how a verb fails: an exit status and words, kept for the thread that failed.  The first
// function to know an error writes the words; main.c prints them once, on stderr.
#ifndef CLI_FAIL_H
#define CLI_FAIL_H

#include "../swathe.h"

enum cli_exit {
  CLI_OK = 0,
  CLI_FAILED = 1,   // what was asked could not be done, or a check did not pass
  CLI_BAD_USE = 2,  // the command line makes no sense
};

// Keeps the words and returns `code`.
enum cli_exit cli_fail(enum cli_exit code, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

// The same for a call of the library that failed: the words, then the library's own, indented.
// Statuses that say the request makes no sense become CLI_BAD_USE, all others CLI_FAILED.
enum cli_exit cli_fail_library(enum swathe_status status, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

// Words of this thread's last failure; "" before the first.
const char *cli_fail_words(void);

#endif
