// code.c: from statements to ops.  Every instruction that is not understood to the last dot is
// refused by name.
#include "code.h"
#include "allocate.h"
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- the plain instructions, by name

#define CELL_u8 '3'
#define CELL_s8 '3'
#define CELL_u16 '3'
#define CELL_s16 '3'
#define CELL_u32 '3'
#define CELL_s32 '3'
#define CELL_f32 '3'
#define CELL_u64 '6'
#define CELL_s64 '6'
#define CELL_f64 '6'

struct plain { const char *names, cells[8]; uint16_t code; };

static const struct plain plains[] = {
#define ONE(code, names, r, a, value) { names, { CELL_##r, CELL_##a }, CODE_##code },
#define TWO(code, names, r, a, b, value) { names, { CELL_##r, CELL_##a, CELL_##b }, CODE_##code },
#define THREE(code, names, r, a, b, c, value) \
  { names, { CELL_##r, CELL_##a, CELL_##b, CELL_##c }, CODE_##code },
#define FOUR(code, names, r, a, b, c, d, value) \
  { names, { CELL_##r, CELL_##a, CELL_##b, CELL_##c, CELL_##d }, CODE_##code },
#include "operations.h"
#undef ONE
#undef TWO
#undef THREE
#undef FOUR
};

struct name { const char *text; const struct plain *plain; };
static struct name names[1024];
static int name_count;
static pthread_once_t names_once = PTHREAD_ONCE_INIT;

static int by_text(const void *a, const void *b)
{
  return strcmp(((const struct name *)a)->text, ((const struct name *)b)->text);
}

static void sort_names(void)
{
  for (size_t i = 0; i < sizeof plains / sizeof *plains; i++) {
    char *words = strdup(plains[i].names), *rest = words;
    for (char *word; (word = strtok_r(rest, " ", &rest));)
      names[name_count++] = (struct name){ strdup(word), &plains[i] };
    free(words);
  }
  qsort(names, (size_t)name_count, sizeof *names, by_text);
}

static const struct plain *find_plain(const char *text)
{
  pthread_once(&names_once, sort_names);
  const struct name key = { text, NULL };
  const struct name *found = bsearch(&key, names, (size_t)name_count, sizeof *names, by_text);
  return found ? found->plain : NULL;
}

// ---- what is being made

enum { PARTS = 24, FIRST_WORD = 96 };  // words 0..95 of a warp's registers take what nobody reads

struct maker {
  const struct ptx_module *module;
  const struct ptx_kernel *kernel;
  struct code *code;
  const struct ptx_instruction *now;
  struct code_op *op;
  uint64_t globals;
  uint8_t *roles;
  uint32_t room;                 // of operands and roles
  bool *apart;
  int *predicates;               // of each register that is one
  int special_count;
  uint64_t *constant_values;
  bool *constant_wide;
  uint32_t *constant_places, constant_count;
  char text[192];
  char *parts[PARTS];
  int part_count;
  char *problem;
  size_t problem_bytes;
  jmp_buf give_up;
};

static _Noreturn void refuse(struct maker *maker, const char *format, ...)
{
  int length = snprintf(maker->problem, maker->problem_bytes, "%s, PTX line %u: %s: ",
                        maker->kernel->name, maker->now->line, maker->now->name);
  va_list values;
  va_start(values, format);
  vsnprintf(maker->problem + length, maker->problem_bytes - (size_t)length, format, values);
  va_end(values);
  longjmp(maker->give_up, 1);
}

static _Noreturn void unknown(struct maker *maker)
{
  refuse(maker, "instruction is not known to the emulator");
}

static void add(struct maker *maker, uint32_t value, enum allocate_role role)
{
  struct code *code = maker->code;
  if (code->operand_count == maker->room) {
    maker->room = maker->room ? 2 * maker->room : 4096;
    code->operands = realloc(code->operands, maker->room * sizeof *code->operands);
    maker->roles = realloc(maker->roles, maker->room);
  }
  code->operands[code->operand_count] = value;
  maker->roles[code->operand_count++] = (uint8_t)role;
  maker->op->count++;
}

static void add_number(struct maker *maker, int64_t value)
{
  if (value < INT32_MIN || value > UINT32_MAX) refuse(maker, "number is too large");
  add(maker, (uint32_t)value, ALLOCATE_FIXED);
}

static const struct ptx_operand *operand(struct maker *maker, uint32_t index)
{
  if (index >= maker->now->count) refuse(maker, "operand %u is missing", index);
  return &maker->kernel->operands[maker->now->first + index];
}

static uint32_t constant(struct maker *maker, uint64_t value, bool wide)
{
  struct code *code = maker->code;
  for (uint32_t i = maker->constant_count; i-- > 0;)
    if (maker->constant_values[i] == value && maker->constant_wide[i] == wide)
      return maker->constant_places[i] | CODE_TOP;
  uint32_t n = maker->constant_count++, words = wide ? 64 : 32;
  maker->constant_values = realloc(maker->constant_values, (n + 1) * sizeof value);
  maker->constant_wide = realloc(maker->constant_wide, (n + 1) * sizeof wide);
  maker->constant_places = realloc(maker->constant_places, (n + 1) * sizeof(uint32_t));
  code->constants = realloc(code->constants, (size_t)(code->constant_words + words) * 4);
  maker->constant_values[n] = value;
  maker->constant_wide[n] = wide;
  maker->constant_places[n] = code->constant_words;
  for (uint32_t lane = 0; lane < 32; lane++) {
    uint32_t narrow = (uint32_t)value;
    uint32_t *row = code->constants + code->constant_words;
    if (wide) memcpy(row + 2 * lane, &value, 8);
    else row[lane] = narrow;
  }
  code->constant_words += words;
  return maker->constant_places[n] | CODE_TOP;
}

// What a variable's name stands for: its address in its own space.
static uint64_t address_of(struct maker *maker, const struct ptx_operand *at)
{
  const struct ptx_variable *variable =
    at->of_module ? &maker->module->variables[at->index] : &maker->kernel->variables[at->index];
  uint64_t address = variable->offset;
  if (variable->space == PTX_GLOBAL || variable->space == PTX_CONST) address += maker->globals;
  if (variable->space == PTX_SHARED) {
    address += CODE_SHARED_BASE;
    if (at->of_module) {
      // after the kernel's own, one after the other; what the launch adds comes last
      uint64_t bytes = maker->kernel->shared_bytes;
      for (int i = 0; i < maker->module->variable_count; i++) {
        const struct ptx_variable *other = &maker->module->variables[i];
        if (other->space != PTX_SHARED || (other->dynamic && other != variable)) continue;
        bytes = (bytes + other->alignment - 1) / other->alignment * other->alignment;
        if (other == variable && !variable->dynamic) return CODE_SHARED_BASE + bytes;
        bytes += other->bytes;
      }
      bytes = (bytes + variable->alignment - 1) / variable->alignment * variable->alignment;
      return CODE_SHARED_BASE + bytes;
    }
  }
  return address;
}

struct special_name { const char *text; enum code_special special; };
static const struct special_name special_names[] = {
  { "tid.x", CODE_TID_X }, { "tid.y", CODE_TID_Y }, { "tid.z", CODE_TID_Z },
  { "ntid.x", CODE_NTID_X }, { "ntid.y", CODE_NTID_Y }, { "ntid.z", CODE_NTID_Z },
  { "ctaid.x", CODE_CTAID_X }, { "ctaid.y", CODE_CTAID_Y }, { "ctaid.z", CODE_CTAID_Z },
  { "nctaid.x", CODE_NCTAID_X }, { "nctaid.y", CODE_NCTAID_Y }, { "nctaid.z", CODE_NCTAID_Z },
  { "laneid", CODE_LANEID }, { "warpid", CODE_WARPID }, { "nwarpid", CODE_NWARPID },
  { "smid", CODE_SMID }, { "lanemask_eq", CODE_LANEMASK_EQ }, { "lanemask_lt", CODE_LANEMASK_LT },
  { "lanemask_le", CODE_LANEMASK_LE }, { "lanemask_gt", CODE_LANEMASK_GT },
  { "lanemask_ge", CODE_LANEMASK_GE }, { "dynamic_smem_size", CODE_DYNAMIC_SHARED_BYTES },
  { "total_smem_size", CODE_TOTAL_SHARED_BYTES }, { "cluster_ctarank", CODE_CLUSTER_ZERO },
  { "cluster_nctarank", CODE_CLUSTER_ONE }, { "cluster_ctaid.x", CODE_CLUSTER_ZERO },
};

static uint32_t special_place(struct maker *maker, const char *text)
{
  for (size_t i = 0; i < sizeof special_names / sizeof *special_names; i++) {
    if (strcmp(special_names[i].text, text)) continue;
    uint32_t *place = &maker->code->special[special_names[i].special];
    if (!*place) *place = FIRST_WORD + 32 * (uint32_t)maker->special_count++;
    return *place;
  }
  refuse(maker, "special register %%%s is not known to the emulator", text);
}

static int bits_of(const struct maker *maker, const struct ptx_operand *at)
{
  return maker->kernel->registers[at->index].bits;
}

static void add_use(struct maker *maker, const struct ptx_operand *at, bool wide)
{
  switch (at->kind) {
  case PTX_REG:
    if ((bits_of(maker, at) == 64) != wide || bits_of(maker, at) == 1 || bits_of(maker, at) > 64)
      refuse(maker, "a register has the wrong width");
    add(maker, (uint32_t)at->index, ALLOCATE_USE);
    return;
  case PTX_NUMBER:
    add(maker, constant(maker, wide ? at->value : (uint32_t)at->value, wide), ALLOCATE_FIXED);
    return;
  case PTX_SYMBOL:
    add(maker, constant(maker, address_of(maker, at) + (uint64_t)at->offset, wide),
        ALLOCATE_FIXED);
    return;
  case PTX_SPECIAL:
    if (!strcmp(at->special, "clock") || wide) refuse(maker, "%%%s here", at->special);
    add(maker, special_place(maker, at->special), ALLOCATE_FIXED);
    return;
  default:
    refuse(maker, "an operand is not a value");
  }
}

static void add_definition(struct maker *maker, const struct ptx_operand *at, bool wide)
{
  if (at->kind == PTX_NOTHING) {
    add(maker, wide ? 32 : 0, ALLOCATE_FIXED);
    return;
  }
  if (at->kind != PTX_REG || (bits_of(maker, at) == 64) != wide || bits_of(maker, at) == 1 ||
      bits_of(maker, at) > 64)
    refuse(maker, "the destination has the wrong width");
  add(maker, (uint32_t)at->index, ALLOCATE_DEFINITION);
}

static bool is_predicate(const struct maker *maker, const struct ptx_operand *at)
{
  return at->kind == PTX_REG && bits_of(maker, at) == 1;
}

static void add_predicate(struct maker *maker, const struct ptx_operand *at)
{
  if (at->kind == PTX_NOTHING) {
    add(maker, CODE_TRASH_PREDICATE, ALLOCATE_FIXED);
  } else if (at->kind == PTX_NUMBER) {
    add(maker, CODE_TRUE_PREDICATE | (at->value ? 0 : CODE_TOP), ALLOCATE_FIXED);
  } else {
    if (!is_predicate(maker, at)) refuse(maker, "a predicate is expected");
    add(maker, (uint32_t)maker->predicates[at->index] | (at->negated ? CODE_TOP : 0),
        ALLOCATE_FIXED);
  }
}

// [base + offset]: the base's place and the offset.
static void add_address(struct maker *maker, const struct ptx_operand *at)
{
  if (!at->address) refuse(maker, "an address is expected");
  if (at->kind == PTX_REG) {
    bool wide = bits_of(maker, at) == 64;
    maker->op->access.wide_address = wide;
    add_use(maker, at, wide);
    add_number(maker, at->offset);
  } else {
    maker->op->access.wide_address = true;
    add_use(maker, at, true);
    add_number(maker, at->kind == PTX_SYMBOL ? 0 : at->offset);
  }
}

// An address in shared memory whose base may be of either width: two operands and a number that
// tells the width, for instructions with more than one address.
static void add_any_address(struct maker *maker, const struct ptx_operand *at)
{
  add_address(maker, at);
  add_number(maker, maker->op->access.wide_address);
}

static int64_t number(struct maker *maker, uint32_t index)
{
  const struct ptx_operand *at = operand(maker, index);
  if (at->kind != PTX_NUMBER) refuse(maker, "operand %u must be a number", index);
  return (int64_t)at->value;
}

static bool has_part(const struct maker *maker, const char *part)
{
  for (int i = 1; i < maker->part_count; i++)
    if (!strcmp(maker->parts[i], part)) return true;
  return false;
}

static bool part_is(const struct maker *maker, int index, const char *part)
{
  return index < maker->part_count && !strcmp(maker->parts[index], part);
}

static const char *last_part(const struct maker *maker)
{
  return maker->parts[maker->part_count - 1];
}

// The index of `part` in a list that NULL ends; -1 where it is not in it.
static int among(const char *part, const char *const *list)
{
  for (int i = 0; list[i]; i++)
    if (!strcmp(part, list[i])) return i;
  return -1;
}

// ---- families of instructions

// What a conversion does to a register that is wider than the type it reads, as PTX allows.
static const struct plain *of_low_half(struct maker *maker, const struct plain *plain)
{
  if (maker->now->count != 2 || plain->cells[1] == '6') return plain;
  const struct ptx_operand *from = operand(maker, 1);
  if (from->kind != PTX_REG || bits_of(maker, from) != 64) return plain;
  if (plain->code == CODE_s64_S32) return find_plain("low.s64.s32");
  if (plain->code == CODE_u64_U32) return find_plain("low.u64.u32");
  return plain;
}

static bool make_plain(struct maker *maker)
{
  const struct plain *plain = find_plain(maker->now->name);
  if (!plain) return false;
  plain = of_low_half(maker, plain);
  if (!strncmp(maker->now->name, "mov.", 4)) {
    if (maker->now->count > 2) return false;  // {a, b}
    const struct ptx_operand *from = operand(maker, 1);
    if (from->kind == PTX_SPECIAL && (!strncmp(from->special, "clock", 5) ||
                                      !strncmp(from->special, "globaltimer", 11))) {
      maker->op->code = plain->code == CODE_MOV_64 ? CODE_CLOCK_64 : CODE_CLOCK_32;
      add_definition(maker, operand(maker, 0), plain->code == CODE_MOV_64);
      return true;
    }
  }
  if (maker->now->count != strlen(plain->cells)) refuse(maker, "wrong number of operands");
  maker->op->code = plain->code;
  add_definition(maker, operand(maker, 0), plain->cells[0] == '6');
  for (uint32_t i = 1; plain->cells[i]; i++)
    add_use(maker, operand(maker, i), plain->cells[i] == '6');
  return true;
}

static void make_mov(struct maker *maker)
{
  if (part_is(maker, 1, "pred")) {
    maker->op->code = CODE_PRED_MOV;
    add_predicate(maker, operand(maker, 0));
    add_predicate(maker, operand(maker, 1));
    return;
  }
  bool wide = part_is(maker, 1, "b64");
  if (!wide && !part_is(maker, 1, "b32")) unknown(maker);
  uint32_t count = maker->now->count;
  bool joins = operand(maker, count - 1)->group == operand(maker, count - 2)->group;
  if (count == 3) {
    maker->op->code = (uint16_t)(wide ? (joins ? CODE_JOIN_64 : CODE_SPLIT_64)
                                      : (joins ? CODE_JOIN_32 : CODE_SPLIT_32));
  } else if (count == 5 && wide) {
    maker->op->code = joins ? CODE_JOIN_64_4 : CODE_SPLIT_64_4;
  } else {
    unknown(maker);
  }
  for (uint32_t i = 0; i < count; i++) {
    bool whole = joins ? i == 0 : i == count - 1, definition = joins ? i == 0 : i < count - 1;
    if (definition) add_definition(maker, operand(maker, i), wide && whole);
    else add_use(maker, operand(maker, i), wide && whole);
  }
}

static void make_setp(struct maker *maker)
{
  static const char *const comparisons[] = { "eq", "ne", "lt", "le", "gt", "ge", "equ", "neu",
                                             "ltu", "leu", "gtu", "geu", "num", "nan", NULL };
  static const char *const unsigned_comparisons[] = { "eq", "ne", "lo", "ls", "hi", "hs", NULL };
  static const char *const types[] = { "s32", "u32", "f32", "s64", "u64", "s16", "u16", "f64",
                                       "b32", "b64", "b16", NULL };
  static const uint8_t codes[] = { 0, 1, 2, 3, 4, 5, 6, 7, 1, 4, 6 };
  int comparison = among(maker->parts[1], comparisons), type = among(last_part(maker), types);
  if (comparison < 0) comparison = among(maker->parts[1], unsigned_comparisons);
  if (comparison < 0 || type < 0) unknown(maker);
  static const char *const combinations[] = { "", "and", "or", "xor", NULL };
  int combination = 0;
  for (int i = 2; i < maker->part_count - 1; i++) {
    if (part_is(maker, i, "ftz")) continue;
    combination = among(maker->parts[i], combinations);
    if (combination < 1) unknown(maker);
  }
  maker->op->code = (uint16_t)(CODE_SETP_S32 + codes[type]);
  maker->op->kind = (uint8_t)comparison;
  maker->op->extra = (uint8_t)combination;
  bool wide = strchr(types[type], '6') && strchr(types[type], '4');
  uint32_t at = 0;
  add_predicate(maker, operand(maker, at++));
  if (operand(maker, at)->group == 0) add_predicate(maker, operand(maker, at++));
  else add(maker, CODE_TRASH_PREDICATE, ALLOCATE_FIXED);
  add_use(maker, operand(maker, at++), wide);
  add_use(maker, operand(maker, at++), wide);
  if (combination) add_predicate(maker, operand(maker, at));
  else add(maker, CODE_TRUE_PREDICATE, ALLOCATE_FIXED);
}

static void make_selp(struct maker *maker)
{
  bool wide = strchr(last_part(maker), '6') && strchr(last_part(maker), '4');
  maker->op->code = wide ? CODE_SELP_64 : CODE_SELP_32;
  add_definition(maker, operand(maker, 0), wide);
  add_use(maker, operand(maker, 1), wide);
  add_use(maker, operand(maker, 2), wide);
  add_predicate(maker, operand(maker, 3));
}

static void make_logic(struct maker *maker, enum code_name code)
{
  maker->op->code = (uint16_t)code;
  for (uint32_t i = 0; i < maker->now->count; i++) add_predicate(maker, operand(maker, i));
}

static int element_bytes(struct maker *maker, const char *type)
{
  int bits = strchr("busf", type[0]) ? atoi(type + 1) : 0;
  if (bits != 8 && bits != 16 && bits != 32 && bits != 64) unknown(maker);
  return bits / 8;
}

static uint8_t space_of(struct maker *maker)
{
  static const struct { const char *part; enum ptx_space space; } spaces[] = {
    { "global", PTX_GLOBAL }, { "shared", PTX_SHARED }, { "shared::cta", PTX_SHARED },
    { "shared::cluster", PTX_SHARED }, { "param", PTX_PARAM }, { "param::entry", PTX_PARAM },
    { "const", PTX_GLOBAL }, { "local", PTX_LOCAL },
  };
  for (size_t i = 0; i < sizeof spaces / sizeof *spaces; i++)
    if (has_part(maker, spaces[i].part)) return (uint8_t)spaces[i].space;
  return PTX_GENERIC;
}

static void allow_parts(struct maker *maker, const char *const *allowed)
{
  for (int i = 1; i < maker->part_count - 1; i++)
    if (among(maker->parts[i], allowed) < 0) unknown(maker);
}

static void make_access(struct maker *maker, bool store)
{
  static const char *const allowed[] = {
    "global", "shared", "shared::cta", "shared::cluster", "param", "param::entry", "const",
    "local", "nc", "volatile", "weak", "relaxed", "acquire", "release", "cta", "gpu", "sys",
    "cluster", "ca", "cg", "cs", "lu", "cv", "wb", "wt", "v2", "v4", "v8", "L1::evict_normal",
    "L1::evict_unchanged", "L1::evict_first", "L1::evict_last", "L1::no_allocate",
    "L2::cache_hint", "L2::64B", "L2::128B", "L2::256B", "L2::evict_first", "L2::evict_last", NULL
  };
  allow_parts(maker, allowed);
  struct code_op *op = maker->op;
  op->code = store ? CODE_STORE : CODE_LOAD;
  const char *type = last_part(maker);
  op->access.space = space_of(maker);
  op->access.element_bytes = (uint8_t)element_bytes(maker, type);
  op->access.sign = type[0] == 's';
  op->access.count = has_part(maker, "v2") ? 2 : has_part(maker, "v4") ? 4
                   : has_part(maker, "v8") ? 8 : 1;
  if (op->access.element_bytes * op->access.count > 32) unknown(maker);
  if ((has_part(maker, "acquire") || has_part(maker, "release")) &&
      (has_part(maker, "gpu") || has_part(maker, "sys")))
    maker->code->orders_blocks = true;
  if (op->access.space == PTX_SHARED || op->access.space == PTX_GENERIC) {
    int bits = op->access.element_bytes == 1 ? 0 : op->access.element_bytes == 2 ? 1 : 2;
    if (bits < maker->code->grain_bits) maker->code->grain_bits = bits;
  }
  uint32_t data = store ? 1 : 0;
  add_address(maker, operand(maker, store ? 0 : op->access.count));
  const struct ptx_operand *first = operand(maker, data);
  op->access.wide_cell = first->kind == PTX_REG ? bits_of(maker, first) == 64
                                                : op->access.element_bytes == 8;
  for (uint32_t i = 0; i < op->access.count; i++) {
    const struct ptx_operand *at = operand(maker, data + i);
    if (store) add_use(maker, at, op->access.wide_cell);
    else add_definition(maker, at, op->access.wide_cell);
  }
}

static void make_atom(struct maker *maker, bool reduces)
{
  static const char *const kinds[] = { "add", "min", "max", "and", "or", "xor", "exch", "cas",
                                       NULL };
  static const char *const types[] = { "s32", "u32", "f32", "s64", "u64", "f64", "b32", "b64",
                                       NULL };
  static const char *const allowed[] = { "global", "shared", "shared::cta", "relaxed", "acquire",
    "release", "acq_rel", "cta", "gpu", "sys", "noftz", "add", "min", "max", "and", "or", "xor",
    "exch", "cas", NULL };
  allow_parts(maker, allowed);
  int type = among(last_part(maker), types), kind = -1;
  for (int i = 1; i < maker->part_count - 1; i++)
    if (among(maker->parts[i], kinds) >= 0) kind = among(maker->parts[i], kinds);
  if (type < 0 || kind < 0) unknown(maker);
  struct code_op *op = maker->op;
  op->code = CODE_ATOM;
  op->kind = (uint8_t)kind;
  op->type = (uint8_t)(type == 6 ? CODE_U32 : type == 7 ? CODE_U64 : type);
  op->access.space = space_of(maker);
  bool wide = element_bytes(maker, last_part(maker)) == 8;
  op->access.wide_cell = wide;
  op->access.element_bytes = wide ? 8 : 4;
  op->access.count = 1;
  if (has_part(maker, "acquire") || has_part(maker, "acq_rel") || has_part(maker, "release"))
    maker->code->orders_blocks = true;
  uint32_t at = 0;
  if (!reduces) at = 1;
  add_address(maker, operand(maker, at));
  if (reduces) add(maker, wide ? 32 : 0, ALLOCATE_FIXED);
  else add_definition(maker, operand(maker, 0), wide);
  add_use(maker, operand(maker, at + 1), wide);
  add_use(maker, operand(maker, kind == CODE_ATOM_CAS ? at + 2 : at + 1), wide);
}

static void make_branch(struct maker *maker)
{
  bool indexed = !strcmp(maker->parts[0], "brx");
  const struct ptx_operand *label = operand(maker, indexed ? 1 : 0);
  if (label->kind != PTX_LABEL) refuse(maker, "a label is expected");
  if (!indexed) {
    maker->op->code = CODE_BRANCH;
    maker->op->target = maker->kernel->label_positions[label->index];
    return;
  }
  maker->op->code = CODE_BRANCH_INDEX;
  add_use(maker, operand(maker, 0), false);
  for (int i = 0; i < maker->kernel->target_count; i++) {
    const struct ptx_targets *targets = &maker->kernel->targets[i];
    if (targets->label != label->index) continue;
    maker->op->target = (int32_t)targets->first;
    maker->op->extra = (uint8_t)targets->count;
    return;
  }
  refuse(maker, "its .branchtargets are not known");
}

static void make_barrier(struct maker *maker)
{
  struct code_op *op = maker->op;
  if (part_is(maker, 1, "warp")) {
    op->code = CODE_WARP_SYNC;
    add_use(maker, operand(maker, 0), false);
    return;
  }
  uint32_t at = 0;
  if (has_part(maker, "red")) {
    op->code = has_part(maker, "popc") ? CODE_BAR_RED_POPC
             : has_part(maker, "and") ? CODE_BAR_RED_AND : CODE_BAR_RED_OR;
    if (op->code == CODE_BAR_RED_POPC) add_definition(maker, operand(maker, at++), false);
    else add_predicate(maker, operand(maker, at++));
    add_use(maker, operand(maker, at++), false);
    if (maker->now->count == at + 2) add_use(maker, operand(maker, at++), false);
    else add(maker, constant(maker, 0, false), ALLOCATE_FIXED);
    add_predicate(maker, operand(maker, at));
    return;
  }
  if (has_part(maker, "cluster")) unknown(maker);
  op->code = has_part(maker, "arrive") ? CODE_BAR_ARRIVE : CODE_BAR_SYNC;
  if (op->code == CODE_BAR_SYNC && !has_part(maker, "sync")) unknown(maker);
  add(maker, 0, ALLOCATE_FIXED);  // where a reduction has its result
  add_use(maker, operand(maker, 0), false);
  if (maker->now->count > 1) add_use(maker, operand(maker, 1), false);
  else add(maker, constant(maker, 0, false), ALLOCATE_FIXED);
}

// d | p first; the rest as given.
static uint32_t add_value_and_predicate(struct maker *maker)
{
  add_definition(maker, operand(maker, 0), false);
  if (operand(maker, 1)->group == 0) {
    add_predicate(maker, operand(maker, 1));
    return 2;
  }
  add(maker, CODE_TRASH_PREDICATE, ALLOCATE_FIXED);
  return 1;
}

static void make_warp(struct maker *maker)
{
  struct code_op *op = maker->op;
  const char *base = maker->parts[0];
  if (!strcmp(base, "shfl")) {
    static const char *const kinds[] = { "bfly", "up", "down", "idx", NULL };
    int kind = part_is(maker, 1, "sync") && part_is(maker, 3, "b32") ? among(maker->parts[2], kinds)
                                                                     : -1;
    if (kind < 0) unknown(maker);
    op->code = CODE_SHFL;
    op->kind = (uint8_t)kind;
    for (uint32_t at = add_value_and_predicate(maker), end = at + 4; at < end; at++)
      add_use(maker, operand(maker, at), false);
  } else if (!strcmp(base, "vote")) {
    static const char *const kinds[] = { "all", "any", "uni", "ballot", NULL };
    int kind = part_is(maker, 1, "sync") ? among(maker->parts[2], kinds) : -1;
    if (kind < 0) unknown(maker);
    op->code = CODE_VOTE;
    op->kind = (uint8_t)kind;
    if (kind == 3) add_definition(maker, operand(maker, 0), false);
    else add_predicate(maker, operand(maker, 0));
    add_predicate(maker, operand(maker, 1));
    add_use(maker, operand(maker, 2), false);
  } else if (!strcmp(base, "redux")) {
    static const char *const kinds[] = { "add", "min", "max", "and", "or", "xor", NULL };
    int kind = part_is(maker, 1, "sync") ? among(maker->parts[2], kinds) : -1;
    if (kind < 0 || maker->part_count != 4 || last_part(maker)[0] == 'f') unknown(maker);
    op->code = CODE_REDUX;
    op->kind = (uint8_t)kind;
    op->type = last_part(maker)[0] == 's' ? CODE_S32 : CODE_U32;
    add_definition(maker, operand(maker, 0), false);
    add_use(maker, operand(maker, 1), false);
    add_use(maker, operand(maker, 2), false);
  } else if (!strcmp(base, "activemask")) {
    op->code = CODE_ACTIVE_MASK;
    add_definition(maker, operand(maker, 0), false);
  } else {
    op->code = CODE_ELECT;
    uint32_t at = add_value_and_predicate(maker);
    add_use(maker, operand(maker, at), false);
  }
}

static void make_matrix(struct maker *maker)
{
  struct code_op *op = maker->op;
  const char *base = maker->parts[0];
  if (strncmp(base, "movmatrix", 9) == 0) {
    if (strcmp(maker->now->name, "movmatrix.sync.aligned.m8n8.trans.b16")) unknown(maker);
    op->code = CODE_MOVMATRIX;
    add_definition(maker, operand(maker, 0), false);
    add_use(maker, operand(maker, 1), false);
    return;
  }
  static const char *const allowed[] = { "sync", "aligned", "m8n8", "x1", "x2", "x4", "trans",
                                         "shared", "shared::cta", NULL };
  allow_parts(maker, allowed);
  bool store = !strcmp(base, "stmatrix");
  uint32_t count = has_part(maker, "x4") ? 4 : has_part(maker, "x2") ? 2 : 1;
  if (!part_is(maker, maker->part_count - 1, "b16") || maker->now->count != count + 1)
    unknown(maker);
  op->code = store ? CODE_STMATRIX : CODE_LDMATRIX;
  op->kind = has_part(maker, "trans");
  op->extra = (uint8_t)count;
  add_address(maker, operand(maker, store ? 0 : count));
  for (uint32_t i = 0; i < count; i++) {
    if (store) add_use(maker, operand(maker, 1 + i), false);
    else add_definition(maker, operand(maker, i), false);
  }
}

static void make_mma(struct maker *maker)
{
  static const char *const known[] = {
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
    "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32",
    "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32", NULL
  };
  int which = among(maker->now->name, known);
  if (which < 0) unknown(maker);
  maker->op->code = CODE_MMA;
  maker->op->type = which & 1 ? CODE_F16 : CODE_BF16;
  maker->op->extra = which < 2 ? 16 : 8;  // K
  uint32_t count = which < 2 ? 14 : 11;
  if (maker->now->count != count) refuse(maker, "wrong number of operands");
  for (uint32_t i = 0; i < count; i++) {
    if (i < 4) add_definition(maker, operand(maker, i), false);
    else add_use(maker, operand(maker, i), false);
  }
}

static void make_cp_async_bulk(struct maker *maker)
{
  struct code_op *op = maker->op;
  const char *name = maker->now->name;
  if (!strcmp(name, "cp.async.bulk.commit_group")) {
    op->code = CODE_BULK_COMMIT;
    return;
  }
  if (!strcmp(name, "cp.async.bulk.wait_group") || !strcmp(name, "cp.async.bulk.wait_group.read")) {
    op->code = CODE_BULK_WAIT;
    op->kind = has_part(maker, "read");
    add_number(maker, number(maker, 0));
    return;
  }
  bool reduces = !strcmp(maker->parts[1], "reduce");
  bool hint = has_part(maker, "L2::cache_hint");
  uint32_t plain_count = maker->now->count - hint;
  bool load = !reduces && (has_part(maker, "mbarrier::complete_tx::bytes"));
  if (load && plain_count == 4 && has_part(maker, "global") &&
      (part_is(maker, 3, "shared::cluster") || part_is(maker, 3, "shared::cta"))) {
    op->code = CODE_BULK_LOAD;
    add_any_address(maker, operand(maker, 0));
    add_any_address(maker, operand(maker, 1));
    add_use(maker, operand(maker, 2), false);
    add_any_address(maker, operand(maker, 3));
  } else if (!strncmp(name, "cp.async.bulk.global.shared::cta.bulk_group", 43) &&
             plain_count == 3) {
    op->code = CODE_BULK_STORE;
    add_any_address(maker, operand(maker, 0));
    add_any_address(maker, operand(maker, 1));
    add_use(maker, operand(maker, 2), false);
  } else {
    unknown(maker);
  }
}

static void make_cp_async(struct maker *maker)
{
  static const char *const allowed[] = { "async", "ca", "cg", "shared", "shared::cta", "L2::64B",
                                         "L2::128B", "L2::256B", "L2::cache_hint", NULL };
  struct code_op *op = maker->op;
  const char *name = maker->now->name;
  if (has_part(maker, "bulk")) {
    make_cp_async_bulk(maker);
  } else if (!strcmp(name, "cp.async.commit_group")) {
    op->code = CODE_CP_ASYNC_COMMIT;
  } else if (!strcmp(name, "cp.async.wait_group")) {
    op->code = CODE_CP_ASYNC_WAIT;
    add_number(maker, number(maker, 0));
  } else if (!strcmp(name, "cp.async.wait_all")) {
    op->code = CODE_CP_ASYNC_WAIT;
    op->kind = 1;
    add_number(maker, 0);
  } else if (!strncmp(name, "cp.async.mbarrier.arrive.", 25)) {
    op->code = CODE_CP_ASYNC_ARRIVE;
    op->kind = has_part(maker, "noinc");
    add_any_address(maker, operand(maker, 0));
  } else {
    for (int i = 1; i < maker->part_count; i++)
      if (among(maker->parts[i], allowed) < 0 && strcmp(maker->parts[i], "global")) unknown(maker);
    if (!has_part(maker, "global")) unknown(maker);
    op->code = CODE_CP_ASYNC;
    add_any_address(maker, operand(maker, 0));
    add_any_address(maker, operand(maker, 1));
    int64_t bytes = number(maker, 2);
    if (bytes != 16 && (has_part(maker, "cg") || (bytes != 4 && bytes != 8)))
      refuse(maker, "copies 4, 8 or 16 bytes (.cg: 16)");
    add_number(maker, bytes);
    bool sized = maker->now->count > 3 + (has_part(maker, "L2::cache_hint") ? 1u : 0u);
    if (!sized) add(maker, constant(maker, (uint64_t)bytes, false), ALLOCATE_FIXED);
    else if (is_predicate(maker, operand(maker, 3))) unknown(maker);
    else add_use(maker, operand(maker, 3), false);
  }
}

static void make_mbarrier(struct maker *maker)
{
  static const char *const allowed[] = { "init", "inval", "arrive", "expect_tx", "try_wait",
    "test_wait", "parity", "shared", "shared::cta", "shared::cluster", "release", "acquire",
    "relaxed", "cta", "cluster", NULL };
  allow_parts(maker, allowed);
  if (!part_is(maker, maker->part_count - 1, "b64")) unknown(maker);
  struct code_op *op = maker->op;
  if (has_part(maker, "init")) {
    op->code = CODE_MBAR_INIT;
    add_any_address(maker, operand(maker, 0));
    add_use(maker, operand(maker, 1), false);
  } else if (has_part(maker, "inval")) {
    op->code = CODE_MBAR_INVAL;
    add_any_address(maker, operand(maker, 0));
  } else if (has_part(maker, "arrive")) {
    bool expects = has_part(maker, "expect_tx");
    bool remote = operand(maker, 0)->address;  // no state comes back
    uint32_t at = remote ? 0 : 1;
    op->code = CODE_MBAR_ARRIVE;
    op->kind = expects;
    add_any_address(maker, operand(maker, at));
    if (remote) add(maker, 32, ALLOCATE_FIXED);
    else add_definition(maker, operand(maker, 0), true);
    if (maker->now->count > at + 1) add_use(maker, operand(maker, at + 1), false);
    else add(maker, constant(maker, 1, false), ALLOCATE_FIXED);
  } else if (has_part(maker, "expect_tx")) {
    op->code = CODE_MBAR_EXPECT;
    add_any_address(maker, operand(maker, 0));
    add_use(maker, operand(maker, 1), false);
  } else {
    bool parity = has_part(maker, "parity");
    op->code = CODE_MBAR_WAIT;
    op->kind = has_part(maker, "try_wait");
    op->extra = parity;
    add_any_address(maker, operand(maker, 1));
    add_predicate(maker, operand(maker, 0));
    add_use(maker, operand(maker, 2), !parity);
  }
}

static void make_wgmma(struct maker *maker)
{
  struct code_op *op = maker->op;
  if (has_part(maker, "fence") || has_part(maker, "commit_group")) {
    op->code = has_part(maker, "fence") ? CODE_WGMMA_FENCE : CODE_WGMMA_COMMIT;
    return;
  }
  if (has_part(maker, "wait_group")) {
    op->code = CODE_WGMMA_WAIT;
    add_number(maker, number(maker, 0));
    return;
  }
  int columns = 0;
  bool half = part_is(maker, 6, "f16");
  if (!part_is(maker, 1, "mma_async") || maker->part_count != 8 ||
      sscanf(maker->parts[4], "m64n%dk16", &columns) != 1 || !part_is(maker, 5, "f32") ||
      (!half && !part_is(maker, 6, "bf16")) || strcmp(maker->parts[6], maker->parts[7]) ||
      columns % 8 || columns < 8 || columns > 256)
    unknown(maker);
  op->code = CODE_WGMMA;
  op->type = half ? CODE_F16 : CODE_BF16;
  op->target = columns;
  maker->code->has_wgmma = true;
  uint32_t at = 0, cells = (uint32_t)columns / 2;
  for (; at < cells; at++) {
    const struct ptx_operand *cell = operand(maker, at);
    if (cell->kind != PTX_REG || bits_of(maker, cell) != 32) refuse(maker, "wrong accumulators");
    maker->apart[cell->index] = true;
    add(maker, (uint32_t)cell->index, ALLOCATE_BOTH);
  }
  op->extra = operand(maker, at + 1)->group == operand(maker, at)->group;  // A in registers
  if (op->extra) for (int i = 0; i < 4; i++) add_use(maker, operand(maker, at++), false);
  else add_use(maker, operand(maker, at++), true);
  add_use(maker, operand(maker, at++), true);
  add_predicate(maker, operand(maker, at++));
  for (uint32_t i = 0; i < (op->extra ? 3u : 4u); i++) {
    int64_t value = number(maker, at++);
    if (i < 2 ? value != 1 && value != -1 : value != 0 && value != 1)
      refuse(maker, "scale or transposition is out of range");
    add(maker, (uint32_t)value, ALLOCATE_FIXED);
  }
}

static void make_other(struct maker *maker)
{
  struct code_op *op = maker->op;
  const char *base = maker->parts[0], *name = maker->now->name;
  if (!strcmp(base, "ret") || !strcmp(base, "exit")) {
    op->code = CODE_EXIT;
  } else if (!strcmp(base, "trap")) {
    op->code = CODE_TRAP;
  } else if (!strncmp(name, "fence.proxy.async", 17)) {
    op->code = CODE_FENCE_PROXY;
  } else if (!strcmp(base, "fence") || !strcmp(base, "membar")) {
    op->code = CODE_FENCE;
    if (!has_part(maker, "cta") && !has_part(maker, "mbarrier_init"))
      maker->code->orders_blocks = true;
  } else if (!strcmp(base, "setmaxnreg")) {
    int64_t registers = number(maker, 0);
    if (registers % 8 || registers < 24 || registers > 256)
      refuse(maker, "registers must be a multiple of 8 from 24 to 256");
    op->code = CODE_NOTHING;
  } else if (!strcmp(base, "createpolicy")) {
    op->code = CODE_MOV_64;
    add_definition(maker, operand(maker, 0), true);
    add(maker, constant(maker, 0, true), ALLOCATE_FIXED);
  } else if (!strcmp(base, "nanosleep") || !strcmp(base, "prefetch") ||
             !strcmp(base, "griddepcontrol")) {
    op->code = CODE_NOTHING;
  } else {
    unknown(maker);
  }
}

static void make_instruction(struct maker *maker)
{
  if (make_plain(maker)) return;
  const char *base = maker->parts[0];
  static const struct { const char *base; void (*make)(struct maker *); } families[] = {
    { "mov", make_mov }, { "setp", make_setp }, { "selp", make_selp }, { "bra", make_branch },
    { "brx", make_branch }, { "bar", make_barrier }, { "barrier", make_barrier },
    { "shfl", make_warp }, { "vote", make_warp }, { "redux", make_warp },
    { "activemask", make_warp }, { "elect", make_warp }, { "ldmatrix", make_matrix },
    { "stmatrix", make_matrix }, { "movmatrix", make_matrix }, { "mma", make_mma },
    { "cp", make_cp_async }, { "mbarrier", make_mbarrier }, { "wgmma", make_wgmma },
  };
  for (size_t i = 0; i < sizeof families / sizeof *families; i++)
    if (!strcmp(base, families[i].base)) {
      families[i].make(maker);
      return;
    }
  if (!strcmp(base, "ld")) make_access(maker, false);
  else if (!strcmp(base, "st")) make_access(maker, true);
  else if (!strcmp(base, "atom")) make_atom(maker, false);
  else if (!strcmp(base, "red")) make_atom(maker, true);
  else if (!strcmp(maker->now->name, "and.pred")) make_logic(maker, CODE_PRED_AND);
  else if (!strcmp(maker->now->name, "or.pred")) make_logic(maker, CODE_PRED_OR);
  else if (!strcmp(maker->now->name, "xor.pred")) make_logic(maker, CODE_PRED_XOR);
  else if (!strcmp(maker->now->name, "not.pred")) make_logic(maker, CODE_PRED_NOT);
  else make_other(maker);
}

static void split_name(struct maker *maker)
{
  snprintf(maker->text, sizeof maker->text, "%s", maker->now->name);
  maker->part_count = 0;
  char *rest = maker->text;
  for (char *part; (part = strtok_r(rest, ".", &rest));) {
    if (maker->part_count == PARTS) unknown(maker);
    maker->parts[maker->part_count++] = part;
  }
}

static uint64_t static_shared_bytes(const struct ptx_module *module,
                                    const struct ptx_kernel *kernel)
{
  uint64_t bytes = kernel->shared_bytes;
  for (int i = 0; i < module->variable_count; i++) {
    const struct ptx_variable *variable = &module->variables[i];
    if (variable->space != PTX_SHARED) continue;
    bytes = (bytes + variable->alignment - 1) / variable->alignment * variable->alignment;
    bytes += variable->bytes;
  }
  return bytes;
}

static void make_all(struct maker *maker)
{
  const struct ptx_kernel *kernel = maker->kernel;
  struct code *code = maker->code;
  for (int i = 0; i < kernel->register_count; i++)
    if (kernel->registers[i].bits == 1) maker->predicates[i] = code->predicate_count++;
  for (int i = 0; i < kernel->instruction_count; i++) {
    maker->now = &kernel->instructions[i];
    maker->op = &code->ops[code->op_count++];
    *maker->op = (struct code_op){ .guard = -1, .first = code->operand_count,
                                   .line = maker->now->line,
                                   .source_line = maker->now->source_line };
    if (maker->now->guard >= 0) {
      maker->op->guard = maker->predicates[maker->now->guard];
      maker->op->guard_negated = maker->now->guard_negated;
    }
    split_name(maker);
    make_instruction(maker);
  }
  // a kernel may end without ret
  code->ops[code->op_count++] = (struct code_op){ .code = CODE_EXIT, .guard = -1,
                                                  .first = code->operand_count };
  code->targets = calloc((size_t)kernel->target_label_count + 1, sizeof *code->targets);
  for (int i = 0; i < kernel->target_label_count; i++)
    code->targets[i] = kernel->label_positions[kernel->target_labels[i]];
  allocate_places(code, maker->roles, maker->apart,
                  FIRST_WORD + 32 * (uint32_t)maker->special_count);
}

struct code *code_make(const struct ptx_module *module, const struct ptx_kernel *kernel,
                       uint64_t globals, char *problem, size_t problem_bytes)
{
  struct maker *maker = calloc(1, sizeof *maker);
  struct code *code = calloc(1, sizeof *code);
  *maker = (struct maker){ .module = module, .kernel = kernel, .code = code, .globals = globals,
                           .problem = problem, .problem_bytes = problem_bytes };
  code->module = module;
  code->kernel = kernel;
  code->predicate_count = 2;
  code->grain_bits = 2;
  code->static_shared_bytes = static_shared_bytes(module, kernel);
  code->local_bytes = kernel->local_bytes;
  code->param_bytes = kernel->param_bytes;
  code->ops = calloc((size_t)kernel->instruction_count + 1, sizeof *code->ops);
  maker->apart = calloc((size_t)kernel->register_count + 1, 1);
  maker->predicates = calloc((size_t)kernel->register_count + 1, sizeof *maker->predicates);
  bool failed = setjmp(maker->give_up);
  if (!failed) make_all(maker);
  free(maker->roles);
  free(maker->apart);
  free(maker->predicates);
  free(maker->constant_values);
  free(maker->constant_wide);
  free(maker->constant_places);
  if (failed) code_free(maker->code);
  struct code *made = failed ? NULL : maker->code;
  free(maker);
  return made;
}

void code_free(struct code *code)
{
  free(code->ops);
  free(code->operands);
  free(code->constants);
  free(code->targets);
  free(code);
}
