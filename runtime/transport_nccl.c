// transport_nccl.c: the ranks reach each other through NCCL.  Messages of device memory are one
// group of sends and receives in the order of a stream; the host only queues it.
//
// What hangs on a device hangs whoever waits for its stream, so a thread of the transport's watches
// a word of host memory, into which the stream writes which group it is at, and that it has done
// it.  A group that is not done within the deadline, or an error that NCCL found meanwhile, ends
// the communicator (ncclCommAbort): streams go on, and every call from then on gives the reason.
// The word works in captured graphs too, where nothing else tells how far a stream has come.
//
// Messages of host memory pass through memory of the device on a stream of the transport's own: all
// that were posted become one group when somebody tests or waits.
#include "transport.h"
#include "transport_nccl_library.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
  WORDS_BYTES = 1024,
  NAP_NS = 50000,
  STEPS = 64,                          // groups whose words are kept, beside the captured ones
  STEP_PEERS = 6,
  CONFIG_MAGIC = 0xcafebeef,
  CONFIG_VERSION = 21400,
  STREAM_NON_BLOCKING = 1,
  EVENT_DISABLE_TIMING = 2,
  CAPTURE_MODE_RELAXED = 2,
  NOT_READY = 600,
};

static const uint32_t idle = UINT32_MAX;
static const double most_nap_s = 0.1;

// A group, for words.
struct step {
  int64_t number;
  int32_t peer_count;                  // of those that have a place here
  struct {
    int32_t peer;
    size_t receive, send;              // bytes
  } peers[STEP_PEERS];
};

// What the stream writes, 64 bits at once when a group is done.
struct progress {
  _Alignas(8) _Atomic uint32_t begun;  // which step; `idle` when it is done
  _Atomic uint32_t ended;              // not 0: one ended since the watch looked
};

// A message of host memory.
struct held {
  struct sw_transport_message message;
  size_t offset;                       // in the staging memory
};

struct nccl {
  struct swathe_transport transport;
  const struct sw_nccl_library *library;
  void *context;                       // CUDA's, of the thread that made the transport
  bool own;                            // the communicator
  void (*give_up)(void *user, const char *why);
  void *user;
  double deadline_s;

  // The mutex guards what follows up to `steps`; NCCL's own calls are made without it.
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  pthread_t watch;
  bool watching, leaving;
  void *comm;                          // NULL: it was given up
  double inside_s;                     // since when a call of NCCL's is under way; 0: none
  enum swathe_status failed;           // for good
  bool told;
  char words[WORDS_BYTES];
  struct step steps[STEPS], *captured; // by number, and those that graphs may repeat
  uint32_t captured_count;
  int64_t step_number;

  struct progress *progress;           // pinned
  double stuck_s;                      // of the watch: since when nothing has ended
  void *queued, *last_stream;          // an event of the last group, and its stream
  bool was_queued;

  void *stream;                        // for host memory
  unsigned long long staging;
  size_t staging_bytes;
  struct held *held;                   // posted; [0, launched) are on their way
  int32_t held_count, held_capacity, launched;
};

static struct nccl *nccl_of(struct swathe_transport *transport)
{
  return (struct nccl *)transport;
}

static double now_s(void)
{
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void nap(void)
{
  static const struct timespec time = { 0, NAP_NS };
  nanosleep(&time, NULL);
}

// ---- Failure ------------------------------------------------------------------------------------

// The mutex is held.  Nothing of the communicator is left on any stream afterwards.
static void end_comm(struct nccl *nccl)
{
  void *comm = nccl->comm;
  if (!comm) return;
  nccl->comm = NULL;
  if (!nccl->own && nccl->give_up) nccl->give_up(nccl->user, nccl->words);
  else nccl->library->abort(comm);
}

// The mutex is held.  The first failure stays.  A call of NCCL's that is under way in another
// thread ends the communicator itself when it returns.
static void set_failed(struct nccl *nccl, enum swathe_status status, const char *words)
{
  if (nccl->failed) return;
  nccl->failed = status;
  snprintf(nccl->words, sizeof nccl->words, "%s", words);
  if (nccl->inside_s == 0) end_comm(nccl);
  pthread_cond_broadcast(&nccl->changed);
}

static enum swathe_status fail_for_good(struct nccl *nccl, enum swathe_status status,
                                        const char *words)
{
  pthread_mutex_lock(&nccl->mutex);
  set_failed(nccl, status, words);
  nccl->told = true;
  status = sw_fail(nccl->failed, "%s", nccl->words);
  pthread_mutex_unlock(&nccl->mutex);
  return status;
}

// OK, or the failure of before, with its words.  The mutex is held.
static enum swathe_status say_failure(struct nccl *nccl)
{
  if (!nccl->failed) return SWATHE_OK;
  if (nccl->told)
    return sw_fail(nccl->failed, "the transport of rank %d is unusable, it failed before: %s",
                   nccl->transport.rank, nccl->words);
  nccl->told = true;
  return sw_fail(nccl->failed, "%s", nccl->words);
}

static enum swathe_status soundness(struct nccl *nccl)
{
  pthread_mutex_lock(&nccl->mutex);
  const enum swathe_status status = say_failure(nccl);
  pthread_mutex_unlock(&nccl->mutex);
  return status;
}

// What NCCL says of a result, with what it noted last.
static void word_result(const struct nccl *nccl, int result, char *text, size_t size)
{
  const struct sw_nccl_library *library = nccl->library;
  const char *last = library->last_error ? library->last_error(nccl->comm) : NULL;
  snprintf(text, size, "%.200s (%d)%s%.300s", library->error_string(result), result,
           last && *last ? ": " : "", last ? last : "");
}

static enum swathe_status fail_nccl(struct nccl *nccl, int result, const char *doing)
{
  char text[600], words[WORDS_BYTES];

  pthread_mutex_lock(&nccl->mutex);
  word_result(nccl, result, text, sizeof text);
  pthread_mutex_unlock(&nccl->mutex);
  snprintf(words, sizeof words, "NCCL of rank %d failed %s, at exchange %lld: %s",
           nccl->transport.rank, doing, (long long)nccl->step_number, text);
  return fail_for_good(nccl, SWATHE_TRANSPORT, words);
}

static enum swathe_status check_cuda(struct nccl *nccl, int result, const char *doing)
{
  const char *name = NULL;
  char words[WORDS_BYTES];

  if (!result) return SWATHE_OK;
  nccl->library->driver.error_name(result, &name);
  snprintf(words, sizeof words, "the nccl transport of rank %d failed %s: %s (%d)",
           nccl->transport.rank, doing, name ? name : "error", result);
  return fail_for_good(nccl, SWATHE_DEVICE, words);
}

// What a step was to move, as "8192 bytes from rank 0, 4096 bytes to rank 2".
static void describe(const struct step *step, char *text, size_t size)
{
  size_t used = 0;
  for (int32_t i = 0; i < step->peer_count; i++)
    for (int send = 0; send < 2; send++) {
      const size_t bytes = send ? step->peers[i].send : step->peers[i].receive;
      if (!bytes || used >= size) continue;
      const int wrote = snprintf(text + used, size - used, "%s%zu bytes %s rank %d",
                                 used ? ", " : "", bytes, send ? "to" : "from",
                                 step->peers[i].peer);
      used += wrote > 0 ? (size_t)wrote : 0;
    }
}

// The mutex is held.
static void fail_over_deadline(struct nccl *nccl, const struct step *step, double waited_s,
                               const char *what)
{
  char text[512] = "", words[WORDS_BYTES];
  describe(step, text, sizeof text);
  snprintf(words, sizeof words,
           "rank %d waited %g s %s exchange %lld over NCCL (%s); the communicator is aborted",
           nccl->transport.rank, waited_s, what, (long long)step->number, text);
  set_failed(nccl, SWATHE_TIMEOUT, words);
}

// ---- The watch ----------------------------------------------------------------------------------

// Whether a group has been on a device, or a call of NCCL's has lasted, longer than the deadline.
static void look_at_time(struct nccl *nccl)
{
  const uint32_t begun = atomic_load(&nccl->progress->begun);
  const double now = now_s();

  if (nccl->inside_s > 0 && now - nccl->inside_s > nccl->deadline_s) {
    fail_over_deadline(nccl, &nccl->steps[nccl->step_number % STEPS], nccl->deadline_s,
                       "for NCCL to queue");
    end_comm(nccl);                    // nothing else makes the call return
  }
  if (begun == idle) {
    nccl->stuck_s = 0;
  } else if (nccl->stuck_s == 0 || atomic_load(&nccl->progress->ended)) {
    atomic_store(&nccl->progress->ended, 0);
    nccl->stuck_s = now;
  } else if (now - nccl->stuck_s > nccl->deadline_s) {
    fail_over_deadline(nccl, begun < STEPS ? &nccl->steps[begun] : &nccl->captured[begun - STEPS],
                       nccl->deadline_s, "on the device for");
  }
}

// Errors that NCCL found while nobody called it.
static void look_at_errors(struct nccl *nccl)
{
  char text[600], words[WORDS_BYTES];
  int result = SW_NCCL_SUCCESS;

  if (!nccl->comm || nccl->failed || nccl->inside_s > 0) return;
  if (nccl->library->async_error(nccl->comm, &result)) result = SW_NCCL_SUCCESS;
  if (result == SW_NCCL_SUCCESS || result == SW_NCCL_IN_PROGRESS) return;
  word_result(nccl, result, text, sizeof text);
  snprintf(words, sizeof words,
           "NCCL of rank %d failed, at exchange %lld or before: %s; the communicator is aborted",
           nccl->transport.rank, (long long)nccl->step_number, text);
  set_failed(nccl, SWATHE_TRANSPORT, words);
}

static void *watch(void *arg)
{
  struct nccl *nccl = arg;
  const double interval_s = fmin(most_nap_s, nccl->deadline_s / 8);
  int mode = CAPTURE_MODE_RELAXED;

  // nothing this thread calls belongs to anybody's capture
  if (!nccl->library->driver.context_push(nccl->context))
    nccl->library->driver.capture_mode(&mode);
  pthread_mutex_lock(&nccl->mutex);
  while (!nccl->leaving) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    at.tv_nsec += (long)(interval_s * 1e9);
    if (at.tv_nsec >= 1000000000) at.tv_sec++, at.tv_nsec -= 1000000000;
    pthread_cond_timedwait(&nccl->changed, &nccl->mutex, &at);
    look_at_errors(nccl);
    look_at_time(nccl);
  }
  pthread_mutex_unlock(&nccl->mutex);
  return NULL;
}

// ---- Groups -------------------------------------------------------------------------------------

static void note_message(struct step *step, const struct sw_transport_message *message)
{
  int32_t i = 0;
  while (i < step->peer_count && step->peers[i].peer != message->peer) i++;
  if (i == STEP_PEERS) return;
  if (i == step->peer_count) {
    step->peer_count++;
    step->peers[i].peer = message->peer;
    step->peers[i].receive = step->peers[i].send = 0;
  }
  if (message->send) step->peers[i].send += message->bytes;
  else step->peers[i].receive += message->bytes;
}

// Gives the group a number and keeps its words; *slot is what the stream will write.
static enum swathe_status note_step(struct nccl *nccl, const struct sw_transport_message *messages,
                                    int32_t count, bool capturing, uint32_t *slot)
{
  enum swathe_status status;

  pthread_mutex_lock(&nccl->mutex);
  status = say_failure(nccl);
  if (!status && capturing) {
    const size_t bytes = (nccl->captured_count + (size_t)1) * sizeof *nccl->captured;
    struct step *more = realloc(nccl->captured, bytes);
    if (!more) status = sw_fail(SWATHE_NO_MEMORY, "no memory to capture an exchange");
    else nccl->captured = more;
  }
  if (!status) {
    const int64_t number = ++nccl->step_number;
    struct step *step = &nccl->steps[number % STEPS];
    *step = (struct step){ .number = number };
    for (int32_t i = 0; i < count; i++) note_message(step, &messages[i]);
    *slot = (uint32_t)(number % STEPS);
    if (capturing) {
      *slot = STEPS + nccl->captured_count;
      nccl->captured[nccl->captured_count++] = *step;
    }
  }
  pthread_mutex_unlock(&nccl->mutex);
  return status;
}

// The communicator for a call of NCCL's, which leave_nccl follows; NULL with words after a failure.
static void *enter_nccl(struct nccl *nccl, enum swathe_status *status)
{
  pthread_mutex_lock(&nccl->mutex);
  void *comm = NULL;
  *status = say_failure(nccl);
  if (!*status) {
    comm = nccl->comm;
    nccl->inside_s = now_s();
  }
  pthread_mutex_unlock(&nccl->mutex);
  return comm;
}

static void leave_nccl(struct nccl *nccl)
{
  pthread_mutex_lock(&nccl->mutex);
  nccl->inside_s = 0;
  if (nccl->failed) end_comm(nccl);
  pthread_mutex_unlock(&nccl->mutex);
}

// A communicator that does not block may still be at it when a call returns.
static enum swathe_status await_nccl(struct nccl *nccl, int result, const char *doing)
{
  const double until_s = now_s() + nccl->deadline_s;
  enum swathe_status status = SWATHE_OK;

  while (result == SW_NCCL_IN_PROGRESS && !status) {
    nap();
    pthread_mutex_lock(&nccl->mutex);
    status = say_failure(nccl);
    if (!status && nccl->library->async_error(nccl->comm, &result))
      result = SW_NCCL_IN_PROGRESS;
    if (!status && result == SW_NCCL_IN_PROGRESS && now_s() > until_s) {
      fail_over_deadline(nccl, &nccl->steps[nccl->step_number % STEPS], nccl->deadline_s,
                         "for NCCL to queue");
      status = say_failure(nccl);
    }
    pthread_mutex_unlock(&nccl->mutex);
  }
  if (status || result == SW_NCCL_SUCCESS) return status;
  return fail_nccl(nccl, result, doing);
}

static enum swathe_status call_group(struct nccl *nccl, const struct sw_transport_message *messages,
                                     int32_t count, void *stream)
{
  const struct sw_nccl_library *library = nccl->library;
  enum swathe_status status;
  void *comm = enter_nccl(nccl, &status);
  int result, ended = SW_NCCL_SUCCESS;

  if (status) return status;
  result = library->group_begin();
  if (!result) {
    for (int32_t i = 0; i < count && (!result || result == SW_NCCL_IN_PROGRESS); i++) {
      const struct sw_transport_message *m = &messages[i];
      result = m->send
                   ? library->send(m->data, m->bytes, SW_NCCL_INT8, m->peer, comm, stream)
                   : library->receive(m->data, m->bytes, SW_NCCL_INT8, m->peer, comm, stream);
    }
    ended = library->group_end();
    if (!result || result == SW_NCCL_IN_PROGRESS) result = ended;
  }
  leave_nccl(nccl);
  return await_nccl(nccl, result, "to queue its messages");
}

static unsigned long long address_of(const void *memory)
{
  return (unsigned long long)(uintptr_t)memory;
}

// NCCL's groups come one after the other, whatever their streams; not so what a graph holds, whose
// order is the graph's.
static enum swathe_status queue_group(struct nccl *nccl,
                                      const struct sw_transport_message *messages, int32_t count,
                                      void *stream)
{
  const __typeof__(nccl->library->driver) *driver = &nccl->library->driver;
  uint32_t slot = 0;
  int capturing = 0;
  enum swathe_status status = check_cuda(nccl, driver->stream_capturing(stream, &capturing),
                                         "to look at the stream");

  if (!status) status = note_step(nccl, messages, count, capturing, &slot);
  if (!status && !capturing && nccl->was_queued && nccl->last_stream != stream)
    status = check_cuda(nccl, driver->stream_wait(stream, nccl->queued, 0), "to order its groups");
  if (!status)
    status = check_cuda(
        nccl, driver->put_word(stream, address_of(&nccl->progress->begun), slot, 0),
        "to note where the stream is");
  if (status) return status;
  // the stream comes to its end after a failure, too, and writes into memory until then
  status = call_group(nccl, messages, count, stream);
  int result = driver->put_words(stream, address_of(nccl->progress), UINT64_MAX, 0);
  if (!result && !capturing) result = driver->event_record(nccl->queued, stream);
  if (!capturing) {
    nccl->was_queued = true;
    nccl->last_stream = stream;
  }
  return status ? status : check_cuda(nccl, result, "to note where the stream is");
}

// Calls that need the context current stand between the two.
static enum swathe_status enter(struct nccl *nccl)
{
  return check_cuda(nccl, nccl->library->driver.context_push(nccl->context),
                    "to enter its context");
}

static void leave(struct nccl *nccl)
{
  void *context;
  nccl->library->driver.context_pop(&context);
}

static enum swathe_status enqueue(struct swathe_transport *transport,
                                  const struct sw_transport_message *messages, int32_t count,
                                  void *stream)
{
  struct nccl *nccl = nccl_of(transport);
  enum swathe_status status = soundness(nccl);

  for (int32_t i = 0; i < count && !status; i++)
    status = sw_transport_check(transport, &messages[i]);
  if (status || !count) return status;
  status = enter(nccl);
  if (status) return status;
  status = queue_group(nccl, messages, count, stream);
  leave(nccl);
  return status;
}

// ---- Host memory --------------------------------------------------------------------------------

static enum swathe_status post(struct swathe_transport *transport,
                               const struct sw_transport_message *messages, int32_t count)
{
  struct nccl *nccl = nccl_of(transport);
  enum swathe_status status = soundness(nccl);

  for (int32_t i = 0; i < count && !status; i++)
    status = sw_transport_check(transport, &messages[i]);
  if (!status && nccl->held_count + count > nccl->held_capacity) {
    const int32_t capacity = 2 * (nccl->held_count + count);
    struct held *more = realloc(nccl->held, (size_t)capacity * sizeof *more);
    if (!more) return sw_fail(SWATHE_NO_MEMORY, "no memory to post %d messages", count);
    nccl->held = more;
    nccl->held_capacity = capacity;
  }
  for (int32_t i = 0; i < count && !status; i++)
    nccl->held[nccl->held_count++] = (struct held){ messages[i], 0 };
  return status;
}

static enum swathe_status reserve_staging(struct nccl *nccl, size_t bytes)
{
  const __typeof__(nccl->library->driver) *driver = &nccl->library->driver;

  if (bytes <= nccl->staging_bytes) return SWATHE_OK;
  if (nccl->staging) driver->release(nccl->staging);
  nccl->staging = 0;
  nccl->staging_bytes = 0;
  const enum swathe_status status =
      check_cuda(nccl, driver->allocate(&nccl->staging, bytes), "to have memory for messages");
  if (!status) nccl->staging_bytes = bytes;
  return status;
}

// All that is held becomes one group.
static enum swathe_status launch_held(struct nccl *nccl)
{
  const __typeof__(nccl->library->driver) *driver = &nccl->library->driver;
  const int32_t count = nccl->held_count;
  struct sw_transport_message *messages = calloc((size_t)count, sizeof *messages);
  size_t bytes = 0;

  if (!messages) return sw_fail(SWATHE_NO_MEMORY, "no memory to send %d messages", count);
  for (int32_t i = 0; i < count; i++) {
    nccl->held[i].offset = bytes;
    bytes += (nccl->held[i].message.bytes + 15) / 16 * 16;
  }
  enum swathe_status status = reserve_staging(nccl, bytes);
  for (int32_t i = 0; i < count && !status; i++) {
    const struct held *held = &nccl->held[i];
    messages[i] = held->message;
    messages[i].data = (void *)(uintptr_t)(nccl->staging + held->offset);
    if (held->message.send)
      status = check_cuda(nccl,
                          driver->write(nccl->staging + held->offset, held->message.data,
                                        held->message.bytes, nccl->stream),
                          "to copy a message to the device");
  }
  if (!status) status = queue_group(nccl, messages, count, nccl->stream);
  if (!status) nccl->launched = count;
  free(messages);
  return status;
}

// What came goes to where it was wanted.
static enum swathe_status finish_held(struct nccl *nccl)
{
  const __typeof__(nccl->library->driver) *driver = &nccl->library->driver;
  enum swathe_status status = SWATHE_OK;

  for (int32_t i = 0; i < nccl->launched && !status; i++) {
    const struct held *held = &nccl->held[i];
    if (!held->message.send)
      status = check_cuda(nccl,
                          driver->read(held->message.data, nccl->staging + held->offset,
                                       held->message.bytes, nccl->stream),
                          "to copy a message from the device");
  }
  if (!status)
    status = check_cuda(nccl, driver->stream_synchronize(nccl->stream),
                        "to copy messages from the device");
  for (int32_t i = 0; i < nccl->launched && !status; i++)
    if (nccl->held[i].message.left) atomic_fetch_sub(nccl->held[i].message.left, 1);
  nccl->held_count -= nccl->launched;
  memmove(nccl->held, nccl->held + nccl->launched, (size_t)nccl->held_count * sizeof *nccl->held);
  nccl->launched = 0;
  return status;
}

// One step further: *done when all that was queued, of host or device memory, is done.
static enum swathe_status advance(struct nccl *nccl, bool *done)
{
  enum swathe_status status = soundness(nccl);
  int result = 0;

  *done = false;
  if (!status && !nccl->launched && nccl->held_count) status = launch_held(nccl);
  if (status) return status;
  if (nccl->was_queued) result = nccl->library->driver.event_query(nccl->queued);
  if (result == NOT_READY) return SWATHE_OK;
  status = check_cuda(nccl, result, "to look at its stream");
  // what a failed group leaves behind looks like its end
  pthread_mutex_lock(&nccl->mutex);
  look_at_errors(nccl);
  if (!status) status = say_failure(nccl);
  pthread_mutex_unlock(&nccl->mutex);
  if (!status && nccl->launched) status = finish_held(nccl);
  if (!status) *done = !nccl->held_count;
  return status;
}

static enum swathe_status test(struct swathe_transport *transport, bool *done)
{
  struct nccl *nccl = nccl_of(transport);
  enum swathe_status status = enter(nccl);
  bool all = false;

  if (status) return status;
  status = advance(nccl, &all);
  leave(nccl);
  if (!status) *done = all;
  return status;
}

// The watch counts from when a stream has come to a group; what is before it on the stream has its
// time, too.
static enum swathe_status wait_here(struct nccl *nccl)
{
  const double until_s = now_s() + 2 * nccl->deadline_s;
  enum swathe_status status;
  bool done = false;

  while (!(status = advance(nccl, &done)) && !done) {
    if (now_s() > until_s) {
      pthread_mutex_lock(&nccl->mutex);
      fail_over_deadline(nccl, &nccl->steps[nccl->step_number % STEPS], 2 * nccl->deadline_s,
                         "for");
      pthread_mutex_unlock(&nccl->mutex);
    } else {
      nap();
    }
  }
  return status;
}

static enum swathe_status wait(struct swathe_transport *transport)
{
  struct nccl *nccl = nccl_of(transport);
  enum swathe_status status = enter(nccl);

  if (status) return status;
  status = wait_here(nccl);
  leave(nccl);
  return status;
}

// Every rank to every other: `bytes` > 0.
static enum swathe_status gather_bytes(struct nccl *nccl, const void *mine, size_t bytes, char *all)
{
  const int32_t ranks = nccl->transport.ranks, rank = nccl->transport.rank;
  struct sw_transport_message *messages = calloc(2 * (size_t)ranks, sizeof *messages);
  int32_t count = 0;

  if (!messages) return sw_fail(SWATHE_NO_MEMORY, "no memory for a gather");
  memcpy(all + (size_t)rank * bytes, mine, bytes);
  for (int32_t r = 0; r < ranks; r++) {
    if (r == rank) continue;
    messages[count++] =
        (struct sw_transport_message){ all + (size_t)r * bytes, bytes, r, false, NULL };
    messages[count++] =
        (struct sw_transport_message){ all + (size_t)rank * bytes, bytes, r, true, NULL };
  }
  enum swathe_status status = post(&nccl->transport, messages, count);
  if (!status) status = wait_here(nccl);
  free(messages);
  return status;
}

// The number of bytes first: NCCL does not notice when ranks disagree on it.
static enum swathe_status gather_all(struct nccl *nccl, const void *mine, size_t bytes, void *all)
{
  const int32_t ranks = nccl->transport.ranks;
  uint64_t *sizes = calloc((size_t)ranks, sizeof *sizes);
  const uint64_t size = bytes;
  char words[WORDS_BYTES] = "";
  enum swathe_status status;

  if (!sizes) return sw_fail(SWATHE_NO_MEMORY, "no memory for a gather");
  status = wait_here(nccl);            // what was posted before
  if (!status) status = gather_bytes(nccl, &size, sizeof size, (char *)sizes);
  for (int32_t r = 0; r < ranks && !status && !*words; r++)
    if (sizes[r] != sizes[0])
      snprintf(words, sizeof words, "rank 0 gathers %llu bytes, but rank %d gathers %llu",
               (unsigned long long)sizes[0], r, (unsigned long long)sizes[r]);
  free(sizes);
  if (*words) status = fail_for_good(nccl, SWATHE_DISAGREE, words);
  return status || !bytes ? status : gather_bytes(nccl, mine, bytes, all);
}

static enum swathe_status gather(struct swathe_transport *transport, const void *mine, size_t bytes,
                                 void *all)
{
  struct nccl *nccl = nccl_of(transport);
  enum swathe_status status = soundness(nccl);

  if (!status && transport->ranks == 1) {
    if (bytes) memcpy(all, mine, bytes);
    return SWATHE_OK;
  }
  if (!status) status = enter(nccl);
  if (status) return status;
  status = gather_all(nccl, mine, bytes, all);
  leave(nccl);
  return status;
}

// The others find out by their deadline; this rank's own streams go on.
static void give_up(struct swathe_transport *transport, const char *why)
{
  struct nccl *nccl = nccl_of(transport);
  char words[WORDS_BYTES];

  snprintf(words, sizeof words, "rank %d gave up: %.900s", transport->rank,
           why ? why : "it did not say why");
  pthread_mutex_lock(&nccl->mutex);
  set_failed(nccl, SWATHE_TRANSPORT, words);
  pthread_mutex_unlock(&nccl->mutex);
}

// ---- Create and destroy -------------------------------------------------------------------------

// An own communicator ends with what is on its streams, or at the deadline.
static void drop_comm(struct nccl *nccl)
{
  const struct sw_nccl_library *library = nccl->library;
  const double until_s = now_s() + nccl->deadline_s;
  void *comm = nccl->comm;
  int result;

  if (!comm || !nccl->own) return;
  nccl->comm = NULL;
  result = library->finalize(comm);
  while (result == SW_NCCL_IN_PROGRESS && now_s() < until_s) {
    nap();
    if (library->async_error(comm, &result)) break;
  }
  if (result) library->abort(comm);
  else library->destroy(comm);
}

// `busy`: streams may still write, so what they write to stays behind.
static void free_all(struct nccl *nccl, bool busy)
{
  const __typeof__(nccl->library->driver) *driver = &nccl->library->driver;

  if (nccl->watching) {
    pthread_mutex_lock(&nccl->mutex);
    nccl->leaving = true;
    pthread_cond_broadcast(&nccl->changed);
    pthread_mutex_unlock(&nccl->mutex);
    pthread_join(nccl->watch, NULL);
  }
  if (!driver->context_push(nccl->context)) {
    drop_comm(nccl);
    if (nccl->stream) driver->stream_destroy(nccl->stream);
    if (nccl->queued) driver->event_destroy(nccl->queued);
    if (nccl->staging && !busy) driver->release(nccl->staging);
    if (nccl->progress && !busy) driver->release_host(nccl->progress);
    leave(nccl);
  }
  pthread_cond_destroy(&nccl->changed);
  pthread_mutex_destroy(&nccl->mutex);
  free(nccl->captured);
  free(nccl->held);
  free(nccl);
}

// What is under way still reads and writes.  The watch ends it after the deadline; where a lender
// does not end its communicator the memory stays behind.
static void destroy(struct swathe_transport *transport)
{
  struct nccl *nccl = nccl_of(transport);
  const double until_s = now_s() + 2 * nccl->deadline_s + most_nap_s;
  int result = 0;

  if (!enter(nccl)) {
    while (nccl->was_queued && now_s() < until_s &&
           (result = nccl->library->driver.event_query(nccl->queued)) == NOT_READY)
      nap();
    leave(nccl);
  }
  free_all(nccl, result == NOT_READY);
}

static const struct sw_transport_operations operations = {
  .post = post,
  .test = test,
  .wait = wait,
  .gather = gather,
  .destroy = destroy,
  .enqueue = enqueue,
  .abort = give_up,
};

static enum swathe_status check_given(const struct swathe_nccl *given)
{
  enum { MOST_DEADLINE_S = 1000000000 };
  if (!(given->deadline_s >= 0 && given->deadline_s <= MOST_DEADLINE_S))
    return sw_fail(SWATHE_BAD_USE, "a deadline of %g s", given->deadline_s);
  if (given->communicator) return SWATHE_OK;
  if (!given->id)
    return sw_fail(SWATHE_BAD_USE, "the nccl transport needs a communicator, or an id that "
                                   "swathe_nccl_id made for all ranks");
  if (given->ranks < 1 || given->rank < 0 || given->rank >= given->ranks)
    return sw_fail(SWATHE_BAD_USE, "there is no rank %d of %d", given->rank, given->ranks);
  return SWATHE_OK;
}

// The context that is current, and what the transport keeps in it.
static enum swathe_status find_context(struct nccl *nccl, int *device)
{
  const __typeof__(nccl->library->driver) *driver = &nccl->library->driver;

  if (driver->context_current(&nccl->context) || !nccl->context || driver->context_device(device))
    return sw_fail(SWATHE_BAD_USE, "the nccl transport is made where the calling thread has a "
                                   "current CUDA context (swathe_device_use makes one)");
  return SWATHE_OK;
}

static enum swathe_status make_room(struct nccl *nccl)
{
  const __typeof__(nccl->library->driver) *driver = &nccl->library->driver;
  void *memory = NULL;
  enum swathe_status status =
      check_cuda(nccl, driver->allocate_host(&memory, sizeof *nccl->progress), "to have memory");

  if (status) return status;
  nccl->progress = memory;
  atomic_init(&nccl->progress->begun, idle);
  atomic_init(&nccl->progress->ended, 0);
  status = check_cuda(nccl, driver->stream_create(&nccl->stream, STREAM_NON_BLOCKING),
                      "to make a stream");
  return status ? status
                : check_cuda(nccl, driver->event_create(&nccl->queued, EVENT_DISABLE_TIMING),
                             "to make an event");
}

static enum swathe_status borrow_comm(struct nccl *nccl, const struct swathe_nccl *given,
                                      int device)
{
  const struct sw_nccl_library *library = nccl->library;
  int rank = 0, ranks = 0, its_device = 0;
  int result = library->count(given->communicator, &ranks);

  if (!result) result = library->rank(given->communicator, &rank);
  if (!result) result = library->device(given->communicator, &its_device);
  if (result)
    return sw_fail(SWATHE_BAD_USE, "NCCL does not know this communicator: %s (%d)",
                   library->error_string(result), result);
  if (its_device != device)
    return sw_fail(SWATHE_BAD_USE, "the communicator is of CUDA device %d, the calling thread's "
                                   "current context of device %d", its_device, device);
  nccl->comm = given->communicator;
  nccl->give_up = given->abort;
  nccl->user = given->user;
  nccl->transport.rank = rank;
  nccl->transport.ranks = ranks;
  return SWATHE_OK;
}

static enum swathe_status fail_over_absent(struct nccl *nccl)
{
  nccl->library->abort(nccl->comm);
  nccl->comm = NULL;
  return sw_fail(SWATHE_TIMEOUT,
                 "rank %d waited %g s for all %d ranks to join a communicator of NCCL",
                 nccl->transport.rank, nccl->deadline_s, nccl->transport.ranks);
}

static enum swathe_status make_comm(struct nccl *nccl, const struct swathe_nccl *given)
{
  const struct sw_nccl_library *library = nccl->library;
  const double until_s = now_s() + nccl->deadline_s;
  struct sw_nccl_config config = { sizeof config, (unsigned)CONFIG_MAGIC, CONFIG_VERSION, 0, 0 };
  struct sw_nccl_id id;

  memcpy(&id, given->id, sizeof id);
  nccl->own = true;
  nccl->transport.rank = given->rank;
  nccl->transport.ranks = given->ranks;
  int result = library->init(&nccl->comm, given->ranks, id, given->rank, &config);
  while (result == SW_NCCL_IN_PROGRESS && now_s() < until_s) {
    nap();
    if (library->async_error(nccl->comm, &result)) break;
  }
  if (result == SW_NCCL_SUCCESS) return SWATHE_OK;
  if (result == SW_NCCL_IN_PROGRESS) return fail_over_absent(nccl);
  char text[600];
  word_result(nccl, result, text, sizeof text);
  const enum swathe_status status =
      sw_fail(SWATHE_TRANSPORT, "rank %d of %d cannot join a communicator of NCCL: %s",
              given->rank, given->ranks, text);
  if (nccl->comm) library->abort(nccl->comm);
  nccl->comm = NULL;
  return status;
}

static enum swathe_status start_watch(struct nccl *nccl)
{
  const int error = pthread_create(&nccl->watch, NULL, watch, nccl);
  nccl->watching = !error;
  return error ? sw_fail(SWATHE_TRANSPORT, "the nccl transport gets no thread: %s",
                         strerror(error))
               : SWATHE_OK;
}

enum swathe_status swathe_nccl_create(const struct swathe_nccl *given,
                                      struct swathe_transport **transport)
{
  const struct sw_nccl_library *library = NULL;
  pthread_condattr_t clock;
  int device = 0;
  enum swathe_status status = check_given(given);

  if (!status) status = sw_nccl_open(&library);
  if (status) return status;
  struct nccl *nccl = calloc(1, sizeof *nccl);
  if (!nccl) return sw_fail(SWATHE_NO_MEMORY, "no memory for a transport");
  nccl->transport = (struct swathe_transport){ .operations = &operations, .name = "nccl" };
  nccl->library = library;
  nccl->deadline_s = given->deadline_s == 0 ? 60 : given->deadline_s;
  status = find_context(nccl, &device);
  if (status) {
    free(nccl);
    return status;
  }
  pthread_condattr_init(&clock);
  pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
  pthread_mutex_init(&nccl->mutex, NULL);
  pthread_cond_init(&nccl->changed, &clock);
  pthread_condattr_destroy(&clock);
  status = given->communicator ? borrow_comm(nccl, given, device) : make_comm(nccl, given);
  if (!status) status = make_room(nccl);
  if (!status) status = start_watch(nccl);
  if (status) free_all(nccl, false);
  else *transport = &nccl->transport;
  return status;
}

enum swathe_status swathe_nccl_id(void *id)
{
  const struct sw_nccl_library *library = NULL;
  struct sw_nccl_id made;
  const enum swathe_status status = sw_nccl_find(&library);

  if (status) return status;
  const int result = library->get_id(&made);
  if (result)
    return sw_fail(SWATHE_TRANSPORT, "NCCL makes no id: %s (%d)", library->error_string(result),
                   result);
  memcpy(id, &made, sizeof made);
  return SWATHE_OK;
}
