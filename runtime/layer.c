// layer.c: one rank's layer: exchange + launch.
//
//   forward    post the halo's keys -> interior units (the exchange progresses) -> wait -> edge units
//   backward   halo's keys as above unless the caller kept them -> edge units -> their gradients home ->
//              interior units -> wait -> add everything in a fixed order (gather)
//
// Nothing of a forward is remembered: it may be replayed, and layers may interleave.
#include "layer.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

// Rows that one item of gather adds up: their sums stay in the first-level cache for common heads.
enum { GATHER_ROWS = 32 };

struct buffer {
  void *data;
  size_t bytes;
};

struct swathe_layer {
  struct swathe_context *context;
  struct swathe_problem problem;
  struct swathe_transport *transport;  // NULL: a group of one
  struct sw_device *device;
  struct sw_halo_planner *planner;
  const struct sw_halo_plan *plan;     // NULL until sharded
  int32_t batch;
  struct sw_choice choices[2];
  const struct sw_kernel *kernels[2];  // NULL: not wanted
  struct sw_work work[2];
  struct sw_term *terms;               // of the last backward
  int64_t term_capacity;
  struct sw_transport_message *messages;
  int32_t message_capacity;
  // keys on their way: to others, from others; sums on their way: to owners, from readers
  struct buffer send, receive, send_sums, receive_sums;
  struct buffer own_sums, spill_sums, sink_sums;
  struct swathe_timing timing;
  int64_t most_items;                  // the tuner's limit on the items of a launch; 0: none
  int64_t computed_tokens;             // queries (times key heads and batch) of the last call's items
};

static double now_us(void)
{
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return 1e6 * (double)time.tv_sec + 1e-3 * (double)time.tv_nsec;
}

static int32_t own_rank(const struct swathe_layer *layer)
{
  return layer->transport ? layer->transport->rank : 0;
}

static int32_t group_ranks(const struct swathe_layer *layer)
{
  return layer->transport ? layer->transport->ranks : 1;
}

// ---- Create --------------------------------------------------------------------------------------

// What every rank tells every other before the first message.
struct agreement {
  char version[32], problem[SW_PROBLEM_TEXT], configs[2][SW_CONFIG_TEXT];
};

// Rank 0 decides the configs; a rank whose isa cannot run them keeps its own, since kernels are each rank's
// own business.  What the wire depends on must be equal.
static enum swathe_status agree(struct swathe_layer *layer)
{
  const int32_t ranks = group_ranks(layer);
  struct agreement *all = calloc((size_t)ranks + 1, sizeof *all);
  struct agreement *mine = all ? &all[ranks] : NULL;
  enum swathe_status status;

  if (!all) return sw_fail(SWATHE_NO_MEMORY, "no memory to agree among %d ranks", ranks);
  snprintf(mine->version, sizeof mine->version, "%s", SWATHE_VERSION);
  swathe_problem_format(&layer->problem, mine->problem, sizeof mine->problem);
  for (int d = 0; d < 2; d++)
    snprintf(mine->configs[d], sizeof mine->configs[d], "%s", layer->choices[d].config);

  status = layer->transport->operations->gather(layer->transport, mine, sizeof *mine, all);
  for (int32_t r = 0; r < ranks && !status; r++) {
    if (strncmp(all[r].version, mine->version, sizeof mine->version))
      status = sw_fail(SWATHE_DISAGREE, "rank %d runs swathe %.31s, rank %d runs %s", r, all[r].version,
                       own_rank(layer), mine->version);
    else if (strncmp(all[r].problem, mine->problem, sizeof mine->problem))
      status = sw_fail(SWATHE_DISAGREE, "rank %d has the problem\n    %.511s\n  but rank %d has\n    %s", r,
                       all[r].problem, own_rank(layer), mine->problem);
  }
  for (int d = 0; d < 2 && !status && own_rank(layer) != 0; d++) {
    const struct sw_gen_request request = {
      .problem = &layer->problem,
      .kernel = sw_context_kernel_name((enum swathe_direction)d),
      .isa = layer->context->isa,
    };
    char config[SW_CONFIG_TEXT];
    all[0].configs[d][SW_CONFIG_TEXT - 1] = 0;
    if (!*all[0].configs[d] || !strcmp(all[0].configs[d], layer->choices[d].config)) continue;
    pthread_mutex_lock(&layer->context->mutex);
    const bool usable = !sw_gen_check(layer->context->gen, &request, all[0].configs[d], config);
    pthread_mutex_unlock(&layer->context->mutex);
    if (!usable) continue;
    memcpy(layer->choices[d].config, config, sizeof config);
    snprintf(layer->choices[d].why, sizeof layer->choices[d].why, "rank 0's choice");
  }
  free(all);
  return status ? sw_within(status, "while the ranks agreed on a layer") : SWATHE_OK;
}

struct kernel_load {
  struct swathe_layer *layer;
  enum swathe_direction direction;
  enum swathe_status status;
  char words[2048];
};

static void *load_kernel(void *arg)
{
  struct kernel_load *load = arg;
  struct swathe_layer *layer = load->layer;
  load->status = sw_context_kernel(layer->context, &layer->problem, load->direction,
                                   layer->choices[load->direction].config,
                                   &layer->kernels[load->direction]);
  if (load->status) snprintf(load->words, sizeof load->words, "%s", swathe_error());
  return NULL;
}

// Both kernels at once: they compile side by side when no cache has them.
static enum swathe_status load_kernels(struct swathe_layer *layer, unsigned directions)
{
  struct kernel_load loads[2];
  pthread_t beside;
  bool threaded = false;

  for (int d = 0; d < 2; d++)
    loads[d] = (struct kernel_load){ .layer = layer, .direction = (enum swathe_direction)d };
  if (directions == 3) threaded = !pthread_create(&beside, NULL, load_kernel, &loads[1]);
  if (directions & 1) load_kernel(&loads[0]);
  if (threaded) pthread_join(beside, NULL);
  else if (directions & 2) load_kernel(&loads[1]);
  for (int d = 0; d < 2; d++)
    if (loads[d].status) return sw_fail(loads[d].status, "%s", loads[d].words);
  return SWATHE_OK;
}

enum swathe_status sw_layer_create(struct swathe_context *context, const struct swathe_problem *problem,
                                   struct swathe_transport *transport, const char *const configs[2],
                                   unsigned directions, struct swathe_layer **layer_out)
{
  enum swathe_status status = swathe_problem_check(problem);
  if (status) return status;
  struct swathe_layer *layer = calloc(1, sizeof *layer);
  if (!layer) return sw_fail(SWATHE_NO_MEMORY, "no %zu bytes for a layer", sizeof *layer);

  layer->context = context;
  layer->problem = *problem;
  layer->transport = transport;
  for (int d = 0; d < 2 && !status; d++) {
    struct sw_choice *choice = &layer->choices[d];
    if (!(directions & 1u << d)) continue;
    if (!configs[d]) {
      status = sw_choose(context, problem, (enum swathe_direction)d, choice);
      continue;
    }
    snprintf(choice->config, sizeof choice->config, "%s", configs[d]);
    snprintf(choice->why, sizeof choice->why, "given by the caller");
  }
  if (!status && group_ranks(layer) > 1) status = agree(layer);
  if (!status) status = load_kernels(layer, directions);
  if (!status) status = sw_halo_planner_create(&layer->planner);
  if (!status) status = sw_device_cpu_create(context->threads, &layer->device);
  if (status) {
    swathe_layer_destroy(layer);
    return status;
  }
  *layer_out = layer;
  return SWATHE_OK;
}

enum swathe_status swathe_layer_create(struct swathe_context *context,
                                       const struct swathe_problem *problem,
                                       struct swathe_transport *transport, struct swathe_layer **layer)
{
  static const char *const choose_both[2];
  return sw_layer_create(context, problem, transport, choose_both, 3, layer);
}

void swathe_layer_destroy(struct swathe_layer *layer)
{
  if (!layer) return;
  struct buffer *const buffers[] = { &layer->send,         &layer->receive,  &layer->send_sums,
                                     &layer->receive_sums, &layer->own_sums, &layer->spill_sums,
                                     &layer->sink_sums };
  for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++)
    if (buffers[i]->data) sw_device_free(layer->device, buffers[i]->data);
  for (int d = 0; d < 2; d++) sw_work_free(&layer->work[d]);
  free(layer->terms);
  free(layer->messages);
  if (layer->planner) sw_halo_planner_destroy(layer->planner);
  if (layer->device) sw_device_destroy(layer->device);
  free(layer);
}

// ---- Shard ---------------------------------------------------------------------------------------

// Elements of one token's keys and values, all heads.
static int64_t token_elements(const struct swathe_layer *layer)
{
  return (int64_t)layer->problem.kv_heads * (layer->problem.head_dim_qk + layer->problem.head_dim_v);
}

// At least `tokens` tokens of keys and values of `elem_bytes` each; contents are not kept.
static enum swathe_status reserve(struct swathe_layer *layer, struct buffer *buffer, int64_t tokens,
                                  size_t elem_bytes)
{
  const size_t bytes =
      (size_t)tokens * (size_t)layer->batch * (size_t)token_elements(layer) * elem_bytes;
  if (bytes <= buffer->bytes) return SWATHE_OK;
  if (buffer->data) sw_device_free(layer->device, buffer->data);
  *buffer = (struct buffer){ .data = sw_device_allocate(layer->device, bytes) };
  if (!buffer->data) return sw_fail(SWATHE_NO_MEMORY, "no %zu bytes for a layer's buffer", bytes);
  buffer->bytes = bytes;
  return SWATHE_OK;
}

static enum swathe_status reserve_messages(struct swathe_layer *layer)
{
  const int64_t count = layer->plan->receive_message_count + layer->plan->send_message_count;
  if (count <= layer->message_capacity) return SWATHE_OK;
  free(layer->messages);
  layer->message_capacity = 0;
  layer->messages = calloc((size_t)count, sizeof *layer->messages);
  if (!layer->messages) return sw_fail(SWATHE_NO_MEMORY, "no memory for %" PRId64 " messages", count);
  layer->message_capacity = (int32_t)count;
  return SWATHE_OK;
}

enum swathe_status swathe_layer_shard(struct swathe_layer *layer, const struct swathe_sharding *sharding)
{
  const struct sw_halo_plan *plan = NULL;
  enum swathe_status status;

  layer->plan = NULL;
  if (sharding->ranks != group_ranks(layer))
    return sw_fail(SWATHE_BAD_SHARDING, "the sharding is for %d ranks, the layer's group has %d",
                   sharding->ranks, group_ranks(layer));
  status = sw_halo_plan(layer->planner, &layer->problem, sharding, own_rank(layer), &plan);
  for (int d = 0; d < 2 && !status; d++)
    if (layer->kernels[d])
      status = sw_work_build(&layer->work[d], &layer->problem, plan, (enum swathe_direction)d,
                             layer->kernels[d]->tile_tokens);
  if (status) return sw_within(status, "while sharding for rank %d", own_rank(layer));

  layer->batch = sharding->batch;
  layer->plan = plan;
  const size_t elem = sw_problem_elem_bytes(&layer->problem);
  status = reserve(layer, &layer->send, plan->send_tokens, elem);
  if (!status) status = reserve(layer, &layer->receive, plan->receive_tokens, elem);
  if (!status) status = reserve_messages(layer);
  if (status) layer->plan = NULL;
  return status;
}

size_t swathe_layer_halo_bytes(const struct swathe_layer *layer)
{
  if (!layer->plan) return 0;
  return (size_t)layer->plan->receive_tokens * (size_t)layer->batch *
         (size_t)sw_problem_token_bytes(&layer->problem);
}

// ---- Tensors -------------------------------------------------------------------------------------

static void *offset(void *data, int64_t elements, size_t elem_bytes)
{
  return (char *)data + elements * (int64_t)elem_bytes;
}

static struct sw_view tensor_view(const struct swathe_tensor *tensor, int64_t row, size_t elem_bytes)
{
  return (struct sw_view){
    .data = offset(tensor->data, row * tensor->token_stride, elem_bytes),
    .token = tensor->token_stride,
    .head = tensor->head_stride,
    .batch = tensor->batch_stride,
  };
}

// A packed block [batch][tokens][kv_heads][dim] that begins at `data`, from its token `first` on.
static struct sw_view block_view(const struct swathe_layer *layer, void *data, size_t elem_bytes,
                                 int64_t tokens, int64_t first, int64_t dim)
{
  const int64_t token = layer->problem.kv_heads * dim;
  return (struct sw_view){
    .data = offset(data, first * token, elem_bytes), .token = token, .head = dim, .batch = tokens * token
  };
}

struct key_views {
  struct sw_view k, v;
};

// A buffer of keys: [batch][tokens] of k, then of v.
static struct key_views keys_of(const struct swathe_layer *layer, void *data, size_t elem_bytes,
                                int64_t tokens, int64_t first)
{
  const int64_t k_elements = layer->batch * tokens * layer->problem.kv_heads * layer->problem.head_dim_qk;
  return (struct key_views){
    .k = block_view(layer, data, elem_bytes, tokens, first, layer->problem.head_dim_qk),
    .v = block_view(layer, offset(data, k_elements, elem_bytes), elem_bytes, tokens, first,
                    layer->problem.head_dim_v),
  };
}

static void *message_data(const struct swathe_layer *layer, void *base, size_t elem_bytes,
                          const struct sw_halo_message *message)
{
  return offset(base, message->slot * layer->batch * token_elements(layer), elem_bytes);
}

// The keys from `slot` on, within the message that carries it.
static struct key_views wire_keys(const struct swathe_layer *layer, void *base, size_t elem_bytes,
                                  const struct sw_halo_message *message, int64_t slot)
{
  return keys_of(layer, message_data(layer, base, elem_bytes, message), elem_bytes, message->tokens,
                 slot - message->slot);
}

static enum swathe_status check_tensor(const struct swathe_layer *layer, const char *name,
                                       const struct swathe_tensor *tensor, int32_t heads, int32_t dim,
                                       bool written)
{
  const int64_t rows = layer->plan->rows;
  if (rows == 0) return SWATHE_OK;
  if (!tensor->data)
    return sw_fail(SWATHE_BAD_TENSOR, "%s has no data, but this rank has %" PRId64 " rows", name, rows);
  if (!written) return SWATHE_OK;
  if ((rows > 1 && tensor->token_stride == 0) || (layer->batch > 1 && tensor->batch_stride == 0) ||
      (heads > 1 && llabs(tensor->head_stride) < dim))
    return sw_fail(SWATHE_BAD_TENSOR,
                   "%s is written, but its strides (token %" PRId64 ", head %" PRId64 ", batch %" PRId64
                   ") make elements fall together",
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

static enum swathe_status check_call(const struct swathe_layer *layer, enum swathe_direction direction,
                                     const struct swathe_tensors *tensors, const void *stream)
{
  if (!layer->plan)
    return sw_fail(SWATHE_BAD_USE, "the layer has no sharding: call swathe_layer_shard first");
  if (!layer->kernels[direction])
    return sw_fail(SWATHE_BAD_USE, "the layer was made without its %s kernel",
                   sw_context_kernel_name(direction));
  if (stream) return sw_fail(SWATHE_BAD_USE, "the cpu target takes no stream");
  return check_tensors(layer, tensors, direction == SWATHE_BACKWARD);
}

// Rows of a [batch][rows][heads][dim] tensor that no span covers.
static void zero_gaps(const struct swathe_layer *layer, const struct swathe_tensor *tensor, int32_t heads,
                      size_t dim_bytes, size_t elem_bytes)
{
  for (int64_t g = 0; g < layer->plan->gap_count; g++)
    for (int32_t b = 0; b < layer->batch; b++)
      for (int64_t row = 0; row < layer->plan->gaps[g].rows; row++)
        for (int32_t h = 0; h < heads; h++)
          memset(offset(tensor->data,
                        (layer->plan->gaps[g].row + row) * tensor->token_stride +
                            b * tensor->batch_stride + h * tensor->head_stride,
                        elem_bytes),
                 0, dim_bytes);
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

// ---- Exchange ------------------------------------------------------------------------------------

// One phase of the exchange while units run.
struct exchange {
  struct swathe_transport *transport;  // NULL: nothing to move
  bool done;
  enum swathe_status status;
};

// Called between ranges of items.  A failure is kept for the wait; the words are the thread's last.
static void let_progress(void *arg)
{
  struct exchange *exchange = arg;
  if (!exchange->transport || exchange->done || exchange->status) return;
  exchange->status = exchange->transport->operations->test(exchange->transport, &exchange->done);
}

// Posts the messages of both lists: what this rank sends from `out`, what it receives into `in`.
static enum swathe_status post(struct swathe_layer *layer, void *out, const struct sw_halo_message *sends,
                               int64_t send_count, void *in, const struct sw_halo_message *receives,
                               int64_t receive_count, size_t elem_bytes, struct exchange *exchange)
{
  const size_t token_bytes = (size_t)token_elements(layer) * (size_t)layer->batch * elem_bytes;
  int32_t count = 0;

  *exchange = (struct exchange){ .transport = NULL };
  for (int64_t i = 0; i < receive_count + send_count; i++) {
    const bool send = i >= receive_count;
    const struct sw_halo_message *message = send ? &sends[i - receive_count] : &receives[i];
    const size_t bytes = (size_t)message->tokens * token_bytes;
    layer->messages[count++] = (struct sw_transport_message){
      .data = message_data(layer, send ? out : in, elem_bytes, message),
      .bytes = bytes,
      .peer = message->peer,
      .send = send,
    };
    if (send) layer->timing.sent_bytes += (int64_t)bytes;
    else layer->timing.received_bytes += (int64_t)bytes;
  }
  if (!count) return SWATHE_OK;
  exchange->transport = layer->transport;
  return layer->transport->operations->post(layer->transport, layer->messages, count);
}

static enum swathe_status finish(struct swathe_layer *layer, struct exchange *exchange)
{
  if (!exchange->transport || exchange->done) return SWATHE_OK;
  const double begin = now_us();
  const enum swathe_status status =
      exchange->status ? exchange->status : exchange->transport->operations->wait(exchange->transport);
  layer->timing.wait_us += now_us() - begin;
  return status;
}

static void copy_keys(const struct swathe_layer *layer, struct sw_view to, const struct sw_view from,
                      int64_t tokens, int32_t dim, size_t elem_bytes)
{
  const int32_t heads = layer->problem.kv_heads;
  const bool together = from.head == dim || heads == 1;
  const size_t bytes = (size_t)dim * elem_bytes;

  for (int32_t b = 0; b < layer->batch; b++)
    for (int64_t t = 0; t < tokens; t++) {
      char *out = offset(to.data, b * to.batch + t * to.token, elem_bytes);
      const char *in = offset(from.data, b * from.batch + t * from.token, elem_bytes);
      if (together) {
        memcpy(out, in, bytes * (size_t)heads);
        continue;
      }
      for (int32_t h = 0; h < heads; h++)
        memcpy(out + (size_t)h * bytes, in + h * from.head * (int64_t)elem_bytes, bytes);
    }
}

// Puts the keys that others need into the send buffer and posts the forward exchange.
static enum swathe_status post_keys(struct swathe_layer *layer, const struct swathe_tensors *tensors,
                                    void *halo, struct exchange *exchange)
{
  const struct sw_halo_plan *plan = layer->plan;
  const struct swathe_problem *p = &layer->problem;
  const size_t elem = sw_problem_elem_bytes(p);

  for (int64_t m = 0; m < plan->send_message_count; m++) {
    const struct sw_halo_message *message = &plan->send_messages[m];
    for (int64_t i = message->segment_begin; i < message->segment_end; i++) {
      const struct sw_halo_segment *segment = &plan->sends[i];
      const struct key_views to = wire_keys(layer, layer->send.data, elem, message, segment->slot);
      copy_keys(layer, to.k, tensor_view(&tensors->k, segment->row, elem), segment->tokens,
                p->head_dim_qk, elem);
      copy_keys(layer, to.v, tensor_view(&tensors->v, segment->row, elem), segment->tokens,
                p->head_dim_v, elem);
    }
  }
  return post(layer, layer->send.data, plan->send_messages, plan->send_message_count, halo,
              plan->receive_messages, plan->receive_message_count, elem, exchange);
}

// ---- Launch --------------------------------------------------------------------------------------

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
      run->k = tensor_view(&tensors->k, source->index, elem);
      run->v = tensor_view(&tensors->v, source->index, elem);
    } else {
      const struct key_views keys = wire_keys(
          layer, halo, elem, &layer->plan->receive_messages[source->message], source->index);
      run->k = keys.k;
      run->v = keys.v;
    }
    if (direction == SWATHE_FORWARD) continue;
    const struct key_views sums =
        source->spill >= 0
            ? keys_of(layer, layer->spill_sums.data, sizeof(float), work->spill_tokens, source->spill)
            : keys_of(layer, layer->own_sums.data, sizeof(float), layer->plan->rows, source->index);
    run->dk = sums.k;
    run->dv = sums.v;
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
    .q = tensor_view(&tensors->q, 0, elem),
    .out = tensor_view(&tensors->out, 0, elem),
    .lse = tensor_view(&tensors->lse, 0, sizeof(float)),
  };
  if (direction == SWATHE_BACKWARD) {
    args.dout = tensor_view(&tensors->dout, 0, elem);
    args.dq = tensor_view(&tensors->dq, 0, elem);
    args.dsink = layer->sink_sums.data;
  }
  return args;
}

// The range of items the device hands to a kernel begins at 0; this shifts it to the launch's first.
struct shifted {
  sw_attention_kernel *kernel;
  const struct sw_attention_args *args;
  int64_t first;
};

static void run_shifted(const void *arg, int64_t begin, int64_t end, void *workspace)
{
  const struct shifted *shifted = arg;
  shifted->kernel(shifted->args, shifted->first + begin, shifted->first + end, workspace);
}

static enum swathe_status launch_units(struct swathe_layer *layer, enum swathe_direction direction,
                                       const struct sw_attention_args *args, int64_t begin, int64_t end,
                                       struct exchange *exchange)
{
  const struct sw_kernel *kernel = layer->kernels[direction];
  const int64_t per_unit = (int64_t)layer->batch * layer->problem.kv_heads;
  const int64_t all = (end - begin) * per_unit;
  const int64_t items = layer->most_items && all > layer->most_items ? layer->most_items : all;
  const struct shifted shifted = { kernel->attention, args, begin * per_unit };
  const struct sw_device_launch launch = {
    .kernel = run_shifted,
    .args = &shifted,
    .items = items,
    .grain = 1,
    .workspace_bytes = (size_t)kernel->workspace(args->max_keys),
    .idle = exchange ? let_progress : NULL,
    .idle_arg = exchange,
  };
  for (int64_t i = 0; i < items; i++)
    layer->computed_tokens += layer->work[direction].units[begin + i / per_unit].tokens;
  return launch.items ? sw_device_launch(layer->device, &launch) : SWATHE_OK;
}

void sw_layer_limit(struct swathe_layer *layer, int64_t items)
{
  layer->most_items = items;
}

int64_t sw_layer_computed(const struct swathe_layer *layer)
{
  return layer->computed_tokens;
}

enum swathe_status swathe_layer_forward(struct swathe_layer *layer, const struct swathe_tensors *tensors,
                                        void *stream)
{
  const double begin = now_us();
  const struct sw_work *work = &layer->work[SWATHE_FORWARD];
  struct exchange exchange;
  enum swathe_status status = check_call(layer, SWATHE_FORWARD, tensors, stream);

  if (status) return status;
  layer->timing = (struct swathe_timing){ .total_us = 0 };
  layer->computed_tokens = 0;
  void *halo = tensors->halo ? tensors->halo : layer->receive.data;
  point_runs(layer, SWATHE_FORWARD, tensors, halo);
  const struct sw_attention_args args = attention_args(layer, SWATHE_FORWARD, tensors);
  zero_gaps(layer, &tensors->out, layer->problem.q_heads,
            (size_t)layer->problem.head_dim_v * sw_problem_elem_bytes(&layer->problem),
            sw_problem_elem_bytes(&layer->problem));
  mark_gaps(layer, &tensors->lse);

  status = post_keys(layer, tensors, halo, &exchange);
  if (!status)
    status = launch_units(layer, SWATHE_FORWARD, &args, work->edge_units, work->unit_count, &exchange);
  if (!status) status = finish(layer, &exchange);
  if (!status) status = launch_units(layer, SWATHE_FORWARD, &args, 0, work->edge_units, NULL);
  layer->timing.total_us = now_us() - begin;
  return status ? sw_within(status, "in forward of rank %d", own_rank(layer)) : SWATHE_OK;
}

// ---- Backward ------------------------------------------------------------------------------------

// Adds the sums of spilled halo keys, in list order, into the messages that take them home.
static void add_spills_to_wire(struct swathe_layer *layer)
{
  const struct sw_work *work = &layer->work[SWATHE_BACKWARD];
  const struct swathe_problem *p = &layer->problem;
  const size_t bytes = (size_t)layer->plan->receive_tokens * (size_t)layer->batch *
                       (size_t)token_elements(layer) * sizeof(float);

  if (bytes) memset(layer->send_sums.data, 0, bytes);
  for (int64_t i = 0; i < work->spill_count; i++) {
    const struct sw_spill *spill = &work->spills[i];
    if (spill->place != SW_WIRE) continue;
    const struct key_views from =
        keys_of(layer, layer->spill_sums.data, sizeof(float), work->spill_tokens, spill->spill);
    const struct key_views to =
        wire_keys(layer, layer->send_sums.data, sizeof(float),
                  &layer->plan->receive_messages[spill->message], spill->index);
    for (int32_t b = 0; b < layer->batch; b++) {
      float *out = (float *)to.k.data + b * to.k.batch;
      const float *in = (const float *)from.k.data + b * from.k.batch;
      for (int64_t j = 0; j < spill->tokens * p->kv_heads * p->head_dim_qk; j++) out[j] += in[j];
      out = (float *)to.v.data + b * to.v.batch;
      in = (const float *)from.v.data + b * from.v.batch;
      for (int64_t j = 0; j < spill->tokens * p->kv_heads * p->head_dim_v; j++) out[j] += in[j];
    }
  }
}

static void add_term(struct swathe_layer *layer, int64_t *count, int64_t row, int64_t tokens,
                     struct key_views sums)
{
  assert(*count < layer->term_capacity);
  layer->terms[(*count)++] =
      (struct sw_term){ .row = row, .tokens = tokens, .dk = sums.k, .dv = sums.v };
}

// The sums of every row, in the order they are added: its own unit's, then those of neighbouring units and
// spans of this rank, then those of other ranks by ascending rank.
static int64_t list_terms(struct swathe_layer *layer)
{
  const struct sw_halo_plan *plan = layer->plan;
  const struct sw_work *work = &layer->work[SWATHE_BACKWARD];
  int64_t count = 0;

  add_term(layer, &count, 0, plan->rows,
           keys_of(layer, layer->own_sums.data, sizeof(float), plan->rows, 0));
  for (int64_t i = 0; i < work->spill_count; i++)
    if (work->spills[i].place == SW_OWN)
      add_term(layer, &count, work->spills[i].index, work->spills[i].tokens,
               keys_of(layer, layer->spill_sums.data, sizeof(float), work->spill_tokens,
                       work->spills[i].spill));
  for (int64_t m = 0; m < plan->send_message_count; m++) {
    const struct sw_halo_message *message = &plan->send_messages[m];
    for (int64_t i = message->segment_begin; i < message->segment_end; i++)
      add_term(layer, &count, plan->sends[i].row, plan->sends[i].tokens,
               wire_keys(layer, layer->receive_sums.data, sizeof(float), message, plan->sends[i].slot));
  }
  return count;
}

static enum swathe_status reserve_backward(struct swathe_layer *layer)
{
  const struct sw_halo_plan *plan = layer->plan;
  const struct sw_work *work = &layer->work[SWATHE_BACKWARD];
  const int64_t terms = 1 + work->spill_count + plan->send_count;
  const size_t sink_bytes = (size_t)work->unit_count * (size_t)layer->batch *
                            (size_t)layer->problem.q_heads * sizeof(float);
  enum swathe_status status = reserve(layer, &layer->own_sums, plan->rows, sizeof(float));

  if (!status) status = reserve(layer, &layer->spill_sums, work->spill_tokens, sizeof(float));
  if (!status) status = reserve(layer, &layer->send_sums, plan->receive_tokens, sizeof(float));
  if (!status) status = reserve(layer, &layer->receive_sums, plan->send_tokens, sizeof(float));
  if (!status && layer->problem.sinks && sink_bytes > layer->sink_sums.bytes) {
    if (layer->sink_sums.data) sw_device_free(layer->device, layer->sink_sums.data);
    layer->sink_sums = (struct buffer){ .data = sw_device_allocate(layer->device, sink_bytes) };
    if (!layer->sink_sums.data) return sw_fail(SWATHE_NO_MEMORY, "no %zu bytes for dsink", sink_bytes);
    layer->sink_sums.bytes = sink_bytes;
  }
  if (!status && terms > layer->term_capacity) {
    free(layer->terms);
    layer->terms = calloc((size_t)terms, sizeof *layer->terms);
    layer->term_capacity = layer->terms ? terms : 0;
    if (!layer->terms) status = sw_fail(SWATHE_NO_MEMORY, "no memory for %" PRId64 " sums", terms);
  }
  return status;
}

static void zero_own_gaps(struct swathe_layer *layer)
{
  const struct key_views own =
      keys_of(layer, layer->own_sums.data, sizeof(float), layer->plan->rows, 0);
  const struct swathe_tensor k = { own.k.data, own.k.token, own.k.head, own.k.batch };
  const struct swathe_tensor v = { own.v.data, own.v.token, own.v.head, own.v.batch };
  const struct swathe_problem *p = &layer->problem;
  zero_gaps(layer, &k, p->kv_heads, (size_t)p->head_dim_qk * sizeof(float), sizeof(float));
  zero_gaps(layer, &v, p->kv_heads, (size_t)p->head_dim_v * sizeof(float), sizeof(float));
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

static enum swathe_status launch_gather(struct swathe_layer *layer, const struct swathe_tensors *tensors)
{
  const size_t elem = sw_problem_elem_bytes(&layer->problem);
  const struct sw_gather_args args = {
    .terms = layer->terms,
    .term_count = list_terms(layer),
    .rows = layer->plan->rows,
    .batch = layer->batch,
    .kv_heads = layer->problem.kv_heads,
    .block_rows = GATHER_ROWS,
    .dk = tensor_view(&tensors->dk, 0, elem),
    .dv = tensor_view(&tensors->dv, 0, elem),
  };
  const struct gathering gathering = { layer->kernels[SWATHE_BACKWARD]->gather, &args };
  const struct sw_device_launch launch = {
    .kernel = run_gather,
    .args = &gathering,
    .items = args.batch * ((args.rows + GATHER_ROWS - 1) / GATHER_ROWS),
    .grain = 4,
  };
  return launch.items ? sw_device_launch(layer->device, &launch) : SWATHE_OK;
}

// dsink of this rank: the units' sums, added in double in the order of the units.
static void add_sinks(const struct swathe_layer *layer, float *dsink)
{
  const int64_t rows = layer->work[SWATHE_BACKWARD].unit_count * layer->batch;
  const int32_t heads = layer->problem.q_heads;
  const float *sums = layer->sink_sums.data;

  for (int32_t h = 0; h < heads; h++) {
    double sum = 0;
    for (int64_t i = 0; i < rows; i++) sum += sums[i * heads + h];
    dsink[h] = (float)sum;
  }
}

// The units, with the exchanges between them.  Half the interior hides the keys' way here if they
// must be fetched again, the rest hides the sums' way home.
static enum swathe_status run_backward(struct swathe_layer *layer, const struct swathe_tensors *tensors)
{
  const struct sw_halo_plan *plan = layer->plan;
  const struct sw_work *work = &layer->work[SWATHE_BACKWARD];
  void *halo = tensors->halo ? tensors->halo : layer->receive.data;
  int64_t interior = work->edge_units;
  struct exchange exchange;
  enum swathe_status status = SWATHE_OK;

  point_runs(layer, SWATHE_BACKWARD, tensors, halo);
  const struct sw_attention_args args = attention_args(layer, SWATHE_BACKWARD, tensors);
  if (!tensors->halo) {
    const int64_t half = interior + (work->unit_count - interior) / 2;
    status = post_keys(layer, tensors, halo, &exchange);
    if (!status) status = launch_units(layer, SWATHE_BACKWARD, &args, interior, half, &exchange);
    if (!status) status = finish(layer, &exchange);
    interior = half;
  }
  if (!status) status = launch_units(layer, SWATHE_BACKWARD, &args, 0, work->edge_units, NULL);
  if (status) return status;
  add_spills_to_wire(layer);
  status = post(layer, layer->send_sums.data, plan->receive_messages, plan->receive_message_count,
                layer->receive_sums.data, plan->send_messages, plan->send_message_count, sizeof(float),
                &exchange);
  if (!status) status = launch_units(layer, SWATHE_BACKWARD, &args, interior, work->unit_count, &exchange);
  return status ? status : finish(layer, &exchange);
}

enum swathe_status swathe_layer_backward(struct swathe_layer *layer, const struct swathe_tensors *tensors,
                                         void *stream)
{
  const double begin = now_us();
  const size_t elem = sw_problem_elem_bytes(&layer->problem);
  enum swathe_status status = check_call(layer, SWATHE_BACKWARD, tensors, stream);

  if (!status) status = reserve_backward(layer);
  if (status) return status;
  layer->timing = (struct swathe_timing){ .total_us = 0 };
  layer->computed_tokens = 0;
  zero_gaps(layer, &tensors->dq, layer->problem.q_heads, (size_t)layer->problem.head_dim_qk * elem, elem);
  zero_own_gaps(layer);
  status = run_backward(layer, tensors);
  if (!status) status = launch_gather(layer, tensors);
  if (!status && layer->problem.sinks) add_sinks(layer, tensors->dsink);
  layer->timing.total_us = now_us() - begin;
  return status ? sw_within(status, "in backward of rank %d", own_rank(layer)) : SWATHE_OK;
}

// ---- Told to the caller --------------------------------------------------------------------------

void swathe_layer_timing(const struct swathe_layer *layer, struct swathe_timing *timing)
{
  *timing = layer->timing;
}

struct text {
  char *data;
  size_t size, used;
};

static void say(struct text *text, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void say(struct text *text, const char *format, ...)
{
  const bool room = text->used < text->size;
  va_list args;
  va_start(args, format);
  const int length =
      vsnprintf(room ? text->data + text->used : NULL, room ? text->size - text->used : 0, format, args);
  va_end(args);
  if (length > 0) text->used += (size_t)length;
}

size_t swathe_layer_explain(const struct swathe_layer *layer, char *data, size_t size)
{
  struct text text = { data, size, 0 };
  const struct sw_halo_plan *plan = layer->plan;

  for (int d = 0; d < 2; d++) {
    if (!layer->kernels[d]) continue;
    say(&text, "%-9s %s\n", sw_context_kernel_name((enum swathe_direction)d), layer->choices[d].config);
    say(&text, "          %s; isa %s, %s\n", layer->choices[d].why, layer->context->isa,
        layer->kernels[d]->report.cached ? "from the cache" : "compiled now");
  }
  if (!plan) return text.used;
  say(&text, "halo      rank %d of %d: %" PRId64 " tokens from %" PRId64 " peers, at most %d hops, %" PRId64
             " bytes forward\n",
      plan->rank, group_ranks(layer), plan->receive_tokens, plan->receive_message_count, plan->hops,
      plan->receive_tokens * layer->batch * sw_problem_token_bytes(&layer->problem));
  return text.used;
}
