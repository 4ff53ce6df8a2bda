// pass_cuda.h: what a layer has on a CUDA device, for the file that queues its calls and the one
// that keeps its memory.  Private to pass_cuda*.c.
#ifndef SW_PASS_CUDA_H
#define SW_PASS_CUDA_H

#include "layer.h"

struct sw_cuda_strides {
  int64_t token, head, batch;
};

// What the lists of one direction were made for.
struct sw_cuda_tensor_strides {
  struct sw_cuda_strides k, v, dk, dv;
};

// Where the lists lie in their block, in bytes from its begin.
struct sw_cuda_places {
  size_t units[2], runs[2], pieces, terms, segments, gaps;
  size_t bytes;
  int64_t segment_count, gap_count;   // after cutting
};

struct sw_pass_cuda {
  struct sw_device_cuda *device;
  const struct sw_kernel *copies;
  void *wire, *upload;                // streams of our own: what travels; lists
  void *began, *packed, *arrived;     // events: of one phase of the exchange
  void *uploaded, *used;              // the lists have come; the last call is done with them
  void *staged[2];                    // a staging block has been read
  void *came[SW_MOST_CHUNKS];         // chunks of keys

  struct sw_buffer lists, staging[2]; // device; pinned
  int turn;                           // which staging block is next
  struct sw_cuda_places places;
  struct sw_cuda_tensor_strides strides[2];
  bool listed[2];                     // the direction's lists are there
  bool awaits_lists;                  // no stream has waited for `uploaded` yet
  bool lists_known;                   // the host knows that they have come
  bool was_used;                      // `used` was recorded, on:
  void *last_stream;
  bool gone_backward;                 // once: its lists and buffers are made at shard from then on

  // device: keys and sums on their way, as in struct swathe_layer; then of one call
  struct sw_buffer send, receive, send_sums, receive_narrow, receive_sums, spill_sums;
  struct sw_buffer delta, head_sums;
  struct sw_buffer host_out, host_in; // pinned: the wire's, for transports of host memory
};

// ---- pass_cuda.c --------------------------------------------------------------------------------

// Whether what travels passes through host memory.
bool sw_pass_cuda_stages(const struct swathe_layer *layer);

// ---- pass_cuda_memory.c: within the device's context --------------------------------------------

// After layer->plan and layer->work are made: buffers and lists as most callers will need them.
enum swathe_status sw_pass_cuda_memory_shard(struct swathe_layer *layer);
// Buffers and lists that fit a call with these tensors.  A call that is captured has to have them.
enum swathe_status sw_pass_cuda_memory_fit(struct swathe_layer *layer,
                                           enum swathe_direction direction,
                                           const struct swathe_tensors *tensors, bool capturing);
void sw_pass_cuda_memory_free(struct sw_pass_cuda *pass);

#endif
