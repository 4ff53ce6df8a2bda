// device.h: memory and launches of one layer's device.
//
// The CPU device hands ranges of items to its threads; the calling thread is one of them and lets
// the exchange progress between its ranges.
#ifndef SW_DEVICE_H
#define SW_DEVICE_H

#include "jit.h"

struct sw_device;

// The best isa this processor has among `isas` (names as targets.lua gives them); NULL if none.
const char *sw_device_cpu_isa(const char *const *isas, int32_t count);
// Processors this process may run on.
int32_t sw_device_cpu_processors(void);

// `threads` >= 1, the calling thread included.
enum swathe_status sw_device_cpu_create(int32_t threads, struct sw_device **device);
void sw_device_destroy(struct sw_device *device);

// Zeroed memory aligned to 64 bytes (large pieces to 2 MiB, advised huge); NULL without memory.
void *sw_device_allocate(struct sw_device *device, size_t bytes);
void sw_device_free(struct sw_device *device, void *memory);

// A kernel over a range of items, as kernel_abi.h declares them with the arguments' type erased.
typedef void sw_device_kernel(const void *args, int64_t begin, int64_t end, void *workspace);

struct sw_device_launch {
  sw_device_kernel *kernel;
  const void *args;
  int64_t items;
  int64_t grain;            // items handed out at a time, >= 1
  size_t workspace_bytes;   // per thread; kept by the device and grown when needed
  void (*idle)(void *arg);  // called by the calling thread between its ranges, or NULL
  void *idle_arg;
};
// Runs to the end.  Items may run on any thread in any order.  One launch at a time per device.
enum swathe_status sw_device_launch(struct sw_device *device,
                                    const struct sw_device_launch *launch);

#endif
