// transport_nccl_library.h: NCCL and what its transport needs of the CUDA driver, opened by name
// and declared by hand: no header of either is needed, and neither is there before it is asked for.
#ifndef SW_TRANSPORT_NCCL_LIBRARY_H
#define SW_TRANSPORT_NCCL_LIBRARY_H

#include "error.h"

enum {
  SW_NCCL_SUCCESS = 0,
  SW_NCCL_IN_PROGRESS = 7,
  SW_NCCL_INT8 = 0,
};

struct sw_nccl_id {
  char bytes[SWATHE_NCCL_ID_BYTES];
};

// The beginning of ncclConfig_t, as the version that it names had it; the rest is NCCL's choice.
struct sw_nccl_config {
  size_t size;
  unsigned magic, version;
  int blocking;
  int end;                             // 0; it was padding
};

// Our name, the symbol, the parameters.  All return a result, 0 for success.
#define SW_NCCL_FUNCTIONS(X)                                                                       \
  X(get_version, "ncclGetVersion", (int *version))                                                 \
  X(get_id, "ncclGetUniqueId", (struct sw_nccl_id *id))                                            \
  X(init, "ncclCommInitRankConfig",                                                                \
    (void **comm, int ranks, struct sw_nccl_id id, int rank, struct sw_nccl_config *config))       \
  X(finalize, "ncclCommFinalize", (void *comm))                                                    \
  X(destroy, "ncclCommDestroy", (void *comm))                                                      \
  X(abort, "ncclCommAbort", (void *comm))                                                          \
  X(async_error, "ncclCommGetAsyncError", (void *comm, int *result))                               \
  X(count, "ncclCommCount", (const void *comm, int *count))                                        \
  X(rank, "ncclCommUserRank", (const void *comm, int *rank))                                       \
  X(device, "ncclCommCuDevice", (const void *comm, int *device))                                   \
  X(group_begin, "ncclGroupStart", (void))                                                         \
  X(group_end, "ncclGroupEnd", (void))                                                             \
  X(send, "ncclSend",                                                                              \
    (const void *data, size_t count, int type, int peer, void *comm, void *stream))                \
  X(receive, "ncclRecv",                                                                           \
    (void *data, size_t count, int type, int peer, void *comm, void *stream))

// Of the driver that the process has loaded, for whoever has a context has one.
#define SW_NCCL_DRIVER_FUNCTIONS(X)                                                                \
  X(context_current, "cuCtxGetCurrent", (void **context))                                          \
  X(context_device, "cuCtxGetDevice", (int *device))                                               \
  X(context_push, "cuCtxPushCurrent_v2", (void *context))                                          \
  X(context_pop, "cuCtxPopCurrent_v2", (void **context))                                           \
  X(allocate, "cuMemAlloc_v2", (unsigned long long *memory, size_t bytes))                         \
  X(release, "cuMemFree_v2", (unsigned long long memory))                                          \
  X(allocate_host, "cuMemAllocHost_v2", (void **memory, size_t bytes))                             \
  X(release_host, "cuMemFreeHost", (void *memory))                                                 \
  X(write, "cuMemcpyHtoDAsync_v2",                                                                 \
    (unsigned long long to, const void *from, size_t bytes, void *stream))                         \
  X(read, "cuMemcpyDtoHAsync_v2",                                                                  \
    (void *to, unsigned long long from, size_t bytes, void *stream))                               \
  X(put_word, "cuStreamWriteValue32_v2",                                                           \
    (void *stream, unsigned long long to, unsigned value, unsigned flags))                         \
  X(put_words, "cuStreamWriteValue64_v2",                                                          \
    (void *stream, unsigned long long to, unsigned long long value, unsigned flags))               \
  X(stream_create, "cuStreamCreate", (void **stream, unsigned flags))                              \
  X(stream_destroy, "cuStreamDestroy_v2", (void *stream))                                          \
  X(stream_synchronize, "cuStreamSynchronize", (void *stream))                                     \
  X(stream_wait, "cuStreamWaitEvent", (void *stream, void *event, unsigned flags))                 \
  X(stream_capturing, "cuStreamIsCapturing", (void *stream, int *status))                          \
  X(capture_mode, "cuThreadExchangeStreamCaptureMode", (int *mode))                                \
  X(event_create, "cuEventCreate", (void **event, unsigned flags))                                 \
  X(event_destroy, "cuEventDestroy_v2", (void *event))                                             \
  X(event_record, "cuEventRecord", (void *event, void *stream))                                    \
  X(event_query, "cuEventQuery", (void *event))                                                    \
  X(error_name, "cuGetErrorName", (int result, const char **name))

struct sw_nccl_library {
  char path[256];
  int version;                         // 22809 is 2.28.9
  const char *(*error_string)(int result);
  const char *(*last_error)(void *comm);  // NULL before 2.13
#define SW_NCCL_POINTER(name, symbol, parameters) int(*name) parameters;
  SW_NCCL_FUNCTIONS(SW_NCCL_POINTER)
  struct {
    SW_NCCL_DRIVER_FUNCTIONS(SW_NCCL_POINTER)
  } driver;
#undef SW_NCCL_POINTER
};

// NCCL alone, whose functions can then be called; its driver stays empty.
enum swathe_status sw_nccl_find(const struct sw_nccl_library **library);
// With the driver: SWATHE_BAD_USE if the process has none.
enum swathe_status sw_nccl_open(const struct sw_nccl_library **library);

// What a layer's machine has, for doctor.
struct sw_nccl_found {
  char path[256];
  int version;
};
enum swathe_status sw_nccl_look(struct sw_nccl_found *found);

#endif
