// compile_space.c: every config of a kernel's space, compiled by several threads until the budget
// is spent; which of them a tuner would not try, and why.  What was compiled is in the cache with
// what it uses, so a later tune does not compile it again.
#include "compile_space.h"

#include "compiled.h"

#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST_THREADS = 64 };
static const double default_budget_s = 60;

struct candidate {
  enum swathe_direction direction;
  const char *isa;
  char *config;
  enum { UNTRIED, COMPILED, FAILED } state;
  char *words;                  // of a failure
  struct swathe_compiled compiled;
};

struct walk {
  const struct cli_given *given;
  struct candidate *candidates;
  int64_t count, capacity, limit;    // limit: what count may come to in the space that is listed
  bool no_memory;
  enum swathe_direction direction;   // of the space that is being listed
  const char *isa;
  json_t *rules;                // what turned points of the spaces away: { rule, points }
  atomic_llong next;            // to be compiled
  double end_s;
};

// ---- The candidates -----------------------------------------------------------------------------

static bool list_config(void *arg, const char *config)
{
  struct walk *walk = arg;
  if (walk->count == walk->limit) return false;
  if (walk->count == walk->capacity) {
    const int64_t capacity = walk->capacity ? 2 * walk->capacity : 256;
    void *grown = realloc(walk->candidates, (size_t)capacity * sizeof *walk->candidates);
    if (!grown) {
      walk->no_memory = true;
      return false;
    }
    walk->candidates = grown;
    walk->capacity = capacity;
  }
  struct candidate *candidate = &walk->candidates[walk->count];
  *candidate = (struct candidate){ .direction = walk->direction, .isa = walk->isa };
  candidate->config = strdup(config);
  walk->no_memory |= !candidate->config;
  walk->count += candidate->config != NULL;
  return candidate->config != NULL;
}

static void note_rule(void *arg, const char *rule, int64_t points)
{
  struct walk *walk = arg;
  json_array_append_new(walk->rules,
                        json_pack("{s:s, s:s?, s:s, s:I}", "kernel",
                                  cli_compiled_directions[walk->direction], "isa", walk->isa,
                                  "rule", rule, "points", (json_int_t)points));
}

static enum cli_exit list_candidates(struct walk *walk, const bool wanted[2],
                                     const char *const *isas, int32_t isa_count, int64_t most,
                                     bool exhaustive)
{
  for (int32_t i = 0; i < isa_count; i++)
    for (int d = 0; d < 2; d++) {
      if (!wanted[d]) continue;
      walk->direction = (enum swathe_direction)d;
      walk->isa = isas[i];
      walk->limit = most > INT64_MAX - walk->count ? INT64_MAX : walk->count + most;
      const enum swathe_status status =
          swathe_configs(walk->given->context, &walk->given->problem, walk->direction, walk->isa,
                         exhaustive, list_config, note_rule, walk);
      if (status)
        return cli_fail_library(status, "the space of %s cannot be listed",
                                cli_compiled_directions[d]);
      if (walk->no_memory) return cli_fail(CLI_FAILED, "no memory for a space's configs");
    }
  return CLI_OK;
}

static void free_candidates(struct walk *walk)
{
  for (int64_t i = 0; i < walk->count; i++) {
    free(walk->candidates[i].config);
    free(walk->candidates[i].words);
  }
  free(walk->candidates);
}

// ---- Compiling ----------------------------------------------------------------------------------

static double now_s(void)
{
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void *compile_some(void *arg)
{
  struct walk *walk = arg;
  while (now_s() < walk->end_s) {
    const int64_t index = atomic_fetch_add(&walk->next, 1);
    if (index >= walk->count) break;
    struct candidate *candidate = &walk->candidates[index];
    const enum swathe_status status =
        swathe_compile(walk->given->context, &walk->given->problem, candidate->direction,
                       candidate->isa, candidate->config, &candidate->compiled);
    candidate->state = status ? FAILED : COMPILED;
    if (status) candidate->words = strdup(swathe_error());
  }
  return NULL;
}

static void compile_all(struct walk *walk, int32_t threads)
{
  pthread_t others[MOST_THREADS];
  int32_t started = 0;
  while (started < threads - 1 && started < MOST_THREADS &&
         !pthread_create(&others[started], NULL, compile_some, walk))
    started++;
  compile_some(walk);
  while (started > 0) pthread_join(others[--started], NULL);
}

// ---- The report ---------------------------------------------------------------------------------

struct totals {
  int64_t fit, refused, failed, untried;
};

static struct totals count_states(const struct walk *walk)
{
  struct totals totals = { 0 };
  for (int64_t i = 0; i < walk->count; i++) {
    const struct candidate *candidate = &walk->candidates[i];
    if (candidate->state == UNTRIED) totals.untried++;
    else if (candidate->state == FAILED) totals.failed++;
    else if (*candidate->compiled.refused) totals.refused++;
    else totals.fit++;
  }
  return totals;
}

static json_t *candidate_json(const struct candidate *candidate)
{
  if (candidate->state == COMPILED)
    return cli_compiled_json(candidate->direction, &candidate->compiled);
  return json_pack("{s:s, s:s?, s:s, s:s}", "kernel", cli_compiled_directions[candidate->direction],
                   "isa", candidate->isa, "config", candidate->config, "failed",
                   candidate->words ? candidate->words : "");
}

static enum cli_exit report_json(const struct walk *walk, const struct totals *totals,
                                 enum cli_exit code)
{
  json_t *kernels = json_array();
  for (int64_t i = 0; i < walk->count; i++)
    if (walk->candidates[i].state != UNTRIED)
      json_array_append_new(kernels, candidate_json(&walk->candidates[i]));
  return cli_report_json(
      json_pack("{s:s, s:o, s:o, s:I, s:I, s:I, s:I, s:O}", "verb", "compile", "problem",
                cli_report_problem(&walk->given->problem), "kernels", kernels, "fit",
                (json_int_t)totals->fit, "refused", (json_int_t)totals->refused, "failed",
                (json_int_t)totals->failed, "untried", (json_int_t)totals->untried, "rules",
                walk->rules),
      code);
}

static void add_row(struct cli_table *table, const struct candidate *candidate)
{
  const struct swathe_compiled *compiled = &candidate->compiled;
  const struct swathe_kernel_use most = cli_compiled_most(compiled);
  const char *given = candidate->isa ? candidate->isa : "-";
  cli_report_cell(table, "%s", candidate->state == COMPILED ? compiled->isa : given);
  cli_report_cell(table, "%s", cli_compiled_directions[candidate->direction]);
  if (candidate->state == FAILED || !compiled->kernel_count) {
    for (int i = 0; i < 4; i++) cli_report_cell(table, "-");
  } else {
    cli_report_cell(table, "%d", most.registers);
    cli_report_cell(table, "%d", most.spill_bytes);
    cli_report_cell(table, "%d", most.shared_bytes);
    const bool known = compiled->counted_ratio > 0;
    cli_report_cell(table, "%s",
                    known ? cli_report_number(3, compiled->counted_ratio).text : "-");
  }
  if (candidate->state == FAILED || compiled->cached) cli_report_cell(table, "-");
  else cli_report_cell(table, "%s", cli_report_time(compiled->compile_s * 1e6).text);
  if (candidate->state == FAILED) cli_report_cell(table, "does not compile");
  else cli_report_cell(table, "%s", *compiled->refused ? compiled->refused : "fit");
  cli_report_cell(table, "%s", candidate->config);
}

static void report_words(const struct walk *walk, const struct totals *totals)
{
  static const char *const titles[] = { "isa",    "kernel", "registers", "spills", "shared",
                                        "work",   "time",   "verdict",   "config" };
  struct cli_table table = { .align = "llrrrrrll" };
  for (size_t i = 0; i < sizeof titles / sizeof *titles; i++)
    cli_report_cell(&table, "%s", titles[i]);
  for (int64_t i = 0; i < walk->count; i++)
    if (walk->candidates[i].state != UNTRIED) add_row(&table, &walk->candidates[i]);
  cli_report_table(&table);
  printf("\n%" PRId64 " fit, %" PRId64 " refused, %" PRId64 " failed, %" PRId64
         " not compiled within the budget\n",
         totals->fit, totals->refused, totals->failed, totals->untried);
}

// A config that passes its rules and does not compile is a fault of ours, not of the config.
static enum cli_exit judge(const struct walk *walk, const struct totals *totals)
{
  for (int64_t i = 0; totals->failed && i < walk->count; i++) {
    const struct candidate *candidate = &walk->candidates[i];
    if (candidate->state == FAILED)
      return cli_fail(CLI_FAILED, "%" PRId64 " configs do not compile; the first is %s %s\n%s",
                      totals->failed, cli_compiled_directions[candidate->direction],
                      candidate->config, candidate->words ? candidate->words : "");
  }
  return CLI_OK;
}

enum cli_exit cli_compile_space(const struct cli_args *args, const struct cli_given *given,
                                const bool wanted[2], const char *const *isas, int32_t isa_count)
{
  struct walk walk = { .given = given };
  int64_t most = INT64_MAX;
  double budget_s = default_budget_s;
  enum cli_exit code = cli_args_integer(args, CLI_MOST, 1, INT64_MAX, &most);

  if (!code) code = cli_args_real(args, CLI_BUDGET, &budget_s);
  if (!code && !(budget_s > 0)) code = cli_fail(CLI_BAD_USE, "--budget: more than 0 seconds");
  if (code) return code;
  walk.rules = json_array();
  code = list_candidates(&walk, wanted, isas, isa_count, most, args->value[CLI_EXHAUSTIVE] != NULL);
  if (!code) {
    walk.end_s = now_s() + budget_s;
    compile_all(&walk, given->threads ? given->threads : cli_given_processors());
    const struct totals totals = count_states(&walk);
    code = judge(&walk, &totals);
    if (args->value[CLI_JSON]) code = report_json(&walk, &totals, code);
    else report_words(&walk, &totals);
  }
  json_decref(walk.rules);
  free_candidates(&walk);
  return code;
}
