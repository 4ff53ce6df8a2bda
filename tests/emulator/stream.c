// stream.c: a worker thread for each stream runs its tasks in order and no sooner than it must: by
// chance a task waits until somebody waits for it, or for a while.  What is missing between two
// streams shows that way.
#include "stream.h"
#include "memory.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct node { struct stream_task task; int *before; int before_count; };
struct graph { struct node *nodes; int count; };

struct capture {
  struct capture *before;
  struct graph *graph;
  struct stream *origin;
  int mode;                    // 0: nobody, 1: not its thread, 2: everybody may wait meanwhile
  pthread_t thread;
  bool broken;
};

struct queued { struct stream_task task; uint64_t due_ns; struct queued *next; };

struct stream {
  struct context *context;
  struct stream *next;         // of the context
  bool blocking, destroyed;
  uint64_t added, done, hurry; // tasks; `hurry`: up to which somebody waits
  struct queued *first, *last;
  pthread_cond_t wake;         // its worker: there is something to do, or no more time to do it
  pthread_cond_t progress;     // whoever waits for it: `done` has grown
  struct capture *capture;
  int *ends, end_count;        // the nodes that the next one of a capture comes after
  struct stream *all;          // of the process
};

struct event {
  struct context *context;
  struct stream *stream;       // NULL: never recorded
  uint64_t until, time_ns;
  struct capture *capture;
  int *ends, end_count;
  int holders;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct stream *all_streams;
static int recordings;
static struct capture *captures;  // all there ever were: events may still point to them
static uint64_t chance;
static atomic_uint_fast64_t launches;

uint64_t stream_seed(void)
{
  const char *given = getenv("EMULATOR_SEED");
  return given ? strtoull(given, NULL, 10) : 1;
}

static uint64_t now_ns(void)
{
  struct timespec time;
  clock_gettime(CLOCK_REALTIME, &time);
  return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

static uint64_t draw(void)
{
  if (!chance) chance = stream_seed() * UINT64_C(0x9e3779b97f4a7c15) | 1;
  chance ^= chance << 13;
  chance ^= chance >> 7;
  chance ^= chance << 17;
  return chance >> 16;
}

static uint64_t delay_ns(void)
{
  const char *given = getenv("EMULATOR_DELAY_US");
  uint64_t most_us = given ? strtoull(given, NULL, 10) : 3000;
  return most_us && draw() % 2 ? draw() % (1000 * most_us) : 0;
}

static void wait_until(struct stream *stream, uint64_t due_ns)
{
  struct timespec time = { (time_t)(due_ns / 1000000000), (long)(due_ns % 1000000000) };
  pthread_cond_timedwait(&stream->wake, &lock, &time);
}

// ---- running

static void set_elements(const struct stream_task *task)
{
  unsigned char *at = task->into;
  // one word is written at once: the host may be looking
  if (task->bytes == 1 && task->element_bytes == 8) {
    __atomic_store_n((uint64_t *)task->into, task->value, __ATOMIC_RELEASE);
    return;
  }
  if (task->bytes == 1 && task->element_bytes == 4) {
    __atomic_store_n((uint32_t *)task->into, (uint32_t)task->value, __ATOMIC_RELEASE);
    return;
  }
  for (size_t i = 0; i < task->bytes; i++)
    memcpy(at + i * (size_t)task->element_bytes, &task->value, (size_t)task->element_bytes);
}

static int run_graph(const struct context *context, const struct graph *graph);

static int run_task(const struct context *context, const struct stream_task *task)
{
  switch (task->kind) {
  case STREAM_LAUNCH: {
    const char *races = getenv("EMULATOR_RACES");
    uint64_t number = atomic_fetch_add(&launches, 1);
    return launch_run(&task->launch, context->peers, stream_seed() * UINT64_C(1000003) + number,
                      !races || strcmp(races, "0"));
  }
  case STREAM_COPY:
    memmove(task->into, task->from, task->bytes);
    return 0;
  case STREAM_SET:
    set_elements(task);
    return 0;
  case STREAM_CALL:
    task->call(task->argument);
    return 0;
  case STREAM_GRAPH:
    return run_graph(context, task->graph);
  default:
    return 0;
  }
}

// Nodes in some order that their edges allow.
static int run_graph(const struct context *context, const struct graph *graph)
{
  bool *done = calloc((size_t)graph->count + 1, 1);
  int status = 0;
  for (int left = graph->count; left && !status; left--) {
    int chosen = -1;
    uint64_t ready = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < graph->count; i++) {
      bool can = !done[i];
      for (int k = 0; k < graph->nodes[i].before_count; k++)
        can = can && done[graph->nodes[i].before[k]];
      if (can && draw() % ++ready == 0) chosen = i;
    }
    pthread_mutex_unlock(&lock);
    done[chosen] = true;
    status = run_task(context, &graph->nodes[chosen].task);
  }
  free(done);
  return status;
}

static void free_task(struct stream_task *task)
{
  free(task->launch.params);
  if (task->graph) graph_free(task->graph);
}

// Up to which task a stream must get on, and what that asks of those it waits for.
static void hasten(struct stream *stream, uint64_t until)
{
  if (stream->hurry >= until) return;
  stream->hurry = until;
  pthread_cond_signal(&stream->wake);
  for (struct queued *at = stream->first; at; at = at->next)
    if (at->task.kind == STREAM_WAIT) hasten(at->task.other, at->task.until);
}

static void release_event(struct event *event)
{
  if (--event->holders) return;
  free(event->ends);
  free(event);
}

static void *serve(void *argument)
{
  struct stream *stream = argument;
  pthread_mutex_lock(&lock);
  for (;;) {
    struct queued *at = stream->first;
    if (!at) {
      if (stream->destroyed) break;
      pthread_cond_wait(&stream->wake, &lock);
      continue;
    }
    uint64_t number = stream->done + 1;
    if (stream->hurry < number && now_ns() < at->due_ns) {
      wait_until(stream, at->due_ns);
      continue;
    }
    if (at->task.kind == STREAM_WAIT && at->task.other->done < at->task.until) {
      if (stream->hurry >= number) hasten(at->task.other, at->task.until);
      pthread_cond_wait(&at->task.other->progress, &lock);
      continue;
    }
    int status = stream->context->fault;
    pthread_mutex_unlock(&lock);
    if (!status) status = run_task(stream->context, &at->task);
    pthread_mutex_lock(&lock);
    if (at->task.kind == STREAM_RECORD) {
      at->task.event->time_ns = now_ns();
      release_event(at->task.event);
    }
    if (status && !stream->context->fault) stream->context->fault = status;
    stream->first = at->next;
    if (!stream->first) stream->last = NULL;
    stream->done++;
    pthread_cond_broadcast(&stream->progress);
    pthread_mutex_unlock(&lock);
    free_task(&at->task);
    free(at);
    pthread_mutex_lock(&lock);
  }
  pthread_mutex_unlock(&lock);
  return NULL;
}

// ---- streams

struct stream *stream_create(struct context *context, bool blocking)
{
  struct stream *stream = calloc(1, sizeof *stream);
  pthread_t thread;
  if (!stream) return NULL;
  stream->context = context;
  stream->blocking = blocking;
  pthread_cond_init(&stream->wake, NULL);
  pthread_cond_init(&stream->progress, NULL);
  pthread_mutex_lock(&lock);
  stream->next = context->streams;
  context->streams = stream;
  stream->all = all_streams;
  all_streams = stream;
  pthread_mutex_unlock(&lock);
  if (pthread_create(&thread, NULL, serve, stream)) abort();
  pthread_detach(thread);
  return stream;
}

// The stream itself stays in the list of all: events may still speak of it.
void stream_destroy(struct stream *stream)
{
  pthread_mutex_lock(&lock);
  stream->destroyed = true;
  struct stream **at = &stream->context->streams;
  while (*at && *at != stream) at = &(*at)->next;
  if (*at) *at = stream->next;
  pthread_cond_signal(&stream->wake);
  pthread_mutex_unlock(&lock);
}

void stream_destroy_others(struct context *context)
{
  for (;;) {
    pthread_mutex_lock(&lock);
    struct stream *stream = context->streams;
    while (stream && stream == context->null_stream) stream = stream->next;
    pthread_mutex_unlock(&lock);
    if (!stream) return;
    stream_destroy(stream);
  }
}

bool stream_known(const struct stream *stream)
{
  pthread_mutex_lock(&lock);
  const struct stream *at = all_streams;
  while (at && at != stream) at = at->all;
  bool known = at && !at->destroyed;
  pthread_mutex_unlock(&lock);
  return known;
}

struct context *stream_context(const struct stream *stream) { return stream->context; }

static void put(struct stream *stream, const struct stream_task *task)
{
  struct queued *queued = calloc(1, sizeof *queued);
  if (!queued) abort();
  queued->task = *task;
  queued->due_ns = now_ns() + delay_ns();
  if (stream->last) stream->last->next = queued;
  else stream->first = queued;
  stream->last = queued;
  stream->added++;
  pthread_cond_signal(&stream->wake);
}

static void put_wait(struct stream *stream, struct stream *other)
{
  if (other == stream || other->done == other->added) return;
  put(stream, &(struct stream_task){ .kind = STREAM_WAIT, .other = other, .until = other->added });
}

// The null stream and the blocking streams wait for one another.
static void order_with_null(struct stream *stream)
{
  struct context *context = stream->context;
  if (stream == context->null_stream) {
    for (struct stream *other = context->streams; other; other = other->next)
      if (other->blocking) put_wait(stream, other);
  } else if (stream->blocking && context->null_stream) {
    put_wait(stream, context->null_stream);
  }
}

static void set_ends(int **ends, int *count, const int *from, int from_count)
{
  free(*ends);
  *ends = malloc(((size_t)from_count + 1) * sizeof **ends);
  if (from_count) memcpy(*ends, from, (size_t)from_count * sizeof **ends);
  *count = from_count;
}

static void record(struct stream *stream, struct stream_task *task)
{
  struct graph *graph = stream->capture->graph;
  graph->nodes = realloc(graph->nodes, ((size_t)graph->count + 1) * sizeof *graph->nodes);
  struct node *node = &graph->nodes[graph->count];
  *node = (struct node){ .task = *task };
  set_ends(&node->before, &node->before_count, stream->ends, stream->end_count);
  set_ends(&stream->ends, &stream->end_count, &graph->count, 1);
  graph->count++;
}

int stream_add(struct stream *stream, struct stream_task task)
{
  pthread_mutex_lock(&lock);
  int status = stream->context->fault;
  if (stream->capture) {
    record(stream, &task);
  } else if (status) {
    free_task(&task);
  } else {
    order_with_null(stream);
    put(stream, &task);
  }
  pthread_mutex_unlock(&lock);
  return status;
}

static int finish(struct stream *stream)
{
  uint64_t until = stream->added;
  while (stream->done < until) {
    hasten(stream, until);
    pthread_cond_wait(&stream->progress, &lock);
  }
  return stream->context->fault;
}

// A stream that is recorded cannot be waited for, and the attempt spoils the recording.
static int refuse_captured(struct stream *stream)
{
  if (!stream->capture) return 0;
  stream->capture->broken = true;
  return 900;
}

int stream_finish(struct stream *stream)
{
  pthread_mutex_lock(&lock);
  int status = refuse_captured(stream);
  if (!status) {
    if (stream == stream->context->null_stream)
      for (struct stream *other = stream->context->streams; other; other = other->next)
        if (other->blocking && !other->capture) finish(other);
    status = finish(stream);
  }
  pthread_mutex_unlock(&lock);
  return status;
}

int stream_query(struct stream *stream)
{
  pthread_mutex_lock(&lock);
  int status = refuse_captured(stream);
  if (!status) status = stream->context->fault;
  if (!status && stream->done < stream->added) {
    if (draw() % 8 == 0) hasten(stream, stream->added);  // who only asks must get there too
    status = STREAM_NOT_READY;
  }
  pthread_mutex_unlock(&lock);
  return status;
}

int stream_finish_context(struct context *context)
{
  pthread_mutex_lock(&lock);
  for (struct stream *stream = context->streams; stream; stream = stream->next)
    if (!stream->capture) finish(stream);
  int status = context->fault;
  pthread_mutex_unlock(&lock);
  return status;
}

// ---- events

struct event *event_create(struct context *context)
{
  struct event *event = calloc(1, sizeof *event);
  if (!event) return NULL;
  event->context = context;
  event->holders = 1;
  return event;
}

void event_destroy(struct event *event)
{
  pthread_mutex_lock(&lock);
  release_event(event);
  pthread_mutex_unlock(&lock);
}

int event_record(struct event *event, struct stream *stream)
{
  pthread_mutex_lock(&lock);
  int status = 0;
  if (event->context != stream->context) {
    status = 400;
  } else if (stream->capture) {
    event->capture = stream->capture;
    set_ends(&event->ends, &event->end_count, stream->ends, stream->end_count);
  } else {
    event->capture = NULL;
    event->stream = stream;
    order_with_null(stream);
    event->holders++;
    put(stream, &(struct stream_task){ .kind = STREAM_RECORD, .event = event });
    event->until = stream->added;
  }
  pthread_mutex_unlock(&lock);
  return status;
}

int event_wait(struct event *event, struct stream *stream)
{
  pthread_mutex_lock(&lock);
  int status = 0;
  if (event->capture) {
    if (stream->capture && stream->capture != event->capture) {
      status = 905;  // two recordings cannot be merged
    } else {
      stream->capture = event->capture;
      int count = stream->end_count + event->end_count;
      int *ends = malloc(((size_t)count + 1) * sizeof *ends);
      if (stream->end_count) memcpy(ends, stream->ends, (size_t)stream->end_count * sizeof *ends);
      if (event->end_count)
        memcpy(ends + stream->end_count, event->ends, (size_t)event->end_count * sizeof *ends);
      free(stream->ends);
      stream->ends = ends;
      stream->end_count = count;
    }
  } else if (stream->capture) {
    if (event->stream) status = 906;  // what is outside cannot be waited for inside
  } else if (event->stream) {
    put(stream, &(struct stream_task){ .kind = STREAM_WAIT, .other = event->stream,
                                       .until = event->until });
  }
  pthread_mutex_unlock(&lock);
  return status;
}

int event_finish(struct event *event)
{
  pthread_mutex_lock(&lock);
  int status = event->capture ? 907 : 0;
  while (!status && event->stream && event->stream->done < event->until) {
    hasten(event->stream, event->until);
    pthread_cond_wait(&event->stream->progress, &lock);
  }
  if (!status) status = event->context->fault;
  pthread_mutex_unlock(&lock);
  return status;
}

int event_query(struct event *event)
{
  pthread_mutex_lock(&lock);
  int status = event->capture ? 907 : event->context->fault;
  if (!status && event->stream && event->stream->done < event->until) {
    if (draw() % 8 == 0) hasten(event->stream, event->until);
    status = STREAM_NOT_READY;
  }
  pthread_mutex_unlock(&lock);
  return status;
}

int event_elapsed(struct event *from, struct event *to, float *ms)
{
  pthread_mutex_lock(&lock);
  int status = 0;
  if (!from->stream || !to->stream) status = 400;
  else if (from->stream->done < from->until || to->stream->done < to->until)
    status = STREAM_NOT_READY;
  else *ms = (float)((double)((int64_t)(to->time_ns - from->time_ns)) * 1e-6);
  pthread_mutex_unlock(&lock);
  return status;
}

// ---- recordings

int stream_begin_capture(struct stream *stream, int mode)
{
  pthread_mutex_lock(&lock);
  int status = 0;
  if (stream->capture || stream == stream->context->null_stream) {
    status = stream->capture ? 901 : 900;
  } else {
    struct capture *capture = calloc(1, sizeof *capture);
    capture->graph = calloc(1, sizeof *capture->graph);
    capture->origin = stream;
    capture->mode = mode;
    capture->thread = pthread_self();
    capture->before = captures;
    captures = capture;
    recordings++;
    stream->capture = capture;
    set_ends(&stream->ends, &stream->end_count, NULL, 0);
  }
  pthread_mutex_unlock(&lock);
  return status;
}

static void mark_before(const struct graph *graph, bool *marked, int node)
{
  if (marked[node]) return;
  marked[node] = true;
  for (int i = 0; i < graph->nodes[node].before_count; i++)
    mark_before(graph, marked, graph->nodes[node].before[i]);
}

int stream_end_capture(struct stream *stream, struct graph **graph)
{
  pthread_mutex_lock(&lock);
  struct capture *capture = stream->capture;
  int status = 0;
  *graph = NULL;
  if (!capture || capture->origin != stream) {
    status = capture ? 902 : 1;
  } else {
    bool *joined = calloc((size_t)capture->graph->count + 1, 1);
    for (int i = 0; i < stream->end_count; i++)
      mark_before(capture->graph, joined, stream->ends[i]);
    for (int i = 0; i < capture->graph->count; i++)
      if (!joined[i]) status = 904;  // a stream that joined was not waited for
    free(joined);
    if (capture->broken) status = 901;
    for (struct stream *other = all_streams; other; other = other->all)
      if (other->capture == capture) {
        other->capture = NULL;
        other->end_count = 0;
      }
    recordings--;
    if (status) graph_free(capture->graph);
    else *graph = capture->graph;
  }
  pthread_mutex_unlock(&lock);
  return status;
}

int stream_capture_state(struct stream *stream)
{
  pthread_mutex_lock(&lock);
  int state = !stream->capture ? 0 : stream->capture->broken ? 2 : 1;
  pthread_mutex_unlock(&lock);
  return state;
}

static _Thread_local int thread_mode;  // 2: what the thread calls is no part of a recording

int stream_exchange_mode(int mode)
{
  int before = thread_mode;
  thread_mode = mode;
  return before;
}

bool stream_forbids(void)
{
  bool forbids = false;
  if (thread_mode == 2) return false;
  pthread_mutex_lock(&lock);
  for (struct stream *stream = recordings ? all_streams : NULL; stream; stream = stream->all) {
    struct capture *capture = stream->capture;
    if (!capture || capture->mode == 2) continue;
    if (capture->mode == 1 && !pthread_equal(capture->thread, pthread_self())) continue;
    forbids = capture->broken = true;
  }
  pthread_mutex_unlock(&lock);
  return forbids;
}

struct graph *graph_copy(const struct graph *graph)
{
  struct graph *copy = calloc(1, sizeof *copy);
  copy->count = graph->count;
  copy->nodes = calloc((size_t)graph->count + 1, sizeof *copy->nodes);
  for (int i = 0; i < graph->count; i++) {
    const struct node *from = &graph->nodes[i];
    copy->nodes[i].task = from->task;
    set_ends(&copy->nodes[i].before, &copy->nodes[i].before_count, from->before,
             from->before_count);
    if (from->task.kind == STREAM_LAUNCH) {
      size_t bytes = from->task.launch.code->param_bytes;
      copy->nodes[i].task.launch.params = malloc(bytes + 1);
      memcpy(copy->nodes[i].task.launch.params, from->task.launch.params, bytes);
    }
    if (from->task.graph) copy->nodes[i].task.graph = graph_copy(from->task.graph);
  }
  return copy;
}

void graph_free(struct graph *graph)
{
  for (int i = 0; i < graph->count; i++) {
    free_task(&graph->nodes[i].task);
    free(graph->nodes[i].before);
  }
  free(graph->nodes);
  free(graph);
}

int graph_node_count(const struct graph *graph) { return graph->count; }
