// layer.c: one rank's layer: made from a problem (choose, agree, load), sharded for a micro-batch.
// What it then does is in pass.c, what travels in exchange.c.
#include "layer.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

double sw_layer_now_s(void)
{
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

double sw_layer_now_us(void) { return 1e6 * sw_layer_now_s(); }

int32_t sw_layer_rank(const struct swathe_layer *layer)
{
  return layer->transport ? layer->transport->rank : 0;
}

int32_t sw_layer_ranks(const struct swathe_layer *layer)
{
  return layer->transport ? layer->transport->ranks : 1;
}

int64_t sw_layer_token_elements(const struct swathe_layer *layer)
{
  return (int64_t)layer->problem.kv_heads *
         (layer->problem.head_dim_qk + layer->problem.head_dim_v);
}

size_t sw_layer_keys_bytes(const struct swathe_layer *layer, int64_t tokens, size_t elem_bytes)
{
  return (size_t)tokens * (size_t)layer->batch * (size_t)sw_layer_token_elements(layer) *
         elem_bytes;
}

// ---- Create -------------------------------------------------------------------------------------

// What every rank tells every other before the first message, once all are of one version.
struct agreement {
  char problem[SW_PROBLEM_TEXT], configs[SW_CONFIGS][SW_CONFIG_TEXT], isa[32];
  int32_t strategy;
};

// Validates a config and writes its canonical form.
static enum swathe_status check_config(struct swathe_layer *layer, int d, const char *text,
                                       char *config)
{
  const struct sw_gen_request request = {
    .problem = &layer->problem,
    .kernel = d == SW_EXCHANGE ? sw_exchange_kernel
                               : sw_context_kernel_name((enum swathe_direction)d),
    .isa = layer->aim.isa,
  };
  pthread_mutex_lock(&layer->context->mutex);
  const enum swathe_status status = sw_gen_check(layer->context->gen, &request, text, config);
  pthread_mutex_unlock(&layer->context->mutex);
  return status;
}

// Takes rank 0's config of a kernel or of the exchange.  Kernels are each rank's own business: one
// of another isa keeps what is fast on its own.  The exchange is everybody's.
static enum swathe_status take_config(struct swathe_layer *layer, int d, struct agreement *zero)
{
  char config[SW_CONFIG_TEXT], *theirs = zero->configs[d];

  theirs[SW_CONFIG_TEXT - 1] = 0;
  if (!*theirs || !strcmp(theirs, layer->choices[d].config)) return SWATHE_OK;
  if (d != SW_EXCHANGE && strncmp(zero->isa, layer->aim.isa, sizeof zero->isa)) return SWATHE_OK;
  const bool usable = !check_config(layer, d, theirs, config);
  if (!usable && d == SW_EXCHANGE)
    return sw_fail(SWATHE_DISAGREE, "rank 0 exchanges by %s, which rank %d cannot: %s", theirs,
                   sw_layer_rank(layer), swathe_error());
  if (!usable) return SWATHE_OK;
  memcpy(layer->choices[d].config, config, sizeof config);
  snprintf(layer->choices[d].why, sizeof layer->choices[d].why, "rank 0's choice");
  return SWATHE_OK;
}

// Rank 0 decides the configs.  What the wire depends on must be equal.
static enum swathe_status agree(struct swathe_layer *layer)
{
  const int32_t ranks = sw_layer_ranks(layer);
  struct agreement *all = calloc((size_t)ranks + 1, sizeof *all);
  struct agreement *mine = all ? &all[ranks] : NULL;
  enum swathe_status status;

  if (!all) return sw_fail(SWATHE_NO_MEMORY, "no memory to agree among %d ranks", ranks);
  swathe_problem_format(&layer->problem, mine->problem, sizeof mine->problem);
  snprintf(mine->isa, sizeof mine->isa, "%s", layer->aim.isa);
  mine->strategy = (int32_t)layer->strategy;
  for (int d = 0; d < SW_CONFIGS; d++)
    snprintf(mine->configs[d], sizeof mine->configs[d], "%s", layer->choices[d].config);

  status = layer->transport->operations->gather(layer->transport, mine, sizeof *mine, all);
  for (int32_t r = 0; r < ranks && !status; r++) {
    if (strncmp(all[r].problem, mine->problem, sizeof mine->problem))
      status =
          sw_fail(SWATHE_DISAGREE, "rank %d has the problem\n    %.511s\n  but rank %d has\n    %s",
                  r, all[r].problem, sw_layer_rank(layer), mine->problem);
    else if (all[r].strategy != mine->strategy)
      status = sw_fail(SWATHE_DISAGREE, "rank %d shares by %s, rank %d by %s", r,
                       swathe_strategy_name((enum swathe_strategy)all[r].strategy),
                       sw_layer_rank(layer), swathe_strategy_name(layer->strategy));
  }
  for (int d = 0; d < SW_CONFIGS && !status && sw_layer_rank(layer) != 0; d++)
    status = take_config(layer, d, &all[0]);
  free(all);
  return status ? sw_within(status, "while the ranks agreed on a layer") : SWATHE_OK;
}

struct kernel_load {
  struct swathe_layer *layer;
  enum swathe_direction direction;
  const volatile int *stop;  // as the thread that asks for the layer heeds it
  enum swathe_status status;
  char words[2048];
};

static void *load_kernel(void *arg)
{
  struct kernel_load *load = arg;
  struct swathe_layer *layer = load->layer;
  const struct sw_kernel_wanted wanted = { .problem = &layer->problem,
                                           .aim = &layer->aim,
                                           .name = sw_context_kernel_name(load->direction),
                                           .config = layer->choices[load->direction].config };
  sw_jit_heed(load->stop);
  load->status = sw_context_kernel(layer->context, &wanted, &layer->kernels[load->direction]);
  if (load->status) snprintf(load->words, sizeof load->words, "%s", swathe_error());
  return NULL;
}

// Both kernels at once: they compile side by side when no cache has them.
static enum swathe_status load_kernels(struct swathe_layer *layer, unsigned directions)
{
  const volatile int *stop = sw_jit_heed(NULL);
  struct kernel_load loads[2];
  pthread_t beside;
  bool threaded = false;

  sw_jit_heed(stop);
  for (int d = 0; d < 2; d++)
    loads[d] = (struct kernel_load){
      .layer = layer, .direction = (enum swathe_direction)d, .stop = stop
    };
  if (directions == 3) threaded = !pthread_create(&beside, NULL, load_kernel, &loads[1]);
  if (directions & 1) load_kernel(&loads[0]);
  if (threaded) pthread_join(beside, NULL);
  else if (directions & 2) load_kernel(&loads[1]);
  for (int d = 0; d < 2; d++)
    if (loads[d].status) return sw_fail(loads[d].status, "%s", loads[d].words);
  return SWATHE_OK;
}

// Whether the exchange has knobs; else it goes by their defaults.
static bool has_knobs(const struct swathe_layer *layer)
{
  return layer->strategy == SWATHE_HALO;
}

static enum swathe_status choose_configs(struct swathe_layer *layer,
                                         const char *const configs[SW_CONFIGS], unsigned directions)
{
  enum swathe_status status = SWATHE_OK;
  for (int d = 0; d < SW_CONFIGS && !status; d++) {
    struct sw_choice *choice = &layer->choices[d];
    if (d == SW_EXCHANGE ? !has_knobs(layer) : !(directions & 1u << d)) continue;
    if (configs[d]) {
      snprintf(choice->config, sizeof choice->config, "%s", configs[d]);
      snprintf(choice->why, sizeof choice->why, "given by the caller");
      // a kernel's is checked when it is emitted
      if (d == SW_EXCHANGE) status = check_config(layer, d, configs[d], choice->config);
    } else if (d == SW_EXCHANGE) {
      status = sw_choose_exchange(layer->context, &layer->problem, &layer->aim, layer->transport,
                                  choice);
    } else {
      status = sw_choose(layer->context, &layer->problem, (enum swathe_direction)d, &layer->aim,
                         choice);
    }
  }
  return status;
}

// From configs to a layer that can run.
static enum swathe_status prepare(struct swathe_layer *layer, unsigned directions)
{
  enum swathe_status status = sw_layer_ranks(layer) > 1 ? agree(layer) : SWATHE_OK;
  layer->agreed = layer->transport;
  sw_exchange_read_knobs(layer->choices[SW_EXCHANGE].config, &layer->agreed_knobs);
  layer->knobs = layer->agreed_knobs;
  if (!status && layer->strategy != SWATHE_HALO) status = sw_baseline_create(layer);
  if (!status) status = load_kernels(layer, directions);
  if (!status) status = sw_halo_planner_create(&layer->planner);
  if (!status && layer->aim.cuda) return sw_pass_cuda_create(layer);
  return status ? status : sw_device_cpu_create(layer->context->threads, &layer->device);
}

enum swathe_status sw_layer_create_strategy(struct swathe_context *context,
                                            const struct swathe_problem *problem,
                                            struct swathe_transport *transport,
                                            enum swathe_strategy strategy,
                                            const char *const configs[SW_CONFIGS],
                                            unsigned directions,
                                            struct swathe_layer **layer_out)
{
  struct sw_aim aim = { .cuda = false };
  struct swathe_layer *layer = NULL;
  enum swathe_status status = sw_context_aim(context, problem, NULL, &aim);
  if (!status && aim.cuda && !aim.device) status = sw_context_device(context, &aim.device);
  if (!status && aim.cuda && strategy != SWATHE_HALO)
    status = sw_fail(SWATHE_UNSUPPORTED, "on the cuda target there is the halo only, not %s",
                     swathe_strategy_name(strategy));
  if (!status && !(layer = calloc(1, sizeof *layer)))
    status = sw_fail(SWATHE_NO_MEMORY, "no %zu bytes for a layer", sizeof *layer);
  if (!status) {
    *layer = (struct swathe_layer){ .context = context, .problem = *problem, .aim = aim,
                                    .transport = transport, .strategy = strategy };
    status = choose_configs(layer, configs, directions);
  }
  // what one rank cannot do, no rank begins
  status = sw_agree_all_can(transport, status);
  if (!status) status = sw_agree_all_can(transport, prepare(layer, directions));
  if (status) {
    swathe_layer_destroy(layer);
    return status;
  }
  *layer_out = layer;
  return SWATHE_OK;
}

enum swathe_status sw_layer_create(struct swathe_context *context,
                                   const struct swathe_problem *problem,
                                   struct swathe_transport *transport,
                                   const char *const configs[SW_CONFIGS], unsigned directions,
                                   struct swathe_layer **layer)
{
  return sw_layer_create_strategy(context, problem, transport, SWATHE_HALO, configs, directions,
                                  layer);
}

enum swathe_status swathe_layer_create_strategy(struct swathe_context *context,
                                                const struct swathe_problem *problem,
                                                struct swathe_transport *transport,
                                                enum swathe_strategy strategy,
                                                struct swathe_layer **layer)
{
  static const char *const choose_all[SW_CONFIGS];
  return sw_layer_create_strategy(context, problem, transport, strategy, choose_all, 3, layer);
}

enum swathe_status swathe_layer_create(struct swathe_context *context,
                                       const struct swathe_problem *problem,
                                       struct swathe_transport *transport,
                                       struct swathe_layer **layer)
{
  return swathe_layer_create_strategy(context, problem, transport, SWATHE_HALO, layer);
}

size_t swathe_layer_memory_bytes(const struct swathe_layer *layer)
{
  size_t bytes = sw_baseline_memory_bytes(layer) + sw_pass_cuda_memory_bytes(layer);
  for (int i = 0; i < SW_LAYER_BUFFERS; i++) bytes += layer->buffers[i].bytes;
  return bytes;
}

void swathe_layer_mute(struct swathe_layer *layer, bool muted) { layer->muted = muted; }

void sw_layer_release(struct swathe_layer *layer, struct sw_buffer *buffer)
{
  if (buffer->data && !(layer->transport && layer->transport->holds_memory))
    sw_device_free(layer->device, buffer->data);
  *buffer = (struct sw_buffer){ NULL, 0 };
}

void swathe_layer_destroy(struct swathe_layer *layer)
{
  if (!layer) return;
  for (int i = 0; i < SW_LAYER_BUFFERS; i++) sw_layer_release(layer, &layer->buffers[i]);
  sw_baseline_destroy(layer);
  for (int d = 0; d < 2; d++) sw_work_free(&layer->work[d]);
  sw_list_free(&layer->messages);
  sw_list_free(&layer->arrivals);
  sw_list_free(&layer->waiting);
  if (layer->planner) sw_halo_planner_destroy(layer->planner);
  if (layer->device) sw_device_destroy(layer->device);
  sw_pass_cuda_destroy(layer);
  free(layer);
}

// ---- Shard --------------------------------------------------------------------------------------

enum swathe_status sw_layer_reserve_bytes(struct swathe_layer *layer, struct sw_buffer *buffer,
                                          size_t bytes)
{
  if (bytes <= buffer->bytes) return SWATHE_OK;
  if (buffer->data) sw_device_free(layer->device, buffer->data);
  *buffer = (struct sw_buffer){ .data = sw_device_allocate(layer->device, bytes) };
  if (!buffer->data) return sw_fail(SWATHE_NO_MEMORY, "no %zu bytes for a layer's buffer", bytes);
  buffer->bytes = bytes;
  return SWATHE_OK;
}

enum swathe_status sw_layer_reserve(struct swathe_layer *layer, struct sw_buffer *buffer,
                                    int64_t tokens, size_t elem_bytes)
{
  return sw_layer_reserve_bytes(layer, buffer, sw_layer_keys_bytes(layer, tokens, elem_bytes));
}

enum swathe_status sw_layer_reserve_heads(struct swathe_layer *layer, int64_t units)
{
  const size_t bytes =
      (size_t)units * (size_t)layer->batch * (size_t)layer->problem.q_heads * sizeof(float);
  return sw_layer_reserve_bytes(layer, &layer->head_sums, bytes);
}

enum swathe_status swathe_layer_set_exchange(struct swathe_layer *layer, const char *text)
{
  char config[SW_CONFIG_TEXT];
  enum swathe_status status =
      has_knobs(layer) ? check_config(layer, SW_EXCHANGE, text, config)
                       : sw_fail(SWATHE_UNSUPPORTED, "the exchange of this layer has no knobs");

  if (status) return sw_within(status, "while setting a layer's exchange");
  memcpy(layer->choices[SW_EXCHANGE].config, config, sizeof config);
  snprintf(layer->choices[SW_EXCHANGE].why, sizeof layer->choices[SW_EXCHANGE].why,
           "given by the caller");
  sw_exchange_read_knobs(config, &layer->agreed_knobs);
  layer->knobs = layer->agreed_knobs;
  // where keys lie in messages stands in the lists of the device
  if (layer->plan && layer->cuda) status = sw_pass_cuda_shard(layer);
  return status || !layer->plan ? status : sw_exchange_reserve(layer);
}

void swathe_layer_regroup(struct swathe_layer *layer, struct swathe_transport *transport)
{
  layer->transport = transport;
  layer->plan = NULL;
  layer->digest_agreed = false;
  if (transport == layer->agreed) layer->knobs = layer->agreed_knobs;
  else sw_exchange_read_knobs("", &layer->knobs);
}

enum swathe_status swathe_layer_shard(struct swathe_layer *layer,
                                      const struct swathe_sharding *sharding)
{
  const struct sw_halo_plan *plan = NULL;
  enum swathe_status status;

  layer->plan = NULL;
  if (sharding->ranks != sw_layer_ranks(layer))
    return sw_fail(SWATHE_BAD_SHARDING, "the sharding is for %d ranks, the layer's group has %d",
                   sharding->ranks, sw_layer_ranks(layer));
  status = sw_halo_plan(layer->planner, &layer->problem, sharding, sw_layer_rank(layer), &plan);
  for (int d = 0; d < 2 && !status; d++)
    if (layer->kernels[d])
      status = sw_work_build(&layer->work[d], &layer->problem, plan, (enum swathe_direction)d,
                             layer->kernels[d]->tile_tokens, layer->kernels[d]->final_keys);
  if (status) return sw_within(status, "while sharding for rank %d", sw_layer_rank(layer));

  layer->batch = sharding->batch;
  layer->plan = plan;
  sw_agree_on(layer, sharding);
  const size_t elem = sw_problem_elem_bytes(&layer->problem);
  if (layer->cuda) status = sw_pass_cuda_shard(layer);
  else status = sw_layer_reserve(layer, &layer->send, plan->send_tokens, elem);
  if (!status && !layer->cuda)
    status = sw_layer_reserve(layer, &layer->receive, plan->receive_tokens, elem);
  if (!status) status = sw_exchange_reserve(layer);
  if (!status && layer->strategy != SWATHE_HALO) status = sw_baseline_shard(layer, sharding);
  if (status) layer->plan = NULL;
  return status;
}

size_t swathe_layer_halo_bytes(const struct swathe_layer *layer)
{
  if (!layer->plan) return 0;
  if (layer->strategy == SWATHE_A2A) return sw_baseline_heads_kept_bytes(layer);
  return (size_t)layer->plan->receive_tokens * (size_t)layer->batch *
         (size_t)sw_problem_token_bytes(&layer->problem);
}

// ---- Told to the caller -------------------------------------------------------------------------

void swathe_layer_timing(const struct swathe_layer *layer, struct swathe_timing *timing)
{
  *timing = layer->timing;
}

size_t swathe_layer_explain(const struct swathe_layer *layer, char *data, size_t size)
{
  struct sw_problem_writer text = { data, size, 0 };
  const struct sw_halo_plan *plan = layer->plan;

  for (int d = 0; d < 2; d++) {
    if (!layer->kernels[d]) continue;
    sw_problem_put(&text, "%-9s %s\n", sw_context_kernel_name((enum swathe_direction)d),
                   layer->choices[d].config);
    sw_problem_put(&text, "          %s; isa %s, %s\n", layer->choices[d].why, layer->aim.isa,
                   layer->kernels[d]->report.cached ? "from the cache" : "compiled now");
  }
  if (layer->aim.device) {
    const char *device = sw_device_cuda_name(layer->aim.device);
    sw_problem_put(&text, "device    %s%s\n", device,
                   strstr(device, "emulated") ? ", not a GPU: its times say nothing of one" : "");
  }
  if (has_knobs(layer) && sw_layer_ranks(layer) > 1)
    sw_problem_put(&text, "exchange  %s\n          %s\n",
                   layer->transport == layer->agreed ? layer->choices[SW_EXCHANGE].config
                                                     : "default",
                   layer->transport == layer->agreed ? layer->choices[SW_EXCHANGE].why
                                                     : "the group is another than that of create");
  if (layer->strategy != SWATHE_HALO)
    sw_problem_put(&text, "shared by %s\n", swathe_strategy_name(layer->strategy));
  if (!plan) return text.used;
  sw_problem_put(&text,
                 "halo      rank %d of %d: %" PRId64 " tokens from %" PRId64
                 " peers, at most %d hops, %" PRId64 " bytes forward\n",
                 plan->rank, sw_layer_ranks(layer), plan->receive_tokens,
                 plan->receive_message_count, plan->hops,
                 plan->receive_tokens * layer->batch * sw_problem_token_bytes(&layer->problem));
  return text.used;
}
