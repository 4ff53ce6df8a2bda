// backward.cu: dq, dk, dv (and dsink) of a band of keys per query, from q, k, v, out, lse and dout.
//
// Weights are made again from the lse instead of being kept, and they are made twice: dq walks the
// keys of a tile of query rows, dkv walks the query rows of a tile of keys.  So every sum grows in
// the registers of one warp, in one order, and nothing is added in global memory.
//
//   q, dq        [batch][token][kv_heads * GQA][HEAD_DIM_QK] elem, by strides
//   out, dout    [batch][token][kv_heads * GQA][HEAD_DIM_V] elem, by strides; dout's may be 0
//   lse          [batch][token][kv_heads * GQA] float, natural logarithm
//   delta        [batch][kv_heads * GQA][row] float: sum over dims of dout * out
//   k, v         runs of keys, each with its first position
//   dk, dv       of a run: elem where no other unit sees its keys, else float: this unit's sums
//
// Both multiply alike.  A warp owns TALL * 16 rows of its block's tile (query rows in dq, keys in
// dkv) and walks chunks of WIDE * 16 rows of the other kind, which lie in shared memory:
//
//   S  = own1 other1^T                      q k^T      or  k q^T
//   dP = own2 other2^T                      dout v^T   or  v dout^T
//   P  = exp2(S - lse), dS = P (dP - delta), 0 where a query does not see a key
//   sums1 += dS other1                      dq         or  dk
//   sums2 += P other2                                      dv
//
// With WGMMA the four warps of a warpgroup multiply together, 16 rows each, and a chunk is left out
// only where none of them needs it.
//
// A row of queries is one query of one head: row m of a tile is its query m / PACK, head m % PACK
// of the tile's heads.  Rows without a query are 0 in q, dout, lse and delta: they have P = 1 but
// dS = 0, and add nothing anywhere.  The scale is left out of dS and multiplies the sums instead.

enum {
  DQ_THREADS    = DQ_WARPS * 32,
  DQ_OWN        = DQ_TALL * 16,        // query rows of a warp
  DQ_CHUNK      = DQ_WIDE * 16,        // keys of a chunk
  DQ_GROUPS     = GQA / DQ_PACK,
  DQ_K_BYTES    = TILE_BYTES(DQ_KEYS, HEAD_DIM_QK),
  DQ_STEP_BYTES = DQ_K_BYTES + TILE_BYTES(DQ_KEYS, HEAD_DIM_V),
  DKV_THREADS   = DKV_WARPS * 32,
  DKV_OWN       = DKV_TALL * 16,       // keys of a warp
  DKV_CHUNK     = DKV_WIDE * 16,       // query rows of a chunk
  DKV_GROUPS    = GQA / DKV_PACK,
  DKV_Q_BYTES   = TILE_BYTES(DKV_ROWS, HEAD_DIM_QK),
  DKV_DOUT_BYTES = TILE_BYTES(DKV_ROWS, HEAD_DIM_V),
  DKV_STEP_BYTES = DKV_Q_BYTES + DKV_DOUT_BYTES,
  DKV_NUMBERS_BYTES = DKV_ROWS * 8,    // lse and delta of a step: they lie behind all its tiles
  DELTA_THREADS = 256, DELTA_LANES = 8,   // lanes that share a row
  GATHER_THREADS = 128,
};
static_assert(DQ_SHARED_BYTES == TILE_BYTES(DQ_ROWS, HEAD_DIM_QK) +
                                     TILE_BYTES(DQ_ROWS, HEAD_DIM_V) + DQ_STAGES * DQ_STEP_BYTES,
              "all tiles of dq have a place");
static_assert(DKV_SHARED_BYTES == TILE_BYTES(DKV_KEYS, HEAD_DIM_QK) +
                                      TILE_BYTES(DKV_KEYS, HEAD_DIM_V) +
                                      DKV_STAGES * (DKV_STEP_BYTES + DKV_NUMBERS_BYTES),
              "all tiles of dkv have a place");

extern "C" {
__device__ struct sw_cuda_launch delta_launch = { DELTA_THREADS, 0, 1 << 30, GQA };
__device__ struct sw_cuda_launch dq_launch = { DQ_THREADS, DQ_SHARED_BYTES, DQ_TOKENS, DQ_GROUPS };
__device__ struct sw_cuda_launch dkv_launch = { DKV_THREADS, DKV_SHARED_BYTES, DKV_KEYS,
                                                1 + DKV_SPLIT };
__device__ struct sw_cuda_launch gather_launch = { GATHER_THREADS, 0, 1, 1 };
}

DEVICE float *delta_at(const struct sw_cuda_args &args, sw_int64 row, sw_int64 head,
                       sw_int64 batch) {
  return args.delta + (batch * args.attention.kv_heads * GQA + head) * args.rows + row;
}

// ---- delta --------------------------------------------------------------------------------------

// The products of 8 dims, added up.
DEVICE float multiply_elements(struct chunk a, struct chunk b) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 4; i++)
    sum += widen_first(a.word[i]) * widen_first(b.word[i]) +
           widen_second(a.word[i]) * widen_second(b.word[i]);
  return sum;
}

// A block has the rows of one unit in one head.
extern "C" __global__ void __launch_bounds__(DELTA_THREADS)
delta(const __grid_constant__ struct sw_cuda_args all) {
  const struct sw_attention_args &args = all.attention;
  struct place place = place_of_block(all);
  sw_int64 head = place.kv_head * GQA + place.y;
  int lane = (int)threadIdx.x % DELTA_LANES, first = (int)threadIdx.x / DELTA_LANES;
  int tokens = (int)place.unit->tokens;
//@ if SINKS == 1 then
  float sink = args.sink[head], dsink = 0;
//@ end
  // a warp has four rows at a time; it stays together until all of them are done
  for (int token = first; token / 4 * 4 < tokens; token += DELTA_THREADS / DELTA_LANES) {
    sw_int64 row = place.unit->row + token;
    float sum = 0;
    if (token < tokens) {
      const elem *dout = elem_at(args.dout, row, head, place.batch);
      const elem *out = elem_at(args.out, row, head, place.batch);
      for (int d = lane * 8; d < HEAD_DIM_V; d += DELTA_LANES * 8)
        sum += multiply_elements(load_global(dout + d, HEAD_DIM_V - d),
                                 load_global(out + d, HEAD_DIM_V - d));
    }
#pragma unroll
    for (int mask = 1; mask < DELTA_LANES; mask *= 2) sum += exchange(sum, mask);
    if (token >= tokens || lane > 0) continue;
    *delta_at(all, row, head, place.batch) = sum;
//@ if SINKS == 1 then
    // a sink's weight in a row is exp(sink - lse) and its value 0: d sink = weight * (0 - delta)
    float lse = *float_at(args.lse, row, head, place.batch);
    if (sink >= NEVER) dsink -= exp2_of((sink - lse) * LOG2E) * sum;
//@ end
  }
//@ if SINKS == 1 then
  __shared__ float parts[DELTA_THREADS / DELTA_LANES];
  if (lane == 0) parts[first] = dsink;
  block_sync();
  if (threadIdx.x > 0) return;
  dsink = 0;
  for (int i = 0; i < DELTA_THREADS / DELTA_LANES; i++) dsink += parts[i];
  sw_int64 unit = place.unit - args.units;
  args.dsink[(unit * args.batch + place.batch) * args.kv_heads * GQA + head] = dsink;
//@ end
}

// ---- products -----------------------------------------------------------------------------------

// Scores of a warp's rows with those of a chunk; sums of its rows' products with others' rows.  Of
// each 16 rows a lane has rows lane / 4 and 8 + lane / 4, of each 8 columns two neighbours.
template <int TALL, int WIDE> struct scores { float of[TALL][2 * WIDE][4]; };
template <int TALL, int DIM> struct sums { float of[TALL][CHUNKS(DIM)][4]; };
// A warp's own rows as left operands, where they stay in registers.
template <int TALL, int DIM> struct held { struct chunk of[TALL][CHUNKS(DIM) / 2]; };

template <int TALL, int DIM>
DEVICE void hold(struct held<TALL, DIM> &held, unsigned tile, int row) {
#pragma unroll
  for (int t = 0; t < TALL; t++)
#pragma unroll
    for (int d = 0; d < CHUNKS(DIM) / 2; d++)
      held.of[t][d] = operand_a(tile, DIM, row + 16 * t, 2 * d);
}

template <int TALL, int DIM> DEVICE void clear(struct sums<TALL, DIM> &sums) {
#pragma unroll
  for (int t = 0; t < TALL; t++)
#pragma unroll
    for (int n = 0; n < CHUNKS(DIM); n++)
#pragma unroll
      for (int e = 0; e < 4; e++) sums.of[t][n][e] = 0;
}

// Does `body(t, n, e)` for every score of a lane.
template <int TALL, int WIDE, typename Body> DEVICE void for_scores(Body body) {
#pragma unroll
  for (int n = 0; n < 2 * WIDE; n++)
#pragma unroll
    for (int t = 0; t < TALL; t++)
#pragma unroll
      for (int e = 0; e < 4; e++) body(t, n, e);
}
// The row of a score among the warp's own, and its column in the chunk.
DEVICE int row_of(int t, int e) { return 16 * t + 8 * (e / 2) + (int)lane() / 4; }
DEVICE int column_of(int n, int e) { return 8 * n + 2 * ((int)lane() % 4) + e % 2; }

// The first row that is multiplied together with a warp's, which are `own` and begin at `row`.
DEVICE int first_together(int row, int own) { return WGMMA ? row / 64 * 64 : row / own * own; }

// s = own other^T, over dims: the warp's own rows, held or from `row` of a tile on, with those of
// another tile from `column` on.
template <bool HOLD, int DIM, int TALL, int WIDE>
DEVICE void multiply_over_dims(struct scores<TALL, WIDE> &s, const struct held<TALL, DIM> &held,
                               unsigned own, int row, unsigned other, int column) {
//@ if WGMMA == 1 then
  multiply_dims<DIM, 16 * WIDE>(s.of[0], own + TILE_BYTES(first_together(row, 16), DIM),
                                other + TILE_BYTES(column, DIM));
//@ else
  const int at_once = HOLD || DIM <= 192 ? CHUNKS(DIM) / 2 : 4;   // for the compiler's time
  for_scores<TALL, WIDE>([&](int t, int n, int e) { s.of[t][n][e] = 0; });
#pragma unroll at_once
  for (int d = 0; d < CHUNKS(DIM) / 2; d++) {
    struct chunk a[TALL];
#pragma unroll
    for (int t = 0; t < TALL; t++)
      a[t] = HOLD ? held.of[t][d] : operand_a(own, DIM, row + 16 * t, 2 * d);
#pragma unroll
    for (int w = 0; w < WIDE; w++) {
      struct chunk b = operands_b_transposed(other, DIM, column + 16 * w, 2 * d);
#pragma unroll
      for (int t = 0; t < TALL; t++) {
        multiply(s.of[t][2 * w], a[t], b.word[0], b.word[1]);
        multiply(s.of[t][2 * w + 1], a[t], b.word[2], b.word[3]);
      }
    }
  }
//@ end
}

// 16 of a warp's rows of x, 16 columns, rounded.
template <int TALL, int WIDE>
DEVICE struct chunk left_operand(const struct scores<TALL, WIDE> &x, int t, int w) {
  struct chunk a;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float *pair = &x.of[t][2 * w + i / 2][i % 2 * 2];
    a.word[i] = join(pair[0], pair[1]);
  }
  return a;
}

// sums += x other, over the chunk's rows, which lie in the other tile from `column` on.
template <int DIM, int TALL, int WIDE>
DEVICE void multiply_over_rows(struct sums<TALL, DIM> &sums, const struct scores<TALL, WIDE> &x,
                               unsigned other, int column) {
//@ if WGMMA == 1 then
  struct chunk all[WIDE];
#pragma unroll
  for (int w = 0; w < WIDE; w++) all[w] = left_operand(x, 0, w);
  multiply_rows<DIM, 16 * WIDE>(sums.of[0], all, other + TILE_BYTES(column, DIM));
//@ else
#pragma unroll
  for (int w = 0; w < WIDE; w++) {
    struct chunk a[TALL];
#pragma unroll
    for (int t = 0; t < TALL; t++) a[t] = left_operand(x, t, w);
#pragma unroll
    for (int d = 0; d < CHUNKS(DIM) / 2; d++) {
      struct chunk b = operands_b(other, DIM, column + 16 * w, 2 * d);
#pragma unroll
      for (int t = 0; t < TALL; t++) {
        multiply(sums.of[t][2 * d], a[t], b.word[0], b.word[1]);
        multiply(sums.of[t][2 * d + 1], a[t], b.word[2], b.word[3]);
      }
    }
  }
//@ end
}

// What makes weights of scores.
struct slopes {
  float factor;                       // from a product q . k to its score, in powers of two
  float cap;                          // softcap in powers of two
};
DEVICE struct slopes slopes_of(const struct sw_attention_args &args) {
  struct slopes slopes;
  slopes.factor = SOFTCAP ? args.scale / args.softcap : args.scale * LOG2E;
  slopes.cap = args.softcap * LOG2E;
  return slopes;
}

// From q . k and dout . v to P and dS; `lse` in powers of two.
DEVICE void differentiate(float &s, float &dp, struct slopes slopes, float lse, float delta) {
//@ if SOFTCAP == 1 then
  float capped = tanh_of(s * slopes.factor);
  s = exp2_of(capped * slopes.cap - lse);
  dp = s * (dp - delta) * (1 - capped * capped);
//@ else
  s = exp2_of(s * slopes.factor - lse);
  dp = s * (dp - delta);
//@ end
}

// ---- results ------------------------------------------------------------------------------------

// Rounds the warp's sums, times `factor`, and lays them into a tile from `row` on.
template <int TALL, int DIM>
DEVICE void lay_out(unsigned tile, int row, const struct sums<TALL, DIM> &sums, float factor) {
  int lane = (int)threadIdx.x % 32;
#pragma unroll
  for (int t = 0; t < TALL; t++)
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int n = 0; n < CHUNKS(DIM); n++) {
        const float *pair = &sums.of[t][n][2 * half];
        store_shared_word(chunk_at(tile, DIM, row + row_of(t, 2 * half), n) + lane % 4 * 4,
                          join(pair[0] * factor, pair[1] * factor));
      }
}

// The same as floats, to rows `stride` floats apart in global memory, for the first `rows`.
template <int TALL, int DIM>
DEVICE void store_floats(float *to, sw_int64 stride, int rows, const struct sums<TALL, DIM> &sums,
                         float factor) {
#pragma unroll
  for (int t = 0; t < TALL; t++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int row = row_of(t, 2 * half);
      if (row >= rows) continue;
      float *first = to + row * stride;
#pragma unroll
      for (int n = 0; n < CHUNKS(DIM); n++) {
        const float *pair = &sums.of[t][n][2 * half];
        int d = column_of(n, 0);
        if (d < DIM) first[d] = pair[0] * factor;
        if (d + 1 < DIM) first[d + 1] = pair[1] * factor;
      }
    }
}

// ---- dq -----------------------------------------------------------------------------------------

// Asks for the keys and values of a step of dq.
DEVICE void load_dq_step(unsigned step, const struct key_tile &keys,
                         const struct sw_cuda_args &all, const struct place &place) {
  int thread = (int)threadIdx.x;
  load_keys(step, DQ_KEYS, HEAD_DIM_QK, false, keys, all, place, thread, DQ_THREADS);
  load_keys(step + DQ_K_BYTES, DQ_KEYS, HEAD_DIM_V, true, keys, all, place, thread, DQ_THREADS);
}

extern "C" __global__ void __launch_bounds__(DQ_THREADS, DQ_BLOCKS)
dq(const __grid_constant__ struct sw_cuda_args all) {
  const struct sw_attention_args &args = all.attention;
  struct place place = place_of_block(all);
  sw_int64 token = (sw_int64)(place.y / DQ_GROUPS) * DQ_TOKENS;
  if (token >= place.unit->tokens) return;
  int tokens = place.unit->tokens - token < DQ_TOKENS ? (int)(place.unit->tokens - token)
                                                      : DQ_TOKENS;
  sw_int64 position = place.unit->position + token, row = place.unit->row + token;
  sw_int64 head = place.kv_head * GQA + place.y % DQ_GROUPS * DQ_PACK;

  int thread = (int)threadIdx.x;
  unsigned q_tile = shared_start(), dout_tile = q_tile + TILE_BYTES(DQ_ROWS, HEAD_DIM_QK);
  unsigned stages = dout_tile + TILE_BYTES(DQ_ROWS, HEAD_DIM_V);
  load_queries(q_tile, DQ_ROWS, HEAD_DIM_QK, args.q, row, tokens, head, DQ_PACK, place.batch,
               thread, DQ_THREADS);
  load_queries(dout_tile, DQ_ROWS, HEAD_DIM_V, args.dout, row, tokens, head, DQ_PACK, place.batch,
               thread, DQ_THREADS);
  copy_commit();
  struct key_tile keys = first_keys(args, place.unit, keys_of_some(position, tokens), DQ_KEYS);
  struct key_tile ahead = keys;

  const int own = thread / 32 * DQ_OWN;                // the warp's first row
  const int together = first_together(own, DQ_OWN);    // and that of those it multiplies with
  const int q_begin = together / DQ_PACK;              // their queries, from the tile's first
  const int q_end = min((together + (WGMMA ? 64 : DQ_OWN) - 1) / DQ_PACK + 1, tokens);
  const struct slopes slopes = slopes_of(args);
  float lse[DQ_TALL][2], delta[DQ_TALL][2];
#pragma unroll
  for (int t = 0; t < DQ_TALL; t++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int m = own + row_of(t, 2 * half);
      lse[t][half] = delta[t][half] = 0;
      if (m >= tokens * DQ_PACK) continue;
      sw_int64 at = row + m / DQ_PACK, of = head + m % DQ_PACK;
      lse[t][half] = *float_at(args.lse, at, of, place.batch) * LOG2E;
      delta[t][half] = *delta_at(all, at, of, place.batch);
    }

  struct held<DQ_TALL, HEAD_DIM_QK> q;
  struct held<DQ_TALL, HEAD_DIM_V> dout;
  struct sums<DQ_TALL, HEAD_DIM_QK> sums;
  clear(sums);

  // steps below 0 only ask for the first ones
  for (int step = 1 - DQ_STAGES; keys.keys; step++) {
    if (step >= 0) {
      rows_wait(DQ_STAGES - 2);       // this step is there, for all warps,
      block_sync();                   // and the one before it is free again
    }
    if (ahead.keys) {
      load_dq_step(stages + (step + DQ_STAGES - 1) % DQ_STAGES * DQ_STEP_BYTES, ahead, all, place);
      next_keys(ahead, args.runs, DQ_KEYS);
    }
    copy_commit();
    if (step < 0) continue;
//@ if DQ_HOLD == 1 then
    if (step == 0) hold(q, q_tile, own), hold(dout, dout_tile, own);
//@ end

    const unsigned k_tile = stages + step % DQ_STAGES * DQ_STEP_BYTES;
    const unsigned v_tile = k_tile + DQ_K_BYTES;
    for (int c = 0; c < keys.keys; c += DQ_CHUNK) {
      const struct band band = band_of(position, keys.first + c);   // keys from the chunk's first
      const int left = keys.keys - c;
      if (!some_see_some(band, q_begin, q_end, min(left, DQ_CHUNK))) continue;
      struct scores<DQ_TALL, DQ_WIDE> p, ds;
      multiply_over_dims<DQ_HOLD>(p, q, q_tile, own, k_tile, c);
      multiply_over_dims<DQ_HOLD>(ds, dout, dout_tile, own, v_tile, c);
      for_scores<DQ_TALL, DQ_WIDE>([&](int t, int n, int e) {
        differentiate(p.of[t][n][e], ds.of[t][n][e], slopes, lse[t][e / 2], delta[t][e / 2]);
      });
      if (left < DQ_CHUNK || !all_see_all(band, q_begin, q_end, DQ_CHUNK)) {
        struct sight sight[DQ_TALL][2];
#pragma unroll
        for (int i = 0; i < 2 * DQ_TALL; i++)
          sight[i / 2][i % 2] =
              sight_of(band, (own + row_of(i / 2, i % 2 * 2)) / DQ_PACK, min(left, DQ_CHUNK));
        for_scores<DQ_TALL, DQ_WIDE>([&](int t, int n, int e) {
          if (!sees(sight[t][e / 2], column_of(n, e))) ds.of[t][n][e] = 0;
        });
      }
      for_gaps(keys, args.runs, [&](int begin, int end) {
        for_scores<DQ_TALL, DQ_WIDE>([&](int t, int n, int e) {
          int key = c + column_of(n, e);
          if (begin <= key && key < end) ds.of[t][n][e] = 0;
        });
      });
      multiply_over_rows(sums, ds, k_tile, c);
    }
    next_keys(keys, args.runs, DQ_KEYS);
  }
  rows_wait(0);

  block_sync();                       // nobody's queries are still on their way
  lay_out(q_tile, own, sums, args.scale);
  warp_sync();
  for_chunks(DQ_OWN, HEAD_DIM_QK, thread % 32, 32, [&](int r, int chunk) {
    int m = own + r, left = HEAD_DIM_QK - 8 * chunk;
    if (m >= tokens * DQ_PACK || left <= 0) return;
    const elem *to = elem_at(args.dq, row + m / DQ_PACK, head + m % DQ_PACK, place.batch);
    store_elements((elem *)to + 8 * chunk, load_shared(chunk_at(q_tile, HEAD_DIM_QK, m, chunk)),
                   left);
  });
}

// ---- dk and dv ----------------------------------------------------------------------------------

enum parts { KEYS = 1, VALUES = 2 };   // of what a block makes the sums

// The queries of a tile of keys are those of the unit that see one of them.  Steps go through the
// groups of heads, then on to the next DKV_TOKENS queries.
struct query_steps {
  sw_int64 row;                       // of the first query, in q and the like
  int      tokens;                    // queries in all; no more than 0: there are no steps
};
DEVICE int count_of(const struct query_steps &s) {
  return (s.tokens + DKV_TOKENS - 1) / DKV_TOKENS * DKV_GROUPS;
}
// A step's first query, counted from the first of all; its queries.
DEVICE int token_of(int step) { return step / DKV_GROUPS * DKV_TOKENS; }
DEVICE int tokens_of(const struct query_steps &s, int step) {
  return min(s.tokens - token_of(step), DKV_TOKENS);
}

// Asks for q, dout, lse and delta of a step.
DEVICE void load_dkv_step(unsigned to, unsigned lse, const struct query_steps &s, int step,
                          const struct sw_cuda_args &all, const struct place &place) {
  const struct sw_attention_args &args = all.attention;
  int thread = (int)threadIdx.x, tokens = tokens_of(s, step);
  sw_int64 row = s.row + token_of(step);
  sw_int64 head = place.kv_head * GQA + step % DKV_GROUPS * DKV_PACK;
  load_queries(to, DKV_ROWS, HEAD_DIM_QK, args.q, row, tokens, head, DKV_PACK, place.batch,
               thread, DKV_THREADS);
  load_queries(to + DKV_Q_BYTES, DKV_ROWS, HEAD_DIM_V, args.dout, row, tokens, head, DKV_PACK,
               place.batch, thread, DKV_THREADS);
  unsigned delta = lse + DKV_ROWS * 4;
  for (int m = thread; m < DKV_ROWS; m += DKV_THREADS) {
    bool is_query = m < tokens * DKV_PACK;
    sw_int64 at = is_query ? m / DKV_PACK : 0, of = is_query ? m % DKV_PACK : 0;
    copy_async_word(lse + m * 4, float_at(args.lse, row + at, head + of, place.batch), is_query);
    copy_async_word(delta + m * 4, delta_at(all, row + at, head + of, place.batch), is_query);
  }
}

// Writes a warp's sums of `rows` keys, times `factor`: `view` is at the first of them.
template <int DIM>
DEVICE void store_key_sums(char *base, const struct sw_view &view, bool final, sw_int64 first,
                           int rows, const struct place &place, unsigned tile, int own,
                           const struct sums<DKV_TALL, DIM> &sums, float factor) {
  char *data = base + (sw_int64)view.data;
  sw_int64 start = first * view.token + place.kv_head * view.head + place.batch * view.batch;
  if (!final) {
    store_floats((float *)data + start, view.token, rows, sums, factor);
    return;
  }
  lay_out(tile, own, sums, factor);
  warp_sync();
  for_chunks(DKV_OWN, DIM, (int)threadIdx.x % 32, 32, [&](int r, int chunk) {
    int left = DIM - 8 * chunk;
    if (r >= rows || left <= 0) return;
    store_elements((elem *)data + start + r * view.token + 8 * chunk,
                   load_shared(chunk_at(tile, DIM, own + r, chunk)), left);
  });
}

// dk and dv, or one of them, of a tile of keys of one run.
template <int PARTS> DEVICE void sum_for_keys(const struct sw_cuda_args &all) {
  const struct sw_attention_args &args = all.attention;
  struct place place = place_of_block(all);
  sw_int64 tile = place.y / (1 + DKV_SPLIT), r = place.unit->run_begin;
  for (; r < place.unit->run_end; r++) {
    sw_int64 tiles = (args.runs[r].tokens + DKV_KEYS - 1) / DKV_KEYS;
    if (tile < tiles) break;
    tile -= tiles;
  }
  if (r == place.unit->run_end) return;
  const struct sw_run &run = args.runs[r];
  struct positions wanted;
  wanted.begin = run.position + tile * DKV_KEYS;
  wanted.end = run.position + run.tokens;
  struct key_tile keys = first_keys(args, place.unit, wanted, DKV_KEYS);

  int thread = (int)threadIdx.x;
  unsigned k_tile = shared_start(), v_tile = k_tile + TILE_BYTES(DKV_KEYS, HEAD_DIM_QK);
  unsigned stages = v_tile + TILE_BYTES(DKV_KEYS, HEAD_DIM_V);
  unsigned numbers = stages + DKV_STAGES * DKV_STEP_BYTES;
  load_keys(k_tile, DKV_KEYS, HEAD_DIM_QK, false, keys, all, place, thread, DKV_THREADS);
  load_keys(v_tile, DKV_KEYS, HEAD_DIM_V, true, keys, all, place, thread, DKV_THREADS);
  copy_commit();
  struct positions seen = queries_of_some(keys.first, keys.keys), unit;
  unit.begin = place.unit->position;
  unit.end = place.unit->position + place.unit->tokens;
  seen = overlap(seen, unit);
  struct query_steps queries;
  queries.row = place.unit->row + (seen.begin - unit.begin);
  queries.tokens = seen.begin < seen.end ? (int)(seen.end - seen.begin) : 0;
  const int steps = count_of(queries);

  const int own = thread / 32 * DKV_OWN;                       // the warp's first key
  const int rows = min(keys.keys - own, DKV_OWN);              // how many it has; maybe none
  const int together = first_together(own, DKV_OWN);           // the keys it multiplies with
  const int rows_together = min(keys.keys - together, WGMMA ? 64 : DKV_OWN);
  const struct band all_steps = band_of(seen.begin, keys.first + own);
  const struct slopes slopes = slopes_of(args);
  struct held<DKV_TALL, HEAD_DIM_QK> k;
  struct held<DKV_TALL, HEAD_DIM_V> v;
  struct sums<DKV_TALL, HEAD_DIM_QK> dk;
  struct sums<DKV_TALL, HEAD_DIM_V> dv;
  if (PARTS & KEYS) clear(dk);
  if (PARTS & VALUES) clear(dv);

  // steps below 0 only ask for the first ones
  for (int step = 1 - DKV_STAGES; step < steps; step++) {
    if (step >= 0) {
      rows_wait(DKV_STAGES - 2);      // this step is there, for all warps,
      block_sync();                   // and the one before is free
    }
    int ahead = step + DKV_STAGES - 1;
    if (ahead < steps)
      load_dkv_step(stages + ahead % DKV_STAGES * DKV_STEP_BYTES,
                    numbers + ahead % DKV_STAGES * DKV_NUMBERS_BYTES, queries, ahead, all, place);
    copy_commit();
    if (step < 0) continue;
//@ if DKV_HOLD == 1 then
    if (step == 0) hold(k, k_tile, own);
    if (step == 0 && PARTS & KEYS) hold(v, v_tile, own);
//@ end

    const unsigned q_tile = stages + step % DKV_STAGES * DKV_STEP_BYTES;
    const unsigned dout_tile = q_tile + DKV_Q_BYTES;
    const unsigned lses = numbers + step % DKV_STAGES * DKV_NUMBERS_BYTES;
    const unsigned deltas = lses + DKV_ROWS * 4;
    const int tokens = tokens_of(queries, step);
    struct band band = all_steps;
    band.first += token_of(step), band.last += token_of(step);
    for (int c = 0; c < tokens * DKV_PACK; c += DKV_CHUNK) {
      const int q_begin = c / DKV_PACK, q_end = min((c + DKV_CHUNK - 1) / DKV_PACK + 1, tokens);
      const struct band wide = { band.first + own - together, band.last + own - together };
      if (rows_together <= 0 || !some_see_some(wide, q_begin, q_end, rows_together)) continue;
      struct scores<DKV_TALL, DKV_WIDE> p, ds;
      multiply_over_dims<DKV_HOLD>(p, k, k_tile, own, q_tile, c);
      if (PARTS & KEYS) multiply_over_dims<DKV_HOLD>(ds, v, v_tile, own, dout_tile, c);
      float lse[2 * DKV_WIDE][2], delta[2 * DKV_WIDE][2];
#pragma unroll
      for (int n = 0; n < 2 * DKV_WIDE; n++) {
        load_shared_floats(lse[n], lses + (c + column_of(n, 0)) * 4);
        load_shared_floats(delta[n], deltas + (c + column_of(n, 0)) * 4);
        lse[n][0] *= LOG2E, lse[n][1] *= LOG2E;
      }
      for_scores<DKV_TALL, DKV_WIDE>([&](int t, int n, int e) {
        if (!(PARTS & KEYS)) ds.of[t][n][e] = 0;
        differentiate(p.of[t][n][e], ds.of[t][n][e], slopes, lse[n][e % 2], delta[n][e % 2]);
      });
      if (!all_see_all(band, q_begin, q_end, rows)) {
        struct sight sight[2 * DKV_WIDE][2];
#pragma unroll
        for (int i = 0; i < 4 * DKV_WIDE; i++)
          sight[i / 2][i % 2] = sight_of(band, (c + column_of(i / 2, i % 2)) / DKV_PACK, rows);
        for_scores<DKV_TALL, DKV_WIDE>([&](int t, int n, int e) {
          if (!sees(sight[n][e % 2], row_of(t, e))) p.of[t][n][e] = ds.of[t][n][e] = 0;
        });
      }
      if (PARTS & VALUES) multiply_over_rows(dv, p, dout_tile, c);
      if (PARTS & KEYS) multiply_over_rows(dk, ds, q_tile, c);
    }
  }
  rows_wait(0);

  block_sync();                       // nobody's keys are still on their way
  const bool final = run.final != 0;
  const sw_int64 first = tile * DKV_KEYS + own;
  if (PARTS & KEYS)
    store_key_sums(final ? all.dk : all.sums, run.dk, final, first, rows, place, k_tile, own, dk,
                   args.scale);
  if (PARTS & VALUES)
    store_key_sums(final ? all.dv : all.sums, run.dv, final, first, rows, place, v_tile, own, dv,
                   1);
}

extern "C" __global__ void __launch_bounds__(DKV_THREADS, DKV_BLOCKS)
dkv(const __grid_constant__ struct sw_cuda_args all) {
//@ if DKV_SPLIT == 1 then
  if (blockIdx.y % 2 == 0) sum_for_keys<KEYS>(all);
  else sum_for_keys<VALUES>(all);
//@ else
  sum_for_keys<KEYS | VALUES>(all);
//@ end
}

// ---- gather -------------------------------------------------------------------------------------

// 4 dims, from d on, of one key's sum in one head over all terms, in their order.
struct quad { float of[4]; };

DEVICE struct quad add_terms(const struct sw_gather_args &args, const struct sw_sum &piece,
                             bool values, int dim, int d, sw_int64 row, sw_int64 head,
                             sw_int64 batch) {
  struct quad sum = { { 0, 0, 0, 0 } };
  for (sw_int64 i = piece.term_begin; i < piece.term_end; i++) {
    const struct sw_view &view = values ? args.terms[i].dv : args.terms[i].dk;
    const float *from = float_at(view, row, head, batch) + d;
    if (d + 4 <= dim && is_aligned(from)) {
      struct chunk four = load_global((const elem *)from, 8);
#pragma unroll
      for (int j = 0; j < 4; j++) sum.of[j] += __uint_as_float(four.word[j]);
    } else {
      for (int j = 0; j < 4 && d + j < dim; j++) sum.of[j] += from[j];
    }
  }
  return sum;
}

extern "C" __global__ void __launch_bounds__(GATHER_THREADS)
gather(const __grid_constant__ struct sw_gather_args args) {
  const sw_int64 batch = blockIdx.x / args.sum_count;
  const struct sw_sum &piece = args.sums[blockIdx.x % args.sum_count];
  const int quads_k = (HEAD_DIM_QK + 3) / 4, quads = quads_k + (HEAD_DIM_V + 3) / 4;
  const int heads = (int)args.kv_heads, count = (int)piece.tokens * heads * quads;
  for (int i = (int)threadIdx.x; i < count; i += GATHER_THREADS) {
    bool values = i % quads >= quads_k;
    int d = (i % quads - (values ? quads_k : 0)) * 4, dim = values ? HEAD_DIM_V : HEAD_DIM_QK;
    int head = i / quads % heads, row = i / quads / heads;
    struct quad sum = add_terms(args, piece, values, dim, d, row, head, batch);
    const struct sw_view &view = values ? args.dv : args.dk;
    sw_int64 at = (piece.row + row) * view.token + head * view.head + batch * view.batch + d;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if (d + j >= dim) continue;
      if (args.format == SW_SUMS_FLOAT) ((float *)view.data)[at + j] = sum.of[j];
      else if (args.format == SW_SUMS_BF16) ((elem *)view.data)[at + j] = narrow_bf16(sum.of[j]);
      else ((elem *)view.data)[at + j] = narrow(sum.of[j]);
    }
  }
}
