// reference.c: naive attention in double, row by row over the whole sequence: the oracle that
// `run --check`, tuning and the tests compare with.  It stands beside the way of the data and knows
// no kernel, sharding, halo or target: a key is visible by its position in its document, by nothing
// else.
//
// Work per row is proportional to what the window sees.  Inner loops run over LANES independent
// doubles, so that a compiler vectorises them without being allowed to reorder sums.
#include "problem.h"

#include <assert.h>
#include <math.h>

// At -O2, GCC leaves such loops as they are: half the speed.
#if defined(__OPTIMIZE__) && !defined(__clang__)
#pragma GCC optimize("O3")
#endif

enum {
  MOST_DIM = 256,  // head dims that swathe_problem_check lets through
  LANES = 8,       // doubles added independently; rows are zero-filled up to a multiple
  KEYS = 16,       // keys widened to double at a time ...
  HEADS = 16,      // ... for at most so many query heads that share them
};

// Tokens [begin, end) of the packed row.
struct range { int64_t begin, end; };

// ---- The mask ----------------------------------------------------------------------------------

static int64_t document_begin(const struct swathe_sequence *sequence, int64_t document)
{
  return sequence->document_starts_padded ? sequence->document_starts_padded[document]
                                          : sequence->document_starts[document];
}

// The document that holds `token`; empty when the token is padding.
static struct range document_around(const struct swathe_sequence *sequence, int64_t token)
{
  if (!sequence->documents) return (struct range){ 0, sequence->tokens };

  // `low` becomes the last document that begins at or before `token`.
  int64_t low = 0, high = sequence->documents;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (document_begin(sequence, middle) <= token) low = middle;
    else high = middle;
  }
  const int64_t begin = document_begin(sequence, low);
  const int64_t tokens = sequence->document_starts[low + 1] - sequence->document_starts[low];
  if (token < begin || token >= begin + tokens) return (struct range){ token, token };
  return (struct range){ begin, begin + tokens };
}

// Tokens of the same document from `before` ahead of `token` to `after` behind it, itself included.
static struct range neighbours(const struct swathe_sequence *sequence, int64_t token,
                               int64_t before, int64_t after)
{
  const struct range document = document_around(sequence, token);
  if (document.begin == document.end) return document;
  return (struct range){
    .begin = before < token - document.begin ? token - before : document.begin,
    .end = after < document.end - 1 - token ? token + after + 1 : document.end,
  };
}

static struct range keys_of_query(const struct swathe_problem *problem,
                                  const struct swathe_sequence *sequence, int64_t token)
{
  return neighbours(sequence, token, problem->window_left, problem->window_right);
}

static struct range queries_of_key(const struct swathe_problem *problem,
                                   const struct swathe_sequence *sequence, int64_t token)
{
  return neighbours(sequence, token, problem->window_right, problem->window_left);
}

void swathe_reference_seen_by(const struct swathe_problem *problem,
                              const struct swathe_sequence *sequence, int64_t token, int64_t *begin,
                              int64_t *end)
{
  const struct range queries = queries_of_key(problem, sequence, token);
  *begin = queries.begin;
  *end = queries.end;
}

// ---- Rows of doubles ---------------------------------------------------------------------------

// `dims` floats as doubles, zero-filled to a multiple of LANES.
static void widen(const float *row, int dims, double *restrict wide)
{
  int d = 0;
  for (; d < dims; d++) wide[d] = row[d];
  for (; d % LANES; d++) wide[d] = 0;
}

static double dot(const double *restrict a, const double *restrict b, int dims)
{
  double sum[LANES] = { 0 };
  for (int d = 0; d < dims; d += LANES)
    for (int lane = 0; lane < LANES; lane++) sum[lane] += a[d + lane] * b[d + lane];
  return ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
}

// sum += factors[0] * rows[0] + factors[1] * rows[1] + ...
static void add_scaled(double *restrict sum, const double *restrict factors,
                       double (*restrict rows)[MOST_DIM], int count, int dims)
{
  for (int d = 0; d < dims; d += LANES) {
    double part[LANES];
    for (int lane = 0; lane < LANES; lane++) part[lane] = sum[d + lane];
    for (int j = 0; j < count; j++)
      for (int lane = 0; lane < LANES; lane++) part[lane] += factors[j] * rows[j][d + lane];
    for (int lane = 0; lane < LANES; lane++) sum[d + lane] = part[lane];
  }
}

static int at_most(int64_t count, int most)
{
  return count < most ? (int)count : most;
}

// ---- Reading the sequence ----------------------------------------------------------------------

// What one call works on.
struct oracle {
  const struct swathe_problem *problem;
  const struct swathe_sequence *sequence;
  int64_t batch;
  int sharing;   // query heads of one key head
  double scale;  // on q.k
};

static struct oracle oracle_of(const struct swathe_problem *problem,
                               const struct swathe_sequence *sequence, int64_t batch)
{
  assert(problem->head_dim_qk <= MOST_DIM && problem->head_dim_v <= MOST_DIM);
  return (struct oracle){
    .problem = problem,
    .sequence = sequence,
    .batch = batch,
    .sharing = problem->q_heads / problem->kv_heads,
    .scale = sw_problem_scale(problem),
  };
}

// Index of (token, head) among the batch's rows of an array with `heads` heads.
static int64_t row_index(const struct oracle *oracle, int64_t token, int heads, int head)
{
  return (oracle->batch * oracle->sequence->tokens + token) * heads + head;
}

static void load_q(const struct oracle *oracle, int64_t token, int head, double *wide)
{
  const int dims = oracle->problem->head_dim_qk;
  const int64_t row = row_index(oracle, token, oracle->problem->q_heads, head);
  widen(oracle->sequence->q + row * dims, dims, wide);
}

static void load_dout(const struct oracle *oracle, int64_t token, int head, double *wide)
{
  const int dims = oracle->problem->head_dim_v;
  const int64_t row = row_index(oracle, token, oracle->problem->q_heads, head);
  widen(oracle->sequence->dout + row * dims, dims, wide);
}

// Keys and values of one head, `count` tokens from `token` on.
struct keys {
  double k[KEYS][MOST_DIM], v[KEYS][MOST_DIM];
  int count;
};

static void load_keys(const struct oracle *oracle, struct range range, int head, struct keys *keys)
{
  const int dims_qk = oracle->problem->head_dim_qk, dims_v = oracle->problem->head_dim_v;

  keys->count = at_most(range.end - range.begin, KEYS);
  for (int j = 0; j < keys->count; j++) {
    const int64_t row = row_index(oracle, range.begin + j, oracle->problem->kv_heads, head);
    widen(oracle->sequence->k + row * dims_qk, dims_qk, keys->k[j]);
    widen(oracle->sequence->v + row * dims_v, dims_v, keys->v[j]);
  }
}

// How many heads from `head` on share one key head, at most HEADS.
static int heads_together(const struct oracle *oracle, int head)
{
  return at_most((head / oracle->sharing + 1) * oracle->sharing - head, HEADS);
}

static double score_of(const struct oracle *oracle, const double *q, const double *k)
{
  const double softcap = oracle->problem->softcap;
  const double score = oracle->scale * dot(q, k, oracle->problem->head_dim_qk);
  return softcap > 0 ? softcap * tanh(score / softcap) : score;
}

// ---- Forward -----------------------------------------------------------------------------------

// One query head's softmax so far: `sum` and `out` are relative to exp(top).
struct softmax {
  double q[MOST_DIM], out[MOST_DIM];
  double top, sum;
};

// A sink is a key without a value: it opens the softmax.  No sink is one of -inf, which the first
// key shrinks to nothing.
static void open_softmax(const struct oracle *oracle, int64_t token, int head, struct softmax *row)
{
  load_q(oracle, token, head, row->q);
  for (int d = 0; d < MOST_DIM; d++) row->out[d] = 0;
  row->top = oracle->problem->sinks ? (double)oracle->sequence->sink[head] : -INFINITY;
  row->sum = 1;
}

static void absorb_keys(const struct oracle *oracle, struct keys *keys, struct softmax *row)
{
  const int dims_v = oracle->problem->head_dim_v;
  double scores[KEYS], weights[KEYS], top = row->top;

  for (int j = 0; j < keys->count; j++) {
    scores[j] = score_of(oracle, row->q, keys->k[j]);
    if (!(scores[j] <= top)) top = scores[j];
  }
  const double shrink = exp(row->top - top);
  for (int d = 0; d < dims_v; d++) row->out[d] *= shrink;
  row->sum *= shrink;
  row->top = top;
  for (int j = 0; j < keys->count; j++) row->sum += weights[j] = exp(scores[j] - top);
  add_scaled(row->out, weights, keys->v, keys->count, dims_v);
}

// Writes out [head_dim_v] and lse; returns the sum of out * dout (0 without dout).
static double close_softmax(const struct softmax *row, int dims_v, const double *dout, double *out,
                            double *lse)
{
  double delta = 0;
  for (int d = 0; d < dims_v; d++) {
    out[d] = row->out[d] / row->sum;
    if (dout) delta += out[d] * dout[d];
  }
  *lse = row->top + log(row->sum);
  return delta;
}

void swathe_reference_query(const struct swathe_problem *problem,
                            const struct swathe_sequence *sequence, int64_t batch, int64_t token,
                            double *out, double *lse, double *delta)
{
  const struct oracle oracle = oracle_of(problem, sequence, batch);
  const struct range visible = keys_of_query(problem, sequence, token);
  const int q_heads = problem->q_heads, dims_v = problem->head_dim_v;
  struct softmax rows[HEADS];
  struct keys keys;
  double dout[MOST_DIM];

  if (visible.begin == visible.end) {  // padding: a token of a document sees at least itself
    for (int64_t i = 0; i < (int64_t)q_heads * dims_v; i++) out[i] = 0;
    for (int head = 0; head < q_heads; head++) lse[head] = -INFINITY;
    for (int head = 0; delta && head < q_heads; head++) delta[head] = 0;
    return;
  }
  for (int head = 0, heads; head < q_heads; head += heads) {
    heads = heads_together(&oracle, head);
    for (int h = 0; h < heads; h++) open_softmax(&oracle, token, head + h, &rows[h]);
    for (struct range left = visible; left.begin < left.end; left.begin += KEYS) {
      load_keys(&oracle, left, head / oracle.sharing, &keys);
      for (int h = 0; h < heads; h++) absorb_keys(&oracle, &keys, &rows[h]);
    }
    for (int h = head; h < head + heads; h++) {
      if (delta) load_dout(&oracle, token, h, dout);
      const double sum = close_softmax(&rows[h - head], dims_v, delta ? dout : NULL,
                                       out + (int64_t)h * dims_v, &lse[h]);
      if (delta) delta[h] = sum;
    }
  }
}

// ---- Backward ----------------------------------------------------------------------------------

// One query head of one token.
struct query {
  double q[1][MOST_DIM], dout[1][MOST_DIM];
  double lse, delta;
  double dq[MOST_DIM];
};

static void load_query(const struct oracle *oracle, const double *lse, const double *delta,
                       int64_t token, int head, struct query *query)
{
  const int64_t row = row_index(oracle, token, oracle->problem->q_heads, head);
  load_q(oracle, token, head, query->q[0]);
  load_dout(oracle, token, head, query->dout[0]);
  query->lse = lse[row];
  query->delta = delta[row];
}

// The loss's gradient by q.k; `weight` is what the softmax gave this key.
static double score_gradient(const struct oracle *oracle, const struct query *query,
                             const double *k, const double *v, double *weight)
{
  const double softcap = oracle->problem->softcap;
  const double score = score_of(oracle, query->q[0], k);
  const double bend = softcap > 0 ? 1 - (score / softcap) * (score / softcap) : 1;  // tanh'
  *weight = exp(score - query->lse);
  const double dweight = dot(query->dout[0], v, oracle->problem->head_dim_v);
  return *weight * (dweight - query->delta) * bend * oracle->scale;
}

void swathe_reference_dq(const struct swathe_problem *problem,
                         const struct swathe_sequence *sequence, const double *lse,
                         const double *delta, int64_t batch, int64_t token, double *dq,
                         double *dsink)
{
  const struct oracle oracle = oracle_of(problem, sequence, batch);
  const struct range visible = keys_of_query(problem, sequence, token);
  const int dims_qk = problem->head_dim_qk;
  double gradients[KEYS], weight;
  struct query queries[HEADS];
  struct keys keys;

  for (int64_t i = 0; i < (int64_t)problem->q_heads * dims_qk; i++) dq[i] = 0;
  if (visible.begin == visible.end) return;
  for (int head = 0, heads; head < problem->q_heads; head += heads) {
    heads = heads_together(&oracle, head);
    for (int h = 0; h < heads; h++) {
      load_query(&oracle, lse, delta, token, head + h, &queries[h]);
      for (int d = 0; d < MOST_DIM; d++) queries[h].dq[d] = 0;
    }
    for (struct range left = visible; left.begin < left.end; left.begin += KEYS) {
      load_keys(&oracle, left, head / oracle.sharing, &keys);
      for (int h = 0; h < heads; h++) {
        for (int j = 0; j < keys.count; j++)
          gradients[j] = score_gradient(&oracle, &queries[h], keys.k[j], keys.v[j], &weight);
        add_scaled(queries[h].dq, gradients, keys.k, keys.count, dims_qk);
      }
    }
    for (int h = 0; h < heads; h++) {
      for (int d = 0; d < dims_qk; d++) dq[(int64_t)(head + h) * dims_qk + d] = queries[h].dq[d];
      if (problem->sinks && dsink)
        dsink[head + h] -= exp(sequence->sink[head + h] - queries[h].lse) * queries[h].delta;
    }
  }
}

void swathe_reference_dkv(const struct swathe_problem *problem,
                          const struct swathe_sequence *sequence, const double *lse,
                          const double *delta, int64_t batch, int64_t token, double *dk, double *dv)
{
  const struct oracle oracle = oracle_of(problem, sequence, batch);
  const struct range readers = queries_of_key(problem, sequence, token);
  const int dims_qk = problem->head_dim_qk, dims_v = problem->head_dim_v, sharing = oracle.sharing;
  struct query query;
  struct keys keys;

  for (int kv_head = 0; kv_head < problem->kv_heads; kv_head++) {
    double dk_sum[MOST_DIM] = { 0 }, dv_sum[MOST_DIM] = { 0 };

    load_keys(&oracle, (struct range){ token, token + 1 }, kv_head, &keys);
    for (int64_t reader = readers.begin; reader < readers.end; reader++)
      for (int head = kv_head * sharing; head < (kv_head + 1) * sharing; head++) {
        double weight;
        load_query(&oracle, lse, delta, reader, head, &query);
        const double gradient = score_gradient(&oracle, &query, keys.k[0], keys.v[0], &weight);
        add_scaled(dk_sum, &gradient, query.q, 1, dims_qk);
        add_scaled(dv_sum, &weight, query.dout, 1, dims_v);
      }
    for (int d = 0; d < dims_qk; d++) dk[(int64_t)kv_head * dims_qk + d] = dk_sum[d];
    for (int d = 0; d < dims_v; d++) dv[(int64_t)kv_head * dims_v + d] = dv_sum[d];
  }
}
