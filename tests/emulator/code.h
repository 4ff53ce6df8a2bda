// code.h: a kernel as the interpreter runs it: operands are places in a warp's registers.
#ifndef EMULATOR_CODE_H
#define EMULATOR_CODE_H
#include "ptx.h"

// Generic addresses: device and pinned memory lie where they lie, the rest in windows of its own.
#define CODE_SHARED_WINDOW (UINT64_C(1) << 56)
#define CODE_LOCAL_WINDOW  (UINT64_C(2) << 56)
#define CODE_PARAM_WINDOW  (UINT64_C(3) << 56)
#define CODE_WINDOW(address) ((address) & UINT64_C(0xff) << 56)
#define CODE_WINDOW_OFFSET ((UINT64_C(1) << 56) - 1)
enum { CODE_SHARED_BASE = 1024 };  // where a block's shared memory starts in its window

enum code_name {
#define ONE(code, names, result, a, value) CODE_##code,
#define TWO(code, names, result, a, b, value) CODE_##code,
#define THREE(code, names, result, a, b, c, value) CODE_##code,
#define FOUR(code, names, result, a, b, c, d, value) CODE_##code,
#include "operations.h"
#undef ONE
#undef TWO
#undef THREE
#undef FOUR
  CODE_PLAIN_COUNT,
  CODE_SETP_S32 = CODE_PLAIN_COUNT,  // d, other d, a, b, c predicate; sub: comparison, combination
  CODE_SETP_U32, CODE_SETP_F32, CODE_SETP_S64, CODE_SETP_U64, CODE_SETP_S16, CODE_SETP_U16,
  CODE_SETP_F64,
  CODE_PRED_AND, CODE_PRED_OR, CODE_PRED_XOR, CODE_PRED_NOT, CODE_PRED_MOV,
  CODE_SELP_32, CODE_SELP_64,
  CODE_SPLIT_64, CODE_JOIN_64, CODE_SPLIT_32, CODE_JOIN_32, CODE_SPLIT_64_4, CODE_JOIN_64_4,
  CODE_LOAD, CODE_STORE,             // struct code_access
  CODE_ATOM,
  CODE_BRANCH, CODE_BRANCH_INDEX, CODE_EXIT, CODE_TRAP,
  CODE_BAR_SYNC, CODE_BAR_ARRIVE, CODE_BAR_RED_POPC, CODE_BAR_RED_AND, CODE_BAR_RED_OR,
  CODE_WARP_SYNC, CODE_SHFL, CODE_VOTE, CODE_ACTIVE_MASK, CODE_REDUX, CODE_ELECT,
  CODE_LDMATRIX, CODE_STMATRIX, CODE_MOVMATRIX, CODE_MMA,
  CODE_CP_ASYNC, CODE_CP_ASYNC_COMMIT, CODE_CP_ASYNC_WAIT, CODE_CP_ASYNC_ARRIVE,
  CODE_MBAR_INIT, CODE_MBAR_INVAL, CODE_MBAR_ARRIVE, CODE_MBAR_EXPECT, CODE_MBAR_WAIT,
  CODE_BULK_LOAD, CODE_BULK_STORE, CODE_BULK_COMMIT, CODE_BULK_WAIT,
  CODE_FENCE, CODE_FENCE_PROXY,
  CODE_WGMMA, CODE_WGMMA_FENCE, CODE_WGMMA_COMMIT, CODE_WGMMA_WAIT,
  CODE_CLOCK_32, CODE_CLOCK_64, CODE_NOTHING,
};

enum code_comparison {
  CODE_EQ, CODE_NE, CODE_LT, CODE_LE, CODE_GT, CODE_GE,
  CODE_EQU, CODE_NEU, CODE_LTU, CODE_LEU, CODE_GTU, CODE_GEU, CODE_NUM, CODE_NAN,
};
enum code_combination { CODE_ALONE, CODE_AND_WITH, CODE_OR_WITH, CODE_XOR_WITH };

// What a load, a store or an atomic operation moves: `sub` of the op.
struct code_access {
  uint8_t space, element_bytes, count;
  bool sign, wide_address, wide_cell;  // 64 bit address register; 64 bit data registers
};
enum code_atom { CODE_ATOM_ADD, CODE_ATOM_MIN, CODE_ATOM_MAX, CODE_ATOM_AND, CODE_ATOM_OR,
                 CODE_ATOM_XOR, CODE_ATOM_EXCH, CODE_ATOM_CAS };
enum code_type { CODE_S32, CODE_U32, CODE_F32, CODE_S64, CODE_U64, CODE_F64 };
enum code_matrix { CODE_BF16, CODE_F16, CODE_TF32 };

struct code_op {
  uint16_t code, count;
  int32_t guard;             // predicate, or -1
  bool guard_negated;
  struct code_access access;
  uint8_t kind, type, extra; // by code
  uint32_t first;            // operands
  int32_t target;            // of a branch; of an indexed one the first of `count` in targets
  uint32_t line, source_line;
};

// An operand: a place in 32 bit words from the start of the warp's registers, or of the constants
// where the top bit is set; of a predicate its number, negated where the top bit is set; of a plain
// number (an offset, a count) itself.
#define CODE_TOP (UINT32_C(1) << 31)
enum { CODE_TRASH_PREDICATE = 0, CODE_TRUE_PREDICATE = 1 };

enum code_special {
  CODE_TID_X, CODE_TID_Y, CODE_TID_Z, CODE_NTID_X, CODE_NTID_Y, CODE_NTID_Z,
  CODE_CTAID_X, CODE_CTAID_Y, CODE_CTAID_Z, CODE_NCTAID_X, CODE_NCTAID_Y, CODE_NCTAID_Z,
  CODE_LANEID, CODE_WARPID, CODE_NWARPID, CODE_SMID, CODE_LANEMASK_EQ, CODE_LANEMASK_LT,
  CODE_LANEMASK_LE, CODE_LANEMASK_GT, CODE_LANEMASK_GE, CODE_DYNAMIC_SHARED_BYTES,
  CODE_TOTAL_SHARED_BYTES, CODE_CLUSTER_ZERO, CODE_CLUSTER_ONE, CODE_SPECIAL_COUNT,
};

struct code {
  const struct ptx_module *module;
  const struct ptx_kernel *kernel;
  struct code_op *ops;
  int op_count;
  uint32_t *operands;
  uint32_t operand_count;
  uint32_t *constants;                 // rows of 32 lanes
  uint32_t constant_words;
  uint32_t register_words;             // of a warp
  int predicate_count;
  uint32_t special[CODE_SPECIAL_COUNT];  // where in the warp's registers; 0: not used
  int *targets;
  uint64_t static_shared_bytes, local_bytes, param_bytes;
  int grain_bits;                      // log2 of the shadow's grain: 2, less for small accesses
  bool orders_blocks;                  // fences or atomics: blocks may hand memory to one another
  bool has_wgmma;
};

// `globals`: where the module's own memory lies.  NULL and words where an instruction is not known.
struct code *code_make(const struct ptx_module *module, const struct ptx_kernel *kernel,
                       uint64_t globals, char *problem, size_t problem_bytes);
void code_free(struct code *code);

#endif
