// history.c: samples of one kernel in the order they were measured.  See history.h.
#include "history.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const char *const verdict_names[] = {
  [CLI_RIGHT] = "ok",    [CLI_WRONG] = "wrong",     [CLI_COMPILE] = "compile",
  [CLI_CRASH] = "crash", [CLI_TIMEOUT] = "timeout", [CLI_OOM] = "oom",
};

const char *cli_history_verdict_name(enum cli_verdict verdict) { return verdict_names[verdict]; }

static enum cli_exit no_memory(void)
{
  return cli_fail(CLI_FAILED, "out of memory for the samples of a kernel");
}

// ---- Adding -------------------------------------------------------------------------------------

bool cli_history_takes(const struct cli_history *history, const struct swathe_sample *sample)
{
  return !history->problem ||
         (!strcmp(history->problem, sample->problem) && !strcmp(history->kernel, sample->kernel) &&
          !strcmp(history->environment, sample->environment) &&
          !strcmp(history->generator, sample->generator));
}

static bool name_history(struct cli_history *history, const struct swathe_sample *sample)
{
  if (history->problem) return true;
  history->problem = strdup(sample->problem);
  history->kernel = strdup(sample->kernel);
  history->environment = strdup(sample->environment);
  history->generator = strdup(sample->generator);
  return history->problem && history->kernel && history->environment && history->generator;
}

static int ascending(const void *a, const void *b)
{
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

// The middle half of the timings, as shares of their median, times the ratio: a median of pairs.
static bool find_quartiles(const struct swathe_sample *sample, struct cli_history_sample *copy)
{
  copy->low = copy->high = sample->ratio;
  if (sample->runs < 4 || !(sample->median_us > 0)) return true;
  double *sorted = malloc((size_t)sample->runs * sizeof *sorted);
  if (!sorted) return false;
  memcpy(sorted, sample->runs_us, (size_t)sample->runs * sizeof *sorted);
  qsort(sorted, (size_t)sample->runs, sizeof *sorted, ascending);
  const double us_to_ratio = sample->ratio / sample->median_us;
  copy->low = us_to_ratio * sorted[sample->runs / 4];
  copy->high = us_to_ratio * sorted[sample->runs - 1 - sample->runs / 4];
  free(sorted);
  return true;
}

enum cli_exit cli_history_add(struct cli_history *history, const struct swathe_sample *sample)
{
  int verdict = 0;
  while (verdict < CLI_VERDICT_COUNT && strcmp(sample->verdict, verdict_names[verdict])) verdict++;
  if (verdict == CLI_VERDICT_COUNT) return CLI_OK;
  if (verdict == CLI_RIGHT && !(sample->ratio > 0)) return CLI_OK;
  if (!name_history(history, sample)) return no_memory();
  if (history->count == history->capacity) {
    const int64_t capacity = history->capacity ? 2 * history->capacity : 64;
    void *grown = realloc(history->samples, (size_t)capacity * sizeof *history->samples);
    if (!grown) return no_memory();
    history->samples = grown;
    history->capacity = capacity;
  }
  struct cli_history_sample *copy = &history->samples[history->count];
  *copy = (struct cli_history_sample){
    .config = strdup(sample->config),
    .words = strdup(sample->words),
    .verdict = (enum cli_verdict)verdict,
    .ratio = verdict == CLI_RIGHT ? sample->ratio : 0,
    .median_us = sample->median_us,
    .runs = sample->runs,
    .noisy = sample->noisy,
  };
  history->count++;
  history->verdicts[verdict]++;
  strncpy(copy->when, sample->when, sizeof copy->when - 1);
  if (!copy->config || !copy->words || !find_quartiles(sample, copy)) return no_memory();
  return CLI_OK;
}

// ---- Settling -----------------------------------------------------------------------------------

static int by_config(const void *a, const void *b)
{
  const struct cli_history_sample *x = *(struct cli_history_sample *const *)a,
                                  *y = *(struct cli_history_sample *const *)b;
  const int order = strcmp(x->config, y->config);
  return order ? order : (x > y) - (x < y);
}

// Numbers the different configs; returns how many there are, -1 without memory.
static int64_t number_rivals(struct cli_history *history)
{
  struct cli_history_sample **sorted = malloc((size_t)history->count * sizeof(void *));
  int64_t rival = -1;

  if (!sorted) return -1;
  for (int64_t i = 0; i < history->count; i++) sorted[i] = &history->samples[i];
  qsort(sorted, (size_t)history->count, sizeof *sorted, by_config);
  for (int64_t i = 0; i < history->count; i++) {
    if (!i || strcmp(sorted[i]->config, sorted[i - 1]->config)) rival++;
    sorted[i]->rival = rival;
  }
  free(sorted);
  return rival + 1;
}

// A rival's newest sample; -1: none yet, or it was not right.
static void walk_in_time(struct cli_history *history, int64_t *newest, int64_t rivals)
{
  int64_t best = -1;  // the rival that leads

  for (int64_t i = 0; i < rivals; i++) newest[i] = -1;
  for (int64_t i = 0; i < history->count; i++) {
    struct cli_history_sample *sample = &history->samples[i];
    const double before = best < 0 ? INFINITY : history->samples[newest[best]].ratio;
    newest[sample->rival] = sample->verdict == CLI_RIGHT ? i : -1;
    if (sample->verdict == CLI_RIGHT && sample->ratio < before) {
      best = sample->rival;
    } else if (sample->rival == best) {  // the leader did worse this time
      best = -1;
      for (int64_t r = 0; r < rivals; r++)
        if (newest[r] >= 0 &&
            (best < 0 || history->samples[newest[r]].ratio < history->samples[newest[best]].ratio))
          best = r;
    }
    sample->best = best < 0 ? 0 : history->samples[newest[best]].ratio;
  }
}

static int by_ratio(const void *a, const void *b, void *arg)
{
  const struct cli_history_sample *samples = arg;
  const int64_t i = *(const int64_t *)a, j = *(const int64_t *)b;
  const double x = samples[i].ratio, y = samples[j].ratio;
  return x != y ? (x > y) - (x < y) : (i > j) - (i < j);
}

enum cli_exit cli_history_settle(struct cli_history *history)
{
  const int64_t rivals = number_rivals(history);
  int64_t *newest = rivals < 0 ? NULL : malloc((size_t)rivals * sizeof *newest);

  if (!newest) return no_memory();
  walk_in_time(history, newest, rivals);
  history->ranking = newest;
  history->ranked = 0;
  for (int64_t r = 0; r < rivals; r++)
    if (newest[r] >= 0) newest[history->ranked++] = newest[r];
  qsort_r(newest, (size_t)history->ranked, sizeof *newest, by_ratio, history->samples);
  return CLI_OK;
}

// The default is what has a ratio of 1 to itself; else any sample tells it.
double cli_history_default_us(const struct cli_history *history)
{
  double us = 0;
  for (int64_t i = 0; i < history->count; i++) {
    const struct cli_history_sample *sample = &history->samples[i];
    if (sample->verdict != CLI_RIGHT) continue;
    if (sample->ratio == 1) us = sample->median_us;
    else if (!(us > 0)) us = sample->median_us / sample->ratio;
  }
  return us;
}

void cli_history_clear(struct cli_history *history)
{
  for (int64_t i = 0; i < history->count; i++) {
    free(history->samples[i].config);
    free(history->samples[i].words);
  }
  free(history->samples);
  free(history->ranking);
  free(history->problem);
  free(history->kernel);
  free(history->environment);
  free(history->generator);
  *history = (struct cli_history){ 0 };
}
