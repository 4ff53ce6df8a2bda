// memory.c: regions by address.  The list is copied on every change, so that kernels read theirs
// without a lock.
#include "memory.h"
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { PAGE = 4096, REMEMBERED = 256, DEVICES = 64 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct memory_table *current;
static uint64_t used_bytes[DEVICES];
static struct { uint64_t begin, bytes; } freed[REMEMBERED];
static unsigned freed_count;

static uint64_t total_bytes(void)
{
  const char *given = getenv("EMULATOR_MEMORY_BYTES");
  return given ? strtoull(given, NULL, 10) : UINT64_C(8) << 30;
}

static struct memory_table *copy_table(int count)
{
  struct memory_table *table =
    calloc(1, sizeof *table + (size_t)count * sizeof(struct memory_region));
  if (!table) abort();
  table->holders = 1;
  table->count = count;
  return table;
}

static void drop(struct memory_table *table)
{
  if (table && !--table->holders) free(table);
}

static void *map(uint64_t bytes, int extra)
{
  void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | extra, -1, 0);
  return at == MAP_FAILED ? NULL : at;
}

static uint64_t mapped_bytes(uint64_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

static void insert(struct memory_region region)
{
  int count = current ? current->count : 0, at = 0;
  struct memory_table *table = copy_table(count + 1);
  while (at < count && current->regions[at].begin < region.begin) at++;
  if (at) memcpy(table->regions, current->regions, (size_t)at * sizeof region);
  table->regions[at] = region;
  if (at < count)
    memcpy(table->regions + at + 1, current->regions + at, (size_t)(count - at) * sizeof region);
  drop(current);
  current = table;
}

uint64_t memory_allocate(uint64_t bytes, enum memory_kind kind, int device, bool watched)
{
  if (!bytes) return 0;
  pthread_mutex_lock(&lock);
  uint64_t address = 0;
  if (kind == MEMORY_PINNED || used_bytes[device] + bytes <= total_bytes()) {
    // a page after the end that nobody may touch, so that a copy past it is seen as well
    char *base = map(mapped_bytes(bytes) + PAGE, 0);
    if (base) {
      mprotect(base + mapped_bytes(bytes), PAGE, PROT_NONE);
      struct memory_region region = { .begin = (uint64_t)(uintptr_t)base, .bytes = bytes,
                                      .pinned = kind == MEMORY_PINNED, .device = device };
      if (kind == MEMORY_DEVICE) {
        memset(base, 0xff, bytes);
        region.begin |= MEMORY_DEVICE_BIT;
        used_bytes[device] += bytes;
        if (watched) region.shadow = map(2 * mapped_bytes(bytes), MAP_NORESERVE);
      }
      insert(region);
      address = region.begin;
    }
  }
  pthread_mutex_unlock(&lock);
  return address;
}

static void forget(int at)
{
  struct memory_region region = current->regions[at];
  struct memory_table *table = copy_table(current->count - 1);
  memcpy(table->regions, current->regions, (size_t)at * sizeof region);
  memcpy(table->regions + at, current->regions + at + 1,
         (size_t)(current->count - 1 - at) * sizeof region);
  drop(current);
  current = table;
  if (!region.pinned) used_bytes[region.device] -= region.bytes;
  freed[freed_count % REMEMBERED].begin = region.begin;
  freed[freed_count++ % REMEMBERED].bytes = region.bytes;
  munmap(MEMORY_HOST(region.begin), mapped_bytes(region.bytes) + PAGE);
  if (region.shadow) munmap(region.shadow, 2 * mapped_bytes(region.bytes));
}

bool memory_free(uint64_t address, enum memory_kind kind)
{
  bool found = false;
  pthread_mutex_lock(&lock);
  for (int i = 0; current && i < current->count && !found; i++)
    if (current->regions[i].begin == address &&
        current->regions[i].pinned == (kind == MEMORY_PINNED)) {
      forget(i);
      found = true;
    }
  pthread_mutex_unlock(&lock);
  return found;
}

void memory_free_all(int device)
{
  pthread_mutex_lock(&lock);
  for (int i = current ? current->count : 0; i-- > 0;)
    if (current->regions[i].device == device) forget(i);
  pthread_mutex_unlock(&lock);
}

void memory_room(int device, uint64_t *free_bytes, uint64_t *total)
{
  pthread_mutex_lock(&lock);
  *total = total_bytes();
  *free_bytes = *total - used_bytes[device];
  pthread_mutex_unlock(&lock);
}

struct memory_table *memory_hold(void)
{
  pthread_mutex_lock(&lock);
  if (!current) current = copy_table(0);
  current->holders++;
  struct memory_table *table = current;
  pthread_mutex_unlock(&lock);
  return table;
}

void memory_release(struct memory_table *table)
{
  pthread_mutex_lock(&lock);
  drop(table);
  pthread_mutex_unlock(&lock);
}

const struct memory_region *memory_find(const struct memory_table *table, uint64_t address,
                                        uint64_t bytes)
{
  int low = 0, high = table->count;
  while (low < high) {
    int middle = (low + high) / 2;
    if (table->regions[middle].begin <= address) low = middle + 1;
    else high = middle;
  }
  if (!low) return NULL;
  const struct memory_region *region = &table->regions[low - 1];
  uint64_t offset = address - region->begin;
  return offset < region->bytes && bytes <= region->bytes - offset ? region : NULL;
}

void memory_describe(uint64_t address, uint64_t bytes, char *text, size_t text_bytes)
{
  struct memory_table *table = memory_hold();
  snprintf(text, text_bytes, "no allocation is near");
  int64_t nearest = 1 << 20;
  for (int i = 0; i < table->count; i++) {
    const struct memory_region *region = &table->regions[i];
    int64_t before = (int64_t)(region->begin - address);
    int64_t after = (int64_t)(address + bytes - region->begin - region->bytes);
    if (before > 0 && before < nearest) {
      nearest = before;
      snprintf(text, text_bytes, "it begins %" PRId64 " bytes before the %" PRIu64
               " bytes at 0x%" PRIx64, before, region->bytes, region->begin);
    } else if (before <= 0 && after > 0 && after < nearest) {
      nearest = after;
      snprintf(text, text_bytes, "it ends %" PRId64 " bytes past the %" PRIu64
               " bytes at 0x%" PRIx64, after, region->bytes, region->begin);
    }
  }
  for (unsigned i = 0; i < REMEMBERED; i++)
    if (freed[i].bytes && address - freed[i].begin < freed[i].bytes)
      snprintf(text, text_bytes, "it was freed");
  memory_release(table);
}
