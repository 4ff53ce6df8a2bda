// compile.c: the verb `compile`: kernels into the cache, before anyone waits for them.
#include "given.h"
#include "report.h"

static const char *const direction_names[] = { [SWATHE_FORWARD] = "forward",
                                               [SWATHE_BACKWARD] = "backward" };

static json_t *compiled_json(enum swathe_direction direction,
                             const struct swathe_compiled *compiled)
{
  return json_pack("{s:s, s:s, s:b, s:o, s:I}", "kernel", direction_names[direction], "config",
                   compiled->config, "cached", compiled->cached, "compile_s",
                   cli_report_real(compiled->compile_s), "binary_bytes",
                   (json_int_t)compiled->binary_bytes);
}

static void print_compiled(enum swathe_direction direction, const struct swathe_compiled *compiled)
{
  printf("%s\n  config    %s\n", direction_names[direction], compiled->config);
  if (compiled->cached) printf("  compiled  not again: it was in the cache\n");
  else printf("  compiled  in %s\n", cli_report_time(compiled->compile_s * 1e6).text);
  printf("  bytes     %s\n", cli_report_bytes((int64_t)compiled->binary_bytes).text);
}

static enum cli_exit compile(const struct cli_args *args, const struct cli_given *given,
                             bool forward, bool backward)
{
  const bool wanted[] = { [SWATHE_FORWARD] = forward, [SWATHE_BACKWARD] = backward };
  json_t *kernels = json_array();

  for (int i = 0; i < 2; i++) {
    const enum swathe_direction direction = (enum swathe_direction)i;
    struct swathe_compiled compiled = { 0 };
    if (!wanted[i]) continue;
    const enum swathe_status status =
        swathe_compile(given->context, &given->problem, direction, args->value[CLI_ISA],
                       args->value[CLI_CONFIG], &compiled);
    if (status) {
      json_decref(kernels);
      return cli_fail_library(status, "the %s kernel cannot be compiled", direction_names[i]);
    }
    json_array_append_new(kernels, compiled_json(direction, &compiled));
    if (!args->value[CLI_JSON]) print_compiled(direction, &compiled);
  }
  if (args->value[CLI_JSON])
    return cli_report_json(json_pack("{s:s, s:o, s:o}", "verb", "compile", "problem",
                                     cli_report_problem(&given->problem), "kernels", kernels),
                           CLI_OK);
  json_decref(kernels);
  return CLI_OK;
}

static enum cli_exit run(const struct cli_args *args)
{
  struct cli_given given = { 0 };
  enum swathe_direction direction = SWATHE_FORWARD;
  enum cli_exit code = CLI_OK;

  if (args->operands) code = cli_args_direction(args->operand[0], &direction);
  else if (args->value[CLI_CONFIG])
    code =
        cli_fail(CLI_BAD_USE, "--config is a point of one kernel's space: say forward or backward");
  if (!code) code = cli_given_read(args, false, NULL, &given);
  if (!code)
    code = compile(args, &given, !args->operands || direction == SWATHE_FORWARD,
                   !args->operands || direction == SWATHE_BACKWARD);
  cli_given_close(&given);
  return code;
}

const struct cli_verb cli_verb_compile = {
  .name = "compile",
  .operands = "[forward|backward]",
  .most_operands = 1,
  .summary = "Compile kernels into the cache, or find them there.",
  .details = "Both directions unless one is named.",
  .options = CLI_COMMON_OPTIONS | CLI_PROBLEM_OPTIONS | CLI_CONTEXT_OPTIONS | CLI_BIT(CONFIG),
  .examples = { "what a preset's layer needs", "swathe compile --model gpt-oss-20b",
                "one kernel, into a directory of its own",
                "swathe compile forward --model gemma-3-1b --cache ./kernels", NULL },
  .run = run,
};
