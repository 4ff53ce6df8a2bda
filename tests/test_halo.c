// test_halo.c: who holds what, and who sends what to whom.
//
// The oracle is a table of every token of the packed row (its document, position, owner and row)
// and the window's definition, applied query by query.  It shares no code and no arithmetic with
// the plan.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "halo.h"

enum { MOST_TOKENS = 60, MOST_RANKS = 9, MOST_DOCUMENTS = 6, MOST_SPANS = 2 * MOST_TOKENS };
enum { MOST_ROWS = 3 * MOST_TOKENS };

// ---- Allocations -------------------------------------------------------------------------------

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define COUNTS_ALLOCATIONS 1
static int64_t allocations;
void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
void *__libc_realloc(void *old, size_t bytes);
void *malloc(size_t bytes)
{
  allocations++;
  return __libc_malloc(bytes);
}
void *calloc(size_t count, size_t bytes)
{
  allocations++;
  return __libc_calloc(count, bytes);
}
void *realloc(void *old, size_t bytes)
{
  allocations++;
  return __libc_realloc(old, bytes);
}
#else
#define COUNTS_ALLOCATIONS 0
static int64_t allocations;
#endif

// ---- A sharding as tables ----------------------------------------------------------------------

struct token {
  int document, position;  // -1: padding
  int owner, row;
};

struct table {
  struct swathe_sharding sharding;
  int64_t starts[MOST_DOCUMENTS + 1], places[MOST_DOCUMENTS + 1];
  int64_t rank_spans[MOST_RANKS + 1], rank_rows[MOST_RANKS];
  struct swathe_span spans[MOST_SPANS];
  int tokens, ranks, documents;             // documents as the oracle counts them: at least 1
  int begin[MOST_DOCUMENTS + 1], length[MOST_DOCUMENTS];
  struct token token[MOST_TOKENS];          // of the packed row
  int rows[MOST_RANKS];
  int held[MOST_RANKS][MOST_ROWS];          // token in each row, -1: padding
};

static uint64_t random_state;

static int below(int bound)
{
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return (int)((random_state >> 20) % (uint64_t)bound);
}

static int chance(int percent) { return below(100) < percent; }

// The next row of the rank holds this token (-1: nothing).
static void hold(struct table *table, int rank, int token)
{
  table->held[rank][table->rows[rank]] = token;
  if (token >= 0) {
    table->token[token].owner = rank;
    table->token[token].row = table->rows[rank];
  }
  table->rows[rank]++;
}

static void hold_chunk(struct table *table, int first, int tokens, int chunks, int chunk, int rank)
{
  for (int t = 0; t < tokens; t++)
    if (chunk * tokens / chunks <= t && t < (chunk + 1) * tokens / chunks)
      hold(table, rank, first + t);
}

static void hold_zigzag(struct table *table, int first, int tokens)
{
  const int chunks = 2 * table->ranks;
  for (int r = 0; r < table->ranks; r++) {
    hold_chunk(table, first, tokens, chunks, r, r);
    hold_chunk(table, first, tokens, chunks, chunks - 1 - r, r);
  }
}

// An empty span says nothing, whatever its numbers; `spare` entries stay free for others.
static int64_t list_empty_span(struct table *table, int64_t total, int spare)
{
  if (total >= MOST_SPANS - spare) return total;
  table->spans[total] = (struct swathe_span){ below(9), below(99), 0, below(99), 0 };
  return total + 1;
}

// Cuts every document at random, deals the pieces out, and places them in random order with free
// rows between them.
static void hold_spans(struct table *table)
{
  struct swathe_span pieces[MOST_SPANS];
  int owners[MOST_SPANS], count = 0;
  for (int d = 0; d < table->documents; d++) {
    int position = 0, owner = below(table->ranks);
    const int cuts = 1 + below(8);
    while (position < table->length[d]) {
      const int tokens = chance(60) ? 1 + below(cuts) : table->length[d];
      const int taken = tokens < table->length[d] - position ? tokens : table->length[d] - position;
      if (chance(70)) owner = below(table->ranks);
      owners[count] = owner;
      pieces[count++] = (struct swathe_span){ d, position, taken, 0, 0 };
      position += taken;
    }
  }
  for (int i = count - 1; i > 0 && chance(90); i--) {  // some stay half sorted
    const int j = below(i + 1), owner = owners[i];
    const struct swathe_span span = pieces[i];
    pieces[i] = pieces[j], owners[i] = owners[j];
    pieces[j] = span, owners[j] = owner;
  }
  const int gaps = chance(50);
  int64_t total = 0;
  for (int r = 0; r < table->ranks; r++) {
    table->rank_spans[r] = total;
    for (int i = 0; i < count; i++) {
      if (owners[i] != r) continue;
      while (gaps && chance(20) && table->rows[r] < MOST_TOKENS) hold(table, r, -1);
      if (chance(10)) total = list_empty_span(table, total, count);
      struct swathe_span *span = &table->spans[total++];
      *span = pieces[i];
      span->row = table->rows[r];
      for (int t = 0; t < span->tokens; t++)
        hold(table, r, table->begin[span->document] + (int)span->position + t);
    }
    if (gaps && chance(30) && table->sharding.rank_rows) hold(table, r, -1);
    if (chance(20)) total = list_empty_span(table, total, count);
    table->rank_rows[r] = table->rows[r];
  }
  table->rank_spans[table->ranks] = total;
}

// Who holds what, from `sharding` and the documents; for spans at random.
static void deal_out(struct table *table)
{
  const enum swathe_layout layout = table->sharding.layout;
  if (layout == SWATHE_CONTIGUOUS)
    for (int r = 0; r < table->ranks; r++) hold_chunk(table, 0, table->tokens, table->ranks, r, r);
  else if (layout == SWATHE_ZIGZAG)
    hold_zigzag(table, 0, table->tokens);
  else if (layout == SWATHE_ZIGZAG_DOCUMENT)
    for (int d = 0; d <= table->documents; d++)
      hold_zigzag(table, table->begin[d],
                  (d < table->documents ? table->begin[d + 1] : table->tokens) - table->begin[d]);
  else
    hold_spans(table);
}

// `lengths` NULL: the whole row is one document.  `paddings` NULL: only after the last document.
static void make_table(struct table *table, enum swathe_layout layout, int ranks, int tokens,
                       int documents, const int *lengths, const int *paddings)
{
  memset(table, 0, sizeof *table);
  memset(table->token, -1, sizeof table->token);
  table->tokens = tokens;
  table->ranks = ranks;
  table->documents = lengths ? documents : 1;
  table->sharding = (struct swathe_sharding){ .layout = layout, .ranks = ranks, .batch = 1 };
  table->sharding.tokens = tokens;
  table->sharding.documents = lengths ? documents : 0;
  if (!lengths) table->length[0] = table->begin[1] = tokens;
  for (int d = 0; lengths && d < documents; d++) {
    table->length[d] = lengths[d];
    table->begin[d + 1] = table->begin[d] + lengths[d] + (paddings ? paddings[d] : 0);
    table->starts[d + 1] = table->starts[d] + lengths[d];
    table->places[d + 1] = table->begin[d + 1];
  }
  if (lengths) table->sharding.document_starts = table->starts;
  if (paddings) table->sharding.document_starts_padded = table->places;
  if (layout == SWATHE_SPANS) {
    table->sharding.spans = table->spans;
    table->sharding.rank_spans = table->rank_spans;
    table->sharding.rank_rows = chance(50) ? table->rank_rows : NULL;
  }
  for (int d = 0; d < table->documents; d++)
    for (int p = 0; p < table->length[d]; p++) {
      table->token[table->begin[d] + p].document = d;
      table->token[table->begin[d] + p].position = p;
    }
  deal_out(table);
}

static void make_random_table(struct table *table)
{
  const int ranks = 1 + below(MOST_RANKS), tokens = below(MOST_TOKENS + 1);
  const int documents = below(MOST_DOCUMENTS + 1);
  int lengths[MOST_DOCUMENTS], paddings[MOST_DOCUMENTS], left = tokens;
  for (int d = 0; d < documents; d++) {
    lengths[d] = chance(20) ? below(2) : below(tokens / 2 + 1);
    paddings[d] = chance(50) ? 0 : below(5);
    if (lengths[d] > left) lengths[d] = left;
    left -= lengths[d];
    if (paddings[d] > left) paddings[d] = left;
    left -= paddings[d];
  }
  make_table(table, (enum swathe_layout)below(4), ranks, tokens, documents,
             documents ? lengths : NULL, chance(50) ? paddings : NULL);
}

// ---- What must be true of a plan ---------------------------------------------------------------

static char now_checking[256];

#define CHECK(condition)                                              \
  do {                                                                \
    if (!(condition)) fail_msg("%s: %s", now_checking, #condition); \
  } while (0)

// As the oracle finds them: rows in order, cut where documents, positions or rows do not go on.
static int list_spans(const struct table *table, int rank, struct swathe_span *spans)
{
  int count = 0;
  for (int row = 0; row < table->rows[rank]; row++) {
    const int t = table->held[rank][row];
    if (t < 0 || table->token[t].document < 0) continue;
    const struct token *token = &table->token[t];
    struct swathe_span *last = count ? &spans[count - 1] : NULL;
    if (last && last->document == token->document &&
        last->position + last->tokens == token->position && last->row + last->tokens == row)
      last->tokens++;
    else
      spans[count++] = (struct swathe_span){ token->document, token->position, 1, row, t };
  }
  return count;
}

static bool sees(const struct swathe_problem *problem, int64_t query, int64_t key)
{
  return (problem->window_left == SWATHE_UNLIMITED || key >= query - problem->window_left) &&
         (problem->window_right == SWATHE_UNLIMITED || key <= query + problem->window_right);
}

static bool span_sees(const struct swathe_problem *problem, const struct swathe_span *span,
                      int64_t key)
{
  for (int64_t query = span->position; query < span->position + span->tokens; query++)
    if (sees(problem, query, key)) return true;
  return false;
}

static const struct token *token_at(const struct table *table, int64_t document, int64_t position)
{
  return &table->token[table->begin[document] + position];
}

// Changes of owner between a span and a key outside it.
static int owner_changes(const struct table *table, const struct swathe_span *span, int64_t key)
{
  const int step = key < span->position ? -1 : 1;
  int changes = 0;
  int64_t p = step < 0 ? span->position : span->position + span->tokens - 1;
  for (; p != key; p += step)
    changes += token_at(table, span->document, p)->owner !=
               token_at(table, span->document, p + step)->owner;
  return changes;
}

static void check_spans_and_gaps(const struct table *table, const struct sw_halo_plan *plan)
{
  struct swathe_span spans[MOST_SPANS], public_spans[MOST_SPANS];
  const int count = list_spans(table, plan->rank, spans);
  int64_t public_count = -1, public_rows = -1;
  CHECK(plan->rows == table->rows[plan->rank]);
  CHECK(plan->span_count == count);
  CHECK(!memcmp(plan->spans, spans, (size_t)count * sizeof *spans) || !count);
  CHECK(!swathe_sharding_spans(&table->sharding, plan->rank, public_spans, MOST_SPANS,
                               &public_count));
  CHECK(public_count == count &&
        (!count || !memcmp(public_spans, spans, (size_t)count * sizeof *spans)));
  CHECK(!swathe_sharding_rows(&table->sharding, plan->rank, &public_rows));
  CHECK(public_rows == plan->rows);

  bool gap[MOST_ROWS] = { false };
  int64_t after = -1;
  for (int64_t g = 0; g < plan->gap_count; g++) {
    CHECK(plan->gaps[g].rows > 0 && plan->gaps[g].row > after);
    after = plan->gaps[g].row + plan->gaps[g].rows;
    CHECK(after <= plan->rows);
    for (int64_t row = plan->gaps[g].row; row < after; row++) gap[row] = true;
  }
  for (int row = 0; row < plan->rows; row++) {
    const int t = table->held[plan->rank][row];
    CHECK(gap[row] == (t < 0 || table->token[t].document < 0));
  }
}

struct want {
  int hops;  // -1: not needed from elsewhere
  int slot;  // where it arrives, -1 until it does
};

// Every key each span sees outside itself is listed once, where it is; notes what must arrive.
static void check_needs(const struct table *table, const struct swathe_problem *problem,
                        const struct sw_halo_plan *plan, struct want wants[MOST_TOKENS])
{
  int64_t own_tokens = 0, next = 0;
  CHECK(plan->need_begin[0] == 0);
  for (int s = 0; s < plan->span_count; s++) {
    const struct swathe_span *span = &plan->spans[s];
    int64_t offset = 0;  // within needs[next]
    for (int p = 0; p < table->length[span->document]; p++) {
      const bool inside = span->position <= p && p < span->position + span->tokens;
      if (inside || !span_sees(problem, span, p)) continue;
      CHECK(next < plan->need_begin[s + 1]);
      const struct sw_halo_segment *need = &plan->needs[next];
      const struct token *token = token_at(table, span->document, p);
      CHECK(need->document == span->document && need->position + offset == p && need->tokens > 0);
      CHECK(need->owner == token->owner && need->reader == plan->rank && need->span == s);
      if (token->owner == plan->rank) {
        CHECK(need->slot == -1 && need->row + offset == token->row && need->hops == 0);
        own_tokens++;
      } else {
        const int t = table->begin[span->document] + p;
        const int hops = owner_changes(table, span, p);
        CHECK(need->slot >= 0 && need->row == -1 && need->hops == hops);
        CHECK(wants[t].slot == -1 || wants[t].slot == need->slot + offset);
        wants[t].slot = (int)(need->slot + offset);
        if (wants[t].hops < 0 || hops < wants[t].hops) wants[t].hops = hops;
      }
      if (++offset == need->tokens) offset = 0, next++;
    }
    CHECK(offset == 0 && next == plan->need_begin[s + 1]);
  }
  CHECK(next == plan->need_count && own_tokens == plan->own_tokens);
}

// Messages tile the buffer, peers and positions ascend.
static void check_messages(const struct sw_halo_message *messages, int64_t message_count,
                           const struct sw_halo_segment *segments, int64_t segment_count,
                           int64_t tokens, int rank)
{
  int64_t slot = 0, segment = 0;
  for (int64_t m = 0; m < message_count; m++) {
    CHECK(messages[m].peer != rank && (!m || messages[m].peer > messages[m - 1].peer));
    CHECK(messages[m].slot == slot && messages[m].tokens > 0);
    CHECK(messages[m].segment_begin == segment && messages[m].segment_end > segment);
    for (; segment < messages[m].segment_end; segment++) {
      CHECK(segments[segment].slot == slot && segments[segment].tokens > 0);
      slot += segments[segment].tokens;
    }
    CHECK(slot == messages[m].slot + messages[m].tokens);
  }
  CHECK(slot == tokens && segment == segment_count);
}

// What is wanted arrives once, from its owner, and nothing else does.
static void check_receives(const struct table *table, const struct sw_halo_plan *plan,
                           const struct want wants[MOST_TOKENS])
{
  int wanted = 0, largest = 0;
  bool arrived[MOST_TOKENS] = { false };
  check_messages(plan->receive_messages, plan->receive_message_count, plan->receives,
                 plan->receive_count, plan->receive_tokens, plan->rank);
  for (int64_t m = 0; m < plan->receive_message_count; m++)
    for (int64_t i = plan->receive_messages[m].segment_begin;
         i < plan->receive_messages[m].segment_end; i++) {
      const struct sw_halo_segment *segment = &plan->receives[i];
      int hops = INT32_MAX;
      CHECK(segment->owner == plan->receive_messages[m].peer && segment->reader == plan->rank);
      for (int k = 0; k < segment->tokens; k++) {
        const int t = table->begin[segment->document] + (int)segment->position + k;
        CHECK(segment->position + k < table->length[segment->document]);
        CHECK(table->token[t].owner == segment->owner && !arrived[t]);
        CHECK(wants[t].hops > 0 && wants[t].slot == segment->slot + k);
        arrived[t] = true;
        if (wants[t].hops < hops) hops = wants[t].hops;
      }
      CHECK(segment->hops == hops);
      if (hops > largest) largest = hops;
    }
  for (int t = 0; t < table->tokens; t++) wanted += wants[t].hops >= 0;
  CHECK(wanted == plan->receive_tokens && largest == plan->hops);
}

// One segment as both ends must name it; slots count from the message's own.
struct wire {
  int64_t owner, reader, hops, document, position, tokens, slot;
};

static int list_wire(const struct sw_halo_message *messages, int64_t count,
                     const struct sw_halo_segment *segments, struct wire *wire)
{
  int listed = 0;
  for (int64_t m = 0; m < count; m++)
    for (int64_t i = messages[m].segment_begin; i < messages[m].segment_end; i++) {
      const struct sw_halo_segment *s = &segments[i];
      wire[listed++] = (struct wire){ s->owner,    s->reader, s->hops, s->document,
                                      s->position, s->tokens, s->slot - messages[m].slot };
    }
  return listed;
}

static void check_sends(const struct table *table, const struct sw_halo_plan *plan)
{
  check_messages(plan->send_messages, plan->send_message_count, plan->sends, plan->send_count,
                 plan->send_tokens, plan->rank);
  for (int64_t m = 0; m < plan->send_message_count; m++)
    for (int64_t i = plan->send_messages[m].segment_begin; i < plan->send_messages[m].segment_end;
         i++) {
      const struct sw_halo_segment *send = &plan->sends[i];
      CHECK(send->reader == plan->send_messages[m].peer && send->owner == plan->rank);
      for (int64_t k = 0; k < send->tokens; k++)
        CHECK(token_at(table, send->document, send->position + k)->row == send->row + k);
      const struct sw_halo_segment *before = send - (i > plan->send_messages[m].segment_begin);
      CHECK(before->document != send->document ||  // what can be one segment is one
            before->position + before->tokens != send->position ||
            before->row + before->tokens != send->row);
    }
}

static void same_wire(const struct wire *sends, int send_count, const struct wire *receives,
                      int receive_count, int ranks)
{
  CHECK(send_count == receive_count);
  // Sends are listed owner by owner, receives reader by reader: compare pair by pair.
  for (int owner = 0; owner < ranks; owner++)
    for (int reader = 0, r = 0; reader < ranks; reader++, r = 0)
      for (int s = 0; s < send_count; s++) {
        if (sends[s].owner != owner || sends[s].reader != reader) continue;
        while (r < receive_count && (receives[r].owner != owner || receives[r].reader != reader))
          r++;
        CHECK(r < receive_count);
        CHECK(!memcmp(&sends[s], &receives[r], sizeof *sends));
        r++;
      }
}

struct visit {
  const struct wire *sends;
  int count, seen;
};

static void check_visit(void *arg, const struct swathe_message *message)
{
  struct visit *visit = arg;
  CHECK(visit->seen < visit->count);
  const struct wire *send = &visit->sends[visit->seen++];
  CHECK(message->from == send->owner && message->to == send->reader && message->hops == send->hops);
  CHECK(message->document == send->document && message->position == send->position &&
        message->tokens == send->tokens);
  CHECK(message->hops >= 1);
}

static void check_all_ranks(struct sw_halo_planner *planner, const struct table *table,
                            const struct swathe_problem *problem)
{
  static struct wire sends[MOST_RANKS * MOST_TOKENS], receives[MOST_RANKS * MOST_TOKENS];
  struct swathe_traffic traffic[MOST_RANKS];
  int send_count = 0, receive_count = 0;
  for (int r = 0; r < table->ranks; r++) {
    struct want wants[MOST_TOKENS];
    const struct sw_halo_plan *plan = NULL;
    for (int t = 0; t < MOST_TOKENS; t++) wants[t] = (struct want){ -1, -1 };
    if (sw_halo_plan(planner, problem, &table->sharding, r, &plan))
      fail_msg("%s: %s", now_checking, swathe_error());
    check_spans_and_gaps(table, plan);
    check_needs(table, problem, plan, wants);
    check_receives(table, plan, wants);
    check_sends(table, plan);
    send_count += list_wire(plan->send_messages, plan->send_message_count, plan->sends,
                            sends + send_count);
    receive_count += list_wire(plan->receive_messages, plan->receive_message_count, plan->receives,
                               receives + receive_count);
    traffic[r] = (struct swathe_traffic){ .halo_tokens = plan->receive_tokens, .rows = plan->rows,
                                          .hops = plan->hops, .own_tokens = plan->own_tokens,
                                          .send_tokens = plan->send_tokens };
  }
  same_wire(sends, send_count, receives, receive_count, table->ranks);

  struct swathe_traffic public_traffic[MOST_RANKS];
  struct visit visit = { sends, send_count, 0 };
  CHECK(!swathe_plan(problem, &table->sharding, check_visit, &visit, public_traffic));
  CHECK(visit.seen == send_count);
  const int64_t token_bytes = (int64_t)problem->kv_heads *
                              (problem->head_dim_qk + problem->head_dim_v) *
                              (problem->dtype == SWATHE_BF16 ? 2 : 4) * table->sharding.batch;
  for (int r = 0; r < table->ranks; r++) {
    const struct swathe_traffic *got = &public_traffic[r];
    CHECK(got->rows == traffic[r].rows && got->hops == traffic[r].hops);
    CHECK(got->halo_tokens == traffic[r].halo_tokens && got->own_tokens == traffic[r].own_tokens);
    CHECK(got->receive_bytes == traffic[r].halo_tokens * token_bytes);
    CHECK(got->send_bytes == traffic[r].send_tokens * token_bytes);
  }
}

// ---- Tests -------------------------------------------------------------------------------------

static struct swathe_problem problem_of(int64_t window_left, int64_t window_right)
{
  struct swathe_problem problem;
  swathe_problem_init(&problem);
  problem.window_left = window_left;
  problem.window_right = window_right;
  return problem;
}

static int64_t random_window(void)
{
  switch (below(6)) {
  case 0: return 0;
  case 1: return SWATHE_UNLIMITED;
  case 2: return below(71);
  default: return below(12);
  }
}

static void random_shardings(void **state)
{
  enum { CASES = 100000 };
  static struct table table;
  struct sw_halo_planner *planner = NULL;
  (void)state;
  assert_int_equal(sw_halo_planner_create(&planner), SWATHE_OK);
  for (int i = 0; i < CASES; i++) {
    random_state = 0x9E3779B97F4A7C15u * (uint64_t)(i + 1);
    make_random_table(&table);
    struct swathe_problem problem = problem_of(random_window(), chance(50) ? 0 : random_window());
    problem.kv_heads = problem.q_heads = 1 + below(3);
    problem.head_dim_v = 1 + below(8);
    problem.dtype = chance(50) ? SWATHE_F32 : SWATHE_BF16;
    table.sharding.batch = 1 + below(3);
    snprintf(now_checking, sizeof now_checking, "case %d: %s, %d ranks, %d tokens, %d documents, "
             "window %lld, %lld", i, swathe_layout_name(table.sharding.layout), table.ranks,
             table.tokens, (int)table.sharding.documents, (long long)problem.window_left,
             (long long)problem.window_right);
    check_all_ranks(planner, &table, &problem);
  }
  sw_halo_planner_destroy(planner);
}

// Shapes from bug reports: each must pass every check above with every window.
static void reported_shapes(void **state)
{
  static const struct shape {
    const char *name;
    enum swathe_layout layout;
    int ranks, tokens, documents, lengths[9];
  } shapes[] = {
    { "documents shorter than 2P", SWATHE_ZIGZAG_DOCUMENT, 2, 5, 3, { 2, 2, 1 } },
    { "documents shorter than 2P", SWATHE_ZIGZAG_DOCUMENT, 4, 5, 3, { 2, 2, 1 } },
    { "documents of one token", SWATHE_ZIGZAG_DOCUMENT, 4, 6, 6, { 1, 1, 1, 1, 1, 1 } },
    { "documents of one token, whole row", SWATHE_ZIGZAG, 4, 6, 6, { 1, 1, 1, 1, 1, 1 } },
    { "row not divisible", SWATHE_ZIGZAG, 4, 7, 1, { 7 } },
    { "row not divisible", SWATHE_CONTIGUOUS, 3, 10, 1, { 10 } },
    { "fewer tokens than ranks", SWATHE_CONTIGUOUS, 3, 2, 1, { 2 } },
    { "fewer tokens than ranks", SWATHE_ZIGZAG, 3, 2, 1, { 2 } },
    { "share shorter than the halo", SWATHE_CONTIGUOUS, 4, 5, 1, { 5 } },
    { "first local piece of one row", SWATHE_CONTIGUOUS, 4, 16, 3, { 3, 6, 7 } },
    { "document ends on a rank's edge", SWATHE_CONTIGUOUS, 4, 16, 2, { 8, 8 } },
    { "trailing padding", SWATHE_CONTIGUOUS, 4, 32, 1, { 20 } },
    { "trailing padding", SWATHE_ZIGZAG_DOCUMENT, 4, 32, 1, { 20 } },
    { "only padding", SWATHE_ZIGZAG, 4, 32, 2, { 0, 0 } },
    { "no tokens", SWATHE_CONTIGUOUS, 4, 0, 1, { 0 } },
  };
  static struct table table;
  struct sw_halo_planner *planner = NULL;
  (void)state;
  assert_int_equal(sw_halo_planner_create(&planner), SWATHE_OK);
  for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
    for (int left = 0; left <= 33; left++)
      for (int right = 0; right <= 8; right += 4) {
        const struct shape *shape = &shapes[i];
        const struct swathe_problem problem =
            problem_of(left < 33 ? left : SWATHE_UNLIMITED, right);
        make_table(&table, shape->layout, shape->ranks, shape->tokens, shape->documents,
                   shape->lengths, NULL);
        snprintf(now_checking, sizeof now_checking, "%s, window %d, %d", shape->name, left, right);
        check_all_ranks(planner, &table, &problem);
      }
  sw_halo_planner_destroy(planner);
}

// No token is lost: shares add up, also where they cannot be even.
static void uneven_shares(void **state)
{
  static const struct {
    int64_t tokens;
    int32_t ranks;
    int64_t first, last;  // rows of the first and the last rank, contiguous
  } rows[] = {
    { 10, 3, 3, 4 },       { 2, 3, 0, 1 },
    { 2999, 4, 749, 750 }, { 0, 5, 0, 0 },
    { 5, 4, 1, 2 },        { (INT64_C(1) << 62) - 1, 3, 1537228672809129301, 1537228672809129301 }
  };
  (void)state;
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
    for (int layout = SWATHE_CONTIGUOUS; layout < SWATHE_SPANS; layout++) {
      const struct swathe_sharding sharding = { .layout = (enum swathe_layout)layout, .batch = 1,
                                                .ranks = rows[i].ranks, .tokens = rows[i].tokens };
      int64_t sum = 0, rank_rows = 0;
      for (int32_t r = 0; r < sharding.ranks; r++) {
        assert_int_equal(swathe_sharding_rows(&sharding, r, &rank_rows), SWATHE_OK);
        if (layout == SWATHE_CONTIGUOUS && r == 0) assert_int_equal(rank_rows, rows[i].first);
        if (layout == SWATHE_CONTIGUOUS && r == sharding.ranks - 1)
          assert_int_equal(rank_rows, rows[i].last);
        sum += rank_rows;
      }
      assert_int_equal(sum, rows[i].tokens);
    }
}

// With even contiguous shares of `share` tokens: ceil(window_left / share) hops, but never past the
// document's start.
static void hops_of_even_shares(void **state)
{
  static const struct {
    int64_t window, share;  // as model cards print it, own key included
    int32_t ranks, hops;
  } rows[] = { { 8, 8, 8, 1 },      { 9, 8, 8, 1 },      { 10, 8, 8, 2 },    { 17, 8, 8, 2 },
               { 18, 8, 8, 3 },     { 64, 8, 8, 7 },     { 65, 8, 8, 7 },    { 1, 8, 8, 0 },
               { 1024, 512, 8, 2 }, { 1024, 256, 8, 4 }, { 1025, 512, 8, 2 } };
  struct swathe_traffic traffic[8];
  (void)state;
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    const struct swathe_problem problem = problem_of(rows[i].window - 1, 0);
    const struct swathe_sharding sharding = { .layout = SWATHE_CONTIGUOUS, .ranks = rows[i].ranks,
                                              .batch = 1, .tokens = rows[i].share * rows[i].ranks };
    assert_int_equal(swathe_plan(&problem, &sharding, NULL, NULL, traffic), SWATHE_OK);
    for (int32_t r = 0; r < rows[i].ranks; r++) {
      const int32_t hops = rows[i].hops < r ? rows[i].hops : r;
      const int64_t before = r * rows[i].share;
      assert_int_equal(traffic[r].hops, hops);
      assert_int_equal(traffic[r].peers, hops);
      assert_int_equal(traffic[r].halo_tokens,
                       before < rows[i].window - 1 ? before : rows[i].window - 1);
    }
  }
}

// The halo of gpt-oss, and what the other strategies would move, from their formulas.
static void traffic_of_a_known_shape(void **state)
{
  struct swathe_problem problem = problem_of(127, 0);
  struct swathe_traffic traffic[8];
  struct swathe_sharding sharding = { .layout = SWATHE_CONTIGUOUS, .ranks = 8, .batch = 1,
                                      .tokens = 32768 };
  (void)state;
  problem.q_heads = 64, problem.kv_heads = 8, problem.dtype = SWATHE_BF16;
  assert_int_equal(swathe_plan(&problem, &sharding, NULL, NULL, traffic), SWATHE_OK);
  assert_int_equal(traffic[0].halo_tokens, 0);
  assert_int_equal(traffic[7].send_tokens, 0);
  for (int r = 1; r < 8; r++) {
    assert_int_equal(traffic[r].receive_bytes, 127 * 8 * (64 + 64) * 2);
    assert_int_equal(traffic[r].all_gather_bytes, 7 * 4096 * 2048);
    assert_int_equal(traffic[r].ring_all_bytes, 7 * 4096 * 2048);
    assert_int_equal(traffic[r].ring_bytes, 4096 * 2048);
    // (P - 1) / P of q, k, v and out: 7/8 * 4096 rows * (64 + 8 + 8 + 64) heads * 64 * 2 bytes
    assert_int_equal(traffic[r].a2a_bytes, 4096 * 7 / 8 * 144 * 64 * 2);
  }
  sharding.layout = SWATHE_ZIGZAG;
  sharding.batch = 3;
  assert_int_equal(swathe_plan(&problem, &sharding, NULL, NULL, traffic), SWATHE_OK);
  assert_int_equal(traffic[0].receive_bytes, 3 * 127 * 2048);
  assert_int_equal(traffic[3].receive_bytes, 3 * 2 * 127 * 2048);
  assert_int_equal(traffic[7].receive_bytes, 3 * 127 * 2048);  // its two chunks are neighbours
  assert_int_equal(traffic[7].spans, 1);
  assert_int_equal(traffic[3].all_gather_bytes, 3 * 7 * 4096 * 2048);
  problem.kv_heads = 4;
  assert_int_equal(swathe_plan(&problem, &sharding, NULL, NULL, traffic), SWATHE_OK);
  assert_int_equal(traffic[3].a2a_bytes, -1);
}

// What a2a and all-gather move adds up over uneven ranks: every row's heads change hands P - 1
// times out of P.
static void uneven_traffic_adds_up(void **state)
{
  struct swathe_problem problem = problem_of(3, 0);
  struct swathe_traffic traffic[4];
  const struct swathe_sharding sharding = { .layout = SWATHE_CONTIGUOUS, .ranks = 4, .batch = 1,
                                            .tokens = 11 };
  int64_t all_gather = 0, a2a = 0;
  (void)state;
  problem.q_heads = 8, problem.kv_heads = 4, problem.head_dim_qk = 5, problem.head_dim_v = 3;
  assert_int_equal(swathe_plan(&problem, &sharding, NULL, NULL, traffic), SWATHE_OK);
  for (int r = 0; r < 4; r++)
    all_gather += traffic[r].all_gather_bytes, a2a += traffic[r].a2a_bytes;
  assert_int_equal(all_gather, 3 * 11 * 4 * (5 + 3) * 4);
  assert_int_equal(a2a, 3 * 11 * (8 * 5 + 4 * 5 + 4 * 3 + 8 * 3) / 4 * 4);
}

// A zigzag rank whose two spans see the same remote key gets it once.
static void shared_keys_travel_once(void **state)
{
  const struct swathe_problem problem = problem_of(6, 0);
  const struct swathe_sharding sharding = { .layout = SWATHE_ZIGZAG, .ranks = 2, .batch = 1,
                                            .tokens = 8 };
  struct sw_halo_planner *planner = NULL;
  const struct sw_halo_plan *plan = NULL;
  (void)state;
  // Rank 1 holds [2, 6), one span; rank 0 holds [0, 2) and [6, 8).
  assert_int_equal(sw_halo_planner_create(&planner), SWATHE_OK);
  assert_int_equal(sw_halo_plan(planner, &problem, &sharding, 0, &plan), SWATHE_OK);
  assert_int_equal(plan->span_count, 2);
  assert_int_equal(plan->receive_tokens, 4);
  assert_int_equal(plan->own_tokens, 2);

  const struct swathe_problem both = problem_of(6, 6);
  assert_int_equal(sw_halo_plan(planner, &both, &sharding, 0, &plan), SWATHE_OK);
  assert_int_equal(plan->receive_tokens, 4);  // both spans see all four
  assert_int_equal(plan->receive_count, 1);
  assert_int_equal(plan->need_count, 4);
  assert_int_equal(plan->needs[0].slot, plan->needs[3].slot);
  sw_halo_planner_destroy(planner);
}

// Near 2^62 tokens nothing overflows; byte counts that leave 64 bits stay at the largest number.
static void enormous_rows(void **state)
{
  const int64_t tokens = (INT64_C(1) << 62) - 3;
  const int64_t starts[] = { 0, tokens / 2, tokens / 2, tokens - 1 };
  const int64_t windows[] = {
    0, 1000, INT32_MAX, INT64_C(1) << 61, INT64_MAX - 1, SWATHE_UNLIMITED
  };
  struct sw_halo_planner *planner = NULL;
  const struct sw_halo_plan *plan = NULL;
  (void)state;
  assert_int_equal(sw_halo_planner_create(&planner), SWATHE_OK);
  for (int layout = SWATHE_CONTIGUOUS; layout < SWATHE_SPANS; layout++)
    for (size_t w = 0; w < 36; w++) {
      const struct swathe_problem problem = problem_of(windows[w / 6], windows[w % 6]);
      const struct swathe_sharding sharding = {
        .layout = (enum swathe_layout)layout, .ranks = 7, .batch = 1, .tokens = tokens,
        .documents = 3, .document_starts = starts
      };
      int64_t received = 0, sent = 0, rows = 0;
      for (int r = 0; r < 7; r++) {
        assert_int_equal(sw_halo_plan(planner, &problem, &sharding, r, &plan), SWATHE_OK);
        assert_in_range(plan->receive_tokens, 0, tokens - plan->rows);
        assert_true(plan->send_tokens >= 0);
        rows += plan->rows;
        received += plan->receive_tokens / 8;  // eighths: the sums would leave 64 bits
        sent += plan->send_tokens / 8;
      }
      assert_int_equal(rows, tokens);
      assert_in_range(received - sent + 7, 0, 14);
    }
  sw_halo_planner_destroy(planner);

  const struct swathe_problem problem = problem_of(SWATHE_UNLIMITED, 0);
  const struct swathe_sharding sharding = { .layout = SWATHE_CONTIGUOUS, .ranks = 7, .batch = 1,
                                            .tokens = tokens };
  struct swathe_traffic traffic[7];
  assert_int_equal(swathe_plan(&problem, &sharding, NULL, NULL, traffic), SWATHE_OK);
  assert_int_equal(traffic[6].halo_tokens, tokens - traffic[6].rows);
  assert_int_equal(traffic[6].receive_bytes, INT64_MAX);
  assert_int_equal(traffic[6].all_gather_bytes, INT64_MAX);
  assert_int_equal(traffic[6].ring_bytes, INT64_MAX);
}

// ---- Refusals ----------------------------------------------------------------------------------

static struct swathe_sharding good_spans(void)
{
  static const int64_t starts[] = { 0, 6, 10 }, rank_spans[] = { 0, 2, 3 }, rank_rows[] = { 9, 4 };
  static const struct swathe_span spans[] = {
    { 0, 0, 4, 0, 0 }, { 1, 0, 4, 5, 6 }, { 0, 4, 2, 1, 4 }
  };
  return (struct swathe_sharding){ .layout = SWATHE_SPANS, .ranks = 2, .batch = 1, .tokens = 12,
                                   .documents = 2, .document_starts = starts, .spans = spans,
                                   .rank_spans = rank_spans, .rank_rows = rank_rows };
}

// Each row changes one thing in a sharding that is good.
static void refusals(void **state)
{
  enum field { NOTHING, LAYOUT, RANKS, BATCH, TOKENS, DOCUMENTS, STARTS, PADDED, RANK_SPANS, ROWS,
               SPANS, SPAN0, SPAN1, SPAN2 };
  static const struct row {
    enum field field;
    int64_t value[4];  // a scalar, three or four numbers, or document, position, tokens, row
    const char *words;
  } rows[] = {
    { NOTHING, { 0 }, NULL },
    { LAYOUT, { 9 }, "layout 9" },
    { RANKS, { 0 }, "0 ranks" },
    { RANKS, { -4 }, "-4 ranks" },
    { BATCH, { 0 }, "batch of 0" },
    { TOKENS, { -1 }, "-1 tokens" },
    { TOKENS, { 9 }, "ends at 10, past the row's 9 tokens" },
    { DOCUMENTS, { -1 }, "-1 documents" },
    { STARTS, { 1, 6, 10 }, "document_starts[0] is 1" },
    { STARTS, { 0, 11, 10 }, "descends from 11 to 10 at document 1" },
    { STARTS, { 0, 6, 13 }, "ends at 13, past" },
    { PADDED, { 0, 5, 12 }, "document 0 has 6 tokens, but its padded place has 5" },
    { PADDED, { 2, 8, 12 }, "document_starts_padded[0] is 2" },
    { PADDED, { 0, 8, 13 }, "document_starts_padded ends at 13" },
    { PADDED, { 0, 8, 12 }, NULL },
    { RANK_SPANS, { 1, 2, 3 }, "rank_spans[0] is 1" },
    { RANK_SPANS, { 0, 3, 2 }, "descends from 3 to 2 at rank 1" },
    { ROWS, { 8, 4 }, "rank 0, span 1: 4 tokens from row 5 leave the rank's 8 rows" },
    { ROWS, { 9, -1 }, "rank_rows of rank 1 is -1" },
    { SPANS, { 0 }, "spans is NULL" },
    { SPAN0, { 0, 0, -2, 0 }, "rank 0, span 0: -2 tokens" },
    { SPAN0, { 2, 0, 4, 0 }, "rank 0, span 0: document 2 is none of the 2" },
    { SPAN0, { -1, 0, 4, 0 }, "document -1" },
    { SPAN0, { 0, -1, 4, 0 }, "4 tokens from position -1 leave document 0" },
    { SPAN0, { 0, 3, 4, 0 }, "4 tokens from position 3 leave document 0 of 6 tokens" },
    { SPAN0, { 0, 0, INT64_MAX, 0 }, "leave document 0" },
    { SPAN0, { 0, INT64_MAX, 4, 0 }, "leave document 0" },
    { SPAN0, { 0, 0, 4, -1 }, "begins at row -1" },
    { SPAN0,
      { 0, 0, 5, 0 },
      "document 0: position 4 is held twice, by rank 0, span 0 and by rank 1, span 0" },
    { SPAN0, { 0, 0, 3, 0 }, "document 0: positions [3, 4) are held by no rank" },
    { SPAN0, { 0, 1, 3, 0 }, "document 0: positions [0, 1) are held by no rank" },
    { SPAN0, { 0, 0, 0, 0 }, "positions [0, 4) are held by no rank" },
    { SPAN1, { 1, 0, 4, 3 }, "rank 0, span 1: begins at row 3, but the rows before 4" },
    { SPAN1, { 1, 0, 4, INT64_MAX }, "leave the rank's 9 rows" },
    { SPAN1, { 1, 0, 3, 5 }, "document 1: positions [3, 4) are held by no rank" },
    { SPAN1, { 0, 0, 4, 5 }, "position 0 is held twice, by rank 0, span 0 and by rank 0, span 1" },
    { SPAN2, { 0, 4, 2, 3 }, "rank 1, span 0: 2 tokens from row 3 leave the rank's 4 rows" },
    { SPAN2, { 0, 5, 1, 0 }, "document 0: positions [4, 5) are held by no rank" },
  };
  const struct swathe_problem problem = problem_of(3, 0);
  (void)state;
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    const struct row *row = &rows[i];
    struct swathe_sharding sharding = good_spans();
    struct swathe_span spans[3];
    memcpy(spans, sharding.spans, sizeof spans);
    sharding.spans = row->field == SPANS ? NULL : spans;
    switch (row->field) {
    case LAYOUT: sharding.layout = (enum swathe_layout)row->value[0]; break;
    case RANKS: sharding.ranks = (int32_t)row->value[0]; break;
    case BATCH: sharding.batch = (int32_t)row->value[0]; break;
    case TOKENS: sharding.tokens = row->value[0]; break;
    case DOCUMENTS: sharding.documents = row->value[0]; break;
    case STARTS: sharding.document_starts = row->value; break;
    case PADDED: sharding.document_starts_padded = row->value; break;
    case RANK_SPANS: sharding.rank_spans = row->value; break;
    case ROWS: sharding.rank_rows = row->value; break;
    case SPAN0: case SPAN1: case SPAN2:
      spans[row->field - SPAN0] =
          (struct swathe_span){ row->value[0], row->value[1], row->value[2], row->value[3], 0 };
      break;
    default: break;
    }
    int64_t count = -7;
    struct sw_halo_planner *planner = NULL;
    const struct sw_halo_plan *plan = NULL;
    assert_int_equal(sw_halo_planner_create(&planner), SWATHE_OK);
    const enum swathe_status want = row->words ? SWATHE_BAD_SHARDING : SWATHE_OK;
    const enum swathe_status got[] = { swathe_plan(&problem, &sharding, NULL, NULL, NULL),
                                       swathe_sharding_rows(&sharding, 0, &count),
                                       sw_halo_plan(planner, &problem, &sharding, 1, &plan) };
    for (int k = 0; k < 3; k++)
      if (got[k] != want || (row->words && !strstr(swathe_error(), row->words)))
        fail_msg("row %zu, call %d: status %d, wanted '%s', got '%s'", i, k, (int)got[k],
                 row->words ? row->words : "", swathe_error());
    assert_true(row->words ? count == -7 && !plan : count == 9);
    sw_halo_planner_destroy(planner);
  }
}

static void refusals_of_pointers_and_ranks(void **state)
{
  const struct swathe_problem problem = problem_of(3, 0);
  struct swathe_problem backwards = problem;
  struct swathe_sharding sharding = good_spans();
  int64_t rows = 0;
  (void)state;
  assert_int_equal(swathe_sharding_rows(&sharding, 2, &rows), SWATHE_BAD_USE);
  assert_int_equal(swathe_sharding_rows(&sharding, -1, &rows), SWATHE_BAD_USE);
  backwards.window_left = -1;
  assert_int_equal(swathe_plan(&backwards, &sharding, NULL, NULL, NULL), SWATHE_BAD_PROBLEM);
  sharding.rank_spans = NULL;
  assert_int_equal(swathe_plan(&problem, &sharding, NULL, NULL, NULL), SWATHE_BAD_SHARDING);
  sharding = good_spans();
  sharding.document_starts = NULL;
  assert_int_equal(swathe_plan(&problem, &sharding, NULL, NULL, NULL), SWATHE_BAD_SHARDING);
}

// No more spans are written than there is room for, and the count says how many there are.
static void spans_within_capacity(void **state)
{
  const struct swathe_sharding sharding = { .layout = SWATHE_ZIGZAG, .ranks = 2, .batch = 1,
                                            .tokens = 8 };
  struct swathe_span spans[2] = { { -1, -1, -1, -1, -1 }, { -1, -1, -1, -1, -1 } };
  int64_t count = 0;
  (void)state;
  assert_int_equal(swathe_sharding_spans(&sharding, 0, spans, 1, &count), SWATHE_OK);
  assert_int_equal(count, 2);
  assert_int_equal(spans[0].tokens, 2);
  assert_int_equal(spans[1].tokens, -1);
  assert_int_equal(swathe_sharding_spans(&sharding, 0, NULL, 0, &count), SWATHE_OK);
  assert_int_equal(count, 2);
}

// After a first plan, plans of the same shapes allocate nothing.
static void plans_allocate_nothing(void **state)
{
  static struct table tables[4];
  struct sw_halo_planner *planner = NULL;
  const struct sw_halo_plan *plan = NULL;
  const struct swathe_problem problem = problem_of(20, 5);
  const int lengths[] = { 20, 0, 11, 25 };
  (void)state;
  if (!COUNTS_ALLOCATIONS) skip();
  random_state = 7;
  for (int layout = 0; layout < 4; layout++)
    make_table(&tables[layout], (enum swathe_layout)layout, 8, 60, 4, lengths, NULL);
  assert_int_equal(sw_halo_planner_create(&planner), SWATHE_OK);
  for (int round = 0; round < 2; round++) {
    const int64_t before = allocations;
    for (int layout = 0; layout < 4; layout++)
      for (int r = 0; r < 8; r++)
        assert_int_equal(sw_halo_plan(planner, &problem, &tables[layout].sharding, r, &plan),
                         SWATHE_OK);
    assert_true(round == 0 ? allocations > before : allocations == before);
  }
  sw_halo_planner_destroy(planner);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(random_shardings),
    cmocka_unit_test(reported_shapes),
    cmocka_unit_test(uneven_shares),
    cmocka_unit_test(hops_of_even_shares),
    cmocka_unit_test(traffic_of_a_known_shape),
    cmocka_unit_test(uneven_traffic_adds_up),
    cmocka_unit_test(shared_keys_travel_once),
    cmocka_unit_test(enormous_rows),
    cmocka_unit_test(refusals),
    cmocka_unit_test(refusals_of_pointers_and_ranks),
    cmocka_unit_test(spans_within_capacity),
    cmocka_unit_test(plans_allocate_nothing),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
