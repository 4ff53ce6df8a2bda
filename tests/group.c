// group.c: ranks as threads for the layer's tests.
#include "group.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "layer.h"
#include "wires.h"

struct member {
  const struct group_case *group;
  struct sequence *sequence;
  struct swathe_threads *threads;
  struct share *share;
  struct swathe_context *context;
  int32_t rank;
  const char *nccl_id;
  int64_t moved;
  enum swathe_status status;
  char words[1024];
};

// ---- A share on the target ---------------------------------------------------------------------

// A share's arrays in the target's memory, which on the CPU is where they are anyway.
struct mirror {
  struct swathe_context *context;
  enum swathe_target target;
  const struct sequence *sequence;
  struct share *share;
  void *memory[SEQUENCE_ARRAYS], *sink, *dsink, *halo;
  struct swathe_tensors tensors;
};

static struct swathe_tensor *tensor_of(struct swathe_tensors *tensors, int array)
{
  struct swathe_tensor *const all[SEQUENCE_ARRAYS] = {
    [SEQUENCE_Q] = &tensors->q,     [SEQUENCE_K] = &tensors->k,   [SEQUENCE_V] = &tensors->v,
    [SEQUENCE_DOUT] = &tensors->dout, [SEQUENCE_OUT] = &tensors->out,
    [SEQUENCE_LSE] = &tensors->lse, [SEQUENCE_DQ] = &tensors->dq, [SEQUENCE_DK] = &tensors->dk,
    [SEQUENCE_DV] = &tensors->dv,
  };
  return all[array];
}

static size_t sink_bytes(const struct mirror *mirror)
{
  return (size_t)mirror->sequence->problem.q_heads * sizeof(float);
}

// Brings what the host has of the arrays from `first` on to the target.
static enum swathe_status write_mirror(struct mirror *mirror, int first)
{
  enum swathe_status status = SWATHE_OK;

  for (int a = first; a < SEQUENCE_ARRAYS && mirror->target != SWATHE_CPU && !status; a++)
    status = swathe_memory_write(
        mirror->context, mirror->target, mirror->memory[a], mirror->share->memory[a],
        share_bytes(mirror->sequence, mirror->share, (enum sequence_array)a));
  if (mirror->dsink && !status)
    status = swathe_memory_write(mirror->context, mirror->target, mirror->dsink,
                                 mirror->share->dsink, sink_bytes(mirror));
  return status;
}

// Everything back to the host: what was only read, too, so that a test sees if it was written.
static enum swathe_status read_mirror(struct mirror *mirror)
{
  enum swathe_status status = SWATHE_OK;

  for (int a = 0; a < SEQUENCE_ARRAYS && mirror->target != SWATHE_CPU && !status; a++)
    status = swathe_memory_read(
        mirror->context, mirror->target, mirror->share->memory[a], mirror->memory[a],
        share_bytes(mirror->sequence, mirror->share, (enum sequence_array)a));
  if (mirror->dsink && !status)
    status = swathe_memory_read(mirror->context, mirror->target, mirror->share->dsink,
                                mirror->dsink, sink_bytes(mirror));
  return status;
}

static enum swathe_status open_mirror(struct mirror *mirror)
{
  struct share *share = mirror->share;
  enum swathe_status status = SWATHE_OK;

  mirror->tensors = share->tensors;
  if (mirror->target == SWATHE_CPU) return SWATHE_OK;
  for (int a = 0; a < SEQUENCE_ARRAYS && !status; a++) {
    const size_t bytes = share_bytes(mirror->sequence, share, (enum sequence_array)a);
    const size_t first = (size_t)((char *)tensor_of(&share->tensors, a)->data -
                                  (char *)share->memory[a]);
    status = swathe_memory_allocate(mirror->context, mirror->target, bytes, &mirror->memory[a]);
    tensor_of(&mirror->tensors, a)->data = (void *)((uintptr_t)mirror->memory[a] + first);
  }
  if (share->tensors.sink && !status)
    status = swathe_memory_allocate(mirror->context, mirror->target, sink_bytes(mirror),
                                    &mirror->sink);
  if (share->tensors.sink && !status)
    status = swathe_memory_write(mirror->context, mirror->target, mirror->sink,
                                 share->tensors.sink, sink_bytes(mirror));
  if (share->tensors.dsink && !status)
    status = swathe_memory_allocate(mirror->context, mirror->target, sink_bytes(mirror),
                                    &mirror->dsink);
  mirror->tensors.sink = mirror->sink;
  mirror->tensors.dsink = mirror->dsink;
  return status ? status : write_mirror(mirror, 0);
}

static void close_mirror(struct mirror *mirror)
{
  void *const rest[] = { mirror->sink, mirror->dsink };
  swathe_memory_free(mirror->context, mirror->target, mirror->halo);
  for (int a = 0; a < SEQUENCE_ARRAYS && mirror->target != SWATHE_CPU; a++)
    swathe_memory_free(mirror->context, mirror->target, mirror->memory[a]);
  for (size_t i = 0; i < 2 && mirror->target != SWATHE_CPU; i++)
    swathe_memory_free(mirror->context, mirror->target, rest[i]);
}

// ---- A rank ------------------------------------------------------------------------------------

static enum swathe_status play_step(struct member *member, struct swathe_layer *layer,
                                    struct mirror *mirror, char step)
{
  struct swathe_timing timing;
  enum swathe_status status = SWATHE_OK;

  if (step == 'f') status = swathe_layer_forward(layer, &mirror->tensors, NULL);
  if (step == 'b') status = swathe_layer_backward(layer, &mirror->tensors, NULL);
  if (step == 's') status = swathe_layer_shard(layer, member->group->sharding);
  if (step == 'm') swathe_layer_mute(layer, true);
  if (step == 'p') {
    share_poison(member->sequence, mirror->share);
    status = write_mirror(mirror, SEQUENCE_OUT);
  }
  if (step != 'f' && step != 'b') return status;
  swathe_layer_timing(layer, &timing);
  member->moved += timing.received_bytes;
  return status;
}

static enum swathe_status play(struct member *member, struct swathe_layer *layer)
{
  const struct group_case *group = member->group;
  struct mirror mirror = { .context = member->context,
                           .target = group->problem->target,
                           .sequence = member->sequence,
                           .share = member->share };
  enum swathe_status status = swathe_layer_shard(layer, group->sharding);

  if (!status) status = open_mirror(&mirror);
  if (!status && group->keep_halo) {
    status = swathe_memory_allocate(member->context, mirror.target, swathe_layer_halo_bytes(layer),
                                    &mirror.halo);
    mirror.tensors.halo = mirror.halo;
  }
  for (const char *step = group->script; *step && !status; step++)
    status = play_step(member, layer, &mirror, *step);
  if (!status) status = read_mirror(&mirror);
  if (group->memory_bytes)
    group->memory_bytes[member->rank] = (int64_t)swathe_layer_memory_bytes(layer);
  close_mirror(&mirror);
  return status;
}

// Leaves the layer's buffers as another micro-batch does.
static enum swathe_status play_before(const struct member *member, struct swathe_layer *layer)
{
  const struct group_case *group = member->group;
  struct share *share = share_make(member->sequence, group->before, member->rank, group->form);
  if (!share) return SWATHE_BAD_SHARDING;
  struct mirror mirror = { .context = member->context,
                           .target = group->problem->target,
                           .sequence = member->sequence,
                           .share = share };
  enum swathe_status status = swathe_layer_shard(layer, group->before);
  if (!status) status = open_mirror(&mirror);
  if (!status) status = swathe_layer_forward(layer, &mirror.tensors, NULL);
  if (!status) status = swathe_layer_backward(layer, &mirror.tensors, NULL);
  if (!status) status = swathe_stream_synchronize(member->context, mirror.target, NULL);
  close_mirror(&mirror);
  share_free(share);
  return status;
}

// The rank's own device and transport.
static enum swathe_status join_nccl(const struct member *member,
                                    struct swathe_transport **transport)
{
  const struct swathe_nccl given = { .id = member->nccl_id,
                                     .rank = member->rank,
                                     .ranks = member->group->sharding->ranks,
                                     .deadline_s = member->group->deadline_s };
  const enum swathe_status status = swathe_device_use(member->context, member->rank);
  return status ? status : swathe_nccl_create(&given, transport);
}

static void *be_rank(void *arg)
{
  struct member *member = arg;
  const struct group_case *group = member->group;
  struct swathe_layer *layer = NULL;
  struct swathe_transport *transport =
      member->threads ? swathe_threads_rank(member->threads, member->rank) : NULL;
  if (transport && group->wires)
    transport = wires_rank(group->wires, member->rank, transport);
  if (group->nccl) member->status = join_nccl(member, &transport);

  const char *const configs[SW_CONFIGS] = { group->configs ? group->configs[0] : NULL,
                                            group->configs ? group->configs[1] : NULL,
                                            group->exchange };
  if (!member->status)
    member->status =
        sw_layer_create_strategy(member->context, group->problem, transport, group->strategy,
                                 configs, 3, &layer);
  if (!member->status && group->before) member->status = play_before(member, layer);
  if (!member->status) member->status = play(member, layer);
  if (!member->status && group->nccl) member->status = swathe_transport_wait(transport);
  if (member->status) {
    snprintf(member->words, sizeof member->words, "%s", swathe_error());
    if (member->threads) swathe_threads_abort(member->threads, member->rank, "a rank failed");
  }
  swathe_layer_destroy(layer);
  if (group->nccl) swathe_transport_destroy(transport);
  return NULL;
}

// Everything outside the contract is as it was, and the results are brought home.
static enum swathe_status collect(struct member *member, char *words, size_t size)
{
  const bool backward = strchr(member->group->script, 'b') != NULL;
  if (member->status) {
    snprintf(words, size, "rank %d: %s", member->rank, member->words);
    return member->status;
  }
  if (!share_check(member->sequence, member->share, backward, words, size))
    return SWATHE_WRONG_RESULT;
  share_gather(member->sequence, member->share, backward);
  return SWATHE_OK;
}

enum swathe_status group_run(const struct group_case *group, struct sequence *sequence,
                             int64_t *moved, char *words, size_t size)
{
  const int32_t ranks = group->sharding->ranks;
  struct member *members = calloc((size_t)ranks, sizeof *members);
  pthread_t *threads = calloc((size_t)ranks, sizeof *threads);
  struct swathe_threads *transport = NULL;
  char nccl_id[SWATHE_NCCL_ID_BYTES];
  enum swathe_status status = SWATHE_OK;

  if (group->nccl) status = swathe_nccl_id(nccl_id);
  if (ranks > 1 && !group->nccl)
    status =
        swathe_threads_create(ranks, group->deadline_s > 0 ? group->deadline_s : 20, &transport);
  for (int32_t r = 0; r < ranks && !status; r++) {
    members[r] = (struct member){ .group = group,
                                  .sequence = sequence,
                                  .threads = transport,
                                  .context = group->contexts ? group->contexts[r] : group->context,
                                  .rank = r,
                                  .nccl_id = nccl_id };
    members[r].share = share_make(sequence, group->sharding, r, group->form);
    if (!members[r].share) status = SWATHE_BAD_SHARDING;
  }
  if (status) snprintf(words, size, "%s", swathe_error());
  if (!status) {
    for (int32_t r = 0; r < ranks; r++) pthread_create(&threads[r], NULL, be_rank, &members[r]);
    for (int32_t r = 0; r < ranks; r++) pthread_join(threads[r], NULL);
    sequence_forget(sequence);
    for (int32_t r = 0; r < ranks && !status; r++) {
      status = collect(&members[r], words, size);
      if (moved) moved[r] = members[r].moved;
    }
  }
  for (int32_t r = 0; r < ranks; r++)
    if (members[r].share) share_free(members[r].share);
  swathe_threads_destroy(transport);
  free(threads);
  free(members);
  return status;
}
