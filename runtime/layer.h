// layer.h: the private face of the meeting place: context.c (opens the specialists and keeps loaded
// kernels), choose.c (which config), work.c (plan -> units and runs), layer.c (create and shard),
// exchange.c (what travels), pass.c (forward and backward), baseline.c and baseline_heads.c (other
// ways to share), doctor.c, and the tuner beside them.
#ifndef SW_LAYER_H
#define SW_LAYER_H

#include <pthread.h>

#include "../templates/kernel_abi.h"
#include "../tuning_db/db.h"
#include "device.h"
#include "device_cuda.h"
#include "gen.h"
#include "halo.h"
#include "jit.h"
#include "sharding.h"
#include "transport.h"

// ---- context.c ---------------------------------------------------------------------------------

// What kernels of a problem are made for, and what runs them for the calling thread.
struct sw_aim {
  char isa[32];
  bool own;                      // the isa is that of this machine, so its picks count
  bool cuda;
  struct sw_device_cuda *device; // of a CUDA problem; NULL: kernels are made, not run
};

// A kernel of a CUDA image.
struct sw_cuda_function {
  const char *name;
  void *function;                // NULL: not in this image
  struct sw_cuda_launch launch;
};
enum sw_cuda_kernel {
  SW_CUDA_FORWARD,
  SW_CUDA_DELTA, SW_CUDA_DQ, SW_CUDA_DKV, SW_CUDA_GATHER,
  SW_CUDA_PACK, SW_CUDA_FILL, SW_CUDA_WIDEN, SW_CUDA_COMBINE,
  SW_CUDA_KERNELS
};

// A loaded kernel; kept by the context until it closes.
struct sw_kernel {
  struct sw_kernel *next;
  char *key;                     // name, isa, device, config and problem: what it was made from
  enum { SW_KERNEL_LOADING, SW_KERNEL_READY, SW_KERNEL_FAILED } state;
  enum swathe_status status;     // of a failed one, with its words
  char *words;
  struct sw_jit_image *image;
  struct sw_jit_report report;
  sw_attention_kernel *attention;
  sw_workspace_query *workspace;
  sw_gather_kernel *gather;      // backward only
  int64_t tile_tokens;
  int64_t final_keys;            // backward only
  struct sw_device_cuda *device; // of a CUDA image, instead of those above but the last two
  void *module;
  struct sw_cuda_function functions[SW_CUDA_KERNELS];
};

enum { SW_CUDA_DEVICES = 16, SW_ISAS = 16 };

struct swathe_context {
  struct sw_gen *gen;            // with `mutex`
  struct sw_jit *jit;
  struct sw_db *db;              // with `mutex`; NULL: no tuned data
  bool db_failed;                // `db_words` says why
  char db_words[512];
  char *database;                // path; "" if there is nowhere to keep one
  char *generator;               // directory or NULL
  char isa[32], processor[96];   // of the cpu target
  int32_t threads;
  char *arch;                    // of the cuda target, or NULL: the device's
  int32_t device;                // when the calling thread has no current one
  struct sw_device_cuda *devices[SW_CUDA_DEVICES];  // by ordinal; with `mutex`
  struct {                       // while this process must leave CUDA to its children:
    bool on;
    char isa[32], device[128];   // what they have
  } apart;
  enum swathe_mode mode;
  pthread_mutex_t mutex;
  pthread_cond_t loaded;         // a kernel left SW_KERNEL_LOADING
  struct sw_kernel *kernels;
  int64_t compiled_count, loaded_count;
};

const char *sw_context_kernel_name(enum swathe_direction direction);

// The names of a target's isas, the best first.
struct sw_isa_names {
  char names[SW_ISAS][32];
  const char *list[SW_ISAS];
  int32_t count;
};
enum swathe_status sw_context_isas(struct swathe_context *context, enum swathe_target target,
                                   struct sw_isa_names *isas);

// Checks the problem.  `isa` NULL: that of this machine, which for CUDA needs a device, or an arch
// among the options.
enum swathe_status sw_context_aim(struct swathe_context *context,
                                  const struct swathe_problem *problem, const char *isa,
                                  struct sw_aim *aim);

// Loads the kernel (compiling it if no cache has it), or returns the one already loaded.  Borrowed
// until the context closes.
struct sw_kernel_wanted {
  const struct swathe_problem *problem;
  const struct sw_aim *aim;
  const char *name, *config;
};
enum swathe_status sw_context_kernel(struct swathe_context *context,
                                     const struct sw_kernel_wanted *wanted,
                                     const struct sw_kernel **kernel);

// Seconds one kernel may take to compile before its compiler is given up.
extern const double sw_compile_deadline_s;
enum sw_jit_compiler sw_context_compiler(const struct sw_aim *aim);

// `config`, or what a layer would use, in canonical form.  `settled` has SW_CONFIG_TEXT bytes.
enum swathe_status sw_context_config(struct swathe_context *context,
                                     const struct swathe_problem *problem,
                                     enum swathe_direction direction, const struct sw_aim *aim,
                                     const char *config, char *settled);

// The source of a kernel; free with sw_gen_source_free.
enum swathe_status sw_context_source(struct swathe_context *context,
                                     const struct swathe_problem *problem, const char *kernel,
                                     const char *isa, const char *config,
                                     struct sw_gen_source *source);

// Turns a compiler's log into the words of the failure, in the template's own lines; frees the log.
enum swathe_status sw_context_compile_failed(const struct sw_gen_source *source,
                                             enum swathe_status status, char *log);

// Borrows from both.
void sw_context_environment(const struct swathe_context *context, const struct sw_aim *aim,
                            struct sw_db_environment *environment);

// Closes and opens the database again, so that what another handle wrote is seen.
void sw_context_reopen_database(struct swathe_context *context);

// ---- context_cuda.c ----------------------------------------------------------------------------

// The device of the calling thread; the context keeps it.
enum swathe_status sw_context_device(struct swathe_context *context,
                                     struct sw_device_cuda **device);
enum swathe_status sw_context_aim_cuda(struct swathe_context *context, const char *isa,
                                       struct sw_aim *aim);
// From now on, until context->apart.on is taken back, this process touches no device: forked
// children, who take it back for themselves, do.  Asks one of them what there is.
enum swathe_status sw_context_stand_apart(struct swathe_context *context,
                                          const struct swathe_problem *problem);
// Loads the kernel's image on the device and finds its functions.
enum swathe_status sw_context_load_module(struct sw_device_cuda *device, const char *name,
                                          struct sw_kernel *kernel);
void sw_context_drop_module(struct sw_kernel *kernel);
void sw_context_drop_devices(struct swathe_context *context);

// ---- choose.c ----------------------------------------------------------------------------------

struct sw_choice {
  char config[SW_CONFIG_TEXT];
  char why[384];                 // one line: which rung, from where, why no better one
};

// How many shares away the farthest visible key can live.
int32_t sw_choose_hops(const struct swathe_problem *problem);

// The ladder: exact, near, default.  Always gives a valid config, except in SWATHE_REQUIRE mode.
enum swathe_status sw_choose(struct swathe_context *context, const struct swathe_problem *problem,
                             enum swathe_direction direction, const struct sw_aim *aim,
                             struct sw_choice *choice);
// The exchange's, for this transport (NULL: alone); its default is good in any mode.
enum swathe_status sw_choose_exchange(struct swathe_context *context,
                                      const struct swathe_problem *problem,
                                      const struct sw_aim *aim,
                                      const struct swathe_transport *transport,
                                      struct sw_choice *choice);
// Under which a pick of the exchange is kept: its isa names the transport, too.
struct sw_exchange_place {
  struct sw_db_environment environment;
  char isa[32];
};
void sw_choose_exchange_place(const struct swathe_context *context, const struct sw_aim *aim,
                              const struct swathe_transport *transport,
                              struct sw_exchange_place *place);

// ---- work.c ------------------------------------------------------------------------------------

// Where keys or sums live; pointers are filled in at each call.
enum sw_place {
  SW_OWN,    // rows of the rank's tensors
  SW_WIRE,   // slots of the receive buffer
  SW_SPILL,  // tokens of the buffer of sums that are added later
  SW_HOME,   // slots of the send buffer, whose sums came home
};

struct sw_run_source {
  enum sw_place place;           // SW_OWN or SW_WIRE
  int64_t index;                 // of its first key
  int64_t spill;                 // of its sums; -1: they are final
};

// ---- sums.c -------------------------------------------------------------------------------------

// Terms of one key are added in this order, those of one turn as they were claimed.
enum sw_turn { SW_TURN_UNIT, SW_TURN_NEIGHBOUR, SW_TURN_RECEIVED };

struct sw_sum_source {
  enum sw_place place;           // SW_SPILL or SW_HOME
  int64_t index;
};

struct sw_sums {
  // pieces of struct sw_sum: [0, wire_pieces) are slots of the message that takes them home, the
  // rest rows of the rank's tensors; their terms' sources, and room for the terms themselves
  struct sw_list pieces, sources, terms;
  int64_t wire_pieces;
  struct sw_list own, wire, shared, keys, scratch, active;
};

void sw_sums_clear(struct sw_sums *sums);
void sw_sums_free(struct sw_sums *sums);
// Somebody has sums for keys [index, index + tokens) of SW_OWN or SW_WIRE.
enum swathe_status sw_sums_claim(struct sw_sums *sums, enum sw_place place, int64_t index,
                                 int64_t tokens, enum sw_turn turn, struct sw_sum_source source);
// So do the other ranks that read this rank's keys.
enum swathe_status sw_sums_claim_received(struct sw_sums *sums, const struct sw_halo_plan *plan);
// Takes the claims on own rows that were made so far as those of others than the keys' own units,
// and forgets them: these rows are shared.
enum swathe_status sw_sums_share(struct sw_sums *sums);
// Whether the row is shared, and how far, until `end`, the rows after it are like it.
bool sw_sums_part(const struct sw_sums *sums, int64_t row, int64_t end, int64_t *part_end);
// Lists pieces, sources, and makes room for terms.
enum swathe_status sw_sums_cut(struct sw_sums *sums);

// ---- work.c, again ------------------------------------------------------------------------------

// The units of one launch pair: [0, edge_units) see keys that come by the wire, the rest do not.
struct sw_work {
  struct sw_unit *units;
  struct sw_run *runs;
  struct sw_run_source *sources; // [run_count]
  struct sw_sums sums;           // backward only
  int64_t unit_count, edge_units, run_count, spill_tokens, max_keys;
  int64_t unit_capacity, run_capacity, source_capacity;
};

// Cuts the plan's spans into units of a kernel whose tiles have `tile_tokens` queries.  Unit
// boundaries depend on the problem, the plan and the tile alone, never on threads.  `final_keys` of
// backward: as kernel_abi.h has it.
enum swathe_status sw_work_build(struct sw_work *work, const struct swathe_problem *problem,
                                 const struct sw_halo_plan *plan, enum swathe_direction direction,
                                 int64_t tile_tokens, int64_t final_keys);
void sw_work_free(struct sw_work *work);

// ---- layer.c, exchange.c, pass.c ----------------------------------------------------------------

struct sw_buffer {
  void *data;
  size_t bytes;
};

enum { SW_LAYER_BUFFERS = 7, SW_MOST_CHUNKS = 8 };

// Beside the kernels' configs, by direction, that of the exchange.
enum { SW_EXCHANGE = 2, SW_CONFIGS = 3 };
extern const char sw_exchange_kernel[];  // its name where kernels have theirs

// The exchange's config: knobs of generator/spaces.lua.
struct sw_exchange_knobs {
  int32_t overlap, chunks, together, order, poll, progress;
};

// A chunk of the halo, on its way as long as any of its messages is left.
struct sw_arrival {
  int64_t slot, end;                   // of the receive buffer
  _Atomic int32_t left;
};

struct sw_baseline;
struct sw_baseline_heads;

// Of what all ranks must hold alike.
struct sw_digest {
  uint64_t words[2];
};

struct swathe_layer {
  struct swathe_context *context;
  enum swathe_strategy strategy;
  struct sw_baseline *baseline;        // NULL: the halo, or heads
  struct sw_baseline_heads *baseline_heads;  // SWATHE_A2A
  bool muted;                          // see swathe_layer_mute
  struct swathe_problem problem;
  struct sw_aim aim;
  struct swathe_transport *transport;  // NULL: a group of one
  struct sw_device *device;            // of the cpu target
  struct sw_pass_cuda *cuda;           // of the cuda target
  struct sw_halo_planner *planner;
  const struct sw_halo_plan *plan;     // NULL until sharded
  int32_t batch;
  struct sw_choice choices[SW_CONFIGS];
  const struct sw_kernel *kernels[2];  // NULL: not wanted
  struct sw_work work[2];
  const struct swathe_transport *agreed;  // the group whose ranks agreed on the exchange
  struct sw_exchange_knobs agreed_knobs, knobs;
  struct sw_digest digest, agreed_digest;  // of the sharding; what the ranks last agreed on
  bool digest_agreed;                  // in this group
  struct sw_list messages;             // of struct sw_transport_message
  struct sw_list arrivals;             // of struct sw_arrival, ascending; of the keys last posted
  struct sw_list waiting;              // of int64_t: edge units whose keys are on their way
  // keys on their way: to others, from others; sums on their way, in the dtype of the wire: to
  // owners, from readers; the latter as floats; sums that are added later; [unit][batch][query
  // heads]
  union {
    struct {
      struct sw_buffer send, receive, send_sums, receive_narrow, receive_sums, spill_sums,
          head_sums;
    };
    struct sw_buffer buffers[SW_LAYER_BUFFERS];
  };
  struct swathe_timing timing;
};

// ---- agree.c -----------------------------------------------------------------------------------

// Tells every rank of the group whether this one is fine so far, and of which version it is: the
// first failure of any is everybody's, and the transport stays usable.  `status` and its words if
// this rank failed itself.  Nothing to do for a group of one.
enum swathe_status sw_agree_all_can(struct swathe_transport *transport, enum swathe_status status);

// Notes what the ranks have to agree on.
void sw_agree_on(struct swathe_layer *layer, const struct swathe_sharding *sharding);

// Before a call's first message; a gather of 16 bytes, unless the ranks agreed on the same before.
enum swathe_status sw_agree(struct swathe_layer *layer);

// ------------------------------------------------------------------------------------------------

int32_t sw_layer_rank(const struct swathe_layer *layer);
int32_t sw_layer_ranks(const struct swathe_layer *layer);

// Elements of one token's keys and values, all heads.
int64_t sw_layer_token_elements(const struct swathe_layer *layer);

// Bytes of so many tokens' keys and values, or of their gradients' sums.
size_t sw_layer_keys_bytes(const struct swathe_layer *layer, int64_t tokens, size_t elem_bytes);

// At least `tokens` tokens of keys and values of `elem_bytes` each; contents are not kept.
enum swathe_status sw_layer_reserve(struct swathe_layer *layer, struct sw_buffer *buffer,
                                    int64_t tokens, size_t elem_bytes);

// At least so many bytes, likewise.
enum swathe_status sw_layer_reserve_bytes(struct swathe_layer *layer, struct sw_buffer *buffer,
                                          size_t bytes);

// Frees it, unless a failed transport may still read or write it.
void sw_layer_release(struct swathe_layer *layer, struct sw_buffer *buffer);

// Room for a float per unit, batch row and query head.
enum swathe_status sw_layer_reserve_heads(struct swathe_layer *layer, int64_t units);

// The monotonic clock.
double sw_layer_now_s(void);
double sw_layer_now_us(void);

// The rank's own rows from `row` on.
struct sw_view sw_exchange_tensor(const struct swathe_tensor *tensor, int64_t row,
                                  size_t elem_bytes);

// Copies [batch][tokens][heads][dim] from one view to the other.
void sw_exchange_copy(int32_t batch, int64_t tokens, int32_t heads, int32_t dim, struct sw_view to,
                      struct sw_view from, size_t elem_bytes);

struct sw_key_views {
  struct sw_view k, v;
};

// Keys in a buffer of the layer, from its token `first` on.  A token is [batch][kv_heads][dim] of
// k, then of v, so that any tokens in a row can travel as they lie.
struct sw_key_views sw_exchange_packed(const struct swathe_layer *layer, void *data,
                                       size_t elem_bytes, int64_t first);

// Keys, or sums of their gradients, in a buffer that travels, of `tokens` tokens: as packed, or
// where K and V travel apart, all of K before all of V.
struct sw_key_views sw_exchange_wire(const struct swathe_layer *layer, void *data,
                                     size_t elem_bytes, int64_t tokens, int64_t first);

// The knobs that a canonical config sets.
void sw_exchange_read_knobs(const char *config, struct sw_exchange_knobs *knobs);

// One side of a phase: what is sent or received, and where it lies.
struct sw_exchange_side {
  void *data;
  const struct sw_halo_message *messages;
  int64_t count, tokens;               // of the whole buffer
  size_t elem_bytes;
  bool send, tracked;                  // tracked: arrivals are counted
};

// The messages of a phase as the knobs have them, those to receive first, in layer->messages; of
// one chunk of each of the plan's, or all (-1).  Counts their bytes.
void sw_exchange_list(struct swathe_layer *layer, const struct sw_exchange_side *receive,
                      const struct sw_exchange_side *send, int32_t chunk);

// The last chunk, in the order in which they travel, that brings any of these slots' keys.
int32_t sw_exchange_last_chunk(const struct swathe_layer *layer, int64_t slot, int64_t tokens);

// Most messages of a phase under the layer's plan and knobs; room for them and for arrivals.
enum swathe_status sw_exchange_reserve(struct swathe_layer *layer);

// ---- pass_cuda.c, pass_cuda_memory.c ------------------------------------------------------------

// Streams, events and memory of a layer on a CUDA device.
struct sw_pass_cuda;
// layer->cuda, which is to be destroyed after a failure too.
enum swathe_status sw_pass_cuda_create(struct swathe_layer *layer);
void sw_pass_cuda_destroy(struct swathe_layer *layer);
// After layer->plan and layer->work are made.
enum swathe_status sw_pass_cuda_shard(struct swathe_layer *layer);
// Queues forward or backward; the tensors were checked.
enum swathe_status sw_pass_cuda_run(struct swathe_layer *layer, enum swathe_direction direction,
                                    const struct swathe_tensors *tensors, void *stream);
// Of the device.
size_t sw_pass_cuda_memory_bytes(const struct swathe_layer *layer);


// ---- exchange.c, again --------------------------------------------------------------------------

// One phase of the exchange while units run.
struct sw_exchange {
  struct swathe_transport *transport;  // NULL: nothing to move
  struct swathe_layer *layer;
  bool rounds;                         // of a baseline, whose exchange has rounds
  bool done;
  int32_t looks;                       // asked for so far
  enum swathe_status status;
};

// Puts the keys that others need into the send buffer, posts them, and receives the halo.
enum swathe_status sw_exchange_post_keys(struct swathe_layer *layer,
                                         const struct swathe_tensors *tensors, void *halo,
                                         struct sw_exchange *exchange);
// Whether sums travel as bfloat16, not as floats; they are added as floats either way.  (Those of a
// baseline leave and arrive as floats.)
bool sw_exchange_narrows(const struct swathe_layer *layer);
// Bytes of one sum that travels.
size_t sw_exchange_sum_bytes(const struct swathe_layer *layer);
// Posts the sums of the halo's keys to their owners, and receives those of the own keys.
enum swathe_status sw_exchange_post_sums(struct swathe_layer *layer, struct sw_exchange *exchange);
// For a launch's idle calls: `arg` is the exchange.
void sw_exchange_progress(void *arg);
// Whether the keys of these slots have come.
bool sw_exchange_has(const struct sw_exchange *exchange, int64_t slot, int64_t tokens);
// Waits until more keys have come, or all messages are done.
enum swathe_status sw_exchange_wait_more(struct sw_exchange *exchange);
enum swathe_status sw_exchange_finish(struct swathe_layer *layer, struct sw_exchange *exchange);
enum swathe_status sw_exchange_finish_sums(struct swathe_layer *layer,
                                           struct sw_exchange *exchange);
// After a failure, whose words stay: nobody touches the memory of messages that are under way any
// more, or the transport says that it holds it; the other ranks are told.  Returns `status`.
enum swathe_status sw_exchange_abandon(struct swathe_layer *layer, enum swathe_status status);

// As swathe_layer_create, with configs given for some directions and the exchange (NULL: choose),
// and `directions` a mask of 1 << direction: the others get no kernel.
enum swathe_status sw_layer_create(struct swathe_context *context,
                                   const struct swathe_problem *problem,
                                   struct swathe_transport *transport,
                                   const char *const configs[SW_CONFIGS], unsigned directions,
                                   struct swathe_layer **layer);
// The same for any strategy.
enum swathe_status sw_layer_create_strategy(struct swathe_context *context,
                                            const struct swathe_problem *problem,
                                            struct swathe_transport *transport,
                                            enum swathe_strategy strategy,
                                            const char *const configs[SW_CONFIGS],
                                            unsigned directions,
                                            struct swathe_layer **layer);

// ---- baseline.c ---------------------------------------------------------------------------------

// What the layer's strategy needs; SWATHE_UNSUPPORTED if it cannot serve the problem.  Destroy
// while the layer has its device.
enum swathe_status sw_baseline_create(struct swathe_layer *layer);
void sw_baseline_destroy(struct swathe_layer *layer);
enum swathe_status sw_baseline_shard(struct swathe_layer *layer,
                                     const struct swathe_sharding *sharding);
size_t sw_baseline_memory_bytes(const struct swathe_layer *layer);

// They take the place of the functions of exchange.c: keys come to where the plan wants them, sums
// leave from and arrive where the plan has them.
enum swathe_status sw_baseline_post_keys(struct swathe_layer *layer,
                                         const struct swathe_tensors *tensors, void *halo,
                                         struct sw_exchange *exchange);
enum swathe_status sw_baseline_post_sums(struct swathe_layer *layer, struct sw_exchange *exchange);
void sw_baseline_progress(struct sw_exchange *exchange);
enum swathe_status sw_baseline_finish(struct swathe_layer *layer, struct sw_exchange *exchange);

// ---- baseline_heads.c: SWATHE_A2A ---------------------------------------------------------------

enum swathe_status sw_baseline_heads_create(struct swathe_layer *layer);
void sw_baseline_heads_destroy(struct swathe_layer *layer);
enum swathe_status sw_baseline_heads_shard(struct swathe_layer *layer,
                                           const struct swathe_sharding *sharding);
size_t sw_baseline_heads_memory_bytes(const struct swathe_layer *layer);
size_t sw_baseline_heads_kept_bytes(const struct swathe_layer *layer);
// In the place of a pass: deals out, runs the inner layer, deals back.
enum swathe_status sw_baseline_heads_pass(struct swathe_layer *layer,
                                          enum swathe_direction direction,
                                          const struct swathe_tensors *tensors);

#endif
