// primitives.cu: one small kernel for each primitive of templates/cuda/prelude.cu.  Pasted after an
// emitted source, whose prelude it speaks; test_conformance.c has the list of names.
//
//   in    4096 words of chance, in the kind that the list says
//   out   512 words
// One block of 64 threads; each thread has its own words of in and out.

#define TRY(name) extern "C" __global__ void __launch_bounds__(64) try_##name( \
    const unsigned *in, unsigned *out)

DEVICE float real(unsigned bits) { return __uint_as_float(bits); }
DEVICE unsigned bits_of(float x) { return __float_as_uint(x); }
DEVICE void put(unsigned *out, struct chunk c) { store_global(out + threadIdx.x * 4, c); }

// 16 rows of 64 elements from `in`, as a tile at the start of shared memory.
DEVICE void fill_tile(const unsigned *in) {
  for_chunks(16, 64, (int)threadIdx.x, 64, [&](int row, int chunk) {
    unsigned to = chunk_at(shared_start(), 64, row, chunk);
    ask_chunk(to, (const elem *)in + row * 64, 64, chunk, true);
  });
  copy_commit();
  copy_wait(0);
  block_sync();
}

TRY(copy_async) {                      // 0 to 16 bytes, the rest zeros
  unsigned at = shared_start() + threadIdx.x * 16;
  copy_async(at, in + threadIdx.x * 4, (int)(threadIdx.x % 9) * 2);
  copy_commit();
  copy_wait(0);
  put(out, load_shared(at));
}
TRY(copy_async_word) {
  unsigned at = shared_start() + threadIdx.x * 4;
  copy_async_word(at, in + threadIdx.x, threadIdx.x % 3 != 0);
  copy_commit();
  copy_wait(0);
  out[threadIdx.x] = load_shared_word(at);
}
TRY(copy_groups) {                     // of two groups the first, then the second
  unsigned at = shared_start() + threadIdx.x * 32;
  copy_async(at, in + threadIdx.x * 8, 16);
  copy_commit();
  copy_async(at + 16, in + threadIdx.x * 8 + 4, 16);
  copy_commit();
  copy_wait(1);
  struct chunk first = load_shared(at);
  copy_wait(0);
  struct chunk second = load_shared(at + 16);
  store_global(out + threadIdx.x * 8, first);
  store_global(out + threadIdx.x * 8 + 4, second);
}
TRY(shared_words) {                    // of each other, over both warps
  unsigned at = shared_start() + threadIdx.x * 8, other = shared_start() + (63 - threadIdx.x) * 8;
  float x[2];
  store_shared_word(at, in[threadIdx.x]);
  store_shared_float(at + 4, real(in[threadIdx.x + 64]));
  block_sync();
  load_shared_floats(x, other);
  out[threadIdx.x] = bits_of(x[0]);
  out[threadIdx.x + 64] = bits_of(x[1]);
  out[threadIdx.x + 128] = load_shared_word(other);
  out[threadIdx.x + 192] = bits_of(load_shared_float(other + 4));
}
TRY(shared_chunks) {                   // within each warp
  unsigned start = shared_start() + threadIdx.x / 32 * 512;
  struct chunk c = load_global((const elem *)(in + threadIdx.x * 4), 8);
  store_shared(start + lane() * 16, c);
  warp_sync();
  put(out, load_shared(start + (31 - lane()) * 16));
}
TRY(some_sync) {                       // the second warp tells the first
  unsigned at = shared_start() + lane() * 4;
  if (threadIdx.x >= 32) store_shared_word(at, in[lane()]);
  some_sync(3, 64);
  if (threadIdx.x < 32) out[lane()] = load_shared_word(at);
}
TRY(load_elements) {                   // counts 0 to 8, from addresses of all kinds
  put(out, load_elements((const elem *)in + threadIdx.x * 9, (int)threadIdx.x % 9));
}
TRY(load_global) {
  put(out, load_global((const elem *)in + threadIdx.x * 12, 8 - (int)(threadIdx.x & 1)));
}
TRY(store_elements) {
  struct chunk c = load_global((const elem *)(in + threadIdx.x * 4), 8);
  store_elements((elem *)out + threadIdx.x * 9, c, (int)threadIdx.x % 9);
}
TRY(load_matrices) {
  fill_tile(in);
  put(out, load_matrices(chunk_at(shared_start(), 64, (int)lane() & 15,
                                  (int)(lane() >> 4) + (int)threadIdx.x / 32 * 2)));
}
TRY(load_matrices_transposed) {
  fill_tile(in);
  put(out, load_matrices_transposed(chunk_at(shared_start(), 64, (int)lane() & 15,
                                             (int)(lane() >> 4) + (int)threadIdx.x / 32 * 2)));
}
TRY(operand_a) {
  fill_tile(in);
  put(out, operand_a(shared_start(), 64, 0, (int)threadIdx.x / 32 * 4));
}
TRY(operands_b) {
  fill_tile(in);
  put(out, operands_b(shared_start(), 64, 0, (int)threadIdx.x / 32 * 4));
}
TRY(operands_b_transposed) {
  fill_tile(in);
  put(out, operands_b_transposed(shared_start(), 64, 0, (int)threadIdx.x / 32 * 4));
}
DEVICE void try_product(const unsigned *in, unsigned *out) {  // a tile by itself transposed
  float c[4] = { 1, 2, 3, 4 };
  fill_tile(in);
#pragma unroll
  for (int k = 0; k < 4; k++) {
    struct chunk b = operands_b_transposed(shared_start(), 64, 0, 2 * k);
    multiply(c, operand_a(shared_start(), 64, 0, 2 * k), b.word[0], b.word[1]);
  }
  for (int i = 0; i < 4; i++) out[threadIdx.x * 4 + (unsigned)i] = bits_of(c[i]);
}
TRY(multiply_whole) { try_product(in, out); }
TRY(multiply_real) { try_product(in, out); }
TRY(join) {
  for (unsigned i = threadIdx.x; i < 512; i += 64) out[i] = join(real(in[i]), real(in[i + 512]));
}
TRY(narrow) {
  for (unsigned i = threadIdx.x; i < 512; i += 64) out[i] = narrow(real(in[i]));
}
TRY(narrow_bf16) {
  for (unsigned i = threadIdx.x; i < 512; i += 64) out[i] = narrow_bf16(real(in[i]));
}
TRY(widen) {
  for (unsigned i = threadIdx.x; i < 512; i += 64)
    out[i] = bits_of(i & 1 ? widen_first(in[i]) : widen_second(in[i]));
}
TRY(exp2_of) {
  for (unsigned i = threadIdx.x; i < 512; i += 64) out[i] = bits_of(exp2_of(real(in[i])));
}
TRY(log2_of) {
  for (unsigned i = threadIdx.x; i < 512; i += 64) out[i] = bits_of(log2_of(fabsf(real(in[i]))));
}
TRY(reciprocal) {
  for (unsigned i = threadIdx.x; i < 512; i += 64) out[i] = bits_of(reciprocal(real(in[i])));
}
TRY(tanh_of) {
  for (unsigned i = threadIdx.x; i < 512; i += 64) out[i] = bits_of(tanh_of(real(in[i])));
}
TRY(larger) {
  for (unsigned i = threadIdx.x; i < 512; i += 64)
    out[i] = bits_of(larger(real(in[i]), real(in[i + 512])));
}
TRY(exchange) { out[threadIdx.x] = bits_of(exchange(real(in[threadIdx.x]), 5)); }
TRY(row_largest) { out[threadIdx.x] = bits_of(row_largest(real(in[threadIdx.x]))); }
TRY(row_sum) { out[threadIdx.x] = bits_of(row_sum(real(in[threadIdx.x]))); }
TRY(grow_global) {                     // the largest of every eighth
  if (threadIdx.x < 8) ((float *)out)[threadIdx.x] = -__int_as_float(0x7f800000);
  block_sync();
  grow_global((float *)out + threadIdx.x % 8, real(in[threadIdx.x]));
}
TRY(chunk_beside) {                    // the same as chunk_at, for both kinds of pitch
  for (int row = 0; row < 64; row += 8)
    for (int chunk = 0; chunk < 6; chunk += 2)
      out[threadIdx.x] += chunk_beside(0, 64, row, lane() & 7, chunk, lane() >> 3 & 1) -
                          chunk_at(0, 64, row + (int)(lane() & 7), chunk + (int)(lane() >> 3 & 1)) +
                          chunk_beside(0, 48, row, lane() & 7, chunk, lane() >> 3 & 1) -
                          chunk_at(0, 48, row + (int)(lane() & 7), chunk + (int)(lane() >> 3 & 1));
}
