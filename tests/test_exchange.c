// test_exchange.c: the exchange's config: results never depend on it, all ranks use rank 0's, and
// units run when their keys are there, not earlier and not later.
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "group.h"
#include "layer.h"
#include "scratch.h"
#include "transport.h"

static struct swathe_context *context;

static int set_up(void **state)
{
  const char *scratch = scratch_make("exchange"), *cache = getenv("TEST_CACHE_DIR");
  char database[64];
  (void)state;
  if (!scratch) return -1;
  snprintf(database, sizeof database, "%s/tuning.db", scratch);
  const struct swathe_options options = { .database = database,
                                          .cache = cache ? cache : scratch,
                                          .threads = 1 };
  return swathe_open(&options, &context) ? -1 : 0;
}

static int tear_down(void **state)
{
  swathe_close(context);
  return scratch_remove(state);
}

static struct swathe_problem problem_of(const char *text)
{
  struct swathe_problem problem;
  swathe_problem_init(&problem);
  if (swathe_problem_parse(text, &problem)) fail_msg("%s: %s", text, swathe_error());
  return problem;
}

static size_t bytes_of(const struct sequence *sequence, int array)
{
  size_t elems;
  sequence_row(sequence, (enum sequence_array)array, 0, 0, &elems);
  return elems * (size_t)(sequence->view.batch * sequence->view.tokens) * sizeof(float);
}

static void expect_same_bits(const struct sequence *a, const struct sequence *b, const char *what)
{
  for (int array = SEQUENCE_OUT; array < SEQUENCE_ARRAYS; array++)
    if (memcmp(a->got[array], b->got[array], bytes_of(a, array)))
      fail_msg("%s is not bit-equal with %s", sequence_array_name((enum sequence_array)array),
               what);
}

// ---- Results -----------------------------------------------------------------------------------

struct shape {
  const char *problem;
  enum swathe_layout layout;
  int32_t ranks, batch;
  int64_t tokens;
  bool keep_halo;
};

static void results_do_not_depend_on_it(void **state)
{
  static const struct shape shapes[] = {
    { "q_heads=4,kv_heads=2,head_dim_qk=16,head_dim_v=24,window_left=300",
      SWATHE_CONTIGUOUS, 4, 2, 1900, true },  // and each message is cut
    { "q_heads=2,kv_heads=1,head_dim_qk=16,head_dim_v=16,window_left=90,window_right=200,sinks=1",
      SWATHE_ZIGZAG, 3, 1, 700, false },
    { "q_heads=2,kv_heads=2,head_dim_qk=8,head_dim_v=8,window_left=400,dtype=bf16,"
      "halo_gradient=bf16", SWATHE_CONTIGUOUS, 4, 2, 500, false },  // three hops
    { "q_heads=1,kv_heads=1,head_dim_qk=8,head_dim_v=8,window_left=3",
      SWATHE_CONTIGUOUS, 5, 1, 11, false },  // fewer tokens than chunks
  };
  static const char *const configs[] = {
    "overlap=0,chunks=1,together=1,order=0,poll=1,progress=0",
    "overlap=0,chunks=8,together=0,order=1,poll=1,progress=0",
    "overlap=1,chunks=4,together=0,order=0,poll=4,progress=0",
    "overlap=2,chunks=1,together=1,order=0,poll=1,progress=0",
    "overlap=2,chunks=4,together=1,order=1,poll=1,progress=0",
    "overlap=2,chunks=8,together=0,order=0,poll=4,progress=50",
  };
  (void)state;
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
    struct swathe_problem problem = problem_of(shapes[i].problem);
    const struct swathe_sharding sharding = { .layout = shapes[i].layout,
                                              .ranks = shapes[i].ranks,
                                              .batch = shapes[i].batch,
                                              .tokens = shapes[i].tokens };
    struct sequence *sequences[2];
    int64_t moved[2][8] = { { 0 } };
    char words[1024] = "";
    problem.ranks = sharding.ranks;
    problem.layout = sharding.layout;
    for (int s = 0; s < 2; s++) sequences[s] = sequence_make(&problem, &sharding, 11, 1);
    struct group_case group = { .context = context, .problem = &problem, .sharding = &sharding,
                                .script = "fbpfb", .keep_halo = shapes[i].keep_halo };
    if (group_run(&group, sequences[0], moved[0], words, sizeof words)) fail_msg("%s", words);
    for (size_t c = 0; c < sizeof configs / sizeof *configs; c++) {
      group.exchange = configs[c];
      sequence_forget(sequences[1]);
      if (group_run(&group, sequences[1], moved[1], words, sizeof words))
        fail_msg("%s: %s", configs[c], words);
      expect_same_bits(sequences[0], sequences[1], configs[c]);
      assert_memory_equal(moved[0], moved[1], sizeof moved[0]);
    }
    for (int s = 0; s < 2; s++) sequence_free(sequences[s]);
  }
}

// ---- Agreement ---------------------------------------------------------------------------------

struct creating {
  struct swathe_threads *threads;
  const struct swathe_problem *problem;
  const char *exchange;
  int32_t rank;
  enum swathe_status status;
  char text[2048];  // explain, or the words
};

static void *create(void *arg)
{
  struct creating *self = arg;
  const char *const configs[SW_CONFIGS] = { NULL, NULL, self->exchange };
  struct swathe_layer *layer = NULL;
  self->status = sw_layer_create(context, self->problem,
                                 swathe_threads_rank(self->threads, self->rank), configs, 1,
                                 &layer);
  if (self->status) snprintf(self->text, sizeof self->text, "%s", swathe_error());
  else swathe_layer_explain(layer, self->text, sizeof self->text);
  swathe_layer_destroy(layer);
  return NULL;
}

static void create_both(struct creating ranks[2], const char *const exchange[2])
{
  const struct swathe_problem problem =
      problem_of("q_heads=1,kv_heads=1,head_dim_qk=8,head_dim_v=8,window_left=3,ranks=2");
  struct swathe_threads *threads = NULL;
  pthread_t ids[2];
  assert_int_equal(swathe_threads_create(2, 10, &threads), SWATHE_OK);
  for (int r = 0; r < 2; r++) {
    ranks[r] = (struct creating){ threads, &problem, exchange[r], r, SWATHE_OK, "" };
    pthread_create(&ids[r], NULL, create, &ranks[r]);
  }
  for (int r = 0; r < 2; r++) pthread_join(ids[r], NULL);
  swathe_threads_destroy(threads);
}

static void rank_0_decides(void **state)
{
  static const char chosen[] = "overlap=2,chunks=2,together=0,order=1,poll=4,progress=200";
  struct creating ranks[2];
  (void)state;
  create_both(ranks, (const char *const[]){ chosen, NULL });
  for (int r = 0; r < 2; r++) {
    assert_int_equal(ranks[r].status, SWATHE_OK);
    if (!strstr(ranks[r].text, chosen)) fail_msg("rank %d: %s", r, ranks[r].text);
  }
  assert_non_null(strstr(ranks[1].text, "rank 0's choice"));
}

static void a_config_that_is_none_is_refused(void **state)
{
  const struct swathe_problem problem = problem_of("window_left=3");
  const char *const configs[SW_CONFIGS] = {
    NULL, NULL, "overlap=2,chunks=3,together=1,order=0,poll=1,progress=0"
  };
  struct swathe_layer *layer = NULL;
  (void)state;
  assert_int_equal(sw_layer_create(context, &problem, NULL, configs, 1, &layer),
                   SWATHE_BAD_CONFIG);
  assert_non_null(strstr(swathe_error(), "chunks=3"));
  const struct sw_gen_request request = { &problem, sw_exchange_kernel, context->isa };
  struct sw_gen_source text;
  assert_int_equal(sw_gen_emit(context->gen, &request, "", &text), SWATHE_BAD_USE);
  assert_non_null(strstr(swathe_error(), "exchange is no kernel"));
}

// ---- Tuning ------------------------------------------------------------------------------------

struct tuning_rank {
  struct swathe_threads *threads;
  const struct swathe_problem *problem;
  struct swathe_tune_options options;
  struct swathe_tuned tuned;
  int32_t rank;
  enum swathe_status status;
  char text[2048];  // explain, or the words
};

static void *tune(void *arg)
{
  struct tuning_rank *self = arg;
  struct swathe_transport *transport = swathe_threads_rank(self->threads, self->rank);
  struct swathe_layer *layer = NULL;
  self->status =
      swathe_tune_exchange(context, self->problem, transport, &self->options, &self->tuned);
  if (!self->status) self->status = swathe_layer_create(context, self->problem, transport, &layer);
  if (self->status) snprintf(self->text, sizeof self->text, "%s", swathe_error());
  else swathe_layer_explain(layer, self->text, sizeof self->text);
  swathe_layer_destroy(layer);
  return NULL;
}

#define TUNED "q_heads=2,kv_heads=2,head_dim_qk=8,head_dim_v=8,window_left=300,ranks=2,sinks=1"

static void tune_both(struct tuning_rank ranks[2], int64_t tokens_per_rank,
                      const struct swathe_tune_options *options)
{
  struct swathe_problem problem = problem_of(TUNED);
  struct swathe_threads *threads = NULL;
  pthread_t ids[2];
  problem.tokens_per_rank = tokens_per_rank;
  assert_int_equal(swathe_threads_create(2, 20, &threads), SWATHE_OK);
  for (int r = 0; r < 2; r++) {
    ranks[r] = (struct tuning_rank){ .threads = threads, .problem = &problem,
                                     .options = *options, .rank = r };
    pthread_create(&ids[r], NULL, tune, &ranks[r]);
  }
  for (int r = 0; r < 2; r++) pthread_join(ids[r], NULL);
  swathe_threads_destroy(threads);
}

// What was found is known to all ranks, is what their next layer uses, and is not measured again.
static void the_group_tunes_its_exchange(void **state)
{
  const struct swathe_tune_options options = { .budget_s = 3 };
  struct tuning_rank ranks[2];
  char first[512];
  (void)state;
  tune_both(ranks, 1200, &options);
  for (int r = 0; r < 2; r++) {
    if (ranks[r].status) fail_msg("rank %d: %s", r, ranks[r].text);
    assert_string_equal(ranks[r].tuned.config, ranks[0].tuned.config);
    if (!strstr(ranks[r].text, ranks[0].tuned.config)) fail_msg("rank %d: %s", r, ranks[r].text);
  }
  assert_non_null(strstr(ranks[0].text, "exact pick"));
  assert_true(ranks[0].tuned.tried > 1);
  assert_true(ranks[0].tuned.default_us > 0);
  assert_true(ranks[0].tuned.ratio <= 1);
  assert_int_equal(ranks[0].tuned.rejected, 0);
  snprintf(first, sizeof first, "%s", ranks[0].tuned.config);
  tune_both(ranks, 1200, &options);
  for (int r = 0; r < 2; r++) {
    assert_int_equal(ranks[r].status, SWATHE_OK);
    assert_true(ranks[r].tuned.reused);
    assert_string_equal(ranks[r].tuned.config, first);
  }
}

static int64_t count_configs(void)
{
  const struct swathe_problem problem = problem_of(TUNED);
  const struct sw_gen_request request = { &problem, sw_exchange_kernel, context->isa };
  char config[SW_CONFIG_TEXT];
  struct sw_gen_walk *walk = NULL;
  int64_t count = 0;
  assert_int_equal(sw_gen_walk_begin(context->gen, &request, false, &walk), SWATHE_OK);
  while (!sw_gen_walk_next(walk, config)) count++;
  sw_gen_walk_end(walk);
  return count;
}

// B37: a budget that ends a search is no end of it for whoever gives more, and what was measured is
// not measured again.
static void more_time_goes_on_where_less_ended(void **state)
{
  struct swathe_tune_options options = { .budget_s = 1e-6 };
  struct tuning_rank ranks[2];
  int64_t tried;
  (void)state;
  for (int time = 0; time < 2; time++) {
    tune_both(ranks, 600, &options);
    if (ranks[0].status) fail_msg("%s", ranks[0].text);
    assert_false(ranks[0].tuned.reused);
    assert_int_equal(ranks[0].tuned.tried, 1);  // the default
    assert_non_null(strstr(ranks[0].text, "not finished"));
  }
  options.budget_s = 0.5;
  do {  // a slow machine takes longer for the default alone
    options.budget_s *= 2;
    tune_both(ranks, 600, &options);
    if (ranks[0].status) fail_msg("%s", ranks[0].text);
  } while (ranks[0].tuned.tried == 1 && options.budget_s < 60);
  assert_true(ranks[0].tuned.tried > 1);
  tried = ranks[0].tuned.tried;
  tune_both(ranks, 600, &options);
  assert_true(ranks[0].tuned.reused);
  options.budget_s = 120;
  tune_both(ranks, 600, &options);
  if (ranks[0].status) fail_msg("%s", ranks[0].text);
  assert_false(ranks[0].tuned.reused);
  tried += ranks[0].tuned.tried;
  assert_true(tried <= count_configs() + 1);  // the default alone is timed twice
}

static void who_stops_tuning_stops_all(void **state)
{
  const volatile int stop = 1;
  const struct swathe_tune_options options = { .budget_s = 60, .again = true, .stop = &stop };
  struct tuning_rank ranks[2];
  (void)state;
  tune_both(ranks, 1200, &options);
  for (int r = 0; r < 2; r++) assert_int_equal(ranks[r].status, SWATHE_INTERRUPTED);
}

// ---- When units run ----------------------------------------------------------------------------

// A transport that holds back what the other one brought: a message is handed over after so many
// looks, the nearest chunk first; until then its place is poisoned.
enum { LOOKS = 24, MOST_HELD = 16 };

struct held {
  char *place, *staged;
  size_t bytes;
  _Atomic int32_t *left;
};

// What the share's rows held when a message was handed over.
struct sight {
  bool interior, edge[4];  // whether written; edge: by unit
};

struct holding {
  struct swathe_transport transport;
  struct swathe_transport *inner;
  const struct share *share;
  struct held held[MOST_HELD];
  struct sight sights[MOST_HELD];
  int32_t count, handed, looks, looks_before_wait;
  int64_t edge_tokens;
  bool waited, arrived;
};

static bool is_written(const struct holding *holding, int64_t row)
{
  const struct swathe_tensor *lse = &holding->share->tensors.lse;
  const float value = ((const float *)lse->data)[row * lse->token_stride];
  return value == value;
}

static void hand_over(struct holding *holding)
{
  struct held *held = &holding->held[holding->handed];
  struct sight *sight = &holding->sights[holding->handed++];
  sight->interior = true;
  for (int64_t row = holding->edge_tokens; row < holding->share->rows; row++)
    sight->interior = sight->interior && is_written(holding, row);
  for (int u = 0; u < 4; u++) sight->edge[u] = is_written(holding, holding->edge_tokens / 4 * u);
  memcpy(held->place, held->staged, held->bytes);
  if (held->left) --*held->left;
  free(held->staged);
}

static enum swathe_status hold_post(struct swathe_transport *transport,
                                    const struct sw_transport_message *messages, int32_t count)
{
  struct holding *holding = (struct holding *)transport;
  struct sw_transport_message passed[2 * MOST_HELD];
  assert_in_range(count, 1, 2 * MOST_HELD);
  for (int32_t i = 0; i < count; i++) {
    passed[i] = messages[i];
    passed[i].left = NULL;
    if (messages[i].send) continue;
    assert_true(holding->count < MOST_HELD);
    struct held *held = &holding->held[holding->count++];
    *held = (struct held){ messages[i].data, malloc(messages[i].bytes), messages[i].bytes,
                           messages[i].left };
    memset(held->place, 0xff, held->bytes);
    passed[i].data = held->staged;
  }
  return holding->inner->operations->post(holding->inner, passed, count);
}

static enum swathe_status hold_test(struct swathe_transport *transport, bool *done)
{
  struct holding *holding = (struct holding *)transport;
  enum swathe_status status = SWATHE_OK;
  holding->looks++;
  if (!holding->waited) holding->looks_before_wait++;
  if (!holding->arrived) status = holding->inner->operations->wait(holding->inner);
  if (status) return status;
  holding->arrived = true;
  if (holding->handed < holding->count && holding->looks >= (holding->handed + 1) * LOOKS)
    hand_over(holding);
  *done = holding->handed == holding->count;
  return SWATHE_OK;
}

static enum swathe_status hold_wait(struct swathe_transport *transport)
{
  struct holding *holding = (struct holding *)transport;
  const enum swathe_status status =
      holding->arrived ? SWATHE_OK : holding->inner->operations->wait(holding->inner);
  holding->waited = holding->arrived = true;
  while (!status && holding->handed < holding->count) hand_over(holding);
  return status;
}

static enum swathe_status hold_gather(struct swathe_transport *transport, const void *mine,
                                      size_t bytes, void *all)
{
  struct holding *holding = (struct holding *)transport;
  return holding->inner->operations->gather(holding->inner, mine, bytes, all);
}

static const struct sw_transport_operations hold_operations = {
  .post = hold_post, .test = hold_test, .wait = hold_wait, .gather = hold_gather
};

struct watched {
  struct swathe_threads *threads;
  const struct sequence *sequence;
  const struct swathe_sharding *sharding;
  const char *exchange, *forward;
  struct share *share;
  struct holding holding;
  int32_t rank;
  enum swathe_status status;
  char words[1024];
};

static void *run_forward(void *arg)
{
  struct watched *self = arg;
  const char *const configs[SW_CONFIGS] = { self->forward, NULL, self->exchange };
  struct swathe_layer *layer = NULL;
  struct holding *holding = &self->holding;
  struct swathe_transport *transport = swathe_threads_rank(self->threads, self->rank);
  holding->transport = *transport;
  holding->transport.operations = &hold_operations;
  holding->inner = transport;
  holding->share = self->share;
  self->status = sw_layer_create(context, &self->sequence->problem,
                                 self->rank ? &holding->transport : transport, configs, 1, &layer);
  if (!self->status) self->status = swathe_layer_shard(layer, self->sharding);
  if (!self->status) holding->edge_tokens = 0;
  if (!self->status && self->rank) assert_int_equal(layer->work[0].edge_units, 4);
  for (int64_t u = 0; !self->status && u < layer->work[0].edge_units; u++)
    holding->edge_tokens += layer->work[0].units[u].tokens;
  if (!self->status) self->status = swathe_layer_forward(layer, &self->share->tensors, NULL);
  if (self->status) snprintf(self->words, sizeof self->words, "%s", swathe_error());
  swathe_layer_destroy(layer);
  return NULL;
}

// The forward default with tiles of two vectors of query rows, of which on any isa a whole number
// is a unit.
static void even_tiles(const struct swathe_problem *problem, char *config)
{
  const struct sw_gen_request request = { problem, "forward", context->isa };
  assert_int_equal(sw_gen_default(context->gen, &request, config), SWATHE_OK);
  assert_memory_equal(config, "vectors=", 8);
  config[8] = '2';
}

// A window of four units over two ranks; what rank 1 saw as the halo came to it.
static struct holding watch(const char *exchange)
{
  const struct swathe_problem problem =
      problem_of("q_heads=2,kv_heads=2,head_dim_qk=8,head_dim_v=8,window_left=2047,ranks=2");
  const struct swathe_sharding sharding = { .ranks = 2, .batch = 1, .tokens = 9000 };
  struct sequence *sequences[2] = { sequence_make(&problem, &sharding, 2, 1),
                                    sequence_make(&problem, &sharding, 2, 1) };
  char words[1024], forward[SW_CONFIG_TEXT];
  const char *const configs[2] = { forward, NULL };
  const struct group_case plain = { .context = context, .problem = &problem,
                                    .sharding = &sharding, .script = "f", .configs = configs };
  struct watched ranks[2];
  pthread_t ids[2];
  struct swathe_threads *threads = NULL;

  even_tiles(&problem, forward);
  assert_int_equal(swathe_threads_create(2, 20, &threads), SWATHE_OK);
  for (int r = 0; r < 2; r++) {
    ranks[r] = (struct watched){ .threads = threads, .sequence = sequences[0],
                                 .sharding = &sharding, .exchange = exchange,
                                 .forward = forward, .rank = r };
    ranks[r].share = share_make(sequences[0], &sharding, r, (struct share_form){ .gap = 0 });
    pthread_create(&ids[r], NULL, run_forward, &ranks[r]);
  }
  for (int r = 0; r < 2; r++) {
    pthread_join(ids[r], NULL);
    if (ranks[r].status) fail_msg("rank %d: %s", r, ranks[r].words);
    share_gather(sequences[0], ranks[r].share, false);
  }
  if (group_run(&plain, sequences[1], NULL, words, sizeof words)) fail_msg("%s", words);
  for (int a = SEQUENCE_OUT; a <= SEQUENCE_LSE; a++)
    assert_memory_equal(sequences[0]->got[a], sequences[1]->got[a], bytes_of(sequences[0], a));
  for (int r = 0; r < 2; r++) share_free(ranks[r].share), sequence_free(sequences[r]);
  swathe_threads_destroy(threads);
  return ranks[1].holding;
}

static void without_overlap_nothing_runs_before(void **state)
{
  const struct holding seen = watch("overlap=0,chunks=1,together=1,order=0,poll=1,progress=0");
  (void)state;
  assert_int_equal(seen.looks_before_wait, 0);
  assert_int_equal(seen.count, 1);
  assert_false(seen.sights[0].interior);
}

static void the_interior_runs_while_keys_travel(void **state)
{
  const struct holding seen = watch("overlap=1,chunks=1,together=1,order=0,poll=1,progress=0");
  const struct holding seldom = watch("overlap=1,chunks=1,together=1,order=0,poll=4,progress=0");
  (void)state;
  assert_true(seen.sights[0].interior);
  for (int u = 0; u < 4; u++) assert_false(seen.sights[0].edge[u]);
  // a look for each item, and for every fourth
  assert_in_range(seen.looks_before_wait, 4, LOOKS);
  assert_in_range(seldom.looks_before_wait, 1, (seen.looks_before_wait + 3) / 4);
}

// Chunk c serves the unit that is c units nearer the boundary than the last.
static void edge_units_run_as_their_keys_come(void **state)
{
  const struct holding seen = watch("overlap=2,chunks=4,together=1,order=0,poll=1,progress=0");
  (void)state;
  assert_int_equal(seen.count, 4);
  assert_true(seen.sights[0].interior);
  for (int chunk = 0; chunk < 4; chunk++)
    for (int u = 0; u < 4; u++)
      if (seen.sights[chunk].edge[u] != (3 - u < chunk))
        fail_msg("when chunk %d came, edge unit %d was %s", chunk, u,
                 seen.sights[chunk].edge[u] ? "done" : "not done");
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(results_do_not_depend_on_it),
    cmocka_unit_test(rank_0_decides),
    cmocka_unit_test(a_config_that_is_none_is_refused),
    cmocka_unit_test(the_group_tunes_its_exchange),
    cmocka_unit_test(more_time_goes_on_where_less_ended),
    cmocka_unit_test(who_stops_tuning_stops_all),
    cmocka_unit_test(without_overlap_nothing_runs_before),
    cmocka_unit_test(the_interior_runs_while_keys_travel),
    cmocka_unit_test(edge_units_run_as_their_keys_come),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
