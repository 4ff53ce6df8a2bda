// words.c: one voice for all threads.
#include "words.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char last[2048];
static int count;

void words_say(const char *format, ...)
{
  const char *quiet = getenv("EMULATOR_QUIET");
  va_list values;
  va_start(values, format);
  pthread_mutex_lock(&lock);
  vsnprintf(last, sizeof last, format, values);
  count++;
  if (!quiet || strcmp(quiet, "1")) fprintf(stderr, "emulator: %s\n", last);
  pthread_mutex_unlock(&lock);
  va_end(values);
}

int emulator_words(char *text, size_t bytes)
{
  pthread_mutex_lock(&lock);
  snprintf(text, bytes, "%s", last);
  int said = count;
  pthread_mutex_unlock(&lock);
  return said;
}
