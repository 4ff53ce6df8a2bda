// ledger.c: candidates, samples and picks of a search, between search.c and the database.  See
// ledger.h.
#include "ledger.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct sw_db_row row_of(const struct sw_ledger *ledger, const char *config)
{
  return (struct sw_db_row){ .problem = ledger->request.problem,
                             .kernel = ledger->request.kernel,
                             .environment = ledger->environment,
                             .config = config };
}

// ---- Candidates -------------------------------------------------------------------------------

static enum swathe_status grow(struct sw_ledger *ledger)
{
  const int64_t capacity = ledger->capacity ? 2 * ledger->capacity : 256;
  void *candidates = realloc(ledger->candidates, (size_t)capacity * sizeof *ledger->candidates);
  if (candidates) ledger->candidates = candidates;
  void *counted = realloc(ledger->counted, (size_t)capacity * sizeof *ledger->counted);
  if (counted) ledger->counted = counted;
  if (!candidates || !counted)
    return sw_fail(SWATHE_NO_MEMORY, "no memory for %lld candidates", (long long)capacity);
  ledger->capacity = capacity;
  return SWATHE_OK;
}

enum swathe_status sw_ledger_add(struct sw_ledger *ledger, const char *config)
{
  if (ledger->count && !strcmp(config, ledger->candidates[0].config)) return SWATHE_OK;
  enum swathe_status status = ledger->count == ledger->capacity ? grow(ledger) : SWATHE_OK;
  if (status) return status;
  char *copy = strdup(config);
  if (!copy) return sw_fail(SWATHE_NO_MEMORY, "no memory for a candidate");
  ledger->counted[ledger->count] = false;
  ledger->candidates[ledger->count++] =
      (struct sw_search_candidate){ .config = copy, .verdict = SW_VERDICT_UNTRIED };
  return SWATHE_OK;
}

void sw_ledger_free(struct sw_ledger *ledger)
{
  for (int64_t i = 0; i < ledger->count; i++) free((char *)(uintptr_t)ledger->candidates[i].config);
  free(ledger->candidates);
  free(ledger->counted);
}

static int64_t find(const struct sw_ledger *ledger, const char *config)
{
  for (int64_t i = 0; i < ledger->count; i++)
    if (!strcmp(ledger->candidates[i].config, config)) return i;
  return -1;
}

// ---- What the database already knows ----------------------------------------------------------

enum swathe_status sw_ledger_recall_pick(struct sw_ledger *ledger, double budget_s, bool *done)
{
  const struct sw_db_row row = row_of(ledger, "");
  struct sw_db_held *held = &ledger->held;
  char config[SW_CONFIG_TEXT];
  enum swathe_status status = sw_db_held(ledger->db, &row, held);

  *done = false;
  if (status || !held->found) return status;
  pthread_mutex_lock(&ledger->context->mutex);
  held->found = !sw_gen_check(ledger->context->gen, &ledger->request, held->config, config);
  pthread_mutex_unlock(&ledger->context->mutex);
  *done = held->found && held->complete && held->current && held->budget_s >= budget_s;
  if (!*done) return SWATHE_OK;
  snprintf(ledger->tuned->config, sizeof ledger->tuned->config, "%s", config);
  ledger->tuned->ratio = held->ratio;
  ledger->tuned->limit_share = held->limit_share;
  ledger->tuned->reused = true;
  return SWATHE_OK;
}

static enum sw_verdict verdict_of(const char *name)
{
  int v = SW_VERDICT_OK;
  while (v < SW_VERDICT_UNTRIED && strcmp(sw_verdict_name((enum sw_verdict)v), name)) v++;
  return (enum sw_verdict)v;
}

static void recall(void *arg, const char *config, const char *verdict, double median_us,
                   double ratio)
{
  struct sw_ledger *ledger = arg;
  const int64_t i = find(ledger, config);
  (void)median_us;
  if (i <= 0) return;
  struct sw_search_candidate *candidate = &ledger->candidates[i];
  candidate->verdict = verdict_of(verdict);
  candidate->ratio = candidate->verdict == SW_VERDICT_OK ? ratio : 0;
  if (candidate->verdict == SW_VERDICT_UNTRIED || ledger->counted[i]) return;
  ledger->counted[i] = true;
  ledger->tried++;
}

enum swathe_status sw_ledger_recall(struct sw_ledger *ledger)
{
  const struct sw_db_row row = row_of(ledger, "");
  return sw_db_known(ledger->db, &row, recall, ledger);
}

static bool has_finished_pick(const struct sw_ledger *ledger)
{
  return ledger->held.found && ledger->held.complete;
}

void sw_ledger_start(const struct sw_ledger *ledger, struct sw_search *search)
{
  const int64_t held = has_finished_pick(ledger) ? find(ledger, ledger->held.config) : -1;
  search->candidates = ledger->candidates;
  search->count = ledger->count;
  search->holder = held > 0 ? held : 0;
  search->holder_quiet = held >= 0 && ledger->held.quiet;
}

// ---- Store ------------------------------------------------------------------------------------

static void count_tried(struct sw_ledger *ledger, int64_t candidate, enum sw_verdict verdict)
{
  if (ledger->counted[candidate]) return;
  ledger->counted[candidate] = true;
  ledger->tried++;
  ledger->tuned->tried++;
  ledger->tuned->rejected += verdict == SW_VERDICT_WRONG;
  ledger->tuned->failed += verdict != SW_VERDICT_OK && verdict != SW_VERDICT_WRONG;
}

enum swathe_status sw_ledger_put_failure(struct sw_ledger *ledger, int64_t candidate,
                                         enum sw_verdict verdict, const char *words)
{
  const struct sw_db_row row = row_of(ledger, ledger->candidates[candidate].config);
  const struct sw_db_sample sample = { .verdict = sw_verdict_name(verdict), .words = words };
  count_tried(ledger, candidate, verdict);
  return sw_db_put_sample(ledger->db, ledger->session, &row, &sample);
}

enum swathe_status sw_ledger_note(struct sw_ledger *ledger, const struct sw_search_runs *runs)
{
  const struct sw_db_row row = row_of(ledger, ledger->candidates[runs->candidate].config);
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
  count_tried(ledger, runs->candidate, SW_VERDICT_OK);
  return sw_db_put_sample(ledger->db, ledger->session, &row, &sample);
}

double sw_ledger_limit_share(const struct sw_ledger *ledger, const struct sw_search *search)
{
  const double best_us = search->default_us * search->best_ratio;
  return ledger->limit_us > 0 && best_us > 0 ? ledger->limit_us / best_us : 0;
}

static enum swathe_status put_pick(struct sw_ledger *ledger, const struct sw_search *search,
                                   bool complete)
{
  const struct sw_db_row row = row_of(ledger, ledger->candidates[search->best].config);
  const struct sw_db_pick pick = { .best_us = search->default_us * search->best_ratio,
                                   .default_us = search->default_us,
                                   .ratio = search->best_ratio,
                                   .limit_share = sw_ledger_limit_share(ledger, search),
                                   .complete = complete };
  return sw_db_put_pick(ledger->db, ledger->session, &row, &pick);
}

enum swathe_status sw_ledger_lead(struct sw_ledger *ledger, const struct sw_search *search)
{
  return has_finished_pick(ledger) ? SWATHE_OK : put_pick(ledger, search, false);
}

// A pick that held against noise rests on its older, quiet samples: it stays as it is stored.
static bool keeps_stored_pick(const struct sw_ledger *ledger, const struct sw_search *search)
{
  return has_finished_pick(ledger) && ledger->held.quiet && search->noisy &&
         !strcmp(ledger->held.config, ledger->candidates[search->best].config);
}

// A search that had no time for anything beside the default is none.
static bool is_finished(const struct sw_ledger *ledger)
{
  return ledger->tried > 1 || ledger->count == 1;
}

enum swathe_status sw_ledger_end(struct sw_ledger *ledger, const struct sw_search *search,
                                 enum swathe_status status)
{
  struct swathe_tuned *tuned = ledger->tuned;

  if (!status && !keeps_stored_pick(ledger, search))
    status = is_finished(ledger) ? put_pick(ledger, search, true) : sw_ledger_lead(ledger, search);
  if (!(search->default_us > 0)) return status;
  snprintf(tuned->config, sizeof tuned->config, "%s", ledger->candidates[search->best].config);
  tuned->default_us = search->default_us;
  tuned->best_us = search->default_us * search->best_ratio;
  tuned->ratio = search->best_ratio;
  tuned->limit_share = sw_ledger_limit_share(ledger, search);
  tuned->noisy = search->noisy;
  tuned->good_enough = search->ended_good;
  return status;
}
