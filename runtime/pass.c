// pass.c: forward and backward of one rank: exchange + launch.
//
//   forward    post the halo's keys -> interior units (the exchange progresses) -> wait ->
//              edge units
//   backward   halo's keys as above unless the caller kept them -> edge units -> their gradients
//              home -> interior units -> wait -> add everything in a fixed order (gather)
//
// Nothing of a forward is remembered: it may be replayed, and layers may interleave.
#include "layer.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

// ---- Tensors ------------------------------------------------------------------------------------

static enum swathe_status check_tensor(const struct swathe_layer *layer, const char *name,
                                       const struct swathe_tensor *tensor, int32_t heads,
                                       int32_t dim, bool written)
{
  const int64_t rows = layer->plan->rows;
  if (rows == 0) return SWATHE_OK;
  if (!tensor->data)
    return sw_fail(SWATHE_BAD_TENSOR, "%s has no data, but this rank has %" PRId64 " rows", name,
                   rows);
  if (!written) return SWATHE_OK;
  if ((rows > 1 && tensor->token_stride == 0) || (layer->batch > 1 && tensor->batch_stride == 0) ||
      (heads > 1 && llabs(tensor->head_stride) < dim))
    return sw_fail(SWATHE_BAD_TENSOR,
                   "%s is written, but its strides (token %" PRId64 ", head %" PRId64
                   ", batch %" PRId64 ") make elements fall together",
                   name, tensor->token_stride, tensor->head_stride, tensor->batch_stride);
  return SWATHE_OK;
}

static enum swathe_status check_tensors(const struct swathe_layer *layer,
                                        const struct swathe_tensors *tensors, bool backward)
{
  const struct swathe_problem *p = &layer->problem;
  const struct {
    const char *name;
    const struct swathe_tensor *tensor;
    int32_t heads, dim;
    bool written, backward;
  } rows[] = {
    { "q", &tensors->q, p->q_heads, p->head_dim_qk, false, false },
    { "k", &tensors->k, p->kv_heads, p->head_dim_qk, false, false },
    { "v", &tensors->v, p->kv_heads, p->head_dim_v, false, false },
    { "out", &tensors->out, p->q_heads, p->head_dim_v, !backward, false },
    { "lse", &tensors->lse, p->q_heads, 1, !backward, false },
    { "dout", &tensors->dout, p->q_heads, p->head_dim_v, false, true },
    { "dq", &tensors->dq, p->q_heads, p->head_dim_qk, true, true },
    { "dk", &tensors->dk, p->kv_heads, p->head_dim_qk, true, true },
    { "dv", &tensors->dv, p->kv_heads, p->head_dim_v, true, true },
  };
  enum swathe_status status = SWATHE_OK;

  for (size_t i = 0; i < sizeof rows / sizeof *rows && !status; i++)
    if (backward || !rows[i].backward)
      status = check_tensor(layer, rows[i].name, rows[i].tensor, rows[i].heads, rows[i].dim,
                            rows[i].written);
  if (!status && p->sinks && (!tensors->sink || (backward && !tensors->dsink)))
    status = sw_fail(SWATHE_BAD_TENSOR, "the problem has sinks, but %s is NULL",
                     tensors->sink ? "dsink" : "sink");
  if (!status && !p->sinks && tensors->sink)
    status = sw_fail(SWATHE_BAD_TENSOR, "sink is given, but the problem has no sinks");
  return status;
}

static enum swathe_status check_call(const struct swathe_layer *layer,
                                     enum swathe_direction direction,
                                     const struct swathe_tensors *tensors, const void *stream)
{
  if (!layer->plan)
    return sw_fail(SWATHE_BAD_USE, "the layer has no sharding: call swathe_layer_shard first");
  if (!layer->kernels[direction])
    return sw_fail(SWATHE_BAD_USE, "the layer was made without its %s kernel",
                   sw_context_kernel_name(direction));
  if (stream && !layer->cuda) return sw_fail(SWATHE_BAD_USE, "the cpu target takes no stream");
  return check_tensors(layer, tensors, direction == SWATHE_BACKWARD);
}

// Rows of a [batch][rows][heads][dim] tensor that no span covers.
static void zero_gaps(const struct swathe_layer *layer, const struct swathe_tensor *tensor,
                      int32_t heads, size_t dim_bytes, size_t elem_bytes)
{
  for (int64_t g = 0; g < layer->plan->gap_count; g++)
    for (int32_t b = 0; b < layer->batch; b++)
      for (int64_t row = 0; row < layer->plan->gaps[g].rows; row++)
        for (int32_t h = 0; h < heads; h++) {
          const int64_t first = (layer->plan->gaps[g].row + row) * tensor->token_stride +
                                b * tensor->batch_stride + h * tensor->head_stride;
          memset((char *)tensor->data + first * (int64_t)elem_bytes, 0, dim_bytes);
        }
}

static void mark_gaps(const struct swathe_layer *layer, const struct swathe_tensor *lse)
{
  for (int64_t g = 0; g < layer->plan->gap_count; g++)
    for (int32_t b = 0; b < layer->batch; b++)
      for (int64_t row = 0; row < layer->plan->gaps[g].rows; row++)
        for (int32_t h = 0; h < layer->problem.q_heads; h++)
          ((float *)lse->data)[(layer->plan->gaps[g].row + row) * lse->token_stride +
                               b * lse->batch_stride + h * lse->head_stride] = -INFINITY;
}

// ---- Launch -------------------------------------------------------------------------------------

// Points every run at its keys, and in backward at the place of its sums.
static void point_runs(struct swathe_layer *layer, enum swathe_direction direction,
                       const struct swathe_tensors *tensors, void *halo)
{
  struct sw_work *work = &layer->work[direction];
  const size_t elem = sw_problem_elem_bytes(&layer->problem);

  for (int64_t i = 0; i < work->run_count; i++) {
    const struct sw_run_source *source = &work->sources[i];
    struct sw_run *run = &work->runs[i];
    if (source->place == SW_OWN) {
      run->k = sw_exchange_tensor(&tensors->k, source->index, elem);
      run->v = sw_exchange_tensor(&tensors->v, source->index, elem);
    } else {
      const struct sw_key_views keys =
          sw_exchange_wire(layer, halo, elem, layer->plan->receive_tokens, source->index);
      run->k = keys.k;
      run->v = keys.v;
    }
    if (direction == SWATHE_FORWARD) continue;
    if (run->final) {
      run->dk = sw_exchange_tensor(&tensors->dk, source->index, elem);
      run->dv = sw_exchange_tensor(&tensors->dv, source->index, elem);
    } else {
      const struct sw_key_views sums =
          sw_exchange_packed(layer, layer->spill_sums.data, sizeof(float), source->spill);
      run->dk = sums.k;
      run->dv = sums.v;
    }
  }
}

static struct sw_attention_args attention_args(const struct swathe_layer *layer,
                                               enum swathe_direction direction,
                                               const struct swathe_tensors *tensors)
{
  const struct sw_work *work = &layer->work[direction];
  const size_t elem = sw_problem_elem_bytes(&layer->problem);
  struct sw_attention_args args = {
    .units = work->units,
    .runs = work->runs,
    .batch = layer->batch,
    .kv_heads = layer->problem.kv_heads,
    .max_keys = work->max_keys,
    .scale = (float)sw_problem_scale(&layer->problem),
    .softcap = (float)layer->problem.softcap,
    .sink = tensors->sink,
    .q = sw_exchange_tensor(&tensors->q, 0, elem),
    .out = sw_exchange_tensor(&tensors->out, 0, elem),
    .lse = sw_exchange_tensor(&tensors->lse, 0, sizeof(float)),
  };
  if (direction == SWATHE_FORWARD && tensors->max_logits) args.max_logits = layer->head_sums.data;
  if (direction == SWATHE_BACKWARD) {
    args.dout = sw_exchange_tensor(&tensors->dout, 0, elem);
    args.dq = sw_exchange_tensor(&tensors->dq, 0, elem);
    args.dsink = layer->head_sums.data;
  }
  return args;
}

// A launch of some units: of a list, or without one of those from `first` on.  The device hands out
// ranges of their items, counted from 0.
struct picked {
  sw_attention_kernel *kernel;
  const struct sw_attention_args *args;
  const int64_t *list;
  int64_t first, per_unit;
};

static void run_picked(const void *arg, int64_t begin, int64_t end, void *workspace)
{
  const struct picked *picked = arg;
  const int64_t per_unit = picked->per_unit;
  if (!picked->list) {
    const int64_t first = picked->first * per_unit;
    picked->kernel(picked->args, first + begin, first + end, workspace);
    return;
  }
  for (int64_t i = begin; i < end; i++) {
    const int64_t item = picked->list[i / per_unit] * per_unit + i % per_unit;
    picked->kernel(picked->args, item, item + 1, workspace);
  }
}

static enum swathe_status launch_picked(struct swathe_layer *layer,
                                        enum swathe_direction direction,
                                        const struct sw_attention_args *args, const int64_t *list,
                                        int64_t first, int64_t count, struct sw_exchange *exchange)
{
  const struct sw_kernel *kernel = layer->kernels[direction];
  const int64_t per_unit = (int64_t)layer->batch * layer->problem.kv_heads;
  const struct picked picked = { kernel->attention, args, list, first, per_unit };
  const struct sw_device_launch launch = {
    .kernel = run_picked,
    .args = &picked,
    .items = count * per_unit,
    .grain = 1,
    .workspace_bytes = (size_t)kernel->workspace(args->max_keys),
    .idle = exchange ? sw_exchange_progress : NULL,
    .idle_arg = exchange,
  };
  return launch.items ? sw_device_launch(layer->device, &launch) : SWATHE_OK;
}

static enum swathe_status launch_units(struct swathe_layer *layer, enum swathe_direction direction,
                                       const struct sw_attention_args *args, int64_t begin,
                                       int64_t end, struct sw_exchange *exchange)
{
  return launch_picked(layer, direction, args, NULL, begin, end - begin, exchange);
}

// Whether all keys of the unit that come by the wire are there.
static bool has_keys(const struct sw_work *work, const struct sw_unit *unit,
                     const struct sw_exchange *exchange)
{
  for (int64_t r = unit->run_begin; r < unit->run_end; r++)
    if (work->runs[r].wire &&
        !sw_exchange_has(exchange, work->sources[r].index, work->runs[r].tokens))
      return false;
  return true;
}

// Of the `count` units of the list, puts those first that have their keys; returns how many.
static int64_t sort_out(const struct sw_work *work, int64_t *list, int64_t count,
                        const struct sw_exchange *exchange)
{
  int64_t ready = 0;
  for (int64_t i = 0; i < count; i++) {
    if (!has_keys(work, &work->units[list[i]], exchange)) continue;
    const int64_t unit = list[i];
    list[i] = list[ready];
    list[ready++] = unit;
  }
  return ready;
}

// The edge units: when all keys have come, or each as soon as its own have.  The phase is over
// afterwards.
static enum swathe_status launch_edge(struct swathe_layer *layer, enum swathe_direction direction,
                                      const struct sw_attention_args *args,
                                      struct sw_exchange *exchange)
{
  const struct sw_work *work = &layer->work[direction];
  int64_t *list = layer->waiting.items, count = work->edge_units;
  enum swathe_status status = SWATHE_OK;

  if (layer->knobs.overlap < 2) {
    status = sw_exchange_finish(layer, exchange);
    return status ? status : launch_units(layer, direction, args, 0, count, NULL);
  }
  for (int64_t i = 0; i < count; i++) list[i] = i;
  while (count && !status) {
    const int64_t ready = sort_out(work, list, count, exchange);
    if (ready) status = launch_picked(layer, direction, args, list, 0, ready, exchange);
    else status = sw_exchange_wait_more(exchange);
    list += ready;
    count -= ready;
  }
  return status ? status : sw_exchange_finish(layer, exchange);
}

// The largest of the units' scores for each head; -inf for a rank without rows.
static void find_max_logits(const struct swathe_layer *layer, float *max_logits)
{
  const int64_t rows = layer->work[SWATHE_FORWARD].unit_count * layer->batch;
  const int32_t heads = layer->problem.q_heads;
  const float *scores = layer->head_sums.data;

  for (int32_t h = 0; h < heads; h++) {
    max_logits[h] = -INFINITY;
    for (int64_t i = 0; i < rows; i++) max_logits[h] = fmaxf(max_logits[h], scores[i * heads + h]);
  }
}

enum swathe_status swathe_layer_forward(struct swathe_layer *layer,
                                        const struct swathe_tensors *tensors, void *stream)
{
  const double begin = sw_layer_now_us();
  const struct sw_work *work = &layer->work[SWATHE_FORWARD];
  struct sw_exchange exchange;
  enum swathe_status status = check_call(layer, SWATHE_FORWARD, tensors, stream);

  if (!status) status = sw_agree(layer);
  if (!status && layer->cuda) return sw_pass_cuda_run(layer, SWATHE_FORWARD, tensors, stream);
  if (!status && tensors->max_logits) status = sw_layer_reserve_heads(layer, work->unit_count);
  if (status) return status;
  layer->timing = (struct swathe_timing){ .total_us = 0 };
  if (layer->strategy == SWATHE_A2A)
    return sw_baseline_heads_pass(layer, SWATHE_FORWARD, tensors);
  void *halo = tensors->halo ? tensors->halo : layer->receive.data;
  point_runs(layer, SWATHE_FORWARD, tensors, halo);
  const struct sw_attention_args args = attention_args(layer, SWATHE_FORWARD, tensors);
  zero_gaps(layer, &tensors->out, layer->problem.q_heads,
            (size_t)layer->problem.head_dim_v * sw_problem_elem_bytes(&layer->problem),
            sw_problem_elem_bytes(&layer->problem));
  mark_gaps(layer, &tensors->lse);

  status = sw_exchange_post_keys(layer, tensors, halo, &exchange);
  if (!status)
    status =
        launch_units(layer, SWATHE_FORWARD, &args, work->edge_units, work->unit_count, &exchange);
  if (!status) status = launch_edge(layer, SWATHE_FORWARD, &args, &exchange);
  if (!status && tensors->max_logits) find_max_logits(layer, tensors->max_logits);
  layer->timing.total_us = sw_layer_now_us() - begin;
  if (!status) return SWATHE_OK;
  status = sw_exchange_abandon(layer, status);
  return sw_within(status, "in forward of rank %d", sw_layer_rank(layer));
}

// ---- Backward -----------------------------------------------------------------------------------

// The terms of all sums, for this call.
static void point_terms(struct swathe_layer *layer)
{
  const struct sw_sums *sums = &layer->work[SWATHE_BACKWARD].sums;
  const struct sw_sum_source *sources = sums->sources.items;
  struct sw_term *terms = sums->terms.items;

  for (int64_t i = 0; i < sums->sources.count; i++) {
    const struct sw_key_views views =
        sources[i].place == SW_HOME
            ? sw_exchange_wire(layer, layer->receive_sums.data, sizeof(float),
                               layer->plan->send_tokens, sources[i].index)
            : sw_exchange_packed(layer, layer->spill_sums.data, sizeof(float), sources[i].index);
    terms[i] = (struct sw_term){ .dk = views.k, .dv = views.v };
  }
}

static enum swathe_status reserve_backward(struct swathe_layer *layer)
{
  const struct sw_halo_plan *plan = layer->plan;
  const struct sw_work *work = &layer->work[SWATHE_BACKWARD];
  const size_t wire_bytes = sw_exchange_sum_bytes(layer);
  enum swathe_status status =
      sw_layer_reserve(layer, &layer->spill_sums, work->spill_tokens, sizeof(float));

  if (!status)
    status = sw_layer_reserve(layer, &layer->send_sums, plan->receive_tokens, wire_bytes);
  if (!status)
    status = sw_layer_reserve(layer, &layer->receive_sums, plan->send_tokens, sizeof(float));
  if (!status && sw_exchange_narrows(layer))
    status = sw_layer_reserve(layer, &layer->receive_narrow, plan->send_tokens, wire_bytes);
  if (!status && layer->problem.sinks) status = sw_layer_reserve_heads(layer, work->unit_count);
  return status;
}

struct gathering {
  sw_gather_kernel *kernel;
  const struct sw_gather_args *args;
};

static void run_gather(const void *arg, int64_t begin, int64_t end, void *workspace)
{
  const struct gathering *gathering = arg;
  gathering->kernel(gathering->args, begin, end, workspace);
}

static enum swathe_status launch_gather(struct swathe_layer *layer, struct sw_gather_args args)
{
  args.terms = layer->work[SWATHE_BACKWARD].sums.terms.items;
  args.batch = layer->batch;
  args.kv_heads = layer->problem.kv_heads;
  const struct gathering gathering = { layer->kernels[SWATHE_BACKWARD]->gather, &args };
  const struct sw_device_launch launch = {
    .kernel = run_gather,
    .args = &gathering,
    .items = args.batch * args.sum_count,
    .grain = 4,
  };
  return launch.items ? sw_device_launch(layer->device, &launch) : SWATHE_OK;
}

// Adds up the sums of the halo's keys in the messages that take them home.
static enum swathe_status gather_wire(struct swathe_layer *layer)
{
  const struct sw_sums *sums = &layer->work[SWATHE_BACKWARD].sums;
  const struct sw_key_views to =
      sw_exchange_wire(layer, layer->send_sums.data, sw_exchange_sum_bytes(layer),
                       layer->plan->receive_tokens, 0);
  return launch_gather(
      layer, (struct sw_gather_args){
                 .sums = sums->pieces.items,
                 .sum_count = sums->wire_pieces,
                 .format = sw_exchange_narrows(layer) ? SW_SUMS_BF16 : SW_SUMS_FLOAT,
                 .dk = to.k,
                 .dv = to.v,
             });
}

// Adds up the gradients of the own keys that several had sums for.
static enum swathe_status gather_own(struct swathe_layer *layer,
                                     const struct swathe_tensors *tensors)
{
  const struct sw_sums *sums = &layer->work[SWATHE_BACKWARD].sums;
  const size_t elem = sw_problem_elem_bytes(&layer->problem);
  return launch_gather(layer, (struct sw_gather_args){
                                  .sums = (const struct sw_sum *)sums->pieces.items +
                                          sums->wire_pieces,
                                  .sum_count = sums->pieces.count - sums->wire_pieces,
                                  .format = SW_SUMS_ELEM,
                                  .dk = sw_exchange_tensor(&tensors->dk, 0, elem),
                                  .dv = sw_exchange_tensor(&tensors->dv, 0, elem),
                              });
}

// dsink of this rank: the units' sums, added in double in the order of the units.
static void add_sinks(const struct swathe_layer *layer, float *dsink)
{
  const int64_t rows = layer->work[SWATHE_BACKWARD].unit_count * layer->batch;
  const int32_t heads = layer->problem.q_heads;
  const float *sums = layer->head_sums.data;

  for (int32_t h = 0; h < heads; h++) {
    double sum = 0;
    for (int64_t i = 0; i < rows; i++) sum += sums[i * heads + h];
    dsink[h] = (float)sum;
  }
}

// The units, with the exchanges between them.  Half the interior hides the keys' way here if they
// must be fetched again, the rest hides the sums' way home.
static enum swathe_status run_backward(struct swathe_layer *layer,
                                       const struct swathe_tensors *tensors)
{
  const struct sw_work *work = &layer->work[SWATHE_BACKWARD];
  void *halo = tensors->halo ? tensors->halo : layer->receive.data;
  int64_t interior = work->edge_units;
  struct sw_exchange exchange = { .layer = layer };
  enum swathe_status status = SWATHE_OK;

  point_runs(layer, SWATHE_BACKWARD, tensors, halo);
  const struct sw_attention_args args = attention_args(layer, SWATHE_BACKWARD, tensors);
  if (!tensors->halo) {
    const int64_t half = interior + (work->unit_count - interior) / 2;
    status = sw_exchange_post_keys(layer, tensors, halo, &exchange);
    if (!status) status = launch_units(layer, SWATHE_BACKWARD, &args, interior, half, &exchange);
    interior = half;
  }
  if (!status) status = launch_edge(layer, SWATHE_BACKWARD, &args, &exchange);
  if (!status) status = gather_wire(layer);
  if (!status) status = sw_exchange_post_sums(layer, &exchange);
  if (!status)
    status = launch_units(layer, SWATHE_BACKWARD, &args, interior, work->unit_count, &exchange);
  return status ? status : sw_exchange_finish_sums(layer, &exchange);
}

enum swathe_status swathe_layer_backward(struct swathe_layer *layer,
                                         const struct swathe_tensors *tensors, void *stream)
{
  const double begin = sw_layer_now_us();
  const size_t elem = sw_problem_elem_bytes(&layer->problem);
  enum swathe_status status = check_call(layer, SWATHE_BACKWARD, tensors, stream);

  if (!status) status = sw_agree(layer);
  if (!status && layer->cuda) return sw_pass_cuda_run(layer, SWATHE_BACKWARD, tensors, stream);
  if (!status && layer->strategy == SWATHE_A2A)
    return sw_baseline_heads_pass(layer, SWATHE_BACKWARD, tensors);
  if (!status) status = reserve_backward(layer);
  if (status) return status;
  layer->timing = (struct swathe_timing){ .total_us = 0 };
  zero_gaps(layer, &tensors->dq, layer->problem.q_heads, (size_t)layer->problem.head_dim_qk * elem,
            elem);
  zero_gaps(layer, &tensors->dk, layer->problem.kv_heads,
            (size_t)layer->problem.head_dim_qk * elem, elem);
  zero_gaps(layer, &tensors->dv, layer->problem.kv_heads,
            (size_t)layer->problem.head_dim_v * elem, elem);
  point_terms(layer);
  status = run_backward(layer, tensors);
  if (!status) status = gather_own(layer, tensors);
  if (!status && layer->problem.sinks) add_sinks(layer, tensors->dsink);
  layer->timing.total_us = sw_layer_now_us() - begin;
  if (!status) return SWATHE_OK;
  status = sw_exchange_abandon(layer, status);
  return sw_within(status, "in backward of rank %d", sw_layer_rank(layer));
}
