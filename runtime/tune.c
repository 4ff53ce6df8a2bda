// tune.c: finds the config a problem runs fastest with on this machine, and stores every sample
// and the pick.  What to try and what to believe is decided in search.c; here candidates are
// listed, compiled side by side while nothing is timed, checked and timed (trial.c), and what
// comes of it is stored (ledger.c).
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "lease.h"
#include "ledger.h"
#include "limit.h"
#include "trial.h"
#include "tune.h"

enum {
  LEAST_HEAT = 8,  // candidates compiled together; with many processors as many as those
  MOST_CONFIGS = 1 << 15,
  PATIENCE = 96,  // candidates in a row without gain that end a search
};

static const double compile_deadline_s = 60, default_budget_s = 60, default_wait_s = 60;
static const double default_good_enough = 0.95;

struct tuning {
  struct swathe_context *context;
  const struct swathe_problem *problem;
  const struct swathe_tune_options *options;
  enum swathe_direction direction;
  struct sw_aim aim;
  struct sw_db_environment environment;
  struct sw_ledger ledger;
  struct sw_trial_bench *bench;
  struct sw_search search;
  int64_t refused;
  double begin_s, end_s;  // of this direction
};

static bool stopped(const struct tuning *tuning)
{
  return tuning->options->stop && *tuning->options->stop;
}

static void show_progress(const struct tuning *tuning, const char *trying)
{
  if (!tuning->options->progress) return;
  const struct sw_search *search = &tuning->search;
  const struct swathe_progress progress = {
    .direction = tuning->direction,
    .tried = tuning->ledger.tried,
    .total = tuning->ledger.count,
    .refused = tuning->refused,
    .elapsed_s = sw_layer_now_s() - tuning->begin_s,
    .budget_s = tuning->end_s - tuning->begin_s,
    .left_s = search->operations ? sw_search_left_s(search) : tuning->end_s - sw_layer_now_s(),
    .default_us = search->default_us,
    .best_us = search->default_us * search->best_ratio,
    .limit_share = sw_ledger_limit_share(&tuning->ledger, search),
    .best = tuning->ledger.candidates[search->best].config,
    .trying = trying,
  };
  tuning->options->progress(tuning->options->arg, &progress);
}

// ---- Candidates -------------------------------------------------------------------------------

struct listing {
  struct tuning *tuning;
  enum swathe_status status;
};

static bool list_candidate(void *arg, const char *config)
{
  struct listing *listing = arg;
  struct tuning *tuning = listing->tuning;
  listing->status = sw_ledger_add(&tuning->ledger, config);
  return !listing->status && tuning->ledger.count < MOST_CONFIGS && !stopped(tuning);
}

static void count_refused(void *arg, const char *rule, int64_t points)
{
  (void)rule;
  ((struct listing *)arg)->tuning->refused += points;
}

// The default first, then the space in its order.
static enum swathe_status list_candidates(struct tuning *tuning)
{
  char config[SW_CONFIG_TEXT];
  struct listing listing = { .tuning = tuning };

  pthread_mutex_lock(&tuning->context->mutex);
  enum swathe_status status =
      sw_gen_default(tuning->context->gen, &tuning->ledger.request, config);
  pthread_mutex_unlock(&tuning->context->mutex);
  if (!status) status = sw_ledger_add(&tuning->ledger, config);
  if (!status)
    status = swathe_configs(tuning->context, tuning->problem, tuning->direction, NULL,
                            tuning->options->exhaustive, list_candidate, count_refused, &listing);
  return status ? status : listing.status;
}

// ---- Compile ----------------------------------------------------------------------------------

struct building {
  const char *config;
  struct sw_gen_source source;
  struct sw_jit_job *job;
  bool failed;
  char words[512];
};

static void start_building(struct tuning *tuning, struct building *building)
{
  enum swathe_status status = sw_context_source(tuning->context, tuning->problem,
                                                sw_context_kernel_name(tuning->direction),
                                                tuning->aim.isa, building->config,
                                                &building->source);
  if (!status) {
    const struct sw_jit_request request = {
      .name = sw_context_kernel_name(tuning->direction),
      .source = building->source.text,
      .flags = building->source.flags,
      .isa = tuning->aim.isa,
      .compiler = sw_context_compiler(&tuning->aim),
    };
    status = sw_jit_job_start(tuning->context->jit, &request, &building->job);
  }
  building->failed = status != SWATHE_OK;
  if (status) snprintf(building->words, sizeof building->words, "%s", swathe_error());
}

// Whether what is not compiled yet will not be tried any more.
static bool over(const struct tuning *tuning, const struct building *building)
{
  return stopped(tuning) || (building->config != tuning->ledger.candidates[0].config &&
                             sw_layer_now_s() >= tuning->end_s);
}

// Waits for the job as long as it is of use.
static void finish_building(struct tuning *tuning, struct building *building)
{
  const double end = sw_layer_now_s() + compile_deadline_s;
  bool done = false;
  char *log = NULL;

  if (!building->job) return;
  while (!done && !over(tuning, building) && sw_layer_now_s() < end) {
    if (sw_jit_job_poll(building->job, &done)) break;
    if (!done) nanosleep(&(struct timespec){ .tv_nsec = 5000000 }, NULL);
  }
  if (over(tuning, building)) {
    sw_jit_job_kill(building->job);
    building->failed = true;
  } else {
    enum swathe_status status = sw_jit_job_finish(building->job, 0.01, &log);
    if (status) status = sw_context_compile_failed(&building->source, status, log);
    building->failed = status != SWATHE_OK;
    if (status) snprintf(building->words, sizeof building->words, "%s", swathe_error());
  }
  building->job = NULL;
}

// Compiles the batch, as many at a time as there are processors, while there is time for more than
// the default.
static void build(struct tuning *tuning, struct building *batch, int count)
{
  const int beside = sw_device_cpu_processors();
  for (int i = 0; i < count + beside; i++) {
    if (i >= beside && i - beside < count) finish_building(tuning, &batch[i - beside]);
    if (i < count && !over(tuning, &batch[i])) start_building(tuning, &batch[i]);
  }
}

// ---- The search's operations ------------------------------------------------------------------

// Whether a CUDA kernel spills or is over a limit, as the binary in the cache says; the words why.
// What a layer needs beside it is in the cache after that, too: children compile nothing.
static bool is_refused(struct tuning *tuning, struct building *building)
{
  struct swathe_compiled compiled;
  if (!tuning->aim.cuda || building->failed ||
      swathe_compile(tuning->context, tuning->problem, tuning->direction, tuning->aim.isa,
                     building->config, &compiled))
    return false;
  snprintf(building->words, sizeof building->words, "not tried: %s", compiled.refused);
  return *compiled.refused;
}

static enum swathe_status check_built(struct tuning *tuning, struct building *building,
                                      int64_t candidate, enum sw_verdict *verdict)
{
  char words[SW_TRIAL_WORDS];
  const bool refused = is_refused(tuning, building);
  // the default, candidate 0, is tried in any case: everything is measured beside it
  if (building->failed || (refused && candidate > 0)) {
    *verdict = SW_VERDICT_COMPILE;
    return sw_ledger_put_failure(&tuning->ledger, candidate, *verdict, building->words);
  }
  show_progress(tuning, building->config);
  const enum swathe_status status =
      sw_trial_check(tuning->bench, building->config, tuning->options->stop, verdict, words);
  if (status || *verdict == SW_VERDICT_OK) return status;
  return sw_ledger_put_failure(&tuning->ledger, candidate, *verdict, words);
}

static enum swathe_status prepare(void *arg, const int64_t *candidates, int32_t count,
                                  enum sw_verdict *verdicts)
{
  struct tuning *tuning = arg;
  struct building batch[SW_SEARCH_MOST_SLOTS];
  enum swathe_status status = SWATHE_OK;

  sw_trial_end_racers(tuning->bench);
  memset(batch, 0, sizeof batch);
  for (int32_t i = 0; i < count; i++)
    batch[i].config = tuning->ledger.candidates[candidates[i]].config;
  show_progress(tuning, batch[0].config);
  build(tuning, batch, count);
  for (int32_t i = 0; i < count && !status; i++) {
    if (stopped(tuning)) status = sw_fail(SWATHE_INTERRUPTED, "stopped; what was measured is kept");
    else if (candidates[i] == 0 || sw_layer_now_s() < tuning->end_s)
      status = check_built(tuning, &batch[i], candidates[i], &verdicts[i]);
  }
  for (int32_t i = 0; i < count; i++) sw_gen_source_free(&batch[i].source);
  return status;
}

static enum swathe_status measure(void *arg, struct sw_search_round *round)
{
  struct tuning *tuning = arg;
  struct sw_trial_slot slots[SW_SEARCH_MOST_SLOTS];

  show_progress(tuning, "");
  if (stopped(tuning)) return sw_fail(SWATHE_INTERRUPTED, "stopped; what was measured is kept");
  for (int32_t i = 0; i < round->count; i++)
    slots[i].config = tuning->ledger.candidates[round->order[i]].config;
  enum swathe_status status =
      sw_trial_round(tuning->bench, slots, round->count, round->stage == SW_SEARCH_LOADED,
                     tuning->options->stop, &round->noisy);
  for (int32_t i = 0; i < round->count && !status; i++) {
    round->us[i] = slots[i].us;
    round->verdicts[i] = slots[i].verdict;
    if (slots[i].verdict == SW_VERDICT_OK || slots[i].verdict == SW_VERDICT_UNTRIED) continue;
    status = sw_ledger_put_failure(&tuning->ledger, round->order[i], slots[i].verdict,
                                   slots[i].words);
  }
  return status;
}

static enum swathe_status note(void *arg, const struct sw_search_runs *runs)
{
  return sw_ledger_note(&((struct tuning *)arg)->ledger, runs);
}

static enum swathe_status lead(void *arg)
{
  struct tuning *tuning = arg;
  return sw_ledger_lead(&tuning->ledger, &tuning->search);
}

static double search_now_s(void *arg)
{
  (void)arg;
  return sw_layer_now_s();
}

static const struct sw_search_operations operations = {
  .prepare = prepare, .measure = measure, .note = note, .lead = lead, .now_s = search_now_s
};

// ---- The limit --------------------------------------------------------------------------------

// What a config's sizes (spaces.lua) say of it before it runs.
struct sizes {
  int64_t bytes;             // what it works in: the sum of all sizes that are called so
  int64_t counted_permille;  // products it makes over those of visible pairs; 0: not known
  int64_t step;              // elements that one of its multiply-adds takes; 0: not known
};

static void note_size(void *arg, const char *name, int64_t value)
{
  struct sizes *sizes = arg;
  const char *end = strrchr(name, '_');
  if (end && !strcmp(end, "_bytes")) sizes->bytes += value;
  if (!strcmp(name, "counted_permille")) sizes->counted_permille = value;
  if (!strcmp(name, "step")) sizes->step = value;
}

// What the machine can do, by elements that a multiply-add takes: [1] floats, [2] pairs.
struct limits {
  struct sw_limit of[3];
};

// Not known: no harm.
static void measure_limits(struct tuning *tuning, struct limits *limits)
{
  const char *name = sw_context_kernel_name(tuning->direction);
  struct sw_gen_source source;

  memset(limits, 0, sizeof *limits);
  if (tuning->aim.cuda || sw_context_source(tuning->context, tuning->problem, name, tuning->aim.isa,
                                            tuning->ledger.candidates[0].config, &source))
    return;
  if (sw_limit_measure(tuning->context, SWATHE_F32, source.flags, &limits->of[1]) ||
      (tuning->problem->dtype == SWATHE_BF16 &&
       sw_limit_measure(tuning->context, SWATHE_BF16, source.flags, &limits->of[2])))
    memset(limits, 0, sizeof *limits);
  sw_gen_source_free(&source);
}

// The least time for so many operations and bytes; 0: not known.
static double least_us(const struct sw_limit *limit, double flops, double bytes)
{
  if (!(limit->flops_per_s > 0)) return 0;
  const double compute_us = 1e6 * flops / limit->flops_per_s;
  const double memory_us = limit->bytes_per_s > 0 ? 1e6 * bytes / limit->bytes_per_s : 0;
  return compute_us > memory_us ? compute_us : memory_us;
}

// The share's limit is what its visible pairs and its tensors take at the machine's best; a
// candidate's bound counts all products of its tiles, too, made by the instruction it uses.
static enum swathe_status find_bounds(struct tuning *tuning)
{
  const struct sw_gen_request *request = &tuning->ledger.request;
  struct limits limits;
  double flops, bytes;
  enum swathe_status status = SWATHE_OK;

  measure_limits(tuning, &limits);
  sw_trial_work(tuning->bench, &flops, &bytes);
  const bool pairs = limits.of[2].flops_per_s > limits.of[1].flops_per_s;
  tuning->ledger.limit_us = least_us(&limits.of[pairs ? 2 : 1], flops, bytes);
  for (int64_t i = 0; i < tuning->ledger.count && !status; i++) {
    struct sw_search_candidate *candidate = &tuning->ledger.candidates[i];
    struct sizes sizes = { 0 };
    pthread_mutex_lock(&tuning->context->mutex);
    status = sw_gen_sizes(tuning->context->gen, request, candidate->config, note_size, &sizes);
    pthread_mutex_unlock(&tuning->context->mutex);
    const double counted =
        sizes.counted_permille > 1000 ? 1e-3 * (double)sizes.counted_permille : 1;
    candidate->bytes = sizes.bytes;
    candidate->bound_us =
        least_us(&limits.of[pairs && sizes.step != 1 ? 2 : 1], counted * flops, bytes);
  }
  return status;
}

// ---- Tune -------------------------------------------------------------------------------------

static int64_t memory_bytes(const struct tuning *tuning)
{
  if (tuning->options->memory_bytes > 0) return tuning->options->memory_bytes;
  return (int64_t)sysconf(_SC_PHYS_PAGES) / 2 * (int64_t)sysconf(_SC_PAGESIZE);
}

static enum swathe_status prepare_bench(struct tuning *tuning)
{
  const struct sw_trial_options options = { .default_config = tuning->ledger.candidates[0].config,
                                            .trial_s = tuning->options->trial_s,
                                            .memory_bytes = memory_bytes(tuning) };
  return sw_trial_prepare(tuning->context, tuning->problem, tuning->direction, &options,
                          &tuning->bench);
}

static void set_up_search(struct tuning *tuning)
{
  const double good = tuning->options->good_enough;
  const int32_t processors = sw_device_cpu_processors();

  tuning->search = (struct sw_search){
    .operations = &operations,
    .arg = tuning,
    .end_s = tuning->end_s,
    .good_enough = good < 0   ? 0
                   : good > 0 ? good
                              : default_good_enough,
    .heat = processors > LEAST_HEAT ? processors : LEAST_HEAT,
    .patience = PATIENCE,
    .seed = (uint64_t)tuning->ledger.session,
  };
  sw_ledger_start(&tuning->ledger, &tuning->search);
}

static enum swathe_status tune_direction(struct tuning *tuning)
{
  enum swathe_status status = list_candidates(tuning);
  if (status) return status;

  show_progress(tuning, "");
  status = prepare_bench(tuning);
  if (!status && !tuning->options->again) status = sw_ledger_recall(&tuning->ledger);
  if (!status) status = find_bounds(tuning);
  if (status) return status;
  set_up_search(tuning);
  status = sw_ledger_end(&tuning->ledger, &tuning->search, sw_search_run(&tuning->search));
  show_progress(tuning, "");
  return status;
}

static void free_tuning(struct tuning *tuning)
{
  sw_trial_free(tuning->bench);
  sw_ledger_free(&tuning->ledger);
}

struct call {
  struct swathe_context *context;
  const struct swathe_problem *problem;
  const struct swathe_tune_options *options;
  struct swathe_tuned *tuned;
  struct sw_aim aim;
  struct sw_db *db;
  int64_t session;
  double budget_s, end_s;
};

static enum swathe_status tune_both(struct call *call)
{
  const bool both = !call->options->forward && !call->options->backward;
  const bool wanted[2] = { both || call->options->forward, both || call->options->backward };
  enum swathe_status status = SWATHE_OK;

  for (int d = 0; d < 2 && !status; d++) {
    if (!wanted[d]) continue;
    // forward may use half of what there is, backward all that is left
    const double begin = sw_layer_now_s(), left = call->end_s - begin;
    struct tuning tuning = {
      .context = call->context,
      .problem = call->problem,
      .options = call->options,
      .direction = (enum swathe_direction)d,
      .aim = call->aim,
      .begin_s = begin,
      .end_s = begin + (d == 0 && wanted[1] ? left / 2 : left),
    };
    tuning.ledger = (struct sw_ledger){
      .context = call->context,
      .db = call->db,
      .session = call->session,
      .request = { .problem = call->problem,
                   .kernel = sw_context_kernel_name(tuning.direction),
                   .isa = tuning.aim.isa },
      .environment = &tuning.environment,
      .tuned = &call->tuned[d],
    };
    bool done = false;
    sw_context_environment(call->context, &tuning.aim, &tuning.environment);
    status = sw_ledger_recall_pick(&tuning.ledger,
                                   call->options->again ? INFINITY : call->budget_s, &done);
    if (!status && !done) status = tune_direction(&tuning);
    free_tuning(&tuning);
  }
  return status;
}

enum swathe_status sw_tune_check_options(const struct swathe_tune_options *options)
{
  const struct {
    const char *name;
    double value;
  } seconds[] = { { "budget_s", options->budget_s },
                  { "wait_s", options->wait_s },
                  { "trial_s", options->trial_s } };
  for (size_t i = 0; i < sizeof seconds / sizeof *seconds; i++)
    if (!(seconds[i].value >= 0 && seconds[i].value <= 1e12))
      return sw_fail(SWATHE_BAD_USE, "%s of %g makes no sense: seconds, or 0 for the default",
                     seconds[i].name, seconds[i].value);
  if (options->memory_bytes < 0)
    return sw_fail(SWATHE_BAD_USE, "memory_bytes of %lld makes no sense: 0 for the default",
                   (long long)options->memory_bytes);
  return SWATHE_OK;
}

enum swathe_status swathe_tune(struct swathe_context *context, const struct swathe_problem *problem,
                               const struct swathe_tune_options *options,
                               struct swathe_tuned tuned[2])
{
  const double budget_s = options->budget_s > 0 ? options->budget_s : default_budget_s;
  const double wait_s = options->wait_s > 0 ? options->wait_s : default_wait_s;
  struct call call = { .context = context, .problem = problem, .options = options, .tuned = tuned,
                       .budget_s = budget_s };
  struct sw_lease lease = { .file = -1 };
  enum swathe_status status = swathe_problem_check(problem);

  memset(tuned, 0, 2 * sizeof *tuned);
  if (!status) status = sw_tune_check_options(options);
  if (status) return status;
  if (!*context->database)
    return sw_fail(SWATHE_DATABASE,
                   "there is no place for a tuning database: give one, or set SWATHE_DB");
  const volatile int *heeded = sw_jit_heed(options->stop);
  if (problem->target == SWATHE_CUDA) status = sw_context_stand_apart(context, problem);
  if (!status) status = sw_context_aim(context, problem, NULL, &call.aim);
  if (!status)
    status = sw_db_open(context->database, SW_DB_WRITE, &call.db);  // makes its directory
  if (!status) status = sw_lease_take(context->database, wait_s, options->stop, &lease);
  if (!status) status = sw_db_session_begin(call.db, "tune", budget_s, &call.session);
  call.end_s = sw_layer_now_s() + budget_s;
  if (!status) status = tune_both(&call);
  sw_lease_give_back(&lease);
  context->apart.on = false;
  sw_jit_heed(heeded);
  if (call.db) sw_db_close(call.db);
  sw_context_reopen_database(context);
  return status;
}
