// doctor.c: the verb `doctor`: what this machine has, what is broken and what would mend it.
#include "given.h"
#include "report.h"

#include <inttypes.h>

static const char *const health_names[] = { [SWATHE_HEALTHY] = "ok", [SWATHE_ABSENT] = "absent",
                                            [SWATHE_BROKEN] = "broken" };

struct examination {
  bool json;
  int64_t broken;
  struct cli_table table;
  json_t *findings;
};

static void add_row(struct cli_table *table, const char *what, const char *state,
                    const char *prefix, const char *found)
{
  cli_report_cell(table, "%s", what);
  cli_report_cell(table, "%s", state);
  cli_report_cell(table, "%s%s", prefix, found);
}

// The fix has a line of its own: both texts can be long.
static void visit(void *arg, const struct swathe_finding *finding)
{
  struct examination *examination = arg;

  examination->broken += finding->health == SWATHE_BROKEN;
  if (examination->json) {
    json_array_append_new(examination->findings,
                          json_pack("{s:s, s:s, s:s, s:s}", "what", finding->what, "state",
                                    health_names[finding->health], "found", finding->found, "fix",
                                    finding->fix));
    return;
  }
  add_row(&examination->table, finding->what, health_names[finding->health], "", finding->found);
  if (*finding->fix) add_row(&examination->table, "", "", "fix: ", finding->fix);
}

static enum cli_exit examine(const struct cli_args *args, const struct cli_given *given)
{
  struct examination examination = { .json = args->value[CLI_JSON], .table = { .align = "lll" } };
  enum cli_exit code = CLI_OK;

  if (examination.json) examination.findings = json_array();
  else add_row(&examination.table, "what", "state", "", "found");
  const enum swathe_status status = swathe_doctor(given->context, visit, &examination);
  if (status) {
    json_decref(examination.findings);
    cli_report_drop(&examination.table);
    return cli_fail_library(status, "the examination ended early");
  }
  if (examination.broken)
    code = cli_fail(CLI_FAILED, "%" PRId64 " broken, see above", examination.broken);
  if (examination.json)
    return cli_report_json(json_pack("{s:s, s:s, s:I, s:o}", "verb", "doctor", "version",
                                     SWATHE_VERSION, "broken", (json_int_t)examination.broken,
                                     "findings", examination.findings),
                           code);
  cli_report_table(&examination.table);
  if (!code) printf("\nNothing is broken.  What is absent is optional.\n");
  return code;
}

static enum cli_exit run(const struct cli_args *args)
{
  struct cli_given given = { 0 };
  enum cli_exit code = cli_given_open(args, 0, &given);
  if (!code) code = examine(args, &given);
  cli_given_close(&given);
  return code;
}

const struct cli_verb cli_verb_doctor = {
  .name = "doctor",
  .operands = "",
  .summary = "Look at the compiler, the cache and the database; say what is broken.",
  .options = CLI_COMMON_OPTIONS | CLI_CONTEXT_OPTIONS,
  .examples = { "this machine", "swathe doctor", "a database that someone passed on",
                "swathe doctor --database cluster.db", NULL },
  .run = run,
};
