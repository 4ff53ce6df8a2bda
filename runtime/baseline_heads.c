// baseline_heads.c: SWATHE_A2A: before attention every rank gets its part of the heads of the whole
// sequence, after it every rank gets its tokens back.
//
//   forward    q, k, v dealt out by heads -> a layer alone, over all tokens -> out and lse dealt
//              back by tokens
//   backward   dout (and q, k, v, out, lse, unless forward kept them) dealt out -> the same layer
//              -> dq, dk, dv dealt back
//
// The inner layer runs the outer one's configs on a sharding of one rank that holds every span of
// every rank.  Ranks meet in pairs: in round s, rank r sends to r + s and receives from r - s.  A
// dealt tensor is [rows][batch][heads / ranks][dim], rows by rank, so that what a rank sends or
// receives of it is one piece.
#include "layer.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

// Forward needs those before DOUT, which it may keep for backward.
enum dealt { Q, K, V, OUT, LSE, DOUT, DQ, DK, DV, DEALT_COUNT };
enum { MOST_TOGETHER = 6, ALIGNMENT = 64 };

struct sw_baseline_heads {
  struct swathe_layer *inner;
  int32_t ranks, rank;            // ranks: that `inner` was made for; 0: none
  int64_t *first_row;             // [ranks + 1] of every rank in a dealt tensor
  struct swathe_span *spans;
  int64_t span_capacity;
  size_t kept_bytes;
  struct sw_buffer kept;          // q, k, v, out, lse, where the caller does not keep them
  struct sw_buffer gradients;     // dout, dq, dk, dv
  struct sw_buffer stage;         // what is on its way to or from the ranks' own tensors
};

// ---- Create and shard ---------------------------------------------------------------------------

static enum swathe_status check_heads(const struct swathe_problem *p, int32_t ranks)
{
  if (p->q_heads % ranks == 0 && p->kv_heads % ranks == 0) return SWATHE_OK;
  return sw_fail(SWATHE_UNSUPPORTED,
                 "a2a deals out heads: %d query and %d key heads do not divide by %d ranks",
                 p->q_heads, p->kv_heads, ranks);
}

enum swathe_status sw_baseline_heads_create(struct swathe_layer *layer)
{
  const enum swathe_status status = check_heads(&layer->problem, sw_layer_ranks(layer));
  if (status) return status;
  layer->baseline_heads = calloc(1, sizeof *layer->baseline_heads);
  return layer->baseline_heads ? SWATHE_OK : sw_fail(SWATHE_NO_MEMORY, "no memory for a strategy");
}

void sw_baseline_heads_destroy(struct swathe_layer *layer)
{
  struct sw_baseline_heads *heads = layer->baseline_heads;
  if (!heads) return;
  struct sw_buffer *const buffers[] = { &heads->kept, &heads->gradients, &heads->stage };
  for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++)
    sw_layer_release(layer, buffers[i]);
  swathe_layer_destroy(heads->inner);
  free(heads->first_row);
  free(heads->spans);
  free(heads);
  layer->baseline_heads = NULL;
}

size_t sw_baseline_heads_memory_bytes(const struct swathe_layer *layer)
{
  const struct sw_baseline_heads *heads = layer->baseline_heads;
  if (!heads) return 0;
  return heads->kept.bytes + heads->gradients.bytes + heads->stage.bytes +
         (heads->inner ? swathe_layer_memory_bytes(heads->inner) : 0);
}

// The layer that computes this rank's heads, with the same kernels: those depend on the ratio of
// heads alone.
static enum swathe_status make_inner(struct swathe_layer *layer, struct sw_baseline_heads *heads)
{
  const int32_t ranks = sw_layer_ranks(layer);
  const char *const configs[SW_CONFIGS] = { layer->choices[0].config, layer->choices[1].config };
  struct swathe_problem problem = layer->problem;
  unsigned directions = 0;
  enum swathe_status status;

  if (heads->ranks == ranks) return SWATHE_OK;
  status = check_heads(&layer->problem, ranks);
  if (status) return status;
  swathe_layer_destroy(heads->inner);
  free(heads->first_row);
  heads->inner = NULL;
  heads->ranks = 0;
  heads->first_row = calloc((size_t)ranks + 1, sizeof *heads->first_row);
  if (!heads->first_row) return sw_fail(SWATHE_NO_MEMORY, "no memory for %d ranks", ranks);
  problem.q_heads /= ranks;
  problem.kv_heads /= ranks;
  for (unsigned d = 0; d < 2; d++)
    if (layer->kernels[d]) directions |= 1u << d;
  status = sw_layer_create(layer->context, &problem, NULL, configs, directions, &heads->inner);
  if (!status) heads->ranks = ranks;
  return status;
}

// Every rank's spans, each at its row of the dealt tensors.
static enum swathe_status list_spans(struct sw_baseline_heads *heads,
                                     const struct swathe_sharding *sharding, int64_t *span_count)
{
  int64_t count = 0;
  for (int32_t r = 0; r < heads->ranks; r++) {
    int64_t rows = 0, more = 0;
    enum swathe_status status = swathe_sharding_rows(sharding, r, &rows);
    if (!status) status = swathe_sharding_spans(sharding, r, NULL, 0, &more);
    if (!status && count + more > heads->span_capacity) {
      void *grown = realloc(heads->spans, (size_t)(2 * (count + more)) * sizeof *heads->spans);
      if (!grown) return sw_fail(SWATHE_NO_MEMORY, "no memory for the spans of all ranks");
      heads->spans = grown;
      heads->span_capacity = 2 * (count + more);
    }
    if (!status && more)
      status = swathe_sharding_spans(sharding, r, heads->spans + count, more, &more);
    if (status) return status;
    for (int64_t i = 0; i < more; i++) heads->spans[count + i].row += heads->first_row[r];
    heads->first_row[r + 1] = heads->first_row[r] + rows;
    count += more;
  }
  *span_count = count;
  return SWATHE_OK;
}

// ---- Dealt tensors ------------------------------------------------------------------------------

// Heads of all ranks, dim, and bytes of an element.
struct shape {
  int32_t heads, dim;
  size_t elem_bytes;
};

static struct shape shape_of(const struct swathe_layer *layer, enum dealt dealt)
{
  const struct swathe_problem *p = &layer->problem;
  const size_t elem = sw_problem_elem_bytes(p);
  switch (dealt) {
  case K: case DK: return (struct shape){ p->kv_heads, p->head_dim_qk, elem };
  case V: case DV: return (struct shape){ p->kv_heads, p->head_dim_v, elem };
  case OUT: case DOUT: return (struct shape){ p->q_heads, p->head_dim_v, elem };
  case LSE: return (struct shape){ p->q_heads, 1, sizeof(float) };
  default: return (struct shape){ p->q_heads, p->head_dim_qk, elem };
  }
}

static const struct swathe_tensor *own_tensor(const struct swathe_tensors *tensors,
                                              enum dealt dealt)
{
  const struct swathe_tensor *const all[DEALT_COUNT] = {
    [Q] = &tensors->q,   [K] = &tensors->k,       [V] = &tensors->v,
    [OUT] = &tensors->out, [LSE] = &tensors->lse, [DOUT] = &tensors->dout,
    [DQ] = &tensors->dq, [DK] = &tensors->dk,     [DV] = &tensors->dv,
  };
  return all[dealt];
}

// Bytes of one row, all of the batch, one rank's heads.
static size_t row_bytes(const struct swathe_layer *layer, enum dealt dealt)
{
  const struct shape shape = shape_of(layer, dealt);
  const int32_t heads = shape.heads / layer->baseline_heads->ranks;
  return (size_t)layer->batch * (size_t)heads * (size_t)shape.dim * shape.elem_bytes;
}

static size_t aligned(size_t bytes) { return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

// Bytes of the dealt tensors [first, last) one behind the other, `rows` rows each.
static size_t bytes_of(const struct swathe_layer *layer, enum dealt first, enum dealt last,
                       int64_t rows)
{
  size_t bytes = 0;
  for (int i = (int)first; i < (int)last; i++)
    bytes += aligned((size_t)rows * row_bytes(layer, (enum dealt)i));
  return bytes;
}

static char *dealt_data(const struct swathe_layer *layer, void *kept, enum dealt dealt)
{
  const struct sw_baseline_heads *heads = layer->baseline_heads;
  const int64_t rows = heads->first_row[heads->ranks];
  if (dealt < DOUT) return (char *)kept + bytes_of(layer, Q, dealt, rows);
  return (char *)heads->gradients.data + bytes_of(layer, DOUT, dealt, rows);
}

static struct sw_view dealt_view(const struct swathe_layer *layer, enum dealt dealt, void *data)
{
  const struct shape shape = shape_of(layer, dealt);
  const int64_t row = (int64_t)(shape.heads / layer->baseline_heads->ranks) * shape.dim;
  return (struct sw_view){
    .data = data, .token = layer->batch * row, .head = shape.dim, .batch = row
  };
}

enum swathe_status sw_baseline_heads_shard(struct swathe_layer *layer,
                                           const struct swathe_sharding *sharding)
{
  struct sw_baseline_heads *heads = layer->baseline_heads;
  struct swathe_sharding alone = *sharding;
  int64_t rank_spans[2] = { 0 }, rank_rows[1];
  enum swathe_status status = make_inner(layer, heads);

  if (!status) status = list_spans(heads, sharding, &rank_spans[1]);
  if (status) return status;
  heads->rank = sw_layer_rank(layer);
  rank_rows[0] = heads->first_row[heads->ranks];
  alone.layout = SWATHE_SPANS;
  alone.ranks = 1;
  alone.spans = heads->spans;
  alone.rank_spans = rank_spans;
  alone.rank_rows = rank_rows;
  status = swathe_layer_shard(heads->inner, &alone);
  if (status) return sw_within(status, "while sharding by heads");
  heads->kept_bytes = bytes_of(layer, Q, DOUT, rank_rows[0]);
  return SWATHE_OK;
}

size_t sw_baseline_heads_kept_bytes(const struct swathe_layer *layer)
{
  return layer->baseline_heads->kept_bytes;
}

// ---- Rounds -------------------------------------------------------------------------------------

// Between this rank's tensors and the stage, where each rank's heads lie together.
static void stage(const struct swathe_layer *layer, const struct swathe_tensors *tensors,
                  enum dealt dealt, char *staged, bool out)
{
  const struct sw_baseline_heads *heads = layer->baseline_heads;
  const struct shape shape = shape_of(layer, dealt);
  const int32_t part = shape.heads / heads->ranks;
  const int64_t rows = layer->plan->rows;
  const size_t part_bytes = (size_t)rows * row_bytes(layer, dealt);

  for (int32_t r = 0; r < heads->ranks; r++) {
    struct sw_view own = sw_exchange_tensor(own_tensor(tensors, dealt), 0, shape.elem_bytes);
    own.data = (char *)own.data + r * part * own.head * (int64_t)shape.elem_bytes;
    const struct sw_view there = dealt_view(layer, dealt, staged + (size_t)r * part_bytes);
    sw_exchange_copy(layer->batch, rows, part, shape.dim, out ? there : own, out ? own : there,
                     shape.elem_bytes);
  }
}

// What travels: each tensor as it is staged here and dealt there.
struct parcel {
  enum dealt dealt;
  char *staged, *whole;
};

// One round: `out` sends heads to ranks and receives tokens, else the other way.
static enum swathe_status exchange_round(struct swathe_layer *layer, const struct parcel *parcels,
                                         int count, int32_t round, bool out)
{
  struct sw_baseline_heads *heads = layer->baseline_heads;
  const int32_t to = (heads->rank + round) % heads->ranks;
  const int32_t from = (heads->rank + heads->ranks - round) % heads->ranks;
  struct sw_transport_message messages[2 * MOST_TOGETHER];
  int32_t posted = 0;

  for (int i = 0; i < 2 * count; i++) {
    const bool send = i >= count;
    const struct parcel *parcel = &parcels[i % count];
    const int32_t peer = send ? to : from;
    const size_t row = row_bytes(layer, parcel->dealt);
    const int64_t peer_rows = heads->first_row[peer + 1] - heads->first_row[peer];
    const size_t mine = (size_t)layer->plan->rows * row, theirs = (size_t)peer_rows * row;
    char *staged = parcel->staged + (size_t)peer * mine;
    char *dealt = parcel->whole + (size_t)heads->first_row[peer] * row;
    const bool from_stage = send == out;
    const size_t bytes = from_stage ? mine : theirs;
    if (!bytes) continue;
    messages[posted++] =
        (struct sw_transport_message){ from_stage ? staged : dealt, bytes, peer, send,
                                       NULL };
    if (send) layer->timing.sent_bytes += (int64_t)bytes;
    else layer->timing.received_bytes += (int64_t)bytes;
  }
  if (!posted) return SWATHE_OK;
  const enum swathe_status status =
      layer->transport->operations->post(layer->transport, messages, posted);
  return status ? status : layer->transport->operations->wait(layer->transport);
}

// Deals [first, last) out or back, all of them together, this rank's own part included.
static enum swathe_status deal(struct swathe_layer *layer, const struct swathe_tensors *tensors,
                               void *kept, enum dealt first, enum dealt last, bool out)
{
  struct sw_baseline_heads *heads = layer->baseline_heads;
  const double begin = sw_layer_now_us();
  struct parcel parcels[MOST_TOGETHER];
  int count = 0;

  if (layer->muted) return SWATHE_OK;
  enum swathe_status status =
      sw_layer_reserve_bytes(layer, &heads->stage,
                             bytes_of(layer, first, last, layer->plan->rows * heads->ranks));
  if (status) return status;
  char *staged = heads->stage.data;
  for (int i = (int)first; i < (int)last; i++) {
    const enum dealt dealt = (enum dealt)i;
    const size_t row = row_bytes(layer, dealt), mine = (size_t)layer->plan->rows * row;
    parcels[count++] = (struct parcel){ dealt, staged, dealt_data(layer, kept, dealt) };
    char *own_staged = staged + (size_t)heads->rank * mine;
    char *own_dealt =
        dealt_data(layer, kept, dealt) + (size_t)heads->first_row[heads->rank] * row;
    if (out) stage(layer, tensors, dealt, staged, true);
    if (mine) memcpy(out ? own_dealt : own_staged, out ? own_staged : own_dealt, mine);
    staged += aligned(mine * (size_t)heads->ranks);
  }
  for (int32_t round = 1; round < heads->ranks && !status; round++)
    status = exchange_round(layer, parcels, count, round, out);
  for (int i = 0; i < count && !out && !status; i++)
    stage(layer, tensors, parcels[i].dealt, parcels[i].staged, false);
  layer->timing.wait_us += sw_layer_now_us() - begin;
  return status;
}

// ---- Passes -------------------------------------------------------------------------------------

static struct swathe_tensor inner_tensor(const struct swathe_layer *layer, void *kept,
                                         enum dealt dealt)
{
  const struct sw_view view = dealt_view(layer, dealt, dealt_data(layer, kept, dealt));
  return (struct swathe_tensor){ view.data, view.token, view.head, view.batch };
}

static enum swathe_status run_inner(struct swathe_layer *layer, enum swathe_direction direction,
                                    const struct swathe_tensors *tensors, void *kept)
{
  struct sw_baseline_heads *heads = layer->baseline_heads;
  const int32_t all = layer->problem.q_heads, part = all / heads->ranks;
  const int32_t first = heads->rank * part;
  struct swathe_tensors inner = {
    .q = inner_tensor(layer, kept, Q),
    .k = inner_tensor(layer, kept, K),
    .v = inner_tensor(layer, kept, V),
    .out = inner_tensor(layer, kept, OUT),
    .lse = inner_tensor(layer, kept, LSE),
    .sink = tensors->sink ? tensors->sink + first : NULL,
  };

  if (direction == SWATHE_FORWARD) {
    for (int32_t h = 0; tensors->max_logits && h < all; h++) tensors->max_logits[h] = -INFINITY;
    if (tensors->max_logits) inner.max_logits = tensors->max_logits + first;
    return swathe_layer_forward(heads->inner, &inner, NULL);
  }
  inner.dout = inner_tensor(layer, kept, DOUT);
  inner.dq = inner_tensor(layer, kept, DQ);
  inner.dk = inner_tensor(layer, kept, DK);
  inner.dv = inner_tensor(layer, kept, DV);
  for (int32_t h = 0; layer->problem.sinks && h < all; h++) tensors->dsink[h] = 0;
  if (layer->problem.sinks) inner.dsink = tensors->dsink + first;
  return swathe_layer_backward(heads->inner, &inner, NULL);
}

enum swathe_status sw_baseline_heads_pass(struct swathe_layer *layer,
                                          enum swathe_direction direction,
                                          const struct swathe_tensors *tensors)
{
  struct sw_baseline_heads *heads = layer->baseline_heads;
  const double begin = sw_layer_now_us();
  const bool forward = direction == SWATHE_FORWARD;
  void *kept = tensors->halo;
  enum swathe_status status = SWATHE_OK;

  layer->timing = (struct swathe_timing){ .total_us = 0 };
  if (!kept) {
    status = sw_layer_reserve_bytes(layer, &heads->kept, heads->kept_bytes);
    kept = heads->kept.data;
  }
  if (!status && !forward)
    status = sw_layer_reserve_bytes(
        layer, &heads->gradients,
        bytes_of(layer, DOUT, DEALT_COUNT, heads->first_row[heads->ranks]));
  if (!status)
    status = forward ? deal(layer, tensors, kept, Q, OUT, true)
                     : deal(layer, tensors, kept, tensors->halo ? DOUT : Q, DQ, true);
  if (!status) status = run_inner(layer, direction, tensors, kept);
  if (!status)
    status = forward ? deal(layer, tensors, kept, OUT, DOUT, false)
                     : deal(layer, tensors, kept, DQ, DEALT_COUNT, false);
  layer->timing.total_us = sw_layer_now_us() - begin;
  return status ? sw_within(status, "in %s of rank %d, shared by heads",
                            sw_context_kernel_name(direction), heads->rank)
                : SWATHE_OK;
}
