// check_report.c: what a check found, as a table and as JSON.
#include "check_report.h"

#include <inttypes.h>

// "token 17, head 3, dim 5".
static struct cli_text place_text(const struct cli_check *check, enum cli_array array)
{
  const struct cli_check_error *error = &check->errors[array];
  const int64_t tokens = check->arrays->tokens, dims = check->arrays->dims[array];
  struct cli_text text = { "" };
  int used = 0;

  if (check->arrays->batch > 1 && error->row >= 0)
    used = snprintf(text.text, sizeof text.text, "batch %" PRId64 ", ", error->row / tokens);
  if (error->row >= 0)
    used += snprintf(text.text + used, sizeof text.text - (size_t)used, "token %" PRId64 ", ",
                     error->row % tokens);
  used += snprintf(text.text + used, sizeof text.text - (size_t)used, "head %" PRId64,
                   error->element / dims);
  if (dims > 1)
    snprintf(text.text + used, sizeof text.text - (size_t)used, ", dim %" PRId64,
             error->element % dims);
  return text;
}

void cli_check_report_print(const struct cli_check *check)
{
  static const char *const titles[] = { "  array", "largest error", "limit", "", "got", "reference",
                                        "at" };
  struct cli_table table = { .align = "lrrlrrl" };

  printf("Check: %" PRId64 " of %" PRId64 " tokens against the reference (double), errors over "
         "max(1, |reference|)\n", check->tokens_checked, check->tokens_held);
  for (int i = 0; i < 7; i++) cli_report_cell(&table, "%s", titles[i]);
  for (int i = CLI_ARRAY_OUT; i < CLI_ARRAY_COUNT; i++) {
    const struct cli_check_error *error = &check->errors[i];
    if (!error->elements) continue;
    cli_report_cell(&table, "  %s", cli_arrays_name((enum cli_array)i));
    cli_report_cell(&table, "%.2e", error->error);
    cli_report_cell(&table, "%.0e", error->limit);
    cli_report_cell(&table, "%s", error->error <= error->limit ? "ok" : "TOO LARGE");
    cli_report_cell(&table, "%.6g", error->got);
    cli_report_cell(&table, "%.6g", error->wanted);
    cli_report_cell(&table, "%s", place_text(check, (enum cli_array)i).text);
  }
  cli_report_table(&table);
  if (check->given->problem.dtype != SWATHE_F32 && check->arrays->backward)
    printf("  gradients are compared with those of the run's own out, as backward was given it\n");
  if (check->own_lse)
    printf("  lse and sum(out * dout) of the queries around sampled keys are the run's own: the "
           "window is\n  too wide to work them out by the reference\n");
  if (check->dsink_left)
    printf("  dsink was not checked: it sums over all queries, which takes too long\n");
}

json_t *cli_check_report_json(const struct cli_check *check)
{
  json_t *errors = json_object();

  for (int i = CLI_ARRAY_OUT; i < CLI_ARRAY_COUNT; i++) {
    const struct cli_check_error *error = &check->errors[i];
    if (!error->elements) continue;
    json_object_set_new(
        errors, cli_arrays_name((enum cli_array)i),
        json_pack("{s:o, s:o, s:b, s:I, s:o, s:o, s:s}", "error", cli_report_real(error->error),
                  "limit", cli_report_real(error->limit), "ok", error->error <= error->limit,
                  "elements", (json_int_t)error->elements, "got", cli_report_real(error->got),
                  "reference", cli_report_real(error->wanted), "at",
                  place_text(check, (enum cli_array)i).text));
  }
  return json_pack("{s:b, s:I, s:I, s:s, s:b, s:o}", "passed", check->passed, "tokens_checked",
                   (json_int_t)check->tokens_checked, "tokens_held", (json_int_t)check->tokens_held,
                   "lse_of_readers", check->own_lse ? "run" : "reference", "dsink_checked",
                   check->errors[CLI_ARRAY_DSINK].elements > 0, "arrays", errors);
}
