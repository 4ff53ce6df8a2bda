// words.h: what the emulator has to say: to stderr (not with EMULATOR_QUIET=1), and kept for tests.
#ifndef EMULATOR_WORDS_H
#define EMULATOR_WORDS_H
#include <stdarg.h>
#include <stddef.h>

void words_say(const char *format, ...) __attribute__((format(printf, 1, 2)));

// The last words, and how often there were any since the process began.
__attribute__((visibility("default"))) int emulator_words(char *text, size_t bytes);

#endif
