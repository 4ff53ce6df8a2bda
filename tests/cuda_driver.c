// cuda_driver.c: looks the functions up by their versioned names.
#include "cuda_driver.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct { const char *name; size_t at; } functions[] = {
#define AT(field) offsetof(struct cuda_driver, field)
  { "cuInit", AT(init) }, { "cuDriverGetVersion", AT(driver_version) },
  { "cuDeviceGet", AT(device_get) }, { "cuDeviceGetName", AT(device_name) },
  { "cuDeviceGetAttribute", AT(device_attribute) },
  { "cuDevicePrimaryCtxRetain", AT(retain) }, { "cuDevicePrimaryCtxRelease_v2", AT(release) },
  { "cuCtxSetCurrent", AT(set_current) }, { "cuCtxSynchronize", AT(synchronize) },
  { "cuMemAlloc_v2", AT(allocate) }, { "cuMemFree_v2", AT(free) },
  { "cuMemAllocHost_v2", AT(allocate_host) }, { "cuMemFreeHost", AT(free_host) },
  { "cuMemcpyHtoD_v2", AT(to_device) }, { "cuMemcpyDtoH_v2", AT(to_host) },
  { "cuMemcpyHtoDAsync_v2", AT(to_device_async) }, { "cuMemcpyDtoHAsync_v2", AT(to_host_async) },
  { "cuMemcpyDtoDAsync_v2", AT(between_async) }, { "cuMemsetD32_v2", AT(set_words) },
  { "cuMemsetD32Async", AT(set_words_async) }, { "cuStreamCreate", AT(stream_create) },
  { "cuStreamDestroy_v2", AT(stream_destroy) }, { "cuStreamSynchronize", AT(stream_synchronize) },
  { "cuStreamQuery", AT(stream_query) }, { "cuStreamWaitEvent", AT(stream_wait) },
  { "cuLaunchHostFunc", AT(host_function) }, { "cuEventCreate", AT(event_create) },
  { "cuEventDestroy_v2", AT(event_destroy) }, { "cuEventRecord", AT(event_record) },
  { "cuEventSynchronize", AT(event_synchronize) }, { "cuEventQuery", AT(event_query) },
  { "cuEventElapsedTime", AT(event_elapsed) }, { "cuModuleLoadData", AT(load) },
  { "cuModuleUnload", AT(unload) }, { "cuModuleGetFunction", AT(function) },
  { "cuModuleGetGlobal_v2", AT(global) }, { "cuFuncSetAttribute", AT(function_set) },
  { "cuLaunchKernel", AT(launch) }, { "cuStreamBeginCapture_v2", AT(begin_capture) },
  { "cuStreamEndCapture", AT(end_capture) }, { "cuStreamIsCapturing", AT(is_capturing) },
  { "cuGraphInstantiateWithFlags", AT(graph_instantiate) }, { "cuGraphLaunch", AT(graph_launch) },
  { "cuGraphDestroy", AT(graph_destroy) }, { "cuGraphExecDestroy", AT(graph_exec_destroy) },
  { "cuGetErrorName", AT(error_name) }, { "emulator_words", AT(words) },
  { "emulator_count", AT(count) },
#undef AT
};

bool cuda_driver_open(struct cuda_driver *driver, const char *path)
{
  void *library = dlopen(path ? path : "libcuda.so.1", RTLD_NOW);
  if (!library) {
    fprintf(stderr, "no CUDA driver: %s\n", dlerror());
    return false;
  }
  for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
    void *found = dlsym(library, functions[i].name);
    *(void **)((char *)driver + functions[i].at) = found;
    if (!found && strncmp(functions[i].name, "emulator", 8)) {
      fprintf(stderr, "the CUDA driver has no %s\n", functions[i].name);
      return false;
    }
  }
  return true;
}

static void *open_nvrtc(void)
{
  const char *names[] = { getenv("SWATHE_LIBNVRTC"), "libnvrtc.so.13", "libnvrtc.so.12",
                          "/usr/local/cuda/lib64/libnvrtc.so", "/usr/local/cuda/lib/libnvrtc.so" };
  void *library = NULL;
  for (size_t i = 0; i < sizeof names / sizeof *names && !library; i++)
    if (names[i] && *names[i]) library = dlopen(names[i], RTLD_NOW);
  return library;
}

char *cuda_compile(const char *source, const char *arch, const char *const *options,
                   int option_count, bool cubin, bool *missing)
{
  int (*create)(void **, const char *, const char *, int, const char *const *, const char *const *);
  int (*compile)(void *, int, const char *const *), (*get_log_size)(void *, size_t *);
  int (*get_log)(void *, char *), (*get_size)(void *, size_t *), (*get)(void *, char *);
  int (*destroy)(void **);
  void *library = open_nvrtc(), *program;
  *missing = !library;
  if (!library) return NULL;
  *(void **)&create = dlsym(library, "nvrtcCreateProgram");
  *(void **)&compile = dlsym(library, "nvrtcCompileProgram");
  *(void **)&get_log_size = dlsym(library, "nvrtcGetProgramLogSize");
  *(void **)&get_log = dlsym(library, "nvrtcGetProgramLog");
  *(void **)&get_size = dlsym(library, cubin ? "nvrtcGetCUBINSize" : "nvrtcGetPTXSize");
  *(void **)&destroy = dlsym(library, "nvrtcDestroyProgram");
  *(void **)&get = dlsym(library, cubin ? "nvrtcGetCUBIN" : "nvrtcGetPTX");
  char target[48];
  const char *all[16] = { target };
  size_t bytes;
  snprintf(target, sizeof target, "--gpu-architecture=%s", arch);
  for (int i = 0; i < option_count && i < 15; i++) all[1 + i] = options[i];
  if (create(&program, source, "kernel.cu", 0, NULL, NULL)) return NULL;
  if (compile(program, 1 + option_count, all)) {
    get_log_size(program, &bytes);
    char *log = calloc(1, bytes + 1);
    get_log(program, log);
    fprintf(stderr, "%s\n", log);
    free(log);
    destroy(&program);
    return NULL;
  }
  get_size(program, &bytes);
  char *image = calloc(1, bytes + 1);
  get(program, image);
  destroy(&program);
  return image;
}
