// db.c: the verbs `db list`, `db show` and `db best`: what the tuning database knows.
#include "given.h"
#include "report.h"

#include <inttypes.h>
#include <string.h>

enum { MOST_PLACES = 32 };

struct rows {
  bool json;
  int64_t count;
  json_t *array;
  struct cli_table table;
  char problem[1024];             // of the last pick printed
  char kernel[64], first[512];    // of the table under way, and its best config
  char places[MOST_PLACES][512];  // where samples were measured, and with which kernels
  int place_count;
  bool noisy;
};

static json_t *number_or_null(double value)
{
  return value > 0 ? cli_report_real(value) : json_null();
}

// ---- list ---------------------------------------------------------------------------------------

static json_t *pick_json(const struct swathe_pick *pick)
{
  return json_pack("{s:s, s:s, s:s, s:s, s:o, s:o, s:o, s:o, s:I, s:s}", "problem", pick->problem,
                   "kernel", pick->kernel, "environment", pick->environment, "config", pick->config,
                   "best_us", number_or_null(pick->best_us), "default_us",
                   number_or_null(pick->default_us), "ratio", number_or_null(pick->ratio),
                   "limit_share", number_or_null(pick->limit_share), "samples",
                   (json_int_t)pick->samples, "when", pick->when);
}

static void print_problem(const char *text)
{
  struct swathe_problem problem;
  swathe_problem_init(&problem);
  if (!swathe_problem_parse(text, &problem)) {
    cli_report_wrapped(0, 0, cli_report_problem_words(&problem));
    cli_report_wrapped(0, 0, cli_report_group(&problem).text);
  }
  cli_report_wrapped(0, 0, text);
}

// Texts are too long for columns: a block per problem, a few lines per pick.
static void visit_pick(void *arg, const struct swathe_pick *pick)
{
  struct rows *rows = arg;
  enum { COLUMN = 12 };

  rows->count++;
  if (rows->json) {
    json_array_append_new(rows->array, pick_json(pick));
    return;
  }
  if (strcmp(rows->problem, pick->problem)) {
    if (rows->count > 1) putchar('\n');
    print_problem(pick->problem);
    snprintf(rows->problem, sizeof rows->problem, "%s", pick->problem);
  }
  printf("  %-*s %s, %.3f of the default's %s", COLUMN - 3, pick->kernel,
         cli_report_time(pick->best_us).text, pick->ratio, cli_report_time(pick->default_us).text);
  if (pick->limit_share > 0) printf(", %.2f of the machine's peak", pick->limit_share);
  printf("\n%*s", COLUMN, "");
  cli_report_wrapped(COLUMN, COLUMN, pick->config);
  const int at = printf("%*s%" PRId64 " sample%s, %s, on ", COLUMN, "", pick->samples,
                        pick->samples == 1 ? "" : "s", pick->when);
  cli_report_wrapped(at, COLUMN, pick->environment);
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
  return json_pack("{s:s, s:s, s:s, s:s, s:s, s:o, s:o, s:o, s:I, s:b, s:s, s:s}", "problem",
                   sample->problem, "kernel", sample->kernel, "environment", sample->environment,
                   "config", sample->config, "verdict", sample->verdict, "words",
                   cli_report_string(sample->words), "median_us", number_or_null(sample->median_us),
                   "ratio", number_or_null(sample->ratio), "runs", (json_int_t)sample->runs,
                   "noisy", sample->noisy, "when", sample->when, "generator", sample->generator);
}

// Index of the sample's place and kernel texts among those seen; samples of different ones do not
// compare.
static int find_place(struct rows *rows, const struct swathe_sample *sample)
{
  char place[sizeof rows->places[0]];
  int i = 0;

  snprintf(place, sizeof place, "%s, generator %s", sample->environment, sample->generator);
  while (i < rows->place_count && strcmp(rows->places[i], place)) i++;
  if (i == MOST_PLACES) return MOST_PLACES - 1;
  if (i == rows->place_count) strcpy(rows->places[rows->place_count++], place);
  return i;
}

// The parts of `config` that `first` has otherwise, or all of it.
static void find_difference(const char *config, const char *first, char *text, size_t size)
{
  size_t used = 0;

  *text = 0;
  for (const char *at = config; *at && used < size;) {
    const size_t length = strcspn(at, ","), first_length = strcspn(first, ",");
    if (length != first_length || strncmp(at, first, length))
      used +=
          (size_t)snprintf(text + used, size - used, "%s%.*s", used ? "," : "", (int)length, at);
    at += length + (at[length] == ',');
    first += first_length + (first[first_length] == ',');
  }
}

static void end_kernel(struct rows *rows)
{
  if (rows->table.count) cli_report_table(&rows->table);
}

// A table per kernel: its best config in full, then in what the others differ, then those that were
// rejected and why.
static void visit_sample(void *arg, const struct swathe_sample *sample)
{
  static const char *const titles[] = { "", "median us", "of default", "runs", "on", "config" };
  struct rows *rows = arg;
  struct cli_table *table = &rows->table;
  char difference[512];

  rows->count++;
  if (rows->json) {
    json_array_append_new(rows->array, sample_json(sample));
    return;
  }
  const int place = find_place(rows, sample) + 1;
  if (strcmp(rows->kernel, sample->kernel)) {
    end_kernel(rows);
    snprintf(rows->kernel, sizeof rows->kernel, "%s", sample->kernel);
    snprintf(rows->first, sizeof rows->first, "%s", sample->config);
    printf("\n%s\n  best  ", sample->kernel);
    cli_report_wrapped(8, 8, sample->config);
    for (int i = 0; i < 6; i++) cli_report_cell(table, "%s", titles[i]);
  }
  find_difference(sample->config, rows->first, difference, sizeof difference);
  const char *config = *difference ? difference : "as the best";
  if (strcmp(sample->verdict, "ok")) {
    end_kernel(rows);
    const int at = printf("  %s  ", sample->verdict);
    cli_report_wrapped(at, at, config);
    if (*sample->words) printf("%*s", at, "");
    if (*sample->words) cli_report_wrapped(at, at, sample->words);
    return;
  }
  cli_report_cell(table, "%s", sample->noisy ? "~" : "");
  cli_report_cell(table, "%.1f", sample->median_us);
  cli_report_cell(table, sample->ratio > 0 ? "%.3f" : "-", sample->ratio);
  cli_report_cell(table, "%" PRId64, sample->runs);
  cli_report_cell(table, "%d", place);
  cli_report_cell(table, "%s", config);
  rows->noisy |= sample->noisy;
}

static enum cli_exit show_samples(const struct cli_args *args, const struct cli_given *given)
{
  struct rows rows = { .json = args->value[CLI_JSON], .table = { .align = "lrrrrl" } };

  if (rows.json) rows.array = json_array();
  else print_problem(cli_report_problem_text(&given->problem));
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
  end_kernel(&rows);
  if (!rows.count) printf("\nno samples yet: 'swathe tune' with the same options makes them\n");
  if (rows.count) putchar('\n');
  for (int i = 0; i < rows.place_count; i++) {
    const int at = printf("on %d: ", i + 1);
    cli_report_wrapped(at, at, rows.places[i]);
  }
  if (rows.noisy) printf("~: others used the machine meanwhile\n");
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

static const char *const direction_names[] = {
  [SWATHE_FORWARD] = "forward", [SWATHE_BACKWARD] = "backward"
};

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
    if (args->value[CLI_JSON]) {
      json_array_append_new(kernels, json_pack("{s:s, s:s, s:s}", "kernel", direction_names[i],
                                               "config", config, "why", why));
    } else {
      printf("%s\n  config  ", direction_names[i]);
      cli_report_wrapped(10, 10, config);
      printf("  why     ");
      cli_report_wrapped(10, 10, why);
    }
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
