// transport_mpi_process.c: which MPI the process has, and the plugin of it.
#include "transport_mpi_process.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { FINALIZE_S = 10 };

static struct {
  pthread_mutex_t mutex;
  struct sw_mpi_process mpi;
  bool initialized_here;
  bool unfit_to_finalize;  // a failed transport left behind what MPI_Finalize would wait for
} process = { .mutex = PTHREAD_MUTEX_INITIALIZER };

// The MPI that is in the process already, else the one whose launcher started it; NULL: none.
static const char *find_name(void)
{
  int (*version)(char *, int *) = NULL;
  *(void **)&version = dlsym(RTLD_DEFAULT, "MPI_Get_library_version");
  if (version) {
    static char text[16384];  // more than any MPI_MAX_LIBRARY_VERSION_STRING
    int length = 0;
    if (!version(text, &length)) return strstr(text, "Open MPI") ? "openmpi" : "mpich";
  }
  if (getenv("OMPI_COMM_WORLD_SIZE")) return "openmpi";
  if (getenv("PMI_SIZE")) return "mpich";
  if (getenv("PMIX_RANK")) return "openmpi";
  return NULL;
}

// A name with a slash is a file.  Others are looked for where $SWATHE_MPI_PLUGIN says, which may be
// a file itself, and where this library lies.
bool sw_transport_mpi_find(const char *name, char *path, size_t size)
{
  const char *named = getenv("SWATHE_MPI_PLUGIN"), *const places[] = { "swathe/", "" };
  Dl_info here;

  if (strchr(name, '/')) {
    snprintf(path, size, "%s", name);
    return access(path, R_OK) == 0;
  }
  if (named && *named) {
    const size_t length = strlen(named);
    const bool file = length > 3 && !strcmp(named + length - 3, ".so");
    if (file) snprintf(path, size, "%s", named);
    else snprintf(path, size, "%s/swathe_mpi_%s.so", named, name);
    return access(path, R_OK) == 0;
  }
  if (!dladdr((void *)swathe_mpi_create, &here) || !here.dli_fname) return false;
  const char *slash = strrchr(here.dli_fname, '/');
  const int length = slash ? (int)(slash - here.dli_fname) : 1;
  for (int i = 0; i < 2; i++) {
    snprintf(path, size, "%.*s/%sswathe_mpi_%s.so", length, slash ? here.dli_fname : ".", places[i],
             name);
    if (access(path, R_OK) == 0) return true;
  }
  return false;
}

// MPI_Finalize waits for every rank; one that is gone must not keep this one for ever.
static void *watch_finalize(void *arg)
{
  (void)arg;
  sleep(FINALIZE_S);
  static const char words[] = "swathe: MPI does not finalize: another rank is gone; giving up\n";
  if (write(STDERR_FILENO, words, sizeof words - 1) < 0) _exit(EXIT_FAILURE);
  _exit(EXIT_FAILURE);
}

static void finalize_at_exit(void)
{
  static pthread_t watch;
  if (!process.initialized_here || process.unfit_to_finalize) return;
  fflush(NULL);
  if (!pthread_create(&watch, NULL, watch_finalize, NULL)) pthread_detach(watch);
  process.mpi.plugin->finalize();
}

static enum swathe_status load(const char *name)
{
  char path[4096], text[SW_MPI_ERROR_TEXT];

  if (!sw_transport_mpi_find(name, path, sizeof path))
    return sw_fail(SWATHE_NOT_FOUND,
                   "there is no plugin for the MPI '%s': it is built where that MPI's headers are, "
                   "lies beside the library as swathe_mpi_%s.so, and $SWATHE_MPI_PLUGIN may name "
                   "its file or directory",
                   name, name);
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (!library) return sw_fail(SWATHE_LOAD, "the MPI plugin cannot be opened: %s", dlerror());
  const struct sw_mpi_plugin *plugin = dlsym(library, SW_MPI_PLUGIN_SYMBOL);
  if (!plugin || plugin->version != SW_MPI_PLUGIN_VERSION)
    return sw_fail(SWATHE_LOAD, "the MPI plugin '%s' belongs to another version of swathe", name);
  const int code = plugin->initialize(&process.initialized_here, &process.mpi.threads);
  if (code) {
    plugin->error_text(code, text);
    return sw_fail(SWATHE_TRANSPORT, "MPI cannot be initialized: %s", text);
  }
  process.mpi.plugin = plugin;
  snprintf(process.mpi.name, sizeof process.mpi.name, "%s", name);
  if (process.initialized_here) atexit(finalize_at_exit);
  return SWATHE_OK;
}

// The process's plugin, opened at the first call.
enum swathe_status sw_transport_mpi_start(const char *name, struct sw_mpi_process *started)
{
  enum swathe_status status = SWATHE_OK;
  pthread_mutex_lock(&process.mutex);
  if (!process.mpi.plugin) {
    if (!name) name = find_name();
    status = name ? load(name)
                  : sw_fail(SWATHE_NOT_FOUND,
                            "no launcher of MPI started this process: neither OMPI_COMM_WORLD_SIZE "
                            "nor PMI_SIZE nor PMIX_RANK is set; start it with mpirun or srun, one "
                            "process per rank");
  } else if (name && strcmp(name, process.mpi.name)) {
    status = sw_fail(SWATHE_BAD_USE, "the process uses the MPI '%s' already, not '%s'",
                     process.mpi.name, name);
  }
  *started = process.mpi;
  pthread_mutex_unlock(&process.mutex);
  return status;
}

void sw_transport_mpi_keep_running(void)
{
  pthread_mutex_lock(&process.mutex);
  process.unfit_to_finalize = true;
  pthread_mutex_unlock(&process.mutex);
}

