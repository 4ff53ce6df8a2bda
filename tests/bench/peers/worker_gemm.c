// worker_gemm.c: the attention that a careful user writes on a library's matrix product: a tile
// of queries with the query heads of one key head packed into its rows, one product for the
// scores, a vectorised softmax, one product for the output.  Keys may come in blocks, with a
// running maximum.
//
//   ... RESULTS LIBRARY     a shared library with dnnl_sgemm, cblas_sgemm or scipy_cblas_sgemm
//   worker_gemm probe LIBRARY     prints the Gflop/s of a product of 512 x 512 and what ran it
//
// Of all tile shapes below the one that does the last 512 tokens fastest is used.
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "worker.h"

typedef int dnnl_sgemm_call(char, char, int64_t m, int64_t n, int64_t k, float alpha,
                            const float *a, int64_t lda, const float *b, int64_t ldb, float beta,
                            float *c, int64_t ldc);
typedef void cblas_sgemm_call(int order, int, int, int m, int n, int k, float alpha, const float *a,
                              int lda, const float *b, int ldb, float beta, float *c, int ldc);
enum { ROW_MAJOR = 101, PLAIN = 111, TRANSPOSED = 112 };

static dnnl_sgemm_call *dnnl_sgemm;
static cblas_sgemm_call *cblas_sgemm;

// A tile has `rows` packed rows (tokens x query heads of one key head) and takes `keys` at a
// time, 0: all.
static const struct shape { int rows, keys; } shapes[] = {
  { 32, 0 }, { 64, 0 }, { 128, 0 }, { 256, 0 }, { 512, 0 },
  { 64, 512 }, { 128, 512 }, { 256, 512 }, { 512, 512 }, { 256, 1024 },
};
enum { SHAPES = sizeof shapes / sizeof *shapes, MOST_ROWS = 512 };

struct work {
  const struct worker_case *given;
  int shape;
  float *out;
  float *queries;        // [rows][dim]
  float *scores;         // [rows][keys of a block]
  float *product;        // [rows][dim]
  float top[MOST_ROWS], sum[MOST_ROWS];
};

static void *find(void *library, const char *name) { return library ? dlsym(library, name) : NULL; }

static bool open_library(const char *path, char words[256])
{
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  void *blas = find(library, "cblas_sgemm"), *dnnl = find(library, "dnnl_sgemm");
  const char *prefix = "";
  if (!blas) blas = find(library, "scipy_cblas_sgemm"), prefix = "scipy_";
  memcpy(&dnnl_sgemm, &dnnl, sizeof dnnl);
  memcpy(&cblas_sgemm, &blas, sizeof blas);
  if (dnnl) {
    const struct { int major, minor, patch; } *version;
    void *const address = find(library, "dnnl_version");
    const void *(*call)(void);
    memcpy(&call, &address, sizeof call);
    version = call();
    snprintf(words, 256, "oneDNN %d.%d.%d", version->major, version->minor, version->patch);
  } else if (blas) {
    char name[64];
    const char *(*call)(void);
    snprintf(name, sizeof name, "%sopenblas_get_config", prefix);
    void *const address = find(library, name);
    memcpy(&call, &address, sizeof call);
    snprintf(words, 256, "%s", address ? call() : "a BLAS");
  } else {
    snprintf(words, 256, "%s: %s", path, library ? "no sgemm in it" : "not on this machine");
  }
  return dnnl || blas;
}

// c [m][n] = a [m][k] times b ([k][n], or [n][k] when `transposed`) + beta c, row by row.
static void multiply(bool transposed, int64_t m, int64_t n, int64_t k, const float *a, int64_t lda,
                     const float *b, int64_t ldb, float beta, float *c, int64_t ldc)
{
  if (dnnl_sgemm)
    dnnl_sgemm('N', transposed ? 'T' : 'N', m, n, k, 1, a, lda, b, ldb, beta, c, ldc);
  else
    cblas_sgemm(ROW_MAJOR, PLAIN, transposed ? TRANSPOSED : PLAIN, (int)m, (int)n, (int)k, 1, a,
                (int)lda, b, (int)ldb, beta, c, (int)ldc);
}

// 2^x for x <= 0, to 2e-7; the compiler makes vectors of it.
static inline float exp2_fast(float x)
{
  const float clamped = x < -126 ? -126 : x;
  const float whole = rintf(clamped), rest = clamped - whole;
  float power = 1.5403530e-4f;
  power = power * rest + 1.3333558e-3f;
  power = power * rest + 9.6181291e-3f;
  power = power * rest + 5.5504109e-2f;
  power = power * rest + 2.4022651e-1f;
  power = power * rest + 6.9314718e-1f;
  power = power * rest + 1;
  union { int32_t bits; float value; } scale = { ((int32_t)whole + 127) << 23 };
  return power * scale.value;
}

// One row of scores [keys], of which [begin, end) are visible, to unnormalised weights.
// Returns by how much what was summed before must shrink.
static float soften(float *restrict row, int64_t keys, int64_t begin, int64_t end, float scale,
                    float *top, float *sum)
{
  float largest = *top, total = 0;
  for (int64_t j = 0; j < begin; j++) row[j] = 0;
  for (int64_t j = end > begin ? end : begin; j < keys; j++) row[j] = 0;
  #pragma omp simd reduction(max : largest)
  for (int64_t j = begin; j < end; j++)
    largest = row[j] * scale > largest ? row[j] * scale : largest;
  #pragma omp simd reduction(+ : total)
  for (int64_t j = begin; j < end; j++) {
    row[j] = exp2_fast(row[j] * scale - largest);
    total += row[j];
  }
  const float shrink = exp2_fast(*top - largest);
  *sum = *sum * shrink + total;
  *top = largest;
  return shrink;
}

// Queries [first, first + tokens) of one key head against keys [low, low + keys).
static void block(struct work *work, int head, int64_t first, int64_t tokens, int64_t low,
                  int64_t keys, bool begins, const float *q, int64_t ldq)
{
  const struct worker_case *given = work->given;
  const int64_t dim = given->dim, group = given->q_heads / given->kv_heads, rows = tokens * group;
  const int64_t ldk = given->kv_heads * dim, lds = (keys + 15) / 16 * 16;
  const float scale = 1.44269504f / sqrtf((float)dim);
  multiply(true, rows, keys, dim, q, ldq, given->k + (low * given->kv_heads + head) * dim, ldk, 0,
           work->scores, lds);
  for (int64_t row = 0; row < rows; row++) {
    const int64_t token = first + row / group;
    int64_t begin = token - given->window + 1 - low, end = token + 1 - low;
    if (begin < 0) begin = 0;
    if (begin > keys) begin = keys;
    if (end > keys) end = keys;
    const float shrink = soften(work->scores + row * lds, keys, begin, end, scale, &work->top[row],
                                &work->sum[row]);
    float *product = work->product + row * dim;
    if (!begins && shrink != 1)
      for (int64_t d = 0; d < dim; d++) product[d] *= shrink;
  }
  multiply(false, rows, dim, keys, work->scores, lds,
           given->v + (low * given->kv_heads + head) * dim, ldk, begins ? 0 : 1, work->product,
           dim);
}

static void tile(struct work *work, int head, int64_t first, int64_t tokens, int64_t most_keys)
{
  const struct worker_case *given = work->given;
  const int64_t dim = given->dim, group = given->q_heads / given->kv_heads;
  const int64_t row_stride = given->q_heads * dim, head_offset = head * group * dim;
  const float *q = given->q + first * row_stride + head_offset;
  int64_t ldq = given->kv_heads == 1 ? dim : row_stride;   // one head a group: rows stand in place
  if (given->kv_heads > 1 && group > 1) {
    for (int64_t t = 0; t < tokens; t++)
      memcpy(work->queries + t * group * dim, q + t * row_stride,
             (size_t)(group * dim) * sizeof *q);
    q = work->queries, ldq = dim;
  }
  for (int64_t row = 0; row < tokens * group; row++) work->top[row] = -1e30f, work->sum[row] = 0;
  const int64_t low = first - given->window + 1 > 0 ? first - given->window + 1 : 0;
  const int64_t high = first + tokens, step = most_keys ? most_keys : high - low;
  for (int64_t key = low; key < high; key += step)
    block(work, head, first, tokens, key, high - key < step ? high - key : step, key == low, q,
          ldq);
  for (int64_t row = 0; row < tokens * group; row++) {
    const float inverse = 1 / work->sum[row];
    const float *product = work->product + row * dim;
    float *out = work->out + (first + row / group) * row_stride + head_offset + row % group * dim;
    for (int64_t d = 0; d < dim; d++) out[d] = product[d] * inverse;
  }
}

static void pass(void *arg, int shape, int64_t first, int64_t last)
{
  struct work *work = arg;
  const int64_t group = work->given->q_heads / work->given->kv_heads;
  const int64_t step = shapes[shape].rows / group;
  for (int head = 0; head < work->given->kv_heads; head++)
    for (int64_t t = first; t < last; t += step)
      tile(work, head, t, last - t < step ? last - t : step, shapes[shape].keys);
}

static void run(void *arg)
{
  struct work *work = arg;
  pass(work, work->shape, 0, work->given->tokens);
}

static void save(void *arg)
{
  const struct work *work = arg;
  worker_write(work->out, work->given->q_count);
}

static int probe(const char *path)
{
  enum { SIZE = 512 };
  char words[256];
  if (!open_library(path, words)) worker_absent("%s", words);
  float *a = worker_memory(3 * SIZE * SIZE * sizeof *a), *b = a + SIZE * SIZE, *c = b + SIZE * SIZE;
  double best_s = 1e30;
  for (int round = 0; round < 20; round++) {
    const double begin_s = worker_cpu_s();
    multiply(true, SIZE, SIZE, SIZE, a, SIZE, b, SIZE, 0, c, SIZE);
    const double spent_s = worker_cpu_s() - begin_s;
    if (spent_s < best_s) best_s = spent_s;
  }
  printf("%.1f %s\n", 2e-9 * SIZE * SIZE * SIZE / best_s, words);
  return 0;
}

int main(int argc, char **argv)
{
  static struct work work;
  struct worker_case given;
  char library[256], words[512];
  if (argc == 3 && !strcmp(argv[1], "probe")) return probe(argv[2]);
  worker_open(argc, argv, &given);
  if (argc < 11) worker_absent("no library was named");
  if (!open_library(argv[10], library)) worker_absent("%s", library);
  if (given.bf16 || given.backward) worker_absent("only forward in float was written");
  if (given.q_heads / given.kv_heads > shapes[0].rows) worker_absent("too many heads in a group");
  work.given = &given;
  work.out = worker_memory(given.q_count * sizeof *work.out);
  work.queries = worker_memory((size_t)(MOST_ROWS * given.dim) * sizeof *work.out);
  work.product = worker_memory((size_t)(MOST_ROWS * given.dim) * sizeof *work.out);
  work.scores =
    worker_memory((size_t)(MOST_ROWS * (MOST_ROWS + given.window + 16)) * sizeof *work.out);
  work.shape = worker_best_shape(&given, pass, &work, SHAPES);
  snprintf(words, sizeof words, "%s, tiles of %d rows, %d keys", library, shapes[work.shape].rows,
           shapes[work.shape].keys);
  worker_serve(&given, run, save, &work, words);
  return 0;
}
