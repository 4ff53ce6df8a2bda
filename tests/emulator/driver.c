// driver.c: the driver's interface, as cuda.h declares it, over the emulated machine.
//
// Environment: EMULATOR_ARCH (sm_80), EMULATOR_DEVICES (1), EMULATOR_DRIVER_VERSION (13000),
// EMULATOR_MEMORY_BYTES, EMULATOR_SEED, EMULATOR_RACES=0, EMULATOR_DELAY_US, and
// EMULATOR_FAIL=cuLaunchKernel:3=719,... which makes a function's third call return 719.
#include "memory.h"
#include "stream.h"
#include "words.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))

enum result {
  SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100,
  INVALID_DEVICE = 101, INVALID_CONTEXT = 201, NO_BINARY_FOR_GPU = 209, INVALID_PTX = 218,
  UNSUPPORTED_PTX_VERSION = 222, INVALID_HANDLE = 400, NOT_FOUND = 500,
  CAPTURE_UNSUPPORTED = 900,
};

typedef struct context *CUcontext;
typedef struct stream *CUstream;
typedef struct event *CUevent;
typedef struct module *CUmodule;
typedef struct function *CUfunction;
typedef struct graph *CUgraph, *CUgraphExec;
typedef uint64_t CUdeviceptr;
typedef int CUdevice, CUresult;

struct function {
  struct module *module;
  const struct ptx_kernel *kernel;
  struct code *code;
  uint32_t most_dynamic_shared_bytes;
};

struct module {
  struct module *next;         // of the context
  CUcontext context;
  struct ptx_module *ptx;
  uint64_t globals;
  struct function *functions;
};

// ---- the machine that is emulated

static const struct arch {
  const char *name;
  int major, minor, processors;
  int shared_bytes, most_shared_bytes, most_threads;  // of a processor; of a block, on request
} archs[] = {
  { "sm_80", 8, 0, 108, 167936, 166912, 2048 },  { "sm_86", 8, 6, 84, 102400, 101376, 1536 },
  { "sm_89", 8, 9, 142, 102400, 101376, 1536 },  { "sm_90", 9, 0, 132, 233472, 232448, 2048 },
  { "sm_90a", 9, 0, 132, 233472, 232448, 2048 }, { "sm_100", 10, 0, 148, 233472, 232448, 2048 },
  { "sm_100a", 10, 0, 148, 233472, 232448, 2048 },
  { "sm_103", 10, 3, 148, 233472, 232448, 2048 },
  { "sm_120", 12, 0, 188, 102400, 101376, 1536 },
};

static const struct arch *arch(void)
{
  const char *given = getenv("EMULATOR_ARCH");
  for (size_t i = 0; given && i < sizeof archs / sizeof *archs; i++)
    if (!strcmp(archs[i].name, given)) return &archs[i];
  if (given) words_say("EMULATOR_ARCH=%s is not known; sm_80 it is", given);
  return &archs[0];
}

static int number_of(const char *name, int otherwise)
{
  const char *given = getenv(name);
  return given ? atoi(given) : otherwise;
}

static int driver_version(void) { return number_of("EMULATOR_DRIVER_VERSION", 13000); }
static int device_count(void) { return number_of("EMULATOR_DEVICES", 1); }

// ---- who calls

enum { MOST_DEVICES = 64, MOST_CONTEXTS = 16, MOST_FUNCTIONS = 128 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct context contexts[MOST_DEVICES];
static atomic_bool initialised;
static _Thread_local CUcontext stack[MOST_CONTEXTS];
static _Thread_local int depth;
static struct { const char *name; int calls; } calls[MOST_FUNCTIONS];

static CUcontext current(void) { return depth ? stack[depth - 1] : NULL; }

// What EMULATOR_FAIL says of this call.
static int injected(const char *name)
{
  const char *given = getenv("EMULATOR_FAIL");
  if (!given) return 0;
  pthread_mutex_lock(&lock);
  int i = 0, status = 0;
  while (i < MOST_FUNCTIONS - 1 && calls[i].name && strcmp(calls[i].name, name)) i++;
  calls[i].name = name;
  int call = ++calls[i].calls;
  for (const char *at = given; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
    size_t length = strcspn(at, ":=,");
    int which = 1, result = 0;
    if (length != strlen(name) || strncmp(at, name, length)) continue;
    if (sscanf(at + length, ":%d=%d", &which, &result) == 2 && which == call) status = result;
  }
  pthread_mutex_unlock(&lock);
  return status;
}

// What every function checks first.
#define ENTER_ANYWHERE do { \
    if (!atomic_load(&initialised)) return NOT_INITIALIZED; \
    int fails_ = injected(__func__); \
    if (fails_) return fails_; \
  } while (0)
#define ENTER do { \
    ENTER_ANYWHERE; \
    if (!current()) return INVALID_CONTEXT; \
    if (current()->fault) return current()->fault; \
  } while (0)

static struct stream *stream_of(CUstream stream)
{
  // 0 and 1: the null stream; 2: the thread's own, which here is the same
  if ((uintptr_t)stream <= 2) return current()->null_stream;
  return stream_known(stream) && stream_context(stream) == current() ? stream : NULL;
}

// ---- start, devices

API CUresult cuInit(unsigned flags)
{
  int fails = injected(__func__);
  if (fails) return fails;
  if (flags) return INVALID_VALUE;
  if (device_count() < 1) return NO_DEVICE;
  atomic_store(&initialised, true);
  return SUCCESS;
}

API CUresult cuDriverGetVersion(int *version)
{
  *version = driver_version();
  return SUCCESS;
}

API CUresult cuDeviceGetCount(int *count)
{
  ENTER_ANYWHERE;
  *count = device_count();
  return SUCCESS;
}

API CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
  ENTER_ANYWHERE;
  if (ordinal < 0 || ordinal >= device_count() || ordinal >= MOST_DEVICES) return INVALID_DEVICE;
  *device = ordinal;
  return SUCCESS;
}

API CUresult cuDeviceGetName(char *name, int bytes, CUdevice device)
{
  ENTER_ANYWHERE;
  (void)device;
  snprintf(name, (size_t)bytes, "swathe emulated %s", arch()->name);
  return SUCCESS;
}

API CUresult cuDeviceGetUuid_v2(unsigned char *uuid, CUdevice device)
{
  ENTER_ANYWHERE;
  memset(uuid, 0, 16);
  memcpy(uuid, "swathe emulated", 15);
  uuid[15] = (unsigned char)device;
  return SUCCESS;
}

API CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
  ENTER_ANYWHERE;
  if (device < 0 || device >= MOST_DEVICES) return INVALID_DEVICE;
  uint64_t free_bytes, total;
  memory_room(device, &free_bytes, &total);
  *bytes = total;
  return SUCCESS;
}

API CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device)
{
  ENTER_ANYWHERE;
  if (device < 0 || device >= device_count()) return INVALID_DEVICE;
  const struct arch *at = arch();
  const struct { int attribute, value; } known[] = {
    { 1, 1024 }, { 2, 1024 }, { 3, 1024 }, { 4, 64 },            // threads of a block
    { 5, 2147483647 }, { 6, 65535 }, { 7, 65535 },               // blocks of a grid
    { 8, 49152 }, { 9, 65536 }, { 10, 32 }, { 12, 65536 },       // shared, const, warp, registers
    { 13, 1400000 }, { 15, 1 }, { 16, at->processors }, { 17, 0 }, { 18, 0 }, { 19, 1 },
    { 31, 1 }, { 32, 0 }, { 33, 0 }, { 34, 0 }, { 35, 0 },
    { 36, 1000000 }, { 37, 4096 }, { 38, 40 << 20 }, { 39, at->most_threads }, { 40, 2 },
    { 41, 1 }, { 75, at->major }, { 76, at->minor }, { 78, 1 }, { 81, at->shared_bytes },
    { 82, 65536 }, { 83, 1 }, { 95, 1 }, { 97, at->most_shared_bytes }, { 106, 32 },
    { 111, 1024 }, { 115, 1 }, { 120, 0 },
  };
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (known[i].attribute == attribute) {
      *value = known[i].value;
      return SUCCESS;
    }
  words_say("device attribute %d is not known", attribute);
  return INVALID_VALUE;
}

API CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer)
{
  ENTER_ANYWHERE;
  *can = device != peer;
  return SUCCESS;
}

// ---- contexts

static void free_module(struct module *module)
{
  for (int i = 0; module->functions && i < module->ptx->kernel_count; i++)
    if (module->functions[i].code) code_free(module->functions[i].code);
  free(module->functions);
  if (module->globals) memory_free(module->globals, MEMORY_DEVICE);
  ptx_free(module->ptx);
  free(module);
}

// Held while a context comes or goes, so that nobody gets one that is being cleared.
static pthread_mutex_t door = PTHREAD_MUTEX_INITIALIZER;

API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
  ENTER_ANYWHERE;
  if (device < 0 || device >= device_count() || device >= MOST_DEVICES) return INVALID_DEVICE;
  pthread_mutex_lock(&door);
  struct context *at = &contexts[device];
  if (!at->holders++) at->device = device;
  if (!at->null_stream) at->null_stream = stream_create(at, true);
  pthread_mutex_unlock(&door);
  *context = at;
  return SUCCESS;
}

// All that was the context's goes with it: streams, modules, memory, and the fault.
static void clear_context(struct context *context)
{
  stream_finish_context(context);
  stream_destroy_others(context);
  pthread_mutex_lock(&lock);
  struct module *module = context->modules;
  context->modules = NULL;
  pthread_mutex_unlock(&lock);
  while (module) {
    struct module *next = module->next;
    free_module(module);
    module = next;
  }
  memory_free_all(context->device);
  context->fault = 0;
  context->peers = 0;
}

API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
  ENTER_ANYWHERE;
  if (device < 0 || device >= MOST_DEVICES) return INVALID_DEVICE;
  struct context *at = &contexts[device];
  pthread_mutex_lock(&door);
  bool held = at->holders > 0;
  if (held && !--at->holders) clear_context(at);
  pthread_mutex_unlock(&door);
  return held ? SUCCESS : INVALID_CONTEXT;
}

API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active)
{
  ENTER_ANYWHERE;
  *flags = 0;
  *active = contexts[device].holders > 0;
  return SUCCESS;
}

API CUresult cuCtxSetCurrent(CUcontext context)
{
  ENTER_ANYWHERE;
  if (!context) {
    if (depth) depth--;
    return SUCCESS;
  }
  if (!depth) depth = 1;
  stack[depth - 1] = context;
  return SUCCESS;
}

API CUresult cuCtxGetCurrent(CUcontext *context)
{
  ENTER_ANYWHERE;
  *context = current();
  return SUCCESS;
}

API CUresult cuCtxPushCurrent_v2(CUcontext context)
{
  ENTER_ANYWHERE;
  if (!context || depth == MOST_CONTEXTS) return INVALID_VALUE;
  stack[depth++] = context;
  return SUCCESS;
}

API CUresult cuCtxPopCurrent_v2(CUcontext *context)
{
  ENTER_ANYWHERE;
  if (!depth) return INVALID_CONTEXT;
  depth--;
  if (context) *context = stack[depth];
  return SUCCESS;
}

API CUresult cuCtxGetDevice(CUdevice *device)
{
  ENTER_ANYWHERE;
  if (!current()) return INVALID_CONTEXT;
  *device = current()->device;
  return SUCCESS;
}

API CUresult cuCtxSynchronize(void)
{
  ENTER;
  if (stream_forbids()) return CAPTURE_UNSUPPORTED;
  return stream_finish_context(current());
}

API CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
  ENTER;
  *least = 0;
  *greatest = -5;
  return SUCCESS;
}

API CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags)
{
  ENTER;
  if (flags || !peer || peer == current()) return INVALID_VALUE;
  if (current()->peers >> peer->device & 1) return 704;  // it is already
  current()->peers |= UINT64_C(1) << peer->device;
  return SUCCESS;
}

// ---- memory

static bool watches(void)
{
  const char *races = getenv("EMULATOR_RACES");
  return !races || strcmp(races, "0");
}

API CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes)
{
  ENTER;
  if (!address || !bytes) return INVALID_VALUE;
  if (stream_forbids()) return CAPTURE_UNSUPPORTED;
  *address = memory_allocate(bytes, MEMORY_DEVICE, current()->device, watches());
  return *address ? SUCCESS : OUT_OF_MEMORY;
}

API CUresult cuMemFree_v2(CUdeviceptr address)
{
  ENTER;
  if (!address) return SUCCESS;
  if (stream_forbids()) return CAPTURE_UNSUPPORTED;
  int status = stream_finish_context(current());  // as the driver does
  if (!memory_free(address, MEMORY_DEVICE)) return INVALID_VALUE;
  return status;
}

API CUresult cuMemAllocHost_v2(void **address, size_t bytes)
{
  ENTER;
  if (stream_forbids()) return CAPTURE_UNSUPPORTED;
  *address = (void *)(uintptr_t)memory_allocate(bytes, MEMORY_PINNED, current()->device, false);
  return *address ? SUCCESS : OUT_OF_MEMORY;
}

API CUresult cuMemHostAlloc(void **address, size_t bytes, unsigned flags)
{
  (void)flags;
  return cuMemAllocHost_v2(address, bytes);
}

API CUresult cuMemFreeHost(void *address)
{
  ENTER;
  int status = stream_finish_context(current());
  if (!memory_free((uint64_t)(uintptr_t)address, MEMORY_PINNED)) return INVALID_VALUE;
  return status;
}

API CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *device, void *host, unsigned flags)
{
  ENTER;
  (void)flags;
  *device = (uint64_t)(uintptr_t)host;
  return SUCCESS;
}

API CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes)
{
  ENTER;
  uint64_t left, total;
  memory_room(current()->device, &left, &total);
  *free_bytes = left;
  *total_bytes = total;
  return SUCCESS;
}

// Whether all of the bytes lie in one allocation of the kind asked for.
static bool lies_in(uint64_t address, size_t bytes, bool host, bool *pinned)
{
  struct memory_table *table = memory_hold();
  const struct memory_region *region = memory_find(table, address, bytes);
  bool found = region && (host ? region->pinned : true);
  if (pinned) *pinned = region && region->pinned;
  memory_release(table);
  if (!found && !host) {
    char why[160];
    memory_describe(address, bytes, why, sizeof why);
    words_say("%zu bytes at 0x%llx are not in device memory: %s", bytes,
              (unsigned long long)address, why);
  }
  return found;
}

// Copies with a host side that is not pinned have read or written it when the call returns.
static CUresult copy(uint64_t into, bool into_host, uint64_t from, bool from_host, size_t bytes,
                     CUstream stream, bool waits)
{
  struct stream *at = stream_of(stream);
  bool pinned = true;
  if (!at) return INVALID_HANDLE;
  if (!bytes) return SUCCESS;
  if (into_host) lies_in(into, bytes, true, &pinned);
  else if (!lies_in(into, bytes, false, NULL)) return INVALID_VALUE;
  if (from_host) lies_in(from, bytes, true, &pinned);
  else if (!lies_in(from, bytes, false, NULL)) return INVALID_VALUE;
  bool captured = stream_capture_state(at) != 0;
  if (waits && stream_forbids()) return CAPTURE_UNSUPPORTED;
  int status = stream_add(at, (struct stream_task){
    .kind = STREAM_COPY, .into = MEMORY_HOST(into), .from = MEMORY_HOST(from), .bytes = bytes });
  if (!status && (waits || !pinned) && !captured) status = stream_finish(at);
  return status;
}

#define HOST(pointer) ((uint64_t)(uintptr_t)(pointer))

API CUresult cuMemcpyHtoD_v2(CUdeviceptr into, const void *from, size_t bytes)
{
  ENTER;
  return copy(into, false, HOST(from), true, bytes, NULL, true);
}

API CUresult cuMemcpyDtoH_v2(void *into, CUdeviceptr from, size_t bytes)
{
  ENTER;
  return copy(HOST(into), true, from, false, bytes, NULL, true);
}

API CUresult cuMemcpyDtoD_v2(CUdeviceptr into, CUdeviceptr from, size_t bytes)
{
  ENTER;
  return copy(into, false, from, false, bytes, NULL, false);
}

API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr into, const void *from, size_t bytes, CUstream stream)
{
  ENTER;
  return copy(into, false, HOST(from), true, bytes, stream, false);
}

API CUresult cuMemcpyDtoHAsync_v2(void *into, CUdeviceptr from, size_t bytes, CUstream stream)
{
  ENTER;
  return copy(HOST(into), true, from, false, bytes, stream, false);
}

API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr into, CUdeviceptr from, size_t bytes,
                                  CUstream stream)
{
  ENTER;
  return copy(into, false, from, false, bytes, stream, false);
}

API CUresult cuMemcpyAsync(CUdeviceptr into, CUdeviceptr from, size_t bytes, CUstream stream)
{
  ENTER;
  return copy(into, !(into & MEMORY_DEVICE_BIT), from, !(from & MEMORY_DEVICE_BIT), bytes, stream,
              false);
}

static CUresult set(CUdeviceptr into, uint64_t value, int element_bytes, size_t count,
                    CUstream stream)
{
  struct stream *at = stream_of(stream);
  if (!at) return INVALID_HANDLE;
  if (!count) return SUCCESS;
  if (into % (unsigned)element_bytes || !lies_in(into, count * (size_t)element_bytes, false, NULL))
    return INVALID_VALUE;
  return stream_add(at, (struct stream_task){ .kind = STREAM_SET, .into = MEMORY_HOST(into),
                    .bytes = count, .element_bytes = element_bytes, .value = value });
}

API CUresult cuMemsetD8_v2(CUdeviceptr into, unsigned char value, size_t count)
{
  ENTER;
  return set(into, value, 1, count, NULL);
}

API CUresult cuMemsetD16_v2(CUdeviceptr into, unsigned short value, size_t count)
{
  ENTER;
  return set(into, value, 2, count, NULL);
}

API CUresult cuMemsetD32_v2(CUdeviceptr into, unsigned value, size_t count)
{
  ENTER;
  return set(into, value, 4, count, NULL);
}

API CUresult cuMemsetD8Async(CUdeviceptr into, unsigned char value, size_t count, CUstream stream)
{
  ENTER;
  return set(into, value, 1, count, stream);
}

API CUresult cuMemsetD16Async(CUdeviceptr into, unsigned short value, size_t count,
                              CUstream stream)
{
  ENTER;
  return set(into, value, 2, count, stream);
}

API CUresult cuMemsetD32Async(CUdeviceptr into, unsigned value, size_t count, CUstream stream)
{
  ENTER;
  return set(into, value, 4, count, stream);
}

API CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr into, unsigned value,
                                     unsigned flags)
{
  ENTER;
  return flags ? INVALID_VALUE : set(into, value, 4, 1, stream);
}

API CUresult cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr into, uint64_t value,
                                     unsigned flags)
{
  ENTER;
  return flags ? INVALID_VALUE : set(into, value, 8, 1, stream);
}

API CUresult cuPointerGetAttribute(void *value, int attribute, CUdeviceptr address)
{
  ENTER_ANYWHERE;
  struct memory_table *table = memory_hold();
  const struct memory_region *region = memory_find(table, address, 1);
  CUresult status = region ? SUCCESS : INVALID_VALUE;
  if (region) {
    switch (attribute) {
    case 1: *(CUcontext *)value = current(); break;
    case 2: *(unsigned *)value = region->pinned ? 1 : 2; break;
    case 3: *(CUdeviceptr *)value = address; break;
    case 8: *(unsigned *)value = 0; break;
    case 9: *(int *)value = current() ? current()->device : 0; break;
    case 11: *(CUdeviceptr *)value = region->begin; break;
    case 12: *(size_t *)value = region->bytes; break;
    default: status = INVALID_VALUE;
    }
  }
  memory_release(table);
  return status;
}

// What all kernels of the process did so far, warp by warp: "instructions", "mma", "wgmma",
// "ldmatrix", "replays" (of its rows in the same banks), "copied bytes" (by cp.async), "barriers".
API uint64_t emulator_count(const char *what) { return launch_count(what); }

// For what stands in for a device's other libraries: moves bytes now, checked like a kernel's.
API int emulator_copy(CUdeviceptr into, CUdeviceptr from, size_t bytes)
{
  if (!lies_in(into, bytes, false, NULL) || !lies_in(from, bytes, false, NULL)) return 700;
  memmove(MEMORY_HOST(into), MEMORY_HOST(from), bytes);
  return SUCCESS;
}

API int emulator_fill(CUdeviceptr into, int byte, size_t bytes)
{
  if (!lies_in(into, bytes, false, NULL)) return 700;
  memset(MEMORY_HOST(into), byte, bytes);
  return SUCCESS;
}

// ---- streams and events

API CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority)
{
  ENTER;
  (void)priority;
  if (flags > 1) return INVALID_VALUE;
  *stream = stream_create(current(), !(flags & 1));
  return *stream ? SUCCESS : OUT_OF_MEMORY;
}

API CUresult cuStreamCreate(CUstream *stream, unsigned flags)
{
  return cuStreamCreateWithPriority(stream, flags, 0);
}

API CUresult cuStreamDestroy_v2(CUstream stream)
{
  ENTER;
  if ((uintptr_t)stream <= 2 || !stream_of(stream)) return INVALID_HANDLE;
  stream_destroy(stream);
  return SUCCESS;
}

API CUresult cuStreamSynchronize(CUstream stream)
{
  ENTER;
  struct stream *at = stream_of(stream);
  return at ? stream_finish(at) : INVALID_HANDLE;
}

API CUresult cuStreamQuery(CUstream stream)
{
  ENTER;
  struct stream *at = stream_of(stream);
  return at ? stream_query(at) : INVALID_HANDLE;
}

API CUresult cuStreamGetCtx(CUstream stream, CUcontext *context)
{
  ENTER;
  *context = (uintptr_t)stream > 2 && stream_known(stream) ? stream_context(stream) : current();
  return SUCCESS;
}

API CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags)
{
  ENTER;
  struct stream *at = stream_of(stream);
  if (!at || !event || flags > 1) return INVALID_HANDLE;
  return event_wait(event, at);
}

API CUresult cuLaunchHostFunc(CUstream stream, void (*call)(void *), void *argument)
{
  ENTER;
  struct stream *at = stream_of(stream);
  if (!at || !call) return at ? INVALID_VALUE : INVALID_HANDLE;
  return stream_add(at, (struct stream_task){ .kind = STREAM_CALL, .call = call,
                                              .argument = argument });
}

API CUresult cuEventCreate(CUevent *event, unsigned flags)
{
  ENTER;
  (void)flags;
  *event = event_create(current());
  return *event ? SUCCESS : OUT_OF_MEMORY;
}

API CUresult cuEventDestroy_v2(CUevent event)
{
  ENTER;
  if (!event) return INVALID_HANDLE;
  event_destroy(event);
  return SUCCESS;
}

API CUresult cuEventRecord(CUevent event, CUstream stream)
{
  ENTER;
  struct stream *at = stream_of(stream);
  return at && event ? event_record(event, at) : INVALID_HANDLE;
}

API CUresult cuEventSynchronize(CUevent event)
{
  ENTER;
  return event ? event_finish(event) : INVALID_HANDLE;
}

API CUresult cuEventQuery(CUevent event)
{
  ENTER;
  return event ? event_query(event) : INVALID_HANDLE;
}

API CUresult cuEventElapsedTime_v2(float *ms, CUevent from, CUevent to)
{
  ENTER;
  return from && to ? event_elapsed(from, to, ms) : INVALID_HANDLE;
}

API CUresult cuEventElapsedTime(float *ms, CUevent from, CUevent to)
{
  return cuEventElapsedTime_v2(ms, from, to);
}

// ---- modules

static int most_ptx_version(void)
{
  static const struct { int driver, ptx; } versions[] = {
    { 13000, 90 }, { 12090, 88 }, { 12080, 87 }, { 12070, 86 }, { 12050, 85 }, { 12040, 84 },
    { 12030, 83 }, { 12020, 82 }, { 12010, 81 }, { 12000, 80 },
  };
  for (size_t i = 0; i < sizeof versions / sizeof *versions; i++)
    if (driver_version() >= versions[i].driver)
      return versions[i].ptx + (driver_version() >= 13010 ? (driver_version() - 13000) / 10 : 0);
  return 78;
}

// The texts that the options of cuModuleLoadDataEx ask for.
struct log { char *text; size_t bytes; };

static CUresult refuse(struct log *log, CUresult status, const char *words)
{
  words_say("the module cannot be loaded: %s", words);
  if (log->text && log->bytes) snprintf(log->text, log->bytes, "%s", words);
  return status;
}

static CUresult check_target(const struct ptx_module *ptx, struct log *log)
{
  char words[160];
  const struct arch *at = arch();
  size_t length = strlen(ptx->target);
  char last = length ? ptx->target[length - 1] : 0;
  int own = at->major * 10 + at->minor;
  if (ptx->version > most_ptx_version()) {
    snprintf(words, sizeof words, "PTX %d.%d is newer than this driver's %d.%d", ptx->version / 10,
             ptx->version % 10, most_ptx_version() / 10, most_ptx_version() % 10);
    return refuse(log, UNSUPPORTED_PTX_VERSION, words);
  }
  // what is made for one architecture alone (sm_90a) runs on its devices and on no later ones
  if (ptx->arch > own || (last == 'a' && ptx->arch != own)) {
    snprintf(words, sizeof words, "the PTX is for %s and this is %s", ptx->target, at->name);
    return refuse(log, INVALID_PTX, words);
  }
  return SUCCESS;
}

static CUresult load(struct module *module, struct log *log)
{
  struct ptx_module *ptx = module->ptx;
  char words[512];
  if (ptx->global_bytes) {
    module->globals = memory_allocate(ptx->global_bytes, MEMORY_DEVICE, current()->device,
                                      watches());
    if (!module->globals) return OUT_OF_MEMORY;
    memset(MEMORY_HOST(module->globals), 0, ptx->global_bytes);
    for (int i = 0; i < ptx->variable_count; i++)
      if (ptx->variables[i].initial)
        memcpy(MEMORY_HOST(module->globals + ptx->variables[i].offset), ptx->variables[i].initial,
               ptx->variables[i].bytes);
  }
  module->functions = calloc((size_t)ptx->kernel_count + 1, sizeof *module->functions);
  for (int i = 0; i < ptx->kernel_count; i++) {
    struct function *function = &module->functions[i];
    const struct ptx_kernel *kernel = &ptx->kernels[i];
    uint64_t most = ptx->version >= 81 && ptx->arch >= 70 ? 32764 : 4096;
    if (kernel->param_bytes > most) {
      snprintf(words, sizeof words, "%s has %llu bytes of parameters, more than %llu",
               kernel->name, (unsigned long long)kernel->param_bytes, (unsigned long long)most);
      return refuse(log, INVALID_PTX, words);
    }
    function->module = module;
    function->kernel = kernel;
    function->code = code_make(ptx, kernel, module->globals, words, sizeof words);
    if (!function->code) return refuse(log, INVALID_PTX, words);
    if (function->code->static_shared_bytes > 49152)
      return refuse(log, INVALID_PTX, "more than 48 KiB of static shared memory");
    function->most_dynamic_shared_bytes = 49152 - (uint32_t)function->code->static_shared_bytes;
  }
  return SUCCESS;
}

API CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned option_count,
                                int *options, void **values)
{
  ENTER;
  struct log log = { 0 };
  for (unsigned i = 0; i < option_count; i++) {
    if (options[i] == 5) log.text = values[i];
    if (options[i] == 6) log.bytes = (size_t)(uintptr_t)values[i];
  }
  if (!image) return INVALID_VALUE;
  static const unsigned char elf[] = { 0x7f, 'E', 'L', 'F' }, fat[] = { 0x50, 0xed, 0x55, 0xba };
  if (!memcmp(image, elf, 4) || !memcmp(image, fat, 4)) return NO_BINARY_FOR_GPU;
  char words[512] = "";
  struct ptx_module *ptx = ptx_parse(image, words, sizeof words);
  if (!ptx) return refuse(&log, INVALID_PTX, words);
  struct module *made = calloc(1, sizeof *made);
  made->ptx = ptx;
  made->context = current();
  CUresult status = check_target(ptx, &log);
  if (!status) status = load(made, &log);
  if (status) {
    free_module(made);
    return status;
  }
  pthread_mutex_lock(&lock);
  made->next = current()->modules;
  current()->modules = made;
  pthread_mutex_unlock(&lock);
  *module = made;
  return SUCCESS;
}

API CUresult cuModuleLoadData(CUmodule *module, const void *image)
{
  return cuModuleLoadDataEx(module, image, 0, NULL, NULL);
}

API CUresult cuModuleUnload(CUmodule module)
{
  ENTER;
  if (!module) return INVALID_HANDLE;
  stream_finish_context(module->context);
  pthread_mutex_lock(&lock);
  struct module **at = &module->context->modules;
  while (*at && *at != module) at = &(*at)->next;
  bool known = *at;
  if (known) *at = module->next;
  pthread_mutex_unlock(&lock);
  if (!known) return INVALID_HANDLE;
  free_module(module);
  return SUCCESS;
}

API CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
  ENTER;
  if (!module) return INVALID_HANDLE;
  for (int i = 0; i < module->ptx->kernel_count; i++)
    if (!strcmp(module->ptx->kernels[i].name, name)) {
      *function = &module->functions[i];
      return SUCCESS;
    }
  return NOT_FOUND;
}

API CUresult cuModuleGetGlobal_v2(CUdeviceptr *address, size_t *bytes, CUmodule module,
                                  const char *name)
{
  ENTER;
  if (!module) return INVALID_HANDLE;
  for (int i = 0; i < module->ptx->variable_count; i++) {
    const struct ptx_variable *variable = &module->ptx->variables[i];
    if (strcmp(variable->name, name) || variable->space == PTX_SHARED) continue;
    if (address) *address = module->globals + variable->offset;
    if (bytes) *bytes = variable->bytes;
    return SUCCESS;
  }
  return NOT_FOUND;
}

API CUresult cuFuncSetAttribute(CUfunction function, int attribute, int value)
{
  ENTER;
  if (!function) return INVALID_HANDLE;
  if (attribute == 8) {
    uint64_t all = function->code->static_shared_bytes + (uint64_t)value;
    if (value < 0 || all > (uint64_t)arch()->most_shared_bytes) return INVALID_VALUE;
    function->most_dynamic_shared_bytes = (uint32_t)value;
    return SUCCESS;
  }
  return attribute == 9 ? SUCCESS : INVALID_VALUE;  // 9: how much of the cache is shared memory
}

static int most_threads(const struct function *function)
{
  return function->kernel->max_threads ? function->kernel->max_threads : 1024;
}

API CUresult cuFuncGetAttribute(int *value, int attribute, CUfunction function)
{
  ENTER;
  if (!function) return INVALID_HANDLE;
  const struct code *code = function->code;
  uint32_t registers = code->register_words / 32;  // a guess: of the lifetimes, not of ptxas
  switch (attribute) {
  case 0: *value = most_threads(function); return SUCCESS;
  case 1: *value = (int)code->static_shared_bytes; return SUCCESS;
  case 2: *value = 0; return SUCCESS;
  case 3: *value = (int)code->local_bytes; return SUCCESS;
  case 4: *value = (int)(registers > 255 ? 255 : registers); return SUCCESS;
  case 5: *value = function->module->ptx->version; return SUCCESS;
  case 6: *value = arch()->major * 10 + arch()->minor; return SUCCESS;
  case 8: *value = (int)function->most_dynamic_shared_bytes; return SUCCESS;
  default: return INVALID_VALUE;
  }
}

API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function,
                                                         int threads, size_t dynamic_bytes)
{
  ENTER;
  if (!function || threads < 1 || threads > 1024) return INVALID_VALUE;
  int by_threads = arch()->most_threads / ((threads + 31) / 32 * 32);
  size_t shared = function->code->static_shared_bytes + dynamic_bytes + 1024;
  int by_shared = (int)((size_t)arch()->shared_bytes / shared);
  *blocks = by_threads < by_shared ? by_threads : by_shared;
  if (*blocks > 32) *blocks = 32;
  return SUCCESS;
}

// ---- launches

static CUresult check_launch(const struct function *function, const struct launch_request *request)
{
  const uint32_t *grid = request->grid, *threads = request->threads;
  uint64_t all = (uint64_t)threads[0] * threads[1] * threads[2];
  const char *words = NULL;
  if (!grid[0] || !grid[1] || !grid[2] || grid[0] > INT32_MAX || grid[1] > 65535 ||
      grid[2] > 65535)
    words = "the grid is out of range";
  else if (!all || all > 1024 || threads[0] > 1024 || threads[1] > 1024 || threads[2] > 64)
    words = "the block is out of range";
  else if (all > (uint64_t)most_threads(function))
    words = "the block has more threads than the kernel was made for";
  else if (request->dynamic_shared_bytes > function->most_dynamic_shared_bytes)
    words = "the block wants more shared memory than the kernel's attribute allows";
  else if ((uint64_t)grid[0] * grid[1] * grid[2] >> 27)
    words = "the emulator has no patience for so many blocks";
  if (!words) return SUCCESS;
  words_say("%s, grid (%u,%u,%u), block (%u,%u,%u), %u bytes of shared memory: %s",
            function->kernel->name, grid[0], grid[1], grid[2], threads[0], threads[1], threads[2],
            request->dynamic_shared_bytes, words);
  return INVALID_VALUE;
}

static CUresult take_params(const struct function *function, void **params, void **extra,
                            unsigned char *into)
{
  const struct ptx_kernel *kernel = function->kernel;
  if (extra) {
    const void *from = NULL;
    size_t bytes = 0;
    for (; extra[0]; extra += 2) {
      if (extra[0] == (void *)1) from = extra[1];
      else if (extra[0] == (void *)2) bytes = *(size_t *)extra[1];
      else return INVALID_VALUE;
    }
    if (bytes < kernel->param_bytes || !from) return INVALID_VALUE;
    memcpy(into, from, kernel->param_bytes);
    return SUCCESS;
  }
  if (kernel->param_count && !params) return INVALID_VALUE;
  for (int i = 0; i < kernel->param_count; i++)
    memcpy(into + kernel->variables[i].offset, params[i], kernel->variables[i].bytes);
  return SUCCESS;
}

API CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                            unsigned x, unsigned y, unsigned z, unsigned shared_bytes,
                            CUstream stream, void **params, void **extra)
{
  ENTER;
  struct stream *at = stream_of(stream);
  if (!function || !at || function->module->context != current()) return INVALID_HANDLE;
  struct stream_task task = { .kind = STREAM_LAUNCH,
    .launch = { .code = function->code, .device = current()->device,
                .grid = { grid_x, grid_y, grid_z }, .threads = { x, y, z },
                .dynamic_shared_bytes = shared_bytes } };
  CUresult status = check_launch(function, &task.launch);
  if (status) return status;
  task.launch.params = calloc(1, function->code->param_bytes + 1);
  if (!task.launch.params) return OUT_OF_MEMORY;
  status = take_params(function, params, extra, task.launch.params);
  if (status) {
    free(task.launch.params);
    return status;
  }
  return stream_add(at, task);
}

// ---- graphs

API CUresult cuStreamBeginCapture_v2(CUstream stream, int mode)
{
  ENTER;
  struct stream *at = stream_of(stream);
  return at ? stream_begin_capture(at, mode) : INVALID_HANDLE;
}

API CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph)
{
  ENTER;
  struct stream *at = stream_of(stream);
  return at ? stream_end_capture(at, graph) : INVALID_HANDLE;
}

API CUresult cuStreamIsCapturing(CUstream stream, int *state)
{
  ENTER;
  struct stream *at = stream_of(stream);
  if (!at) return INVALID_HANDLE;
  *state = stream_capture_state(at);
  return SUCCESS;
}

API CUresult cuThreadExchangeStreamCaptureMode(int *mode)
{
  ENTER;
  if (*mode < 0 || *mode > 2) return INVALID_VALUE;
  *mode = stream_exchange_mode(*mode);
  return SUCCESS;
}

API CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph,
                                         unsigned long long flags)
{
  ENTER;
  (void)flags;
  if (!graph) return INVALID_VALUE;
  *exec = graph_copy(graph);
  return SUCCESS;
}

API CUresult cuGraphGetNodes(CUgraph graph, void **nodes, size_t *count)
{
  ENTER;
  if (nodes) return INVALID_VALUE;
  *count = (size_t)graph_node_count(graph);
  return SUCCESS;
}

API CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream)
{
  ENTER;
  struct stream *at = stream_of(stream);
  if (!at || !exec) return INVALID_HANDLE;
  return stream_add(at, (struct stream_task){ .kind = STREAM_GRAPH, .graph = graph_copy(exec) });
}

API CUresult cuGraphDestroy(CUgraph graph)
{
  ENTER_ANYWHERE;
  if (graph) graph_free(graph);
  return SUCCESS;
}

API CUresult cuGraphExecDestroy(CUgraphExec exec) { return cuGraphDestroy(exec); }

// ---- words

static const struct { CUresult result; const char *name, *words; } errors[] = {
  { 0, "CUDA_SUCCESS", "no error" },
  { 1, "CUDA_ERROR_INVALID_VALUE", "invalid argument" },
  { 2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory" },
  { 3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error" },
  { 35, "CUDA_ERROR_INSUFFICIENT_DRIVER", "CUDA driver version is insufficient" },
  { 100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected" },
  { 101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal" },
  { 201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context" },
  { 209, "CUDA_ERROR_NO_BINARY_FOR_GPU",
    "no kernel image is available for execution on the device" },
  { 218, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed" },
  { 222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
    "the provided PTX was compiled with an unsupported toolchain." },
  { 400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle" },
  { 500, "CUDA_ERROR_NOT_FOUND", "named symbol not found" },
  { 600, "CUDA_ERROR_NOT_READY", "device not ready" },
  { 700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered" },
  { 701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch" },
  { 715, "CUDA_ERROR_ILLEGAL_INSTRUCTION", "an illegal instruction was encountered" },
  { 716, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address" },
  { 719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure" },
  { 900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
    "operation not permitted when stream is capturing" },
  { 901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
    "operation failed due to a previous error during capture" },
  { 902, "CUDA_ERROR_STREAM_CAPTURE_MERGE", "operation would result in a merge of captures" },
  { 904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "capturing stream has unjoined work" },
  { 905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
    "dependency created on uncaptured work in another stream" },
  { 907, "CUDA_ERROR_CAPTURED_EVENT",
    "operation not permitted on an event last recorded in a capturing stream" },
};

API CUresult cuGetErrorName(CUresult result, const char **name)
{
  *name = NULL;
  for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
    if (errors[i].result == result) *name = errors[i].name;
  return *name ? SUCCESS : INVALID_VALUE;
}

API CUresult cuGetErrorString(CUresult result, const char **words)
{
  *words = NULL;
  for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
    if (errors[i].result == result) *words = errors[i].words;
  return *words ? SUCCESS : INVALID_VALUE;
}
