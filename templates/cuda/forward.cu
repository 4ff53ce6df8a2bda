// forward.cu: out = softmax(scale * q k^T + mask) v and lse, each query against its band of keys.
//
// A tile is TILE_TOKENS query positions times PACK query heads of one key head, ROWS in all,
// WARP_ROWS to a warp.  Row m is query m / PACK, head m % PACK.  A block has
//
//   a tile, whose keys come in tiles of BLOCK_K with a running maximum; the first one starts at the
//   first key that the tile of queries sees;
//   or, where the whole window of a tile of queries fits BLOCK_K (ONE_TILE), a strip of STRIP
//   tiles, one after the other.  Their windows overlap: each key is loaded once, and before it is
//   needed.
//
// With WGMMA four warps multiply together, 16 rows each; S and P lie in registers as they do
// without.  Keys come by the same copies of 16 bytes (TMA wants rows evenly apart, and runs are
// not), so all that products read is shown to them before the barrier that they wait at.
//
//   q, out   [batch][token][kv_heads * GQA][HEAD_DIM_QK or HEAD_DIM_V] elem, by strides
//   lse      [batch][token][kv_heads * GQA] float, natural logarithm
//   k, v     runs of keys, each with its first position
//   max_logits   NULL, or [unit][batch][kv_heads * GQA] float: grows to each head's largest score
//
// In shared memory: Q [ROWS][HEAD_DIM_QK], later out [ROWS][HEAD_DIM_V], twice in a strip of
// several tiles; K [KEYS][HEAD_DIM_QK] and V [KEYS][HEAD_DIM_V], where KEYS is STAGES times
// BLOCK_K, or all that a strip sees.  S, P and O stay in registers.

enum {
  STEPS_QK = CHUNKS(HEAD_DIM_QK) / 2,  // products of 16 dims
  STEPS_K  = BLOCK_K / 16,             // of 16 keys
  PAIRS_V  = CHUNKS(HEAD_DIM_V) / 2,   // 16 dims of out: two products' columns
  BANDS    = WARP_ROWS / 16,           // 16 rows of a warp: a product's rows
  GROUPS   = GQA / PACK,
  K_BYTES  = TILE_BYTES(BLOCK_K, HEAD_DIM_QK),
  V_BYTES  = TILE_BYTES(BLOCK_K, HEAD_DIM_V),
  BLOCK_TOKENS = STRIP * TILE_TOKENS,
  TOGETHER = WGMMA ? 64 : WARP_ROWS,   // rows that are multiplied by one instruction's warps
};
static_assert(Q_BYTES >= TILE_BYTES(ROWS, HEAD_DIM_QK) && Q_BYTES >= TILE_BYTES(ROWS, HEAD_DIM_V),
              "Q's place holds Q and out");
static_assert(SHARED_BYTES >= Q_TILES * Q_BYTES + TILE_BYTES(KEYS, HEAD_DIM_QK) +
                                  TILE_BYTES(KEYS, HEAD_DIM_V), "all tiles have a place");

extern "C" {
__device__ struct sw_cuda_launch forward_launch = { THREADS, SHARED_BYTES, BLOCK_TOKENS, GROUPS };
}

// What a warp holds of its rows.  Of each 16 rows a lane has two, `r` of 0 and 1: rows lane / 4 and
// 8 + lane / 4; of each 8 columns two.
struct rows {
  float o[BANDS][2 * PAIRS_V][4];      // sum of weights times values
  float top[BANDS][2];                 // running maximum of the scores, powers of two
  float sum[BANDS][2];                 // of the weights: this lane's share
};

// A warp's part of the tile.
struct part {
  int row;                             // its first row
  int q_begin, q_end;                  // its queries, counted from the tile's first; with WGMMA,
                                       // those of the four warps
  float factor;                        // from a product q . k to its score, in powers of two
  unsigned flip;                       // signs of a pair of query elements: the factor has none
};

// What a key that a query does not see scores.  Smaller than LOWEST by any factor.
#define UNSEEN -__int_as_float(0x7f800000)

// ---- scores -------------------------------------------------------------------------------------

//@ if WGMMA == 1 then
typedef unsigned queries;              // where the four warps' rows of the tile lie

DEVICE void take_queries(queries &q, unsigned tile, unsigned) { q = tile; }

DEVICE void score_keys(float s[BANDS][2 * STEPS_K][4], const queries &q, unsigned k,
                       unsigned flip) {
  multiply_dims<HEAD_DIM_QK, BLOCK_K>(s[0], q, k);
  if (flip)
#pragma unroll
    for (int n = 0; n < 2 * STEPS_K; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) s[0][n][e] = -s[0][n][e];
}

//@ else
//@ if Q_IN_REGS == 1 then
typedef struct chunk queries[STEPS_QK][BANDS];
//@ else
typedef unsigned queries;              // where the warp's rows of the tile lie
//@ end

DEVICE struct chunk read_queries(unsigned tile, int m, int d, unsigned flip) {
  struct chunk a = operand_a(tile, HEAD_DIM_QK, 16 * m, 2 * d);
#pragma unroll
  for (int i = 0; i < 4; i++) a.word[i] ^= flip;
  return a;
}

DEVICE void take_queries(queries &q, unsigned tile, unsigned flip) {
//@ if Q_IN_REGS == 1 then
#pragma unroll
  for (int d = 0; d < STEPS_QK; d++)
#pragma unroll
    for (int m = 0; m < BANDS; m++) q[d][m] = read_queries(tile, m, d, flip);
//@ else
  q = tile;
//@ end
}

DEVICE struct chunk query_operand(const queries &q, int m, int d, unsigned flip) {
//@ if Q_IN_REGS == 1 then
  return q[d][m];
//@ else
  return read_queries(q, m, d, flip);
//@ end
}

// s = q k^T
DEVICE void score_keys(float s[BANDS][2 * STEPS_K][4], const queries &q, unsigned k,
                       unsigned flip) {
#pragma unroll
  for (int m = 0; m < BANDS; m++)
#pragma unroll
    for (int n = 0; n < 2 * STEPS_K; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) s[m][n][e] = 0;
#pragma unroll
  for (int d = 0; d < STEPS_QK; d++) {
    struct chunk a[BANDS];
#pragma unroll
    for (int m = 0; m < BANDS; m++) a[m] = query_operand(q, m, d, flip);
#pragma unroll
    for (int n = 0; n < STEPS_K; n++) {
      struct chunk b = operands_b_transposed(k, HEAD_DIM_QK, 16 * n, 2 * d);
#pragma unroll
      for (int m = 0; m < BANDS; m++) {
        multiply(s[m][2 * n], a[m], b.word[0], b.word[1]);
        multiply(s[m][2 * n + 1], a[m], b.word[2], b.word[3]);
      }
    }
  }
}

//@ end
// The row of a lane's score and its key, counted from the tiles' firsts.
DEVICE int row_of(const struct part &part, int m, int r) {
  return part.row + 16 * m + 8 * r + (int)(lane() >> 2);
}
DEVICE int key_of(int n, int e) { return 8 * n + e % 2 + 2 * (int)(lane() & 3); }

// Does `body(s[m][n][e], m, n, e)` with every score.
template <typename Body> DEVICE void for_scores(float s[BANDS][2 * STEPS_K][4], Body body) {
#pragma unroll
  for (int m = 0; m < BANDS; m++)
#pragma unroll
    for (int n = 0; n < 2 * STEPS_K; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) body(s[m][n][e], m, n, e);
}

// Caps the scores, and hides from each query what it does not see.
DEVICE void finish_scores(float s[BANDS][2 * STEPS_K][4], const struct part &part,
                          const struct sw_attention_args &args, const struct key_tile &keys,
                          struct band band) {
//@ if SOFTCAP == 1 then
  for_scores(s, [&](float &x, int, int, int) {
    x = tanh_of(x * part.factor) * (args.softcap * LOG2E);
  });
//@ end
  // all of the warp's queries see the keys from begin to end
  int begin = part.q_end - 1 + band.first, end = part.q_begin + band.last + 1;
  if (end > keys.keys) end = keys.keys;
  if (begin > 0 || end < BLOCK_K) {
    struct sight sight[BANDS][2];
#pragma unroll
    for (int m = 0; m < BANDS; m++)
#pragma unroll
      for (int r = 0; r < 2; r++)
        sight[m][r] = sight_of(band, row_of(part, m, r) / PACK, keys.keys);
#pragma unroll
    for (int n = 0; n < 2 * STEPS_K; n++)
      if (8 * n < begin || 8 * n + 8 > end)
#pragma unroll
        for (int m = 0; m < BANDS; m++)
#pragma unroll
          for (int e = 0; e < 4; e++)
            if (!sees(sight[m][e / 2], key_of(n, e))) s[m][n][e] = UNSEEN;
  }
  for_gaps(keys, args.runs, [&](int begin, int end) {
    for_scores(s, [&](float &x, int, int n, int e) {
      if ((unsigned)(key_of(n, e) - begin) < (unsigned)(end - begin)) x = UNSEEN;
    });
  });
}

// ---- softmax ------------------------------------------------------------------------------------

// s = exp2(factor * s - top), with the running maximum following, and all that was summed before.
DEVICE void exponentiate(float s[BANDS][2 * STEPS_K][4], float factor, struct rows &rows) {
//@ if SOFTCAP == 1 then
  factor = 1;                          // it went into the cap
//@ end
#pragma unroll
  for (int m = 0; m < BANDS; m++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float top = s[m][0][2 * r];
#pragma unroll
      for (int n = 0; n < 2 * STEPS_K; n++)
        top = larger(top, larger(s[m][n][2 * r], s[m][n][2 * r + 1]));
      top = larger(rows.top[m][r], row_largest(top) * factor);
//@ if ONE_TILE == 0 then
      float shrink = exp2_of(rows.top[m][r] - top);
      rows.sum[m][r] *= shrink;
#pragma unroll
      for (int d = 0; d < 2 * PAIRS_V; d++)
        rows.o[m][d][2 * r] *= shrink, rows.o[m][d][2 * r + 1] *= shrink;
//@ end
      rows.top[m][r] = top;
      float sum = 0;
#pragma unroll
      for (int n = 0; n < 2 * STEPS_K; n++)
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; e++)
          sum += s[m][n][e] = exp2_of(s[m][n][e] * factor - top);
      rows.sum[m][r] += sum;
    }
}

// The weights as operands: two neighbouring products' columns are one's 16 keys.
struct weights { struct chunk p[BANDS][STEPS_K]; };

DEVICE void round_weights(struct weights &w, float s[BANDS][2 * STEPS_K][4]) {
#pragma unroll
  for (int m = 0; m < BANDS; m++)
#pragma unroll
    for (int n = 0; n < STEPS_K; n++) {
      w.p[m][n].word[0] = join(s[m][2 * n][0], s[m][2 * n][1]);
      w.p[m][n].word[1] = join(s[m][2 * n][2], s[m][2 * n][3]);
      w.p[m][n].word[2] = join(s[m][2 * n + 1][0], s[m][2 * n + 1][1]);
      w.p[m][n].word[3] = join(s[m][2 * n + 1][2], s[m][2 * n + 1][3]);
    }
}

// o += p v
DEVICE void weigh_values(struct rows &rows, const struct weights &w, unsigned v) {
//@ if WGMMA == 1 then
  multiply_rows<HEAD_DIM_V, BLOCK_K>(rows.o[0], w.p[0], v);
//@ else
#pragma unroll
  for (int n = 0; n < STEPS_K; n++)
#pragma unroll
    for (int d = 0; d < PAIRS_V; d++) {
      struct chunk b = operands_b(v, HEAD_DIM_V, 16 * n, 2 * d);
#pragma unroll
      for (int m = 0; m < BANDS; m++) {
        multiply(rows.o[m][2 * d], w.p[m][n], b.word[0], b.word[1]);
        multiply(rows.o[m][2 * d + 1], w.p[m][n], b.word[2], b.word[3]);
      }
    }
//@ end
}

// The first row that is multiplied together with the warp's.
DEVICE int first_together(const struct part &part) { return part.row / TOGETHER * TOGETHER; }

// ---- results ------------------------------------------------------------------------------------

// lse and the largest score of one row; returns the factor that makes o to out.
DEVICE float finish_row(const struct sw_attention_args &args, const struct place &place, float top,
                        float sum, sw_int64 row, sw_int64 head, bool writes) {
  float share = 1;
  if (writes && args.max_logits && top > LOWEST)
    grow_global(args.max_logits + ((place.unit - args.units) * args.batch + place.batch) *
                                      args.kv_heads * GQA + head, top * LN2);
//@ if SINKS == 1 then
  // The sink is one more key, without a value: it joins the maximum and the sum.
  float sink = larger(NEVER, args.sink[head] * LOG2E), most = larger(sink, top);
  share = exp2_of(top - most);
  sum = sum * share + exp2_of(sink - most);
  top = most;
//@ end
  bool some = sum != 0;
  if (writes)
    *float_at(args.lse, row, head, place.batch) =
        some ? (top + log2_of(sum)) * LN2 : -__int_as_float(0x7f800000);
  return some ? share * reciprocal(sum) : 0;
}

// Rounds the warp's rows of out and lays them where Q was.
DEVICE void lay_out(unsigned tile, const struct part &part, const struct rows &rows,
                    float factor[BANDS][2]) {
#pragma unroll
  for (int m = 0; m < BANDS; m++)
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int d = 0; d < 2 * PAIRS_V; d++) {
        unsigned at = chunk_at(tile, HEAD_DIM_V, row_of(part, m, r), d);
        store_shared_word(at + (lane() & 3) * 4, join(rows.o[m][d][2 * r] * factor[m][r],
                                                      rows.o[m][d][2 * r + 1] * factor[m][r]));
      }
}

DEVICE void store_out(unsigned tile, const struct part &part, const struct sw_view &out,
                      sw_int64 row, sw_int64 head, sw_int64 batch, int rows_there) {
  elem *first = (elem *)elem_at(out, row, head, batch);
  sw_int64 token_stride = out.token, head_stride = out.head;
  bool whole = HEAD_DIM_V % 8 == 0 && is_aligned(first) && token_stride % 8 == 0 &&
               (PACK == 1 || head_stride % 8 == 0);
  if (whole)
    for_chunks(WARP_ROWS, HEAD_DIM_V, (int)lane(), 32, [&](int r, int chunk) {
      int m = part.row + r;
      elem *to = first + m / PACK * token_stride + m % PACK * head_stride + 8 * chunk;
      if (m < rows_there && 8 * chunk < HEAD_DIM_V)
        store_global(to, load_shared(chunk_at(tile, HEAD_DIM_V, m, chunk)));
    });
  else
    for_chunks_slowly(WARP_ROWS, HEAD_DIM_V, (int)lane(), 32, [&](int r, int chunk) {
      int m = part.row + r;
      elem *to = first + m / PACK * token_stride + m % PACK * head_stride + 8 * chunk;
      if (m < rows_there)
        store_elements(to, load_shared(chunk_at(tile, HEAD_DIM_V, m, chunk)),
                       HEAD_DIM_V - 8 * chunk);
    });
}

// ---- a block ------------------------------------------------------------------------------------

// The block's first query, counted from its unit's, and first head.  What follows from them is read
// again where it is needed: registers are scarcer than loads.
DEVICE sw_int64 first_token(const struct place &place) {
  return (sw_int64)(place.y / GROUPS) * BLOCK_TOKENS;
}
DEVICE sw_int64 first_head(const struct place &place) {
  return place.kv_head * GQA + place.y % GROUPS * PACK;
}
DEVICE sw_int64 first_row(const struct place &place) {
  return place.unit->row + first_token(place);
}
DEVICE sw_int64 first_position(const struct place &place) {
  return place.unit->position + first_token(place);
}

// The queries of tile `t` of the block.
DEVICE int tokens_of(const struct place &place, int t) {
  sw_int64 left = place.unit->tokens - first_token(place) - t * TILE_TOKENS;
  return left < TILE_TOKENS ? (int)left : TILE_TOKENS;
}

DEVICE void load_tile(unsigned q_tile, const struct sw_attention_args &args,
                      const struct place &place, int t) {
  load_queries(q_tile, ROWS, HEAD_DIM_QK, args.q, first_row(place) + t * TILE_TOKENS,
               tokens_of(place, t), first_head(place), PACK, place.batch, (int)threadIdx.x,
               THREADS);
}

DEVICE struct part part_of(const struct sw_attention_args &args, int tokens) {
  struct part part;
  part.row = (int)threadIdx.x / 32 * WARP_ROWS;
  part.q_begin = first_together(part) / PACK;
  part.q_end = (first_together(part) + TOGETHER - 1) / PACK + 1;
  if (part.q_end > tokens) part.q_end = tokens;
  float factor = SOFTCAP ? args.scale / args.softcap : args.scale * LOG2E;
  part.factor = larger(fabsf(factor), 1e-37f);   // not 0, which would undo UNSEEN
  part.flip = factor < 0 ? 0x80008000 : 0;
  return part;
}

DEVICE void begin_rows(struct rows &rows) {
#pragma unroll
  for (int m = 0; m < BANDS; m++) {
#pragma unroll
    for (int d = 0; d < 2 * PAIRS_V; d++)
#pragma unroll
      for (int e = 0; e < 4; e++) rows.o[m][d][e] = 0;
#pragma unroll
    for (int r = 0; r < 2; r++) rows.top[m][r] = LOWEST, rows.sum[m][r] = 0;
  }
}

// Until Q was read wherever the warp's rows of out will lie.
DEVICE void queries_sync(void) {
//@ if WGMMA == 1 then
  if (PITCH(HEAD_DIM_QK) == PITCH(HEAD_DIM_V)) group_sync();   // four warps share a product
//@ else
  if (PITCH(HEAD_DIM_QK) == PITCH(HEAD_DIM_V)) warp_sync();
//@ end
  else block_sync();                              // rows of out lie across those of other warps
}

// Writes the tile's out and lse, and grows the largest scores.
DEVICE void finish_tile(unsigned q_tile, const struct sw_cuda_args &all, const struct part &part,
                        const struct rows &rows, int t) {
  struct place place = place_again(all);
  sw_int64 row = first_row(place) + t * TILE_TOKENS, head = first_head(place);
  int rows_there = tokens_of(place, t) * PACK;
  float shares[BANDS][2];
#pragma unroll
  for (int m = 0; m < BANDS; m++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      int at = row_of(part, m, r);
      shares[m][r] = finish_row(all.attention, place, rows.top[m][r], row_sum(rows.sum[m][r]),
                                row + at / PACK, head + at % PACK,
                                at < rows_there && lane() % 4 == 0);
    }
  queries_sync();                                 // all have read what lies where out will
  lay_out(q_tile, part, rows, shares);
  warp_sync();                                    // the warp's rows of out are there
  store_out(q_tile, part, all.attention.out, row, head, place.batch, rows_there);
}

//@ if ONE_TILE == 1 then
// ---- a strip ------------------------------------------------------------------------------------

// Row r of K and of V is the key at the first position that the block's first query sees, plus r,
// so tile t of queries starts at row t * TILE_TOKENS.  `rows` of them from `from` on:
DEVICE void load_strip(unsigned k_tile, int from, int rows, bool values,
                       const struct sw_cuda_args &all, const struct place &place) {
  struct key_tile keys = keys_at(all.attention, place.unit,
                                 keys_of_some(first_position(place), 1).begin + from, rows);
  int dim = values ? HEAD_DIM_V : HEAD_DIM_QK;
  load_keys(k_tile + TILE_BYTES(from, dim), rows, dim, values, keys, all, place, (int)threadIdx.x,
            THREADS);
}

// Groups of copies: the first tile's Q and K, its V, then the keys that each further tile adds; a
// later tile's Q while the one before it is worked on.
DEVICE void forward_block(const struct sw_cuda_args &all, const struct place &place) {
  const struct sw_attention_args &args = all.attention;
  unsigned q_tiles = shared_start(), k_rows = q_tiles + Q_TILES * Q_BYTES;
  unsigned v_rows = k_rows + TILE_BYTES(KEYS, HEAD_DIM_QK);
  load_tile(q_tiles, args, place, 0);
  load_strip(k_rows, 0, BLOCK_K, false, all, place);
  copy_commit();
  load_strip(v_rows, 0, BLOCK_K, true, all, place);
  copy_commit();
#pragma unroll 1
  for (int t = 1; t < STRIP; t++) {
    if (tokens_of(place, t) > 0) {
      load_strip(k_rows, BLOCK_K + (t - 1) * TILE_TOKENS, TILE_TOKENS, false, all, place);
      load_strip(v_rows, BLOCK_K + (t - 1) * TILE_TOKENS, TILE_TOKENS, true, all, place);
    }
    copy_commit();
  }

#pragma unroll 1
  for (int t = 0; t < STRIP; t++) {
    struct place place = place_again(all);
    if (tokens_of(place, t) <= 0) break;
    if (t == 0) rows_wait(STRIP);                 // all but the first tile's V and what comes after
    else rows_wait(0);
    block_sync();                                 // Q and K are there; the tile before is done with
    unsigned q_tile = q_tiles + t % 2 * Q_BYTES;
    if (t + 1 < STRIP && tokens_of(place, t + 1) > 0)
      load_tile(q_tiles + (t + 1) % 2 * Q_BYTES, args, place, t + 1);
    copy_commit();

    struct part part = part_of(args, tokens_of(place, t));
    sw_int64 position = first_position(place) + t * TILE_TOKENS;
    struct key_tile keys = keys_at(args, place.unit, keys_of_some(position, 1).begin, BLOCK_K);
    struct band band = band_of(position, keys.first);
    bool seen = some_see_some(band, part.q_begin, part.q_end, keys.keys);
    struct weights weights;
    struct rows rows;
    begin_rows(rows);
    if (seen) {
      float s[BANDS][2 * STEPS_K][4];
      queries q;
      take_queries(q, q_tile + TILE_BYTES(first_together(part), HEAD_DIM_QK), part.flip);
      score_keys(s, q, k_rows + TILE_BYTES(t * TILE_TOKENS, HEAD_DIM_QK), part.flip);
      finish_scores(s, part, args, keys, band);
      exponentiate(s, part.factor, rows);
      round_weights(weights, s);
    }
    if (t == 0) {
      rows_wait(STRIP);                           // the V of the first tile, for all warps
      block_sync();
    }
    if (seen) weigh_values(rows, weights, v_rows + TILE_BYTES(t * TILE_TOKENS, HEAD_DIM_V));
    finish_tile(q_tile, all, part, rows, t);
  }
}

//@ else
// ---- a tile -------------------------------------------------------------------------------------

// K and V of a tile of keys are a group of copies each, and every step commits both, be they empty.
DEVICE void forward_block(const struct sw_cuda_args &all, const struct place &place) {
  const struct sw_attention_args &args = all.attention;
  unsigned q_tile = shared_start(), k_tiles = q_tile + Q_BYTES;
  unsigned v_tiles = k_tiles + STAGES * K_BYTES;
  int thread = (int)threadIdx.x, tokens = tokens_of(place, 0);

  load_tile(q_tile, args, place, 0);
  struct key_tile keys = first_keys(args, place.unit, keys_of_some(first_position(place), tokens),
                                    BLOCK_K);
  struct key_tile ahead = keys;
#pragma unroll
  for (int stage = 0; stage < (STAGES > 1 ? STAGES - 1 : 1); stage++) {
    if (ahead.keys)
      load_keys(k_tiles + stage * K_BYTES, BLOCK_K, HEAD_DIM_QK, false, ahead, all, place, thread,
                THREADS);
    copy_commit();
    if (ahead.keys)
      load_keys(v_tiles + stage * V_BYTES, BLOCK_K, HEAD_DIM_V, true, ahead, all, place, thread,
                THREADS);
    copy_commit();
    if (ahead.keys) next_keys(ahead, args.runs, BLOCK_K);
  }

  struct part part = part_of(args, tokens);
  struct rows rows;
  begin_rows(rows);
  queries q;
//@ if Q_IN_REGS == 1 then
  rows_wait(2 * (STAGES > 1 ? STAGES - 1 : 1) - 1);
  block_sync();
//@ end
  take_queries(q, q_tile + TILE_BYTES(first_together(part), HEAD_DIM_QK), part.flip);

#pragma unroll 1
  for (int stage = 0; keys.keys; stage = stage + 1 < STAGES ? stage + 1 : 0) {
    const unsigned k_tile = k_tiles + stage * K_BYTES, v_tile = v_tiles + stage * V_BYTES;
    rows_wait(STAGES > 1 ? 2 * STAGES - 3 : 1);   // this tile's K is there, for all warps,
    block_sync();                                 // and the stage before it is free again
//@ if STAGES > 1 then
    int free = stage > 0 ? stage - 1 : STAGES - 1;
    if (ahead.keys)
      load_keys(k_tiles + free * K_BYTES, BLOCK_K, HEAD_DIM_QK, false, ahead, all, place, thread,
                THREADS);
    copy_commit();
    if (ahead.keys)
      load_keys(v_tiles + free * V_BYTES, BLOCK_K, HEAD_DIM_V, true, ahead, all, place, thread,
                THREADS);
    copy_commit();
    if (ahead.keys) next_keys(ahead, args.runs, BLOCK_K);
//@ end
    struct band band = band_of(first_position(place), keys.first);
    bool seen = some_see_some(band, part.q_begin, part.q_end, keys.keys);
    float s[BANDS][2 * STEPS_K][4];
    if (seen) score_keys(s, q, k_tile, part.flip);
//@ if STAGES == 1 then
    block_sync();                                 // all have read K: the next may come
    if (ahead.keys)
      load_keys(k_tile, BLOCK_K, HEAD_DIM_QK, false, ahead, all, place, thread, THREADS);
    copy_commit();
//@ end
    struct weights weights;
    if (seen) {
      finish_scores(s, part, args, keys, band);
      exponentiate(s, part.factor, rows);
      round_weights(weights, s);
    }
    rows_wait(STAGES > 1 ? 2 * STAGES - 2 : 1);
    block_sync();                                 // its V too
    if (seen) weigh_values(rows, weights, v_tile);
//@ if STAGES == 1 then
    block_sync();                                 // all have read V
    if (ahead.keys) {
      load_keys(v_tile, BLOCK_K, HEAD_DIM_V, true, ahead, all, place, thread, THREADS);
      next_keys(ahead, args.runs, BLOCK_K);
    }
    copy_commit();
//@ end
    next_keys(keys, args.runs, BLOCK_K);
  }
  rows_wait(0);                                   // Q at least is on its way where there is no key
  block_sync();
  finish_tile(q_tile, all, part, rows, 0);
}

//@ end
// ---- the kernel ---------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
forward(const __grid_constant__ struct sw_cuda_args all) {
  struct place place = place_of_block(all);
  if (first_token(place) < place.unit->tokens) forward_block(all, place);
}
