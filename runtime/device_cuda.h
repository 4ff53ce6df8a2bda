// device_cuda.h: NVIDIA devices through the driver API: memory, streams, events, modules, launches.
//
// The driver is opened with dlopen when the first device is asked for; no CUDA header or library is
// needed before that.  Work happens in a device's primary context, which PyTorch and the CUDA
// runtime use too.  sw_device_cuda_enter makes it the thread's current one; everything below it
// here is called between enter and leave, which puts back what was current.
//
// A failed kernel shows at a later call, and every call after that fails likewise: the words say
// so.
#ifndef SW_DEVICE_CUDA_H
#define SW_DEVICE_CUDA_H

#include "error.h"

struct sw_device_cuda;

// What the driver is, for words and for doctor.  Nothing is created.
struct sw_device_cuda_driver {
  char library[256];                  // where it was found
  int version;                        // of CUDA that it serves: 13000 is 13.0
  int devices;
  bool emulated;                      // its first device says so
  char first[128];                    // the first device's name
  int first_major, first_minor;       // and compute capability
};
enum swathe_status sw_device_cuda_look(struct sw_device_cuda_driver *driver);

// Whether this process has started the driver: then its forked children cannot use it.
bool sw_device_cuda_started(void);

// The device of the calling thread's current context, else `wanted`, else (when that is -1) the
// first one.
enum swathe_status sw_device_cuda_pick(int32_t wanted, int32_t *ordinal);
// Retains the primary context of device `ordinal`.
enum swathe_status sw_device_cuda_create(int32_t ordinal, struct sw_device_cuda **device);
void sw_device_cuda_destroy(struct sw_device_cuda *device);

const char *sw_device_cuda_name(const struct sw_device_cuda *device);
int32_t sw_device_cuda_ordinal(const struct sw_device_cuda *device);
// Bytes of second-level cache.
int64_t sw_device_cuda_cache_bytes(const struct sw_device_cuda *device);
// The best of `isas` ("sm_90a", ...) for this device: its own number, with the features that only
// it has where the list knows them, else the highest of its major number.  NULL if none.
const char *sw_device_cuda_isa(const struct sw_device_cuda *device, const char *const *isas,
                               int32_t count);

enum swathe_status sw_device_cuda_enter(struct sw_device_cuda *device);
void sw_device_cuda_leave(struct sw_device_cuda *device);
// Makes it the thread's current one in the place of another, and leaves it so.
enum swathe_status sw_device_cuda_use(struct sw_device_cuda *device);

// ---- Memory ------------------------------------------------------------------------------------

// 256-byte aligned; contents are not set.
enum swathe_status sw_device_cuda_allocate(struct sw_device_cuda *device, size_t bytes,
                                           void **memory);
void sw_device_cuda_free(struct sw_device_cuda *device, void *memory);
// Host memory that copies reach without a stop.
enum swathe_status sw_device_cuda_allocate_pinned(struct sw_device_cuda *device, size_t bytes,
                                                  void **memory);
void sw_device_cuda_free_pinned(struct sw_device_cuda *device, void *memory);

// In the order of the stream.  From and to pageable memory only where the comment of the caller
// says that it may wait.
enum swathe_status sw_device_cuda_write(struct sw_device_cuda *device, void *to, const void *from,
                                        size_t bytes, void *stream);
enum swathe_status sw_device_cuda_read(struct sw_device_cuda *device, void *to, const void *from,
                                       size_t bytes, void *stream);
// `count` words of 32 bits get `value`.
enum swathe_status sw_device_cuda_fill(struct sw_device_cuda *device, void *memory, uint32_t value,
                                       size_t count, void *stream);

// ---- Streams and events ------------------------------------------------------------------------

// A stream that does not wait for the default one; `urgent`: its work goes first where the device
// has the choice.
enum swathe_status sw_device_cuda_stream(struct sw_device_cuda *device, bool urgent, void **stream);
void sw_device_cuda_drop_stream(struct sw_device_cuda *device, void *stream);
enum swathe_status sw_device_cuda_synchronize(struct sw_device_cuda *device, void *stream);
// Whether a graph is being captured from it.
enum swathe_status sw_device_cuda_capturing(struct sw_device_cuda *device, void *stream,
                                            bool *capturing);

enum swathe_status sw_device_cuda_event(struct sw_device_cuda *device, bool timed, void **event);
void sw_device_cuda_drop_event(struct sw_device_cuda *device, void *event);
enum swathe_status sw_device_cuda_record(struct sw_device_cuda *device, void *event, void *stream);
// The stream goes on when the event's last record is reached; the host does not wait.
enum swathe_status sw_device_cuda_await(struct sw_device_cuda *device, void *stream, void *event);
// The host waits; allowed while the thread captures, for events that are no part of the capture.
enum swathe_status sw_device_cuda_wait_event(struct sw_device_cuda *device, void *event);
enum swathe_status sw_device_cuda_elapsed(struct sw_device_cuda *device, void *begin, void *end,
                                          double *us);

// ---- Modules and launches ----------------------------------------------------------------------

// A CUBIN, or where the driver has no use for it its PTX, which must end with a zero.
enum swathe_status sw_device_cuda_load(struct sw_device_cuda *device, const char *name,
                                       const void *cubin, size_t cubin_bytes, const char *ptx,
                                       void **module);
void sw_device_cuda_unload(struct sw_device_cuda *device, void *module);
enum swathe_status sw_device_cuda_function(struct sw_device_cuda *device, void *module,
                                           const char *name, void **function);
// Lets blocks of the function have this much dynamic shared memory.
enum swathe_status sw_device_cuda_allow_shared(struct sw_device_cuda *device, void *function,
                                               const char *name, int bytes);

struct sw_device_cuda_launch {
  const char *name;                   // for words
  void *function;
  int64_t blocks_x, blocks_y;         // none: nothing is launched
  int threads, shared_bytes;
  const void *args;                   // the kernel's one parameter, read before the call returns
};
enum swathe_status sw_device_cuda_launch(struct sw_device_cuda *device,
                                         const struct sw_device_cuda_launch *launch, void *stream);

#endif
