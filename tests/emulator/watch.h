// watch.h: every access to shared and to device memory is checked here: bounds, alignment, whether
// the bytes were ever written, whether a barrier stands between it and what it conflicts with.
//
// An access is an epoch: the agent's clock, the agent, the lane.  Lanes of one warp are ordered
// with each other only by __syncwarp or a barrier, as the memory model has it; ldmatrix and
// stmatrix are accesses of the whole warp.
#ifndef EMULATOR_WATCH_H
#define EMULATOR_WATCH_H
#include "machine.h"

// clock 19 bits, agent 6, lane 6, whether it has not landed yet 1
#define WATCH_EPOCH(clock, agent, lane) \
  ((uint32_t)(clock) << 13 | (uint32_t)(agent) << 7 | (uint32_t)(lane) << 1)
enum { WATCH_PENDING = 1, WATCH_CLOCKS = 1 << 19 };

_Noreturn void watch_unwritten(struct machine_block *block, const struct code_op *op, int lane,
                               uint32_t grain);
_Noreturn void watch_race(struct machine_block *block, const struct code_op *op, int lane,
                          uint32_t grain, const char *mine, const char *theirs, uint32_t agent,
                          uint32_t other_op);

static inline bool watch_before(const struct machine_warp *warp, uint32_t epoch, int lane)
{
  uint32_t clock = epoch >> 13, agent = epoch >> 7 & 63, known = warp->clock[agent];
  return agent != warp->number ? clock <= known
                               : clock < known || (int)(epoch >> 1 & 63) == lane;
}

// Shared memory at `address` of the shared window, or a fault.
static inline unsigned char *watch_shared(struct machine_block *block, const struct code_op *op,
                                          int lane, uint64_t address, uint32_t bytes)
{
  uint32_t offset = (uint32_t)address - CODE_SHARED_BASE;
  if (address < CODE_SHARED_BASE || address >> 32 || offset > block->shared_bytes ||
      bytes > block->shared_bytes - offset)
    machine_fault(block, op, lane, MACHINE_ILLEGAL_ADDRESS,
                  "%u bytes at %lld of the block's %u bytes of shared memory", bytes,
                  (long long)address - CODE_SHARED_BASE, block->shared_bytes);
  if ((uint32_t)address & (bytes - 1))
    machine_fault(block, op, lane, MACHINE_MISALIGNED,
                  "%u bytes at %u of shared memory, which is not a multiple", bytes, offset);
  return block->shared + offset;
}

static inline uint32_t watch_grains(const struct machine_block *block, uint32_t bytes)
{
  uint32_t count = bytes >> block->code->grain_bits;
  return count ? count : 1;
}

// A read by a lane, or by the whole warp.
static inline void watch_read(struct machine_block *block, struct machine_warp *warp,
                              const struct code_op *op, int lane, uint32_t offset, uint32_t bytes)
{
  if (!block->launch->watch) return;
  uint32_t first = offset >> block->code->grain_bits, count = watch_grains(block, bytes);
  uint32_t now = warp->clock[warp->number] << 6, mine = now | (uint32_t)lane;
  uint32_t *seen = block->reader[warp->number] + first;
  uint32_t number = (uint32_t)(op - block->code->ops);
  uint32_t last = ~0u;  // no epoch
  for (uint32_t i = 0; i < count; i++) {
    uint32_t epoch = block->writer[first + i];
    if (epoch != last) {
      if (!epoch || epoch & WATCH_PENDING) watch_unwritten(block, op, lane, first + i);
      if (!watch_before(warp, epoch, lane))
        watch_race(block, op, lane, first + i, "reads", "was written", epoch >> 7 & 63,
                   block->writer_op[first + i]);
      last = epoch;
    }
    uint32_t before = seen[i];
    seen[i] = lane == MACHINE_WHOLE_WARP || (before >> 6 == now >> 6 && before != mine)
            ? now | MACHINE_WHOLE_WARP : mine;
    block->reader_op[first + i] = number;
  }
}

// Whether no agent can have read the grains later than the warp knows; if not, it is worth a look.
static inline bool watch_read_before(const struct machine_block *block,
                                     const struct machine_warp *warp, uint32_t first,
                                     uint32_t count)
{
  uint32_t late = block->reader[MACHINE_BULK] != NULL;  // more agents than warps
  for (uint32_t agent = 0; agent < block->warp_count; agent++) {
    const uint32_t *seen = block->reader[agent] + first;
    uint32_t known = warp->clock[agent] - (agent == warp->number);
    for (uint32_t i = 0; i < count; i++) late |= seen[i] >> 6 > known;
  }
  return !late;
}

// A write by a lane, or by the whole warp; `pending`: it lands later.
static inline void watch_write(struct machine_block *block, struct machine_warp *warp,
                               const struct code_op *op, int lane, uint32_t offset, uint32_t bytes,
                               uint32_t pending)
{
  if (!block->launch->watch) return;
  uint32_t first = offset >> block->code->grain_bits, count = watch_grains(block, bytes);
  uint32_t mine = WATCH_EPOCH(warp->clock[warp->number], warp->number, lane) | pending;
  bool read_before = watch_read_before(block, warp, first, count);
  for (uint32_t i = first; i < first + count; i++) {
    uint32_t epoch = block->writer[i];
    if (epoch & WATCH_PENDING)
      watch_race(block, op, lane, i, "writes", "is the destination of a copy under way by",
                 epoch >> 7 & 63, block->writer_op[i]);
    if (epoch && !watch_before(warp, epoch, lane))
      watch_race(block, op, lane, i, "writes", "was written", epoch >> 7 & 63,
                 block->writer_op[i]);
    for (uint32_t agent = 0; agent < MACHINE_AGENTS && !read_before; agent++) {
      if (agent == block->warp_count) {
        if (!block->reader[MACHINE_BULK]) break;
        agent = MACHINE_TENSOR;
      }
      uint32_t read = block->reader[agent] ? block->reader[agent][i] : 0;
      if (read && !watch_before(warp, WATCH_EPOCH(read >> 6, agent, read & 63), lane))
        watch_race(block, op, lane, i, "writes", "was read", agent, block->reader_op[i]);
    }
    block->writer[i] = mine;
    block->writer_op[i] = (uint32_t)(op - block->code->ops);
  }
}

// What was pending has landed, for the lane's own eyes.
static inline void watch_landed(struct machine_block *block, struct machine_warp *warp, int lane,
                                uint32_t offset, uint32_t bytes)
{
  if (!block->launch->watch) return;
  uint32_t first = offset >> block->code->grain_bits, count = watch_grains(block, bytes);
  for (uint32_t i = first; i < first + count; i++)
    block->writer[i] = WATCH_EPOCH(warp->clock[warp->number], warp->number, lane);
}

// Device or pinned memory, parameters and windows: host memory of `bytes`, or a fault.
unsigned char *watch_global_slowly(struct machine_block *block, const struct code_op *op, int lane,
                                   uint64_t address, uint32_t bytes);
void watch_blocks(struct machine_block *block, const struct code_op *op, int lane,
                  uint64_t address, uint32_t bytes, bool write);

static inline unsigned char *watch_global(struct machine_block *block, const struct code_op *op,
                                          int lane, uint64_t address, uint32_t bytes,
                                          uint32_t alignment)
{
  const struct memory_region *region = block->region;
  if (address & (alignment - 1))
    machine_fault(block, op, lane, MACHINE_MISALIGNED, "%u bytes at 0x%llx, which is not aligned",
                  bytes, (unsigned long long)address);
  if (region) {
    uint64_t offset = address - region->begin;
    if (offset < region->bytes && bytes <= region->bytes - offset) return MEMORY_HOST(address);
  }
  return watch_global_slowly(block, op, lane, address, bytes);
}

#endif
