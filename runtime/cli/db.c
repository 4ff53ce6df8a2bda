// db.c: the verbs `db list`, `db show` and `db best`: what the tuning database knows.
#include "given.h"
#include "report.h"

#include <inttypes.h>
#include <string.h>

struct rows {
  bool json;
  int64_t count;
  json_t *array;
  struct cli_table table;
  char problem[1024];  // of the last pick printed
};

static json_t *number_or_null(double value)
{
  return value > 0 ? cli_report_real(value) : json_null();
}

// ---- list ---------------------------------------------------------------------------------------

static json_t *pick_json(const struct swathe_pick *pick)
{
  return json_pack("{s:s, s:s, s:s, s:s, s:o, s:o, s:o, s:I, s:s}", "problem", pick->problem,
                   "kernel", pick->kernel, "environment", pick->environment, "config", pick->config,
                   "best_us", number_or_null(pick->best_us), "default_us",
                   number_or_null(pick->default_us), "ratio", number_or_null(pick->ratio),
                   "samples", (json_int_t)pick->samples, "when", pick->when);
}

// Texts are too long for columns: a block per problem, a few lines per pick.
static void visit_pick(void *arg, const struct swathe_pick *pick)
{
  struct rows *rows = arg;

  rows->count++;
  if (rows->json) {
    json_array_append_new(rows->array, pick_json(pick));
    return;
  }
  if (strcmp(rows->problem, pick->problem)) {
    printf("%s%s\n", rows->count > 1 ? "\n" : "", pick->problem);
    snprintf(rows->problem, sizeof rows->problem, "%s", pick->problem);
  }
  printf("  %-9s %s\n", pick->kernel, pick->config);
  printf("            %s, the default %s: %.3f of it; %" PRId64 " samples; %s\n",
         cli_report_time(pick->best_us).text, cli_report_time(pick->default_us).text, pick->ratio,
         pick->samples, pick->when);
  printf("            on %s\n", pick->environment);
}

static enum cli_exit list(const struct cli_args *args)
{
  struct cli_given given = { 0 };
  struct rows rows = { .json = args->value[CLI_JSON] };
  enum cli_exit code = cli_given_open(args, 0, &given);

  if (!code) {
    if (rows.json) rows.array = json_array();
    const enum swathe_status status = swathe_db_list(given.context, visit_pick, &rows);
    if (status) {
      json_decref(rows.array);
      code = cli_fail_library(status, "the picks cannot be read");
    } else if (rows.json) {
      code =
          cli_report_json(json_pack("{s:s, s:o}", "verb", "db list", "picks", rows.array), CLI_OK);
    } else if (!rows.count) {
      printf("no picks yet: 'swathe tune' makes them\n");
    }
  }
  cli_given_close(&given);
  return code;
}

const struct cli_verb cli_verb_db_list = {
  .name = "db list",
  .operands = "",
  .summary = "List every pick: the fastest config of each problem and machine.",
  .options = CLI_COMMON_OPTIONS | CLI_STORE_OPTIONS,
  .examples = { "of the default database", "swathe db list", "of a file, for a script",
                "swathe db list --database cluster.db --json | jq '.picks[].config'", NULL },
  .run = list,
};

// ---- show ---------------------------------------------------------------------------------------

static json_t *sample_json(const struct swathe_sample *sample)
{
  return json_pack("{s:s, s:s, s:s, s:s, s:s, s:s, s:o, s:o, s:I, s:s}", "problem", sample->problem,
                   "kernel", sample->kernel, "environment", sample->environment, "config",
                   sample->config, "verdict", sample->verdict, "words", sample->words, "median_us",
                   number_or_null(sample->median_us), "ratio", number_or_null(sample->ratio),
                   "runs", (json_int_t)sample->runs, "when", sample->when);
}

static void visit_sample(void *arg, const struct swathe_sample *sample)
{
  struct rows *rows = arg;

  rows->count++;
  if (rows->json) {
    json_array_append_new(rows->array, sample_json(sample));
    return;
  }
  struct cli_table *table = &rows->table;
  cli_report_cell(table, "%s", sample->kernel);
  cli_report_cell(table, "%s", sample->verdict);
  if (sample->median_us > 0) cli_report_cell(table, "%.1f", sample->median_us);
  else cli_report_cell(table, "-");
  if (sample->ratio > 0) cli_report_cell(table, "%.3f", sample->ratio);
  else cli_report_cell(table, "-");
  cli_report_cell(table, "%" PRId64, sample->runs);
  cli_report_cell(table, "%s%s%s", sample->config, *sample->words ? "  " : "", sample->words);
}

static enum cli_exit show_samples(const struct cli_args *args, const struct cli_given *given)
{
  static const char *const titles[] = { "kernel", "verdict", "median us", "of default", "runs",
                                        "config" };
  struct rows rows = { .json = args->value[CLI_JSON], .table = { .align = "llrrrl" } };

  if (rows.json) rows.array = json_array();
  for (int i = 0; !rows.json && i < 6; i++) cli_report_cell(&rows.table, "%s", titles[i]);
  const enum swathe_status status =
      swathe_db_show(given->context, &given->problem, visit_sample, &rows);
  if (status) {
    json_decref(rows.array);
    cli_report_drop(&rows.table);
    return cli_fail_library(status, "the samples cannot be read");
  }
  if (rows.json)
    return cli_report_json(json_pack("{s:s, s:o, s:o}", "verb", "db show", "problem",
                                     cli_report_problem(&given->problem), "samples", rows.array),
                           CLI_OK);
  printf("%s\n", cli_report_problem_words(&given->problem));
  if (rows.count) {
    putchar('\n');
    cli_report_table(&rows.table);
  } else {
    cli_report_drop(&rows.table);
    printf("no samples yet: 'swathe tune' with the same options makes them\n");
  }
  return CLI_OK;
}

static enum cli_exit show(const struct cli_args *args)
{
  struct cli_given given = { 0 };
  enum cli_exit code = cli_given_read(args, false, NULL, &given);
  if (!code) code = show_samples(args, &given);
  cli_given_close(&given);
  return code;
}

const struct cli_verb cli_verb_db_show = {
  .name = "db show",
  .operands = "",
  .summary = "Show every sample of one problem, best first.",
  .options = CLI_COMMON_OPTIONS | CLI_PROBLEM_OPTIONS | CLI_CONTEXT_OPTIONS,
  .examples = { "what tuning measured for a preset",
                "swathe db show --model gpt-oss-20b --tokens 32768 --ranks 8", "what was rejected",
                "swathe db show --model gpt-oss-20b --json | "
                "jq '.samples[] | select(.verdict != \"ok\")'",
                NULL },
  .run = show,
};

// ---- best ---------------------------------------------------------------------------------------

static const char *const direction_names[] = { [SWATHE_FORWARD] = "forward",
                                               [SWATHE_BACKWARD] = "backward" };

static enum cli_exit best_of(const struct cli_args *args, const struct cli_given *given,
                             bool forward, bool backward)
{
  const bool wanted[] = { [SWATHE_FORWARD] = forward, [SWATHE_BACKWARD] = backward };
  json_t *kernels = json_array();

  for (int i = 0; i < 2; i++) {
    char config[512] = "", why[1024] = "";
    if (!wanted[i]) continue;
    const enum swathe_status status =
        swathe_db_best(given->context, &given->problem, (enum swathe_direction)i, config,
                       sizeof config, why, sizeof why);
    if (status) {
      json_decref(kernels);
      return cli_fail_library(status, "no config for the %s kernel", direction_names[i]);
    }
    if (args->value[CLI_JSON])
      json_array_append_new(kernels, json_pack("{s:s, s:s, s:s}", "kernel", direction_names[i],
                                               "config", config, "why", why));
    else
      printf("%s\n  config  %s\n  why     %s\n", direction_names[i], config, why);
  }
  if (args->value[CLI_JSON])
    return cli_report_json(json_pack("{s:s, s:o, s:o}", "verb", "db best", "problem",
                                     cli_report_problem(&given->problem), "kernels", kernels),
                           CLI_OK);
  json_decref(kernels);
  return CLI_OK;
}

static enum cli_exit best(const struct cli_args *args)
{
  struct cli_given given = { 0 };
  enum swathe_direction direction = SWATHE_FORWARD;
  enum cli_exit code = args->operands ? cli_args_direction(args->operand[0], &direction) : CLI_OK;

  if (!code) code = cli_given_read(args, false, NULL, &given);
  if (!code)
    code = best_of(args, &given, !args->operands || direction == SWATHE_FORWARD,
                   !args->operands || direction == SWATHE_BACKWARD);
  cli_given_close(&given);
  return code;
}

const struct cli_verb cli_verb_db_best = {
  .name = "db best",
  .operands = "[forward|backward]",
  .most_operands = 1,
  .summary = "Show which config a layer of one problem would use, and why.",
  .options = CLI_COMMON_OPTIONS | CLI_PROBLEM_OPTIONS | CLI_CONTEXT_OPTIONS,
  .examples = { "both kernels of a preset",
                "swathe db best --model gpt-oss-20b --tokens 32768 --ranks 8",
                "one kernel, from a file",
                "swathe db best forward --window 4096 --database cluster.db", NULL },
  .run = best,
};
