// async.c: copies that land later (cp.async, bulk copies) and the barriers in shared memory that
// tell of them.
//
// A cp.async lands at its issue or at its wait, by chance; until it was waited for its destination
// may not be touched, and it holds poison where the copy is late.
#include "watch.h"
#include <stdlib.h>
#include <string.h>

static struct machine_copy *add_copy(struct machine_warp *warp)
{
  if (warp->copy_count == warp->copy_room) {
    warp->copy_room = warp->copy_room ? 2 * warp->copy_room : 64;
    warp->copies = realloc(warp->copies, (size_t)warp->copy_room * sizeof *warp->copies);
    if (!warp->copies) abort();
  }
  return &warp->copies[warp->copy_count++];
}

static void land(struct machine_block *block, const struct machine_copy *copy, int lane)
{
  unsigned char *into = block->shared + copy->destination[lane];
  uint32_t bytes = copy->source_bytes[lane];
  if (bytes) memcpy(into, MEMORY_HOST(copy->source[lane]), bytes);
  memset(into + bytes, 0, copy->bytes - bytes);
}

FOR_EACH_MACHINE
void machine_cp_async(struct machine_block *block, struct machine_warp *warp,
                      const struct code_op *op, const uint32_t *o, uint32_t mask)
{
  struct machine_copy *copy = add_copy(warp);
  copy->op = op;
  copy->mask = mask;
  block->counts[MACHINE_COPIED_BYTES] += (uint64_t)__builtin_popcount(mask) * o[6];
  copy->bytes = o[6];
  copy->late = machine_random(block) & mask;
  memcpy(copy->group, warp->commits, sizeof copy->group);
  const uint32_t *wanted = machine_row(warp, o[7]);
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    int lane = __builtin_ctz(rest);
    uint64_t source = machine_address(warp, o + 3, o[5], lane);
    uint32_t bytes = wanted[lane] < copy->bytes ? wanted[lane] : copy->bytes;
    unsigned char *into = watch_shared(block, op, lane, machine_address(warp, o, o[2], lane) &
                                       CODE_WINDOW_OFFSET, copy->bytes);
    copy->destination[lane] = (uint32_t)(into - block->shared);
    copy->source[lane] = source;
    copy->source_bytes[lane] = (uint8_t)bytes;
    if (bytes) {
      watch_global(block, op, lane, source, bytes, copy->bytes);
      watch_blocks(block, op, lane, source, bytes, false);
    }
    watch_write(block, warp, op, lane, copy->destination[lane], copy->bytes, WATCH_PENDING);
    if (copy->late >> lane & 1) memset(into, 0xff, copy->bytes);
    else land(block, copy, lane);
  }
}

void machine_cp_async_wait(struct machine_block *block, struct machine_warp *warp,
                           const struct code_op *op, uint32_t left, uint32_t mask)
{
  (void)op;
  int kept = 0;
  for (int i = 0; i < warp->copy_count; i++) {
    struct machine_copy *copy = &warp->copies[i];
    for (uint32_t rest = copy->mask & mask; rest; rest &= rest - 1) {
      int lane = __builtin_ctz(rest);
      if (copy->group[lane] + left >= warp->commits[lane]) continue;
      if (copy->late >> lane & 1) land(block, copy, lane);
      watch_landed(block, warp, lane, copy->destination[lane], copy->bytes);
      copy->mask &= ~(1u << lane);
    }
    if (!copy->mask) continue;
    if (kept != i) warp->copies[kept] = *copy;
    kept++;
  }
  warp->copy_count = kept;
}

// ---- mbarriers

int machine_mbarrier_find(struct machine_block *block, const struct code_op *op, uint64_t address,
                          int lane)
{
  uint32_t at = (uint32_t)(address & CODE_WINDOW_OFFSET);
  watch_shared(block, op, lane, at, 8);
  for (int i = 0; i < block->mbarrier_count; i++)
    if (block->mbarriers[i].address == at) return i;
  machine_fault(block, op, lane, MACHINE_LAUNCH_FAILED,
                "there is no mbarrier at %u of shared memory", at - CODE_SHARED_BASE);
}

static void advance(struct machine_mbarrier *mbarrier)
{
  if (mbarrier->pending || mbarrier->bytes) return;
  mbarrier->phase++;
  mbarrier->pending = mbarrier->count;
  memcpy(mbarrier->clock, mbarrier->next, sizeof mbarrier->clock);
  memcpy(mbarrier->proxied, mbarrier->next_proxied, sizeof mbarrier->proxied);
}

static void need_initialised(struct machine_block *block, struct machine_warp *warp,
                             const struct code_op *op, const struct machine_mbarrier *mbarrier,
                             int lane)
{
  if (!block->launch->watch) return;
  uint32_t grain = (mbarrier->address - CODE_SHARED_BASE) >> block->code->grain_bits;
  uint32_t epoch = block->writer[grain];
  if (!watch_before(warp, epoch, lane))
    watch_race(block, op, lane, grain, "uses the mbarrier in", "was initialised", epoch >> 7 & 63,
               block->writer_op[grain]);
}

static void arrive(struct machine_block *block, struct machine_warp *warp,
                   const struct code_op *op, struct machine_mbarrier *mbarrier, int lane,
                   uint32_t count, uint32_t bytes)
{
  need_initialised(block, warp, op, mbarrier, lane);
  if (count > mbarrier->pending)
    machine_fault(block, op, lane, MACHINE_LAUNCH_FAILED,
                  "%u arrivals where the mbarrier at %u waits for %u", count,
                  mbarrier->address - CODE_SHARED_BASE, mbarrier->pending);
  machine_join(mbarrier->next, warp->clock);
  machine_join(mbarrier->next_proxied, warp->proxied);
  mbarrier->bytes += bytes;
  mbarrier->pending -= count;
  advance(mbarrier);
}

static void initialise(struct machine_block *block, struct machine_warp *warp,
                       const struct code_op *op, uint64_t address, int lane, uint32_t count)
{
  unsigned char *at = watch_shared(block, op, lane, address & CODE_WINDOW_OFFSET, 8);
  uint32_t offset = (uint32_t)(at - block->shared);
  if (!count || count >> 20)
    machine_fault(block, op, lane, MACHINE_LAUNCH_FAILED, "a count of %u", count);
  watch_write(block, warp, op, lane, offset, 8, 0);
  int found = 0;
  while (found < block->mbarrier_count &&
         block->mbarriers[found].address != offset + CODE_SHARED_BASE) found++;
  if (found == MACHINE_MBARRIERS)
    machine_fault(block, op, lane, MACHINE_LAUNCH_FAILED, "more mbarriers than the emulator has");
  if (found == block->mbarrier_count) block->mbarrier_count++;
  block->mbarriers[found] = (struct machine_mbarrier){
    .address = offset + CODE_SHARED_BASE, .count = count, .pending = count };
}

void machine_mbarrier_op(struct machine_block *block, struct machine_warp *warp,
                         const struct code_op *op, const uint32_t *o, uint32_t mask)
{
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    int lane = __builtin_ctz(rest);
    uint64_t address = machine_address(warp, o, o[2], lane);
    if (op->code == CODE_MBAR_INIT) {
      initialise(block, warp, op, address, lane, ((uint32_t *)machine_row(warp, o[3]))[lane]);
      continue;
    }
    int found = machine_mbarrier_find(block, op, address, lane);
    struct machine_mbarrier *mbarrier = &block->mbarriers[found];
    switch (op->code) {
    case CODE_MBAR_INVAL:
      *mbarrier = block->mbarriers[--block->mbarrier_count];
      break;
    case CODE_MBAR_EXPECT:
      need_initialised(block, warp, op, mbarrier, lane);
      mbarrier->bytes += ((uint32_t *)machine_row(warp, o[3]))[lane];
      break;
    case CODE_MBAR_ARRIVE: {
      uint32_t value = ((uint32_t *)machine_row(warp, o[4]))[lane];
      ((uint64_t *)machine_row(warp, o[3]))[lane] = mbarrier->phase & 1;
      arrive(block, warp, op, mbarrier, lane, op->kind ? 1 : value, op->kind ? value : 0);
      break;
    }
    default:  // cp.async.mbarrier.arrive: when the lane's copies so far have landed
      for (int i = 0; i < warp->copy_count; i++) {
        struct machine_copy *copy = &warp->copies[i];
        if (!(copy->mask >> lane & 1)) continue;
        if (copy->late >> lane & 1) land(block, copy, lane);
        watch_landed(block, warp, lane, copy->destination[lane], copy->bytes);
        copy->mask &= ~(1u << lane);
      }
      if (!op->kind) mbarrier->pending++;
      arrive(block, warp, op, mbarrier, lane, 1, 0);
    }
  }
  machine_tick(block, warp);
}

bool machine_mbarrier_passed(struct machine_block *block, struct machine_warp *warp, int mbarrier,
                             uint32_t parity)
{
  (void)block;
  const struct machine_mbarrier *at = &block->mbarriers[mbarrier];
  if ((at->phase & 1) == parity) return false;
  uint32_t own = warp->clock[warp->number];
  machine_join(warp->clock, at->clock);
  machine_join(warp->proxied, at->proxied);
  warp->clock[warp->number] = own;
  return true;
}

// ---- bulk copies

static struct machine_bulk *add_bulk(struct machine_block *block)
{
  if (block->bulk_count == block->bulk_room) {
    block->bulk_room = block->bulk_room ? 2 * block->bulk_room : 16;
    block->bulks = realloc(block->bulks, (size_t)block->bulk_room * sizeof *block->bulks);
    if (!block->bulks) abort();
  }
  return &block->bulks[block->bulk_count++];
}

static void mark(struct machine_block *block, const struct code_op *op, uint32_t offset,
                 uint32_t bytes, uint32_t clock, uint32_t pending)
{
  if (!block->launch->watch) return;
  for (uint32_t i = offset; i < offset + bytes; i += 1u << block->code->grain_bits) {
    uint32_t grain = i >> block->code->grain_bits;
    block->writer[grain] = WATCH_EPOCH(clock, MACHINE_BULK, 0) | pending;
    block->writer_op[grain] = (uint32_t)(op - block->code->ops);
  }
}

// A bulk copy's source is read by the async proxy: what wrote it must have been fenced.
static void watch_source(struct machine_block *block, struct machine_warp *warp,
                         const struct code_op *op, uint32_t offset, uint32_t bytes, uint32_t clock)
{
  if (!block->launch->watch) return;
  for (uint32_t i = offset; i < offset + bytes; i += 1u << block->code->grain_bits) {
    uint32_t grain = i >> block->code->grain_bits, epoch = block->writer[grain];
    uint32_t writer = epoch >> 7 & 63;
    if (!epoch || epoch & WATCH_PENDING) watch_unwritten(block, op, 0, grain);
    if (!watch_before(warp, epoch, MACHINE_WHOLE_WARP) && epoch >> 13 != warp->clock[writer])
      watch_race(block, op, 0, grain, "reads", "was written", writer, block->writer_op[grain]);
    if (writer < MACHINE_TENSOR && epoch >> 13 > warp->proxied[writer])
      machine_fault(block, op, 0, MACHINE_LAUNCH_FAILED,
                    "reads shared memory at %u, which was written (line %u) with no "
                    "fence.proxy.async since", i, block->code->ops[block->writer_op[grain]].line);
    block->reader[MACHINE_BULK][grain] = clock << 6 | MACHINE_WHOLE_WARP;
    block->reader_op[grain] = (uint32_t)(op - block->code->ops);
  }
}

static void issue(struct machine_block *block, struct machine_warp *warp, const struct code_op *op,
                  const uint32_t *o, int lane)
{
  bool store = op->code == CODE_BULK_STORE;
  uint64_t first = machine_address(warp, o, o[2], lane);
  uint64_t second = machine_address(warp, o + 3, o[5], lane);
  uint64_t shared = (store ? second : first) & CODE_WINDOW_OFFSET;
  uint64_t global = store ? first : second;
  uint32_t bytes = ((uint32_t *)machine_row(warp, o[6]))[lane];
  if (!bytes || bytes % 16)
    machine_fault(block, op, lane, MACHINE_MISALIGNED, "copies %u bytes, no multiple of 16", bytes);
  unsigned char *at = watch_shared(block, op, lane, shared, 16);
  uint32_t offset = (uint32_t)(at - block->shared);
  if (bytes > block->shared_bytes - offset)
    machine_fault(block, op, lane, MACHINE_ILLEGAL_ADDRESS, "%u bytes at %u of %u of shared memory",
                  bytes, offset, block->shared_bytes);
  watch_global(block, op, lane, global, bytes, 16);
  watch_blocks(block, op, lane, global, bytes, store);
  uint32_t clock = ++block->agent_clock[MACHINE_BULK];
  struct machine_bulk bulk = { .op = op, .shared = offset, .bytes = bytes, .global = global,
                               .store = store, .warp = warp->number, .group = warp->bulk_commits,
                               .clock = clock, .mbarrier = -1 };
  if (store) {
    watch_source(block, warp, op, offset, bytes, clock);
  } else {
    bulk.mbarrier = machine_mbarrier_find(block, op, machine_address(warp, o + 7, o[9], lane),
                                          lane);
    for (uint32_t i = 0; i < bytes; i += 1u << block->code->grain_bits)
      watch_write(block, warp, op, lane, offset + i, 1u << block->code->grain_bits, 0);
    mark(block, op, offset, bytes, clock, WATCH_PENDING);
    memset(at, 0xff, bytes);
  }
  *add_bulk(block) = bulk;
}

static bool bulk_left(const struct machine_block *block, const struct machine_warp *warp,
                      uint32_t left, bool reads_only)
{
  for (int i = 0; i < block->bulk_count; i++) {
    const struct machine_bulk *bulk = &block->bulks[i];
    if (bulk->store && bulk->warp == warp->number && bulk->group + left < warp->bulk_commits &&
        !(reads_only && bulk->read))
      return true;
  }
  return false;
}

static void finish(struct machine_block *block, int index, bool all)
{
  struct machine_bulk *bulk = &block->bulks[index];
  unsigned char *shared = block->shared + bulk->shared;
  if (bulk->store) {
    if (!bulk->read) memcpy(MEMORY_HOST(bulk->global), shared, bulk->bytes);
    bulk->read = true;
    if (!all) return;
  } else {
    struct machine_mbarrier *mbarrier = &block->mbarriers[bulk->mbarrier];
    memcpy(shared, MEMORY_HOST(bulk->global), bulk->bytes);
    mark(block, bulk->op, bulk->shared, bulk->bytes, bulk->clock, 0);
    if (bulk->clock > mbarrier->next[MACHINE_BULK]) mbarrier->next[MACHINE_BULK] = bulk->clock;
    mbarrier->bytes -= bulk->bytes;
    advance(mbarrier);
  }
  block->bulks[index] = block->bulks[--block->bulk_count];
}

void machine_bulk_op(struct machine_block *block, struct machine_warp *warp,
                     const struct code_op *op, const uint32_t *o, uint32_t mask)
{
  switch (op->code) {
  case CODE_BULK_COMMIT:
    warp->bulk_commits++;
    return;
  case CODE_BULK_WAIT:
    while (bulk_left(block, warp, o[0], op->kind))
      for (int i = block->bulk_count; i-- > 0;)
        if (block->bulks[i].store && block->bulks[i].warp == warp->number)
          finish(block, i, !op->kind);
    // what the engine has read may be written again
    warp->clock[MACHINE_BULK] = block->agent_clock[MACHINE_BULK];
    return;
  default:
    for (uint32_t rest = mask; rest; rest &= rest - 1)
      issue(block, warp, op, o, __builtin_ctz(rest));
  }
}

bool machine_bulk_step(struct machine_block *block)
{
  if (!block->bulk_count) return false;
  finish(block, (int)(machine_random(block) % (uint32_t)block->bulk_count), true);
  return true;
}

void machine_async_end(struct machine_block *block)
{
  for (uint32_t w = 0; w < block->warp_count; w++) {
    const struct machine_warp *warp = &block->warps[w];
    block->now = warp;
    if (warp->copy_count)
      machine_fault(block, warp->copies[0].op, __builtin_ctz(warp->copies[0].mask),
                    MACHINE_LAUNCH_FAILED, "the thread has ended with the copy not waited for");
    if (warp->wgmma_count)
      machine_fault(block, warp->wgmmas[0].op, 0, MACHINE_LAUNCH_FAILED,
                    "the warp has ended with the wgmma not waited for");
    const struct machine_warp *first = &block->warps[w / 4 * 4];
    if (warp->wgmma_digest != first->wgmma_digest)
      machine_fault(block, &block->code->ops[0], 0, MACHINE_LAUNCH_FAILED,
                    "the warp has ended with other wgmmas than warp %u of its warpgroup",
                    w / 4 * 4);
  }
  for (int i = 0; i < block->bulk_count; i++)
    if (!block->bulks[i].store)
      machine_fault(block, block->bulks[i].op, 0, MACHINE_LAUNCH_FAILED,
                    "the block has ended with the copy under way");
  for (int i = 0; i < block->mbarrier_count; i++)
    if (block->mbarriers[i].bytes)
      machine_fault(block, &block->code->ops[0], 0, MACHINE_LAUNCH_FAILED,
                    "the block has ended with %lld bytes expected by the mbarrier at %u",
                    (long long)block->mbarriers[i].bytes,
                    block->mbarriers[i].address - CODE_SHARED_BASE);
}
