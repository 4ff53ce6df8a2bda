// context_cuda.c: the CUDA half of a context: its devices, what kernels are made for there, loaded
// images; and memory of either target for callers who need not know which.
#include "layer.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

// ---- Devices ------------------------------------------------------------------------------------

static enum swathe_status find_device(struct swathe_context *context, int32_t ordinal,
                                      struct sw_device_cuda **device)
{
  enum swathe_status status = SWATHE_OK;

  if (ordinal < 0 || ordinal >= SW_CUDA_DEVICES)
    return sw_fail(SWATHE_UNSUPPORTED, "CUDA device %d: only devices 0 to %d can be used", ordinal,
                   SW_CUDA_DEVICES - 1);
  pthread_mutex_lock(&context->mutex);
  if (!context->devices[ordinal])
    status = sw_device_cuda_create(ordinal, &context->devices[ordinal]);
  if (!status) *device = context->devices[ordinal];
  pthread_mutex_unlock(&context->mutex);
  return status;
}

enum swathe_status sw_context_device(struct swathe_context *context,
                                     struct sw_device_cuda **device)
{
  int32_t ordinal = 0;
  const enum swathe_status status = sw_device_cuda_pick(context->device, &ordinal);

  return status ? status : find_device(context, ordinal, device);
}

enum swathe_status swathe_device_use(struct swathe_context *context, int32_t ordinal)
{
  struct sw_device_cuda *device = NULL;
  const enum swathe_status status = find_device(context, ordinal, &device);

  return status ? status : sw_device_cuda_use(device);
}

void sw_context_drop_devices(struct swathe_context *context)
{
  for (int i = 0; i < SW_CUDA_DEVICES; i++) sw_device_cuda_destroy(context->devices[i]);
}

static const char *find_name(const struct sw_isa_names *isas, const char *name)
{
  for (int32_t i = 0; i < isas->count; i++)
    if (!strcmp(isas->list[i], name)) return isas->list[i];
  return NULL;
}

struct name_list {
  char text[SW_ISAS * 34];
};

static struct name_list list_names(const struct sw_isa_names *isas)
{
  struct name_list list = { "" };
  size_t used = 0;
  for (int32_t i = 0; i < isas->count; i++) {
    const size_t left = sizeof list.text - used;
    const int wrote = snprintf(list.text + used, left, "%s%s", i ? ", " : "", isas->list[i]);
    if (wrote > 0 && (size_t)wrote < left) used += (size_t)wrote;
  }
  return list;
}

// The device's own isa.
static enum swathe_status isa_of_device(const struct sw_isa_names *isas, struct sw_aim *aim)
{
  const char *isa = sw_device_cuda_isa(aim->device, isas->list, isas->count);
  if (!isa)
    return sw_fail(SWATHE_UNSUPPORTED, "there are no kernels for device %d (%s); there are %s",
                   sw_device_cuda_ordinal(aim->device), sw_device_cuda_name(aim->device),
                   list_names(isas).text);
  snprintf(aim->isa, sizeof aim->isa, "%s", isa);
  return SWATHE_OK;
}

enum swathe_status sw_context_aim_cuda(struct swathe_context *context, const char *isa,
                                       struct sw_aim *aim)
{
  const char *given = isa ? isa : context->arch;
  struct sw_isa_names isas;
  enum swathe_status status = sw_context_isas(context, SWATHE_CUDA, &isas);

  if (status) return status;
  if (given && !find_name(&isas, given))
    return sw_fail(SWATHE_BAD_USE,
                   "no architecture of the cuda target is called '%s'; there are %s", given,
                   list_names(&isas).text);
  if (context->apart.on) {
    snprintf(aim->isa, sizeof aim->isa, "%s", given ? given : context->apart.isa);
    aim->own = !strcmp(aim->isa, context->apart.isa);
    return SWATHE_OK;
  }
  // without a device kernels can still be made
  status = sw_context_device(context, &aim->device);
  if (status && !given)
    return sw_within(status, "kernels can be made without a device when an architecture is named "
                             "(--arch, SWATHE_ARCH): %s", list_names(&isas).text);
  if (status) aim->device = NULL;
  if (!given) status = isa_of_device(&isas, aim);
  else status = SWATHE_OK;
  if (given) snprintf(aim->isa, sizeof aim->isa, "%s", given);
  aim->own = !isa || (aim->device && !strcmp(aim->isa, isa));
  return status;
}

// What a child tells of the device it finds.
struct sighting {
  enum swathe_status status;
  char isa[32], device[128], words[1024];
};

static void look_and_tell(struct swathe_context *context, const struct swathe_problem *problem,
                          int end)
{
  struct sighting sighting = { .status = SWATHE_OK };
  struct sw_aim aim;

  sighting.status = sw_context_aim(context, problem, NULL, &aim);
  if (!sighting.status && !aim.device) sighting.status = sw_context_device(context, &aim.device);
  if (sighting.status) {
    snprintf(sighting.words, sizeof sighting.words, "%s", swathe_error());
  } else {
    snprintf(sighting.isa, sizeof sighting.isa, "%s", aim.isa);
    snprintf(sighting.device, sizeof sighting.device, "%s", sw_device_cuda_name(aim.device));
  }
  if (write(end, &sighting, sizeof sighting) != (ssize_t)sizeof sighting) _exit(1);
  _exit(0);
}

enum swathe_status sw_context_stand_apart(struct swathe_context *context,
                                          const struct swathe_problem *problem)
{
  struct sighting sighting = { .status = SWATHE_DEVICE };
  int ends[2];

  if (sw_device_cuda_started())
    return sw_fail(SWATHE_UNSUPPORTED, "this process has used CUDA, and its children, who would "
                                       "try the kernels, cannot then: do it in one of its own");
  if (pipe2(ends, O_CLOEXEC)) return sw_fail(SWATHE_DEVICE, "no pipe: %s", strerror(errno));
  const pid_t child = fork();
  if (child == 0) look_and_tell(context, problem, ends[1]);
  close(ends[1]);
  ssize_t got = -1;
  if (child > 0) got = read(ends[0], &sighting, sizeof sighting);
  close(ends[0]);
  while (child > 0 && waitpid(child, NULL, 0) < 0 && errno == EINTR) continue;
  if (got != (ssize_t)sizeof sighting)
    return sw_fail(SWATHE_DEVICE, "the process that looks for a CUDA device does not answer");
  if (sighting.status) return sw_fail(sighting.status, "%s", sighting.words);
  memcpy(context->apart.isa, sighting.isa, sizeof context->apart.isa);
  memcpy(context->apart.device, sighting.device, sizeof context->apart.device);
  context->apart.on = true;
  return SWATHE_OK;
}

// ---- Images -------------------------------------------------------------------------------------

static const struct {
  const char *image, *name;
} cuda_kernels[SW_CUDA_KERNELS] = {
  [SW_CUDA_FORWARD] = { "forward", "forward" }, [SW_CUDA_DELTA] = { "backward", "delta" },
  [SW_CUDA_DQ] = { "backward", "dq" },          [SW_CUDA_DKV] = { "backward", "dkv" },
  [SW_CUDA_GATHER] = { "backward", "gather" },  [SW_CUDA_PACK] = { "copies", "pack" },
  [SW_CUDA_FILL] = { "copies", "fill" },        [SW_CUDA_WIDEN] = { "copies", "widen" },
  [SW_CUDA_COMBINE] = { "copies", "combine" },
};

// How it wants to be launched is read from the image: NVRTC gives variables a local binding, and a
// driver need not tell of those.
static enum swathe_status find_function(struct sw_device_cuda *device,
                                        const struct sw_kernel *kernel, const char *name,
                                        struct sw_cuda_function *function)
{
  char variable[64];
  struct sw_cuda_function found = { .name = name };
  enum swathe_status status =
      sw_device_cuda_function(device, kernel->module, name, &found.function);

  snprintf(variable, sizeof variable, "%s_launch", name);
  if (!status)
    status = sw_jit_variable(kernel->image, variable, &found.launch, sizeof found.launch);
  if (!status)
    status = sw_device_cuda_allow_shared(device, found.function, name, found.launch.shared_bytes);
  if (!status) *function = found;
  return status;
}

static enum swathe_status find_functions(struct sw_device_cuda *device, const char *name,
                                         struct sw_kernel *kernel)
{
  enum swathe_status status = SWATHE_OK;

  for (int i = 0; i < SW_CUDA_KERNELS && !status; i++)
    if (!strcmp(cuda_kernels[i].image, name))
      status = find_function(device, kernel, cuda_kernels[i].name, &kernel->functions[i]);
  kernel->tile_tokens = !strcmp(name, "forward")
                            ? kernel->functions[SW_CUDA_FORWARD].launch.tile_tokens
                            : kernel->functions[SW_CUDA_DQ].launch.tile_tokens;
  kernel->final_keys = INT64_MAX;   // each key's sums are made in one block
  return status;
}

enum swathe_status sw_context_load_module(struct sw_device_cuda *device, const char *name,
                                          struct sw_kernel *kernel)
{
  const void *cubin = NULL;
  const char *ptx = NULL;
  size_t cubin_bytes = 0;
  enum swathe_status status = sw_jit_cuda(kernel->image, &cubin, &cubin_bytes, &ptx);

  if (status) return status;
  if (!device)
    return sw_fail(SWATHE_UNSUPPORTED, "there is no CUDA device to run %s on", name);
  status = sw_device_cuda_enter(device);
  if (status) return status;
  kernel->device = device;
  status = sw_device_cuda_load(device, name, cubin, cubin_bytes, ptx, &kernel->module);
  if (!status) {
    status = find_functions(device, name, kernel);
    if (status) sw_device_cuda_unload(device, kernel->module);
  }
  if (status) kernel->module = NULL;
  sw_device_cuda_leave(device);
  return status;
}

void sw_context_drop_module(struct sw_kernel *kernel)
{
  if (sw_device_cuda_enter(kernel->device)) return;
  sw_device_cuda_unload(kernel->device, kernel->module);
  sw_device_cuda_leave(kernel->device);
}

// ---- Memory of either target --------------------------------------------------------------------

enum swathe_status swathe_memory_allocate(struct swathe_context *context,
                                          enum swathe_target target, size_t bytes, void **memory)
{
  struct sw_device_cuda *device = NULL;

  if (target == SWATHE_CPU) {
    void *found = aligned_alloc(64, (bytes + 63) / 64 * 64 + 64);
    if (!found) return sw_fail(SWATHE_NO_MEMORY, "no %zu bytes of memory", bytes);
    *memory = found;
    return SWATHE_OK;
  }
  enum swathe_status status = sw_context_device(context, &device);
  if (!status) status = sw_device_cuda_enter(device);
  if (status) return status;
  status = sw_device_cuda_allocate(device, bytes, memory);
  sw_device_cuda_leave(device);
  return status;
}

void swathe_memory_free(struct swathe_context *context, enum swathe_target target, void *memory)
{
  struct sw_device_cuda *device = NULL;

  if (target == SWATHE_CPU) {
    free(memory);
    return;
  }
  if (!memory || sw_context_device(context, &device) || sw_device_cuda_enter(device)) return;
  sw_device_cuda_free(device, memory);
  sw_device_cuda_leave(device);
}

// One copy on the device's default stream, and the wait for it.
static enum swathe_status copy(struct swathe_context *context, void *to, const void *from,
                               size_t bytes, bool read)
{
  struct sw_device_cuda *device = NULL;
  enum swathe_status status = sw_context_device(context, &device);

  if (!status) status = sw_device_cuda_enter(device);
  if (status) return status;
  status = read ? sw_device_cuda_read(device, to, from, bytes, NULL)
                : sw_device_cuda_write(device, to, from, bytes, NULL);
  if (!status) status = sw_device_cuda_synchronize(device, NULL);
  sw_device_cuda_leave(device);
  return status;
}

enum swathe_status swathe_memory_write(struct swathe_context *context, enum swathe_target target,
                                       void *to, const void *from, size_t bytes)
{
  if (target == SWATHE_CUDA) return copy(context, to, from, bytes, false);
  if (bytes) memcpy(to, from, bytes);
  return SWATHE_OK;
}

enum swathe_status swathe_memory_read(struct swathe_context *context, enum swathe_target target,
                                      void *to, const void *from, size_t bytes)
{
  if (target == SWATHE_CUDA) return copy(context, to, from, bytes, true);
  if (bytes) memcpy(to, from, bytes);
  return SWATHE_OK;
}

enum swathe_status swathe_stream_synchronize(struct swathe_context *context,
                                             enum swathe_target target, void *stream)
{
  struct sw_device_cuda *device = NULL;

  if (target == SWATHE_CPU) return SWATHE_OK;
  enum swathe_status status = sw_context_device(context, &device);
  if (!status) status = sw_device_cuda_enter(device);
  if (status) return status;
  status = sw_device_cuda_synchronize(device, stream);
  sw_device_cuda_leave(device);
  return status;
}
