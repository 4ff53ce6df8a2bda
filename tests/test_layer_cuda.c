// test_layer_cuda.c: the layer on the CUDA target over ranks, on the emulated driver: every result
// against the reference; bit-equal results; the caller's stream; capture and replay.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "group.h"
#include "scratch.h"
#include "transport.h"
#include "wires.h"

// The race detector looks at threads, which few cases show as well as many.
#ifdef __SANITIZE_THREAD__
enum { EVERY = 8 };
#else
enum { EVERY = 1 };
#endif

static struct swathe_context *context;
static const char *scratch;

static int set_up(void **state)
{
  const char *driver = getenv("TEST_LIBCUDA"), *cache = getenv("TEST_CACHE_DIR");
  char database[64];
  (void)state;
  scratch = scratch_make("layer-cuda");
  if (!scratch) return -1;
  if (driver) setenv("SWATHE_LIBCUDA", driver, 1);
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
};

static void note_health(void *arg, const struct swathe_finding *finding)
{
  struct health *health = arg;
  if (!strcmp(finding->what, health->what)) health->healthy = finding->health == SWATHE_HEALTHY;
}

// What these tests cannot do without.
static void need_cuda(void)
{
  struct health driver = { "cuda driver", false }, compiler = { "cuda compiler", false };
  swathe_doctor(context, note_health, &driver);
  swathe_doctor(context, note_health, &compiler);
  if (!getenv("TEST_LIBCUDA") || !driver.healthy || !compiler.healthy) skip();
}

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

static void expect_right(const struct swathe_problem *problem,
                         const struct swathe_sharding *sharding, struct share_form form,
                         bool keep_halo)
{
  char words[1024] = "", text[512];
  struct sequence *sequence = sequence_make(problem, sharding, 7, 1);
  const struct group_case group = { .context = context,
                                    .problem = problem,
                                    .sharding = sharding,
                                    .form = form,
                                    .script = "fb",
                                    .keep_halo = keep_halo,
                                    .deadline_s = 60 };

  swathe_problem_format(problem, text, sizeof text);
  sequence_solve_rounded(sequence);
  if (group_run(&group, sequence, NULL, words, sizeof words) ||
      !sequence_compare(sequence, true, tolerance, words, sizeof words))
    fail_msg("%s\n  %s, %d ranks, %lld tokens, batch %d\n  %s", words,
             swathe_layout_name(sharding->layout), sharding->ranks, (long long)sharding->tokens,
             sharding->batch, text);
  sequence_free(sequence);
}

// The CPU target's matrix: 64 tokens, windows around tiles and shares, both layouts, small groups.
static void results_equal_the_reference(void **state)
{
  static const char *const heads[] = { "q_heads=28,kv_heads=7", "q_heads=5,kv_heads=1" };
  static const int64_t windows[] = { 0, 1, 6, 7, 8, 15, 63, 200 };
  (void)state;
  need_cuda();
  for (size_t h = 0; h < 2; h++)
    for (size_t w = 0; w < 8; w += EVERY) {
      struct swathe_problem problem = problem_of(heads[h]);
      problem.window_left = windows[w];
      problem.head_dim_qk = problem.head_dim_v = 16;
      problem.dtype = (w + h) % 2 ? SWATHE_F16 : SWATHE_BF16;
      for (int32_t ranks = 1; ranks <= 4; ranks++)
        for (int layout = 0; layout < 2; layout++) {
          problem.ranks = ranks;
          problem.layout = (enum swathe_layout)layout;
          problem.tokens_per_rank = (64 + ranks - 1) / ranks;
          const struct swathe_sharding sharding = {
            .layout = problem.layout, .ranks = ranks, .batch = 1, .tokens = 64
          };
          expect_right(&problem, &sharding, (struct share_form){ .gap = layout }, ranks % 2);
        }
    }
}

struct shape {
  const char *problem;
  enum swathe_layout layout;
  int32_t ranks, batch;
  int64_t tokens;
};

// Real models' heads at few tokens, odd dims, sinks, both sides, softcap, batch, uneven shares and
// empty ones; windows around multiples of a tile, tokens that are none.
static void shapes_of_real_models(void **state)
{
  static const struct shape shapes[] = {
    { "q_heads=16,kv_heads=2,window_left=127,sinks=1", SWATHE_ZIGZAG, 4, 1, 700 },
    { "q_heads=8,kv_heads=2,window_left=127,halo_gradient=bf16", SWATHE_ZIGZAG, 4, 1, 700 },
    { "q_heads=8,kv_heads=1,head_dim_qk=192,head_dim_v=128,window_left=127,sinks=1",
      SWATHE_CONTIGUOUS, 3, 1, 300 },
    { "q_heads=4,kv_heads=1,head_dim_qk=256,head_dim_v=256,window_left=255", SWATHE_ZIGZAG, 2, 1,
      400 },
    { "q_heads=4,kv_heads=2,head_dim_qk=128,head_dim_v=128,window_left=100,softcap=50,scale=0.0625",
      SWATHE_CONTIGUOUS, 3, 1, 300 },
    { "q_heads=3,kv_heads=3,window_left=64,window_right=64", SWATHE_ZIGZAG, 3, 1, 500 },
    { "q_heads=2,kv_heads=1,window_left=unlimited,window_right=0", SWATHE_ZIGZAG, 3, 1, 200 },
    { "q_heads=2,kv_heads=2,window_left=5,window_right=unlimited", SWATHE_CONTIGUOUS, 2, 1, 90 },
    { "q_heads=3,kv_heads=1,head_dim_qk=40,head_dim_v=72,window_left=9", SWATHE_ZIGZAG, 4, 2, 57 },
    { "q_heads=1,kv_heads=1,head_dim_qk=1,head_dim_v=1,window_left=3", SWATHE_CONTIGUOUS, 4, 3, 3 },
    { "q_heads=4,kv_heads=2,head_dim_qk=8,head_dim_v=8,window_left=999", SWATHE_CONTIGUOUS, 4, 1,
      999 },
    { "q_heads=2,kv_heads=1,window_left=62", SWATHE_CONTIGUOUS, 2, 1, 333 },
    { "q_heads=2,kv_heads=1,window_left=63,dtype=f16", SWATHE_ZIGZAG, 2, 1, 333 },
    { "q_heads=2,kv_heads=1,window_left=64", SWATHE_CONTIGUOUS, 3, 1, 257 },
    { "q_heads=2,kv_heads=1,window_left=126", SWATHE_CONTIGUOUS, 2, 1, 383 },
    { "q_heads=2,kv_heads=1,window_left=128", SWATHE_CONTIGUOUS, 1, 2, 191 },
  };
  (void)state;
  need_cuda();
  for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i += EVERY) {
    struct swathe_problem problem = problem_of(shapes[i].problem);
    const struct swathe_sharding sharding = { .layout = shapes[i].layout,
                                              .ranks = shapes[i].ranks,
                                              .batch = shapes[i].batch,
                                              .tokens = shapes[i].tokens };
    problem.ranks = sharding.ranks;
    problem.layout = sharding.layout;
    expect_right(&problem, &sharding, (struct share_form){ .head_major = i % 2, .gap = 3 }, i % 2);
  }
}

// Packed documents, one of them empty, with padding behind the last; and a list of spans out of
// order, with a row between them that nobody covers.
static void documents_and_spans(void **state)
{
  static const int64_t starts[] = { 0, 37, 101, 101, 102, 230 };
  static const struct swathe_span spans[] = {
    { .document = 1, .position = 20, .tokens = 44, .row = 0, .token = 57 },
    { .document = 0, .position = 0, .tokens = 37, .row = 45, .token = 0 },
    { .document = 1, .position = 0, .tokens = 20, .row = 0, .token = 37 },
    { .document = 4, .position = 0, .tokens = 128, .row = 20, .token = 102 },
    { .document = 3, .position = 0, .tokens = 1, .row = 150, .token = 101 },
  };
  static const int64_t rank_spans[] = { 0, 2, 5 };
  struct swathe_problem problem =
      problem_of("q_heads=4,kv_heads=2,head_dim_qk=32,head_dim_v=48,window_left=30,window_right=3,"
                 "sinks=1");
  (void)state;
  need_cuda();
  for (int layout = 0; layout < 3; layout++)
    for (int32_t ranks = 1; ranks <= 4; ranks++) {
      const struct swathe_sharding sharding = { .layout = (enum swathe_layout)layout,
                                                .ranks = ranks,
                                                .batch = 1 + ranks % 2,
                                                .tokens = 241,
                                                .documents = 5,
                                                .document_starts = starts };
      problem.layout = sharding.layout;
      problem.ranks = ranks;
      expect_right(&problem, &sharding, (struct share_form){ .head_major = layout == 1 }, true);
    }
  const struct swathe_sharding listed = { .layout = SWATHE_SPANS,
                                          .ranks = 2,
                                          .batch = 1,
                                          .tokens = 230,
                                          .documents = 5,
                                          .document_starts = starts,
                                          .spans = spans,
                                          .rank_spans = rank_spans };
  problem.layout = SWATHE_SPANS;
  problem.ranks = 2;
  expect_right(&problem, &listed, (struct share_form){ .gap = 1 }, false);
}

// ---- Bits ---------------------------------------------------------------------------------------

static size_t array_bytes(const struct sequence *sequence, enum sequence_array array)
{
  size_t elems = 0;
  sequence_row(sequence, array, 0, 0, &elems);
  return (size_t)(sequence->view.batch * sequence->view.tokens) * elems * sizeof(float);
}

// Runs replayed, sharded anew and with a halo kept or fetched give the same bits.
static void results_are_bit_equal(void **state)
{
  static const char *const scripts[] = { "fb", "ffpfb", "fbpsfbb", "fb" };
  struct swathe_problem problem = problem_of("q_heads=8,kv_heads=2,head_dim_qk=32,head_dim_v=32,"
                                             "window_left=150,sinks=1,ranks=3,layout=zigzag");
  const struct swathe_sharding sharding = {
    .layout = SWATHE_ZIGZAG, .ranks = 3, .batch = 2, .tokens = 700
  };
  struct sequence *sequence = sequence_make(&problem, &sharding, 3, 1);
  float *first[SEQUENCE_ARRAYS] = { NULL };
  char words[1024];
  (void)state;

  need_cuda();
  for (int run = 0; run < 4; run++) {
    const struct group_case group = { .context = context,
                                      .problem = &problem,
                                      .sharding = &sharding,
                                      .before = run == 3 ? &sharding : NULL,
                                      .script = scripts[run],
                                      .keep_halo = run % 2,
                                      .deadline_s = 60 };
    if (group_run(&group, sequence, NULL, words, sizeof words)) fail_msg("%s", words);
    for (enum sequence_array a = SEQUENCE_OUT; a < SEQUENCE_ARRAYS; a++) {
      const size_t bytes = array_bytes(sequence, a);
      if (!first[a]) {
        first[a] = malloc(bytes);
        memcpy(first[a], sequence->got[a], bytes);
      } else if (memcmp(first[a], sequence->got[a], bytes)) {
        fail_msg("%s of run %d (%s) is not bit-equal", sequence_array_name(a), run, scripts[run]);
      }
    }
  }
  for (int a = 0; a < SEQUENCE_ARRAYS; a++) free(first[a]);
  sequence_free(sequence);
}

// ---- Device memory on the wire ------------------------------------------------------------------

// A transport that queues device memory: the host waits for nothing, and everything overlaps.
static void messages_of_device_memory(void **state)
{
  static const char *const problems[] = {
    "q_heads=4,kv_heads=2,head_dim_qk=32,head_dim_v=48,window_left=60,window_right=20,sinks=1",
    "q_heads=4,kv_heads=2,head_dim_qk=32,head_dim_v=48,window_left=60,halo_gradient=bf16",
  };
  char words[1024] = "";
  (void)state;

  need_cuda();
  for (int i = 0; i < 2; i++)
    for (int32_t ranks = 2; ranks <= 4; ranks++) {
      struct swathe_problem problem = problem_of(problems[i]);
      const struct swathe_sharding sharding = {
        .layout = SWATHE_ZIGZAG, .ranks = ranks, .batch = 2, .tokens = 333
      };
      problem.layout = sharding.layout;
      problem.ranks = ranks;
      struct sequence *sequence = sequence_make(&problem, &sharding, 5, 1);
      const struct group_case group = { .context = context,
                                        .problem = &problem,
                                        .sharding = &sharding,
                                        .script = "fbpfb",
                                        .keep_halo = ranks % 2,
                                        .wires = wires_make(ranks) };
      sequence_solve_rounded(sequence);
      if (group_run(&group, sequence, NULL, words, sizeof words) ||
          !sequence_compare(sequence, true, tolerance, words, sizeof words))
        fail_msg("%s\n  %d ranks, %s", words, ranks, problems[i]);
      assert_true(wires_count(group.wires) >= 4 * ranks);
      wires_free(group.wires);
      sequence_free(sequence);
    }
}

// ---- Streams and graphs -------------------------------------------------------------------------

// The driver itself, as a program that has streams and graphs of its own uses it.
static struct {
  int (*context_current)(void **context);
  int (*context_push)(void *context);
  int (*context_pop)(void **context);
  int (*primary)(void **context, int device);
  int (*stream_create)(void **stream, unsigned flags, int priority);
  int (*stream_destroy)(void *stream);
  int (*begin_capture)(void *stream, int mode);
  int (*end_capture)(void *stream, void **graph);
  int (*instantiate)(void **executable, void *graph, unsigned long long flags);
  int (*graph_launch)(void *executable, void *stream);
  int (*graph_destroy)(void *graph);
  int (*executable_destroy)(void *executable);
} driver;

static void open_driver(void)
{
  const struct {
    const char *name;
    void *place;
  } functions[] = {
    { "cuCtxGetCurrent", &driver.context_current },
    { "cuCtxPushCurrent_v2", &driver.context_push },
    { "cuCtxPopCurrent_v2", &driver.context_pop },
    { "cuDevicePrimaryCtxRetain", &driver.primary },
    { "cuStreamCreateWithPriority", &driver.stream_create },
    { "cuStreamDestroy_v2", &driver.stream_destroy },
    { "cuStreamBeginCapture_v2", &driver.begin_capture },
    { "cuStreamEndCapture", &driver.end_capture },
    { "cuGraphInstantiateWithFlags", &driver.instantiate },
    { "cuGraphLaunch", &driver.graph_launch },
    { "cuGraphDestroy", &driver.graph_destroy },
    { "cuGraphExecDestroy", &driver.executable_destroy },
  };
  void *library = dlopen(getenv("SWATHE_LIBCUDA"), RTLD_NOW);
  if (!library) fail_msg("%s", dlerror());
  for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
    void *address = dlsym(library, functions[i].name);
    if (!address) fail_msg("the emulated driver has no %s", functions[i].name);
    memcpy(functions[i].place, &address, sizeof address);
  }
}

// One rank's tensors in device memory, and what came of them.
struct alone {
  struct swathe_problem problem;
  struct swathe_sharding sharding;
  struct sequence *sequence;
  struct share *share;
  struct swathe_layer *layer;
  struct swathe_tensors tensors;
  void *memory[SEQUENCE_ARRAYS], *max_logits;
  float got_max_logits[4];
};

static void expect_ok(enum swathe_status status)
{
  if (status) fail_msg("%s", swathe_error());
}

static void expect_success(int result, const char *what)
{
  if (result) fail_msg("%s gives %d", what, result);
}

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

static void write_arrays(struct alone *alone, int first)
{
  for (int a = first; a < SEQUENCE_ARRAYS; a++)
    expect_ok(swathe_memory_write(
        context, SWATHE_CUDA, alone->memory[a], alone->share->memory[a],
        share_bytes(alone->sequence, alone->share, (enum sequence_array)a)));
}

static void open_alone(struct alone *alone)
{
  *alone = (struct alone){
    .problem = problem_of("q_heads=4,kv_heads=2,window_left=100"),
    .sharding = { .ranks = 1, .batch = 1, .tokens = 600 },
  };
  alone->sequence = sequence_make(&alone->problem, &alone->sharding, 11, 1);
  sequence_solve_rounded(alone->sequence);
  alone->share = share_make(alone->sequence, &alone->sharding, 0, (struct share_form){ .gap = 0 });
  alone->tensors = alone->share->tensors;
  for (int a = 0; a < SEQUENCE_ARRAYS; a++) {
    const size_t bytes = share_bytes(alone->sequence, alone->share, (enum sequence_array)a);
    struct swathe_tensor *tensor = tensor_of(&alone->tensors, a);
    const size_t first = (size_t)((char *)tensor->data - (char *)alone->share->memory[a]);
    expect_ok(swathe_memory_allocate(context, SWATHE_CUDA, bytes, &alone->memory[a]));
    tensor->data = (char *)alone->memory[a] + first;
  }
  expect_ok(swathe_memory_allocate(context, SWATHE_CUDA, 16, &alone->max_logits));
  alone->tensors.max_logits = alone->max_logits;
  write_arrays(alone, 0);
  expect_ok(swathe_layer_create(context, &alone->problem, NULL, &alone->layer));
  expect_ok(swathe_layer_shard(alone->layer, &alone->sharding));
}

static void close_alone(struct alone *alone)
{
  swathe_layer_destroy(alone->layer);
  for (int a = 0; a < SEQUENCE_ARRAYS; a++)
    swathe_memory_free(context, SWATHE_CUDA, alone->memory[a]);
  swathe_memory_free(context, SWATHE_CUDA, alone->max_logits);
  share_free(alone->share);
  sequence_free(alone->sequence);
}

// What the device has now, against the reference.
static void expect_results(struct alone *alone)
{
  char words[1024] = "";
  for (int a = 0; a < SEQUENCE_ARRAYS; a++)
    expect_ok(swathe_memory_read(
        context, SWATHE_CUDA, alone->share->memory[a], alone->memory[a],
        share_bytes(alone->sequence, alone->share, (enum sequence_array)a)));
  expect_ok(swathe_memory_read(context, SWATHE_CUDA, alone->got_max_logits, alone->max_logits, 16));
  sequence_forget(alone->sequence);
  if (!share_check(alone->sequence, alone->share, true, words, sizeof words))
    fail_msg("%s", words);
  share_gather(alone->sequence, alone->share, true);
  if (!sequence_compare(alone->sequence, true, tolerance, words, sizeof words))
    fail_msg("%s", words);
}

// Poisons the outputs, on the host and on the device.
static void spoil(struct alone *alone)
{
  share_poison(alone->sequence, alone->share);
  write_arrays(alone, SEQUENCE_OUT);
}

static float largest_logit(const struct alone *alone, int head)
{
  const struct sequence *sequence = alone->sequence;
  float largest = -1e30f;
  size_t elems;
  for (int64_t i = 0; i < 600; i++)
    for (int64_t j = i < 100 ? 0 : i - 100; j <= i; j++) {
      const size_t query = sequence_row(sequence, SEQUENCE_Q, 0, i, &elems);
      const size_t key = sequence_row(sequence, SEQUENCE_K, 0, j, &elems);
      const float *q = sequence->given[SEQUENCE_Q] + query;
      const float *k = sequence->given[SEQUENCE_K] + key;
      float dot = 0;
      for (int d = 0; d < 64; d++) dot += q[head * 64 + d] * k[head / 2 * 64 + d];
      if (dot / 8 > largest) largest = dot / 8;
    }
  return largest;
}

// Work goes to the stream that was given, behind what is there and before what follows; one layer's
// calls on several streams are put in order.  The thread's context is left as it was.
static void the_callers_stream_is_used(void **state)
{
  struct alone alone;
  void *streams[2], *outer = NULL, *current = NULL;
  (void)state;

  need_cuda();
  open_driver();
  open_alone(&alone);
  expect_success(driver.primary(&outer, 0), "the primary context");
  expect_success(driver.context_push(outer), "push");
  for (int s = 0; s < 2; s++)
    expect_success(driver.stream_create(&streams[s], 1, 0), "a stream");
  for (int run = 0; run < 4; run++) {
    expect_ok(swathe_layer_forward(alone.layer, &alone.tensors, streams[run % 2]));
    expect_ok(swathe_layer_backward(alone.layer, &alone.tensors, streams[run / 2]));
    expect_ok(swathe_stream_synchronize(context, SWATHE_CUDA, streams[0]));
    expect_ok(swathe_stream_synchronize(context, SWATHE_CUDA, streams[1]));
    expect_results(&alone);
    spoil(&alone);
  }
  expect_success(driver.context_current(&current), "the current context");
  assert_ptr_equal(current, outer);
  for (int h = 0; h < 4; h++)
    if (!(alone.got_max_logits[h] > largest_logit(&alone, h) - 1e-3f &&
          alone.got_max_logits[h] < largest_logit(&alone, h) + 1e-3f))
      fail_msg("max_logits[%d] is %g, must be %g", h, (double)alone.got_max_logits[h],
               (double)largest_logit(&alone, h));
  close_alone(&alone);
  for (int s = 0; s < 2; s++) expect_success(driver.stream_destroy(streams[s]), "the end of it");
  expect_success(driver.context_pop(&current), "pop");
}

// A layer may be sharded anew while what was queued under the old sharding still waits.
static void queued_work_keeps_its_sharding(void **state)
{
  static const int64_t starts[] = { 0, 100, 600 };
  struct alone alone;
  (void)state;

  need_cuda();
  open_alone(&alone);
  const struct swathe_sharding other = {
    .ranks = 1, .batch = 1, .tokens = 600, .documents = 2, .document_starts = starts
  };
  expect_ok(swathe_layer_forward(alone.layer, &alone.tensors, NULL));
  expect_ok(swathe_layer_backward(alone.layer, &alone.tensors, NULL));
  for (int run = 0; run < 3; run++) {
    spoil(&alone);
    expect_ok(swathe_layer_forward(alone.layer, &alone.tensors, NULL));
    expect_ok(swathe_layer_backward(alone.layer, &alone.tensors, NULL));
    expect_ok(swathe_layer_shard(alone.layer, &other));
    expect_results(&alone);
    expect_ok(swathe_layer_shard(alone.layer, &alone.sharding));
  }
  close_alone(&alone);
}

// Forward and backward in one graph, replayed: the same bits each time.
static void a_captured_graph_replays(void **state)
{
  struct alone alone;
  void *stream, *context_of_device, *graph = NULL, *executable = NULL, *popped;
  void *first = NULL;
  (void)state;

  need_cuda();
  open_driver();
  open_alone(&alone);
  expect_success(driver.primary(&context_of_device, 0), "the primary context");
  expect_success(driver.context_push(context_of_device), "push");
  expect_success(driver.stream_create(&stream, 1, 0), "a stream");

  // a call that was never run cannot be captured, for its lists are not there yet
  expect_success(driver.begin_capture(stream, 0), "begin");
  assert_int_equal(swathe_layer_backward(alone.layer, &alone.tensors, stream), SWATHE_BAD_USE);
  if (!strstr(swathe_error(), "captured before it ran once")) fail_msg("%s", swathe_error());
  expect_success(driver.end_capture(stream, &graph), "end");
  expect_success(driver.graph_destroy(graph), "destroy");

  expect_ok(swathe_layer_forward(alone.layer, &alone.tensors, stream));
  expect_ok(swathe_layer_backward(alone.layer, &alone.tensors, stream));
  expect_ok(swathe_stream_synchronize(context, SWATHE_CUDA, stream));
  expect_success(driver.begin_capture(stream, 0), "begin");
  expect_ok(swathe_layer_forward(alone.layer, &alone.tensors, stream));
  expect_ok(swathe_layer_backward(alone.layer, &alone.tensors, stream));
  expect_success(driver.end_capture(stream, &graph), "end");
  expect_success(driver.instantiate(&executable, graph, 0), "instantiate");

  const size_t bytes = array_bytes(alone.sequence, SEQUENCE_DK);
  for (int replay = 0; replay < 3; replay++) {
    spoil(&alone);
    expect_success(driver.graph_launch(executable, stream), "launch");
    expect_ok(swathe_stream_synchronize(context, SWATHE_CUDA, stream));
    expect_results(&alone);
    if (!first) {
      first = malloc(bytes);
      memcpy(first, alone.sequence->got[SEQUENCE_DK], bytes);
    }
    assert_memory_equal(first, alone.sequence->got[SEQUENCE_DK], bytes);
  }
  free(first);
  expect_success(driver.executable_destroy(executable), "destroy");
  expect_success(driver.graph_destroy(graph), "destroy");
  close_alone(&alone);
  expect_success(driver.stream_destroy(stream), "the end of it");
  expect_success(driver.context_pop(&popped), "pop");
}

static enum swathe_status repeat_mine(struct swathe_transport *transport, const void *mine,
                                      size_t bytes, void *all)
{
  for (int32_t r = 0; r < transport->ranks; r++)
    memcpy((char *)all + (size_t)r * bytes, mine, bytes);
  return SWATHE_OK;
}

static int enqueued;

static enum swathe_status count_messages(struct swathe_transport *transport,
                                         const struct sw_transport_message *messages,
                                         int32_t count, void *stream)
{
  (void)transport, (void)messages, (void)stream;
  enqueued += count;
  return SWATHE_OK;
}

// Messages of host memory cannot be part of a graph; those of device memory are, with the stream
// that they are queued on.
static void device_memory_is_captured(void **state)
{
  static const struct sw_transport_operations host = { .gather = repeat_mine };
  static const struct sw_transport_operations of_device = { .gather = repeat_mine,
                                                            .enqueue = count_messages };
  struct swathe_transport transport = {
    .operations = &host, .name = "postal", .rank = 0, .ranks = 2
  };
  struct alone alone;
  void *stream, *device, *graph = NULL, *executable = NULL, *popped;
  (void)state;

  need_cuda();
  open_driver();
  open_alone(&alone);
  expect_success(driver.primary(&device, 0), "the primary context");
  expect_success(driver.context_push(device), "push");
  expect_success(driver.stream_create(&stream, 1, 0), "a stream");
  struct swathe_layer *layer = NULL;
  const struct swathe_sharding halves = { .ranks = 2, .batch = 1, .tokens = 1200 };
  expect_ok(swathe_layer_create(context, &alone.problem, &transport, &layer));
  expect_ok(swathe_layer_shard(layer, &halves));
  expect_success(driver.begin_capture(stream, 0), "begin");
  assert_int_equal(swathe_layer_forward(layer, &alone.tensors, stream), SWATHE_UNSUPPORTED);
  if (!strstr(swathe_error(), "the postal transport moves host memory"))
    fail_msg("%s", swathe_error());
  expect_success(driver.end_capture(stream, &graph), "end");
  expect_success(driver.graph_destroy(graph), "destroy");

  transport.operations = &of_device;
  for (int captured = 0; captured < 2; captured++) {
    enqueued = 0;
    if (captured) expect_success(driver.begin_capture(stream, 0), "begin");
    expect_ok(swathe_layer_forward(layer, &alone.tensors, stream));
    expect_ok(swathe_layer_backward(layer, &alone.tensors, stream));
    assert_int_equal(enqueued, 3);  // keys twice, for the halo was not kept, and sums once
  }
  expect_success(driver.end_capture(stream, &graph), "end");
  expect_success(driver.instantiate(&executable, graph, 0), "instantiate");
  expect_success(driver.graph_launch(executable, stream), "launch");
  expect_ok(swathe_stream_synchronize(context, SWATHE_CUDA, stream));
  expect_success(driver.executable_destroy(executable), "destroy");
  expect_success(driver.graph_destroy(graph), "destroy");
  swathe_layer_destroy(layer);
  close_alone(&alone);
  expect_success(driver.stream_destroy(stream), "the end of it");
  expect_success(driver.context_pop(&popped), "pop");
}

// ---- Refusals -----------------------------------------------------------------------------------

static void what_cuda_cannot_do_is_said(void **state)
{
  struct swathe_problem problem = problem_of("q_heads=4,kv_heads=2,window_left=100");
  struct swathe_layer *layer = NULL;
  (void)state;

  need_cuda();
  assert_int_equal(
      swathe_layer_create_strategy(context, &problem, NULL, SWATHE_ALL_GATHER, &layer),
      SWATHE_UNSUPPORTED);
  // its children could not use what this process has started
  struct swathe_tuned tuned[2];
  assert_int_equal(swathe_tune(context, &problem, &(struct swathe_tune_options){ .budget_s = 1 },
                               tuned),
                   SWATHE_UNSUPPORTED);
  if (!strstr(swathe_error(), "this process has used CUDA")) fail_msg("%s", swathe_error());
  problem.dtype = SWATHE_F32;
  assert_int_equal(swathe_layer_create(context, &problem, NULL, &layer), SWATHE_UNSUPPORTED);
}

int main(void)
{
  const struct CMUnitTest tests[] = {
    cmocka_unit_test(results_equal_the_reference),
    cmocka_unit_test(shapes_of_real_models),
    cmocka_unit_test(documents_and_spans),
    cmocka_unit_test(results_are_bit_equal),
    cmocka_unit_test(messages_of_device_memory),
    cmocka_unit_test(the_callers_stream_is_used),
    cmocka_unit_test(queued_work_keeps_its_sharding),
    cmocka_unit_test(a_captured_graph_replays),
    cmocka_unit_test(device_memory_is_captured),
    cmocka_unit_test(what_cuda_cannot_do_is_said),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
