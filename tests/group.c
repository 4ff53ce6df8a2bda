// group.c: ranks as threads for the layer's tests.
#include "group.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "layer.h"

struct member {
  const struct group_case *group;
  struct sequence *sequence;
  struct swathe_threads *threads;
  struct share *share;
  int32_t rank;
  int64_t moved;
  enum swathe_status status;
  char words[1024];
};

static enum swathe_status play(struct member *member, struct swathe_layer *layer)
{
  struct share *share = member->share;
  enum swathe_status status = swathe_layer_shard(layer, member->group->sharding);
  void *halo = NULL;
  struct swathe_timing timing;

  if (!status && member->group->keep_halo) {
    halo = malloc(swathe_layer_halo_bytes(layer) + 1);
    share->tensors.halo = halo;
  }
  for (const char *step = member->group->script; *step && !status; step++) {
    if (*step == 'f') status = swathe_layer_forward(layer, &share->tensors, NULL);
    if (*step == 'b') status = swathe_layer_backward(layer, &share->tensors, NULL);
    if (*step == 's') status = swathe_layer_shard(layer, member->group->sharding);
    if (*step == 'm') swathe_layer_mute(layer, true);
    if (*step == 'p') share_poison(member->sequence, share);
    if (*step != 'f' && *step != 'b') continue;
    swathe_layer_timing(layer, &timing);
    member->moved += timing.received_bytes;
  }
  if (member->group->memory_bytes)
    member->group->memory_bytes[member->rank] = (int64_t)swathe_layer_memory_bytes(layer);
  free(halo);
  share->tensors.halo = NULL;
  return status;
}

// Leaves the layer's buffers as another micro-batch does.
static enum swathe_status play_before(const struct member *member, struct swathe_layer *layer)
{
  const struct group_case *group = member->group;
  struct share *share = share_make(member->sequence, group->before, member->rank, group->form);
  if (!share) return SWATHE_BAD_SHARDING;
  enum swathe_status status = swathe_layer_shard(layer, group->before);
  if (!status) status = swathe_layer_forward(layer, &share->tensors, NULL);
  if (!status) status = swathe_layer_backward(layer, &share->tensors, NULL);
  share_free(share);
  return status;
}

static void *be_rank(void *arg)
{
  struct member *member = arg;
  const struct group_case *group = member->group;
  struct swathe_layer *layer = NULL;
  struct swathe_transport *transport =
      member->threads ? swathe_threads_rank(member->threads, member->rank) : NULL;

  static const char *const chosen[2];
  member->status =
      sw_layer_create_strategy(group->context, group->problem, transport, group->strategy,
                               group->configs ? group->configs : chosen, 3, &layer);
  if (!member->status && group->before) member->status = play_before(member, layer);
  if (!member->status) member->status = play(member, layer);
  if (member->status) {
    snprintf(member->words, sizeof member->words, "%s", swathe_error());
    if (member->threads) swathe_threads_abort(member->threads, member->rank, "a rank failed");
  }
  swathe_layer_destroy(layer);
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
  enum swathe_status status = SWATHE_OK;

  if (ranks > 1)
    status =
        swathe_threads_create(ranks, group->deadline_s > 0 ? group->deadline_s : 20, &transport);
  for (int32_t r = 0; r < ranks && !status; r++) {
    members[r] =
        (struct member){ .group = group, .sequence = sequence, .threads = transport, .rank = r };
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
