// tune_exchange.c: finds the exchange that the layers of a group run fastest with, over the group's
// own transport: whole passes, forward and backward.
//
// Rank 0 searches (search.c) and stores; the others serve.  A round is an order of rank 0's, which
// all ranks carry out side by side, and a report of each; a candidate's time is the slowest rank's.
// No exchange may change a result, so each candidate is checked by the bits of the default's.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lease.h"
#include "ledger.h"
#include "tune.h"

static const double default_budget_s = 60, default_wait_s = 60;
static const double least_run_us = 5000;  // shorter ones are repeated

enum { INPUTS = 5, OUTPUTS = 6, MOST_REPEATS = 1000 };

// What all ranks do next.
struct order {
  int32_t count, repeats;              // count 0: no more, and how it ended
  enum swathe_status status;
  char configs[SW_SEARCH_MOST_SLOTS][SW_CONFIG_TEXT];
  struct swathe_tuned tuned;
  char words[512];
};

// What came of it on one rank.
struct report {
  double us[SW_SEARCH_MOST_SLOTS];
  bool wrong[SW_SEARCH_MOST_SLOTS];
  enum swathe_status status;
  char words[512];
};

struct array {
  void *data;
  size_t bytes;
};

struct tuning {
  struct swathe_context *context;
  const struct swathe_problem *problem;
  struct swathe_transport *transport;
  const struct swathe_tune_options *options;
  struct sw_aim aim;
  struct swathe_layer *layer;
  struct array inputs[INPUTS];         // q, k, v, dout, sink
  struct array outputs[OUTPUTS];       // out, lse, dq, dk, dv, dsink
  struct array expected[OUTPUTS];
  bool expects;
  struct swathe_tensors tensors;
  struct order *orders;                // [ranks]; rank 0's counts
  struct report *reports, mine;        // [ranks]
  // rank 0
  struct sw_exchange_place place;
  struct sw_ledger ledger;
  struct sw_search search;
  int32_t repeats;
  struct swathe_tuned tuned;
};

// ---- A rank's share ----------------------------------------------------------------------------

// Numbers in [-1, 1), the same for the same seed; seed 0: nothing but room.
static enum swathe_status make_array(struct array *array, int64_t count, enum swathe_dtype dtype,
                                     uint32_t seed)
{
  const size_t elem = dtype == SWATHE_F32 ? sizeof(float) : sizeof(uint16_t);
  array->bytes = (size_t)count * elem;
  array->data = calloc((size_t)count + 1, elem);
  if (!array->data)
    return sw_fail(SWATHE_NO_MEMORY, "no %zu bytes for a tensor to tune on", array->bytes);
  for (int64_t i = 0; seed && i < count; i++) {
    seed = seed * 1664525 + 1013904223;
    const float value = (float)(seed >> 8) / (float)(1 << 23) - 1;
    if (dtype == SWATHE_F32) ((float *)array->data)[i] = value;
    else ((uint16_t *)array->data)[i] = sw_problem_to_bf16(value);
  }
  return SWATHE_OK;
}

static struct swathe_tensor packed(const struct array *array, int32_t heads, int32_t dim)
{
  return (struct swathe_tensor){ array->data, (int64_t)heads * dim, dim, 0 };
}

static enum swathe_status make_arrays(struct tuning *tuning, int64_t rows)
{
  const struct swathe_problem *p = tuning->problem;
  const int64_t q = rows * p->q_heads * p->head_dim_qk, o = rows * p->q_heads * p->head_dim_v;
  const int64_t k = rows * p->kv_heads * p->head_dim_qk, v = rows * p->kv_heads * p->head_dim_v;
  const int64_t in[INPUTS] = { q, k, v, o, p->q_heads };
  const int64_t out[OUTPUTS] = { o, rows * p->q_heads, q, k, v, p->q_heads };
  enum swathe_status status = SWATHE_OK;

  for (uint32_t i = 0; i < INPUTS && !status; i++)
    status = make_array(&tuning->inputs[i], in[i], i == 4 ? SWATHE_F32 : p->dtype, i + 1);
  for (int i = 0; i < OUTPUTS && !status; i++) {
    const enum swathe_dtype dtype = i == 1 || i == 5 ? SWATHE_F32 : p->dtype;
    status = make_array(&tuning->outputs[i], out[i], dtype, 0);
    if (!status) status = make_array(&tuning->expected[i], out[i], dtype, 0);
  }
  tuning->tensors = (struct swathe_tensors){
    .q = packed(&tuning->inputs[0], p->q_heads, p->head_dim_qk),
    .k = packed(&tuning->inputs[1], p->kv_heads, p->head_dim_qk),
    .v = packed(&tuning->inputs[2], p->kv_heads, p->head_dim_v),
    .dout = packed(&tuning->inputs[3], p->q_heads, p->head_dim_v),
    .sink = p->sinks ? tuning->inputs[4].data : NULL,
    .out = packed(&tuning->outputs[0], p->q_heads, p->head_dim_v),
    .lse = packed(&tuning->outputs[1], p->q_heads, 1),
    .dq = packed(&tuning->outputs[2], p->q_heads, p->head_dim_qk),
    .dk = packed(&tuning->outputs[3], p->kv_heads, p->head_dim_qk),
    .dv = packed(&tuning->outputs[4], p->kv_heads, p->head_dim_v),
    .dsink = p->sinks ? tuning->outputs[5].data : NULL,
  };
  return status;
}

static enum swathe_status make_layer(struct tuning *tuning)
{
  static const char *const choose_all[SW_CONFIGS];
  const struct swathe_problem *p = tuning->problem;
  const int32_t ranks = tuning->transport->ranks;
  const struct swathe_sharding sharding = { .layout = p->layout == SWATHE_SPANS ? SWATHE_CONTIGUOUS
                                                                                : p->layout,
                                            .ranks = ranks,
                                            .batch = 1,
                                            .tokens = p->tokens_per_rank * ranks };
  enum swathe_status status =
      sw_layer_create(tuning->context, p, tuning->transport, choose_all, 3, &tuning->layer);
  if (!status) status = swathe_layer_shard(tuning->layer, &sharding);
  return status ? status : make_arrays(tuning, tuning->layer->plan->rows);
}

// ---- Orders, on every rank ---------------------------------------------------------------------

static enum swathe_status run_passes(struct tuning *tuning, int32_t repeats, double *us)
{
  const double begin = sw_layer_now_us();
  enum swathe_status status = SWATHE_OK;
  for (int32_t i = 0; i < repeats && !status; i++) {
    status = swathe_layer_forward(tuning->layer, &tuning->tensors, NULL);
    if (!status) status = swathe_layer_backward(tuning->layer, &tuning->tensors, NULL);
  }
  *us = (sw_layer_now_us() - begin) / repeats;
  return status;
}

// Whether the results are those of the first run of all; that one's are kept.
static bool as_expected(struct tuning *tuning)
{
  for (int i = 0; i < OUTPUTS; i++) {
    struct array *expected = &tuning->expected[i];
    if (!tuning->expects) memcpy(expected->data, tuning->outputs[i].data, expected->bytes);
    else if (memcmp(expected->data, tuning->outputs[i].data, expected->bytes)) return false;
  }
  tuning->expects = true;
  return true;
}

// All ranks begin a slot together.
static enum swathe_status carry_out(struct tuning *tuning)
{
  struct swathe_transport *transport = tuning->transport;
  const struct order *order = &tuning->orders[0];
  char *came = calloc((size_t)transport->ranks, 1);
  enum swathe_status status =
      came ? SWATHE_OK : sw_fail(SWATHE_NO_MEMORY, "no memory to meet %d ranks", transport->ranks);

  memset(&tuning->mine, 0, sizeof tuning->mine);
  for (int32_t i = 0; i < order->count && !status; i++) {
    status = swathe_layer_set_exchange(tuning->layer, order->configs[i]);
    if (!status) status = sw_agree(tuning->layer);  // else the first pass would
    if (!status) status = transport->operations->gather(transport, "", 1, came);
    if (!status) status = run_passes(tuning, order->repeats, &tuning->mine.us[i]);
    if (!status) tuning->mine.wrong[i] = !as_expected(tuning);
  }
  free(came);
  tuning->mine.status = status;
  if (status) snprintf(tuning->mine.words, sizeof tuning->mine.words, "%s", swathe_error());
  const enum swathe_status told =
      transport->operations->gather(transport, &tuning->mine, sizeof tuning->mine, tuning->reports);
  return status ? sw_fail(status, "%s", tuning->mine.words) : told;
}

// Rank 0 sends `order`; the others hear it.
static enum swathe_status pass_on(struct tuning *tuning, const struct order *order)
{
  const struct order none = { .count = 0 };
  struct swathe_transport *transport = tuning->transport;
  return transport->operations->gather(transport, order ? order : &none, sizeof none,
                                       tuning->orders);
}

static enum swathe_status serve(struct tuning *tuning)
{
  const struct order *order = &tuning->orders[0];
  enum swathe_status status = pass_on(tuning, NULL);
  while (!status && order->count) {
    status = carry_out(tuning);
    if (!status) status = pass_on(tuning, NULL);
  }
  if (status) return status;
  tuning->tuned = order->tuned;
  return order->status ? sw_fail(order->status, "rank 0: %s", order->words) : SWATHE_OK;
}

// ---- The search, on rank 0 ---------------------------------------------------------------------

static enum swathe_status prepare(void *arg, const int64_t *candidates, int32_t count,
                                  enum sw_verdict *verdicts)
{
  (void)arg;
  (void)candidates;
  for (int32_t i = 0; i < count; i++) verdicts[i] = SW_VERDICT_OK;  // nothing to compile
  return SWATHE_OK;
}

static enum swathe_status measure(void *arg, struct sw_search_round *round)
{
  struct tuning *tuning = arg;
  static const char differs[] = "its results are not those of the default";
  struct order *order = calloc(1, sizeof *order);
  if (!order) return sw_fail(SWATHE_NO_MEMORY, "no memory for an order");
  if (tuning->options->stop && *tuning->options->stop) {
    free(order);
    return sw_fail(SWATHE_INTERRUPTED, "stopped; what was measured is kept");
  }
  order->count = round->count;
  order->repeats = tuning->repeats;
  for (int32_t i = 0; i < round->count; i++)
    snprintf(order->configs[i], SW_CONFIG_TEXT, "%s",
             tuning->ledger.candidates[round->order[i]].config);
  enum swathe_status status = pass_on(tuning, order);
  free(order);
  if (!status) status = carry_out(tuning);

  round->noisy = false;
  for (int32_t i = 0; i < round->count && !status; i++) {
    bool wrong = false;
    round->us[i] = 0;
    for (int32_t r = 0; r < tuning->transport->ranks; r++) {
      const struct report *report = &tuning->reports[r];
      if (report->status && !status)
        status = sw_fail(report->status, "rank %d: %.500s", r, report->words);
      if (report->us[i] > round->us[i]) round->us[i] = report->us[i];
      wrong = wrong || report->wrong[i];
    }
    round->verdicts[i] = wrong ? SW_VERDICT_WRONG : SW_VERDICT_OK;
    if (wrong && !status)
      status = sw_ledger_put_failure(&tuning->ledger, round->order[i], SW_VERDICT_WRONG, differs);
  }
  return status;
}

static enum swathe_status note(void *arg, const struct sw_search_runs *runs)
{
  return sw_ledger_note(&((struct tuning *)arg)->ledger, runs);
}

static enum swathe_status lead(void *arg)
{
  struct tuning *tuning = arg;
  return sw_ledger_lead(&tuning->ledger, &tuning->search);
}

static double now_s(void *arg)
{
  (void)arg;
  return sw_layer_now_s();
}

static const struct sw_search_operations operations = {
  .prepare = prepare, .measure = measure, .note = note, .lead = lead, .now_s = now_s
};

// ---- Candidates --------------------------------------------------------------------------------

// The default first, then the space in its order.
static enum swathe_status list_candidates(struct tuning *tuning)
{
  const struct sw_gen_request *request = &tuning->ledger.request;
  struct sw_gen *gen = tuning->context->gen;
  struct sw_gen_walk *walk = NULL;
  char config[SW_CONFIG_TEXT];

  pthread_mutex_lock(&tuning->context->mutex);
  enum swathe_status status = sw_gen_default(gen, request, config);
  if (!status) status = sw_ledger_add(&tuning->ledger, config);
  if (!status) status = sw_gen_walk_begin(gen, request, tuning->options->exhaustive, &walk);
  while (!status && !(status = sw_gen_walk_next(walk, config)))
    status = sw_ledger_add(&tuning->ledger, config);
  if (walk) sw_gen_walk_end(walk);
  pthread_mutex_unlock(&tuning->context->mutex);
  return status == SWATHE_NOT_FOUND ? SWATHE_OK : status;
}

static enum swathe_status search(struct tuning *tuning, double end_s)
{
  enum swathe_status status = list_candidates(tuning);
  if (!status && !tuning->options->again) status = sw_ledger_recall(&tuning->ledger);
  struct sw_search_round first = { .order = &(const int64_t){ 0 }, .count = 1 };

  if (status) return status;
  tuning->repeats = 1;
  status = measure(tuning, &first);  // to warm up; and its results are what all others' must be
  if (!status) status = measure(tuning, &first);
  if (status) return status;
  const double repeats = first.us[0] > 0 ? least_run_us / first.us[0] : 1;
  tuning->repeats = repeats < 1 ? 1 : repeats > MOST_REPEATS ? MOST_REPEATS : (int32_t)repeats;
  tuning->search = (struct sw_search){ .operations = &operations,
                                       .arg = tuning,
                                       .end_s = end_s,
                                       .heat = SW_SEARCH_MOST_HEAT / 2,
                                       .seed = (uint64_t)tuning->ledger.session };
  sw_ledger_start(&tuning->ledger, &tuning->search);
  return sw_ledger_end(&tuning->ledger, &tuning->search, sw_search_run(&tuning->search));
}

static enum swathe_status conduct(struct tuning *tuning)
{
  const struct swathe_tune_options *options = tuning->options;
  const double budget_s = options->budget_s > 0 ? options->budget_s : default_budget_s;
  const double wait_s = options->wait_s > 0 ? options->wait_s : default_wait_s;
  struct swathe_context *context = tuning->context;
  struct sw_ledger *ledger = &tuning->ledger;
  struct sw_lease lease = { .file = -1 };
  enum swathe_status status = SWATHE_OK;
  bool done = false;

  if (!*context->database)
    return sw_fail(SWATHE_DATABASE,
                   "there is no place for a tuning database: give one, or set SWATHE_DB");
  sw_choose_exchange_place(context, &tuning->aim, tuning->transport, &tuning->place);
  *ledger = (struct sw_ledger){
    .context = context,
    .request = { tuning->problem, sw_exchange_kernel, tuning->aim.isa },
    .environment = &tuning->place.environment,
    .tuned = &tuning->tuned,
  };
  status = sw_db_open(context->database, SW_DB_WRITE, &ledger->db);
  if (!status) status = sw_lease_take(context->database, wait_s, options->stop, &lease);
  if (!status)
    status = sw_db_session_begin(ledger->db, "tune exchange", budget_s, &ledger->session);
  if (!status) status = sw_ledger_recall_pick(ledger, options->again ? INFINITY : budget_s, &done);
  if (!status && !done) status = search(tuning, sw_layer_now_s() + budget_s);
  sw_lease_give_back(&lease);
  if (ledger->db) sw_db_close(ledger->db);
  sw_context_reopen_database(context);
  return status;
}

// Rank 0 tells the others how it ended, whatever that is.
static enum swathe_status lead_group(struct tuning *tuning)
{
  struct order *last = calloc(1, sizeof *last);
  if (!last) return sw_fail(SWATHE_NO_MEMORY, "no memory for an order");
  const enum swathe_status status = conduct(tuning);
  last->status = status;
  last->tuned = tuning->tuned;
  if (status) snprintf(last->words, sizeof last->words, "%s", swathe_error());
  const enum swathe_status told = pass_on(tuning, last);
  const enum swathe_status ended = status ? sw_fail(status, "%s", last->words) : told;
  free(last);
  return ended;
}

static void free_tuning(struct tuning *tuning)
{
  swathe_layer_destroy(tuning->layer);
  for (int i = 0; i < INPUTS; i++) free(tuning->inputs[i].data);
  for (int i = 0; i < OUTPUTS; i++) free(tuning->outputs[i].data), free(tuning->expected[i].data);
  sw_ledger_free(&tuning->ledger);
  free(tuning->orders);
  free(tuning->reports);
}

enum swathe_status swathe_tune_exchange(struct swathe_context *context,
                                        const struct swathe_problem *problem,
                                        struct swathe_transport *transport,
                                        const struct swathe_tune_options *options,
                                        struct swathe_tuned *tuned)
{
  struct tuning *tuning = calloc(1, sizeof *tuning);
  enum swathe_status status = SWATHE_OK;

  memset(tuned, 0, sizeof *tuned);
  if (!tuning) return sw_fail(SWATHE_NO_MEMORY, "no memory to tune an exchange");
  *tuning = (struct tuning){ .context = context, .problem = problem, .transport = transport,
                             .options = options };
  const volatile int *heeded = sw_jit_heed(options->stop);
  if (!transport || transport->ranks < 2)
    status = sw_fail(SWATHE_BAD_USE, "an exchange is tuned by two ranks or more");
  if (!status) status = sw_tune_check_options(options);
  if (!status) status = sw_context_aim(context, problem, NULL, &tuning->aim);
  if (!status && tuning->aim.cuda)
    status = sw_fail(SWATHE_UNSUPPORTED, "the exchange of the cuda target is not tuned: its waits "
                                         "are on streams, which are not measured");
  if (!status) status = make_layer(tuning);
  if (!status) {
    tuning->orders = calloc((size_t)transport->ranks, sizeof *tuning->orders);
    tuning->reports = calloc((size_t)transport->ranks, sizeof *tuning->reports);
    if (!tuning->orders || !tuning->reports)
      status = sw_fail(SWATHE_NO_MEMORY, "no memory to tune over %d ranks", transport->ranks);
  }
  if (!status) status = transport->rank ? serve(tuning) : lead_group(tuning);
  *tuned = tuning->tuned;
  sw_jit_heed(heeded);
  free_tuning(tuning);
  free(tuning);
  return status ? sw_within(status, "while tuning the exchange") : SWATHE_OK;
}
