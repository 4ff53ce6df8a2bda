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
#include "pass_cuda.h"

#include <stdio.h>
#include <stdlib.h>

enum { MOST_WIDEN_BLOCKS = 1024 };

// ---- Create -------------------------------------------------------------------------------------

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
    if (!layer->transport || !layer->transport->holds_memory) sw_pass_cuda_memory_free(pass);
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

enum swathe_status sw_pass_cuda_shard(struct swathe_layer *layer)
{
  enum swathe_status status = sw_device_cuda_enter(layer->cuda->device);

  if (status) return status;
  status = sw_pass_cuda_memory_shard(layer);
  sw_device_cuda_leave(layer->cuda->device);
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

static void *device_address(const void *base, size_t offset)
{
  return (void *)((uintptr_t)base + offset);
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

bool sw_pass_cuda_stages(const struct swathe_layer *layer)
{
  return layer->transport && !layer->transport->operations->enqueue;
}

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
                     !sw_pass_cuda_stages(layer);
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

  if (!sw_pass_cuda_stages(call->layer)) return enqueue_phase(call, phase);
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

  if (!sw_pass_cuda_stages(layer)) return SWATHE_OK;
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
  if (!call->capturing || !sw_pass_cuda_stages(call->layer)) return SWATHE_OK;
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

  if (sw_pass_cuda_stages(call->layer)) return sw_exchange_abandon(call->layer, status);
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
  if (!status)
    status = sw_pass_cuda_memory_fit(call->layer, call->direction, call->tensors, call->capturing);
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
