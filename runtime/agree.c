// agree.c: what the ranks make sure of.  When they make a layer: that all can, and are of one
// version.  Before the first message of a sharding: that they hold the same one, and exchange it
// the same way, for each derives its messages on its own, and a size that differs is found too late
// by some transports.
#include "layer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Its layout never changes: ranks of different versions read it.
struct greeting {
  char version[32];
  int32_t status;
  char words[476];
};

static enum swathe_status compare_greetings(const struct greeting *all, int32_t ranks, int32_t rank)
{
  for (int32_t r = 0; r < ranks; r++)
    if (strncmp(all[r].version, SWATHE_VERSION, sizeof all[r].version))
      return sw_fail(SWATHE_DISAGREE, "rank %d runs swathe %.31s, rank %d runs %s", r,
                     all[r].version, rank, SWATHE_VERSION);
  for (int32_t r = 0; r < ranks; r++)
    if (all[r].status)
      return sw_fail((enum swathe_status)all[r].status, "rank %d cannot make the layer: %.475s", r,
                     all[r].words);
  return SWATHE_OK;
}

enum swathe_status sw_agree_all_can(struct swathe_transport *transport, enum swathe_status status)
{
  const int32_t ranks = transport ? transport->ranks : 1;
  struct greeting *all = ranks > 1 ? calloc((size_t)ranks, sizeof *all) : NULL;
  struct greeting mine = { .version = SWATHE_VERSION, .status = (int32_t)status };
  char words[4096];

  if (ranks == 1) return status;
  if (!all) return status ? status : sw_fail(SWATHE_NO_MEMORY, "no memory to agree");
  snprintf(words, sizeof words, "%s", swathe_error());
  if (status) snprintf(mine.words, sizeof mine.words, "%.475s", words);
  enum swathe_status theirs = transport->operations->gather(transport, &mine, sizeof mine, all);
  if (status) sw_fail(status, "%s", words);
  else if (!theirs) theirs = compare_greetings(all, ranks, transport->rank);
  free(all);
  if (status || !theirs) return status;
  return sw_within(theirs, "while the ranks agreed on a layer");
}

static void mix(struct sw_digest *digest, uint64_t word)
{
  // two multiplicative hashes with different odd constants: those of FNV-1a and of splitmix64
  digest->words[0] = (digest->words[0] ^ word) * 1099511628211u;
  digest->words[0] ^= digest->words[0] >> 32;
  digest->words[1] = (digest->words[1] + word) * 0xbf58476d1ce4e5b9u;
  digest->words[1] ^= digest->words[1] >> 29;
}

static void mix_all(struct sw_digest *digest, const int64_t *words, int64_t count)
{
  mix(digest, words ? (uint64_t)count : UINT64_MAX);
  for (int64_t i = 0; words && i < count; i++) mix(digest, (uint64_t)words[i]);
}

void sw_agree_on(struct swathe_layer *layer, const struct swathe_sharding *sharding)
{
  struct sw_digest digest = { { 14695981039346656037u, 0x9e3779b97f4a7c15u } };
  const struct swathe_problem *p = &layer->problem;
  const int64_t numbers[] = {
    sharding->layout, sharding->ranks, sharding->batch, sharding->tokens, sharding->documents,
    p->kv_heads, p->head_dim_qk, p->head_dim_v, p->window_left, p->window_right, p->dtype,
    p->halo_gradient, layer->strategy,
  };

  mix_all(&digest, numbers, sizeof numbers / sizeof *numbers);
  mix_all(&digest, sharding->documents ? sharding->document_starts : NULL, sharding->documents + 1);
  mix_all(&digest, sharding->documents ? sharding->document_starts_padded : NULL,
          sharding->documents + 1);
  if (sharding->layout == SWATHE_SPANS) {
    mix_all(&digest, sharding->rank_spans, sharding->ranks + 1);
    mix_all(&digest, sharding->rank_rows, sharding->ranks);
    for (int64_t i = 0; i < sharding->rank_spans[sharding->ranks]; i++) {
      const struct swathe_span *span = &sharding->spans[i];
      const int64_t fields[] = { span->document, span->position, span->tokens, span->row };
      mix_all(&digest, fields, 4);
    }
  }
  layer->digest = digest;
}

enum swathe_status sw_agree(struct swathe_layer *layer)
{
  const int32_t ranks = sw_layer_ranks(layer), rank = sw_layer_rank(layer);
  const int64_t knobs[] = { layer->knobs.chunks, layer->knobs.together, layer->knobs.order };
  struct sw_digest mine = layer->digest;
  enum swathe_status status;

  if (ranks == 1 || layer->muted) return SWATHE_OK;
  mix_all(&mine, knobs, 3);
  if (layer->digest_agreed && !memcmp(&mine, &layer->agreed_digest, sizeof mine)) return SWATHE_OK;
  struct sw_digest *all = calloc((size_t)ranks, sizeof *all);
  if (!all) return sw_fail(SWATHE_NO_MEMORY, "no memory to agree among %d ranks", ranks);

  status = layer->transport->operations->gather(layer->transport, &mine, sizeof mine, all);
  for (int32_t r = 0; r < ranks && !status; r++)
    if (memcmp(&all[r], &all[0], sizeof *all))
      status = sw_fail(SWATHE_DISAGREE,
                       "rank %d and rank 0 do not hold the same sharding, or exchange it in other "
                       "ways", r);
  free(all);
  if (status)
    return sw_within(status, "while the ranks agreed on a sharding, before rank %d's first message",
                     rank);
  layer->agreed_digest = mine;
  layer->digest_agreed = true;
  return SWATHE_OK;
}
