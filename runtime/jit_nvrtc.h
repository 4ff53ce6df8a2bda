// jit_nvrtc.h: compiling CUDA C with NVRTC, which is found when it is first needed.  Private to
// jit*.c.
//
// NVRTC works inside this process, so nothing can kill it.  A run is a thread of low priority; one
// that its caller gives up is asked to stop, and ends on its own.
#ifndef SW_JIT_NVRTC_H
#define SW_JIT_NVRTC_H

#include "error.h"

struct sw_jit_nvrtc;

// Opens what SWATHE_LIBNVRTC names, else the library the loader or a usual CUDA directory has.
// SWATHE_COMPILE if it is not there.
enum swathe_status sw_jit_nvrtc_open(struct sw_jit_nvrtc **nvrtc);
// Waits for runs that were given up.  NULL is fine.
void sw_jit_nvrtc_close(struct sw_jit_nvrtc *nvrtc);

const char *sw_jit_nvrtc_path(const struct sw_jit_nvrtc *nvrtc);
const char *sw_jit_nvrtc_version(const struct sw_jit_nvrtc *nvrtc);  // "nvrtc 13.0"
const char *sw_jit_nvrtc_isas(const struct sw_jit_nvrtc *nvrtc);     // "sm_75 sm_80 ..."

// `name` names the source in messages: "forward" gives "forward.cu(12): error: ...".
struct sw_jit_nvrtc_run;
enum swathe_status sw_jit_nvrtc_start(struct sw_jit_nvrtc *nvrtc, const char *name,
                                      const char *source, const char *flags, const char *isa,
                                      struct sw_jit_nvrtc_run **run);
bool sw_jit_nvrtc_done(struct sw_jit_nvrtc_run *run);  // without waiting
// Waits, gives the run up at the deadline (SWATHE_TIMEOUT), and frees it.  *bytes, as
// sw_jit_cuda_pack makes them, is to be freed; so is *log, which only a failure gives.
enum swathe_status sw_jit_nvrtc_finish(struct sw_jit_nvrtc_run *run, double deadline_s,
                                       unsigned char **bytes, size_t *size, double *seconds,
                                       char **log);
void sw_jit_nvrtc_kill(struct sw_jit_nvrtc_run *run);  // gives it up, and frees it

#endif
