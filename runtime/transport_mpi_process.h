// transport_mpi_process.h: the one MPI of this process, behind its plugin.
#ifndef SW_TRANSPORT_MPI_PROCESS_H
#define SW_TRANSPORT_MPI_PROCESS_H

#include "transport.h"
#include "transport_mpi_plugin.h"

struct sw_mpi_process {
  const struct sw_mpi_plugin *plugin;
  bool threads;    // any thread may call MPI at any time
  char name[256];  // of the plugin
};

// Opens the plugin and initializes MPI, unless that is done.  `name` as in swathe_mpi_create.
enum swathe_status sw_transport_mpi_start(const char *name, struct sw_mpi_process *process);

// Where the plugin of that name is.
bool sw_transport_mpi_find(const char *name, char *path, size_t size);

// MPI is not finalized when the process ends.
void sw_transport_mpi_keep_running(void);

#endif
