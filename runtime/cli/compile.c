// compile.c: the verb `compile`: kernels into the cache before anyone waits for them, and what they
// use of the machine they are made for.
#include "compile_space.h"
#include "compiled.h"

#include <string.h>

enum { MOST_ISAS = 16 };

// The isas of --arch or --isa; NULL stands for the context's own.
struct isas {
  char text[MOST_ISAS * 32];
  const char *names[MOST_ISAS];
  int32_t count;
};

static enum cli_exit read_isas(const struct cli_args *args, const struct cli_given *given,
                               struct isas *isas)
{
  const bool cuda = given->problem.target == SWATHE_CUDA;
  const enum cli_option option = cuda ? CLI_ARCH : CLI_ISA, other = cuda ? CLI_ISA : CLI_ARCH;
  const char *value = args->value[option];

  *isas = (struct isas){ .count = 1 };
  if (args->value[other])
    return cli_fail(CLI_BAD_USE, "%s says nothing of the %s target; there it is %s",
                    cli_args_name(other), swathe_target_name(given->problem.target),
                    cli_args_name(option));
  if (!value) return CLI_OK;
  if (strlen(value) >= sizeof isas->text)
    return cli_fail(CLI_BAD_USE, "%s: too long", cli_args_name(option));
  strcpy(isas->text, value);
  isas->count = 0;
  for (char *rest = isas->text, *name; (name = strsep(&rest, ",")) != NULL;) {
    if (!*name)
      return cli_fail(CLI_BAD_USE, "%s %s: a name is empty", cli_args_name(option), value);
    if (isas->count == MOST_ISAS)
      return cli_fail(CLI_BAD_USE, "%s: at most %d names", cli_args_name(option), MOST_ISAS);
    isas->names[isas->count++] = name;
  }
  return CLI_OK;
}

static enum cli_exit compile_one(const struct cli_args *args, const struct cli_given *given,
                                 enum swathe_direction direction, const char *isa, json_t *kernels)
{
  struct swathe_compiled compiled = { 0 };
  const enum swathe_status status =
      swathe_compile(given->context, &given->problem, direction, isa, args->value[CLI_CONFIG],
                     &compiled);
  if (status)
    return cli_fail_library(status, "the %s kernel cannot be compiled%s%s",
                            cli_compiled_directions[direction], isa ? " for " : "", isa ? isa : "");
  json_array_append_new(kernels, cli_compiled_json(direction, &compiled));
  if (!args->value[CLI_JSON]) cli_compiled_print(direction, &compiled);
  return CLI_OK;
}

static enum cli_exit compile(const struct cli_args *args, const struct cli_given *given,
                             const struct isas *isas, const bool wanted[2])
{
  json_t *kernels = json_array();
  enum cli_exit code = CLI_OK;

  for (int32_t i = 0; i < isas->count; i++)
    for (int d = 0; d < 2 && !code; d++)
      if (wanted[d])
        code = compile_one(args, given, (enum swathe_direction)d, isas->names[i], kernels);
  if (!code && args->value[CLI_JSON])
    return cli_report_json(json_pack("{s:s, s:o, s:o}", "verb", "compile", "problem",
                                     cli_report_problem(&given->problem), "kernels", kernels),
                           CLI_OK);
  json_decref(kernels);
  return code;
}

static enum cli_exit check_space(const struct cli_args *args)
{
  static const enum cli_option only[] = { CLI_MOST, CLI_BUDGET, CLI_EXHAUSTIVE };
  enum cli_exit code = cli_args_exclude(args, CLI_SPACE, CLI_CONFIG, "one is a point of the other");
  for (size_t i = 0; i < sizeof only / sizeof *only && !code; i++)
    if (args->value[only[i]] && !args->value[CLI_SPACE])
      code = cli_fail(CLI_BAD_USE, "%s is for --space", cli_args_name(only[i]));
  return code;
}

static enum cli_exit run(const struct cli_args *args)
{
  struct cli_given given = { 0 };
  struct isas isas;
  enum swathe_direction direction = SWATHE_FORWARD;
  enum cli_exit code = check_space(args);

  if (!code && args->operands) code = cli_args_direction(args->operand[0], &direction);
  else if (!code && args->value[CLI_CONFIG])
    code =
        cli_fail(CLI_BAD_USE, "--config is a point of one kernel's space: say forward or backward");
  if (!code) code = cli_given_read(args, false, NULL, &given);
  if (!code) code = read_isas(args, &given, &isas);
  const bool wanted[2] = { [SWATHE_FORWARD] = !args->operands || direction == SWATHE_FORWARD,
                           [SWATHE_BACKWARD] = !args->operands || direction == SWATHE_BACKWARD };
  if (!code && args->value[CLI_SPACE])
    code = cli_compile_space(args, &given, wanted, isas.names, isas.count);
  else if (!code)
    code = compile(args, &given, &isas, wanted);
  cli_given_close(&given);
  return code;
}

const struct cli_verb cli_verb_compile = {
  .name = "compile",
  .operands = "[forward|backward]",
  .most_operands = 1,
  .summary = "Compile kernels into the cache, or find them there, and say what they use.",
  .details = "Both directions unless one is named.  CUDA kernels need NVRTC but neither a driver "
             "nor a GPU; --arch may name several architectures, separated by commas.  --space "
             "compiles every config of the space, --threads at a time: those that spill registers "
             "or are over a limit are refused by name, as tuning would.",
  .options = CLI_COMMON_OPTIONS | CLI_PROBLEM_OPTIONS | CLI_CONTEXT_OPTIONS | CLI_BIT(CONFIG) |
             CLI_BIT(SPACE) | CLI_BIT(BUDGET) | CLI_BIT(MOST) | CLI_BIT(EXHAUSTIVE),
  .examples = { "what a preset's layer needs", "swathe compile --model gpt-oss-20b",
                "one kernel, into a directory of its own",
                "swathe compile forward --model gemma-3-1b --cache ./kernels",
                "registers, spills and shared memory on two GPUs",
                "swathe compile --model gpt-oss-20b --target cuda --arch sm_80,sm_90a", NULL },
  .run = run,
};
