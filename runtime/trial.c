// trial.c: makes and frees what the trials of one problem share.  Candidates are checked
// (trial_check.c) and timed several in turn (trial_time.c) in child processes (trial_child.c).  The
// parent leaves CUDA to its children, which copy the inputs to their device.
#include "trial_bench.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// ---- Layers -----------------------------------------------------------------------------------

enum swathe_status sw_trial_layer(struct sw_trial_bench *bench, bool small, const char *config,
                                  struct swathe_layer **layer)
{
  const char *configs[SW_CONFIGS] = { config, config };
  const struct swathe_problem *p = small ? &bench->small.problem : &bench->timed;
  const struct swathe_sharding two_pieces = { .layout = SWATHE_SPANS,
                                              .ranks = 1,
                                              .batch = 1,
                                              .tokens = bench->small_tokens,
                                              .spans = bench->spans,
                                              .rank_spans = bench->rank_spans,
                                              .rank_rows = &bench->small_rows };
  const struct swathe_sharding share = sw_trial_time_share(bench);
  enum swathe_status status =
      sw_layer_create(bench->context, p, small ? NULL : &bench->alone.transport, configs,
                      1u << bench->direction, layer);
  if (status) return status;
  status = swathe_layer_shard(*layer, small ? &two_pieces : &share);
  if (status) swathe_layer_destroy(*layer);
  return status;
}

enum swathe_status sw_trial_run(struct swathe_layer *layer, enum swathe_direction direction,
                                const struct swathe_tensors *call)
{
  return direction == SWATHE_FORWARD ? swathe_layer_forward(layer, call, NULL)
                                     : swathe_layer_backward(layer, call, NULL);
}

// ---- Forward, for backward to start from ------------------------------------------------------

static enum swathe_status default_forward(struct sw_trial_bench *bench, char *config)
{
  struct sw_aim aim;
  enum swathe_status status = sw_context_aim(bench->context, &bench->problem, NULL, &aim);
  const struct sw_gen_request request = { .problem = &bench->problem,
                                          .kernel = "forward",
                                          .isa = aim.isa };
  if (status) return status;
  pthread_mutex_lock(&bench->context->mutex);
  status = sw_gen_default(bench->context->gen, &request, config);
  pthread_mutex_unlock(&bench->context->mutex);
  return status;
}

// Runs the default forward kernel on the small problem, so that backward has outputs and lse to
// start from.  The share is timed without: its zeros give sums of the usual size in the usual time.
static enum swathe_status run_forward(struct sw_trial_bench *bench)
{
  char config[SW_CONFIG_TEXT];
  struct swathe_layer *layer;
  struct sw_trial_placed placed;
  enum swathe_status status = default_forward(bench, config);

  if (status) return status;
  bench->direction = SWATHE_FORWARD;
  status = sw_trial_layer(bench, true, config, &layer);
  bench->direction = SWATHE_BACKWARD;
  if (status) return status;
  status = sw_trial_tensors_place(bench->context, &bench->small, &placed);
  if (!status) status = swathe_layer_forward(layer, &placed.call, NULL);
  if (!status) status = sw_trial_tensors_fetch(bench->context, &placed);
  sw_trial_tensors_unplace(bench->context, &placed);
  swathe_layer_destroy(layer);
  return status;
}

// ---- Prepare where only children may use the device -------------------------------------------

// What a child that prepares something reports, followed by the small problem's out and lse.
struct prepared {
  enum swathe_status status;
  char words[SW_TRIAL_WORDS];
  double default_us;
};

static size_t out_bytes(const struct sw_trial_bench *bench)
{
  const struct swathe_problem *p = &bench->small.problem;
  return (size_t)(bench->small.rows * p->q_heads * p->head_dim_v) * sw_problem_elem_bytes(p);
}

static size_t lse_bytes(const struct sw_trial_bench *bench)
{
  return (size_t)(bench->small.rows * bench->small.problem.q_heads) * sizeof(float);
}

static void prepare_in_child(struct sw_trial_bench *bench, const char *default_config, int end)
{
  struct prepared prepared;
  memset(&prepared, 0, sizeof prepared);
  if (bench->direction == SWATHE_BACKWARD) prepared.status = run_forward(bench);
  if (!prepared.status) prepared.status = sw_trial_time_default(bench, default_config);
  prepared.default_us = bench->default_us;
  if (prepared.status) snprintf(prepared.words, sizeof prepared.words, "%s", swathe_error());
  sw_trial_child_send(end, &prepared, sizeof prepared);
  sw_trial_child_send(end, bench->small.out, out_bytes(bench));
  sw_trial_child_send(end, bench->small.lse, lse_bytes(bench));
}

static enum swathe_status hear_prepared(struct sw_trial_bench *bench, pid_t pid, int end)
{
  const size_t bytes = sizeof(struct prepared) + out_bytes(bench) + lse_bytes(bench);
  char *report = malloc(bytes), words[SW_TRIAL_WORDS] = "";
  enum sw_verdict verdict;
  struct prepared prepared;

  if (!report) return sw_fail(SWATHE_NO_MEMORY, "no %zu bytes to tune", bytes);
  enum swathe_status status =
      sw_trial_child_hear(bench, pid, end, report, bytes, NULL, &verdict, words);
  if (!status && verdict) status = sw_fail(SWATHE_DEVICE, "the default kernel: %s", words);
  if (!status) {
    sw_trial_child_reap(pid);
    memcpy(&prepared, report, sizeof prepared);
    if (prepared.status) status = sw_fail(prepared.status, "%s", prepared.words);
    bench->default_us = prepared.default_us;
    memcpy(bench->small.out, report + sizeof prepared, out_bytes(bench));
    memcpy(bench->small.lse, report + sizeof prepared + out_bytes(bench), lse_bytes(bench));
  }
  free(report);
  return status;
}

// The kernels are made here, where the compiler is; they run in a child.
static enum swathe_status prepare_apart(struct sw_trial_bench *bench, const char *default_config)
{
  char config[SW_CONFIG_TEXT];
  struct swathe_compiled compiled;
  const char *isa = bench->context->apart.isa;
  pid_t pid;
  int end;
  enum swathe_status status = swathe_compile(bench->context, &bench->problem, bench->direction, isa,
                                             default_config, &compiled);

  if (!status && bench->direction == SWATHE_BACKWARD) {
    status = default_forward(bench, config);
    if (!status)
      status = swathe_compile(bench->context, &bench->problem, SWATHE_FORWARD, isa, config,
                              &compiled);
  }
  if (!status) status = sw_trial_child_start(bench, default_config, prepare_in_child, &pid, &end);
  if (status) return status;
  status = hear_prepared(bench, pid, end);
  close(end);
  return status;
}

// ---- Prepare ----------------------------------------------------------------------------------

static enum swathe_status prepare_inputs(struct sw_trial_bench *bench, const char *default_config)
{
  enum swathe_status status = sw_trial_time_prepare(bench);
  if (!status) status = sw_trial_check_prepare(bench);
  if (!status && bench->cuda) status = prepare_apart(bench, default_config);
  if (!status && !bench->cuda && bench->direction == SWATHE_BACKWARD) status = run_forward(bench);
  if (!status && bench->direction == SWATHE_BACKWARD) sw_trial_check_start_backward(bench);
  return status || bench->cuda ? status : sw_trial_time_default(bench, default_config);
}

enum swathe_status sw_trial_prepare(struct swathe_context *context,
                                    const struct swathe_problem *problem,
                                    enum swathe_direction direction,
                                    const struct sw_trial_options *options,
                                    struct sw_trial_bench **bench_out)
{
  struct sw_trial_bench *bench = calloc(1, sizeof *bench);

  if (!bench) return sw_fail(SWATHE_NO_MEMORY, "no memory to tune");
  bench->context = context;
  bench->problem = *problem;
  bench->direction = direction;
  bench->cuda = problem->target == SWATHE_CUDA;
  bench->emulated = bench->cuda && strstr(context->apart.device, "emulated");
  bench->trial_s = options->trial_s;
  bench->memory_bytes = options->memory_bytes;
  const enum swathe_status status = prepare_inputs(bench, options->default_config);
  if (status) {
    sw_trial_free(bench);
    return sw_within(status, "while preparing to tune %s", sw_context_kernel_name(direction));
  }
  *bench_out = bench;
  return SWATHE_OK;
}

void sw_trial_free(struct sw_trial_bench *bench)
{
  if (!bench) return;
  sw_trial_time_free(bench);
  sw_trial_check_free(bench);
  free(bench);
}
