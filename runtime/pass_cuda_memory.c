// pass_cuda_memory.c: what a layer keeps in its device's memory: buffers for keys and sums, and the
// lists that tell the kernels of a sharding.
//
// What a sharding says (units, runs, pieces, ...) is laid out once in one block of host memory and
// copied to the device beside the work that is queued.  The strides of the caller's tensors stand
// in it too, so a call with other strides than the last makes it anew.
#include "pass_cuda.h"

#include <stdlib.h>
#include <string.h>

// Rows that one block of pack, fill or gather works on.
enum { COPY_ROWS = 8, ALIGNMENT = 256 };

// ---- Buffers ------------------------------------------------------------------------------------

size_t sw_pass_cuda_memory_bytes(const struct swathe_layer *layer)
{
  const struct sw_pass_cuda *pass = layer->cuda;
  if (!pass) return 0;
  const size_t bytes[] = { pass->lists.bytes,        pass->send.bytes,         pass->receive.bytes,
                           pass->send_sums.bytes,    pass->receive_sums.bytes, pass->delta.bytes,
                           pass->receive_narrow.bytes, pass->spill_sums.bytes,
                           pass->head_sums.bytes };
  size_t sum = 0;
  for (size_t i = 0; i < sizeof bytes / sizeof *bytes; i++) sum += bytes[i];
  return sum;
}

// At least so many bytes; contents are not kept.  What is queued may use the old memory, so growing
// waits for it.
static enum swathe_status reserve(struct sw_pass_cuda *pass, struct sw_buffer *memory, size_t bytes,
                                  bool pinned)
{
  enum swathe_status status = SWATHE_OK;

  if (bytes <= memory->bytes) return SWATHE_OK;
  if (memory->data) {
    if (pass->was_used) status = sw_device_cuda_wait_event(pass->device, pass->used);
    if (!status) status = sw_device_cuda_synchronize(pass->device, pass->wire);
    if (!status) status = sw_device_cuda_synchronize(pass->device, pass->upload);
    if (status) return status;
    if (pinned) sw_device_cuda_free_pinned(pass->device, memory->data);
    else sw_device_cuda_free(pass->device, memory->data);
  }
  *memory = (struct sw_buffer){ .data = NULL };
  status = pinned ? sw_device_cuda_allocate_pinned(pass->device, bytes, &memory->data)
                  : sw_device_cuda_allocate(pass->device, bytes, &memory->data);
  if (!status) memory->bytes = bytes;
  return status;
}

// Buffers whose size the sharding decides.
static enum swathe_status reserve_buffers(struct swathe_layer *layer)
{
  struct sw_pass_cuda *pass = layer->cuda;
  const struct sw_halo_plan *plan = layer->plan;
  const struct sw_work *work = layer->work;
  const size_t elem = sw_problem_elem_bytes(&layer->problem), sum = sw_exchange_sum_bytes(layer);
  const bool backward = pass->gone_backward;
  const size_t heads = (size_t)layer->batch * (size_t)layer->problem.q_heads * sizeof(float);
  const int64_t units = work[0].unit_count > work[1].unit_count ? work[0].unit_count
                                                                 : work[1].unit_count;
  const size_t wide = backward && sum > elem ? sum : elem;  // of what passes through host memory
  const int64_t sent = plan->send_tokens, received = plan->receive_tokens;
  const int64_t most = sent > received ? sent : received;
  const struct {
    struct sw_buffer *memory;
    size_t bytes;
    bool pinned, wanted;
  } rows[] = {
    { &pass->send, sw_layer_keys_bytes(layer, sent, elem), false, true },
    { &pass->receive, sw_layer_keys_bytes(layer, received, elem), false, true },
    { &pass->head_sums, (size_t)units * heads, false, true },
    { &pass->host_out, sw_layer_keys_bytes(layer, most, wide), true, sw_pass_cuda_stages(layer) },
    { &pass->host_in, sw_layer_keys_bytes(layer, most, wide), true, sw_pass_cuda_stages(layer) },
    { &pass->send_sums, sw_layer_keys_bytes(layer, received, sum), false, backward },
    { &pass->receive_sums, sw_layer_keys_bytes(layer, sent, sizeof(float)), false, backward },
    { &pass->receive_narrow, sw_layer_keys_bytes(layer, sent, sum), false,
      backward && sw_exchange_narrows(layer) },
    { &pass->spill_sums,
      sw_layer_keys_bytes(layer, work[SWATHE_BACKWARD].spill_tokens, sizeof(float)), false,
      backward },
    { &pass->delta, (size_t)plan->rows * heads, false, backward },
  };
  enum swathe_status status = SWATHE_OK;

  for (size_t i = 0; i < sizeof rows / sizeof *rows && !status; i++)
    if (rows[i].wanted)
      status = reserve(pass, rows[i].memory, rows[i].bytes, rows[i].pinned);
  return status;
}

void sw_pass_cuda_memory_free(struct sw_pass_cuda *pass)
{
  struct sw_buffer *const device[] = {
    &pass->lists,        &pass->send,       &pass->receive,        &pass->send_sums,
    &pass->receive_sums, &pass->spill_sums, &pass->receive_narrow, &pass->delta,
    &pass->head_sums
  };
  struct sw_buffer *const host[] = { &pass->staging[0], &pass->staging[1], &pass->host_out,
                                     &pass->host_in };

  for (size_t i = 0; i < sizeof device / sizeof *device; i++)
    sw_device_cuda_free(pass->device, device[i]->data);
  for (size_t i = 0; i < sizeof host / sizeof *host; i++)
    sw_device_cuda_free_pinned(pass->device, host[i]->data);
}

// ---- Lists --------------------------------------------------------------------------------------

static int64_t pieces_of(int64_t rows) { return (rows + COPY_ROWS - 1) / COPY_ROWS; }

static size_t place(struct sw_cuda_places *places, int64_t count, size_t item_bytes)
{
  const size_t at = places->bytes;
  places->bytes += ((size_t)count * item_bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  return at;
}

static struct sw_cuda_places find_places(const struct swathe_layer *layer)
{
  const struct sw_halo_plan *plan = layer->plan;
  const struct sw_sums *sums = &layer->work[SWATHE_BACKWARD].sums;
  struct sw_cuda_places places = { .bytes = 0 };

  for (int d = 0; d < 2; d++) {
    places.units[d] = place(&places, layer->work[d].unit_count, sizeof(struct sw_unit));
    places.runs[d] = place(&places, layer->work[d].run_count, sizeof(struct sw_run));
  }
  places.pieces = place(&places, sums->pieces.count, sizeof(struct sw_sum));
  places.terms = place(&places, sums->sources.count, sizeof(struct sw_term));
  for (int64_t i = 0; i < plan->send_count; i++)
    places.segment_count += pieces_of(plan->sends[i].tokens);
  for (int64_t i = 0; i < plan->gap_count; i++) places.gap_count += pieces_of(plan->gaps[i].rows);
  places.segments = place(&places, places.segment_count, sizeof(struct sw_segment));
  places.gaps = place(&places, places.gap_count, sizeof(struct sw_gap));
  return places;
}

// A view whose data is the distance in bytes from `base`.
static struct sw_view from_base(struct sw_view view, const void *base)
{
  view.data = (void *)((uintptr_t)view.data - (uintptr_t)base);
  return view;
}

static struct sw_view rows_from(struct sw_cuda_strides strides, int64_t row, size_t elem_bytes)
{
  return (struct sw_view){
    .data = (void *)(uintptr_t)(row * strides.token * (int64_t)elem_bytes),
    .token = strides.token,
    .head = strides.head,
    .batch = strides.batch,
  };
}

static void list_runs(const struct swathe_layer *layer, int direction, struct sw_run *runs)
{
  const struct sw_pass_cuda *pass = layer->cuda;
  const struct sw_work *work = &layer->work[direction];
  const struct sw_cuda_tensor_strides *strides = &pass->strides[direction];
  const size_t elem = sw_problem_elem_bytes(&layer->problem);

  for (int64_t i = 0; i < work->run_count; i++) {
    const struct sw_run_source *source = &work->sources[i];
    struct sw_run *run = &runs[i];
    *run = work->runs[i];
    if (source->place == SW_OWN) {
      run->k = rows_from(strides->k, source->index, elem);
      run->v = rows_from(strides->v, source->index, elem);
    } else {
      const struct sw_key_views keys = sw_exchange_wire(
          layer, pass->receive.data, elem, layer->plan->receive_tokens, source->index);
      run->k = from_base(keys.k, pass->receive.data);
      run->v = from_base(keys.v, pass->receive.data);
    }
    if (direction == SWATHE_FORWARD) continue;
    if (run->final) {
      run->dk = rows_from(strides->dk, source->index, elem);
      run->dv = rows_from(strides->dv, source->index, elem);
    } else {
      const struct sw_key_views sums =
          sw_exchange_packed(layer, pass->spill_sums.data, sizeof(float), source->spill);
      run->dk = from_base(sums.k, pass->spill_sums.data);
      run->dv = from_base(sums.v, pass->spill_sums.data);
    }
  }
}

static void list_terms(const struct swathe_layer *layer, struct sw_term *terms)
{
  const struct sw_pass_cuda *pass = layer->cuda;
  const struct sw_sums *sums = &layer->work[SWATHE_BACKWARD].sums;
  const struct sw_sum_source *sources = sums->sources.items;

  for (int64_t i = 0; i < sums->sources.count; i++) {
    const struct sw_key_views views =
        sources[i].place == SW_HOME
            ? sw_exchange_wire(layer, pass->receive_sums.data, sizeof(float),
                               layer->plan->send_tokens, sources[i].index)
            : sw_exchange_packed(layer, pass->spill_sums.data, sizeof(float), sources[i].index);
    terms[i] = (struct sw_term){ .dk = views.k, .dv = views.v };
  }
}

static void list_copies(const struct swathe_layer *layer, struct sw_segment *segments,
                        struct sw_gap *gaps)
{
  const struct sw_pass_cuda *pass = layer->cuda;
  const struct sw_halo_plan *plan = layer->plan;
  const size_t elem = sw_problem_elem_bytes(&layer->problem);

  for (int64_t i = 0; i < plan->send_count; i++)
    for (int64_t at = 0; at < plan->sends[i].tokens; at += COPY_ROWS) {
      const int64_t left = plan->sends[i].tokens - at;
      const struct sw_key_views to = sw_exchange_wire(layer, pass->send.data, elem,
                                                      plan->send_tokens, plan->sends[i].slot + at);
      *segments++ = (struct sw_segment){ .row = plan->sends[i].row + at,
                                         .tokens = left < COPY_ROWS ? left : COPY_ROWS,
                                         .k = from_base(to.k, pass->send.data),
                                         .v = from_base(to.v, pass->send.data) };
    }
  for (int64_t i = 0; i < plan->gap_count; i++)
    for (int64_t at = 0; at < plan->gaps[i].rows; at += COPY_ROWS) {
      const int64_t left = plan->gaps[i].rows - at;
      *gaps++ = (struct sw_gap){ plan->gaps[i].row + at, left < COPY_ROWS ? left : COPY_ROWS };
    }
}

// Copies `count` items where there are any.
static void put(char *to, const void *from, int64_t count, size_t item_bytes)
{
  if (count) memcpy(to, from, (size_t)count * item_bytes);
}

static void write_lists(const struct swathe_layer *layer, const struct sw_cuda_places *places,
                        char *block)
{
  const struct sw_sums *sums = &layer->work[SWATHE_BACKWARD].sums;

  for (int d = 0; d < 2; d++) {
    put(block + places->units[d], layer->work[d].units, layer->work[d].unit_count,
        sizeof(struct sw_unit));
    if (layer->cuda->listed[d])
      list_runs(layer, d, (struct sw_run *)(void *)(block + places->runs[d]));
  }
  list_copies(layer, (struct sw_segment *)(void *)(block + places->segments),
              (struct sw_gap *)(void *)(block + places->gaps));
  if (!layer->cuda->listed[SWATHE_BACKWARD]) return;
  put(block + places->pieces, sums->pieces.items, sums->pieces.count, sizeof(struct sw_sum));
  list_terms(layer, (struct sw_term *)(void *)(block + places->terms));
}

// Makes the lists and sends them to the device, behind the work that reads those it has.
static enum swathe_status upload_lists(struct swathe_layer *layer)
{
  struct sw_pass_cuda *pass = layer->cuda;
  const struct sw_cuda_places places = find_places(layer);
  struct sw_buffer *staging = &pass->staging[pass->turn];
  enum swathe_status status = SWATHE_OK;

  if (staging->data) status = sw_device_cuda_wait_event(pass->device, pass->staged[pass->turn]);
  if (!status) status = reserve(pass, staging, places.bytes, true);
  if (!status) status = reserve(pass, &pass->lists, places.bytes, false);
  if (status) return status;
  write_lists(layer, &places, staging->data);
  if (pass->was_used) status = sw_device_cuda_await(pass->device, pass->upload, pass->used);
  if (!status)
    status = sw_device_cuda_write(pass->device, pass->lists.data, staging->data, places.bytes,
                                  pass->upload);
  if (!status) status = sw_device_cuda_record(pass->device, pass->staged[pass->turn], pass->upload);
  if (!status) status = sw_device_cuda_record(pass->device, pass->uploaded, pass->upload);
  pass->turn = !pass->turn;
  pass->places = places;
  pass->awaits_lists = true;
  pass->lists_known = false;
  return status;
}

// ---- What a sharding needs, and what a call -----------------------------------------------------

// [rows][heads][dim], as most callers have it.
static struct sw_cuda_strides dense(const struct swathe_layer *layer, int32_t dim)
{
  const int64_t token = (int64_t)layer->problem.kv_heads * dim;
  return (struct sw_cuda_strides){ token, dim, layer->plan->rows * token };
}

static void guess_strides(struct swathe_layer *layer)
{
  const struct sw_cuda_strides k = dense(layer, layer->problem.head_dim_qk);
  const struct sw_cuda_strides v = dense(layer, layer->problem.head_dim_v);
  for (int d = 0; d < 2; d++)
    layer->cuda->strides[d] = (struct sw_cuda_tensor_strides){ k, v, k, v };
}

enum swathe_status sw_pass_cuda_memory_shard(struct swathe_layer *layer)
{
  struct sw_pass_cuda *pass = layer->cuda;

  guess_strides(layer);
  pass->listed[SWATHE_FORWARD] = layer->kernels[SWATHE_FORWARD] != NULL;
  pass->listed[SWATHE_BACKWARD] = layer->kernels[SWATHE_BACKWARD] && pass->gone_backward;
  const enum swathe_status status = reserve_buffers(layer);
  return status ? status : upload_lists(layer);
}

static struct sw_cuda_strides strides_of(const struct swathe_tensor *tensor)
{
  return (struct sw_cuda_strides){
    tensor->token_stride, tensor->head_stride, tensor->batch_stride
  };
}

static bool same_strides(const struct sw_cuda_tensor_strides *a,
                         const struct sw_cuda_tensor_strides *b, bool backward)
{
  return !memcmp(&a->k, &b->k, sizeof a->k) && !memcmp(&a->v, &b->v, sizeof a->v) &&
         (!backward ||
          (!memcmp(&a->dk, &b->dk, sizeof a->dk) && !memcmp(&a->dv, &b->dv, sizeof a->dv)));
}

enum swathe_status sw_pass_cuda_memory_fit(struct swathe_layer *layer,
                                           enum swathe_direction direction,
                                           const struct swathe_tensors *tensors, bool capturing)
{
  struct sw_pass_cuda *pass = layer->cuda;
  const bool backward = direction == SWATHE_BACKWARD;
  const struct sw_cuda_tensor_strides strides = {
    strides_of(&tensors->k), strides_of(&tensors->v), strides_of(&tensors->dk),
    strides_of(&tensors->dv)
  };
  enum swathe_status status = SWATHE_OK;

  if (pass->listed[direction] && same_strides(&pass->strides[direction], &strides, backward))
    return SWATHE_OK;
  if (capturing)
    return sw_fail(SWATHE_BAD_USE, "%s is captured before it ran once with tensors of these "
                                   "strides under this sharding",
                   sw_context_kernel_name(direction));
  pass->strides[direction] = strides;
  pass->listed[direction] = true;
  if (backward && !pass->gone_backward) {
    pass->gone_backward = true;
    status = reserve_buffers(layer);
  }
  return status ? status : upload_lists(layer);
}
