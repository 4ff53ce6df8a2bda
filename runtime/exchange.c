// exchange.c: what travels between ranks: the halo's keys, and the sums of their gradients on the
// way home, and how both lie in buffers.  A buffer holds token after token, each
// [batch][kv_heads][dim] of k, then of v.
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

struct sw_key_views sw_exchange_packed(const struct swathe_layer *layer, void *data,
                                       size_t elem_bytes, int64_t first)
{
  const struct swathe_problem *p = &layer->problem;
  const int64_t token = layer->batch * sw_layer_token_elements(layer);
  const int64_t k_batch = (int64_t)p->kv_heads * p->head_dim_qk;
  const int64_t v_batch = (int64_t)p->kv_heads * p->head_dim_v;
  return (struct sw_key_views){
    .k = { offset(data, first * token, elem_bytes), token, p->head_dim_qk, k_batch },
    .v = { offset(data, first * token + layer->batch * k_batch, elem_bytes), token, p->head_dim_v,
           v_batch },
  };
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
      .data = (char *)(send ? out : in) + (size_t)message->slot * token_bytes,
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
  for (int64_t i = 0; i < plan->send_count; i++) {
    const struct sw_halo_segment *segment = &plan->sends[i];
    const struct sw_key_views to =
        sw_exchange_packed(layer, layer->send.data, elem, segment->slot);
    sw_exchange_copy(layer->batch, segment->tokens, p->kv_heads, p->head_dim_qk, to.k,
                     sw_exchange_tensor(&tensors->k, segment->row, elem), elem);
    sw_exchange_copy(layer->batch, segment->tokens, p->kv_heads, p->head_dim_v, to.v,
                     sw_exchange_tensor(&tensors->v, segment->row, elem), elem);
  }
  return post(layer, layer->send.data, plan->send_messages, plan->send_message_count, halo,
              plan->receive_messages, plan->receive_message_count, elem, exchange);
}

bool sw_exchange_narrows(const struct swathe_layer *layer)
{
  return layer->problem.halo_gradient == SWATHE_BF16 && !layer->baseline;
}

enum swathe_status sw_exchange_post_sums(struct swathe_layer *layer, struct sw_exchange *exchange)
{
  const struct sw_halo_plan *plan = layer->plan;
  const bool narrows = sw_exchange_narrows(layer);
  void *in = narrows ? layer->receive_narrow.data : layer->receive_sums.data;

  *exchange = (struct sw_exchange){ .transport = NULL };
  if (layer->muted) return SWATHE_OK;
  if (layer->baseline) return sw_baseline_post_sums(layer, exchange);
  return post(layer, layer->send_sums.data, plan->receive_messages, plan->receive_message_count, in,
              plan->send_messages, plan->send_message_count,
              narrows ? sizeof(uint16_t) : sizeof(float), exchange);
}

enum swathe_status sw_exchange_finish_sums(struct swathe_layer *layer, struct sw_exchange *exchange)
{
  const enum swathe_status status = sw_exchange_finish(layer, exchange);
  if (status || !sw_exchange_narrows(layer) || layer->muted) return status;
  const int64_t elements =
      layer->plan->send_tokens * layer->batch * sw_layer_token_elements(layer);
  float *sums = layer->receive_sums.data;
  const uint16_t *narrow = layer->receive_narrow.data;
  for (int64_t i = 0; i < elements; i++) sums[i] = sw_problem_from_bf16(narrow[i]);
  return SWATHE_OK;
}
