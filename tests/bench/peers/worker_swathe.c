// worker_swathe.c: swathe itself, through its public header: one rank, one thread, the default
// config (its tuning database is one that does not exist).
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "swathe.h"
#include "worker.h"

struct work {
  const struct worker_case *given;
  struct swathe_layer *layer;
  struct swathe_tensors tensors;
  size_t elem_bytes;
};

static void check(enum swathe_status status)
{
  if (status) worker_absent("%s", swathe_error());
}

// A tensor [tokens][heads][dim] of the problem's type, from floats that are bfloat16 values;
// NULL: zeros.
static struct swathe_tensor make_tensor(const struct work *work, const float *values, int heads)
{
  const int64_t row = (int64_t)heads * work->given->dim;
  const size_t count = (size_t)(work->given->tokens * row);
  struct swathe_tensor tensor = {
    worker_memory(count * work->elem_bytes), row, work->given->dim, 0 };
  for (size_t i = 0; values && i < count; i++) {
    const char *from = (const char *)&values[i] + sizeof *values - work->elem_bytes;  // high half
    memcpy((char *)tensor.data + i * work->elem_bytes, from, work->elem_bytes);
  }
  return tensor;
}

static void forward(struct work *work)
{
  check(swathe_layer_forward(work->layer, &work->tensors, NULL));
}

static void run(void *arg)
{
  struct work *work = arg;
  if (work->given->backward) check(swathe_layer_backward(work->layer, &work->tensors, NULL));
  else forward(work);
}

static void write_tensor(const struct work *work, struct swathe_tensor tensor, size_t count)
{
  float *values = worker_memory(count * sizeof *values);
  for (size_t i = 0; i < count; i++)
    memcpy((char *)&values[i] + sizeof *values - work->elem_bytes,
           (const char *)tensor.data + i * work->elem_bytes, work->elem_bytes);
  worker_write(values, count);
  free(values);
}

static void save(void *arg)
{
  const struct work *work = arg;
  if (!work->given->backward) {
    write_tensor(work, work->tensors.out, work->given->q_count);
    return;
  }
  write_tensor(work, work->tensors.dq, work->given->q_count);
  write_tensor(work, work->tensors.dk, work->given->kv_count);
  write_tensor(work, work->tensors.dv, work->given->kv_count);
}

static void make_layer(struct work *work, struct swathe_context *context)
{
  const struct worker_case *given = work->given;
  const struct swathe_sharding sharding = { .layout = SWATHE_CONTIGUOUS, .ranks = 1, .batch = 1,
                                            .tokens = given->tokens };
  struct swathe_problem problem;
  swathe_problem_init(&problem);
  problem.q_heads = given->q_heads;
  problem.kv_heads = given->kv_heads;
  problem.head_dim_qk = problem.head_dim_v = given->dim;
  problem.window_left = given->window - 1;
  problem.dtype = given->bf16 ? SWATHE_BF16 : SWATHE_F32;
  problem.tokens_per_rank = given->tokens;
  check(swathe_layer_create(context, &problem, NULL, &work->layer));
  check(swathe_layer_shard(work->layer, &sharding));
}

int main(int argc, char **argv)
{
  struct worker_case given;
  struct swathe_context *context;
  const struct swathe_options options = { .database = "/nonexistent/tuning.db", .threads = 1 };
  char words[512];
  worker_open(argc, argv, &given);
  struct work work = { .given = &given, .elem_bytes = given.bf16 ? 2 : 4 };
  check(swathe_open(&options, &context));
  make_layer(&work, context);
  work.tensors = (struct swathe_tensors){
    .q = make_tensor(&work, given.q, given.q_heads),
    .k = make_tensor(&work, given.k, given.kv_heads),
    .v = make_tensor(&work, given.v, given.kv_heads),
    .out = make_tensor(&work, NULL, given.q_heads),
    .lse = { worker_memory((size_t)(given.tokens * given.q_heads) * 4), given.q_heads, 1, 0 } };
  if (given.backward) {
    work.tensors.dout = make_tensor(&work, given.dout, given.q_heads);
    work.tensors.dq = make_tensor(&work, NULL, given.q_heads);
    work.tensors.dk = make_tensor(&work, NULL, given.kv_heads);
    work.tensors.dv = make_tensor(&work, NULL, given.kv_heads);
    forward(&work);
  }
  snprintf(words, sizeof words, "swathe %s, default config, 1 rank, 1 thread", SWATHE_VERSION);
  worker_serve(&given, run, save, &work, words);
  swathe_layer_destroy(work.layer);
  swathe_close(context);
  return 0;
}
