// tune.c: finds the config a problem runs fastest with on this machine, and stores every sample
// and the pick.  What to try and what to believe is decided in search.c; here candidates are
// listed, compiled side by side while nothing is timed, checked and timed (trial.c), and what
// comes of it is stored.
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "lease.h"
#include "limit.h"
#include "trial.h"

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
  struct sw_db *db;
  int64_t session;
  struct sw_db_environment environment;
  struct sw_db_held held;  // the pick that the database has
  struct sw_trial_bench *bench;
  struct sw_search search;
  struct sw_search_candidate *candidates;  // [0] is the default; texts are ours
  bool *counted;                           // [count]: in `tried` already
  int64_t count, capacity, refused;
  int64_t tried;          // with a verdict, earlier sessions' included
  double limit_us;        // no config can be faster; 0: not known
  double begin_s, end_s;  // of this direction
  struct swathe_tuned *tuned;
};

static bool stopped(const struct tuning *tuning)
{
  return tuning->options->stop && *tuning->options->stop;
}

static const char *best_config(const struct tuning *tuning)
{
  return tuning->candidates[tuning->search.best].config;
}

static double limit_share(const struct tuning *tuning)
{
  const double best_us = tuning->search.default_us * tuning->search.best_ratio;
  return tuning->limit_us > 0 && best_us > 0 ? tuning->limit_us / best_us : 0;
}

static void show_progress(const struct tuning *tuning, const char *trying)
{
  if (!tuning->options->progress) return;
  const struct sw_search *search = &tuning->search;
  const struct swathe_progress progress = {
    .direction = tuning->direction,
    .tried = tuning->tried,
    .total = tuning->count,
    .refused = tuning->refused,
    .elapsed_s = sw_layer_now_s() - tuning->begin_s,
    .budget_s = tuning->end_s - tuning->begin_s,
    .left_s = search->operations ? sw_search_left_s(search) : tuning->end_s - sw_layer_now_s(),
    .default_us = search->default_us,
    .best_us = search->default_us * search->best_ratio,
    .limit_share = limit_share(tuning),
    .best = best_config(tuning),
    .trying = trying,
  };
  tuning->options->progress(tuning->options->arg, &progress);
}

static struct sw_db_row row_of(const struct tuning *tuning, const char *config)
{
  return (struct sw_db_row){ .problem = tuning->problem,
                             .kernel = sw_context_kernel_name(tuning->direction),
                             .environment = &tuning->environment,
                             .config = config };
}

static struct sw_gen_request request_of(const struct tuning *tuning)
{
  return (struct sw_gen_request){ .problem = tuning->problem,
                                  .kernel = sw_context_kernel_name(tuning->direction),
                                  .isa = tuning->aim.isa };
}

// ---- Candidates -------------------------------------------------------------------------------

static enum swathe_status add_candidate(struct tuning *tuning, const char *config)
{
  if (tuning->count == tuning->capacity) {
    const int64_t capacity = tuning->capacity ? 2 * tuning->capacity : 256;
    struct sw_search_candidate *grown =
        realloc(tuning->candidates, (size_t)capacity * sizeof *grown);
    if (!grown)
      return sw_fail(SWATHE_NO_MEMORY, "no memory for %lld candidates", (long long)capacity);
    tuning->candidates = grown;
    tuning->capacity = capacity;
  }
  char *copy = strdup(config);
  if (!copy) return sw_fail(SWATHE_NO_MEMORY, "no memory for a candidate");
  tuning->candidates[tuning->count++] =
      (struct sw_search_candidate){ .config = copy, .verdict = SW_VERDICT_UNTRIED };
  return SWATHE_OK;
}

struct listing {
  struct tuning *tuning;
  enum swathe_status status;
};

static bool list_candidate(void *arg, const char *config)
{
  struct listing *listing = arg;
  struct tuning *tuning = listing->tuning;
  if (strcmp(config, tuning->candidates[0].config)) listing->status = add_candidate(tuning, config);
  return !listing->status && tuning->count < MOST_CONFIGS && !stopped(tuning);
}

static void count_refused(void *arg, const char *rule, int64_t points)
{
  (void)rule;
  ((struct listing *)arg)->tuning->refused += points;
}

// The default first, then the space in its order.
static enum swathe_status list_candidates(struct tuning *tuning)
{
  const struct sw_gen_request request = request_of(tuning);
  char config[SW_CONFIG_TEXT];
  struct listing listing = { .tuning = tuning };

  pthread_mutex_lock(&tuning->context->mutex);
  enum swathe_status status = sw_gen_default(tuning->context->gen, &request, config);
  pthread_mutex_unlock(&tuning->context->mutex);
  if (!status) status = add_candidate(tuning, config);
  if (!status)
    status = swathe_configs(tuning->context, tuning->problem, tuning->direction, NULL,
                            tuning->options->exhaustive, list_candidate, count_refused, &listing);
  if (!status) status = listing.status;
  if (status) return status;
  tuning->counted = calloc((size_t)tuning->count, sizeof *tuning->counted);
  return tuning->counted ? SWATHE_OK : sw_fail(SWATHE_NO_MEMORY, "no memory for candidates");
}

static int64_t find_candidate(const struct tuning *tuning, const char *config)
{
  for (int64_t i = 0; i < tuning->count; i++)
    if (!strcmp(tuning->candidates[i].config, config)) return i;
  return -1;
}

// ---- What the database already knows ----------------------------------------------------------

static enum sw_verdict verdict_of(const char *name)
{
  int v = SW_VERDICT_OK;
  while (v < SW_VERDICT_UNTRIED && strcmp(sw_verdict_name((enum sw_verdict)v), name)) v++;
  return (enum sw_verdict)v;
}

static void recall(void *arg, const char *config, const char *verdict, double median_us,
                   double ratio)
{
  struct tuning *tuning = arg;
  const int64_t i = find_candidate(tuning, config);
  (void)median_us;
  if (i <= 0) return;  // the default is timed anew in every session
  struct sw_search_candidate *candidate = &tuning->candidates[i];
  candidate->verdict = verdict_of(verdict);
  candidate->ratio = candidate->verdict == SW_VERDICT_OK ? ratio : 0;
  if (candidate->verdict == SW_VERDICT_UNTRIED || tuning->counted[i]) return;
  tuning->counted[i] = true;
  tuning->tried++;
}

// The stored pick, if it is still in the space; a finished search needs no measuring.
static enum swathe_status recall_pick(struct tuning *tuning, bool *done)
{
  const struct sw_db_row row = row_of(tuning, "");
  const struct sw_gen_request request = request_of(tuning);
  char config[SW_CONFIG_TEXT];
  enum swathe_status status = sw_db_held(tuning->db, &row, &tuning->held);

  *done = false;
  if (status || !tuning->held.found) return status;
  pthread_mutex_lock(&tuning->context->mutex);
  tuning->held.found = !sw_gen_check(tuning->context->gen, &request, tuning->held.config, config);
  pthread_mutex_unlock(&tuning->context->mutex);
  *done = tuning->held.found && tuning->held.complete && !tuning->options->again;
  if (!*done) return SWATHE_OK;
  snprintf(tuning->tuned->config, sizeof tuning->tuned->config, "%s", config);
  tuning->tuned->ratio = tuning->held.ratio;
  tuning->tuned->limit_share = tuning->held.limit_share;
  tuning->tuned->reused = true;
  return SWATHE_OK;
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

// Waits for the job, watching the stop flag.
static void finish_building(struct tuning *tuning, struct building *building)
{
  const double end = sw_layer_now_s() + compile_deadline_s;
  bool done = false;
  char *log = NULL;

  if (!building->job) return;
  while (!done && !stopped(tuning) && sw_layer_now_s() < end) {
    if (sw_jit_job_poll(building->job, &done)) break;
    if (!done) nanosleep(&(struct timespec){ .tv_nsec = 5000000 }, NULL);
  }
  if (stopped(tuning)) {
    sw_jit_job_kill(building->job);
  } else {
    enum swathe_status status = sw_jit_job_finish(building->job, 0.01, &log);
    if (status) status = sw_context_compile_failed(&building->source, status, log);
    building->failed = status != SWATHE_OK;
    if (status) snprintf(building->words, sizeof building->words, "%s", swathe_error());
  }
  building->job = NULL;
}

// Compiles the batch, as many at a time as there are processors.
static void build(struct tuning *tuning, struct building *batch, int count)
{
  const int beside = sw_device_cpu_processors();
  for (int i = 0; i < count + beside; i++) {
    if (i >= beside && i - beside < count) finish_building(tuning, &batch[i - beside]);
    if (i < count && !stopped(tuning)) start_building(tuning, &batch[i]);
  }
}

// ---- Store ------------------------------------------------------------------------------------

static void count_tried(struct tuning *tuning, int64_t candidate, enum sw_verdict verdict)
{
  if (tuning->counted[candidate]) return;
  tuning->counted[candidate] = true;
  tuning->tried++;
  tuning->tuned->tried++;
  tuning->tuned->rejected += verdict == SW_VERDICT_WRONG;
  tuning->tuned->failed += verdict != SW_VERDICT_OK && verdict != SW_VERDICT_WRONG;
}

static enum swathe_status put_failure(struct tuning *tuning, int64_t candidate,
                                      enum sw_verdict verdict, const char *words)
{
  const struct sw_db_row row = row_of(tuning, tuning->candidates[candidate].config);
  const struct sw_db_sample sample = { .verdict = sw_verdict_name(verdict), .words = words };
  count_tried(tuning, candidate, verdict);
  return sw_db_put_sample(tuning->db, tuning->session, &row, &sample);
}

static enum swathe_status put_pick(struct tuning *tuning, bool complete)
{
  const struct sw_db_row row = row_of(tuning, best_config(tuning));
  const struct sw_search *search = &tuning->search;
  const struct sw_db_pick pick = { .best_us = search->default_us * search->best_ratio,
                                   .default_us = search->default_us,
                                   .ratio = search->best_ratio,
                                   .limit_share = limit_share(tuning),
                                   .complete = complete };
  return sw_db_put_pick(tuning->db, tuning->session, &row, &pick);
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
    return put_failure(tuning, candidate, *verdict, building->words);
  }
  show_progress(tuning, building->config);
  const enum swathe_status status =
      sw_trial_check(tuning->bench, building->config, tuning->options->stop, verdict, words);
  if (status || *verdict == SW_VERDICT_OK) return status;
  return put_failure(tuning, candidate, *verdict, words);
}

static enum swathe_status prepare(void *arg, const int64_t *candidates, int32_t count,
                                  enum sw_verdict *verdicts)
{
  struct tuning *tuning = arg;
  struct building batch[SW_SEARCH_MOST_SLOTS];
  enum swathe_status status = SWATHE_OK;

  sw_trial_end_racers(tuning->bench);
  memset(batch, 0, sizeof batch);
  for (int32_t i = 0; i < count; i++) batch[i].config = tuning->candidates[candidates[i]].config;
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
    slots[i].config = tuning->candidates[round->order[i]].config;
  enum swathe_status status =
      sw_trial_round(tuning->bench, slots, round->count, round->stage == SW_SEARCH_LOADED,
                     tuning->options->stop, &round->noisy);
  for (int32_t i = 0; i < round->count && !status; i++) {
    round->us[i] = slots[i].us;
    round->verdicts[i] = slots[i].verdict;
    if (slots[i].verdict == SW_VERDICT_OK || slots[i].verdict == SW_VERDICT_UNTRIED) continue;
    status = put_failure(tuning, round->order[i], slots[i].verdict, slots[i].words);
  }
  return status;
}

static enum swathe_status note(void *arg, const struct sw_search_runs *runs)
{
  struct tuning *tuning = arg;
  const struct sw_db_row row = row_of(tuning, tuning->candidates[runs->candidate].config);
  double sorted[SW_SEARCH_MOST_RUNS];

  memcpy(sorted, runs->us, sizeof sorted);
  const struct sw_db_sample sample = {
    .verdict = "ok",
    .words = "",
    .runs_us = runs->us,
    .default_runs_us = runs->beside == 0 ? runs->beside_us : NULL,
    .runs = runs->runs,
    .median_us = sw_search_median(sorted, runs->runs),
    .ratio = runs->ratio,
    .noisy = 2 * runs->noisy > runs->runs,
  };
  count_tried(tuning, runs->candidate, SW_VERDICT_OK);
  return sw_db_put_sample(tuning->db, tuning->session, &row, &sample);
}

// Until the search is over, only a problem without a finished pick gets what leads.
static enum swathe_status lead(void *arg)
{
  struct tuning *tuning = arg;
  return tuning->held.found && tuning->held.complete ? SWATHE_OK : put_pick(tuning, false);
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
                                            tuning->candidates[0].config, &source))
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
  const struct sw_gen_request request = request_of(tuning);
  struct limits limits;
  double flops, bytes;
  enum swathe_status status = SWATHE_OK;

  measure_limits(tuning, &limits);
  sw_trial_work(tuning->bench, &flops, &bytes);
  const bool pairs = limits.of[2].flops_per_s > limits.of[1].flops_per_s;
  tuning->limit_us = least_us(&limits.of[pairs ? 2 : 1], flops, bytes);
  for (int64_t i = 0; i < tuning->count && !status; i++) {
    struct sw_search_candidate *candidate = &tuning->candidates[i];
    struct sizes sizes = { 0 };
    pthread_mutex_lock(&tuning->context->mutex);
    status = sw_gen_sizes(tuning->context->gen, &request, candidate->config, note_size, &sizes);
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
  const struct sw_trial_options options = { .default_config = tuning->candidates[0].config,
                                            .trial_s = tuning->options->trial_s,
                                            .memory_bytes = memory_bytes(tuning) };
  return sw_trial_prepare(tuning->context, tuning->problem, tuning->direction, &options,
                          &tuning->bench);
}

static void set_up_search(struct tuning *tuning)
{
  const double good = tuning->options->good_enough;
  const int32_t processors = sw_device_cpu_processors();
  const int64_t held = tuning->held.found && tuning->held.complete
                           ? find_candidate(tuning, tuning->held.config)
                           : -1;

  tuning->search = (struct sw_search){
    .operations = &operations,
    .arg = tuning,
    .candidates = tuning->candidates,
    .count = tuning->count,
    .holder = held > 0 ? held : 0,
    .holder_quiet = held >= 0 && tuning->held.quiet,
    .end_s = tuning->end_s,
    .good_enough = good < 0   ? 0
                   : good > 0 ? good
                              : default_good_enough,
    .heat = processors > LEAST_HEAT ? processors : LEAST_HEAT,
    .patience = PATIENCE,
    .seed = (uint64_t)tuning->session,
  };
}

// A pick that held against noise rests on its older, quiet samples: it stays as it is stored.
static bool keeps_stored_pick(const struct tuning *tuning)
{
  return tuning->held.found && tuning->held.complete && tuning->held.quiet &&
         tuning->search.noisy && !strcmp(tuning->held.config, best_config(tuning));
}

static enum swathe_status tune_direction(struct tuning *tuning)
{
  enum swathe_status status = list_candidates(tuning);
  if (status) return status;

  show_progress(tuning, "");
  status = prepare_bench(tuning);
  if (!status && !tuning->options->again) {
    const struct sw_db_row row = row_of(tuning, "");
    status = sw_db_known(tuning->db, &row, recall, tuning);
  }
  if (status) return status;
  status = find_bounds(tuning);
  if (status) return status;
  set_up_search(tuning);
  status = sw_search_run(&tuning->search);
  if (!status && !keeps_stored_pick(tuning)) status = put_pick(tuning, true);
  show_progress(tuning, "");
  struct swathe_tuned *tuned = tuning->tuned;
  if (!(tuning->search.default_us > 0)) return status;
  snprintf(tuned->config, sizeof tuned->config, "%s", best_config(tuning));
  tuned->default_us = tuning->search.default_us;
  tuned->best_us = tuning->search.default_us * tuning->search.best_ratio;
  tuned->ratio = tuning->search.best_ratio;
  tuned->limit_share = limit_share(tuning);
  tuned->noisy = tuning->search.noisy;
  tuned->good_enough = tuning->search.ended_good;
  return status;
}

static void free_tuning(struct tuning *tuning)
{
  sw_trial_free(tuning->bench);
  for (int64_t i = 0; i < tuning->count; i++) free((char *)(uintptr_t)tuning->candidates[i].config);
  free(tuning->candidates);
  free(tuning->counted);
}

struct call {
  struct swathe_context *context;
  const struct swathe_problem *problem;
  const struct swathe_tune_options *options;
  struct swathe_tuned *tuned;
  struct sw_aim aim;
  struct sw_db *db;
  int64_t session;
  double end_s;
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
      .db = call->db,
      .session = call->session,
      .tuned = &call->tuned[d],
      .begin_s = begin,
      .end_s = begin + (d == 0 && wanted[1] ? left / 2 : left),
    };
    bool done = false;
    sw_context_environment(call->context, &call->aim, &tuning.environment);
    status = recall_pick(&tuning, &done);
    if (!status && !done) status = tune_direction(&tuning);
    free_tuning(&tuning);
  }
  return status;
}

enum swathe_status swathe_tune(struct swathe_context *context, const struct swathe_problem *problem,
                               const struct swathe_tune_options *options,
                               struct swathe_tuned tuned[2])
{
  const double budget_s = options->budget_s > 0 ? options->budget_s : default_budget_s;
  const double wait_s = options->wait_s > 0 ? options->wait_s : default_wait_s;
  struct call call = { .context = context, .problem = problem, .options = options, .tuned = tuned };
  struct sw_lease lease = { .file = -1 };
  enum swathe_status status = swathe_problem_check(problem);

  memset(tuned, 0, 2 * sizeof *tuned);
  if (status) return status;
  if (!*context->database)
    return sw_fail(SWATHE_DATABASE,
                   "there is no place for a tuning database: give one, or set SWATHE_DB");
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
  if (call.db) sw_db_close(call.db);
  sw_context_reopen_database(context);
  return status;
}
