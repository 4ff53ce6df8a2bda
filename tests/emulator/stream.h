// stream.h: streams that run behind the caller's back, events, and graphs recorded from them.
#ifndef EMULATOR_STREAM_H
#define EMULATOR_STREAM_H
#include "launch.h"
#include <stdatomic.h>

enum { STREAM_NOT_READY = 600 };

struct stream;
struct event;
struct graph;

struct context {
  int device;
  int holders;
  atomic_int fault;            // sticky
  uint64_t peers;              // devices whose memory kernels may touch, as bits
  struct stream *null_stream;
  struct stream *streams;
  struct module *modules;
};

enum stream_kind { STREAM_LAUNCH, STREAM_COPY, STREAM_SET, STREAM_CALL, STREAM_RECORD, STREAM_WAIT,
                   STREAM_GRAPH };

struct stream_task {
  enum stream_kind kind;
  struct launch_request launch;
  void *into;                  // copy, set
  const void *from;
  size_t bytes;                // of a set: elements
  int element_bytes;
  uint64_t value;
  void (*call)(void *);        // host function
  void *argument;
  struct event *event;         // record
  struct stream *other;        // wait: until it has done `until`
  uint64_t until;
  struct graph *graph;
};

struct stream *stream_create(struct context *context, bool blocking);
void stream_destroy(struct stream *stream);
void stream_destroy_others(struct context *context);  // than the null stream
bool stream_known(const struct stream *stream);
// Puts the task last.  A CUresult.
int stream_add(struct stream *stream, struct stream_task task);
// Waits for all that was put in so far.
int stream_finish(struct stream *stream);
int stream_query(struct stream *stream);
struct context *stream_context(const struct stream *stream);
// All of the context's streams.
int stream_finish_context(struct context *context);

struct event *event_create(struct context *context);
void event_destroy(struct event *event);
int event_record(struct event *event, struct stream *stream);
int event_wait(struct event *event, struct stream *stream);
int event_finish(struct event *event);
int event_query(struct event *event);
int event_elapsed(struct event *from, struct event *to, float *ms);

int stream_begin_capture(struct stream *stream, int mode);
int stream_end_capture(struct stream *stream, struct graph **graph);
int stream_capture_state(struct stream *stream);  // 0 none, 1 active, 2 broken
// Whether a call that may wait or allocate is refused because something is being recorded.
bool stream_forbids(void);
int stream_exchange_mode(int mode);  // the calling thread's; the one before
struct graph *graph_copy(const struct graph *graph);
void graph_free(struct graph *graph);
int graph_node_count(const struct graph *graph);

uint64_t stream_seed(void);    // EMULATOR_SEED

#endif
