// driver.c: runs one emitted forward and one emitted backward kernel on whatever processor they
// were compiled for, and compares with attention and its gradients by definition, in double.  It is
// linked with both kernels and needs nothing of the library, so it runs where that was not built.
//
//   driver GQA HEAD_DIM_QK HEAD_DIM_V WINDOW_LEFT WINDOW_RIGHT BF16 SINKS SOFTCAP
//
// A window below 0 is unlimited.  Prints the largest error of each output; exit 1 if any is too
// large.
#include "kernel_abi.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

sw_attention_kernel forward, backward;
sw_workspace_query forward_workspace, backward_workspace;
sw_gather_kernel gather;
extern const sw_int64 backward_final_keys;

// ---- The work: one document with holes, four units ---------------------------------------------

enum {
  BATCH = 2,
  KV_HEADS = 2,
  KEYS = 160,          // of the document
  RUN_KEYS = 33,       // runs are cut here, and at holes
  UNITS = 4,
  ROWS = 120,          // of q and what lies beside it; some belong to no unit
  MOST_RUNS = UNITS * KEYS,
};

// What no kernel may read or leave behind: a NaN as float and as bfloat16.
enum { POISON = 0xff };

// Document positions are far from 0, so that none fits 32 bits.
static const sw_int64 first_position = 5000000000;

// Position from first_position, tokens, row.  Some queries of the third unit see only holes.
static const sw_int64 unit_table[UNITS][3] = {
  { 0, 1, 1 }, { 1, 37, 2 }, { 70, 50, 41 }, { 142, 18, 100 },
};

// Whether the document has a key there; its memory is poisoned where not.
static bool present(long key)
{
  return !((key >= 20 && key < 24) || (key >= 55 && key < 88) || key == 110);
}

// ---- The problem -------------------------------------------------------------------------------

static struct {
  long gqa, head_dim_qk, head_dim_v, window_left, window_right;
  bool bf16, sinks;
  double softcap;  // 0: off
  long heads;
  double scale;
} problem;

static bool visible(long query, long key)
{
  return present(key) && (problem.window_left < 0 || key >= query - problem.window_left) &&
         (problem.window_right < 0 || key <= query + problem.window_right);
}

// ---- Tensors -----------------------------------------------------------------------------------

static void *poisoned(size_t bytes)
{
  void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
  if (!memory) exit(2);
  return memset(memory, POISON, bytes);
}

struct tensor {
  struct sw_view view;
  size_t bytes;
  bool halves;  // bfloat16
};

// [BATCH][rows][heads][dim], or with heads before rows.
static struct tensor make(long rows, long heads, long dim, bool halves, bool heads_first)
{
  struct tensor t = { .halves = halves };
  t.bytes = (size_t)(BATCH * rows * heads * dim) * (halves ? 2 : 4);
  t.view = (struct sw_view){ .data = poisoned(t.bytes),
                             .token = heads_first ? dim : heads * dim,
                             .head = heads_first ? rows * dim : dim,
                             .batch = rows * heads * dim };
  return t;
}

static long place(const struct tensor *t, long b, long row, long head)
{
  return (long)(b * t->view.batch + row * t->view.token + head * t->view.head);
}

static double get(const struct tensor *t, long index)
{
  if (!t->halves) return (double)((const float *)t->view.data)[index];
  const unsigned bits = (unsigned)((const unsigned short *)t->view.data)[index] << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return (double)value;
}

static void put(struct tensor *t, long index, double value)
{
  const float single = (float)value;
  if (!t->halves) {
    ((float *)t->view.data)[index] = single;
    return;
  }
  unsigned bits;
  memcpy(&bits, &single, sizeof bits);
  bits += 0x7fff + (bits >> 16 & 1);
  ((unsigned short *)t->view.data)[index] = (unsigned short)(bits >> 16);
}

// About normal, the same on every machine.
static double random_value(void)
{
  static unsigned state = 1;
  double sum = 0;
  for (int i = 0; i < 4; i++) {
    state = state * 1664525u + 1013904223u;
    sum += (double)(state >> 8) / 16777216.0 - 0.5;
  }
  return sum * 1.7;
}

static void fill(struct tensor *t, long row, long heads, long dim)
{
  for (long b = 0; b < BATCH; b++)
    for (long h = 0; h < heads; h++)
      for (long d = 0; d < dim; d++) put(t, place(t, b, row, h) + d, random_value());
}

static struct {
  struct tensor q, k, v, dout, out, lse, dq, dk, dv;
  float *sink, *dsink, *max_logits;  // [heads], [UNITS][BATCH][heads] twice
  struct sw_unit units[UNITS];
  struct sw_run runs[MOST_RUNS];
  long run_count;
  sw_int64 max_keys;
} work;

static void make_tensors(void)
{
  const bool halves = problem.bf16;
  const long heads = problem.heads, qk = problem.head_dim_qk, v = problem.head_dim_v;
  work.q = make(ROWS, heads, qk, halves, false);
  work.dq = make(ROWS, heads, qk, halves, true);
  work.out = make(ROWS, heads, v, halves, false);
  work.dout = make(ROWS, heads, v, halves, true);
  work.lse = make(ROWS, heads, 1, false, true);
  work.k = make(KEYS, KV_HEADS, qk, halves, false);
  work.v = make(KEYS, KV_HEADS, v, halves, true);
  work.dk = make(KEYS, KV_HEADS, qk, halves, true);
  work.dv = make(KEYS, KV_HEADS, v, halves, false);
  work.sink = poisoned(sizeof(float) * (size_t)heads);
  work.dsink = poisoned(sizeof(float) * (size_t)(UNITS * BATCH * heads));
  work.max_logits = poisoned(sizeof(float) * (size_t)(UNITS * BATCH * heads));

  static const float sinks[] = { 0.5f, -1e4f, 3, 30, -2 };
  for (long h = 0; h < heads; h++) work.sink[h] = sinks[h % 5];
  for (long u = 0; u < UNITS; u++)
    for (long t = 0; t < unit_table[u][1]; t++) {
      fill(&work.q, (long)unit_table[u][2] + t, heads, qk);
      fill(&work.dout, (long)unit_table[u][2] + t, heads, v);
    }
  for (long j = 0; j < KEYS; j++) {
    if (!present(j)) continue;
    fill(&work.k, j, KV_HEADS, qk);
    fill(&work.v, j, KV_HEADS, v);
  }
}

// Where key `key` of a tensor lies.
static struct sw_view from_key(const struct tensor *t, long key)
{
  struct sw_view view = t->view;
  view.data = (char *)view.data + key * view.token * (t->halves ? 2 : 4);
  return view;
}

static bool sees(long unit, long key)
{
  const long first = (long)unit_table[unit][0], last = first + (long)unit_table[unit][1] - 1;
  for (long i = first; i <= last; i++)
    if (visible(i, key)) return true;
  return false;
}

// Whether one unit alone has sums for the key, so that its run may be final.
static bool alone(long key)
{
  long units = 0;
  for (long u = 0; u < UNITS; u++) units += sees(u, key);
  return units == 1;
}

static void make_units(void)
{
  for (long u = 0; u < UNITS; u++) {
    struct sw_unit *unit = &work.units[u];
    sw_int64 keys = 0;
    unit->position = first_position + unit_table[u][0];
    unit->tokens = unit_table[u][1];
    unit->row = unit_table[u][2];
    unit->run_begin = work.run_count;
    for (long j = 0, end; j < KEYS; j = end) {
      for (end = j; end < KEYS && end - j < RUN_KEYS; end++)
        if (!sees(u, end) || alone(end) != alone(j)) break;
      if (end == j) {
        end = j + 1;
        continue;
      }
      work.runs[work.run_count++] = (struct sw_run){
        .position = first_position + j,
        .tokens = end - j,
        .k = from_key(&work.k, j),
        .v = from_key(&work.v, j),
        .dk = make(end - j, KV_HEADS, problem.head_dim_qk, false, false).view,
        .dv = make(end - j, KV_HEADS, problem.head_dim_v, false, true).view,
      };
      keys += end - j;
    }
    unit->run_end = work.run_count;
    if (keys > work.max_keys) work.max_keys = keys;
  }
  for (long r = 0; r < work.run_count && work.max_keys <= backward_final_keys; r++) {
    struct sw_run *run = &work.runs[r];
    const long key = (long)(run->position - first_position);
    if (!alone(key)) continue;
    run->final = true;
    run->dk = from_key(&work.dk, key);
    run->dv = from_key(&work.dv, key);
  }
}

// ---- By definition -----------------------------------------------------------------------------

// [UNITS][BATCH][heads] dsink and max_logits, the rest as the tensors of the same names.
static struct {
  double *out, *lse, *dq, *dk, *dv, *dsink, *max_logits;
} expected;

static double *zeros(size_t count)
{
  double *numbers = calloc(count, sizeof *numbers);
  if (!numbers) exit(2);
  return numbers;
}

static double dot(const struct tensor *x, long at_x, const struct tensor *y, long at_y, long dim)
{
  double sum = 0;
  for (long d = 0; d < dim; d++) sum += get(x, at_x + d) * get(y, at_y + d);
  return sum;
}

// One row of one head: query position `query` in `row`, unit `u`.
static void expect_row(long u, long b, long h, long query, long row)
{
  const long g = h / problem.gqa, unit_head = (u * BATCH + b) * problem.heads + h;
  const long q = place(&work.q, b, row, h), out = place(&work.out, b, row, h);
  const long dout = place(&work.dout, b, row, h), dq = place(&work.dq, b, row, h);
  const double sink = problem.sinks ? (double)work.sink[h] : -INFINITY;
  double score[KEYS], slope[KEYS], top = -INFINITY, sum = 0, delta = 0;

  for (long j = 0; j < KEYS; j++) {
    if (!visible(query, j)) continue;
    score[j] = problem.scale *
               dot(&work.q, q, &work.k, place(&work.k, b, j, g), problem.head_dim_qk);
    slope[j] = problem.scale;
    if (problem.softcap > 0) {
      const double bent = tanh(score[j] / problem.softcap);
      score[j] = problem.softcap * bent;
      slope[j] *= 1 - bent * bent;
    }
    top = fmax(top, score[j]);
  }
  expected.max_logits[unit_head] = fmax(expected.max_logits[unit_head], top);
  top = fmax(top, sink);
  if (top > -INFINITY) sum = exp(sink - top);
  for (long j = 0; j < KEYS; j++)
    if (visible(query, j)) sum += exp(score[j] - top);
  const double lse = sum > 0 ? top + log(sum) : -INFINITY;
  expected.lse[place(&work.lse, b, row, h)] = lse;

  for (long j = 0; j < KEYS; j++) {
    if (!visible(query, j)) continue;
    const long v = place(&work.v, b, j, g);
    const double p = exp(score[j] - lse);
    for (long d = 0; d < problem.head_dim_v; d++) expected.out[out + d] += p * get(&work.v, v + d);
    delta += p * dot(&work.dout, dout, &work.v, v, problem.head_dim_v);
  }
  if (problem.sinks) expected.dsink[unit_head] -= exp(sink - lse) * delta;

  for (long j = 0; j < KEYS; j++) {
    if (!visible(query, j)) continue;
    const long k = place(&work.k, b, j, g), v = place(&work.v, b, j, g);
    const long dk = place(&work.dk, b, j, g), dv = place(&work.dv, b, j, g);
    const double p = exp(score[j] - lse);
    const double ds =
        p * (dot(&work.dout, dout, &work.v, v, problem.head_dim_v) - delta) * slope[j];
    for (long d = 0; d < problem.head_dim_qk; d++) {
      expected.dq[dq + d] += ds * get(&work.k, k + d);
      expected.dk[dk + d] += ds * get(&work.q, q + d);
    }
    for (long d = 0; d < problem.head_dim_v; d++)
      expected.dv[dv + d] += p * get(&work.dout, dout + d);
  }
}

static void expect_all(void)
{
  const size_t rows = (size_t)(BATCH * ROWS * problem.heads), keys = BATCH * KEYS * KV_HEADS;
  const size_t unit_heads = (size_t)(UNITS * BATCH * problem.heads);
  expected.out = zeros(rows * (size_t)problem.head_dim_v);
  expected.lse = zeros(rows);
  expected.dq = zeros(rows * (size_t)problem.head_dim_qk);
  expected.dk = zeros(keys * (size_t)problem.head_dim_qk);
  expected.dv = zeros(keys * (size_t)problem.head_dim_v);
  expected.dsink = zeros(unit_heads);
  expected.max_logits = zeros(unit_heads);
  for (size_t i = 0; i < unit_heads; i++) expected.max_logits[i] = -INFINITY;

  for (long u = 0; u < UNITS; u++)
    for (long b = 0; b < BATCH; b++)
      for (long h = 0; h < problem.heads; h++)
        for (long t = 0; t < unit_table[u][1]; t++)
          expect_row(u, b, h, (long)unit_table[u][0] + t, (long)unit_table[u][2] + t);
}

// ---- The kernels -------------------------------------------------------------------------------

static bool failed;

// All at once, then one by one from the last: `result` must not show which.
static void launch(const char *name, sw_attention_kernel *kernel, sw_workspace_query *query,
                   const struct sw_attention_args *args, const struct tensor *result)
{
  const sw_int64 items = (sw_int64)UNITS * BATCH * KV_HEADS;
  void *workspace = poisoned((size_t)query(work.max_keys)), *once = poisoned(result->bytes);

  kernel(args, 0, items, workspace);
  memcpy(once, result->view.data, result->bytes);
  for (sw_int64 i = items; i-- > 0;) kernel(args, i, i + 1, workspace);
  if (memcmp(once, result->view.data, result->bytes)) {
    printf(" %s depends on the order of its items;", name);
    failed = true;
  }
  free(workspace);
  free(once);
}

static void run_kernels(void)
{
  const struct sw_attention_args args = {
    .units = work.units,
    .runs = work.runs,
    .batch = BATCH,
    .kv_heads = KV_HEADS,
    .max_keys = work.max_keys,
    .scale = (float)problem.scale,
    .softcap = (float)problem.softcap,
    .sink = work.sink,
    .q = work.q.view,
    .out = work.out.view,
    .lse = work.lse.view,
    .dout = work.dout.view,
    .dq = work.dq.view,
    .dsink = work.dsink,
    .max_logits = work.max_logits,
  };
  launch("forward", forward, forward_workspace, &args, &work.out);
  launch("backward", backward, backward_workspace, &args, &work.dq);
}

// Pieces of a few keys; every run that holds them is a term.  A piece ends where a run does.
static void run_gather(void)
{
  enum { PIECE_KEYS = 13 };
  static struct sw_sum sums[KEYS];
  static struct sw_term terms[KEYS * (MOST_RUNS + 1)];
  static float nothing[1024];  // every row needs a term, also where no unit looked
  sw_int64 count = 0, term_count = 0;
  for (sw_int64 row = 0, tokens; row < KEYS; row += tokens) {
    const sw_int64 begin = term_count;
    bool final = false;
    tokens = KEYS - row < PIECE_KEYS ? KEYS - row : PIECE_KEYS;
    terms[term_count++] = (struct sw_term){ { .data = nothing }, { .data = nothing } };
    for (long r = 0; r < work.run_count; r++) {
      const sw_int64 from = work.runs[r].position - first_position - row;
      const sw_int64 to = from + work.runs[r].tokens;
      if (from > 0 && from < tokens) tokens = from;
      if (to > 0 && to < tokens) tokens = to;
    }
    for (long r = 0; r < work.run_count; r++) {
      const struct sw_run *run = &work.runs[r];
      const sw_int64 from = row - (run->position - first_position);
      if (from < 0 || from >= run->tokens) continue;
      final = final || run->final;
      if (final) continue;
      struct sw_term *term = &terms[term_count++];
      *term = (struct sw_term){ run->dk, run->dv };
      term->dk.data = (float *)term->dk.data + from * term->dk.token;
      term->dv.data = (float *)term->dv.data + from * term->dv.token;
    }
    if (!final) sums[count++] = (struct sw_sum){ row, tokens, begin, term_count };
  }
  const struct sw_gather_args args = {
    .sums = sums,
    .terms = terms,
    .sum_count = count,
    .batch = BATCH,
    .kv_heads = KV_HEADS,
    .format = SW_SUMS_ELEM,
    .dk = work.dk.view,
    .dv = work.dv.view,
  };
  gather(&args, 0, BATCH * count, NULL);
}

// ---- The comparison ----------------------------------------------------------------------------

static void note(double *worst, double got, double wanted)
{
  const double error = got == wanted ? 0 : fabs(got - wanted) / fmax(1, fabs(wanted));
  if (isnan(error) || error > *worst) *worst = error;  // a NaN stays
}

static void judge(const char *name, double worst, double limit)
{
  printf(" %s %.1e", name, worst);
  if (worst <= limit) return;
  printf(" > %.0e", limit);
  failed = true;
}

// Rows of units equal `wanted`, all others are still poisoned.
static void compare_rows(const char *name, const struct tensor *t, const double *wanted, long dim,
                         double limit)
{
  double worst = 0;
  bool mine[ROWS] = { false }, touched = false;
  for (long u = 0; u < UNITS; u++)
    for (long i = 0; i < unit_table[u][1]; i++) mine[unit_table[u][2] + i] = true;
  for (long b = 0; b < BATCH; b++)
    for (long row = 0; row < ROWS; row++)
      for (long h = 0; h < problem.heads; h++)
        for (long d = 0; d < dim; d++) {
          const long index = place(t, b, row, h) + d;
          if (mine[row]) note(&worst, get(t, index), wanted[index]);
          else if (!isnan(get(t, index))) touched = true;
        }
  judge(name, worst, limit);
  if (!touched) return;
  printf(" and writes rows of no unit");
  failed = true;
}

static void compare_all(void)
{
  const double coarse = problem.bf16 ? 2e-2 : 1e-4;
  compare_rows("out", &work.out, expected.out, problem.head_dim_v, problem.bf16 ? 2e-2 : 2e-5);
  // where weights are rounded to bfloat16, a row's sum is of those
  compare_rows("lse", &work.lse, expected.lse, 1, problem.bf16 ? 1e-3 : 2e-5);
  compare_rows("dq", &work.dq, expected.dq, problem.head_dim_qk, coarse);

  double dk = 0, dv = 0, dsink = 0, max_logits = 0;
  for (long i = 0; i < BATCH * KEYS * KV_HEADS * problem.head_dim_qk; i++)
    note(&dk, get(&work.dk, i), expected.dk[i]);
  for (long i = 0; i < BATCH * KEYS * KV_HEADS * problem.head_dim_v; i++)
    note(&dv, get(&work.dv, i), expected.dv[i]);
  for (long i = 0; i < UNITS * BATCH * problem.heads; i++) {
    note(&max_logits, (double)work.max_logits[i], expected.max_logits[i]);
    if (problem.sinks) note(&dsink, (double)work.dsink[i], expected.dsink[i]);
  }
  judge("dk", dk, coarse);
  judge("dv", dv, coarse);
  if (problem.sinks) judge("dsink", dsink, coarse);
  judge("max", max_logits, 2e-5);
}

int main(int count, char **words)
{
  if (count != 9) return 2;
  problem.gqa = atol(words[1]);
  problem.head_dim_qk = atol(words[2]);
  problem.head_dim_v = atol(words[3]);
  problem.window_left = atol(words[4]);
  problem.window_right = atol(words[5]);
  problem.bf16 = atol(words[6]);
  problem.sinks = atol(words[7]);
  problem.softcap = atof(words[8]);
  problem.heads = KV_HEADS * problem.gqa;
  problem.scale = (double)(float)(1 / sqrt((double)problem.head_dim_qk));

  make_tensors();
  make_units();
  run_kernels();
  run_gather();
  expect_all();
  compare_all();
  printf("\n");
  return failed;
}
