// compiled.c: what came of a compilation, in words and in JSON.
#include "compiled.h"

const char *const cli_compiled_directions[2] = { [SWATHE_FORWARD] = "forward",
                                                 [SWATHE_BACKWARD] = "backward" };

static json_t *use_json(const struct swathe_kernel_use *use)
{
  return json_pack("{s:s, s:i, s:i, s:i, s:i, s:i, s:i}", "kernel", use->kernel, "threads",
                   use->threads, "registers", use->registers, "spill_bytes", use->spill_bytes,
                   "stack_bytes", use->stack_bytes, "shared_bytes", use->shared_bytes, "barriers",
                   use->barriers);
}

json_t *cli_compiled_json(enum swathe_direction direction, const struct swathe_compiled *compiled)
{
  json_t *json = json_pack("{s:s, s:s, s:s, s:b, s:o, s:I}", "kernel",
                           cli_compiled_directions[direction], "isa", compiled->isa, "config",
                           compiled->config, "cached", compiled->cached, "compile_s",
                           cli_report_real(compiled->compile_s), "binary_bytes",
                           (json_int_t)compiled->binary_bytes);
  if (!compiled->kernel_count) return json;
  json_t *uses = json_array();
  for (int32_t i = 0; i < compiled->kernel_count; i++)
    json_array_append_new(uses, use_json(&compiled->kernels[i]));
  json_object_set_new(json, "uses", uses);
  json_object_set_new(json, "counted_ratio",
                      compiled->counted_ratio > 0 ? cli_report_real(compiled->counted_ratio)
                                                  : json_null());
  json_object_set_new(json, "refused",
                      *compiled->refused ? json_string(compiled->refused) : json_null());
  return json;
}

static void print_uses(const struct swathe_compiled *compiled)
{
  struct cli_table table = { .align = "llrrrrrr" };
  static const char *const titles[] = { "", "kernel", "threads", "registers", "spills", "stack",
                                        "shared", "barriers" };
  for (size_t i = 0; i < sizeof titles / sizeof *titles; i++)
    cli_report_cell(&table, "%s", titles[i]);
  for (int32_t i = 0; i < compiled->kernel_count; i++) {
    const struct swathe_kernel_use *use = &compiled->kernels[i];
    const int32_t numbers[] = { use->threads,     use->registers,    use->spill_bytes,
                                use->stack_bytes, use->shared_bytes, use->barriers };
    cli_report_cell(&table, "%s", "");
    cli_report_cell(&table, "%s", use->kernel);
    for (size_t k = 0; k < sizeof numbers / sizeof *numbers; k++)
      if (numbers[k] < 0) cli_report_cell(&table, "not known");
      else cli_report_cell(&table, "%d", numbers[k]);
  }
  cli_report_table(&table);
}

void cli_compiled_print(enum swathe_direction direction, const struct swathe_compiled *compiled)
{
  printf("%s for %s\n  config    %s\n", cli_compiled_directions[direction], compiled->isa,
         compiled->config);
  if (compiled->cached) printf("  compiled  not again: it was in the cache\n");
  else printf("  compiled  in %s\n", cli_report_time(compiled->compile_s * 1e6).text);
  printf("  bytes     %s\n", cli_report_bytes((int64_t)compiled->binary_bytes).text);
  if (!compiled->kernel_count) return;
  if (compiled->counted_ratio > 0)
    printf("  work      %s multiply-adds for each that the window asks for\n",
           cli_report_number(3, compiled->counted_ratio).text);
  if (*compiled->refused) printf("  refused   %s\n", compiled->refused);
  print_uses(compiled);
}

static void raise(int32_t *most, int32_t value)
{
  if (value > *most) *most = value;
}

struct swathe_kernel_use cli_compiled_most(const struct swathe_compiled *compiled)
{
  struct swathe_kernel_use most = { .kernel = "" };
  for (int32_t i = 0; i < compiled->kernel_count; i++) {
    const struct swathe_kernel_use *use = &compiled->kernels[i];
    raise(&most.threads, use->threads);
    raise(&most.registers, use->registers);
    raise(&most.stack_bytes, use->stack_bytes);
    raise(&most.shared_bytes, use->shared_bytes);
    raise(&most.barriers, use->barriers);
    if (use->spill_bytes > 0) most.spill_bytes += use->spill_bytes;
  }
  return most;
}
