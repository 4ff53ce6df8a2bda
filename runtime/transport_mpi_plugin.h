// transport_mpi_plugin.h: what transport_mpi.c needs of an MPI, in types that know none.  The ABIs
// of MPIs differ, so one small plugin (transport_mpi_plugin.c) is compiled against each that is
// installed, and the library opens the one that the process was started with.
#ifndef SW_TRANSPORT_MPI_PLUGIN_H
#define SW_TRANSPORT_MPI_PLUGIN_H

#include <stdbool.h>
#include <stdint.h>

enum { SW_MPI_PLUGIN_VERSION = 1, SW_MPI_ERROR_TEXT = 512, SW_MPI_ANY = -1 };

// Holds a communicator, a request or a matched message: a pointer in one MPI, a number in another.
struct sw_mpi_handle {
  uint64_t bits;
};

// Calls return 0, or an error code for `error_text`.
struct sw_mpi_plugin {
  int32_t version;
  // Initializes MPI if nobody has; `here` says whether it did.  `threads`: any thread may call at
  // any time (MPI_THREAD_MULTIPLE).
  int (*initialize)(bool *here, bool *threads);
  void (*finalize)(void);              // unless somebody has
  // `communicator` points to an MPI_Comm; NULL: all processes.
  int (*describe)(const void *communicator, int *rank, int *ranks);
  // Begins to make a duplicate that returns errors; `duplicate` must stay where it is until the
  // request is done.  Then `adopt` makes it ready.
  int (*duplicate)(const void *communicator, struct sw_mpi_handle *duplicate,
                   struct sw_mpi_handle *request);
  int (*adopt)(struct sw_mpi_handle duplicate);
  int (*release)(struct sw_mpi_handle *duplicate);
  int (*send)(struct sw_mpi_handle communicator, const void *data, int bytes, int peer, int tag,
              struct sw_mpi_handle *request);
  // Takes the next message of `peer` (or SW_MPI_ANY) with this tag, if one has arrived.
  int (*match)(struct sw_mpi_handle communicator, int peer, int tag, bool *found, int *from,
               int *bytes, struct sw_mpi_handle *message);
  int (*receive)(struct sw_mpi_handle *message, void *data, int bytes,
                 struct sw_mpi_handle *request);
  int (*test)(struct sw_mpi_handle *request, bool *done);
  void (*error_text)(int code, char text[SW_MPI_ERROR_TEXT]);
};

#define SW_MPI_PLUGIN_SYMBOL "sw_mpi_plugin"

#endif
