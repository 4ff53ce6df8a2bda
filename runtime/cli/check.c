// check.c: a run beside the reference.
//
//   choose rows -> out, lse, delta of queries -> dq of the chosen -> dk, dv of the chosen -> dsink
//
// A key's gradient needs lse and delta of every query that sees it.  With a narrow window these
// come from the reference too; where that would take too long they are the run's own, and the
// report says so.  In 16 bits delta is always made of the run's own out, which is checked beside
// it: backward is given the rounded out, and that rounding is forward's error, not its own.
#include "check.h"

#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

enum {
  EVERYTHING_TOKENS = 4096,  // sequences up to this long are checked whole, batch included
  RANK_SAMPLE = 256,         // tokens of a rank that are checked at least, of longer ones
  LEAST_CLUSTER = 16,        // consecutive tokens, so that reference work can share what it reads
  MOST_CLUSTER = 32,
};

// Multiply-adds of the reference that count as affordable beside the sample itself: a minute of one
// core at the pace of an ordinary one.
static const double affordable_work = 60 * 1.5e9;
// Above this the user is told that it takes a while.
static const double noticeable_work = 10 * 1.5e9;

enum mark {
  CHOSEN = 1,   // compared
  NEEDED = 2,   // lse and delta by the reference
  OWN = 4,      // lse and delta of the run itself
  EVERY = 8,    // every row there is
};

struct comparison {
  struct cli_check *check;
  const struct swathe_problem *problem;
  struct swathe_sequence sequence;
  int64_t rows;          // batch * tokens
  unsigned char *marks;  // [rows] of enum mark
  double *lse, *delta;   // [rows][q_heads]
  bool all_dsink;        // every query is NEEDED, and dsink is added up
};

// ---- What to check ------------------------------------------------------------------------------

// Of one rank: which rows of the whole sequence it holds.
struct share {
  struct swathe_span *spans;
  int64_t count, tokens, filled;  // spans; tokens of all; spans that have some
};

static int64_t mark_rows(struct comparison *c, int64_t batch, int64_t token, int64_t tokens)
{
  int64_t fresh = 0;
  for (int64_t t = token; t < token + tokens; t++) {
    unsigned char *mark = &c->marks[batch * c->sequence.tokens + t];
    fresh += !(*mark & CHOSEN);
    *mark |= CHOSEN | NEEDED;
  }
  return fresh;
}

// The first and the last tokens of every span, in every row of the batch.
static int64_t choose_edges(struct comparison *c, const struct share *share)
{
  const int64_t edges = 2 * share->filled * c->sequence.batch;
  int64_t width = edges ? RANK_SAMPLE / 2 / edges : 1, chosen = 0;

  if (width > LEAST_CLUSTER) width = LEAST_CLUSTER;
  if (width < 1) width = 1;
  for (int64_t b = 0; b < c->sequence.batch; b++)
    for (int64_t s = 0; s < share->count; s++) {
      const struct swathe_span *span = &share->spans[s];
      const int64_t tokens = span->tokens < width ? span->tokens : width;
      chosen += mark_rows(c, b, span->token, tokens);
      chosen += mark_rows(c, b, span->token + span->tokens - tokens, tokens);
    }
  return chosen;
}

// A cluster that begins at the `index`-th token the rank holds.
static int64_t choose_cluster(struct comparison *c, const struct share *share, int64_t index,
                              int64_t batch, int64_t tokens)
{
  for (int64_t s = 0; s < share->count; s++) {
    const struct swathe_span *span = &share->spans[s];
    if (index < span->tokens) {
      const int64_t left = span->tokens - index;
      return mark_rows(c, batch, span->token + index, tokens < left ? tokens : left);
    }
    index -= span->tokens;
  }
  return 0;
}

static void choose_sample(struct comparison *c, const struct share *share, int32_t rank)
{
  const uint64_t stream = cli_arrays_mix(c->check->seed * 65537 + (uint64_t)rank);
  int64_t chosen = choose_edges(c, share);

  for (uint64_t i = 0; chosen < RANK_SAMPLE; i++) {
    const uint64_t where = cli_arrays_mix(stream + 2 * i), how = cli_arrays_mix(stream + 2 * i + 1);
    const int64_t width = LEAST_CLUSTER + (int64_t)(how >> 32) % (MOST_CLUSTER - LEAST_CLUSTER + 1);
    chosen += choose_cluster(c, share, (int64_t)(where % (uint64_t)share->tokens),
                             (int64_t)((how & 0xffffffff) % (uint64_t)c->sequence.batch), width);
  }
}

static enum cli_exit read_share(const struct swathe_sharding *sharding, int32_t rank,
                                struct share *share)
{
  int64_t count = 0;
  enum swathe_status status = swathe_sharding_spans(sharding, rank, NULL, 0, &count);

  *share =
      (struct share){ .spans = calloc((size_t)count + 1, sizeof *share->spans), .count = count };
  if (!share->spans) return cli_fail(CLI_FAILED, "out of memory for %" PRId64 " spans", count);
  if (!status) status = swathe_sharding_spans(sharding, rank, share->spans, count, &share->count);
  for (int64_t s = 0; s < share->count && !status; s++) {
    share->tokens += share->spans[s].tokens;
    share->filled += share->spans[s].tokens > 0;
  }
  return status ? cli_fail_library(status, "the spans of rank %" PRId32, rank) : CLI_OK;
}

// Short sequences whole, and of long ones a share whole if a sample would be most of it.
static enum cli_exit choose_rows(struct comparison *c)
{
  const struct swathe_sharding *sharding = &c->check->given->sharding;
  const bool everything = c->rows <= EVERYTHING_TOKENS;

  for (int32_t rank = 0; rank < sharding->ranks; rank++) {
    struct share share;
    const enum cli_exit code = read_share(sharding, rank, &share);
    const int64_t held = share.tokens * c->sequence.batch;
    if (!code && (everything || held <= 2 * RANK_SAMPLE)) {
      for (int64_t b = 0; b < c->sequence.batch; b++)
        for (int64_t s = 0; s < share.count; s++)
          mark_rows(c, b, share.spans[s].token, share.spans[s].tokens);
    } else if (!code) {
      choose_sample(c, &share, rank);
    }
    free(share.spans);
    if (code) return code;
    c->check->tokens_held += held;
  }
  for (int64_t row = 0; row < c->rows; row++) c->check->tokens_checked += c->marks[row] & CHOSEN;
  return CLI_OK;
}

// ---- How much work that is ----------------------------------------------------------------------

// Keys that the query at `token` sees: the public call answers for keys, so the window is turned
// round.
static int64_t visible_keys(const struct comparison *c, int64_t token)
{
  struct swathe_problem turned = *c->problem;
  int64_t begin = 0, end = 0;

  turned.window_left = c->problem->window_right;
  turned.window_right = c->problem->window_left;
  swathe_reference_seen_by(&turned, &c->sequence, token, &begin, &end);
  return end - begin;
}

// Multiply-adds of all rows with any of `marks`, for out and lse.
static double query_work(const struct comparison *c, unsigned marks)
{
  const double per_key =
      (double)c->problem->q_heads * (c->problem->head_dim_qk + c->problem->head_dim_v);
  double keys = 0;

  for (int64_t row = 0; row < c->rows; row++)
    if (c->marks[row] & marks) keys += (double)visible_keys(c, row % c->sequence.tokens);
  return keys * per_key;
}

static void mark_all(struct comparison *c, unsigned char mark)
{
  for (int64_t row = 0; row < c->rows; row++) c->marks[row] |= mark;
}

// Marks every query that sees a chosen key with OWN.  Neighbours see much the same, so a range that
// was marked before is skipped.
static void mark_readers(struct comparison *c)
{
  for (int64_t b = 0; b < c->sequence.batch; b++) {
    int64_t marked = 0;  // all readers before this token are marked
    for (int64_t token = 0; token < c->sequence.tokens; token++) {
      int64_t begin = 0, end = 0;
      if (!(c->marks[b * c->sequence.tokens + token] & CHOSEN)) continue;
      swathe_reference_seen_by(c->problem, &c->sequence, token, &begin, &end);
      for (int64_t t = begin > marked ? begin : marked; t < end; t++)
        c->marks[b * c->sequence.tokens + t] |= OWN;
      if (end > marked) marked = end;
    }
  }
}

// Decides whose lse and delta the keys' gradients are made from, and whether dsink is affordable:
// it sums over all queries.
static void plan_work(struct comparison *c)
{
  struct cli_check *check = c->check;

  if (check->arrays->backward) {
    mark_readers(c);
    check->own_lse =
        query_work(c, OWN) > affordable_work && check->tokens_checked < check->tokens_held;
    if (!check->own_lse)
      for (int64_t row = 0; row < c->rows; row++)
        if (c->marks[row] & OWN) c->marks[row] = (unsigned char)((c->marks[row] & ~OWN) | NEEDED);
  }
  if (check->arrays->data[CLI_ARRAY_DSINK]) {
    // dq beside the query itself: three products more.
    mark_all(c, EVERY);
    c->all_dsink = check->tokens_checked == check->tokens_held ||
                   2.5 * query_work(c, EVERY) <= affordable_work;
    check->dsink_left = !c->all_dsink;
    if (c->all_dsink) mark_all(c, NEEDED);
  }
  const double work =
      query_work(c, NEEDED) + (check->arrays->backward ? 4 : 0) * query_work(c, CHOSEN);
  if (work > noticeable_work)
    fprintf(stderr, "swathe: the reference has about %.0f s of one core's work to do\n",
            work / 1.5e9);
}

// ---- Comparing ----------------------------------------------------------------------------------

static void compare(struct cli_check_error *worst, const float *got, const double *wanted,
                    int64_t elements, int64_t row)
{
  for (int64_t i = 0; i < elements; i++) {
    double error = 0;
    if (!isfinite(got[i]) || !isfinite(wanted[i]))
      error = (double)got[i] == wanted[i] ? 0 : INFINITY;  // -inf is right where -inf is wanted
    else
      error = fabs((double)got[i] - wanted[i]) / fmax(1, fabs(wanted[i]));
    const bool first = worst->elements++ == 0;
    if (!first && (error < worst->error || (error == worst->error && row >= worst->row))) continue;
    worst->error = error;
    worst->got = (double)got[i];
    worst->wanted = wanted[i];
    worst->row = row;
    worst->element = i;
  }
}

// The largest error wins; of equal ones the first row's, so that threads do not show.
static void take_worst(struct cli_check_error *into, const struct cli_check_error *other)
{
  const int64_t elements = into->elements + other->elements;
  if (other->elements && (!into->elements || other->error > into->error ||
                          (other->error == into->error && other->row < into->row))) {
    const double limit = into->limit;
    *into = *other;
    into->limit = limit;
  }
  into->elements = elements;
}

// ---- Workers ------------------------------------------------------------------------------------

struct worker;
typedef void row_work(struct worker *worker, int64_t batch, int64_t token);

struct phase {
  struct comparison *comparison;
  row_work *work;
  unsigned marks;  // rows with any of these
  atomic_llong next;
};

struct worker {
  struct phase *phase;
  struct comparison *comparison;
  pthread_t thread;
  double *first, *second;  // room for one row of any two arrays
  double *dsink;           // [q_heads]
  struct cli_check_error errors[CLI_ARRAY_COUNT];
};

static void compare_row(struct worker *worker, enum cli_array array, const double *wanted,
                        int64_t row)
{
  const struct cli_arrays *arrays = worker->comparison->check->arrays;
  const int64_t elements = cli_arrays_row(arrays, array);
  compare(&worker->errors[array], arrays->data[array] + row * elements, wanted, elements, row);
}

// sum(out * dout) of the run's own out.
static void take_own_delta(struct comparison *c, int64_t row)
{
  const struct cli_arrays *arrays = c->check->arrays;
  const int64_t heads = c->problem->q_heads, dim = c->problem->head_dim_v;

  for (int64_t h = 0; h < heads; h++) {
    const float *out = arrays->data[CLI_ARRAY_OUT] + (row * heads + h) * dim;
    const float *dout = arrays->data[CLI_ARRAY_DOUT] + (row * heads + h) * dim;
    double sum = 0;
    for (int64_t d = 0; d < dim; d++) sum += (double)out[d] * (double)dout[d];
    c->delta[row * heads + h] = sum;
  }
}

static void work_query(struct worker *worker, int64_t batch, int64_t token)
{
  struct comparison *c = worker->comparison;
  const int64_t row = batch * c->sequence.tokens + token, heads = c->problem->q_heads;
  double *delta = c->check->arrays->backward ? c->delta + row * heads : NULL;

  if (!(c->marks[row] & NEEDED)) return;
  swathe_reference_query(c->problem, &c->sequence, batch, token, worker->first,
                         c->lse + row * heads, delta);
  if (delta && c->problem->dtype != SWATHE_F32) take_own_delta(c, row);
  if (!(c->marks[row] & CHOSEN)) return;
  compare_row(worker, CLI_ARRAY_OUT, worker->first, row);
  compare_row(worker, CLI_ARRAY_LSE, c->lse + row * heads, row);
}

// lse and delta of the run itself.
static void work_own(struct worker *worker, int64_t batch, int64_t token)
{
  struct comparison *c = worker->comparison;
  const struct cli_arrays *arrays = c->check->arrays;
  const int64_t row = batch * c->sequence.tokens + token, heads = c->problem->q_heads;

  if (c->marks[row] & NEEDED) return;
  for (int64_t h = 0; h < heads; h++)
    c->lse[row * heads + h] = (double)arrays->data[CLI_ARRAY_LSE][row * heads + h];
  take_own_delta(c, row);
}

static void work_dq(struct worker *worker, int64_t batch, int64_t token)
{
  struct comparison *c = worker->comparison;
  const int64_t row = batch * c->sequence.tokens + token;

  swathe_reference_dq(c->problem, &c->sequence, c->lse, c->delta, batch, token, worker->first,
                      c->all_dsink ? worker->dsink : NULL);
  if (c->marks[row] & CHOSEN) compare_row(worker, CLI_ARRAY_DQ, worker->first, row);
}

static void work_dkv(struct worker *worker, int64_t batch, int64_t token)
{
  struct comparison *c = worker->comparison;
  const int64_t row = batch * c->sequence.tokens + token;

  swathe_reference_dkv(c->problem, &c->sequence, c->lse, c->delta, batch, token, worker->first,
                       worker->second);
  compare_row(worker, CLI_ARRAY_DK, worker->first, row);
  compare_row(worker, CLI_ARRAY_DV, worker->second, row);
}

static void *run_worker(void *arg)
{
  enum { ROWS_AT_ONCE = 16 };
  struct worker *worker = arg;
  struct phase *phase = worker->phase;
  const struct comparison *c = worker->comparison;

  for (;;) {
    const int64_t begin = atomic_fetch_add(&phase->next, ROWS_AT_ONCE);
    if (begin >= c->rows) return NULL;
    const int64_t end = begin + ROWS_AT_ONCE < c->rows ? begin + ROWS_AT_ONCE : c->rows;
    for (int64_t row = begin; row < end; row++)
      if (c->marks[row] & phase->marks)
        phase->work(worker, row / c->sequence.tokens, row % c->sequence.tokens);
  }
}

// The first worker is this thread; a thread that cannot be made is done without.
static void run_phase(struct comparison *c, struct worker *workers, int32_t count, row_work *work,
                      unsigned marks)
{
  struct phase phase = { .comparison = c, .work = work, .marks = marks };
  int32_t started = 1;

  for (int32_t i = 0; i < count; i++) workers[i].phase = &phase;
  for (; started < count; started++)
    if (pthread_create(&workers[started].thread, NULL, run_worker, &workers[started])) break;
  run_worker(&workers[0]);
  for (int32_t i = 1; i < started; i++) pthread_join(workers[i].thread, NULL);
}

static void run_phases(struct comparison *c, struct worker *workers, int32_t count)
{
  run_phase(c, workers, count, work_query, NEEDED);
  if (!c->check->arrays->backward) return;
  if (c->check->own_lse) run_phase(c, workers, count, work_own, OWN);
  run_phase(c, workers, count, work_dq, c->all_dsink ? NEEDED : CHOSEN);
  run_phase(c, workers, count, work_dkv, CHOSEN);
}

// ---- The whole ----------------------------------------------------------------------------------

// dk and dv are as exact as their dtype and the way of their sums allow.
static void set_limits(struct cli_check *check)
{
  const struct swathe_problem *problem = &check->given->problem;
  const bool narrow = problem->dtype != SWATHE_F32;
  const double gradient = narrow ? 2e-2 : 1e-4;
  const double key_gradient = problem->halo_gradient == SWATHE_BF16 ? 2e-2 : gradient;

  check->errors[CLI_ARRAY_OUT].limit = narrow ? 2e-2 : 2e-5;
  check->errors[CLI_ARRAY_LSE].limit = narrow ? 1e-3 : 2e-5;
  check->errors[CLI_ARRAY_DQ].limit = gradient;
  check->errors[CLI_ARRAY_DK].limit = key_gradient;
  check->errors[CLI_ARRAY_DV].limit = key_gradient;
  check->errors[CLI_ARRAY_DSINK].limit = gradient;
}

// Adds up what the workers found.
static enum cli_exit collect(struct comparison *c, const struct worker *workers, int32_t count)
{
  struct cli_check *check = c->check;
  const float *got = check->arrays->data[CLI_ARRAY_DSINK];
  const int32_t heads = c->problem->q_heads;

  for (int32_t i = 0; i < count; i++)
    for (int a = CLI_ARRAY_OUT; a < CLI_ARRAY_COUNT; a++)
      take_worst(&check->errors[a], &workers[i].errors[a]);
  if (c->all_dsink) {
    double *wanted = calloc((size_t)heads, sizeof *wanted);
    if (!wanted) return cli_fail(CLI_FAILED, "out of memory for %" PRId32 " sinks", heads);
    for (int32_t i = 0; i < count; i++)
      for (int32_t h = 0; h < heads; h++) wanted[h] += workers[i].dsink[h];
    compare(&check->errors[CLI_ARRAY_DSINK], got, wanted, heads, -1);
    free(wanted);
  }
  check->passed = true;
  for (int a = CLI_ARRAY_OUT; a < CLI_ARRAY_COUNT; a++)
    if (check->errors[a].elements && !(check->errors[a].error <= check->errors[a].limit))
      check->passed = false;
  return CLI_OK;
}

static enum cli_exit run_workers(struct comparison *c)
{
  enum { MOST_DIM = 256 };  // head dims go up to this
  const int32_t count = cli_given_processors();
  const size_t room = (size_t)c->problem->q_heads * MOST_DIM;
  struct worker *workers = calloc((size_t)count, sizeof *workers);
  enum cli_exit code = workers ? CLI_OK : cli_fail(CLI_FAILED, "out of memory for the check");

  for (int32_t i = 0; i < count && !code; i++) {
    workers[i].comparison = c;
    workers[i].first = calloc(room, sizeof(double));
    workers[i].second = calloc(room, sizeof(double));
    workers[i].dsink = calloc((size_t)c->problem->q_heads, sizeof(double));
    if (!workers[i].first || !workers[i].second || !workers[i].dsink)
      code = cli_fail(CLI_FAILED, "out of memory for the check");
  }
  if (!code) {
    run_phases(c, workers, count);
    code = collect(c, workers, count);
  }
  for (int32_t i = 0; workers && i < count; i++) {
    free(workers[i].first);
    free(workers[i].second);
    free(workers[i].dsink);
  }
  free(workers);
  return code;
}

enum cli_exit cli_check_run(struct cli_check *check)
{
  const struct cli_given *given = check->given;
  const struct cli_arrays *arrays = check->arrays;
  struct comparison c = {
    .check = check,
    .problem = &given->problem,
    .sequence = { .batch = arrays->batch, .tokens = arrays->tokens,
                  .documents = given->sharding.documents,
                  .document_starts = given->sharding.document_starts,
                  .q = arrays->data[CLI_ARRAY_Q], .k = arrays->data[CLI_ARRAY_K],
                  .v = arrays->data[CLI_ARRAY_V], .sink = arrays->data[CLI_ARRAY_SINK],
                  .dout = arrays->data[CLI_ARRAY_DOUT] },
    .rows = arrays->batch * arrays->tokens,
  };
  const size_t heads = (size_t)given->problem.q_heads, rows = (size_t)c.rows;
  enum cli_exit code = CLI_OK;

  set_limits(check);
  c.marks = calloc(rows, 1);
  c.lse = calloc(rows * heads, sizeof(double));
  c.delta = calloc(rows * heads, sizeof(double));
  if (!c.marks || !c.lse || !c.delta)
    code = cli_fail(CLI_FAILED, "out of memory to check %zu tokens", rows);
  if (!code) code = choose_rows(&c);
  if (!code) {
    plan_work(&c);
    code = run_workers(&c);
  }
  free(c.marks);
  free(c.lse);
  free(c.delta);
  return code;
}
