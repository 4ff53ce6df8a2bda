// launch.c: blocks go to whichever thread is free: the one that launches and a few helpers that
// serve every launch under way.
#include "launch.h"
#include "machine.h"
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct job {
  struct machine_launch launch;
  uint64_t count, step, shift;     // block i runs as (i * step + shift) % count
  atomic_uint_fast64_t next;
  int helpers;                     // at it now
  struct job *after;
};

enum { MOST_HELPERS = 15 };
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t change = PTHREAD_COND_INITIALIZER;
static struct job *jobs;
static struct { struct machine_block *blocks[2 * MOST_HELPERS]; int count; } spare;
static atomic_uint_fast64_t counts[MACHINE_COUNTS];
static pthread_once_t start_once = PTHREAD_ONCE_INIT;
static atomic_uint_fast32_t next_tag = 1;

static struct machine_block *take_block(void)
{
  struct machine_block *block = NULL;
  pthread_mutex_lock(&lock);
  if (spare.count) block = spare.blocks[--spare.count];
  pthread_mutex_unlock(&lock);
  if (!block) block = calloc(1, sizeof *block);
  if (!block) abort();
  return block;
}

static void give_block_back(struct machine_block *block)
{
  bool kept = false;
  pthread_mutex_lock(&lock);
  if (spare.count < 2 * MOST_HELPERS) {
    spare.blocks[spare.count++] = block;
    kept = true;
  }
  pthread_mutex_unlock(&lock);
  if (!kept) machine_free_block(block);
}

static void work(struct job *job)
{
  struct machine_block *block = take_block();
  for (;;) {
    uint64_t i = atomic_fetch_add(&job->next, 1);
    if (i >= job->count || atomic_load(&job->launch.status)) break;
    machine_run_block(block, &job->launch, (uint32_t)((i * job->step + job->shift) % job->count));
  }
  give_block_back(block);
}

static void *help(void *none)
{
  (void)none;
  pthread_mutex_lock(&lock);
  for (;;) {
    struct job *job = jobs;
    while (job && (atomic_load(&job->next) >= job->count || atomic_load(&job->launch.status)))
      job = job->after;
    if (!job) {
      pthread_cond_wait(&change, &lock);
      continue;
    }
    job->helpers++;
    pthread_mutex_unlock(&lock);
    work(job);
    pthread_mutex_lock(&lock);
    if (!--job->helpers) pthread_cond_broadcast(&change);
  }
  return NULL;
}

static void start_helpers(void)
{
  long processors = sysconf(_SC_NPROCESSORS_ONLN);
  for (long i = 1; i < processors && i <= MOST_HELPERS; i++) {
    pthread_t thread;
    if (!pthread_create(&thread, NULL, help, NULL)) pthread_detach(thread);
  }
}

static uint64_t common_divisor(uint64_t a, uint64_t b)
{
  while (b) {
    uint64_t rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

static void remove_job(struct job *job)
{
  pthread_mutex_lock(&lock);
  struct job **at = &jobs;
  while (*at != job) at = &(*at)->after;
  *at = job->after;
  while (job->helpers) pthread_cond_wait(&change, &lock);
  pthread_mutex_unlock(&lock);
}

static const char *const names[MACHINE_COUNTS] = { "instructions", "mma", "wgmma", "ldmatrix",
                                                   "replays", "copied bytes", "barriers" };

__attribute__((destructor)) static void say_counts(void)
{
  if (!getenv("EMULATOR_COUNTS")) return;
  for (int i = 0; i < MACHINE_COUNTS; i++)
    fprintf(stderr, "emulator: %-12s %" PRIuFAST64 "\n", names[i], atomic_load(&counts[i]));
}

uint64_t launch_count(const char *what)
{
  for (int i = 0; i < MACHINE_COUNTS; i++)
    if (!strcmp(names[i], what)) return atomic_load(&counts[i]);
  return UINT64_MAX;
}

int launch_run(const struct launch_request *request, uint64_t peers, uint64_t seed, bool watch)
{
  struct memory_table *memory = memory_hold();
  struct job job = { .count = (uint64_t)request->grid[0] * request->grid[1] * request->grid[2] };
  job.launch.code = request->code;
  for (int i = 0; i < 3; i++) {
    job.launch.grid[i] = request->grid[i];
    job.launch.threads[i] = request->threads[i];
  }
  job.launch.dynamic_shared_bytes = request->dynamic_shared_bytes;
  job.launch.params = request->params;
  job.launch.memory = memory;
  job.launch.device = request->device;
  job.launch.peers = peers;
  job.launch.seed = seed;
  const char *most = getenv("EMULATOR_MOST_INSTRUCTIONS");
  job.launch.most_instructions = most ? strtoull(most, NULL, 10) : UINT64_C(1) << 32;
  job.launch.watch = watch;
  // a tag has 28 bits; a process that uses them up is no longer watched between blocks
  job.launch.first_tag = (uint32_t)atomic_fetch_add(&next_tag, job.count) & 0xfffffff;
  job.step = seed % job.count;
  while (job.step == 0 || common_divisor(job.step, job.count) != 1) job.step++;
  job.shift = (seed >> 20) % job.count;
  if (job.count > 1) {
    pthread_once(&start_once, start_helpers);
    pthread_mutex_lock(&lock);
    job.after = jobs;
    jobs = &job;
    pthread_cond_broadcast(&change);
    pthread_mutex_unlock(&lock);
  }
  work(&job);
  if (job.count > 1) remove_job(&job);
  memory_release(memory);
  for (int i = 0; i < MACHINE_COUNTS; i++) atomic_fetch_add(&counts[i], job.launch.counts[i]);
  return atomic_load(&job.launch.status);
}
