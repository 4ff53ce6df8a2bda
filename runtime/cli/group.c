// group.c: one thread per rank that is here, one shared context, one layer each.  A rank that fails
// takes the others with it: they leave the exchange and the meeting points below
// (swathe_transport_abort).  With --transport mpi the one rank of each process holds the inputs
// whole, and its outputs travel to rank 0.  With --transport nccl only layers use NCCL: ranks still
// meet as threads or by MPI, where a failure is heard of at once.
#include "group.h"

#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

// What the threads share.
struct team {
  struct cli_group *group;
  struct member *members;
  pthread_mutex_t mutex;  // also of their links
  bool failed;
  char words[8192];     // of the first failure
  float *dsink_parts;   // [ranks][q_heads]
};

struct member {
  struct team *team;
  pthread_t thread;
  int32_t rank;
  struct swathe_transport *transport;
  struct swathe_transport *link;  // the layer's; the same, or one of NCCL
  int64_t rows, span_count;
  struct swathe_span *spans;
  struct swathe_layer *layer;
  struct swathe_timing *timings;  // [ranks] of the call in progress
  void *data[CLI_ARRAY_COUNT];  // this rank's tensors; NULL: not part of this run
  // where the layer reads and writes them: the target's memory.  On the CPU it is the same
  void *memory[CLI_ARRAY_COUNT];
  void *halo;
};

// ---- Failing and meeting ------------------------------------------------------------------------

// Keeps the words of the first failure and wakes everyone.  Always false, so that callers can
// return it.
static bool fail_team(struct member *member, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
static bool fail_team(struct member *member, const char *format, ...)
{
  struct team *team = member->team;
  char words[sizeof team->words];
  va_list args;

  va_start(args, format);
  vsnprintf(words, sizeof words, format, args);
  va_end(args);
  pthread_mutex_lock(&team->mutex);
  const bool first = !team->failed;
  team->failed = true;
  if (first) memcpy(team->words, words, sizeof words);
  for (int32_t i = 0; first && i < team->group->ranks.count; i++)
    if (team->members[i].link && team->group->ranks.nccl)
      swathe_transport_abort(team->members[i].link, words);
  pthread_mutex_unlock(&team->mutex);
  if (first) swathe_transport_abort(member->transport, words);
  return false;
}

static bool fail_library(struct member *member, enum swathe_status status, const char *doing)
{
  (void)cli_fail_library(status, "rank %" PRId32 " failed %s", member->rank, doing);
  return fail_team(member, "%s", cli_fail_words());
}

// Waits for all ranks, each of which gives `bytes` of its own; false if one failed.
static bool share(struct member *member, const void *mine, size_t bytes, void *all)
{
  const enum swathe_status status = swathe_transport_gather(member->transport, mine, bytes, all);
  return status ? fail_library(member, status, "to meet the others") : true;
}

static bool meet(struct member *member)
{
  return share(member, NULL, 0, NULL);
}

// ---- A rank's tensors ---------------------------------------------------------------------------

static enum swathe_dtype dtype_of(const struct member *member, enum cli_array array)
{
  return array == CLI_ARRAY_LSE ? SWATHE_F32 : member->team->group->given->problem.dtype;
}

static size_t elem_bytes(const struct member *member, enum cli_array array)
{
  return dtype_of(member, array) == SWATHE_F32 ? sizeof(float) : sizeof(uint16_t);
}

// This rank's share of dsink.
static float *dsink_part(const struct member *member)
{
  const struct team *team = member->team;
  return team->dsink_parts + (int64_t)member->rank * team->group->given->problem.q_heads;
}

// Between the whole sequence and the rank's rows; `gather`: from the rank.
static void move_spans(struct member *member, enum cli_array array, bool gather)
{
  const struct cli_arrays *arrays = member->team->group->arrays;
  const enum swathe_dtype dtype = dtype_of(member, array);
  const int64_t row = cli_arrays_row(arrays, array);

  for (int64_t b = 0; b < arrays->batch; b++)
    for (int64_t s = 0; s < member->span_count; s++) {
      const struct swathe_span *span = &member->spans[s];
      float *whole = arrays->data[array] + (b * arrays->tokens + span->token) * row;
      const int64_t at = (b * member->rows + span->row) * row, count = span->tokens * row;
      if (dtype == SWATHE_F32) {
        float *own = (float *)member->data[array] + at;
        memcpy(gather ? whole : own, gather ? own : whole, (size_t)count * sizeof *own);
        continue;
      }
      uint16_t *own = (uint16_t *)member->data[array] + at;
      for (int64_t i = 0; i < count; i++) {
        if (gather) whole[i] = cli_arrays_widen(dtype, own[i]);
        else own[i] = cli_arrays_narrow(dtype, whole[i]);
      }
    }
}

// The rows of the member's rank.
static bool find_spans(struct member *member)
{
  const struct swathe_sharding *sharding = &member->team->group->given->sharding;
  enum swathe_status status = swathe_sharding_rows(sharding, member->rank, &member->rows);
  if (!status)
    status = swathe_sharding_spans(sharding, member->rank, NULL, 0, &member->span_count);
  if (status) return fail_library(member, status, "to shard");
  member->spans = calloc((size_t)member->span_count + 1, sizeof *member->spans);
  if (!member->spans)
    return fail_team(member, "rank %" PRId32 ": out of memory for its spans", member->rank);
  status = swathe_sharding_spans(sharding, member->rank, member->spans, member->span_count,
                                 &member->span_count);
  return status ? fail_library(member, status, "to shard") : true;
}

static enum swathe_target target_of(const struct member *member)
{
  return member->team->group->given->problem.target;
}

// Memory of the target for one array, with what `data` holds.
static bool place(struct member *member, enum cli_array array, void *data, size_t bytes)
{
  struct swathe_context *context = member->team->group->given->context;
  const enum swathe_target target = target_of(member);

  if (target == SWATHE_CPU) {
    member->memory[array] = data;
    return true;
  }
  enum swathe_status status =
      swathe_memory_allocate(context, target, bytes, &member->memory[array]);
  if (!status) status = swathe_memory_write(context, target, member->memory[array], data, bytes);
  return status ? fail_library(member, status, "to place its tensors") : true;
}

static size_t bytes_of(const struct member *member, enum cli_array array)
{
  const struct cli_arrays *arrays = member->team->group->arrays;
  if (array == CLI_ARRAY_SINK || array == CLI_ARRAY_DSINK)
    return (size_t)member->team->group->given->problem.q_heads * sizeof(float);
  return (size_t)(arrays->batch * member->rows * cli_arrays_row(arrays, array)) *
         elem_bytes(member, array);
}

// All rows begin as NaN: inputs, so that a row no span covers shows if it is read, and outputs, so
// that one that is not written shows.
static bool scatter(struct member *member)
{
  const struct team *team = member->team;
  const struct cli_arrays *arrays = team->group->arrays;
  bool fine = true;

  for (int i = 0; i < CLI_ARRAY_COUNT && fine; i++) {
    const enum cli_array array = (enum cli_array)i;
    const size_t bytes = arrays->data[i] ? bytes_of(member, array) : 0;
    if (!arrays->data[i] || i == CLI_ARRAY_SINK || i == CLI_ARRAY_DSINK) continue;
    member->data[i] = aligned_alloc(64, (bytes + 64) / 64 * 64);  // as a trainer's tensors
    if (!member->data[i])
      return fail_team(member, "rank %" PRId32 ": no %zu bytes for its part of %s", member->rank,
                       bytes, cli_arrays_name(array));
    memset(member->data[i], 0xff, bytes);
    if (i <= CLI_ARRAY_DOUT) move_spans(member, array, false);
    fine = place(member, array, member->data[i], bytes);
  }
  if (fine && arrays->data[CLI_ARRAY_SINK])
    fine = place(member, CLI_ARRAY_SINK, arrays->data[CLI_ARRAY_SINK],
                 bytes_of(member, CLI_ARRAY_SINK));
  if (fine && arrays->data[CLI_ARRAY_DSINK])
    fine = place(member, CLI_ARRAY_DSINK, dsink_part(member), bytes_of(member, CLI_ARRAY_DSINK));
  return fine;
}

// Brings the results into the whole arrays.
static bool gather(struct member *member)
{
  struct swathe_context *context = member->team->group->given->context;
  const enum swathe_target target = target_of(member);

  for (int i = CLI_ARRAY_OUT; i <= CLI_ARRAY_DSINK; i++) {
    const enum cli_array array = (enum cli_array)i;
    void *data = i == CLI_ARRAY_DSINK ? dsink_part(member) : member->data[i];
    if (!member->memory[i]) continue;
    if (target != SWATHE_CPU) {
      const enum swathe_status status =
          swathe_memory_read(context, target, data, member->memory[i], bytes_of(member, array));
      if (status) return fail_library(member, status, "to fetch its results");
    }
    if (i != CLI_ARRAY_DSINK) move_spans(member, array, true);
  }
  return true;
}

// One array of another process's rank, received here, where rank 0 is.
static bool receive(struct member *member, struct member *other, enum cli_array array)
{
  const struct swathe_transfer transfer = { .bytes = bytes_of(other, array), .peer = other->rank };
  struct swathe_transfer wanted = transfer;

  if (!transfer.bytes) return true;
  other->data[array] = wanted.data = malloc(transfer.bytes);
  if (!wanted.data)
    return fail_team(member, "no %zu bytes for rank %" PRId32 "'s part of %s", transfer.bytes,
                     other->rank, cli_arrays_name(array));
  const enum swathe_status status = swathe_transport_exchange(member->transport, &wanted, 1);
  if (status) return fail_library(member, status, "to fetch the results of the others");
  move_spans(other, array, true);
  free(wanted.data);
  return true;
}

static bool receive_all(struct member *member)
{
  struct team *team = member->team;
  bool fine = true;

  for (int32_t r = 1; r < team->group->given->sharding.ranks && fine; r++) {
    struct member other = { .team = team, .rank = r, .transport = member->transport };
    fine = find_spans(&other);
    for (int i = CLI_ARRAY_OUT; i < CLI_ARRAY_DSINK && fine; i++)
      if (member->data[i]) fine = receive(member, &other, (enum cli_array)i);
    free(other.spans);
  }
  return fine;
}

static bool send_all(struct member *member)
{
  for (int i = CLI_ARRAY_OUT; i < CLI_ARRAY_DSINK; i++) {
    const struct swathe_transfer transfer = {
      member->data[i], member->data[i] ? bytes_of(member, (enum cli_array)i) : 0, 0, true
    };
    if (!transfer.bytes) continue;
    const enum swathe_status status = swathe_transport_exchange(member->transport, &transfer, 1);
    if (status) return fail_library(member, status, "to send its results");
  }
  return true;
}

// Results of ranks in other processes come to the one of rank 0.
static bool gather_processes(struct member *member)
{
  const struct team *team = member->team;
  const size_t sinks = (size_t)team->group->given->problem.q_heads * sizeof(float);
  if (!(member->rank ? send_all(member) : receive_all(member))) return false;
  return !team->group->arrays->data[CLI_ARRAY_DSINK] ||
         share(member, dsink_part(member), sinks, team->dsink_parts);
}

static void free_tensors(struct member *member)
{
  struct swathe_context *context = member->team->group->given->context;
  const enum swathe_target target = target_of(member);

  for (int i = 0; i < CLI_ARRAY_COUNT; i++) {
    if (target != SWATHE_CPU) swathe_memory_free(context, target, member->memory[i]);
    free(member->data[i]);
  }
  swathe_memory_free(context, target, member->halo);
}

static struct swathe_tensor tensor(const struct member *member, enum cli_array array)
{
  const struct cli_arrays *arrays = member->team->group->arrays;
  const int64_t row = cli_arrays_row(arrays, array);
  return (struct swathe_tensor){
    .data = member->memory[array],
    .token_stride = row,
    .head_stride = arrays->dims[array],
    .batch_stride = member->rows * row,
  };
}

static struct swathe_tensors all_tensors(const struct member *member)
{
  return (struct swathe_tensors){
    .q = tensor(member, CLI_ARRAY_Q),
    .k = tensor(member, CLI_ARRAY_K),
    .v = tensor(member, CLI_ARRAY_V),
    .out = tensor(member, CLI_ARRAY_OUT),
    .lse = tensor(member, CLI_ARRAY_LSE),
    .sink = member->memory[CLI_ARRAY_SINK],
    .dout = tensor(member, CLI_ARRAY_DOUT),
    .dq = tensor(member, CLI_ARRAY_DQ),
    .dk = tensor(member, CLI_ARRAY_DK),
    .dv = tensor(member, CLI_ARRAY_DV),
    .dsink = member->memory[CLI_ARRAY_DSINK],
    .halo = member->halo,
  };
}

// ---- A rank's run -------------------------------------------------------------------------------

static void set_link(struct member *member, struct swathe_transport *link)
{
  pthread_mutex_lock(&member->team->mutex);
  member->link = link;
  pthread_mutex_unlock(&member->team->mutex);
}

static bool connect(struct member *member)
{
  struct cli_group *group = member->team->group;
  struct swathe_transport *link = NULL;
  const enum swathe_status status =
      cli_ranks_link(&group->ranks, group->given->context, member->rank, &link);
  if (status) return fail_library(member, status, "to reach the others over NCCL");
  set_link(member, link);
  return true;
}

static void disconnect(struct member *member)
{
  struct swathe_transport *link = member->link;
  set_link(member, NULL);
  if (member->team->group->ranks.nccl) swathe_transport_destroy(link);
}

static bool make_layer(struct member *member)
{
  const struct cli_given *given = member->team->group->given;
  enum swathe_status status =
      swathe_layer_create(given->context, &given->problem, member->link, &member->layer);
  if (!status && member->team->group->args->value[CLI_EXCHANGE])
    status = swathe_layer_set_exchange(member->layer,
                                       member->team->group->args->value[CLI_EXCHANGE]);
  if (status) return fail_library(member, status, "to make its layer");

  status = swathe_layer_shard(member->layer, &given->sharding);
  if (status) return fail_library(member, status, "to shard");
  const size_t halo_bytes = swathe_layer_halo_bytes(member->layer);
  member->timings = calloc((size_t)given->sharding.ranks, sizeof *member->timings);
  if (!member->timings)
    return fail_team(member, "rank %" PRId32 ": out of memory for its times", member->rank);
  status = swathe_memory_allocate(given->context, given->problem.target, halo_bytes, &member->halo);
  return status ? fail_library(member, status, "to place its halo") : true;
}

static double now_us(void)
{
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return 1e6 * (double)time.tv_sec + 1e-3 * (double)time.tv_nsec;
}

// All ranks begin a call together, so that none waits for another's start, and end it together.
static bool run_once(struct member *member, enum swathe_direction direction, int64_t repetition)
{
  struct cli_group *group = member->team->group;
  const bool backward = direction == SWATHE_BACKWARD;
  const struct swathe_tensors tensors = all_tensors(member);
  struct swathe_timing timing, *all = member->timings;

  if (!meet(member)) return false;
  const double begin_us = now_us();
  enum swathe_status status = backward ? swathe_layer_backward(member->layer, &tensors, NULL)
                                       : swathe_layer_forward(member->layer, &tensors, NULL);
  if (!status && group->ranks.nccl) status = swathe_transport_wait(member->link);
  if (!status)
    status = swathe_stream_synchronize(group->given->context, target_of(member), NULL);
  if (status) return fail_library(member, status, backward ? "in backward" : "in forward");
  swathe_layer_timing(member->layer, &timing);
  // a call on CUDA returns when its work is queued
  if (target_of(member) == SWATHE_CUDA) timing.total_us = now_us() - begin_us;
  if (!share(member, &timing, sizeof timing, all)) return false;
  if (member->rank != 0) return true;
  memcpy(backward ? group->backward : group->forward, all,
         (size_t)group->given->sharding.ranks * sizeof *all);
  double slowest_us = 0, longest_wait_us = 0;
  for (int32_t r = 0; r < group->given->sharding.ranks; r++) {
    if (all[r].total_us > slowest_us) slowest_us = all[r].total_us;
    if (all[r].wait_us > longest_wait_us) longest_wait_us = all[r].wait_us;
  }
  if (group->ranks.nccl) longest_wait_us = NAN;  // streams wait, which nobody measures
  (backward ? group->backward_us : group->forward_us)[repetition] = slowest_us;
  (backward ? group->backward_wait_us : group->forward_wait_us)[repetition] = longest_wait_us;
  return true;
}

static bool tell_memory(struct member *member)
{
  struct cli_group *group = member->team->group;
  const int32_t ranks = group->given->sharding.ranks;
  const int64_t mine = (int64_t)swathe_layer_memory_bytes(member->layer);
  int64_t *all = calloc((size_t)ranks, sizeof *all);

  if (!all) return fail_team(member, "rank %" PRId32 ": out of memory to tell", member->rank);
  const bool fine = share(member, &mine, sizeof mine, all);
  if (fine && member->rank == 0)
    memcpy(group->memory_bytes, all, (size_t)ranks * sizeof *all);
  free(all);
  return fine;
}

static void *run_rank(void *arg)
{
  struct member *member = arg;
  struct cli_group *group = member->team->group;
  const bool backward = group->arrays->backward;
  bool fine = connect(member) && make_layer(member) && find_spans(member) && scatter(member);

  for (int64_t i = 0; fine && i < group->repeat; i++)
    fine = run_once(member, SWATHE_FORWARD, i) &&
           (!backward || run_once(member, SWATHE_BACKWARD, i));
  fine = fine && tell_memory(member) && gather(member);
  if (fine && group->ranks.transport) fine = gather_processes(member);
  if (fine && member->rank == 0)
    swathe_layer_explain(member->layer, group->explain, sizeof group->explain);
  (void)meet(member);  // nobody destroys a layer that another still talks to
  swathe_layer_destroy(member->layer);
  disconnect(member);
  free_tensors(member);
  free(member->timings);
  free(member->spans);
  return NULL;
}

// ---- The group ----------------------------------------------------------------------------------

static bool allocate(struct cli_group *group, struct team *team)
{
  const size_t ranks = (size_t)group->given->sharding.ranks, repeat = (size_t)group->repeat;

  group->forward_us = calloc(repeat, sizeof(double));
  group->backward_us = calloc(repeat, sizeof(double));
  group->forward_wait_us = calloc(repeat, sizeof(double));
  group->backward_wait_us = calloc(repeat, sizeof(double));
  group->forward = calloc(ranks, sizeof *group->forward);
  group->backward = calloc(ranks, sizeof *group->backward);
  group->traffic = calloc(ranks, sizeof *group->traffic);
  group->memory_bytes = calloc(ranks, sizeof *group->memory_bytes);
  team->dsink_parts = calloc(ranks * (size_t)group->given->problem.q_heads, sizeof(float));
  return group->forward_us && group->backward_us && group->forward_wait_us &&
         group->backward_wait_us && group->forward && group->backward && group->traffic &&
         group->memory_bytes && team->dsink_parts;
}

void cli_group_free(struct cli_group *group)
{
  free(group->forward_us);
  free(group->backward_us);
  free(group->forward_wait_us);
  free(group->backward_wait_us);
  free(group->forward);
  free(group->backward);
  free(group->traffic);
  free(group->memory_bytes);
  cli_ranks_close(&group->ranks);
  *group = (struct cli_group){ 0 };
}

// Partial sums of the ranks, added in rank order.
static void add_dsink(const struct team *team)
{
  const struct cli_given *given = team->group->given;
  float *dsink = team->group->arrays->data[CLI_ARRAY_DSINK];

  for (int32_t h = 0; dsink && h < given->problem.q_heads; h++) {
    double sum = 0;
    for (int32_t r = 0; r < given->sharding.ranks; r++)
      sum += (double)team->dsink_parts[(int64_t)r * given->problem.q_heads + h];
    dsink[h] = (float)sum;
  }
}

static enum cli_exit run_threads(struct team *team)
{
  const struct cli_ranks *ranks = &team->group->ranks;
  struct member *members = calloc((size_t)ranks->count, sizeof *members);
  int32_t started = 0;

  if (!members) return cli_fail(CLI_FAILED, "out of memory for %" PRId32 " ranks", ranks->count);
  team->members = members;
  for (int32_t i = 0; i < ranks->count; i++)  // all, before any looks at the others
    members[i] = (struct member){ .team = team,
                                  .rank = ranks->first + i,
                                  .transport = cli_ranks_transport(ranks, ranks->first + i) };
  for (int32_t i = 0; i < ranks->count; i++) {
    const int error = pthread_create(&members[i].thread, NULL, run_rank, &members[i]);
    if (error) {
      fail_team(&members[i], "rank %" PRId32 " gets no thread: %s", members[i].rank,
                strerror(error));
      break;
    }
    started++;
  }
  for (int32_t i = 0; i < started; i++) pthread_join(members[i].thread, NULL);
  free(members);
  return team->failed ? cli_fail(CLI_FAILED, "%s", team->words) : CLI_OK;
}

enum cli_exit cli_group_run(struct cli_group *group)
{
  const struct cli_given *given = group->given;
  struct team team = { .group = group };
  enum cli_exit code = CLI_OK;
  enum swathe_status status;

  pthread_mutex_init(&team.mutex, NULL);
  if (!allocate(group, &team))
    code = cli_fail(CLI_FAILED, "out of memory for %" PRId32 " ranks", given->sharding.ranks);
  if (!code) {
    status = swathe_plan(&given->problem, &given->sharding, NULL, NULL, group->traffic);
    if (status) code = cli_fail_library(status, "this sequence cannot be planned");
  }
  if (!code) code = cli_ranks_open(group->args, given->sharding.ranks, &group->ranks);
  if (!code) code = run_threads(&team);
  if (!code) {
    add_dsink(&team);
    swathe_kernel_counts(given->context, &group->compiled, &group->loaded);
  }
  free(team.dsink_parts);
  pthread_mutex_destroy(&team.mutex);
  return code;
}
