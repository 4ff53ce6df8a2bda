// transport_mpi_plugin.c: the one source that knows mpi.h; compiled once per MPI that is installed,
// into swathe_mpi_NAME.so, never into the library.  For an MPI that the build did not find:
//
//   mpicc -shared -fPIC transport_mpi_plugin.c -o swathe_mpi_NAME.so
#include "transport_mpi_plugin.h"

#include <mpi.h>
#include <stdio.h>
#include <string.h>

_Static_assert(sizeof(MPI_Comm) <= sizeof(struct sw_mpi_handle), "a communicator fits a handle");
_Static_assert(sizeof(MPI_Request) <= sizeof(struct sw_mpi_handle), "a request fits a handle");
_Static_assert(sizeof(MPI_Message) <= sizeof(struct sw_mpi_handle), "a message fits a handle");

static MPI_Comm communicator_of(const void *communicator)
{
  MPI_Comm value = MPI_COMM_WORLD;
  if (communicator) memcpy(&value, communicator, sizeof value);
  return value;
}

static MPI_Request request_of(const struct sw_mpi_handle *handle)
{
  MPI_Request request;
  memcpy(&request, handle, sizeof request);
  return request;
}

static void keep_request(struct sw_mpi_handle *handle, MPI_Request request)
{
  memcpy(handle, &request, sizeof request);
}

static int initialize(bool *here, bool *threads)
{
  int initialized = 0, level = MPI_THREAD_SINGLE;
  int code = MPI_Initialized(&initialized);
  *here = false;
  if (!code && initialized) code = MPI_Query_thread(&level);
  if (!code && !initialized) {
    code = MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &level);
    *here = !code;
  }
  *threads = level == MPI_THREAD_MULTIPLE;
  return code;
}

static void finalize(void)
{
  int finalized = 1;
  if (!MPI_Finalized(&finalized) && !finalized) MPI_Finalize();
}

static int describe(const void *communicator, int *rank, int *ranks)
{
  const MPI_Comm comm = communicator_of(communicator);
  const int code = MPI_Comm_rank(comm, rank);
  return code ? code : MPI_Comm_size(comm, ranks);
}

static int duplicate(const void *communicator, struct sw_mpi_handle *duplicate,
                     struct sw_mpi_handle *request)
{
  MPI_Request made;
  const int code =
      MPI_Comm_idup(communicator_of(communicator), (MPI_Comm *)(void *)duplicate, &made);
  if (!code) keep_request(request, made);
  return code;
}

static int adopt(struct sw_mpi_handle duplicate)
{
  return MPI_Comm_set_errhandler(communicator_of(&duplicate), MPI_ERRORS_RETURN);
}

static int release(struct sw_mpi_handle *duplicate)
{
  MPI_Comm comm = communicator_of(duplicate);
  return MPI_Comm_free(&comm);
}

static int send_bytes(struct sw_mpi_handle communicator, const void *data, int bytes, int peer,
                      int tag, struct sw_mpi_handle *request)
{
  MPI_Request made;
  const int code =
      MPI_Isend(data, bytes, MPI_BYTE, peer, tag, communicator_of(&communicator), &made);
  if (!code) keep_request(request, made);
  return code;
}

static int match(struct sw_mpi_handle communicator, int peer, int tag, bool *found, int *from,
                 int *bytes, struct sw_mpi_handle *message)
{
  MPI_Message matched;
  MPI_Status status;
  int arrived = 0;
  int code = MPI_Improbe(peer == SW_MPI_ANY ? MPI_ANY_SOURCE : peer, tag,
                         communicator_of(&communicator), &arrived, &matched, &status);
  *found = !code && arrived;
  if (!*found) return code;
  memcpy(message, &matched, sizeof matched);
  *from = status.MPI_SOURCE;
  return MPI_Get_count(&status, MPI_BYTE, bytes);
}

static int receive(struct sw_mpi_handle *message, void *data, int bytes,
                   struct sw_mpi_handle *request)
{
  MPI_Message matched;
  MPI_Request made;
  memcpy(&matched, message, sizeof matched);
  const int code = MPI_Imrecv(data, bytes, MPI_BYTE, &matched, &made);
  if (!code) keep_request(request, made);
  return code;
}

static int test(struct sw_mpi_handle *handle, bool *done)
{
  MPI_Request request = request_of(handle);
  MPI_Status status;
  int finished = 0;
  const int code = MPI_Test(&request, &finished, &status);
  keep_request(handle, request);
  *done = finished;
  return code;
}

static void error_text(int code, char text[SW_MPI_ERROR_TEXT])
{
  char said[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  if (MPI_Error_string(code, said, &length)) length = 0;
  while (length > 0 && said[length - 1] == '\n') length--;
  if (length > SW_MPI_ERROR_TEXT - 40) length = SW_MPI_ERROR_TEXT - 40;
  snprintf(text, SW_MPI_ERROR_TEXT, "%.*s (MPI error %d)", length, said, code);
}

__attribute__((visibility("default"))) const struct sw_mpi_plugin sw_mpi_plugin = {
  .version = SW_MPI_PLUGIN_VERSION,
  .initialize = initialize,
  .finalize = finalize,
  .describe = describe,
  .duplicate = duplicate,
  .adopt = adopt,
  .release = release,
  .send = send_bytes,
  .match = match,
  .receive = receive,
  .test = test,
  .error_text = error_text,
};
