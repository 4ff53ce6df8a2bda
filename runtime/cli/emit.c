// emit.c: the verb `emit`: the source of one kernel, as the compiler gets it.
#include "given.h"
#include "report.h"

#include <string.h>

static enum cli_exit emit(const struct cli_args *args, const struct cli_given *given,
                          enum swathe_direction direction)
{
  const char *output = args->value[CLI_OUTPUT];
  char *source = NULL;
  enum cli_exit code = CLI_OK;
  const enum swathe_status status =
      swathe_emit(given->context, &given->problem, direction,
                  args->value[given->problem.target == SWATHE_CUDA ? CLI_ARCH : CLI_ISA],
                  args->value[CLI_CONFIG], &source);
  if (status) return cli_fail_library(status, "the %s kernel cannot be emitted", args->operand[0]);

  if (output) code = cli_report_file(output, source, strlen(source));
  if (!code && args->value[CLI_JSON])
    code =
        cli_report_json(json_pack("{s:s, s:s, s:o, s:s?, s:s?}", "verb", "emit", "kernel",
                                  args->operand[0], "problem", cli_report_problem(&given->problem),
                                  "output", output, "source", output ? NULL : source),
                        CLI_OK);
  else if (!code && !output)
    fputs(source, stdout);
  swathe_free(source);
  return code;
}

static enum cli_exit run(const struct cli_args *args)
{
  struct cli_given given = { 0 };
  enum swathe_direction direction;
  enum cli_exit code = cli_args_direction(args->operand[0], &direction);
  if (!code) code = cli_given_read(args, false, NULL, &given);
  if (!code) code = emit(args, &given, direction);
  cli_given_close(&given);
  return code;
}

const struct cli_verb cli_verb_emit = {
  .name = "emit",
  .operands = "forward|backward",
  .least_operands = 1,
  .most_operands = 1,
  .summary = "Print the source of one kernel, as the compiler gets it.",
  .details = "The banner holds the command that makes the same source again.",
  .options = CLI_COMMON_OPTIONS | CLI_PROBLEM_OPTIONS | CLI_CONTEXT_OPTIONS | CLI_BIT(CONFIG) |
             CLI_BIT(OUTPUT),
  .examples = { "the forward kernel of a preset", "swathe emit forward --model gpt-oss-20b",
                "of any shape, for another instruction set, to a file",
                "swathe emit backward --problem q_heads=8,kv_heads=2 --window 256 --isa avx2 "
                "--output band.c",
                NULL },
  .run = run,
};
