// prelude.c: what the CPU kernels are written in.  Vectors of LANES floats, elements as the problem
// stores them, exp2 and tanh, the transpose, the mask, and the cache of packed key blocks.
//
// Pasted after the constants and kernel_abi.h, before forward.c or backward.c.  No header of any
// kind is included: headers would take longer to read than the kernel takes to compile.  Everything
// is the vector extension of GCC 12+ and clang; a line of assembly stands only where the extension
// has no word for an instruction.

//@ -- avx512bf16 is avx512 and a few instructions more
//@ local avx512 = ISA == "avx512" or ISA == "avx512bf16"

#define INLINE   static inline __attribute__((always_inline, unused))
#define OUTLINE  static __attribute__((noinline, unused))

typedef float          vec   __attribute__((vector_size(4 * LANES), may_alias));
typedef int            ivec  __attribute__((vector_size(4 * LANES), may_alias));
typedef unsigned       uvec  __attribute__((vector_size(4 * LANES), may_alias));
typedef unsigned short hvec  __attribute__((vector_size(2 * LANES), may_alias));
// the same, wherever a float or an element may stand
typedef float          loose_vec  __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef unsigned short loose_hvec __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

//@ if BF16 == 1 then
typedef unsigned short elem;   // bfloat16: the upper half of a float
//@ else
typedef float elem;
//@ end

#define LOG2E  1.44269504088896341f
#define LN2    0.69314718055994531f
// The score of a key that may not be seen, and where a running maximum starts.  Both finite, so
// that no difference of them is NaN; so far apart that exp2(NEVER - LOWEST) is exactly 0.
#define NEVER  -2e38f
#define LOWEST -1e38f

// ---- vectors ------------------------------------------------------------------------------------

INLINE vec splat(float x) { return x - (vec){0}; }   // minus 0 changes nothing, not even -0
INLINE ivec splat_int(int x) { return x - (ivec){0}; }

INLINE vec load(const float *p) { return *(const vec *)p; }   // aligned to a vector, like store
INLINE void store(float *p, vec x) { *(vec *)p = x; }
INLINE vec load_loose(const float *p) { return *(const loose_vec *)p; }
INLINE void store_loose(float *p, vec x) { *(loose_vec *)p = x; }

INLINE vec keep(vec x, ivec mask) { return (vec)((ivec)x & mask); }   // 0 elsewhere
INLINE vec choose(ivec mask, vec a, vec b) { return (vec)(((ivec)a & mask) | ((ivec)b & ~mask)); }

// The larger of a and b; b where either is NaN, so a NaN in b survives.
INLINE vec larger(vec a, vec b) {
//@ if avx512 or ISA == "avx2" then
  vec r;
  __asm__("vmaxps %2, %1, %0" : "=v"(r) : "v"(a), "v"(b));
  return r;
//@ else
  return choose(a > b, a, b);
//@ end
}

INLINE int any(ivec mask) {
  // halves are folded until one 64-bit word is left
  unsigned long long words[LANES / 2], seen = 0;
  __builtin_memcpy(words, &mask, sizeof words);
  for (int i = 0; i < LANES / 2; i++) seen |= words[i];
  return seen != 0;
}

// ---- elements <-> floats ------------------------------------------------------------------------

INLINE float widen_one(elem x) {
//@ if BF16 == 1 then
  unsigned bits = (unsigned)x << 16;
  float wide;
  __builtin_memcpy(&wide, &bits, sizeof wide);
  return wide;
//@ else
  return x;
//@ end
}

// LANES elements as floats.
INLINE vec widen(const elem *p) {
//@ if BF16 == 1 then
  return (vec)(__builtin_convertvector((hvec)*(const loose_hvec *)p, uvec) << 16);
//@ else
  return load_loose(p);
//@ end
}

// The first `count` < LANES elements, 0 after them; nothing behind them is read.
INLINE vec widen_some(const elem *p, int count) {
  vec x = {0};
  for (int i = 0; i < count; i++) ((float *)&x)[i] = widen_one(p[i]);
  return x;
}

//@ if BF16 == 1 then
// Round to nearest, ties to even; a NaN stays a (quiet) NaN.
INLINE hvec round_to_elem(vec x) {
//@ if ISA == "avx512bf16" then
  hvec rounded;
  __asm__("vcvtneps2bf16 %1, %0" : "=v"(rounded) : "v"(x));
  return rounded;
//@ else
  uvec bits = (uvec)x;
  uvec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  uvec quiet = (bits >> 16) | 0x40;
  uvec nan = (uvec)(x != x);
  return __builtin_convertvector((rounded & ~nan) | (quiet & nan), hvec);
//@ end
}
//@ end

INLINE void store_elem(elem *p, vec x) {
//@ if BF16 == 1 then
  *(loose_hvec *)p = round_to_elem(x);
//@ else
  store_loose(p, x);
//@ end
}

// Writes the first `count` < LANES elements and nothing behind them.
INLINE void store_elem_some(elem *p, vec x, int count) {
//@ if BF16 == 1 then
  hvec narrow = round_to_elem(x);
  for (int i = 0; i < count; i++) p[i] = ((elem *)&narrow)[i];
//@ else
  for (int i = 0; i < count; i++) p[i] = ((float *)&x)[i];
//@ end
}

// A row of `dim` elements goes by vectors at 0, LANES, 2 LANES...; a tail shorter than a vector is
// covered by the row's last LANES elements once more, so nothing outside the row is touched.  (Rows
// shorter than one vector take widen_some and store_elem_some.)
//   for (int d = 0; d < dim; d += LANES) { int at = vector_start(d, dim); ... }
INLINE int vector_start(int d, int dim) {
  return d + LANES <= dim || dim < LANES ? d : dim - LANES;
}

INLINE vec widen_row(const elem *row, int at, int dim) {
  return dim < LANES ? widen_some(row, dim) : widen(row + at);
}
INLINE void store_elem_row(elem *row, int at, int dim, vec x) {
  if (dim < LANES) store_elem_some(row, x, dim);
  else store_elem(row + at, x);
}

// Writes x past the cache if the isa can and `to` is aligned to a vector; else writes nothing and
// returns 0.  For what is written once and not read soon, whole cache lines in a row; a thread ends
// such stores with stream_end.
INLINE int stream(void *to, vec x) {
//@ if avx512 or ISA == "avx2" then
  if ((__UINTPTR_TYPE__)to % sizeof x) return 0;
  __asm__ volatile("vmovntps %1, %0" : "=m"(*(vec *)to) : "v"(x));
  return 1;
//@ else
  return (void)to, (void)x, 0;
//@ end
}
INLINE void stream_end(void) {
//@ if avx512 or ISA == "avx2" then
  __asm__ volatile("sfence" ::: "memory");
//@ end
}

INLINE const elem *elem_at(const struct sw_view *view, sw_int64 token, sw_int64 head,
                           sw_int64 batch) {
  return (const elem *)view->data + token * view->token + head * view->head + batch * view->batch;
}
INLINE float *float_at(const struct sw_view *view, sw_int64 token, sw_int64 head, sw_int64 batch) {
  return (float *)view->data + token * view->token + head * view->head + batch * view->batch;
}

// ---- exp2, log, tanh ----------------------------------------------------------------------------

// 2^f - 1 for |f| <= 1/2, relative error of 2^f about 2e-7 (minimax, the constant term held at 1).
INLINE vec exp2_fraction(vec f) {
  vec p = splat(1.326473879e-03f);
  p = p * f + splat(9.671516679e-03f);
  p = p * f + splat(5.550733753e-02f);
  p = p * f + splat(2.402224202e-01f);
  p = p * f + splat(6.931469776e-01f);
  return p * f;
}

// Adding this to |x| < 2^22 rounds x to an integer and leaves that integer in the low bits of the
// sum.
#define ROUNDER 12582912.0f

// 2^n for an integer n >= -127 given as n + ROUNDER; exactly 0 for -127.
INLINE vec power_of_two(vec n_rounder) { return (vec)(((ivec)n_rounder + 127) << 23); }

// 2^x for x <= 127.  Exactly 0 for x <= -150 (from -127 on, but on avx512), NaN for NaN.
INLINE vec exp2_vec(vec x) {
//@ if avx512 then
  vec n, r;
  __asm__("vrndscaleps $8, %1, %0" : "=v"(n) : "v"(x));
  vec p = exp2_fraction(x - n) + splat(1.0f);
  __asm__("vscalefps %2, %1, %0" : "=v"(r) : "v"(p), "v"(n));
  return r;
//@ else
  x = larger(splat(-127.0f), x);
  vec n_rounder = x + ROUNDER;
  vec p = exp2_fraction(x - (n_rounder - ROUNDER)) + splat(1.0f);
  return p * power_of_two(n_rounder);
//@ end
}

// Natural logarithm of a finite x > 0 that is no denormal, to about 1e-7 of max(1, |log x|).
// With x = m 2^n, m in [sqrt(1/2), sqrt(2)) and f = m - 1: n ln 2 + f - f^2 / 2 + f^3 p(f).
INLINE vec log_vec(vec x) {
  ivec bits = (ivec)x - 0x3f3504f3;   // the bits of sqrt(1/2)
  vec n = __builtin_convertvector(bits >> 23, vec);
  vec f = (vec)((bits & 0x7fffff) + 0x3f3504f3) - 1.0f;
  vec p = splat(7.0376836292e-2f);
  p = p * f - 1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f - 1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f - 1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f - 2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  vec square = f * f;
  return n * LN2 + (f + square * (p * f - 0.5f)) + 0.0f * x;   // the last only lets a NaN through
}

// tanh, to a few units in the last place for small x too: with m = expm1(-2|x|), tanh|x| = -m / (m
// + 2).
INLINE vec tanh_vec(vec x) {
  ivec sign = (ivec)x & splat_int(-0x7fffffff - 1);
  vec y = (vec)((ivec)x ^ sign) * splat(-2.0f * LOG2E);
  y = larger(splat(-126.0f), y);
  vec n_rounder = y + ROUNDER;
  vec scale = power_of_two(n_rounder);
  vec m = exp2_fraction(y - (n_rounder - ROUNDER)) * scale + (scale - 1.0f);
  return (vec)((ivec)(-m / (m + 2.0f)) | sign);
}

// ---- transpose ----------------------------------------------------------------------------------

//@ -- the LANES indices of a two-vector shuffle, as text
//@ local function shuffle(pick)
//@   local list = tostring(pick(0))
//@   for lane = 1, LANES - 1 do list = list .. ", " .. pick(lane) end
//@   return list
//@ end
//@ -- of each group of four: the `half` of a and b, one float or two floats at a time
//@ local function by_ones(half)
//@   return shuffle(function(i) return i - i % 4 + half * 2 + i % 4 // 2 + i % 2 * LANES end)
//@ end
//@ local function by_twos(half)
//@   return shuffle(function(i) return i - i % 4 + half * 2 + i % 2 + i % 4 // 2 * LANES end)
//@ end
//@ -- the even or odd groups of four of a, then those of b
//@ local function by_groups(odd)
//@   local half = LANES // 8
//@   return shuffle(function(i)
//@     local group = i // 4
//@     local b = group // half
//@     return b * LANES + (group - b * half) * 8 + odd * 4 + i % 4
//@   end)
//@ end

// to[i][j] = from[j][i] for a square of LANES x LANES floats; strides in floats, every row aligned.
OUTLINE void transpose(float *to, sw_int64 to_stride, const float *from, sw_int64 from_stride) {
//@ for i = 0, LANES - 1 do
  vec a$(i) = load(from + $(i) * from_stride);
//@ end
//@ for i = 0, LANES - 1, 2 do
  vec b$(i) = __builtin_shufflevector(a$(i), a$(i + 1), $(by_ones(0)));
  vec b$(i + 1) = __builtin_shufflevector(a$(i), a$(i + 1), $(by_ones(1)));
//@ end
//@ for i = 0, LANES - 1, 4 do
  vec c4_$(i) = __builtin_shufflevector(b$(i), b$(i + 2), $(by_twos(0)));
  vec c4_$(i + 1) = __builtin_shufflevector(b$(i), b$(i + 2), $(by_twos(1)));
  vec c4_$(i + 2) = __builtin_shufflevector(b$(i + 1), b$(i + 3), $(by_twos(0)));
  vec c4_$(i + 3) = __builtin_shufflevector(b$(i + 1), b$(i + 3), $(by_twos(1)));
//@ end
//@ local step = 4
//@ while step < LANES do
//@   for i = 0, LANES - 1 do
//@     if i // step % 2 == 0 then
  vec c$(2 * step)_$(i) =
    __builtin_shufflevector(c$(step)_$(i), c$(step)_$(i + step), $(by_groups(0)));
  vec c$(2 * step)_$(i + step) =
    __builtin_shufflevector(c$(step)_$(i), c$(step)_$(i + step), $(by_groups(1)));
//@     end
//@   end
//@   step = 2 * step
//@ end
//@ for i = 0, LANES - 1 do
  store(to + $(i) * to_stride, c$(LANES)_$(i));
//@ end
}

// ---- pairs --------------------------------------------------------------------------------------

//@ -- the indices of a shuffle: LANES from a and LANES from b on, by turns
//@ local function by_turns(a, b)
//@   local list = a .. ", " .. b
//@   for lane = 1, LANES - 1 do list = list .. ", " .. a + lane .. ", " .. b + lane end
//@   return list
//@ end

//@ local has_pairs = ISA == "avx512bf16" and BF16 == 1
//@ if has_pairs then
// A pair is two bfloat16 in the place of a float, the first in its lower half.  A vec of pairs is
// only moved, never calculated with, except by dot_pair.

typedef unsigned short pairs_vec __attribute__((vector_size(4 * LANES), may_alias));
typedef unsigned short loose_pairs_vec
  __attribute__((vector_size(4 * LANES), aligned(2), may_alias));

// In each lane sum + a0 * b0 + a1 * b1, in floats.
INLINE vec dot_pair(vec sum, vec a, vec b) {
  __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
}

INLINE vec splat_pair(const float *pair) {
  int bits;
  __builtin_memcpy(&bits, pair, sizeof bits);
  return (vec)splat_int(bits);
}

// Pairs of first and second, rounded to nearest, ties to even.
INLINE vec join_pair(vec first, vec second) {
  pairs_vec both;
  __asm__("vcvtne2ps2bf16 %1, %2, %0" : "=v"(both) : "v"(first), "v"(second));
  return (vec)__builtin_shufflevector(both, both, $(by_turns(0, LANES)));
}

// The elements of a row go by 2 LANES as vector_start says.
INLINE int pairs_start(int d, int dim) {
  return d + 2 * LANES <= dim || dim < 2 * LANES ? d : dim - 2 * LANES;
}
INLINE void store_pairs_row(elem *row, int at, int dim, vec x) {
  if (dim < 2 * LANES) __builtin_memcpy(row, &x, sizeof(elem) * (unsigned long)dim);
  else *(loose_pairs_vec *)(row + at) = (pairs_vec)x;
}

// LANES pairs of the row's elements from d on, 0 from dim on; nothing behind them is read.
INLINE vec load_pairs(const elem *row, int d, int dim) {
  const loose_pairs_vec *from = (const loose_pairs_vec *)(row + d);
  if (d + 2 * LANES <= dim) return (vec)(pairs_vec)*from;
  vec x;
  __asm__("vmovdqu16 %1, %0%{%2%}%{z%}" : "=v"(x) : "m"(*from), "Yk"((1u << (dim - d)) - 1));
  return x;
}

// 2^x as exp2_vec, to a relative error of 8e-5: enough for what is then rounded to bfloat16.
INLINE vec exp2_coarse(vec x) {
  vec n, r;
  __asm__("vrndscaleps $8, %1, %0" : "=v"(n) : "v"(x));
  vec f = x - n;
  vec p = splat(5.517161097e-2f);
  p = p * f + splat(2.426112115e-1f);
  p = p * f + splat(6.932610061e-1f);
  p = p * f + splat(9.999280659e-1f);
  __asm__("vscalefps %2, %1, %0" : "=v"(r) : "v"(p), "v"(n));
  return r;
}
//@ end

// ---- mask ---------------------------------------------------------------------------------------

// Query i sees key j when i - WINDOW_LEFT <= j <= i + WINDOW_RIGHT, each side only if it is
// limited.  Seen from key j those are the queries j - WINDOW_RIGHT .. j + WINDOW_LEFT; first > last
// when there are none.
struct queries { int first, last; };   // counted from the tile's first query

// The queries of a tile of `tokens` that see the key `key` positions after the tile's first query.
INLINE struct queries seen_by(sw_int64 key, int tokens) {
  sw_int64 first = RIGHT_LIMITED ? key - (sw_int64)WINDOW_RIGHT : 0;
  sw_int64 last = LEFT_LIMITED ? key + (sw_int64)WINDOW_LEFT : tokens - 1;
  struct queries seen;
  seen.first = (int)(first < 0 ? 0 : first > tokens ? tokens : first);
  seen.last = (int)(last > tokens - 1 ? tokens - 1 : last < -1 ? -1 : last);
  return seen;
}

// The lanes whose query sees the key; `lane_token` is each lane's query, counted from the tile's
// first.
INLINE ivec visible(struct queries seen, ivec lane_token) {
  return (lane_token >= seen.first) & (lane_token <= seen.last);
}

// The keys that some query (and those that every query) of a tile of `tokens` from `tile` on sees,
// by the window alone: positions [begin, end), empty when end <= begin.
struct positions { sw_int64 begin, end; };
#define FAR ((sw_int64)1 << 62)

INLINE struct positions keys_of_some(sw_int64 tile, int tokens) {
  struct positions keys;
  keys.begin = LEFT_LIMITED ? tile - (sw_int64)WINDOW_LEFT : -FAR;
  keys.end = RIGHT_LIMITED ? tile + tokens + (sw_int64)WINDOW_RIGHT : FAR;
  return keys;
}
INLINE struct positions keys_of_all(sw_int64 tile, int tokens) {
  struct positions keys;
  keys.begin = LEFT_LIMITED ? tile + tokens - 1 - (sw_int64)WINDOW_LEFT : -FAR;
  keys.end = RIGHT_LIMITED ? tile + 1 + (sw_int64)WINDOW_RIGHT : FAR;
  return keys;
}
INLINE struct positions overlap(struct positions a, struct positions b) {
  struct positions both;
  both.begin = a.begin > b.begin ? a.begin : b.begin;
  both.end = a.end < b.end ? a.end : b.end;
  return both;
}

// ---- packed key blocks --------------------------------------------------------------------------

// Block b holds the keys at positions [b * BLOCK_K, (b + 1) * BLOCK_K) of one key head as
// contiguous floats; where no run holds a position its row is 0 and not covered.  Blocks stand in
// slot b % slots, so a window slides over them and each key is packed once per unit, as long as the
// slots can hold the window.
struct block {
  sw_int64 number;                    // -1: nothing here yet
  int      covered_keys;
  unsigned char covered[BLOCK_K];     // 1 where a run holds the key
};

// How many slots serve units of up to `max_keys` keys, cut into tiles of `tile_tokens`: as many as
// the blocks one tile can touch, but no more than RING_BLOCKS.
INLINE sw_int64 block_slots(sw_int64 max_keys, sw_int64 tile_tokens) {
  sw_int64 span = (sw_int64)WINDOW_LEFT + tile_tokens + WINDOW_RIGHT;
  if (!LEFT_LIMITED || !RIGHT_LIMITED || span > max_keys) span = max_keys;
  sw_int64 touched = (span + BLOCK_K - 2) / BLOCK_K + 1;
  return touched < RING_BLOCKS ? touched : RING_BLOCKS;
}

INLINE void forget_blocks(struct block *blocks, sw_int64 slots) {
  for (sw_int64 slot = 0; slot < slots; slot++) blocks[slot].number = -1;
}

// How `rows` rows of `dim` elements, `token` elements apart, become the rows of a block from `row`
// on.  The block's first row stands at `to`, the next one `stride` floats after it.
typedef void packer(float *to, int stride, sw_int64 row, const elem *from, sw_int64 token, int dim,
                    sw_int64 rows);

INLINE void prefetch_row(const elem *row, int dim) {   // behind the last row it is harmless
  for (int d = 0; d < dim; d += 64 / (int)sizeof(elem)) __builtin_prefetch(row + d);
}

// As floats, 0 from dim on.
INLINE void pack_rows(float *to, int stride, sw_int64 first, const elem *from, sw_int64 token,
                      int dim, sw_int64 rows) {
  to += first * stride;
  for (sw_int64 row = 0; row < rows; row++) {
    prefetch_row(from + 8 * token, dim);
    for (int d = 0; d < dim; d += LANES) {
      int at = vector_start(d, dim);
      if (dim < LANES)
        for (int i = 0; i < dim; i++) to[i] = widen_one(from[i]);
      else
        store_loose(to + at, widen(from + at));
    }
    for (int d = dim; d < stride; d++) to[d] = 0;
    to += stride;
    from += token;
  }
}

//@ if has_pairs then
// As pairs of dims; the last one's second half is 0 where dim is odd.
INLINE void pack_dim_pairs(float *to, int stride, sw_int64 first, const elem *from, sw_int64 token,
                           int dim, sw_int64 rows) {
  for (sw_int64 row = 0; row < rows; row++) {
    elem *packed = (elem *)(to + (first + row) * stride);
    int d = 0;
    prefetch_row(from + 8 * token, dim);
    for (; d + 2 * LANES <= dim; d += 2 * LANES)
      *(loose_pairs_vec *)(packed + d) = *(const loose_pairs_vec *)(from + d);
    __builtin_memcpy(packed + d, from + d, sizeof(elem) * (unsigned long)(dim - d));
    if (dim % 2) packed[dim] = 0;
    from += token;
  }
}

// As pairs of rows, an even one and the next: pair d of both at 2 * stride * (row / 2) + d.  A row
// whose partner is elsewhere leaves the other halves as they are.
INLINE void pack_row_pairs(float *to, int stride, sw_int64 first, const elem *from, sw_int64 token,
                           int dim, sw_int64 rows) {
  for (sw_int64 row = first; row < first + rows; row++) {
    float *packed = to + row / 2 * 2 * stride;
    prefetch_row(from + 8 * token, dim);
    if (row % 2 || row + 1 == first + rows || dim < 2 * LANES) {
      for (int d = 0; d < dim; d++) ((elem *)packed)[2 * d + row % 2] = from[d];
    } else {
      prefetch_row(from + 9 * token, dim);
      for (int d = 0; d < dim; d += 2 * LANES) {
        int at = pairs_start(d, dim);
        pairs_vec a = *(const loose_pairs_vec *)(from + at);
        pairs_vec b = *(const loose_pairs_vec *)(from + token + at);
        vec low = (vec)__builtin_shufflevector(a, b, $(by_turns(0, 2 * LANES)));
        vec high = (vec)__builtin_shufflevector(a, b, $(by_turns(LANES, 3 * LANES)));
        store_loose(packed + at, low);
        store_loose(packed + at + LANES, high);
      }
      row++;
      from += token;
    }
    from += token;
  }
}
//@ end

// Packs block `number` of head h of batch row b from the unit's runs: k and v [BLOCK_K][stride]
// floats. When no run touches it (covered_keys is 0) nothing is written there: such a block is to
// be passed over.
INLINE void pack_block_by(packer *pack_k, packer *pack_v, struct block *block, float *k,
                          int k_stride, float *v, int v_stride,
                          const struct sw_attention_args *args, const struct sw_unit *unit,
                          sw_int64 number, sw_int64 b, sw_int64 h) {
  struct positions whole = { number * BLOCK_K, (number + 1) * BLOCK_K };
  block->number = number;
  block->covered_keys = 0;
  for (sw_int64 r = unit->run_begin; r < unit->run_end; r++) {
    const struct sw_run *run = &args->runs[r];
    struct positions held = { run->position, run->position + run->tokens };
    struct positions here = overlap(whole, held);
    sw_int64 keys = here.end - here.begin;
    if (keys <= 0) continue;

    if (keys < BLOCK_K && block->covered_keys == 0) {   // the first piece of a block in pieces
      __builtin_memset(block->covered, 0, sizeof block->covered);
      __builtin_memset(k, 0, sizeof(float) * BLOCK_K * (unsigned long)k_stride);
      __builtin_memset(v, 0, sizeof(float) * BLOCK_K * (unsigned long)v_stride);
    }
    sw_int64 from = here.begin - run->position, row = here.begin - whole.begin;
    pack_k(k, k_stride, row, elem_at(&run->k, from, h, b), run->k.token, HEAD_DIM_QK, keys);
    pack_v(v, v_stride, row, elem_at(&run->v, from, h, b), run->v.token, HEAD_DIM_V, keys);
    __builtin_memset(block->covered + row, 1, (unsigned long)keys);
    block->covered_keys += (int)keys;
  }
}

// The same as floats, and as pairs: of dims in k, of keys in v.
OUTLINE void pack_block(struct block *block, float *k, int k_stride, float *v, int v_stride,
                        const struct sw_attention_args *args, const struct sw_unit *unit,
                        sw_int64 number, sw_int64 b, sw_int64 h) {
  pack_block_by(pack_rows, pack_rows, block, k, k_stride, v, v_stride, args, unit, number, b, h);
}
//@ if has_pairs then
OUTLINE void pack_block_pairs(struct block *block, float *k, int k_stride, float *v, int v_stride,
                              const struct sw_attention_args *args, const struct sw_unit *unit,
                              sw_int64 number, sw_int64 b, sw_int64 h) {
  pack_block_by(pack_dim_pairs, pack_row_pairs, block, k, k_stride, v, v_stride, args, unit, number,
                b, h);
}
//@ end

// The positions of the unit's runs, first to last.
INLINE struct positions unit_keys(const struct sw_attention_args *args,
                                  const struct sw_unit *unit) {
  struct positions keys = { 0, 0 };
  if (unit->run_begin < unit->run_end) {
    const struct sw_run *last = &args->runs[unit->run_end - 1];
    keys.begin = args->runs[unit->run_begin].position;
    keys.end = last->position + last->tokens;
  }
  return keys;
}

// ---- words --------------------------------------------------------------------------------------

// A word is what a multiply-add takes from a row: STEP elements, one float or, in its place, a pair
// of bfloat16.  `dot` adds the products of LANES words to LANES sums; `join` makes LANES words of
// STEP vectors of floats; `weight_of` is 2^score, as exact as words are.
//@ if STEP == 1 then
INLINE vec dot(vec sum, vec a, vec b) { return sum + a * b; }
INLINE vec splat_word(const float *word) { return splat(*word); }
INLINE vec join(vec first, vec last) { return (void)last, first; }
INLINE vec weight_of(vec score) { return exp2_vec(score); }
//@ else
INLINE vec dot(vec sum, vec a, vec b) { return dot_pair(sum, a, b); }
INLINE vec splat_word(const float *word) { return splat_pair(word); }
INLINE vec join(vec first, vec last) { return join_pair(first, last); }
INLINE vec weight_of(vec score) { return exp2_coarse(score); }
//@ end
