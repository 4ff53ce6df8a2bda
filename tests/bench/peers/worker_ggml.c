// worker_ggml.c: ggml's flash attention.  Its mask is dense, so the queries go in chunks, each
// with the keys its window can reach and no more; chunk lengths are tried as tile shapes are.
// Views of q, k and v in place, key heads shared as ggml shares them; the masks are made before
// the clock runs.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "ggml.h"
#include "ggml-cpu.h"
#include "worker.h"

static const int64_t lengths[] = { 64, 128, 256, 512 };   // queries of a chunk
enum { LENGTHS = sizeof lengths / sizeof *lengths };

struct chunk {
  struct ggml_context *context;
  struct ggml_cgraph *graph;
};

struct work {
  const struct worker_case *given;
  int shape;
  float *out;
  struct chunk *chunks[LENGTHS];    // chunk c has the queries [c * length, (c + 1) * length)
  uint8_t *scratch;
  size_t scratch_bytes;
};

// [heads][tokens][dim] as ggml counts (innermost first), over memory that is [tokens][heads][dim].
static struct ggml_tensor *view(struct ggml_context *context, const float *data, int64_t tokens,
                                int heads, int dim)
{
  struct ggml_tensor *tensor = ggml_new_tensor_3d(context, GGML_TYPE_F32, dim, tokens, heads);
  tensor->data = (void *)(uintptr_t)data;
  tensor->nb[1] = (size_t)(heads * dim) * sizeof *data;
  tensor->nb[2] = (size_t)dim * sizeof *data;
  tensor->nb[3] = tensor->nb[1] * (size_t)tokens;
  return tensor;
}

static ggml_fp16_t *make_mask(const struct worker_case *given, int64_t first, int64_t tokens,
                              int64_t low, int64_t keys)
{
  const ggml_fp16_t hidden = ggml_fp32_to_fp16(-INFINITY), visible = ggml_fp32_to_fp16(0);
  ggml_fp16_t *mask = worker_memory((size_t)(tokens * keys) * sizeof *mask);
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t j = 0; j < keys; j++) {
      const int64_t query = first + t, key = low + j;
      mask[t * keys + j] = key <= query && key > query - given->window ? visible : hidden;
    }
  return mask;
}

static void make_chunk(struct work *work, struct chunk *chunk, int64_t first, int64_t tokens)
{
  const struct worker_case *given = work->given;
  const struct ggml_init_params params = { 16384 + ggml_graph_overhead(), NULL, true };
  const int64_t low = first - given->window + 1 > 0 ? first - given->window + 1 : 0;
  const int64_t keys = first + tokens - low, row = given->q_heads * given->dim;
  const int64_t kv_row = given->kv_heads * given->dim;
  struct ggml_context *context = chunk->context = ggml_init(params);
  struct ggml_tensor *mask = ggml_new_tensor_2d(context, GGML_TYPE_F16, keys, tokens);
  mask->data = make_mask(given, first, tokens, low, keys);
  struct ggml_tensor *attention = ggml_flash_attn_ext(
      context, view(context, given->q + first * row, tokens, given->q_heads, given->dim),
      view(context, given->k + low * kv_row, keys, given->kv_heads, given->dim),
      view(context, given->v + low * kv_row, keys, given->kv_heads, given->dim), mask,
      1 / sqrtf((float)given->dim), 0, 0);
  attention->data = work->out + first * row;
  chunk->graph = ggml_new_graph_custom(context, 8, false);
  ggml_build_forward_expand(chunk->graph, attention);
  const struct ggml_cplan plan = ggml_graph_plan(chunk->graph, 1, NULL);
  if (plan.work_size > work->scratch_bytes) work->scratch_bytes = plan.work_size;
}

static void pass(void *arg, int shape, int64_t first, int64_t last)
{
  struct work *work = arg;
  const int64_t length = lengths[shape];
  for (int64_t c = first / length; c * length < last; c++) {
    struct ggml_cgraph *graph = work->chunks[shape][c].graph;
    struct ggml_cplan plan = ggml_graph_plan(graph, 1, NULL);
    plan.work_data = work->scratch;
    if (ggml_graph_compute(graph, &plan) != GGML_STATUS_SUCCESS) exit(1);
  }
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

int main(int argc, char **argv)
{
  static struct work work;
  struct worker_case given;
  char words[256];
  worker_open(argc, argv, &given);
  if (given.bf16) worker_absent("its flash attention on bfloat16 keys was not tried");
  if (given.backward) worker_absent("ggml has no backward of flash attention on the CPU");
  ggml_cpu_init();
  work.given = &given;
  work.out = worker_memory(given.q_count * sizeof *work.out);
  for (int shape = 0; shape < LENGTHS; shape++) {
    const int64_t length = lengths[shape], count = (given.tokens + length - 1) / length;
    work.chunks[shape] = worker_memory((size_t)count * sizeof **work.chunks);
    for (int64_t c = 0; c < count; c++) {
      const int64_t left = given.tokens - c * length;
      make_chunk(&work, &work.chunks[shape][c], c * length, left < length ? left : length);
    }
  }
  work.scratch = worker_memory(work.scratch_bytes);
  work.shape = worker_best_shape(&given, pass, &work, LENGTHS);
  snprintf(words, sizeof words, "ggml %s, chunks of %lld queries", ggml_version(),
           (long long)lengths[work.shape]);
  worker_serve(&given, run, save, &work, words);
  return 0;
}
