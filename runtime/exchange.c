// exchange.c: what travels between ranks: the halo's keys, and the sums of their gradients on the
// way home, and how both lie in buffers.  A buffer holds token after token, each
// [batch][kv_heads][dim] of k, then of v; or where they travel apart, all of k before all of v.
//
// A message of the plan is cut into chunks, and both ends make the same cut from the same plan and
// the same knobs, which they agreed on.  Chunks are slots in a row, so that only knobs decide how
// buffers lie.
#include "layer.h"

#include <stdlib.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

const char sw_exchange_kernel[] = "exchange";

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

struct sw_key_views sw_exchange_wire(const struct swathe_layer *layer, void *data,
                                     size_t elem_bytes, int64_t tokens, int64_t first)
{
  const struct swathe_problem *p = &layer->problem;
  const int64_t k_batch = (int64_t)p->kv_heads * p->head_dim_qk;
  const int64_t v_batch = (int64_t)p->kv_heads * p->head_dim_v;
  const int64_t k_token = layer->batch * k_batch, v_token = layer->batch * v_batch;

  if (layer->knobs.together) return sw_exchange_packed(layer, data, elem_bytes, first);
  return (struct sw_key_views){
    .k = { offset(data, first * k_token, elem_bytes), k_token, p->head_dim_qk, k_batch },
    .v = { offset(data, tokens * k_token + first * v_token, elem_bytes), v_token, p->head_dim_v,
           v_batch },
  };
}

// ---- Knobs --------------------------------------------------------------------------------------

void sw_exchange_read_knobs(const char *config, struct sw_exchange_knobs *knobs)
{
  const struct {
    const char *name;
    int32_t *value;
  } rows[] = {
    { "overlap=", &knobs->overlap }, { "chunks=", &knobs->chunks },
    { "together=", &knobs->together }, { "order=", &knobs->order },
    { "poll=", &knobs->poll },       { "progress=", &knobs->progress },
  };

  *knobs = (struct sw_exchange_knobs){ .overlap = 1, .chunks = 1, .together = 1, .poll = 1 };
  for (const char *at = config; *at; at += strcspn(at, ","), at += *at == ',')
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
      const size_t length = strlen(rows[i].name);
      if (!strncmp(at, rows[i].name, length))
        *rows[i].value = (int32_t)strtol(at + length, NULL, 10);
    }
}

static int32_t chunks_of(const struct swathe_layer *layer, const struct sw_halo_message *message)
{
  const int32_t chunks = layer->knobs.chunks;
  return message->tokens < chunks ? (int32_t)message->tokens : chunks;
}

struct slots {
  int64_t begin, end;
};

// Which part of a message, by ascending slot, is its chunk `c`.  The first chunk is nearest the
// boundary: keys before a span lie by ascending position, so it is the message's end; where windows
// reach further to the right, its beginning.
static int32_t part_of(const struct swathe_layer *layer, int32_t c, int32_t chunks)
{
  return layer->problem.window_left >= layer->problem.window_right ? chunks - 1 - c : c;
}

static struct slots part_slots(const struct sw_halo_message *message, int32_t part, int32_t parts)
{
  return (struct slots){ message->slot + message->tokens * part / parts,
                         message->slot + message->tokens * (part + 1) / parts };
}

// ---- Messages -----------------------------------------------------------------------------------

enum swathe_status sw_exchange_reserve(struct swathe_layer *layer)
{
  const struct sw_halo_plan *plan = layer->plan;
  const int64_t receives = plan->receive_message_count * layer->knobs.chunks;
  const int64_t sends = plan->send_message_count * layer->knobs.chunks;
  const int64_t parts = layer->knobs.together ? 1 : 2;
  enum swathe_status status = sw_list_reserve(&layer->messages, (receives + sends) * parts,
                                              sizeof(struct sw_transport_message));
  if (!status) status = sw_list_reserve(&layer->arrivals, receives, sizeof(struct sw_arrival));
  for (int d = 0; d < 2 && !status; d++)
    status = sw_list_reserve(&layer->waiting, layer->work[d].edge_units, sizeof(int64_t));
  return status;
}

// Called between ranges of items.  A failure is kept for the wait; the words are the thread's last.
void sw_exchange_progress(void *arg)
{
  struct sw_exchange *exchange = arg;
  if (!exchange->transport || exchange->done || exchange->status) return;
  if (exchange->looks++ % exchange->layer->knobs.poll) return;
  if (exchange->rounds) {
    sw_baseline_progress(exchange);
    return;
  }
  exchange->status = exchange->transport->operations->test(exchange->transport, &exchange->done);
}

static void add_message(struct swathe_layer *layer, const struct sw_exchange_side *side,
                        int32_t peer, int64_t element, int64_t elements, _Atomic int32_t *left)
{
  const size_t bytes = (size_t)elements * side->elem_bytes;
  ((struct sw_transport_message *)layer->messages.items)[layer->messages.count++] =
      (struct sw_transport_message){
        .data = offset(side->data, element, side->elem_bytes),
        .bytes = bytes,
        .peer = peer,
        .send = side->send,
        .left = left,
      };
  if (left) ++*left;
  if (side->send) layer->timing.sent_bytes += (int64_t)bytes;
  else layer->timing.received_bytes += (int64_t)bytes;
}

// The messages of one chunk; `arrival` counts them.
static void add_chunk(struct swathe_layer *layer, const struct sw_exchange_side *side, int32_t peer,
                      struct slots slots, struct sw_arrival *arrival)
{
  const struct swathe_problem *p = &layer->problem;
  const int64_t tokens = slots.end - slots.begin, heads = layer->batch * (int64_t)p->kv_heads;
  const int64_t k = heads * p->head_dim_qk, v = heads * p->head_dim_v;
  _Atomic int32_t *left = arrival ? &arrival->left : NULL;

  if (arrival) {
    arrival->slot = slots.begin;
    arrival->end = slots.end;
    arrival->left = 0;
  }
  if (layer->knobs.together) {
    add_message(layer, side, peer, slots.begin * (k + v), tokens * (k + v), left);
    return;
  }
  add_message(layer, side, peer, slots.begin * k, tokens * k, left);
  add_message(layer, side, peer, side->tokens * k + slots.begin * v, tokens * v, left);
}

// Lists a side's messages: peer by peer, or the first chunks of all before the second ones; of
// chunk `only` alone unless it is -1.  Arrivals stand by ascending slot, whatever the order of
// messages.
static void add_side(struct swathe_layer *layer, const struct sw_exchange_side *side, int32_t only)
{
  const int32_t turns = layer->knobs.order ? layer->knobs.chunks : 1;
  struct sw_arrival *arrivals = layer->arrivals.items;

  for (int32_t turn = 0; turn < turns; turn++) {
    int64_t before = 0;  // chunks of the messages before
    for (int64_t m = 0; m < side->count; m++) {
      const struct sw_halo_message *message = &side->messages[m];
      const int32_t chunks = chunks_of(layer, message);
      for (int32_t c = 0; c < chunks; c++) {
        if ((layer->knobs.order && c != turn) || (only >= 0 && c != only)) continue;
        const int32_t part = part_of(layer, c, chunks);
        add_chunk(layer, side, message->peer, part_slots(message, part, chunks),
                  side->tracked ? &arrivals[before + part] : NULL);
      }
      before += chunks;
    }
    if (side->tracked) layer->arrivals.count = before;
  }
}

void sw_exchange_list(struct swathe_layer *layer, const struct sw_exchange_side *receive,
                      const struct sw_exchange_side *send, int32_t chunk)
{
  layer->messages.count = layer->arrivals.count = 0;
  add_side(layer, receive, chunk);
  add_side(layer, send, chunk);
}

int32_t sw_exchange_last_chunk(const struct swathe_layer *layer, int64_t slot, int64_t tokens)
{
  const struct sw_halo_plan *plan = layer->plan;
  int32_t last = 0;

  for (int64_t m = 0; m < plan->receive_message_count; m++) {
    const struct sw_halo_message *message = &plan->receive_messages[m];
    const int32_t chunks = chunks_of(layer, message);
    if (message->slot >= slot + tokens || message->slot + message->tokens <= slot) continue;
    for (int32_t c = last + 1; c < chunks; c++) {
      const struct slots part = part_slots(message, part_of(layer, c, chunks), chunks);
      if (part.begin < slot + tokens && part.end > slot) last = c;
    }
  }
  return last;
}

// Posts what this rank receives and what it sends.
static enum swathe_status post(struct swathe_layer *layer, const struct sw_exchange_side *receive,
                               const struct sw_exchange_side *send, struct sw_exchange *exchange)
{
  const struct sw_transport_operations *operations;
  enum swathe_status status = SWATHE_OK;

  sw_exchange_list(layer, receive, send, -1);
  if (!layer->messages.count) return SWATHE_OK;
  exchange->transport = layer->transport;
  operations = layer->transport->operations;
  if (operations->progress_thread)
    status = operations->progress_thread(layer->transport, layer->knobs.progress);
  if (!status)
    status = operations->post(layer->transport, layer->messages.items,
                              (int32_t)layer->messages.count);
  if (!status && layer->knobs.overlap == 0) status = sw_exchange_finish(layer, exchange);
  return status;
}

bool sw_exchange_has(const struct sw_exchange *exchange, int64_t slot, int64_t tokens)
{
  const struct sw_list *arrivals = &exchange->layer->arrivals;
  const struct sw_arrival *items = arrivals->items;
  int64_t low = 0, high = arrivals->count;  // the first that ends behind the slot

  if (!exchange->transport || exchange->done) return true;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (items[middle].end > slot) high = middle;
    else low = middle + 1;
  }
  for (; low < arrivals->count && items[low].slot < slot + tokens; low++)
    if (items[low].left) return false;
  return true;
}

static int64_t missing(const struct sw_exchange *exchange)
{
  const struct sw_list *arrivals = &exchange->layer->arrivals;
  int64_t left = 0;
  for (int64_t i = 0; i < arrivals->count; i++)
    left += ((const struct sw_arrival *)arrivals->items)[i].left;
  return left;
}

// Only the wait for all has the transport's deadline, so it follows when nothing comes for long.
enum swathe_status sw_exchange_wait_more(struct sw_exchange *exchange)
{
  enum { MANY_LOOKS = 1000 };
  static const double long_us = 100e3;
  const struct timespec nap = { .tv_nsec = 20000 };
  struct swathe_layer *layer = exchange->layer;
  const double begin = sw_layer_now_us();
  const int64_t before = missing(exchange);

  if (!exchange->transport || exchange->done) return exchange->status;
  for (int looks = 0; !exchange->status && !exchange->done && missing(exchange) == before &&
                      (looks < MANY_LOOKS || sw_layer_now_us() - begin < long_us);
       looks++) {
    exchange->status = layer->transport->operations->test(layer->transport, &exchange->done);
    if (!exchange->status && !exchange->done && missing(exchange) == before)
      nanosleep(&nap, NULL);
  }
  layer->timing.wait_us += sw_layer_now_us() - begin;
  if (exchange->status || exchange->done || missing(exchange) < before) return exchange->status;
  return sw_exchange_finish(layer, exchange);
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
  exchange->status = status;
  exchange->done = !status;
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

  *exchange = (struct sw_exchange){ .layer = layer };
  if (layer->muted) return SWATHE_OK;
  if (layer->baseline) return sw_baseline_post_keys(layer, tensors, halo, exchange);
  for (int64_t i = 0; i < plan->send_count; i++) {
    const struct sw_halo_segment *segment = &plan->sends[i];
    const struct sw_key_views to =
        sw_exchange_wire(layer, layer->send.data, elem, plan->send_tokens, segment->slot);
    sw_exchange_copy(layer->batch, segment->tokens, p->kv_heads, p->head_dim_qk, to.k,
                     sw_exchange_tensor(&tensors->k, segment->row, elem), elem);
    sw_exchange_copy(layer->batch, segment->tokens, p->kv_heads, p->head_dim_v, to.v,
                     sw_exchange_tensor(&tensors->v, segment->row, elem), elem);
  }
  const struct sw_exchange_side receive = {
    halo, plan->receive_messages, plan->receive_message_count, plan->receive_tokens, elem,
    .tracked = true
  };
  const struct sw_exchange_side send = {
    layer->send.data, plan->send_messages, plan->send_message_count, plan->send_tokens, elem,
    .send = true
  };
  return post(layer, &receive, &send, exchange);
}

bool sw_exchange_narrows(const struct swathe_layer *layer)
{
  return layer->problem.halo_gradient == SWATHE_BF16 && !layer->baseline;
}

size_t sw_exchange_sum_bytes(const struct swathe_layer *layer)
{
  return sw_exchange_narrows(layer) ? sizeof(uint16_t) : sizeof(float);
}

enum swathe_status sw_exchange_post_sums(struct swathe_layer *layer, struct sw_exchange *exchange)
{
  const struct sw_halo_plan *plan = layer->plan;
  void *in = sw_exchange_narrows(layer) ? layer->receive_narrow.data : layer->receive_sums.data;
  const size_t bytes = sw_exchange_sum_bytes(layer);

  *exchange = (struct sw_exchange){ .layer = layer };
  if (layer->muted) return SWATHE_OK;
  if (layer->baseline) return sw_baseline_post_sums(layer, exchange);
  const struct sw_exchange_side receive = {
    in, plan->send_messages, plan->send_message_count, plan->send_tokens, bytes, .send = false
  };
  const struct sw_exchange_side send = {
    layer->send_sums.data, plan->receive_messages, plan->receive_message_count,
    plan->receive_tokens, bytes, .send = true
  };
  return post(layer, &receive, &send, exchange);
}

enum swathe_status sw_exchange_finish_sums(struct swathe_layer *layer, struct sw_exchange *exchange)
{
  const enum swathe_status status = sw_exchange_finish(layer, exchange);
  if (status) return sw_within(status, "while the halo's gradients went home");
  if (!sw_exchange_narrows(layer) || layer->muted) return SWATHE_OK;
  const int64_t elements =
      layer->plan->send_tokens * layer->batch * sw_layer_token_elements(layer);
  float *sums = layer->receive_sums.data;
  const uint16_t *narrow = layer->receive_narrow.data;
  for (int64_t i = 0; i < elements; i++) sums[i] = sw_problem_from_bf16(narrow[i]);
  return SWATHE_OK;
}

enum swathe_status sw_exchange_abandon(struct swathe_layer *layer, enum swathe_status status)
{
  struct swathe_transport *transport = layer->transport;
  char words[2048];
  bool done = true;

  if (!transport) return status;
  snprintf(words, sizeof words, "%s", swathe_error());
  if (!transport->operations->test(transport, &done) && !done) {
    swathe_transport_abort(transport, words);
    (void)transport->operations->wait(transport);
  }
  return sw_fail(status, "%s", words);
}
