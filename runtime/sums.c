// sums.c: the sums of a key's gradients in backward: which are final where they are made, and for
// the others the pieces that add them up in a fixed order.  Pure arithmetic, like work.c.
//
// Whoever has sums for a key that others have sums for, too, leaves them beside and makes a claim.
// Claims on rows of the rank's tensors are added there (gather), those on slots of the receive
// buffer in the message that takes them home.
#include "layer.h"

#include <assert.h>

// Sums for the keys [index, index + tokens), found at `source`.  Added by ascending turn.
struct claim {
  int64_t index, tokens, turn;
  struct sw_sum_source source;
};

struct stretch {
  int64_t begin, end;
};

static const struct claim *claims_of(const struct sw_list *list) { return list->items; }
static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Room for one item more at the end; the caller writes it.
static enum swathe_status grow(struct sw_list *list, size_t item_bytes)
{
  return sw_list_reserve(list, list->count + 1, item_bytes);
}

void sw_sums_clear(struct sw_sums *sums)
{
  sums->own.count = sums->wire.count = 0;
  sums->pieces.count = sums->sources.count = sums->wire_pieces = 0;
}

void sw_sums_free(struct sw_sums *sums)
{
  sw_list_free(&sums->pieces);
  sw_list_free(&sums->sources);
  sw_list_free(&sums->terms);
  sw_list_free(&sums->own);
  sw_list_free(&sums->wire);
  sw_list_free(&sums->shared);
  sw_list_free(&sums->keys);
  sw_list_free(&sums->scratch);
  sw_list_free(&sums->active);
}

enum swathe_status sw_sums_claim(struct sw_sums *sums, enum sw_place place, int64_t index,
                                 int64_t tokens, enum sw_turn turn, struct sw_sum_source source)
{
  struct sw_list *list = place == SW_OWN ? &sums->own : &sums->wire;
  const enum swathe_status status = grow(list, sizeof(struct claim));
  if (status) return status;
  ((struct claim *)list->items)[list->count++] =
      (struct claim){ index, tokens, (int64_t)turn, source };
  return SWATHE_OK;
}

enum swathe_status sw_sums_claim_received(struct sw_sums *sums, const struct sw_halo_plan *plan)
{
  enum swathe_status status = SWATHE_OK;
  for (int64_t i = 0; i < plan->send_count && !status; i++)
    status =
        sw_sums_claim(sums, SW_OWN, plan->sends[i].row, plan->sends[i].tokens, SW_TURN_RECEIVED,
                      (struct sw_sum_source){ SW_HOME, plan->sends[i].slot });
  return status;
}

// sums->keys: the claims by ascending index; those of equal index as they were made.
static enum swathe_status sort_claims(struct sw_sums *sums, const struct sw_list *claims)
{
  enum swathe_status status =
      sw_list_reserve(&sums->keys, claims->count, sizeof(struct sw_sharding_key));
  if (!status)
    status = sw_list_reserve(&sums->scratch, claims->count, sizeof(struct sw_sharding_key));
  if (status) return status;
  struct sw_sharding_key *keys = sums->keys.items;
  for (int64_t i = 0; i < claims->count; i++)
    keys[i] = (struct sw_sharding_key){ .position = claims_of(claims)[i].index, .index = i };
  sw_sharding_sort(keys, sums->scratch.items, claims->count);
  return SWATHE_OK;
}

// ---- Which are shared ---------------------------------------------------------------------------

enum swathe_status sw_sums_share(struct sw_sums *sums)
{
  enum swathe_status status = sort_claims(sums, &sums->own);
  struct sw_list *shared = &sums->shared;

  shared->count = 0;
  if (!status) status = sw_list_reserve(shared, sums->own.count, sizeof(struct stretch));
  for (int64_t i = 0; i < sums->own.count && !status; i++) {
    const struct sw_sharding_key *key = (const struct sw_sharding_key *)sums->keys.items + i;
    const struct claim *claim = &claims_of(&sums->own)[key->index];
    const int64_t end = claim->index + claim->tokens;
    struct stretch *last = (struct stretch *)shared->items + shared->count - 1;
    if (!shared->count || claim->index > last->end)
      ((struct stretch *)shared->items)[shared->count++] = (struct stretch){ claim->index, end };
    else if (end > last->end) last->end = end;
  }
  sw_sums_clear(sums);
  return status;
}

bool sw_sums_part(const struct sw_sums *sums, int64_t row, int64_t end, int64_t *part_end)
{
  const struct stretch *shared = sums->shared.items;
  int64_t low = 0, high = sums->shared.count;  // the first that ends behind the row

  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (shared[middle].end > row) high = middle;
    else low = middle + 1;
  }
  const bool within = low < sums->shared.count && shared[low].begin <= row;
  *part_end = end;
  if (low < sums->shared.count)
    *part_end = smaller(end, within ? shared[low].end : shared[low].begin);
  return within;
}

// ---- Pieces -------------------------------------------------------------------------------------

// Enters a claim among those at work, which stand by turn and then as they were made.
static enum swathe_status enter(struct sw_sums *sums, const struct claim *claims, int64_t entering)
{
  struct sw_list *active = &sums->active;
  const enum swathe_status status = grow(active, sizeof(int64_t));
  if (status) return status;
  int64_t *items = active->items, at = active->count++;
  for (; at > 0; at--) {
    const int64_t before = items[at - 1];
    if (claims[before].turn < claims[entering].turn ||
        (claims[before].turn == claims[entering].turn && before < entering))
      break;
    items[at] = before;
  }
  items[at] = entering;
  return SWATHE_OK;
}

// Lets those go that end here.
static void leave(struct sw_sums *sums, const struct claim *claims, int64_t end)
{
  int64_t *items = sums->active.items, kept = 0;
  for (int64_t i = 0; i < sums->active.count; i++)
    if (claims[items[i]].index + claims[items[i]].tokens > end) items[kept++] = items[i];
  sums->active.count = kept;
}

// One piece with a term for each claim at work.
static enum swathe_status add_piece(struct sw_sums *sums, const struct claim *claims, int64_t begin,
                                    int64_t tokens)
{
  const int64_t *active = sums->active.items, terms = sums->active.count;
  enum swathe_status status = grow(&sums->pieces, sizeof(struct sw_sum));
  if (!status)
    status = sw_list_reserve(&sums->sources, sums->sources.count + terms,
                             sizeof(struct sw_sum_source));
  if (status) return status;
  ((struct sw_sum *)sums->pieces.items)[sums->pieces.count++] = (struct sw_sum){
    begin, tokens, sums->sources.count, sums->sources.count + terms
  };
  for (int64_t i = 0; i < terms; i++) {
    struct sw_sum_source source = claims[active[i]].source;
    source.index += begin - claims[active[i]].index;
    ((struct sw_sum_source *)sums->sources.items)[sums->sources.count++] = source;
  }
  return SWATHE_OK;
}

// Sweeps the claims by ascending index; a piece ends where any claim begins or ends.
static enum swathe_status cut_pieces(struct sw_sums *sums, const struct sw_list *list)
{
  const struct claim *claims = claims_of(list);
  enum swathe_status status = sort_claims(sums, list);
  int64_t next = 0, at = 0;

  sums->active.count = 0;
  while (!status && (next < list->count || sums->active.count)) {
    const struct sw_sharding_key *keys = sums->keys.items;
    if (!sums->active.count) at = keys[next].position;
    for (; !status && next < list->count && keys[next].position == at; next++)
      status = enter(sums, claims, keys[next].index);
    int64_t end = next < list->count ? keys[next].position : INT64_MAX;
    for (int64_t i = 0; i < sums->active.count; i++) {
      const struct claim *claim = &claims[((const int64_t *)sums->active.items)[i]];
      end = smaller(end, claim->index + claim->tokens);
    }
    for (; at < end && !status; at = smaller(end, at + SW_SUM_TOKENS))
      status = add_piece(sums, claims, at, smaller(end - at, SW_SUM_TOKENS));
    leave(sums, claims, end);
  }
  return status;
}

enum swathe_status sw_sums_cut(struct sw_sums *sums)
{
  enum swathe_status status = cut_pieces(sums, &sums->wire);
  sums->wire_pieces = sums->pieces.count;
  if (!status) status = cut_pieces(sums, &sums->own);
  if (!status) status = sw_list_reserve(&sums->terms, sums->sources.count, sizeof(struct sw_term));
  return status;
}
