// test_transport_nccl.c: the nccl transport between devices, on the emulated driver and what stands
// in for NCCL there: layers over ranks, what overlaps, graphs, and what happens when a rank does
// not come.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cuda_driver.h"
#include "exchange.h"
#include "group.h"
#include "layer.h"
#include "scratch.h"
#include "transport.h"

enum { MOST_RANKS = 4, WORDS = 1024, RELAXED = 2 };

static struct swathe_context *context;
static struct cuda_driver cuda;
static const char *scratch;

static int set_up(void **state)
{
  const char *driver = getenv("TEST_LIBCUDA"), *nccl = getenv("TEST_LIBNCCL");
  const char *cache = getenv("TEST_CACHE_DIR");
  char database[64];
  (void)state;
  scratch = scratch_make("transport-nccl");
  if (!scratch) return -1;
  if (driver) setenv("SWATHE_LIBCUDA", driver, 1);
  if (nccl) setenv("SWATHE_LIBNCCL", nccl, 1);
  setenv("EMULATOR_DEVICES", "4", 1);
  setenv("EMULATOR_QUIET", "1", 1);
  snprintf(database, sizeof database, "%s/tuning.db", scratch);
  const struct swathe_options options = {
    .database = database, .cache = cache ? cache : scratch, .threads = 1
  };
  return swathe_open(&options, &context) ? -1 : 0;
}

static int tear_down(void **state)
{
  swathe_close(context);
  return scratch_remove(state);
}

struct health {
  const char *what;
  bool healthy;
  char found[512];
};

static void note_health(void *arg, const struct swathe_finding *finding)
{
  struct health *health = arg;
  if (strcmp(finding->what, health->what)) return;
  health->healthy = finding->health == SWATHE_HEALTHY;
  snprintf(health->found, sizeof health->found, "%s", finding->found);
}

static struct health health_of(const char *what)
{
  struct health health = { what, false, "" };
  swathe_doctor(context, note_health, &health);
  return health;
}

static void need_driver(void)
{
  const char *path = getenv("TEST_LIBCUDA");
  if (!path || !*path || !getenv("TEST_LIBNCCL")) skip();
  if (!health_of("cuda driver").healthy || !cuda_driver_open(&cuda, path)) skip();
}

static void need_kernels(void)
{
  need_driver();
  if (!health_of("cuda compiler").healthy) skip();
}

static void expect_ok(enum swathe_status status)
{
  if (status) fail_msg("%s", swathe_error());
}

static void expect_success(int result, const char *what)
{
  if (result) fail_msg("%s gives %d", what, result);
}

static void expect_words(const char *words, const char *wanted)
{
  if (!strstr(words, wanted)) fail_msg("no '%s' in: %s", wanted, words);
}

static void pause_ms(int ms)
{
  const struct timespec time = { ms / 1000, ms % 1000 * 1000000L };
  nanosleep(&time, NULL);
}

// ---- Messages -----------------------------------------------------------------------------------

// A rank that is a thread of its own, and what became of it.
struct rank {
  int32_t number, ranks;
  double deadline_s;
  const char *id;
  enum swathe_status (*play)(struct rank *);
  struct swathe_transport *transport;
  enum swathe_status status;
  char words[WORDS];
};

static enum swathe_status connect(struct rank *rank)
{
  const struct swathe_nccl given = {
    .id = rank->id, .rank = rank->number, .ranks = rank->ranks, .deadline_s = rank->deadline_s
  };
  const enum swathe_status status = swathe_device_use(context, rank->number);
  return status ? status : swathe_nccl_create(&given, &rank->transport);
}

static void *live(void *arg)
{
  struct rank *rank = arg;
  rank->status = connect(rank);
  if (!rank->status) rank->status = rank->play(rank);
  if (rank->status && !*rank->words) snprintf(rank->words, WORDS, "%s", swathe_error());
  swathe_transport_destroy(rank->transport);
  return NULL;
}

static void run_ranks(struct rank *ranks, int32_t count, double deadline_s,
                      enum swathe_status (*play)(struct rank *))
{
  pthread_t threads[MOST_RANKS];
  char id[SWATHE_NCCL_ID_BYTES];
  expect_ok(swathe_nccl_id(id));
  for (int32_t r = 0; r < count; r++) {
    ranks[r] = (struct rank){
      .number = r, .ranks = count, .deadline_s = deadline_s, .id = id, .play = play
    };
    assert_int_equal(pthread_create(&threads[r], NULL, live, &ranks[r]), 0);
  }
  for (int32_t r = 0; r < count; r++) pthread_join(threads[r], NULL);
}

static enum swathe_status exchange(struct rank *rank)
{
  bool fine = exchange_randomly(rank->transport, 77, rank->words, WORDS);
  return fine ? SWATHE_OK : SWATHE_WRONG_RESULT;
}

static void host_memory_travels_too(void **state)
{
  struct rank ranks[MOST_RANKS];
  (void)state;
  need_driver();
  for (int32_t count = 1; count <= MOST_RANKS; count++) {
    run_ranks(ranks, count, 60, exchange);
    for (int32_t r = 0; r < count; r++)
      if (ranks[r].status) fail_msg("%d ranks, rank %d: %s", count, r, ranks[r].words);
  }
}

// Groups of growing size on two streams by turns: taken in another order, sizes would not fit.
static enum swathe_status queue_on_two_streams(struct rank *rank)
{
  enum { GROUPS = 40 };
  const int32_t peer = 1 - rank->number;
  void *streams[2], *memory = NULL;
  enum swathe_status status = swathe_memory_allocate(context, SWATHE_CUDA, 4096, &memory);
  for (int s = 0; s < 2; s++)
    if (cuda.stream_create(&streams[s], 1)) return SWATHE_DEVICE;
  for (int i = 1; i <= GROUPS && !status; i++) {
    const struct sw_transport_message messages[] = {
      { memory, (size_t)(16 * i), peer, true, NULL },
      { (char *)memory + 2048, (size_t)(16 * i), peer, false, NULL },
    };
    status = rank->transport->operations->enqueue(rank->transport, messages, 2, streams[i % 2]);
  }
  if (!status) status = swathe_transport_wait(rank->transport);
  for (int s = 0; s < 2; s++) cuda.stream_synchronize(streams[s]);
  for (int s = 0; s < 2; s++) cuda.stream_destroy(streams[s]);
  swathe_memory_free(context, SWATHE_CUDA, memory);
  return status;
}

static void groups_keep_their_order(void **state)
{
  struct rank ranks[2];
  (void)state;
  need_driver();
  run_ranks(ranks, 2, 10, queue_on_two_streams);
  for (int r = 0; r < 2; r++)
    if (ranks[r].status) fail_msg("rank %d: %s", r, ranks[r].words);
}

static enum swathe_status gather_by_rank(struct rank *rank)
{
  char mine[64] = { 0 }, all[64 * MOST_RANKS];
  return swathe_transport_gather(rank->transport, mine, 8 + 8 * (size_t)(rank->number == 1), all);
}

static void gathers_must_agree(void **state)
{
  struct rank ranks[3];
  (void)state;
  need_driver();
  run_ranks(ranks, 3, 60, gather_by_rank);
  for (int r = 0; r < 3; r++) {
    assert_int_equal(ranks[r].status, SWATHE_DISAGREE);
    expect_words(ranks[r].words, "rank 0 gathers 8 bytes, but rank 1 gathers 16");
  }
}

// What NCCL itself finds: both learn of it, and every later call says the same.
static enum swathe_status send_too_little(struct rank *rank)
{
  char data[16] = { 0 };
  const struct swathe_transfer transfer = { data, rank->number ? 16 : 12, !rank->number,
                                            rank->number == 0 };
  const enum swathe_status status = swathe_transport_exchange(rank->transport, &transfer, 1);
  snprintf(rank->words, WORDS, "%s", swathe_error());
  if (status != swathe_transport_gather(rank->transport, data, 1, data))
    return SWATHE_WRONG_RESULT;
  if (!strstr(swathe_error(), "failed before: ") || !strstr(swathe_error(), rank->words))
    return SWATHE_WRONG_RESULT;
  return status;
}

static void errors_of_nccl_are_told(void **state)
{
  struct rank ranks[2];
  (void)state;
  need_driver();
  run_ranks(ranks, 2, 60, send_too_little);
  for (int r = 0; r < 2; r++) {
    assert_int_equal(ranks[r].status, SWATHE_TRANSPORT);
    expect_words(ranks[r].words, "rank 0 sends 12 bytes where rank 1 receives 16");
  }
}

static enum swathe_status gather_twice(struct rank *rank)
{
  char mine = 0, all[MOST_RANKS];
  enum swathe_status status = swathe_transport_gather(rank->transport, &mine, 1, all);
  return status ? status : swathe_transport_gather(rank->transport, &mine, 1, all);
}

// A rank that leaves a group out, one whose NCCL refuses a group, one that hears of an error late.
static void ranks_that_fail_are_waited_for_until_the_deadline(void **state)
{
  static const struct {
    const char *variable, *value, *words;  // words of one rank at least
  } cases[] = {
    { "EMULATOR_NCCL_SILENT", "1:3", "rank 0 waited 2 s on the device for exchange 3 over NCCL "
                                     "(8 bytes from rank 1, 8 bytes to rank 1)" },
    { "EMULATOR_NCCL_FAIL", "ncclGroupEnd:4=3", "failed to queue its messages, at exchange" },
    // up to four were counted before
    { "EMULATOR_NCCL_FAIL", "ncclSend:8=2", "unhandled system error" },
    { "EMULATOR_NCCL_ERROR", "1:2=6", "remote process exited or there was a network error" },
  };
  (void)state;
  need_driver();
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    struct rank ranks[2];
    int said = 0;
    setenv(cases[i].variable, cases[i].value, 1);
    run_ranks(ranks, 2, 2, gather_twice);
    unsetenv(cases[i].variable);
    for (int r = 0; r < 2; r++) {
      if (ranks[r].status != SWATHE_TIMEOUT && ranks[r].status != SWATHE_TRANSPORT)
        fail_msg("%s: rank %d: %d, %s", cases[i].value, r, ranks[r].status, ranks[r].words);
      said += strstr(ranks[r].words, cases[i].words) != NULL;
    }
    if (!said)
      fail_msg("%s: nobody says '%s' but '%s' and '%s'", cases[i].value, cases[i].words,
               ranks[0].words, ranks[1].words);
  }
}

// Rank 1 does not join at all.
static void who_does_not_join_is_not_waited_for(void **state)
{
  char id[SWATHE_NCCL_ID_BYTES];
  struct swathe_transport *transport;
  const struct swathe_nccl given = { .id = id, .rank = 0, .ranks = 2, .deadline_s = 0.2 };
  (void)state;
  need_driver();
  expect_ok(swathe_nccl_id(id));
  assert_int_equal(swathe_nccl_create(&given, &transport), SWATHE_BAD_USE);
  expect_words(swathe_error(), "current CUDA context");
  expect_ok(swathe_device_use(context, 0));
  assert_int_equal(swathe_nccl_create(&given, &transport), SWATHE_TIMEOUT);
  expect_words(swathe_error(), "rank 0 waited 0.2 s for all 2 ranks to join");
  assert_int_equal(swathe_nccl_create(&(struct swathe_nccl){ .ranks = 1 }, &transport),
                   SWATHE_BAD_USE);
  assert_int_equal(swathe_nccl_create(&(struct swathe_nccl){ .id = id, .rank = 2, .ranks = 2 },
                                      &transport),
                   SWATHE_BAD_USE);
  assert_int_equal(swathe_device_use(context, 4), SWATHE_UNSUPPORTED);
  assert_int_equal(swathe_device_use(context, -1), SWATHE_UNSUPPORTED);
  expect_success(cuda.set_current(NULL), "no context");
}

// ---- A communicator of the caller's -------------------------------------------------------------

struct unique {
  char bytes[SWATHE_NCCL_ID_BYTES];
};

static struct {
  int (*init)(void **comm, int ranks, struct unique id, int rank);
  int (*count)(void *comm, int *count);
  int (*destroy)(void *comm);
  int (*abort)(void *comm);
} nccl;

static void open_nccl(void)
{
  void *library = dlopen(getenv("TEST_LIBNCCL"), RTLD_NOW);
  assert_non_null(library);
  *(void **)&nccl.init = dlsym(library, "ncclCommInitRank");
  *(void **)&nccl.count = dlsym(library, "ncclCommCount");
  *(void **)&nccl.destroy = dlsym(library, "ncclCommDestroy");
  *(void **)&nccl.abort = dlsym(library, "ncclCommAbort");
}

struct lender {
  struct rank rank;
  struct unique id;
  void *comm;
  bool absent;                 // rank 1, whose second gather fails to come
  _Atomic int aborts;
  char why[WORDS];
};

static void abort_own(void *user, const char *why)
{
  struct lender *lender = user;
  lender->aborts++;
  snprintf(lender->why, WORDS, "%s", why);
  nccl.abort(lender->comm);
}

static void *lend(void *arg)
{
  struct lender *lender = arg;
  struct rank *rank = &lender->rank;
  int ranks = 0;
  rank->status = swathe_device_use(context, rank->number);
  if (nccl.init(&lender->comm, 2, lender->id, rank->number)) rank->status = SWATHE_TRANSPORT;
  const struct swathe_nccl given = { .communicator = lender->comm, .abort = abort_own,
                                     .user = lender, .deadline_s = 1 };
  if (!rank->status) rank->status = swathe_nccl_create(&given, &rank->transport);
  if (!rank->status) rank->status = gather_twice(rank);
  if (!rank->status && lender->absent && rank->number == 0) {
    char mine = 0, all[2];
    rank->status = swathe_transport_gather(rank->transport, &mine, 1, all);
  }
  if (rank->status) snprintf(rank->words, WORDS, "%s", swathe_error());
  if (lender->absent && rank->number == 1) pause_ms(1500);
  swathe_transport_destroy(rank->transport);
  // still the lender's: it knows its ranks and can be destroyed, once
  if (!lender->aborts && (nccl.count(lender->comm, &ranks) || ranks != 2 ||
                          nccl.destroy(lender->comm) || !nccl.destroy(lender->comm)))
    snprintf(lender->why, WORDS, "the communicator is not as it was");
  return NULL;
}

static void lend_to_two(struct lender *lenders, bool absent)
{
  pthread_t threads[2];
  struct unique id;
  open_nccl();
  expect_ok(swathe_nccl_id(&id));
  for (int32_t r = 0; r < 2; r++) {
    lenders[r] = (struct lender){ .rank = { .number = r }, .id = id, .absent = absent };
    assert_int_equal(pthread_create(&threads[r], NULL, lend, &lenders[r]), 0);
  }
  for (int32_t r = 0; r < 2; r++) pthread_join(threads[r], NULL);
}

static void a_borrowed_communicator_stays(void **state)
{
  struct lender lenders[2];
  (void)state;
  need_driver();
  lend_to_two(lenders, false);
  for (int r = 0; r < 2; r++) {
    if (lenders[r].rank.status) fail_msg("%s", lenders[r].rank.words);
    assert_int_equal(lenders[r].aborts, 0);
    assert_string_equal(lenders[r].why, "");
  }
}

static void its_lender_aborts_it(void **state)
{
  struct lender lenders[2];
  (void)state;
  need_driver();
  lend_to_two(lenders, true);
  assert_int_equal(lenders[0].rank.status, SWATHE_TIMEOUT);
  assert_int_equal(lenders[0].aborts, 1);
  expect_words(lenders[0].rank.words, "rank 0 waited 1 s on the device for exchange 5");
  expect_words(lenders[0].rank.words, lenders[0].why);
}

// ---- Layers -------------------------------------------------------------------------------------

static struct swathe_problem problem_of(const char *text)
{
  struct swathe_problem problem;
  swathe_problem_init(&problem);
  problem.target = SWATHE_CUDA;
  problem.dtype = SWATHE_BF16;
  if (swathe_problem_parse(text, &problem)) fail_msg("%s: %s", text, swathe_error());
  return problem;
}

static const struct sequence_tolerance tolerance = { 2e-2, 1e-3, 2e-2 };

static size_t array_bytes(const struct sequence *sequence, enum sequence_array array)
{
  size_t elems = 0;
  sequence_row(sequence, array, 0, 0, &elems);
  return (size_t)(sequence->view.batch * sequence->view.tokens) * elems * sizeof(float);
}

// Over NCCL as the reference has it, and bit by bit as over host memory.
static void layers_are_right_and_bit_equal(void **state)
{
  static const char *const problems[] = {
    "q_heads=4,kv_heads=2,head_dim_qk=32,head_dim_v=48,window_left=60,window_right=20,sinks=1",
    "q_heads=4,kv_heads=2,head_dim_qk=32,head_dim_v=48,window_left=90,halo_gradient=bf16",
  };
  char words[WORDS] = "";
  (void)state;

  need_kernels();
  for (int32_t ranks = 2; ranks <= MOST_RANKS; ranks++) {
    struct swathe_problem problem = problem_of(problems[ranks % 2]);
    const struct swathe_sharding sharding = {
      .layout = ranks % 2 ? SWATHE_CONTIGUOUS : SWATHE_ZIGZAG, .ranks = ranks, .batch = 2,
      .tokens = 273
    };
    problem.layout = sharding.layout;
    problem.ranks = ranks;
    struct sequence *sequence = sequence_make(&problem, &sharding, 5, 1);
    float *first[SEQUENCE_ARRAYS] = { NULL };
    sequence_solve_rounded(sequence);
    for (int nccl_moves = 0; nccl_moves < 2; nccl_moves++) {
      const struct group_case group = { .context = context,
                                        .problem = &problem,
                                        .sharding = &sharding,
                                        .script = nccl_moves ? "fbpsfb" : "fb",
                                        .keep_halo = ranks % 2,
                                        .deadline_s = 60,
                                        .nccl = nccl_moves };
      if (group_run(&group, sequence, NULL, words, sizeof words) ||
          !sequence_compare(sequence, true, tolerance, words, sizeof words))
        fail_msg("%s\n  %d ranks, %s", words, ranks, problems[ranks % 2]);
      for (enum sequence_array a = SEQUENCE_OUT; a < SEQUENCE_ARRAYS; a++) {
        const size_t bytes = array_bytes(sequence, a);
        if (!nccl_moves) memcpy(first[a] = malloc(bytes), sequence->got[a], bytes);
        else if (memcmp(first[a], sequence->got[a], bytes))
          fail_msg("%s is not bit-equal, %d ranks", sequence_array_name(a), ranks);
      }
    }
    for (int a = 0; a < SEQUENCE_ARRAYS; a++) free(first[a]);
    sequence_free(sequence);
  }
}

#define QUIETLY ",order=0,poll=1,progress=0"

// Tiles of 16 tokens of two heads each, so that a halo has the keys of several.
static const char small_tiles[] =
    "wgmma=0,pack=2,warps=2,warp_rows=16,block_k=16,stages=2,strip=1,q_in_regs=0,min_blocks=1";

// However keys travel, over NCCL or host memory: the same bits.
static void every_exchange_gives_the_same_bits(void **state)
{
  static const struct {
    const char *config;
    bool nccl;
  } ways[] = {
    { "overlap=1,chunks=1,together=1" QUIETLY, true },
    { "overlap=0,chunks=1,together=0" QUIETLY, true },
    { "overlap=2,chunks=4,together=1" QUIETLY, true },
    { "overlap=2,chunks=8,together=0" QUIETLY, true },
    { "overlap=1,chunks=2,together=0" QUIETLY, true },
    { "overlap=2,chunks=4,together=0" QUIETLY, false },
    { "overlap=0,chunks=1,together=1" QUIETLY, false },
  };
  static const char *const windows[] = { "window_left=150", "window_left=20,window_right=130" };
  char words[WORDS] = "";
  (void)state;

  need_kernels();
  for (int w = 0; w < 2; w++) {
    struct swathe_problem problem = problem_of(
        "q_heads=4,kv_heads=2,head_dim_qk=32,head_dim_v=48,ranks=3,layout=zigzag,sinks=1");
    expect_ok(swathe_problem_parse(windows[w], &problem));
    const struct swathe_sharding sharding = {
      .layout = SWATHE_ZIGZAG, .ranks = 3, .batch = 1 + w, .tokens = 500
    };
    struct sequence *sequence = sequence_make(&problem, &sharding, 5, 1);
    float *first[SEQUENCE_ARRAYS] = { NULL };
    sequence_solve_rounded(sequence);
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
      const struct group_case group = { .context = context,
                                        .problem = &problem,
                                        .sharding = &sharding,
                                        .configs = (const char *const[]){ small_tiles, NULL },
                                        .exchange = ways[i].config,
                                        .script = "fb",
                                        .keep_halo = i % 2,
                                        .deadline_s = 60,
                                        .nccl = ways[i].nccl };
      if (group_run(&group, sequence, NULL, words, sizeof words) ||
          !sequence_compare(sequence, true, tolerance, words, sizeof words))
        fail_msg("%s\n  %s, %s", words, ways[i].config, windows[w]);
      for (enum sequence_array a = SEQUENCE_OUT; a < SEQUENCE_ARRAYS; a++) {
        const size_t bytes = array_bytes(sequence, a);
        if (!i) memcpy(first[a] = malloc(bytes), sequence->got[a], bytes);
        else if (memcmp(first[a], sequence->got[a], bytes))
          fail_msg("%s is not bit-equal: %s", sequence_array_name(a), ways[i].config);
      }
    }
    for (int a = 0; a < SEQUENCE_ARRAYS; a++) free(first[a]);
    sequence_free(sequence);
  }
}

// ---- Two ranks, called by one thread ------------------------------------------------------------

enum { TOKENS = 512, SHARE = TOKENS / 2, WINDOW = 64 };

struct seat {
  struct rank rank;
  struct share *share;
  struct swathe_layer *layer;
  struct swathe_tensors tensors;
  void *memory[SEQUENCE_ARRAYS], *halo, *stream;
};

struct table {
  struct swathe_problem problem;
  struct swathe_sharding sharding;
  struct sequence *sequence;
  struct seat seats[2];
};

static struct table table;
static const char *table_configs[SW_CONFIGS];  // NULL: the layer's choice

static struct swathe_tensor *tensor_of(struct swathe_tensors *tensors, int array)
{
  struct swathe_tensor *const all[SEQUENCE_ARRAYS] = {
    [SEQUENCE_Q] = &tensors->q,       [SEQUENCE_K] = &tensors->k,
    [SEQUENCE_V] = &tensors->v,       [SEQUENCE_DOUT] = &tensors->dout,
    [SEQUENCE_OUT] = &tensors->out,   [SEQUENCE_LSE] = &tensors->lse,
    [SEQUENCE_DQ] = &tensors->dq,     [SEQUENCE_DK] = &tensors->dk,
    [SEQUENCE_DV] = &tensors->dv,
  };
  return all[array];
}

static size_t bytes_of(const struct seat *seat, int array)
{
  return share_bytes(table.sequence, seat->share, (enum sequence_array)array);
}

static enum swathe_status write_arrays(struct seat *seat, int first)
{
  enum swathe_status status = SWATHE_OK;
  for (int a = first; a < SEQUENCE_ARRAYS && !status; a++)
    status = swathe_memory_write(context, SWATHE_CUDA, seat->memory[a], seat->share->memory[a],
                                 bytes_of(seat, a));
  return status;
}

static enum swathe_status place(struct seat *seat)
{
  enum swathe_status status = SWATHE_OK;
  seat->tensors = seat->share->tensors;
  for (int a = 0; a < SEQUENCE_ARRAYS && !status; a++) {
    struct swathe_tensor *tensor = tensor_of(&seat->tensors, a);
    const size_t first = (size_t)((char *)tensor->data - (char *)seat->share->memory[a]);
    status = swathe_memory_allocate(context, SWATHE_CUDA, bytes_of(seat, a), &seat->memory[a]);
    tensor->data = (char *)seat->memory[a] + first;
  }
  if (!status)
    status = swathe_memory_allocate(context, SWATHE_CUDA, swathe_layer_halo_bytes(seat->layer),
                                    &seat->halo);
  seat->tensors.halo = seat->halo;
  return status ? status : write_arrays(seat, 0);
}

// Connects, makes the layer, and calls both directions once: the ranks agree then, together.
static void *sit_down(void *arg)
{
  struct seat *seat = arg;
  struct rank *rank = &seat->rank;
  rank->status = connect(rank);
  if (!rank->status && cuda.stream_create(&seat->stream, 1)) rank->status = SWATHE_DEVICE;
  if (!rank->status)
    rank->status = sw_layer_create(context, &table.problem, rank->transport, table_configs, 3,
                                   &seat->layer);
  if (!rank->status) rank->status = swathe_layer_shard(seat->layer, &table.sharding);
  if (!rank->status) rank->status = place(seat);
  if (!rank->status) rank->status = swathe_layer_forward(seat->layer, &seat->tensors, seat->stream);
  if (!rank->status)
    rank->status = swathe_layer_backward(seat->layer, &seat->tensors, seat->stream);
  if (!rank->status) rank->status = swathe_transport_wait(rank->transport);
  if (!rank->status)
    rank->status = swathe_stream_synchronize(context, SWATHE_CUDA, seat->stream);
  if (rank->status) snprintf(rank->words, WORDS, "%s", swathe_error());
  return NULL;
}

static void lay_table(double deadline_s)
{
  pthread_t threads[2];
  char id[SWATHE_NCCL_ID_BYTES];
  table = (struct table){
    .problem = problem_of("q_heads=4,kv_heads=2,head_dim_qk=32,head_dim_v=32,window_left=63"),
    .sharding = { .ranks = 2, .batch = 1, .tokens = TOKENS },
  };
  table.problem.ranks = 2;
  table.sequence = sequence_make(&table.problem, &table.sharding, 11, 1);
  sequence_solve_rounded(table.sequence);
  // compiles what the ranks will load, before there are deadlines
  struct swathe_layer *layer = NULL;
  expect_ok(swathe_device_use(context, 0));
  expect_ok(sw_layer_create(context, &table.problem, NULL, table_configs, 3, &layer));
  swathe_layer_destroy(layer);
  expect_ok(swathe_nccl_id(id));
  for (int32_t r = 0; r < 2; r++) {
    table.seats[r].share =
        share_make(table.sequence, &table.sharding, r, (struct share_form){ .gap = 0 });
    table.seats[r].rank =
        (struct rank){ .number = r, .ranks = 2, .deadline_s = deadline_s, .id = id };
    pthread_create(&threads[r], NULL, sit_down, &table.seats[r]);
  }
  for (int32_t r = 0; r < 2; r++) pthread_join(threads[r], NULL);
  for (int32_t r = 0; r < 2; r++)
    if (table.seats[r].rank.status) fail_msg("rank %d: %s", r, table.seats[r].rank.words);
}

// From here on the thread's device is the rank's.
static struct seat *turn_to(int32_t rank)
{
  expect_ok(swathe_device_use(context, rank));
  return &table.seats[rank];
}

static void *get_up(void *arg)
{
  struct seat *seat = arg;
  if (swathe_device_use(context, seat->rank.number)) abort();
  swathe_layer_destroy(seat->layer);
  swathe_transport_destroy(seat->rank.transport);
  for (int a = 0; a < SEQUENCE_ARRAYS; a++)
    swathe_memory_free(context, SWATHE_CUDA, seat->memory[a]);
  swathe_memory_free(context, SWATHE_CUDA, seat->halo);
  cuda.stream_destroy(seat->stream);
  return NULL;
}

static void clear_table(void)
{
  pthread_t threads[2];
  for (int r = 0; r < 2; r++) pthread_create(&threads[r], NULL, get_up, &table.seats[r]);
  for (int r = 0; r < 2; r++) pthread_join(threads[r], NULL);
  for (int r = 0; r < 2; r++) share_free(table.seats[r].share);
  sequence_free(table.sequence);
}

// NaN in every output, on the device too.
static void spoil(void)
{
  for (int32_t r = 0; r < 2; r++) {
    struct seat *seat = turn_to(r);
    share_poison(table.sequence, seat->share);
    expect_ok(write_arrays(seat, SEQUENCE_OUT));
  }
}

static void expect_results(void)
{
  char words[WORDS] = "";
  sequence_forget(table.sequence);
  for (int32_t r = 0; r < 2; r++) {
    struct seat *seat = turn_to(r);
    expect_ok(swathe_stream_synchronize(context, SWATHE_CUDA, seat->stream));
    for (int a = 0; a < SEQUENCE_ARRAYS; a++)
      expect_ok(swathe_memory_read(context, SWATHE_CUDA, seat->share->memory[a], seat->memory[a],
                                   bytes_of(seat, a)));
    if (!share_check(table.sequence, seat->share, true, words, sizeof words))
      fail_msg("%s", words);
    share_gather(table.sequence, seat->share, true);
  }
  if (!sequence_compare(table.sequence, true, tolerance, words, sizeof words))
    fail_msg("%s", words);
}

// Whether the device has written the row of the array, of 16-bit elements, whose poison is a NaN.
static bool is_written(struct seat *seat, enum sequence_array array, int64_t row)
{
  const struct swathe_tensor *tensor = tensor_of(&seat->tensors, array);
  uint16_t value = 0;
  expect_ok(swathe_memory_read(context, SWATHE_CUDA, &value,
                               (uint16_t *)tensor->data + row * tensor->token_stride,
                               sizeof value));
  return (value & 0x7f80) != 0x7f80;
}

static void expect_written_soon(struct seat *seat, enum sequence_array array, int64_t row)
{
  for (int i = 0; i < 20000; i++) {
    if (is_written(seat, array, row)) return;
    pause_ms(1);
  }
  fail_msg("row %lld of %s waits for the other rank", (long long)row, sequence_array_name(array));
}

// What needs nothing of the other rank is done before that rank has sent anything, and what needs
// it is not: by what came before what, not by time.
static void the_interior_runs_while_messages_are_awaited(void **state)
{
  (void)state;
  need_kernels();
  lay_table(60);
  spoil();
  // forward: rank 1 waits for the keys of rank 0
  struct seat *late = &table.seats[0], *seat = turn_to(1);
  expect_ok(swathe_layer_forward(seat->layer, &seat->tensors, seat->stream));
  expect_written_soon(seat, SEQUENCE_OUT, SHARE - 1);
  assert_false(is_written(seat, SEQUENCE_OUT, 0));
  assert_int_equal(cuda.stream_query(seat->stream), 600);
  turn_to(0);
  expect_ok(swathe_layer_forward(late->layer, &late->tensors, late->stream));

  // backward: rank 0 waits for the sums of its last keys from rank 1
  expect_ok(swathe_stream_synchronize(context, SWATHE_CUDA, late->stream));
  expect_ok(swathe_layer_backward(late->layer, &late->tensors, late->stream));
  expect_written_soon(late, SEQUENCE_DQ, SHARE - 1);
  expect_written_soon(late, SEQUENCE_DK, 0);
  assert_false(is_written(late, SEQUENCE_DK, SHARE - 1));
  turn_to(1);
  expect_ok(swathe_layer_backward(seat->layer, &seat->tensors, seat->stream));
  expect_results();
  clear_table();
}

// ---- Graphs -------------------------------------------------------------------------------------

static void *capture_both(struct seat *seat)
{
  void *graph = NULL, *executable = NULL;
  expect_success(cuda.begin_capture(seat->stream, RELAXED), "begin");
  expect_ok(swathe_layer_forward(seat->layer, &seat->tensors, seat->stream));
  expect_ok(swathe_layer_backward(seat->layer, &seat->tensors, seat->stream));
  expect_success(cuda.end_capture(seat->stream, &graph), "end");
  expect_success(cuda.graph_instantiate(&executable, graph, 0), "instantiate");
  expect_success(cuda.graph_destroy(graph), "destroy");
  return executable;
}

// Forward and backward of each rank in one graph, replayed; at last by one rank only.
static void graphs_replay_and_their_deadline_holds(void **state)
{
  void *graphs[2];
  (void)state;
  need_kernels();
  lay_table(6);
  for (int32_t r = 0; r < 2; r++) graphs[r] = capture_both(turn_to(r));
  for (int replay = 0; replay < 3; replay++) {
    spoil();
    for (int32_t r = 0; r < 2; r++)
      expect_success(cuda.graph_launch(graphs[r], turn_to(r)->stream), "launch");
    expect_results();
  }
  // another call between replays
  spoil();
  for (int32_t r = 0; r < 2; r++)
    expect_ok(swathe_layer_forward(turn_to(r)->layer, &table.seats[r].tensors,
                                   table.seats[r].stream));
  for (int32_t r = 0; r < 2; r++)
    expect_ok(swathe_layer_backward(turn_to(r)->layer, &table.seats[r].tensors,
                                    table.seats[r].stream));
  expect_results();

  struct seat *seat = turn_to(1);
  expect_success(cuda.graph_launch(graphs[1], seat->stream), "launch");
  expect_ok(swathe_stream_synchronize(context, SWATHE_CUDA, seat->stream));  // it does not hang
  assert_int_equal(swathe_layer_forward(seat->layer, &seat->tensors, seat->stream),
                   SWATHE_TIMEOUT);
  expect_words(swathe_error(), "rank 1 waited 6 s on the device for exchange");
  expect_words(swathe_error(), "bytes from rank 0");
  for (int32_t r = 0; r < 2; r++) expect_success(cuda.graph_exec_destroy(graphs[r]), "destroy");
  clear_table();
}

// ---- A rank that does not come ------------------------------------------------------------------

static void a_rank_that_does_not_come_is_named(void **state)
{
  char words[WORDS];
  (void)state;
  need_kernels();
  lay_table(3);
  struct seat *seat = turn_to(1);
  expect_ok(swathe_layer_forward(seat->layer, &seat->tensors, seat->stream));
  assert_int_equal(swathe_transport_wait(seat->rank.transport), SWATHE_TIMEOUT);
  snprintf(words, sizeof words, "%s", swathe_error());
  expect_words(words, "rank 1 waited 3 s on the device for exchange");
  expect_words(words, "16128 bytes from rank 0");   // 63 keys of 2 * 64 elements of 2 bytes
  expect_ok(swathe_stream_synchronize(context, SWATHE_CUDA, seat->stream));
  for (int i = 0; i < 2; i++) {
    assert_int_equal(swathe_layer_forward(seat->layer, &seat->tensors, seat->stream),
                     SWATHE_TIMEOUT);
    expect_words(swathe_error(), words);
  }
  clear_table();
}

// Of two chunks the second does not come: what needs only the first runs all the same.
static void chunks_are_used_as_they_come(void **state)
{
  char silent[32];
  (void)state;
  need_kernels();
  table_configs[SWATHE_FORWARD] = small_tiles;
  table_configs[SW_EXCHANGE] = "overlap=2,chunks=2,together=1" QUIETLY;
  lay_table(3);
  // where the ranks are by now: a call that rank 0 does not make tells
  struct seat *seat = turn_to(1);
  expect_ok(swathe_layer_forward(seat->layer, &seat->tensors, seat->stream));
  assert_int_equal(swathe_transport_wait(seat->rank.transport), SWATHE_TIMEOUT);
  const char *at = strstr(swathe_error(), "exchange ");
  assert_non_null(at);
  snprintf(silent, sizeof silent, "0:%d", atoi(at + 9) + 1);
  clear_table();

  setenv("EMULATOR_NCCL_SILENT", silent, 1);
  lay_table(3);
  spoil();
  for (int32_t r = 0; r < 2; r++)
    expect_ok(swathe_layer_forward(turn_to(r)->layer, &table.seats[r].tensors,
                                   table.seats[r].stream));
  expect_written_soon(seat, SEQUENCE_OUT, 62);
  expect_written_soon(seat, SEQUENCE_OUT, 48);
  assert_false(is_written(seat, SEQUENCE_OUT, 0));
  assert_int_equal(swathe_transport_wait(seat->rank.transport), SWATHE_TIMEOUT);
  clear_table();
  unsetenv("EMULATOR_NCCL_SILENT");
  table_configs[SWATHE_FORWARD] = table_configs[SW_EXCHANGE] = NULL;
}

static void doctor_knows_nccl(void **state)
{
  (void)state;
  need_driver();
  const struct health health = health_of("nccl transport");
  assert_true(health.healthy);
  expect_words(health.found, "libnccl_emulated.so: NCCL 2.28.9");
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(who_does_not_join_is_not_waited_for),
    cmocka_unit_test(host_memory_travels_too),
    cmocka_unit_test(groups_keep_their_order),
    cmocka_unit_test(gathers_must_agree),
    cmocka_unit_test(errors_of_nccl_are_told),
    cmocka_unit_test(ranks_that_fail_are_waited_for_until_the_deadline),
    cmocka_unit_test(a_borrowed_communicator_stays),
    cmocka_unit_test(its_lender_aborts_it),
    cmocka_unit_test(layers_are_right_and_bit_equal),
    cmocka_unit_test(every_exchange_gives_the_same_bits),
    cmocka_unit_test(the_interior_runs_while_messages_are_awaited),
    cmocka_unit_test(graphs_replay_and_their_deadline_holds),
    cmocka_unit_test(a_rank_that_does_not_come_is_named),
    cmocka_unit_test(chunks_are_used_as_they_come),
    cmocka_unit_test(doctor_knows_nccl),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
