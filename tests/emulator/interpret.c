// interpret.c: runs a warp's ops on rows of 32 lanes.
//
// Lanes that have parted run group by group, the group at the lowest position first, and join again
// where positions meet.
#include "watch.h"
#include <math.h>
#include <string.h>

// ---- what operations.h speaks of

typedef uint32_t cell_u8, cell_s8, cell_u16, cell_s16, cell_u32;
typedef int32_t cell_s32;
typedef float cell_f32;
typedef uint64_t cell_u64;
typedef int64_t cell_s64;
typedef double cell_f64;
typedef uint8_t type_u8;
typedef int8_t type_s8;
typedef uint16_t type_u16;
typedef int16_t type_s16;
typedef uint32_t type_u32;
typedef int32_t type_s32;
typedef float type_f32;
typedef uint64_t type_u64;
typedef int64_t type_s64;
typedef double type_f64;
#define PUT_u8(x) (uint8_t)(x)
#define PUT_s8(x) (uint32_t)(int32_t)(x)
#define PUT_u16(x) (uint16_t)(x)
#define PUT_s16(x) (uint16_t)(x)
#define PUT_u32(x) (x)
#define PUT_s32(x) (x)
#define PUT_f32(x) (x)
#define PUT_u64(x) (x)
#define PUT_s64(x) (x)
#define PUT_f64(x) (x)

static inline float float_of_bits(uint32_t bits)
{
  union { uint32_t bits; float real; } value = { bits };
  return value.real;
}

static inline uint32_t bits_of_float(float real)
{
  union { float real; uint32_t bits; } value = { real };
  return value.bits;
}

// Values too small for a normal number are zero.
static inline float flush(float x)
{
  uint32_t bits = bits_of_float(x);
  return float_of_bits(bits & 0x7f800000u ? bits : bits & 0x80000000u);
}

// Of two zeros -0 is the smaller; of a number and NaN the number.
static inline float smaller_of(float a, float b)
{
  uint32_t zero = bits_of_float(a) | bits_of_float(b);
  float least = a == b ? float_of_bits(zero) : a < b || b != b ? a : b;
  return least != least ? float_of_bits(0x7fffffff) : least;
}

static inline float larger_of(float a, float b)
{
  uint32_t zero = bits_of_float(a) & bits_of_float(b);
  float most = a == b ? float_of_bits(zero) : a > b || b != b ? a : b;
  return most != most ? float_of_bits(0x7fffffff) : most;
}

static inline uint32_t bfloat_of_float(float x)
{
  uint32_t bits = bits_of_float(x);
  uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fff : rounded;
}

static inline float float_of_half(uint16_t half)
{
  uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
  float normal = float_of_bits((rest << 13) + (112u << 23));
  float small = (float)rest * 0x1p-24f;
  float large = float_of_bits(0x7f800000u | (rest & 0x3ff) << 13);
  float size = rest < 0x400 ? small : rest >= 0x7c00 ? large : normal;
  return float_of_bits(bits_of_float(size) | sign);
}

static inline uint32_t half_of_float(float x)
{
  uint32_t bits = bits_of_float(x), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffffu;
  uint32_t normal = (size - (112u << 23) + 0xfff + (size >> 13 & 1)) >> 13;
  uint32_t small = bits_of_float(float_of_bits(size) + 0.5f) - 0x3f000000u;  // rounds at 2^-24
  uint32_t half = size < 0x38800000u ? small : size >= 0x477ff000u ? 0x7c00 : normal;
  return size > 0x7f800000u ? 0x7fff : half | sign;
}

// 2^x within an ulp.
static inline float power_of_two(float x)
{
  float bounded = x > 130 ? 130 : x < -160 ? -160 : x;
  float whole = bounded + 12582912.0f - 12582912.0f, r = bounded - whole;
  int n = (int)whole, half = n >> 1;
  float y = 1.5252734e-5f;
  y = y * r + 1.5403530e-4f;
  y = y * r + 1.3333558e-3f;
  y = y * r + 9.6181291e-3f;
  y = y * r + 5.5504109e-2f;
  y = y * r + 2.4022651e-1f;
  y = y * r + 6.9314718e-1f;
  y = y * r + 1;
  y *= float_of_bits((uint32_t)(half + 127) << 23);
  y *= float_of_bits((uint32_t)(n - half + 127) << 23);
  return x != x ? x : y;
}

static inline int32_t to_s32(float x)
{
  return x != x ? 0 : x >= 0x1p31f ? INT32_MAX : x < -0x1p31f ? INT32_MIN : (int32_t)x;
}

static inline uint32_t to_u32(float x)
{
  return x != x || x <= 0 ? 0 : x >= 0x1p32f ? UINT32_MAX : (uint32_t)x;
}

static inline int64_t to_s64(float x)
{
  return x != x ? 0 : x >= 0x1p63f ? INT64_MAX : x < -0x1p63f ? INT64_MIN : (int64_t)x;
}

static inline uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selection)
{
  uint64_t both = (uint64_t)b << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; i++) {
    uint32_t choice = selection >> 4 * i & 15, byte = (uint32_t)(both >> 8 * (choice & 7)) & 255;
    if (choice & 8) byte = byte & 128 ? 255 : 0;
    result |= byte << 8 * i;
  }
  return result;
}

static inline int32_t extract_signed(int32_t a, uint32_t at, uint32_t length)
{
  if (!length) return 0;
  uint32_t last = at + length - 1 > 31 ? 31 : at + length - 1;
  uint32_t sign = (uint32_t)a >> last & 1;
  if (at > 31) return sign ? -1 : 0;
  uint32_t mask = length > 31 ? UINT32_MAX : (1u << length) - 1;
  uint32_t value = (uint32_t)a >> at & mask;
  uint32_t have = 32 - at < length ? 32 - at : length;
  return (int32_t)(sign && have < 32 ? value | ~0u << have : value);
}

static inline uint32_t insert_bits(uint32_t from, uint32_t into, uint32_t at, uint32_t length)
{
  if (at > 31 || !length) return into;
  uint32_t mask = (length > 31 ? UINT32_MAX : (1u << length) - 1) << at;
  return (into & ~mask) | (from << at & mask);
}

static inline uint32_t look_up_bits(uint32_t a, uint32_t b, uint32_t c, uint32_t table)
{
  uint32_t result = 0;
  for (uint32_t i = 0; i < 8; i++)
    result |= (0 - (table >> i & 1)) & (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  return result;
}

static inline uint32_t reverse_bits(uint32_t a)
{
  a = (a >> 1 & 0x55555555u) | (a & 0x55555555u) << 1;
  a = (a >> 2 & 0x33333333u) | (a & 0x33333333u) << 2;
  a = (a >> 4 & 0x0f0f0f0fu) | (a & 0x0f0f0f0fu) << 4;
  return __builtin_bswap32(a);
}

// ---- registers

#define EACH_LANE for (int l = 0; l < 32; l++)
#define LANES_OF(mask) for (uint32_t rest = (mask); rest; rest &= rest - 1)
#define LANE __builtin_ctz(rest)

static void keep_32(uint32_t *into, const uint32_t *from, uint32_t mask)
{
  EACH_LANE into[l] = mask >> l & 1 ? from[l] : into[l];
}

static void keep_64(uint64_t *into, const uint64_t *from, uint32_t mask)
{
  EACH_LANE into[l] = mask >> l & 1 ? from[l] : into[l];
}

#define KEEP_u8 keep_32
#define KEEP_s8 keep_32
#define KEEP_u16 keep_32
#define KEEP_s16 keep_32
#define KEEP_u32 keep_32
#define KEEP_s32 keep_32
#define KEEP_f32 keep_32
#define KEEP_u64 keep_64
#define KEEP_s64 keep_64
#define KEEP_f64 keep_64
#define WORD_u8 uint32_t
#define WORD_s8 uint32_t
#define WORD_u16 uint32_t
#define WORD_s16 uint32_t
#define WORD_u32 uint32_t
#define WORD_s32 uint32_t
#define WORD_f32 uint32_t
#define WORD_u64 uint64_t
#define WORD_s64 uint64_t
#define WORD_f64 uint64_t

// All lanes are computed; lanes that take no part keep what they had.
#define SOURCE(type, name, at) \
  const cell_##type *restrict row_##name = machine_row(warp, o[at]);
#define YIELD(result, sources, values, value) { \
    sources \
    void *into = machine_row(warp, o[0]), *at = m == MACHINE_ALL ? into : scratch; \
    cell_##result *d = at; \
    _Pragma("GCC ivdep") \
    EACH_LANE { values d[l] = (cell_##result)PUT_##result(value); } \
    if (m != MACHINE_ALL) KEEP_##result(into, at, m); \
  } break;
#define VALUE(type, name) type_##type name = (type_##type)row_##name[l];

// ---- predicates

#define COMPARE(type, relation) \
  EACH_LANE { VALUE(type, a) VALUE(type, b) is |= (uint32_t)(relation) << l; } break;
#define COMPARISONS(type) { \
    SOURCE(type, a, 2) SOURCE(type, b, 3) \
    switch ((enum code_comparison)op->kind) { \
    case CODE_EQ: COMPARE(type, a == b) \
    case CODE_NE: COMPARE(type, a < b || a > b) \
    case CODE_LT: COMPARE(type, a < b) \
    case CODE_LE: COMPARE(type, a <= b) \
    case CODE_GT: COMPARE(type, a > b) \
    case CODE_GE: COMPARE(type, a >= b) \
    case CODE_EQU: COMPARE(type, !(a < b || a > b)) \
    case CODE_NEU: COMPARE(type, a != b) \
    case CODE_LTU: COMPARE(type, !(a >= b)) \
    case CODE_LEU: COMPARE(type, !(a > b)) \
    case CODE_GTU: COMPARE(type, !(a <= b)) \
    case CODE_GEU: COMPARE(type, !(a < b)) \
    case CODE_NUM: COMPARE(type, a == a && b == b) \
    case CODE_NAN: COMPARE(type, a != a || b != b) \
    } \
  } break;

static inline void set_predicate(struct machine_warp *warp, uint32_t operand, uint32_t value,
                                 uint32_t m)
{
  uint32_t *into = &warp->predicates[operand & ~CODE_TOP];
  *into = (*into & ~m) | (value & m);
}

FOR_EACH_MACHINE
static uint32_t compare(const struct machine_warp *warp, const struct code_op *op,
                        const uint32_t *o)
{
  uint32_t is = 0;
  switch (op->code) {
  case CODE_SETP_S32: COMPARISONS(s32)
  case CODE_SETP_U32: COMPARISONS(u32)
  case CODE_SETP_F32: COMPARISONS(f32)
  case CODE_SETP_S64: COMPARISONS(s64)
  case CODE_SETP_U64: COMPARISONS(u64)
  case CODE_SETP_S16: COMPARISONS(s16)
  case CODE_SETP_U16: COMPARISONS(u16)
  default: COMPARISONS(f64)
  }
  return is;
}

static void set_comparison(struct machine_warp *warp, const struct code_op *op, const uint32_t *o,
                           uint32_t m)
{
  uint32_t is = compare(warp, op, o), other = ~is;
  if (op->extra != CODE_ALONE) {
    uint32_t with = machine_predicate(warp, o[4]);
    is = op->extra == CODE_AND_WITH ? is & with : op->extra == CODE_OR_WITH ? is | with : is ^ with;
    other = op->extra == CODE_AND_WITH ? other & with
          : op->extra == CODE_OR_WITH ? other | with : other ^ with;
  }
  set_predicate(warp, o[1], other, m);
  set_predicate(warp, o[0], is, m);
}

// ---- {a, b}

static void split_or_join(struct machine_warp *warp, const struct code_op *op, const uint32_t *o,
                          uint32_t m)
{
  bool wide = op->code == CODE_SPLIT_64 || op->code == CODE_SPLIT_64_4 ||
              op->code == CODE_JOIN_64 || op->code == CODE_JOIN_64_4;
  bool joins = op->code == CODE_JOIN_64 || op->code == CODE_JOIN_64_4 || op->code == CODE_JOIN_32;
  int parts = op->count - 1, bits = (wide ? 64 : 32) / parts;
  uint64_t mask = (UINT64_C(1) << bits) - 1;
  LANES_OF(m) {
    int l = LANE;
    uint64_t whole = 0;
    if (joins) {
      for (int i = 0; i < parts; i++)
        whole |= (((const uint32_t *)machine_row(warp, o[1 + i]))[l] & mask) << bits * i;
      if (wide) ((uint64_t *)machine_row(warp, o[0]))[l] = whole;
      else ((uint32_t *)machine_row(warp, o[0]))[l] = (uint32_t)whole;
    } else {
      const void *from = machine_row(warp, o[parts]);
      whole = wide ? ((const uint64_t *)from)[l] : ((const uint32_t *)from)[l];
      for (int i = 0; i < parts; i++)
        ((uint32_t *)machine_row(warp, o[i]))[l] = (uint32_t)(whole >> bits * i & mask);
    }
  }
}

// ---- memory

enum { NOT_SHARED = -1 };

// Where a lane's bytes lie; *shared_offset tells of shared memory.
static unsigned char *locate(struct machine_block *block, struct machine_warp *warp,
                             const struct code_op *op, int lane, uint64_t address, uint32_t bytes,
                             bool write, int64_t *shared_offset)
{
  uint8_t space = op->access.space;
  *shared_offset = NOT_SHARED;
  if (space == PTX_GENERIC) {
    uint64_t window = CODE_WINDOW(address);
    space = window == CODE_SHARED_WINDOW ? PTX_SHARED : window == CODE_LOCAL_WINDOW ? PTX_LOCAL
          : window == CODE_PARAM_WINDOW ? PTX_PARAM : PTX_GLOBAL;
    if (window) address &= CODE_WINDOW_OFFSET;
  }
  uint64_t room = space == PTX_PARAM ? block->code->param_bytes : block->code->local_bytes;
  switch (space) {
  case PTX_SHARED: {
    unsigned char *at = watch_shared(block, op, lane, address, bytes);
    *shared_offset = at - block->shared;
    if (write) watch_write(block, warp, op, lane, (uint32_t)*shared_offset, bytes, 0);
    else watch_read(block, warp, op, lane, (uint32_t)*shared_offset, bytes);
    return at;
  }
  case PTX_GLOBAL: {
    unsigned char *at = watch_global(block, op, lane, address, bytes, bytes);
    watch_blocks(block, op, lane, address, bytes, write);
    return at;
  }
  default:
    if (address > room || bytes > room - address || (space == PTX_PARAM && write))
      machine_fault(block, op, lane, MACHINE_ILLEGAL_ADDRESS, "%u bytes at %llu of %llu bytes of "
                    "%s", bytes, (unsigned long long)address, (unsigned long long)room,
                    space == PTX_PARAM ? "parameters" : "local memory");
    if (space == PTX_PARAM) return (unsigned char *)(uintptr_t)block->launch->params + address;
    return warp->local + (uint64_t)(uint32_t)lane * block->code->local_bytes + address;
  }
}

static uint64_t widen(const unsigned char *at, const struct code_access *access)
{
  uint64_t value = 0;
  memcpy(&value, at, access->element_bytes);
  if (!access->sign) return value;
  int shift = 64 - 8 * access->element_bytes;
  return (uint64_t)((int64_t)(value << shift) >> shift);
}

// Whether the lanes of m all have one address.
static bool is_uniform(const struct machine_warp *warp, const uint32_t *o, bool wide, uint32_t m)
{
  const void *row = machine_row(warp, o[0]);
  if (o[0] >> 31) return true;
  uint64_t differ = 0;
  int first = __builtin_ctz(m);
  if (wide) {
    const uint64_t *at = row;
    EACH_LANE differ |= m >> l & 1 ? at[l] ^ at[first] : 0;
  } else {
    const uint32_t *at = row;
    EACH_LANE differ |= m >> l & 1 ? at[l] ^ at[first] : 0;
  }
  return !differ;
}

// One load for all.
static void load_uniform(struct machine_block *block, struct machine_warp *warp,
                         const struct code_op *op, const uint32_t *o, uint32_t m)
{
  const struct code_access *access = &op->access;
  uint32_t bytes = (uint32_t)access->element_bytes * access->count;
  int64_t shared;
  int first = __builtin_ctz(m), lane = m & (m - 1) ? MACHINE_WHOLE_WARP : first;
  uint64_t address = machine_address(warp, o, access->wide_address, first);
  const unsigned char *at = locate(block, warp, op, lane, address, bytes, false, &shared);
  for (int i = 0; i < access->count; i++) {
    uint64_t value = widen(at + i * access->element_bytes, access);
    if (access->wide_cell) {
      uint64_t *into = machine_row(warp, o[2 + i]);
      EACH_LANE into[l] = m >> l & 1 ? value : into[l];
    } else {
      uint32_t *into = machine_row(warp, o[2 + i]), narrow = (uint32_t)value;
      EACH_LANE into[l] = m >> l & 1 ? narrow : into[l];
    }
  }
}

static void load(struct machine_block *block, struct machine_warp *warp, const struct code_op *op,
                 const uint32_t *o, uint32_t m)
{
  const struct code_access *access = &op->access;
  uint32_t bytes = (uint32_t)access->element_bytes * access->count;
  int64_t shared;
  if (access->space != PTX_LOCAL && access->space != PTX_GENERIC &&
      is_uniform(warp, o, access->wide_address, m)) {
    load_uniform(block, warp, op, o, m);
    return;
  }
  bool plain = access->element_bytes == 4 && !access->wide_cell;
  LANES_OF(m) {
    int l = LANE;
    const unsigned char *at = locate(block, warp, op, l, machine_address(warp, o,
                                     access->wide_address, l), bytes, false, &shared);
    for (int i = 0; i < access->count; i++) {
      void *into = machine_row(warp, o[2 + i]);
      if (plain) {
        memcpy((uint32_t *)into + l, at + 4 * i, 4);
      } else {
        uint64_t value = widen(at + i * access->element_bytes, access);
        if (access->wide_cell) ((uint64_t *)into)[l] = value;
        else ((uint32_t *)into)[l] = (uint32_t)value;
      }
    }
  }
}

static void store(struct machine_block *block, struct machine_warp *warp, const struct code_op *op,
                  const uint32_t *o, uint32_t m)
{
  const struct code_access *access = &op->access;
  uint32_t bytes = (uint32_t)access->element_bytes * access->count;
  int64_t shared;
  LANES_OF(m) {
    int l = LANE;
    unsigned char *at = locate(block, warp, op, l, machine_address(warp, o, access->wide_address,
                               l), bytes, true, &shared);
    for (int i = 0; i < access->count; i++) {
      const void *from = machine_row(warp, o[2 + i]);
      if (access->wide_cell)
        memcpy(at + i * access->element_bytes, (const uint64_t *)from + l, access->element_bytes);
      else
        memcpy(at + i * access->element_bytes, (const uint32_t *)from + l, access->element_bytes);
    }
  }
}

static uint64_t combine(const struct code_op *op, uint64_t old, uint64_t b, uint64_t c)
{
  float x = float_of_bits((uint32_t)old), y = float_of_bits((uint32_t)b);
  double wide_x, wide_y;
  memcpy(&wide_x, &old, 8);
  memcpy(&wide_y, &b, 8);
  bool less = op->type == CODE_S32 ? (int32_t)old < (int32_t)b
            : op->type == CODE_U32 ? (uint32_t)old < (uint32_t)b
            : op->type == CODE_S64 ? (int64_t)old < (int64_t)b
            : op->type == CODE_F32 ? x < y : op->type == CODE_F64 ? wide_x < wide_y : old < b;
  switch ((enum code_atom)op->kind) {
  case CODE_ATOM_ADD:
    if (op->type == CODE_F32) return bits_of_float(x + y);
    if (op->type == CODE_F64) {
      wide_x += wide_y;
      memcpy(&old, &wide_x, 8);
      return old;
    }
    return old + b;
  case CODE_ATOM_MIN: return less ? old : b;
  case CODE_ATOM_MAX: return less ? b : old;
  case CODE_ATOM_AND: return old & b;
  case CODE_ATOM_OR: return old | b;
  case CODE_ATOM_XOR: return old ^ b;
  case CODE_ATOM_EXCH: return b;
  default: return old == b ? c : old;
  }
}

static void atom(struct machine_block *block, struct machine_warp *warp, const struct code_op *op,
                 const uint32_t *o, uint32_t m)
{
  bool wide = op->access.wide_cell;
  uint32_t bytes = op->access.element_bytes;
  LANES_OF(m) {
    int l = LANE;
    uint64_t address = machine_address(warp, o, op->access.wide_address, l);
    bool shared = op->access.space == PTX_SHARED ||
                  (op->access.space == PTX_GENERIC && CODE_WINDOW(address) == CODE_SHARED_WINDOW);
    unsigned char *at;
    if (shared) {
      at = watch_shared(block, op, l, address & CODE_WINDOW_OFFSET, bytes);
      watch_landed(block, warp, l, (uint32_t)(at - block->shared), bytes);
    } else {
      at = watch_global(block, op, l, address, bytes, bytes);
    }
    const void *second = machine_row(warp, o[3]), *third = machine_row(warp, o[4]);
    uint64_t b = wide ? ((const uint64_t *)second)[l] : ((const uint32_t *)second)[l];
    uint64_t c = wide ? ((const uint64_t *)third)[l] : ((const uint32_t *)third)[l];
    void *into = machine_row(warp, o[2]);
    if (wide) {
      uint64_t old = __atomic_load_n((uint64_t *)(void *)at, __ATOMIC_SEQ_CST);
      while (!__atomic_compare_exchange_n((uint64_t *)(void *)at, &old, combine(op, old, b, c),
                                          false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {}
      ((uint64_t *)into)[l] = old;
    } else {
      uint32_t old = __atomic_load_n((uint32_t *)(void *)at, __ATOMIC_SEQ_CST);
      while (!__atomic_compare_exchange_n((uint32_t *)(void *)at, &old,
                                          (uint32_t)combine(op, old, b, c), false,
                                          __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {}
      ((uint32_t *)into)[l] = old;
    }
  }
}

// ---- lanes together

static uint32_t alive(const struct machine_warp *warp)
{
  uint32_t mask = 0;
  for (int i = 0; i < warp->group_count; i++) mask |= warp->groups[i].mask;
  return mask;
}

// An instruction of the whole warp is executed by all of it.
static void need_warp(struct machine_block *block, struct machine_warp *warp,
                      const struct code_op *op, uint32_t m)
{
  if (m == MACHINE_ALL) return;
  uint32_t all = alive(warp);
  if (m != all)
    machine_fault(block, op, __builtin_ctz(m), MACHINE_LAUNCH_FAILED,
                  "an instruction of the whole warp is executed by lanes %08x of %08x", m, all);
}

// Those that a member mask names are all here.
static void need_members(struct machine_block *block, struct machine_warp *warp,
                         const struct code_op *op, uint32_t operand, uint32_t m)
{
  const uint32_t *members = machine_row(warp, operand);
  LANES_OF(m) {
    uint32_t named = members[LANE] & alive(warp);
    if (named & ~m || !(members[LANE] >> LANE & 1))
      machine_fault(block, op, LANE, MACHINE_LAUNCH_FAILED,
                    "lanes %08x are named and %08x are here", members[LANE], m);
  }
}

static void shuffle(struct machine_block *block, struct machine_warp *warp,
                    const struct code_op *op, const uint32_t *o, uint32_t m)
{
  const uint32_t *a = machine_row(warp, o[2]), *b = machine_row(warp, o[3]);
  const uint32_t *c = machine_row(warp, o[4]);
  uint32_t value[32], valid = 0, named = *(const uint32_t *)machine_row(warp, o[5]);
  need_members(block, warp, op, o[5], m);
  EACH_LANE {
    int clamp = (int)(c[l] & 31), segment = (int)(c[l] >> 8 & 31), by = (int)(b[l] & 31), from;
    int most = (l & segment) | (clamp & ~segment), least = l & segment;
    switch (op->kind) {
    case 0: from = l ^ by; break;
    case 1: from = l - by; break;
    case 2: from = l + by; break;
    default: from = least | (by & ~segment); break;
    }
    bool inside = op->kind == 1 ? from >= most : from <= most;
    if (!inside) from = l;
    valid |= (uint32_t)inside << l;
    if (m >> l & 1 && !(named >> from & 1))
      machine_fault(block, op, l, MACHINE_LAUNCH_FAILED, "reads lane %d, which is not named",
                    from);
    value[l] = a[from & 31];
  }
  keep_32(machine_row(warp, o[0]), value, m);
  set_predicate(warp, o[1], valid, m);
}

static void vote(struct machine_block *block, struct machine_warp *warp, const struct code_op *op,
                 const uint32_t *o, uint32_t m)
{
  need_members(block, warp, op, o[2], m);
  uint32_t is = machine_predicate(warp, o[1]) & m;
  if (op->kind == 3) {
    uint32_t *into = machine_row(warp, o[0]);
    LANES_OF(m) into[LANE] = is;
    return;
  }
  bool yes = op->kind == 0 ? is == m : op->kind == 1 ? is != 0 : is == m || !is;
  set_predicate(warp, o[0], yes ? MACHINE_ALL : 0, m);
}

static void reduce(struct machine_block *block, struct machine_warp *warp,
                   const struct code_op *op, const uint32_t *o, uint32_t m)
{
  need_members(block, warp, op, o[2], m);
  const uint32_t *a = machine_row(warp, o[1]);
  uint64_t sum = a[__builtin_ctz(m)];
  LANES_OF(m & (m - 1)) sum = combine(op, sum, a[LANE], 0);
  uint32_t *into = machine_row(warp, o[0]);
  LANES_OF(m) into[LANE] = (uint32_t)sum;
}

// Which of the lanes that go on branch; true where the warp has parted.
static bool part(struct machine_warp *warp, struct machine_group *group, uint32_t m, int target,
                 int next)
{
  if (m == group->mask) {
    group->position = target;
    return false;
  }
  group->mask &= ~m;
  group->position = next;
  warp->groups[warp->group_count++] = (struct machine_group){ .position = target, .mask = m };
  return true;
}

// The op is one that plain rows do not tell.  True where the group must be chosen anew; `next` has
// been stored in the group.
static bool run_other(struct machine_block *block, struct machine_warp *warp,
                      const struct code_op *op, const uint32_t *o, uint32_t m, int group_index)
{
  struct machine_group *group = &warp->groups[group_index];
  switch (op->code) {
  case CODE_SPLIT_64: case CODE_JOIN_64: case CODE_SPLIT_32: case CODE_JOIN_32:
  case CODE_SPLIT_64_4: case CODE_JOIN_64_4:
    split_or_join(warp, op, o, m);
    return false;
  case CODE_ATOM:
    atom(block, warp, op, o, m);
    return false;
  case CODE_BRANCH_INDEX: {
    const uint32_t *index = machine_row(warp, o[0]);
    uint32_t first = index[__builtin_ctz(m)], same = 0;
    LANES_OF(m) same |= (uint32_t)(index[LANE] == first) << LANE;
    if (first >= op->extra)
      machine_fault(block, op, __builtin_ctz(m), MACHINE_LAUNCH_FAILED, "index %u of %u", first,
                    op->extra);
    // lanes with another index come back for theirs
    part(warp, group, same, block->code->targets[op->target + (int)first], group->position - 1);
    return true;
  }
  case CODE_EXIT:
    group->mask &= ~m;
    if (!group->mask) warp->groups[group_index] = warp->groups[--warp->group_count];
    return true;
  case CODE_TRAP:
    machine_fault(block, op, __builtin_ctz(m), MACHINE_LAUNCH_FAILED, "trap");
  case CODE_BAR_SYNC: case CODE_BAR_RED_POPC: case CODE_BAR_RED_AND: case CODE_BAR_RED_OR:
    need_warp(block, warp, op, m);
    return !machine_arrive(block, warp, op, group_index, true);
  case CODE_BAR_ARRIVE:
    need_warp(block, warp, op, m);
    machine_arrive(block, warp, op, group_index, false);
    return false;
  case CODE_WARP_SYNC:
    need_members(block, warp, op, o[0], m);
    machine_tick(block, warp);
    return false;
  case CODE_VOTE:
    vote(block, warp, op, o, m);
    return false;
  case CODE_REDUX:
    reduce(block, warp, op, o, m);
    return false;
  case CODE_ACTIVE_MASK: {
    uint32_t *into = machine_row(warp, o[0]);
    LANES_OF(m) into[LANE] = m;
    return false;
  }
  case CODE_ELECT: {
    uint32_t *into = machine_row(warp, o[0]), leader = (uint32_t)__builtin_ctz(m);
    need_members(block, warp, op, o[2], m);
    LANES_OF(m) into[LANE] = leader;
    set_predicate(warp, o[1], 1u << leader, m);
    return false;
  }
  case CODE_STMATRIX:
    need_warp(block, warp, op, m);
    machine_stmatrix(block, warp, op, o);
    return false;
  case CODE_MOVMATRIX:
    need_warp(block, warp, op, m);
    machine_movmatrix(warp, o);
    return false;
  case CODE_CP_ASYNC:
    machine_cp_async(block, warp, op, o, m);
    return false;
  case CODE_CP_ASYNC_COMMIT:
    LANES_OF(m) warp->commits[LANE]++;
    return false;
  case CODE_CP_ASYNC_WAIT:
    if (op->kind) LANES_OF(m) warp->commits[LANE]++;
    machine_cp_async_wait(block, warp, op, o[0], m);
    return false;
  case CODE_MBAR_WAIT: {
    uint64_t address = machine_address(warp, o, o[2], __builtin_ctz(m));
    int mbarrier = machine_mbarrier_find(block, op, address, __builtin_ctz(m));
    const void *phases = machine_row(warp, o[4]);
    uint32_t parity = op->extra ? ((const uint32_t *)phases)[__builtin_ctz(m)]
                                : (uint32_t)((const uint64_t *)phases)[__builtin_ctz(m)];
    bool passed = machine_mbarrier_passed(block, warp, mbarrier, parity & 1);
    set_predicate(warp, o[3], passed ? MACHINE_ALL : 0, m);
    if (passed) return false;
    // it will be asked again: until there is something new, others run
    group->wait = MACHINE_AT_MBARRIER;
    group->barrier = mbarrier;
    group->parity = parity & 1;
    return true;
  }
  case CODE_MBAR_INIT: case CODE_MBAR_INVAL: case CODE_MBAR_ARRIVE: case CODE_MBAR_EXPECT:
  case CODE_CP_ASYNC_ARRIVE:
    machine_mbarrier_op(block, warp, op, o, m);
    return false;
  case CODE_BULK_LOAD: case CODE_BULK_STORE: case CODE_BULK_COMMIT: case CODE_BULK_WAIT:
    machine_bulk_op(block, warp, op, o, m);
    return false;
  case CODE_FENCE_PROXY:
    machine_join(warp->proxied, warp->clock);
    machine_tick(block, warp);
    return false;
  case CODE_WGMMA:
    need_warp(block, warp, op, m);
    machine_wgmma_issue(block, warp, op, o);
    return false;
  case CODE_WGMMA_FENCE:
    need_warp(block, warp, op, m);
    warp->wgmma_fenced = true;
    return false;
  case CODE_WGMMA_COMMIT:
    need_warp(block, warp, op, m);
    warp->wgmma_commits++;
    return false;
  case CODE_WGMMA_WAIT:
    need_warp(block, warp, op, m);
    machine_wgmma_wait(block, warp, o[0]);
    return false;
  case CODE_CLOCK_32: case CODE_CLOCK_64: {
    void *into = machine_row(warp, o[0]);
    LANES_OF(m) {
      if (op->code == CODE_CLOCK_64) ((uint64_t *)into)[LANE] = block->counts[MACHINE_INSTRUCTIONS];
      else ((uint32_t *)into)[LANE] = (uint32_t)block->counts[MACHINE_INSTRUCTIONS];
    }
    return false;
  }
  default:
    return false;
  }
}

// The group that runs next: of those that do not wait the lowest, joined with all that stand there.
// *limit: where the next higher one stands.  -1: all wait, or none is left.
static int choose(struct machine_warp *warp, int *limit)
{
  int lowest = -1;
  *limit = INT32_MAX;
  for (int i = 0; i < warp->group_count; i++)
    if (warp->groups[i].wait == MACHINE_READY &&
        (lowest < 0 || warp->groups[i].position < warp->groups[lowest].position))
      lowest = i;
  if (lowest < 0) return -1;
  for (int i = 0; i < warp->group_count; i++) {
    struct machine_group *other = &warp->groups[i];
    if (i == lowest || other->wait != MACHINE_READY) continue;
    if (other->position > warp->groups[lowest].position) {
      if (other->position < *limit) *limit = other->position;
      continue;
    }
    warp->groups[lowest].mask |= other->mask;
    *other = warp->groups[--warp->group_count];
    if (lowest == warp->group_count) lowest = i;
    i--;
  }
  return lowest;
}

// Runs the group until it waits, parts, meets another or has run for a while; false: for a while.
FOR_EACH_MACHINE
static bool run_group(struct machine_block *block, struct machine_warp *warp, int group_index,
                      int limit, int *budget)
{
  struct machine_group *group = &warp->groups[group_index];
  const struct code *code = block->code;
  int position = group->position, steps = *budget;
  _Alignas(64) uint64_t scratch[32];
  while (position < limit) {
    if (!steps--) {
      group->position = position;
      *budget = 0;
      return false;
    }
    const struct code_op *op = &code->ops[position++];
    const uint32_t *o = code->operands + op->first;
    uint32_t m = group->mask;
    if (op->guard >= 0) {
      uint32_t guard = warp->predicates[op->guard];
      m &= op->guard_negated ? ~guard : guard;
      if (!m) continue;
    }
    switch (op->code) {
#define ONE(code, names, result, a_, value) \
    case CODE_##code: YIELD(result, SOURCE(a_, a, 1), VALUE(a_, a), value)
#define TWO(code, names, result, a_, b_, value) \
    case CODE_##code: YIELD(result, SOURCE(a_, a, 1) SOURCE(b_, b, 2), \
                            VALUE(a_, a) VALUE(b_, b), value)
#define THREE(code, names, result, a_, b_, c_, value) \
    case CODE_##code: YIELD(result, SOURCE(a_, a, 1) SOURCE(b_, b, 2) SOURCE(c_, c, 3), \
                            VALUE(a_, a) VALUE(b_, b) VALUE(c_, c), value)
#define FOUR(code, names, result, a_, b_, c_, d_, value) \
    case CODE_##code: YIELD(result, SOURCE(a_, a, 1) SOURCE(b_, b, 2) SOURCE(c_, c, 3) \
                                    SOURCE(d_, d, 4), \
                            VALUE(a_, a) VALUE(b_, b) VALUE(c_, c) \
                            type_##d_ fourth = (type_##d_)row_d[l];, value)
#include "operations.h"
#undef ONE
#undef TWO
#undef THREE
#undef FOUR
    case CODE_SETP_S32: case CODE_SETP_U32: case CODE_SETP_F32: case CODE_SETP_S64:
    case CODE_SETP_U64: case CODE_SETP_S16: case CODE_SETP_U16: case CODE_SETP_F64:
      set_comparison(warp, op, o, m);
      break;
    case CODE_PRED_AND:
      set_predicate(warp, o[0], machine_predicate(warp, o[1]) & machine_predicate(warp, o[2]), m);
      break;
    case CODE_PRED_OR:
      set_predicate(warp, o[0], machine_predicate(warp, o[1]) | machine_predicate(warp, o[2]), m);
      break;
    case CODE_PRED_XOR:
      set_predicate(warp, o[0], machine_predicate(warp, o[1]) ^ machine_predicate(warp, o[2]), m);
      break;
    case CODE_PRED_NOT:
      set_predicate(warp, o[0], ~machine_predicate(warp, o[1]), m);
      break;
    case CODE_PRED_MOV:
      set_predicate(warp, o[0], machine_predicate(warp, o[1]), m);
      break;
    case CODE_SELP_32: {
      uint32_t chosen = machine_predicate(warp, o[3]);
      YIELD(u32, SOURCE(u32, a, 1) SOURCE(u32, b, 2), , chosen >> l & 1 ? row_a[l] : row_b[l])
    }
    case CODE_SELP_64: {
      uint32_t chosen = machine_predicate(warp, o[3]);
      YIELD(u64, SOURCE(u64, a, 1) SOURCE(u64, b, 2), , chosen >> l & 1 ? row_a[l] : row_b[l])
    }
    case CODE_LOAD:
      load(block, warp, op, o, m);
      break;
    case CODE_STORE:
      store(block, warp, op, o, m);
      break;
    case CODE_BRANCH:
      if (m == group->mask) {
        position = op->target;
        break;
      }
      part(warp, group, m, op->target, position);
      *budget = steps;
      return true;
    case CODE_SHFL:
      shuffle(block, warp, op, o, m);
      break;
    case CODE_MMA:
      need_warp(block, warp, op, m);
      machine_mma(block, warp, op, o);
      break;
    case CODE_LDMATRIX:
      need_warp(block, warp, op, m);
      machine_ldmatrix(block, warp, op, o);
      break;
    default:
      group->position = position;
      if (run_other(block, warp, op, o, m, group_index)) {
        *budget = steps;
        return true;
      }
      break;
    }
  }
  group->position = position;
  *budget = steps;
  return true;
}

void machine_run_warp(struct machine_block *block, struct machine_warp *warp)
{
  int budget = 64 + (int)(machine_random(block) & 511), all = budget, limit;
  block->now = warp;
  for (int group; budget > 0 && (group = choose(warp, &limit)) >= 0;)
    if (!run_group(block, warp, group, limit, &budget)) break;
  block->counts[MACHINE_INSTRUCTIONS] += (uint64_t)(all - budget);
}
