// ranks.c: threads, or processes of MPI.  See ranks.h.
#include "ranks.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// Long enough for a rank whose share takes minutes while the others wait.
static const double default_deadline_s = 600;

// The launcher's number of this process.
static const char *const rank_names[] = { "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", NULL };

static bool quiet;  // this process is one of many, and rank 0 says it all

// The first of these variables that a launcher has set; -1: none.
static int32_t from_launcher(const char *const *names)
{
  for (; *names; names++) {
    const char *value = getenv(*names);
    if (value && *value) return (int32_t)strtol(value, NULL, 10);
  }
  return -1;
}

static bool is_transport(const struct cli_args *args, const char *name)
{
  const char *transport = args->value[CLI_TRANSPORT];
  return transport && !strcmp(transport, name);
}

// Devices are of threads where no launcher started processes.
static bool by_mpi(const struct cli_args *args)
{
  return is_transport(args, "mpi") ||
         (is_transport(args, "nccl") && from_launcher(rank_names) >= 0);
}

static enum cli_exit read_deadline(const struct cli_args *args, double *deadline_s)
{
  *deadline_s = default_deadline_s;
  const enum cli_exit code = cli_args_real(args, CLI_DEADLINE, deadline_s);
  if (!code && !(*deadline_s > 0))
    return cli_fail(CLI_BAD_USE, "--deadline %s: more than 0 seconds", args->value[CLI_DEADLINE]);
  return code;
}

enum cli_exit cli_ranks_check(const struct cli_args *args, bool devices)
{
  const char *transport = args->value[CLI_TRANSPORT];
  double deadline_s;
  if (!devices && is_transport(args, "nccl"))
    return cli_fail(CLI_BAD_USE, "--transport nccl is for 'swathe run' only");
  if (transport && strcmp(transport, "threads") && strcmp(transport, "mpi") &&
      strcmp(transport, "nccl"))
    return cli_fail(CLI_BAD_USE,
                    "--transport %s: there is 'threads', ranks that are threads of one process, "
                    "'mpi', one process per rank, and 'nccl', one GPU per rank",
                    transport);
  return read_deadline(args, &deadline_s);
}

enum cli_exit cli_ranks_open(const struct cli_args *args, int32_t ranks, struct cli_ranks *opened)
{
  double deadline_s;
  struct cli_ranks made = { .ranks = ranks, .count = ranks };
  enum swathe_status status;
  const enum cli_exit code = read_deadline(args, &deadline_s);
  if (code) return code;
  made.nccl = is_transport(args, "nccl");
  made.deadline_s = deadline_s;

  if (by_mpi(args)) status = swathe_mpi_create(NULL, NULL, ranks, deadline_s, &made.transport);
  else status = swathe_threads_create(ranks, deadline_s, &made.threads);
  if (status) {
    (void)cli_fail_library(status, "the ranks cannot be connected");
    quiet = status == SWATHE_DISAGREE && from_launcher(rank_names) > 0;
    return CLI_FAILED;
  }
  if (made.transport) {
    made.first = swathe_transport_rank(made.transport);
    made.count = 1;
    quiet = made.first != 0;
  }
  *opened = made;
  return CLI_OK;
}

struct swathe_transport *cli_ranks_transport(const struct cli_ranks *ranks, int32_t rank)
{
  return ranks->transport ? ranks->transport : swathe_threads_rank(ranks->threads, rank);
}

// The device of a rank: of threads each has its own, of processes each has its own on its machine.
static int32_t device_of(const struct cli_ranks *ranks, int32_t rank)
{
  static const char *const names[] = { "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID",
                                       "SLURM_LOCALID", NULL };
  const int32_t local = ranks->transport ? from_launcher(names) : rank;
  return local >= 0 ? local : 0;
}

enum swathe_status cli_ranks_link(const struct cli_ranks *ranks, struct swathe_context *context,
                                  int32_t rank, struct swathe_transport **link)
{
  struct swathe_transport *transport = cli_ranks_transport(ranks, rank);
  char mine[SWATHE_NCCL_ID_BYTES] = { 0 };
  struct swathe_nccl given = {
    .rank = rank, .ranks = ranks->ranks, .deadline_s = ranks->deadline_s
  };

  *link = transport;
  if (!ranks->nccl) return SWATHE_OK;
  enum swathe_status status = swathe_device_use(context, device_of(ranks, rank));
  if (!status && rank == 0) status = swathe_nccl_id(mine);
  if (status) return status;
  char *ids = malloc((size_t)ranks->ranks * sizeof mine);
  if (!ids) return SWATHE_NO_MEMORY;
  status = swathe_transport_gather(transport, mine, sizeof mine, ids);
  given.id = ids;
  if (!status) status = swathe_nccl_create(&given, link);
  free(ids);
  return status;
}

void cli_ranks_close(struct cli_ranks *ranks)
{
  if (ranks->transport) {
    (void)swathe_transport_gather(ranks->transport, NULL, 0, NULL);
    swathe_transport_destroy(ranks->transport);
  }
  swathe_threads_destroy(ranks->threads);
  *ranks = (struct cli_ranks){ 0 };
}

// A launcher that binds processes to processors has shared them out already.
int32_t cli_ranks_sharing(const struct cli_args *args, int32_t ranks, int32_t processors)
{
  static const char *const names[] = { "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS",
                                       "SLURM_NTASKS_PER_NODE", NULL };
  if (!by_mpi(args)) return ranks;
  const int32_t here = processors < sysconf(_SC_NPROCESSORS_ONLN) ? 1 : from_launcher(names);
  return here > 1 ? here : 1;
}

// What makes no sense, or is connected wrongly, is so for every rank; other failures may be of one
// machine alone.
bool cli_ranks_speak(const struct cli_args *args, enum cli_exit code)
{
  if (!by_mpi(args)) return true;
  return !quiet && (code != CLI_BAD_USE || from_launcher(rank_names) <= 0);
}
