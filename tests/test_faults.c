// test_faults.c: whatever one rank does, the others' layers end: with the right results, or with a
// status and words that name a rank, by the deadline; and the process goes on.
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "exchange.h"
#include "layer.h"
#include "scratch.h"
#include "sequence.h"

enum { MOST_RANKS = 4, LANES = 6, INJECTIONS = 1000 };
static const double deadline_s = 0.03;

static struct swathe_context *context;

// ---- A transport that misbehaves ---------------------------------------------------------------

enum fault {
  HEALTHY,
  DIES,  // the rank is gone, without a word
  LATE,  // by more than the deadline
  BRIEFLY_LATE,
  OTHER_SIZE,  // of a message
  FEWER,       // messages than planned
  NO_POST,
  OTHER_WORDS,   // in a gather: another version, another sharding
  OTHER_GATHER,  // of another size
  CALL_FAILS,    // the rank's own layer fails with messages under way
  FAULTS
};

struct faulty {
  struct swathe_transport transport, *below;
  enum fault kind;
  int left;  // calls until it happens
  bool dead;
};

static struct faulty *faulty_of(struct swathe_transport *transport)
{
  return (struct faulty *)transport;
}

static void nap(double s)
{
  const struct timespec time = { (time_t)s, (long)(1e9 * (s - (double)(time_t)s)) };
  nanosleep(&time, NULL);
}

// The fault of this call.
static enum fault strike(struct faulty *faulty)
{
  const bool now = faulty->left-- == 0;
  if (now && faulty->kind == DIES) faulty->dead = true;
  if (now && faulty->kind == LATE) nap(2 * deadline_s);
  if (now && faulty->kind == BRIEFLY_LATE) nap(deadline_s / 8);
  return now ? faulty->kind : HEALTHY;
}

static enum swathe_status dead(const struct faulty *faulty)
{
  return faulty->dead ? sw_fail(SWATHE_INTERRUPTED, "this rank is no more") : SWATHE_OK;
}

static enum swathe_status faulty_post(struct swathe_transport *transport,
                                      const struct sw_transport_message *messages, int32_t count)
{
  struct faulty *faulty = faulty_of(transport);
  struct sw_transport_message *changed = calloc((size_t)count + 1, sizeof *changed);
  const enum fault fault = strike(faulty);
  enum swathe_status status = dead(faulty);

  memcpy(changed, messages, (size_t)count * sizeof *changed);
  if (fault == OTHER_SIZE) changed[0].bytes = (changed[0].bytes + 1) / 2;
  if (fault == FEWER) count /= 2;
  if (fault == NO_POST) count = 0;
  if (!status) status = faulty->below->operations->post(faulty->below, changed, count);
  free(changed);
  return status;
}

static enum swathe_status faulty_test(struct swathe_transport *transport, bool *done)
{
  struct faulty *faulty = faulty_of(transport);
  const enum fault fault = strike(faulty);
  enum swathe_status status = dead(faulty);
  if (!status && fault == CALL_FAILS) status = sw_fail(SWATHE_DEVICE, "the rank's device fails");
  return status ? status : faulty->below->operations->test(faulty->below, done);
}

static enum swathe_status faulty_wait(struct swathe_transport *transport)
{
  struct faulty *faulty = faulty_of(transport);
  const enum fault fault = strike(faulty);
  enum swathe_status status = dead(faulty);
  if (!status && fault == CALL_FAILS) status = sw_fail(SWATHE_DEVICE, "the rank's device fails");
  return status ? status : faulty->below->operations->wait(faulty->below);
}

static enum swathe_status faulty_gather(struct swathe_transport *transport, const void *mine,
                                        size_t bytes, void *all)
{
  struct faulty *faulty = faulty_of(transport);
  char *words = malloc(bytes + 1);
  const enum fault fault = strike(faulty);
  enum swathe_status status = dead(faulty);

  memcpy(words, mine, bytes);
  if (fault == OTHER_WORDS) words[0] ^= 1;  // of the version, or of a digest
  if (fault == OTHER_GATHER) bytes /= 2;
  if (!status) status = faulty->below->operations->gather(faulty->below, words, bytes, all);
  free(words);
  return status;
}

static void faulty_abort(struct swathe_transport *transport, const char *why)
{
  faulty_of(transport)->below->operations->abort(faulty_of(transport)->below, why);
}

static void faulty_destroy(struct swathe_transport *transport) { (void)transport; }

static const struct sw_transport_operations operations = {
  .post = faulty_post,
  .test = faulty_test,
  .wait = faulty_wait,
  .gather = faulty_gather,
  .destroy = faulty_destroy,
  .abort = faulty_abort,
};

// ---- Ranks -------------------------------------------------------------------------------------

// Backward after forward, twice, under two shardings: what a trainer does.
static const struct plan {
  const char *problem;
  struct swathe_sharding first, second;
} plan = {
  .problem = "q_heads=2,kv_heads=1,head_dim_qk=8,head_dim_v=8,window_left=20,window_right=2",
  .first = { .layout = SWATHE_CONTIGUOUS, .batch = 1, .tokens = 90 },
  .second = { .layout = SWATHE_ZIGZAG, .batch = 1, .tokens = 90 },
};

struct rank {
  struct faulty faulty;
  struct swathe_context *context;  // NULL: the one of all
  bool strays;                     // has another second layout
  const struct swathe_problem *problem;
  struct sequence *sequence;
  struct share *shares[2];
  struct swathe_layer *layer;
  enum swathe_status status;
  char words[1024];
  double seconds;
};

static enum swathe_status train(struct rank *rank)
{
  struct swathe_layer *layer = rank->layer;
  struct swathe_sharding shardings[] = { plan.first, plan.second };
  enum swathe_status status = SWATHE_OK;
  for (int i = 0; i < 2 && !status; i++) {
    shardings[i].ranks = rank->faulty.transport.ranks;
    if (i == 1 && rank->strays) shardings[i].layout = SWATHE_ZIGZAG_DOCUMENT;
    status = swathe_layer_shard(layer, &shardings[i]);
    if (!status) status = swathe_layer_forward(layer, &rank->shares[i]->tensors, NULL);
    if (!status) status = swathe_layer_backward(layer, &rank->shares[i]->tensors, NULL);
  }
  return status;
}

static void destroy_layer(struct rank *rank)
{
  swathe_layer_destroy(rank->layer);
  rank->layer = NULL;
}

static void *be_rank(void *arg)
{
  struct rank *rank = arg;
  const double begin_s = sw_layer_now_s();
  rank->status = swathe_layer_create(rank->context ? rank->context : context, rank->problem,
                                     &rank->faulty.transport, &rank->layer);
  if (!rank->status) rank->status = train(rank);
  if (rank->status) snprintf(rank->words, sizeof rank->words, "%s", swathe_error());
  rank->seconds = sw_layer_now_s() - begin_s;
  // the memory of a rank that died goes last: its messages are still there
  if (!rank->faulty.dead) destroy_layer(rank);
  return NULL;
}

static void run_ranks(struct rank *ranks, int count, double limit_s)
{
  struct swathe_threads *group = NULL;
  pthread_t threads[MOST_RANKS];
  if (swathe_threads_create(count, limit_s, &group)) abort();
  for (int r = 0; r < count; r++) {
    ranks[r].faulty.below = swathe_threads_rank(group, r);
    ranks[r].faulty.transport = (struct swathe_transport){
      .operations = &operations, .name = "faulty", .rank = r, .ranks = count
    };
    if (pthread_create(&threads[r], NULL, be_rank, &ranks[r])) abort();
  }
  for (int r = 0; r < count; r++) pthread_join(threads[r], NULL);
  swathe_threads_destroy(group);
  for (int r = 0; r < count; r++) destroy_layer(&ranks[r]);
}

static void make_shares(struct rank *ranks, int count, const struct swathe_problem *problem,
                        struct sequence *sequence)
{
  for (int r = 0; r < count; r++) {
    ranks[r].problem = problem;
    ranks[r].sequence = sequence;
    for (int i = 0; i < 2; i++) {
      struct swathe_sharding sharding = i ? plan.second : plan.first;
      sharding.ranks = count;
      ranks[r].shares[i] = share_make(sequence, &sharding, r, (struct share_form){ false, 0 });
      if (!ranks[r].shares[i]) abort();
    }
  }
}

static void free_shares(struct rank *ranks, int count)
{
  for (int r = 0; r < count; r++)
    for (int i = 0; i < 2; i++) share_free(ranks[r].shares[i]);
}

static bool same_results(const struct rank *rank, const struct rank *healthy)
{
  for (int i = 0; i < 2; i++)
    for (int a = SEQUENCE_OUT; a < SEQUENCE_ARRAYS; a++)
      if (memcmp(rank->shares[i]->memory[a], healthy->shares[i]->memory[a],
                 share_bytes(rank->sequence, rank->shares[i], (enum sequence_array)a)))
        return false;
  return true;
}

// ---- Injections --------------------------------------------------------------------------------

static struct swathe_problem problem;
static struct sequence *sequence;
static struct rank healthy[MOST_RANKS + 1][MOST_RANKS];  // by number of ranks
static atomic_int next_injection, failed_ranks, sound_ranks;

struct lane {
  pthread_t thread;
  char wrong[2048];
};

static void judge(struct lane *lane, int seed, enum fault kind, const struct rank *rank,
                  const struct rank *sound)
{
  const int number = rank->faulty.transport.rank;
  const char *what = NULL;
  if (rank->faulty.dead) return;
  if (rank->seconds > 10) what = "took far longer than the deadline";
  else if (!rank->status && !same_results(rank, sound)) what = "has other results";
  else if (rank->status && !strstr(rank->words, "rank ")) what = "names no rank";
  else if (rank->status == SWATHE_NO_MEMORY) what = "has no memory";
  if (rank->status) atomic_fetch_add(&failed_ranks, 1);
  else atomic_fetch_add(&sound_ranks, 1);
  if (what && !*lane->wrong)
    snprintf(lane->wrong, sizeof lane->wrong, "seed %d, fault %d: rank %d %s: %s", seed, kind,
             number, what, rank->words);
}

static void *inject(void *arg)
{
  struct lane *lane = arg;
  int number;
  while ((number = atomic_fetch_add(&next_injection, 1)) < INJECTIONS) {
    struct rank ranks[MOST_RANKS];
    uint64_t seed = exchange_mix((uint64_t)number);
    const int count = 2 + exchange_below(&seed, MOST_RANKS - 1);
    const int culprit = exchange_below(&seed, count);
    const enum fault kind = (enum fault)(1 + exchange_below(&seed, FAULTS - 1));
    memset(ranks, 0, sizeof ranks);
    make_shares(ranks, count, &problem, sequence);
    ranks[culprit].faulty.kind = kind;
    ranks[culprit].faulty.left = exchange_below(&seed, 17);
    run_ranks(ranks, count, deadline_s);
    for (int r = 0; r < count; r++)
      if (r != culprit || kind == BRIEFLY_LATE)
        judge(lane, number, kind, &ranks[r], &healthy[count][r]);
    free_shares(ranks, count);
  }
  return NULL;
}

static void no_fault_hangs_or_passes(void **state)
{
  struct lane lanes[LANES] = { { .wrong = "" } };
  (void)state;
  alarm(300);  // the watchdog
  for (int i = 0; i < LANES; i++)
    assert_int_equal(pthread_create(&lanes[i].thread, NULL, inject, &lanes[i]), 0);
  for (int i = 0; i < LANES; i++) pthread_join(lanes[i].thread, NULL);
  alarm(0);
  for (int i = 0; i < LANES; i++)
    if (*lanes[i].wrong) fail_msg("%s", lanes[i].wrong);
  assert_true(atomic_load(&failed_ranks) > INJECTIONS / 2);
  assert_true(atomic_load(&sound_ranks) > INJECTIONS / 20);
}

// One fault of each kind where it is sure to strike, by what the others say of it.
static void faults_are_named(void **state)
{
  static const struct {
    enum fault kind;
    int left;
    enum swathe_status status;
    const char *words;
  } rows[] = {
    // calls: all can, the problem, all could, the sharding; then a post and a test or wait
    { OTHER_WORDS, 0, SWATHE_DISAGREE, "rank 1 runs swathe 1.1.0, rank 0 runs 0.1.0" },
    { OTHER_WORDS, 1, SWATHE_DISAGREE, "rank 1 has the problem" },
    { OTHER_WORDS, 3, SWATHE_DISAGREE, "the same sharding" },
    { OTHER_GATHER, 0, SWATHE_DISAGREE, "rank 1 gathers" },
    { OTHER_SIZE, 4, SWATHE_DISAGREE, "they do not hold the same plan" },
    { DIES, 0, SWATHE_TIMEOUT, "did not come to a gather in 0.03 s: rank 1" },
    { DIES, 4, SWATHE_TIMEOUT, "waited 0.03 s for rank 1" },
    { LATE, 0, SWATHE_TIMEOUT, "did not come to a gather in 0.03 s: rank 1" },
    { NO_POST, 4, SWATHE_DISAGREE, "they do not hold the same plan" },
  };
  (void)state;
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    struct rank ranks[MOST_RANKS];
    memset(ranks, 0, sizeof ranks);
    make_shares(ranks, 2, &problem, sequence);
    ranks[1].faulty.kind = rows[i].kind;
    ranks[1].faulty.left = rows[i].left;
    run_ranks(ranks, 2, deadline_s);
    if (ranks[0].status != rows[i].status || !strstr(ranks[0].words, rows[i].words))
      fail_msg("fault %d at %d: '%s': %s", rows[i].kind, rows[i].left,
               swathe_status_text(ranks[0].status), ranks[0].words);
    free_shares(ranks, 2);
  }
}

// A micro-batch later one rank has another layout, though with one document it comes to the same.
static void every_sharding_is_compared(void **state)
{
  struct rank ranks[MOST_RANKS];
  (void)state;
  memset(ranks, 0, sizeof ranks);
  make_shares(ranks, 2, &problem, sequence);
  ranks[0].faulty.left = ranks[1].faulty.left = -1;
  ranks[1].strays = true;
  run_ranks(ranks, 2, 20);
  for (int r = 0; r < 2; r++) {
    assert_int_equal(ranks[r].status, SWATHE_DISAGREE);
    assert_non_null(strstr(ranks[r].words, "rank 1 and rank 0 do not hold the same sharding"));
  }
  free_shares(ranks, 2);
}

// A call that fails while its messages wait for rank 0.
static void a_failed_call_is_told(void **state)
{
  struct rank ranks[MOST_RANKS];
  (void)state;
  memset(ranks, 0, sizeof ranks);
  make_shares(ranks, 2, &problem, sequence);
  ranks[0].faulty = (struct faulty){ .kind = LATE, .left = 4 };
  ranks[1].faulty = (struct faulty){ .kind = CALL_FAILS, .left = 5 };
  run_ranks(ranks, 2, 20);
  assert_int_equal(ranks[1].status, SWATHE_DEVICE);
  assert_int_equal(ranks[0].status, SWATHE_TRANSPORT);
  assert_non_null(strstr(ranks[0].words, "rank 1 gave up: the rank's device fails"));
  free_shares(ranks, 2);
}

// Rank 1 has no tuning data, but must have some: all get to know, and may go on with the same
// transport.
static void a_rank_that_cannot_is_named(void **state)
{
  struct swathe_context *strict = NULL;
  const struct swathe_options options = { .database = "/nonexistent/tuning.db",
                                          .threads = 1,
                                          .mode = SWATHE_REQUIRE };
  (void)state;
  assert_int_equal(swathe_open(&options, &strict), SWATHE_OK);
  for (int strict_rank = 0; strict_rank < 2; strict_rank++) {
    struct rank ranks[MOST_RANKS];
    memset(ranks, 0, sizeof ranks);
    make_shares(ranks, 2, &problem, sequence);
    ranks[strict_rank].context = strict;
    run_ranks(ranks, 2, 20);
    assert_string_not_equal(ranks[0].words, "");
    assert_int_equal(ranks[0].status, ranks[1].status);
    char named[64];
    snprintf(named, sizeof named, "rank %d cannot make the layer: ", strict_rank);
    assert_non_null(strstr(ranks[1 - strict_rank].words, named));
    assert_true(ranks[1 - strict_rank].seconds < 10);
    free_shares(ranks, 2);
  }
  swathe_close(strict);
}

// ---- The program -------------------------------------------------------------------------------

static int set_up(void **state)
{
  (void)state;
  const char *scratch = scratch_make("faults"), *cache = getenv("TEST_CACHE_DIR");
  char database[256];
  if (!scratch) return -1;
  snprintf(database, sizeof database, "%s/tuning.db", scratch);
  const struct swathe_options options = { .database = database,
                                          .cache = cache ? cache : scratch,
                                          .threads = 1 };
  swathe_problem_init(&problem);
  if (swathe_problem_parse(plan.problem, &problem) || swathe_open(&options, &context)) return -1;
  sequence = sequence_make(&problem, &plan.first, 3, 1);
  for (int count = 2; count <= MOST_RANKS; count++) {
    make_shares(healthy[count], count, &problem, sequence);
    for (int r = 0; r < count; r++) healthy[count][r].faulty.left = -1;
    run_ranks(healthy[count], count, 60);
    for (int r = 0; r < count; r++)
      if (healthy[count][r].status) {
        fprintf(stderr, "rank %d: %s\n", r, healthy[count][r].words);
        return -1;
      }
  }
  return 0;
}

static int tear_down(void **state)
{
  for (int count = 2; count <= MOST_RANKS; count++) free_shares(healthy[count], count);
  sequence_free(sequence);
  swathe_close(context);
  return scratch_remove(state);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(faults_are_named),
    cmocka_unit_test(every_sharding_is_compared),
    cmocka_unit_test(a_failed_call_is_told),
    cmocka_unit_test(a_rank_that_cannot_is_named),
    cmocka_unit_test(no_fault_hangs_or_passes),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
