// wires.c: messages of device memory between threads; see wires.h.
//
// A sender leaves where its data lies and an event of its stream; the receiver's stream waits for
// it and copies, and the sender's stream goes on when it has.  The host waits only until the other
// rank has come as far.
#include "wires.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "transport.h"

enum { MOST_RANKS = 8, MOST_LETTERS = 4096 };

struct letter {
  int32_t from, to;
  void *data, *ready, *done;   // events of the sender's and of the receiver's stream
  size_t bytes;
  bool taken;
};

struct wire {
  struct swathe_transport transport;
  struct wires *wires;
  struct swathe_transport *inner;
};

struct wires {
  pthread_mutex_t mutex;
  pthread_cond_t news;
  struct wire rank[MOST_RANKS];
  struct letter letters[MOST_LETTERS];
  int64_t letter_count;
  bool failed;
  int (*event_create)(void **event, unsigned flags);
  int (*event_record)(void *event, void *stream);
  int (*event_destroy)(void *event);
  int (*stream_wait)(void *stream, void *event, unsigned flags);
  int (*copy)(unsigned long long to, unsigned long long from, size_t bytes, void *stream);
  int (*context_retain)(void **context, int device);
  int (*context_release)(int device);
  int (*context_push)(void *context);
  int (*context_pop)(void **context);
};

// An event of all that was queued on the stream; NULL after a failure.
static void *mark(const struct wires *wires, void *stream)
{
  void *event = NULL;
  if (wires->event_create(&event, 2) || wires->event_record(event, stream)) return NULL;
  return event;
}

static enum swathe_status send_letters(struct wire *wire,
                                       const struct sw_transport_message *messages, int32_t count,
                                       void *stream)
{
  struct wires *wires = wire->wires;
  for (int32_t i = 0; i < count; i++) {
    if (!messages[i].send) continue;
    void *ready = mark(wires, stream);
    if (!ready || wires->letter_count == MOST_LETTERS)
      return sw_fail(SWATHE_TRANSPORT, "a message cannot be queued");
    wires->letters[wires->letter_count++] = (struct letter){
      .from = wire->transport.rank,
      .to = messages[i].peer,
      .data = messages[i].data,
      .bytes = messages[i].bytes,
      .ready = ready,
    };
  }
  pthread_cond_broadcast(&wires->news);
  return SWATHE_OK;
}

// The first letter between the two that nobody took; waits until it is there.
static struct letter *next_letter(struct wires *wires, int32_t from, int32_t to)
{
  while (!wires->failed) {
    for (int64_t i = 0; i < wires->letter_count; i++) {
      struct letter *letter = &wires->letters[i];
      if (letter->from == from && letter->to == to && !letter->taken) return letter;
    }
    pthread_cond_wait(&wires->news, &wires->mutex);
  }
  return NULL;
}

static enum swathe_status take_letters(struct wire *wire,
                                       const struct sw_transport_message *messages, int32_t count,
                                       void *stream)
{
  struct wires *wires = wire->wires;
  for (int32_t i = 0; i < count; i++) {
    if (messages[i].send) continue;
    struct letter *letter = next_letter(wires, messages[i].peer, wire->transport.rank);
    if (!letter || letter->bytes != messages[i].bytes)
      return sw_fail(SWATHE_DISAGREE, "a message of another size came");
    letter->taken = true;
    if (wires->stream_wait(stream, letter->ready, 0) ||
        wires->copy((unsigned long long)(uintptr_t)messages[i].data,
                    (unsigned long long)(uintptr_t)letter->data, letter->bytes, stream))
      return sw_fail(SWATHE_TRANSPORT, "a message cannot be copied");
    letter->done = mark(wires, stream);
    pthread_cond_broadcast(&wires->news);
  }
  return SWATHE_OK;
}

// What this rank sent may change again when its readers have it.
static enum swathe_status await_readers(struct wire *wire, int64_t first, void *stream)
{
  struct wires *wires = wire->wires;
  for (int64_t i = first; i < wires->letter_count; i++) {
    struct letter *letter = &wires->letters[i];
    if (letter->from != wire->transport.rank) continue;
    while (!letter->done && !wires->failed) pthread_cond_wait(&wires->news, &wires->mutex);
    if (!letter->done || wires->stream_wait(stream, letter->done, 0))
      return sw_fail(SWATHE_TRANSPORT, "a reader is lost");
  }
  return SWATHE_OK;
}

static enum swathe_status enqueue(struct swathe_transport *transport,
                                  const struct sw_transport_message *messages, int32_t count,
                                  void *stream)
{
  struct wire *wire = (struct wire *)transport;
  struct wires *wires = wire->wires;

  pthread_mutex_lock(&wires->mutex);
  const int64_t first = wires->letter_count;
  enum swathe_status status = send_letters(wire, messages, count, stream);
  if (!status) status = take_letters(wire, messages, count, stream);
  if (!status) status = await_readers(wire, first, stream);
  wires->failed |= status != SWATHE_OK;
  pthread_cond_broadcast(&wires->news);
  pthread_mutex_unlock(&wires->mutex);
  return status;
}

static enum swathe_status gather(struct swathe_transport *transport, const void *mine,
                                 size_t bytes, void *all)
{
  struct swathe_transport *inner = ((struct wire *)transport)->inner;
  return inner->operations->gather(inner, mine, bytes, all);
}

static enum swathe_status refuse_post(struct swathe_transport *transport,
                                      const struct sw_transport_message *messages, int32_t count)
{
  (void)transport, (void)messages, (void)count;
  return sw_fail(SWATHE_TRANSPORT, "host memory was posted");
}

static enum swathe_status refuse_wait(struct swathe_transport *transport)
{
  (void)transport;
  return sw_fail(SWATHE_TRANSPORT, "the host waits");
}

static const struct sw_transport_operations operations = {
  .post = refuse_post, .wait = refuse_wait, .gather = gather, .enqueue = enqueue
};

struct wires *wires_make(int32_t ranks)
{
  struct wires *wires = calloc(1, sizeof *wires);
  void *library = dlopen(getenv("SWATHE_LIBCUDA"), RTLD_NOW);
  if (!wires || !library || ranks > MOST_RANKS) abort();
  pthread_mutex_init(&wires->mutex, NULL);
  pthread_cond_init(&wires->news, NULL);
  *(void **)&wires->event_create = dlsym(library, "cuEventCreate");
  *(void **)&wires->event_record = dlsym(library, "cuEventRecord");
  *(void **)&wires->event_destroy = dlsym(library, "cuEventDestroy_v2");
  *(void **)&wires->stream_wait = dlsym(library, "cuStreamWaitEvent");
  *(void **)&wires->copy = dlsym(library, "cuMemcpyDtoDAsync_v2");
  *(void **)&wires->context_retain = dlsym(library, "cuDevicePrimaryCtxRetain");
  *(void **)&wires->context_release = dlsym(library, "cuDevicePrimaryCtxRelease_v2");
  *(void **)&wires->context_push = dlsym(library, "cuCtxPushCurrent_v2");
  *(void **)&wires->context_pop = dlsym(library, "cuCtxPopCurrent_v2");
  if (!wires->event_create || !wires->event_record || !wires->event_destroy ||
      !wires->stream_wait || !wires->copy)
    abort();
  return wires;
}

struct swathe_transport *wires_rank(struct wires *wires, int32_t rank,
                                    struct swathe_transport *inner)
{
  wires->rank[rank] = (struct wire){
    .transport = { .operations = &operations, .name = "wires", .rank = inner->rank,
                   .ranks = inner->ranks },
    .wires = wires,
    .inner = inner,
  };
  return &wires->rank[rank].transport;
}

int64_t wires_count(const struct wires *wires) { return wires->letter_count; }

void wires_free(struct wires *wires)
{
  void *context = NULL;
  if (wires->context_retain(&context, 0) || wires->context_push(context)) abort();
  for (int64_t i = 0; i < wires->letter_count; i++) {
    wires->event_destroy(wires->letters[i].ready);
    if (wires->letters[i].done) wires->event_destroy(wires->letters[i].done);
  }
  wires->context_pop(&context);
  wires->context_release(0);
  pthread_cond_destroy(&wires->news);
  pthread_mutex_destroy(&wires->mutex);
  free(wires);
}
