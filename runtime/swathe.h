// swathe.h: the one public header; its comments are the manual.
//
// swathe makes the sliding-window attention (SWA) layers of a long-context model cheap under
// context parallelism (CP).  Each rank keeps its share of the sequence; only the halo travels: the
// keys and values just outside a share that the window can see.  Backward, their gradients go home.
//
//   swathe_open -> swathe_layer_create -> swathe_layer_shard -> swathe_layer_forward / _backward
//
// Rules that hold for every call:
//   - A call that can fail returns an enum swathe_status; outputs are set only when it is
//     SWATHE_OK.  swathe_error() then gives the words, for the calling thread, until its next call.
//   - Windows are in tokens beside the query's own: query i sees key j of the same document when
//     i - window_left <= j <= i + window_right.
//   - Strides are in elements and 64-bit; the head dim is always contiguous.  Tensors may start at
//     any element; heads that start at multiples of 64 bytes are a few percent faster.
//   - A pointer given to a call is borrowed until it returns unless its comment says otherwise.
//   - What a visitor gets is borrowed until it returns.  It must not call anything of the context
//     that calls it.
#ifndef SWATHE_H
#define SWATHE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define SWATHE_API __attribute__((visibility("default")))
#else
#define SWATHE_API
#endif

#define SWATHE_VERSION "0.1.0"

// A window without a bound on that side.
#define SWATHE_UNLIMITED INT64_MAX

// ---- Status ------------------------------------------------------------------------------------

#define SWATHE_STATUS_MAP(X)                                                   \
  X(OK, "success")                                                             \
  X(NO_MEMORY, "out of memory")                                                \
  X(BAD_USE, "the call or its arguments make no sense")                        \
  X(BAD_PROBLEM, "the problem cannot be served")                               \
  X(BAD_CONFIG, "the config is not in the declared space")                     \
  X(BAD_SHARDING, "the sharding does not fit the problem")                     \
  X(BAD_TENSOR, "a tensor does not fit the problem")                           \
  X(UNSUPPORTED, "not supported")                                              \
  X(NOT_FOUND, "not found")                                                    \
  X(EMIT, "the generator failed")                                              \
  X(COMPILE, "the compiler rejected emitted code")                             \
  X(LOAD, "a compiled kernel could not be loaded")                             \
  X(DEVICE, "the device failed")                                               \
  X(TRANSPORT, "the exchange failed")                                          \
  X(TIMEOUT, "a deadline passed")                                              \
  X(DISAGREE, "the ranks do not agree")                                        \
  X(DATABASE, "the tuning database failed")                                    \
  X(FILE, "a file could not be read or written")                               \
  X(WRONG_RESULT, "a result differs from the reference")                       \
  X(INTERRUPTED, "interrupted")

#define SWATHE_STATUS_NAME(name, text) SWATHE_##name,
enum swathe_status { SWATHE_STATUS_MAP(SWATHE_STATUS_NAME) SWATHE_STATUS_COUNT };
#undef SWATHE_STATUS_NAME

// The text of a status.  Never NULL.
SWATHE_API const char *swathe_status_text(enum swathe_status status);

// The words of the calling thread's last failure: what went wrong, then where, a line each.
SWATHE_API const char *swathe_error(void);

// ---- Problem -----------------------------------------------------------------------------------

enum swathe_dtype { SWATHE_F32, SWATHE_BF16, SWATHE_F16 };  // cpu: f32, bf16; cuda: bf16, f16
enum swathe_target { SWATHE_CPU, SWATHE_CUDA };
enum swathe_direction { SWATHE_FORWARD, SWATHE_BACKWARD };

// Who holds what.  Of n chunks over T tokens, chunk c is [floor(c*T/n), floor((c+1)*T/n)).
enum swathe_layout {
  SWATHE_CONTIGUOUS,       // P chunks of the packed row, rank r holds chunk r
  SWATHE_ZIGZAG,           // 2P chunks of the packed row, rank r holds r and 2P-1-r
  SWATHE_ZIGZAG_DOCUMENT,  // the same within each document (Transformer Engine's THD order)
  SWATHE_SPANS,            // any list of spans, given by the caller
};

// One layer's shape: what kernels are made for and what tuning is remembered by.
struct swathe_problem {
  int32_t q_heads, kv_heads;         // kv_heads divides q_heads; no other rule on heads
  int32_t head_dim_qk, head_dim_v;   // 1 to 256
  int64_t window_left, window_right; // >= 0, or SWATHE_UNLIMITED
  enum swathe_dtype dtype;           // of q, k, v, out and their gradients; sums are fp32
  bool sinks;                        // a learnable logit per query head joins each row's softmax
  double softcap;                    // > 0: scores become softcap * tanh(score / softcap); 0: off
  double scale;                      // multiplies q.k; 0 means 1/sqrt(head_dim_qk)
  enum swathe_dtype halo_gradient;   // in which the sums of the halo's dk and dv travel home: f32
                                     // or bf16
  enum swathe_target target;
  enum swathe_layout layout;         // the next three only guide tuning; a layer may be re-sharded
  int32_t ranks;                     // context-parallel group size, >= 1
  int64_t tokens_per_rank;           // typical share, batch included; >= 1
};

// Fills the problem with: 1 head, head dim 64, causal unlimited window, f32, cpu, contiguous,
// 1 rank of 4096 tokens.
SWATHE_API void swathe_problem_init(struct swathe_problem *problem);

// SWATHE_BAD_PROBLEM and words if no target could serve it.
SWATHE_API enum swathe_status swathe_problem_check(const struct swathe_problem *problem);

// "q_heads=64,kv_heads=8,...": every field, in one fixed order; the canonical key of a problem.
// Returns the length it needs without the final zero; writes at most `size` bytes.
SWATHE_API size_t swathe_problem_format(const struct swathe_problem *problem, char *text,
                                        size_t size);

// Reads "name=value,...", any subset in any order, over what `problem` holds, then checks it.
SWATHE_API enum swathe_status swathe_problem_parse(const char *text,
                                                   struct swathe_problem *problem);

// Names used in problems, on the command line and in reports.  Parse is the inverse.
SWATHE_API const char *swathe_dtype_name(enum swathe_dtype dtype);
SWATHE_API const char *swathe_layout_name(enum swathe_layout layout);
SWATHE_API const char *swathe_target_name(enum swathe_target target);
SWATHE_API enum swathe_status swathe_dtype_parse(const char *name, enum swathe_dtype *dtype);
SWATHE_API enum swathe_status swathe_layout_parse(const char *name, enum swathe_layout *layout);
SWATHE_API enum swathe_status swathe_target_parse(const char *name, enum swathe_target *target);

// ---- Sharding ----------------------------------------------------------------------------------

// A run of consecutive positions of one document on one rank.
struct swathe_span {
  int64_t document;  // index of the document
  int64_t position;  // of the first token within its document
  int64_t tokens;    // >= 0
  int64_t row;       // of the first token in the rank's tensors
  int64_t token;     // of the first token in the packed row of the whole sequence
};

// One micro-batch: its documents and who holds them.  Every rank gives the same values.
struct swathe_sharding {
  enum swathe_layout layout;
  int32_t ranks;
  int32_t batch;                       // rows of the batch share one sharding; >= 1
  int64_t tokens;                      // of the packed row, padding included
  int64_t documents;                   // 0: the whole row is one document
  // [documents + 1] cumulative tokens, as cu_seqlens; the rest of the row is padding
  const int64_t *document_starts;
  // [documents + 1] or NULL: where documents begin in the packed row when there is padding between
  // them, as cu_seqlens_padded
  const int64_t *document_starts_padded;
  // the rest for SWATHE_SPANS only
  const struct swathe_span *spans;     // rank by rank, ascending rows within a rank
  const int64_t *rank_spans;           // [ranks + 1]: rank r's are [rank_spans[r], rank_spans[r+1])
  const int64_t *rank_rows;            // [ranks] rows of its tensors, or NULL: up to its last span
};

// Rows of the rank's tensors.
SWATHE_API enum swathe_status swathe_sharding_rows(const struct swathe_sharding *sharding,
                                                   int32_t rank, int64_t *rows);
// The rank's spans; at most `capacity` are written, `count` says how many there are.
SWATHE_API enum swathe_status swathe_sharding_spans(const struct swathe_sharding *sharding,
                                                    int32_t rank, struct swathe_span *spans,
                                                    int64_t capacity, int64_t *count);

// One message of the forward halo exchange: `tokens` keys of `document` from `position` on, in
// order.  Backward sends the gradients of the same tokens the other way.
struct swathe_message {
  int32_t from, to;
  int64_t document, position, tokens;
  int32_t hops;                        // shares between owner and reader along the document, >= 1
};

// What one rank moves for one layer, forward, one direction of the wire; bytes include the batch.
struct swathe_traffic {
  int64_t rows, spans;
  int64_t halo_tokens;                 // received
  int64_t send_tokens;
  int32_t peers, hops;                 // ranks it hears from; largest hop count
  int64_t own_tokens;                  // halo tokens of one of its spans that the rank itself holds
  int64_t receive_bytes, send_bytes;   // tokens * kv_heads * (head_dim_qk + head_dim_v) * dtype
  int64_t all_gather_bytes;            // received if whole K and V were gathered
  int64_t ring_bytes;                  // received if the whole shares the window reaches came round
  int64_t ring_all_bytes;              // received if all shares came round a ring
  int64_t a2a_bytes;                   // received by all-to-all over heads (q, k, v in, out back);
                                       // -1: the ranks do not divide the heads
};

typedef void swathe_message_visit(void *arg, const struct swathe_message *message);

// Who sends what to whom, without any communication.  `visit` may be NULL, `traffic` is [ranks] or
// NULL.
SWATHE_API enum swathe_status swathe_plan(const struct swathe_problem *problem,
                                          const struct swathe_sharding *sharding,
                                          swathe_message_visit *visit, void *arg,
                                          struct swathe_traffic *traffic);

// ---- Transport ---------------------------------------------------------------------------------

// How the ranks of one context-parallel group reach each other.  A rank's transport is used by one
// thread at a time.
struct swathe_transport;

// `threads`: the ranks are threads of one process.  The group makes one transport per rank; destroy
// it after every layer that uses it.  Waits longer than `deadline_s` (0: 60 s) end in
// SWATHE_TIMEOUT.
struct swathe_threads;
SWATHE_API enum swathe_status swathe_threads_create(int32_t ranks, double deadline_s,
                                                    struct swathe_threads **group);
SWATHE_API struct swathe_transport *swathe_threads_rank(struct swathe_threads *group, int32_t rank);
// Every rank that waits, now or later, gets SWATHE_TRANSPORT with these words.
SWATHE_API void swathe_threads_abort(struct swathe_threads *group, int32_t rank, const char *why);
SWATHE_API void swathe_threads_destroy(struct swathe_threads *group);

// `mpi`: the ranks are processes, each with one transport, over a duplicate of a communicator.
//   communicator  points to an MPI_Comm; NULL: MPI_COMM_WORLD.  All its ranks make the call.
//   plugin        which MPI: "openmpi", "mpich", or a file with a slash in its name; NULL: the one
//                 that is in the process, else the one whose launcher started it.  The library has
//                 no MPI in it: it opens swathe_mpi_NAME.so beside itself, or what the environment
//                 variable SWATHE_MPI_PLUGIN names (a file or its directory).
//   expected      ranks; 0: any number.  SWATHE_DISAGREE when MPI has another number, as when a
//                 launcher of another MPI starts every rank as a group of its own.
//   deadline_s    waits longer than this (0: 60 s) end in SWATHE_TIMEOUT
// MPI is initialized if it is not, with MPI_THREAD_MULTIPLE, and then finalized at exit, unless a
// transport failed: MPI_Finalize would wait for what never comes.
//
// After a failure the transport is unusable for good and the other ranks are told.  MPI cannot take
// back what it was given, so messages that were under way may still be read, and written, when
// somebody calls MPI: the layer's own buffers then stay behind when it is destroyed, and the caller
// must not free or use what it gave as swathe_tensors.halo.  The process may go on.
SWATHE_API enum swathe_status swathe_mpi_create(const void *communicator, const char *plugin,
                                                int32_t expected, double deadline_s,
                                                struct swathe_transport **transport);

// One message: `bytes` > 0 of `data` to or from rank `peer`.
struct swathe_transfer {
  void *data;
  size_t bytes;
  int32_t peer;
  bool send;
};

// A transport of the caller's own: what carries bytes between ranks, such as torch.distributed or
// UCX.  Calls return 0, or an enum swathe_status (SWATHE_TIMEOUT, SWATHE_TRANSPORT, ...) and write
// why into `words`; the transport is unusable from then on.  They are never called at the same
// time, and may not call swathe.
//
// Between two ranks the n-th message sent belongs to the n-th received.  Both ends give the same
// bytes: before the first message of a sharding the ranks compare digests of it, through `gather`.
// Should another number of bytes come all the same, the call returns SWATHE_DISAGREE and writes
// nothing behind the end of the message.
struct swathe_custom {
  int32_t rank, ranks;
  double deadline_s;            // of each wait; 0: 60
  const char *name;             // in words of failures, borrowed; NULL: "custom"
  void *user;                   // handed to each call
  // Starts the messages and returns at once; their data stays where it is until they are done.
  int (*post)(void *user, const struct swathe_transfer *transfers, int32_t count, char *words,
              size_t size);
  // *done = 1 when all that were posted are done; never waits.  NULL: only `wait` knows.
  int (*test)(void *user, int *done, char *words, size_t size);
  // Returns when all are done.  NULL: `test` is called until they are.
  int (*wait)(void *user, double deadline_s, char *words, size_t size);
  // all[r * bytes ...] = what rank r gave as `mine`; bytes may be 0.  NULL: made of messages.
  int (*gather)(void *user, const void *mine, size_t bytes, void *all, char *words, size_t size);
  // Tells the others that this rank gives up.  NULL: they find out by their deadline.
  void (*abort)(void *user, const char *why);
  void (*destroy)(void *user);  // or NULL
};
SWATHE_API enum swathe_status swathe_custom_create(const struct swathe_custom *calls,
                                                   struct swathe_transport **transport);

// `nccl`: the ranks are GPUs, whose memory travels without the host: layers of the cuda target
// queue their messages on streams, and their calls can be captured in CUDA graphs.  A rank's
// transport is made where the calling thread's current CUDA context is of its device (see
// swathe_device_use); ranks are processes or threads.
//   communicator  an ncclComm_t, borrowed until the transport is destroyed; NULL: an own one of
//                 `ranks` ranks, each of which makes the call with the same id
//   deadline_s    0: 60 s.  A stream that is at one exchange for longer makes the transport fail
//                 with SWATHE_TIMEOUT and words that name the peers: its communicator is aborted
//                 (ncclCommAbort), so that the stream goes on, with results that are not to be
//                 used.  The call that follows says so, as does swathe_transport_wait.
//   abort         of a borrowed communicator: is called in the place of ncclCommAbort, once, from
//                 any thread, to end what the communicator has on streams; may not call swathe.
//                 NULL: ncclCommAbort is called, which frees it: nobody else may use it then.
// Graphs that captured a layer's calls are not launched any more when its transport is destroyed.
// NCCL is opened at run time: $SWATHE_LIBNCCL, else libnccl.so.2.
enum { SWATHE_NCCL_ID_BYTES = 128 };
struct swathe_nccl {
  void *communicator;
  void (*abort)(void *user, const char *why);
  void *user;                   // handed to `abort`
  const void *id;               // SWATHE_NCCL_ID_BYTES of an ncclUniqueId
  int32_t rank, ranks;          // with `id`
  double deadline_s;
};
SWATHE_API enum swathe_status swathe_nccl_create(const struct swathe_nccl *given,
                                                 struct swathe_transport **transport);
// An id for one communicator, made by one rank and brought to the others.
SWATHE_API enum swathe_status swathe_nccl_id(void *id);

// For programs that have a transport anyway: what a layer does with it, between its calls.
SWATHE_API int32_t swathe_transport_rank(const struct swathe_transport *transport);
SWATHE_API int32_t swathe_transport_ranks(const struct swathe_transport *transport);
// Posts all and waits for them.
SWATHE_API enum swathe_status swathe_transport_exchange(struct swathe_transport *transport,
                                                        const struct swathe_transfer *transfers,
                                                        int32_t count);
// Waits for all that was posted, and for what was queued on streams, other than by graphs; says
// whether the transport failed meanwhile.
SWATHE_API enum swathe_status swathe_transport_wait(struct swathe_transport *transport);
// all[r * bytes ...] = what rank r gave as `mine`; every rank calls it, with the same bytes.
SWATHE_API enum swathe_status swathe_transport_gather(struct swathe_transport *transport,
                                                      const void *mine, size_t bytes, void *all);
// This rank will not come any more: those that wait for it fail with these words, now or later.
SWATHE_API void swathe_transport_abort(struct swathe_transport *transport, const char *why);
// After every layer that uses it.  A transport of a threads group lives as long as that group.
SWATHE_API void swathe_transport_destroy(struct swathe_transport *transport);

// ---- Context -----------------------------------------------------------------------------------

enum swathe_mode {
  SWATHE_REPLAY,   // use what the database has, else a default config; never tune
  SWATHE_REQUIRE,  // a problem the database does not have is an error at layer creation
};

struct swathe_options {
  const char *database;      // tuning database; NULL: $SWATHE_DB, else tuning.db in the cache
                             // directory
  const char *cache;         // directory of compiled kernels; NULL: $SWATHE_CACHE_DIR,
                             // $XDG_CACHE_HOME/swathe, $HOME/.cache/swathe, a private directory in
                             // the temporary one, else memory only.  While it holds more than
                             // $SWATHE_CACHE_MIB (default 512; 0: any) the kernels go that were
                             // not used for longest, but none of the last day
  enum swathe_mode mode;
  int32_t threads;           // compute threads per layer; 0: all processors
  const char *isa;           // "avx512bf16", "avx512", "avx2", "neon", "generic";
                             // NULL: $SWATHE_ISA, else the best this machine has
  const char *compiler;      // a program, whose path may hold spaces, and arguments, divided by
                             // spaces; NULL: $SWATHE_CC, $CC, else cc
  const char *generator;     // directory of generator/ and templates/;
                             // NULL: $SWATHE_GENERATOR_DIR, else the built-in texts
  // of the cuda target; nothing is looked for before a problem asks for it.  The driver is
  // $SWATHE_LIBCUDA, else libcuda.so.1; the compiler $SWATHE_LIBNVRTC, else libnvrtc.so
  int32_t device;            // when the calling thread has no current CUDA context, whose device
                             // counts otherwise
  const char *arch;          // "sm_80", "sm_90a", ...; NULL: $SWATHE_ARCH, else the device's
};

struct swathe_context;

// Opens the generator, the kernel cache and the database.  Neither a missing database nor a cache
// that cannot be written is an error.  `options` may be NULL.  A context may be used by several
// threads.
SWATHE_API enum swathe_status swathe_open(const struct swathe_options *options,
                                          struct swathe_context **context);
// After every layer made from it.
SWATHE_API void swathe_close(struct swathe_context *context);

// Where the picks are kept; "" if there is no place for them.  Borrowed until close.
SWATHE_API const char *swathe_database_path(const struct swathe_context *context);

// Frees text that a call returned.
SWATHE_API void swathe_free(void *text);

// Makes the primary context of a CUDA device the calling thread's current one, in the place of what
// was: for programs that have no CUDA of their own, and a device for each of several threads.
SWATHE_API enum swathe_status swathe_device_use(struct swathe_context *context, int32_t device);

// ---- Memory ------------------------------------------------------------------------------------

// Memory that a target's tensors may lie in, for programs that do not care which: on CUDA, of the
// calling thread's device.  CUDA programs may as well pass memory of their own (that device's
// primary context's, as PyTorch and the CUDA runtime have it).
SWATHE_API enum swathe_status swathe_memory_allocate(struct swathe_context *context,
                                                     enum swathe_target target, size_t bytes,
                                                     void **memory);
SWATHE_API void swathe_memory_free(struct swathe_context *context, enum swathe_target target,
                                   void *memory);
// Copies between host memory and a target's, and returns when it is done.  On CUDA in the order of
// the default stream: work of other streams is waited for with swathe_stream_synchronize.
SWATHE_API enum swathe_status swathe_memory_write(struct swathe_context *context,
                                                  enum swathe_target target, void *to,
                                                  const void *from, size_t bytes);
SWATHE_API enum swathe_status swathe_memory_read(struct swathe_context *context,
                                                 enum swathe_target target, void *to,
                                                 const void *from, size_t bytes);
// Waits for what was queued on the stream; failures of its kernels show here.  NULL: the default
// stream.  On the CPU there is nothing to wait for.
SWATHE_API enum swathe_status swathe_stream_synchronize(struct swathe_context *context,
                                                        enum swathe_target target, void *stream);

// ---- Layer -------------------------------------------------------------------------------------

// A tensor [batch][token][head][dim], dim contiguous.  lse is [batch][token][head], float.
struct swathe_tensor {
  void *data;  // first token of the rank's share, head 0, batch 0
  int64_t token_stride, head_stride, batch_stride;
};

// Forward reads q, k, v and sink, writes out and lse.  Backward reads those six and dout, writes
// dq, dk, dv and dsink.  dsink is this rank's partial sum; sum it over the ranks.  Rows that no
// span covers are not read and are written as 0 (lse: -inf).
struct swathe_tensors {
  struct swathe_tensor q, k, v, out, lse;
  const float *sink;  // [q_heads], natural-log units; only for problems with sinks
  float *max_logits;  // [q_heads] or NULL: forward's largest score (after scale and softcap,
                      // without the sink) of this rank's rows, as qk-clip reads; take the largest
                      // over the ranks
  struct swathe_tensor dout, dq, dk, dv;
  float *dsink;       // [q_heads]
  void *halo;         // swathe_layer_halo_bytes() of the caller's: forward leaves the halo's keys
                      // and values there and backward reads them; NULL: backward fetches them anew
};

// Used by one thread at a time.
struct swathe_layer;

// Chooses configs of the kernels and of the exchange (database, else default), agrees with the
// other ranks (rank 0 decides; for its kernels a rank of another isa keeps its own), and loads or
// compiles the kernels.  Every rank of the transport calls it.  `transport` is borrowed until
// destroy; NULL: alone.  SWATHE_UNSUPPORTED: no kernels for that target.  SWATHE_DISAGREE:
// the ranks' versions or problems differ.
SWATHE_API enum swathe_status swathe_layer_create(struct swathe_context *context,
                                                  const struct swathe_problem *problem,
                                                  struct swathe_transport *transport,
                                                  struct swathe_layer **layer);

// How the ranks of a layer come by the keys of others.  All give the same results, within rounding,
// through the same kernels and transport; they differ in what travels.  SWATHE_HALO is what swathe
// is for, the others are what it is compared with.
enum swathe_strategy {
  SWATHE_HALO,        // exactly the keys that the window sees
  SWATHE_ALL_GATHER,  // all of K and V to every rank, round a ring, of which the halo is kept;
                      // backward, gradients of whole shares are summed on their way home round it
  SWATHE_A2A,         // heads instead of tokens: q, k and v are dealt out by heads, out and lse
                      // back by tokens; the ranks must divide both head counts
  SWATHE_RING,        // whole shares go round as many ranks as the window reaches
  SWATHE_RING_ALL,    // whole shares go all the way round
};
SWATHE_API const char *swathe_strategy_name(enum swathe_strategy strategy);
SWATHE_API enum swathe_status swathe_strategy_parse(const char *name,
                                                    enum swathe_strategy *strategy);

// As swathe_layer_create, which is SWATHE_HALO.  Every rank gives the same strategy.
// SWATHE_UNSUPPORTED: the problem cannot be shared like that, or not on its target.
SWATHE_API enum swathe_status swathe_layer_create_strategy(struct swathe_context *context,
                                                           const struct swathe_problem *problem,
                                                           struct swathe_transport *transport,
                                                           enum swathe_strategy strategy,
                                                           struct swathe_layer **layer);

// Bytes of the layer's own buffers under the shardings it has seen, swathe_tensors.halo not among
// them: what attention takes beside the caller's tensors, kernels' workspaces and lists of some
// hundred bytes for 512 tokens aside.  Of the halo: keys on their way, sums of gradients on theirs,
// and those that spill where strips of backward meet; in proportion to the window, not the share.
SWATHE_API size_t swathe_layer_memory_bytes(const struct swathe_layer *layer);

// Muted, a layer computes as always but exchanges nothing: it takes what the last exchange left, so
// that results are right only if nothing changed since.  With it a bench tells what communication
// costs.  Every rank mutes, or none.
SWATHE_API void swathe_layer_mute(struct swathe_layer *layer, bool muted);

// From now on the layer works in another group, as dynamic context parallelism asks; NULL: alone.
// No communication: every rank of the new group has a layer of the same problem, made in any group
// with the same database.  The layer has no sharding until the next swathe_layer_shard.
SWATHE_API void swathe_layer_regroup(struct swathe_layer *layer,
                                     struct swathe_transport *transport);
// This micro-batch's documents and spans.  No communication here: the ranks compare digests of it
// before the next call's first message (SWATHE_DISAGREE), a gather of 16 bytes, which a rank leaves
// out whose sharding is the one agreed on last; should another's differ then, the deadline tells.
// Nothing is allocated once it has seen the largest.  `sharding` is not kept.
SWATHE_API enum swathe_status swathe_layer_shard(struct swathe_layer *layer,
                                                 const struct swathe_sharding *sharding);
// Another exchange than the one chosen, for who wants to compare: a config as swathe_tune_exchange
// has it.  Every rank makes the same call between the same passes.
SWATHE_API enum swathe_status swathe_layer_set_exchange(struct swathe_layer *layer,
                                                        const char *config);

// On the CPU `stream` must be NULL, and the calls return when the work is done.
//
// On CUDA `stream` is a CUstream of the layer's device (NULL: the default stream).  Tensors, sink,
// max_logits, dsink and halo are device memory.  The work goes in the order of the stream and the
// call returns when it is queued; failures of kernels show at a later call.  Alone, or with a
// transport that moves device memory, the calls may be captured in a CUDA graph: run forward and
// backward once before, with tensors of the same strides, and capture anew after every
// swathe_layer_shard.  With other transports a call waits, on the host, until the halo has come,
// and a capture is refused.  One layer's calls on different streams are put in order; replays of
// graphs are the caller's to order.
SWATHE_API enum swathe_status swathe_layer_forward(struct swathe_layer *layer,
                                                   const struct swathe_tensors *tensors,
                                                   void *stream);
SWATHE_API enum swathe_status swathe_layer_backward(struct swathe_layer *layer,
                                                    const struct swathe_tensors *tensors,
                                                    void *stream);

// Bytes of swathe_tensors.halo under the current sharding; 0 if this rank needs no halo.  With
// SWATHE_A2A forward keeps all that it was dealt there, and backward need not ask for it again.
SWATHE_API size_t swathe_layer_halo_bytes(const struct swathe_layer *layer);

// Where the time of the last forward or backward went, and what it moved.  On CUDA it is the host's
// time: until the work was queued, and the wait for messages of host memory.
struct swathe_timing {
  double total_us;
  double wait_us;                     // waiting for the wire with nothing left to compute
  int64_t sent_bytes, received_bytes; // payload that crossed the transport
};
SWATHE_API void swathe_layer_timing(const struct swathe_layer *layer, struct swathe_timing *timing);

// Which configs, from where and why; the halo's bytes and hops.  Returns the length as snprintf.
SWATHE_API size_t swathe_layer_explain(const struct swathe_layer *layer, char *text, size_t size);
SWATHE_API void swathe_layer_destroy(struct swathe_layer *layer);

// ---- Models ------------------------------------------------------------------------------------

struct swathe_model {
  const char *name, *family, *source, *note;  // note: "" or what was not verified
  int32_t layers, swa_layers;                 // 0: not known
  struct swathe_problem problem;              // ranks 1, contiguous; direct use after setting those
};
typedef void swathe_model_visit(void *arg, const struct swathe_model *model);
SWATHE_API enum swathe_status swathe_models(struct swathe_context *context,
                                            swathe_model_visit *visit, void *arg);
// The problem of one preset.  SWATHE_NOT_FOUND names near ones.
SWATHE_API enum swathe_status swathe_model_problem(struct swathe_context *context, const char *name,
                                                   struct swathe_problem *problem);

// ---- Kernels -----------------------------------------------------------------------------------

// The source text of one kernel; free with swathe_free.  isa NULL: the context's.  config NULL:
// what a layer would use, or for another isa than the context's the default.
SWATHE_API enum swathe_status swathe_emit(struct swathe_context *context,
                                          const struct swathe_problem *problem,
                                          enum swathe_direction direction, const char *isa,
                                          const char *config, char **source);

// What one kernel of a CUDA image uses, as its compiler says.
struct swathe_kernel_use {
  char kernel[32];
  int32_t threads;      // of a block
  int32_t registers;    // of a thread
  int32_t spill_bytes;  // of a thread: registers that did not fit, stores and loads; -1: not known
  int32_t stack_bytes;
  int32_t shared_bytes; // of a block, what it asks for at the launch included
  int32_t barriers;
};

struct swathe_compiled {
  char config[512], isa[32];
  bool cached;          // loaded from the cache, nothing was compiled
  double compile_s;     // 0 when cached
  size_t binary_bytes;
  // of CUDA images only, else 0 and ""
  int32_t kernel_count;
  struct swathe_kernel_use kernels[8];
  double counted_ratio; // multiply-adds that are done over those that the window asks for
  char refused[192];    // why a tuner would not try it: it spills, or is over a limit; "": it would
};
// Compiles one kernel into the cache (or finds it there); on CUDA also the small ones that a layer
// needs beside it.
SWATHE_API enum swathe_status swathe_compile(struct swathe_context *context,
                                             const struct swathe_problem *problem,
                                             enum swathe_direction direction, const char *isa,
                                             const char *config, struct swathe_compiled *compiled);

// Walks the configs of a kernel's space in their fixed order; return false to stop.  isa as above.
// `refused` (or NULL) is called at the end for each rule that turned points away: how many.
// `exhaustive`: also what `prefer` rules think unlikely to win.
typedef bool swathe_config_visit(void *arg, const char *config);
typedef void swathe_refused_visit(void *arg, const char *rule, int64_t points);
SWATHE_API enum swathe_status swathe_configs(struct swathe_context *context,
                                             const struct swathe_problem *problem,
                                             enum swathe_direction direction, const char *isa,
                                             bool exhaustive, swathe_config_visit *visit,
                                             swathe_refused_visit *refused, void *arg);

// How many kernels this context compiled, and how many it loaded from the cache.
SWATHE_API void swathe_kernel_counts(struct swathe_context *context, int64_t *compiled,
                                     int64_t *loaded);

// ---- Tuning ------------------------------------------------------------------------------------

struct swathe_progress {
  enum swathe_direction direction;
  // all of this direction: with both, forward may use half of the call's budget, backward the rest
  int64_t tried, total;         // candidates; total is an upper bound
  int64_t refused;              // points of the space that its rules turned away
  double elapsed_s, budget_s;
  double left_s;                // until its end, as far as can be told
  double default_us, best_us;   // median time of the rank's share; 0 until known
  double limit_share;           // of the machine's multiply-add or memory peak that the best
                                // reaches; 0: not known
  const char *best, *trying;    // configs; borrowed during the call
};

struct swathe_tune_options {
  double budget_s;              // wall seconds for the whole call, the default's compilation and
                                // measuring aside; 0: 60
  bool forward, backward;       // which; both false means both
  bool exhaustive;              // also what `prefer` rules think unlikely to win
  bool again;                   // measure even what the database already has
  double good_enough;           // ends when the best reaches this share of what the tiles of any
                                // config could at the machine's peak; 0: 0.95, < 0: never
  double wait_s;                // for another process that tunes into the same database; 0: 60
  int64_t memory_bytes;         // most that a candidate's workspaces may take; 0: half of the
                                // machine's
  double trial_s;               // a candidate is killed after this, beside what the default takes;
                                // 0: 20
  void (*progress)(void *arg, const struct swathe_progress *progress);  // or NULL
  void *arg;
  const volatile int *stop;     // or NULL; nonzero ends the tuning and keeps what is done
};

struct swathe_tuned {
  char config[512];
  double default_us, best_us, ratio;  // ratio: best / default, median of paired runs
  int64_t tried, rejected, failed;    // by this call; rejected: wrong result; failed: did not
                                      // compile, crashed, hung or wanted too much memory
  double limit_share;                 // as in swathe_progress
  bool reused;                        // the database had it: config and ratio; nothing was measured
  bool noisy;                         // others used the machine; a quiet pick was not replaced
  bool good_enough;                   // it ended because the best is that near what can be
};

// Measures one rank's share of the problem on this machine and stores samples and picks.  The
// default config always takes part; each candidate must match the reference before it may win.
// Resumes where an interrupted call stopped, and where one stopped that had a smaller budget or was
// of other kernel texts; else what the database has is the answer, and nothing is measured.  A
// finished pick is replaced only by one that beats it by more than the noise.  `tuned` is [2], by
// direction.  SWATHE_INTERRUPTED: stopped, but kept.  SWATHE_TIMEOUT: another process tunes into
// the same database.
SWATHE_API enum swathe_status swathe_tune(struct swathe_context *context,
                                          const struct swathe_problem *problem,
                                          const struct swathe_tune_options *options,
                                          struct swathe_tuned tuned[2]);

// Measures how a group best exchanges this problem's halo over its transport: whole layers, forward
// and backward; a candidate's time is the slowest rank's.  Every rank of the transport calls it
// with the same problem, at the same time.  Rank 0 decides, and stores samples and pick in its
// database, where its next layer finds them for all; `tuned` is told to all.  Of the options
// budget_s, exhaustive, again, wait_s and stop count, on rank 0.
SWATHE_API enum swathe_status swathe_tune_exchange(struct swathe_context *context,
                                                   const struct swathe_problem *problem,
                                                   struct swathe_transport *transport,
                                                   const struct swathe_tune_options *options,
                                                   struct swathe_tuned *tuned);

// ---- Tuning database ---------------------------------------------------------------------------

struct swathe_pick {
  const char *problem, *kernel, *environment, *config;  // canonical; kernel: the direction's name
  double best_us, default_us, ratio;
  double limit_share;                                   // as in swathe_tuned; 0: not known
  int64_t samples;
  const char *when;                                     // UTC, ISO 8601
  const char *generator;                                // digest of the texts it was made from
};
typedef void swathe_pick_visit(void *arg, const struct swathe_pick *pick);
// Every pick, in a fixed order.
SWATHE_API enum swathe_status swathe_db_list(struct swathe_context *context,
                                             swathe_pick_visit *visit, void *arg);

struct swathe_sample {
  const char *problem, *kernel, *environment, *config;
  const char *verdict;           // ok, wrong, compile, crash, timeout, oom (wants too much memory)
  const char *words;             // why, or ""
  double median_us, ratio;       // ratio to the default in the same run; 0 when not measured
  int64_t runs;
  const double *runs_us;         // [runs], every timing
  const char *when;
  const char *generator;         // as in swathe_pick: samples of other kernels do not compare
  bool noisy;                    // others used the machine meanwhile
};
typedef void swathe_sample_visit(void *arg, const struct swathe_sample *sample);
// Every sample of the problem, best first.
SWATHE_API enum swathe_status swathe_db_show(struct swathe_context *context,
                                             const struct swathe_problem *problem,
                                             swathe_sample_visit *visit, void *arg);
// Every sample of every problem: by problem, forward first, by environment and generator, and then
// in the order they were measured.
SWATHE_API enum swathe_status swathe_db_samples(struct swathe_context *context,
                                                swathe_sample_visit *visit, void *arg);

// What a layer of this problem would use: config, and in one line where it is from and why.
SWATHE_API enum swathe_status swathe_db_best(struct swathe_context *context,
                                             const struct swathe_problem *problem,
                                             enum swathe_direction direction, char *config,
                                             size_t config_size, char *why, size_t why_size);

// ---- Reference ---------------------------------------------------------------------------------

// Naive attention in double over the whole, unsharded sequence, for the rows asked for: the oracle.
// Arrays are float, packed [batch][tokens][heads][dim] in sequence order.
struct swathe_sequence {
  int64_t batch, tokens, documents;
  const int64_t *document_starts;         // as in swathe_sharding; documents 0: one document
  const int64_t *document_starts_padded;  // or NULL
  const float *q, *k, *v, *sink, *dout;   // sink, dout: NULL where not needed
};

// out [q_heads][head_dim_v] and lse [q_heads] (double) of the query at (batch row, token).
// delta [q_heads] = sum of out * dout, or NULL.  A padding token gives 0 and -inf.
SWATHE_API void swathe_reference_query(const struct swathe_problem *problem,
                                       const struct swathe_sequence *sequence, int64_t batch,
                                       int64_t token, double *out, double *lse, double *delta);
// dq [q_heads][head_dim_qk] of the query at (batch row, token); dsink [q_heads] (or NULL) gets this
// row's share added.  lse and delta: [batch][tokens][q_heads], filled for the token itself.
SWATHE_API void swathe_reference_dq(const struct swathe_problem *problem,
                                    const struct swathe_sequence *sequence, const double *lse,
                                    const double *delta, int64_t batch, int64_t token, double *dq,
                                    double *dsink);
// dk [kv_heads][head_dim_qk] and dv [kv_heads][head_dim_v] of the key at (batch row, token); lse
// and delta must hold for every query that sees it.
SWATHE_API void swathe_reference_dkv(const struct swathe_problem *problem,
                                     const struct swathe_sequence *sequence, const double *lse,
                                     const double *delta, int64_t batch, int64_t token, double *dk,
                                     double *dv);
// The queries that see the key at `token`: first and last + 1, in the packed row.  Padding: none.
SWATHE_API void swathe_reference_seen_by(const struct swathe_problem *problem,
                                         const struct swathe_sequence *sequence, int64_t token,
                                         int64_t *begin, int64_t *end);

// ---- Doctor ------------------------------------------------------------------------------------

enum swathe_health { SWATHE_HEALTHY, SWATHE_ABSENT, SWATHE_BROKEN };
// One line of `swathe doctor`: what was looked at, what was found and what would mend it.
struct swathe_finding {
  const char *what, *found, *fix;  // fix: "" when there is nothing to mend
  enum swathe_health health;
};
typedef void swathe_finding_visit(void *arg, const struct swathe_finding *finding);
SWATHE_API enum swathe_status swathe_doctor(struct swathe_context *context,
                                            swathe_finding_visit *visit, void *arg);

#ifdef __cplusplus
}
#endif

#endif
