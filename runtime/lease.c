// lease.c: a lock on a file beside the database; the file says who has it.
#include "lease.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

#include "layer.h"

// The owner's number as its file has it; 0 if it has none yet.
static long owner_of(int file)
{
  char text[32] = { 0 };
  const ssize_t size = pread(file, text, sizeof text - 1, 0);
  return size > 0 ? strtol(text, NULL, 10) : 0;
}

static void sign(int file)
{
  char text[32];
  const int size = snprintf(text, sizeof text, "%ld\n", (long)getpid());
  // who cannot sign still has the lease
  if (ftruncate(file, 0) || pwrite(file, text, (size_t)size, 0) != size)
    sw_warn("the tuner's lease cannot be signed: %s", strerror(errno));
}

static enum swathe_status wait_for_it(int file, const char *name, double wait_s,
                                      const volatile int *stop)
{
  const double end = sw_layer_now_s() + wait_s;
  while (flock(file, LOCK_EX | LOCK_NB)) {
    if (errno != EWOULDBLOCK && errno != EINTR) {
      // a file system without locks: nothing can be promised, and tuning is better than not
      sw_warn("%s cannot be locked (%s); another tuner would go unnoticed", name, strerror(errno));
      return SWATHE_OK;
    }
    if (stop && *stop) return sw_fail(SWATHE_INTERRUPTED, "stopped while another process tunes");
    if (sw_layer_now_s() >= end)
      return sw_fail(SWATHE_TIMEOUT,
                     "process %ld is tuning into the same database (it holds %s), and did not end "
                     "within %.0f s",
                     owner_of(file), name, wait_s);
    nanosleep(&(struct timespec){ .tv_nsec = 50000000 }, NULL);
  }
  sign(file);
  return SWATHE_OK;
}

enum swathe_status sw_lease_take(const char *path, double wait_s, const volatile int *stop,
                                 struct sw_lease *lease)
{
  char *name = NULL;
  if (asprintf(&name, "%s.lease", path) < 0)
    return sw_fail(SWATHE_NO_MEMORY, "no memory for a path");
  const int file = open(name, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  enum swathe_status status = SWATHE_OK;
  if (file < 0) status = sw_fail(SWATHE_FILE, "%s cannot be opened: %s", name, strerror(errno));
  else status = wait_for_it(file, name, wait_s, stop);
  free(name);
  if (status && file >= 0) close(file);
  if (!status) lease->file = file;
  return status;
}

void sw_lease_give_back(struct sw_lease *lease)
{
  if (lease->file >= 0) close(lease->file);
  lease->file = -1;
}
