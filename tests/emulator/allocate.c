// allocate.c: liveness over the basic blocks, then one scan over the instructions.
//
// A lifetime is the span from the first to the last instruction where the register is live, holes
// included.  Lanes that have diverged each follow their own path through the same lifetimes and
// write only their own cells, so what holds for one lane holds for the warp.
#include "allocate.h"
#include <stdlib.h>
#include <string.h>

struct flow {
  const struct code *code;
  const uint8_t *roles;
  int block_count, words;         // words of a set of registers
  int *begin;                     // first op of each block; begin[block_count] = op_count
  int *block_of;                  // of each op
  uint64_t *used, *defined, *in, *out;  // [block][words]
};

static bool ends_block(const struct code_op *op)
{
  return op->code == CODE_BRANCH || op->code == CODE_BRANCH_INDEX || op->code == CODE_EXIT ||
         op->code == CODE_TRAP;
}

static void cut_blocks(struct flow *flow)
{
  const struct code *code = flow->code;
  bool *starts = calloc((size_t)code->op_count + 1, 1);
  starts[0] = true;
  for (int i = 0; i < code->op_count; i++) {
    const struct code_op *op = &code->ops[i];
    if (!ends_block(op)) continue;
    starts[i + 1] = true;
    if (op->code == CODE_BRANCH) starts[op->target] = true;
    if (op->code == CODE_BRANCH_INDEX)
      for (int k = 0; k < op->extra; k++) starts[code->targets[op->target + k]] = true;
  }
  flow->begin = malloc(((size_t)code->op_count + 2) * sizeof *flow->begin);
  flow->block_of = malloc(((size_t)code->op_count + 1) * sizeof *flow->block_of);
  for (int i = 0; i < code->op_count; i++) {
    if (starts[i]) flow->begin[flow->block_count++] = i;
    flow->block_of[i] = flow->block_count - 1;
  }
  flow->begin[flow->block_count] = code->op_count;
  free(starts);
}

static void mark(uint64_t *set, uint32_t member) { set[member / 64] |= UINT64_C(1) << member % 64; }
static bool marked(const uint64_t *set, uint32_t member)
{
  return set[member / 64] >> member % 64 & 1;
}

static void gather_uses(struct flow *flow)
{
  const struct code *code = flow->code;
  for (int b = 0; b < flow->block_count; b++) {
    uint64_t *used = flow->used + (size_t)b * (size_t)flow->words;
    uint64_t *defined = flow->defined + (size_t)b * (size_t)flow->words;
    for (int i = flow->begin[b]; i < flow->begin[b + 1]; i++) {
      const struct code_op *op = &code->ops[i];
      for (int pass = 0; pass < 2; pass++)
        for (uint32_t k = op->first; k < op->first + op->count; k++) {
          uint8_t role = flow->roles[k];
          uint32_t name = code->operands[k];
          // a guarded definition leaves the old value in some lanes
          bool use = role == ALLOCATE_USE || role == ALLOCATE_BOTH ||
                     (role == ALLOCATE_DEFINITION && op->guard >= 0);
          bool definition = role == ALLOCATE_DEFINITION || role == ALLOCATE_BOTH;
          if (!pass && use && !marked(defined, name)) mark(used, name);
          if (pass && definition) mark(defined, name);
        }
    }
  }
}

static bool merge(struct flow *flow, int block, int successor)
{
  bool changed = false;
  uint64_t *out = flow->out + (size_t)block * (size_t)flow->words;
  const uint64_t *in = flow->in + (size_t)successor * (size_t)flow->words;
  for (int i = 0; i < flow->words; i++) {
    changed |= (in[i] & ~out[i]) != 0;
    out[i] |= in[i];
  }
  return changed;
}

static bool update(struct flow *flow, int block)
{
  const struct code *code = flow->code;
  int last = flow->begin[block + 1] - 1;
  const struct code_op *op = &code->ops[last];
  bool falls = !ends_block(op) || op->guard >= 0;
  if (falls && block + 1 < flow->block_count) merge(flow, block, block + 1);
  if (op->code == CODE_BRANCH && op->target < code->op_count)
    merge(flow, block, flow->block_of[op->target]);
  if (op->code == CODE_BRANCH_INDEX)
    for (int k = 0; k < op->extra; k++)
      merge(flow, block, flow->block_of[code->targets[op->target + k]]);
  bool changed = false;
  size_t row = (size_t)block * (size_t)flow->words;
  for (int i = 0; i < flow->words; i++) {
    uint64_t in = flow->used[row + (size_t)i] |
                  (flow->out[row + (size_t)i] & ~flow->defined[row + (size_t)i]);
    changed |= in != flow->in[row + (size_t)i];
    flow->in[row + (size_t)i] = in;
  }
  return changed;
}

struct life { int begin, end; uint32_t name; };

static void stretch(struct life *life, int at)
{
  if (life->begin < 0 || at < life->begin) life->begin = at;
  if (at > life->end) life->end = at;
}

static void find_lives(const struct flow *flow, struct life *lives)
{
  const struct code *code = flow->code;
  for (int b = 0; b < flow->block_count; b++)
    for (int word = 0; word < flow->words; word++) {
      size_t at = (size_t)b * (size_t)flow->words + (size_t)word;
      for (uint64_t rest = flow->in[at]; rest; rest &= rest - 1)
        stretch(&lives[word * 64 + __builtin_ctzll(rest)], flow->begin[b]);
      for (uint64_t rest = flow->out[at]; rest; rest &= rest - 1)
        stretch(&lives[word * 64 + __builtin_ctzll(rest)], flow->begin[b + 1] - 1);
    }
  for (int i = 0; i < code->op_count; i++)
    for (uint32_t k = code->ops[i].first; k < code->ops[i].first + code->ops[i].count; k++)
      if (flow->roles[k] != ALLOCATE_FIXED) stretch(&lives[code->operands[k]], i);
}

static int by_begin(const void *a, const void *b)
{
  const struct life *x = a, *y = b;
  return x->begin != y->begin ? (x->begin < y->begin ? -1 : 1) : x->name < y->name ? -1 : 1;
}

// Free places of one width, with the instruction from which on each is free.
struct pool { uint32_t *places; int count; };
struct held { int end; uint32_t place; bool wide; };

static void give_places(struct code *code, struct life *lives, int count, const bool *apart,
                        uint32_t first_word, uint32_t *places)
{
  struct pool pools[2] = { { malloc(((size_t)count + 1) * 4), 0 },
                           { malloc(((size_t)count + 1) * 4), 0 } };
  struct held *held = malloc(((size_t)count + 1) * sizeof *held);
  int held_count = 0;
  uint32_t words = first_word;
  qsort(lives, (size_t)count, sizeof *lives, by_begin);
  for (int i = 0; i < count; i++) {
    if (lives[i].begin < 0) continue;
    bool wide = code->kernel->registers[lives[i].name].bits == 64, alone = apart[lives[i].name];
    for (int k = 0; k < held_count;) {
      if (held[k].end < lives[i].begin) {
        struct pool *pool = &pools[held[k].wide];
        pool->places[pool->count++] = held[k].place;
        held[k] = held[--held_count];
      } else {
        k++;
      }
    }
    uint32_t place;
    if (pools[wide].count && !alone) {
      place = pools[wide].places[--pools[wide].count];
    } else {
      place = words;
      words += wide ? 64 : 32;
    }
    places[lives[i].name] = place;
    if (!alone) held[held_count++] = (struct held){ lives[i].end, place, wide };
  }
  code->register_words = words;
  free(held);
  free(pools[0].places);
  free(pools[1].places);
}

void allocate_places(struct code *code, const uint8_t *roles, const bool *apart,
                     uint32_t first_word)
{
  int count = code->kernel->register_count;
  struct flow flow = { .code = code, .roles = roles, .words = (count + 63) / 64 };
  cut_blocks(&flow);
  size_t cells = (size_t)flow.block_count * (size_t)flow.words + 1;
  flow.used = calloc(4 * cells, sizeof *flow.used);
  flow.defined = flow.used + cells;
  flow.in = flow.used + 2 * cells;
  flow.out = flow.used + 3 * cells;
  gather_uses(&flow);
  for (bool changed = true; changed;) {
    changed = false;
    for (int b = flow.block_count; b-- > 0;) changed |= update(&flow, b);
  }
  struct life *lives = malloc(((size_t)flow.words * 64 + 1) * sizeof *lives);
  for (int i = 0; i < flow.words * 64; i++) lives[i] = (struct life){ -1, -1, (uint32_t)i };
  find_lives(&flow, lives);
  uint32_t *places = calloc((size_t)count + 1, sizeof *places);
  give_places(code, lives, count, apart, first_word, places);
  for (uint32_t k = 0; k < code->operand_count; k++)
    if (roles[k] != ALLOCATE_FIXED) code->operands[k] = places[code->operands[k]];
  free(places);
  free(lives);
  free(flow.used);
  free(flow.begin);
  free(flow.block_of);
}
