// transport_mpi.c: the ranks are processes that MPI started.
//
// The library itself needs no MPI: it opens the plugin of the one that is there (see
// transport_mpi_process.c).  Messages go nonblocking over a duplicate of the caller's communicator,
// so that nobody else's can match them.  A receive is given to MPI only when its message has
// arrived and its size is known to fit: some MPIs write past the end of a buffer that is too short.
// MPI says nothing when a peer dies, so every wait has a deadline; a rank that fails tells the
// others, which then need not wait for theirs.
#include "transport.h"
#include "transport_mpi_process.h"

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
  TAG_MESSAGE = 1, TAG_GATHER, TAG_NOTICE,
  PIECE_BYTES = 1 << 30,      // MPI counts in int
  WORDS_BYTES = 1024,
  YIELDS = 40, NAP_NS = 50000,  // a wait yields so often in vain, then naps
};
static const double settle_s = 0.05;  // what is on its way at a failure gets so long to end

// A message, or 1 GiB of one.
struct piece {
  struct piece *next;
  char *data;
  int bytes;
  int32_t peer;
  bool send;
  _Atomic int32_t *left;         // as in the message; NULL in parts of a large one
  struct sw_mpi_handle request;  // of a send, or of a receive whose message has come
};

struct queue {
  struct piece *first, *last;
};

// What was posted and is not done: messages, and apart from them the parts of a gather.
struct traffic {
  int tag;
  struct queue *expected;     // [ranks] receives whose message has not come, in order
  struct queue started;       // MPI may touch the memory of these
  int64_t pending;            // pieces in all queues
};

// What a rank that fails tells the others.
struct notice {
  int32_t status, concerned;  // concerned: the rank that fails with the same status; -1: none
  char words[WORDS_BYTES];
};

struct mpi {
  struct swathe_transport transport;
  const struct sw_mpi_plugin *plugin;
  struct sw_mpi_handle communicator;
  double deadline_s;
  bool threads;               // MPI allows the helper
  pthread_mutex_t mutex;      // guards the rest, and this rank's calls of MPI
  struct traffic messages, gathers;
  struct piece *spare;
  enum swathe_status failed;  // for good
  bool told;
  struct notice notice;       // of the failure
  struct sw_mpi_handle *notice_requests;  // [ranks]
  bool *notice_pending;                   // [ranks]
  pthread_t helper;
  pthread_cond_t woken;       // the helper has something to do
  bool helping, leaving;
  int32_t interval_us;
  struct mpi *kept;           // the next one whose memory must stay
};

// Transports whose memory must stay, reachable.
static pthread_mutex_t kept_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct mpi *kept;

static struct mpi *mpi_of(struct swathe_transport *transport) { return (struct mpi *)transport; }

static double now_s(void)
{
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

// `idle`: calls in vain so far.
static void rest(int idle)
{
  static const struct timespec nap = { 0, NAP_NS };
  if (idle < YIELDS) sched_yield();
  else nanosleep(&nap, NULL);
}

// ---- Queues ------------------------------------------------------------------------------------

static void push(struct queue *queue, struct piece *piece)
{
  piece->next = NULL;
  if (queue->first) queue->last->next = piece;
  else queue->first = piece;
  queue->last = piece;
}

static struct piece *pop(struct queue *queue)
{
  struct piece *piece = queue->first;
  queue->first = piece->next;
  return piece;
}

static void retire(struct mpi *mpi, struct traffic *traffic, struct piece *piece)
{
  piece->next = mpi->spare;
  mpi->spare = piece;
  traffic->pending--;
}

static void free_pieces(struct piece *piece)
{
  while (piece) {
    struct piece *next = piece->next;
    free(piece);
    piece = next;
  }
}

// So many spare pieces at least.
static enum swathe_status stock(struct mpi *mpi, int64_t count)
{
  const struct piece *have = mpi->spare;
  for (; count > 0 && have; have = have->next) count--;
  for (; count > 0; count--) {
    struct piece *more = malloc(sizeof *more);
    if (!more) return sw_fail(SWATHE_NO_MEMORY, "no memory to post a message");
    more->next = mpi->spare;
    mpi->spare = more;
  }
  return SWATHE_OK;
}

// ---- Failure -----------------------------------------------------------------------------------

// Tests what MPI has of the traffic; errors count as done, for the transport has failed already.
static void test_leftovers(struct mpi *mpi, struct traffic *traffic)
{
  struct queue left = { NULL, NULL };
  while (traffic->started.first) {
    struct piece *piece = pop(&traffic->started);
    bool done = false;
    if (mpi->plugin->test(&piece->request, &done) || done) retire(mpi, traffic, piece);
    else push(&left, piece);
  }
  traffic->started = left;
}

static bool test_notices(struct mpi *mpi)
{
  bool left = false;
  for (int32_t r = 0; r < mpi->transport.ranks; r++) {
    bool done = false;
    if (!mpi->notice_pending[r]) continue;
    if (mpi->plugin->test(&mpi->notice_requests[r], &done) || done) mpi->notice_pending[r] = false;
    left |= mpi->notice_pending[r];
  }
  return left;
}

// Forgets what MPI has not been given yet, and waits a little for what it has.
static void settle(struct mpi *mpi)
{
  struct traffic *const all[] = { &mpi->messages, &mpi->gathers };
  const double until_s = now_s() + settle_s;
  bool left = true;

  for (int i = 0; i < 2; i++)
    for (int32_t r = 0; r < mpi->transport.ranks; r++)
      while (all[i]->expected[r].first) retire(mpi, all[i], pop(&all[i]->expected[r]));
  for (int idle = 0; left; idle++) {
    for (int i = 0; i < 2; i++) test_leftovers(mpi, all[i]);
    left = test_notices(mpi) || mpi->messages.started.first || mpi->gathers.started.first;
    if (now_s() > until_s) break;
    rest(idle);
  }
  if (mpi->messages.started.first) mpi->transport.holds_memory = true;
  if (left) sw_transport_mpi_keep_running();
}

// The first failure of a rank stays.  `tell`: the others do not know of it.
static void set_failed(struct mpi *mpi, bool tell)
{
  for (int32_t r = 0; tell && r < mpi->transport.ranks; r++)
    mpi->notice_pending[r] =
        r != mpi->transport.rank &&
        !mpi->plugin->send(mpi->communicator, &mpi->notice, sizeof mpi->notice, r, TAG_NOTICE,
                           &mpi->notice_requests[r]);
  settle(mpi);
}

static void fail(struct mpi *mpi, enum swathe_status status, int32_t concerned, const char *format,
                 ...) __attribute__((format(printf, 4, 5)));
static void fail(struct mpi *mpi, enum swathe_status status, int32_t concerned, const char *format,
                 ...)
{
  va_list args;
  if (mpi->failed) return;
  mpi->failed = status;
  mpi->notice = (struct notice){ .status = (int32_t)status, .concerned = concerned };
  va_start(args, format);
  vsnprintf(mpi->notice.words, sizeof mpi->notice.words, format, args);
  va_end(args);
  set_failed(mpi, true);
}

static void fail_over_code(struct mpi *mpi, int code, const char *doing, int32_t peer)
{
  char text[SW_MPI_ERROR_TEXT];
  mpi->plugin->error_text(code, text);
  fail(mpi, SWATHE_TRANSPORT, -1, "rank %d failed %s rank %d: %s", mpi->transport.rank, doing, peer,
       text);
}

// A message has come that does not fit.  It is left alone: its sender learns of the failure, and
// may be gone before MPI has read it all.
static void fail_over_bytes(struct mpi *mpi, const struct traffic *traffic, int32_t from, int bytes,
                            int expected)
{
  const int32_t rank = mpi->transport.rank;
  if (traffic->tag == TAG_GATHER)
    fail(mpi, SWATHE_DISAGREE, from, "rank %d gathers %d bytes, but rank %d gathers %d", from,
         bytes, rank, expected);
  else
    fail(mpi, SWATHE_DISAGREE, from,
         "rank %d sends %d bytes to rank %d, which expects %d: they do not hold the same plan",
         from, bytes, rank, expected);
}

// OK, or the failure of this rank with its words.
static enum swathe_status soundness(struct mpi *mpi)
{
  if (!mpi->failed) return SWATHE_OK;
  if (mpi->told)
    return sw_fail(mpi->failed, "the transport of rank %d is unusable, it failed before: %s",
                   mpi->transport.rank, mpi->notice.words);
  mpi->told = true;
  return sw_fail(mpi->failed, "%s", mpi->notice.words);
}

// Has another rank given up?
static void look_for_notice(struct mpi *mpi)
{
  struct sw_mpi_handle message, request;
  struct notice notice;
  bool found = false, done = false;
  int from = 0, bytes = 0;

  if (mpi->failed || mpi->plugin->match(mpi->communicator, SW_MPI_ANY, TAG_NOTICE, &found, &from,
                                        &bytes, &message))
    return;
  if (!found || bytes != sizeof notice ||
      mpi->plugin->receive(&message, &notice, sizeof notice, &request))
    return;
  while (!mpi->plugin->test(&request, &done) && !done) sched_yield();
  notice.words[sizeof notice.words - 1] = 0;
  const bool concerned = notice.concerned == mpi->transport.rank;
  mpi->failed = concerned ? (enum swathe_status)notice.status : SWATHE_TRANSPORT;
  if (concerned) mpi->notice = notice;
  else
    snprintf(mpi->notice.words, sizeof mpi->notice.words,
             "rank %d cannot go on without rank %d, which failed: %.800s", mpi->transport.rank,
             from, notice.words);
  set_failed(mpi, false);
}

// ---- Progress ----------------------------------------------------------------------------------

// Gives MPI the receives of one peer whose messages have come.
static bool start_receives(struct mpi *mpi, struct traffic *traffic, int32_t peer)
{
  struct queue *expected = &traffic->expected[peer];
  bool moved = false;

  while (expected->first && !mpi->failed) {
    struct sw_mpi_handle message;
    bool found = false;
    int from = 0, bytes = 0;
    int code =
        mpi->plugin->match(mpi->communicator, peer, traffic->tag, &found, &from, &bytes, &message);
    if (!code && !found) break;
    if (!code && bytes != expected->first->bytes) {
      fail_over_bytes(mpi, traffic, peer, bytes, expected->first->bytes);
      break;
    }
    if (!code)
      code = mpi->plugin->receive(&message, expected->first->data, bytes,
                                  &expected->first->request);
    if (code) {
      fail_over_code(mpi, code, "to receive from", peer);
      break;
    }
    push(&traffic->started, pop(expected));
    moved = true;
  }
  return moved;
}

// Lets everything progress.  Returns whether anything did.
static bool advance(struct mpi *mpi, struct traffic *traffic)
{
  struct queue left = { NULL, NULL };
  bool moved = false;

  for (int32_t r = 0; r < mpi->transport.ranks && !mpi->failed; r++)
    moved |= start_receives(mpi, traffic, r);
  while (traffic->started.first && !mpi->failed) {
    struct piece *piece = pop(&traffic->started);
    bool done = false;
    const int32_t peer = piece->peer;
    const char *doing = piece->send ? "to send to" : "to receive from";
    const int code = mpi->plugin->test(&piece->request, &done);
    if (!code && done && piece->left) atomic_fetch_sub(piece->left, 1);
    if (code || done) retire(mpi, traffic, piece);
    else push(&left, piece);
    moved |= done;
    if (!code) continue;
    for (; traffic->started.first;) push(&left, pop(&traffic->started));
    traffic->started = left;
    fail_over_code(mpi, code, doing, peer);
    return true;
  }
  if (!mpi->failed) traffic->started = left;
  return moved;
}

static enum swathe_status start_piece(struct mpi *mpi, struct traffic *traffic, char *data,
                                      int bytes, int32_t peer, bool send, _Atomic int32_t *left)
{
  struct piece *piece = mpi->spare;
  mpi->spare = piece->next;
  *piece = (struct piece){ .data = data, .bytes = bytes, .peer = peer, .send = send,
                            .left = left };
  traffic->pending++;
  if (!send) {
    push(&traffic->expected[peer], piece);
    return SWATHE_OK;
  }
  const int code =
      mpi->plugin->send(mpi->communicator, data, bytes, peer, traffic->tag, &piece->request);
  if (!code) {
    push(&traffic->started, piece);
    return SWATHE_OK;
  }
  retire(mpi, traffic, piece);
  fail_over_code(mpi, code, "to send to", peer);
  return soundness(mpi);
}

static const struct piece *first_missing(const struct mpi *mpi, const struct traffic *traffic)
{
  for (int32_t r = 0; r < mpi->transport.ranks; r++)
    if (traffic->expected[r].first) return traffic->expected[r].first;
  return traffic->started.first;
}

static void fail_over_deadline(struct mpi *mpi, const struct traffic *traffic)
{
  const struct piece *piece = first_missing(mpi, traffic);
  fail(mpi, SWATHE_TIMEOUT, -1,
       "rank %d waited %g s for rank %d: %d bytes to %s are missing (%lld messages are not done)",
       mpi->transport.rank, mpi->deadline_s, piece->peer, piece->bytes,
       piece->send ? "send to it" : "receive from it", (long long)traffic->pending);
}

static void fail_over_absent(struct mpi *mpi, const struct traffic *traffic)
{
  char words[WORDS_BYTES / 2];
  int used = 0, absent = 0;

  for (int32_t r = 0; r < mpi->transport.ranks; r++) {
    if (!traffic->expected[r].first) continue;
    absent++;
    if (used < (int)sizeof words - 32)
      used += snprintf(words + used, sizeof words - (size_t)used, " rank %d", r);
  }
  if (!absent) {  // they came, but do not take this rank's part
    fail_over_deadline(mpi, traffic);
    return;
  }
  fail(mpi, SWATHE_TIMEOUT, -1, "%d of %d ranks did not come to a gather in %g s:%s", absent,
       mpi->transport.ranks, mpi->deadline_s, words);
}

// Until nothing of the traffic is pending.  With the mutex, which it leaves to the helper while it
// rests.
static enum swathe_status wait_for(struct mpi *mpi, struct traffic *traffic)
{
  const double until_s = now_s() + mpi->deadline_s;
  enum swathe_status status;

  for (int idle = 0; !(status = soundness(mpi)) && traffic->pending; idle++) {
    const bool messages = advance(mpi, &mpi->messages);
    const bool gathers = mpi->gathers.pending && advance(mpi, &mpi->gathers);
    if (messages || gathers) idle = -1;
    if (!traffic->pending || mpi->failed || idle < 0) continue;
    look_for_notice(mpi);
    if (!mpi->failed && now_s() > until_s) {
      if (traffic->tag == TAG_GATHER) fail_over_absent(mpi, traffic);
      else fail_over_deadline(mpi, traffic);
    }
    pthread_mutex_unlock(&mpi->mutex);
    rest(idle);
    pthread_mutex_lock(&mpi->mutex);
  }
  if (status) return status;
  look_for_notice(mpi);  // a small message of another size is sent before anyone sees its size
  return soundness(mpi);
}

// ---- Operations --------------------------------------------------------------------------------

static enum swathe_status check_messages(const struct mpi *mpi,
                                         const struct sw_transport_message *messages, int32_t count,
                                         int64_t *pieces)
{
  *pieces = 0;
  for (int32_t i = 0; i < count; i++) {
    const struct sw_transport_message *message = &messages[i];
    const enum swathe_status status = sw_transport_check(&mpi->transport, message);
    if (status) return status;
    *pieces += (int64_t)((message->bytes - 1) / PIECE_BYTES + 1);
  }
  return SWATHE_OK;
}

static enum swathe_status post(struct swathe_transport *transport,
                               const struct sw_transport_message *messages, int32_t count)
{
  struct mpi *mpi = mpi_of(transport);
  int64_t pieces;
  enum swathe_status status = check_messages(mpi, messages, count, &pieces);
  if (status) return status;

  pthread_mutex_lock(&mpi->mutex);
  look_for_notice(mpi);
  status = soundness(mpi);
  if (!status) status = stock(mpi, pieces);
  for (int32_t i = 0; i < count; i++) {
    const struct sw_transport_message *message = &messages[i];
    for (size_t at = 0; at < message->bytes && !status; at += PIECE_BYTES) {
      const size_t left = message->bytes - at;
      status = start_piece(mpi, &mpi->messages, (char *)message->data + at,
                           left < PIECE_BYTES ? (int)left : PIECE_BYTES, message->peer,
                           message->send, message->bytes <= PIECE_BYTES ? message->left : NULL);
    }
  }
  pthread_cond_signal(&mpi->woken);
  pthread_mutex_unlock(&mpi->mutex);
  return status;
}

static enum swathe_status test(struct swathe_transport *transport, bool *done)
{
  struct mpi *mpi = mpi_of(transport);
  pthread_mutex_lock(&mpi->mutex);
  enum swathe_status status = soundness(mpi);
  if (!status && mpi->messages.pending) {
    advance(mpi, &mpi->messages);
    if (mpi->messages.pending) look_for_notice(mpi);
    status = soundness(mpi);
  }
  if (!status) *done = mpi->messages.pending == 0;
  pthread_mutex_unlock(&mpi->mutex);
  return status;
}

static enum swathe_status wait(struct swathe_transport *transport)
{
  struct mpi *mpi = mpi_of(transport);
  pthread_mutex_lock(&mpi->mutex);
  const enum swathe_status status = wait_for(mpi, &mpi->messages);
  pthread_mutex_unlock(&mpi->mutex);
  return status;
}

// Every rank sends its part to every other.  The parts go through memory of their own, which stays
// behind if MPI does not get done with it.
static enum swathe_status gather(struct swathe_transport *transport, const void *mine, size_t bytes,
                                 void *all)
{
  struct mpi *mpi = mpi_of(transport);
  const int32_t ranks = transport->ranks;
  const size_t own = (size_t)transport->rank * bytes;
  if (bytes > PIECE_BYTES)
    return sw_fail(SWATHE_BAD_USE, "a gather of %zu bytes of each rank; at most %d", bytes,
                   PIECE_BYTES);
  char *parts = malloc(bytes ? bytes * (size_t)ranks : 1);
  if (!parts) return sw_fail(SWATHE_NO_MEMORY, "no memory for a gather");

  if (bytes) memcpy(parts + own, mine, bytes);
  pthread_mutex_lock(&mpi->mutex);
  enum swathe_status status = soundness(mpi);
  if (!status) status = stock(mpi, 2 * (int64_t)ranks);
  for (int32_t r = 0; r < ranks && !status; r++)
    if (r != transport->rank)
      status = start_piece(mpi, &mpi->gathers, parts + (size_t)r * bytes, (int)bytes, r, false,
                           NULL);
  for (int32_t r = 0; r < ranks && !status; r++)
    if (r != transport->rank)
      status = start_piece(mpi, &mpi->gathers, parts + own, (int)bytes, r, true, NULL);
  if (!status) status = wait_for(mpi, &mpi->gathers);
  const bool in_use = mpi->gathers.started.first != NULL;
  pthread_mutex_unlock(&mpi->mutex);
  if (!status && bytes) memcpy(all, parts, bytes * (size_t)ranks);
  if (!in_use) free(parts);
  return status;
}

static void give_up(struct swathe_transport *transport, const char *why)
{
  struct mpi *mpi = mpi_of(transport);
  pthread_mutex_lock(&mpi->mutex);
  fail(mpi, SWATHE_TRANSPORT, -1, "rank %d gave up: %s", transport->rank,
       why ? why : "it did not say why");
  pthread_mutex_unlock(&mpi->mutex);
}

// ---- The helper --------------------------------------------------------------------------------

static void *help(void *arg)
{
  struct mpi *mpi = arg;
  pthread_mutex_lock(&mpi->mutex);
  while (!mpi->leaving) {
    if (!mpi->interval_us || !mpi->messages.pending || mpi->failed) {
      pthread_cond_wait(&mpi->woken, &mpi->mutex);
      continue;
    }
    advance(mpi, &mpi->messages);
    const struct timespec nap = { mpi->interval_us / 1000000,
                                  (long)(mpi->interval_us % 1000000) * 1000 };
    pthread_mutex_unlock(&mpi->mutex);
    nanosleep(&nap, NULL);
    pthread_mutex_lock(&mpi->mutex);
  }
  pthread_mutex_unlock(&mpi->mutex);
  return NULL;
}

static enum swathe_status progress_thread(struct swathe_transport *transport, int32_t interval_us)
{
  struct mpi *mpi = mpi_of(transport);
  enum swathe_status status = SWATHE_OK;
  if (interval_us > 0 && !mpi->threads) {
    sw_warn("the exchange has no progress thread: MPI was not initialized with "
            "MPI_THREAD_MULTIPLE; messages progress between tiles");
    interval_us = 0;
  }
  pthread_mutex_lock(&mpi->mutex);
  mpi->interval_us = interval_us > 0 ? interval_us : 0;
  if (mpi->interval_us && !mpi->helping) {
    const int error = pthread_create(&mpi->helper, NULL, help, mpi);
    if (error) status = sw_fail(SWATHE_TRANSPORT, "no progress thread: %s", strerror(error));
    else mpi->helping = true;
  }
  pthread_cond_signal(&mpi->woken);
  pthread_mutex_unlock(&mpi->mutex);
  return status;
}

static void stop_helper(struct mpi *mpi)
{
  pthread_mutex_lock(&mpi->mutex);
  mpi->leaving = true;
  pthread_cond_signal(&mpi->woken);
  pthread_mutex_unlock(&mpi->mutex);
  if (mpi->helping) pthread_join(mpi->helper, NULL);
}

// ---- Made and destroyed ------------------------------------------------------------------------

static void free_mpi(struct mpi *mpi)
{
  free_pieces(mpi->spare);
  free(mpi->messages.expected);
  free(mpi->gathers.expected);
  free(mpi->notice_requests);
  free(mpi->notice_pending);
  pthread_cond_destroy(&mpi->woken);
  pthread_mutex_destroy(&mpi->mutex);
  free(mpi);
}

// What MPI may still touch stays, reachable.
static void keep(struct mpi *mpi)
{
  pthread_mutex_lock(&kept_mutex);
  mpi->kept = kept;
  kept = mpi;
  pthread_mutex_unlock(&kept_mutex);
  sw_transport_mpi_keep_running();
}

static void destroy(struct swathe_transport *transport)
{
  struct mpi *mpi = mpi_of(transport);
  stop_helper(mpi);
  for (int i = 0; i < YIELDS && !mpi->failed; i++) look_for_notice(mpi);
  if (!mpi->failed && mpi->messages.pending) settle(mpi);
  if (mpi->failed || mpi->transport.holds_memory) {
    keep(mpi);
    return;
  }
  mpi->plugin->release(&mpi->communicator);
  free_mpi(mpi);
}

static const struct sw_transport_operations operations = {
  .post = post,
  .test = test,
  .wait = wait,
  .gather = gather,
  .destroy = destroy,
  .progress_thread = progress_thread,
  .abort = give_up,
};

static struct mpi *make(int rank, int ranks, double deadline_s)
{
  enum { MOST_DEADLINE_S = 1000000000 };
  struct mpi *mpi = calloc(1, sizeof *mpi);
  if (!mpi) return NULL;
  mpi->transport = (struct swathe_transport){
    .operations = &operations, .name = "mpi", .rank = rank, .ranks = ranks
  };
  mpi->deadline_s = deadline_s == 0 ? 60 : fmin(deadline_s, MOST_DEADLINE_S);
  mpi->messages = (struct traffic){ .tag = TAG_MESSAGE };
  mpi->gathers = (struct traffic){ .tag = TAG_GATHER };
  mpi->messages.expected = calloc((size_t)ranks, sizeof(struct queue));
  mpi->gathers.expected = calloc((size_t)ranks, sizeof(struct queue));
  mpi->notice_requests = calloc((size_t)ranks, sizeof *mpi->notice_requests);
  mpi->notice_pending = calloc((size_t)ranks, sizeof *mpi->notice_pending);
  pthread_mutex_init(&mpi->mutex, NULL);
  pthread_cond_init(&mpi->woken, NULL);
  if (mpi->messages.expected && mpi->gathers.expected && mpi->notice_requests &&
      mpi->notice_pending)
    return mpi;
  free_mpi(mpi);
  return NULL;
}

// The duplicate, by the deadline: a rank may be missing.
static enum swathe_status connect(struct mpi *mpi, const void *communicator)
{
  struct sw_mpi_handle request;
  char text[SW_MPI_ERROR_TEXT];
  const double until_s = now_s() + mpi->deadline_s;
  bool done = false;
  int code = mpi->plugin->duplicate(communicator, &mpi->communicator, &request);

  for (int idle = 0; !code && !(code = mpi->plugin->test(&request, &done)) && !done; idle++) {
    if (now_s() > until_s) {
      keep(mpi);
      return sw_fail(SWATHE_TIMEOUT,
                     "rank %d waited %g s for all %d ranks to duplicate the communicator: some "
                     "did not come",
                     mpi->transport.rank, mpi->deadline_s, mpi->transport.ranks);
    }
    rest(idle);
  }
  if (!code) code = mpi->plugin->adopt(mpi->communicator);
  if (!code) return SWATHE_OK;
  mpi->plugin->error_text(code, text);
  free_mpi(mpi);
  return sw_fail(SWATHE_TRANSPORT, "the communicator cannot be duplicated: %s", text);
}

enum swathe_status swathe_mpi_create(const void *communicator, const char *plugin, int32_t expected,
                                     double deadline_s, struct swathe_transport **transport)
{
  if (!(deadline_s >= 0)) return sw_fail(SWATHE_BAD_USE, "a deadline of %g s", deadline_s);
  struct sw_mpi_process process;
  enum swathe_status status = sw_transport_mpi_start(plugin, &process);
  char text[SW_MPI_ERROR_TEXT];
  int rank = 0, ranks = 1;
  if (status) return status;

  const int code = process.plugin->describe(communicator, &rank, &ranks);
  if (code) {
    process.plugin->error_text(code, text);
    return sw_fail(SWATHE_TRANSPORT, "the communicator cannot be used: %s", text);
  }
  if (expected && ranks != expected)
    return sw_fail(SWATHE_DISAGREE, "%d ranks are expected, but MPI ('%s') has %d%s", expected,
                   process.name, ranks,
                   ranks == 1 ? ": each process is alone, as when the launcher of another MPI "
                                "started it, or none; use the mpirun that belongs to this MPI"
                              : "");
  struct mpi *mpi = make(rank, ranks, deadline_s);
  if (!mpi) return sw_fail(SWATHE_NO_MEMORY, "no memory for a transport of %d ranks", ranks);
  mpi->plugin = process.plugin;
  mpi->threads = process.threads;
  status = connect(mpi, communicator);
  if (!status) *transport = &mpi->transport;
  return status;
}
