// test_device.c: the CPU device: every item once, whoever runs it; workspaces, idle calls, forks.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "device.h"

enum { MOST_ITEMS = 1000, MOST_THREADS = 8 };

// What a launch saw, from every thread.
struct record {
  int64_t items, grain;
  size_t workspace_bytes;
  long range_ns;                         // how long a range takes
  _Atomic int visits[MOST_ITEMS];
  _Atomic int wide, outside, crooked, shared;  // ranges that break a promise
  _Atomic int threads;                   // that took part
  pthread_t caller;
  int idle_calls, idle_elsewhere;
};

static _Thread_local const struct record *seen_by_thread;

static void visit(const void *args, int64_t begin, int64_t end, void *workspace)
{
  struct record *record = *(struct record *const *)args;
  if (begin < 0 || end > record->items || begin >= end) {
    record->outside++;
    return;
  }
  if (end - begin > record->grain) record->wide++;
  for (int64_t i = begin; i < end; i++) record->visits[i]++;
  if (seen_by_thread != record) {
    seen_by_thread = record;
    record->threads++;
  }
  if (record->workspace_bytes) {
    unsigned char *bytes = workspace;
    const unsigned char mark = (unsigned char)(begin * 7 + 1);
    if ((uintptr_t)workspace % 64) record->crooked++;
    memset(bytes, mark, record->workspace_bytes);
    for (size_t i = 0; i < record->workspace_bytes; i++)
      if (bytes[i] != mark) {
        record->shared++;
        break;
      }
  }
  if (record->range_ns) nanosleep(&(struct timespec){ .tv_nsec = record->range_ns }, NULL);
}

static void count_idle(void *arg)
{
  struct record *record = arg;
  record->idle_calls++;
  if (!pthread_equal(record->caller, pthread_self())) record->idle_elsewhere++;
}

static struct record record;

static void run(struct sw_device *device, int64_t items, int64_t grain, size_t workspace_bytes,
                bool idle, long range_ns)
{
  struct record *address = &record;
  memset(&record, 0, sizeof record);
  seen_by_thread = NULL;
  record.items = items;
  record.grain = grain;
  record.workspace_bytes = workspace_bytes;
  record.range_ns = range_ns;
  record.caller = pthread_self();
  const struct sw_device_launch launch = {
    .kernel = visit,
    .args = &address,
    .items = items,
    .grain = grain,
    .workspace_bytes = workspace_bytes,
    .idle = idle ? count_idle : NULL,
    .idle_arg = &record,
  };
  assert_int_equal(sw_device_launch(device, &launch), SWATHE_OK);
  for (int64_t i = 0; i < MOST_ITEMS; i++) assert_int_equal(record.visits[i], i < items ? 1 : 0);
  assert_int_equal(record.wide, 0);
  assert_int_equal(record.outside, 0);
  assert_int_equal(record.crooked, 0);
  assert_int_equal(record.shared, 0);
  assert_int_equal(record.idle_elsewhere, 0);
}

static void every_item_runs_once(void **state)
{
  static const int64_t items[] = { 0, 1, 2, 7, 64, 333, MOST_ITEMS };
  static const int64_t grains[] = { 1, 3, 64, MOST_ITEMS, INT64_MAX };
  (void)state;
  for (int32_t threads = 1; threads <= MOST_THREADS; threads++) {
    struct sw_device *device;
    assert_int_equal(sw_device_cpu_create(threads, &device), SWATHE_OK);
    for (size_t i = 0; i < sizeof items / sizeof *items; i++)
      for (size_t g = 0; g < sizeof grains / sizeof *grains; g++)
        run(device, items[i], grains[g], (size_t)(100 * (i + g)), i & 1, 0);
    sw_device_destroy(device);
  }
}

static void many_launches_in_a_row(void **state)
{
  struct sw_device *device;
  (void)state;
  assert_int_equal(sw_device_cpu_create(4, &device), SWATHE_OK);
  for (int i = 0; i < 2000; i++) run(device, i % 9, 1 + i % 3, (size_t)(i % 5) * 40, i & 1, 0);
  sw_device_destroy(device);
}

static void slow_ranges_are_shared(void **state)
{
  struct sw_device *device;
  (void)state;
  assert_int_equal(sw_device_cpu_create(4, &device), SWATHE_OK);
  run(device, 80, 1, 64, false, 1000 * 1000);
  assert_true(record.threads >= 2);
  run(device, 80, 1, 64, false, 0);
  assert_true(record.threads <= 4);
  sw_device_destroy(device);

  assert_int_equal(sw_device_cpu_create(1, &device), SWATHE_OK);
  run(device, 80, 1, 64, false, 0);
  assert_int_equal(record.threads, 1);
  sw_device_destroy(device);
}

static void idle_is_called_between_ranges(void **state)
{
  struct sw_device *device;
  (void)state;
  assert_int_equal(sw_device_cpu_create(1, &device), SWATHE_OK);
  run(device, 30, 3, 0, true, 0);
  assert_int_equal(record.idle_calls, 10);
  run(device, 30, 3, 0, false, 0);
  assert_int_equal(record.idle_calls, 0);
  sw_device_destroy(device);
}

// The calling thread's range is over at once, another thread's takes long: the exchange must go on.
static _Atomic bool other_took_one, caller_is_done;
static void one_is_slow(const void *args, int64_t begin, int64_t end, void *workspace)
{
  const pthread_t *caller = args;
  const struct timespec moment = { .tv_nsec = 1000 * 1000 };
  (void)begin, (void)end, (void)workspace;
  if (pthread_equal(*caller, pthread_self())) {
    for (int i = 0; i < 5000 && !other_took_one; i++) nanosleep(&moment, NULL);
    caller_is_done = true;
  } else {
    other_took_one = true;
    while (!caller_is_done) nanosleep(&moment, NULL);
    for (int i = 0; i < 60; i++) nanosleep(&moment, NULL);
  }
}

static void idle_goes_on_while_others_finish(void **state)
{
  struct sw_device *device;
  pthread_t caller = pthread_self();
  (void)state;
  memset(&record, 0, sizeof record);
  record.caller = caller;
  assert_int_equal(sw_device_cpu_create(2, &device), SWATHE_OK);
  const struct sw_device_launch launch = { .kernel = one_is_slow,
                                           .args = &caller,
                                           .items = 2,
                                           .grain = 1,
                                           .idle = count_idle,
                                           .idle_arg = &record };
  assert_int_equal(sw_device_launch(device, &launch), SWATHE_OK);
  assert_true(record.idle_calls > 5);
  assert_int_equal(record.idle_elsewhere, 0);
  sw_device_destroy(device);
}

// Workspaces stay where they are until a launch needs more.
static void *workspace_seen;
static void see_workspace(const void *args, int64_t begin, int64_t end, void *workspace)
{
  (void)args, (void)begin, (void)end;
  workspace_seen = workspace;
}

static void workspace_is_kept(void **state)
{
  struct sw_device *device;
  (void)state;
  assert_int_equal(sw_device_cpu_create(1, &device), SWATHE_OK);
  struct sw_device_launch launch = { .kernel = see_workspace, .items = 1, .grain = 1,
                                     .workspace_bytes = 5000 };
  assert_int_equal(sw_device_launch(device, &launch), SWATHE_OK);
  void *first = workspace_seen;
  assert_non_null(first);
  launch.workspace_bytes = 10;
  assert_int_equal(sw_device_launch(device, &launch), SWATHE_OK);
  assert_ptr_equal(workspace_seen, first);

  launch.workspace_bytes = SIZE_MAX / 2 + 1;
  assert_int_equal(sw_device_launch(device, &launch), SWATHE_NO_MEMORY);
  launch.workspace_bytes = 10;
  assert_int_equal(sw_device_launch(device, &launch), SWATHE_OK);
  assert_non_null(workspace_seen);
  sw_device_destroy(device);
}

static void memory_is_zeroed_and_aligned(void **state)
{
  static const struct { size_t bytes, alignment; } cases[] = {
    { 0, 64 }, { 1, 64 }, { 63, 64 }, { 4097, 64 }, { (4u << 20) - 1, 64 },
    { 4u << 20, 2u << 20 }, { (5u << 20) + 3, 2u << 20 },
  };
  struct sw_device *device;
  (void)state;
  assert_int_equal(sw_device_cpu_create(1, &device), SWATHE_OK);
  for (int again = 0; again < 3; again++)
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
      unsigned char *bytes = sw_device_allocate(device, cases[i].bytes);
      assert_non_null(bytes);
      assert_int_equal((uintptr_t)bytes % cases[i].alignment, 0);
      for (size_t b = 0; b < cases[i].bytes; b++)
        if (bytes[b]) fail_msg("byte %zu of %zu is not zero", b, cases[i].bytes);
      memset(bytes, 0xff, cases[i].bytes);
      sw_device_free(device, bytes);
    }
  assert_null(sw_device_allocate(device, SIZE_MAX));
  assert_null(sw_device_allocate(device, SIZE_MAX / 2 + 1));
  sw_device_free(device, NULL);
  sw_device_destroy(device);
}

// In the child: the exit status says whether everything went well.
static int use_in_child(struct sw_device *inherited)
{
  struct sw_device *own;
  struct sw_device *devices[] = { inherited, NULL };
  if (sw_device_cpu_create(3, &own)) return 1;
  devices[1] = own;
  for (int d = 0; d < 2; d++)
    for (int i = 0; i < 50; i++) {
      run(devices[d], 40, 1, 64, i & 1, i == 0 ? 1000 * 1000 : 0);
      if (i == 0 && record.threads < 2) return 2;  // the calling thread alone would be slow
    }
  sw_device_destroy(own);
  sw_device_destroy(inherited);
  return 0;
}

static void fork_does_not_hang(void **state)
{
  struct sw_device *device;
  int status;
  (void)state;
  assert_int_equal(sw_device_cpu_create(3, &device), SWATHE_OK);
#ifndef __SANITIZE_THREAD__  // which cannot follow a fork of a process with threads
  run(device, 40, 1, 64, false, 1000 * 1000);
#endif
  const pid_t child = fork();
  assert_true(child >= 0);
  if (child == 0) {
    alarm(60);
    _exit(use_in_child(device));
  }
  assert_int_equal(waitpid(child, &status, 0), child);
  assert_true(WIFEXITED(status));
  assert_int_equal(WEXITSTATUS(status), 0);
  run(device, 40, 1, 64, false, 0);
  sw_device_destroy(device);
}

static void isa_follows_the_order_given(void **state)
{
  const char *all[] = { "avx512bf16", "avx512", "avx2", "neon", "generic" };
  const char *plain_first[] = { "generic", "avx512" };
  const char *unknown[] = { "vax", "avx9000" };
  (void)state;
  const char *best = sw_device_cpu_isa(all, 5);
  assert_non_null(best);
  assert_ptr_equal(sw_device_cpu_isa(plain_first, 2), plain_first[0]);
  assert_null(sw_device_cpu_isa(unknown, 2));
  assert_null(sw_device_cpu_isa(all, 0));

  // what the kernel says about this processor, beside what we say
  char line[16384];
  FILE *processors = fopen("/proc/cpuinfo", "re");
  bool avx2 = false, avx512 = false, pairs = false, x86 = false;
  while (processors && fgets(line, sizeof line, processors))
    if (!strncmp(line, "flags", 5)) {
      x86 = true;
      avx2 = strstr(line, " avx2") && strstr(line, " fma");
      avx512 = avx2 && strstr(line, " avx512f") && strstr(line, " avx512dq") &&
               strstr(line, " avx512bw") && strstr(line, " avx512vl");
      pairs = avx512 && strstr(line, " avx512_bf16");
    }
  if (processors) fclose(processors);
  if (x86)
    assert_string_equal(best, pairs ? "avx512bf16" : avx512 ? "avx512" : avx2 ? "avx2" : "generic");
}

static void processors_are_those_allowed(void **state)
{
  cpu_set_t before, one;
  (void)state;
  assert_int_equal(sched_getaffinity(0, sizeof before, &before), 0);
  assert_int_equal(sw_device_cpu_processors(), CPU_COUNT(&before));
  CPU_ZERO(&one);
  for (size_t cpu = 0; cpu < CPU_SETSIZE; cpu++)
    if (CPU_ISSET(cpu, &before)) {
      CPU_SET(cpu, &one);
      break;
    }
  assert_int_equal(sched_setaffinity(0, sizeof one, &one), 0);
  assert_int_equal(sw_device_cpu_processors(), 1);
  assert_int_equal(sched_setaffinity(0, sizeof before, &before), 0);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(fork_does_not_hang),  // first: no thread has been made yet
    cmocka_unit_test(every_item_runs_once),
    cmocka_unit_test(many_launches_in_a_row),
    cmocka_unit_test(slow_ranges_are_shared),
    cmocka_unit_test(idle_is_called_between_ranges),
    cmocka_unit_test(idle_goes_on_while_others_finish),
    cmocka_unit_test(workspace_is_kept),
    cmocka_unit_test(memory_is_zeroed_and_aligned),
    cmocka_unit_test(isa_follows_the_order_given),
    cmocka_unit_test(processors_are_those_allowed),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
