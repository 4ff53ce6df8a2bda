// work.c: a rank's halo plan -> units of work and the runs of keys each unit sees.  Pure
// arithmetic: where data lives is told by place and index; layer.c puts the pointers in.
//
// Forward units are cut for locality alone.  Backward units are strips at least as long as the
// window, so that a key gets sums from its own strip and at most the next and the previous one, and
// a key of the halo from exactly one strip of each span: those sums spill beside and are added in a
// fixed order.
#include "layer.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

// Queries in a unit.  Larger units pack the window's keys less often (each unit packs window + unit
// keys), smaller ones spread better over threads and let the exchange progress between them.
enum { UNIT_TOKENS = 512 };

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

// Every strip is at least as long as both windows, or is the whole span.
static struct cuts cut_backward(const struct swathe_problem *problem,
                                const struct swathe_span *span, struct wire wire, int64_t tile)
{
  const int64_t window = larger(problem->window_left, problem->window_right);
  struct cuts whole = { .middle = span->tokens, .unit = span->tokens };

  if (window >= span->tokens) return whole;
  const int64_t strip = larger(round_up(window, tile), tile);
  struct cuts cuts = { .unit = larger(round_up(UNIT_TOKENS, tile), strip + tile) };
  if (wire.before) cuts.head = strip;
  if (wire.after) cuts.tail = strip;
  cuts.middle = span->tokens - cuts.head - cuts.tail;
  if (cuts.middle < strip) return whole;
  return cuts;
}

// ---- Runs ---------------------------------------------------------------------------------------

struct builder {
  struct sw_work *work;
  const struct sw_halo_plan *plan;
  bool backward;
};

// Adds the keys [from, to) of a piece that begins at `begin`; `spilled`: not this unit's own sums.
static enum swathe_status add_run(struct builder *b, enum sw_place place, int64_t begin,
                                  int64_t index, int32_t message, int64_t from, int64_t to,
                                  bool spilled)
{
  struct sw_work *work = b->work;
  enum swathe_status status;

  if (from >= to) return SWATHE_OK;
  const int64_t first = index + (from - begin), tokens = to - from;
  status = grow((void **)&work->runs, &work->run_capacity, work->run_count + 1, sizeof *work->runs);
  if (!status)
    status = grow((void **)&work->sources, &work->source_capacity, work->run_count + 1,
                  sizeof *work->sources);
  if (!status && spilled)
    status = grow((void **)&work->spills, &work->spill_capacity, work->spill_count + 1,
                  sizeof *work->spills);
  if (status) return status;

  int64_t spill = -1;
  if (spilled) {
    spill = work->spill_tokens;
    work->spills[work->spill_count++] = (struct sw_spill){ place, first, tokens, spill, message };
    work->spill_tokens += tokens;
  }
  work->runs[work->run_count].position = from;  // its views are filled in at each call
  work->runs[work->run_count].tokens = tokens;
  work->runs[work->run_count].wire = place == SW_WIRE;
  work->sources[work->run_count++] = (struct sw_run_source){ place, first, message, spill };
  return SWATHE_OK;
}

static int32_t message_of(const struct sw_halo_plan *plan, int64_t slot)
{
  int64_t low = 0, high = plan->receive_message_count;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (plan->receive_messages[middle].slot <= slot) low = middle;
    else high = middle;
  }
  return (int32_t)low;
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
      status = add_run(b, SW_OWN, need->position, need->row, -1, low, high, b->backward);
    else
      status = add_run(b, SW_WIRE, need->position, need->slot, message_of(plan, need->slot), low,
                       high, b->backward);
  }
  return status;
}

// One unit: the queries [begin, end) of the span, and its runs in ascending position.
static enum swathe_status add_unit(struct builder *b, const struct swathe_problem *problem,
                                   int64_t index, int64_t begin, int64_t end)
{
  struct sw_work *work = b->work;
  const struct swathe_span *span = &b->plan->spans[index];
  const int64_t span_end = span->position + span->tokens;
  const int64_t low = reach_before(begin, problem->window_left);
  const int64_t high = reach_after(end, problem->window_right);
  const int64_t run_begin = work->run_count;
  enum swathe_status status;

  status =
      grow((void **)&work->units, &work->unit_capacity, work->unit_count + 1, sizeof *work->units);
  if (!status) status = add_needs(b, index, low, span->position);
  if (!status)
    status = add_run(b, SW_OWN, span->position, span->row, -1, larger(low, span->position), begin,
                     b->backward);
  if (!status) status = add_run(b, SW_OWN, span->position, span->row, -1, begin, end, false);
  if (!status)
    status = add_run(b, SW_OWN, span->position, span->row, -1, end, smaller(high, span_end),
                     b->backward);
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
static enum swathe_status add_units(struct builder *b, const struct swathe_problem *problem,
                                    int64_t index, int64_t begin, int64_t end, int64_t unit,
                                    int64_t tile)
{
  const int64_t origin = b->plan->spans[index].position;
  const int64_t tokens = end - begin, pieces = larger(1, tokens / unit);
  enum swathe_status status = SWATHE_OK;

  for (int64_t i = 0; i < pieces && begin < end && !status; i++) {
    const int64_t from = tokens / pieces * i / tile * tile;
    const int64_t to = i + 1 == pieces ? tokens : tokens / pieces * (i + 1) / tile * tile;
    if (from < to) status = add_unit(b, problem, index, origin + begin + from, origin + begin + to);
  }
  return status;
}

enum swathe_status sw_work_build(struct sw_work *work, const struct swathe_problem *problem,
                                 const struct sw_halo_plan *plan, enum swathe_direction direction,
                                 int64_t tile_tokens)
{
  struct builder builder = { work, plan, direction == SWATHE_BACKWARD };
  enum swathe_status status = SWATHE_OK;

  assert(tile_tokens >= 1);
  work->unit_count = work->run_count = work->spill_count = work->spill_tokens = work->max_keys = 0;
  for (int interior = 0; interior < 2; interior++) {
    for (int64_t s = 0; s < plan->span_count && !status; s++) {
      const struct wire wire = wire_of(plan, s);
      const struct cuts cuts = builder.backward
                                   ? cut_backward(problem, &plan->spans[s], wire, tile_tokens)
                                   : cut_forward(problem, &plan->spans[s], wire, tile_tokens);
      const bool whole = !cuts.head && !cuts.tail;
      const bool edge = whole && (wire.before || wire.after);
      const int64_t middle = cuts.head + cuts.middle;
      if (interior ? !edge : edge)
        status = add_units(&builder, problem, s, cuts.head, middle, cuts.unit, tile_tokens);
      if (interior || status || whole) continue;
      status = add_units(&builder, problem, s, 0, cuts.head, cuts.unit, tile_tokens);
      if (!status)
        status =
            add_units(&builder, problem, s, middle, middle + cuts.tail, cuts.unit, tile_tokens);
    }
    if (!interior) work->edge_units = work->unit_count;
  }
  return status;
}

void sw_work_free(struct sw_work *work)
{
  free(work->units);
  free(work->runs);
  free(work->sources);
  free(work->spills);
  memset(work, 0, sizeof *work);
}
