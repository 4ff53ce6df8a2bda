// test_kernels_cuda.c: the CUDA kernels on their own, given units and runs that no sharding makes:
// keys in many short runs, here and there, some in memory of odd strides, and positions that no run
// holds.  The answers are worked out here, pair by pair, in double.
//
// Environment:
//   TEST_LIBCUDA     the driver, as a rule the emulated one; without it nothing runs
//   TEST_CACHE_DIR   a directory for compiled kernels that is kept, instead of a temporary one
//   TEST_SEED        of the scenes; default 1
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "layer.h"
#include "scratch.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))

enum { MOST_RUNS = 400, MOST_UNITS = 40, MOST_DIM = 256 };

static struct swathe_context *context;

// What these tests cannot do without.
static void need_cuda(void)
{
  struct sw_device_cuda_driver driver;
  struct sw_jit_nvrtc_state compiler;
  sw_jit_nvrtc_state(context->jit, &compiler);
  if (!getenv("TEST_LIBCUDA") || sw_device_cuda_look(&driver) || !driver.devices ||
      !*compiler.path)
    skip();
}

// ---- Numbers ------------------------------------------------------------------------------------

static uint64_t state_of_chance;

static uint32_t chance(uint32_t below)
{
  state_of_chance = state_of_chance * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
  return (uint32_t)((state_of_chance >> 33) % below);
}

static float normal(void)
{
  float sum = -6;
  for (int i = 0; i < 12; i++) sum += (float)chance(1 << 20) / (1 << 20);
  return sum;
}

static float float_of(uint32_t bits)
{
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

static uint32_t bits_of(float x)
{
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

static uint16_t narrow(float x, bool f16)
{
  if (f16) {
    const _Float16 half = (_Float16)x;
    uint16_t bits;
    memcpy(&bits, &half, sizeof bits);
    return bits;
  }
  const uint32_t bits = bits_of(x);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float widen(uint16_t bits, bool f16)
{
  if (f16) {
    _Float16 half;
    memcpy(&half, &bits, sizeof half);
    return (float)half;
  }
  return float_of((uint32_t)bits << 16);
}

// ---- Memory -------------------------------------------------------------------------------------

static void check(enum swathe_status status)
{
  if (status) fail_msg("%s", swathe_error());
}

static void *device_copy(const void *from, size_t bytes)
{
  void *memory;
  check(swathe_memory_allocate(context, SWATHE_CUDA, bytes ? bytes : 1, &memory));
  if (bytes) check(swathe_memory_write(context, SWATHE_CUDA, memory, from, bytes));
  return memory;
}

static void device_read(void *to, const void *from, size_t bytes)
{
  check(swathe_memory_read(context, SWATHE_CUDA, to, from, bytes));
}

static void device_free(void *memory) { swathe_memory_free(context, SWATHE_CUDA, memory); }

// An array here and there.  Poisoned all over, so that strays are seen.
struct twin {
  unsigned char *here;
  void *there;
  size_t bytes;
};

static struct twin make_twin(size_t bytes)
{
  struct twin twin = { malloc(bytes + 1), NULL, bytes };
  assert_non_null(twin.here);
  memset(twin.here, 0xff, bytes);
  return twin;
}
static void send(struct twin *twin) { twin->there = device_copy(twin->here, twin->bytes); }
static void drop(struct twin *twin)
{
  device_free(twin->there);
  free(twin->here);
}

// ---- Scenes -------------------------------------------------------------------------------------

struct scene_row {
  const char *problem, *config;  // config: changes to the default, "name=value,..."
  int tokens, documents, batch;
  int most_unit;                 // queries of a unit
  int gap;                       // elements between heads: where it is odd nothing is aligned
  bool holes;                    // positions that no run holds, and keys that nobody sees
};

// A tensor of [batch][rows][heads][dim] as the kernels see it.
struct tensor {
  struct twin twin;
  struct sw_view view;           // in elements; data is there
  int heads, dim;
  size_t elem_bytes;
};

struct scene {
  const struct scene_row *row;
  struct swathe_problem problem;
  bool f16;
  int rows;
  struct tensor q, out, dout, dq, k, v, lse;
  struct twin halo, sums, dk, dv, delta, dsink, sink;
  struct sw_unit units[MOST_UNITS];
  struct sw_run runs[MOST_RUNS];
  int document_of_unit[MOST_UNITS];
  int document_begin[8];         // row of position 0
  int unit_count, run_count;
  double *deltas;                // [batch][q_heads][rows]
  double *largest;               // scores, [unit][batch][q_heads]
};

static struct tensor make_tensor(const struct scene *scene, int heads, int dim, size_t elem_bytes)
{
  const int64_t head = dim + scene->row->gap, token = heads * head + (scene->row->gap ? 3 : 0);
  struct tensor t = { .heads = heads, .dim = dim, .elem_bytes = elem_bytes };
  t.view = (struct sw_view){ .token = token, .head = head, .batch = scene->rows * token };
  t.twin = make_twin((size_t)(scene->row->batch * t.view.batch) * elem_bytes);
  return t;
}

static size_t place(const struct sw_view *view, int64_t token, int64_t head, int64_t batch)
{
  return (size_t)(token * view->token + head * view->head + batch * view->batch);
}

static uint16_t *elems(const struct tensor *t, int64_t token, int64_t head, int64_t batch)
{
  return (uint16_t *)t->twin.here + place(&t->view, token, head, batch);
}

static void fill_normal(const struct scene *scene, struct tensor *t)
{
  for (int b = 0; b < scene->row->batch; b++)
    for (int row = 0; row < scene->rows; row++)
      for (int h = 0; h < t->heads; h++)
        for (int d = 0; d < t->dim; d++) elems(t, row, h, b)[d] = narrow(normal(), scene->f16);
}

static void send_tensor(struct tensor *t)
{
  send(&t->twin);
  t->view.data = t->twin.there;
}

// Room in a buffer that grows, as a view whose data is the offset.
static struct sw_view take_room(const struct scene *scene, size_t *used, int64_t tokens, int heads,
                                int dim, size_t elem_bytes)
{
  const int64_t gap = scene->row->gap ? (int64_t)chance(2) * 2 + 1 : 0;
  struct sw_view view = { .data = (void *)*used, .head = dim + gap };
  view.token = heads * view.head;
  view.batch = tokens * view.token;
  *used += (size_t)(scene->row->batch * view.batch) * elem_bytes;
  *used = (*used + 15) / 16 * 16;
  return view;
}

static void add_run(struct scene *scene, int64_t position, int64_t tokens)
{
  struct sw_run *run = &scene->runs[scene->run_count++];
  assert_true(scene->run_count < MOST_RUNS);
  *run = (struct sw_run){ .position = position,
                          .tokens = tokens,
                          .wire = chance(3) == 0,
                          .final = chance(2) };
}

// Cuts the keys that a unit sees into runs, some of which are left out.
static void add_runs(struct scene *scene, struct sw_unit *unit, int64_t document_tokens)
{
  const struct swathe_problem *p = &scene->problem;
  int64_t begin = 0, end = document_tokens;
  if (p->window_left != SWATHE_UNLIMITED && unit->position > p->window_left)
    begin = unit->position - p->window_left;
  if (p->window_right != SWATHE_UNLIMITED &&
      unit->position + unit->tokens + p->window_right < end)
    end = unit->position + unit->tokens + p->window_right;
  unit->run_begin = scene->run_count;
  if (scene->row->holes) begin -= begin < 90 ? begin : chance(90);
  while (begin < end) {
    int64_t tokens = chance(4) ? end - begin : 1 + chance((uint32_t)(end - begin));
    if (scene->row->holes) tokens = 1 + chance(tokens < 12 ? (uint32_t)tokens : 12);   // several
    if (!scene->row->holes || chance(3)) add_run(scene, begin, tokens);
    begin += tokens;
  }
  unit->run_end = scene->run_count;
}

static void add_units(struct scene *scene)
{
  const int length = scene->row->tokens / scene->row->documents;
  for (int document = 0; document < scene->row->documents; document++) {
    scene->document_begin[document] = 1 + document * (length + 1);  // a row without owner between
    for (int position = 0; position < length;) {
      struct sw_unit *unit = &scene->units[scene->unit_count];
      scene->document_of_unit[scene->unit_count++] = document;
      assert_true(scene->unit_count < MOST_UNITS);
      int tokens = 1 + (int)chance((uint32_t)scene->row->most_unit);
      if (tokens > length - position) tokens = length - position;
      *unit = (struct sw_unit){ .position = position,
                                .tokens = tokens,
                                .row = scene->document_begin[document] + position };
      add_runs(scene, unit, length);
      position += tokens;
    }
  }
}

// Gives every run its keys' place and room for their gradients.
static void place_runs(struct scene *scene)
{
  const struct swathe_problem *p = &scene->problem;
  size_t halo = 0, sums = 0, dk = 0, dv = 0;

  for (int u = 0; u < scene->unit_count; u++)
    for (int64_t r = scene->units[u].run_begin; r < scene->units[u].run_end; r++) {
      struct sw_run *run = &scene->runs[r];
      const int64_t row = scene->document_begin[scene->document_of_unit[u]] + run->position;
      run->k = scene->k.view;
      run->k.data = (void *)(place(&scene->k.view, row, 0, 0) * 2);
      run->v = scene->v.view;
      run->v.data = (void *)(place(&scene->v.view, row, 0, 0) * 2);
      if (run->wire) {
        run->k = take_room(scene, &halo, run->tokens, p->kv_heads, p->head_dim_qk, 2);
        run->v = take_room(scene, &halo, run->tokens, p->kv_heads, p->head_dim_v, 2);
      }
      run->dk = take_room(scene, run->final ? &dk : &sums, run->tokens, p->kv_heads,
                          p->head_dim_qk, run->final ? 2 : 4);
      run->dv = take_room(scene, run->final ? &dv : &sums, run->tokens, p->kv_heads,
                          p->head_dim_v, run->final ? 2 : 4);
    }
  scene->halo = make_twin(halo);
  scene->sums = make_twin(sums);
  scene->dk = make_twin(dk);
  scene->dv = make_twin(dv);
}

static void copy_keys(struct scene *scene, const struct tensor *from, const struct sw_view *to,
                      const struct sw_run *run, int64_t row)
{
  for (int b = 0; b < scene->row->batch; b++)
    for (int64_t j = 0; j < run->tokens; j++)
      for (int h = 0; h < from->heads; h++)
        memcpy(scene->halo.here + (size_t)to->data + 2 * place(to, j, h, b),
               elems(from, row + j, h, b), 2 * (size_t)from->dim);
}

// ---- Answers ------------------------------------------------------------------------------------

static bool sees(const struct swathe_problem *p, int64_t query, int64_t key)
{
  return (p->window_left == SWATHE_UNLIMITED || key >= query - p->window_left) &&
         (p->window_right == SWATHE_UNLIMITED || key <= query + p->window_right);
}

static double product(const struct scene *scene, const uint16_t *a, const uint16_t *b, int dim)
{
  double sum = 0;
  for (int d = 0; d < dim; d++)
    sum += (double)widen(a[d], scene->f16) * (double)widen(b[d], scene->f16);
  return sum;
}

// A query of one head and a key: the score, and its derivative by the product.
static double score(const struct swathe_problem *p, double dot, double *slope)
{
  const double x = dot * sw_problem_scale(p);
  *slope = sw_problem_scale(p);
  if (p->softcap <= 0) return x;
  const double t = tanh(x / p->softcap);
  *slope *= 1 - t * t;
  return p->softcap * t;
}

// lse, out and delta of one query of one head.
static void solve_query(struct scene *scene, const struct sw_unit *unit, int64_t i, int h, int b,
                        int64_t document)
{
  const struct swathe_problem *p = &scene->problem;
  const int64_t row = unit->row + i;
  const int kv = h / (p->q_heads / p->kv_heads);
  const float *sink = (const float *)scene->sink.here;
  double top = -INFINITY, most = top, sum = 0, out[MOST_DIM] = { 0 }, slope;

  for (int pass = 0; pass < 2; pass++) {
    if (pass) most = top;
    if (pass && p->sinks && (double)sink[h] > top) top = (double)sink[h];
    if (pass && p->sinks && isfinite(top)) sum = exp((double)sink[h] - top);
    for (int64_t r = unit->run_begin; r < unit->run_end; r++)
      for (int64_t j = 0; j < scene->runs[r].tokens; j++) {
        const int64_t key = scene->runs[r].position + j;
        if (!sees(p, unit->position + i, key)) continue;
        const uint16_t *k = elems(&scene->k, document + key, kv, b);
        const double s =
            score(p, product(scene, elems(&scene->q, row, h, b), k, p->head_dim_qk), &slope);
        if (!pass && s > top) top = s;
        if (!pass) continue;
        sum += exp(s - top);
        for (int d = 0; d < p->head_dim_v; d++)
          out[d] += exp(s - top) *
                    (double)widen(elems(&scene->v, document + key, kv, b)[d], scene->f16);
      }
  }
  const int64_t batches = scene->row->batch;
  double *largest = &scene->largest[((unit - scene->units) * batches + b) * p->q_heads + h];
  *largest = fmax(*largest, most);
  ((float *)scene->lse.twin.here)[place(&scene->lse.view, row, h, b)] =
      sum > 0 ? (float)(top + log(sum)) : -INFINITY;
  for (int d = 0; d < p->head_dim_v; d++)
    elems(&scene->out, row, h, b)[d] = narrow(sum > 0 ? (float)(out[d] / sum) : 0, scene->f16);
  scene->deltas[(b * p->q_heads + h) * scene->rows + row] = product(
      scene, elems(&scene->out, row, h, b), elems(&scene->dout, row, h, b), p->head_dim_v);
}

// P and dS of one pair.
static double weigh(const struct scene *scene, const struct sw_unit *unit, int64_t i, int64_t key,
                    int h, int b, int64_t document, double *ds)
{
  const struct swathe_problem *p = &scene->problem;
  const int64_t row = unit->row + i;
  const int kv = h / (p->q_heads / p->kv_heads);
  const float lse = ((const float *)scene->lse.twin.here)[place(&scene->lse.view, row, h, b)];
  double slope;
  const uint16_t *k = elems(&scene->k, document + key, kv, b);
  const double s =
      score(p, product(scene, elems(&scene->q, row, h, b), k, p->head_dim_qk), &slope);
  const double weight = exp(s - (double)lse);
  const double dp = product(scene, elems(&scene->dout, row, h, b),
                            elems(&scene->v, document + key, kv, b), p->head_dim_v);
  *ds = weight * (dp - scene->deltas[(b * p->q_heads + h) * scene->rows + row]) * slope;
  return weight;
}

static void expect_near(const char *what, double got, double want, double tolerance, int64_t at,
                        int h, int d)
{
  if (!(fabs(got - want) <= tolerance * fmax(1, fabs(want))))
    fail_msg("%s at %lld, head %d, dim %d: %g, not %g", what, (long long)at, h, d, got, want);
}

// A sum of products of weights with elements, and of their squares.
struct sum { double of, squares; };

static void add_product(struct sum *sum, double weight, double element)
{
  sum->of += weight * element;
  sum->squares += weight * element * weight * element;
}

// Weights are rounded to elements before they are multiplied: errors of up to `unit` of each term,
// which come to little more than their root mean square; then the result is rounded.  Scores that
// are far larger than their exponentials can tell apart get more.
static void expect_sum(const char *what, const struct scene *scene, double got, struct sum want,
                       int64_t at, int h, int d)
{
  const double unit = scene->f16 ? 0x1p-11 : 0x1p-8;
  const double scores = fabs(sw_problem_scale(&scene->problem)) *
                        sqrt(scene->problem.head_dim_qk);
  const double tolerance = 6 / sqrt(3) * unit * sqrt(want.squares) + unit * fabs(want.of) + 1e-4 +
                           (scores > 2 ? 2e-2 * scores * fmax(1, fabs(want.of)) : 0);
  if (!(fabs(got - want.of) <= tolerance))
    fail_msg("%s at %lld, head %d, dim %d: %g, not %g, within %g", what, (long long)at, h, d, got,
             want.of, tolerance);
}

static void check_dq(const struct scene *scene, int u, int b)
{
  const struct swathe_problem *p = &scene->problem;
  const struct sw_unit *unit = &scene->units[u];
  const int64_t document = scene->document_begin[scene->document_of_unit[u]];

  for (int64_t i = 0; i < unit->tokens; i++)
    for (int h = 0; h < p->q_heads; h++) {
      struct sum want[MOST_DIM] = { 0 };
      double ds;
      for (int64_t r = unit->run_begin; r < unit->run_end; r++)
        for (int64_t j = 0; j < scene->runs[r].tokens; j++) {
          const int64_t key = scene->runs[r].position + j;
          if (!sees(p, unit->position + i, key)) continue;
          weigh(scene, unit, i, key, h, b, document, &ds);
          const uint16_t *k = elems(&scene->k, document + key, h / (p->q_heads / p->kv_heads), b);
          for (int d = 0; d < p->head_dim_qk; d++)
            add_product(&want[d], ds, (double)widen(k[d], scene->f16));
        }
      const uint16_t *got = elems(&scene->dq, unit->row + i, h, b);
      for (int d = 0; d < p->head_dim_qk; d++)
        expect_sum("dq", scene, (double)widen(got[d], scene->f16), want[d], unit->row + i, h, d);
    }
}

// A gradient as the kernel left it.
static double gradient(const struct scene *scene, const struct twin *final,
                       const struct sw_view *view, bool is_final, int64_t j, int h, int b, int d)
{
  const size_t at = place(view, j, h, b) + (size_t)d;
  if (is_final)
    return (double)widen(((const uint16_t *)(final->here + (size_t)view->data))[at], scene->f16);
  return (double)((const float *)(scene->sums.here + (size_t)view->data))[at];
}

static void check_run(const struct scene *scene, int u, const struct sw_run *run, int b)
{
  const struct swathe_problem *p = &scene->problem;
  const struct sw_unit *unit = &scene->units[u];
  const int64_t document = scene->document_begin[scene->document_of_unit[u]];
  const int gqa = p->q_heads / p->kv_heads;

  for (int64_t j = 0; j < run->tokens; j++)
    for (int kv = 0; kv < p->kv_heads; kv++) {
      struct sum dk[MOST_DIM] = { 0 }, dv[MOST_DIM] = { 0 };
      double ds;
      for (int64_t i = 0; i < unit->tokens; i++) {
        if (!sees(p, unit->position + i, run->position + j)) continue;
        for (int h = kv * gqa; h < (kv + 1) * gqa; h++) {
          const double weight = weigh(scene, unit, i, run->position + j, h, b, document, &ds);
          const uint16_t *q = elems(&scene->q, unit->row + i, h, b);
          const uint16_t *dout = elems(&scene->dout, unit->row + i, h, b);
          for (int d = 0; d < p->head_dim_qk; d++)
            add_product(&dk[d], ds, (double)widen(q[d], scene->f16));
          for (int d = 0; d < p->head_dim_v; d++)
            add_product(&dv[d], weight, (double)widen(dout[d], scene->f16));
        }
      }
      for (int d = 0; d < p->head_dim_qk; d++)
        expect_sum("dk", scene, gradient(scene, &scene->dk, &run->dk, run->final, j, kv, b, d),
                   dk[d], run->position + j, kv, d);
      for (int d = 0; d < p->head_dim_v; d++)
        expect_sum("dv", scene, gradient(scene, &scene->dv, &run->dv, run->final, j, kv, b, d),
                   dv[d], run->position + j, kv, d);
    }
}

static void check_delta(const struct scene *scene)
{
  const struct swathe_problem *p = &scene->problem;
  const float *got = (const float *)scene->delta.here, *sink = (const float *)scene->sink.here;
  const float *dsink = (const float *)scene->dsink.here, *lse = (float *)scene->lse.twin.here;

  for (int u = 0; u < scene->unit_count; u++)
    for (int b = 0; b < scene->row->batch; b++)
      for (int h = 0; h < p->q_heads; h++) {
        double want = 0;
        for (int64_t i = 0; i < scene->units[u].tokens; i++) {
          const int64_t row = scene->units[u].row + i;
          const int64_t at = (b * p->q_heads + h) * scene->rows + row;
          expect_near("delta", (double)got[at], scene->deltas[at], 1e-4, row, h, 0);
          if (!p->sinks || isinf(sink[h])) continue;
          want -= exp((double)sink[h] - (double)lse[place(&scene->lse.view, row, h, b)]) *
                  scene->deltas[at];
        }
        if (p->sinks)
          expect_near("dsink", (double)dsink[(u * scene->row->batch + b) * p->q_heads + h], want,
                      1e-4, u, h, 0);
      }
}

// What lies between the elements of a written tensor is as it was.
static void check_untouched(const struct scene *scene, const struct tensor *t)
{
  unsigned char *bytes = t->twin.here;
  for (int u = 0; u < scene->unit_count; u++)
    for (int64_t i = 0; i < scene->units[u].tokens; i++)
      for (int b = 0; b < scene->row->batch; b++)
        for (int h = 0; h < t->heads; h++)
          memset(bytes + place(&t->view, scene->units[u].row + i, h, b) * t->elem_bytes, 0xff,
                 (size_t)t->dim * t->elem_bytes);
  for (size_t i = 0; i < t->twin.bytes; i++)
    if (bytes[i] != 0xff) fail_msg("byte %zu was written", i);
}

static void check_untouched_runs(const struct scene *scene, struct twin *twin, bool final)
{
  const struct swathe_problem *p = &scene->problem;
  for (int r = 0; r < scene->run_count; r++) {
    const struct sw_run *run = &scene->runs[r];
    if (final != (run->final != 0)) continue;
    for (int values = 0; values < 2; values++) {
      const struct sw_view *view = values ? &run->dv : &run->dk;
      if (final && twin != (values ? &scene->dv : &scene->dk)) continue;
      const size_t bytes = final ? 2 : 4;
      for (int b = 0; b < scene->row->batch; b++)
        for (int64_t j = 0; j < run->tokens; j++)
          for (int h = 0; h < p->kv_heads; h++)
            memset(twin->here + (size_t)view->data + place(view, j, h, b) * bytes, 0xff,
                   (size_t)(values ? p->head_dim_v : p->head_dim_qk) * bytes);
    }
  }
  for (size_t i = 0; i < twin->bytes; i++)
    if (twin->here[i] != 0xff) fail_msg("byte %zu beside the gradients was written", i);
}

// ---- Launches -----------------------------------------------------------------------------------

// The default config with some knobs changed.
static void change_config(char *config, const char *changes)
{
  char text[SW_CONFIG_TEXT], changed[2 * SW_CONFIG_TEXT] = "", *rest;
  snprintf(text, sizeof text, "%s", config);
  for (char *knob = strtok_r(text, ",", &rest); knob; knob = strtok_r(NULL, ",", &rest)) {
    const size_t name = strcspn(knob, "=") + 1;
    const char *change = changes;
    while (change && strncmp(change, knob, name)) {
      change = strchr(change, ',');
      if (change) change++;
    }
    const char *chosen = change ? change : knob;
    const size_t used = strlen(changed);
    snprintf(changed + used, sizeof changed - used, "%s%.*s", used ? "," : "",
             (int)strcspn(chosen, ","), chosen);
  }
  snprintf(config, SW_CONFIG_TEXT, "%s", changed);
}

static const struct sw_kernel *load_kernel(const struct swathe_problem *problem, const char *name,
                                           const char *changes, struct sw_aim *aim)
{
  const struct sw_kernel *kernel = NULL;
  char config[SW_CONFIG_TEXT] = "";

  check(sw_context_aim(context, problem, NULL, aim));
  if (strcmp(name, "copies")) {
    const enum swathe_direction direction =
        strcmp(name, "backward") ? SWATHE_FORWARD : SWATHE_BACKWARD;
    check(sw_context_config(context, problem, direction, aim, NULL, config));
    if (changes) change_config(config, changes);
  }
  const struct sw_kernel_wanted wanted = { problem, aim, name, config };
  check(sw_context_kernel(context, &wanted, &kernel));
  return kernel;
}

static void launch(struct sw_device_cuda *device, const struct sw_cuda_function *function,
                   int64_t blocks_x, int64_t blocks_y, const void *args)
{
  const struct sw_device_cuda_launch launch = { .name = function->name,
                                                .function = function->function,
                                                .blocks_x = blocks_x,
                                                .blocks_y = blocks_y,
                                                .threads = function->launch.threads,
                                                .shared_bytes = function->launch.shared_bytes,
                                                .args = args };
  check(sw_device_cuda_enter(device));
  check(sw_device_cuda_launch(device, &launch, NULL));
  check(sw_device_cuda_synchronize(device, NULL));
  sw_device_cuda_leave(device);
}

static int64_t tiles_of(const struct scene *scene, int u, int64_t tile, bool keys)
{
  const struct sw_unit *unit = &scene->units[u];
  int64_t tiles = keys ? 0 : (unit->tokens + tile - 1) / tile;
  for (int64_t r = unit->run_begin; keys && r < unit->run_end; r++)
    tiles += (scene->runs[r].tokens + tile - 1) / tile;
  return tiles;
}

// What is added to all positions there: which keys a query sees depends on none of it.  Some scenes
// lie so far into a document that 32 bits do not hold their positions.
static int64_t far_in(const struct scene *scene)
{
  return scene->row->batch > 1 ? INT64_C(5000000000) : 0;
}

static void *send_units(const struct scene *scene)
{
  struct sw_unit units[MOST_UNITS];
  memcpy(units, scene->units, sizeof units);
  for (int u = 0; u < scene->unit_count; u++) units[u].position += far_in(scene);
  return device_copy(units, sizeof *units * (size_t)scene->unit_count);
}

static void *send_runs(const struct scene *scene)
{
  static struct sw_run runs[MOST_RUNS];
  memcpy(runs, scene->runs, sizeof runs);
  for (int r = 0; r < scene->run_count; r++) runs[r].position += far_in(scene);
  return device_copy(runs, sizeof *runs * (size_t)scene->run_count);
}

// delta, dq and dkv; in two launches of dq and dkv, as a layer does.
static void run_kernels(struct scene *scene, const struct sw_kernel *kernel,
                        struct sw_device_cuda *device)
{
  const struct swathe_problem *p = &scene->problem;
  void *units = send_units(scene), *runs = send_runs(scene);
  struct sw_cuda_args args = {
    .attention = { .units = units, .runs = runs, .batch = scene->row->batch,
                   .kv_heads = p->kv_heads, .scale = (float)sw_problem_scale(p),
                   .softcap = (float)p->softcap, .sink = scene->sink.there, .q = scene->q.view,
                   .out = scene->out.view, .lse = scene->lse.view, .dout = scene->dout.view,
                   .dq = scene->dq.view, .dsink = scene->dsink.there },
    .k = scene->k.twin.there, .v = scene->v.twin.there, .halo = scene->halo.there,
    .sums = scene->sums.there, .dk = scene->dk.there, .dv = scene->dv.there,
    .delta = scene->delta.there, .rows = scene->rows,
  };
  const int64_t per_unit = scene->row->batch * p->kv_heads;
  const struct sw_cuda_function *delta = &kernel->functions[SW_CUDA_DELTA];
  launch(device, delta, scene->unit_count * per_unit, delta->launch.groups, &args);
  for (int keys = 0; keys < 2; keys++) {
    const struct sw_cuda_function *function =
        &kernel->functions[keys ? SW_CUDA_DKV : SW_CUDA_DQ];
    int begin = 0, half = (scene->unit_count + 1) / 2;
    for (int end = half; begin < end; begin = end, end = scene->unit_count) {
      int64_t most = 0;
      for (int u = begin; u < end; u++) {
        const int64_t tiles = tiles_of(scene, u, function->launch.tile_tokens, keys);
        if (tiles > most) most = tiles;
      }
      args.first_item = begin * per_unit;
      launch(device, function, (end - begin) * per_unit, most * function->launch.groups, &args);
    }
  }
  device_free(units);
  device_free(runs);
}

static struct scene *make_scene(const struct scene_row *row)
{
  struct scene *scene = calloc(1, sizeof *scene);
  assert_non_null(scene);
  scene->row = row;
  char text[512];
  snprintf(text, sizeof text, "target=cuda,%s", row->problem);
  swathe_problem_init(&scene->problem);
  check(swathe_problem_parse(text, &scene->problem));
  const struct swathe_problem *p = &scene->problem;
  scene->f16 = p->dtype == SWATHE_F16;
  scene->rows = row->tokens + row->documents + 2;
  add_units(scene);

  scene->q = make_tensor(scene, p->q_heads, p->head_dim_qk, 2);
  scene->dq = make_tensor(scene, p->q_heads, p->head_dim_qk, 2);
  scene->out = make_tensor(scene, p->q_heads, p->head_dim_v, 2);
  scene->dout = make_tensor(scene, p->q_heads, p->head_dim_v, 2);
  scene->k = make_tensor(scene, p->kv_heads, p->head_dim_qk, 2);
  scene->v = make_tensor(scene, p->kv_heads, p->head_dim_v, 2);
  scene->lse = make_tensor(scene, p->q_heads, 1, 4);
  fill_normal(scene, &scene->q);
  fill_normal(scene, &scene->k);
  fill_normal(scene, &scene->v);
  fill_normal(scene, &scene->dout);
  place_runs(scene);

  const size_t heads = (size_t)(row->batch * p->q_heads);
  scene->delta = make_twin(heads * (size_t)scene->rows * sizeof(float));
  scene->deltas = calloc(heads * (size_t)scene->rows, sizeof *scene->deltas);
  assert_non_null(scene->deltas);
  const size_t largest = heads * (size_t)scene->unit_count;
  scene->largest = calloc(largest, sizeof *scene->largest);
  assert_non_null(scene->largest);
  for (size_t i = 0; i < largest; i++) scene->largest[i] = -INFINITY;
  scene->dsink = make_twin(heads * (size_t)scene->unit_count * sizeof(float));
  scene->sink = make_twin((size_t)p->q_heads * sizeof(float));
  for (int h = 0; h < p->q_heads; h++)
    ((float *)scene->sink.here)[h] = h == 1 ? -INFINITY : normal();
  for (int u = 0; u < scene->unit_count; u++) {
    const int64_t document = scene->document_begin[scene->document_of_unit[u]];
    for (int64_t r = scene->units[u].run_begin; r < scene->units[u].run_end; r++) {
      const struct sw_run *run = &scene->runs[r];
      if (!run->wire) continue;
      copy_keys(scene, &scene->k, &run->k, run, document + run->position);
      copy_keys(scene, &scene->v, &run->v, run, document + run->position);
    }
    for (int64_t i = 0; i < scene->units[u].tokens; i++)
      for (int h = 0; h < p->q_heads; h++)
        for (int b = 0; b < row->batch; b++)
          solve_query(scene, &scene->units[u], i, h, b, document);
  }
  return scene;
}

static void check_scene(struct scene *scene)
{
  struct tensor *dq = &scene->dq;
  struct twin *read[] = { &dq->twin, &scene->sums, &scene->dk, &scene->dv, &scene->delta,
                          &scene->dsink };
  for (size_t i = 0; i < COUNT(read); i++) device_read(read[i]->here, read[i]->there,
                                                       read[i]->bytes);
  check_delta(scene);
  for (int u = 0; u < scene->unit_count; u++)
    for (int b = 0; b < scene->row->batch; b++) {
      check_dq(scene, u, b);
      for (int64_t r = scene->units[u].run_begin; r < scene->units[u].run_end; r++)
        check_run(scene, u, &scene->runs[r], b);
    }
  check_untouched(scene, dq);
  check_untouched_runs(scene, &scene->sums, false);
  check_untouched_runs(scene, &scene->dk, true);
  check_untouched_runs(scene, &scene->dv, true);
}

// Runs `pass` on a scene whose arrays are there.
static void run_scene(const struct scene_row *row, void (*pass)(struct scene *))
{
  struct scene *scene = make_scene(row);
  struct tensor *tensors[] = { &scene->q, &scene->out, &scene->dout, &scene->dq,
                               &scene->k, &scene->v,   &scene->lse };
  struct twin *twins[] = { &scene->halo, &scene->sums,  &scene->dk,  &scene->dv,
                           &scene->delta, &scene->dsink, &scene->sink };
  print_message("%s %s\n", row->problem, row->config ? row->config : "");
  for (size_t i = 0; i < COUNT(tensors); i++) send_tensor(tensors[i]);
  for (size_t i = 0; i < COUNT(twins); i++) send(twins[i]);
  pass(scene);
  for (size_t i = 0; i < COUNT(tensors); i++) drop(&tensors[i]->twin);
  for (size_t i = 0; i < COUNT(twins); i++) drop(twins[i]);
  free(scene->deltas);
  free(scene->largest);
  free(scene);
}

static void run_backward(struct scene *scene)
{
  struct sw_aim aim;
  const struct sw_kernel *kernel =
      load_kernel(&scene->problem, "backward", scene->row->config, &aim);
  run_kernels(scene, kernel, aim.device);
  check_scene(scene);
}

// ---- Forward ------------------------------------------------------------------------------------

// What forward leaves, where the scene has the answers.
struct results {
  struct tensor out, lse;
  struct twin max_logits;
};

// In two launches, as a layer does.
static void launch_forward(const struct scene *scene, const struct results *results,
                           const struct sw_kernel *kernel, struct sw_device_cuda *device)
{
  const struct swathe_problem *p = &scene->problem;
  const struct sw_cuda_function *forward = &kernel->functions[SW_CUDA_FORWARD];
  void *units = send_units(scene), *runs = send_runs(scene);
  struct sw_cuda_args args = {
    .attention = { .units = units, .runs = runs, .batch = scene->row->batch,
                   .kv_heads = p->kv_heads, .scale = (float)sw_problem_scale(p),
                   .softcap = (float)p->softcap, .sink = scene->sink.there, .q = scene->q.view,
                   .out = results->out.view, .lse = results->lse.view,
                   .max_logits = results->max_logits.there },
    .k = scene->k.twin.there, .v = scene->v.twin.there, .halo = scene->halo.there,
    .rows = scene->rows,
  };
  const int64_t per_unit = scene->row->batch * p->kv_heads;
  int begin = 0, half = (scene->unit_count + 1) / 2;
  for (int end = half; begin < end; begin = end, end = scene->unit_count) {
    int64_t most = 0;
    for (int u = begin; u < end; u++) {
      const int64_t tiles = tiles_of(scene, u, forward->launch.tile_tokens, false);
      if (tiles > most) most = tiles;
    }
    args.first_item = begin * per_unit;
    launch(device, forward, (end - begin) * per_unit, most * forward->launch.groups, &args);
  }
  device_free(units);
  device_free(runs);
}

static void check_row(const struct scene *scene, const struct results *results, int64_t row, int h,
                      int b)
{
  const uint16_t *got = elems(&results->out, row, h, b), *want = elems(&scene->out, row, h, b);
  const size_t at = place(&results->lse.view, row, h, b);
  const float lse = ((const float *)results->lse.twin.here)[at];
  const float want_lse = ((const float *)scene->lse.twin.here)[at];
  if (lse != want_lse) expect_near("lse", (double)lse, (double)want_lse, 1e-4, row, h, 0);
  for (int d = 0; d < scene->problem.head_dim_v; d++)
    expect_near("out", (double)widen(got[d], scene->f16), (double)widen(want[d], scene->f16),
                1e-2, row, h, d);
}

static void check_results(const struct scene *scene, const struct results *results)
{
  for (int u = 0; u < scene->unit_count; u++)
    for (int b = 0; b < scene->row->batch; b++)
      for (int h = 0; h < scene->problem.q_heads; h++) {
        const struct sw_unit *unit = &scene->units[u];
        for (int64_t row = unit->row; row < unit->row + unit->tokens; row++)
          check_row(scene, results, row, h, b);
        const int64_t at = (u * scene->row->batch + b) * scene->problem.q_heads + h;
        const double largest = (double)((const float *)results->max_logits.here)[at];
        if (largest != scene->largest[at])
          expect_near("largest score", largest, scene->largest[at], 1e-4, u, h, 0);
      }
  check_untouched(scene, &results->out);
  check_untouched(scene, &results->lse);
}

static void run_forward(struct scene *scene)
{
  const struct swathe_problem *p = &scene->problem;
  const size_t largest = (size_t)(scene->unit_count * scene->row->batch * p->q_heads);
  struct results results = { make_tensor(scene, p->q_heads, p->head_dim_v, 2),
                             make_tensor(scene, p->q_heads, 1, 4),
                             make_twin(largest * sizeof(float)) };
  struct sw_aim aim;
  for (size_t i = 0; i < largest; i++) ((float *)results.max_logits.here)[i] = -INFINITY;
  send_tensor(&results.out);
  send_tensor(&results.lse);
  send(&results.max_logits);
  const struct sw_kernel *kernel =
      load_kernel(&scene->problem, "forward", scene->row->config, &aim);
  launch_forward(scene, &results, kernel, aim.device);
  struct twin *read[] = { &results.out.twin, &results.lse.twin, &results.max_logits };
  for (size_t i = 0; i < COUNT(read); i++) {
    device_read(read[i]->here, read[i]->there, read[i]->bytes);
  }
  check_results(scene, &results);
  for (size_t i = 0; i < COUNT(read); i++) drop(read[i]);
}

// ---- Backward -----------------------------------------------------------------------------------

#define WIDE_64 "q_heads=4,kv_heads=2,head_dim_qk=64,head_dim_v=64,dtype=bf16,"
#define GPT_64  "q_heads=8,kv_heads=1,head_dim_qk=64,head_dim_v=64,dtype=bf16,sinks=1,"

// Windows around the tiles' widths, one-sided, two-sided and without end.
static const struct scene_row backward_windows[] = {
  { WIDE_64 "window_left=63", NULL, 150, 1, 1, 70, 0, false },
  { WIDE_64 "window_left=64", NULL, 150, 2, 2, 40, 0, false },
  { WIDE_64 "window_left=15,window_right=16", NULL, 90, 1, 1, 90, 0, false },
  { WIDE_64 "window_left=0", NULL, 70, 1, 1, 30, 0, false },
  { WIDE_64 "window_left=unlimited", NULL, 100, 1, 1, 60, 0, false },
  { WIDE_64 "window_left=unlimited,window_right=unlimited", NULL, 90, 2, 1, 60, 8, true },
  { WIDE_64 "window_left=40,window_right=3", NULL, 100, 1, 1, 50, 1, false },
  { GPT_64 "window_left=127", NULL, 200, 1, 1, 150, 0, false },
  { GPT_64 "window_left=20", NULL, 90, 3, 2, 20, 0, true },
  // weights of 0 and 1, and lse so low that what is no key would weigh infinitely much
  { WIDE_64 "window_left=unlimited,window_right=unlimited,scale=20", NULL, 30, 6, 2, 5, 0, true },
};

// Head dims from 1 to 256, even and odd; GQA ratios; both dtypes; softcap.
static const struct scene_row backward_shapes[] = {
  { WIDE_64 "window_left=30,softcap=20", NULL, 80, 1, 1, 50, 0, false },
  { "q_heads=5,kv_heads=1,head_dim_qk=64,head_dim_v=64,dtype=f16,window_left=33", NULL,
    80, 1, 1, 80, 0, true },
  { "q_heads=6,kv_heads=2,head_dim_qk=128,head_dim_v=128,dtype=bf16,window_left=47", NULL,
    110, 1, 1, 90, 0, false },
  { "q_heads=4,kv_heads=1,head_dim_qk=192,head_dim_v=128,dtype=bf16,window_left=31,sinks=1", NULL,
    70, 1, 1, 60, 8, false },
  { "q_heads=2,kv_heads=1,head_dim_qk=256,head_dim_v=256,dtype=bf16,window_left=20", NULL,
    60, 1, 1, 60, 0, false },
  { "q_heads=3,kv_heads=1,head_dim_qk=20,head_dim_v=37,dtype=f16,window_left=17,window_right=2",
    NULL, 60, 1, 2, 40, 0, true },
  { "q_heads=1,kv_heads=1,head_dim_qk=1,head_dim_v=3,dtype=bf16,window_left=9", NULL,
    40, 1, 1, 40, 0, false },
};

// Configs far from the default.
static const struct scene_row backward_knobs[] = {
  { WIDE_64 "window_left=48", "dq_tall=1,dq_hold=0,dkv_tall=2,dkv_hold=0,dkv_rows=16", 120, 1, 1,
    120, 0, false },
  { WIDE_64 "window_left=48", "dq_wide=2,dkv_wide=2,dkv_rows=32,dq_stages=3,dkv_stages=3", 120, 1,
    1, 120, 0, true },
  { WIDE_64 "window_left=48", "dkv_split=1,dq_warps=2,dkv_warps=8,dq_pack=1,dkv_pack=1", 200, 1, 1,
    200, 0, false },
};

static void differentiate(const struct scene_row *rows, size_t count)
{
  need_cuda();
  for (size_t i = 0; i < count; i++)
    for (int times = 0; times < 3; times++) run_scene(&rows[i], run_backward);
}

static void gradients_in_any_window(void **state)
{
  (void)state;
  differentiate(backward_windows, COUNT(backward_windows));
}

static void gradients_of_any_shape(void **state)
{
  (void)state;
  differentiate(backward_shapes, COUNT(backward_shapes));
}

static void gradients_with_any_knobs(void **state)
{
  (void)state;
  differentiate(backward_knobs, COUNT(backward_knobs));
}

// tiles of 16 queries and 32 keys
#define SMALL_64 "pack=2,warps=2,warp_rows=16,block_k=32,strip=1,"

// Windows around multiples of a tile of keys and of 64; each way of loading and waiting.
static const struct scene_row forward_tiles[] = {
  { WIDE_64 "window_left=31", SMALL_64 "stages=1,q_in_regs=1", 130, 1, 1, 130, 0, false },
  { WIDE_64 "window_left=32", SMALL_64 "stages=2", 130, 1, 2, 100, 0, false },
  { WIDE_64 "window_left=62", SMALL_64 "stages=3", 130, 2, 1, 100, 0, false },
  { WIDE_64 "window_left=63", SMALL_64 "stages=2,q_in_regs=1", 130, 1, 1, 60, 0, true },
  { WIDE_64 "window_left=64", SMALL_64 "stages=1", 130, 1, 1, 60, 8, true },
  { WIDE_64 "window_left=16", SMALL_64 "stages=1", 130, 1, 1, 60, 1, false },   // one tile
  { WIDE_64 "window_left=17", SMALL_64 "stages=1", 130, 1, 1, 60, 1, false },   // a key too wide
  { WIDE_64 "window_left=0,window_right=40", SMALL_64 "stages=2", 130, 1, 1, 70, 0, false },
  // the third warp's first query sees the first tile's last key, and of that tile nothing else
  { WIDE_64 "window_left=17", "pack=1,warps=4,warp_rows=16,block_k=16,stages=2,strip=1", 130, 1, 1,
    130, 0,
    false },
  { GPT_64 "window_left=40", "warps=2,warp_rows=32,block_k=32,stages=2,strip=1", 130, 1, 1, 70,
    0, true },
};

// Strips: whole ones and parts, across holes, at both ends of documents.
#define STRIP_64 "pack=2,warps=2,warp_rows=16,block_k=32,stages=1,"

static const struct scene_row forward_strips[] = {
  { WIDE_64 "window_left=16", STRIP_64 "strip=1", 130, 1, 1, 60, 0, false },
  { WIDE_64 "window_left=16", STRIP_64 "strip=2", 130, 1, 1, 60, 0, false },
  { WIDE_64 "window_left=16", STRIP_64 "strip=4,q_in_regs=1", 130, 2, 2, 100, 0, true },
  { WIDE_64 "window_left=15", STRIP_64 "strip=4", 130, 1, 1, 130, 1, true },
  { WIDE_64 "window_left=9,window_right=7", STRIP_64 "strip=8", 200, 1, 1, 190, 0, false },
  { WIDE_64 "window_left=0,window_right=16", STRIP_64 "strip=4", 130, 3, 1, 100, 8, true },
  { GPT_64 "window_left=40", "pack=4,warps=2,warp_rows=32,block_k=64,strip=4", 150, 1, 1, 140, 0,
    false },
  // rows of out lie across those of other warps' queries
  { "q_heads=2,kv_heads=1,head_dim_qk=192,head_dim_v=128,dtype=bf16,window_left=16",
    STRIP_64 "strip=4", 130, 1, 1, 100, 0, false },
};

static const struct scene_row forward_shapes[] = {
  { WIDE_64 "window_left=63", NULL, 150, 1, 1, 70, 0, false },
  { WIDE_64 "window_left=0", NULL, 70, 1, 1, 30, 0, false },
  { WIDE_64 "window_left=15,window_right=16", NULL, 90, 1, 1, 90, 0, false },
  { WIDE_64 "window_left=unlimited", NULL, 100, 1, 1, 60, 0, false },
  { WIDE_64 "window_left=unlimited,window_right=unlimited", NULL, 90, 2, 1, 60, 8, true },
  { WIDE_64 "window_left=40,window_right=3", NULL, 100, 1, 1, 50, 1, true },
  { WIDE_64 "window_left=30,softcap=20", NULL, 80, 1, 1, 50, 0, false },
  { WIDE_64 "window_left=30,softcap=2,scale=-0.5", NULL, 80, 1, 1, 50, 0, false },
  { WIDE_64 "window_left=99,scale=-0.2", NULL, 120, 1, 1, 50, 0, false },
  { GPT_64 "window_left=127", NULL, 200, 1, 1, 150, 0, false },
  { GPT_64 "window_left=127", "warps=8,warp_rows=16", 200, 1, 1, 150, 0, true },
  { GPT_64 "window_left=20", NULL, 90, 3, 2, 20, 0, true },
  { "q_heads=5,kv_heads=1,head_dim_qk=64,head_dim_v=64,dtype=f16,window_left=33", NULL,
    80, 1, 1, 80, 0, true },
  { "q_heads=6,kv_heads=2,head_dim_qk=128,head_dim_v=128,dtype=bf16,window_left=47", NULL,
    110, 1, 1, 90, 0, false },
  { "q_heads=4,kv_heads=1,head_dim_qk=192,head_dim_v=128,dtype=bf16,window_left=31,sinks=1", NULL,
    70, 1, 1, 60, 8, false },
  { "q_heads=2,kv_heads=1,head_dim_qk=256,head_dim_v=256,dtype=f16,window_left=20", NULL,
    60, 1, 1, 60, 0, false },
  { "q_heads=3,kv_heads=1,head_dim_qk=20,head_dim_v=37,dtype=f16,window_left=17,window_right=2",
    NULL, 60, 1, 2, 40, 0, true },
  { "q_heads=1,kv_heads=1,head_dim_qk=1,head_dim_v=3,dtype=bf16,window_left=9", NULL,
    40, 1, 1, 40, 0, false },
};

static void forward_around_tiles(void **state)
{
  (void)state;
  need_cuda();
  for (size_t i = 0; i < COUNT(forward_tiles); i++) run_scene(&forward_tiles[i], run_forward);
}

static void forward_in_strips(void **state)
{
  (void)state;
  need_cuda();
  for (size_t i = 0; i < COUNT(forward_strips); i++) run_scene(&forward_strips[i], run_forward);
}

static void forward_of_all_shapes(void **state)
{
  (void)state;
  need_cuda();
  for (size_t i = 0; i < COUNT(forward_shapes); i++) run_scene(&forward_shapes[i], run_forward);
}

// ---- Hopper -------------------------------------------------------------------------------------

// Tiles of 64 rows, a warpgroup's, or two of them.
#define GROUP      "wgmma=1,warps=4,warp_rows=16,q_in_regs=0,min_blocks=1,"
#define TWO_GROUPS "wgmma=1,warps=8,warp_rows=16,q_in_regs=0,min_blocks=1,"
#define ONE_HEAD(dims) "q_heads=2,kv_heads=1," dims ",dtype=bf16,"
#define DIM_128     "head_dim_qk=128,head_dim_v=128"
#define DIM_192_128 "head_dim_qk=192,head_dim_v=128"
#define DIM_256     "head_dim_qk=256,head_dim_v=256"

// Windows around multiples of a tile of keys and of 64; each way of loading and waiting; all widths
// of panels.
static const struct scene_row hopper_tiles[] = {
  { WIDE_64 "window_left=31", GROUP "pack=2,block_k=32,stages=1,strip=1", 130, 1, 1, 130, 0,
    false },
  { WIDE_64 "window_left=32", GROUP "pack=2,block_k=32,stages=2,strip=1", 130, 1, 2, 100, 0,
    false },
  { WIDE_64 "window_left=63", GROUP "pack=2,block_k=48,stages=3,strip=1", 150, 2, 1, 70, 8, true },
  { WIDE_64 "window_left=64", TWO_GROUPS "pack=1,block_k=16,stages=2,strip=1", 180, 1, 1, 170, 0,
    true },
  { WIDE_64 "window_left=62,window_right=3", TWO_GROUPS "pack=2,block_k=64,stages=1,strip=1", 130,
    1, 1, 100, 1, true },
  { WIDE_64 "window_left=32", GROUP "pack=2,block_k=64,stages=1,strip=1", 130, 1, 1, 60, 1,
    false },                                                                          // one tile
  { WIDE_64 "window_left=33", GROUP "pack=2,block_k=64,stages=1,strip=1", 130, 1, 1, 60, 0,
    false },                                                                  // a key too wide
  { WIDE_64 "window_left=unlimited,window_right=unlimited",
    GROUP "pack=2,block_k=80,stages=2,strip=1", 90, 2, 1, 60, 8, true },
  { WIDE_64 "window_left=0", GROUP "pack=1,block_k=16,stages=2,strip=1", 70, 1, 1, 70, 0, false },
  { WIDE_64 "window_left=30,softcap=2,scale=-0.5", GROUP "pack=2,block_k=32,stages=2,strip=1", 80,
    1, 1, 50, 0, false },
  { WIDE_64 "window_left=99,scale=-0.2", TWO_GROUPS "pack=2,block_k=32,stages=2,strip=1", 120, 1, 1,
    80, 0, false },
  { GPT_64 "window_left=127", GROUP "pack=8,block_k=144,stages=1,strip=1", 200, 1, 1, 150, 0,
    false },
  { GPT_64 "window_left=20", GROUP "pack=4,block_k=16,stages=2,strip=1", 90, 3, 2, 20, 0, true },
  { "q_heads=5,kv_heads=1,head_dim_qk=64,head_dim_v=64,dtype=f16,window_left=33",
    GROUP "pack=5,block_k=32,stages=2,strip=1", 80, 1, 1, 80, 0, true },
  { ONE_HEAD(DIM_128) "window_left=47", GROUP "pack=2,block_k=32,stages=2,strip=1", 110, 1, 1, 90,
    0, false },
  { ONE_HEAD(DIM_128) "window_left=80", TWO_GROUPS "pack=1,block_k=112,stages=1,strip=1", 140, 1, 1,
    140, 1, true },
  { ONE_HEAD("head_dim_qk=120,head_dim_v=50") "window_left=40",
    GROUP "pack=2,block_k=48,stages=2,strip=1", 100, 1, 1, 80, 0, true },
  { ONE_HEAD(DIM_192_128) "window_left=31,sinks=1", GROUP "pack=2,block_k=32,stages=2,strip=1", 90,
    1, 1, 90, 8, false },
  { ONE_HEAD(DIM_256) "window_left=20", GROUP "pack=2,block_k=32,stages=1,strip=1", 60, 1, 1, 60,
    0, false },
};

static const struct scene_row hopper_strips[] = {
  { WIDE_64 "window_left=32", GROUP "pack=2,block_k=64,stages=1,strip=1", 130, 1, 1, 100, 0,
    false },
  { WIDE_64 "window_left=32", GROUP "pack=2,block_k=64,stages=1,strip=4", 200, 1, 1, 190, 0,
    false },
  { WIDE_64 "window_left=9,window_right=7", TWO_GROUPS "pack=2,block_k=80,stages=1,strip=2", 200,
    2, 1, 190, 1, true },
  { GPT_64 "window_left=40", TWO_GROUPS "pack=8,block_k=64,stages=1,strip=8", 150, 1, 2, 140, 0,
    true },
  { ONE_HEAD(DIM_128) "window_left=16", GROUP "pack=2,block_k=48,stages=1,strip=2", 130, 1, 1, 120,
    0, false },
  { ONE_HEAD(DIM_192_128) "window_left=16", TWO_GROUPS "pack=2,block_k=80,stages=1,strip=2", 150,
    1, 1, 150, 0, false },
};

#define BACK       "wgmma=1,dq_tall=1,dq_hold=0,dq_blocks=1,dkv_tall=1,dkv_hold=0,dkv_blocks=1,"
#define GROUP_BACK BACK "dq_warps=4,dkv_warps=4,"

static const struct scene_row hopper_gradients[] = {
  { WIDE_64 "window_left=48", GROUP_BACK "dq_wide=4,dkv_wide=4,dq_keys=64,dkv_rows=64", 120, 1, 1,
    120, 0, false },
  { WIDE_64 "window_left=63", GROUP_BACK "dq_wide=1,dkv_wide=1,dq_keys=16,dkv_rows=16,dq_stages=3,"
    "dkv_stages=3", 150, 2, 2, 100, 8, true },
  { WIDE_64 "window_left=20,window_right=9", BACK "dq_wide=2,dkv_wide=1,dq_keys=64,"
    "dkv_rows=32,dq_warps=8,dkv_warps=8,dq_pack=1,dkv_pack=1", 150, 1, 1, 150, 1, true },
  { WIDE_64 "window_left=30,softcap=2,scale=-0.5", GROUP_BACK "dq_wide=1,dkv_wide=2,dq_keys=32,"
    "dkv_rows=32,dkv_split=1", 80, 1, 1, 50, 0, false },
  { GPT_64 "window_left=40", GROUP_BACK "dq_wide=4,dkv_wide=2,dq_keys=64,dkv_rows=64", 150, 1, 1,
    150, 0, true },
  { "q_heads=5,kv_heads=1,head_dim_qk=64,head_dim_v=64,dtype=f16,window_left=33",
    GROUP_BACK "dq_wide=2,dkv_wide=2,dq_keys=32,dkv_rows=32", 80, 1, 1, 80, 0, true },
  { ONE_HEAD(DIM_128) "window_left=70", GROUP_BACK "dq_wide=2,dkv_wide=2,dq_keys=32,dkv_rows=32",
    150, 1, 1, 150, 0, false },
  { ONE_HEAD("head_dim_qk=120,head_dim_v=50") "window_left=40",
    GROUP_BACK "dq_wide=2,dkv_wide=2,dq_keys=32,dkv_rows=32", 100, 1, 1, 80, 0, true },
  { ONE_HEAD(DIM_192_128) "window_left=31,sinks=1",
    GROUP_BACK "dq_wide=2,dkv_wide=1,dq_keys=32,dkv_rows=16", 90, 1, 1, 90, 8, false },
};

static void need_hopper(void)
{
  struct swathe_problem problem;
  struct sw_aim aim;
  need_cuda();
  swathe_problem_init(&problem);
  check(swathe_problem_parse("target=cuda", &problem));
  check(sw_context_aim(context, &problem, NULL, &aim));
  if (!strcmp(aim.isa, "sm_90a")) return;
  print_message("the device is of %s, wgmma is of sm_90a\n", aim.isa);
  skip();
}

static void warpgroups_around_tiles(void **state)
{
  (void)state;
  need_hopper();
  for (size_t i = 0; i < COUNT(hopper_tiles); i++) run_scene(&hopper_tiles[i], run_forward);
}

static void warpgroups_in_strips(void **state)
{
  (void)state;
  need_hopper();
  for (size_t i = 0; i < COUNT(hopper_strips); i++) run_scene(&hopper_strips[i], run_forward);
}

static void warpgroups_make_gradients(void **state)
{
  (void)state;
  need_hopper();
  for (size_t i = 0; i < COUNT(hopper_gradients); i++)
    run_scene(&hopper_gradients[i], run_backward);
}

// ---- Sums and copies ----------------------------------------------------------------------------

static const char odd[] = "target=cuda,q_heads=3,kv_heads=3,head_dim_qk=20,head_dim_v=37,dtype=f16";

static void init_problem(struct swathe_problem *problem, const char *text)
{
  swathe_problem_init(problem);
  check(swathe_problem_parse(text, problem));
}

static struct sw_view packed_view(int64_t rows, int64_t heads, int64_t head)
{
  return (struct sw_view){ .token = heads * head, .head = head, .batch = rows * heads * head };
}

// Pieces of 1 to 5 terms, as elements, floats and bfloat16.
static void sums_are_gathered(void **state)
{
  (void)state;
  need_cuda();
  enum { BATCH = 2, HEADS = 3, QK = 20, V = 37, PIECES = 6, TERMS = 18, ROWS = 32 * PIECES + 7 };
  struct swathe_problem problem;
  struct sw_aim aim;
  init_problem(&problem, odd);
  const struct sw_kernel *kernel = load_kernel(&problem, "backward", NULL, &aim);
  const struct sw_view from_k = { .token = HEADS * (QK + V) * BATCH, .head = QK,
                                  .batch = HEADS * QK };
  const struct sw_view from_v = { .token = HEADS * (QK + V) * BATCH, .head = V,
                                  .batch = HEADS * V };
  const size_t term_floats = 32 * (size_t)from_k.token;
  float *values = malloc(TERMS * term_floats * sizeof *values);
  assert_non_null(values);
  for (size_t i = 0; i < TERMS * term_floats; i++) values[i] = normal() / 3;  // all bits matter
  float *there = device_copy(values, TERMS * term_floats * sizeof *values);

  struct sw_sum sums[PIECES];
  struct sw_term terms[TERMS];
  int64_t row = 3, term = 0;
  for (int i = 0; i < PIECES; i++) {
    sums[i] = (struct sw_sum){ row, 1 + chance(32), term, term + 1 + chance(i < 3 ? 5 : 1) };
    if (i == 0) sums[i].tokens = 32, sums[i].term_end = 5;   // the most there may be
    row += sums[i].tokens;
    term = sums[i].term_end;
  }
  for (int i = 0; i < TERMS; i++) {
    terms[i] = (struct sw_term){ from_k, from_v };
    terms[i].dk.data = there + (size_t)i * term_floats;
    terms[i].dv.data = there + (size_t)i * term_floats + BATCH * HEADS * QK;
  }
  void *sums_there = device_copy(sums, sizeof sums);
  void *terms_there = device_copy(terms, sizeof terms);

  for (int format = SW_SUMS_ELEM; format <= SW_SUMS_BF16; format++) {
    const size_t bytes = format == SW_SUMS_FLOAT ? 4 : 2;
    struct sw_view dk = packed_view(ROWS, HEADS, QK + 1), dv = packed_view(ROWS, HEADS, V);
    struct twin k = make_twin((size_t)(BATCH * dk.batch) * bytes);
    struct twin v = make_twin((size_t)(BATCH * dv.batch) * bytes);
    send(&k), send(&v);
    dk.data = k.there, dv.data = v.there;
    const struct sw_gather_args args = { sums_there, terms_there, PIECES, BATCH,
                                         HEADS,      format,      dk,     dv };
    launch(aim.device, &kernel->functions[SW_CUDA_GATHER], BATCH * PIECES, 1, &args);
    device_read(k.here, k.there, k.bytes);
    device_read(v.here, v.there, v.bytes);
    for (int i = 0; i < PIECES; i++)
      for (int64_t j = 0; j < sums[i].tokens; j++)
        for (int b = 0; b < BATCH; b++)
          for (int h = 0; h < HEADS; h++)
            for (int d = 0; d < QK + V; d++) {
              const struct twin *twin = d < QK ? &k : &v;
              const struct sw_view *to = d < QK ? &dk : &dv, *from = d < QK ? &from_k : &from_v;
              const int dim = d < QK ? d : d - QK;
              float want = 0;
              for (int64_t t = sums[i].term_begin; t < sums[i].term_end; t++)
                want += values[(size_t)t * term_floats + (d < QK ? 0 : BATCH * HEADS * QK) +
                               place(from, j, h, b) + (size_t)dim];
              const size_t at = place(to, sums[i].row + j, h, b) + (size_t)dim;
              uint32_t bits = bits_of(want);
              if (format != SW_SUMS_FLOAT) bits = narrow(want, format == SW_SUMS_ELEM);
              const uint32_t got = format == SW_SUMS_FLOAT ? ((uint32_t *)(void *)twin->here)[at]
                                                           : ((uint16_t *)(void *)twin->here)[at];
              if (got != bits)
                fail_msg("format %d, piece %d, row %lld, dim %d: %x, not %x", format, i,
                         (long long)j, d, got, bits);
            }
    drop(&k), drop(&v);
  }
  free(values);
  device_free(there);
  device_free(sums_there);
  device_free(terms_there);
}

// Keys of every second row of two segments, to places of odd strides.
static void keys_are_packed(void **state)
{
  (void)state;
  need_cuda();
  enum { BATCH = 2, HEADS = 3, QK = 20, V = 37, ROWS = 40, TOKEN = BATCH * HEADS * (QK + V) };
  struct swathe_problem problem;
  struct sw_aim aim;
  init_problem(&problem, odd);
  const struct sw_kernel *kernel = load_kernel(&problem, "copies", NULL, &aim);
  for (int gap = 0; gap < 5; gap += 4) {
    struct sw_view k = packed_view(ROWS, HEADS, QK + gap), v = packed_view(ROWS, HEADS, V + gap);
    struct twin keys = make_twin((size_t)(BATCH * k.batch) * 2);
    struct twin values = make_twin((size_t)(BATCH * v.batch) * 2);
    struct twin to = make_twin(ROWS * TOKEN * 2);
    for (size_t i = 0; i < keys.bytes; i++) keys.here[i] = (unsigned char)chance(250);
    for (size_t i = 0; i < values.bytes; i++) values.here[i] = (unsigned char)chance(250);
    send(&keys), send(&values), send(&to);
    k.data = keys.there, v.data = values.there;
    struct sw_segment segments[] = { { .row = 5, .tokens = 7 }, { .row = 20, .tokens = 17 } };
    for (int i = 0, slot = 0; i < 2; slot += (int)segments[i].tokens, i++) {
      const size_t at = (size_t)slot * TOKEN * 2;
      segments[i].k = (struct sw_view){ (void *)at, TOKEN, QK, HEADS * QK };
      segments[i].v = (struct sw_view){ (void *)(at + BATCH * HEADS * QK * 2), TOKEN, V,
                                        HEADS * V };
    }
    void *list = device_copy(segments, sizeof segments);
    const struct sw_pack_args args = { list, 2, BATCH, HEADS, k, v, to.there };
    launch(aim.device, &kernel->functions[SW_CUDA_PACK], 2 * BATCH, 1, &args);
    device_read(to.here, to.there, to.bytes);
    for (int i = 0, slot = 0; i < 2; slot += (int)segments[i].tokens, i++)
      for (int64_t j = 0; j < segments[i].tokens; j++)
        for (int b = 0; b < BATCH; b++)
          for (int h = 0; h < HEADS; h++) {
            const unsigned char *token = to.here + (size_t)(slot + j) * TOKEN * 2;
            assert_memory_equal(token + (b * HEADS + h) * QK * 2,
                                keys.here + 2 * place(&k, segments[i].row + j, h, b), QK * 2);
            assert_memory_equal(token + (BATCH * HEADS * QK + (b * HEADS + h) * V) * 2,
                                values.here + 2 * place(&v, segments[i].row + j, h, b), V * 2);
          }
    for (size_t i = 24 * TOKEN * 2; i < to.bytes; i++) assert_int_equal(to.here[i], 0xff);
    device_free(list);
    drop(&keys), drop(&values), drop(&to);
  }
}

static void gaps_are_filled(void **state)
{
  (void)state;
  need_cuda();
  enum { BATCH = 2, HEADS = 3, ROWS = 50, DIM = 5, STRIDE = 7 };
  static const struct { int bytes; unsigned bits; } rows[] = { { 2, 0 }, { 4, 0xff800000u } };
  static const struct sw_gap gaps[] = { { 0, 2 }, { 9, 30 }, { 49, 1 } };
  struct swathe_problem problem;
  struct sw_aim aim;
  init_problem(&problem, odd);
  const struct sw_kernel *kernel = load_kernel(&problem, "copies", NULL, &aim);
  void *list = device_copy(gaps, sizeof gaps);
  for (size_t c = 0; c < COUNT(rows); c++) {
    const size_t bytes = (size_t)rows[c].bytes;
    struct sw_view view = packed_view(ROWS, HEADS, STRIDE);
    struct twin to = make_twin((size_t)(BATCH * view.batch) * bytes), want = make_twin(to.bytes);
    for (size_t i = 0; i < to.bytes; i++) to.here[i] = want.here[i] = 0x5a;
    send(&to);
    view.data = to.there;
    const struct sw_fill_args args = { list, COUNT(gaps), BATCH, HEADS, DIM, view, rows[c].bytes,
                                       rows[c].bits };
    launch(aim.device, &kernel->functions[SW_CUDA_FILL], BATCH * (int64_t)COUNT(gaps), 1, &args);
    for (size_t g = 0; g < COUNT(gaps); g++)
      for (int64_t row = gaps[g].row; row < gaps[g].row + gaps[g].rows; row++)
        for (int b = 0; b < BATCH; b++)
          for (int h = 0; h < HEADS; h++)
            for (int d = 0; d < DIM; d++)
              memcpy(want.here + (place(&view, row, h, b) + (size_t)d) * bytes, &rows[c].bits,
                     bytes);
    device_read(to.here, to.there, to.bytes);
    assert_memory_equal(to.here, want.here, to.bytes);
    drop(&to);
    free(want.here);
  }
  device_free(list);
}

static void sums_become_wide(void **state)
{
  (void)state;
  need_cuda();
  enum { ELEMENTS = 1001 };
  struct swathe_problem problem;
  struct sw_aim aim;
  init_problem(&problem, odd);
  const struct sw_kernel *kernel = load_kernel(&problem, "copies", NULL, &aim);
  struct twin from = make_twin(ELEMENTS * 2), to = make_twin(ELEMENTS * 4 + 4);
  for (int i = 0; i < ELEMENTS; i++) ((uint16_t *)(void *)from.here)[i] = narrow(normal(), false);
  send(&from), send(&to);
  const struct sw_widen_args args = { from.there, to.there, ELEMENTS };
  launch(aim.device, &kernel->functions[SW_CUDA_WIDEN], 3, 1, &args);
  device_read(to.here, to.there, to.bytes);
  for (int i = 0; i < ELEMENTS; i++)
    assert_int_equal(((uint32_t *)(void *)to.here)[i],
                     (uint32_t)((uint16_t *)(void *)from.here)[i] << 16);
  assert_int_equal(((uint32_t *)(void *)to.here)[ELEMENTS], 0xffffffff);
  drop(&from), drop(&to);
}

// Large terms that cancel leave the small ones; of nothing the largest is -inf, the sum 0.
static void heads_are_combined(void **state)
{
  (void)state;
  need_cuda();
  enum { ROWS = 700, HEADS = 3 };
  struct swathe_problem problem;
  struct sw_aim aim;
  init_problem(&problem, odd);
  const struct sw_kernel *kernel = load_kernel(&problem, "copies", NULL, &aim);
  float values[ROWS * HEADS], got[HEADS];
  for (int i = 0; i < ROWS * HEADS; i++) values[i] = normal();
  values[5 * HEADS] = 1e7f, values[400 * HEADS] = -1e7f;
  void *from = device_copy(values, sizeof values), *to = device_copy(got, sizeof got);
  for (int largest = 0; largest < 2; largest++)
    for (int rows = 0; rows <= ROWS; rows += ROWS) {
      const struct sw_combine_args args = { from, to, rows, HEADS, largest };
      launch(aim.device, &kernel->functions[SW_CUDA_COMBINE], HEADS, 1, &args);
      device_read(got, to, sizeof got);
      for (int h = 0; h < HEADS; h++) {
        double want = largest ? -INFINITY : 0;
        for (int i = 0; i < rows; i++) {
          const double x = (double)values[i * HEADS + h];
          want = !largest ? want + x : x > want ? x : want;
        }
        if (isinf(want)) assert_true(isinf(got[h]) && got[h] < 0);
        else assert_true(fabs((double)got[h] - want) <= 1e-6 * fmax(1, fabs(want)));
      }
    }
  device_free(from);
  device_free(to);
}

static int open_context(void **state)
{
  (void)state;
  const char *scratch = scratch_make("kernels_cuda"), *kept = getenv("TEST_CACHE_DIR");
  const char *seed = getenv("TEST_SEED"), *driver = getenv("TEST_LIBCUDA");
  if (driver) setenv("SWATHE_LIBCUDA", driver, 1);
  const struct swathe_options options = { .database = "", .cache = kept ? kept : scratch };
  state_of_chance = seed ? strtoull(seed, NULL, 0) : 1;
  return scratch && !swathe_open(&options, &context) ? 0 : -1;
}

static int close_context(void **state)
{
  swathe_close(context);
  return scratch_remove(state);
}

// The emulated device becomes a Hopper; a real one stays what it is.
static int open_hopper(void **state)
{
  setenv("EMULATOR_ARCH", "sm_90a", 1);
  return open_context(state);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(forward_around_tiles),     cmocka_unit_test(forward_in_strips),
    cmocka_unit_test(forward_of_all_shapes),
    cmocka_unit_test(gradients_in_any_window),  cmocka_unit_test(gradients_of_any_shape),
    cmocka_unit_test(gradients_with_any_knobs), cmocka_unit_test(sums_are_gathered),
    cmocka_unit_test(keys_are_packed),          cmocka_unit_test(gaps_are_filled),
    cmocka_unit_test(sums_become_wide),         cmocka_unit_test(heads_are_combined),
  };
  const struct CMUnitTest hopper[] = {
    cmocka_unit_test(warpgroups_around_tiles),  cmocka_unit_test(warpgroups_in_strips),
    cmocka_unit_test(warpgroups_make_gradients),
  };
  return cmocka_run_group_tests(tests, open_context, close_context) +
         cmocka_run_group_tests(hopper, open_hopper, close_context);
}
