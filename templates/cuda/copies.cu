// copies.cu: what a pass moves beside its kernels: keys into the messages that take them to other
// ranks, sums that came narrow, rows that no unit writes, and values of heads into one.
//
// An entry of a list (a segment, a gap) is what a block works on; the host cuts them to few rows.

enum { COPY_THREADS = 128, COMBINE_THREADS = 128 };

extern "C" {
__device__ struct sw_cuda_launch pack_launch = { COPY_THREADS, 0, 1, 1 };
__device__ struct sw_cuda_launch fill_launch = { COPY_THREADS, 0, 1, 1 };
__device__ struct sw_cuda_launch widen_launch = { COPY_THREADS, 0, 1, 1 };
__device__ struct sw_cuda_launch combine_launch = { COMBINE_THREADS, 0, 1, 1 };
}

// ---- keys on their way --------------------------------------------------------------------------

// Rows [row, row + tokens) of `from`, all heads, to where `to` is, an offset from `base`.
DEVICE void pack_rows(const struct sw_view &from, sw_int64 row, int tokens, int heads, char *base,
                      const struct sw_view &to, int dim, sw_int64 batch) {
  for (int i = (int)threadIdx.x; i < tokens * heads * CHUNKS(dim); i += COPY_THREADS) {
    int chunk = i % CHUNKS(dim), head = i / CHUNKS(dim) % heads, token = i / CHUNKS(dim) / heads;
    int left = dim - 8 * chunk;
    if (left <= 0) continue;
    const elem *source = elem_at(from, row + token, head, batch) + 8 * chunk;
    elem *target = (elem *)elem_from(base, to, head, batch) + token * to.token + 8 * chunk;
    store_elements(target, load_global(source, left), left);
  }
}

extern "C" __global__ void __launch_bounds__(COPY_THREADS)
pack(const __grid_constant__ struct sw_pack_args args) {
  const struct sw_segment &segment = args.segments[blockIdx.x % args.segment_count];
  sw_int64 batch = blockIdx.x / args.segment_count;
  int tokens = (int)segment.tokens, heads = (int)args.kv_heads;
  pack_rows(args.k, segment.row, tokens, heads, args.to, segment.k, HEAD_DIM_QK, batch);
  pack_rows(args.v, segment.row, tokens, heads, args.to, segment.v, HEAD_DIM_V, batch);
}

// ---- rows that no unit writes -------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(COPY_THREADS)
fill(const __grid_constant__ struct sw_fill_args args) {
  const struct sw_gap gap = args.gaps[blockIdx.x % args.gap_count];
  sw_int64 batch = blockIdx.x / args.gap_count;
  int dim = (int)args.dim, heads = (int)args.heads, count = (int)gap.rows * heads * dim;
  for (int i = (int)threadIdx.x; i < count; i += COPY_THREADS) {
    int head = i / dim % heads, row = i / dim / heads;
    sw_int64 at = (gap.row + row) * args.to.token + head * args.to.head +
                  batch * args.to.batch + i % dim;
    if (args.elem_bytes == 4) ((unsigned *)args.to.data)[at] = args.bits;
    else ((unsigned short *)args.to.data)[at] = (unsigned short)args.bits;
  }
}

// ---- sums that came narrow ----------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(COPY_THREADS)
widen(const __grid_constant__ struct sw_widen_args args) {
  sw_int64 step = (sw_int64)gridDim.x * COPY_THREADS;
  for (sw_int64 i = (sw_int64)blockIdx.x * COPY_THREADS + threadIdx.x; i < args.elements; i += step)
    args.to[i] = __uint_as_float((unsigned)args.from[i] << 16);
}

// ---- values of heads into one -------------------------------------------------------------------

// A sum and what rounding lost of it.
struct exact { float sum, lost; };

DEVICE struct exact add_exactly(struct exact a, float x, float lost) {
  struct exact r;
  r.sum = a.sum + x;
  float part = r.sum - a.sum;
  r.lost = a.lost + lost + ((a.sum - (r.sum - part)) + (x - part));
  return r;
}

extern "C" __global__ void __launch_bounds__(COMBINE_THREADS)
combine(const __grid_constant__ struct sw_combine_args args) {
  __shared__ float sums[COMBINE_THREADS], losts[COMBINE_THREADS];
  int thread = (int)threadIdx.x;
  struct exact all = { args.largest ? -__int_as_float(0x7f800000) : 0, 0 };
  for (sw_int64 row = thread; row < args.rows; row += COMBINE_THREADS) {
    float x = args.from[row * args.heads + blockIdx.x];
    if (args.largest) all.sum = larger(all.sum, x);
    else all = add_exactly(all, x, 0);
  }
  sums[thread] = all.sum, losts[thread] = all.lost;
  block_sync();
  if (thread > 0) return;
  for (int i = 1; i < COMBINE_THREADS; i++) {
    if (args.largest) all.sum = larger(all.sum, sums[i]);
    else all = add_exactly(all, sums[i], losts[i]);
  }
  args.to[blockIdx.x] = args.largest ? all.sum : all.sum + all.lost;
}
