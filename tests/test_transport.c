// test_transport.c: the threads transport, and one made of a caller's own functions: messages pair
// up and arrive, and every failure ends in words on both sides, in time, and without a byte written
// to a rank that was told of it.  MPI's ranks are processes: see mpi/.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <pthread.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "exchange.h"
#include "transport.h"

enum { MOST_RANKS = EXCHANGE_MOST_RANKS };

static double now_s(void)
{
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static enum swathe_status post(struct swathe_transport *t,
                               const struct sw_transport_message *messages, int32_t count)
{
  return t->operations->post(t, messages, count);
}

static enum swathe_status post_one(struct swathe_transport *t, bool send, int peer, void *data,
                                   size_t bytes)
{
  const struct sw_transport_message message = { data, bytes, peer, send, NULL };
  return post(t, &message, 1);
}

static enum swathe_status test(struct swathe_transport *t, bool *done)
{
  return t->operations->test(t, done);
}

static enum swathe_status wait(struct swathe_transport *t) { return t->operations->wait(t); }

static enum swathe_status gather(struct swathe_transport *t, const void *mine, size_t bytes,
                                 void *all)
{
  return t->operations->gather(t, mine, bytes, all);
}

static struct swathe_threads *make_group(int32_t ranks, double deadline_s)
{
  struct swathe_threads *group = NULL;
  assert_int_equal(swathe_threads_create(ranks, deadline_s, &group), SWATHE_OK);
  return group;
}

// ---- Ranks as threads --------------------------------------------------------------------------

// What one rank does and how it ended.  Its function must not use cmocka's asserts: they only work
// in the main thread.
struct rank {
  struct swathe_threads *group;
  struct swathe_transport *transport;
  uint64_t seed;
  int number, ranks;
  enum swathe_status status, again;  // of the failing call; of one more call after it
  char words[1024], words_again[1024];
  double seconds;
  char failure[256];                 // "" or what was wrong
  char *buffer;
  size_t bytes;
};

static void *run_rank(struct rank *rank, enum swathe_status status)
{
  rank->status = status;
  if (status) {
    snprintf(rank->words, sizeof rank->words, "%s", swathe_error());
    rank->again = wait(rank->transport);
    if (rank->again) snprintf(rank->words_again, sizeof rank->words_again, "%s", swathe_error());
  }
  return rank;
}

static void run_ranks(struct swathe_threads *group, struct rank *ranks, int count, uint64_t seed,
                      void *(*body)(void *))
{
  pthread_t threads[MOST_RANKS];
  for (int r = 0; r < count; r++) {
    ranks[r].group = group;
    ranks[r].transport = swathe_threads_rank(group, r);
    ranks[r].seed = seed;
    ranks[r].number = r;
    ranks[r].ranks = count;
    assert_int_equal(pthread_create(&threads[r], NULL, body, &ranks[r]), 0);
  }
  for (int r = 0; r < count; r++) pthread_join(threads[r], NULL);
  for (int r = 0; r < count; r++)
    if (ranks[r].failure[0])
      fail_msg("seed %llu, rank %d: %s", (unsigned long long)seed, r, ranks[r].failure);
}

// ---- Messages arrive ---------------------------------------------------------------------------

static void *exchange_messages(void *arg)
{
  struct rank *rank = arg;
  exchange_randomly(rank->transport, rank->seed, rank->failure, sizeof rank->failure);
  return rank;
}

static void random_messages_arrive(void **state)
{
  (void)state;
  for (int ranks = 1; ranks <= MOST_RANKS; ranks++)
    for (uint64_t seed = 0; seed < 6; seed++) {
      struct rank all[MOST_RANKS] = { { 0 } };
      struct swathe_threads *group = make_group(ranks, 60);
      run_ranks(group, all, ranks, exchange_mix(seed * 8 + (uint64_t)ranks), exchange_messages);
      swathe_threads_destroy(group);
    }
}

// Without the other rank's help: `test` alone moves a message that both have posted, a part at a
// time.
static void one_rank_moves_a_message(void **state)
{
  enum { BYTES = 1 << 20 };
  static char from[BYTES], to[BYTES];
  (void)state;
  for (int mover = 0; mover < 2; mover++) {
    struct swathe_threads *group = make_group(2, 60);
    struct swathe_transport *ranks[] = { swathe_threads_rank(group, 0),
                                         swathe_threads_rank(group, 1) };
    bool done = true;
    memset(from, 7 + mover, BYTES);
    assert_int_equal(post_one(ranks[0], true, 1, from, BYTES), SWATHE_OK);
    assert_int_equal(test(ranks[0], &done), SWATHE_OK);
    assert_false(done);
    assert_int_equal(post_one(ranks[1], false, 0, to, BYTES), SWATHE_OK);
    int calls = 0;
    for (done = false; !done && calls < 100; calls++)
      assert_int_equal(test(ranks[mover], &done), SWATHE_OK);
    assert_in_range(calls, 2, 16);
    assert_int_equal(test(ranks[1 - mover], &done), SWATHE_OK);
    assert_true(done);
    assert_memory_equal(from, to, BYTES);
    swathe_threads_destroy(group);
  }
}

static void alone(void **state)
{
  struct swathe_threads *group = make_group(1, 0);
  struct swathe_transport *t = swathe_threads_rank(group, 0);
  int mine = 3, all = 0;
  bool done = false;
  (void)state;
  assert_string_equal(t->name, "threads");
  assert_int_equal(t->rank, 0);
  assert_int_equal(t->ranks, 1);
  assert_int_equal(wait(t), SWATHE_OK);
  assert_int_equal(test(t, &done), SWATHE_OK);
  assert_true(done);
  assert_int_equal(gather(t, &mine, sizeof mine, &all), SWATHE_OK);
  assert_int_equal(all, 3);
  assert_int_equal(gather(t, NULL, 0, NULL), SWATHE_OK);
  swathe_threads_destroy(group);
}

static void bad_calls_are_refused(void **state)
{
  struct swathe_threads *group = make_group(3, 1);
  struct swathe_transport *t = swathe_threads_rank(group, 1);
  char byte = 0;
  bool done = false;
  (void)state;
  assert_int_equal(post_one(t, true, 1, &byte, 1), SWATHE_BAD_USE);
  assert_int_equal(post_one(t, true, 3, &byte, 1), SWATHE_BAD_USE);
  assert_int_equal(post_one(t, true, -1, &byte, 1), SWATHE_BAD_USE);
  assert_int_equal(post_one(t, true, 0, &byte, 0), SWATHE_BAD_USE);
  const struct sw_transport_message half_good[] = { { &byte, 1, 0, true, NULL },
                                                    { &byte, 0, 0, true, NULL } };
  assert_int_equal(post(t, half_good, 2), SWATHE_BAD_USE);
  assert_int_equal(test(t, &done), SWATHE_OK);
  assert_true(done);  // of a refused array nothing is posted
  // destroy frees what is still posted
  assert_int_equal(post_one(t, true, 0, &byte, 1), SWATHE_OK);
  assert_int_equal(post_one(t, false, 0, &byte, 1), SWATHE_OK);
  swathe_threads_destroy(group);
  assert_int_equal(swathe_threads_create(0, 1, &group), SWATHE_BAD_USE);
  assert_int_equal(swathe_threads_create(2, -1, &group), SWATHE_BAD_USE);
}

enum { LARGE_BYTES = 16 << 20 };

// Rank 1 sleeps until rank 0 posts, and finds the message done or helps to move it.
static void *wait_for_a_late_post(void *arg)
{
  struct rank *rank = arg;
  const double begin_s = now_s();
  if (rank->number == 0) usleep(5000);
  enum swathe_status status = post_one(rank->transport, rank->number == 0, 1 - rank->number,
                                       rank->buffer, rank->bytes);
  if (rank->number == 0 && rank->bytes == 1) sleep(1);  // computes; rank 1 moves the byte
  if (!status) status = wait(rank->transport);
  run_rank(rank, status);
  rank->seconds = now_s() - begin_s;
  return rank;
}

static void sleepers_are_woken(void **state)
{
  static char from[LARGE_BYTES], to[LARGE_BYTES];
  (void)state;
  for (int i = 0; i < 12; i++) {
    struct rank all[MOST_RANKS] = { { .buffer = from }, { .buffer = to } };
    struct swathe_threads *group = make_group(2, 60);
    all[0].bytes = all[1].bytes = i ? LARGE_BYTES : 1;
    run_ranks(group, all, 2, 1, wait_for_a_late_post);
    assert_int_equal(all[0].status | all[1].status, SWATHE_OK);
    assert_true(all[1].seconds < (i ? 20 : 0.9));
    swathe_threads_destroy(group);
  }
}

// ---- Failures ----------------------------------------------------------------------------------

static void expect_words(const char *words, const char *const *parts)
{
  for (; *parts; parts++)
    if (!strstr(words, *parts)) fail_msg("'%s' does not say '%s'", words, *parts);
}

static void different_sizes_disagree(void **state)
{
  (void)state;
  for (int bigger = 0; bigger < 2; bigger++) {
    struct swathe_threads *group = make_group(3, 60);
    struct swathe_transport *a = swathe_threads_rank(group, 0), *b = swathe_threads_rank(group, 2);
    char sent[100], received[100];
    bool done = false;
    memset(sent, 1, sizeof sent);
    memset(received, 2, sizeof received);
    assert_int_equal(post_one(a, true, 2, sent, bigger ? 100 : 40), SWATHE_OK);
    assert_int_equal(post_one(b, false, 0, received, bigger ? 40 : 100), SWATHE_OK);
    const char *const parts[] = { "rank 0", "rank 2", "40", "100", NULL };
    assert_int_equal(wait(b), SWATHE_DISAGREE);
    expect_words(swathe_error(), parts);
    assert_int_equal(test(a, &done), SWATHE_DISAGREE);
    expect_words(swathe_error(), parts);
    for (size_t i = 0; i < sizeof received; i++) assert_int_equal(received[i], 2);
    const char *const sticky[] = { "unusable", "rank 0 sends", NULL };
    assert_int_equal(post_one(a, true, 1, sent, 1), SWATHE_DISAGREE);
    expect_words(swathe_error(), sticky);
    assert_int_equal(gather(b, NULL, 0, NULL), SWATHE_DISAGREE);
    expect_words(swathe_error(), sticky);
    swathe_threads_destroy(group);
  }
}

static void missing_peer_times_out(void **state)
{
  struct swathe_threads *group = make_group(3, 0.2);
  struct swathe_transport *a = swathe_threads_rank(group, 0), *b = swathe_threads_rank(group, 1);
  char *buffer = malloc(640), late[640];
  (void)state;
  const double begin_s = now_s();
  assert_int_equal(post_one(a, false, 1, buffer, 640), SWATHE_OK);
  assert_int_equal(wait(a), SWATHE_TIMEOUT);
  assert_true(now_s() - begin_s >= 0.2);
  assert_true(now_s() - begin_s < 5);
  const char *const parts[] = { "rank 0", "rank 1", "0.2 s", "640 of 640 bytes to receive", NULL };
  expect_words(swathe_error(), parts);
  free(buffer);  // a late send must not find it
  memset(late, 3, sizeof late);
  assert_int_equal(wait(a), SWATHE_TIMEOUT);
  const char *const sticky[] = { "unusable", "640 of 640", NULL };
  expect_words(swathe_error(), sticky);

  assert_int_equal(post_one(b, true, 0, late, 640), SWATHE_OK);
  assert_int_equal(wait(b), SWATHE_TRANSPORT);  // at once, and with the reason
  const char *const cascade[] = { "rank 1", "rank 0, which failed", "640 of 640", NULL };
  expect_words(swathe_error(), cascade);
  swathe_threads_destroy(group);

  group = make_group(3, 0.05);
  a = swathe_threads_rank(group, 2);
  assert_int_equal(post_one(a, true, 0, late, 33), SWATHE_OK);
  assert_int_equal(wait(a), SWATHE_TIMEOUT);
  const char *const sending[] = { "rank 2", "rank 0", "33 of 33 bytes to send", NULL };
  expect_words(swathe_error(), sending);
  swathe_threads_destroy(group);
}

static void *wait_for_rank_0(void *arg)
{
  struct rank *rank = arg;
  char byte;
  const double begin_s = now_s();
  if (rank->number == 0) {
    usleep(20000);
    swathe_threads_abort(rank->group, 0, "the dog ate it");
    swathe_threads_abort(rank->group, 0, "a second reason");
    usleep(1500000);  // the abort alone must wake the others
    return run_rank(rank, wait(rank->transport));
  }
  enum swathe_status status = SWATHE_OK;
  if (rank->number == 3) status = gather(rank->transport, &byte, 0, NULL);
  else if (!(status = post_one(rank->transport, rank->number == 1, 0, &byte, 1)))
    status = wait(rank->transport);
  run_rank(rank, status);
  rank->seconds = now_s() - begin_s;
  return rank;
}

static void abort_wakes_everyone(void **state)
{
  struct rank all[MOST_RANKS] = { { 0 } };
  struct swathe_threads *group = make_group(4, 60);
  const char *const parts[] = { "rank 0", "the dog ate it", NULL };
  char byte = 0;
  (void)state;
  run_ranks(group, all, 4, 1, wait_for_rank_0);
  for (int r = 0; r < 4; r++) {
    assert_int_equal(all[r].status, SWATHE_TRANSPORT);
    assert_int_equal(all[r].again, SWATHE_TRANSPORT);
    assert_true(all[r].seconds < 1.4);
    expect_words(all[r].words, parts);
    expect_words(all[r].words_again, parts);
  }
  assert_int_equal(post_one(swathe_threads_rank(group, 0), true, 1, &byte, 1), SWATHE_TRANSPORT);
  swathe_threads_destroy(group);

  group = make_group(2, 60);  // before anyone waits
  swathe_threads_abort(group, 1, NULL);
  assert_int_equal(post_one(swathe_threads_rank(group, 0), true, 1, &byte, 1), SWATHE_TRANSPORT);
  swathe_threads_destroy(group);
}

// Rank 0 copies into rank 1's buffer when rank 1 fails, and the buffer goes away.
static void *fail_amid_a_copy(void *arg)
{
  struct rank *rank = arg;
  enum swathe_status status = post_one(rank->transport, rank->number == 0, 1 - rank->number,
                                       rank->buffer, rank->bytes);
  if (rank->number == 1) {
    usleep((useconds_t)exchange_below(&rank->seed, 1500));
    swathe_threads_abort(rank->group, 1, "enough");
    status = wait(rank->transport);
    mprotect(rank->buffer, rank->bytes, PROT_NONE);
  } else if (!status) {
    status = wait(rank->transport);
  }
  return run_rank(rank, status);
}

static void told_ranks_are_left_alone(void **state)
{
  static char from[LARGE_BYTES];
  (void)state;
  for (uint64_t i = 0; i < 60; i++) {
    struct rank all[MOST_RANKS] = { { .buffer = from, .bytes = LARGE_BYTES } };
    struct swathe_threads *group = make_group(2, 60);
    all[1].bytes = LARGE_BYTES;
    all[1].buffer =
        mmap(NULL, LARGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(all[1].buffer != MAP_FAILED);
    run_ranks(group, all, 2, exchange_mix(i), fail_amid_a_copy);
    munmap(all[1].buffer, LARGE_BYTES);
    swathe_threads_destroy(group);
  }
}

static void *gather_unless_rank_2(void *arg)
{
  struct rank *rank = arg;
  uint64_t all[MOST_RANKS], mine = 5;
  for (int i = 0; i < 2; i++)  // that all came before must not count
    if (gather(rank->transport, &mine, sizeof mine, all))
      snprintf(rank->failure, sizeof rank->failure, "%.250s", swathe_error());
  if (rank->number == 2) usleep(700000);  // too late
  return run_rank(rank, gather(rank->transport, &mine, sizeof mine, all));
}

static void *gather_own_size(void *arg)
{
  struct rank *rank = arg;
  char all[MOST_RANKS * 8], mine[8] = { 0 };
  return run_rank(rank, gather(rank->transport, mine, rank->number == 1 ? 7 : 8, all));
}

static void *gather_after_failure(void *arg)
{
  struct rank *rank = arg;
  char byte = 0, all[MOST_RANKS];
  const double begin_s = now_s();
  enum swathe_status status = SWATHE_OK;
  if (rank->number < 2) status = post_one(rank->transport, rank->number, 1 - rank->number, &byte,
                                          rank->number ? 1 : 2);
  if (!status && rank->number < 2) status = wait(rank->transport);
  if (!status) status = gather(rank->transport, &byte, 1, all);
  run_rank(rank, status);
  rank->seconds = now_s() - begin_s;
  return rank;
}

static void gathers_fail_together(void **state)
{
  const char *const absent[] = { "1 of 4 ranks", "rank 2", NULL };
  const char *const sizes[] = { "rank 1 gathers 7", NULL }, *const other[] = { "gathers 8", NULL };
  const char *const failed[] = { "which failed", "1 bytes", NULL };
  (void)state;
  struct rank all[MOST_RANKS] = { { 0 } };
  struct swathe_threads *group = make_group(4, 0.3);
  run_ranks(group, all, 4, 1, gather_unless_rank_2);
  for (int r = 0; r < 4; r++) {
    assert_int_equal(all[r].status, SWATHE_TIMEOUT);
    assert_int_equal(all[r].again, SWATHE_TIMEOUT);
    expect_words(all[r].words, absent);
  }
  swathe_threads_destroy(group);

  group = make_group(2, 60);
  memset(all, 0, sizeof all);
  run_ranks(group, all, 2, 1, gather_own_size);
  for (int r = 0; r < 2; r++) {
    assert_int_equal(all[r].status, SWATHE_DISAGREE);
    expect_words(all[r].words, sizes + (strstr(all[r].words, "rank 1 gathers 7") ? 0 : 1));
    expect_words(all[r].words, other);
  }
  swathe_threads_destroy(group);

  group = make_group(3, 60);
  memset(all, 0, sizeof all);
  run_ranks(group, all, 3, 1, gather_after_failure);
  assert_int_equal(all[0].status, SWATHE_DISAGREE);
  assert_int_equal(all[1].status, SWATHE_DISAGREE);
  assert_int_equal(all[2].status, SWATHE_TRANSPORT);
  expect_words(all[2].words, failed);
  assert_true(all[2].seconds < 10);
  swathe_threads_destroy(group);
}

// ---- A transport of the caller's own -----------------------------------------------------------

// Carried by the threads transport, whose public calls are all it needs.
static int carry(enum swathe_status status, char *words, size_t size)
{
  if (status) snprintf(words, size, "%s", swathe_error());
  return (int)status;
}

static int carry_post(void *user, const struct swathe_transfer *transfers, int32_t count,
                      char *words, size_t size)
{
  struct sw_transport_message messages[64];
  for (int32_t i = 0; i < count; i++)
    messages[i] = (struct sw_transport_message){ transfers[i].data, transfers[i].bytes,
                                                 transfers[i].peer, transfers[i].send,
                                                 NULL };
  return carry(post(user, messages, count), words, size);
}

static int carry_test(void *user, int *done, char *words, size_t size)
{
  bool finished = false;
  const int failed = carry(test(user, &finished), words, size);
  *done = finished;
  return failed;
}

static int carry_wait(void *user, double deadline_s, char *words, size_t size)
{
  (void)deadline_s;
  return carry(wait(user), words, size);
}

static int carry_gather(void *user, const void *mine, size_t bytes, void *all, char *words,
                        size_t size)
{
  return carry(gather(user, mine, bytes, all), words, size);
}

static void *exchange_by_own_calls(void *arg)
{
  struct rank *rank = arg;
  struct swathe_transport *custom = NULL;
  const struct swathe_custom calls = {
    .rank = rank->number,
    .ranks = rank->ranks,
    .user = rank->transport,
    .post = carry_post,
    .test = rank->seed % 3 == 0 ? NULL : carry_test,
    .wait = rank->seed % 3 == 1 ? NULL : carry_wait,
    .gather = rank->seed % 2 ? NULL : carry_gather,
  };
  if (swathe_custom_create(&calls, &custom))
    snprintf(rank->failure, sizeof rank->failure, "%.250s", swathe_error());
  else exchange_randomly(custom, rank->seed, rank->failure, sizeof rank->failure);
  swathe_transport_destroy(custom);
  return rank;
}

static void own_calls_carry_messages(void **state)
{
  (void)state;
  for (uint64_t seed = 0; seed < 12; seed++) {
    struct rank all[MOST_RANKS] = { { 0 } };
    const int ranks = 1 + (int)(seed % 4);
    struct swathe_threads *group = make_group(ranks, 60);
    run_ranks(group, all, ranks, seed, exchange_by_own_calls);
    swathe_threads_destroy(group);
  }
}

static int never_done(void *user, int *done, char *words, size_t size)
{
  (void)user;
  (void)words;
  (void)size;
  *done = 0;
  return 0;
}

static int refuse(void *user, const struct swathe_transfer *transfers, int32_t count, char *words,
                  size_t size)
{
  (void)user;
  snprintf(words, size, "%d of %zu bytes are too many", count, transfers->bytes);
  return SWATHE_DISAGREE;
}

static int accept_all(void *user, const struct swathe_transfer *transfers, int32_t count,
                      char *words, size_t size)
{
  (void)transfers;
  (void)words;
  (void)size;
  *(int *)user += count;
  return 0;
}

static void count_destroyed(void *user) { *(int *)user += 100; }

static void own_calls_fail_for_good(void **state)
{
  struct swathe_custom calls = { .rank = 1, .ranks = 2, .name = "pigeons", .deadline_s = 0.05 };
  struct swathe_transport *custom = NULL;
  int counted = 0;
  char byte = 0;
  (void)state;
  assert_int_equal(swathe_custom_create(&calls, &custom), SWATHE_BAD_USE);  // nothing to call
  calls.post = refuse;
  calls.test = never_done;
  calls.rank = 2;
  assert_int_equal(swathe_custom_create(&calls, &custom), SWATHE_BAD_USE);
  calls.rank = 1;
  assert_int_equal(swathe_custom_create(&calls, &custom), SWATHE_OK);
  assert_int_equal(post_one(custom, true, 1, &byte, 1), SWATHE_BAD_USE);
  assert_int_equal(post_one(custom, true, 0, &byte, 1), SWATHE_DISAGREE);
  const char *const refused[] = { "pigeons of rank 1 failed to post", "1 of 1 bytes", NULL };
  expect_words(swathe_error(), refused);
  assert_int_equal(wait(custom), SWATHE_DISAGREE);
  const char *const before[] = { "unusable", "1 of 1 bytes", NULL };
  expect_words(swathe_error(), before);
  swathe_transport_destroy(custom);

  calls.post = accept_all;
  calls.user = &counted;
  calls.destroy = count_destroyed;
  assert_int_equal(swathe_custom_create(&calls, &custom), SWATHE_OK);
  assert_int_equal(wait(custom), SWATHE_OK);  // nothing was posted
  assert_int_equal(post_one(custom, true, 0, &byte, 1), SWATHE_OK);
  assert_false(custom->holds_memory);
  assert_int_equal(wait(custom), SWATHE_TIMEOUT);
  const char *const late[] = { "to finish what was posted", "waited 0.05 s", NULL };
  expect_words(swathe_error(), late);
  assert_true(custom->holds_memory);
  assert_int_equal(gather(custom, &byte, 1, &byte), SWATHE_TIMEOUT);
  swathe_transport_destroy(custom);
  assert_int_equal(counted, 101);
}

// ---- Faults at random --------------------------------------------------------------------------

enum fault { HEALTHY, ABSENT, LATE, WRONG_BYTES, ABORTS, SKIPS_GATHER, FAULTS };
enum { RING_BYTES = 300000, CANARY = 0x6b };

// Two rounds of a ring with a gather after each.  When a call fails, the rank paints its buffer:
// from then on nobody may write there.
static void *ring_with_a_fault(void *arg)
{
  struct rank *rank = arg;
  uint64_t seed = rank->seed;
  const int culprit = exchange_below(&seed, rank->ranks), when = exchange_below(&seed, 2);
  const enum fault kind = (enum fault)exchange_below(&seed, FAULTS);
  const int most = exchange_below(&seed, 2) ? RING_BYTES : 200;
  const size_t bytes = (size_t)(1 + exchange_below(&seed, most));
  const int next = (rank->number + 1) % rank->ranks,
            previous = (rank->number + rank->ranks - 1) % rank->ranks;
  char *sent = malloc(RING_BYTES + 8), all[MOST_RANKS], mine = (char)rank->number;
  enum swathe_status status = SWATHE_OK;
  memset(sent, 1 + rank->number, RING_BYTES + 8);
  for (int round = 0; round < 2 && !status; round++) {
    const enum fault fault = rank->number == culprit && round == when ? kind : HEALTHY;
    if (fault == ABSENT) break;
    if (fault == LATE) usleep((useconds_t)exchange_below(&seed, 12000));
    if (fault == ABORTS) swathe_threads_abort(rank->group, rank->number, "a fault");
    const size_t sent_bytes = bytes + (fault == WRONG_BYTES);
    const struct sw_transport_message messages[] = {
      { rank->buffer, bytes, previous, false, NULL }, { sent, sent_bytes, next, true, NULL }
    };
    status = post(rank->transport, messages, 2);
    bool done = false;
    if (!status && exchange_below(&seed, 2)) status = test(rank->transport, &done);
    if (!status) status = wait(rank->transport);
    for (size_t i = 0; !status && i < bytes; i++)
      if (rank->buffer[i] != 1 + previous)
        snprintf(rank->failure, sizeof rank->failure, "byte %zu of %zu is %d", i, bytes,
                 rank->buffer[i]);
    if (!status && fault != SKIPS_GATHER) status = gather(rank->transport, &mine, 1, all);
    for (int r = 0; !status && fault != SKIPS_GATHER && r < rank->ranks; r++)
      if (all[r] != r)
        snprintf(rank->failure, sizeof rank->failure, "gathered %d from %d", all[r], r);
  }
  run_rank(rank, status);
  if (status) memset(rank->buffer, CANARY, rank->bytes);
  if (status && (rank->again != status || !rank->words[0]))
    snprintf(rank->failure, sizeof rank->failure, "the failure did not stay");
  free(sent);
  return rank;
}

// A fault in one rank never hangs another, and never harms the memory of one that has been told.
static void random_faults_never_hang(void **state)
{
  enum { CASES = 1000 };
  static char buffers[MOST_RANKS][RING_BYTES + 8];
  int failed = 0, sound = 0;
  (void)state;
  alarm(240);  // the watchdog
  for (uint64_t seed = 0; seed < CASES; seed++) {
    const int ranks = 2 + (int)(exchange_mix(seed) % 4);
    struct rank all[MOST_RANKS] = { { 0 } };
    struct swathe_threads *group = make_group(ranks, 0.006);
    for (int r = 0; r < ranks; r++) all[r].buffer = buffers[r], all[r].bytes = sizeof buffers[r];
    run_ranks(group, all, ranks, exchange_mix(seed), ring_with_a_fault);
    for (int r = 0; r < ranks; r++) {
      failed += all[r].status != SWATHE_OK;
      sound += all[r].status == SWATHE_OK;
      for (size_t i = 0; all[r].status && i < sizeof buffers[r]; i++)
        if (buffers[r][i] != CANARY)
          fail_msg("seed %llu: byte %zu of rank %d was written after its failure",
                   (unsigned long long)seed, i, r);
    }
    swathe_threads_destroy(group);
  }
  alarm(0);
  assert_true(failed > CASES / 2);
  assert_true(sound > CASES / 10);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(random_messages_arrive),
    cmocka_unit_test(one_rank_moves_a_message),
    cmocka_unit_test(alone),
    cmocka_unit_test(bad_calls_are_refused),
    cmocka_unit_test(sleepers_are_woken),
    cmocka_unit_test(different_sizes_disagree),
    cmocka_unit_test(missing_peer_times_out),
    cmocka_unit_test(abort_wakes_everyone),
    cmocka_unit_test(told_ranks_are_left_alone),
    cmocka_unit_test(gathers_fail_together),
    cmocka_unit_test(own_calls_carry_messages),
    cmocka_unit_test(own_calls_fail_for_good),
    cmocka_unit_test(random_faults_never_hang),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
