// doctor.c: what a layer would find on this machine, and what would mend what is missing.
#include <stdio.h>
#include <string.h>

#include "layer.h"
#include "transport_mpi_process.h"
#include "transport_nccl_library.h"

struct report {
  swathe_finding_visit *visit;
  void *arg;
};

static void find(const struct report *report, const char *what, enum swathe_health health,
                 const char *found, const char *fix)
{
  const struct swathe_finding finding = {
    .what = what, .found = found, .fix = fix, .health = health
  };
  report->visit(report->arg, &finding);
}

static void look_at_compiler(const struct report *report, const struct sw_jit_state *state)
{
  char text[512];

  if (!*state->compiler) {
    find(
        report, "compiler", SWATHE_BROKEN, "none found",
        "install a C compiler (apt-get install gcc), or set SWATHE_CC; a warm cache works without");
    return;
  }
  snprintf(text, sizeof text, "%s (%s)", state->compiler, state->compiler_version);
  find(report, "compiler", SWATHE_HEALTHY, text, "");
}

static void look_at_cache(const struct report *report, const struct sw_jit_state *state)
{
  char text[1024], bound[64];

  if (!*state->directory) {
    find(report, "kernel cache", SWATHE_BROKEN, *state->problem ? state->problem : "memory only",
         "set SWATHE_CACHE_DIR to a directory of your own, or every process compiles anew");
    return;
  }
  if (!state->writable) {
    snprintf(text, sizeof text, "%s cannot be written%s%s", state->directory,
             *state->problem ? ": " : "", state->problem);
    find(
        report, "kernel cache", SWATHE_BROKEN, text,
        "kernels it lacks are compiled by every process; make it writable or set SWATHE_CACHE_DIR");
    return;
  }
  snprintf(bound, sizeof bound, ", of at most %lld", (long long)(state->most_bytes >> 20));
  snprintf(text, sizeof text, "%s: %lld kernel%s, %.1f MiB%s", state->directory,
           (long long)state->kernels, state->kernels == 1 ? "" : "s",
           (double)state->bytes / (1 << 20), state->most_bytes < INT64_MAX ? bound : "");
  find(report, "kernel cache", SWATHE_HEALTHY, text, "");
}

static void look_at_database(const struct report *report, struct swathe_context *context)
{
  struct sw_db_state state;
  char text[1024];

  if (context->db_failed) {
    find(report, "tuning database", SWATHE_BROKEN, context->db_words,
         "move the file aside, or name another with SWATHE_DB; layers use default configs "
         "meanwhile");
    return;
  }
  if (!context->db) {
    find(report, "tuning database", SWATHE_ABSENT, "no place to keep one", "set SWATHE_DB");
    return;
  }
  pthread_mutex_lock(&context->mutex);
  const enum swathe_status status = sw_db_state(context->db, &state);
  pthread_mutex_unlock(&context->mutex);
  if (status) {
    find(report, "tuning database", SWATHE_BROKEN, swathe_error(), "move the file aside");
    return;
  }
  snprintf(text, sizeof text, "%s: schema %d, %lld picks, %lld samples", context->database,
           state.schema_version, (long long)state.picks, (long long)state.samples);
  if (state.picks) find(report, "tuning database", SWATHE_HEALTHY, text, "");
  else find(report, "tuning database", SWATHE_ABSENT, text, "tune a problem: swathe tune --help");
}

static void look_at_nvrtc(const struct report *report, struct sw_jit *jit)
{
  struct sw_jit_nvrtc_state state;
  char text[1024];

  sw_jit_nvrtc_state(jit, &state);
  if (!*state.path) {
    find(report, "cuda compiler", SWATHE_ABSENT, state.problem,
         "CUDA kernels that the cache lacks need it; CPU kernels do not");
    return;
  }
  snprintf(text, sizeof text, "%s (%s), for %s", state.path, state.version, state.isas);
  find(report, "cuda compiler", SWATHE_HEALTHY, text, "");
}

static void look_at_driver(const struct report *report)
{
  struct sw_device_cuda_driver driver;
  char text[768];

  if (sw_device_cuda_look(&driver)) {
    find(report, "cuda driver", SWATHE_ABSENT, swathe_error(),
         "only --target cuda needs it; kernels can be compiled without");
    return;
  }
  snprintf(text, sizeof text,
           "%s%s: CUDA %d.%d, %d device%s, the first %s, compute capability %d.%d",
           driver.emulated ? "emulated, not a GPU: " : "", driver.library, driver.version / 1000,
           driver.version % 1000 / 10, driver.devices, driver.devices == 1 ? "" : "s",
           driver.first, driver.first_major, driver.first_minor);
  if (driver.devices) find(report, "cuda driver", SWATHE_HEALTHY, text, "");
  else find(report, "cuda driver", SWATHE_BROKEN, text, "is CUDA_VISIBLE_DEVICES set to none?");
}

// The plugins, not the MPIs behind them: opening one starts it.
static void look_at_mpi(const struct report *report)
{
  static const char *const names[] = { "openmpi", "mpich" };
  char text[1024] = "", path[512];
  size_t used = 0;

  for (int i = 0; i < 2; i++)
    if (sw_transport_mpi_find(names[i], path, sizeof path) && used < sizeof text)
      used += (size_t)snprintf(text + used, sizeof text - used, "%s%s (%s)", used ? ", " : "",
                               names[i], path);
  if (used)
    find(report, "mpi transport", SWATHE_HEALTHY, text, "");
  else
    find(report, "mpi transport", SWATHE_ABSENT, "no plugin",
         "only ranks that are processes need one: build where an MPI's headers are (apt-get "
         "install libopenmpi-dev), or set SWATHE_MPI_PLUGIN");
}

static void look_at_nccl(const struct report *report)
{
  struct sw_nccl_found nccl;
  char text[512];

  if (sw_nccl_look(&nccl)) {
    find(report, "nccl transport", SWATHE_ABSENT, swathe_error(),
         "only --transport nccl needs it; others move the memory of devices through the host's");
    return;
  }
  snprintf(text, sizeof text, "%s: NCCL %d.%d.%d", nccl.path, nccl.version / 10000,
           nccl.version / 100 % 100, nccl.version % 100);
  find(report, "nccl transport", SWATHE_HEALTHY, text, "");
}

enum swathe_status swathe_doctor(struct swathe_context *context, swathe_finding_visit *visit,
                                 void *arg)
{
  const struct report report = { visit, arg };
  struct sw_jit_state state;
  char text[256];

  snprintf(text, sizeof text, "%s, %d processors, isa %s", context->processor,
           sw_device_cpu_processors(), context->isa);
  find(&report, "processor", SWATHE_HEALTHY, text, "");
  find(&report, "generator", SWATHE_HEALTHY,
       context->generator ? context->generator : "built into the library", "");
  sw_jit_state(context->jit, &state);
  look_at_compiler(&report, &state);
  look_at_cache(&report, &state);
  look_at_nvrtc(&report, context->jit);
  look_at_database(&report, context);
  find(&report, "threads transport", SWATHE_HEALTHY, "ranks as threads of one process", "");
  look_at_mpi(&report);
  look_at_nccl(&report);
  look_at_driver(&report);
  return SWATHE_OK;
}
