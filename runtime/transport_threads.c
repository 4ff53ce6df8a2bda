// transport_threads.c: the ranks are threads of one process.
//
// Between two ranks, and for each direction, posted messages wait in a lane: the first send and the
// first receive of a lane belong together.  Whoever of the two ranks comes by (in test or wait)
// copies a slice of it, straight from one tensor to the other and without the lock, so that nobody
// needs a helper thread and a rank that computes does not hold up one that waits.  A rank that
// fails takes its messages back before it tells its caller; nothing touches their memory
// afterwards.
#include "transport.h"

#include <assert.h>
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
  SLICE_BYTES = 256 * 1024,  // a call of test copies little more: some tens of microseconds
  WORDS_BYTES = 1024,
};

struct posted {
  char *data;
  size_t bytes;
  _Atomic int32_t *left;
  struct posted *next;
};

struct queue {
  struct posted *first, *last;
};

// From one rank to another.  `copied` and `copying` are of the two first messages.
struct lane {
  struct queue sends, receives;
  size_t copied;
  bool copying;  // by one of the two ranks, without the lock: nobody else may take them away
};

// One rank's end; its operations get a pointer to `transport`, the first member.
struct endpoint {
  struct swathe_transport transport;
  struct swathe_threads *group;
  pthread_cond_t changed;     // something the rank may be waiting for
  int64_t pending;            // messages posted and not finished
  int64_t gathers;            // finished
  struct posted *spare;       // for the next messages
  enum swathe_status failed;  // for good
  bool told;                  // the caller knows; its messages are taken back
  char words[WORDS_BYTES];
};

// One gather; two take turns.  Who begins the next but one has left the next, which nobody leaves
// before all have come to it, that is, before all have left this one.
struct gathering {
  char *all;
  size_t bytes, capacity;     // of one rank's part; of `all`
  bool *came;                 // [ranks]
  int32_t first, came_count, left_count;
  enum swathe_status failed;  // for everyone who comes or waits
  char words[WORDS_BYTES];
};

// The mutex guards everything in here but the bytes of messages.
struct swathe_threads {
  int32_t ranks;
  double deadline_s;
  pthread_mutex_t mutex;
  bool aborted;
  char why[WORDS_BYTES];
  struct endpoint *endpoints;   // [ranks]
  struct lane *lanes;           // [ranks from][ranks to]
  struct gathering gatherings[2];
};

static struct lane *lane_between(struct swathe_threads *group, int32_t from, int32_t to)
{
  return &group->lanes[(size_t)from * (size_t)group->ranks + (size_t)to];
}

static struct endpoint *endpoint_of(struct swathe_transport *transport)
{
  return (struct endpoint *)transport;
}

static void wake_all(struct swathe_threads *group)
{
  for (int32_t r = 0; r < group->ranks; r++) pthread_cond_broadcast(&group->endpoints[r].changed);
}

static struct timespec deadline_of(const struct swathe_threads *group)
{
  struct timespec at;
  const double whole = floor(group->deadline_s);
  clock_gettime(CLOCK_MONOTONIC, &at);
  at.tv_sec += (time_t)whole;
  at.tv_nsec += (long)((group->deadline_s - whole) * 1e9);
  if (at.tv_nsec >= 1000000000) at.tv_sec++, at.tv_nsec -= 1000000000;
  return at;
}

// ---- Queues ------------------------------------------------------------------------------------

static void push(struct queue *queue, struct posted *message)
{
  message->next = NULL;
  if (queue->first) queue->last->next = message;
  else queue->first = message;
  queue->last = message;
}

static void retire_first(struct endpoint *endpoint, struct queue *queue)
{
  struct posted *message = queue->first;
  queue->first = message->next;
  message->next = endpoint->spare;
  endpoint->spare = message;
  endpoint->pending--;
}

// ---- Failure -----------------------------------------------------------------------------------

// The first failure of a rank stays.  Others may wait for it: they look again.
static void set_failed(struct endpoint *endpoint, enum swathe_status status, const char *words)
{
  if (endpoint->failed) return;
  endpoint->failed = status;
  snprintf(endpoint->words, sizeof endpoint->words, "%s", words);
  wake_all(endpoint->group);
}

// Takes back what the rank has posted.  A slice that a peer is copying right now is waited for.
static void withdraw(struct endpoint *endpoint)
{
  struct swathe_threads *group = endpoint->group;
  const int32_t rank = endpoint->transport.rank;
  for (int32_t peer = 0; peer < group->ranks; peer++) {
    struct lane *out = lane_between(group, rank, peer), *in = lane_between(group, peer, rank);
    while (out->copying || in->copying) pthread_cond_wait(&endpoint->changed, &group->mutex);
    while (out->sends.first) retire_first(endpoint, &out->sends);
    while (in->receives.first) retire_first(endpoint, &in->receives);
  }
}

// OK, or the failure of this rank or of the whole group, with its words.
static enum swathe_status soundness(struct endpoint *endpoint)
{
  if (endpoint->group->aborted) set_failed(endpoint, SWATHE_TRANSPORT, endpoint->group->why);
  if (!endpoint->failed) return SWATHE_OK;
  if (endpoint->told)
    return sw_fail(endpoint->failed, "the transport of rank %d is unusable, it failed before: %s",
                   endpoint->transport.rank, endpoint->words);
  withdraw(endpoint);
  endpoint->told = true;
  return sw_fail(endpoint->failed, "%s", endpoint->words);
}

static void fail_over_peer(struct endpoint *endpoint, const struct endpoint *peer)
{
  char words[WORDS_BYTES];
  snprintf(words, sizeof words, "rank %d cannot go on without rank %d, which failed: %.800s",
           endpoint->transport.rank, peer->transport.rank, peer->words);
  set_failed(endpoint, SWATHE_TRANSPORT, words);
}

static void fail_over_bytes(struct endpoint *from, struct endpoint *to, size_t sent,
                            size_t expected)
{
  char words[WORDS_BYTES];
  snprintf(words, sizeof words,
           "rank %d sends %zu bytes to rank %d, which expects %zu: they do not hold the same plan",
           from->transport.rank, sent, to->transport.rank, expected);
  set_failed(from, SWATHE_DISAGREE, words);
  set_failed(to, SWATHE_DISAGREE, words);
}

// Names the first message that is missing.
static void fail_over_deadline(struct endpoint *endpoint)
{
  struct swathe_threads *group = endpoint->group;
  const int32_t rank = endpoint->transport.rank;
  char words[WORDS_BYTES];
  for (int32_t peer = 0; peer < group->ranks; peer++)
    for (int incoming = 1; incoming >= 0; incoming--) {
      const struct lane *lane =
          incoming ? lane_between(group, peer, rank) : lane_between(group, rank, peer);
      const struct posted *first = incoming ? lane->receives.first : lane->sends.first;
      if (!first) continue;
      snprintf(
          words, sizeof words,
          "rank %d waited %g s for rank %d: %zu of %zu bytes to %s are missing (%lld messages are "
          "not done)",
          rank, group->deadline_s, peer, first->bytes - lane->copied, first->bytes,
          incoming ? "receive from it" : "send to it", (long long)endpoint->pending);
      set_failed(endpoint, SWATHE_TIMEOUT, words);
      return;
    }
}

// ---- Progress ----------------------------------------------------------------------------------

// One slice of the lane's first message, if both ends have posted it.  Returns the bytes that
// moved.
static size_t advance_lane(struct endpoint *me, struct endpoint *peer, struct endpoint *from,
                         struct endpoint *to)
{
  struct swathe_threads *group = me->group;
  struct lane *lane = lane_between(group, from->transport.rank, to->transport.rank);
  const struct posted *mine = me == from ? lane->sends.first : lane->receives.first;
  if (!mine) return 0;
  if (peer->failed) {
    fail_over_peer(me, peer);
    return 0;
  }
  const struct posted *send = lane->sends.first, *receive = lane->receives.first;
  if (!send || !receive || lane->copying) return 0;
  if (send->bytes != receive->bytes) {
    fail_over_bytes(from, to, send->bytes, receive->bytes);
    return 0;
  }
  const size_t at = lane->copied, left = send->bytes - at;
  const size_t slice = left < SLICE_BYTES ? left : SLICE_BYTES;
  lane->copying = true;
  pthread_mutex_unlock(&group->mutex);
  memcpy(receive->data + at, send->data + at, slice);
  pthread_mutex_lock(&group->mutex);
  lane->copying = false;
  lane->copied += slice;
  if (lane->copied == send->bytes) {
    if (send->left) atomic_fetch_sub(send->left, 1);
    if (receive->left) atomic_fetch_sub(receive->left, 1);
    retire_first(from, &lane->sends);
    retire_first(to, &lane->receives);
    lane->copied = 0;
  }
  pthread_cond_broadcast(&peer->changed);
  return slice;
}

// The first slice that can move.  Returns its bytes, 0: nothing can.
static size_t advance(struct endpoint *endpoint)
{
  struct swathe_threads *group = endpoint->group;
  size_t moved = 0;
  for (int32_t r = 0; r < group->ranks && endpoint->pending && !endpoint->failed; r++) {
    struct endpoint *peer = &group->endpoints[r];
    if ((moved = advance_lane(endpoint, peer, peer, endpoint))) break;
    if ((moved = advance_lane(endpoint, peer, endpoint, peer))) break;
  }
  return moved;
}

// ---- Operations --------------------------------------------------------------------------------

// So many spare messages at least, or none is posted at all.
static enum swathe_status stock(struct endpoint *endpoint, int32_t count)
{
  const struct posted *have = endpoint->spare;
  for (; count > 0 && have; have = have->next) count--;
  for (; count > 0; count--) {
    struct posted *more = malloc(sizeof *more);
    if (!more) return sw_fail(SWATHE_NO_MEMORY, "no memory to post a message");
    more->next = endpoint->spare;
    endpoint->spare = more;
  }
  return SWATHE_OK;
}

static enum swathe_status post(struct swathe_transport *transport,
                               const struct sw_transport_message *messages, int32_t count)
{
  struct endpoint *endpoint = endpoint_of(transport);
  struct swathe_threads *group = endpoint->group;
  enum swathe_status status = SWATHE_OK;
  for (int32_t i = 0; i < count && !status; i++)
    status = sw_transport_check(transport, &messages[i]);
  if (status) return status;
  pthread_mutex_lock(&group->mutex);
  status = soundness(endpoint);
  if (!status) status = stock(endpoint, count);
  for (int32_t i = 0; !status && i < count; i++) {
    const struct sw_transport_message *message = &messages[i];
    struct posted *posted = endpoint->spare;
    endpoint->spare = posted->next;
    *posted = (struct posted){ message->data, message->bytes, message->left, NULL };
    if (message->send) push(&lane_between(group, transport->rank, message->peer)->sends, posted);
    else push(&lane_between(group, message->peer, transport->rank)->receives, posted);
    endpoint->pending++;
    pthread_cond_broadcast(&group->endpoints[message->peer].changed);
  }
  pthread_mutex_unlock(&group->mutex);
  return status;
}

static enum swathe_status test(struct swathe_transport *transport, bool *done)
{
  struct endpoint *endpoint = endpoint_of(transport);
  pthread_mutex_lock(&endpoint->group->mutex);
  enum swathe_status status = soundness(endpoint);
  size_t moved = 0, more = 1;
  while (!status && more && moved < SLICE_BYTES) {
    moved += more = advance(endpoint);
    status = soundness(endpoint);
  }
  if (!status) *done = endpoint->pending == 0;
  pthread_mutex_unlock(&endpoint->group->mutex);
  return status;
}

static enum swathe_status wait(struct swathe_transport *transport)
{
  struct endpoint *endpoint = endpoint_of(transport);
  pthread_mutex_t *mutex = &endpoint->group->mutex;
  const struct timespec deadline = deadline_of(endpoint->group);
  enum swathe_status status;
  pthread_mutex_lock(mutex);
  while (!(status = soundness(endpoint)) && endpoint->pending) {
    if (advance(endpoint) || endpoint->failed) continue;
    if (pthread_cond_timedwait(&endpoint->changed, mutex, &deadline) == ETIMEDOUT &&
        !advance(endpoint) && endpoint->pending)
      fail_over_deadline(endpoint);
  }
  pthread_mutex_unlock(mutex);
  return status;
}

// ---- Gather ------------------------------------------------------------------------------------

static void fail_gathering(struct swathe_threads *group, struct gathering *gathering,
                           enum swathe_status status, const char *words)
{
  if (gathering->failed) return;
  gathering->failed = status;
  snprintf(gathering->words, sizeof gathering->words, "%s", words);
  wake_all(group);
}

// Puts the rank's part down, unless it does not fit the others'.
static void come(struct endpoint *endpoint, struct gathering *gathering, const void *mine,
                 size_t bytes)
{
  struct swathe_threads *group = endpoint->group;
  const int32_t rank = endpoint->transport.rank;
  char words[WORDS_BYTES];
  if (!gathering->came_count) {
    const size_t all_bytes = bytes * (size_t)group->ranks;
    char *all =
        all_bytes > gathering->capacity ? realloc(gathering->all, all_bytes) : gathering->all;
    if (all_bytes && !all) {
      fail_gathering(group, gathering, SWATHE_NO_MEMORY, "no memory for a gather");
      return;
    }
    if (all_bytes > gathering->capacity) gathering->capacity = all_bytes;
    gathering->all = all;
    gathering->bytes = bytes;
    gathering->first = rank;
  } else if (gathering->bytes != bytes) {
    snprintf(words, sizeof words, "rank %d gathers %zu bytes, but rank %d gathers %zu",
             gathering->first, gathering->bytes, rank, bytes);
    fail_gathering(group, gathering, SWATHE_DISAGREE, words);
    return;
  }
  if (bytes) memcpy(gathering->all + (size_t)rank * bytes, mine, bytes);
  gathering->came[rank] = true;
  if (++gathering->came_count == group->ranks) wake_all(group);
}

// A rank that failed will not come.
static void look_for_the_failed(struct endpoint *endpoint, const struct gathering *gathering)
{
  struct swathe_threads *group = endpoint->group;
  for (int32_t r = 0; r < group->ranks; r++)
    if (!gathering->came[r] && group->endpoints[r].failed)
      fail_over_peer(endpoint, &group->endpoints[r]);
}

static void fail_over_absent(struct endpoint *endpoint, struct gathering *gathering)
{
  const struct swathe_threads *group = endpoint->group;
  char words[WORDS_BYTES];
  int used = snprintf(words, sizeof words, "%d of %d ranks did not come to a gather in %g s:",
                      group->ranks - gathering->came_count, group->ranks, group->deadline_s);
  for (int32_t r = 0; r < group->ranks && used < WORDS_BYTES - 32; r++)
    if (!gathering->came[r])
      used += snprintf(words + used, sizeof words - (size_t)used, " rank %d", r);
  fail_gathering(endpoint->group, gathering, SWATHE_TIMEOUT, words);
}

static enum swathe_status gather(struct swathe_transport *transport, const void *mine, size_t bytes,
                                 void *all)
{
  struct endpoint *endpoint = endpoint_of(transport);
  struct swathe_threads *group = endpoint->group;
  const struct timespec deadline = deadline_of(group);
  pthread_mutex_lock(&group->mutex);
  enum swathe_status status = soundness(endpoint);
  struct gathering *gathering = &group->gatherings[endpoint->gathers % 2];
  if (!status && !gathering->failed) come(endpoint, gathering, mine, bytes);
  while (!status && gathering->came_count < group->ranks) {
    if (gathering->failed) set_failed(endpoint, gathering->failed, gathering->words);
    else look_for_the_failed(endpoint, gathering);
    if ((status = soundness(endpoint))) break;
    if (pthread_cond_timedwait(&endpoint->changed, &group->mutex, &deadline) == ETIMEDOUT &&
        gathering->came_count < group->ranks)
      fail_over_absent(endpoint, gathering);
  }
  if (!status) {
    if (bytes) memcpy(all, gathering->all, bytes * (size_t)group->ranks);
    endpoint->gathers++;
    if (++gathering->left_count == group->ranks) {
      gathering->came_count = gathering->left_count = 0;
      memset(gathering->came, 0, (size_t)group->ranks * sizeof *gathering->came);
    }
  }
  pthread_mutex_unlock(&group->mutex);
  return status;
}

// A rank's end lives as long as its group.
static void destroy(struct swathe_transport *transport)
{
  (void)transport;
}

static void abort_group(struct swathe_transport *transport, const char *why)
{
  swathe_threads_abort(endpoint_of(transport)->group, transport->rank, why);
}

static const struct sw_transport_operations operations = {
  .post = post,
  .test = test,
  .wait = wait,
  .gather = gather,
  .destroy = destroy,
  .abort = abort_group,
};

// ---- The group ---------------------------------------------------------------------------------

static void free_messages(struct posted *message)
{
  while (message) {
    struct posted *next = message->next;
    free(message);
    message = next;
  }
}

static void free_group(struct swathe_threads *group)
{
  free(group->endpoints);
  free(group->lanes);
  for (int i = 0; i < 2; i++) {
    free(group->gatherings[i].came);
    free(group->gatherings[i].all);
  }
  free(group);
}

static void init_endpoint(struct swathe_threads *group, int32_t rank,
                          const pthread_condattr_t *clock)
{
  struct endpoint *endpoint = &group->endpoints[rank];
  endpoint->transport = (struct swathe_transport){
    .operations = &operations,
    .name = "threads",
    .rank = rank,
    .ranks = group->ranks,
  };
  endpoint->group = group;
  pthread_cond_init(&endpoint->changed, clock);
}

enum swathe_status swathe_threads_create(int32_t ranks, double deadline_s,
                                         struct swathe_threads **group)
{
  enum { MOST_DEADLINE_S = 1000000000 };
  if (ranks < 1) return sw_fail(SWATHE_BAD_USE, "a group of %d ranks; at least 1", ranks);
  if (!(deadline_s >= 0)) return sw_fail(SWATHE_BAD_USE, "a deadline of %g s", deadline_s);
  struct swathe_threads *made = calloc(1, sizeof *made);
  if (!made) return sw_fail(SWATHE_NO_MEMORY, "no memory for a group of %d ranks", ranks);
  made->ranks = ranks;
  made->deadline_s = deadline_s == 0 ? 60 : fmin(deadline_s, MOST_DEADLINE_S);
  made->endpoints = calloc((size_t)ranks, sizeof *made->endpoints);
  made->lanes = calloc((size_t)ranks * (size_t)ranks, sizeof *made->lanes);
  for (int i = 0; i < 2; i++) made->gatherings[i].came = calloc((size_t)ranks, sizeof(bool));
  if (!made->endpoints || !made->lanes || !made->gatherings[0].came || !made->gatherings[1].came) {
    free_group(made);
    return sw_fail(SWATHE_NO_MEMORY, "no memory for a group of %d ranks", ranks);
  }
  pthread_condattr_t clock;
  pthread_condattr_init(&clock);
  pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
  pthread_mutex_init(&made->mutex, NULL);
  for (int32_t r = 0; r < ranks; r++) init_endpoint(made, r, &clock);
  pthread_condattr_destroy(&clock);
  *group = made;
  return SWATHE_OK;
}

struct swathe_transport *swathe_threads_rank(struct swathe_threads *group, int32_t rank)
{
  assert(0 <= rank && rank < group->ranks);
  return &group->endpoints[rank].transport;
}

void swathe_threads_abort(struct swathe_threads *group, int32_t rank, const char *why)
{
  pthread_mutex_lock(&group->mutex);
  if (!group->aborted) {
    group->aborted = true;
    snprintf(group->why, sizeof group->why, "rank %d gave up: %s", rank,
             why ? why : "it did not say why");
    wake_all(group);
  }
  pthread_mutex_unlock(&group->mutex);
}

void swathe_threads_destroy(struct swathe_threads *group)
{
  if (!group) return;
  for (int32_t r = 0; r < group->ranks; r++) {
    free_messages(group->endpoints[r].spare);
    pthread_cond_destroy(&group->endpoints[r].changed);
  }
  for (size_t i = 0; i < (size_t)group->ranks * (size_t)group->ranks; i++) {
    free_messages(group->lanes[i].sends.first);
    free_messages(group->lanes[i].receives.first);
  }
  pthread_mutex_destroy(&group->mutex);
  free_group(group);
}
