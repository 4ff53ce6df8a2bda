// backward.c: dq, dk, dv (and dsink) of a band of keys per query, from q, k, v, out, lse and dout.
//
// Weights are made again from the lse instead of being kept.  As in forward.c a row is one query of
// one head, and vectors run over rows; only the sums for keys run over the dims of a head.  A panel
// is ROWS rows: PANEL_TOKENS query positions times PACK query heads of one key head.  A tile is
// PANELS panels, one after the other in position, so that a key's sums are loaded and stored once
// for all of them, while each panel works only on the keys that it sees.
//
//   q, dq        [batch][token][kv_heads * GQA][HEAD_DIM_QK] elem, by strides
//   out, dout    [batch][token][kv_heads * GQA][HEAD_DIM_V] elem, by strides; dout's may be 0
//   lse          [batch][token][kv_heads * GQA] float, natural logarithm
//   k, v         runs of keys, each with its first position; packed block by block
//   dk, dv       beside the keys of each run: what this unit alone adds to their gradients, float;
//                where that is all that there is, the gradients themselves, elem
//
// For each tile:  Q^T, dO^T [dim][ROWS], Q, dO [row][dim],  delta = sum over dims of dout * out
//   for each block of keys that some row sees, for each panel:
//     P^T  = exp2(K Q^T - lse), masked          [keys][ROWS]
//     dS^T = P^T * (V dO^T - delta) * scale     [keys][ROWS]
//     dQ^T = dQ^T + K^T dS^T                    [HEAD_DIM_QK][ROWS]
//   and for all panels at once:
//     dV = dV + P^T dO,  dK = dK + dS^T Q       [keys][dim], kept beside the packed block
//
// A product over dims takes words (prelude.c) of dims, one over keys words of keys, one over rows
// words of rows; so K, Q, dO and dS stand here twice, and where a word is a float that is the same.
// Sums are floats always.
//
// A sum takes its terms in the order of tiles, head groups and rows, whatever the slots or the
// threads: the scale is in dS, so what leaves the block cache and returns is the sum itself.

enum {
  ROWS      = LANES * VECTORS,        // rows of a panel
  TILE_ROWS = ROWS * PANELS,
  K_DIMS    = LANES * KEY_VECTORS,    // floats from key to key of dK, words from row to row of Q
  V_DIMS    = LANES * VALUE_VECTORS,  // the same of dV and dO
  K_WORDS   = K_DIMS / STEP,          // words of dims from key to key of K
  V_WORDS   = V_DIMS / STEP,          // and of V
  Q_T_WORDS    = (K_WORDS + LANES - 1) / LANES * LANES,   // words of dims of Q^T and dO^T, whose
  DOUT_T_WORDS = (V_WORDS + LANES - 1) / LANES * LANES,   // transposes write whole squares
  S_STRIDE  = TILE_ROWS + LANES,         // from key to key of P^T and dS^T, and in words of rows; a
  P_STRIDE  = TILE_ROWS / STEP + LANES,  // vector more than needed, for powers of two would fall on
                                         // the same few cache sets
  GRAIN     = ROWS_K > ROWS_J ? ROWS_K : ROWS_J,   // a panel's part of a block is rounded to it
  COLUMNS   = LANES * VECTORS_D,      // dims of a key that are summed at once
  PREFETCH  = 2,                      // rows of the next tile that are asked for at a time
};
_Static_assert(ROWS_K % STEP == 0 && BLOCK_K % STEP == 0, "groups of keys are whole words");

const sw_int64 backward_tile_tokens = TILE_TOKENS;

// Where all blocks that a tile touches have slots, no block is left before its sums are complete.
enum {
  LIMITED      = LEFT_LIMITED && RIGHT_LIMITED,
  MOST_TOUCHED = (RING_BLOCKS - 1) * BLOCK_K + 1,   // keys in a row that touch RING_BLOCKS at most
};
const sw_int64 backward_final_keys =
    LIMITED && (sw_int64)WINDOW_LEFT + TILE_TOKENS + WINDOW_RIGHT <= MOST_TOUCHED ? __INT64_MAX__
                                                                                  : MOST_TOUCHED;

// ---- words --------------------------------------------------------------------------------------

//@ if STEP == 1 then
// a float is a word of anything
#define k_by_keys  k
#define p_by_rows  p
#define ds_by_rows ds
//@ end

// LANES floats, or words of dims, of a row of `dim` elements from d on, 0 from dim on.
INLINE vec row_floats(const elem *row, int d, int dim) {
  return d + LANES <= dim ? widen(row + d) : widen_some(row + d, dim - d);
}
INLINE vec row_words(const elem *row, int d, int dim) {
//@ if STEP == 1 then
  return row_floats(row, d, dim);
//@ else
  return load_pairs(row, d, dim);
//@ end
}

// ---- what a thread works in ---------------------------------------------------------------------

#define ALIGNED __attribute__((aligned(64)))

// A packed block of keys with the sums of their gradients so far.
struct slot {
  struct block block;
  float k[BLOCK_K * K_WORDS] ALIGNED;              // words of dims
  float v[BLOCK_K * V_WORDS] ALIGNED;
//@ if STEP > 1 then
  float k_by_keys[BLOCK_K / STEP * K_DIMS] ALIGNED;
//@ end
  float dk[BLOCK_K * K_DIMS] ALIGNED;
  float dv[BLOCK_K * V_DIMS] ALIGNED;
};

struct workspace {
  float q_t[PANELS][Q_T_WORDS * ROWS] ALIGNED;     // Q^T, words of dims
  float dout_t[PANELS][DOUT_T_WORDS * ROWS] ALIGNED;
  float dq_t[PANELS][K_DIMS * ROWS] ALIGNED;       // dQ^T
  float q[TILE_ROWS / STEP * K_DIMS] ALIGNED;      // Q, words of rows
  float dout[TILE_ROWS / STEP * V_DIMS] ALIGNED;
  float p[BLOCK_K * S_STRIDE] ALIGNED;             // P^T, floats
  float ds[BLOCK_K * S_STRIDE] ALIGNED;            // dS^T, words of keys
//@ if STEP > 1 then
  float p_by_rows[BLOCK_K * P_STRIDE] ALIGNED;
  float ds_by_rows[BLOCK_K * P_STRIDE] ALIGNED;
//@ end
  float lse[TILE_ROWS] ALIGNED;                    // in powers of two
  float delta[TILE_ROWS] ALIGNED;                  // times the scale
  ivec lane_token[VECTORS];                        // each lane's query, from its panel's first on
  double dsink[GQA];                               // of the item at work
  sw_int64 next_block;                             // this item has seen the blocks below it before
  int asked;                                       // rows of the next tile that were prefetched
  sw_int64 slots;
  struct slot slot[];
};

sw_int64 backward_workspace(sw_int64 max_keys) {
  sw_int64 slots = block_slots(max_keys, TILE_TOKENS);
  return (sw_int64)sizeof(struct workspace) + slots * (sw_int64)sizeof(struct slot);
}

// ---- a tile -------------------------------------------------------------------------------------

// Lane m of a panel holds its query m / PACK, head m % PACK of the tile's heads.  Rows without a
// query are all 0: they have P = 1, but dO, delta and so dS are 0, and they add nothing anywhere.
struct tile {
  const struct sw_attention_args *args;
  const struct sw_unit *unit;
  sw_int64 b, h;                      // batch row, key head
  sw_int64 head;                      // its first query head
  sw_int64 position, row;             // of its first query
  int      tokens;                    // 1 .. TILE_TOKENS
  int      panels;                    // that hold a query; the others are left alone
  sw_int64 ahead_tokens, ahead_heads; // from here to the next tile
};

INLINE int panel_tokens(const struct tile *t, int panel) {
  int left = t->tokens - panel * PANEL_TOKENS;
  return left < PANEL_TOKENS ? left : PANEL_TOKENS;
}

// Where lane m of a panel finds its row: its token of q and its head.
struct place { sw_int64 token, head; };

INLINE struct place place_of(const struct tile *t, int panel, int m) {
  return (struct place){ t->row + panel * PANEL_TOKENS + m / PACK, t->head + m % PACK };
}

// Asks for a few more rows of the next tile, while this one computes.  (Behind the last tile that
// is harmless.)
INLINE void prefetch_rows(struct workspace *w, const struct tile *t) {
  for (int i = 0; i < PREFETCH && w->asked < TILE_ROWS; i++, w->asked++) {
    struct place at = place_of(t, w->asked / ROWS, w->asked % ROWS);
    at.token += t->ahead_tokens;
    at.head += t->ahead_heads;
    prefetch_row(elem_at(&t->args->q, at.token, at.head, t->b), HEAD_DIM_QK);
    prefetch_row(elem_at(&t->args->out, at.token, at.head, t->b), HEAD_DIM_V);
    prefetch_row(elem_at(&t->args->dout, at.token, at.head, t->b), HEAD_DIM_V);
  }
}

// Lays out LANES rows, `rows` of which exist, as words of rows: to[row][d].
INLINE void load_plain(float *to, int stride, const elem *const *from, int rows, int dim) {
  for (int i = 0; i < LANES; i += STEP)
    for (int d = 0; d < dim; d += LANES) {
      vec first = i < rows ? row_floats(from[i], d, dim) : (vec){0};
      vec last = i + STEP - 1 < rows ? row_floats(from[i + STEP - 1], d, dim) : (vec){0};
      store(to + i / STEP * stride + d, join(first, last));
    }
}

// The same as words of dims, turned: to[word of dims][ROWS].
INLINE void load_turned(float *to, const elem *const *from, int rows, int dim) {
  float square[LANES * LANES] ALIGNED;
  for (int d = 0; d < dim; d += LANES * STEP) {
    for (int i = 0; i < LANES; i++)
      store(square + i * LANES, i < rows ? row_words(from[i], d, dim) : (vec){0});
    transpose(to + d / STEP * ROWS, ROWS, square, LANES);
  }
}

// delta of LANES rows: sum over dims of dout * out.
INLINE vec row_products(const elem *const *dout, const elem *const *out, int rows) {
  float square[LANES * LANES] ALIGNED, turned[LANES * LANES] ALIGNED;
  for (int i = 0; i < LANES; i++) {
    vec sum = {0};
    for (int d = 0; i < rows && d < HEAD_DIM_V; d += LANES * STEP)
      sum = dot(sum, row_words(dout[i], d, HEAD_DIM_V), row_words(out[i], d, HEAD_DIM_V));
    store(square + i * LANES, sum);
  }
  transpose(turned, LANES, square, LANES);
  vec delta = load(turned);
  for (int i = 1; i < LANES; i++) delta += load(turned + i * LANES);
  return delta;
}

// Lays out LANES rows of a panel from lane m on: Q and dO both ways, lse, delta; adds to dsink.
OUTLINE void load_rows(struct workspace *w, const struct tile *t, int panel, int m) {
  const struct sw_attention_args *args = t->args;
  const elem *q[LANES], *out[LANES], *dout[LANES];
  int row = panel * ROWS + m, rows = panel_tokens(t, panel) * PACK - m;
  if (rows > LANES) rows = LANES;
  for (int i = 0; i < LANES; i++) {
    w->lse[row + i] = 0;
    if (i >= rows) continue;
    struct place at = place_of(t, panel, m + i);
    q[i] = elem_at(&args->q, at.token, at.head, t->b);
    out[i] = elem_at(&args->out, at.token, at.head, t->b);
    dout[i] = elem_at(&args->dout, at.token, at.head, t->b);
    w->lse[row + i] = *float_at(&args->lse, at.token, at.head, t->b) * LOG2E;
  }

  load_turned(w->q_t[panel] + m, q, rows, HEAD_DIM_QK);
  load_plain(w->q + row / STEP * K_DIMS, K_DIMS, q, rows, HEAD_DIM_QK);
  load_turned(w->dout_t[panel] + m, dout, rows, HEAD_DIM_V);
  load_plain(w->dout + row / STEP * V_DIMS, V_DIMS, dout, rows, HEAD_DIM_V);
  vec delta = row_products(dout, out, rows);
  store(w->delta + row, delta * args->scale);

//@ if SINKS == 1 then
  // A sink's weight in a row is exp(sink - lse) and its value 0: d sink = weight * (0 - delta).
  float powers[LANES] ALIGNED;        // of two; NEVER where there is no sink, whose weight is 0
  for (int i = 0; i < LANES; i++) {
    powers[i] = NEVER;
    if (i >= rows) continue;
    struct place at = place_of(t, panel, m + i);
    float sink = args->sink[at.head], lse = *float_at(&args->lse, at.token, at.head, t->b);
    if (sink > -__builtin_inff()) powers[i] = (sink - lse) * LOG2E;
  }
  vec products = exp2_vec(load(powers)) * delta;
  for (int i = 0; i < rows; i++)
    w->dsink[place_of(t, panel, m + i).head - t->h * GQA] -= ((float *)&products)[i];
//@ end
}

// dq = dQ, for the rows of a panel that exist.
OUTLINE void store_panel(const struct workspace *w, const struct tile *t, int panel) {
  const struct sw_attention_args *args = t->args;
  float square[LANES * LANES] ALIGNED;
  int all = panel_tokens(t, panel) * PACK;
  for (int m = 0; m < all; m += LANES)
    for (int d = 0; d < HEAD_DIM_QK; d += LANES) {
      int at = vector_start(d, HEAD_DIM_QK);
      transpose(square, LANES, w->dq_t[panel] + at * ROWS + m, ROWS);
      for (int i = 0; i < LANES && m + i < all; i++) {
        struct place row = place_of(t, panel, m + i);
        elem *to = (elem *)elem_at(&args->dq, row.token, row.head, t->b);
        store_elem_row(to, at, HEAD_DIM_QK, load(square + i * LANES));
      }
    }
}

// ---- weights and what flows into them -----------------------------------------------------------

// P^T of ROWS_K keys: p[r][m] = exp2(k[r] . q[:, m] * factor - lse[m]).  With a softcap the score
// is softcap * tanh(k . q * factor), and slope[r][m] gets the derivative of that by the score
// before the cap.
OUTLINE void weigh_keys(float *p, float *slope, const float *k, const float *q, const float *lse,
                        float factor, float softcap) {
//@ for r = 0, ROWS_K - 1 do
//@ for v = 0, VECTORS - 1 do
  vec s$(r)_$(v) = {0};
//@ end
//@ end
  for (int d = 0; d < (HEAD_DIM_QK + STEP - 1) / STEP; d++) {
//@ for v = 0, VECTORS - 1 do
    vec q$(v) = load(q + d * ROWS + $(v) * LANES);
//@ end
//@ for r = 0, ROWS_K - 1 do
    vec k$(r) = splat_word(k + $(r) * K_WORDS + d);
//@ for v = 0, VECTORS - 1 do
    s$(r)_$(v) = dot(s$(r)_$(v), k$(r), q$(v));
//@ end
//@ end
  }
//@ for v = 0, VECTORS - 1 do
  vec lse$(v) = load(lse + $(v) * LANES);
//@ for r = 0, ROWS_K - 1 do
//@ if SOFTCAP == 1 then
  s$(r)_$(v) = tanh_vec(s$(r)_$(v) * factor);
  store(slope + $(r) * S_STRIDE + $(v) * LANES, 1.0f - s$(r)_$(v) * s$(r)_$(v));
  s$(r)_$(v) = s$(r)_$(v) * (softcap * LOG2E) - lse$(v);
//@ else
  s$(r)_$(v) = s$(r)_$(v) * factor - lse$(v);
//@ end
  store(p + $(r) * S_STRIDE + $(v) * LANES, weight_of(s$(r)_$(v)));
//@ end
//@ end
}

// The same rows once more, where some row does not see some key: its weight becomes 0.
//   row, key   the first key's row in the block, and its distance from the panel's first query
OUTLINE void mask_keys(float *p, const struct block *block, int row, sw_int64 key, int tokens,
                       const ivec *lane_token) {
  for (int r = 0; r < ROWS_K; r++) {
    struct queries seen = seen_by(key + r, tokens);
    if (!block->covered[row + r]) seen.last = -1;
    for (int v = 0; v < VECTORS; v++) {
      float *at = p + r * S_STRIDE + v * LANES;
      store(at, keep(load(at), visible(seen, lane_token[v])));
    }
  }
}

// dS^T of ROWS_K keys: p[r][m] * (v[r] . dout[:, m] * scale - delta[m]), with a softcap times the
// slope.  It goes to `ds` as words of keys (over the slopes of keys that are done with) and, where
// that is something else, to `ds_rows` as words of rows; so does P^T to `p_rows`.
OUTLINE void differentiate_weights(float *ds, float *p_rows, float *ds_rows, const float *p,
                                   const float *slope, const float *v, const float *dout,
                                   const float *delta, float scale) {
//@ for r = 0, ROWS_K - 1 do
//@ for m = 0, VECTORS - 1 do
  vec g$(r)_$(m) = {0};
//@ end
//@ end
  for (int d = 0; d < (HEAD_DIM_V + STEP - 1) / STEP; d++) {
//@ for m = 0, VECTORS - 1 do
    vec o$(m) = load(dout + d * ROWS + $(m) * LANES);
//@ end
//@ for r = 0, ROWS_K - 1 do
    vec v$(r) = splat_word(v + $(r) * V_WORDS + d);
//@ for m = 0, VECTORS - 1 do
    g$(r)_$(m) = dot(g$(r)_$(m), v$(r), o$(m));
//@ end
//@ end
  }
//@ for m = 0, VECTORS - 1 do
  vec delta$(m) = load(delta + $(m) * LANES);
//@ for r = 0, ROWS_K - 1 do
  vec p$(r)_$(m) = load(p + $(r) * S_STRIDE + $(m) * LANES);
  g$(r)_$(m) = p$(r)_$(m) * (g$(r)_$(m) * scale - delta$(m));
//@ if SOFTCAP == 1 then
  g$(r)_$(m) *= load(slope + $(r) * S_STRIDE + $(m) * LANES);
//@ end
//@ if STEP > 1 then
  store_elem((elem *)(p_rows + $(r) * P_STRIDE) + $(m) * LANES, p$(r)_$(m));
  store_elem((elem *)(ds_rows + $(r) * P_STRIDE) + $(m) * LANES, g$(r)_$(m));
//@ end
//@ if r % STEP == STEP - 1 then
  store(ds + $(r // STEP) * S_STRIDE + $(m) * LANES, join(g$(r - STEP + 1)_$(m), g$(r)_$(m)));
//@ end
//@ end
//@ end
}

// ---- sums ---------------------------------------------------------------------------------------

// dQ^T of ROWS_D dims: dq[d][m] += sum over `words` words of keys j of k[j][d] . ds[j][m].
OUTLINE void sum_for_queries(float *dq, const float *k, const float *ds, int words) {
//@ for d = 0, ROWS_D - 1 do
//@ for m = 0, VECTORS - 1 do
  vec q$(d)_$(m) = load(dq + $(d) * ROWS + $(m) * LANES);
//@ end
//@ end
  for (int j = 0; j < words; j++) {
//@ for m = 0, VECTORS - 1 do
    vec s$(m) = load(ds + j * S_STRIDE + $(m) * LANES);
//@ end
//@ for d = 0, ROWS_D - 1 do
    vec k$(d) = splat_word(k + j * K_DIMS + $(d));
//@ for m = 0, VECTORS - 1 do
    q$(d)_$(m) = dot(q$(d)_$(m), k$(d), s$(m));
//@ end
//@ end
  }
//@ for d = 0, ROWS_D - 1 do
//@ for m = 0, VECTORS - 1 do
  store(dq + $(d) * ROWS + $(m) * LANES, q$(d)_$(m));
//@ end
//@ end
}

// dV, or dK, of ROWS_J keys and COLUMNS dims: sum[r][c] += sum over `words` words of rows m of
// p[r][m] . x[m][c].  `dims` is the stride of sum and of x.
OUTLINE void sum_for_keys(float *sum, const float *p, const float *x, sw_int64 dims, int words) {
//@ for r = 0, ROWS_J - 1 do
//@ for c = 0, VECTORS_D - 1 do
  vec a$(r)_$(c) = load(sum + $(r) * dims + $(c) * LANES);
//@ end
//@ end
  for (int m = 0; m < words; m++) {
//@ for c = 0, VECTORS_D - 1 do
    vec x$(c) = load(x + $(c) * LANES);
//@ end
//@ for r = 0, ROWS_J - 1 do
    vec p$(r) = splat_word(p + $(r) * P_STRIDE + m);
//@ for c = 0, VECTORS_D - 1 do
    a$(r)_$(c) = dot(a$(r)_$(c), p$(r), x$(c));
//@ end
//@ end
    x += dims;
  }
//@ for r = 0, ROWS_J - 1 do
//@ for c = 0, VECTORS_D - 1 do
  store(sum + $(r) * dims + $(c) * LANES, a$(r)_$(c));
//@ end
//@ end
}

// ---- the sums of a block and the runs -----------------------------------------------------------

INLINE void copy_rows(float *to, sw_int64 to_stride, const float *from, sw_int64 from_stride,
                      unsigned long dim, sw_int64 rows) {
  for (sw_int64 row = 0; row < rows; row++)
    __builtin_memcpy(to + row * to_stride, from + row * from_stride, sizeof(float) * dim);
}

// Writes complete sums to a run that is final.
INLINE void store_final(const struct sw_view *to, sw_int64 token, const struct tile *t,
                        const float *from, sw_int64 from_stride, int dim, sw_int64 rows) {
  for (sw_int64 row = 0; row < rows; row++, from += from_stride) {
    elem *row_to = (elem *)elem_at(to, token + row, t->h, t->b);
    for (int d = 0; d < dim; d += LANES) {
      int at = vector_start(d, dim);
      store_elem_row(row_to, at, dim, load_loose(from + at));
    }
  }
}

// Writes the block's dk and dv to the runs that hold its keys, or with `back` takes up what it left
// there, which no run that is final sees.
OUTLINE void exchange_sums(struct slot *slot, const struct tile *t, int back) {
  struct positions whole = { slot->block.number * BLOCK_K, (slot->block.number + 1) * BLOCK_K };
  for (sw_int64 r = t->unit->run_begin; r < t->unit->run_end; r++) {
    const struct sw_run *run = &t->args->runs[r];
    struct positions held = { run->position, run->position + run->tokens };
    struct positions here = overlap(whole, held);
    sw_int64 keys = here.end - here.begin;
    if (keys <= 0) continue;

    sw_int64 from = here.begin - run->position, row = here.begin - whole.begin;
    float *block_dk = slot->dk + row * K_DIMS, *block_dv = slot->dv + row * V_DIMS;
    if (run->final) {
      store_final(&run->dk, from, t, block_dk, K_DIMS, HEAD_DIM_QK, keys);
      store_final(&run->dv, from, t, block_dv, V_DIMS, HEAD_DIM_V, keys);
      continue;
    }
    float *dk = float_at(&run->dk, from, t->h, t->b), *dv = float_at(&run->dv, from, t->h, t->b);
    if (back) {
      copy_rows(block_dk, K_DIMS, dk, run->dk.token, HEAD_DIM_QK, keys);
      copy_rows(block_dv, V_DIMS, dv, run->dv.token, HEAD_DIM_V, keys);
    } else {
      copy_rows(dk, run->dk.token, block_dk, K_DIMS, HEAD_DIM_QK, keys);
      copy_rows(dv, run->dv.token, block_dv, V_DIMS, HEAD_DIM_V, keys);
    }
  }
}

// Empties a slot: what its block summed up is handed over.
static void leave_slot(struct slot *slot, const struct tile *t) {
  if (slot->block.number >= 0 && slot->block.covered_keys) exchange_sums(slot, t, 0);
  slot->block.number = -1;
}

static void pack_slot(struct slot *slot, const struct tile *t, sw_int64 number) {
//@ if STEP == 1 then
  pack_block(&slot->block, slot->k, K_WORDS, slot->v, V_WORDS, t->args, t->unit, number, t->b,
             t->h);
//@ else
  pack_block_by(pack_dim_pairs, pack_dim_pairs, &slot->block, slot->k, K_WORDS, slot->v, V_WORDS,
                t->args, t->unit, number, t->b, t->h);
  for (int row = 0; row < BLOCK_K && slot->block.covered_keys; row += STEP) {
    const elem *first = (const elem *)(slot->k + row * K_WORDS);
    for (int d = 0; d < K_DIMS; d += LANES)
      store(slot->k_by_keys + row / STEP * K_DIMS + d,
            join(widen(first + d), widen(first + K_DIMS + d)));
  }
//@ end
}

// The slot that holds block `number`, made ready if another block was in it.  Tiles see their
// blocks in ascending order and no tile sees less far than the one before, so a block that is new
// has the highest number so far; any other has been here, and goes on from what it left.
static struct slot *visit_block(struct workspace *w, const struct tile *t, sw_int64 number) {
  struct slot *slot = &w->slot[number % w->slots];
  if (slot->block.number == number) return slot;
  leave_slot(slot, t);
  pack_slot(slot, t, number);
  if (slot->block.covered_keys) {
    __builtin_memset(slot->dk, 0, sizeof slot->dk);
    __builtin_memset(slot->dv, 0, sizeof slot->dv);
    if (number < w->next_block) exchange_sums(slot, t, 1);
  }
  if (number >= w->next_block) w->next_block = number + 1;
  return slot;
}

// ---- a tile, continued --------------------------------------------------------------------------

struct rows { int begin, end; };      // keys, as rows of a block

// Which rows of a block a panel works on: those of the positions `here` that it sees, rounded to
// GRAIN.  Both ends only grow from panel to panel; there are none when begin >= end.
static struct rows rows_of_panel(const struct tile *t, int panel, const struct block *block,
                                 struct positions here) {
  sw_int64 first = block->number * BLOCK_K, position = t->position + panel * PANEL_TOKENS;
  here = overlap(here, keys_of_some(position, panel_tokens(t, panel)));
  return (struct rows){ (int)(here.begin - first) / GRAIN * GRAIN,
                        (int)(here.end - first + GRAIN - 1) / GRAIN * GRAIN };
}

// P^T, dS^T and dQ^T of one panel for its rows of a block.
static void differentiate_panel(struct workspace *w, const struct tile *t, int panel,
                                const struct slot *slot, struct rows keys) {
  sw_int64 first = slot->block.number * BLOCK_K, position = t->position + panel * PANEL_TOKENS;
  int tokens = panel_tokens(t, panel);
  struct positions plain = keys_of_all(position, tokens);
  if (slot->block.covered_keys < BLOCK_K) plain.end = plain.begin;
  float factor = SOFTCAP ? t->args->scale / t->args->softcap : t->args->scale * LOG2E;
  float *p = w->p + panel * ROWS, *ds = w->ds + panel * ROWS;

  for (int row = keys.begin; row < keys.end; row += ROWS_K) {
    float *weights = p + row * S_STRIDE;
    prefetch_rows(w, t);
    weigh_keys(weights, ds + row * S_STRIDE, slot->k + row * K_WORDS, w->q_t[panel],
               w->lse + panel * ROWS, factor, t->args->softcap);
    if (first + row < plain.begin || first + row + ROWS_K > plain.end)
      mask_keys(weights, &slot->block, row, first + row - position, tokens, w->lane_token);
  }
  for (int row = keys.begin; row < keys.end; row += ROWS_K) {
    int by_rows = row * P_STRIDE + panel * ROWS / STEP;
    differentiate_weights(ds + row / STEP * S_STRIDE, w->p_by_rows + by_rows,
                          w->ds_by_rows + by_rows, p + row * S_STRIDE, ds + row * S_STRIDE,
                          slot->v + row * V_WORDS, w->dout_t[panel], w->delta + panel * ROWS,
                          t->args->scale);
  }
  for (int d = 0; d < K_DIMS; d += ROWS_D)
    sum_for_queries(w->dq_t[panel] + d * ROWS, slot->k_by_keys + keys.begin / STEP * K_DIMS + d,
                    ds + keys.begin / STEP * S_STRIDE, (keys.end - keys.begin) / STEP);
}

// sums[key][dim] += weights[key][row] * x[row][dim], over the rows of the panels that see the key.
static void sum_block(float *sums, const float *weights, const float *x, int dims,
                      const struct rows *keys, int panels) {
  for (int d = 0; d < dims; d += COLUMNS) {
    int panel = 0, end = 0;   // the panels that see a key follow each other; both ends only grow
    for (int row = keys[0].begin; row < keys[panels - 1].end; row += ROWS_J) {
      while (panel < panels && keys[panel].end <= row) panel++;
      while (end < panels && keys[end].begin <= row) end++;
      int word = panel * ROWS / STEP;
      if (panel < end)
        sum_for_keys(sums + row * dims + d, weights + row * P_STRIDE + word,
                     x + word * dims + d, dims, (end - panel) * ROWS / STEP);
    }
  }
}

static void differentiate_block(struct workspace *w, const struct tile *t, struct slot *slot,
                                struct positions here) {
  struct rows keys[PANELS];
  for (int panel = 0; panel < t->panels; panel++) {
    keys[panel] = rows_of_panel(t, panel, &slot->block, here);
    if (keys[panel].begin < keys[panel].end) differentiate_panel(w, t, panel, slot, keys[panel]);
  }
  sum_block(slot->dv, w->p_by_rows, w->dout, V_DIMS, keys, t->panels);
  sum_block(slot->dk, w->ds_by_rows, w->q, K_DIMS, keys, t->panels);
}

static void backward_tile(struct workspace *w, const struct tile *t) {
  for (int panel = 0; panel < t->panels; panel++)
    for (int m = 0; m < ROWS; m += LANES) load_rows(w, t, panel, m);
  __builtin_memset(w->dq_t, 0, sizeof w->dq_t);
  w->asked = 0;

  struct positions seen = keys_of_some(t->position, t->tokens);
  seen = overlap(seen, unit_keys(t->args, t->unit));
  while (seen.begin < seen.end) {
    sw_int64 number = seen.begin / BLOCK_K;
    struct positions here = overlap(seen, (struct positions){ 0, (number + 1) * BLOCK_K });
    struct slot *slot = visit_block(w, t, number);
    if (slot->block.covered_keys) differentiate_block(w, t, slot, here);
    seen.begin = here.end;
  }
  for (int panel = 0; panel < t->panels; panel++) store_panel(w, t, panel);
}

// ---- items --------------------------------------------------------------------------------------

static void backward_item(struct workspace *w, const struct sw_attention_args *args,
                          sw_int64 item) {
  sw_int64 unit = item / args->kv_heads / args->batch;
  struct tile t = { .args = args, .unit = args->units + unit };
  t.h = item % args->kv_heads;
  t.b = item / args->kv_heads % args->batch;
  __builtin_memset(w->dsink, 0, sizeof w->dsink);
  w->next_block = 0;

  for (sw_int64 token = 0; token < t.unit->tokens; token += TILE_TOKENS) {
    sw_int64 left = t.unit->tokens - token;
    t.tokens = (int)(left < TILE_TOKENS ? left : TILE_TOKENS);
    t.panels = (t.tokens + PANEL_TOKENS - 1) / PANEL_TOKENS;
    t.position = t.unit->position + token;
    t.row = t.unit->row + token;
    for (int group = 0; group < GQA / PACK; group++) {
      t.head = t.h * GQA + group * PACK;
      int last = group == GQA / PACK - 1;
      t.ahead_tokens = last ? TILE_TOKENS : 0;
      t.ahead_heads = last ? PACK - GQA : PACK;
      backward_tile(w, &t);
    }
  }
  for (sw_int64 slot = 0; slot < w->slots; slot++) leave_slot(&w->slot[slot], &t);
//@ if SINKS == 1 then
  float *dsink = args->dsink + ((unit * args->batch + t.b) * args->kv_heads + t.h) * GQA;
  for (int head = 0; head < GQA; head++) dsink[head] = (float)w->dsink[head];
//@ end
}

void backward(const struct sw_attention_args *args, sw_int64 begin, sw_int64 end, void *workspace) {
  struct workspace *w = workspace;
  w->slots = block_slots(args->max_keys, TILE_TOKENS);
  for (sw_int64 slot = 0; slot < w->slots; slot++) w->slot[slot].block.number = -1;
  for (int m = 0; m < ROWS; m++) ((int *)w->lane_token)[m] = m / PACK;
  for (sw_int64 item = begin; item < end; item++) backward_item(w, args, item);
}

// ---- gather -------------------------------------------------------------------------------------

// One row of one head as a message takes it home.
INLINE void store_sum(const struct sw_gather_args *args, const struct sw_view *to, sw_int64 row,
                      sw_int64 h, sw_int64 b, const float *sum, int dim) {
  if (args->format == SW_SUMS_FLOAT) {
    __builtin_memcpy(float_at(to, row, h, b), sum, sizeof *sum * (unsigned long)dim);
    return;
  }
  unsigned short *narrow = (unsigned short *)to->data + row * to->token + h * to->head +
                           b * to->batch;
  for (int d = 0; d < dim; d++) {     // to nearest, ties to even; a NaN stays a (quiet) NaN
    unsigned bits;
    __builtin_memcpy(&bits, sum + d, sizeof bits);
    unsigned rounded = bits + 0x7fff + (bits >> 16 & 1);
    narrow[d] = (unsigned short)((sum[d] != sum[d] ? bits | 0x400000 : rounded) >> 16);
  }
}

// dk (or dv, with `values`) of one head of a piece: the sum of its terms, in their order.
INLINE void gather_piece(const struct sw_gather_args *args, const struct sw_sum *piece, int values,
                         int dim, sw_int64 h, sw_int64 b) {
  float sum[K_DIMS > V_DIMS ? K_DIMS : V_DIMS] ALIGNED;
  const struct sw_view *to = values ? &args->dv : &args->dk;
  for (sw_int64 row = 0; row < piece->tokens; row++) {
    __builtin_memset(sum, 0, sizeof sum);
    for (sw_int64 i = piece->term_begin; i < piece->term_end; i++) {
      const struct sw_term *term = &args->terms[i];
      const float *from = float_at(values ? &term->dv : &term->dk, row, h, b);
      int d = 0;
      for (; d + LANES <= dim; d += LANES) store(sum + d, load(sum + d) + load_loose(from + d));
      for (; d < dim; d++) sum[d] += from[d];
    }
    if (args->format != SW_SUMS_ELEM) {
      store_sum(args, to, piece->row + row, h, b, sum, dim);
      continue;
    }
    elem *out = (elem *)elem_at(to, piece->row + row, h, b);
    for (int d = 0; d < dim; d += LANES) {
      int at = vector_start(d, dim);
      store_elem_row(out, at, dim, load_loose(sum + at));
    }
  }
}

void gather(const struct sw_gather_args *args, sw_int64 begin, sw_int64 end, void *workspace) {
  (void)workspace;
  for (sw_int64 item = begin; item < end; item++) {
    const struct sw_sum *piece = &args->sums[item % args->sum_count];
    for (sw_int64 h = 0; h < args->kv_heads; h++) {
      gather_piece(args, piece, 0, HEAD_DIM_QK, h, item / args->sum_count);
      gather_piece(args, piece, 1, HEAD_DIM_V, h, item / args->sum_count);
    }
  }
}
