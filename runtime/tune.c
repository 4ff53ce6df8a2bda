// tune.c: finds the config a problem runs fastest with on this machine, and stores every sample and the pick.
//
// The search walks the declared space outward from the best config so far: always the untried config that
// differs from it in the fewest knobs.  Candidates compile in batches, side by side, with nothing being
// timed; then each is checked and timed in turn with the incumbent (trial.c).  A challenger replaces the
// incumbent only when it wins by more than the noise.
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "trial.h"

// A challenger must be this much faster, as a median of paired runs, and in two thirds of the pairs.
static const double better_ratio = 0.99;

// The search ends by itself when every config one knob away from the best was tried and this many more
// were without gain.
enum { PATIENCE = 16 };

enum { BATCH = 6, MOST_CONFIGS = 1 << 15, FIRST_RUNS = 7, LAST_RUNS = 11 };

static const double compile_deadline_s = 60;

struct candidate {
  char *config;
  bool tried;
};

struct search {
  struct swathe_context *context;
  const struct swathe_problem *problem;
  const struct swathe_tune_options *options;
  enum swathe_direction direction;
  struct sw_db *db;
  int64_t session;
  struct sw_db_environment environment;
  struct sw_trial_bench *bench;
  struct candidate *candidates;      // [0] is the default
  int64_t count, capacity, tried;
  char best[SW_CONFIG_TEXT];
  double best_ratio, default_us;     // ratio to the default
  int64_t since_gain;
  double begin_s, end_s;             // of this direction
  struct swathe_tuned *tuned;
};

static double now_s(void)
{
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static bool stopped(const struct search *search)
{
  return search->options->stop && *search->options->stop;
}

static void show_progress(const struct search *search, const char *trying)
{
  if (!search->options->progress) return;
  const struct swathe_progress progress = {
    .direction = search->direction,
    .tried = search->tried,
    .total = search->count,
    .elapsed_s = now_s() - search->begin_s,
    .budget_s = search->end_s - search->begin_s,
    .default_us = search->default_us,
    .best_us = search->default_us * search->best_ratio,
    .best = search->best,
    .trying = trying,
  };
  search->options->progress(search->options->arg, &progress);
}

static struct sw_db_row row_of(const struct search *search, const char *config)
{
  return (struct sw_db_row){ .problem = search->problem,
                             .kernel = sw_context_kernel_name(search->direction),
                             .environment = &search->environment,
                             .config = config };
}

// ---- Candidates ----------------------------------------------------------------------------------

static enum swathe_status add_candidate(struct search *search, const char *config)
{
  if (search->count == search->capacity) {
    const int64_t capacity = search->capacity ? 2 * search->capacity : 256;
    struct candidate *grown = realloc(search->candidates, (size_t)capacity * sizeof *grown);
    if (!grown) return sw_fail(SWATHE_NO_MEMORY, "no memory for %lld candidates", (long long)capacity);
    search->candidates = grown;
    search->capacity = capacity;
  }
  char *copy = strdup(config);
  if (!copy) return sw_fail(SWATHE_NO_MEMORY, "no memory for a candidate");
  search->candidates[search->count++] = (struct candidate){ .config = copy };
  return SWATHE_OK;
}

struct listing {
  struct search *search;
  enum swathe_status status;
};

static bool list_candidate(void *arg, const char *config)
{
  struct listing *listing = arg;
  struct search *search = listing->search;
  if (strcmp(config, search->candidates[0].config))
    listing->status = add_candidate(search, config);
  return !listing->status && search->count < MOST_CONFIGS;
}

// The default first, then the space in its order.
static enum swathe_status list_candidates(struct search *search)
{
  const struct sw_gen_request request = {
    .problem = search->problem,
    .kernel = sw_context_kernel_name(search->direction),
    .isa = search->context->isa,
  };
  char config[SW_CONFIG_TEXT];
  struct listing listing = { .search = search };

  pthread_mutex_lock(&search->context->mutex);
  enum swathe_status status = sw_gen_default(search->context->gen, &request, config);
  pthread_mutex_unlock(&search->context->mutex);
  if (!status) status = add_candidate(search, config);
  if (!status)
    status = swathe_configs(search->context, search->problem, search->direction,
                            search->options->exhaustive, list_candidate, NULL, &listing);
  return status ? status : listing.status;
}

// How many "name=value" parts of two configs differ; both are canonical, so parts line up.
static int knobs_apart(const char *a, const char *b)
{
  int apart = 0;
  while (*a && *b) {
    const size_t n = strcspn(a, ","), m = strcspn(b, ",");
    apart += n != m || strncmp(a, b, n);
    a += n + (a[n] == ',');
    b += m + (b[m] == ',');
  }
  return apart;
}

// The untried candidate nearest to the best; NULL when none is left.  Among equals, one in an order that is
// fixed but not that of the space, so that a short search is not stuck in one corner.
static struct candidate *nearest_untried(const struct search *search, int *apart)
{
  struct candidate *nearest = NULL;
  uint64_t nearest_order = 0;

  for (int64_t i = 0; i < search->count; i++) {
    struct candidate *candidate = &search->candidates[i];
    if (candidate->tried) continue;
    const int distance = knobs_apart(candidate->config, search->best);
    const uint64_t order = (uint64_t)i * 0x9e3779b97f4a7c15u;  // 2^64 / golden ratio: spreads indices
    if (nearest && (distance > *apart || (distance == *apart && order > nearest_order))) continue;
    nearest = candidate;
    nearest_order = order;
    *apart = distance;
  }
  return nearest;
}

// ---- What the database already knows -------------------------------------------------------------

static void recall(void *arg, const char *config, const char *verdict, double median_us, double ratio)
{
  struct search *search = arg;
  (void)median_us;
  for (int64_t i = 0; i < search->count; i++) {
    struct candidate *candidate = &search->candidates[i];
    if (strcmp(candidate->config, config)) continue;
    if (!candidate->tried) search->tried++;
    candidate->tried = true;
    if (strcmp(verdict, "ok") || !(ratio > 0) || ratio >= search->best_ratio) return;
    snprintf(search->best, sizeof search->best, "%s", config);
    search->best_ratio = ratio;
    return;
  }
}

struct stored {
  struct swathe_tuned *tuned;
  bool complete;
};

static bool recall_pick(void *arg, const struct sw_db_found *found)
{
  struct stored *stored = arg;
  if (!found->exact || !found->complete) return false;
  stored->complete = true;
  snprintf(stored->tuned->config, sizeof stored->tuned->config, "%s", found->config);
  stored->tuned->ratio = found->ratio;
  return false;
}

// A finished search in the database whose pick is still in the space needs no measuring.
static bool already_tuned(struct search *search)
{
  const char *kernel = sw_context_kernel_name(search->direction);
  const struct sw_gen_request request = {
    .problem = search->problem, .kernel = kernel, .isa = search->context->isa
  };
  struct stored stored = { .tuned = search->tuned };
  char config[SW_CONFIG_TEXT];

  if (search->options->again) return false;
  if (sw_db_find(search->db, search->problem, kernel, &search->environment, recall_pick, &stored))
    return false;
  if (!stored.complete) return false;
  pthread_mutex_lock(&search->context->mutex);
  const bool valid = !sw_gen_check(search->context->gen, &request, search->tuned->config, config);
  pthread_mutex_unlock(&search->context->mutex);
  search->tuned->reused = valid;
  return valid;
}

// ---- Compile -------------------------------------------------------------------------------------

struct building {
  struct candidate *candidate;
  struct sw_gen_source source;
  struct sw_jit_job *job;
  bool failed;
  char words[512];
};

static void start_building(struct search *search, struct building *building)
{
  enum swathe_status status = sw_context_source(search->context, search->problem, search->direction, NULL,
                                                building->candidate->config, &building->source);
  if (!status) {
    const struct sw_jit_request request = {
      .name = sw_context_kernel_name(search->direction),
      .source = building->source.text,
      .flags = building->source.flags,
      .isa = search->context->isa,
    };
    status = sw_jit_job_start(search->context->jit, &request, &building->job);
  }
  building->failed = status != SWATHE_OK;
  if (status) snprintf(building->words, sizeof building->words, "%s", swathe_error());
}

// Waits for the job, watching the stop flag.
static void finish_building(struct search *search, struct building *building)
{
  const double end = now_s() + compile_deadline_s;
  bool done = false;
  char *log = NULL;

  if (!building->job) return;
  while (!done && !stopped(search) && now_s() < end) {
    if (sw_jit_job_poll(building->job, &done)) break;
    if (!done) nanosleep(&(struct timespec){ .tv_nsec = 5000000 }, NULL);
  }
  if (stopped(search)) {
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
static void build(struct search *search, struct building *batch, int count)
{
  const int beside = sw_device_cpu_processors();
  for (int i = 0; i < count + beside; i++) {
    if (i >= beside && i - beside < count) finish_building(search, &batch[i - beside]);
    if (i < count && !stopped(search)) start_building(search, &batch[i]);
  }
}

// ---- Try -----------------------------------------------------------------------------------------

static enum swathe_status put_pick(struct search *search, bool complete)
{
  const struct sw_db_row row = row_of(search, search->best);
  return sw_db_put_pick(search->db, search->session, &row, search->default_us * search->best_ratio,
                        search->default_us, search->best_ratio, complete);
}

static enum swathe_status put_sample(struct search *search, const char *config, const char *verdict,
                                     const char *words, const struct sw_trial_result *result, double ratio)
{
  double runs[SW_TRIAL_RUNS] = { 0 };
  const struct sw_db_row row = row_of(search, config);
  const int32_t count = result ? result->runs : 0;

  if (result) memcpy(runs, result->candidate_us, sizeof runs);
  const struct sw_db_sample sample = {
    .verdict = verdict,
    .words = words,
    .runs_us = count ? result->candidate_us : NULL,
    .default_runs_us = count ? result->incumbent_us : NULL,
    .runs = count,
    .median_us = sw_trial_median(runs, count),
    .ratio = count ? ratio : 0,
  };
  return sw_db_put_sample(search->db, search->session, &row, &sample);
}

static bool wins(const struct sw_trial_result *result)
{
  int32_t faster = 0;
  for (int32_t i = 0; i < result->runs; i++) faster += result->candidate_us[i] < result->incumbent_us[i];
  return sw_trial_ratio(result) < better_ratio && 3 * faster >= 2 * result->runs;
}

static enum swathe_status try_candidate(struct search *search, struct candidate *candidate)
{
  struct sw_trial_result result;
  enum swathe_status status;

  show_progress(search, candidate->config);
  status = sw_trial_run(search->bench, candidate->config, search->best, FIRST_RUNS, search->options->stop,
                        &result);
  if (status) return status;
  candidate->tried = true;
  search->tried++;
  search->tuned->tried++;
  search->since_gain++;
  const double ratio = result.runs ? sw_trial_ratio(&result) * search->best_ratio : 0;
  if (result.verdict == SW_VERDICT_WRONG) search->tuned->rejected++;
  else if (result.verdict) search->tuned->failed++;
  status = put_sample(search, candidate->config, sw_verdict_name(result.verdict), result.words, &result,
                      ratio);
  if (status || result.verdict || !wins(&result)) return status;
  snprintf(search->best, sizeof search->best, "%s", candidate->config);
  search->best_ratio = ratio;
  search->since_gain = 0;
  return put_pick(search, false);
}

static enum swathe_status try_batch(struct search *search, struct building *batch, int count)
{
  enum swathe_status status = SWATHE_OK;

  build(search, batch, count);
  for (int i = 0; i < count && !status; i++) {
    struct building *building = &batch[i];
    if (stopped(search)) status = sw_fail(SWATHE_INTERRUPTED, "stopped; what was measured is kept");
    else if (building->failed) {
      building->candidate->tried = true;
      search->tried++;
      search->tuned->tried++;
      search->tuned->failed++;
      status = put_sample(search, building->candidate->config, "compile", building->words, NULL, 0);
    } else if (now_s() < search->end_s) {
      status = try_candidate(search, building->candidate);
    }
  }
  for (int i = 0; i < count; i++) sw_gen_source_free(&batch[i].source);
  return status;
}

// ---- Search --------------------------------------------------------------------------------------

// The next batch; 0 when the search ends by itself.
static int choose_batch(struct search *search, struct building batch[BATCH])
{
  int count = 0;

  memset(batch, 0, BATCH * sizeof *batch);
  while (count < BATCH) {
    int apart = 0;
    struct candidate *candidate = nearest_untried(search, &apart);
    if (!candidate || (apart > 1 && search->since_gain >= PATIENCE)) break;
    candidate->tried = true;  // so that it is chosen once; set back below
    batch[count++].candidate = candidate;
  }
  for (int i = 0; i < count; i++) batch[i].candidate->tried = false;
  return count;
}

static enum swathe_status walk(struct search *search)
{
  struct building batch[BATCH];
  enum swathe_status status = SWATHE_OK;
  int count;

  while (!status && now_s() < search->end_s && (count = choose_batch(search, batch)) > 0)
    status = try_batch(search, batch, count);
  return status;
}

// The default alone: it must be right, and its time is what every ratio is of.
static enum swathe_status try_default(struct search *search)
{
  struct sw_trial_result result;
  struct candidate *first = &search->candidates[0];
  enum swathe_status status = sw_trial_run(search->bench, first->config, first->config, 5,
                                           search->options->stop, &result);
  if (status) return status;
  if (result.verdict) {
    put_sample(search, first->config, sw_verdict_name(result.verdict), result.words, NULL, 0);
    return sw_fail(SWATHE_WRONG_RESULT, "the default config %s failed its check (%s): %s", first->config,
                   sw_verdict_name(result.verdict), result.words);
  }
  if (!first->tried) search->tried++;
  first->tried = true;
  search->tuned->tried++;
  search->default_us = sw_trial_median(result.candidate_us, result.runs);
  return put_sample(search, first->config, "ok", "", &result, 1);
}

// Best against default once more, with more pairs: the ratio that is told.  A best that does not hold up
// gives way to the default.
static enum swathe_status confirm(struct search *search)
{
  struct sw_trial_result result;
  enum swathe_status status;

  if (!strcmp(search->best, search->candidates[0].config)) return SWATHE_OK;
  show_progress(search, search->best);
  status = sw_trial_run(search->bench, search->best, search->candidates[0].config, LAST_RUNS,
                        search->options->stop, &result);
  if (status) return status;
  search->best_ratio = result.runs ? sw_trial_ratio(&result) : 1;
  if (!result.verdict && search->best_ratio < 1)
    return put_sample(search, search->best, "ok", "", &result, search->best_ratio);
  snprintf(search->best, sizeof search->best, "%s", search->candidates[0].config);
  search->best_ratio = 1;
  return SWATHE_OK;
}

static enum swathe_status tune_direction(struct search *search)
{
  enum swathe_status status = list_candidates(search);
  if (status) return status;

  snprintf(search->best, sizeof search->best, "%s", search->candidates[0].config);
  search->best_ratio = 1;
  show_progress(search, "");
  status = sw_trial_prepare(search->context, search->problem, search->direction,
                            search->candidates[0].config, search->options->trial_s, &search->bench);
  if (!status) status = try_default(search);
  if (!status && !search->options->again) {
    const struct sw_db_row row = row_of(search, search->best);
    status = sw_db_known(search->db, &row, recall, search);
  }
  if (!status) status = put_pick(search, false);
  if (!status) status = walk(search);
  if (!status) status = confirm(search);
  if (!status) status = put_pick(search, true);
  show_progress(search, "");
  snprintf(search->tuned->config, sizeof search->tuned->config, "%s", search->best);
  search->tuned->default_us = search->default_us;
  search->tuned->best_us = search->default_us * search->best_ratio;
  search->tuned->ratio = search->best_ratio;
  return status;
}

static void free_search(struct search *search)
{
  sw_trial_free(search->bench);
  for (int64_t i = 0; i < search->count; i++) free(search->candidates[i].config);
  free(search->candidates);
}

enum swathe_status swathe_tune(struct swathe_context *context, const struct swathe_problem *problem,
                               const struct swathe_tune_options *options, struct swathe_tuned tuned[2])
{
  const bool both = !options->forward && !options->backward;
  const bool wanted[2] = { both || options->forward, both || options->backward };
  const double begin = now_s(), budget = options->budget_s > 0 ? options->budget_s : 60;
  struct sw_db *db = NULL;
  int64_t session = 0;
  enum swathe_status status = swathe_problem_check(problem);

  memset(tuned, 0, 2 * sizeof *tuned);
  if (status) return status;
  if (!*context->database)
    return sw_fail(SWATHE_DATABASE, "there is no place for a tuning database: give one, or set SWATHE_DB");
  status = sw_db_open(context->database, SW_DB_WRITE, &db);
  if (!status) status = sw_db_session_begin(db, "tune", budget, &session);
  for (int d = 0; d < 2 && !status; d++) {
    if (!wanted[d]) continue;
    // forward may use half of what there is, backward all that is left
    const double left = budget - (now_s() - begin);
    struct search search = {
      .context = context,
      .problem = problem,
      .options = options,
      .direction = (enum swathe_direction)d,
      .db = db,
      .session = session,
      .tuned = &tuned[d],
      .begin_s = now_s(),
      .end_s = now_s() + (d == 0 && wanted[1] ? left / 2 : left),
    };
    sw_context_environment(context, &search.environment);
    if (already_tuned(&search)) continue;
    status = tune_direction(&search);
    free_search(&search);
  }
  if (db) sw_db_close(db);
  sw_context_reopen_database(context);
  return status;
}
