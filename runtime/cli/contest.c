// contest.c: strategies side by side.  See contest.h.
//
// All layers of a rank live at the same time and work on the same tensors.  A round runs each
// strategy, forward and backward, with its exchange and again muted, so that what disturbs the
// machine meets all of them; the order turns from round to round.  Ranks begin every pass together.
#include "contest.h"

#include "arrays.h"

#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

// Inputs first; those from `OUT` on are compared, but for lse.
enum tensor { Q, K, V, DOUT, LSE, OUT, DQ, DK, DV, TENSOR_COUNT };

struct player {
  struct cli_contest *contest;
  struct swathe_transport *transport;
  int32_t rank;
  int64_t rows;
  struct swathe_layer *layers[CLI_CONTEST_MOST];
  void *halos[CLI_CONTEST_MOST];
  void *data[TENSOR_COUNT];
  void *sink, *dsink;
  void *first[TENSOR_COUNT];  // the first contestant's results, here
  char *scratch;              // of the largest tensor, here
  void *all;                  // what gather brings of all ranks
  bool failed;
};

// What a rank tells of a pass; the largest count.
struct report {
  double us, wait_us, difference;
  int64_t received_bytes, memory_bytes;
};

static double now_us(void)
{
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return 1e6 * (double)time.tv_sec + 1e-3 * (double)time.tv_nsec;
}

static enum cli_exit fail(const struct player *player, enum swathe_status status,
                          const char *doing)
{
  return cli_fail_library(status, "rank %" PRId32 " failed %s", player->rank, doing);
}

// ---- Tensors ------------------------------------------------------------------------------------

struct shape {
  int32_t heads, dim;
  size_t elem_bytes;
};

static struct shape shape_of(const struct player *player, enum tensor tensor)
{
  const struct swathe_problem *p = &player->contest->given->problem;
  const size_t elem = p->dtype == SWATHE_F32 ? sizeof(float) : sizeof(uint16_t);
  switch (tensor) {
  case K: case DK: return (struct shape){ p->kv_heads, p->head_dim_qk, elem };
  case V: case DV: return (struct shape){ p->kv_heads, p->head_dim_v, elem };
  case OUT: case DOUT: return (struct shape){ p->q_heads, p->head_dim_v, elem };
  case LSE: return (struct shape){ p->q_heads, 1, sizeof(float) };
  default: return (struct shape){ p->q_heads, p->head_dim_qk, elem };
  }
}

static int64_t elements(const struct player *player, enum tensor tensor)
{
  const struct shape shape = shape_of(player, tensor);
  return player->rows * player->contest->given->sharding.batch * shape.heads * shape.dim;
}

static size_t tensor_bytes(const struct player *player, enum tensor tensor)
{
  return (size_t)elements(player, tensor) * shape_of(player, tensor).elem_bytes;
}

static struct swathe_tensor layout(const struct player *player, enum tensor tensor)
{
  const struct shape shape = shape_of(player, tensor);
  const int64_t row = (int64_t)shape.heads * shape.dim;
  return (struct swathe_tensor){ player->data[tensor], row, shape.dim, player->rows * row };
}

static float value_at(const struct player *player, const void *data, int64_t i)
{
  const enum swathe_dtype dtype = player->contest->given->problem.dtype;
  return dtype == SWATHE_F32 ? ((const float *)data)[i]
                             : cli_arrays_widen(dtype, ((const uint16_t *)data)[i]);
}

// Sixteenths in [-1, 1), which every dtype holds.
static enum cli_exit fill(struct player *player, enum tensor tensor)
{
  const struct cli_given *given = player->contest->given;
  const enum swathe_dtype dtype = given->problem.dtype;
  const int64_t count = elements(player, tensor);
  uint64_t at = ((uint64_t)player->contest->seed << 40) + ((uint64_t)player->rank << 36) +
                ((uint64_t)tensor << 32);

  for (int64_t i = 0; i < count; i++, at++) {
    const float value = (float)((int)(cli_arrays_mix(at) & 31) - 16) / 16;
    if (dtype == SWATHE_F32) ((float *)(void *)player->scratch)[i] = value;
    else ((uint16_t *)(void *)player->scratch)[i] = cli_arrays_narrow(dtype, value);
  }
  const enum swathe_status status =
      swathe_memory_write(given->context, given->problem.target, player->data[tensor],
                          player->scratch, tensor_bytes(player, tensor));
  return status ? fail(player, status, "to fill its tensors") : CLI_OK;
}

static enum cli_exit make_sinks(struct player *player)
{
  const struct cli_given *given = player->contest->given;
  const enum swathe_target target = given->problem.target;
  const size_t bytes = (size_t)given->problem.q_heads * sizeof(float);
  float *zeros = calloc(1, bytes);

  if (!zeros) return cli_fail(CLI_FAILED, "out of memory for the sinks");
  enum swathe_status status = swathe_memory_allocate(given->context, target, bytes, &player->sink);
  if (!status) status = swathe_memory_allocate(given->context, target, bytes, &player->dsink);
  if (!status) status = swathe_memory_write(given->context, target, player->sink, zeros, bytes);
  free(zeros);
  return status ? fail(player, status, "to make its sinks") : CLI_OK;
}

static enum cli_exit make_tensors(struct player *player)
{
  const struct cli_given *given = player->contest->given;
  const bool backward = player->contest->backward;
  size_t most = 1;
  enum swathe_status status = SWATHE_OK;

  for (int i = 0; i < TENSOR_COUNT && !status; i++) {
    const size_t bytes = tensor_bytes(player, (enum tensor)i);
    if (bytes > most) most = bytes;
    if ((i == DOUT || i > OUT) && !backward) continue;
    status = swathe_memory_allocate(given->context, given->problem.target, bytes ? bytes : 1,
                                    &player->data[i]);
  }
  if (status) return fail(player, status, "to make its tensors");
  player->scratch = malloc(most);
  if (!player->scratch)
    return cli_fail(CLI_FAILED, "rank %" PRId32 ": no %zu bytes for a tensor", player->rank, most);
  enum cli_exit code = given->problem.sinks ? make_sinks(player) : CLI_OK;
  for (int i = Q; i <= DOUT && !code; i++)
    if (player->data[i]) code = fill(player, (enum tensor)i);
  return code;
}

static struct swathe_tensors all_tensors(const struct player *player, int contestant)
{
  return (struct swathe_tensors){
    .q = layout(player, Q),     .k = layout(player, K),     .v = layout(player, V),
    .out = layout(player, OUT), .lse = layout(player, LSE), .sink = player->sink,
    .dout = layout(player, DOUT), .dq = layout(player, DQ), .dk = layout(player, DK),
    .dv = layout(player, DV),   .dsink = player->dsink,     .halo = player->halos[contestant],
  };
}

// ---- Results beside those of the first ----------------------------------------------------------

// Keeps the results, or finds how far they are from those that were kept.
static enum cli_exit compare(struct player *player, bool keep, double *difference)
{
  const struct cli_given *given = player->contest->given;

  *difference = 0;
  for (int i = OUT; i < TENSOR_COUNT; i++) {
    const size_t bytes = tensor_bytes(player, (enum tensor)i);
    if (!player->data[i]) continue;
    if (keep && !(player->first[i] = malloc(bytes ? bytes : 1)))
      return cli_fail(CLI_FAILED, "rank %" PRId32 ": no %zu bytes to compare results", player->rank,
                      bytes);
    void *here = keep ? player->first[i] : player->scratch;
    const enum swathe_status status =
        swathe_memory_read(given->context, given->problem.target, here, player->data[i], bytes);
    if (status) return fail(player, status, "to read its results");
    const int64_t count = keep ? 0 : elements(player, (enum tensor)i);
    for (int64_t e = 0; e < count; e++) {
      const double want = (double)value_at(player, player->first[i], e);
      const double got = (double)value_at(player, here, e);
      const double off = fabs(got - want) / fmax(1, fabs(want));
      if (!(off <= *difference)) *difference = isnan(off) ? INFINITY : off;
    }
  }
  return CLI_OK;
}

// ---- Layers -------------------------------------------------------------------------------------

static enum cli_exit make_layer(struct player *player, int c)
{
  const struct cli_given *given = player->contest->given;
  struct cli_contestant *contestant = &player->contest->contestants[c];
  enum swathe_status status =
      swathe_layer_create_strategy(given->context, &given->problem, player->transport,
                                   contestant->strategy, &player->layers[c]);
  if (status == SWATHE_UNSUPPORTED && contestant->strategy != SWATHE_HALO) {
    // ranks of one process share the contest; all of them are refused with the same words
    if (player->rank == 0)
      snprintf(contestant->refused, sizeof contestant->refused, "%s", swathe_error());
    return CLI_OK;
  }
  if (status) return fail(player, status, "to make a layer");
  status = swathe_layer_shard(player->layers[c], &given->sharding);
  if (status) return fail(player, status, "to shard");
  const size_t bytes = swathe_layer_halo_bytes(player->layers[c]);
  status = swathe_memory_allocate(given->context, given->problem.target, bytes ? bytes : 1,
                                  &player->halos[c]);
  return status ? fail(player, status, "to make room for its halo") : CLI_OK;
}

static enum cli_exit set_up(struct player *player)
{
  const struct cli_contest *contest = player->contest;
  const struct cli_given *given = contest->given;
  enum swathe_status status =
      swathe_sharding_rows(&given->sharding, player->rank, &player->rows);
  if (status) return fail(player, status, "to shard");
  player->all = calloc((size_t)given->sharding.ranks, sizeof(struct report));
  if (!player->all) return cli_fail(CLI_FAILED, "out of memory for the ranks' reports");
  enum cli_exit code = make_tensors(player);
  for (int c = 0; c < contest->count && !code; c++) code = make_layer(player, c);
  return code;
}

static void clean_up(struct player *player)
{
  const struct cli_given *given = player->contest->given;
  const enum swathe_target target = given->problem.target;

  for (int c = 0; c < player->contest->count; c++) {
    swathe_layer_destroy(player->layers[c]);
    // a transport that failed may still write there
    if (player->halos[c] && !player->failed)
      swathe_memory_free(given->context, target, player->halos[c]);
  }
  for (int i = 0; i < TENSOR_COUNT; i++) {
    if (player->data[i]) swathe_memory_free(given->context, target, player->data[i]);
    free(player->first[i]);
  }
  if (player->sink) swathe_memory_free(given->context, target, player->sink);
  if (player->dsink) swathe_memory_free(given->context, target, player->dsink);
  free(player->scratch);
  free(player->all);
}

// ---- Rounds -------------------------------------------------------------------------------------

// Everyone's report, the largest of each number.
static enum cli_exit largest(struct player *player, struct report *report)
{
  const enum swathe_status status =
      swathe_transport_gather(player->transport, report, sizeof *report, player->all);
  const struct report *all = player->all;
  if (status) return fail(player, status, "to meet the others");
  for (int32_t r = 0; r < player->contest->given->sharding.ranks; r++) {
    report->us = fmax(report->us, all[r].us);
    report->wait_us = fmax(report->wait_us, all[r].wait_us);
    report->difference = fmax(report->difference, all[r].difference);
    if (all[r].received_bytes > report->received_bytes)
      report->received_bytes = all[r].received_bytes;
    if (all[r].memory_bytes > report->memory_bytes) report->memory_bytes = all[r].memory_bytes;
  }
  return CLI_OK;
}

// One pass of one contestant on all ranks; `report` gets the slowest and the largest.
static enum cli_exit pass(struct player *player, int c, enum swathe_direction direction,
                          struct report *report)
{
  const struct cli_given *given = player->contest->given;
  struct swathe_layer *layer = player->layers[c];
  const struct swathe_tensors tensors = all_tensors(player, c);
  struct swathe_timing timing;
  enum cli_exit code = largest(player, report);  // all begin together
  if (code) return code;

  const double begin = now_us();
  enum swathe_status status = direction == SWATHE_BACKWARD
                                  ? swathe_layer_backward(layer, &tensors, NULL)
                                  : swathe_layer_forward(layer, &tensors, NULL);
  if (!status) status = swathe_stream_synchronize(given->context, given->problem.target, NULL);
  const double us = now_us() - begin;
  if (status) return fail(player, status, "in a pass");
  swathe_layer_timing(layer, &timing);
  *report = (struct report){
    .us = us,
    .wait_us = timing.wait_us,
    .received_bytes = timing.received_bytes,
    .memory_bytes = (int64_t)(swathe_layer_memory_bytes(layer) + swathe_layer_halo_bytes(layer)),
  };
  return largest(player, report);
}

// Both passes of one contestant; round -1 warms up and compares results.
static enum cli_exit play_one(struct player *player, int c, int64_t round, bool muted, bool first)
{
  struct cli_contest *contest = player->contest;
  struct cli_contestant *contestant = &contest->contestants[c];
  const bool writes = player->rank == 0;
  enum cli_exit code = CLI_OK;

  swathe_layer_mute(player->layers[c], muted);
  for (int d = 0; d < 1 + contest->backward && !code; d++) {
    struct report report = { 0 };
    code = pass(player, c, (enum swathe_direction)d, &report);
    if (code || !writes) continue;
    if (round >= 0) (muted ? contestant->mute_us : contestant->us)[d][round] = report.us;
    if (round >= 0 && !muted) contestant->wait_us[d][round] = report.wait_us;
    if (!muted) contestant->received_bytes[d] = report.received_bytes;
    contestant->memory_bytes = report.memory_bytes;
  }
  if (code || round >= 0 || muted) return code;
  struct report report = { 0 };
  code = compare(player, first, &report.difference);
  if (!code) code = largest(player, &report);
  if (!code && writes) contestant->difference = report.difference;
  return code;
}

static enum cli_exit play_rounds(struct player *player)
{
  const struct cli_contest *contest = player->contest;
  bool first = true;
  enum cli_exit code = CLI_OK;

  for (int64_t round = -1; round < contest->rounds && !code; round++)
    for (int i = 0; i < contest->count && !code; i++) {
      const int c = (int)((i + (round > 0 ? round : 0)) % contest->count);
      if (!player->layers[c]) continue;
      code = play_one(player, c, round, false, first);
      if (!code && round >= 0) code = play_one(player, c, round, true, first);
      first = false;
    }
  return code;
}

// ---- All ranks ----------------------------------------------------------------------------------

enum cli_exit cli_contest_begin(struct cli_contest *contest)
{
  for (int i = 0; i < 2 * contest->count; i++) {
    struct cli_contestant *contestant = &contest->contestants[i / 2];
    double **const times[] = { contestant->us, contestant->mute_us, contestant->wait_us };
    for (int t = 0; t < 3; t++) {
      times[t][i % 2] = calloc((size_t)contest->rounds, sizeof(double));
      if (!times[t][i % 2])
        return cli_fail(CLI_FAILED, "out of memory for %" PRId64 " rounds", contest->rounds);
    }
  }
  return CLI_OK;
}

void cli_contest_free(struct cli_contest *contest)
{
  for (int i = 0; i < 2 * CLI_CONTEST_MOST; i++) {
    free(contest->contestants[i / 2].us[i % 2]);
    free(contest->contestants[i / 2].mute_us[i % 2]);
    free(contest->contestants[i / 2].wait_us[i % 2]);
  }
}

static enum cli_exit play(struct cli_contest *contest, struct swathe_transport *transport)
{
  struct player player = { .contest = contest, .transport = transport,
                           .rank = swathe_transport_rank(transport) };
  enum cli_exit code = set_up(&player);
  if (!code) code = play_rounds(&player);
  player.failed = code != CLI_OK;
  if (code) swathe_transport_abort(transport, cli_fail_words());
  clean_up(&player);
  return code;
}

struct thread {
  struct cli_contest *contest;
  struct swathe_transport *transport;
  pthread_t id;
  enum cli_exit code;
  char words[2048];
};

static void *play_thread(void *arg)
{
  struct thread *thread = arg;
  thread->code = play(thread->contest, thread->transport);
  if (thread->code) snprintf(thread->words, sizeof thread->words, "%s", cli_fail_words());
  return NULL;
}

enum cli_exit cli_contest_play(struct cli_contest *contest, const struct cli_ranks *ranks)
{
  struct thread *threads = calloc((size_t)ranks->count, sizeof *threads);
  enum cli_exit code = CLI_OK;
  int32_t started = 0;

  if (!threads) return cli_fail(CLI_FAILED, "out of memory for %" PRId32 " ranks", ranks->count);
  for (; started < ranks->count && !code; started++) {
    struct thread *thread = &threads[started];
    const int32_t rank = ranks->first + started;
    *thread = (struct thread){ .contest = contest,
                               .transport = cli_ranks_transport(ranks, rank) };
    const int error = pthread_create(&thread->id, NULL, play_thread, thread);
    if (!error) continue;
    code = cli_fail(CLI_FAILED, "rank %" PRId32 " gets no thread: %s", rank, strerror(error));
    swathe_transport_abort(thread->transport, cli_fail_words());
    break;
  }
  for (int32_t r = 0; r < started; r++) pthread_join(threads[r].id, NULL);
  for (int32_t r = 0; r < started && !code; r++)
    if (threads[r].code) code = cli_fail(threads[r].code, "%s", threads[r].words);
  free(threads);
  return code;
}
