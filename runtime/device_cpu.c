// device_cpu.c: the processors as a device: memory, and a launch that shares its items among
// threads.
//
// A launch is cut into ranges of `grain` items; threads take them one by one from an atomic
// counter, so a slow thread takes fewer.  The calling thread takes ranges too and lets the exchange
// progress between them and while it waits for the last of the others.  Threads are made by the
// first launch that has work for them and sleep between launches; a forked child makes its own.
#include "device.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum {
  ALIGNMENT = 64,                // of every piece of memory: a cache line, the widest vector
  HUGE_PAGE = 2 << 20,
  HUGE_FROM = 4 << 20,           // pieces of this many bytes are advised huge
  IDLE_NAP_NS = 50 * 1000,       // between idle calls while other threads finish
};

struct workspace {
  void *memory;
  size_t bytes;
};

struct member {                  // a thread beside the calling one
  struct sw_device *device;
  int32_t index;                 // >= 1; the calling thread is 0
  pthread_t thread;
};

struct sw_device {
  int32_t threads;
  struct workspace *workspaces;  // [threads]
  struct member *members;        // [threads], the first one is not used
  pid_t process;                 // that the members run in

  int32_t member_count;          // 1 .. member_count are running; only the calling thread looks

  pthread_mutex_t mutex;         // of the rest, but `next_range`
  pthread_cond_t begin, end;
  uint64_t launches;             // a member sees that there is a new one
  int32_t wanted;                // members 1 .. wanted may join it, 0 when its ranges are all taken
  int32_t busy;                  // this many have joined and are not done
  bool stop;
  struct sw_device_launch launch;
  int64_t ranges;
  _Atomic int64_t next_range;
};

// ---- What this processor can -------------------------------------------------------------------

static bool has_isa(const char *isa)
{
  if (!strcmp(isa, "generic")) return true;
#if defined(__x86_64__) || defined(__i386__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (!strcmp(isa, "avx2")) return avx2;
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl");
  if (!strcmp(isa, "avx512")) return avx512;
  if (!strcmp(isa, "avx512bf16")) return avx512 && __builtin_cpu_supports("avx512bf16");
#elif defined(__aarch64__)
  if (!strcmp(isa, "neon")) return true;
#endif
  return false;
}

const char *sw_device_cpu_isa(const char *const *isas, int32_t count)
{
  for (int32_t i = 0; i < count; i++)
    if (has_isa(isas[i])) return isas[i];
  return NULL;
}

int32_t sw_device_cpu_processors(void)
{
  // the kernel refuses a set smaller than its own, whose size it does not tell
  for (int capacity = 1024; capacity <= 1 << 20; capacity *= 2) {
    cpu_set_t *set = CPU_ALLOC((size_t)capacity);
    if (!set) break;
    const size_t bytes = CPU_ALLOC_SIZE((size_t)capacity);
    const bool known = sched_getaffinity(0, bytes, set) == 0;
    const int count = known ? CPU_COUNT_S(bytes, set) : 0;
    const int error = errno;
    CPU_FREE(set);
    if (known) return count > 0 ? count : 1;
    if (error != EINVAL) break;
  }
  const long online = sysconf(_SC_NPROCESSORS_ONLN);
  return online > 0 ? (int32_t)online : 1;
}

// ---- Memory ------------------------------------------------------------------------------------

// `bytes` rounded up; NULL without memory.
static void *allocate(size_t bytes, bool zeroed)
{
  const bool huge = bytes >= HUGE_FROM;
  const size_t alignment = huge ? HUGE_PAGE : ALIGNMENT;
  if (bytes > SIZE_MAX / 2) return NULL;
  const size_t whole = bytes ? (bytes + alignment - 1) / alignment * alignment : alignment;
  void *memory = aligned_alloc(alignment, whole);
  if (!memory) return NULL;
  if (huge) madvise(memory, whole, MADV_HUGEPAGE);  // before the first touch; only advice
  if (zeroed) memset(memory, 0, whole);
  return memory;
}

void *sw_device_allocate(struct sw_device *device, size_t bytes)
{
  (void)device;
  return allocate(bytes, true);
}

void sw_device_free(struct sw_device *device, void *memory)
{
  (void)device;
  free(memory);
}

static bool grow_workspaces(struct sw_device *device, int32_t threads, size_t bytes)
{
  for (int32_t i = 0; i < threads; i++) {
    struct workspace *workspace = &device->workspaces[i];
    if (workspace->bytes >= bytes) continue;
    free(workspace->memory);
    workspace->memory = allocate(bytes, false);
    workspace->bytes = workspace->memory ? bytes : 0;
    if (!workspace->memory) return false;
  }
  return true;
}

// ---- Threads -----------------------------------------------------------------------------------

// Takes ranges until none is left.
static void run_ranges(struct sw_device *device, int32_t index)
{
  const struct sw_device_launch *launch = &device->launch;
  void *workspace = device->workspaces[index].memory;
  for (;;) {
    const int64_t range = atomic_fetch_add_explicit(&device->next_range, 1, memory_order_relaxed);
    if (range >= device->ranges) return;
    const int64_t begin = range * launch->grain;
    const int64_t left = launch->items - begin;
    launch->kernel(launch->args, begin, begin + (left < launch->grain ? left : launch->grain),
                   workspace);
    if (index == 0 && launch->idle) launch->idle(launch->idle_arg);
  }
}

static void *serve(void *arg)
{
  struct member *member = arg;
  struct sw_device *device = member->device;
  char name[16];
  uint64_t seen = 0;
  snprintf(name, sizeof name, "swathe-%d", (int)member->index % 100000);
  pthread_setname_np(pthread_self(), name);

  pthread_mutex_lock(&device->mutex);
  for (;;) {
    while (!device->stop && (seen == device->launches || member->index > device->wanted))
      pthread_cond_wait(&device->begin, &device->mutex);
    if (device->stop) break;
    seen = device->launches;
    device->busy++;
    pthread_mutex_unlock(&device->mutex);
    run_ranges(device, member->index);
    pthread_mutex_lock(&device->mutex);
    if (--device->busy == 0) pthread_cond_signal(&device->end);
  }
  pthread_mutex_unlock(&device->mutex);
  return NULL;
}

static void init_synchronisation(struct sw_device *device)
{
  pthread_condattr_t monotonic;
  pthread_condattr_init(&monotonic);
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_mutex_init(&device->mutex, NULL);
  pthread_cond_init(&device->begin, NULL);
  pthread_cond_init(&device->end, &monotonic);
  pthread_condattr_destroy(&monotonic);
}

// Brings the number of running members to `count`, or as many as the system grants.  They take no
// signals: those are the host program's.
static void start_members(struct sw_device *device, int32_t count)
{
  sigset_t all, before;
  if (device->process != getpid()) {  // a forked child has the memory but not the threads
    device->process = getpid();
    device->member_count = device->wanted = device->busy = 0;
    init_synchronisation(device);
  }
  if (device->member_count >= count) return;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  while (device->member_count < count) {
    struct member *member = &device->members[device->member_count + 1];
    *member = (struct member){ .device = device, .index = device->member_count + 1 };
    const int error = pthread_create(&member->thread, NULL, serve, member);
    if (error) {
      sw_warn("only %d of %d threads could be made: %s", (int)device->member_count + 1,
              (int)device->threads, strerror(error));
      break;
    }
    device->member_count++;
  }
  pthread_sigmask(SIG_SETMASK, &before, NULL);
}

enum swathe_status sw_device_cpu_create(int32_t threads, struct sw_device **device_out)
{
  assert(threads >= 1);
  struct sw_device *device = calloc(1, sizeof *device);
  if (!device)
    return sw_fail(SWATHE_NO_MEMORY, "no memory for a device of %d threads", (int)threads);
  device->workspaces = calloc((size_t)threads, sizeof *device->workspaces);
  device->members = calloc((size_t)threads, sizeof *device->members);
  device->threads = threads;
  device->process = getpid();
  init_synchronisation(device);
  if (!device->workspaces || !device->members) {
    sw_device_destroy(device);
    return sw_fail(SWATHE_NO_MEMORY, "no memory for a device of %d threads", (int)threads);
  }
  *device_out = device;
  return SWATHE_OK;
}

void sw_device_destroy(struct sw_device *device)
{
  if (!device) return;
  if (device->process == getpid()) {
    pthread_mutex_lock(&device->mutex);
    device->stop = true;
    pthread_cond_broadcast(&device->begin);
    pthread_mutex_unlock(&device->mutex);
    for (int32_t i = 1; i <= device->member_count; i++)
      pthread_join(device->members[i].thread, NULL);
    pthread_cond_destroy(&device->begin);
    pthread_cond_destroy(&device->end);
    pthread_mutex_destroy(&device->mutex);
  }
  for (int32_t i = 0; device->workspaces && i < device->threads; i++)
    free(device->workspaces[i].memory);
  free(device->workspaces);
  free(device->members);
  free(device);
}

// ---- Launch ------------------------------------------------------------------------------------

// Until those that joined are done; who has not woken up yet need not.  With an idle callback the
// exchange progresses meanwhile.
static void wait_for_members(struct sw_device *device)
{
  const struct sw_device_launch *launch = &device->launch;
  pthread_mutex_lock(&device->mutex);
  device->wanted = 0;
  while (device->busy) {
    if (!launch->idle) {
      pthread_cond_wait(&device->end, &device->mutex);
      continue;
    }
    pthread_mutex_unlock(&device->mutex);
    launch->idle(launch->idle_arg);
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += IDLE_NAP_NS;
    if (until.tv_nsec >= 1000000000) {
      until.tv_nsec -= 1000000000;
      until.tv_sec++;
    }
    pthread_mutex_lock(&device->mutex);
    if (device->busy) pthread_cond_timedwait(&device->end, &device->mutex, &until);
  }
  pthread_mutex_unlock(&device->mutex);
}

enum swathe_status sw_device_launch(struct sw_device *device, const struct sw_device_launch *launch)
{
  assert(launch->grain >= 1);
  if (launch->items <= 0) return SWATHE_OK;
  const int64_t ranges = (launch->items - 1) / launch->grain + 1;
  int32_t threads = ranges < device->threads ? (int32_t)ranges : device->threads;
  if (threads > 1) start_members(device, threads - 1);
  if (threads > device->member_count + 1) threads = device->member_count + 1;
  if (!grow_workspaces(device, threads, launch->workspace_bytes))
    return sw_fail(SWATHE_NO_MEMORY, "no memory for %d workspaces of %zu bytes", (int)threads,
                   launch->workspace_bytes);

  pthread_mutex_lock(&device->mutex);
  device->launch = *launch;
  device->ranges = ranges;
  atomic_store_explicit(&device->next_range, 0, memory_order_relaxed);
  device->wanted = threads - 1;
  device->launches++;
  if (threads > 1) pthread_cond_broadcast(&device->begin);
  pthread_mutex_unlock(&device->mutex);

  run_ranges(device, 0);
  wait_for_members(device);
  return SWATHE_OK;
}
