// trial_tensors.c: random inputs of a problem and room for its results, copied to the device and
// back where kernels run there.
#include "trial_tensors.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

// ---- On the host ------------------------------------------------------------------------------

// xorshift64* (Vigna 2016): uniform in [-sqrt 3, sqrt 3), so of variance 1.
static float next_random(uint64_t *state)
{
  *state ^= *state >> 12;
  *state ^= *state << 25;
  *state ^= *state >> 27;
  const uint64_t bits = (*state * 2685821657736338717u) >> 40;
  return ((float)bits / 8388608.0f - 1.0f) * 1.7320508f;
}

double sw_trial_tensors_element(const struct swathe_problem *problem, const void *data,
                                int64_t index)
{
  return problem->dtype == SWATHE_F32
             ? (double)((const float *)data)[index]
             : (double)sw_problem_widen(problem->dtype, ((const uint16_t *)data)[index]);
}

// Aligned to cache lines, as a trainer's tensors are: kernels may write whole ones past the cache.
static void *make(const struct swathe_problem *problem, int64_t elements, uint64_t seed)
{
  const size_t bytes = (size_t)elements * sw_problem_elem_bytes(problem);
  void *data = aligned_alloc(64, (bytes + 64) / 64 * 64);
  if (data) memset(data, 0, bytes);
  if (!data || !seed) return data;
  for (int64_t i = 0; i < elements; i++) {
    const float value = next_random(&seed);
    if (problem->dtype == SWATHE_F32) ((float *)data)[i] = value;
    else ((uint16_t *)data)[i] = sw_problem_narrow(problem->dtype, value);
  }
  return data;
}

void sw_trial_tensors_free(struct sw_trial_tensors *t)
{
  void *const all[] = { t->q,  t->k,  t->v,   t->out,  t->dout, t->dq,
                        t->dk, t->dv, t->lse, t->sink, t->dsink };
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

enum swathe_status sw_trial_tensors_make(struct sw_trial_tensors *t,
                                         const struct swathe_problem *problem, int64_t rows)
{
  const int64_t q = rows * problem->q_heads * problem->head_dim_qk;
  const int64_t o = rows * problem->q_heads * problem->head_dim_v;
  const int64_t k = rows * problem->kv_heads * problem->head_dim_qk;
  const int64_t v = rows * problem->kv_heads * problem->head_dim_v;
  struct swathe_problem floats = *problem;

  floats.dtype = SWATHE_F32;
  *t = (struct sw_trial_tensors){
    .problem = *problem,
    .rows = rows,
    .q = make(problem, q, 11),
    .k = make(problem, k, 12),
    .v = make(problem, v, 13),
    .dout = make(problem, o, 14),
    .sink = make(&floats, problem->q_heads, 15),
    .out = make(problem, o, 0),
    .dq = make(problem, q, 0),
    .dk = make(problem, k, 0),
    .dv = make(problem, v, 0),
    .lse = make(&floats, rows * problem->q_heads, 0),
    .dsink = make(&floats, problem->q_heads, 0),
  };
  if (t->q && t->k && t->v && t->dout && t->sink && t->out && t->dq && t->dk && t->dv && t->lse &&
      t->dsink)
    return SWATHE_OK;
  return sw_fail(SWATHE_NO_MEMORY, "no memory for %" PRId64 " rows to tune on", rows);
}

static struct swathe_tensor packed(void *data, int32_t heads, int32_t dim)
{
  return (struct swathe_tensor){ data, (int64_t)heads * dim, dim, 0 };
}

struct swathe_tensors sw_trial_tensors_call(struct sw_trial_tensors *t)
{
  const struct swathe_problem *p = &t->problem;
  return (struct swathe_tensors){
    .q = packed(t->q, p->q_heads, p->head_dim_qk),
    .k = packed(t->k, p->kv_heads, p->head_dim_qk),
    .v = packed(t->v, p->kv_heads, p->head_dim_v),
    .out = packed(t->out, p->q_heads, p->head_dim_v),
    .lse = packed(t->lse, p->q_heads, 1),
    .dout = packed(t->dout, p->q_heads, p->head_dim_v),
    .dq = packed(t->dq, p->q_heads, p->head_dim_qk),
    .dk = packed(t->dk, p->kv_heads, p->head_dim_qk),
    .dv = packed(t->dv, p->kv_heads, p->head_dim_v),
    .sink = p->sinks ? t->sink : NULL,
    .dsink = p->sinks ? t->dsink : NULL,
  };
}

// ---- On the target ----------------------------------------------------------------------------

struct array {
  void *host;
  void **called;  // its place in the call; NULL: not part of it
  size_t bytes;
  bool written;
};

static void list_arrays(struct sw_trial_tensors *t, struct swathe_tensors *call,
                        struct array *arrays)
{
  const struct swathe_problem *p = &t->problem;
  const size_t elem = sw_problem_elem_bytes(p), rows = (size_t)t->rows;
  const size_t heads = (size_t)p->q_heads, kv = (size_t)p->kv_heads;
  const size_t qk = (size_t)p->head_dim_qk * elem, v = (size_t)p->head_dim_v * elem;
  const struct array all[SW_TRIAL_ARRAYS] = {
    { t->q, &call->q.data, rows * heads * qk, false },
    { t->k, &call->k.data, rows * kv * qk, false },
    { t->v, &call->v.data, rows * kv * v, false },
    { t->dout, &call->dout.data, rows * heads * v, false },
    { t->out, &call->out.data, rows * heads * v, true },
    { t->dq, &call->dq.data, rows * heads * qk, true },
    { t->dk, &call->dk.data, rows * kv * qk, true },
    { t->dv, &call->dv.data, rows * kv * v, true },
    { t->lse, &call->lse.data, rows * heads * sizeof(float), true },
    { t->sink, call->sink ? (void **)&call->sink : NULL, heads * sizeof(float), false },
    { t->dsink, call->dsink ? (void **)&call->dsink : NULL, heads * sizeof(float), true },
  };
  memcpy(arrays, all, sizeof all);
}

static bool on_device(const struct sw_trial_tensors *t) { return t->problem.target == SWATHE_CUDA; }

enum swathe_status sw_trial_tensors_place(struct swathe_context *context,
                                          struct sw_trial_tensors *t,
                                          struct sw_trial_placed *placed)
{
  struct array arrays[SW_TRIAL_ARRAYS];
  enum swathe_status status = SWATHE_OK;

  *placed = (struct sw_trial_placed){ .host = t, .call = sw_trial_tensors_call(t) };
  list_arrays(t, &placed->call, arrays);
  for (int i = 0; i < SW_TRIAL_ARRAYS && on_device(t) && !status; i++) {
    if (!arrays[i].called) continue;
    status = swathe_memory_allocate(context, SWATHE_CUDA, arrays[i].bytes,
                                    &placed->memory[i]);
    if (!status)
      status = swathe_memory_write(context, SWATHE_CUDA, placed->memory[i], arrays[i].host,
                                   arrays[i].bytes);
    *arrays[i].called = placed->memory[i];
  }
  return status;
}

enum swathe_status sw_trial_tensors_fetch(struct swathe_context *context,
                                          struct sw_trial_placed *placed)
{
  struct array arrays[SW_TRIAL_ARRAYS];
  enum swathe_status status = SWATHE_OK;

  list_arrays(placed->host, &placed->call, arrays);
  for (int i = 0; i < SW_TRIAL_ARRAYS && on_device(placed->host) && !status; i++)
    if (arrays[i].called && arrays[i].written)
      status = swathe_memory_read(context, SWATHE_CUDA, arrays[i].host, placed->memory[i],
                                  arrays[i].bytes);
  return status;
}

void sw_trial_tensors_unplace(struct swathe_context *context, struct sw_trial_placed *placed)
{
  for (int i = 0; i < SW_TRIAL_ARRAYS && on_device(placed->host); i++)
    swathe_memory_free(context, SWATHE_CUDA, placed->memory[i]);
}
