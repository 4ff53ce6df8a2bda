// fail.c: keeps the words of a failure per thread.  See fail.h.
#include "fail.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char words[8192];

enum cli_exit cli_fail(enum cli_exit code, const char *format, ...)
{
  va_list args;
  va_start(args, format);
  vsnprintf(words, sizeof words, format, args);
  va_end(args);
  return code;
}

// Appends `text`, each of its lines on a new, indented line.
static void append_indented(const char *text)
{
  size_t used = strlen(words);
  bool line_start = true;

  for (; *text && used + 4 < sizeof words; text++) {
    if (line_start && *text != '\n') {
      memcpy(words + used, "\n  ", 3);
      used += 3;
    }
    line_start = *text == '\n';
    if (!line_start) words[used++] = *text;
  }
  words[used] = 0;
}

enum cli_exit cli_fail_library(enum swathe_status status, const char *format, ...)
{
  const bool bad_use = status == SWATHE_BAD_USE || status == SWATHE_BAD_PROBLEM ||
                       status == SWATHE_BAD_CONFIG || status == SWATHE_BAD_SHARDING;
  const char *reason = swathe_error();
  va_list args;

  va_start(args, format);
  vsnprintf(words, sizeof words, format, args);
  va_end(args);
  append_indented(reason && *reason ? reason : swathe_status_text(status));
  return bad_use ? CLI_BAD_USE : CLI_FAILED;
}

const char *cli_fail_words(void)
{
  return words;
}
