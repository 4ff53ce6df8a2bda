// sharding.c: layouts -> who holds which position of which document.
//
// The computed layouts cut a row into chunks; owners, rows and spans follow by arithmetic, so that
// a rank never lists what others hold.  Spans given by a caller are checked and sorted into one
// index. Stands first in the halo room: halo.c walks along documents through sw_sharding_piece_at.
#include "sharding.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

// ---- Lists and sorting -------------------------------------------------------------------------

enum swathe_status sw_list_reserve(struct sw_list *list, int64_t capacity, size_t item_bytes)
{
  if (capacity <= list->capacity) return SWATHE_OK;
  const int64_t most = (int64_t)(PTRDIFF_MAX / item_bytes);
  int64_t grown = list->capacity < most / 2 ? 2 * list->capacity : most;
  if (grown < capacity) grown = capacity;
  if (grown < 64) grown = 64;
  void *items = capacity > most ? NULL : realloc(list->items, (size_t)grown * item_bytes);
  if (!items)
    return sw_fail(SWATHE_NO_MEMORY, "no memory for %" PRId64 " items of %zu bytes in a halo plan",
                   grown, item_bytes);
  list->items = items;
  list->capacity = grown;
  return SWATHE_OK;
}

void sw_list_free(struct sw_list *list)
{
  free(list->items);
  *list = (struct sw_list){ 0 };
}

static bool key_before(const struct sw_sharding_key *a, const struct sw_sharding_key *b)
{
  if (a->rank != b->rank) return a->rank < b->rank;
  if (a->document != b->document) return a->document < b->document;
  return a->position < b->position;
}

// End of the ascending stretch that starts at `begin`.
static int64_t stretch_end(const struct sw_sharding_key *keys, int64_t begin, int64_t count)
{
  int64_t end = begin < count ? begin + 1 : begin;
  while (end < count && !key_before(&keys[end], &keys[end - 1])) end++;
  return end;
}

static void merge_stretches(const struct sw_sharding_key *from, struct sw_sharding_key *to,
                            int64_t begin, int64_t middle, int64_t end)
{
  int64_t left = begin, right = middle;
  for (int64_t i = begin; i < end; i++) {
    const bool take_right =
        right < end && (left == middle || key_before(&from[right], &from[left]));
    to[i] = take_right ? from[right++] : from[left++];
  }
}

// Merges the ascending stretches that are there, two by two: one look at a list that is already
// sorted. (qsort may allocate.)
void sw_sharding_sort(struct sw_sharding_key *keys, struct sw_sharding_key *scratch, int64_t count)
{
  struct sw_sharding_key *from = keys, *to = scratch;
  while (stretch_end(from, 0, count) < count) {
    for (int64_t begin = 0; begin < count;) {
      const int64_t middle = stretch_end(from, begin, count);
      const int64_t end = stretch_end(from, middle, count);
      merge_stretches(from, to, begin, middle, end);
      begin = end;
    }
    struct sw_sharding_key *swap = from;
    from = to;
    to = swap;
  }
  if (from != keys) memcpy(keys, from, (size_t)count * sizeof *keys);
}

// ---- Chunks ------------------------------------------------------------------------------------

// A row that a layout cuts: the packed row, or with zigzag-doc one document with its padding.
struct cut {
  int64_t first;    // token of the packed row where it begins
  int64_t tokens;
  int64_t chunks;   // < 2^32
};

// floor(chunk * tokens / chunks), without a product that could leave 64 bits.
static int64_t chunk_begin(struct cut cut, int64_t chunk)
{
  const uint64_t rest = (uint64_t)chunk * (uint64_t)(cut.tokens % cut.chunks);
  return chunk * (cut.tokens / cut.chunks) + (int64_t)(rest / (uint64_t)cut.chunks);
}

// The chunk that holds a token of the row, which is the largest whose begin is not after it:
// floor(chunk * tokens / chunks) <= token  <=>  chunk * tokens < (token + 1) * chunks.
static int64_t chunk_of(struct cut cut, int64_t token)
{
  __extension__ typedef unsigned __int128 wide;
  uint64_t product;
  assert(0 <= token && token < cut.tokens);
  if (!__builtin_mul_overflow((uint64_t)token + 1, (uint64_t)cut.chunks, &product))
    return (int64_t)((product - 1) / (uint64_t)cut.tokens);
  return (int64_t)((((wide)token + 1) * (wide)cut.chunks - 1) / (wide)cut.tokens);
}

static int64_t layout_chunks(const struct swathe_sharding *given)
{
  return given->layout == SWATHE_CONTIGUOUS ? given->ranks : 2 * (int64_t)given->ranks;
}

static struct cut packed_row(const struct sw_sharding *sharding)
{
  return (struct cut){ 0, sharding->given->tokens, layout_chunks(sharding->given) };
}

// The document's place in the packed row, padding included; `documents` itself is the row's tail,
// which no document covers.
static struct cut document_row(const struct sw_sharding *sharding, int64_t document)
{
  const int64_t begin = sharding->places[document];
  const int64_t end = document < sharding->documents ? sharding->places[document + 1]
                                                     : sharding->given->tokens;
  return (struct cut){ begin, end - begin, layout_chunks(sharding->given) };
}

static int64_t chunk_tokens(struct cut cut, int64_t chunk)
{
  return chunk_begin(cut, chunk + 1) - chunk_begin(cut, chunk);
}

// Rows a rank gets from one cut row.
static int64_t cut_rows(struct cut cut, int32_t rank, bool mirrored)
{
  return chunk_tokens(cut, rank) + (mirrored ? chunk_tokens(cut, cut.chunks - 1 - rank) : 0);
}

int64_t sw_sharding_document_tokens(const struct sw_sharding *sharding, int64_t document)
{
  return sharding->starts[document + 1] - sharding->starts[document];
}

// ---- Rows and spans of one rank ----------------------------------------------------------------

// Takes spans in order of rows, merges adjacent ones and keeps as many as there is room for.
struct span_sink {
  struct swathe_span *spans, last;
  int64_t capacity, count;
};

static bool adjacent(const struct swathe_span *before, const struct swathe_span *after)
{
  return before->document == after->document &&
         before->position + before->tokens == after->position &&
         before->row + before->tokens == after->row;
}

static void take_span(struct span_sink *sink, struct swathe_span span)
{
  if (!span.tokens) return;
  if (sink->count && adjacent(&sink->last, &span)) {
    sink->last.tokens += span.tokens;
  } else {
    sink->last = span;
    sink->count++;
  }
  if (sink->count <= sink->capacity) sink->spans[sink->count - 1] = sink->last;
}

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// What of a document lies within tokens [begin, end) of the packed row; the rank keeps `begin` in
// `row`.
static void take_document(const struct sw_sharding *sharding, struct span_sink *sink,
                          int64_t document, int64_t begin, int64_t end, int64_t row)
{
  const int64_t place = sharding->places[document];
  const int64_t first = larger(begin, place);
  const int64_t last = smaller(end, place + sw_sharding_document_tokens(sharding, document));
  if (first < last)
    take_span(sink, (struct swathe_span){ document, first - place, last - first,
                                          row + first - begin, first });
}

// The first document that ends, padding included, after this token of the packed row.
static int64_t document_at(const struct sw_sharding *sharding, int64_t token)
{
  int64_t low = 0, high = sharding->documents;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (sharding->places[middle + 1] > token) high = middle;
    else low = middle + 1;
  }
  return low;
}

static void take_packed_chunk(const struct sw_sharding *sharding, struct span_sink *sink,
                              int64_t chunk, int64_t row)
{
  const struct cut cut = packed_row(sharding);
  const int64_t begin = chunk_begin(cut, chunk), end = chunk_begin(cut, chunk + 1);
  for (int64_t d = document_at(sharding, begin);
       d < sharding->documents && sharding->places[d] < end; d++)
    take_document(sharding, sink, d, begin, end, row);
}

static void take_document_chunks(const struct sw_sharding *sharding, struct span_sink *sink,
                                 int32_t rank)
{
  int64_t row = 0;
  for (int64_t d = 0; d < sharding->documents; d++) {
    const struct cut cut = document_row(sharding, d);
    const int64_t chunks[2] = { rank, cut.chunks - 1 - rank };
    for (int half = 0; half < 2; half++) {
      const int64_t begin = chunk_begin(cut, chunks[half]),
                    end = chunk_begin(cut, chunks[half] + 1);
      take_document(sharding, sink, d, cut.first + begin, cut.first + end, row);
      row += end - begin;
    }
  }
}

static void take_given_spans(const struct sw_sharding *sharding, struct span_sink *sink,
                             int32_t rank)
{
  const struct swathe_sharding *given = sharding->given;
  for (int64_t i = given->rank_spans[rank]; i < given->rank_spans[rank + 1]; i++) {
    struct swathe_span span = given->spans[i];
    if (span.tokens) span.token = sharding->places[span.document] + span.position;
    take_span(sink, span);
  }
}

int64_t sw_sharding_spans(const struct sw_sharding *sharding, int32_t rank,
                          struct swathe_span *spans, int64_t capacity)
{
  struct span_sink sink = { .spans = spans, .capacity = capacity };
  const struct cut cut = packed_row(sharding);
  switch (sharding->given->layout) {
  case SWATHE_CONTIGUOUS:
    take_packed_chunk(sharding, &sink, rank, 0);
    break;
  case SWATHE_ZIGZAG:
    take_packed_chunk(sharding, &sink, rank, 0);
    take_packed_chunk(sharding, &sink, cut.chunks - 1 - rank, chunk_tokens(cut, rank));
    break;
  case SWATHE_ZIGZAG_DOCUMENT:
    take_document_chunks(sharding, &sink, rank);
    break;
  case SWATHE_SPANS:
    take_given_spans(sharding, &sink, rank);
    break;
  }
  return sink.count;
}

int64_t sw_sharding_rows(const struct sw_sharding *sharding, int32_t rank)
{
  const struct swathe_sharding *given = sharding->given;
  int64_t rows = 0;
  switch (given->layout) {
  case SWATHE_CONTIGUOUS:
  case SWATHE_ZIGZAG:
    return cut_rows(packed_row(sharding), rank, given->layout == SWATHE_ZIGZAG);
  case SWATHE_ZIGZAG_DOCUMENT:  // the row's tail, which is padding, is cut like a document
    for (int64_t d = 0; d <= sharding->documents; d++)
      rows += cut_rows(document_row(sharding, d), rank, true);
    return rows;
  case SWATHE_SPANS:
    if (given->rank_rows) return given->rank_rows[rank];
    for (int64_t i = given->rank_spans[rank]; i < given->rank_spans[rank + 1]; i++)
      if (given->spans[i].tokens) rows = given->spans[i].row + given->spans[i].tokens;
    return rows;
  }
  return rows;
}

// ---- Pieces ------------------------------------------------------------------------------------

// The last given piece that begins at or before the position.
static struct sw_piece given_piece(const struct sw_sharding *sharding, int64_t document,
                                   int64_t position)
{
  const struct sw_piece *pieces = sharding->pieces.items;
  int64_t low = 0, high = sharding->pieces.count;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    const struct sw_piece *piece = &pieces[middle];
    if (piece->document < document || (piece->document == document && piece->begin <= position))
      low = middle;
    else
      high = middle;
  }
  return pieces[low];
}

struct sw_piece sw_sharding_piece_at(const struct sw_sharding *sharding, int64_t document,
                                     int64_t position)
{
  const enum swathe_layout layout = sharding->given->layout;
  assert(0 <= position && position < sw_sharding_document_tokens(sharding, document));
  if (layout == SWATHE_SPANS) return given_piece(sharding, document, position);

  const struct cut cut =
      layout == SWATHE_ZIGZAG_DOCUMENT ? document_row(sharding, document) : packed_row(sharding);
  const int64_t shift =
      sharding->places[document] - cut.first;  // of the document within the cut row
  const int64_t chunk = chunk_of(cut, position + shift);
  int64_t owner = chunk, begin = chunk_begin(cut, chunk), end = chunk_begin(cut, chunk + 1);
  if (layout != SWATHE_CONTIGUOUS) {
    const int64_t mirror = cut.chunks - 1 - chunk;
    owner = smaller(chunk, mirror);
    // A rank's two chunks are one piece when nothing lies between them: the two in the middle, and
    // others where chunks are empty.
    if (cut.tokens < cut.chunks || mirror - chunk == 1 || chunk - mirror == 1) {
      if (mirror > chunk && chunk_begin(cut, mirror) == end) end = chunk_begin(cut, mirror + 1);
      if (mirror < chunk && chunk_begin(cut, mirror + 1) == begin) begin = chunk_begin(cut, mirror);
    }
  }
  return (struct sw_piece){
    .document = document,
    .begin = larger(begin - shift, 0),
    .end = smaller(end - shift, sw_sharding_document_tokens(sharding, document)),
    .row = -1,
    .owner = (int32_t)owner,
  };
}

// ---- Checks ------------------------------------------------------------------------------------

static enum swathe_status check_starts(const char *name, const int64_t *starts, int64_t documents,
                                       int64_t tokens)
{
  if (!starts)
    return sw_fail(SWATHE_BAD_SHARDING, "%" PRId64 " documents, but %s is NULL", documents, name);
  if (starts[0] != 0)
    return sw_fail(SWATHE_BAD_SHARDING, "%s[0] is %" PRId64 ", not 0", name, starts[0]);
  for (int64_t d = 0; d < documents; d++)
    if (starts[d + 1] < starts[d])
      return sw_fail(SWATHE_BAD_SHARDING,
                     "%s descends from %" PRId64 " to %" PRId64 " at document %" PRId64, name,
                     starts[d], starts[d + 1], d);
  if (starts[documents] > tokens)
    return sw_fail(SWATHE_BAD_SHARDING, "%s ends at %" PRId64 ", past the row's %" PRId64 " tokens",
                   name, starts[documents], tokens);
  return SWATHE_OK;
}

static enum swathe_status check_documents(struct sw_sharding *sharding)
{
  const struct swathe_sharding *given = sharding->given;
  const int64_t documents = given->documents;
  if (documents == 0) {
    sharding->whole[0] = 0;
    sharding->whole[1] = given->tokens;
    sharding->starts = sharding->places = sharding->whole;
    sharding->documents = 1;
    return SWATHE_OK;
  }
  enum swathe_status status =
      check_starts("document_starts", given->document_starts, documents, given->tokens);
  if (status) return status;
  sharding->documents = documents;
  sharding->starts = sharding->places = given->document_starts;
  if (!given->document_starts_padded) return SWATHE_OK;

  sharding->places = given->document_starts_padded;
  status = check_starts("document_starts_padded", sharding->places, documents, given->tokens);
  for (int64_t d = 0; !status && d < documents; d++) {
    const int64_t tokens = sw_sharding_document_tokens(sharding, d);
    const int64_t room = sharding->places[d + 1] - sharding->places[d];
    if (tokens > room)
      status =
          sw_fail(SWATHE_BAD_SHARDING,
                  "document %" PRId64 " has %" PRId64 " tokens, but its padded place has %" PRId64,
                  d, tokens, room);
  }
  return status;
}

// One span of the caller's; `row_end` is the first row that is free, `rows` how many there are.
static enum swathe_status check_span(const struct sw_sharding *sharding, int32_t rank,
                                     int64_t index, const struct swathe_span *span, int64_t row_end,
                                     int64_t rows)
{
  if (span->tokens < 0)
    return sw_fail(SWATHE_BAD_SHARDING, "rank %d, span %" PRId64 ": %" PRId64 " tokens", rank,
                   index, span->tokens);
  if (!span->tokens) return SWATHE_OK;
  if (span->document < 0 || span->document >= sharding->documents)
    return sw_fail(SWATHE_BAD_SHARDING,
                   "rank %d, span %" PRId64 ": document %" PRId64 " is none of the %" PRId64, rank,
                   index, span->document, sharding->documents);
  const int64_t length = sw_sharding_document_tokens(sharding, span->document);
  if (span->position < 0 || span->tokens > length - span->position)
    return sw_fail(SWATHE_BAD_SHARDING,
                   "rank %d, span %" PRId64 ": %" PRId64 " tokens from position %" PRId64
                   " leave document %" PRId64 " of %" PRId64 " tokens",
                   rank, index, span->tokens, span->position, span->document, length);
  if (span->row < row_end)
    return sw_fail(SWATHE_BAD_SHARDING,
                   "rank %d, span %" PRId64 ": begins at row %" PRId64
                   ", but the rows before %" PRId64
                   " belong to earlier spans; rows must ascend and not overlap",
                   rank, index, span->row, row_end);
  if (span->row > rows || span->tokens > rows - span->row)
    return sw_fail(SWATHE_BAD_SHARDING,
                   "rank %d, span %" PRId64 ": %" PRId64 " tokens from row %" PRId64
                   " leave the rank's %" PRId64 " rows",
                   rank, index, span->tokens, span->row, rows);
  return SWATHE_OK;
}

static enum swathe_status check_rank_spans(const struct swathe_sharding *given)
{
  if (!given->rank_spans) return sw_fail(SWATHE_BAD_SHARDING, "rank_spans is NULL");
  if (given->rank_spans[0] != 0)
    return sw_fail(SWATHE_BAD_SHARDING, "rank_spans[0] is %" PRId64 ", not 0",
                   given->rank_spans[0]);
  for (int32_t r = 0; r < given->ranks; r++) {
    if (given->rank_spans[r + 1] < given->rank_spans[r])
      return sw_fail(SWATHE_BAD_SHARDING,
                     "rank_spans descends from %" PRId64 " to %" PRId64 " at rank %d",
                     given->rank_spans[r], given->rank_spans[r + 1], r);
    if (given->rank_rows && given->rank_rows[r] < 0)
      return sw_fail(SWATHE_BAD_SHARDING, "rank_rows of rank %d is %" PRId64, r,
                     given->rank_rows[r]);
  }
  if (given->rank_spans[given->ranks] > 0 && !given->spans)
    return sw_fail(SWATHE_BAD_SHARDING, "rank_spans counts %" PRId64 " spans, but spans is NULL",
                   given->rank_spans[given->ranks]);
  return SWATHE_OK;
}

// The rank's spans, merged, to the end of `unsorted`, which has room for them.
static enum swathe_status collect_pieces(struct sw_sharding *sharding, int32_t rank)
{
  const struct swathe_sharding *given = sharding->given;
  const int64_t first = given->rank_spans[rank];
  const int64_t rows = given->rank_rows ? given->rank_rows[rank] : INT64_MAX;
  struct sw_piece *pieces = sharding->unsorted.items;
  int64_t row_end = 0;
  for (int64_t i = first; i < given->rank_spans[rank + 1]; i++) {
    const struct swathe_span *span = &given->spans[i];
    const enum swathe_status status = check_span(sharding, rank, i - first, span, row_end, rows);
    if (status) return status;
    if (!span->tokens) continue;
    struct sw_piece *last = sharding->unsorted.count ? &pieces[sharding->unsorted.count - 1] : NULL;
    if (last && last->owner == rank && last->document == span->document &&
        last->end == span->position && row_end == span->row) {
      last->end += span->tokens;
    } else {
      pieces[sharding->unsorted.count++] = (struct sw_piece){
        span->document, span->position, span->position + span->tokens, span->row, i - first, rank
      };
    }
    row_end = span->row + span->tokens;
  }
  return SWATHE_OK;
}

// Every token of every document is held once: walks the sorted pieces along the documents.
static enum swathe_status check_cover(const struct sw_sharding *sharding)
{
  const struct sw_piece *piece = sharding->pieces.items;
  const struct sw_piece *end = piece + sharding->pieces.count;
  for (int64_t d = 0; d < sharding->documents; d++) {
    const int64_t length = sw_sharding_document_tokens(sharding, d);
    int64_t covered = 0;
    for (; piece < end && piece->document == d; piece++) {
      if (piece->begin > covered) break;
      if (piece->begin < covered)
        return sw_fail(SWATHE_BAD_SHARDING,
                       "document %" PRId64 ": position %" PRId64
                       " is held twice, by rank %d, span %" PRId64 " and by rank %d, span %" PRId64,
                       d, piece->begin, piece[-1].owner, piece[-1].span, piece->owner, piece->span);
      covered = piece->end;
    }
    if (covered < length)
      return sw_fail(SWATHE_BAD_SHARDING,
                     "document %" PRId64 ": positions [%" PRId64 ", %" PRId64
                     ") are held by no rank",
                     d, covered, piece < end && piece->document == d ? piece->begin : length);
  }
  return SWATHE_OK;
}

static enum swathe_status index_spans(struct sw_sharding *sharding)
{
  enum swathe_status status = check_rank_spans(sharding->given);
  if (status) return status;
  const int64_t most = sharding->given->rank_spans[sharding->given->ranks];
  if ((status = sw_list_reserve(&sharding->unsorted, most, sizeof(struct sw_piece))) ||
      (status = sw_list_reserve(&sharding->pieces, most, sizeof(struct sw_piece))) ||
      (status = sw_list_reserve(&sharding->keys, most, sizeof(struct sw_sharding_key))) ||
      (status = sw_list_reserve(&sharding->scratch, most, sizeof(struct sw_sharding_key))))
    return status;

  sharding->unsorted.count = 0;
  for (int32_t r = 0; r < sharding->given->ranks; r++)
    if ((status = collect_pieces(sharding, r))) return status;

  const struct sw_piece *unsorted = sharding->unsorted.items;
  struct sw_piece *pieces = sharding->pieces.items;
  struct sw_sharding_key *keys = sharding->keys.items;
  sharding->pieces.count = sharding->unsorted.count;
  for (int64_t i = 0; i < sharding->pieces.count; i++)
    keys[i] = (struct sw_sharding_key){
      .document = unsorted[i].document, .position = unsorted[i].begin, .index = i
    };
  sw_sharding_sort(keys, sharding->scratch.items, sharding->pieces.count);
  for (int64_t i = 0; i < sharding->pieces.count; i++) pieces[i] = unsorted[keys[i].index];
  return check_cover(sharding);
}

enum swathe_status sw_sharding_open(struct sw_sharding *sharding,
                                    const struct swathe_sharding *given)
{
  sharding->given = given;
  if ((unsigned)given->layout > SWATHE_SPANS)
    return sw_fail(SWATHE_BAD_SHARDING, "there is no layout %d", (int)given->layout);
  if (given->ranks < 1) return sw_fail(SWATHE_BAD_SHARDING, "%d ranks; at least 1", given->ranks);
  if (given->batch < 1)
    return sw_fail(SWATHE_BAD_SHARDING, "a batch of %d; at least 1", given->batch);
  if (given->tokens < 0) return sw_fail(SWATHE_BAD_SHARDING, "%" PRId64 " tokens", given->tokens);
  if (given->documents < 0)
    return sw_fail(SWATHE_BAD_SHARDING, "%" PRId64 " documents", given->documents);
  const enum swathe_status status = check_documents(sharding);
  if (status || given->layout != SWATHE_SPANS) return status;
  return index_spans(sharding);
}

void sw_sharding_free(struct sw_sharding *sharding)
{
  sw_list_free(&sharding->pieces);
  sw_list_free(&sharding->unsorted);
  sw_list_free(&sharding->keys);
  sw_list_free(&sharding->scratch);
}

// ---- Public ------------------------------------------------------------------------------------

static enum swathe_status open_for_rank(struct sw_sharding *opened,
                                        const struct swathe_sharding *sharding, int32_t rank)
{
  const enum swathe_status status = sw_sharding_open(opened, sharding);
  if (!status && (rank < 0 || rank >= sharding->ranks))
    return sw_fail(SWATHE_BAD_USE, "rank %d is none of the %d", rank, sharding->ranks);
  return status;
}

enum swathe_status swathe_sharding_rows(const struct swathe_sharding *sharding, int32_t rank,
                                        int64_t *rows)
{
  struct sw_sharding opened = { 0 };
  const enum swathe_status status = open_for_rank(&opened, sharding, rank);
  if (!status) *rows = sw_sharding_rows(&opened, rank);
  sw_sharding_free(&opened);
  return status;
}

enum swathe_status swathe_sharding_spans(const struct swathe_sharding *sharding, int32_t rank,
                                         struct swathe_span *spans, int64_t capacity,
                                         int64_t *count)
{
  struct sw_sharding opened = { 0 };
  const enum swathe_status status = open_for_rank(&opened, sharding, rank);
  if (!status) *count = sw_sharding_spans(&opened, rank, spans, capacity);
  sw_sharding_free(&opened);
  return status;
}
