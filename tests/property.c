// property.c: random cases: drawn, written, read and made small; see property.h.
#include "property.h"

#include <inttypes.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *const property_isas[] = { "best", "avx2", "generic" };
const char *const property_scripts[] = { "fb", "ffpfb", "fbpsfb", NULL };
const char *const property_probes[] = { "plain", "isolate", "threads", "differences" };
static const char *const layouts[] = { "contiguous", "zigzag", "zigzag-doc", "spans" };

enum { SCRIPTS = 3, LAYOUTS = 4 };

// ---- The table ---------------------------------------------------------------------------------

// One member of struct property (or an array of them, one per document).  `least` is its simplest
// value.
struct field {
  const char *name;
  size_t offset;
  int64_t least;
  const char *const *names;  // the values' names, or NULL
  int64_t name_count;
  bool per_document;
  bool fixed;           // shrinking leaves it alone
  bool all_or_nothing;  // shrinking tries the least value only
  bool may_be_less;     // an unlimited window, a negative scale
};

#define MEMBER(member)     .name = #member, .offset = offsetof(struct property, member)
#define NAMED(list, count) .names = list, .name_count = count

// In the order in which shrinking tries them: what makes the rest cheaper and plainer first.
static const struct field fields[] = {
  { MEMBER(config), .all_or_nothing = true },
  { MEMBER(optimised) },
  { MEMBER(isa), NAMED(property_isas, PROPERTY_ISAS) },
  { MEMBER(probe), NAMED(property_probes, PROPERTY_PROBES) },
  { MEMBER(script), NAMED(property_scripts, SCRIPTS) },
  { MEMBER(layout), NAMED(layouts, LAYOUTS) },
  { MEMBER(batch), .least = 1 },
  { MEMBER(ranks), .least = 1 },
  { MEMBER(documents), .fixed = true },
  { MEMBER(lengths), .per_document = true },
  { MEMBER(paddings), .per_document = true },
  { MEMBER(tail) },
  { MEMBER(kv_heads), .least = 1 },
  { MEMBER(gqa), .least = 1 },
  { MEMBER(softcap) },
  { MEMBER(sinks) },
  { MEMBER(bf16) },
  { MEMBER(narrow_home) },
  { MEMBER(gain), .least = 1 },
  { MEMBER(sink) },
  { MEMBER(scale), .may_be_less = true },
  { MEMBER(right), .may_be_less = true },
  { MEMBER(left), .may_be_less = true },
  { MEMBER(dim_qk), .least = 1 },
  { MEMBER(dim_v), .least = 1 },
  { MEMBER(pieces), .least = 1 },
  { MEMBER(row_gap) },
  { MEMBER(before) },
  { MEMBER(keep_halo) },
  { MEMBER(head_major) },
  { MEMBER(gap) },
  { MEMBER(cuda), .fixed = true },
  { MEMBER(seed), .fixed = true },
};
enum { FIELDS = sizeof fields / sizeof fields[0] };

static int64_t *cell(struct property *property, const struct field *field, int64_t index)
{
  return (int64_t *)(void *)((char *)property + field->offset) + index;
}

static int64_t value_of(const struct property *property, const struct field *field, int64_t index)
{
  return *((const int64_t *)(const void *)((const char *)property + field->offset) + index);
}

static int64_t cells(const struct property *property, const struct field *field)
{
  return field->per_document ? property->documents : 1;
}

// ---- Drawing -----------------------------------------------------------------------------------

// splitmix64 (Steele, Lea, Flood 2014).
int64_t property_random(uint64_t *state, int64_t below)
{
  uint64_t z = *state += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  z ^= z >> 31;
  return (int64_t)(z % (uint64_t)below);
}

// Uniform in [low, high].
static int64_t between(uint64_t *state, int64_t low, int64_t high)
{
  return low + property_random(state, high - low + 1);
}

static bool chance(uint64_t *state, int64_t percent)
{
  return property_random(state, 100) < percent;
}

static int64_t draw_dim(uint64_t *state)
{
  static const int64_t usual[] = { 16, 32, 64, 128, 192, 256 };
  if (chance(state, 15)) return usual[property_random(state, 6)];
  return chance(state, 40) ? between(state, 1, 20) : between(state, 1, 72);
}

static int64_t draw_window(uint64_t *state)
{
  static const int64_t edges[] = { 8, 16, 32, 48, 64, 96, 128 };
  switch (property_random(state, 10)) {
  case 0:
    return 0;
  case 1:
  case 2:
    return between(state, 1, 8);
  case 3:
  case 4:
    return between(state, 0, 80);
  case 5:
  case 6:
    return edges[property_random(state, 7)] + between(state, -1, 1);
  case 7:
    return -1;
  case 8:
    return between(state, 81, 300);
  default:
    return between(state, 4, 40);
  }
}

void property_draw_kernel(uint64_t *state, struct property *property)
{
  static const int64_t gqas[] = { 1, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8, 8 };
  *property = (struct property){
    .gqa = gqas[property_random(state, 12)],
    .dim_qk = draw_dim(state),
    .left = draw_window(state),
    .right = chance(state, 55) ? 0 : draw_window(state),
    .bf16 = chance(state, 40),
    .sinks = chance(state, 40),
    .softcap = chance(state, 35),
  };
  property->dim_v = chance(state, 40) ? property->dim_qk : draw_dim(state);
}

// Keys that a query sees, at most.
static int64_t band(const struct property *p, int64_t tokens)
{
  const int64_t left = p->left < 0 ? tokens : p->left, right = p->right < 0 ? tokens : p->right;
  const int64_t keys = left + right + 1;
  return keys < tokens ? keys : tokens;
}

// A row's length: mostly short, around window * ranks, now and then long enough for several units.
static int64_t draw_tokens(uint64_t *state, const struct property *p)
{
  const int64_t kind = property_random(state, 100);
  const bool large = kind >= 97;
  const int64_t most_elements = large ? 320000 : 60000;  // of q, k, v and dout
  const int64_t most_work = large ? 5000000 : 1000000;   // multiply-adds of the reference, about
  const int64_t dims = p->dim_qk + p->dim_v, heads = p->gqa * p->kv_heads;
  const int64_t share = p->left > 0 ? p->left : p->right > 0 ? p->right : 9;
  int64_t tokens = between(state, 0, 80);

  if (kind >= 70) tokens = p->ranks * (share + between(state, -1, 1)) + between(state, 0, 2);
  if (kind >= 87) tokens = between(state, 81, 300);
  if (large) tokens = between(state, 1100, 2300);
  while (tokens * p->batch * (heads + p->kv_heads) * dims > most_elements ||
         tokens * band(p, tokens) * heads * p->batch * dims > most_work)
    tokens = tokens * 3 / 4;
  return tokens;
}

static void draw_documents(uint64_t *state, struct property *p)
{
  const int64_t tokens = draw_tokens(state, p);
  const bool padding = chance(state, 40);
  int64_t left = tokens;

  memset(p->lengths, 0, sizeof p->lengths);
  memset(p->paddings, 0, sizeof p->paddings);
  p->documents = chance(state, 40) ? 0 : between(state, 1, PROPERTY_DOCUMENTS);
  for (int64_t d = 0; d < p->documents; d++) {
    const int64_t most = 2 * tokens / p->documents + 1;
    p->lengths[d] = chance(state, 12) ? 0 : between(state, 0, most < left ? most : left);
    if (d + 1 == p->documents && chance(state, 50)) p->lengths[d] = left;
    left -= p->lengths[d];
    if (padding) p->paddings[d] = chance(state, 50) ? between(state, 0, 5) : 0;
  }
  p->tail = p->documents == 0 ? tokens : chance(state, 50) ? 0 : between(state, 0, 9);
}

static enum property_probe draw_probe(uint64_t *state, const struct property *p)
{
  if (p->documents > 1 && chance(state, 20)) return PROPERTY_ISOLATE;
  if (chance(state, 6)) return PROPERTY_THREADS;
  return !p->bf16 && property_tokens(p) <= 40 && chance(state, 8) ? PROPERTY_DIFFERENCES
                                                                  : PROPERTY_PLAIN;
}

void property_draw_problem(uint64_t *state, struct property *p)
{
  const int64_t most_heads = p->gqa > 12 ? 1 : 12 / p->gqa;
  const double usual_scale = 1000 / sqrt((double)p->dim_qk);

  p->kv_heads = chance(state, 60) ? between(state, 1, most_heads < 2 ? most_heads : 2)
                                  : between(state, 1, most_heads);
  if (p->gqa == 8 && chance(state, 6)) p->kv_heads = 8;
  p->narrow_home = chance(state, 20);
  p->softcap = p->softcap ? between(state, 1, 50) : 0;
  p->scale = chance(state, 25) ? (int64_t)(usual_scale * (double)between(state, -10, 20) / 10) : 0;
}

void property_draw_data(uint64_t *state, struct property *p)
{
  p->gain = chance(state, p->softcap ? 60 : 10) ? between(state, 2, 12) : 1;
  p->sink = chance(state, 30) ? 30 : between(state, 0, 5);
  p->batch = chance(state, 70) ? 1 : between(state, 2, 3);
  p->layout = property_random(state, LAYOUTS);
  p->ranks = between(state, 1, 8);
  draw_documents(state, p);
  p->pieces = between(state, 1, 8);
  p->row_gap = chance(state, 50) ? 0 : between(state, 1, 4);
  p->head_major = chance(state, 40);
  p->gap = chance(state, 40) ? between(state, 1, 5) : 0;
  p->keep_halo = chance(state, 50);
  p->script = chance(state, 60) ? 0 : property_random(state, SCRIPTS);
  p->before = chance(state, 25);
  p->seed = property_random(state, 1000000000);
  p->probe = draw_probe(state, p);
}

// ---- What it stands for ------------------------------------------------------------------------

int64_t property_tokens(const struct property *property)
{
  int64_t tokens = property->tail;
  for (int64_t d = 0; d < property->documents; d++)
    tokens += property->lengths[d] + property->paddings[d];
  return tokens;
}

struct swathe_problem property_problem(const struct property *p)
{
  struct swathe_problem problem;
  swathe_problem_init(&problem);
  problem.q_heads = (int32_t)(p->gqa * p->kv_heads);
  problem.kv_heads = (int32_t)p->kv_heads;
  problem.head_dim_qk = (int32_t)p->dim_qk;
  problem.head_dim_v = (int32_t)p->dim_v;
  problem.window_left = p->left < 0 ? SWATHE_UNLIMITED : p->left;
  problem.window_right = p->right < 0 ? SWATHE_UNLIMITED : p->right;
  problem.dtype = p->bf16 ? SWATHE_BF16 : SWATHE_F32;
  if (p->cuda) problem.target = SWATHE_CUDA;
  if (p->cuda && !p->bf16) problem.dtype = SWATHE_F16;
  problem.halo_gradient = p->narrow_home ? SWATHE_BF16 : SWATHE_F32;
  problem.sinks = p->sinks != 0;
  problem.softcap = (double)p->softcap;
  problem.scale = (double)p->scale / 1000;
  return problem;
}

// A piece of a document on its way to a rank.
struct piece {
  int64_t document, position, tokens, rank, turn;
};

static int by_rank_and_turn(const void *a, const void *b)
{
  const struct piece *x = a, *y = b;
  if (x->rank != y->rank) return x->rank < y->rank ? -1 : 1;
  return x->turn < y->turn ? -1 : x->turn > y->turn;
}

// Cuts every document at random (also into nothing) and deals the pieces; returns how many.
static int64_t cut_pieces(uint64_t *state, const struct property *p, struct piece *pieces)
{
  int64_t count = 0;
  for (int64_t d = 0; d < (p->documents ? p->documents : 1); d++) {
    const int64_t length = p->documents ? p->lengths[d] : p->tail;
    const int64_t parts = between(state, 1, p->pieces);
    int64_t position = 0;
    for (int64_t i = 0; i < parts; i++) {
      const int64_t most = 2 * length / parts + 1, left = length - position;
      int64_t tokens = between(state, 0, most < left ? most : left);
      if (i + 1 == parts) tokens = left;
      pieces[count++] = (struct piece){ d, position, tokens, property_random(state, p->ranks),
                                        property_random(state, 1 << 30) };
      position += tokens;
    }
  }
  qsort(pieces, (size_t)count, sizeof *pieces, by_rank_and_turn);
  return count;
}

static void deal_spans(const struct property *p, struct property_sharding *sharding)
{
  struct piece *pieces = calloc((size_t)(p->pieces * PROPERTY_DOCUMENTS), sizeof *pieces);
  uint64_t state = (uint64_t)p->seed ^ 0x5eed;
  const int64_t count = cut_pieces(&state, p, pieces);
  int64_t next = 0;

  sharding->spans = calloc((size_t)count, sizeof *sharding->spans);
  sharding->rank_spans = calloc((size_t)p->ranks + 1, sizeof *sharding->rank_spans);
  sharding->rank_rows = calloc((size_t)p->ranks, sizeof *sharding->rank_rows);
  for (int64_t rank = 0; rank < p->ranks; rank++) {
    int64_t row = 0;
    for (; next < count && pieces[next].rank == rank; next++) {
      row += between(&state, 0, p->row_gap);
      sharding->spans[next] = (struct swathe_span){
        .document = pieces[next].document,
        .position = pieces[next].position,
        .tokens = pieces[next].tokens,
        .row = row,
      };
      row += pieces[next].tokens;
    }
    sharding->rank_spans[rank + 1] = next;
    sharding->rank_rows[rank] = row + between(&state, 0, p->row_gap);
  }
  free(pieces);
  sharding->view.spans = sharding->spans;
  sharding->view.rank_spans = sharding->rank_spans;
  sharding->view.rank_rows = sharding->rank_rows;
}

struct property_sharding *property_sharding_make(const struct property *p)
{
  struct property_sharding *sharding = calloc(1, sizeof *sharding);
  bool padding = false;

  for (int64_t d = 0; d < p->documents; d++) {
    sharding->starts[d + 1] = sharding->starts[d] + p->lengths[d];
    sharding->padded[d + 1] = sharding->padded[d] + p->lengths[d] + p->paddings[d];
    padding = padding || p->paddings[d];
  }
  sharding->view = (struct swathe_sharding){
    .layout = (enum swathe_layout)p->layout,
    .ranks = (int32_t)p->ranks,
    .batch = (int32_t)p->batch,
    .tokens = property_tokens(p),
    .documents = p->documents,
    .document_starts = p->documents ? sharding->starts : NULL,
    .document_starts_padded = padding ? sharding->padded : NULL,
  };
  if (p->layout == SWATHE_SPANS) deal_spans(p, sharding);
  return sharding;
}

void property_sharding_free(struct property_sharding *sharding)
{
  free(sharding->spans);
  free(sharding->rank_spans);
  free(sharding->rank_rows);
  free(sharding);
}

// ---- Text --------------------------------------------------------------------------------------

void property_format(const struct property *property, char *text, size_t size)
{
  size_t used = 0;
  text[0] = 0;
  for (int f = 0; f < FIELDS; f++) {
    const struct field *field = &fields[f];
    const int64_t count = cells(property, field);
    bool plain = true;
    for (int64_t i = 0; i < count; i++)
      plain = plain && value_of(property, field, i) == field->least;
    for (int64_t i = 0; i < count && !plain && used < size; i++) {
      const int64_t value = value_of(property, field, i);
      used += (size_t)snprintf(text + used, size - used, i ? "%s," : "%s%s=",
                               i      ? ""
                               : used ? " "
                                      : "",
                               field->name);
      if (used >= size) break;
      if (field->names)
        used += (size_t)snprintf(text + used, size - used, "%s", field->names[value]);
      else used += (size_t)snprintf(text + used, size - used, "%" PRId64, value);
    }
  }
}

static const struct field *find_field(const char *name, size_t length)
{
  for (int f = 0; f < FIELDS; f++)
    if (strlen(fields[f].name) == length && !strncmp(fields[f].name, name, length))
      return &fields[f];
  return NULL;
}

static bool parse_value(const struct field *field, const char *text, const char **end,
                        int64_t *value)
{
  const size_t length = strcspn(text, ", ");
  *end = text + length;
  for (int64_t i = 0; i < field->name_count; i++)
    if (strlen(field->names[i]) == length && !strncmp(field->names[i], text, length)) {
      *value = i;
      return true;
    }
  char *stop;
  *value = strtoll(text, &stop, 10);
  return !field->names && length && stop == *end;
}

bool property_parse(const char *text, struct property *property, char *words, size_t size)
{
  memset(property, 0, sizeof *property);
  for (int f = 0; f < FIELDS; f++) *cell(property, &fields[f], 0) = fields[f].least;
  while (*(text += strspn(text, " "))) {
    const size_t length = strcspn(text, "= ");
    const struct field *field = find_field(text, length);
    const char *rest = text + length;
    if (!field || *rest != '=') {
      snprintf(words, size, "'%.*s' is no field of a case", (int)length, text);
      return false;
    }
    const int64_t most = field->per_document ? PROPERTY_DOCUMENTS : 1;
    int64_t i = 0;
    do {
      if (i == most || !parse_value(field, rest + 1, &rest, cell(property, field, i++))) {
        snprintf(words, size, "'%.*s' has a value it cannot have", (int)length, text);
        return false;
      }
    } while (*rest == ',');
    text = rest;
  }
  bool sound = property->documents >= 0 && property->documents <= PROPERTY_DOCUMENTS &&
               property->ranks <= PROPERTY_RANKS;
  for (int f = 0; f < FIELDS && sound; f++)
    for (int64_t i = 0; i < cells(property, &fields[f]); i++)
      sound =
          sound && (fields[f].may_be_less || value_of(property, &fields[f], i) >= fields[f].least);
  if (!sound) snprintf(words, size, "a value is out of range");
  return sound;
}

// ---- Shrinking ---------------------------------------------------------------------------------

struct shrinking {
  struct property *best;
  bool (*fails)(void *arg, const struct property *property);
  void *arg;
  int asked, attempts;
};

static bool still_fails(struct shrinking *shrinking, const struct property *smaller)
{
  if (shrinking->asked >= shrinking->attempts) return false;
  shrinking->asked++;
  if (!shrinking->fails(shrinking->arg, smaller)) return false;
  *shrinking->best = *smaller;
  return true;
}

static bool drop_documents(struct shrinking *shrinking)
{
  bool any = false;
  for (int64_t d = shrinking->best->documents - 1; d >= 0; d--) {
    struct property smaller = *shrinking->best;
    const size_t behind = (size_t)(smaller.documents - d - 1) * sizeof(int64_t);
    memmove(&smaller.lengths[d], &smaller.lengths[d + 1], behind);
    memmove(&smaller.paddings[d], &smaller.paddings[d + 1], behind);
    smaller.documents--;
    smaller.lengths[smaller.documents] = smaller.paddings[smaller.documents] = 0;
    any = still_fails(shrinking, &smaller) || any;
  }
  if (shrinking->best->documents == 1) {  // the row as one document
    struct property smaller = *shrinking->best;
    smaller.tail = smaller.lengths[0];
    smaller.documents = smaller.lengths[0] = smaller.paddings[0] = 0;
    any = still_fails(shrinking, &smaller) || any;
  }
  return any;
}

// Tries the least value, else comes down in halves, else in ones.
static bool lower_cell(struct shrinking *shrinking, const struct field *field, int64_t index)
{
  bool any = false;
  for (;;) {
    const int64_t value = value_of(shrinking->best, field, index);
    const int64_t tries[] = { field->least, field->least + (value - field->least) / 2,
                              value > field->least ? value - 1 : value + 1 };
    bool lowered = false;
    if (value == field->least) return any;
    for (int i = 0; i < (field->all_or_nothing ? 1 : 3) && !lowered; i++) {
      struct property smaller = *shrinking->best;
      if (tries[i] == value || (i && tries[i] == field->least)) continue;
      *cell(&smaller, field, index) = tries[i];
      lowered = still_fails(shrinking, &smaller);
    }
    if (!lowered) return any;
    any = true;
  }
}

int property_shrink(struct property *property,
                    bool (*fails)(void *arg, const struct property *property), void *arg,
                    int attempts)
{
  struct shrinking shrinking = { property, fails, arg, 0, attempts };
  bool any = true;
  while (any && shrinking.asked < attempts) {
    any = drop_documents(&shrinking);
    for (int f = 0; f < FIELDS; f++)
      for (int64_t i = 0; !fields[f].fixed && i < cells(property, &fields[f]); i++)
        any = lower_cell(&shrinking, &fields[f], i) || any;
  }
  return shrinking.asked;
}
