// compile.c: one kernel into the cache, and what it uses of the machine it is made for: the static
// half of what a tuner goes by, known without a device.
#include <stdio.h>
#include <string.h>

#include "layer.h"

enum {
  REGISTER_UNIT = 8,   // a thread's registers are handed out in these, a block's threads in warps
  WARP = 32,
};

// What is known of a config before it is compiled.
struct sizes {
  int64_t counted_permille, most_shared_bytes, most_registers;
};

static void note_size(void *arg, const char *name, int64_t value)
{
  struct sizes *sizes = arg;
  if (!strcmp(name, "counted_permille")) sizes->counted_permille = value;
  if (!strcmp(name, "most_shared_bytes")) sizes->most_shared_bytes = value;
  if (!strcmp(name, "most_registers")) sizes->most_registers = value;
}

// The kernel's use, as its compiler said, and what it asks for when it is launched.
static void describe(const struct sw_jit_image *image, const struct sw_jit_resources *resources,
                     struct swathe_kernel_use *use)
{
  char name[64];
  void *address;
  snprintf(use->kernel, sizeof use->kernel, "%s", resources->kernel);
  use->registers = resources->registers;
  use->spill_bytes = resources->spill_bytes;
  use->stack_bytes = resources->stack_bytes;
  use->barriers = resources->barriers;
  use->shared_bytes = resources->static_shared_bytes;
  snprintf(name, sizeof name, "%s_launch", resources->kernel);
  if (sw_jit_symbol(image, name, &address)) return;
  const struct sw_cuda_launch *launch = address;
  use->threads = launch->threads;
  use->shared_bytes += launch->shared_bytes;
}

// Why a kernel is not worth a trial, or could not be launched.
static bool find_fault(const struct swathe_kernel_use *use, const struct sizes *sizes, char *words,
                       size_t size)
{
  const int64_t registers = (int64_t)((use->registers + REGISTER_UNIT - 1) / REGISTER_UNIT) *
                            REGISTER_UNIT * ((use->threads + WARP - 1) / WARP * WARP);
  if (use->spill_bytes > 0)
    snprintf(words, size, "%s spills %d bytes of registers", use->kernel, use->spill_bytes);
  else if (sizes->most_shared_bytes && use->shared_bytes > sizes->most_shared_bytes)
    snprintf(words, size, "%s wants %d bytes of shared memory of %lld", use->kernel,
             use->shared_bytes, (long long)sizes->most_shared_bytes);
  else if (sizes->most_registers && registers > sizes->most_registers)
    snprintf(words, size, "%s wants %lld registers a block of %lld", use->kernel,
             (long long)registers, (long long)sizes->most_registers);
  else return false;
  return true;
}

static void judge(const struct sw_jit_image *image, const struct sw_jit_report *report,
                  const struct sizes *sizes, struct swathe_compiled *compiled)
{
  const int32_t most = (int32_t)(sizeof compiled->kernels / sizeof *compiled->kernels);
  compiled->counted_ratio = (double)sizes->counted_permille / 1000;
  for (int32_t i = 0; i < report->kernel_count && i < most; i++) {
    struct swathe_kernel_use *use = &compiled->kernels[compiled->kernel_count++];
    describe(image, &report->kernels[i], use);
    if (!*compiled->refused)
      find_fault(use, sizes, compiled->refused, sizeof compiled->refused);
  }
}

// Compiles, or finds in the cache, and fills in what came of it.
static enum swathe_status make(struct swathe_context *context, const struct sw_aim *aim,
                               const struct sw_jit_request *request, const struct sizes *sizes,
                               struct swathe_compiled *compiled, char **log)
{
  struct sw_jit_report report;
  struct sw_jit_image *image = NULL;
  enum swathe_status status =
      aim->cuda ? sw_jit_load(context->jit, request, sw_compile_deadline_s, &image, &report, log)
                : sw_jit_warm(context->jit, request, sw_compile_deadline_s, &report, log);
  if (status) return status;
  compiled->cached = report.cached;
  compiled->compile_s = report.compile_s;
  compiled->binary_bytes = report.binary_bytes;
  if (image) judge(image, &report, sizes, compiled);
  sw_jit_unload(image);
  return SWATHE_OK;
}

// One kernel by its name, with `config` or the default.
static enum swathe_status make_kernel(struct swathe_context *context,
                                      const struct swathe_problem *problem,
                                      const struct sw_aim *aim, const char *name,
                                      struct swathe_compiled *compiled)
{
  struct sw_gen_source source = { .text = NULL };
  struct sizes sizes = { 0 };
  char *log = NULL;
  enum swathe_status status =
      sw_context_source(context, problem, name, aim->isa, compiled->config, &source);

  if (status) return status;
  const struct sw_gen_request about = { .problem = problem, .kernel = name, .isa = aim->isa };
  pthread_mutex_lock(&context->mutex);
  status = sw_gen_sizes(context->gen, &about, compiled->config, note_size, &sizes);
  pthread_mutex_unlock(&context->mutex);

  const struct sw_jit_request request = {
    .name = name,
    .source = source.text,
    .flags = source.flags,
    .isa = aim->isa,
    .compiler = sw_context_compiler(aim),
  };
  if (!status) status = make(context, aim, &request, &sizes, compiled, &log);
  if (status) status = sw_context_compile_failed(&source, status, log);
  sw_gen_source_free(&source);
  return status;
}

enum swathe_status swathe_compile(struct swathe_context *context,
                                  const struct swathe_problem *problem,
                                  enum swathe_direction direction, const char *isa,
                                  const char *config, struct swathe_compiled *compiled)
{
  struct swathe_compiled result = { .cached = false }, copies = { .config = "" };
  struct sw_aim aim;
  enum swathe_status status = sw_context_aim(context, problem, isa, &aim);

  if (!status)
    status = sw_context_config(context, problem, direction, &aim, config, result.config);
  if (!status)
    status = make_kernel(context, problem, &aim, sw_context_kernel_name(direction), &result);
  // a layer on CUDA copies by kernels, too, which have no config
  if (!status && aim.cuda) status = make_kernel(context, problem, &aim, "copies", &copies);
  snprintf(result.isa, sizeof result.isa, "%s", aim.isa);
  if (!status) *compiled = result;
  return status;
}
