// memory.h: what the device can address: its own memory and pinned memory of the host.
#ifndef EMULATOR_MEMORY_H
#define EMULATOR_MEMORY_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// Device memory lies at its host address plus a bit that no host address has: whoever mistakes one
// for the other dies of it.
#define MEMORY_DEVICE_BIT (UINT64_C(1) << 47)
#define MEMORY_HOST(address) ((void *)(uintptr_t)((address) & ~MEMORY_DEVICE_BIT))

struct memory_region {
  uint64_t begin, bytes;
  bool pinned;
  int device;                // that has it, or whose context asked for it
  uint64_t *shadow;          // of each 4 bytes who wrote and read them last; NULL: not watched
};

// The regions at one moment, ascending.  Those who hold a table see it unchanged.
struct memory_table {
  int holders, count;
  struct memory_region regions[];
};

enum memory_kind { MEMORY_DEVICE, MEMORY_PINNED };

// 0 where there is no room.  Device memory is filled with 0xff.
uint64_t memory_allocate(uint64_t bytes, enum memory_kind kind, int device, bool watched);
bool memory_free(uint64_t address, enum memory_kind kind);
void memory_free_all(int device);
void memory_room(int device, uint64_t *free_bytes, uint64_t *total_bytes);

struct memory_table *memory_hold(void);
void memory_release(struct memory_table *table);
// The region with all of the bytes, or NULL.
const struct memory_region *memory_find(const struct memory_table *table, uint64_t address,
                                        uint64_t bytes);
// Why the bytes are not in a region: "freed", "7 bytes past the end of 128 bytes at ..".
void memory_describe(uint64_t address, uint64_t bytes, char *text, size_t text_bytes);

#endif
