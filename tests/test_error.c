// test_error.c: the words of a failure: who writes them, who adds to them, which thread sees them;
// and warnings that are said once.
#include "error.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

static void every_status_has_a_text_of_its_own(void **state)
{
  (void)state;
  for (int a = 0; a < SWATHE_STATUS_COUNT; a++) {
    const char *text = swathe_status_text((enum swathe_status)a);
    assert_non_null(text);
    assert_true(*text != 0);
    assert_string_not_equal(text, "unknown status");
    for (int b = 0; b < a; b++)
      assert_string_not_equal(text, swathe_status_text((enum swathe_status)b));
  }
  assert_int_equal(SWATHE_OK, 0);
  assert_string_equal(swathe_status_text(SWATHE_OK), "success");
}

static void unknown_statuses_have_a_text_too(void **state)
{
  static const int unknown[] = { SWATHE_STATUS_COUNT, SWATHE_STATUS_COUNT + 1, -1, 1 << 30 };
  (void)state;
  for (size_t i = 0; i < sizeof unknown / sizeof unknown[0]; i++)
    assert_string_equal(swathe_status_text((enum swathe_status)unknown[i]), "unknown status");
}

static void fail_returns_the_status_and_keeps_the_words(void **state)
{
  (void)state;
  assert_int_equal(sw_fail(SWATHE_FILE, "cannot read %s: %d bytes", "q.npy", 3), SWATHE_FILE);
  assert_string_equal(swathe_error(), "cannot read q.npy: 3 bytes");
  assert_int_equal(sw_fail(SWATHE_DEVICE, "gone"), SWATHE_DEVICE);
  assert_string_equal(swathe_error(), "gone");
}

static void within_adds_a_line_each(void **state)
{
  (void)state;
  sw_fail(SWATHE_COMPILE, "no compiler");
  assert_int_equal(sw_within(SWATHE_COMPILE, "in kernel %d", 7), SWATHE_COMPILE);
  assert_int_equal(sw_within(SWATHE_COMPILE, "while loading"), SWATHE_COMPILE);
  assert_string_equal(swathe_error(), "no compiler\n  in kernel 7\n  while loading");
}

// Words of the world's making (a compiler's messages) may be of any length.
static void long_words_are_cut_and_end(void **state)
{
  static char text[10000];
  (void)state;
  memset(text, 'x', sizeof text - 1);
  sw_fail(SWATHE_EMIT, "%s", text);
  const size_t length = strlen(swathe_error());
  assert_true(length >= 1000 && length < sizeof text);
  assert_memory_equal(swathe_error(), text, length);
  for (int i = 0; i < 3; i++) assert_int_equal(sw_within(SWATHE_EMIT, "%s", text), SWATHE_EMIT);
  assert_true(strlen(swathe_error()) < sizeof text);

  for (size_t short_of = 0; short_of < 12; short_of++) {  // the line just fits, or just does not
    sw_fail(SWATHE_EMIT, "%.*s", (int)(length - short_of), text);
    sw_within(SWATHE_EMIT, "here");
    assert_memory_equal(swathe_error(), text, length - short_of);
    assert_true(strlen(swathe_error()) <= length);
  }
  sw_fail(SWATHE_EMIT, "%.*s", (int)(length - 7), text);
  sw_within(SWATHE_EMIT, "here");
  assert_string_equal(swathe_error() + length - 7, "\n  here");
}

static void *fail_elsewhere(void *arg)
{
  (void)arg;
  assert_string_equal(swathe_error(), "");
  sw_fail(SWATHE_TIMEOUT, "elsewhere");
  sw_within(SWATHE_TIMEOUT, "in a thread");
  return strcmp(swathe_error(), "elsewhere\n  in a thread") ? arg : NULL;
}

static void words_belong_to_their_thread(void **state)
{
  pthread_t thread;
  void *wrong;
  int mark;

  (void)state;
  sw_fail(SWATHE_BAD_USE, "here");
  assert_int_equal(pthread_create(&thread, NULL, fail_elsewhere, &mark), 0);
  assert_int_equal(pthread_join(thread, &wrong), 0);
  assert_null(wrong);
  assert_string_equal(swathe_error(), "here");
}

// What `say` writes to stderr.
static void listen(void (*say)(void), char *heard, size_t size)
{
  FILE *file = tmpfile();
  const int before = dup(STDERR_FILENO);

  assert_non_null(file);
  assert_true(before >= 0);
  fflush(stderr);
  assert_true(dup2(fileno(file), STDERR_FILENO) >= 0);
  say();
  fflush(stderr);
  assert_true(dup2(before, STDERR_FILENO) >= 0);
  close(before);
  rewind(file);
  heard[fread(heard, 1, size - 1, file)] = 0;
  fclose(file);
}

static void warn_of_two_things(void)
{
  for (int i = 0; i < 3; i++) sw_warn("the cache in %s cannot be written", "/nowhere");
  for (int i = 0; i < 3; i++) sw_warn("database %d is missing", 4);
}

static void *warn_in_a_thread(void *arg)
{
  sw_warn("said by many");
  return arg;
}

static void warn_in_threads(void)
{
  pthread_t threads[8];
  for (int i = 0; i < 8; i++)
    if (pthread_create(&threads[i], NULL, warn_in_a_thread, NULL)) abort();
  for (int i = 0; i < 8; i++) pthread_join(threads[i], NULL);
}

static void warnings_are_said_once(void **state)
{
  char heard[1000];

  (void)state;
  sw_fail(SWATHE_BAD_USE, "words before");
  listen(warn_of_two_things, heard, sizeof heard);
  assert_string_equal(heard, "swathe: warning: the cache in /nowhere cannot be written\n"
                             "swathe: warning: database 4 is missing\n");
  listen(warn_of_two_things, heard, sizeof heard);
  assert_string_equal(heard, "");
  listen(warn_in_threads, heard, sizeof heard);
  assert_string_equal(heard, "swathe: warning: said by many\n");
  assert_string_equal(swathe_error(), "words before");  // a warning is no failure
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(every_status_has_a_text_of_its_own),
    cmocka_unit_test(unknown_statuses_have_a_text_too),
    cmocka_unit_test(fail_returns_the_status_and_keeps_the_words),
    cmocka_unit_test(within_adds_a_line_each),
    cmocka_unit_test(long_words_are_cut_and_end),
    cmocka_unit_test(words_belong_to_their_thread),
    cmocka_unit_test(warnings_are_said_once),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
