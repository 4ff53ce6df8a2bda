// transport_nccl_library.c: opens NCCL, once, and finds the driver.  See transport_nccl_library.h.
#include "transport_nccl_library.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct {
  pthread_mutex_t mutex;
  bool ready, driven;                  // NCCL is open; the driver's functions are known
  struct sw_nccl_library library;
} state = { .mutex = PTHREAD_MUTEX_INITIALIZER };

struct row {
  const char *symbol;
  size_t place;
};

static const struct row functions[] = {
#define ROW(name, symbol, parameters) { symbol, offsetof(struct sw_nccl_library, name) },
  SW_NCCL_FUNCTIONS(ROW)
#undef ROW
};

static const struct row driver_functions[] = {
#define ROW(name, symbol, parameters) { symbol, offsetof(struct sw_nccl_library, driver.name) },
  SW_NCCL_DRIVER_FUNCTIONS(ROW)
#undef ROW
};

// The first symbol that is missing, or NULL.
static const char *find_all(void *handle, const struct row *rows, size_t count)
{
  for (size_t i = 0; i < count; i++) {
    void *address = dlsym(handle, rows[i].symbol);
    if (!address) return rows[i].symbol;
    memcpy((char *)&state.library + rows[i].place, &address, sizeof address);
  }
  return NULL;
}

static void *open_library(void)
{
  static const char *const names[] = { "libnccl.so.2", "/usr/local/cuda/lib64/libnccl.so.2" };
  const char *wanted = getenv("SWATHE_LIBNCCL");
  void *handle = NULL;

  if (wanted && *wanted) return dlopen(wanted, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  for (size_t i = 0; i < sizeof names / sizeof *names && !handle; i++)
    handle = dlopen(names[i], RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  return handle;
}

static enum swathe_status find_nccl(void)
{
  struct link_map *map = NULL;
  void *handle = open_library();

  if (!handle)
    return sw_fail(SWATHE_UNSUPPORTED,
                   "no NCCL here: %s; install libnccl2, or set SWATHE_LIBNCCL to its libnccl.so.2",
                   dlerror());
  if (dlinfo(handle, RTLD_DI_LINKMAP, &map)) map = NULL;
  snprintf(state.library.path, sizeof state.library.path, "%s", map ? map->l_name : "libnccl.so.2");
  const char *missing = find_all(handle, functions, sizeof functions / sizeof *functions);
  *(void **)&state.library.error_string = dlsym(handle, "ncclGetErrorString");
  *(void **)&state.library.last_error = dlsym(handle, "ncclGetLastError");
  if (!missing && !state.library.error_string) missing = "ncclGetErrorString";
  if (missing)
    return sw_fail(SWATHE_UNSUPPORTED, "%s has no %s: it is older than NCCL 2.14; update it",
                   state.library.path, missing);
  if (state.library.get_version(&state.library.version)) state.library.version = 0;
  state.ready = true;
  return SWATHE_OK;
}

// Only what is loaded already: nobody has a context without.
static enum swathe_status find_driver(void)
{
  const char *wanted = getenv("SWATHE_LIBCUDA");
  void *handle =
      dlopen(wanted && *wanted ? wanted : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);

  if (!handle)
    return sw_fail(SWATHE_BAD_USE, "the nccl transport is made where the calling thread has a "
                                   "current CUDA context; this process has not even the driver");
  const char *missing =
      find_all(handle, driver_functions, sizeof driver_functions / sizeof *driver_functions);
  if (missing)
    return sw_fail(SWATHE_UNSUPPORTED,
                   "the CUDA driver has no %s: it is older than CUDA 11.7; update it", missing);
  state.driven = true;
  return SWATHE_OK;
}

enum swathe_status sw_nccl_find(const struct sw_nccl_library **library)
{
  enum swathe_status status = SWATHE_OK;

  pthread_mutex_lock(&state.mutex);
  if (!state.ready) status = find_nccl();
  pthread_mutex_unlock(&state.mutex);
  if (!status) *library = &state.library;
  return status;
}

enum swathe_status sw_nccl_open(const struct sw_nccl_library **library)
{
  enum swathe_status status = sw_nccl_find(library);

  if (status) return status;
  pthread_mutex_lock(&state.mutex);
  if (!state.driven) status = find_driver();
  pthread_mutex_unlock(&state.mutex);
  return status;
}

enum swathe_status sw_nccl_look(struct sw_nccl_found *found)
{
  const struct sw_nccl_library *library = NULL;
  const enum swathe_status status = sw_nccl_find(&library);

  if (status) return status;
  snprintf(found->path, sizeof found->path, "%s", library->path);
  found->version = library->version;
  return SWATHE_OK;
}
