// baseline.c: the ways of sharing that the halo is compared with, over the same transport and the
// same kernels: whole shares go round a ring of ranks, and each rank keeps of them what its window
// sees, in the place where exchange.c would have put it.  Units, runs and kernels do not know the
// difference.
//
//   keys    round s brings the block of the rank s places away, if that block goes so far
//   sums    the same way back: a block of zeros begins at the last rank its keys came to, each rank
//           on the way home adds its sums, and its owner gets one sum of them all
//
// How far a block goes is its reach: to all ranks (all_gather, ring_all) or as far as somebody's
// window needs it, to later ranks one way and to earlier ranks the other (ring).  All_gather keeps
// every block until the last has come; a ring keeps the one it passes on and the one that comes.
// Dealing out heads is baseline_heads.c.
#include "layer.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

// The two ways round: blocks go to the next rank or to the one before.
enum { WAYS = 2 };
static const int32_t step_of[WAYS] = { 1, -1 };

enum travel { KEYS, SUMS };

struct sw_baseline {
  struct sw_halo_planner *planner;    // for the plans of others
  int32_t ranks, rank, rounds;        // rounds: the largest reach
  int64_t *rows, *first_row;          // [ranks] of every share; before it in `gathered`
  int64_t all_rows, largest_rows;
  int32_t *reach[WAYS];               // [ranks] places that a rank's block goes
  int64_t *owner_rows;                // [receive_count] where a segment's keys lie at their owner
  int64_t owner_row_capacity;
  struct sw_buffer blocks[WAYS][2];   // one goes, one comes; by parity of the round
  struct sw_buffer gathered;          // all_gather: every share
  // of the exchange in progress
  enum travel travel;
  int32_t round;
  size_t elem_bytes;
  void *halo;
};

// ---- Create and shard ---------------------------------------------------------------------------

static void free_group(struct sw_baseline *baseline)
{
  free(baseline->rows);
  free(baseline->first_row);
  for (int w = 0; w < WAYS; w++) free(baseline->reach[w]);
  baseline->rows = baseline->first_row = NULL;
  baseline->reach[0] = baseline->reach[1] = NULL;
  baseline->ranks = 0;
}

enum swathe_status sw_baseline_create(struct swathe_layer *layer)
{
  if ((unsigned)layer->strategy > SWATHE_RING_ALL)
    return sw_fail(SWATHE_BAD_USE, "strategy %d is not one of enum swathe_strategy",
                   (int)layer->strategy);
  if (layer->problem.target != SWATHE_CPU)
    return sw_fail(SWATHE_UNSUPPORTED, "strategy %s is made for the cpu target only, not for %s",
                   swathe_strategy_name(layer->strategy),
                   swathe_target_name(layer->problem.target));
  if (layer->strategy == SWATHE_A2A) return sw_baseline_heads_create(layer);
  layer->baseline = calloc(1, sizeof *layer->baseline);
  if (!layer->baseline) return sw_fail(SWATHE_NO_MEMORY, "no memory for a strategy");
  return sw_halo_planner_create(&layer->baseline->planner);
}

void sw_baseline_destroy(struct swathe_layer *layer)
{
  struct sw_baseline *baseline = layer->baseline;
  sw_baseline_heads_destroy(layer);
  if (!baseline) return;
  for (int i = 0; i < 2 * WAYS; i++)
    sw_layer_release(layer, &baseline->blocks[i / 2][i % 2]);
  sw_layer_release(layer, &baseline->gathered);
  if (baseline->planner) sw_halo_planner_destroy(baseline->planner);
  free_group(baseline);
  free(baseline->owner_rows);
  free(baseline);
  layer->baseline = NULL;
}

size_t sw_baseline_memory_bytes(const struct swathe_layer *layer)
{
  const struct sw_baseline *baseline = layer->baseline;
  if (!baseline) return sw_baseline_heads_memory_bytes(layer);
  size_t bytes = baseline->gathered.bytes;
  for (int i = 0; i < 2 * WAYS; i++) bytes += baseline->blocks[i / 2][i % 2].bytes;
  return bytes;
}

static int32_t around(const struct sw_baseline *baseline, int32_t rank)
{
  return (rank % baseline->ranks + baseline->ranks) % baseline->ranks;
}

// A bounded ring serves later ranks one way and earlier ranks the other.
static int way_to(int32_t from, int32_t to) { return to > from ? 0 : 1; }

static enum swathe_status size_group(struct sw_baseline *baseline, int32_t ranks)
{
  if (ranks == baseline->ranks) return SWATHE_OK;
  free_group(baseline);
  baseline->rows = calloc((size_t)ranks, sizeof *baseline->rows);
  baseline->first_row = calloc((size_t)ranks, sizeof *baseline->first_row);
  for (int w = 0; w < WAYS; w++)
    baseline->reach[w] = calloc((size_t)ranks, sizeof *baseline->reach[w]);
  if (!baseline->rows || !baseline->first_row || !baseline->reach[0] || !baseline->reach[1])
    return sw_fail(SWATHE_NO_MEMORY, "no memory for a ring of %d ranks", ranks);
  baseline->ranks = ranks;
  return SWATHE_OK;
}

static enum swathe_status reserve_owner_rows(struct sw_baseline *baseline, int64_t count)
{
  if (count <= baseline->owner_row_capacity) return SWATHE_OK;
  free(baseline->owner_rows);
  baseline->owner_row_capacity = 0;
  baseline->owner_rows = calloc((size_t)count, sizeof *baseline->owner_rows);
  if (!baseline->owner_rows)
    return sw_fail(SWATHE_NO_MEMORY, "no memory for %" PRId64 " segments", count);
  baseline->owner_row_capacity = count;
  return SWATHE_OK;
}

// How far the owner's block goes, by whose windows reach into it.
static void find_reach(struct sw_baseline *baseline, enum swathe_strategy strategy,
                       const struct sw_halo_plan *owner)
{
  const int32_t from = owner->rank;
  for (int w = 0; w < WAYS; w++) baseline->reach[w][from] = 0;
  if (!owner->rows) return;
  if (strategy != SWATHE_RING) {
    baseline->reach[0][from] = baseline->ranks - 1;
    return;
  }
  for (int64_t m = 0; m < owner->send_message_count; m++) {
    const int32_t to = owner->send_messages[m].peer;
    const int way = way_to(from, to);
    const int32_t hops = step_of[way] * (to - from);
    if (hops > baseline->reach[way][from]) baseline->reach[way][from] = hops;
  }
}

// Where the keys that come from this owner lie among its rows: both ends of a message list the same
// segments in the same order.
static void find_owner_rows(struct sw_baseline *baseline, const struct sw_halo_plan *mine,
                            const struct sw_halo_plan *owner)
{
  for (int64_t m = 0; m < mine->receive_message_count; m++) {
    const struct sw_halo_message *to_me = &mine->receive_messages[m];
    if (to_me->peer != owner->rank) continue;
    for (int64_t n = 0; n < owner->send_message_count; n++) {
      const struct sw_halo_message *of_owner = &owner->send_messages[n];
      if (of_owner->peer != mine->rank) continue;
      for (int64_t i = 0; i < to_me->segment_end - to_me->segment_begin; i++)
        baseline->owner_rows[to_me->segment_begin + i] =
            owner->sends[of_owner->segment_begin + i].row;
    }
  }
}

// Blocks are used from the round after the first message on; the last to come needs no follower.
static enum swathe_status reserve_blocks(struct swathe_layer *layer)
{
  struct sw_baseline *baseline = layer->baseline;
  const struct swathe_problem *p = &layer->problem;
  const size_t elem = sw_problem_elem_bytes(p);
  const size_t sum = p->halo_gradient == SWATHE_BF16 ? sizeof(uint16_t) : sizeof(float);
  const bool gathers = layer->strategy == SWATHE_ALL_GATHER;
  const bool sums = layer->kernels[SWATHE_BACKWARD];
  enum swathe_status status = SWATHE_OK;

  if (gathers && baseline->rounds)
    status = sw_layer_reserve(layer, &baseline->gathered, baseline->all_rows, elem);
  for (int w = 0; w < WAYS && !status; w++) {
    bool used = false;
    for (int32_t r = 0; r < baseline->ranks; r++) used = used || baseline->reach[w][r];
    const size_t bytes = gathers ? (sums ? sum : 0) : sums && sum > elem ? sum : elem;
    for (int i = 0; i < 2 && used && bytes && !status; i++)
      status = sw_layer_reserve(layer, &baseline->blocks[w][i], baseline->largest_rows, bytes);
  }
  return status;
}

enum swathe_status sw_baseline_shard(struct swathe_layer *layer,
                                     const struct swathe_sharding *sharding)
{
  struct sw_baseline *baseline = layer->baseline;
  const struct sw_halo_plan *plan = layer->plan;
  enum swathe_status status;

  if (layer->baseline_heads) return sw_baseline_heads_shard(layer, sharding);
  status = size_group(baseline, sharding->ranks);
  if (!status) status = reserve_owner_rows(baseline, plan->receive_count);
  if (status) return status;
  baseline->rank = plan->rank;
  baseline->all_rows = baseline->largest_rows = baseline->rounds = 0;
  for (int32_t r = 0; r < baseline->ranks && !status; r++) {
    const struct sw_halo_plan *owner;
    status = sw_halo_plan(baseline->planner, &layer->problem, sharding, r, &owner);
    if (status) break;
    baseline->rows[r] = owner->rows;
    baseline->first_row[r] = baseline->all_rows;
    baseline->all_rows += owner->rows;
    if (owner->rows > baseline->largest_rows) baseline->largest_rows = owner->rows;
    find_reach(baseline, layer->strategy, owner);
    find_owner_rows(baseline, plan, owner);
    for (int w = 0; w < WAYS; w++)
      if (baseline->reach[w][r] > baseline->rounds) baseline->rounds = baseline->reach[w][r];
  }
  return status ? status : reserve_blocks(layer);
}

// ---- Blocks -------------------------------------------------------------------------------------

// The rank `places` before this one on the way: whose block comes after so many rounds.
static int32_t owner_before(const struct sw_baseline *baseline, int way, int32_t places)
{
  return around(baseline, baseline->rank - step_of[way] * places);
}

static size_t block_bytes(const struct swathe_layer *layer, int32_t owner)
{
  const struct sw_baseline *baseline = layer->baseline;
  return sw_layer_keys_bytes(layer, baseline->rows[owner], baseline->elem_bytes);
}

// Where a block lies that moves in `round`.
static void *block_of(const struct swathe_layer *layer, int way, int32_t round, int32_t owner)
{
  const struct sw_baseline *baseline = layer->baseline;
  if (baseline->travel == KEYS && layer->strategy == SWATHE_ALL_GATHER)
    return (char *)baseline->gathered.data +
           sw_layer_keys_bytes(layer, baseline->first_row[owner], baseline->elem_bytes);
  return baseline->blocks[way][round % 2].data;
}

static struct sw_key_views block_views(const struct swathe_layer *layer, void *block, int64_t row)
{
  return sw_exchange_packed(layer, block, layer->baseline->elem_bytes, row);
}

// The message of this rank's halo that `owner` would send; NULL if it needs nothing of it.
static const struct sw_halo_message *message_from(const struct swathe_layer *layer, int32_t owner)
{
  const struct sw_halo_plan *plan = layer->plan;
  for (int64_t m = 0; m < plan->receive_message_count; m++)
    if (plan->receive_messages[m].peer == owner) return &plan->receive_messages[m];
  return NULL;
}

// Of a block that came, what the window sees, to its place in the halo.
static void keep_needed(const struct swathe_layer *layer, void *block, int32_t owner)
{
  const struct sw_baseline *baseline = layer->baseline;
  const struct swathe_problem *p = &layer->problem;
  const struct sw_halo_message *message = message_from(layer, owner);

  for (int64_t i = message ? message->segment_begin : 0; message && i < message->segment_end; i++) {
    const struct sw_halo_segment *segment = &layer->plan->receives[i];
    const struct sw_key_views from = block_views(layer, block, baseline->owner_rows[i]);
    const struct sw_key_views to =
        sw_exchange_packed(layer, baseline->halo, baseline->elem_bytes, segment->slot);
    sw_exchange_copy(layer->batch, segment->tokens, p->kv_heads, p->head_dim_qk, to.k, from.k,
                     baseline->elem_bytes);
    sw_exchange_copy(layer->batch, segment->tokens, p->kv_heads, p->head_dim_v, to.v, from.v,
                     baseline->elem_bytes);
  }
}

// ---- Sums ---------------------------------------------------------------------------------------

// to += from, over [tokens][batch][row] of float; `to` may be bfloat16, rounded at each addition.
static void add_rows(const struct swathe_layer *layer, struct sw_view to, struct sw_view from,
                     int64_t tokens, int64_t row, bool narrow)
{
  for (int32_t b = 0; b < layer->batch; b++)
    for (int64_t t = 0; t < tokens; t++) {
      const float *in = (const float *)from.data + b * from.batch + t * from.token;
      const int64_t at = b * to.batch + t * to.token;
      for (int64_t i = 0; narrow && i < row; i++) {
        uint16_t *sum = (uint16_t *)to.data + at + i;
        *sum = sw_problem_to_bf16(sw_problem_from_bf16(*sum) + in[i]);
      }
      for (int64_t i = 0; !narrow && i < row; i++) ((float *)to.data)[at + i] += in[i];
    }
}

// This rank's sums for the owner's keys, into the block that takes them there.
static void add_own(const struct swathe_layer *layer, void *block, int32_t owner)
{
  const struct sw_baseline *baseline = layer->baseline;
  const struct swathe_problem *p = &layer->problem;
  const struct sw_halo_message *message = message_from(layer, owner);
  const bool narrow = baseline->elem_bytes == sizeof(uint16_t);

  for (int64_t i = message ? message->segment_begin : 0; message && i < message->segment_end; i++) {
    const struct sw_halo_segment *segment = &layer->plan->receives[i];
    const struct sw_key_views to = block_views(layer, block, baseline->owner_rows[i]);
    const struct sw_key_views from =
        sw_exchange_packed(layer, layer->send_sums.data, sizeof(float), segment->slot);
    add_rows(layer, to.k, from.k, segment->tokens, p->kv_heads * p->head_dim_qk, narrow);
    add_rows(layer, to.v, from.v, segment->tokens, p->kv_heads * p->head_dim_v, narrow);
  }
}

// Moves rows of sums out of the block, leaving zeros: what several readers share is taken once.
static void take_rows(const struct swathe_layer *layer, struct sw_view to, struct sw_view from,
                      int64_t tokens, int64_t row, bool narrow)
{
  for (int32_t b = 0; b < layer->batch; b++)
    for (int64_t t = 0; t < tokens; t++) {
      float *out = (float *)to.data + b * to.batch + t * to.token;
      const int64_t at = b * from.batch + t * from.token;
      for (int64_t i = 0; narrow && i < row; i++) {
        uint16_t *sum = (uint16_t *)from.data + at + i;
        out[i] = sw_problem_from_bf16(*sum);
        *sum = 0;
      }
      for (int64_t i = 0; !narrow && i < row; i++) {
        float *sum = (float *)from.data + at + i;
        out[i] = *sum;
        *sum = 0;
      }
    }
}

// The sums of this rank's keys came home: to where those of the first reader that has each key
// would lie, and zeros to the others.
static void arrive_home(const struct swathe_layer *layer, int way, void *block)
{
  const struct sw_baseline *baseline = layer->baseline;
  const struct sw_halo_plan *plan = layer->plan;
  const struct swathe_problem *p = &layer->problem;
  const bool narrow = baseline->elem_bytes == sizeof(uint16_t);

  for (int64_t m = 0; m < plan->send_message_count; m++) {
    const struct sw_halo_message *message = &plan->send_messages[m];
    if (layer->strategy == SWATHE_RING && way_to(plan->rank, message->peer) != way)
      continue;
    for (int64_t i = message->segment_begin; i < message->segment_end; i++) {
      const struct sw_halo_segment *segment = &plan->sends[i];
      const struct sw_key_views from = block_views(layer, block, segment->row);
      const struct sw_key_views to =
          sw_exchange_packed(layer, layer->receive_sums.data, sizeof(float), segment->slot);
      take_rows(layer, to.k, from.k, segment->tokens, p->kv_heads * p->head_dim_qk, narrow);
      take_rows(layer, to.v, from.v, segment->tokens, p->kv_heads * p->head_dim_v, narrow);
    }
  }
}

// ---- Rounds -------------------------------------------------------------------------------------

// The block that moves on one way in a round; `places` it has gone, or has still to go, from home.
struct move {
  int32_t owner, peer;
  bool moves;
};

static struct move to_send(const struct sw_baseline *baseline, int way)
{
  const int32_t step = step_of[way];
  const bool keys = baseline->travel == KEYS;
  const int32_t places = keys ? baseline->round : baseline->rounds - baseline->round + 1;
  const int32_t owner = owner_before(baseline, way, keys ? places - 1 : places);
  return (struct move){ owner, around(baseline, baseline->rank + (keys ? step : -step)),
                        baseline->reach[way][owner] >= places };
}

static struct move to_receive(const struct sw_baseline *baseline, int way)
{
  const int32_t step = step_of[way];
  const bool keys = baseline->travel == KEYS;
  const int32_t places = keys ? baseline->round : baseline->rounds - baseline->round + 1;
  const int32_t owner = owner_before(baseline, way, keys ? places : places - 1);
  return (struct move){ owner, around(baseline, baseline->rank - (keys ? step : -step)),
                        baseline->reach[way][owner] >= places };
}

// Posts what moves in the round.  A block of sums that begins its way here is made first.
static enum swathe_status post_round(struct swathe_layer *layer, int32_t *posted)
{
  struct sw_baseline *baseline = layer->baseline;
  struct sw_transport_message messages[2 * WAYS];
  int32_t count = 0;

  for (int w = 0; w < WAYS; w++) {
    const struct move receive = to_receive(baseline, w), send = to_send(baseline, w);
    if (receive.moves) {
      const size_t bytes = block_bytes(layer, receive.owner);
      messages[count++] = (struct sw_transport_message){
        block_of(layer, w, baseline->round, receive.owner), bytes, receive.peer, false, NULL
      };
      layer->timing.received_bytes += (int64_t)bytes;
    }
    if (send.moves) {
      const size_t bytes = block_bytes(layer, send.owner);
      void *block = block_of(layer, w, baseline->round - 1, send.owner);
      const int32_t places = baseline->rounds - baseline->round + 1;
      if (baseline->travel == SUMS && baseline->reach[w][send.owner] == places) {
        memset(block, 0, bytes);
        add_own(layer, block, send.owner);
      }
      messages[count++] = (struct sw_transport_message){ block, bytes, send.peer, true, NULL };
      layer->timing.sent_bytes += (int64_t)bytes;
    }
  }
  *posted = count;
  if (!count) return SWATHE_OK;
  return layer->transport->operations->post(layer->transport, messages, count);
}

// What the round brought.
static void take_round(struct swathe_layer *layer)
{
  struct sw_baseline *baseline = layer->baseline;
  for (int w = 0; w < WAYS; w++) {
    const struct move receive = to_receive(baseline, w);
    if (!receive.moves) continue;
    void *block = block_of(layer, w, baseline->round, receive.owner);
    if (baseline->travel == KEYS) keep_needed(layer, block, receive.owner);
    else if (receive.owner == baseline->rank) arrive_home(layer, w, block);
    else add_own(layer, block, receive.owner);
  }
}

// On to the next round in which something moves here.
static enum swathe_status next_round(struct swathe_layer *layer, struct sw_exchange *exchange)
{
  struct sw_baseline *baseline = layer->baseline;
  enum swathe_status status = SWATHE_OK;
  int32_t posted = 0;

  while (!posted && !status && ++baseline->round <= baseline->rounds)
    status = post_round(layer, &posted);
  exchange->done = !status && baseline->round > baseline->rounds;
  return status;
}

void sw_baseline_progress(struct sw_exchange *exchange)
{
  struct swathe_layer *layer = exchange->layer;
  bool arrived = false;
  exchange->status = layer->transport->operations->test(layer->transport, &arrived);
  if (exchange->status || !arrived) return;
  take_round(layer);
  exchange->status = next_round(layer, exchange);
}

enum swathe_status sw_baseline_finish(struct swathe_layer *layer, struct sw_exchange *exchange)
{
  const double begin = sw_layer_now_us();
  enum swathe_status status = exchange->status;

  while (!status && !exchange->done) {
    status = layer->transport->operations->wait(layer->transport);
    if (status) break;
    take_round(layer);
    status = next_round(layer, exchange);
  }
  layer->timing.wait_us += sw_layer_now_us() - begin;
  return status;
}

static enum swathe_status begin_travel(struct swathe_layer *layer, enum travel travel,
                                       size_t elem_bytes, struct sw_exchange *exchange)
{
  struct sw_baseline *baseline = layer->baseline;
  baseline->travel = travel;
  baseline->elem_bytes = elem_bytes;
  baseline->round = 0;
  exchange->transport = layer->transport;
  exchange->layer = layer;
  exchange->rounds = true;
  if (!layer->transport) return next_round(layer, exchange);
  const struct sw_transport_operations *operations = layer->transport->operations;
  enum swathe_status status = SWATHE_OK;
  if (operations->progress_thread)
    status = operations->progress_thread(layer->transport, layer->knobs.progress);
  if (!status) status = next_round(layer, exchange);
  if (!status && layer->knobs.overlap == 0) status = sw_baseline_finish(layer, exchange);
  return status;
}

enum swathe_status sw_baseline_post_keys(struct swathe_layer *layer,
                                         const struct swathe_tensors *tensors, void *halo,
                                         struct sw_exchange *exchange)
{
  struct sw_baseline *baseline = layer->baseline;
  const struct swathe_problem *p = &layer->problem;
  const size_t elem = sw_problem_elem_bytes(p);

  baseline->halo = halo;
  baseline->travel = KEYS;
  baseline->elem_bytes = elem;
  for (int w = 0; w < WAYS; w++) {
    if (!baseline->reach[w][baseline->rank]) continue;
    void *block = block_of(layer, w, 0, baseline->rank);
    const struct sw_key_views own = block_views(layer, block, 0);
    sw_exchange_copy(layer->batch, layer->plan->rows, p->kv_heads, p->head_dim_qk, own.k,
                     sw_exchange_tensor(&tensors->k, 0, elem), elem);
    sw_exchange_copy(layer->batch, layer->plan->rows, p->kv_heads, p->head_dim_v, own.v,
                     sw_exchange_tensor(&tensors->v, 0, elem), elem);
  }
  return begin_travel(layer, KEYS, elem, exchange);
}

enum swathe_status sw_baseline_post_sums(struct swathe_layer *layer, struct sw_exchange *exchange)
{
  const bool narrow = layer->problem.halo_gradient == SWATHE_BF16;
  return begin_travel(layer, SUMS, narrow ? sizeof(uint16_t) : sizeof(float), exchange);
}
