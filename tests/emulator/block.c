// block.c: one block of threads from its first instruction to its last: poisoned shared memory,
// warps in random order, barriers, and the words for what went wrong.
#include "watch.h"
#include "words.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void machine_fault(struct machine_block *block, const struct code_op *op, int lane,
                   enum machine_status status, const char *format, ...)
{
  int none = 0;
  // the first fault of a launch is the one to read
  if (atomic_compare_exchange_strong(&block->launch->status, &none, (int)status)) {
    const struct code *code = block->code;
    char where[128] = "", words[1280];
    int length, at = 0;
    const char *text = ptx_line(code->module, op->line, &length);
    if (block->now) at = snprintf(where, sizeof where, ", warp %u", block->now->number);
    if (lane >= 0 && lane < MACHINE_WHOLE_WARP)
      at += snprintf(where + at, sizeof where - (size_t)at, ", lane %d", lane);
    at += snprintf(where + at, sizeof where - (size_t)at, ", PTX line %u", op->line);
    if (op->source_line)
      snprintf(where + at, sizeof where - (size_t)at, " (source line %u)", op->source_line);
    va_list values;
    va_start(values, format);
    vsnprintf(words, sizeof words, format, values);
    va_end(values);
    words_say("kernel %s, block (%u,%u,%u)%s: %s\n  %.*s", code->kernel->name, block->index[0],
              block->index[1], block->index[2], where, words, length, text);
  }
  longjmp(block->give_up, 1);
}

void machine_tick(struct machine_block *block, struct machine_warp *warp)
{
  if (++warp->clock[warp->number] >= WATCH_CLOCKS && block->launch->watch)
    machine_fault(block, &block->code->ops[0], -1, MACHINE_LAUNCH_FAILED,
                  "more barriers than the emulator's clocks can count");
}

// ---- barriers

static uint32_t live_warps(const struct machine_block *block)
{
  uint32_t count = 0;
  for (uint32_t w = 0; w < block->warp_count; w++) count += block->warps[w].group_count > 0;
  return count;
}

static void give_result(struct machine_warp *warp, const struct code_op *op, uint32_t place,
                        const struct machine_barrier *barrier)
{
  if (op->code == CODE_BAR_RED_POPC) {
    uint32_t *into = machine_row(warp, place);
    for (int l = 0; l < 32; l++) into[l] = barrier->count;
  } else if (op->code != CODE_BAR_SYNC) {
    bool yes = op->code == CODE_BAR_RED_AND ? barrier->all : barrier->any;
    warp->predicates[place] = yes ? MACHINE_ALL : 0;
  }
}

static void release(struct machine_block *block, int number)
{
  struct machine_barrier *barrier = &block->barriers[number];
  for (uint32_t w = 0; w < block->warp_count; w++) {
    struct machine_warp *warp = &block->warps[w];
    for (int g = 0; g < warp->group_count; g++) {
      struct machine_group *group = &warp->groups[g];
      if (group->wait != MACHINE_AT_BARRIER || group->barrier != number) continue;
      group->wait = MACHINE_READY;
      uint32_t own = warp->clock[w];
      machine_join(warp->clock, barrier->clock);
      machine_join(warp->proxied, barrier->proxied);
      warp->clock[w] = own;
      const struct code_op *op = &block->code->ops[group->position - 1];
      give_result(warp, op, block->code->operands[op->first], barrier);
    }
  }
  *barrier = (struct machine_barrier){ .all = true };
  block->counts[MACHINE_MEETINGS]++;
}

static bool complete(const struct machine_block *block, const struct machine_barrier *barrier)
{
  uint32_t needed = barrier->needed ? barrier->needed : 32 * live_warps(block);
  return barrier->arrived && barrier->arrived >= needed;
}

bool machine_arrive(struct machine_block *block, struct machine_warp *warp,
                    const struct code_op *op, int group, bool waits)
{
  const uint32_t *o = block->code->operands + op->first;
  int lane = __builtin_ctz(warp->groups[group].mask);
  uint32_t number = ((const uint32_t *)machine_row(warp, o[1]))[lane];
  uint32_t threads = ((const uint32_t *)machine_row(warp, o[2]))[lane];
  if (number >= MACHINE_BARRIERS || threads % 32 || threads > 1024)
    machine_fault(block, op, lane, MACHINE_LAUNCH_FAILED, "barrier %u with %u threads", number,
                  threads);
  struct machine_barrier *barrier = &block->barriers[number];
  if (barrier->arrived && barrier->needed != threads)
    machine_fault(block, op, lane, MACHINE_LAUNCH_FAILED,
                  "barrier %u with %u threads, where others (line %u) wait with %u", number,
                  threads, barrier->op->line, barrier->needed);
  barrier->op = op;
  barrier->needed = threads;
  barrier->arrived += 32;
  machine_join(barrier->clock, warp->clock);
  machine_join(barrier->proxied, warp->proxied);
  machine_tick(block, warp);
  if (op->code != CODE_BAR_SYNC && op->code != CODE_BAR_ARRIVE) {
    uint32_t mask = warp->groups[group].mask, is = machine_predicate(warp, o[3]) & mask;
    barrier->count += (uint32_t)__builtin_popcount(is);
    barrier->all &= is == mask;
    barrier->any |= is != 0;
  }
  if (waits) {
    warp->groups[group].wait = MACHINE_AT_BARRIER;
    warp->groups[group].barrier = (int)number;
  }
  if (complete(block, barrier)) release(block, (int)number);
  return false;  // the group is chosen anew either way
}

// ---- from start to end

static void *room(void *array, size_t *have, size_t want, size_t bytes)
{
  if (*have >= want) return array;
  free(array);
  *have = want;
  void *more = aligned_alloc(64, (want * bytes + 63) / 64 * 64);
  if (!more) abort();
  return more;
}

static void lay_out_shared(struct machine_block *block)
{
  const struct code *code = block->code;
  uint32_t bytes = (uint32_t)code->static_shared_bytes + block->launch->dynamic_shared_bytes;
  size_t have = block->shared_room;
  block->shared = room(block->shared, &have, bytes + 64, 1);
  block->shared_room = (uint32_t)have;
  block->shared_bytes = bytes;
  memset(block->shared, 0xff, bytes);
  if (!block->launch->watch) return;
  bool asynchronous = code->has_wgmma;
  for (int i = 0; i < code->op_count && !asynchronous; i++)
    asynchronous = code->ops[i].code == CODE_BULK_LOAD || code->ops[i].code == CODE_BULK_STORE;
  block->grains = (bytes >> code->grain_bits) + 1;
  uint32_t agents = asynchronous ? MACHINE_AGENTS : block->warp_count;
  size_t rows = 3 + block->warp_count + (asynchronous ? MACHINE_AGENTS - MACHINE_TENSOR : 0);
  block->writer = room(block->writer, &block->shadow_room, rows * block->grains, 4);
  memset(block->writer, 0, rows * block->grains * 4);
  uint32_t *at = block->writer + block->grains;
  block->writer_op = at;
  block->reader_op = at += block->grains;
  memset(block->reader, 0, sizeof block->reader);
  for (uint32_t agent = 0; agent < agents; agent++)
    if (agent < block->warp_count || agent >= MACHINE_TENSOR)
      block->reader[agent] = at += block->grains;
}

static void set_special(struct machine_block *block, struct machine_warp *warp)
{
  const struct machine_launch *launch = block->launch;
  const uint32_t *place = block->code->special;
  for (uint32_t l = 0; l < 32; l++) {
    uint32_t thread = warp->number * 32 + l, x = launch->threads[0], y = launch->threads[1];
    const uint32_t values[CODE_SPECIAL_COUNT] = {
      [CODE_TID_X] = thread % x, [CODE_TID_Y] = thread / x % y, [CODE_TID_Z] = thread / x / y,
      [CODE_NTID_X] = x, [CODE_NTID_Y] = y, [CODE_NTID_Z] = launch->threads[2],
      [CODE_CTAID_X] = block->index[0], [CODE_CTAID_Y] = block->index[1],
      [CODE_CTAID_Z] = block->index[2], [CODE_NCTAID_X] = launch->grid[0],
      [CODE_NCTAID_Y] = launch->grid[1], [CODE_NCTAID_Z] = launch->grid[2],
      [CODE_LANEID] = l, [CODE_WARPID] = warp->number, [CODE_NWARPID] = block->warp_count,
      [CODE_SMID] = block->number % 16, [CODE_LANEMASK_EQ] = 1u << l,
      [CODE_LANEMASK_LT] = (1u << l) - 1, [CODE_LANEMASK_LE] = (2u << l) - 1,
      [CODE_LANEMASK_GT] = ~((2u << l) - 1), [CODE_LANEMASK_GE] = ~((1u << l) - 1),
      [CODE_DYNAMIC_SHARED_BYTES] = launch->dynamic_shared_bytes,
      [CODE_TOTAL_SHARED_BYTES] = block->shared_bytes, [CODE_CLUSTER_ONE] = 1,
    };
    for (int i = 0; i < CODE_SPECIAL_COUNT; i++)
      if (place[i]) warp->banks[0][place[i] + l] = values[i];
  }
}

static void lay_out_warps(struct machine_block *block)
{
  const struct code *code = block->code;
  size_t words = (code->register_words + 15) / 16 * 16;
  size_t predicates = ((size_t)code->predicate_count + 15) / 16 * 16;
  block->registers = room(block->registers, &block->register_room,
                          (words + predicates) * block->warp_count, 4);
  // a register that was never written holds poison
  memset(block->registers, 0xff, (words + predicates) * block->warp_count * 4);
  size_t local = (size_t)code->local_bytes * 32;
  block->local = room(block->local, &block->local_room, local * block->warp_count + 1, 1);
  memset(block->local, 0xff, local * block->warp_count);
  for (uint32_t w = 0; w < block->warp_count; w++) {
    struct machine_warp *warp = &block->warps[w];
    struct machine_copy *copies = warp->copies;
    struct machine_wgmma *wgmmas = warp->wgmmas;
    int copy_room = warp->copy_room, wgmma_room = warp->wgmma_room;
    for (int i = 0; i < warp->wgmma_count; i++) free(wgmmas[i].sums);
    memset(warp, 0, sizeof *warp);
    warp->copies = copies;
    warp->copy_room = copy_room;
    warp->wgmmas = wgmmas;
    warp->wgmma_room = wgmma_room;
    warp->number = w;
    warp->banks[0] = block->registers + (words + predicates) * w;
    warp->banks[1] = code->constants;
    warp->predicates = warp->banks[0] + words;
    warp->predicates[CODE_TRUE_PREDICATE] = MACHINE_ALL;
    warp->local = block->local + local * w;
    uint32_t lanes = block->thread_count - 32 * w;
    warp->born = lanes >= 32 ? MACHINE_ALL : (1u << lanes) - 1;
    warp->groups[0].mask = warp->born;
    warp->group_count = 1;
    warp->clock[w] = 1;
    set_special(block, warp);
  }
}

static _Noreturn void report_deadlock(struct machine_block *block)
{
  char text[1024];
  size_t length = 0;
  const struct code_op *first = NULL;
  for (uint32_t w = 0; w < block->warp_count; w++)
    for (int g = 0; g < block->warps[w].group_count && length < 900; g++) {
      const struct machine_group *group = &block->warps[w].groups[g];
      const struct code_op *op = &block->code->ops[group->position - 1];
      if (!first) first = op;
      length += (size_t)snprintf(text + length, sizeof text - length, "%s warp %u at %s %d (line "
                                 "%u)", length ? "," : "", w,
                                 group->wait == MACHINE_AT_BARRIER ? "barrier" : "mbarrier",
                                 group->barrier, op->line);
    }
  block->now = NULL;
  machine_fault(block, first, -1, MACHINE_LAUNCH_FAILED, "no warp can go on:%s", text);
}

static _Noreturn void report_endless(struct machine_block *block, const struct machine_warp *warp)
{
  int position = warp->group_count ? warp->groups[0].position : 1;
  machine_fault(block, &block->code->ops[position ? position - 1 : 0], -1, MACHINE_LAUNCH_FAILED,
                "the block does not end: %llu instructions so far",
                (unsigned long long)block->counts[MACHINE_INSTRUCTIONS]);
}

// The groups that waited for a phase that is over may look again.
static void wake(struct machine_block *block, struct machine_warp *warp)
{
  for (int g = 0; g < warp->group_count; g++) {
    struct machine_group *group = &warp->groups[g];
    if (group->wait == MACHINE_AT_MBARRIER &&
        (block->mbarriers[group->barrier].phase & 1) != group->parity)
      group->wait = MACHINE_READY;
  }
}

static bool can_run(const struct machine_warp *warp)
{
  for (int g = 0; g < warp->group_count; g++)
    if (warp->groups[g].wait == MACHINE_READY) return true;
  return false;
}

static void run_warps(struct machine_block *block)
{
  for (;;) {
    uint32_t ready = 0, alive = 0;
    struct machine_warp *chosen = NULL;
    for (uint32_t w = 0; w < block->warp_count; w++) {
      struct machine_warp *warp = &block->warps[w];
      alive += warp->group_count > 0;
      wake(block, warp);
      if (can_run(warp) && machine_random(block) % ++ready == 0) chosen = warp;
    }
    if (!alive) return;
    if (block->bulk_count && (!chosen || machine_random(block) % 4 == 0)) {
      machine_bulk_step(block);
      continue;
    }
    if (!chosen) report_deadlock(block);
    machine_run_warp(block, chosen);
    if (block->counts[MACHINE_INSTRUCTIONS] > block->launch->most_instructions)
      report_endless(block, chosen);
    if (chosen->group_count) continue;
    // a warp that has ended is no longer waited for
    for (int i = 0; i < MACHINE_BARRIERS; i++)
      if (!block->barriers[i].needed && complete(block, &block->barriers[i])) release(block, i);
  }
}

void machine_run_block(struct machine_block *block, struct machine_launch *launch, uint32_t number)
{
  block->launch = launch;
  block->code = launch->code;
  block->number = number;
  block->tag = launch->first_tag + number;
  block->index[0] = number % launch->grid[0];
  block->index[1] = number / launch->grid[0] % launch->grid[1];
  block->index[2] = number / launch->grid[0] / launch->grid[1];
  block->thread_count = launch->threads[0] * launch->threads[1] * launch->threads[2];
  block->warp_count = (block->thread_count + 31) / 32;
  block->random = (launch->seed * UINT64_C(0x9e3779b97f4a7c15) + number) ^
                  UINT64_C(0x2545f4914f6cdd1d);
  for (int i = 0; i < 4; i++) machine_random(block);
  block->region = NULL;
  block->now = NULL;
  block->mbarrier_count = block->bulk_count = 0;
  memset(block->counts, 0, sizeof block->counts);
  memset(block->agent_clock, 0, sizeof block->agent_clock);
  for (int i = 0; i < MACHINE_BARRIERS; i++)
    block->barriers[i] = (struct machine_barrier){ .all = true };
  lay_out_shared(block);
  lay_out_warps(block);
  if (setjmp(block->give_up)) return;
  run_warps(block);
  machine_async_end(block);
  for (int i = 0; i < MACHINE_COUNTS; i++)
    atomic_fetch_add(&launch->counts[i], block->counts[i]);
}

void machine_free_block(struct machine_block *block)
{
  for (int w = 0; w < MACHINE_WARPS; w++) {
    free(block->warps[w].copies);
    free(block->warps[w].wgmmas);
  }
  free(block->shared);
  free(block->writer);
  free(block->registers);
  free(block->local);
  free(block->bulks);
  free(block);
}
