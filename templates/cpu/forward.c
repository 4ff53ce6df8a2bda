// forward.c: out = softmax(scale * q k^T + mask) v and lse, each query against its band of keys.
//
// Vectors run over query rows: a tile is TILE_TOKENS query positions times PACK query heads of one
// key head, ROWS in all with one row to a lane.  So K and V are only ever broadcast, and softmax
// never reduces across lanes.
//
//   q, out   [batch][token][kv_heads * GQA][HEAD_DIM_QK or HEAD_DIM_V] elem, by strides
//   lse      [batch][token][kv_heads * GQA] float, natural logarithm
//   k, v     runs of keys, each with its first position; packed block by block (see prelude.c)
//   max_logits   NULL, or [unit][batch][kv_heads * GQA] float: each head's largest score
//
// For each strip of tiles:  Q^T, scaled   [STRIP][HEAD_DIM_QK][ROWS]
//   for each block of keys that some row sees, and each tile of which one does:
//     S^T = K Q^T, masked           [keys][ROWS]    as powers of two: log2(e) is folded into Q
//     P^T = exp2(S^T - top)         in place
//     O^T = O^T + V^T P^T           [STRIP][HEAD_DIM_V][ROWS]
//   out = O / sum,  lse = top * ln 2 + log(sum)
// So a block comes from beyond the L2 once for a whole strip.

enum {
  GROUPS   = GQA / PACK,                                     // tiles of the same query positions
  // query positions that a strip can touch, where it starts amid the groups of one
  STRIP_TOKENS = (1 + (STRIP + GROUPS - 2) / GROUPS) * TILE_TOKENS,
  K_STRIDE = (HEAD_DIM_QK + STEP - 1) / STEP,                // words of a row of Q or K
  V_STRIDE = (HEAD_DIM_V + ROWS_D - 1) / ROWS_D * ROWS_D,    // words of STEP rows of V
  // rows of Q^T and O^T; a transpose writes and reads whole squares
  Q_ROWS   = (K_STRIDE + LANES - 1) / LANES * LANES,
  O_ROWS   = V_STRIDE < LANES * STEP ? LANES * STEP : V_STRIDE,
  // vectors of out that are written one after the other: past the cache whole cache lines
  ABREAST  = STREAM ? 64 / (4 * LANES) : 1,
};
_Static_assert(ROWS_K % STEP == 0 && BLOCK_K % STEP == 0, "groups of keys are whole words");

// O^T and the sum follow a new maximum only when it grew by more than this, in powers of two.
#define SLACK 8.0f

const sw_int64 forward_tile_tokens = TILE_TOKENS;

// ---- words --------------------------------------------------------------------------------------

// Q and K have words along the dims, V and P along the keys.  S, O and the sums are floats always.

//@ if STEP == 1 then
#define PACK_WORDS pack_block

// LANES words of a query from `at` on, at = word_start(d).  The factor of the scores goes into Q.
INLINE int word_start(int d) { return vector_start(d, HEAD_DIM_QK); }
INLINE vec query_words(const elem *row, int at, float factor) {
  return widen_row(row, at, HEAD_DIM_QK) * factor;
}
INLINE vec scale_score(vec score, vec factor) { return (void)factor, score; }

// The same for out.
INLINE int out_start(int d) { return vector_start(d, HEAD_DIM_V); }
INLINE void store_words(elem *row, int at, vec words) {
  if (!STREAM || !stream(row + at, words)) store_elem_row(row, at, HEAD_DIM_V, words);
}
//@ else
#define PACK_WORDS pack_block_pairs

// LANES words of a query from `at` on, at = word_start(d).  Times the factor they would have to be
// rounded once more, so the scores get it.
INLINE int word_start(int d) { return d; }
INLINE vec query_words(const elem *row, int at, float factor) {
  return (void)factor, load_pairs(row, at, HEAD_DIM_QK);
}
INLINE vec scale_score(vec score, vec factor) { return score * factor; }

// The same for out.
INLINE int out_start(int d) { return pairs_start(d, HEAD_DIM_V); }
INLINE void store_words(elem *row, int at, vec words) {
  if (!STREAM || !stream(row + at, words)) store_pairs_row(row, at, HEAD_DIM_V, words);
}
//@ end

// ---- what a thread works in ---------------------------------------------------------------------

struct workspace {
  sw_int64 slots;
  float *q;                           // Q^T [STRIP][Q_ROWS][ROWS] words
  float *scores;                      // S^T [BLOCK_K][ROWS], then P^T [BLOCK_K / STEP][ROWS] words
  float *out;                         // O^T [STRIP][O_ROWS][ROWS]
  float *k;                           // [slots][BLOCK_K][K_STRIDE] words
  float *v;                           // [slots][BLOCK_K / STEP][V_STRIDE] words
  struct block *blocks;               // [slots]
};

// Cuts the workspace; returns its size in bytes, so with base = 0 it only measures.
static sw_int64 cut_workspace(struct workspace *w, char *base, sw_int64 max_keys) {
  sw_int64 used = 0;
#define CUT(member, count)                                                       \
  w->member = (void *)(base + used);                                             \
  used += ((count) * (sw_int64)sizeof *w->member + 63) / 64 * 64
  w->slots = block_slots(max_keys, STRIP_TOKENS);
  CUT(q, STRIP * Q_ROWS * ROWS);
  CUT(scores, BLOCK_K * ROWS);
  CUT(out, STRIP * O_ROWS * ROWS);
  CUT(k, w->slots * BLOCK_K * K_STRIDE);
  CUT(v, w->slots * BLOCK_K / STEP * V_STRIDE);
  CUT(blocks, w->slots);
#undef CUT
  return used;
}

sw_int64 forward_workspace(sw_int64 max_keys) {
  struct workspace w;
  return cut_workspace(&w, 0, max_keys);
}

// ---- a tile -------------------------------------------------------------------------------------

// Lane m holds query m / PACK of the tile, head m % PACK of its heads.  Lanes past the last query
// repeat it; their results are dropped.
struct tile {
  const struct sw_attention_args *args;
  const struct sw_unit *unit;
  sw_int64 b, h;                      // batch row, key head
  sw_int64 head;                      // its first query head
  sw_int64 position, row;             // of its first query
  int      tokens;                    // 1 .. TILE_TOKENS
  sw_int64 next_row, next_head;       // where the tile in its place in the next strip starts
  int      next_tokens;               // 0 after the last
  int      asked;                     // elements of its queries that were prefetched
  float   *q, *out;                   // its parts of the workspace
  ivec     lane_token[VECTORS];       // each lane's query, counted from the first
  vec      top[VECTORS];              // running maximum of the scores (within SLACK), powers of two
  vec      sum[VECTORS];              // sum of exp2(score - top)
  vec      most[VECTORS];             // the largest score itself, powers of two; LOWEST: none yet
  float    factor;                    // from a product q . k to its score, in powers of two
  int      started;                   // O^T and top hold something
};

INLINE int token_of(const struct tile *t, int m) {
  return m / PACK < t->tokens ? m / PACK : t->tokens - 1;
}

// Q^T[d][m] = word d of lane m's query.
OUTLINE void load_queries(const struct tile *t) {
  float square[LANES * LANES] __attribute__((aligned(4 * LANES)));
  for (int m = 0; m < ROWS; m += LANES) {
    const elem *rows[LANES];
    for (int i = 0; i < LANES; i++)
      rows[i] = elem_at(&t->args->q, t->row + token_of(t, m + i), t->head + (m + i) % PACK, t->b);
    for (int d = 0; d < HEAD_DIM_QK; d += LANES * STEP) {
      int at = word_start(d);
      for (int i = 0; i < LANES; i++)
        store(square + i * LANES, query_words(rows[i], at, t->factor));
      transpose(t->q + at / STEP * ROWS + m, ROWS, square, LANES);
    }
  }
}

// Asks for a few more cache lines of the next strip's queries, while this tile computes.
INLINE void prefetch_queries(struct tile *t) {
  enum { LINE = 64 / sizeof(elem) };
  for (int i = 0; i < PREFETCH && t->asked < t->next_tokens * PACK * HEAD_DIM_QK; i++) {
    int m = t->asked / HEAD_DIM_QK, d = t->asked % HEAD_DIM_QK;
    const elem *row = elem_at(&t->args->q, t->next_row + m / PACK, t->next_head + m % PACK, t->b);
    __builtin_prefetch(row + d);
    t->asked += LINE;
  }
}

// ---- scores -------------------------------------------------------------------------------------

// S^T of ROWS_K keys: scores[r][m] = k[r] . q[:, m], scaled; top[m] grows to the largest.
OUTLINE void score_keys(float *scores, const float *k, const float *q, float factor, vec *top) {
//@ for r = 0, ROWS_K - 1 do
//@ for v = 0, VECTORS - 1 do
  vec s$(r)_$(v) = {0};
//@ end
//@ end
  for (int d = 0; d < K_STRIDE; d++) {
//@ for v = 0, VECTORS - 1 do
    vec q$(v) = load(q + d * ROWS + $(v) * LANES);
//@ end
//@ for r = 0, ROWS_K - 1 do
    vec k$(r) = splat_word(k + $(r) * K_STRIDE + d);
//@ for v = 0, VECTORS - 1 do
    s$(r)_$(v) = dot(s$(r)_$(v), k$(r), q$(v));
//@ end
//@ end
  }
//@ for v = 0, VECTORS - 1 do
  vec top$(v) = top[$(v)];
//@ for r = 0, ROWS_K - 1 do
  s$(r)_$(v) = scale_score(s$(r)_$(v), splat(factor));
  store(scores + $(r) * ROWS + $(v) * LANES, s$(r)_$(v));
  top$(v) = larger(top$(v), s$(r)_$(v));
//@ end
  top[$(v)] = top$(v);
//@ end
}

// The same rows once more, for keys that need more than a product: the softcap, the mask, or both.
// `row` is the first key's row in the block, `key` its distance from the tile's first query.
OUTLINE void finish_scores(float *scores, const struct tile *t, const struct block *block, int row,
                           sw_int64 key, int masked, vec *top) {
  for (int r = 0; r < ROWS_K; r++) {
    struct queries seen = seen_by(key + r, t->tokens);
    if (!block->covered[row + r]) seen.last = -1;
    for (int v = 0; v < VECTORS; v++) {
      vec s = load(scores + r * ROWS + v * LANES);
//@ if SOFTCAP == 1 then
      s = tanh_vec(s) * (t->args->softcap * LOG2E);   // scaled by scale / softcap
//@ end
      if (masked) s = choose(visible(seen, t->lane_token[v]), s, splat(NEVER));
      store(scores + r * ROWS + v * LANES, s);
      top[v] = larger(top[v], s);
    }
  }
}

// ---- softmax ------------------------------------------------------------------------------------

// Lets the running maximum follow the block's, when it must; what was summed before is scaled to
// the new one.
OUTLINE void raise_top(struct tile *t, const vec *block_top) {
  ivec grown = {0};
  for (int v = 0; v < VECTORS; v++) grown |= block_top[v] > t->top[v] + SLACK;
  if (!any(grown)) return;
  vec shrink[VECTORS];
  for (int v = 0; v < VECTORS; v++) {
    vec top = larger(t->top[v], block_top[v]);
    shrink[v] = exp2_vec(t->top[v] - top);
    t->sum[v] *= shrink[v];
    t->top[v] = top;
  }
  for (int d = 0; d < V_STRIDE; d++)
    for (int v = 0; v < VECTORS; v++) {
      float *o = t->out + d * ROWS + v * LANES;
      store(o, load(o) * shrink[v]);
    }
}

// P^T = exp2(S^T - top) in place: `keys` rows become keys / STEP rows of words.  The sum grows by
// the weights before they are rounded: backward makes them again from the lse alone, and rounded
// ones would put an error of up to 2^-9 into it.
OUTLINE void exponentiate(float *scores, int keys, struct tile *t) {
//@ for v = 0, VECTORS - 1 do
  vec top$(v) = t->top[$(v)], sum$(v) = t->sum[$(v)];
//@ end
  for (int j = 0; j < keys; j += STEP) {
//@ for v = 0, VECTORS - 1 do
//@ for r = 0, STEP - 1 do
    vec p$(v)_$(r) = weight_of(load(scores + (j + $(r)) * ROWS + $(v) * LANES) - top$(v));
    sum$(v) += p$(v)_$(r);
//@ end
    store(scores + j / STEP * ROWS + $(v) * LANES, join(p$(v)_0, p$(v)_$(STEP - 1)));
//@ end
  }
//@ for v = 0, VECTORS - 1 do
  t->sum[$(v)] = sum$(v);
//@ end
}

// ---- values -------------------------------------------------------------------------------------

// O^T of ROWS_D dims: out[d][m] (+)= sum over `words` words of keys j of v[j][d] . p[j][m].
OUTLINE void weigh_values(float *out, const float *v, const float *p, int words, int add) {
//@ for d = 0, ROWS_D - 1 do
//@ for m = 0, VECTORS - 1 do
  vec o$(d)_$(m) = {0};
//@ end
//@ end
  if (add) {
//@ for d = 0, ROWS_D - 1 do
//@ for m = 0, VECTORS - 1 do
    o$(d)_$(m) = load(out + $(d) * ROWS + $(m) * LANES);
//@ end
//@ end
  }
  for (int j = 0; j < words; j++) {
//@ for m = 0, VECTORS - 1 do
    vec p$(m) = load(p + j * ROWS + $(m) * LANES);
//@ end
//@ for d = 0, ROWS_D - 1 do
    vec v$(d) = splat_word(v + j * V_STRIDE + $(d));
//@ for m = 0, VECTORS - 1 do
    o$(d)_$(m) = dot(o$(d)_$(m), v$(d), p$(m));
//@ end
//@ end
  }
//@ for d = 0, ROWS_D - 1 do
//@ for m = 0, VECTORS - 1 do
  store(out + $(d) * ROWS + $(m) * LANES, o$(d)_$(m));
//@ end
//@ end
}

// ---- a tile, continued --------------------------------------------------------------------------

// The block's keys [seen.begin, seen.end), of which every row sees [plain.begin, plain.end).
static void attend_block(struct tile *t, struct workspace *w, const struct block *block,
                         const float *k, const float *v, struct positions seen,
                         struct positions plain) {
  sw_int64 first = block->number * BLOCK_K;
  int begin = (int)(seen.begin - first) / STEP * STEP;
  int end = ((int)(seen.end - first) + STEP - 1) / STEP * STEP;
  if (block->covered_keys < BLOCK_K) plain.end = plain.begin;

  vec block_top[VECTORS];
  for (int m = 0; m < VECTORS; m++) block_top[m] = splat(LOWEST);
  for (int row = begin / ROWS_K * ROWS_K; row < end; row += ROWS_K) {
    float *scores = w->scores + row * ROWS;
    prefetch_queries(t);
    int masked = first + row < plain.begin || first + row + ROWS_K > plain.end;
    if (masked || SOFTCAP) {
      vec unused[VECTORS];
      for (int m = 0; m < VECTORS; m++) unused[m] = splat(LOWEST);
      score_keys(scores, k + row * K_STRIDE, t->q, t->factor, unused);
      finish_scores(scores, t, block, row, first + row - t->position, masked, block_top);
    } else {
      score_keys(scores, k + row * K_STRIDE, t->q, t->factor, block_top);
    }
  }

  for (int m = 0; m < VECTORS; m++) t->most[m] = larger(t->most[m], block_top[m]);
  if (t->started) raise_top(t, block_top);
  else for (int m = 0; m < VECTORS; m++) t->top[m] = block_top[m];
  float *p = w->scores + begin * ROWS;
  exponentiate(p, end - begin, t);
  for (int d = 0; d < V_STRIDE; d += ROWS_D)
    weigh_values(t->out + d * ROWS, v + begin / STEP * V_STRIDE + d, p, (end - begin) / STEP,
                 t->started);
  t->started = 1;
}

// out = O / sum and lse of the rows that exist; one that saw no key gets 0 and -inf, or its sink.
OUTLINE void store_tile(const struct tile *t) {
  const struct sw_attention_args *args = t->args;
  float square[LANES * LANES] __attribute__((aligned(4 * LANES)));
  float lines[LANES * ABREAST * LANES] __attribute__((aligned(4 * LANES)));
  for (int m = 0; m < t->tokens * PACK; m += LANES) {
    int rows = t->tokens * PACK - m < LANES ? t->tokens * PACK - m : LANES;
    vec top = t->top[m / LANES], sum = t->sum[m / LANES], share = splat(1);
//@ if SINKS == 1 then
    // The sink is one more key, without a value: it joins the maximum and the sum.
    vec sink;
    for (int i = 0; i < LANES; i++) ((float *)&sink)[i] = args->sink[t->head + (m + i) % PACK];
    sink = larger(splat(NEVER), sink * LOG2E);
    vec most = larger(sink, top);
    share = exp2_vec(top - most);
    sum = sum * share + exp2_vec(sink - most);
    top = most;
//@ end
    ivec some = sum != 0.0f;
    vec factor = keep(share / sum, some);
    vec lse = choose(some, top * LN2 + log_vec(sum), splat(-__builtin_inff()));
    for (int i = 0; i < rows; i++) {
      sw_int64 row = t->row + (m + i) / PACK, head = t->head + (m + i) % PACK;
      *float_at(&args->lse, row, head, t->b) = ((float *)&lse)[i];
    }
    for (int d = 0; d < HEAD_DIM_V; d += ABREAST * LANES * STEP) {
      for (int v = 0; v < ABREAST; v++) {
        int at = out_start(d + v * LANES * STEP);
        for (int i = 0; i < LANES; i++) {
          const float *o = t->out + (at + i * STEP) * ROWS + m;
          store(square + i * LANES, join(load(o) * factor, load(o + (STEP - 1) * ROWS) * factor));
        }
        transpose(lines + v * LANES, ABREAST * LANES, square, LANES);
      }
      for (int i = 0; i < rows; i++) {
        sw_int64 row = t->row + (m + i) / PACK, head = t->head + (m + i) % PACK;
        elem *to = (elem *)elem_at(&args->out, row, head, t->b);
        for (int v = 0; v < ABREAST; v++)
          store_words(to, out_start(d + v * LANES * STEP),
                      load(lines + (i * ABREAST + v) * LANES));
      }
    }
  }
}

// The item's largest scores, one for each query head of the key head.
INLINE float *item_max_logits(const struct tile *t) {
  const struct sw_attention_args *args = t->args;
  sw_int64 unit = t->unit - args->units;
  return args->max_logits + ((unit * args->batch + t->b) * args->kv_heads + t->h) * GQA;
}

// They grow to the tile's.  (Lanes past the last query repeat it, so all lanes may count.)
OUTLINE void raise_max_logits(const struct tile *t) {
  float *max_logits = item_max_logits(t) + (t->head - t->h * GQA);
  for (int m = 0; m < ROWS; m++) {
    float most = ((const float *)t->most)[m], *so_far = max_logits + m % PACK;
    if (most > LOWEST && most * LN2 > *so_far) *so_far = most * LN2;
  }
}

// ---- a strip ------------------------------------------------------------------------------------

// Tile `n` of a unit: the groups of heads of its first positions, then those of the next.
INLINE sw_int64 tile_token(sw_int64 n) { return n / GROUPS * TILE_TOKENS; }
INLINE sw_int64 tile_head(const struct tile *t, sw_int64 n) {
  return t->h * GQA + n % GROUPS * PACK;
}
INLINE int tile_tokens(const struct tile *t, sw_int64 n) {
  sw_int64 left = t->unit->tokens - tile_token(n);
  return (int)(left < 0 ? 0 : left < TILE_TOKENS ? left : TILE_TOKENS);
}

// Starts tile `n`; `t` has the item's members already.
static void start_tile(struct tile *t, sw_int64 n) {
  t->head = tile_head(t, n);
  t->position = t->unit->position + tile_token(n);
  t->row = t->unit->row + tile_token(n);
  t->tokens = tile_tokens(t, n);
  t->next_head = tile_head(t, n + STRIP);
  t->next_row = t->unit->row + tile_token(n + STRIP);
  t->next_tokens = tile_tokens(t, n + STRIP);
  for (int m = 0; m < ROWS; m++) ((int *)t->lane_token)[m] = token_of(t, m);
  for (int v = 0; v < VECTORS; v++) t->top[v] = t->most[v] = splat(LOWEST), t->sum[v] = splat(0);
  t->started = t->asked = 0;
  load_queries(t);
}

static void forward_strip(struct tile *tiles, int count, struct workspace *w) {
  const struct tile *first = &tiles[0], *last = &tiles[count - 1];
  const struct sw_attention_args *args = first->args;
  int tokens = (int)(last->position - first->position) + last->tokens;
  struct positions seen =
    overlap(keys_of_some(first->position, tokens), unit_keys(args, first->unit));
  while (seen.begin < seen.end) {
    sw_int64 number = seen.begin / BLOCK_K, slot = number % w->slots;
    struct positions here = overlap(seen, (struct positions){ 0, (number + 1) * BLOCK_K });
    struct block *block = w->blocks + slot;
    float *k = w->k + slot * BLOCK_K * K_STRIDE, *v = w->v + slot * BLOCK_K / STEP * V_STRIDE;
    if (block->number != number)
      PACK_WORDS(block, k, K_STRIDE, v, V_STRIDE / STEP, args, first->unit, number, first->b,
                 first->h);
    for (struct tile *t = tiles; t < tiles + count && block->covered_keys; t++) {
      struct positions its = overlap(here, keys_of_some(t->position, t->tokens));
      if (its.begin < its.end)
        attend_block(t, w, block, k, v, its, keys_of_all(t->position, t->tokens));
    }
    seen.begin = here.end;
  }
  for (struct tile *t = tiles; t < tiles + count; t++) {
    if (!t->started) __builtin_memset(t->out, 0, sizeof(float) * O_ROWS * ROWS);
    store_tile(t);
    if (args->max_logits) raise_max_logits(t);
  }
}

static void forward_item(struct workspace *w, const struct sw_attention_args *args,
                         sw_int64 item) {
  struct tile tiles[STRIP];
  for (int i = 0; i < STRIP; i++) {
    struct tile *t = &tiles[i];
    t->args = args;
    t->h = item % args->kv_heads;
    t->b = item / args->kv_heads % args->batch;
    t->unit = args->units + item / args->kv_heads / args->batch;
    t->factor = SOFTCAP ? args->scale / args->softcap : args->scale * LOG2E;
    t->q = w->q + i * Q_ROWS * ROWS;
    t->out = w->out + i * O_ROWS * ROWS;
  }
  forget_blocks(w->blocks, w->slots);
  for (int head = 0; args->max_logits && head < GQA; head++)
    item_max_logits(&tiles[0])[head] = -__builtin_inff();
  sw_int64 count = (tiles[0].unit->tokens + TILE_TOKENS - 1) / TILE_TOKENS * GROUPS;
  for (sw_int64 n = 0; n < count; n += STRIP) {
    int here = count - n < STRIP ? (int)(count - n) : STRIP;
    for (int i = 0; i < here; i++) start_tile(&tiles[i], n + i);
    forward_strip(tiles, here, w);
  }
}

void forward(const struct sw_attention_args *args, sw_int64 begin, sw_int64 end, void *workspace) {
  struct workspace w;
  cut_workspace(&w, workspace, args->max_keys);
  for (sw_int64 item = begin; item < end; item++) forward_item(&w, args, item);
  if (STREAM) stream_end();
}
