// models.c: the verb `models`: presets and where their numbers come from.
#include "given.h"
#include "report.h"

#include <inttypes.h>
#include <string.h>

struct listing {
  const char *wanted;      // NULL: all
  bool json, found;
  struct cli_table table;
  json_t *models;
};

// As model cards print it: keys counted with the query's own; two-sided ones by their sides.
static struct cli_text window_text(const struct swathe_problem *problem)
{
  struct cli_text text;
  const int64_t left = problem->window_left, right = problem->window_right;

  if (left == SWATHE_UNLIMITED) snprintf(text.text, sizeof text.text, "unlimited");
  else if (right == 0) snprintf(text.text, sizeof text.text, "%" PRId64, left + 1);
  else if (right == SWATHE_UNLIMITED)
    snprintf(text.text, sizeof text.text, "-%" PRId64 ", all", left);
  else snprintf(text.text, sizeof text.text, "-%" PRId64 " to +%" PRId64, left, right);
  return text;
}

static struct cli_text count_text(int32_t count)
{
  struct cli_text text;
  if (count > 0) snprintf(text.text, sizeof text.text, "%" PRId32, count);
  else snprintf(text.text, sizeof text.text, "?");
  return text;
}

static json_t *model_json(const struct swathe_model *model)
{
  return json_pack("{s:s, s:s, s:s, s:s, s:o, s:o, s:o}", "name", model->name, "family",
                   model->family, "source", model->source, "note", model->note, "layers",
                   model->layers ? json_integer(model->layers) : json_null(), "swa_layers",
                   model->swa_layers ? json_integer(model->swa_layers) : json_null(), "problem",
                   cli_report_problem(&model->problem));
}

static void print_one(const struct swathe_model *model)
{
  const struct swathe_problem *p = &model->problem;

  printf("%s (%s)\n", model->name, model->family);
  printf("  heads        %" PRId32 " query, %" PRId32 " key and value\n", p->q_heads, p->kv_heads);
  printf("  head dims    %" PRId32 " query and key, %" PRId32 " value\n", p->head_dim_qk,
         p->head_dim_v);
  printf("  window       %s keys%s\n", window_text(p).text,
         p->window_right ? " around the query's own" : ", the query's own included");
  printf("  dtype        %s\n", swathe_dtype_name(p->dtype));
  printf("  sinks        %s\n", p->sinks ? "one logit per query head" : "none");
  if (p->softcap > 0) printf("  softcap      %g\n", p->softcap);
  else printf("  softcap      off\n");
  if (p->scale != 0) printf("  scale        %g\n", p->scale);
  else printf("  scale        1/sqrt(%" PRId32 ")\n", p->head_dim_qk);
  printf("  SWA layers   %s of %s\n", count_text(model->swa_layers).text,
         count_text(model->layers).text);
  printf("  source       %s\n", model->source);
  if (*model->note) printf("  note         %s\n", model->note);
  // What follows in the canonical text are the options' business: target, layout, ranks, tokens.
  const char *text = cli_report_problem_text(p), *rest = strstr(text, ",target=");
  printf("  the same as --problem %.*s\n", rest ? (int)(rest - text) : (int)strlen(text), text);
}

// As many whole words of the first source as fit into the table.
static int source_length(const char *source)
{
  enum { MOST_LENGTH = 27 };
  int length = (int)strcspn(source, ";");
  while (length > MOST_LENGTH) {
    do length--;
    while (length > 0 && source[length] != ' ');
  }
  return length;
}

static void add_row(struct cli_table *table, const struct swathe_model *model)
{
  const struct swathe_problem *p = &model->problem;

  cli_report_cell(table, "%s", model->name);
  cli_report_cell(table, "%" PRId32 "/%" PRId32, p->q_heads, p->kv_heads);
  if (p->head_dim_qk == p->head_dim_v) cli_report_cell(table, "%" PRId32, p->head_dim_qk);
  else cli_report_cell(table, "%" PRId32 "/%" PRId32, p->head_dim_qk, p->head_dim_v);
  cli_report_cell(table, "%s", window_text(p).text);
  cli_report_cell(table, "%s", swathe_dtype_name(p->dtype));
  cli_report_cell(table, "%s", p->sinks ? "yes" : "-");
  if (p->softcap > 0) cli_report_cell(table, "%g", p->softcap);
  else cli_report_cell(table, "-");
  cli_report_cell(table, "%s/%s", count_text(model->swa_layers).text,
                  count_text(model->layers).text);
  cli_report_cell(table, "%.*s", source_length(model->source), model->source);
}

static void visit(void *arg, const struct swathe_model *model)
{
  struct listing *listing = arg;

  if (listing->wanted && strcmp(listing->wanted, model->name)) return;
  listing->found = true;
  if (listing->json) json_array_append_new(listing->models, model_json(model));
  else if (listing->wanted) print_one(model);
  else add_row(&listing->table, model);
}

static enum cli_exit list(const struct cli_args *args, struct cli_given *given)
{
  static const char *const titles[] = { "model", "heads",   "dim",        "window", "dtype",
                                        "sinks", "cap", "layers", "source" };
  struct listing listing = {
    .wanted = args->operands ? args->operand[0] : NULL,
    .json = args->value[CLI_JSON],
    .table = { .align = "lrrrlrrrl" },
  };
  if (listing.json) listing.models = json_array();
  else if (!listing.wanted)
    for (int i = 0; i < 9; i++) cli_report_cell(&listing.table, "%s", titles[i]);

  const enum swathe_status status = swathe_models(given->context, visit, &listing);
  if (status) {
    json_decref(listing.models);
    cli_report_drop(&listing.table);
    return cli_fail_library(status, "the presets cannot be read");
  }
  if (listing.wanted && !listing.found) {
    struct swathe_problem ignored;
    const enum swathe_status missing =
        swathe_model_problem(given->context, listing.wanted, &ignored);
    json_decref(listing.models);
    (void)cli_fail_library(missing ? missing : SWATHE_NOT_FOUND, "no preset '%s'", listing.wanted);
    return CLI_BAD_USE;
  }
  if (listing.json)
    return cli_report_json(json_pack("{s:s, s:o}", "verb", "models", "models", listing.models),
                           CLI_OK);
  if (!listing.wanted) {
    cli_report_table(&listing.table);
    printf("\nheads: query/key; dim: query and key/value where they differ; window: keys a query "
           "sees, its own\nincluded; cap: softcap; layers: with this window/all; '?': not known.  "
           "'swathe models NAME' shows\none whole, with its note and sources.\n");
  }
  return CLI_OK;
}

static enum cli_exit run(const struct cli_args *args)
{
  struct cli_given given = { 0 };
  enum cli_exit code = cli_given_open(args, 0, &given);
  if (!code) code = list(args, &given);
  cli_given_close(&given);
  return code;
}

const struct cli_verb cli_verb_models = {
  .name = "models",
  .operands = "[NAME]",
  .most_operands = 1,
  .summary = "List the presets: published models with sliding-window layers.",
  .options = CLI_COMMON_OPTIONS,
  .examples = { "all presets", "swathe models", "one, with its note and as text for --problem",
                "swathe models gpt-oss-20b", "the windows by name, for a script",
                "swathe models --json | jq '.models[] | {name, window: .problem.window_left}'",
                NULL },
  .run = run,
};
