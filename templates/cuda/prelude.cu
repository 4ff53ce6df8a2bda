// prelude.cu: what the CUDA kernels are written in.  The instructions that C has no word for, tiles
// of rows in shared memory, where the rows of keys and queries lie, and the mask.
//
// Pasted after the constants and kernel_abi.h, before the kernel.  No header of any kind is
// included.  Everything a kernel says in PTX stands here, so that each word of it is written (and
// interpreted, and checked on a GPU) once.  Addresses in shared memory are 32-bit numbers.

#define DEVICE [[maybe_unused]] static __device__ __forceinline__

typedef unsigned short elem;           // bfloat16 or, where F16, IEEE half precision, as bits

#define LOG2E  1.44269504088896341f
#define LN2    0.69314718055994531f
// The score of a key that may not be seen, and where a running maximum starts.  Both finite, so
// that no difference of them is NaN; so far apart that exp2(NEVER - LOWEST) is exactly 0.
#define NEVER  -2e38f
#define LOWEST -1e38f

// Of the size the host was told.  Swizzles of wgmma go by the bits of addresses.
extern __shared__ __align__($(WGMMA == 1 and 1024 or 128)) unsigned char shared_memory[];

DEVICE unsigned shared_start(void) {
  return (unsigned)__cvta_generic_to_shared(shared_memory);
}
// x, hidden from the compiler: what is made of it is worked out here, not kept from elsewhere.
DEVICE unsigned afresh(unsigned x) {
  asm volatile("" : "+r"(x));
  return x;
}
DEVICE unsigned lane(void) { return threadIdx.x & 31; }

// ---- waiting ------------------------------------------------------------------------------------

DEVICE void block_sync(void) { __syncthreads(); }
DEVICE void warp_sync(void) { __syncwarp(); }

// Some of the block's warps meet, `threads` in all, at barrier `id` of 1 .. 15.
DEVICE void some_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
}

// ---- copies that land later ---------------------------------------------------------------------

// 16 bytes of shared memory: the first `bytes` of them from `from`, the rest 0.  Both addresses are
// multiples of 16.
DEVICE void copy_async(unsigned to, const void *from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :: "r"(to), "l"(from), "r"(bytes) : "memory");
}
// 4 bytes likewise: those at `from`, or 0 where there are none.
DEVICE void copy_async_word(unsigned to, const void *from, bool some) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
               :: "r"(to), "l"(from), "r"(some ? 4 : 0) : "memory");
}
// Closes the group of the copies this thread asked for since the last.
DEVICE void copy_commit(void) { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most the last `groups` groups of this thread are under way; a constant.
#define copy_wait(groups) asm volatile("cp.async.wait_group %0;" :: "n"((groups) + 0) : "memory")

// ---- shared and global memory -------------------------------------------------------------------

struct chunk { unsigned word[4]; };    // 16 bytes, eight elements

DEVICE void store_shared(unsigned to, struct chunk c) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
               :: "r"(to), "r"(c.word[0]), "r"(c.word[1]), "r"(c.word[2]), "r"(c.word[3])
               : "memory");
}
DEVICE struct chunk load_shared(unsigned from) {
  struct chunk c;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(c.word[0]), "=r"(c.word[1]), "=r"(c.word[2]), "=r"(c.word[3])
               : "r"(from) : "memory");
  return c;
}
DEVICE void store_shared_word(unsigned to, unsigned word) {
  asm volatile("st.shared.b32 [%0], %1;" :: "r"(to), "r"(word) : "memory");
}
DEVICE unsigned load_shared_word(unsigned from) {
  unsigned word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
  return word;
}
DEVICE void store_shared_float(unsigned to, float x) {
  asm volatile("st.shared.f32 [%0], %1;" :: "r"(to), "f"(x) : "memory");
}
DEVICE float load_shared_float(unsigned from) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(from) : "memory");
  return x;
}

DEVICE void load_shared_floats(float x[2], unsigned from) {   // a multiple of 8
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x[0]), "=f"(x[1]) : "r"(from) : "memory");
}

DEVICE bool is_aligned(const void *p) { return ((unsigned long long)p & 15) == 0; }

DEVICE void store_global(void *to, struct chunk c) {   // aligned
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
               :: "l"(to), "r"(c.word[0]), "r"(c.word[1]), "r"(c.word[2]), "r"(c.word[3])
               : "memory");
}

DEVICE struct chunk no_elements(void) {
  struct chunk c = { { 0, 0, 0, 0 } };
  return c;
}

// The first `count` elements of eight, 0 after them; nothing behind them is read.
DEVICE struct chunk load_elements(const elem *from, int count) {
  struct chunk c = no_elements();
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (i < count) c.word[i / 2] |= (unsigned)from[i] << 16 * (i % 2);
  return c;
}
// The same of what no block of this launch writes, in one load where it is aligned.
DEVICE struct chunk load_global(const elem *from, int count) {
  if (count < 8 || !is_aligned(from)) return load_elements(from, count);
  struct chunk c;
  asm("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
      : "=r"(c.word[0]), "=r"(c.word[1]), "=r"(c.word[2]), "=r"(c.word[3]) : "l"(from));
  return c;
}
// Writes the first `count` of them and nothing behind.
DEVICE void store_elements(elem *to, struct chunk c, int count) {
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (i < count) to[i] = (elem)(c.word[i / 2] >> 16 * (i % 2));
}

// ---- products -----------------------------------------------------------------------------------

// Four 8 x 8 matrices: lane l gives the address of row l % 8 of matrix l / 8, and gets in word[i]
// two elements of matrix i: row l / 4, columns 2 (l % 4) and the next.
DEVICE struct chunk load_matrices(unsigned row) {
  struct chunk c;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(c.word[0]), "=r"(c.word[1]), "=r"(c.word[2]), "=r"(c.word[3])
               : "r"(row) : "memory");
  return c;
}
// The same with each matrix transposed: rows 2 (l % 4) and the next, column l / 4.
DEVICE struct chunk load_matrices_transposed(unsigned row) {
  struct chunk c;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(c.word[0]), "=r"(c.word[1]), "=r"(c.word[2]), "=r"(c.word[3])
               : "r"(row) : "memory");
  return c;
}

// c += a b for 16 x 16 a, 16 x 8 b.  Lane l holds of c the rows l / 4 (c[0], c[1]) and 8 + l / 4
// (c[2], c[3]), columns 2 (l % 4) and the next; of a the 8 x 8 quarters upper left, lower left,
// upper right, lower right as load_matrices gives them; of b the upper and the lower half, as
// load_matrices_transposed gives them.
DEVICE void multiply(float c[4], struct chunk a, unsigned b_upper, unsigned b_lower) {
//@ local dtype = F16 == 1 and "f16" or "bf16"
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.$(dtype).$(dtype).f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a.word[0]), "r"(a.word[1]), "r"(a.word[2]), "r"(a.word[3]),
                 "r"(b_upper), "r"(b_lower));
}

// ---- numbers ------------------------------------------------------------------------------------

// Two elements of two floats, the first in the lower half; to nearest, ties to even.
DEVICE unsigned join(float first, float second) {
  unsigned both;
//@ if F16 == 1 then
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
//@ else
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
//@ end
  return both;
}
DEVICE elem narrow(float x) { return (elem)join(x, 0); }
DEVICE elem narrow_bf16(float x) {     // whatever the elements are
  unsigned both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(0.0f), "f"(x));
  return (elem)both;
}

DEVICE float widen(elem x) {
//@ if F16 == 1 then
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x));
  return wide;
//@ else
  return __uint_as_float((unsigned)x << 16);
//@ end
}
// The first and the second element of a word.
DEVICE float widen_first(unsigned word) { return widen((elem)word); }
DEVICE float widen_second(unsigned word) { return widen((elem)(word >> 16)); }

DEVICE float exp2_of(float x) {        // 0 for what would be denormal
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float log2_of(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// tanh, to some 4e-7 of itself.
DEVICE float tanh_of(float x) {
  float square = x * x;
  float p = 2.18694885e-2f;            // x^9 and down: the series, for small x
  p = p * square - 5.39682540e-2f;
  p = p * square + 1.33333333e-1f;
  p = p * square - 3.33333333e-1f;
  float small = x + x * (square * p);
  float large = 1 - 2 * reciprocal(1 + exp2_of(x * (2 * LOG2E)));
  return square < 0.0625f ? small : large;
}

// The larger of two, and that of the four lanes that share a row of a product; their sum.
DEVICE float larger(float a, float b) { return fmaxf(a, b); }
DEVICE float exchange(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEVICE float row_largest(float x) {
  x = larger(x, exchange(x, 1));
  return larger(x, exchange(x, 2));
}
DEVICE float row_sum(float x) {
  x += exchange(x, 1);
  return x + exchange(x, 2);
}

// *to grows to x at least, in whatever order blocks come.  -inf may stand there, no NaN.
DEVICE void grow_global(float *to, float x) {
  int bits = __float_as_int(x);        // floats of one sign are ordered as their bits are
  if (bits >= 0) asm volatile("red.global.max.s32 [%0], %1;" :: "l"(to), "r"(bits) : "memory");
  else asm volatile("red.global.min.u32 [%0], %1;" :: "l"(to), "r"(bits) : "memory");
}

// ---- tiles --------------------------------------------------------------------------------------

// A tile is rows of `dim` elements in shared memory, in chunks of 16 bytes, with zeros up to a
// multiple of 16 elements.  Eight rows' chunks of one column of chunks lie in different banks:
// where a row is a multiple of eight chunks they change places with the row, else rows lie an odd
// number of chunks apart.  Tiles start at multiples of 128 bytes.

// Chunks of a row; chunks from one row to the next; bytes of a tile.
#define CHUNKS(dim)           (((dim) + 15) / 16 * 2)
#define PITCH(dim)            (CHUNKS(dim) % 8 == 0 ? CHUNKS(dim) : CHUNKS(dim) | 1)
#define TILE_BYTES(rows, dim) ((rows) * PITCH(dim) * 16)

// (Tiles that wgmma reads start at multiples of 1024 bytes.  Eight rows are panels of 64 columns,
// one behind the other, each of them as it stands in such a tile of 64 columns.)

DEVICE unsigned chunk_at(unsigned tile, int dim, int row, int chunk) {
//@ if WGMMA == 1 then
  int panel = row / 8 * (PITCH(dim) / 8) + chunk / 8;
  return tile + (unsigned)(panel * 1024 + row % 8 * 128 + ((chunk ^ row) & 7) * 16);
//@ end
  if (PITCH(dim) % 8 == 0) chunk ^= row & 7;
  return tile + (unsigned)((row * PITCH(dim) + chunk) * 16);
}

// The same where row = at_row + lane_row and chunk = at_chunk + lane_chunk, at_row a multiple of 8
// and at_chunk even: what differs from lane to lane is worked out once for many such places.
DEVICE unsigned chunk_beside(unsigned tile, int dim, int at_row, unsigned lane_row, int at_chunk,
                             unsigned lane_chunk) {
  unsigned lane_at = lane_row * (PITCH(dim) * 16) + tile;
  if (PITCH(dim) % 8 != 0)
    return lane_at + lane_chunk * 16 + (unsigned)((at_row * PITCH(dim) + at_chunk) * 16);
  lane_at += (lane_chunk ^ (lane_row & 7)) * 16;
  return (lane_at ^ (unsigned)(at_chunk % 8 * 16)) +
         (unsigned)((at_row * PITCH(dim) + at_chunk / 8 * 8) * 16);
}

// The operands of `multiply` out of a tile, for the calling lane; rows are multiples of 8, chunks
// even.  a: rows [row, row + 16), columns 8 chunk and on of the tile.
DEVICE struct chunk operand_a(unsigned tile, int dim, int row, int chunk) {
  return load_matrices(chunk_beside(tile, dim, row, lane() & 15, chunk, lane() >> 4));
}
// b = the tile transposed, for two products: its rows [row, row + 8) are the columns of the first
// (words 0 and 1), the next eight those of the second (words 2 and 3).
DEVICE struct chunk operands_b_transposed(unsigned tile, int dim, int row, int chunk) {
  return load_matrices(chunk_beside(tile, dim, row, (lane() & 7) + (lane() >> 4) * 8, chunk,
                                    lane() >> 3 & 1));
}
// b = the tile, for two products: rows [row, row + 16), columns of `chunk` and of the next.
DEVICE struct chunk operands_b(unsigned tile, int dim, int row, int chunk) {
  return load_matrices_transposed(chunk_beside(tile, dim, row, lane() & 15, chunk, lane() >> 4));
}

// One chunk of a row of `dim` elements that starts at `row`, asked for; 0 if it `is_there` not.
// The row is aligned.
DEVICE void ask_chunk(unsigned to, const elem *row, int dim, int chunk, bool is_there) {
  int left = is_there ? dim - 8 * chunk : 0;
  copy_async(to, left > 0 ? row + 8 * chunk : row, left >= 8 ? 16 : left > 0 ? 2 * left : 0);
}
// The same of any row; of none it is 0.  What is not aligned is there at once.
DEVICE void load_chunk(unsigned to, const elem *row, int dim, int chunk) {
  if (!row) store_shared(to, no_elements());
  else if (is_aligned(row)) ask_chunk(to, row, dim, chunk, true);
  else store_shared(to, load_elements(row + 8 * chunk, dim - 8 * chunk));
}

// Does `body` with the `row` and `chunk` of each chunk of a tile, `rows` and `dim` constant, shared
// out among `threads` threads of which the caller is number `thread`.
template <typename Body>
DEVICE void for_chunks(int rows, int dim, int thread, int threads, Body body) {
  int all = rows * CHUNKS(dim);
#pragma unroll
  for (int i = 0; i < (all + threads - 1) / threads; i++) {
    int row, chunk;
    if (threads % CHUNKS(dim) == 0) {
      row = thread / CHUNKS(dim) + i * (threads / CHUNKS(dim)), chunk = thread % CHUNKS(dim);
    } else {
      row = (i * threads + thread) / CHUNKS(dim), chunk = (i * threads + thread) % CHUNKS(dim);
    }
    if (all % threads == 0 || i * threads + thread < all) body(row, chunk);
  }
}

// Asks for the caller's column of chunks in the first `count` of `rows` rows, the others become 0:
// its first row starts at `from`, each of the next `step` elements on.  For threads in a multiple
// of a row's chunks.
DEVICE void ask_column(unsigned tile, int rows, int dim, const elem *from, sw_int64 step, int count,
                       int thread, int threads) {
  int apart = threads / CHUNKS(dim), row = thread / CHUNKS(dim), chunk = thread % CHUNKS(dim);
#pragma unroll
  for (int i = 0; i < (rows + apart - 1) / apart; i++) {
    if (rows % apart == 0 || row < rows)
      ask_chunk(chunk_at(tile, dim, row, chunk), from, dim, chunk, row < count);
    row += apart;
    from += step;
  }
}
// Asks for the first `count` of `rows` rows, `stride` elements apart from `first` on, all aligned;
// the others become 0.
DEVICE void ask_rows(unsigned tile, int rows, int dim, const elem *first, sw_int64 stride,
                     int count, int thread, int threads) {
  if (threads % CHUNKS(dim) == 0) {
    ask_column(tile, rows, dim, first + thread / CHUNKS(dim) * stride,
               threads / CHUNKS(dim) * stride, count, thread, threads);
  } else {
    for_chunks(rows, dim, thread, threads, [&](int row, int chunk) {
      ask_chunk(chunk_at(tile, dim, row, chunk), first + row * stride, dim, chunk, row < count);
    });
  }
}

// for_chunks in a loop, for what is seldom done.
template <typename Body>
DEVICE void for_chunks_slowly(int rows, int dim, int thread, int threads, Body body) {
#pragma unroll 1
  for (int i = thread; i < rows * CHUNKS(dim); i += threads) body(i / CHUNKS(dim), i % CHUNKS(dim));
}

// Where a view's row of (token, head, batch) starts; of one whose data is an offset, from `base`.
DEVICE const elem *elem_at(const struct sw_view &view, sw_int64 token, sw_int64 head,
                           sw_int64 batch) {
  return (const elem *)view.data + token * view.token + head * view.head + batch * view.batch;
}
DEVICE float *float_at(const struct sw_view &view, sw_int64 token, sw_int64 head, sw_int64 batch) {
  return (float *)view.data + token * view.token + head * view.head + batch * view.batch;
}
DEVICE const elem *elem_from(const char *base, const struct sw_view &view, sw_int64 head,
                             sw_int64 batch) {
  return (const elem *)(base + (sw_int64)view.data) + head * view.head + batch * view.batch;
}

//@ if WGMMA == 1 then
// ---- products of four warps ---------------------------------------------------------------------

// A warpgroup multiplies 64 rows at once, 16 to a warp, and reads tiles of shared memory itself,
// from beyond the order of what threads write there: they show it, then comes a barrier.
// rows_wait is copy_wait, and shows what the caller has laid there.
DEVICE void show_products(void) { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
#define rows_wait(groups) do { copy_wait(groups); show_products(); } while (0)
DEVICE void group_sync(void) { some_sync(1 + (int)threadIdx.x / 128, 128); }

// Tells products where a tile lies, from its row at `start`, a multiple of 8, on: 8 rows of 64
// columns take 1024 bytes, and so far apart are the panels of 8 rows (of use where columns run
// along the result); the next 8 rows follow after `apart` bytes; swizzled in lines of 128 bytes.
DEVICE unsigned long long tile_words(unsigned start, unsigned apart) {
  return (start & 0x3ffff) >> 4 | 1024 / 16 << 16 | (unsigned long long)(apart >> 4) << 32 |
         1ull << 62;
}

//@ local type = F16 == 1 and "f32.f16.f16" or "f32.bf16.bf16"
//@ local start = [["wgmma.fence.sync.aligned;\n"]]
//@ local finish = [["wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n}"]]
//@ local function list(count, item)
//@   local items = {}
//@   for i = 0, count - 1 do items[i + 1] = item(i) end
//@   return concat(items, ", ")
//@ end
//@ local function numbers(first, count)
//@   return list(count, function(i) return "%" .. first + i end)
//@ end
//@ local function sums(mode, name, count)
//@   return list(count, function(i)
//@     return format('"%s"(%s[%d][%d])', mode, name, i // 4, i % 4)
//@   end)
//@ end
//@ local function words(name, count)
//@   return list(count, function(i) return format('"r"(%s[%d].word[%d])', name, i // 4, i % 4) end)
//@ end
//@ local shapes, known = {}, {}
//@ for _, dim in ipairs { HEAD_DIM_QK, HEAD_DIM_V } do
//@   for _, width in ipairs { COLUMNS, OTHER_COLUMNS } do
//@     local name = dim .. " " .. width
//@     if not known[name] then
//@       shapes[#shapes + 1] = { dim = dim, padded = (dim + 15) // 16 * 16, width = width }
//@     end
//@     known[name] = true
//@   end
//@ end

// s = own other^T, over DIM dims: 64 rows of a tile from `own` on, WIDTH rows of another from
// `other` on.  s as `multiply` has its c, one for every 8 columns, of the caller's 16 rows.  For
// all threads of a warpgroup; it is done when they go on.
template <int DIM, int WIDTH>
DEVICE void multiply_dims(float s[][4], unsigned own, unsigned other) {
  unsigned long long rows = tile_words(own, 128 * PITCH(DIM));
  unsigned long long columns = tile_words(other, 128 * PITCH(DIM));
//@ for _, shape in ipairs(shapes) do
//@ local count = shape.width // 2
  if constexpr (DIM == $(shape.dim) && WIDTH == $(shape.width))
    asm volatile("{\n.reg .pred add;\n.reg .b64 a, b;\n"
                 $(start)
                 "setp.ne.b32 add, %$(count + 2), 0;\n"
//@   for d = 0, shape.padded // 16 - 1 do
//@   local on = (d // 4 * 1024 + d % 4 * 32) // 16
                 "add.s64 a, %$(count), $(on);\n"
                 "add.s64 b, %$(count + 1), $(on);\n"
                 "wgmma.mma_async.sync.aligned.m64n$(shape.width)k16.$(type) "
                 "{$(numbers(0, count))}, a, b, add, 1, 1, 0, 0;\n"
//@     if d == 0 then
                 "setp.eq.b32 add, %$(count + 2), 0;\n"
//@     end
//@   end
                 $(finish)
                 : $(sums("=f", "s", count))
                 : "l"(rows), "l"(columns), "r"(0) : "memory");
//@ end
}

// sums += x other: the caller's 16 rows of x, whose WIDTH columns are operands of `multiply`, with
// as many rows of DIM columns from `other` on.
template <int DIM, int WIDTH>
DEVICE void multiply_rows(float sums[][4], const struct chunk x[], unsigned other) {
  unsigned long long rows = tile_words(other, 128 * PITCH(DIM));
//@ for _, shape in ipairs(shapes) do
//@ local count, operands = shape.padded // 2, shape.width // 4
  if constexpr (DIM == $(shape.dim) && WIDTH == $(shape.width))
    asm volatile("{\n.reg .pred add;\n.reg .b64 b;\n"
                 $(start)
                 "setp.eq.b32 add, %$(count + operands + 1), 0;\n"
//@   for n = 0, shape.width // 16 - 1 do
                 "add.s64 b, %$(count + operands), $(n * 2 * shape.padded);\n"
                 "wgmma.mma_async.sync.aligned.m64n$(shape.padded)k16.$(type) "
                 "{$(numbers(0, count))}, {$(numbers(count + 4 * n, 4))}, b, add, 1, 1, 1;\n"
//@   end
                 $(finish)
                 : $(sums("+f", "sums", count))
                 : $(words("x", operands)),
                   "l"(rows), "r"(0) : "memory");
//@ end
}

//@ else
#define rows_wait(groups) copy_wait(groups)

//@ end
// ---- queries ------------------------------------------------------------------------------------

// A block's work: a tile of TILE_TOKENS queries for some heads of one key head, of one item.
struct place {
  const struct sw_unit *unit;
  unsigned batch, kv_head;
  int      y;                         // which tile (and group) of the item
};

DEVICE struct place place_of(const struct sw_cuda_args &args, unsigned block, unsigned y) {
  struct place place;
  unsigned item = (unsigned)args.first_item + block;   // units are listed: they are not 2^32
  unsigned kv_heads = (unsigned)args.attention.kv_heads, batch = (unsigned)args.attention.batch;
  place.kv_head = item % kv_heads;
  place.batch = item / kv_heads % batch;
  place.unit = args.attention.units + item / kv_heads / batch;
  place.y = (int)y;
  return place;
}
DEVICE struct place place_of_block(const struct sw_cuda_args &args) {
  return place_of(args, blockIdx.x, blockIdx.y);
}
// The same, worked out again rather than kept in registers all along.
DEVICE struct place place_again(const struct sw_cuda_args &args) {
  return place_of(args, afresh(blockIdx.x), afresh(blockIdx.y));
}

// Row m of a tile of queries is query m / pack of the tile, head m % pack of its heads.  Rows of
// what is no query of the tile become 0.
DEVICE void load_queries(unsigned tile, int rows, int dim, const struct sw_view &view, sw_int64 row,
                         int tokens, sw_int64 head, int pack, sw_int64 batch, int thread,
                         int threads) {
  const elem *first = elem_at(view, row, head, batch);
  sw_int64 token_stride = view.token, head_stride = view.head;
  bool aligned = is_aligned(first) && token_stride % 8 == 0 &&
                 (pack == 1 || head_stride % 8 == 0);
  if (aligned && threads % CHUNKS(dim) == 0 && threads / CHUNKS(dim) % pack == 0) {
    int m = thread / CHUNKS(dim);      // whole queries further on it is the same head's turn
    ask_column(tile, rows, dim, first + m / pack * token_stride + m % pack * head_stride,
               threads / CHUNKS(dim) / pack * token_stride, tokens * pack, thread, threads);
  } else if (aligned) {
    for_chunks(rows, dim, thread, threads, [&](int m, int chunk) {
      ask_chunk(chunk_at(tile, dim, m, chunk),
                first + m / pack * token_stride + m % pack * head_stride, dim, chunk,
                m < tokens * pack);
    });
  } else {
    for_chunks_slowly(rows, dim, thread, threads, [&](int m, int chunk) {
      const elem *from = first + m / pack * token_stride + m % pack * head_stride;
      load_chunk(chunk_at(tile, dim, m, chunk), m < tokens * pack ? from : 0, dim, chunk);
    });
  }
}

// ---- mask ---------------------------------------------------------------------------------------

// The keys that some query (and those that every query) of a tile of `tokens` from `tile` on sees,
// by the window alone: positions [begin, end), empty when end <= begin.
struct positions { sw_int64 begin, end; };
#define FAR ((sw_int64)1 << 62)

DEVICE struct positions keys_of_some(sw_int64 tile, int tokens) {
  struct positions keys;
  keys.begin = LEFT_LIMITED ? tile - (sw_int64)WINDOW_LEFT : -FAR;
  keys.end = RIGHT_LIMITED ? tile + tokens + (sw_int64)WINDOW_RIGHT : FAR;
  return keys;
}
// The queries that see some key of a tile of `tokens` keys from `tile` on, likewise.
DEVICE struct positions queries_of_some(sw_int64 tile, int tokens) {
  struct positions queries;
  queries.begin = RIGHT_LIMITED ? tile - (sw_int64)WINDOW_RIGHT : -FAR;
  queries.end = LEFT_LIMITED ? tile + tokens + (sw_int64)WINDOW_LEFT : FAR;
  return queries;
}
DEVICE struct positions overlap(struct positions a, struct positions b) {
  struct positions both;
  both.begin = a.begin > b.begin ? a.begin : b.begin;
  both.end = a.end < b.end ? a.end : b.end;
  return both;
}

// The window between a tile of queries and one of keys, each counted from its first: query i sees
// key j when i + first <= j <= i + last.
struct band { int first, last; };

DEVICE int within_int(sw_int64 x) {    // far beyond any tile, yet with room for a tile's numbers
  sw_int64 far = 1 << 30;
  return (int)(x < -far ? -far : x > far ? far : x);
}
DEVICE struct band band_of(sw_int64 query, sw_int64 key) {
  struct band band;
  band.first = LEFT_LIMITED ? within_int(query - (sw_int64)WINDOW_LEFT - key) : -(1 << 30);
  band.last = RIGHT_LIMITED ? within_int(query + (sw_int64)WINDOW_RIGHT - key) : 1 << 30;
  return band;
}
// The keys of [0, keys) that a query sees, as [first, first + more]; `first` is beyond all of them
// when there are none.
struct sight { int first; unsigned more; };
DEVICE struct sight sight_of(struct band band, int query, int keys) {
  struct sight sight;
  int first = query + band.first, last = query + band.last;
  if (first < 0) first = 0;
  if (last > keys - 1) last = keys - 1;
  sight.first = first <= last ? first : 1 << 30;
  sight.more = first <= last ? (unsigned)(last - first) : 0;
  return sight;
}
DEVICE bool sees(struct sight sight, int key) {
  return (unsigned)(key - sight.first) <= sight.more;
}
// Whether all queries [q_begin, q_end) see all keys [0, keys); whether some of them may see some.
DEVICE bool all_see_all(struct band band, int q_begin, int q_end, int keys) {
  return q_end - 1 + band.first <= 0 && keys - 1 <= q_begin + band.last;
}
DEVICE bool some_see_some(struct band band, int q_begin, int q_end, int keys) {
  return q_begin < q_end && q_begin + band.first < keys && 0 <= q_end - 1 + band.last;
}

// ---- keys ---------------------------------------------------------------------------------------

// The keys of a unit lie in its runs.  A tile of keys is positions [first, first + keys), cut from
// the first key that a tile of queries sees and that a run holds, so it fits the window and stands
// on no grid.  Runs may leave positions out; keys there are 0 and nobody sees them.
struct key_tile {
  int      run, run_end;              // the run that holds `first`, or the next; behind the last
  sw_int64 first, until;              // `until` this position the run holds all
  sw_int64 end;                       // behind the last key of interest
  int      keys;                      // 0: there are no more
};

// From `first` on, or the first position after it that a run holds.
DEVICE void find_keys(struct key_tile &t, const struct sw_run *runs, sw_int64 first, int most) {
  t.keys = 0;
#pragma unroll 1
  while (first >= t.until) {
    if (++t.run >= t.run_end) return;
    t.until = runs[t.run].position + runs[t.run].tokens;
    if (first < runs[t.run].position) first = runs[t.run].position;
  }
  if (first >= t.end) return;
  t.first = first;
  t.keys = t.end - first < most ? (int)(t.end - first) : most;
}

// The first tile of at most `most` keys of those in `wanted`.
DEVICE struct key_tile first_keys(const struct sw_attention_args &args, const struct sw_unit *unit,
                                  struct positions wanted, int most) {
  struct key_tile t;
  t.run = (int)unit->run_begin - 1;
  t.run_end = (int)unit->run_end;
  t.first = 0;
  t.until = -FAR;
  t.end = -FAR;
  t.keys = 0;
  if (unit->run_begin < unit->run_end) {
    const struct sw_run &last = args.runs[unit->run_end - 1];
    t.end = last.position + last.tokens;
    if (wanted.end < t.end) t.end = wanted.end;
    find_keys(t, args.runs, wanted.begin, most);
  }
  return t;
}
DEVICE void next_keys(struct key_tile &t, const struct sw_run *runs, int most) {
  find_keys(t, runs, t.first + most, most);
}

// The `keys` positions from `first` on, as far as there are runs; unlike a tile that was found, its
// first key may be one that no run holds.
DEVICE struct key_tile keys_at(const struct sw_attention_args &args, const struct sw_unit *unit,
                               sw_int64 first, int keys) {
  struct key_tile t;
  sw_int64 end = first;
  t.run = (int)unit->run_begin;
  t.run_end = (int)unit->run_end;
  t.first = t.until = first;
  if (t.run < t.run_end)
    end = args.runs[t.run_end - 1].position + args.runs[t.run_end - 1].tokens;
  t.end = end < first ? first : end < first + keys ? end : first + keys;
  t.keys = (int)(t.end - first);
#pragma unroll 1
  while (t.run < t.run_end && args.runs[t.run].position + args.runs[t.run].tokens <= first) t.run++;
  if (t.run < t.run_end && args.runs[t.run].position <= first)
    t.until = args.runs[t.run].position + args.runs[t.run].tokens;
  return t;
}

// Does `body` with the keys [begin, end) of the tile, counted from its first, that no run holds.
template <typename Body>
DEVICE void for_gaps(const struct key_tile &t, const struct sw_run *runs, Body body) {
  sw_int64 end = t.first + t.keys, from = t.until;
#pragma unroll 1
  for (int r = from > t.first ? t.run + 1 : t.run; from < end; r++) {
    sw_int64 to = r < t.run_end && runs[r].position < end ? runs[r].position : end;
    if (from < to) body((int)(from - t.first), (int)(to - t.first));
    from = r < t.run_end ? runs[r].position + runs[r].tokens : end;
  }
}

// Where the row of a key of the tile lies, `row` counted from its first; 0 if no run holds it.
DEVICE const elem *key_row(const struct key_tile &t, const struct sw_cuda_args &args, bool values,
                           const struct place &place, int row) {
  const struct sw_run *runs = args.attention.runs;
  sw_int64 key = t.first + row;
  int r = t.run;
  while (r < t.run_end && key >= runs[r].position + runs[r].tokens) r++;
  if (row >= t.keys || r == t.run_end || key < runs[r].position) return 0;
  const struct sw_view &view = values ? runs[r].v : runs[r].k;
  return elem_from(runs[r].wire ? args.halo : values ? args.v : args.k, view, place.kv_head,
                   place.batch) + (key - runs[r].position) * view.token;
}

// Loads the k (or the v) of a tile of keys: `rows` rows, zeros where there is no key.
DEVICE void load_keys(unsigned tile, int rows, int dim, bool values, const struct key_tile &t,
                      const struct sw_cuda_args &args, const struct place &place, int thread,
                      int threads) {
  const elem *first = 0;
  sw_int64 stride = 1;                 // no fast way unless one run holds all
  if (t.keys > 0 && t.first + t.keys <= t.until) {
    const struct sw_run &run = args.attention.runs[t.run];
    stride = values ? run.v.token : run.k.token;
    first = key_row(t, args, values, place, 0);
  }
  if (is_aligned(first) && stride % 8 == 0)
    ask_rows(tile, rows, dim, first, stride, t.keys, thread, threads);
  else
    for_chunks_slowly(rows, dim, thread, threads, [&](int row, int chunk) {
      load_chunk(chunk_at(tile, dim, row, chunk), key_row(t, args, values, place, row), dim, chunk);
    });
}
