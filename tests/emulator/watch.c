// watch.c: what is rare of the checks: words for faults, regions, races between blocks.
#include "watch.h"
#include <stdio.h>

static void name_agent(uint32_t agent, char *text, size_t bytes)
{
  if (agent < MACHINE_TENSOR) snprintf(text, bytes, "warp %u", agent);
  else if (agent < MACHINE_BULK) snprintf(text, bytes, "wgmma of warpgroup %u",
                                          agent - MACHINE_TENSOR);
  else snprintf(text, bytes, "a bulk copy");
}

void watch_unwritten(struct machine_block *block, const struct code_op *op, int lane,
                     uint32_t grain)
{
  uint32_t offset = grain << block->code->grain_bits;
  if (!block->writer[grain])
    machine_fault(block, op, lane, MACHINE_LAUNCH_FAILED,
                  "reads shared memory at %u, which was never written", offset);
  machine_fault(block, op, lane, MACHINE_LAUNCH_FAILED,
                "reads shared memory at %u, where a copy is under way (line %u) that was not "
                "waited for", offset, block->code->ops[block->writer_op[grain]].line);
}

void watch_race(struct machine_block *block, const struct code_op *op, int lane, uint32_t grain,
                const char *mine, const char *theirs, uint32_t agent, uint32_t other_op)
{
  char name[48];
  name_agent(agent, name, sizeof name);
  machine_fault(block, op, lane, MACHINE_LAUNCH_FAILED,
                "%s shared memory at %u, which %s by %s (line %u) with no barrier between", mine,
                grain << block->code->grain_bits, theirs, name, block->code->ops[other_op].line);
}

unsigned char *watch_global_slowly(struct machine_block *block, const struct code_op *op, int lane,
                                   uint64_t address, uint32_t bytes)
{
  const struct memory_region *region = memory_find(block->launch->memory, address, bytes);
  if (!region) {
    char why[160];
    memory_describe(address, bytes, why, sizeof why);
    machine_fault(block, op, lane, MACHINE_ILLEGAL_ADDRESS,
                  "%u bytes at 0x%llx are not in device memory: %s", bytes,
                  (unsigned long long)address, why);
  }
  const struct machine_launch *launch = block->launch;
  if (!region->pinned && region->device != launch->device &&
      !(launch->peers >> region->device & 1))
    machine_fault(block, op, lane, MACHINE_ILLEGAL_ADDRESS,
                  "%u bytes at 0x%llx are memory of device %d, not of device %d", bytes,
                  (unsigned long long)address, region->device, launch->device);
  block->region = region;
  return MEMORY_HOST(address);
}

// Of each 4 bytes: low half who wrote, high half who read them last: the block's tag (28 bits) and
// which of the bytes (4 bits).  Tags of blocks that ran before this launch do not count.
void watch_blocks(struct machine_block *block, const struct code_op *op, int lane,
                  uint64_t address, uint32_t bytes, bool write)
{
  const struct memory_region *region = block->region;
  const struct machine_launch *launch = block->launch;
  if (!launch->watch || !region || !region->shadow || block->code->orders_blocks) return;
  uint64_t offset = address - region->begin, end = offset + bytes;
  for (uint64_t word = offset / 4; word * 4 < end; word++) {
    uint32_t from = word * 4 < offset ? (uint32_t)(offset & 3) : 0;
    uint32_t to = word * 4 + 4 > end ? (uint32_t)(end - word * 4) : 4;
    uint32_t mask = (1u << to) - (1u << from), mine = block->tag << 4 | mask;
    uint64_t seen = __atomic_load_n(&region->shadow[word], __ATOMIC_RELAXED);
    uint32_t wrote = (uint32_t)seen, read = (uint32_t)(seen >> 32);
    bool theirs = wrote >> 4 != block->tag && wrote >> 4 >= launch->first_tag && wrote & mask;
    if (theirs)
      machine_fault(block, op, lane, MACHINE_LAUNCH_FAILED,
                    "%s 0x%llx, which block %u wrote: blocks of a launch have no order",
                    write ? "writes" : "reads", (unsigned long long)address,
                    (wrote >> 4) - launch->first_tag);
    if (write && read >> 4 != block->tag && read >> 4 >= launch->first_tag && read & mask)
      machine_fault(block, op, lane, MACHINE_LAUNCH_FAILED,
                    "writes 0x%llx, which block %u reads: blocks of a launch have no order",
                    (unsigned long long)address, (read >> 4) - launch->first_tag);
    uint32_t *half = write ? &wrote : &read;
    *half = *half >> 4 == block->tag ? *half | mask : mine;
    uint64_t now = (uint64_t)read << 32 | wrote;
    if (now != seen) __atomic_store_n(&region->shadow[word], now, __ATOMIC_RELAXED);
  }
}
