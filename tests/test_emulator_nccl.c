// test_emulator_nccl.c: what stands in for NCCL: groups between rank threads in the order of
// streams; what hangs on a device hangs here until it is aborted, and other streams go on.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cuda_driver.h"

enum { RANKS = 3, WORDS = 256, INT32 = 2, INVALID_USAGE = 5, IN_PROGRESS = 7 };

struct unique { char bytes[128]; };
struct config { size_t size; unsigned magic, version; int blocking; };

static struct cuda_driver cuda;
static int (*get_version)(int *), (*get_unique)(struct unique *);
static int (*init_rank)(void **, int, struct unique, int);
static int (*init_rank_config)(void **, int, struct unique, int, const struct config *);
static int (*destroy)(void *), (*abort_comm)(void *), (*async_error)(void *, int *);
static int (*group_start)(void), (*group_end)(void);
static int (*send)(uint64_t, size_t, int, int, void *, void *);
static int (*receive)(uint64_t, size_t, int, int, void *, void *);
static const char *(*last_error)(void *);

static struct unique unique;

struct rank {
  int number;
  void *context, *comm, *stream;
  uint64_t from, to;           // WORDS of each peer
  bool (*test)(struct rank *);
  bool passed;
};

#define NEED(condition) do { \
    if (!(condition)) { \
      print_error("%s:%d: rank %d: %s\n", __FILE__, __LINE__, rank->number, #condition); \
      return false; \
    } \
  } while (0)

static bool begin(struct rank *rank)
{
  NEED(!cuda.retain(&rank->context, rank->number));
  NEED(!cuda.set_current(rank->context));
  NEED(!cuda.stream_create(&rank->stream, 1));
  NEED(!cuda.allocate(&rank->from, RANKS * WORDS * 4));
  NEED(!cuda.allocate(&rank->to, RANKS * WORDS * 4));
  NEED(!cuda.set_words(rank->from, (unsigned)rank->number + 1, RANKS * WORDS));
  NEED(!cuda.synchronize());
  return true;
}

static bool join(struct rank *rank)
{
  NEED(begin(rank));
  NEED(!init_rank(&rank->comm, RANKS, unique, rank->number));
  return true;
}

static void *live(void *argument)
{
  struct rank *rank = argument;
  rank->passed = rank->test(rank);
  cuda.release(rank->number);
  return NULL;
}

static void run_ranks(bool (*test)(struct rank *))
{
  struct rank ranks[RANKS];
  pthread_t threads[RANKS];
  assert_int_equal(get_unique(&unique), 0);
  for (int r = 0; r < RANKS; r++) {
    ranks[r] = (struct rank){ .number = r, .test = test };
    assert_int_equal(pthread_create(&threads[r], NULL, live, &ranks[r]), 0);
  }
  bool passed = true;
  for (int r = 0; r < RANKS; r++) {
    pthread_join(threads[r], NULL);
    passed = passed && ranks[r].passed;
  }
  assert_true(passed);
}

static void pause_ms(int ms)
{
  const struct timespec time = { ms / 1000, ms % 1000 * 1000000L };
  nanosleep(&time, NULL);
}

// Everybody to everybody, itself not.
static bool exchange(struct rank *rank, size_t words)
{
  NEED(!group_start());
  for (int peer = 0; peer < RANKS; peer++) {
    if (peer == rank->number) continue;
    NEED(!send(rank->from, words, INT32, peer, rank->comm, rank->stream));
    NEED(!receive(rank->to + (uint64_t)peer * WORDS * 4, words, INT32, peer, rank->comm,
                  rank->stream));
  }
  int status = group_end();
  NEED(!status || status == IN_PROGRESS);
  return true;
}

static bool arrived(struct rank *rank)
{
  uint32_t words[RANKS * WORDS];
  NEED(!cuda.to_host(words, rank->to, sizeof words));
  for (int peer = 0; peer < RANKS; peer++)
    for (int i = 0; i < WORDS && peer != rank->number; i++)
      NEED(words[peer * WORDS + i] == (uint32_t)peer + 1);
  return true;
}

static bool all_to_all(struct rank *rank)
{
  NEED(join(rank));
  for (int i = 0; i < 20; i++) {
    NEED(!cuda.set_words_async(rank->to, 0, RANKS * WORDS, rank->stream));
    NEED(exchange(rank, WORDS));
    NEED(!cuda.stream_synchronize(rank->stream));
    NEED(arrived(rank));
  }
  int error;
  NEED(!async_error(rank->comm, &error) && !error);
  NEED(!destroy(rank->comm));
  return destroy(rank->comm) != 0;
}

// What is sent is what the stream has written before, and what comes in is there for what follows.
static bool stream_order(struct rank *rank)
{
  void *host;
  int before = (rank->number + RANKS - 1) % RANKS, after = (rank->number + 1) % RANKS;
  NEED(join(rank));
  NEED(!cuda.allocate_host(&host, 4));
  for (unsigned i = 0; i < 20; i++) {
    NEED(!cuda.set_words_async(rank->from, 100 * i + (unsigned)rank->number, 1, rank->stream));
    NEED(!group_start());
    NEED(!send(rank->from, 1, INT32, after, rank->comm, rank->stream));
    NEED(!receive(rank->to, 1, INT32, before, rank->comm, rank->stream));
    NEED(!group_end());
    NEED(!cuda.to_host_async(host, rank->to, 4, rank->stream));
    NEED(!cuda.stream_synchronize(rank->stream));
    NEED(*(uint32_t *)host == 100 * i + (unsigned)before);
  }
  NEED(!destroy(rank->comm));
  return !cuda.free_host(host);
}

// Whether the stream is still at it after a while.
static bool hangs(struct rank *rank)
{
  for (int i = 0; i < 30; i++) {
    if (cuda.stream_query(rank->stream) != 600) return false;
    pause_ms(1);
  }
  return true;
}

// Sends with no group wait for one another in a ring; the abort ends it, for whoever aborts.
static bool ring_without_group(struct rank *rank)
{
  NEED(join(rank));
  NEED(!send(rank->from, 1, INT32, (rank->number + 1) % RANKS, rank->comm, rank->stream));
  NEED(!receive(rank->to, 1, INT32, (rank->number + RANKS - 1) % RANKS, rank->comm, rank->stream));
  if (rank->number) NEED(hangs(rank));
  else pause_ms(10);
  NEED(!abort_comm(rank->comm));
  return !cuda.stream_synchronize(rank->stream);
}

// Rank 1 leaves its second group out: its peers wait, a second stream goes on meanwhile.
static bool silent_rank(struct rank *rank)
{
  void *other;
  uint64_t apart;
  uint32_t word = 0;
  NEED(join(rank));
  NEED(exchange(rank, WORDS));
  NEED(!cuda.stream_synchronize(rank->stream));
  NEED(!cuda.stream_create(&other, 1));
  NEED(!cuda.allocate(&apart, 4));
  NEED(exchange(rank, WORDS));
  NEED(!cuda.set_words_async(apart, 77, 1, other));
  NEED(!cuda.stream_synchronize(other));
  NEED(hangs(rank));
  NEED(!abort_comm(rank->comm));
  NEED(!cuda.stream_synchronize(rank->stream));
  NEED(!cuda.to_host(&word, apart, 4));
  return word == 77;
}

static bool size_mismatch(struct rank *rank)
{
  int error = 0;
  NEED(join(rank));
  if (rank->number == 0) NEED(!send(rank->from, 3, INT32, 1, rank->comm, rank->stream));
  if (rank->number == 1) NEED(!receive(rank->to, 4, INT32, 0, rank->comm, rank->stream));
  NEED(!cuda.stream_synchronize(rank->stream));
  NEED(!async_error(rank->comm, &error));
  NEED(error == (rank->number < 2 ? INVALID_USAGE : 0));
  if (error) NEED(strstr(last_error(rank->comm), "rank 0 sends 12 bytes where rank 1 receives 16"));
  if (error) NEED(send(rank->from, 3, INT32, 1, rank->comm, rank->stream) == INVALID_USAGE);
  return !destroy(rank->comm);
}

static bool joins_without_blocking(struct rank *rank)
{
  const struct config config = { .magic = 0xcafebeef, .blocking = 0 };
  int error = IN_PROGRESS;
  NEED(begin(rank));
  if (rank->number == 2) pause_ms(10);
  int status = init_rank_config(&rank->comm, RANKS, unique, rank->number, &config);
  NEED(!status || status == IN_PROGRESS);

  while (error == IN_PROGRESS) NEED(!async_error(rank->comm, &error));
  NEED(!error);
  for (int i = 0; i < 8; i++) NEED(exchange(rank, WORDS));
  NEED(!cuda.stream_synchronize(rank->stream));
  NEED(arrived(rank));
  return !destroy(rank->comm);
}

static bool one_device_twice(struct rank *rank)
{
  NEED(!cuda.retain(&rank->context, 0));
  NEED(!cuda.set_current(rank->context));
  const struct config config = { .magic = 0xcafebeef, .blocking = 0 };
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  static int joined, refused;
  pthread_mutex_lock(&lock);
  int status = init_rank_config(&rank->comm, RANKS, unique, rank->number, &config);
  joined += status == IN_PROGRESS;
  refused += status == INVALID_USAGE;
  bool right = joined <= 1 && (joined + refused < RANKS || refused == RANKS - 1);
  pthread_mutex_unlock(&lock);
  if (status == IN_PROGRESS) abort_comm(rank->comm);
  cuda.release(0);
  NEED(!cuda.retain(&rank->context, rank->number));
  return right;
}

// The exchange as part of a graph, replayed.
static bool in_a_graph(struct rank *rank)
{
  void *graph, *exec;
  NEED(join(rank));
  NEED(!cuda.begin_capture(rank->stream, 1));
  NEED(!cuda.set_words_async(rank->to, 0, RANKS * WORDS, rank->stream));
  NEED(exchange(rank, WORDS));
  NEED(!cuda.end_capture(rank->stream, &graph));
  NEED(!cuda.graph_instantiate(&exec, graph, 0));
  for (int i = 0; i < 5; i++) {
    NEED(!cuda.graph_launch(exec, rank->stream));
    NEED(!cuda.stream_synchronize(rank->stream));
    NEED(arrived(rank));
  }
  cuda.graph_destroy(graph);
  cuda.graph_exec_destroy(exec);
  return !destroy(rank->comm);
}

static void test_all_to_all(void **state) { (void)state; run_ranks(all_to_all); }
static void test_stream_order(void **state) { (void)state; run_ranks(stream_order); }
static void test_ring_without_group(void **state) { (void)state; run_ranks(ring_without_group); }
static void test_joins_without_blocking(void **state)
{
  (void)state;
  run_ranks(joins_without_blocking);
}
static void test_one_device_twice(void **state) { (void)state; run_ranks(one_device_twice); }
static void test_in_a_graph(void **state) { (void)state; run_ranks(in_a_graph); }
static void test_size_mismatch(void **state) { (void)state; run_ranks(size_mismatch); }

static void test_silent_rank(void **state)
{
  (void)state;
  setenv("EMULATOR_NCCL_SILENT", "1:2", 1);
  run_ranks(silent_rank);
  unsetenv("EMULATOR_NCCL_SILENT");
}

static void test_failures_on_demand(void **state)
{
  (void)state;
  int version;
  setenv("EMULATOR_NCCL_FAIL", "ncclGetUniqueId:2=3", 1);
  assert_int_equal(get_version(&version), 0);
  assert_true(version >= 20000);
  assert_int_equal(get_unique(&unique), 0);
  assert_int_equal(get_unique(&unique), 3);
  assert_int_equal(get_unique(&unique), 0);
  unsetenv("EMULATOR_NCCL_FAIL");
}

static bool look_up(void)
{
  const char *path = getenv("TEST_LIBNCCL");
  void *library = path ? dlopen(path, RTLD_NOW) : NULL;
  if (!library) return false;
  const struct { const char *name; void **into; } functions[] = {
    { "ncclGetVersion", (void **)&get_version }, { "ncclGetUniqueId", (void **)&get_unique },
    { "ncclCommInitRank", (void **)&init_rank }, { "ncclCommDestroy", (void **)&destroy },
    { "ncclCommInitRankConfig", (void **)&init_rank_config },
    { "ncclCommAbort", (void **)&abort_comm }, { "ncclGroupStart", (void **)&group_start },
    { "ncclCommGetAsyncError", (void **)&async_error }, { "ncclGroupEnd", (void **)&group_end },
    { "ncclSend", (void **)&send }, { "ncclRecv", (void **)&receive },
    { "ncclGetLastError", (void **)&last_error },
  };
  for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
    if (!(*functions[i].into = dlsym(library, functions[i].name))) return false;
  return true;
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_all_to_all),
    cmocka_unit_test(test_stream_order),
    cmocka_unit_test(test_ring_without_group),
    cmocka_unit_test(test_silent_rank),
    cmocka_unit_test(test_size_mismatch),
    cmocka_unit_test(test_joins_without_blocking),
    cmocka_unit_test(test_one_device_twice),
    cmocka_unit_test(test_in_a_graph),
    cmocka_unit_test(test_failures_on_demand),
  };
  const char *path = getenv("TEST_LIBCUDA");
  if (!path || !cuda_driver_open(&cuda, path) || !look_up()) {
    fprintf(stderr, "TEST_LIBCUDA and TEST_LIBNCCL must name the emulated libraries\n");
    return 1;
  }
  setenv("EMULATOR_DEVICES", "3", 1);
  setenv("EMULATOR_QUIET", "1", 1);
  if (cuda.init(0)) return 1;
  return cmocka_run_group_tests(tests, NULL, NULL);
}
