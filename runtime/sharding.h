// sharding.h: layouts -> who holds which position of which document.  Private to the halo room, but
// for lists that grow and the sort, which sums.c works with too.
#ifndef SW_SHARDING_H
#define SW_SHARDING_H

#include "error.h"

// An array that grows and is never given back before sw_list_free.  The user knows the type of its
// items.
struct sw_list {
  void *items;
  int64_t count, capacity;
};

// Room for at least `capacity` items; what is there stays.
enum swathe_status sw_list_reserve(struct sw_list *list, int64_t capacity, size_t item_bytes);
void sw_list_free(struct sw_list *list);

// A span seen along its document: positions [begin, end) of one owner, in consecutive rows of its
// tensors.
struct sw_piece {
  int64_t document, begin, end;
  int64_t row;    // of `begin` in the owner's tensors; SWATHE_SPANS only, else -1: nobody but the
                  // owner asks
  int64_t span;   // SWATHE_SPANS only: index in the owner's list, for words
  int32_t owner;
};

// What lists of pieces and segments are sorted by: rank, then document, then position.
struct sw_sharding_key {
  int64_t document, position;
  int64_t piece;  // first position of the owner's piece; carried, not compared
  int64_t index;  // of the item this key stands for; carried, not compared
  int32_t rank;
};

// Sorts in place, equal keys in their old order; `scratch` is [count].  Allocates nothing.
void sw_sharding_sort(struct sw_sharding_key *keys, struct sw_sharding_key *scratch, int64_t count);

// A checked sharding.  Start with all zeros; may be opened again and again, and keeps its memory.
struct sw_sharding {
  const struct swathe_sharding *given;  // borrowed until the next open
  int64_t documents;                    // at least 1
  const int64_t *starts;                // [documents + 1] cumulative tokens
  const int64_t *places;                // [documents + 1] where documents begin in the packed row
  int64_t whole[2];                     // the starts of a row that is one document
  struct sw_list pieces;                // SWATHE_SPANS: of every rank, ascending (document, begin)
  struct sw_list unsorted, keys, scratch;
};

// SWATHE_BAD_SHARDING: see halo.h.
enum swathe_status sw_sharding_open(struct sw_sharding *sharding,
                                    const struct swathe_sharding *given);
void sw_sharding_free(struct sw_sharding *sharding);

// Rows of the rank's tensors.
int64_t sw_sharding_rows(const struct sw_sharding *sharding, int32_t rank);

// The rank's spans by ascending row, adjacent ones merged, empty ones dropped.  Writes the first
// `capacity`; returns how many there are.
int64_t sw_sharding_spans(const struct sw_sharding *sharding, int32_t rank,
                          struct swathe_span *spans, int64_t capacity);

int64_t sw_sharding_document_tokens(const struct sw_sharding *sharding, int64_t document);

// The piece that holds this position, which must be within the document.
struct sw_piece sw_sharding_piece_at(const struct sw_sharding *sharding, int64_t document,
                                     int64_t position);

#endif
