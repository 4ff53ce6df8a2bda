// machine.h: a launch, its blocks and their warps while they run.
#ifndef EMULATOR_MACHINE_H
#define EMULATOR_MACHINE_H
#include "code.h"
#include "memory.h"
#include <setjmp.h>
#include <stdatomic.h>

// Built for what the machine has: the loops over lanes are vector loops.
#if defined __x86_64__ && defined __GNUC__ && !defined __clang__ && !defined __SANITIZE_ADDRESS__ \
    && !defined __SANITIZE_THREAD__
#define FOR_EACH_MACHINE \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_MACHINE
#endif

// Who can touch shared memory: warps, the tensor cores of each warpgroup, the bulk copy engine.
// Each has a clock; what a warp knows of the others' clocks tells which accesses came before.
enum { MACHINE_WARPS = 32, MACHINE_TENSOR = 32, MACHINE_BULK = 40, MACHINE_AGENTS = 41 };
enum { MACHINE_WHOLE_WARP = 32 };  // as a lane
#define MACHINE_ALL UINT32_C(0xffffffff)

enum { MACHINE_BARRIERS = 16, MACHINE_MBARRIERS = 256 };

enum machine_status {  // CUresult's numbers
  MACHINE_ILLEGAL_ADDRESS = 700, MACHINE_MISALIGNED = 716, MACHINE_ILLEGAL_INSTRUCTION = 715,
  MACHINE_LAUNCH_FAILED = 719,
};

// What blocks did; `replays`: passes that ldmatrix and stmatrix needed beyond one for each matrix,
// because rows lay in the same banks.
enum machine_count { MACHINE_INSTRUCTIONS, MACHINE_MMA, MACHINE_WGMMA, MACHINE_LDMATRIX,
                     MACHINE_REPLAYS, MACHINE_COPIED_BYTES, MACHINE_MEETINGS, MACHINE_COUNTS };

struct machine_launch {
  const struct code *code;
  uint32_t grid[3], threads[3];
  uint32_t dynamic_shared_bytes;
  const unsigned char *params;
  const struct memory_table *memory;
  int device;
  uint64_t peers;              // devices whose memory it may touch as well
  uint64_t seed;
  uint64_t most_instructions;  // of a block: more is an endless loop
  uint32_t first_tag;          // blocks are first_tag + their number, unlike any other launch's
  bool watch;                  // races
  atomic_int status;
  atomic_uint_fast64_t counts[MACHINE_COUNTS];
};

enum machine_wait { MACHINE_READY, MACHINE_AT_BARRIER, MACHINE_AT_MBARRIER };

// Lanes of a warp that stand at the same instruction.
struct machine_group {
  int position;
  uint32_t mask;
  enum machine_wait wait;
  int barrier;                 // or the index of the mbarrier
  uint32_t parity;
};

// A cp.async of one warp: what has not landed yet.
struct machine_copy {
  const struct code_op *op;
  uint32_t mask;               // lanes whose copy is under way
  uint32_t late;               // of these, whose bytes have not been moved
  uint32_t bytes;              // of a lane in shared memory
  uint32_t group[32];          // each lane's count of commits at the issue
  uint32_t destination[32];
  uint64_t source[32];
  uint8_t source_bytes[32];
};

struct machine_wgmma {
  const struct code_op *op;
  uint32_t group;
  uint64_t a_descriptor, b_descriptor;
  uint32_t a[4][32];
  bool accumulate;
  float *sums;                 // [columns / 2][32]: what the accumulators held
  bool chained;                // sums come from an earlier one in flight
  uint32_t clock;              // of the warpgroup's tensor agent
};

struct machine_warp {
  uint32_t *banks[2];          // registers, constants
  uint32_t *predicates;
  uint32_t number;
  uint32_t born;               // lanes that exist
  struct machine_group groups[32];
  int group_count;
  uint32_t clock[MACHINE_AGENTS];   // what of each agent came before now
  uint32_t proxied[MACHINE_AGENTS]; // and of these what the async proxy may see
  struct machine_copy *copies;
  int copy_count, copy_room;
  uint32_t commits[32];
  struct machine_wgmma *wgmmas;
  int wgmma_count, wgmma_room;
  uint32_t wgmma_commits;
  bool wgmma_fenced;           // registers may be handed to wgmma
  uint64_t wgmma_digest;       // of all it has issued: a warpgroup's warps do the same
  uint32_t bulk_commits;
  unsigned char *local;        // [lane][local_bytes]
};

struct machine_barrier {
  uint32_t arrived, needed;    // threads
  uint32_t clock[MACHINE_AGENTS], proxied[MACHINE_AGENTS];
  uint32_t count;              // of a reduction: predicates so far
  bool all, any;
  const struct code_op *op;
};

struct machine_mbarrier {
  uint32_t address;
  uint32_t count, pending, phase;
  int64_t bytes;               // expected and not yet there
  uint32_t next[MACHINE_AGENTS], clock[MACHINE_AGENTS];   // of this phase, of the completed one
  uint32_t next_proxied[MACHINE_AGENTS], proxied[MACHINE_AGENTS];
};

struct machine_bulk {          // a bulk copy under way
  const struct code_op *op;
  uint32_t shared, bytes;
  uint64_t global;
  bool store;
  int mbarrier;                // of a load
  uint32_t warp, group;        // of a store
  bool read;                   // a store's source has been read
  uint32_t clock;
};

struct machine_block {
  struct machine_launch *launch;
  const struct code *code;
  uint32_t index[3], number, tag;
  unsigned char *shared;
  uint32_t shared_bytes, shared_room;
  // Of each grain of shared memory: who wrote it last and with which op, when each agent read it.
  uint32_t *writer, *writer_op, *reader[MACHINE_AGENTS], *reader_op;
  size_t shadow_room;
  uint32_t grains;
  struct machine_warp warps[MACHINE_WARPS];
  uint32_t warp_count, thread_count;
  uint32_t *registers;
  size_t register_room;
  unsigned char *local;
  size_t local_room;
  struct machine_barrier barriers[MACHINE_BARRIERS];
  struct machine_mbarrier mbarriers[MACHINE_MBARRIERS];
  int mbarrier_count;
  struct machine_bulk *bulks;
  int bulk_count, bulk_room;
  uint32_t agent_clock[MACHINE_AGENTS];  // of the agents that are no warps
  const struct memory_region *region;    // of the last access
  uint64_t random;
  uint64_t counts[MACHINE_COUNTS];
  const struct machine_warp *now;
  jmp_buf give_up;
};

// ---- block.c

// Runs one block to its end.  The launch's status tells of a fault.
void machine_run_block(struct machine_block *block, struct machine_launch *launch,
                       uint32_t number);
void machine_free_block(struct machine_block *block);

// Says what happened where, once a launch, sets its status and leaves the block.
_Noreturn void machine_fault(struct machine_block *block, const struct code_op *op, int lane,
                             enum machine_status status, const char *format, ...)
  __attribute__((format(printf, 5, 6)));

// Lanes arrive at a barrier; true where all have and the warp may go on.
bool machine_arrive(struct machine_block *block, struct machine_warp *warp,
                    const struct code_op *op, int group, bool waits);
// The warp's lanes have seen each other's memory.
void machine_tick(struct machine_block *block, struct machine_warp *warp);

static inline uint32_t machine_random(struct machine_block *block)
{
  uint64_t x = block->random;
  x ^= x << 13;
  x ^= x >> 7;
  x ^= x << 17;
  block->random = x;
  return (uint32_t)(x >> 32);
}

static inline void machine_join(uint32_t *into, const uint32_t *from)
{
  for (int i = 0; i < MACHINE_AGENTS; i++) into[i] = into[i] > from[i] ? into[i] : from[i];
}

// The row of 32 lanes an operand stands for.
static inline void *machine_row(const struct machine_warp *warp, uint32_t operand)
{
  return warp->banks[operand >> 31] + (operand & ~CODE_TOP);
}

static inline uint32_t machine_predicate(const struct machine_warp *warp, uint32_t operand)
{
  uint32_t value = warp->predicates[operand & ~CODE_TOP];
  return operand >> 31 ? ~value : value;
}

static inline uint64_t machine_address(const struct machine_warp *warp, const uint32_t *operands,
                                       bool wide, int lane)
{
  const void *row = machine_row(warp, operands[0]);
  int64_t offset = (int32_t)operands[1];
  return wide ? ((const uint64_t *)row)[lane] + (uint64_t)offset
              : ((const uint32_t *)row)[lane] + (uint32_t)offset;
}

// ---- interpret.c

// Runs a warp until it waits, ends, or has run for a while.
void machine_run_warp(struct machine_block *block, struct machine_warp *warp);

// ---- tensor.c

void machine_mma(struct machine_block *block, struct machine_warp *warp, const struct code_op *op,
                 const uint32_t *operands);
void machine_ldmatrix(struct machine_block *block, struct machine_warp *warp,
                      const struct code_op *op, const uint32_t *operands);
void machine_stmatrix(struct machine_block *block, struct machine_warp *warp,
                      const struct code_op *op, const uint32_t *operands);
void machine_movmatrix(struct machine_warp *warp, const uint32_t *operands);
void machine_wgmma_issue(struct machine_block *block, struct machine_warp *warp,
                         const struct code_op *op, const uint32_t *operands);
void machine_wgmma_wait(struct machine_block *block, struct machine_warp *warp, uint32_t left);

// ---- async.c

void machine_cp_async(struct machine_block *block, struct machine_warp *warp,
                      const struct code_op *op, const uint32_t *operands, uint32_t mask);
void machine_cp_async_wait(struct machine_block *block, struct machine_warp *warp,
                           const struct code_op *op, uint32_t left, uint32_t mask);
void machine_mbarrier_op(struct machine_block *block, struct machine_warp *warp,
                         const struct code_op *op, const uint32_t *operands, uint32_t mask);
// Whether the phase is over; where it is, the warp knows what came before that.
bool machine_mbarrier_passed(struct machine_block *block, struct machine_warp *warp, int mbarrier,
                             uint32_t parity);
int machine_mbarrier_find(struct machine_block *block, const struct code_op *op, uint64_t address,
                          int lane);
void machine_bulk_op(struct machine_block *block, struct machine_warp *warp,
                     const struct code_op *op, const uint32_t *operands, uint32_t mask);
// Moves one bulk copy on; false where none is under way.
bool machine_bulk_step(struct machine_block *block);
// A block's end: nothing may be left under way.
void machine_async_end(struct machine_block *block);

#endif
