// scratch.c: a test program's own directory.  See scratch.h.
#include "scratch.h"

#include <limits.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <cmocka.h>

static char directory[64];

const char *scratch_make(const char *room)
{
  snprintf(directory, sizeof directory, "/tmp/swathe-test-%s-XXXXXX", room);
  return mkdtemp(directory);
}

int scratch_remove(void **state)
{
  char command[sizeof directory + 16];
  (void)state;
  snprintf(command, sizeof command, "rm -rf %s", directory);
  return system(command);
}

const char *scratch_home(const char *room)
{
  static char binary[PATH_MAX];
  const char *command = getenv("TEST_COMMAND");
  if (!command || !realpath(command, binary)) {
    print_error("TEST_COMMAND must name the swathe binary\n");
    return NULL;
  }
  if (!scratch_make(room) || chdir(directory)) return NULL;
  setenv("HOME", directory, 1);
  unsetenv("SWATHE_DB");
  unsetenv("SWATHE_CACHE_DIR");
  unsetenv("XDG_CACHE_HOME");
  return binary;
}

void scratch_shell(const char *format, ...)
{
  char command[2048];
  va_list args;
  va_start(args, format);
  const int length = vsnprintf(command, sizeof command, format, args);
  va_end(args);
  assert_in_range(length, 1, sizeof command - 1);
  if (system(command)) fail_msg("failed: %s", command);
}

char *scratch_read(const char *path)
{
  FILE *file = fopen(path, "rb");
  assert_non_null(file);
  assert_int_equal(fseek(file, 0, SEEK_END), 0);
  const long size = ftell(file);
  assert_true(size >= 0);
  rewind(file);
  char *text = calloc(1, (size_t)size + 1);
  assert_non_null(text);
  assert_int_equal(fread(text, 1, (size_t)size, file), size);
  fclose(file);
  return text;
}
