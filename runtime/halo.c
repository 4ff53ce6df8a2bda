// halo.c: spans -> who sends what to whom.
//
// One walk makes it all: from each of the rank's spans outward along its document, piece by piece,
// until the window ends.  What is met on the way are owners (of keys this span's queries see) and,
// with the window's two sides exchanged, readers (whose queries see this span's keys).  Both ends
// of a message find the same intervals, sort them by document and position and unite those that
// touch, so they agree on the wire's order without a word.
#include "halo.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>

#include "sharding.h"

struct sw_halo_planner {
  struct sw_sharding sharding;
  struct sw_halo_plan plan;
  struct sw_list spans, gaps, needs, need_begin;
  struct sw_list receives, receive_messages, sends, send_messages;
  struct sw_list wanted;         // segments of this rank that others need, before they are united
  struct sw_list keys, scratch;  // what `needs` or `wanted` are sorted by
};

enum swathe_status sw_halo_planner_create(struct sw_halo_planner **planner)
{
  struct sw_halo_planner *made = calloc(1, sizeof *made);
  if (!made) return sw_fail(SWATHE_NO_MEMORY, "no memory for a halo planner");
  *planner = made;
  return SWATHE_OK;
}

static void free_lists(struct sw_halo_planner *planner)
{
  sw_sharding_free(&planner->sharding);
  struct sw_list *const lists[] = { &planner->spans, &planner->gaps, &planner->needs,
                                    &planner->need_begin, &planner->receives,
                                    &planner->receive_messages, &planner->sends,
                                    &planner->send_messages, &planner->wanted, &planner->keys,
                                    &planner->scratch };
  for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++) sw_list_free(lists[i]);
}

void sw_halo_planner_destroy(struct sw_halo_planner *planner)
{
  if (!planner) return;
  free_lists(planner);
  free(planner);
}

// ---- Walking along a document ------------------------------------------------------------------

enum side { BEFORE, AFTER };

// From one span outward.
struct walk {
  const struct sw_sharding *sharding;
  enum side side;
  int64_t document;
  int64_t edge;      // what was walked ends here
  int64_t limit;     // the first (AFTER) or last (BEFORE) edge from which nothing is within reach
  int32_t owner;     // of the piece last met
  int32_t hops;      // changes of owner so far
};

// `reach` in tokens, from the span's edge.
static struct walk walk_from(const struct sw_halo_planner *planner, const struct swathe_span *span,
                             enum side side, int64_t reach)
{
  const int64_t length = sw_sharding_document_tokens(&planner->sharding, span->document);
  const int64_t end = span->position + span->tokens;
  struct walk walk = { &planner->sharding, side, span->document, 0, 0, planner->plan.rank, 0 };
  walk.edge = side == BEFORE ? span->position : end;
  if (side == BEFORE) walk.limit = reach < span->position ? span->position - reach : 0;
  else walk.limit = reach < length - end ? end + reach : length;
  return walk;
}

static bool walk_on(struct walk *walk, struct sw_piece *piece)
{
  const bool before = walk->side == BEFORE;
  if (before ? walk->edge <= walk->limit : walk->edge >= walk->limit) return false;
  *piece =
      sw_sharding_piece_at(walk->sharding, walk->document, before ? walk->edge - 1 : walk->edge);
  walk->edge = before ? piece->begin : piece->end;
  walk->hops += piece->owner != walk->owner;
  walk->owner = piece->owner;
  return true;
}

// ---- Needs and wants ---------------------------------------------------------------------------

static enum swathe_status append(struct sw_list *list, const struct sw_halo_segment *segment)
{
  const enum swathe_status status = sw_list_reserve(list, list->count + 1, sizeof *segment);
  if (!status) ((struct sw_halo_segment *)list->items)[list->count++] = *segment;
  return status;
}

static enum swathe_status append_key(struct sw_list *list, const struct sw_sharding_key *key)
{
  const enum swathe_status status = sw_list_reserve(list, list->count + 1, sizeof *key);
  if (!status) ((struct sw_sharding_key *)list->items)[list->count++] = *key;
  return status;
}

// The row of a position that the rank itself holds.  The spans of a computed layout ascend by
// document and position as they do by row.
static int64_t own_row(const struct sw_halo_planner *planner, const struct sw_piece *piece,
                       int64_t position)
{
  if (piece->row >= 0) return piece->row + (position - piece->begin);
  const struct swathe_span *spans = planner->spans.items;
  int64_t low = 0, high = planner->plan.span_count;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    const struct swathe_span *span = &spans[middle];
    if (span->document < piece->document ||
        (span->document == piece->document && span->position <= position))
      low = middle;
    else
      high = middle;
  }
  return spans[low].row + (position - spans[low].position);
}

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// The keys outside the span that its queries see, on one side, in the order of the walk.
static enum swathe_status find_needs(struct sw_halo_planner *planner, int32_t index, enum side side,
                                     int64_t reach)
{
  const struct swathe_span *span = (struct swathe_span *)planner->spans.items + index;
  struct walk walk = walk_from(planner, span, side, reach);
  struct sw_piece piece;
  enum swathe_status status = SWATHE_OK;
  while (!status && walk_on(&walk, &piece)) {
    const int64_t begin = side == BEFORE ? larger(piece.begin, walk.limit) : piece.begin;
    const int64_t end = side == AFTER ? smaller(piece.end, walk.limit) : piece.end;
    const bool own = piece.owner == planner->plan.rank;
    const struct sw_halo_segment need = {
      .document = span->document,
      .position = begin,
      .tokens = end - begin,
      .row = own ? own_row(planner, &piece, begin) : -1,
      .slot = -1,
      .owner = piece.owner,
      .reader = planner->plan.rank,
      .hops = own ? 0 : walk.hops,
      .span = index,
    };
    const struct sw_sharding_key key = { need.document, begin, piece.begin, planner->needs.count,
                                         piece.owner };
    status = append(&planner->needs, &need);
    if (own) planner->plan.own_tokens += need.tokens;
    else if (!status) status = append_key(&planner->keys, &key);
  }
  return status;
}

// Needs met on a walk BEFORE come in descending order: turns those from `need` on around, and their
// keys, which begin at `key`.
static void reverse(struct sw_halo_planner *planner, int64_t need, int64_t key)
{
  struct sw_halo_segment *needs = planner->needs.items;
  struct sw_sharding_key *keys = planner->keys.items;
  const int64_t last_need = planner->needs.count - 1, last_key = planner->keys.count - 1;
  for (int64_t i = need, j = last_need; i < j; i++, j--) {
    const struct sw_halo_segment swap = needs[i];
    needs[i] = needs[j];
    needs[j] = swap;
  }
  for (int64_t i = key; i <= last_key; i++) keys[i].index = need + last_need - keys[i].index;
  for (int64_t i = key, j = last_key; i < j; i++, j--) {
    const struct sw_sharding_key swap = keys[i];
    keys[i] = keys[j];
    keys[j] = swap;
  }
}

static enum swathe_status find_all_needs(struct sw_halo_planner *planner,
                                         const struct swathe_problem *problem)
{
  const int64_t spans = planner->plan.span_count;
  enum swathe_status status = sw_list_reserve(&planner->need_begin, spans + 1, sizeof(int64_t));
  if (status) return status;
  int64_t *need_begin = planner->need_begin.items;
  planner->needs.count = planner->keys.count = 0;
  for (int64_t s = 0; s < spans; s++) {
    const int64_t first_key = planner->keys.count;
    need_begin[s] = planner->needs.count;
    if ((status = find_needs(planner, (int32_t)s, BEFORE, problem->window_left))) return status;
    reverse(planner, need_begin[s], first_key);
    if ((status = find_needs(planner, (int32_t)s, AFTER, problem->window_right))) return status;
  }
  need_begin[spans] = planner->needs.count;
  return SWATHE_OK;
}

// The keys of the span that other ranks' queries on one side of it see.  Queries after the span
// look back, so a walk AFTER reaches as far as window_left.
static enum swathe_status find_readers(struct sw_halo_planner *planner,
                                       const struct swathe_span *span, enum side side,
                                       int64_t reach)
{
  struct walk walk = walk_from(planner, span, side, reach);
  const int64_t span_end = span->position + span->tokens;
  struct sw_piece piece;
  enum swathe_status status = SWATHE_OK;
  while (!status && walk_on(&walk, &piece)) {
    if (piece.owner == planner->plan.rank) continue;
    int64_t begin = span->position, end = span_end;
    if (side == AFTER && reach < piece.begin) begin = larger(begin, piece.begin - reach);
    if (side == BEFORE && reach < end - piece.end) end = piece.end + reach;
    const struct sw_halo_segment want = {
      .document = span->document,
      .position = begin,
      .tokens = end - begin,
      .row = span->row + (begin - span->position),
      .owner = planner->plan.rank,
      .reader = piece.owner,
      .hops = walk.hops,
    };
    const struct sw_sharding_key key = { span->document, begin, span->position,
                                         planner->wanted.count, piece.owner };
    status = append(&planner->wanted, &want);
    if (!status) status = append_key(&planner->keys, &key);
  }
  return status;
}

// ---- Messages ----------------------------------------------------------------------------------

static void open_message(struct sw_list *messages, int32_t peer, int64_t slot, int64_t segment)
{
  struct sw_halo_message *message = (struct sw_halo_message *)messages->items + messages->count++;
  *message = (struct sw_halo_message){ peer, slot, 0, segment, segment };
}

// Sorts the keys of segments[] by peer, document and position, unites what touches within one piece
// of its owner, and lists what goes over the wire.  Slots follow; segments[] learn theirs.
static enum swathe_status make_messages(struct sw_halo_planner *planner, struct sw_list *segments,
                                        struct sw_list *united, struct sw_list *messages,
                                        int64_t *tokens)
{
  const int64_t count = planner->keys.count;
  enum swathe_status status;
  if ((status = sw_list_reserve(&planner->scratch, count, sizeof(struct sw_sharding_key))) ||
      (status = sw_list_reserve(united, count, sizeof(struct sw_halo_segment))) ||
      (status = sw_list_reserve(messages, count, sizeof(struct sw_halo_message))))
    return status;
  const struct sw_sharding_key *keys = planner->keys.items;
  sw_sharding_sort(planner->keys.items, planner->scratch.items, count);

  struct sw_halo_segment *last = NULL;
  int64_t slot = 0;  // after `last`
  united->count = messages->count = 0;
  for (int64_t i = 0; i < count; i++) {
    struct sw_halo_segment *segment = (struct sw_halo_segment *)segments->items + keys[i].index;
    const bool same_piece = i && keys[i].rank == keys[i - 1].rank &&
                            keys[i].document == keys[i - 1].document &&
                            keys[i].piece == keys[i - 1].piece;
    if (same_piece && segment->position <= last->position + last->tokens) {
      const int64_t end = segment->position + segment->tokens;
      const int64_t more = larger(end - (last->position + last->tokens), 0);
      last->tokens += more;
      last->hops = segment->hops < last->hops ? segment->hops : last->hops;
      slot += more;
    } else {
      if (!i || keys[i].rank != keys[i - 1].rank)
        open_message(messages, keys[i].rank, slot, united->count);
      last = (struct sw_halo_segment *)united->items + united->count++;
      *last = *segment;
      last->slot = slot;
      last->span = -1;
      slot += last->tokens;
    }
    segment->slot = last->slot + (segment->position - last->position);
    struct sw_halo_message *message =
        (struct sw_halo_message *)messages->items + messages->count - 1;
    message->tokens = slot - message->slot;
    message->segment_end = united->count;
  }
  *tokens = slot;
  return SWATHE_OK;
}

static enum swathe_status make_receives(struct sw_halo_planner *planner,
                                        const struct swathe_problem *problem)
{
  const enum swathe_status status = find_all_needs(planner, problem);
  if (status) return status;
  return make_messages(planner, &planner->needs, &planner->receives, &planner->receive_messages,
                       &planner->plan.receive_tokens);
}

static enum swathe_status make_sends(struct sw_halo_planner *planner,
                                     const struct swathe_problem *problem)
{
  const struct swathe_span *spans = planner->spans.items;
  enum swathe_status status;
  planner->keys.count = planner->wanted.count = 0;
  for (int64_t s = 0; s < planner->plan.span_count; s++)
    if ((status = find_readers(planner, &spans[s], BEFORE, problem->window_right)) ||
        (status = find_readers(planner, &spans[s], AFTER, problem->window_left)))
      return status;
  return make_messages(planner, &planner->wanted, &planner->sends, &planner->send_messages,
                       &planner->plan.send_tokens);
}

// ---- The plan ----------------------------------------------------------------------------------

static enum swathe_status list_spans(struct sw_halo_planner *planner)
{
  struct sw_halo_plan *plan = &planner->plan;
  plan->span_count = sw_sharding_spans(&planner->sharding, plan->rank, planner->spans.items,
                                       planner->spans.capacity);
  if (plan->span_count <= planner->spans.capacity) return SWATHE_OK;
  if (plan->span_count > INT32_MAX)
    return sw_fail(SWATHE_UNSUPPORTED, "rank %d has %" PRId64 " spans; at most %d", plan->rank,
                   plan->span_count, INT32_MAX);
  const enum swathe_status status =
      sw_list_reserve(&planner->spans, plan->span_count, sizeof(struct swathe_span));
  if (!status)
    sw_sharding_spans(&planner->sharding, plan->rank, planner->spans.items,
                      planner->spans.capacity);
  return status;
}

static enum swathe_status list_gaps(struct sw_halo_planner *planner)
{
  struct sw_halo_plan *plan = &planner->plan;
  const enum swathe_status status =
      sw_list_reserve(&planner->gaps, plan->span_count + 1, sizeof(struct sw_halo_gap));
  if (status) return status;
  const struct swathe_span *spans = planner->spans.items;
  struct sw_halo_gap *gaps = planner->gaps.items;
  int64_t row = 0;
  for (int64_t s = 0; s <= plan->span_count; s++) {
    const int64_t next = s < plan->span_count ? spans[s].row : plan->rows;
    if (next > row) gaps[plan->gap_count++] = (struct sw_halo_gap){ row, next - row };
    if (s < plan->span_count) row = next + spans[s].tokens;
  }
  return SWATHE_OK;
}

// The plan of one rank of the sharding that the planner has open.
static enum swathe_status plan_rank(struct sw_halo_planner *planner,
                                    const struct swathe_problem *problem, int32_t rank)
{
  struct sw_halo_plan *plan = &planner->plan;
  enum swathe_status status;
  assert(problem->window_left >= 0 && problem->window_right >= 0);
  *plan = (struct sw_halo_plan){ .rank = rank, .rows = sw_sharding_rows(&planner->sharding, rank) };
  if ((status = list_spans(planner)) || (status = list_gaps(planner)) ||
      (status = make_receives(planner, problem)) || (status = make_sends(planner, problem)))
    return status;

  plan->need_count = planner->needs.count;
  plan->receive_count = planner->receives.count;
  plan->send_count = planner->sends.count;
  plan->receive_message_count = planner->receive_messages.count;
  plan->send_message_count = planner->send_messages.count;
  plan->spans = planner->spans.items;
  plan->gaps = planner->gaps.items;
  plan->needs = planner->needs.items;
  plan->need_begin = planner->need_begin.items;
  plan->receives = planner->receives.items;
  plan->receive_messages = planner->receive_messages.items;
  plan->sends = planner->sends.items;
  plan->send_messages = planner->send_messages.items;
  for (int64_t i = 0; i < plan->receive_count; i++)
    if (plan->receives[i].hops > plan->hops) plan->hops = plan->receives[i].hops;
  return SWATHE_OK;
}

enum swathe_status sw_halo_plan(struct sw_halo_planner *planner,
                                const struct swathe_problem *problem,
                                const struct swathe_sharding *sharding, int32_t rank,
                                const struct sw_halo_plan **plan)
{
  enum swathe_status status = sw_sharding_open(&planner->sharding, sharding);
  if (status) return status;
  if (rank < 0 || rank >= sharding->ranks)
    return sw_fail(SWATHE_BAD_USE, "rank %d is none of the %d", rank, sharding->ranks);
  if ((status = plan_rank(planner, problem, rank))) return status;
  *plan = &planner->plan;
  return SWATHE_OK;
}

// ---- All ranks ---------------------------------------------------------------------------------

// a * b for counts; INT64_MAX when it would be more.
static int64_t times(int64_t a, int64_t b)
{
  int64_t product;
  return __builtin_mul_overflow(a, b, &product) ? INT64_MAX : product;
}

static int64_t plus(int64_t a, int64_t b)
{
  int64_t sum;
  return __builtin_add_overflow(a, b, &sum) ? INT64_MAX : sum;
}

// Received when heads are dealt out, forward.  Of q, k and v a rank gets its heads / ranks of every
// row it does not hold; of out it gets back, for its own rows, the heads that the other ranks
// computed:
//   (T - rows) * (q_heads * dqk + kv_heads * (dqk + dv)) / P  +  rows * q_heads * dv * (P - 1) / P
// With even shares that is (P - 1) / P of the rank's share of q, k, v and out.
static int64_t all_to_all_bytes(const struct swathe_problem *problem, int32_t ranks,
                                int64_t all_rows, int64_t rows, int32_t batch)
{
  if (problem->q_heads % ranks || problem->kv_heads % ranks) return -1;
  const int64_t q_heads = problem->q_heads / ranks, kv_heads = problem->kv_heads / ranks;
  const int64_t in = q_heads * problem->head_dim_qk +
                     kv_heads * (problem->head_dim_qk + (int64_t)problem->head_dim_v);
  const int64_t out = q_heads * problem->head_dim_v * (ranks - 1);
  const int64_t elems = plus(times(all_rows - rows, in), times(rows, out));
  return times(elems, (int64_t)sw_problem_elem_bytes(problem) * batch);
}

// Bytes of K and V, token_bytes a row, all rows of the batch:
//   halo        halo_tokens: exactly what the window sees outside the share
//   all_gather  every row that the rank does not hold
//   ring_all    the same rows, block by block
//   ring        the whole blocks of those ranks that hold anything the window sees
static void fill_traffic(const struct swathe_problem *problem, const struct sw_halo_plan *plan,
                         const struct swathe_sharding *sharding, int64_t all_rows,
                         struct swathe_traffic *traffic)
{
  struct swathe_traffic *mine = &traffic[plan->rank];
  const int64_t token_bytes = times(sw_problem_token_bytes(problem), sharding->batch);
  int64_t ring_rows = 0;
  for (int64_t m = 0; m < plan->receive_message_count; m++)
    ring_rows += traffic[plan->receive_messages[m].peer].rows;
  mine->spans = plan->span_count;
  mine->halo_tokens = plan->receive_tokens;
  mine->send_tokens = plan->send_tokens;
  mine->peers = (int32_t)plan->receive_message_count;
  mine->hops = plan->hops;
  mine->own_tokens = plan->own_tokens;
  mine->receive_bytes = times(plan->receive_tokens, token_bytes);
  mine->send_bytes = times(plan->send_tokens, token_bytes);
  mine->all_gather_bytes = mine->ring_all_bytes = times(all_rows - mine->rows, token_bytes);
  mine->ring_bytes = times(ring_rows, token_bytes);
  mine->a2a_bytes =
      all_to_all_bytes(problem, sharding->ranks, all_rows, mine->rows, sharding->batch);
}

static void visit_sends(const struct sw_halo_plan *plan, swathe_message_visit *visit, void *arg)
{
  for (int64_t i = 0; i < plan->send_count; i++) {
    const struct sw_halo_segment *send = &plan->sends[i];
    const struct swathe_message message = { send->owner,    send->reader, send->document,
                                            send->position, send->tokens, send->hops };
    visit(arg, &message);
  }
}

enum swathe_status swathe_plan(const struct swathe_problem *problem,
                               const struct swathe_sharding *sharding, swathe_message_visit *visit,
                               void *arg, struct swathe_traffic *traffic)
{
  struct sw_halo_planner planner = { 0 };
  int64_t all_rows = 0;
  enum swathe_status status = swathe_problem_check(problem);
  if (!status) status = sw_sharding_open(&planner.sharding, sharding);
  for (int32_t r = 0; !status && traffic && r < sharding->ranks; r++) {
    traffic[r].rows = sw_sharding_rows(&planner.sharding, r);
    all_rows = plus(all_rows, traffic[r].rows);
  }
  for (int32_t r = 0; !status && r < sharding->ranks; r++) {
    if ((status = plan_rank(&planner, problem, r))) break;
    if (visit) visit_sends(&planner.plan, visit, arg);
    if (traffic) fill_traffic(problem, &planner.plan, sharding, all_rows, traffic);
  }
  free_lists(&planner);
  return status;
}
