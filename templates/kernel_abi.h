// kernel_abi.h: what the host and an emitted kernel hand each other.
//
// One text for both sides: the runtime includes it, the generator pastes it into every emitted
// source (which includes no header of any kind).  So only built-in types stand here.  All strides
// are in elements, all offsets 64-bit.  `elem` is the problem's dtype: float, or bfloat16 as bits.

typedef __INT64_TYPE__ sw_int64;

// A tensor of [batch][token][head][dim]: dim is contiguous, the rest goes by stride.
struct sw_view {
  void    *data;                      // first token, head 0, batch 0
  sw_int64 token, head, batch;        // strides
};

// A run: consecutive key positions of one document that lie evenly spaced in memory, in the rank's
// own tensor or in the halo buffer.  The kernel does not know which.
struct sw_run {
  sw_int64       position, tokens;    // first key position within its document, how many
  sw_int64       wire;                // whether k and v lie in the halo buffer
  sw_int64       final;               // backward: nobody else has sums for these keys, so dk and
                                      // dv are their gradients themselves, elem
  struct sw_view k, v;                // elem; data is the key at `position`, head 0, batch 0
  struct sw_view dk, dv;              // float if not final; here backward leaves the unit's sums
                                      // for these keys
};

// A unit of work: consecutive query positions of one span, with every key that any of them can see.
// Tiles are cut from the unit's first query on; no tile crosses a unit.
struct sw_unit {
  sw_int64 position, tokens;          // first query position within its document; how many, >= 1
  sw_int64 row;                       // row of the first query in q, out, lse, dout and dq
  sw_int64 run_begin, run_end;        // its runs, ascending in position, without overlap: exactly
                                      // the visible keys, no more
};

// One launch.  The work is cut into items, item = (unit * batch + b) * kv_heads + h; a kernel call
// processes the items [begin, end) and items may run in any order and on any thread.  Outputs of
// different items never overlap.
struct sw_attention_args {
  const struct sw_unit *units;
  const struct sw_run  *runs;
  sw_int64       batch, kv_heads;     // query heads = kv_heads * GQA
  sw_int64       max_keys;            // most keys any unit of this launch sees
  float          scale, softcap;      // softcap is read only by kernels made for one
  const float   *sink;                // [query heads], read only by kernels made for sinks
  struct sw_view q, out;              // elem
  struct sw_view lse;                 // float; head stride and token stride as given, no dim
  struct sw_view dout, dq;            // elem; backward
  float         *dsink;               // backward with sinks: [unit][batch][query heads], the
                                      // unit's sums
  float         *max_logits;          // forward, NULL or [unit][batch][query heads]: the largest
                                      // score of the unit's visible pairs, scaled and capped, in
                                      // natural-log units, without sinks; -inf when there is none
};

// Second half of backward: the keys that several have sums for.  A piece is a few rows that get
// the sum of the same terms, in their order.
struct sw_sum {
  sw_int64 row, tokens;               // rows [row, row + tokens) of dk and dv
  sw_int64 term_begin, term_end;      // at least one
};
struct sw_term {
  struct sw_view dk, dv;              // float; data is the piece's first row, head 0, batch 0
};
enum sw_sum_format { SW_SUMS_ELEM, SW_SUMS_FLOAT, SW_SUMS_BF16 };
struct sw_gather_args {
  const struct sw_sum  *sums;         // none has more than SW_SUM_TOKENS tokens
  const struct sw_term *terms;
  sw_int64       sum_count, batch, kv_heads;   // item = b * sum_count + sum, all heads
  sw_int64       format;              // an sw_sum_format: what dk and dv hold.  SW_SUMS_ELEM: the
                                      // outputs; otherwise a message that takes sums home
  struct sw_view dk, dv;              // outputs
};
enum { SW_SUM_TOKENS = 32 };

// Every emitted CPU image exports, for its kernel:
//   void     forward(const struct sw_attention_args *, sw_int64 begin, sw_int64 end,
//                    void *workspace);
//   sw_int64 forward_workspace(sw_int64 max_keys);  bytes a thread needs, 64-byte aligned; need not
//                                                   be zeroed
//   const sw_int64 forward_tile_tokens;             query positions in a tile; units are best a
//                                                   multiple of it
// and for backward the same with `backward`, and
//   const sw_int64 backward_final_keys;             runs may be final in launches whose units see
//                                                   at most so many keys
//   void     gather(const struct sw_gather_args *, sw_int64 begin, sw_int64 end,
//                   void *workspace);               the workspace is not used
typedef void     sw_attention_kernel(const struct sw_attention_args *, sw_int64, sw_int64, void *);
typedef sw_int64 sw_workspace_query(sw_int64);
typedef void     sw_gather_kernel(const struct sw_gather_args *, sw_int64, sw_int64, void *);

// ---- CUDA ---------------------------------------------------------------------------------------

// The lists of units and runs lie in device memory and stay as they were when the layer was
// sharded, so that a captured launch may be replayed.  There a view's data is an offset in bytes
// from one of these bases; every other pointer is an address in device memory.  (The views of terms
// hold addresses, too.)
struct sw_cuda_args {
  struct sw_attention_args attention;
  char    *k, *v, *halo;              // bases of a run's k and v: the rank's own, or where run.wire
  char    *sums;                      // base of a run's dk and dv, float
  char    *dk, *dv;                   // their bases where run.final: the rank's own gradients
  float   *delta;                     // backward: [batch][query heads][rows], sum of out * dout
  sw_int64 rows;                      // of the rank's tensors
  sw_int64 first_item;                // a block's item is first_item + blockIdx.x
};

// How a kernel wants to be launched; an image exports it as <kernel>_launch.  The grid is
//   x  items    y  tiles of the launch's largest unit times groups    (tile = y / groups)
// where a tile is tile_tokens query positions (of dkv: key positions, cut run by run from each
// run's first key; its y counts the tiles of all runs of a unit; of delta: the unit, one tile).
//
//   image      kernels, in the order of a pass
//   forward    forward(sw_cuda_args)
//   backward   delta(sw_cuda_args), dq(sw_cuda_args), dkv(sw_cuda_args), gather
//   copies     pack, fill, widen, combine
// dq and dkv read what delta left for their units' rows; they do not read each other's results.
struct sw_cuda_launch {
  int threads, shared_bytes;          // of a block; dynamic shared memory
  int tile_tokens, groups;            // groups: GQA / PACK where heads share a tile, else 1 or as
                                      // many as share the work on one
};

// What the other kernels of a CUDA image are handed.  Lists lie in device memory and stay as they
// were when the layer was sharded.  The host cuts their entries to few rows, for an entry is what a
// block works on: the grid is
//   x  batch * entries    item = b * entries + entry, all heads    (gather: the sums)

// pack: rows of the rank's keys and values, to where messages hold them.
struct sw_segment {
  sw_int64 row, tokens;               // rows [row, row + tokens) of k and v go
  struct sw_view k, v;                // here; data is an offset in bytes from `to`
};
struct sw_pack_args {
  const struct sw_segment *segments;
  sw_int64       segment_count, batch, kv_heads;
  struct sw_view k, v;                // elem
  char          *to;
};

// fill: rows that no unit writes get one value in all their elements.
struct sw_gap {
  sw_int64 row, rows;
};
struct sw_fill_args {
  const struct sw_gap *gaps;
  sw_int64       gap_count, batch, heads, dim;
  struct sw_view to;
  int            elem_bytes;          // 2 or 4
  unsigned       bits;                // the value, in the low bytes
};

// widen: bfloat16 sums as they came, to floats.  Any number of blocks.
struct sw_widen_args {
  const unsigned short *from;
  float   *to;
  sw_int64 elements;
};

// combine: of each head's column of [rows][heads], the sum or the largest, in an order that the
// number of rows alone decides.  A block per head.
struct sw_combine_args {
  const float *from;
  float       *to;                    // [heads]
  sw_int64     rows, heads;
  sw_int64     largest;               // 0: the sum; else the largest, -inf of no rows
};
