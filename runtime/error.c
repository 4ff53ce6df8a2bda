// error.c: the thread's last words, and warnings that are said once.
#include "error.h"

#include <assert.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char words[4096];

#define STATUS_TEXT(name, text) [SWATHE_##name] = text,
static const char *const status_texts[] = { SWATHE_STATUS_MAP(STATUS_TEXT) };
#undef STATUS_TEXT

const char *swathe_status_text(enum swathe_status status)
{
  const unsigned index = (unsigned)status;
  return index < SWATHE_STATUS_COUNT ? status_texts[index] : "unknown status";
}

const char *swathe_error(void)
{
  return words;
}

enum swathe_status sw_fail(enum swathe_status status, const char *format, ...)
{
  va_list args;
  assert(status != SWATHE_OK);
  va_start(args, format);
  vsnprintf(words, sizeof words, format, args);
  va_end(args);
  return status;
}

enum swathe_status sw_within(enum swathe_status status, const char *format, ...)
{
  const size_t used = strlen(words);
  va_list args;
  if (used + 4 >= sizeof words) return status;
  memcpy(words + used, "\n  ", 4);
  va_start(args, format);
  vsnprintf(words + used + 3, sizeof words - used - 3, format, args);
  va_end(args);
  return status;
}

// FNV-1a, 64 bit: offset basis and prime from the authors' page (isthe.com/chongo/tech/comp/fnv).
static uint64_t text_hash(const char *text)
{
  uint64_t hash = 14695981039346656037u;
  for (; *text; text++) hash = (hash ^ (unsigned char)*text) * 1099511628211u;
  return hash;
}

void sw_warn(const char *format, ...)
{
  static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  static uint64_t said[64];
  static unsigned said_count;
  char text[1024];
  va_list args;

  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);

  const uint64_t hash = text_hash(text);
  bool known = false;
  pthread_mutex_lock(&mutex);
  for (unsigned i = 0; i < said_count && i < 64; i++) known |= said[i] == hash;
  if (!known) said[said_count++ % 64] = hash;
  pthread_mutex_unlock(&mutex);
  if (!known) fprintf(stderr, "swathe: warning: %s\n", text);
}
