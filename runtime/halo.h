// halo.h: spans -> who sends what to whom.  Pure arithmetic; no communication, no tensors.
//
// A plan is made for one rank.  Its pieces, in order of the wire:
//   - receives: keys this rank needs and others hold, one message per peer, each of segments;
//   - sends: keys others need and this rank holds, likewise.  Both ends list the same segments of a
//     message in the same order, so nothing but the keys travels.
//   - for each of this rank's spans, its segments: where each visible key outside the span lives.
#ifndef SW_HALO_H
#define SW_HALO_H

#include "problem.h"

// Consecutive keys of one document with one owner.
struct sw_halo_segment {
  int64_t document, position, tokens;
  int64_t row;        // of the first key, in this rank's tensors; -1: another rank is the owner
  int64_t slot;       // of the first key: token of this rank's receive or send buffer; -1: own rows
  int32_t owner;      // rank that holds it
  int32_t reader;     // rank that needs it
  int32_t hops;       // shares between them along the document; 0 when the owner is the reader
  int32_t span;       // in needs: index of the span that needs it; else -1, for several may
};

struct sw_halo_message {
  int32_t peer;
  int64_t slot, tokens;                 // of the buffer: [slot, slot + tokens)
  int64_t segment_begin, segment_end;   // in `receives` or `sends`, slots ascending
};

struct sw_halo_plan {
  int32_t rank;
  int64_t rows;                         // of this rank's tensors
  int64_t span_count, receive_count, send_count, need_count, gap_count;
  int64_t receive_message_count, send_message_count;
  int64_t receive_tokens, send_tokens, own_tokens;
  int32_t hops;                         // largest
  const struct swathe_span *spans;      // this rank's by row; adjacent merged, empty dropped
  const struct sw_halo_segment *receives, *sends;      // by message, in wire order
  const struct sw_halo_message *receive_messages, *send_messages;  // ascending peer
  // needs: every visible key outside its span, span by span, ascending position; slot -1 = own
  // rows.  Span s has needs [need_begin[s], need_begin[s + 1]).
  const struct sw_halo_segment *needs;
  const int64_t *need_begin;            // [span_count + 1]
  const struct sw_halo_gap *gaps;       // rows no span covers, ascending
};

struct sw_halo_gap { int64_t row, rows; };

// Makes plans; keeps its memory from one to the next, so that nothing is allocated after warm-up.
struct sw_halo_planner;
enum swathe_status sw_halo_planner_create(struct sw_halo_planner **planner);
void sw_halo_planner_destroy(struct sw_halo_planner *planner);

// The rank's plan for this sharding; borrowed from the planner until its next call.
// SWATHE_BAD_SHARDING: spans overlap, a document leaves its bounds, tokens are missing, ...
enum swathe_status sw_halo_plan(struct sw_halo_planner *planner,
                                const struct swathe_problem *problem,
                                const struct swathe_sharding *sharding, int32_t rank,
                                const struct sw_halo_plan **plan);

#endif
