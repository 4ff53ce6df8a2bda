// tensor.c: matrices: ldmatrix and its kin, mma.sync, wgmma.
//
// A fragment of 32 lanes is a matrix in memory already: of lane 4 i + j the pair 2 j, 2 j + 1 of
// row i.  Sums are made in the order of k, in float; the device promises no order.
#include "watch.h"
#include <stdlib.h>
#include <string.h>

static inline float real(uint16_t bits, uint8_t type)
{
  union { uint32_t bits; float real; } value = { (uint32_t)bits << 16 };
  if (type == CODE_BF16) return value.real;
  uint32_t rest = bits & 0x7fff;
  union { uint32_t bits; float real; } normal = { (rest << 13) + (112u << 23) };
  if (rest >= 0x7c00) normal.bits = 0x7f800000u | (rest & 0x3ff) << 13;
  if (rest < 0x400) normal.real = (float)rest * 0x1p-24f;
  normal.bits |= (uint32_t)(bits & 0x8000) << 16;
  return normal.real;
}

// Rows of 8 numbers of two bytes, as a fragment's register has them, to floats `stride` apart.
FOR_EACH_MACHINE
static void unpack(float *into, size_t stride, const uint32_t *fragment, uint8_t type)
{
  uint16_t bits[64];
  union { uint32_t bits[64]; float real[64]; } wide;
  memcpy(bits, fragment, sizeof bits);
  if (type == CODE_BF16)
    for (int i = 0; i < 64; i++) wide.bits[i] = (uint32_t)bits[i] << 16;
  else
    for (int i = 0; i < 64; i++) wide.real[i] = real(bits[i], type);
  for (size_t i = 0; i < 8; i++) memcpy(into + i * stride, wide.real + 8 * i, 32);
}

typedef float row __attribute__((vector_size(32)));

// c[16][8] += a[16][depth] * b[8][depth] transposed.
FOR_EACH_MACHINE
static void multiply(float (*c)[8], const float (*a)[16], const float (*b)[16], int depth)
{
  float turned[16][8];
  row rows[16];
  for (int k = 0; k < depth; k++)
    for (int n = 0; n < 8; n++) turned[k][n] = b[n][k];
  memcpy(rows, turned, sizeof rows);
  for (int i = 0; i < 16; i++) {
    row sum;
    memcpy(&sum, c[i], sizeof sum);
    for (int k = 0; k < depth; k++) sum += a[i][k] * rows[k];
    memcpy(c[i], &sum, sizeof sum);
  }
}

void machine_mma(struct machine_block *block, struct machine_warp *warp, const struct code_op *op,
                 const uint32_t *o)
{
  float a[16][16], b[8][16], c[16][8];
  int depth = op->extra, halves = depth / 8;
  block->counts[MACHINE_MMA]++;
  for (int h = 0; h < halves; h++) {
    unpack(&a[0][8 * h], 16, machine_row(warp, o[4 + 2 * h]), op->type);
    unpack(&a[8][8 * h], 16, machine_row(warp, o[5 + 2 * h]), op->type);
    unpack(&b[0][8 * h], 16, machine_row(warp, o[4 + 2 * halves + h]), op->type);
  }
  const uint32_t *sums = o + 4 + 3 * halves;
  for (int half = 0; half < 2; half++) {
    const float *even = machine_row(warp, sums[2 * half]);
    const float *odd = machine_row(warp, sums[2 * half + 1]);
    float *into = &c[8 * half][0];
    for (int l = 0; l < 32; l++) {
      into[2 * l] = even[l];
      into[2 * l + 1] = odd[l];
    }
  }
  multiply(c, a, b, depth);
  for (int half = 0; half < 2; half++) {
    float *even = machine_row(warp, o[2 * half]), *odd = machine_row(warp, o[2 * half + 1]);
    const float *from = &c[8 * half][0];
    for (int l = 0; l < 32; l++) {
      even[l] = from[2 * l];
      odd[l] = from[2 * l + 1];
    }
  }
}

static void transpose(uint16_t *matrix)
{
  for (int i = 0; i < 8; i++)
    for (int k = 0; k < i; k++) {
      uint16_t one = matrix[8 * i + k];
      matrix[8 * i + k] = matrix[8 * k + i];
      matrix[8 * k + i] = one;
    }
}

// A matrix's 8 rows of 16 bytes are one pass where they lie in different banks.
static void count_banks(struct machine_block *block, const uint64_t *addresses)
{
  unsigned rows[8] = { 0 }, most = 0;
  for (int i = 0; i < 8; i++) {
    unsigned count = ++rows[addresses[i] >> 4 & 7];
    if (count > most) most = count;
  }
  block->counts[MACHINE_REPLAYS] += most - 1;
}

FOR_EACH_MACHINE
void machine_ldmatrix(struct machine_block *block, struct machine_warp *warp,
                      const struct code_op *op, const uint32_t *o)
{
  uint16_t matrices[4][64];
  uint64_t addresses[32];
  block->counts[MACHINE_LDMATRIX]++;
  for (int i = 0; i < 8 * op->extra; i++) {
    uint64_t address = machine_address(warp, o, op->access.wide_address, i);
    addresses[i] = address;
    const unsigned char *row = watch_shared(block, op, i, address, 16);
    watch_read(block, warp, op, MACHINE_WHOLE_WARP, (uint32_t)(row - block->shared), 16);
    memcpy(&matrices[i / 8][i % 8 * 8], row, 16);
  }
  for (int m = 0; m < op->extra; m++) {
    count_banks(block, addresses + 8 * m);
    if (op->kind) transpose(matrices[m]);
    memcpy(machine_row(warp, o[2 + m]), matrices[m], sizeof matrices[m]);
  }
}

void machine_stmatrix(struct machine_block *block, struct machine_warp *warp,
                      const struct code_op *op, const uint32_t *o)
{
  uint16_t matrices[4][64];
  for (int m = 0; m < op->extra; m++) {
    memcpy(matrices[m], machine_row(warp, o[2 + m]), sizeof matrices[m]);
    if (op->kind) transpose(matrices[m]);
  }
  for (int i = 0; i < 8 * op->extra; i++) {
    uint64_t address = machine_address(warp, o, op->access.wide_address, i);
    unsigned char *row = watch_shared(block, op, i, address, 16);
    watch_write(block, warp, op, MACHINE_WHOLE_WARP, (uint32_t)(row - block->shared), 16, 0);
    memcpy(row, &matrices[i / 8][i % 8 * 8], 16);
  }
}

void machine_movmatrix(struct machine_warp *warp, const uint32_t *o)
{
  uint16_t matrix[64];
  memcpy(matrix, machine_row(warp, o[1]), sizeof matrix);
  transpose(matrix);
  memcpy(machine_row(warp, o[0]), matrix, sizeof matrix);
}

// ---- wgmma

// Where element (row, k) of an operand lies, from its descriptor.  K-major: rows of 16 k in units
// of 8 rows; M/N-major: columns of k in units of 64 (by swizzle) rows.  All in bytes.
struct operand { uint32_t start, leading, stride, swizzle, base; bool major_k; };

static struct operand read_descriptor(uint64_t descriptor, bool transposed)
{
  struct operand operand = {
    .start = (uint32_t)(descriptor & 0x3fff) << 4,
    .leading = (uint32_t)(descriptor >> 16 & 0x3fff) << 4,
    .stride = (uint32_t)(descriptor >> 32 & 0x3fff) << 4,
    .major_k = !transposed,
  };
  static const uint32_t bytes[] = { 16, 128, 64, 32 };  // none, then by the field's number
  operand.swizzle = bytes[descriptor >> 62];
  operand.base = (uint32_t)(descriptor >> 49 & 7);
  return operand;
}

static uint32_t place(const struct operand *operand, uint32_t row, uint32_t k)
{
  uint32_t width = operand->swizzle, at;
  if (operand->major_k) {
    // core matrices of 8 rows by 16 bytes; with a swizzle a line holds `width` bytes of k
    uint32_t line = width == 16 ? 16 : width, byte = 2 * k;
    at = operand->start + row / 8 * operand->stride + row % 8 * line +
         (width == 16 ? byte / 16 * operand->leading + byte % 16 : byte);
  } else {
    uint32_t byte = 2 * row;
    at = width == 16
       ? operand->start + byte / 16 * operand->stride + k / 8 * operand->leading + k % 8 * 16 +
         byte % 16
       : operand->start + byte / width * operand->leading + k / 8 * operand->stride +
         k % 8 * width + byte % width;
  }
  uint32_t bits = width == 128 ? 7 : width == 64 ? 3 : width == 32 ? 1 : 0;
  return at ^ (at >> 3 & bits << 4);
}

// 16 bytes of an operand, read by the tensor cores on the warp's behalf.
static void watch_operand(struct machine_block *block, struct machine_warp *warp,
                          const struct code_op *op, uint32_t offset, uint32_t clock)
{
  if (!block->launch->watch) return;
  uint32_t *reader = block->reader[MACHINE_TENSOR + warp->number / 4];
  uint32_t first = offset >> block->code->grain_bits, count = watch_grains(block, 16);
  uint32_t mine = clock << 6 | MACHINE_WHOLE_WARP, last = ~0u;
  for (uint32_t grain = first; grain < first + count; grain++) {
    uint32_t epoch = block->writer[grain], writer = epoch >> 7 & 63;
    if (epoch != last) {
      if (!epoch || epoch & WATCH_PENDING) watch_unwritten(block, op, 0, grain);
      if (!watch_before(warp, epoch, MACHINE_WHOLE_WARP))
        watch_race(block, op, 0, grain, "reads", "was written", writer, block->writer_op[grain]);
      if (writer < MACHINE_TENSOR && epoch >> 13 > warp->proxied[writer])
        machine_fault(block, op, 0, MACHINE_LAUNCH_FAILED,
                      "reads shared memory at %u, which was written (line %u) with no "
                      "fence.proxy.async since", grain << block->code->grain_bits,
                      block->code->ops[block->writer_op[grain]].line);
      last = epoch;
    }
    if (mine > reader[grain]) reader[grain] = mine;  // another warp's may be later
    block->reader_op[grain] = (uint32_t)(op - block->code->ops);
  }
}

// Rows [first, first + count) of an operand and their 16 k.  What is contiguous in memory, k or
// rows, is so in units of 16 bytes, which no swizzle breaks.
static void fetch(struct machine_block *block, struct machine_warp *warp,
                  const struct code_op *op, const struct operand *operand, uint32_t first,
                  uint32_t count, uint32_t clock, float (*into)[16])
{
  for (uint32_t i = 0; i < count * 2; i++) {
    uint32_t row = operand->major_k ? i / 2 : i / 16 * 8, k = operand->major_k ? i % 2 * 8 : i % 16;
    uint32_t address = place(operand, first + row, k);
    uint16_t bits[8];
    memcpy(bits, watch_shared(block, op, 0, address, 16), sizeof bits);
    watch_operand(block, warp, op, address - CODE_SHARED_BASE, clock);
    for (uint32_t e = 0; e < 8; e++) {
      float x = real(bits[e], op->type);
      if (operand->major_k) into[row][k + e] = x;
      else into[row + e][k] = x;
    }
  }
}

// The warp's 16 rows of the warpgroup's 64.
static void run_wgmma(struct machine_block *block, struct machine_warp *warp,
                      const struct machine_wgmma *wgmma)
{
  const struct code_op *op = wgmma->op;
  int columns = op->target;
  const uint32_t *flags = block->code->operands + op->first + op->count - (op->extra ? 3 : 4);
  float scale_a = (float)(int32_t)flags[0], scale_b = (float)(int32_t)flags[1];
  struct operand a_at = read_descriptor(wgmma->a_descriptor, !op->extra && flags[2]);
  struct operand b_at = read_descriptor(wgmma->b_descriptor, op->extra ? flags[2] : flags[3]);
  float a[16][16], b[8][16], c[16][8];
  if (b_at.base || (!op->extra && a_at.base))
    machine_fault(block, op, 0, MACHINE_LAUNCH_FAILED,
                  "a descriptor has a base offset, which the emulator does not know");
  if (op->extra)
    for (int i = 0; i < 4; i++)
      unpack(&a[8 * (i & 1)][8 * (i >> 1)], 16, wgmma->a[i], op->type);
  if (!op->extra) fetch(block, warp, op, &a_at, warp->number % 4 * 16, 16, wgmma->clock, a);
  for (int i = 0; i < 16; i++)
    for (int k = 0; k < 16; k++) a[i][k] *= scale_a;
  for (int n = 0; n < columns; n += 8) {
    fetch(block, warp, op, &b_at, (uint32_t)n, 8, wgmma->clock, b);
    for (int i = 0; i < 8; i++)
      for (int k = 0; k < 16; k++) b[i][k] *= scale_b;
    float *sums = wgmma->sums + (size_t)n / 2 * 32;
    for (int half = 0; half < 2; half++)
      for (int l = 0; l < 32; l++)
        for (int e = 0; e < 2; e++)
          (&c[8 * half][0])[2 * l + e] = wgmma->accumulate ? sums[(2 * half + e) * 32 + l] : 0;
    multiply(c, a, b, 16);
    for (int half = 0; half < 2; half++)
      for (int l = 0; l < 32; l++)
        for (int e = 0; e < 2; e++)
          sums[(2 * half + e) * 32 + l] = (&c[8 * half][0])[2 * l + e];
  }
}

void machine_wgmma_issue(struct machine_block *block, struct machine_warp *warp,
                         const struct code_op *op, const uint32_t *o)
{
  if (warp->wgmma_count == warp->wgmma_room) {
    warp->wgmma_room = warp->wgmma_room ? 2 * warp->wgmma_room : 8;
    warp->wgmmas = realloc(warp->wgmmas, (size_t)warp->wgmma_room * sizeof *warp->wgmmas);
    if (!warp->wgmmas) abort();
  }
  if (warp->number % 4 == 0 && warp->number + 4 > block->warp_count)
    machine_fault(block, op, 0, MACHINE_LAUNCH_FAILED, "the warpgroup has fewer than 4 warps");
  if (!warp->wgmma_fenced)
    machine_fault(block, op, 0, MACHINE_LAUNCH_FAILED, "there was no wgmma.fence before");
  struct machine_wgmma *wgmma = &warp->wgmmas[warp->wgmma_count];
  uint32_t cells = (uint32_t)op->target / 2, at = cells;
  block->counts[MACHINE_WGMMA]++;
  *wgmma = (struct machine_wgmma){ .op = op, .group = warp->wgmma_commits };
  if (op->extra) {
    for (int i = 0; i < 4; i++) memcpy(wgmma->a[i], machine_row(warp, o[at++]), 128);
  } else {
    wgmma->a_descriptor = *(uint64_t *)machine_row(warp, o[at++]);
  }
  wgmma->b_descriptor = *(uint64_t *)machine_row(warp, o[at++]);
  wgmma->accumulate = machine_predicate(warp, o[at]) & 1;
  uint64_t same = (uint64_t)(op - block->code->ops) ^ wgmma->a_descriptor << 7 ^
                  wgmma->b_descriptor << 1 ^ (uint64_t)wgmma->accumulate << 63;
  warp->wgmma_digest = (warp->wgmma_digest ^ same) * UINT64_C(0x9e3779b97f4a7c15) + 1;
  wgmma->clock = ++block->agent_clock[MACHINE_TENSOR + warp->number / 4];
  for (int i = warp->wgmma_count; i-- > 0 && !wgmma->chained;)
    wgmma->chained = !memcmp(block->code->operands + warp->wgmmas[i].op->first, o, 4);
  wgmma->sums = malloc(cells * 128);
  if (!wgmma->sums) abort();
  for (uint32_t i = 0; i < cells; i++) {
    float *row = machine_row(warp, o[i]);
    memcpy(wgmma->sums + 32 * i, row, 128);
    memset(row, 0xff, 128);  // nothing to be read before the wait
  }
  warp->wgmma_count++;
}

void machine_wgmma_wait(struct machine_block *block, struct machine_warp *warp, uint32_t left)
{
  int done = 0;
  for (; done < warp->wgmma_count; done++) {
    struct machine_wgmma *wgmma = &warp->wgmmas[done];
    if (wgmma->group + left >= warp->wgmma_commits) break;
    run_wgmma(block, warp, wgmma);
    const uint32_t *o = block->code->operands + wgmma->op->first;
    uint32_t cells = (uint32_t)wgmma->op->target / 2;
    struct machine_wgmma *next = NULL;
    for (int i = done + 1; i < warp->wgmma_count && !next; i++)
      if (block->code->operands[warp->wgmmas[i].op->first] == o[0]) next = &warp->wgmmas[i];
    for (uint32_t i = 0; i < cells; i++)
      memcpy(next ? next->sums + 32 * i : machine_row(warp, o[i]), wgmma->sums + 32 * i, 128);
    uint32_t *known = &warp->clock[MACHINE_TENSOR + warp->number / 4];
    if (wgmma->clock > *known) *known = wgmma->clock;
    free(wgmma->sums);
  }
  warp->wgmma_count -= done;
  memmove(warp->wgmmas, warp->wgmmas + done, (size_t)warp->wgmma_count * sizeof *warp->wgmmas);
}
