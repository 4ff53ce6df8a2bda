// jit_cuda.h: what a compiled CUDA kernel is kept as: the CUBIN, the PTX it was made from, and what
// its kernels use of the machine.  Private to jit*.c.
#ifndef SW_JIT_CUDA_H
#define SW_JIT_CUDA_H

#include "jit.h"

struct sw_jit_cuda_parts {
  const void *cubin;
  size_t cubin_bytes;
  const char *ptx;                      // zero-terminated
  int32_t kernel_count;
  struct sw_jit_resources kernels[SW_JIT_KERNELS];
};

// `log` is what NVRTC printed, with --ptxas-options=-v; spills stand only there.  *bytes is to be
// freed.
enum swathe_status sw_jit_cuda_pack(const void *cubin, size_t cubin_bytes, const char *ptx,
                                    const char *log, unsigned char **bytes, size_t *size);

// The parts lie in `bytes`, which are aligned as malloc does.  False: these are not the packed
// bytes of this version.
bool sw_jit_cuda_unpack(const unsigned char *bytes, size_t size, struct sw_jit_cuda_parts *parts);

// Where the CUBIN holds the initial value of a variable, and its size; NULL if there is none of
// that name.
const void *sw_jit_cuda_variable(const struct sw_jit_cuda_parts *parts, const char *name,
                                 size_t *bytes);

#endif
