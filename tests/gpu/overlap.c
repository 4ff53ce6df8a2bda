// overlap.c: the middle one of three ranks on one GPU, whose neighbours are a delayed copy.
//
//   gpu_overlap PROBLEM RUNS DELAY_US...
//
// Emulates overlap on a single GPU: no wire and no other rank is there.  What a neighbour would
// send is copied from this device's own memory, on the layer's stream for messages, after the host
// has held that stream up for the delay.  It tells how much of the time until the halo is there
// the interior hides, and nothing of what a link does to the rest.
//
// PROBLEM is the canonical text of one problem; ranks and target are set here.  Prints one JSON
// document; times are medians on the device's clock, of which an emulated driver has none.
#include <dlfcn.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "layer.h"
#include "transport.h"

enum { RANKS = 3, MOST_RUNS = 200 };

// One call is a forward or a backward; the layer hands the transport its messages in one or more.
struct neighbour {
  struct swathe_transport transport;
  struct sw_device_cuda *device;
  int (*host_function)(void *stream, void (*function)(void *), void *arg);
  int (*copy)(unsigned long long to, unsigned long long from, size_t bytes, void *stream);
  long delay_us;
  void *elsewhere;                // as large as the largest message
  size_t elsewhere_bytes;
  void *begin, *end;              // events around what travels in one call
  int calls;
  size_t received_bytes;          // of one call
};

static _Noreturn void give_up(const char *what)
{
  fprintf(stderr, "gpu_overlap: %s: %s\n", what, swathe_error());
  exit(1);
}

static void need(enum swathe_status status, const char *what)
{
  if (status) give_up(what);
}

// ---- The neighbour ------------------------------------------------------------------------------

static void hold_up(void *arg)
{
  const long us = *(const long *)arg;
  const struct timespec time = { us / 1000000, us % 1000000 * 1000 };
  nanosleep(&time, NULL);
}

// Waiting for all its work: a block that other calls may use cannot be exchanged before.
static enum swathe_status grow(struct neighbour *neighbour, size_t bytes, void *stream)
{
  if (bytes <= neighbour->elsewhere_bytes) return SWATHE_OK;
  enum swathe_status status = sw_device_cuda_synchronize(neighbour->device, stream);
  if (status) return status;
  sw_device_cuda_free(neighbour->device, neighbour->elsewhere);
  neighbour->elsewhere_bytes = bytes;
  status = sw_device_cuda_allocate(neighbour->device, bytes, &neighbour->elsewhere);
  if (!status)
    status = sw_device_cuda_fill(neighbour->device, neighbour->elsewhere, 0, bytes / 4, stream);
  return status;
}

static enum swathe_status enqueue(struct swathe_transport *transport,
                                  const struct sw_transport_message *messages, int32_t count,
                                  void *stream)
{
  struct neighbour *neighbour = (struct neighbour *)transport;
  enum swathe_status status = SWATHE_OK;

  for (int32_t i = 0; i < count && !status; i++)
    status = grow(neighbour, messages[i].bytes, stream);
  if (!status && !neighbour->calls++)
    status = sw_device_cuda_record(neighbour->device, neighbour->begin, stream);
  if (status) return status;
  if (neighbour->delay_us && neighbour->host_function(stream, hold_up, &neighbour->delay_us))
    return sw_fail(SWATHE_TRANSPORT, "the stream cannot be held up");
  for (int32_t i = 0; i < count; i++) {
    const unsigned long long data = (uintptr_t)messages[i].data;
    const unsigned long long elsewhere = (uintptr_t)neighbour->elsewhere;
    if (messages[i].send) continue;
    neighbour->received_bytes += messages[i].bytes;
    if (neighbour->copy(data, elsewhere, messages[i].bytes, stream))
      return sw_fail(SWATHE_TRANSPORT, "a message cannot be copied");
  }
  return sw_device_cuda_record(neighbour->device, neighbour->end, stream);
}

static enum swathe_status gather(struct swathe_transport *transport, const void *mine,
                                 size_t bytes, void *all)
{
  for (int32_t r = 0; r < transport->ranks; r++)
    memcpy((char *)all + (size_t)r * bytes, mine, bytes);
  return SWATHE_OK;
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

static void open_neighbour(struct neighbour *neighbour, struct sw_device_cuda *device)
{
  const char *path = getenv("SWATHE_LIBCUDA");
  void *library = dlopen(path && *path ? path : "libcuda.so.1", RTLD_NOW);
  *neighbour = (struct neighbour){
    .transport = { .operations = &operations, .name = "a delayed copy", .rank = 1,
                   .ranks = RANKS },
    .device = device,
  };
  if (library) {
    *(void **)&neighbour->host_function = dlsym(library, "cuLaunchHostFunc");
    *(void **)&neighbour->copy = dlsym(library, "cuMemcpyDtoDAsync_v2");
  }
  if (!neighbour->host_function || !neighbour->copy) give_up("the driver's functions");
  need(sw_device_cuda_event(device, true, &neighbour->begin), "an event");
  need(sw_device_cuda_event(device, true, &neighbour->end), "an event");
}

// ---- The rank -----------------------------------------------------------------------------------

static void fill(void *host, size_t bytes, bool floats)
{
  static uint64_t state = 1;
  for (size_t i = 0; i < bytes / (floats ? 4 : 2); i++) {
    state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    // from 1 to 2 or -2 to -1; the same number in bf16 and, a little larger, in f16
    const uint16_t bits = (uint16_t)(0x3f80 | (state >> 57) | (state >> 40 & 0x8000));
    if (floats) ((uint32_t *)host)[i] = (uint32_t)bits << 16;
    else ((uint16_t *)host)[i] = bits;
  }
}

static void *make(struct swathe_context *context, size_t bytes, bool floats)
{
  void *memory = NULL, *host = malloc(bytes);
  if (!host) give_up("memory");
  fill(host, bytes, floats);
  need(swathe_memory_allocate(context, SWATHE_CUDA, bytes, &memory), "tensors");
  need(swathe_memory_write(context, SWATHE_CUDA, memory, host, bytes), "tensors");
  free(host);
  return memory;
}

static struct swathe_tensor tensor(struct swathe_context *context, int64_t rows, int32_t heads,
                                   int32_t dim, bool floats)
{
  const size_t bytes = (size_t)(rows * heads * dim) * (floats ? 4 : 2);
  return (struct swathe_tensor){ make(context, bytes, floats), (int64_t)heads * dim, dim, 0 };
}

static struct swathe_tensors make_tensors(struct swathe_context *context,
                                          const struct swathe_problem *p)
{
  const int64_t rows = p->tokens_per_rank;
  const size_t head_bytes = sizeof(float) * (size_t)p->q_heads;
  return (struct swathe_tensors){
    .q = tensor(context, rows, p->q_heads, p->head_dim_qk, false),
    .k = tensor(context, rows, p->kv_heads, p->head_dim_qk, false),
    .v = tensor(context, rows, p->kv_heads, p->head_dim_v, false),
    .out = tensor(context, rows, p->q_heads, p->head_dim_v, false),
    .lse = tensor(context, rows, p->q_heads, 1, true),
    .dout = tensor(context, rows, p->q_heads, p->head_dim_v, false),
    .dq = tensor(context, rows, p->q_heads, p->head_dim_qk, false),
    .dk = tensor(context, rows, p->kv_heads, p->head_dim_qk, false),
    .dv = tensor(context, rows, p->kv_heads, p->head_dim_v, false),
    .sink = p->sinks ? make(context, head_bytes, true) : NULL,
    .dsink = p->sinks ? make(context, head_bytes, true) : NULL,
  };
}

// ---- Time ---------------------------------------------------------------------------------------

struct timed {
  double total_us, wire_us;  // medians
};

static int ascending(const void *a, const void *b)
{
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static struct timed time_runs(struct swathe_layer *layer, const struct swathe_tensors *tensors,
                              struct neighbour *neighbour, bool backward, int runs)
{
  struct sw_device_cuda *device = neighbour->device;
  double total_us[MOST_RUNS], wire_us[MOST_RUNS];
  void *begin, *end;

  need(sw_device_cuda_event(device, true, &begin), "an event");
  need(sw_device_cuda_event(device, true, &end), "an event");
  for (int i = -2; i < runs; i++) {  // two to warm up
    const int at = i < 0 ? 0 : i;
    neighbour->calls = 0;
    neighbour->received_bytes = 0;
    need(sw_device_cuda_record(device, begin, NULL), "an event");
    need(backward ? swathe_layer_backward(layer, tensors, NULL)
                  : swathe_layer_forward(layer, tensors, NULL), "the layer");
    need(sw_device_cuda_record(device, end, NULL), "an event");
    need(sw_device_cuda_wait_event(device, end), "the device");
    need(sw_device_cuda_elapsed(device, begin, end, &total_us[at]), "an event");
    wire_us[at] = 0;
    if (!neighbour->calls) continue;
    need(sw_device_cuda_wait_event(device, neighbour->end), "the device");
    need(sw_device_cuda_elapsed(device, neighbour->begin, neighbour->end, &wire_us[at]),
         "an event");
  }
  sw_device_cuda_drop_event(device, begin);
  sw_device_cuda_drop_event(device, end);
  qsort(total_us, (size_t)runs, sizeof *total_us, ascending);
  qsort(wire_us, (size_t)runs, sizeof *wire_us, ascending);
  return (struct timed){ total_us[runs / 2], wire_us[runs / 2] };
}

// What stays visible of the time until the halo is there: the total beside the muted layer's.
static void report(struct swathe_layer *layer, const struct swathe_tensors *tensors,
                   struct neighbour *neighbour, bool backward, int runs, char **delays)
{
  neighbour->delay_us = 0;
  time_runs(layer, tensors, neighbour, backward, 1);
  swathe_layer_mute(layer, true);
  const struct timed muted = time_runs(layer, tensors, neighbour, backward, runs);
  swathe_layer_mute(layer, false);
  printf("%s\"%s\": {\"muted_us\": %.2f, \"delays\": [", backward ? ", " : "",
         backward ? "backward" : "forward", muted.total_us);
  for (char **delay = delays; *delay; delay++) {
    neighbour->delay_us = strtol(*delay, NULL, 10);
    const struct timed timed = time_runs(layer, tensors, neighbour, backward, runs);
    printf("%s{\"delay_us\": %ld, \"wire_us\": %.2f, \"total_us\": %.2f, \"exposed_us\": %.2f, "
           "\"received_bytes\": %zu}", delay == delays ? "" : ", ", neighbour->delay_us,
           timed.wire_us, timed.total_us, timed.total_us - muted.total_us,
           neighbour->received_bytes);
  }
  printf("]}");
}

static void run(struct swathe_context *context, const struct swathe_problem *problem, int runs,
                char **delays)
{
  const struct swathe_sharding sharding = { .ranks = RANKS, .batch = 1,
                                            .tokens = problem->tokens_per_rank * RANKS };
  struct sw_device_cuda *device;
  struct swathe_layer *layer;
  struct neighbour neighbour;

  need(sw_context_device(context, &device), "the device");
  need(sw_device_cuda_enter(device), "the device");
  open_neighbour(&neighbour, device);
  struct swathe_tensors tensors = make_tensors(context, problem);
  need(swathe_layer_create(context, problem, &neighbour.transport, &layer), "the layer");
  need(swathe_layer_shard(layer, &sharding), "the layer");
  printf("{\"emulates\": \"overlap on a single GPU: the neighbours are a delayed copy\", "
         "\"device\": \"%s\", \"runs\": %d, ", sw_device_cuda_name(device), runs);
  report(layer, &tensors, &neighbour, false, runs, delays);
  report(layer, &tensors, &neighbour, true, runs, delays);
  printf("}\n");
  swathe_layer_destroy(layer);
  sw_device_cuda_leave(device);
}

int main(int argc, char **argv)
{
  const int runs = argc > 3 ? atoi(argv[2]) : 0;
  struct swathe_problem problem;
  struct swathe_context *context;

  if (runs < 1 || runs > MOST_RUNS) {
    fprintf(stderr, "usage: gpu_overlap PROBLEM RUNS DELAY_US...\n");
    return 2;
  }
  swathe_problem_init(&problem);
  problem.target = SWATHE_CUDA;
  need(swathe_problem_parse(argv[1], &problem), "the problem");
  problem.target = SWATHE_CUDA;
  problem.ranks = RANKS;
  problem.layout = SWATHE_CONTIGUOUS;
  need(swathe_open(NULL, &context), "the library");
  run(context, &problem, runs, argv + 3);
  swathe_close(context);
  return 0;
}
