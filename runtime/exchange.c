// exchange.c: what travels between ranks: the halo's keys, and the sums of their gradients on the
// way home, and how both lie in buffers.  A message holds, for its tokens,
// [batch][tokens][kv_heads][dim] of k, then of v.
#include "layer.h"

#include <string.h>

// ---- Where things lie ---------------------------------------------------------------------------

static void *offset(void *data, int64_t elements, size_t elem_bytes)
{
  return (char *)data + elements * (int64_t)elem_bytes;
}

struct sw_view sw_exchange_tensor(const struct swathe_tensor *tensor, int64_t row,
                                  size_t elem_bytes)
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
  return (struct sw_view){ .data = offset(data, first * token, elem_bytes),
                           .token = token,
                           .head = dim,
                           .batch = tokens * token };
}

struct sw_key_views sw_exchange_packed(const struct swathe_layer *layer, void *data,
                                       size_t elem_bytes, int64_t tokens, int64_t first)
{
  const int64_t k_elements =
      layer->batch * tokens * layer->problem.kv_heads * layer->problem.head_dim_qk;
  return (struct sw_key_views){
    .k = block_view(layer, data, elem_bytes, tokens, first, layer->problem.head_dim_qk),
    .v = block_view(layer, offset(data, k_elements, elem_bytes), elem_bytes, tokens, first,
                    layer->problem.head_dim_v),
  };
}

static void *message_data(const struct swathe_layer *layer, void *base, size_t elem_bytes,
                          const struct sw_halo_message *message)
{
  return offset(base, message->slot * layer->batch * sw_layer_token_elements(layer), elem_bytes);
}

struct sw_key_views sw_exchange_wire(const struct swathe_layer *layer, void *base,
                                     size_t elem_bytes, const struct sw_halo_message *message,
                                     int64_t slot)
{
  return sw_exchange_packed(layer, message_data(layer, base, elem_bytes, message), elem_bytes,
                            message->tokens, slot - message->slot);
}

// ---- Messages -----------------------------------------------------------------------------------

// Called between ranges of items.  A failure is kept for the wait; the words are the thread's last.
void sw_exchange_progress(void *arg)
{
  struct sw_exchange *exchange = arg;
  if (!exchange->transport || exchange->done || exchange->status) return;
  if (exchange->rounds) {
    sw_baseline_progress(exchange);
    return;
  }
  exchange->status = exchange->transport->operations->test(exchange->transport, &exchange->done);
}

// Posts the messages of both lists: what this rank sends from `out`, what it receives into `in`.
static enum swathe_status post(struct swathe_layer *layer, void *out,
                               const struct sw_halo_message *sends, int64_t send_count, void *in,
                               const struct sw_halo_message *receives, int64_t receive_count,
                               size_t elem_bytes, struct sw_exchange *exchange)
{
  const size_t token_bytes =
      (size_t)sw_layer_token_elements(layer) * (size_t)layer->batch * elem_bytes;
  int32_t count = 0;

  *exchange = (struct sw_exchange){ .transport = NULL };
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

enum swathe_status sw_exchange_finish(struct swathe_layer *layer, struct sw_exchange *exchange)
{
  if (!exchange->transport || exchange->done) return exchange->status;
  if (exchange->rounds) return sw_baseline_finish(layer, exchange);
  const double begin = sw_layer_now_us();
  const enum swathe_status status =
      exchange->status ? exchange->status
                       : exchange->transport->operations->wait(exchange->transport);
  layer->timing.wait_us += sw_layer_now_us() - begin;
  return status;
}

void sw_exchange_copy(int32_t batch, int64_t tokens, int32_t heads, int32_t dim, struct sw_view to,
                      struct sw_view from, size_t elem_bytes)
{
  const bool together = (from.head == dim && to.head == dim) || heads == 1;
  const size_t bytes = (size_t)dim * elem_bytes;

  for (int32_t b = 0; b < batch; b++)
    for (int64_t t = 0; t < tokens; t++) {
      char *out = offset(to.data, b * to.batch + t * to.token, elem_bytes);
      const char *in = offset(from.data, b * from.batch + t * from.token, elem_bytes);
      if (together) {
        memcpy(out, in, bytes * (size_t)heads);
        continue;
      }
      for (int32_t h = 0; h < heads; h++)
        memcpy(out + h * to.head * (int64_t)elem_bytes, in + h * from.head * (int64_t)elem_bytes,
               bytes);
    }
}

enum swathe_status sw_exchange_post_keys(struct swathe_layer *layer,
                                         const struct swathe_tensors *tensors, void *halo,
                                         struct sw_exchange *exchange)
{
  const struct sw_halo_plan *plan = layer->plan;
  const struct swathe_problem *p = &layer->problem;
  const size_t elem = sw_problem_elem_bytes(p);

  *exchange = (struct sw_exchange){ .transport = NULL };
  if (layer->muted) return SWATHE_OK;
  if (layer->baseline) return sw_baseline_post_keys(layer, tensors, halo, exchange);
  for (int64_t m = 0; m < plan->send_message_count; m++) {
    const struct sw_halo_message *message = &plan->send_messages[m];
    for (int64_t i = message->segment_begin; i < message->segment_end; i++) {
      const struct sw_halo_segment *segment = &plan->sends[i];
      const struct sw_key_views to =
          sw_exchange_wire(layer, layer->send.data, elem, message, segment->slot);
      sw_exchange_copy(layer->batch, segment->tokens, p->kv_heads, p->head_dim_qk, to.k,
                       sw_exchange_tensor(&tensors->k, segment->row, elem), elem);
      sw_exchange_copy(layer->batch, segment->tokens, p->kv_heads, p->head_dim_v, to.v,
                       sw_exchange_tensor(&tensors->v, segment->row, elem), elem);
    }
  }
  return post(layer, layer->send.data, plan->send_messages, plan->send_message_count, halo,
              plan->receive_messages, plan->receive_message_count, elem, exchange);
}

// Sums travel as fp32, or narrowed where the problem says so; they are added in fp32 either way.
static bool narrows(const struct swathe_layer *layer)
{
  return layer->problem.halo_gradient == SWATHE_BF16;
}

static size_t sums_of(const struct swathe_layer *layer, int64_t tokens)
{
  return (size_t)tokens * (size_t)layer->batch * (size_t)sw_layer_token_elements(layer);
}

enum swathe_status sw_exchange_post_sums(struct swathe_layer *layer, struct sw_exchange *exchange)
{
  const struct sw_halo_plan *plan = layer->plan;
  void *out = layer->send_sums.data, *in = layer->receive_sums.data;
  size_t elem = sizeof(float);

  *exchange = (struct sw_exchange){ .transport = NULL };
  if (layer->muted) return SWATHE_OK;
  if (layer->baseline) return sw_baseline_post_sums(layer, exchange);
  if (narrows(layer)) {
    const float *sums = out;
    uint16_t *narrow = layer->send_narrow.data;
    for (size_t i = 0; i < sums_of(layer, plan->receive_tokens); i++)
      narrow[i] = sw_problem_to_bf16(sums[i]);
    out = narrow;
    in = layer->receive_narrow.data;
    elem = sizeof *narrow;
  }
  return post(layer, out, plan->receive_messages, plan->receive_message_count, in,
              plan->send_messages, plan->send_message_count, elem, exchange);
}

enum swathe_status sw_exchange_finish_sums(struct swathe_layer *layer, struct sw_exchange *exchange)
{
  const enum swathe_status status = sw_exchange_finish(layer, exchange);
  if (status || !narrows(layer) || layer->baseline || layer->muted) return status;
  float *sums = layer->receive_sums.data;
  const uint16_t *narrow = layer->receive_narrow.data;
  for (size_t i = 0; i < sums_of(layer, layer->plan->send_tokens); i++)
    sums[i] = sw_problem_from_bf16(narrow[i]);
  return SWATHE_OK;
}
