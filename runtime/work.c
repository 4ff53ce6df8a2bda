// work.c: a rank's halo plan -> units of work and the runs of keys each unit sees.  Pure
// arithmetic: where data lives is told by place and index; layer.c puts the pointers in.
//
// Forward units are cut for locality alone.  Backward units are strips at least as long as the
// window, so that a key gets sums from its own strip and at most the next and the previous one, and
// a key of the halo from exactly one strip of each span.  Where several have sums for a key they
// spill beside (sums.c); so there are few strips, and how many does not grow with the share.
#include "layer.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

// Queries in a unit.  Larger units pack the window's keys less often (each unit packs window + unit
// keys), smaller ones spread better over threads and let the exchange progress between them.
enum { UNIT_TOKENS = 512 };

// Strips: two windows of keys spill at each end, a small part of a strip of so many windows.  They
// are shorter where there would be few items for many threads, and longer where there would be very
// many.
enum { STRIP_WINDOWS = 8, FEW_ITEMS = 64, MANY_ITEMS = 256 };

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// position - window, or the document's start
static int64_t reach_before(int64_t position, int64_t window)
{
  return window == SWATHE_UNLIMITED || window > position ? 0 : position - window;
}

// end + window, saturating
static int64_t reach_after(int64_t end, int64_t window)
{
  return window == SWATHE_UNLIMITED || window > INT64_MAX - end ? INT64_MAX : end + window;
}

static enum swathe_status grow_array(void **array, int64_t *capacity, int64_t count, size_t size)
{
  const int64_t larger_capacity = larger(2 * *capacity, larger(count, 16));
  void *grown = realloc(*array, (size_t)larger_capacity * size);
  if (!grown)
    return sw_fail(SWATHE_NO_MEMORY, "no %zu bytes for a work list",
                   (size_t)larger_capacity * size);
  *array = grown;
  *capacity = larger_capacity;
  return SWATHE_OK;
}

static inline enum swathe_status grow(void **array, int64_t *capacity, int64_t count, size_t size)
{
  return count <= *capacity ? SWATHE_OK : grow_array(array, capacity, count, size);
}

// ---- Where to cut -------------------------------------------------------------------------------

// One span's cuts: `head` tokens in units that see the wire before it, `tail` after it, the middle
// in `pieces` about equal parts.
struct cuts {
  int64_t head, tail, middle, pieces, unit;
};

// Whether keys come by the wire before and after a span.
struct wire {
  bool before, after;
};

static struct wire wire_of(const struct sw_halo_plan *plan, int64_t span)
{
  const int64_t position = plan->spans[span].position;
  struct wire wire = { false, false };
  for (int64_t i = plan->need_begin[span]; i < plan->need_begin[span + 1]; i++) {
    if (plan->needs[i].slot < 0) continue;
    if (plan->needs[i].position < position) wire.before = true;
    else wire.after = true;
  }
  return wire;
}

// Tokens of the span whose window reaches `window` past one of its ends, in whole tiles.
static int64_t edge_tokens(const struct swathe_span *span, int64_t window, int64_t tile)
{
  return window > span->tokens ? span->tokens : smaller(span->tokens, round_up(window, tile));
}

static struct cuts cut_forward(const struct swathe_problem *problem, const struct swathe_span *span,
                               struct wire wire, int64_t tile)
{
  struct cuts cuts = { .unit = round_up(UNIT_TOKENS, tile) };

  if (wire.before) cuts.head = edge_tokens(span, problem->window_left, tile);
  if (wire.after)
    cuts.tail = smaller(span->tokens - cuts.head, edge_tokens(span, problem->window_right, tile));
  cuts.middle = span->tokens - cuts.head - cuts.tail;
  return cuts;
}

static int64_t larger_window(const struct swathe_problem *problem)
{
  return larger(problem->window_left, problem->window_right);
}

// About how many tokens a strip of the rank has.
static int64_t strip_tokens(const struct swathe_problem *problem, const struct sw_halo_plan *plan,
                            int64_t tile)
{
  const int64_t window = larger_window(problem);
  const int64_t few = larger(1, FEW_ITEMS / problem->kv_heads);
  const int64_t many = larger(1, MANY_ITEMS / problem->kv_heads);

  if (window >= plan->rows) return plan->rows;
  const int64_t least = larger(round_up(UNIT_TOKENS, tile), round_up(window, tile) + tile);
  int64_t tokens = larger(UNIT_TOKENS, window > INT64_MAX / STRIP_WINDOWS ? window
                                                                          : STRIP_WINDOWS * window);
  tokens = smaller(tokens, plan->rows / few);
  tokens = larger(tokens, plan->rows / many);
  return larger(tokens, least);
}

// Every strip is at least as long as both windows, or is the whole span.
static struct cuts cut_backward(const struct swathe_problem *problem,
                                const struct swathe_span *span, struct wire wire, int64_t tile,
                                int64_t strip)
{
  const int64_t window = larger_window(problem);
  struct cuts whole = { .middle = span->tokens, .unit = span->tokens };

  if (window >= span->tokens) return whole;
  const int64_t edge = larger(round_up(window, tile), tile);
  struct cuts cuts = { .unit = strip };
  if (wire.before) cuts.head = edge;
  if (wire.after) cuts.tail = edge;
  cuts.middle = span->tokens - cuts.head - cuts.tail;
  if (cuts.middle < edge) return whole;
  return cuts;
}

// ---- Runs ---------------------------------------------------------------------------------------

struct builder {
  struct sw_work *work;
  const struct swathe_problem *problem;
  const struct sw_halo_plan *plan;
  int64_t tile, strip;
  bool backward;
  bool survey;   // backward: only look who has sums for which keys
  bool final;    // there may be final runs
};

// A run's sums that others' are added to, or that are added to others'.
static enum swathe_status spill(struct builder *b, struct sw_run_source *source, int64_t tokens,
                                enum sw_turn turn)
{
  struct sw_work *work = b->work;
  const struct sw_sum_source at = { SW_SPILL, work->spill_tokens };
  source->spill = work->spill_tokens;
  work->spill_tokens += tokens;
  return sw_sums_claim(&work->sums, source->place, source->index, tokens, turn, at);
}

// The keys [position, position + tokens) at `index`; final_sums: nobody else has sums for them.
static enum swathe_status add_run(struct builder *b, enum sw_place place, int64_t index,
                                  int64_t position, int64_t tokens, enum sw_turn turn,
                                  bool final_sums)
{
  struct sw_work *work = b->work;
  enum swathe_status status;

  status = grow((void **)&work->runs, &work->run_capacity, work->run_count + 1, sizeof *work->runs);
  if (!status)
    status = grow((void **)&work->sources, &work->source_capacity, work->run_count + 1,
                  sizeof *work->sources);
  if (status) return status;
  struct sw_run_source *source = &work->sources[work->run_count];
  *source = (struct sw_run_source){ place, index, -1 };
  work->runs[work->run_count++] = (struct sw_run){   // its views are filled in at each call
    .position = position,
    .tokens = tokens,
    .wire = place == SW_WIRE,
    .final = b->backward && final_sums,
  };
  return b->backward && !final_sums ? spill(b, source, tokens, turn) : SWATHE_OK;
}

// Adds the keys [from, to), which are not the unit's own, of a piece that begins at `begin`.
static enum swathe_status add_keys(struct builder *b, enum sw_place place, int64_t begin,
                                   int64_t index, int64_t from, int64_t to)
{
  if (from >= to) return SWATHE_OK;
  return add_run(b, place, index + (from - begin), from, to - from, SW_TURN_NEIGHBOUR, false);
}

// Adds the unit's own keys, final where nobody else has sums for them.
static enum swathe_status add_own_keys(struct builder *b, int64_t row, int64_t position,
                                       int64_t tokens)
{
  const int64_t end = row + tokens;
  enum swathe_status status = SWATHE_OK;

  if (b->survey || !b->backward || !b->final)
    return add_run(b, SW_OWN, row, position, tokens, SW_TURN_UNIT, b->survey);
  for (int64_t part_end; row < end && !status; row = part_end) {
    const bool shared = sw_sums_part(&b->work->sums, row, end, &part_end);
    status = add_run(b, SW_OWN, row, position, part_end - row, SW_TURN_UNIT, !shared);
    position += part_end - row;
  }
  return status;
}

// The needs of `span` among positions [from, to).
static enum swathe_status add_needs(struct builder *b, int64_t span, int64_t from, int64_t to)
{
  const struct sw_halo_plan *plan = b->plan;
  enum swathe_status status = SWATHE_OK;

  for (int64_t i = plan->need_begin[span]; i < plan->need_begin[span + 1] && !status; i++) {
    const struct sw_halo_segment *need = &plan->needs[i];
    const int64_t low = larger(from, need->position);
    const int64_t high = smaller(to, need->position + need->tokens);
    if (need->slot < 0)
      status = add_keys(b, SW_OWN, need->position, need->row, low, high);
    else
      status = add_keys(b, SW_WIRE, need->position, need->slot, low, high);
  }
  return status;
}

// One unit: the queries [begin, end) of the span, and its runs in ascending position.
static enum swathe_status add_unit(struct builder *b, int64_t index, int64_t begin, int64_t end)
{
  struct sw_work *work = b->work;
  const struct swathe_span *span = &b->plan->spans[index];
  const int64_t span_end = span->position + span->tokens;
  const int64_t low = reach_before(begin, b->problem->window_left);
  const int64_t high = reach_after(end, b->problem->window_right);
  const int64_t run_begin = work->run_count;
  enum swathe_status status;

  status =
      grow((void **)&work->units, &work->unit_capacity, work->unit_count + 1, sizeof *work->units);
  if (!status) status = add_needs(b, index, low, span->position);
  if (!status)
    status =
        add_keys(b, SW_OWN, span->position, span->row, larger(low, span->position), begin);
  if (!status) status = add_own_keys(b, span->row + (begin - span->position), begin, end - begin);
  if (!status)
    status = add_keys(b, SW_OWN, span->position, span->row, end, smaller(high, span_end));
  if (!status) status = add_needs(b, index, span_end, high);
  if (status) return status;

  int64_t keys = 0;
  for (int64_t i = run_begin; i < work->run_count; i++) keys += work->runs[i].tokens;
  work->max_keys = larger(work->max_keys, keys);
  work->units[work->unit_count++] = (struct sw_unit){
    .position = begin,
    .tokens = end - begin,
    .row = span->row + (begin - span->position),
    .run_begin = run_begin,
    .run_end = work->run_count,
  };
  return SWATHE_OK;
}

// Units over [begin, end) of a span's tokens, about `unit` long, cut at whole tiles.
static enum swathe_status add_units(struct builder *b, int64_t index, int64_t begin, int64_t end,
                                    int64_t unit)
{
  const int64_t origin = b->plan->spans[index].position, tile = b->tile;
  const int64_t tokens = end - begin, pieces = larger(1, tokens / unit);
  enum swathe_status status = SWATHE_OK;

  for (int64_t i = 0; i < pieces && begin < end && !status; i++) {
    const int64_t from = tokens / pieces * i / tile * tile;
    const int64_t to = i + 1 == pieces ? tokens : tokens / pieces * (i + 1) / tile * tile;
    if (from < to) status = add_unit(b, index, origin + begin + from, origin + begin + to);
  }
  return status;
}

// The span's units of the edge, or of the interior.
static enum swathe_status add_span(struct builder *b, int64_t index, bool interior)
{
  const struct swathe_span *span = &b->plan->spans[index];
  const struct wire wire = wire_of(b->plan, index);
  const struct cuts cuts = b->backward ? cut_backward(b->problem, span, wire, b->tile, b->strip)
                                       : cut_forward(b->problem, span, wire, b->tile);
  const bool whole = !cuts.head && !cuts.tail;
  const bool edge = whole && (wire.before || wire.after);
  const int64_t middle = cuts.head + cuts.middle;
  enum swathe_status status = SWATHE_OK;

  if (interior ? !edge : edge) status = add_units(b, index, cuts.head, middle, cuts.unit);
  if (interior || status || whole) return status;
  status = add_units(b, index, 0, cuts.head, cuts.unit);
  if (!status) status = add_units(b, index, middle, middle + cuts.tail, cuts.unit);
  return status;
}

static enum swathe_status add_spans(struct builder *b)
{
  struct sw_work *work = b->work;
  enum swathe_status status = SWATHE_OK;

  work->unit_count = work->run_count = work->spill_tokens = work->max_keys = 0;
  for (int interior = 0; interior < 2; interior++) {
    for (int64_t s = 0; s < b->plan->span_count && !status; s++)
      status = add_span(b, s, interior);
    if (!interior) work->edge_units = work->unit_count;
  }
  return status;
}

enum swathe_status sw_work_build(struct sw_work *work, const struct swathe_problem *problem,
                                 const struct sw_halo_plan *plan, enum swathe_direction direction,
                                 int64_t tile_tokens, int64_t final_keys)
{
  struct builder builder = { .work = work,
                             .problem = problem,
                             .plan = plan,
                             .tile = tile_tokens,
                             .strip = strip_tokens(problem, plan, tile_tokens),
                             .backward = direction == SWATHE_BACKWARD };
  enum swathe_status status;

  assert(tile_tokens >= 1);
  if (!builder.backward) return add_spans(&builder);
  sw_sums_clear(&work->sums);
  builder.survey = true;
  status = add_spans(&builder);
  if (!status) status = sw_sums_claim_received(&work->sums, plan);
  if (!status) status = sw_sums_share(&work->sums);
  builder.survey = false;
  builder.final = work->max_keys <= final_keys;
  if (!status) status = add_spans(&builder);
  if (!status) status = sw_sums_claim_received(&work->sums, plan);
  return status ? status : sw_sums_cut(&work->sums);
}

void sw_work_free(struct sw_work *work)
{
  free(work->units);
  free(work->runs);
  free(work->sources);
  sw_sums_free(&work->sums);
  memset(work, 0, sizeof *work);
}
