// device_cuda.c: the CUDA driver, opened at run time, and one device's primary context.  What every
// call here means stands in device_cuda.h.
#include "device_cuda.h"

#include <dlfcn.h>
#include <inttypes.h>
#include <link.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- The driver --------------------------------------------------------------------------------

// Results, attributes and flags of cuda.h that are looked at here, by number: no header is needed.
enum {
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  STUB_LIBRARY = 34,
  NO_DEVICE = 100,
  INVALID_DEVICE = 101,
  INVALID_IMAGE = 200,
  NO_BINARY_FOR_GPU = 209,
  INVALID_PTX = 218,
  JIT_COMPILER_NOT_FOUND = 221,
  UNSUPPORTED_PTX_VERSION = 222,
  JIT_COMPILATION_DISABLED = 223,
  ILLEGAL_ADDRESS = 700,
  LAUNCH_TIMEOUT = 702,
  ASSERTION_FAILED = 710,
  HARDWARE_STACK_ERROR = 714,         // and the kinds up to
  LAUNCH_FAILED = 719,

  ATTRIBUTE_L2_BYTES = 38,
  ATTRIBUTE_MAJOR = 75,
  ATTRIBUTE_MINOR = 76,

  STREAM_NON_BLOCKING = 1,
  EVENT_DISABLE_TIMING = 2,
  FUNCTION_MAX_DYNAMIC_SHARED = 8,
  CAPTURE_NONE = 0,
  CAPTURE_MODE_RELAXED = 2,
};

typedef unsigned long long device_pointer;

// The driver's functions: our name, the symbol (the version whose signature stands here), the
// parameters.  All return a result, 0 for success.
#define DRIVER_FUNCTIONS(X)                                                                        \
  X(init, "cuInit", (unsigned flags))                                                              \
  X(driver_version, "cuDriverGetVersion", (int *version))                                          \
  X(device_count, "cuDeviceGetCount", (int *count))                                                \
  X(device_get, "cuDeviceGet", (int *device, int ordinal))                                         \
  X(device_name, "cuDeviceGetName", (char *name, int size, int device))                            \
  X(device_attribute, "cuDeviceGetAttribute", (int *value, int attribute, int device))             \
  X(context_retain, "cuDevicePrimaryCtxRetain", (void **context, int device))                      \
  X(context_release, "cuDevicePrimaryCtxRelease_v2", (int device))                                 \
  X(context_current, "cuCtxGetCurrent", (void **context))                                          \
  X(context_device, "cuCtxGetDevice", (int *device))                                               \
  X(context_push, "cuCtxPushCurrent_v2", (void *context))                                          \
  X(context_pop, "cuCtxPopCurrent_v2", (void **context))                                           \
  X(context_set, "cuCtxSetCurrent", (void *context))                                               \
  X(priorities, "cuCtxGetStreamPriorityRange", (int *least, int *greatest))                        \
  X(memory_info, "cuMemGetInfo_v2", (size_t *free, size_t *total))                                 \
  X(allocate, "cuMemAlloc_v2", (device_pointer *memory, size_t bytes))                             \
  X(release, "cuMemFree_v2", (device_pointer memory))                                              \
  X(allocate_host, "cuMemAllocHost_v2", (void **memory, size_t bytes))                             \
  X(release_host, "cuMemFreeHost", (void *memory))                                                 \
  X(write, "cuMemcpyHtoDAsync_v2",                                                                 \
    (device_pointer to, const void *from, size_t bytes, void *stream))                             \
  X(read, "cuMemcpyDtoHAsync_v2", (void *to, device_pointer from, size_t bytes, void *stream))     \
  X(read_now, "cuMemcpyDtoH_v2", (void *to, device_pointer from, size_t bytes))                    \
  X(fill, "cuMemsetD32Async",                                                                      \
    (device_pointer to, unsigned value, size_t count, void *stream))                               \
  X(stream_create, "cuStreamCreateWithPriority", (void **stream, unsigned flags, int priority))    \
  X(stream_destroy, "cuStreamDestroy_v2", (void *stream))                                          \
  X(stream_synchronize, "cuStreamSynchronize", (void *stream))                                     \
  X(stream_wait, "cuStreamWaitEvent", (void *stream, void *event, unsigned flags))                 \
  X(stream_capturing, "cuStreamIsCapturing", (void *stream, int *status))                          \
  X(capture_mode, "cuThreadExchangeStreamCaptureMode", (int *mode))                                \
  X(event_create, "cuEventCreate", (void **event, unsigned flags))                                 \
  X(event_destroy, "cuEventDestroy_v2", (void *event))                                             \
  X(event_record, "cuEventRecord", (void *event, void *stream))                                    \
  X(event_synchronize, "cuEventSynchronize", (void *event))                                        \
  X(module_load, "cuModuleLoadData", (void **module, const void *image))                           \
  X(module_unload, "cuModuleUnload", (void *module))                                               \
  X(module_function, "cuModuleGetFunction", (void **function, void *module, const char *name))     \
  X(function_set, "cuFuncSetAttribute", (void *function, int attribute, int value))                \
  X(launch, "cuLaunchKernel",                                                                      \
    (void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,          \
     unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream, void **parameters,   \
     void **extra))                                                                                \
  X(error_name, "cuGetErrorName", (int result, const char **name))                                 \
  X(error_string, "cuGetErrorString", (int result, const char **text))

static struct {
  pthread_mutex_t mutex;              // of opening
  bool ready;
  void *handle;
  char library[256];
  int version;
#define DRIVER_POINTER(name, symbol, parameters) int(*name) parameters;
  DRIVER_FUNCTIONS(DRIVER_POINTER)
#undef DRIVER_POINTER
  int (*elapsed)(float *ms, void *begin, void *end);  // its symbol's version differs by driver
} driver = { .mutex = PTHREAD_MUTEX_INITIALIZER };

static const char missing_advice[] =
    "install the NVIDIA driver, or set SWATHE_LIBCUDA to its libcuda.so.1";

// A result as the driver names it.
struct result_words {
  char text[256];
};

static struct result_words words_of(int result)
{
  struct result_words words;
  const char *name = NULL, *text = NULL;
  if (driver.error_name) driver.error_name(result, &name);
  if (driver.error_string) driver.error_string(result, &text);
  snprintf(words.text, sizeof words.text, "%s (%d)%s%s", name ? name : "error", result,
           text ? ": " : "", text ? text : "");
  return words;
}

// The stub that comes with the toolkit has the driver's name and does nothing.
static bool is_stub(const char *path)
{
  char *real = realpath(path, NULL);
  const bool stub = strstr(path, "/stubs/") || (real && strstr(real, "/stubs/"));
  free(real);
  return stub;
}

static enum swathe_status open_library(void)
{
  const char *wanted = getenv("SWATHE_LIBCUDA");
  struct link_map *map = NULL;

  if (!wanted || !*wanted) wanted = "libcuda.so.1";
  if (strchr(wanted, '/') && is_stub(wanted))
    return sw_fail(SWATHE_UNSUPPORTED, "%s is the toolkit's stub, not a driver: %s", wanted,
                   missing_advice);
  driver.handle = dlopen(wanted, RTLD_NOW | RTLD_LOCAL);
  if (!driver.handle)
    return sw_fail(SWATHE_UNSUPPORTED, "no CUDA driver here: %s; %s", dlerror(), missing_advice);
  if (dlinfo(driver.handle, RTLD_DI_LINKMAP, &map)) map = NULL;
  snprintf(driver.library, sizeof driver.library, "%s", map ? map->l_name : wanted);
  if (is_stub(driver.library))
    return sw_fail(SWATHE_UNSUPPORTED, "%s is the toolkit's stub, not a driver: %s",
                   driver.library, missing_advice);
  return SWATHE_OK;
}

static enum swathe_status find_functions(void)
{
  static const struct {
    const char *symbol;
    size_t place;
  } functions[] = {
#define DRIVER_ROW(name, symbol, parameters) { symbol, offsetof(__typeof__(driver), name) },
    DRIVER_FUNCTIONS(DRIVER_ROW)
#undef DRIVER_ROW
  };

  *(void **)&driver.elapsed = dlsym(driver.handle, "cuEventElapsedTime_v2");
  if (!driver.elapsed) *(void **)&driver.elapsed = dlsym(driver.handle, "cuEventElapsedTime");
  for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
    void *address = dlsym(driver.handle, functions[i].symbol);
    if (!address)
      return sw_fail(SWATHE_UNSUPPORTED,
                     "the CUDA driver %s has no %s: it is older than CUDA 11.2; update it",
                     driver.library, functions[i].symbol);
    memcpy((char *)&driver + functions[i].place, &address, sizeof address);
  }
  return SWATHE_OK;
}

static enum swathe_status start_driver(void)
{
  const int result = driver.init(0);

  if (result == STUB_LIBRARY)
    return sw_fail(SWATHE_UNSUPPORTED, "%s is the toolkit's stub, not a driver: %s",
                   driver.library, missing_advice);
  if (result == NO_DEVICE)
    return sw_fail(SWATHE_UNSUPPORTED,
                   "the CUDA driver %s finds no device; is CUDA_VISIBLE_DEVICES set to none?",
                   driver.library);
  if (result)
    return sw_fail(SWATHE_DEVICE, "the CUDA driver %s does not start: %s", driver.library,
                   words_of(result).text);
  if (driver.driver_version(&driver.version)) driver.version = 0;
  return SWATHE_OK;
}

// Once; a failure is tried anew by the next call.
static enum swathe_status need_driver(void)
{
  enum swathe_status status = SWATHE_OK;

  pthread_mutex_lock(&driver.mutex);
  if (!driver.ready) {
    status = open_library();
    if (!status) status = find_functions();
    if (!status) status = start_driver();
    driver.ready = !status;
    if (status && driver.handle) {
      dlclose(driver.handle);
      driver.handle = NULL;
    }
  }
  pthread_mutex_unlock(&driver.mutex);
  return status;
}

bool sw_device_cuda_started(void)
{
  pthread_mutex_lock(&driver.mutex);
  const bool ready = driver.ready;
  pthread_mutex_unlock(&driver.mutex);
  return ready;
}

// ---- Devices -----------------------------------------------------------------------------------

struct sw_device_cuda {
  int ordinal, handle;
  int major, minor;
  int cache_bytes;
  char name[128];
  void *context;
};

// What a kernel does wrong; every call after it gets the same result.
static bool is_sticky(int result)
{
  return result == ILLEGAL_ADDRESS || result == LAUNCH_TIMEOUT || result == ASSERTION_FAILED ||
         (result >= HARDWARE_STACK_ERROR && result <= LAUNCH_FAILED);
}

// Kernels run apart from the calls that start them, so a call that fails may not be the culprit.
static enum swathe_status fail_call(const struct sw_device_cuda *device, int result,
                                    const char *doing)
{
  const char *note = "";
  if (is_sticky(result))
    note = "; a kernel that was started earlier failed, and the process cannot use the device "
           "any more";
  return sw_fail(SWATHE_DEVICE, "%s on device %d (%s): %s%s", doing, device->ordinal, device->name,
                 words_of(result).text, note);
}

static enum swathe_status check(const struct sw_device_cuda *device, int result, const char *doing)
{
  return result ? fail_call(device, result, doing) : SWATHE_OK;
}

enum swathe_status sw_device_cuda_look(struct sw_device_cuda_driver *found)
{
  int device = 0;
  const enum swathe_status status = need_driver();

  *found = (struct sw_device_cuda_driver){ .version = driver.version };
  if (status) return status;
  snprintf(found->library, sizeof found->library, "%s", driver.library);
  if (driver.device_count(&found->devices)) found->devices = 0;
  if (!found->devices || driver.device_get(&device, 0)) return SWATHE_OK;
  driver.device_name(found->first, (int)sizeof found->first, device);
  driver.device_attribute(&found->first_major, ATTRIBUTE_MAJOR, device);
  driver.device_attribute(&found->first_minor, ATTRIBUTE_MINOR, device);
  found->emulated = strstr(found->first, "emulated") != NULL;
  return SWATHE_OK;
}

enum swathe_status sw_device_cuda_pick(int32_t wanted, int32_t *ordinal)
{
  void *context = NULL;
  int current = -1, count = 0, handle = 0;
  const enum swathe_status status = need_driver();

  if (status) return status;
  *ordinal = wanted < 0 ? 0 : wanted;
  if (driver.context_current(&context) || !context || driver.context_device(&current))
    return SWATHE_OK;
  if (driver.device_count(&count)) count = 0;
  for (int i = 0; i < count; i++)
    if (!driver.device_get(&handle, i) && handle == current) *ordinal = i;
  return SWATHE_OK;
}

enum swathe_status sw_device_cuda_create(int32_t ordinal, struct sw_device_cuda **device_out)
{
  int count = 0, result;
  enum swathe_status status = need_driver();

  if (status) return status;
  struct sw_device_cuda *device = calloc(1, sizeof *device);
  if (!device) return sw_fail(SWATHE_NO_MEMORY, "no memory for a CUDA device");
  device->ordinal = ordinal;
  if (driver.device_count(&count)) count = 0;
  result = driver.device_get(&device->handle, ordinal);
  if (result == INVALID_DEVICE || ordinal >= count) {
    free(device);
    return sw_fail(SWATHE_UNSUPPORTED, "there is no CUDA device %d; the driver has %d", ordinal,
                   count);
  }
  if (!result)
    result = driver.device_name(device->name, (int)sizeof device->name, device->handle);
  if (!result) result = driver.device_attribute(&device->major, ATTRIBUTE_MAJOR, device->handle);
  if (!result) result = driver.device_attribute(&device->minor, ATTRIBUTE_MINOR, device->handle);
  if (!result && driver.device_attribute(&device->cache_bytes, ATTRIBUTE_L2_BYTES, device->handle))
    device->cache_bytes = 0;
  if (!result) result = driver.context_retain(&device->context, device->handle);
  if (result) {
    status = fail_call(device, result, "the primary context cannot be had");
    free(device);
    return status;
  }
  *device_out = device;
  return SWATHE_OK;
}

void sw_device_cuda_destroy(struct sw_device_cuda *device)
{
  if (!device) return;
  driver.context_release(device->handle);
  free(device);
}

const char *sw_device_cuda_name(const struct sw_device_cuda *device) { return device->name; }

int32_t sw_device_cuda_ordinal(const struct sw_device_cuda *device) { return device->ordinal; }

int64_t sw_device_cuda_cache_bytes(const struct sw_device_cuda *device)
{
  return device->cache_bytes;
}

const char *sw_device_cuda_isa(const struct sw_device_cuda *device, const char *const *isas,
                               int32_t count)
{
  const int own = device->major * 10 + device->minor;
  const char *best = NULL;
  int best_rank = -1;

  for (int32_t i = 0; i < count; i++) {
    int number = 0, used = 0;
    if (sscanf(isas[i], "sm_%d%n", &number, &used) != 1) continue;
    const bool special = isas[i][used] != 0;  // "sm_90a" runs on 9.0 and nowhere else
    if (number / 10 != device->major || number > own || (special && number != own)) continue;
    const int rank = 2 * number + special;
    if (rank <= best_rank) continue;
    best_rank = rank;
    best = isas[i];
  }
  return best;
}

enum swathe_status sw_device_cuda_enter(struct sw_device_cuda *device)
{
  return check(device, driver.context_push(device->context), "its context cannot be entered");
}

enum swathe_status sw_device_cuda_use(struct sw_device_cuda *device)
{
  return check(device, driver.context_set(device->context), "its context cannot be used");
}

void sw_device_cuda_leave(struct sw_device_cuda *device)
{
  void *context = NULL;
  (void)device;
  driver.context_pop(&context);
}

// ---- Memory ------------------------------------------------------------------------------------

static device_pointer address_of(const void *memory) { return (device_pointer)(uintptr_t)memory; }

enum swathe_status sw_device_cuda_allocate(struct sw_device_cuda *device, size_t bytes,
                                           void **memory)
{
  device_pointer address = 0;
  const int result = driver.allocate(&address, bytes ? bytes : 1);
  size_t available = 0, total = 0;

  if (result == OUT_OF_MEMORY) {
    driver.memory_info(&available, &total);
    return sw_fail(SWATHE_NO_MEMORY,
                   "no %.1f MB of memory on device %d (%s): %.1f MB of its %.1f MB are free",
                   1e-6 * (double)bytes, device->ordinal, device->name, 1e-6 * (double)available,
                   1e-6 * (double)total);
  }
  if (result) return fail_call(device, result, "memory cannot be allocated");
  *memory = (void *)(uintptr_t)address;
  return SWATHE_OK;
}

void sw_device_cuda_free(struct sw_device_cuda *device, void *memory)
{
  (void)device;
  if (memory) driver.release(address_of(memory));
}

enum swathe_status sw_device_cuda_allocate_pinned(struct sw_device_cuda *device, size_t bytes,
                                                  void **memory)
{
  const int result = driver.allocate_host(memory, bytes ? bytes : 1);
  if (result == OUT_OF_MEMORY)
    return sw_fail(SWATHE_NO_MEMORY, "no %.1f MB of pinned host memory", 1e-6 * (double)bytes);
  return check(device, result, "pinned memory cannot be allocated");
}

void sw_device_cuda_free_pinned(struct sw_device_cuda *device, void *memory)
{
  (void)device;
  if (memory) driver.release_host(memory);
}

enum swathe_status sw_device_cuda_write(struct sw_device_cuda *device, void *to, const void *from,
                                        size_t bytes, void *stream)
{
  if (!bytes) return SWATHE_OK;
  return check(device, driver.write(address_of(to), from, bytes, stream),
               "a copy to the device failed");
}

enum swathe_status sw_device_cuda_read(struct sw_device_cuda *device, void *to, const void *from,
                                       size_t bytes, void *stream)
{
  if (!bytes) return SWATHE_OK;
  return check(device, driver.read(to, address_of(from), bytes, stream),
               "a copy from the device failed");
}

enum swathe_status sw_device_cuda_fill(struct sw_device_cuda *device, void *memory, uint32_t value,
                                       size_t count, void *stream)
{
  if (!count) return SWATHE_OK;
  return check(device, driver.fill(address_of(memory), value, count, stream),
               "memory cannot be filled");
}

// ---- Streams and events ------------------------------------------------------------------------

enum swathe_status sw_device_cuda_stream(struct sw_device_cuda *device, bool urgent, void **stream)
{
  int least = 0, greatest = 0;
  int result = driver.priorities(&least, &greatest);
  if (!result)
    result = driver.stream_create(stream, STREAM_NON_BLOCKING, urgent ? greatest : least);
  return check(device, result, "a stream cannot be made");
}

void sw_device_cuda_drop_stream(struct sw_device_cuda *device, void *stream)
{
  (void)device;
  if (stream) driver.stream_destroy(stream);
}

enum swathe_status sw_device_cuda_synchronize(struct sw_device_cuda *device, void *stream)
{
  return check(device, driver.stream_synchronize(stream), "waiting for a stream failed");
}

enum swathe_status sw_device_cuda_capturing(struct sw_device_cuda *device, void *stream,
                                            bool *capturing)
{
  int status = CAPTURE_NONE;
  const int result = driver.stream_capturing(stream, &status);
  *capturing = status != CAPTURE_NONE;
  return check(device, result, "the stream cannot be used");
}

enum swathe_status sw_device_cuda_event(struct sw_device_cuda *device, bool timed, void **event)
{
  return check(device, driver.event_create(event, timed ? 0 : EVENT_DISABLE_TIMING),
               "an event cannot be made");
}

void sw_device_cuda_drop_event(struct sw_device_cuda *device, void *event)
{
  (void)device;
  if (event) driver.event_destroy(event);
}

enum swathe_status sw_device_cuda_record(struct sw_device_cuda *device, void *event, void *stream)
{
  return check(device, driver.event_record(event, stream), "an event cannot be recorded");
}

enum swathe_status sw_device_cuda_await(struct sw_device_cuda *device, void *stream, void *event)
{
  return check(device, driver.stream_wait(stream, event, 0), "a stream cannot wait for an event");
}

enum swathe_status sw_device_cuda_wait_event(struct sw_device_cuda *device, void *event)
{
  int mode = CAPTURE_MODE_RELAXED;
  const int exchanged = driver.capture_mode(&mode);
  const int result = driver.event_synchronize(event);
  if (!exchanged) driver.capture_mode(&mode);
  return check(device, result, "waiting for an event failed");
}

enum swathe_status sw_device_cuda_elapsed(struct sw_device_cuda *device, void *begin, void *end,
                                          double *us)
{
  float ms = 0;
  const int result = driver.elapsed ? driver.elapsed(&ms, begin, end) : INVALID_VALUE;
  *us = 1e3 * (double)ms;
  return check(device, result, "the time between events cannot be had");
}

// ---- Modules and launches ----------------------------------------------------------------------

// The release of the compiler that wrote a PTX, as it says in a comment of the text: "13.0".
static void compiler_of(const char *ptx, char *text, size_t size)
{
  const char *release = ptx ? strstr(ptx, "release ") : NULL;
  const size_t digits = release ? strspn(release + 8, "0123456789.") : 0;
  if (digits) snprintf(text, size, "%.*s", (int)digits, release + 8);
  else snprintf(text, size, "an unknown release");
}

// Results that mean: this image is not for this driver or device, another form of it might be.
static bool is_refusal(int result)
{
  return result == INVALID_IMAGE || result == NO_BINARY_FOR_GPU || result == INVALID_PTX ||
         result == UNSUPPORTED_PTX_VERSION || result == JIT_COMPILER_NOT_FOUND ||
         result == JIT_COMPILATION_DISABLED;
}

enum swathe_status sw_device_cuda_load(struct sw_device_cuda *device, const char *name,
                                       const void *cubin, size_t cubin_bytes, const char *ptx,
                                       void **module)
{
  char compiler[32];
  int of_cubin = NO_BINARY_FOR_GPU, of_ptx = NO_BINARY_FOR_GPU;

  if (cubin && cubin_bytes) of_cubin = driver.module_load(module, cubin);
  if (!of_cubin) return SWATHE_OK;
  if (ptx && is_refusal(of_cubin)) of_ptx = driver.module_load(module, ptx);
  else of_ptx = of_cubin;
  if (!of_ptx) return SWATHE_OK;
  if (!is_refusal(of_ptx)) return fail_call(device, of_ptx, "a kernel cannot be loaded");
  compiler_of(ptx, compiler, sizeof compiler);
  return sw_fail(SWATHE_LOAD,
                 "the CUDA driver %s, of CUDA %d.%d, takes neither the binary of %s (%s) nor its "
                 "PTX (%s), compiled by CUDA %s for device %d (%s, compute capability %d.%d): "
                 "update the driver, or name an older compiler with SWATHE_LIBNVRTC",
                 driver.library, driver.version / 1000, driver.version % 1000 / 10, name,
                 words_of(of_cubin).text, words_of(of_ptx).text, compiler, device->ordinal,
                 device->name, device->major, device->minor);
}

void sw_device_cuda_unload(struct sw_device_cuda *device, void *module)
{
  (void)device;
  if (module) driver.module_unload(module);
}

static enum swathe_status fail_symbol(const struct sw_device_cuda *device, int result,
                                      const char *name)
{
  (void)device;
  return sw_fail(SWATHE_LOAD, "the image has no %s: %s", name, words_of(result).text);
}

enum swathe_status sw_device_cuda_function(struct sw_device_cuda *device, void *module,
                                           const char *name, void **function)
{
  const int result = driver.module_function(function, module, name);
  return result ? fail_symbol(device, result, name) : SWATHE_OK;
}

enum swathe_status sw_device_cuda_allow_shared(struct sw_device_cuda *device, void *function,
                                               const char *name, int bytes)
{
  const int result = driver.function_set(function, FUNCTION_MAX_DYNAMIC_SHARED, bytes);
  if (result == INVALID_VALUE)
    return sw_fail(SWATHE_UNSUPPORTED,
                   "%s wants %d bytes of shared memory for a block, more than device %d (%s) has",
                   name, bytes, device->ordinal, device->name);
  return check(device, result, "shared memory cannot be had");
}

enum swathe_status sw_device_cuda_launch(struct sw_device_cuda *device,
                                         const struct sw_device_cuda_launch *launch, void *stream)
{
  void *parameters[1];
  memcpy(parameters, &launch->args, sizeof launch->args);

  if (launch->blocks_x <= 0 || launch->blocks_y <= 0) return SWATHE_OK;
  if (launch->blocks_x > INT32_MAX || launch->blocks_y > UINT16_MAX)
    return sw_fail(SWATHE_UNSUPPORTED,
                   "%s would need %" PRId64 " x %" PRId64
                   " blocks; a launch has at most 2147483647 x 65535",
                   launch->name, launch->blocks_x, launch->blocks_y);
  const int result = driver.launch(launch->function, (unsigned)launch->blocks_x,
                                   (unsigned)launch->blocks_y, 1, (unsigned)launch->threads, 1, 1,
                                   (unsigned)launch->shared_bytes, stream, parameters, NULL);
  if (!result) return SWATHE_OK;
  return sw_within(fail_call(device, result, "a kernel cannot be started"),
                   "%s, %" PRId64 " x %" PRId64 " blocks of %d threads, %d bytes of shared memory",
                   launch->name, launch->blocks_x, launch->blocks_y, launch->threads,
                   launch->shared_bytes);
}
