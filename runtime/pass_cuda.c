// pass_cuda.c: forward and backward of one rank on a CUDA device, queued on the caller's stream.
//
//   forward    the caller's stream:  gaps -> interior units ----------> edge units
//              the layer's own:      pack the keys that others need -> wire --^
//                                    (in chunks: edge units begin as theirs come)
//   backward   the caller's stream:  gaps, delta -> edge units -> sums for the wire -> interior
//                                    units ------> gather
//              the layer's own:      wire (and widen) --^     (and keys before, unless kept)
//
// A transport that moves device memory puts its messages in the order of the layer's stream, and
// the host never waits.  With others they pass through pinned host memory, and the host waits for
// them while the device works on the interior.
//
// What a sharding says (units, runs, pieces, ...) is laid out once in one block of host memory and
// copied to the device beside the work that is queued.  The strides of the caller's tensors stand
// in it too, so a call with other strides than the last makes it anew.
#include "layer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Rows that one block of pack, fill or gather works on.
enum { COPY_ROWS = 8, ALIGNMENT = 256, MOST_WIDEN_BLOCKS = 1024 };

// Host and device memory that grows.
struct memory {
  void *data;
  size_t bytes;
};

struct strides {
  int64_t token, head, batch;
};

// What the lists of one direction were made for.
struct tensor_strides {
  struct strides k, v, dk, dv;
};

// Where the lists lie in their block, in bytes from its begin.
struct places {
  size_t units[2], runs[2], pieces, terms, segments, gaps;
  size_t bytes;
  int64_t segment_count, gap_count;   // after cutting
};

struct sw_pass_cuda {
  struct sw_device_cuda *device;
  const struct sw_kernel *copies;
  void *wire, *upload;                // streams of our own: what travels; lists
  void *began, *packed, *arrived;     // events: of one phase of the exchange
  void *uploaded, *used;              // the lists have come; the last call is done with them
  void *staged[2];                    // a staging block has been read
  void *came[SW_MOST_CHUNKS];         // chunks of keys

  struct memory lists, staging[2];    // device; pinned
  int turn;                           // which staging block is next
  struct places places;
  struct tensor_strides strides[2];
  bool listed[2];                     // the direction's lists are there
  bool awaits_lists;                  // no stream has waited for `uploaded` yet
  bool lists_known;                   // the host knows that they have come
  bool was_used;                      // `used` was recorded, on:
  void *last_stream;
  bool gone_backward;                 // once: its lists and buffers are made at shard from then on

  // device: keys and sums on their way, as in struct swathe_layer; then of one call
  struct memory send, receive, send_sums, receive_narrow, receive_sums, spill_sums;
  struct memory delta, head_sums;
  struct memory host_out, host_in;    // pinned: the wire's, for transports of host memory
};

// ---- Create -------------------------------------------------------------------------------------

static void *device_address(const void *base, size_t offset)
{
  return (void *)((uintptr_t)base + offset);
}

static enum swathe_status make_streams(struct sw_pass_cuda *pass)
{
  void **const events[] = { &pass->began,    &pass->packed, &pass->arrived,
                            &pass->uploaded, &pass->used,   &pass->staged[0],
                            &pass->staged[1] };
  enum swathe_status status = sw_device_cuda_stream(pass->device, true, &pass->wire);

  if (!status) status = sw_device_cuda_stream(pass->device, false, &pass->upload);
  for (size_t i = 0; i < sizeof events / sizeof *events && !status; i++)
    status = sw_device_cuda_event(pass->device, false, events[i]);
  for (int i = 0; i < SW_MOST_CHUNKS && !status; i++)
    status = sw_device_cuda_event(pass->device, false, &pass->came[i]);
  return status;
}

enum swathe_status sw_pass_cuda_create(struct swathe_layer *layer)
{
  const struct sw_kernel_wanted wanted = {
    .problem = &layer->problem, .aim = &layer->aim, .name = "copies", .config = ""
  };
  struct sw_pass_cuda *pass = calloc(1, sizeof *pass);

  if (!pass) return sw_fail(SWATHE_NO_MEMORY, "no %zu bytes for a layer", sizeof *pass);
  layer->cuda = pass;
  pass->device = layer->aim.device;
  enum swathe_status status = sw_context_kernel(layer->context, &wanted, &pass->copies);
  if (!status) status = sw_device_cuda_enter(pass->device);
  if (status) return status;
  status = make_streams(pass);
  sw_device_cuda_leave(pass->device);
  return status;
}

static void free_memory(struct sw_pass_cuda *pass)
{
  struct memory *const device[] = { &pass->lists,          &pass->send,         &pass->receive,
                                    &pass->send_sums,      &pass->receive_sums, &pass->spill_sums,
                                    &pass->receive_narrow, &pass->delta,        &pass->head_sums };
  struct memory *const host[] = { &pass->staging[0], &pass->staging[1], &pass->host_out,
                                  &pass->host_in };

  for (size_t i = 0; i < sizeof device / sizeof *device; i++)
    sw_device_cuda_free(pass->device, device[i]->data);
  for (size_t i = 0; i < sizeof host / sizeof *host; i++)
    sw_device_cuda_free_pinned(pass->device, host[i]->data);
}

void sw_pass_cuda_destroy(struct swathe_layer *layer)
{
  struct sw_pass_cuda *pass = layer->cuda;
  if (!pass) return;
  void *const events[] = { pass->began, pass->packed,    pass->arrived,  pass->uploaded,
                           pass->used,  pass->staged[0], pass->staged[1] };
  if (!sw_device_cuda_enter(pass->device)) {
    // what was queued still uses the memory
    if (pass->was_used) (void)sw_device_cuda_wait_event(pass->device, pass->used);
    if (pass->wire) (void)sw_device_cuda_synchronize(pass->device, pass->wire);
    if (pass->upload) (void)sw_device_cuda_synchronize(pass->device, pass->upload);
    if (!layer->transport || !layer->transport->holds_memory) free_memory(pass);
    for (size_t i = 0; i < sizeof events / sizeof *events; i++)
      sw_device_cuda_drop_event(pass->device, events[i]);
    for (int i = 0; i < SW_MOST_CHUNKS; i++)
      sw_device_cuda_drop_event(pass->device, pass->came[i]);
    sw_device_cuda_drop_stream(pass->device, pass->wire);
    sw_device_cuda_drop_stream(pass->device, pass->upload);
    sw_device_cuda_leave(pass->device);
  }
  free(pass);
  layer->cuda = NULL;
}

// ---- Memory -------------------------------------------------------------------------------------

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
static enum swathe_status reserve(struct sw_pass_cuda *pass, struct memory *memory, size_t bytes,
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
  *memory = (struct memory){ .data = NULL };
  status = pinned ? sw_device_cuda_allocate_pinned(pass->device, bytes, &memory->data)
                  : sw_device_cuda_allocate(pass->device, bytes, &memory->data);
  if (!status) memory->bytes = bytes;
  return status;
}

static bool stages(const struct swathe_layer *layer)
{
  return layer->transport && !layer->transport->operations->enqueue;
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
    struct memory *memory;
    size_t bytes;
    bool pinned, wanted;
  } rows[] = {
    { &pass->send, sw_layer_keys_bytes(layer, sent, elem), false, true },
    { &pass->receive, sw_layer_keys_bytes(layer, received, elem), false, true },
    { &pass->head_sums, (size_t)units * heads, false, true },
    { &pass->host_out, sw_layer_keys_bytes(layer, most, wide), true, stages(layer) },
    { &pass->host_in, sw_layer_keys_bytes(layer, most, wide), true, stages(layer) },
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

// ---- Lists --------------------------------------------------------------------------------------

static int64_t pieces_of(int64_t rows) { return (rows + COPY_ROWS - 1) / COPY_ROWS; }

static size_t place(struct places *places, int64_t count, size_t item_bytes)
{
  const size_t at = places->bytes;
  places->bytes += ((size_t)count * item_bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  return at;
}

static struct places find_places(const struct swathe_layer *layer)
{
  const struct sw_halo_plan *plan = layer->plan;
  const struct sw_sums *sums = &layer->work[SWATHE_BACKWARD].sums;
  struct places places = { .bytes = 0 };

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

static struct sw_view rows_from(struct strides strides, int64_t row, size_t elem_bytes)
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
  const struct tensor_strides *strides = &pass->strides[direction];
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

static void write_lists(const struct swathe_layer *layer, const struct places *places, char *block)
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
  const struct places places = find_places(layer);
  struct memory *staging = &pass->staging[pass->turn];
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

// [rows][heads][dim], as most callers have it.
static struct strides dense(const struct swathe_layer *layer, int32_t dim)
{
  const int64_t token = (int64_t)layer->problem.kv_heads * dim;
  return (struct strides){ token, dim, layer->plan->rows * token };
}

static void guess_strides(struct swathe_layer *layer)
{
  const struct strides k = dense(layer, layer->problem.head_dim_qk);
  const struct strides v = dense(layer, layer->problem.head_dim_v);
  for (int d = 0; d < 2; d++) layer->cuda->strides[d] = (struct tensor_strides){ k, v, k, v };
}

enum swathe_status sw_pass_cuda_shard(struct swathe_layer *layer)
{
  struct sw_pass_cuda *pass = layer->cuda;
  enum swathe_status status = sw_device_cuda_enter(pass->device);

  if (status) return status;
  guess_strides(layer);
  pass->listed[SWATHE_FORWARD] = layer->kernels[SWATHE_FORWARD] != NULL;
  pass->listed[SWATHE_BACKWARD] = layer->kernels[SWATHE_BACKWARD] && pass->gone_backward;
  status = reserve_buffers(layer);
  if (!status) status = upload_lists(layer);
  sw_device_cuda_leave(pass->device);
  return status ? sw_within(status, "while sharding for rank %d", sw_layer_rank(layer)) : SWATHE_OK;
}

// ---- A call -------------------------------------------------------------------------------------

// One call under way.
struct call {
  struct swathe_layer *layer;
  struct sw_pass_cuda *pass;
  const struct swathe_tensors *tensors;
  enum swathe_direction direction;
  void *stream;
  bool capturing;
  struct sw_cuda_args args;
};

static struct strides strides_of(const struct swathe_tensor *tensor)
{
  return (struct strides){ tensor->token_stride, tensor->head_stride, tensor->batch_stride };
}

static bool same_strides(const struct tensor_strides *a, const struct tensor_strides *b,
                         bool backward)
{
  return !memcmp(&a->k, &b->k, sizeof a->k) && !memcmp(&a->v, &b->v, sizeof a->v) &&
         (!backward ||
          (!memcmp(&a->dk, &b->dk, sizeof a->dk) && !memcmp(&a->dv, &b->dv, sizeof a->dv)));
}

// Lists that fit this call's tensors.
static enum swathe_status need_lists(struct call *call)
{
  struct sw_pass_cuda *pass = call->pass;
  const struct swathe_tensors *t = call->tensors;
  const bool backward = call->direction == SWATHE_BACKWARD;
  const struct tensor_strides strides = { strides_of(&t->k), strides_of(&t->v),
                                          strides_of(&t->dk), strides_of(&t->dv) };
  enum swathe_status status = SWATHE_OK;

  if (pass->listed[call->direction] &&
      same_strides(&pass->strides[call->direction], &strides, backward))
    return SWATHE_OK;
  if (call->capturing)
    return sw_fail(SWATHE_BAD_USE, "%s is captured before it ran once with tensors of these "
                                   "strides under this sharding",
                   sw_context_kernel_name(call->direction));
  pass->strides[call->direction] = strides;
  pass->listed[call->direction] = true;
  if (backward && !pass->gone_backward) {
    pass->gone_backward = true;
    status = reserve_buffers(call->layer);
  }
  return status ? status : upload_lists(call->layer);
}

// Puts the call behind the lists and behind the layer's last call.
static enum swathe_status enter_stream(struct call *call)
{
  struct sw_pass_cuda *pass = call->pass;
  enum swathe_status status = SWATHE_OK;

  if (call->capturing) {
    if (!pass->lists_known) status = sw_device_cuda_wait_event(pass->device, pass->uploaded);
    if (!status) pass->lists_known = true;
    return status;
  }
  if (pass->awaits_lists)
    status = sw_device_cuda_await(pass->device, call->stream, pass->uploaded);
  if (!status) pass->awaits_lists = false;
  if (!status && pass->was_used && pass->last_stream != call->stream)
    status = sw_device_cuda_await(pass->device, call->stream, pass->used);
  return status;
}

static enum swathe_status leave_stream(struct call *call)
{
  struct sw_pass_cuda *pass = call->pass;
  if (call->capturing) return SWATHE_OK;
  pass->was_used = true;
  pass->last_stream = call->stream;
  return sw_device_cuda_record(pass->device, pass->used, call->stream);
}

static void fill_args(struct call *call)
{
  const struct swathe_layer *layer = call->layer;
  const struct sw_pass_cuda *pass = call->pass;
  const struct swathe_tensors *t = call->tensors;
  const size_t elem = sw_problem_elem_bytes(&layer->problem);
  const bool backward = call->direction == SWATHE_BACKWARD;

  call->args = (struct sw_cuda_args){
    .attention = {
      .units = device_address(pass->lists.data, pass->places.units[call->direction]),
      .runs = device_address(pass->lists.data, pass->places.runs[call->direction]),
      .batch = layer->batch,
      .kv_heads = layer->problem.kv_heads,
      .max_keys = layer->work[call->direction].max_keys,
      .scale = (float)sw_problem_scale(&layer->problem),
      .softcap = (float)layer->problem.softcap,
      .sink = t->sink,
      .q = sw_exchange_tensor(&t->q, 0, elem),
      .out = sw_exchange_tensor(&t->out, 0, elem),
      .lse = sw_exchange_tensor(&t->lse, 0, sizeof(float)),
    },
    .k = t->k.data,
    .v = t->v.data,
    .halo = t->halo ? t->halo : pass->receive.data,
    .rows = layer->plan->rows,
  };
  if (!backward && t->max_logits) call->args.attention.max_logits = pass->head_sums.data;
  if (!backward) return;
  call->args.attention.dout = sw_exchange_tensor(&t->dout, 0, elem);
  call->args.attention.dq = sw_exchange_tensor(&t->dq, 0, elem);
  call->args.attention.dsink = pass->head_sums.data;
  call->args.sums = pass->spill_sums.data;
  call->args.dk = t->dk.data;
  call->args.dv = t->dv.data;
  call->args.delta = pass->delta.data;
}

// ---- Launches -----------------------------------------------------------------------------------

static enum swathe_status launch(struct call *call, const struct sw_cuda_function *function,
                                 int64_t blocks_x, int64_t blocks_y, const void *args, void *stream)
{
  const struct sw_device_cuda_launch launch = { .name = function->name,
                                                .function = function->function,
                                                .blocks_x = blocks_x,
                                                .blocks_y = blocks_y,
                                                .threads = function->launch.threads,
                                                .shared_bytes = function->launch.shared_bytes,
                                                .args = args };
  return sw_device_cuda_launch(call->pass->device, &launch, stream);
}

// Most tiles any of the units [begin, end) has: of its queries, or of its keys run by run.
static int64_t most_tiles(const struct sw_work *work, int64_t begin, int64_t end, int64_t tile,
                          bool keys)
{
  int64_t most = 0;
  for (int64_t i = begin; i < end; i++) {
    const struct sw_unit *unit = &work->units[i];
    int64_t tiles = keys ? 0 : (unit->tokens + tile - 1) / tile;
    for (int64_t r = unit->run_begin; keys && r < unit->run_end; r++)
      tiles += (work->runs[r].tokens + tile - 1) / tile;
    if (tiles > most) most = tiles;
  }
  return most;
}

static enum swathe_status launch_units(struct call *call, enum sw_cuda_kernel kernel, int64_t begin,
                                       int64_t end)
{
  const struct swathe_layer *layer = call->layer;
  const struct sw_cuda_function *function =
      &layer->kernels[call->direction]->functions[kernel];
  const int64_t per_unit = (int64_t)layer->batch * layer->problem.kv_heads;
  const int64_t tiles =
      kernel == SW_CUDA_DELTA
          ? 1
          : most_tiles(&layer->work[call->direction], begin, end, function->launch.tile_tokens,
                       kernel == SW_CUDA_DKV);

  call->args.first_item = begin * per_unit;
  return launch(call, function, (end - begin) * per_unit, tiles * function->launch.groups,
                &call->args, call->stream);
}

static enum swathe_status launch_fill(struct call *call, const struct swathe_tensor *tensor,
                                      int32_t heads, int32_t dim, size_t elem_bytes, unsigned bits)
{
  const struct sw_pass_cuda *pass = call->pass;
  const struct sw_fill_args args = {
    .gaps = device_address(pass->lists.data, pass->places.gaps),
    .gap_count = pass->places.gap_count,
    .batch = call->layer->batch,
    .heads = heads,
    .dim = dim,
    .to = sw_exchange_tensor(tensor, 0, elem_bytes),
    .elem_bytes = (int)elem_bytes,
    .bits = bits,
  };
  return launch(call, &pass->copies->functions[SW_CUDA_FILL], args.batch * args.gap_count, 1, &args,
                call->stream);
}

static enum swathe_status launch_combine(struct call *call, float *to, bool largest)
{
  const struct sw_pass_cuda *pass = call->pass;
  const struct sw_combine_args args = {
    .from = pass->head_sums.data,
    .to = to,
    .rows = call->layer->work[call->direction].unit_count * call->layer->batch,
    .heads = call->layer->problem.q_heads,
    .largest = largest,
  };
  return launch(call, &pass->copies->functions[SW_CUDA_COMBINE], args.heads, 1, &args,
                call->stream);
}

// Adds up pieces [begin, begin + count) of the sharding's sums.
static enum swathe_status launch_gather(struct call *call, int64_t begin, int64_t count,
                                        int64_t format, struct sw_view dk, struct sw_view dv)
{
  const struct swathe_layer *layer = call->layer;
  const struct sw_pass_cuda *pass = call->pass;
  const struct sw_gather_args args = {
    .sums = (const struct sw_sum *)device_address(pass->lists.data, pass->places.pieces) + begin,
    .terms = device_address(pass->lists.data, pass->places.terms),
    .sum_count = count,
    .batch = layer->batch,
    .kv_heads = layer->problem.kv_heads,
    .format = format,
    .dk = dk,
    .dv = dv,
  };
  return launch(call, &layer->kernels[SWATHE_BACKWARD]->functions[SW_CUDA_GATHER],
                args.batch * count, 1, &args, call->stream);
}

// ---- The wire -----------------------------------------------------------------------------------

// One phase of the exchange: what leaves from `out`, what comes into `in`; device memory.
struct phase {
  struct sw_exchange_side send, receive;
  int32_t chunks;                     // that travel one after the other
};

static struct phase phase_of_keys(const struct call *call)
{
  const struct swathe_layer *layer = call->layer;
  const struct sw_halo_plan *plan = layer->plan;
  const size_t elem = sw_problem_elem_bytes(&layer->problem);
  const bool parts = call->direction == SWATHE_FORWARD && layer->knobs.overlap == 2 &&
                     !stages(layer);
  return (struct phase){
    .send = { call->pass->send.data, plan->send_messages, plan->send_message_count,
              plan->send_tokens, elem, .send = true },
    .receive = { call->args.halo, plan->receive_messages, plan->receive_message_count,
                 plan->receive_tokens, elem, .send = false },
    .chunks = parts ? layer->knobs.chunks : 1,
  };
}

// The keys' way back.
static struct phase phase_of_sums(const struct call *call)
{
  const struct sw_halo_plan *plan = call->layer->plan;
  const struct sw_pass_cuda *pass = call->pass;
  const size_t bytes = sw_exchange_sum_bytes(call->layer);
  void *in = sw_exchange_narrows(call->layer) ? pass->receive_narrow.data
                                              : pass->receive_sums.data;
  return (struct phase){
    .send = { pass->send_sums.data, plan->receive_messages, plan->receive_message_count,
              plan->receive_tokens, bytes, .send = true },
    .receive = { in, plan->send_messages, plan->send_message_count, plan->send_tokens, bytes,
                 .send = false },
    .chunks = 1,
  };
}

static bool is_empty(const struct call *call, const struct phase *phase)
{
  return call->layer->muted || (!phase->send.count && !phase->receive.count);
}

// The layer's own stream takes over from the caller's.
static enum swathe_status fork_stream(struct call *call)
{
  struct sw_pass_cuda *pass = call->pass;
  enum swathe_status status = sw_device_cuda_record(pass->device, pass->began, call->stream);
  return status ? status : sw_device_cuda_await(pass->device, pass->wire, pass->began);
}

static enum swathe_status pack_keys(struct call *call)
{
  const struct sw_pass_cuda *pass = call->pass;
  const size_t elem = sw_problem_elem_bytes(&call->layer->problem);
  const struct sw_pack_args args = {
    .segments = device_address(pass->lists.data, pass->places.segments),
    .segment_count = pass->places.segment_count,
    .batch = call->layer->batch,
    .kv_heads = call->layer->problem.kv_heads,
    .k = sw_exchange_tensor(&call->tensors->k, 0, elem),
    .v = sw_exchange_tensor(&call->tensors->v, 0, elem),
    .to = pass->send.data,
  };
  return launch(call, &pass->copies->functions[SW_CUDA_PACK], args.batch * args.segment_count, 1,
                &args, pass->wire);
}

// Messages of device memory, chunk after chunk.
static enum swathe_status enqueue_phase(struct call *call, const struct phase *phase)
{
  struct sw_pass_cuda *pass = call->pass;
  struct swathe_layer *layer = call->layer;
  struct swathe_transport *transport = layer->transport;
  enum swathe_status status = SWATHE_OK;

  for (int32_t c = 0; c < phase->chunks && !status; c++) {
    sw_exchange_list(layer, &phase->receive, &phase->send, phase->chunks > 1 ? c : -1);
    status = transport->operations->enqueue(transport, layer->messages.items,
                                            (int32_t)layer->messages.count, pass->wire);
    if (!status && phase->chunks > 1)
      status = sw_device_cuda_record(pass->device, pass->came[c], pass->wire);
  }
  return status;
}

// Queues what the device does for the phase before the interior runs.
static enum swathe_status begin_phase(struct call *call, const struct phase *phase)
{
  struct sw_pass_cuda *pass = call->pass;
  enum swathe_status status;

  if (!stages(call->layer)) return enqueue_phase(call, phase);
  status = sw_device_cuda_read(
      pass->device, pass->host_out.data, phase->send.data,
      sw_layer_keys_bytes(call->layer, phase->send.tokens, phase->send.elem_bytes), pass->wire);
  return status ? status : sw_device_cuda_record(pass->device, pass->packed, pass->wire);
}

// The host's part, after the interior was queued; then the halo is there for the wire's stream.
static enum swathe_status end_phase(struct call *call, const struct phase *phase)
{
  struct sw_pass_cuda *pass = call->pass;
  struct swathe_layer *layer = call->layer;
  struct swathe_transport *transport = layer->transport;
  struct sw_exchange_side receive = phase->receive, send = phase->send;

  if (!stages(layer)) return SWATHE_OK;
  enum swathe_status status = sw_device_cuda_wait_event(pass->device, pass->packed);
  if (status) return status;
  receive.data = pass->host_in.data;
  send.data = pass->host_out.data;
  sw_exchange_list(layer, &receive, &send, -1);
  status = transport->operations->post(transport, layer->messages.items,
                                       (int32_t)layer->messages.count);
  const double begin = sw_layer_now_us();
  if (!status) status = transport->operations->wait(transport);
  layer->timing.wait_us += sw_layer_now_us() - begin;
  if (status) return status;
  return sw_device_cuda_write(pass->device, phase->receive.data, pass->host_in.data,
                              sw_layer_keys_bytes(layer, receive.tokens, receive.elem_bytes),
                              pass->wire);
}

// The caller's stream goes on when the wire's has come this far.
static enum swathe_status join_stream(struct call *call)
{
  struct sw_pass_cuda *pass = call->pass;
  enum swathe_status status = sw_device_cuda_record(pass->device, pass->arrived, pass->wire);
  return status ? status : sw_device_cuda_await(pass->device, call->stream, pass->arrived);
}

static enum swathe_status refuse_capture(const struct call *call)
{
  if (!call->capturing || !stages(call->layer)) return SWATHE_OK;
  return sw_fail(SWATHE_UNSUPPORTED,
                 "the %s transport moves host memory, which a CUDA graph cannot capture",
                 call->layer->transport->name);
}

// ---- Forward ------------------------------------------------------------------------------------

static const uint32_t minus_infinity = 0xff800000u;

static enum swathe_status fill_forward_gaps(struct call *call)
{
  const struct swathe_problem *p = &call->layer->problem;
  enum swathe_status status = launch_fill(call, &call->tensors->out, p->q_heads, p->head_dim_v,
                                          sw_problem_elem_bytes(p), 0);
  return status ? status
                : launch_fill(call, &call->tensors->lse, p->q_heads, 1, sizeof(float),
                              minus_infinity);
}

// The units [begin, end), which need no keys of others.
static enum swathe_status launch_interior(struct call *call, int64_t begin, int64_t end)
{
  enum swathe_status status;

  if (call->direction == SWATHE_FORWARD) return launch_units(call, SW_CUDA_FORWARD, begin, end);
  status = launch_units(call, SW_CUDA_DQ, begin, end);
  return status ? status : launch_units(call, SW_CUDA_DKV, begin, end);
}

// The halo's keys come while the units [begin, end) run, or before where nothing is to overlap.  In
// chunks, whoever needs them awaits `came`.
static enum swathe_status exchange_keys(struct call *call, const struct phase *phase, int64_t begin,
                                        int64_t end)
{
  const bool empty = is_empty(call, phase), overlaps = call->layer->knobs.overlap > 0;
  enum swathe_status status = SWATHE_OK;

  if (!empty) status = fork_stream(call);
  if (!status && !empty) status = pack_keys(call);
  if (!status && !empty) status = begin_phase(call, phase);
  if (!status && overlaps) status = launch_interior(call, begin, end);
  if (!status && !empty) status = end_phase(call, phase);
  if (!status && !empty && phase->chunks == 1) status = join_stream(call);
  if (!status && !overlaps) status = launch_interior(call, begin, end);
  return status;
}

// After which chunk each of the edge units can begin, as int64_t in layer->waiting.
static const int64_t *find_chunks(struct swathe_layer *layer, const struct sw_work *work)
{
  int64_t *chunks = layer->waiting.items;

  for (int64_t u = 0; u < work->edge_units; u++) {
    chunks[u] = 0;
    for (int64_t r = work->units[u].run_begin; r < work->units[u].run_end; r++) {
      if (work->sources[r].place != SW_WIRE) continue;
      const int32_t last =
          sw_exchange_last_chunk(layer, work->sources[r].index, work->runs[r].tokens);
      if (last > chunks[u]) chunks[u] = last;
    }
  }
  return chunks;
}

// Forward's edge units, each as soon as the chunks with its keys have come.
static enum swathe_status launch_edge(struct call *call, const struct phase *phase)
{
  struct sw_pass_cuda *pass = call->pass;
  const struct sw_work *work = &call->layer->work[SWATHE_FORWARD];
  enum swathe_status status = SWATHE_OK;

  if (phase->chunks == 1 || is_empty(call, phase))
    return launch_units(call, SW_CUDA_FORWARD, 0, work->edge_units);
  const int64_t *chunks = find_chunks(call->layer, work);
  for (int32_t c = 0; c < phase->chunks && !status; c++) {
    status = sw_device_cuda_await(pass->device, call->stream, pass->came[c]);
    for (int64_t begin = 0, end; begin < work->edge_units && !status; begin = end) {
      for (end = begin + 1; end < work->edge_units && chunks[end] == chunks[begin]; end++) continue;
      if (chunks[begin] == c) status = launch_units(call, SW_CUDA_FORWARD, begin, end);
    }
  }
  return status;
}

static enum swathe_status queue_forward(struct call *call)
{
  const struct sw_work *work = &call->layer->work[SWATHE_FORWARD];
  const struct phase phase = phase_of_keys(call);
  float *max_logits = call->tensors->max_logits;
  enum swathe_status status = fill_forward_gaps(call);

  // what the kernel raises to each unit's largest score
  if (!status && max_logits)
    status = sw_device_cuda_fill(call->pass->device, call->pass->head_sums.data, minus_infinity,
                                 (size_t)(work->unit_count * call->layer->batch) *
                                     (size_t)call->layer->problem.q_heads,
                                 call->stream);
  if (!status) status = exchange_keys(call, &phase, work->edge_units, work->unit_count);
  if (!status) status = launch_edge(call, &phase);
  if (!status && max_logits) status = launch_combine(call, max_logits, true);
  return status;
}

// ---- Backward -----------------------------------------------------------------------------------

static enum swathe_status fill_backward_gaps(struct call *call)
{
  const struct swathe_problem *p = &call->layer->problem;
  const struct swathe_tensors *t = call->tensors;
  const size_t elem = sw_problem_elem_bytes(p);
  enum swathe_status status = launch_fill(call, &t->dq, p->q_heads, p->head_dim_qk, elem, 0);

  if (!status) status = launch_fill(call, &t->dk, p->kv_heads, p->head_dim_qk, elem, 0);
  if (!status) status = launch_fill(call, &t->dv, p->kv_heads, p->head_dim_v, elem, 0);
  return status;
}

static enum swathe_status gather_wire(struct call *call)
{
  const struct swathe_layer *layer = call->layer;
  const struct sw_key_views to =
      sw_exchange_wire(layer, call->pass->send_sums.data, sw_exchange_sum_bytes(layer),
                       layer->plan->receive_tokens, 0);
  return launch_gather(call, 0, layer->work[SWATHE_BACKWARD].sums.wire_pieces,
                       sw_exchange_narrows(layer) ? SW_SUMS_BF16 : SW_SUMS_FLOAT, to.k, to.v);
}

static enum swathe_status gather_own(struct call *call)
{
  const struct sw_sums *sums = &call->layer->work[SWATHE_BACKWARD].sums;
  const size_t elem = sw_problem_elem_bytes(&call->layer->problem);
  return launch_gather(call, sums->wire_pieces, sums->pieces.count - sums->wire_pieces,
                       SW_SUMS_ELEM, sw_exchange_tensor(&call->tensors->dk, 0, elem),
                       sw_exchange_tensor(&call->tensors->dv, 0, elem));
}

// Sums that came narrow, on the wire's stream.
static enum swathe_status widen_sums(struct call *call)
{
  const struct sw_pass_cuda *pass = call->pass;
  const struct swathe_layer *layer = call->layer;
  const struct sw_cuda_function *function = &pass->copies->functions[SW_CUDA_WIDEN];
  const struct sw_widen_args args = {
    .from = pass->receive_narrow.data,
    .to = pass->receive_sums.data,
    .elements = layer->plan->send_tokens * layer->batch * sw_layer_token_elements(layer),
  };
  const int64_t blocks = (args.elements + function->launch.threads - 1) / function->launch.threads;

  if (!sw_exchange_narrows(layer)) return SWATHE_OK;
  return launch(call, function, blocks < MOST_WIDEN_BLOCKS ? blocks : MOST_WIDEN_BLOCKS, 1, &args,
                pass->wire);
}

// The sums of the halo's keys go home while the units [begin, end) run.
static enum swathe_status exchange_sums(struct call *call, int64_t begin, int64_t end)
{
  const struct phase phase = phase_of_sums(call);
  const bool empty = is_empty(call, &phase), overlaps = call->layer->knobs.overlap > 0;
  enum swathe_status status = SWATHE_OK;

  if (!empty) status = gather_wire(call);
  if (!status && !empty) status = fork_stream(call);
  if (!status && !empty) status = begin_phase(call, &phase);
  if (!status && overlaps) status = launch_interior(call, begin, end);
  if (!status && !empty) status = end_phase(call, &phase);
  if (!status && !empty) status = widen_sums(call);
  if (!status && !empty) status = join_stream(call);
  if (!status && !overlaps) status = launch_interior(call, begin, end);
  return status;
}

// Half the interior hides the keys' way here if they must be fetched again, the rest hides the
// sums' way home.
static enum swathe_status queue_backward(struct call *call)
{
  const struct sw_work *work = &call->layer->work[SWATHE_BACKWARD];
  int64_t interior = work->edge_units;
  enum swathe_status status = fill_backward_gaps(call);

  if (!status) status = launch_units(call, SW_CUDA_DELTA, 0, work->unit_count);
  if (!status && !call->tensors->halo) {
    const int64_t half = interior + (work->unit_count - interior) / 2;
    const struct phase phase = phase_of_keys(call);
    status = exchange_keys(call, &phase, interior, half);
    interior = half;
  }
  if (!status) status = launch_units(call, SW_CUDA_DQ, 0, work->edge_units);
  if (!status) status = launch_units(call, SW_CUDA_DKV, 0, work->edge_units);
  if (!status) status = exchange_sums(call, interior, work->unit_count);
  if (!status) status = gather_own(call);
  if (!status && call->layer->problem.sinks)
    status = launch_combine(call, call->tensors->dsink, false);
  return status;
}

// ---- Both ---------------------------------------------------------------------------------------

// After a failure the others are told, and messages of host memory are taken back.
static enum swathe_status give_up(const struct call *call, enum swathe_status status)
{
  char words[2048];

  if (stages(call->layer)) return sw_exchange_abandon(call->layer, status);
  if (!call->layer->transport) return status;
  snprintf(words, sizeof words, "%s", swathe_error());
  swathe_transport_abort(call->layer->transport, words);
  return sw_fail(status, "%s", words);
}

static enum swathe_status queue_call(struct call *call)
{
  struct sw_pass_cuda *pass = call->pass;
  enum swathe_status status =
      sw_device_cuda_capturing(pass->device, call->stream, &call->capturing);

  if (!status) status = refuse_capture(call);
  if (!status) status = need_lists(call);
  if (!status) status = enter_stream(call);
  if (status) return status;
  fill_args(call);
  status = call->direction == SWATHE_FORWARD ? queue_forward(call) : queue_backward(call);
  if (status) status = give_up(call, status);
  // after a failure too: what was queued still runs
  const enum swathe_status left = leave_stream(call);
  return status ? status : left;
}

enum swathe_status sw_pass_cuda_run(struct swathe_layer *layer, enum swathe_direction direction,
                                    const struct swathe_tensors *tensors, void *stream)
{
  const double begin = sw_layer_now_us();
  struct call call = { .layer = layer,
                       .pass = layer->cuda,
                       .tensors = tensors,
                       .direction = direction,
                       .stream = stream };
  enum swathe_status status = sw_device_cuda_enter(layer->cuda->device);

  if (status) return status;
  layer->timing = (struct swathe_timing){ .total_us = 0 };
  status = queue_call(&call);
  sw_device_cuda_leave(layer->cuda->device);
  layer->timing.total_us = sw_layer_now_us() - begin;
  return status ? sw_within(status, "in %s of rank %d", sw_context_kernel_name(direction),
                            sw_layer_rank(layer))
                : SWATHE_OK;
}
