// trial_child.c: the processes in which candidates run.  A child shares the parent's inputs by
// fork, reports through a socket, and dies with its parent.
#include "trial_bench.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

// A trial is killed after this long (if the caller says nothing), plus many times what the
// default takes.
static const double default_trial_s = 20;

bool sw_trial_child_send(int end, const void *bytes, size_t size)
{
  for (size_t sent = 0; sent < size;) {
    const ssize_t n = send(end, (const char *)bytes + sent, size - sent, MSG_NOSIGNAL);
    if (n < 0 && errno != EINTR) return false;
    if (n > 0) sent += (size_t)n;
  }
  return true;
}

bool sw_trial_child_receive(int end, void *bytes, size_t size)
{
  for (size_t got = 0; got < size;) {
    const ssize_t n = read(end, (char *)bytes + got, size - got);
    if (n == 0 || (n < 0 && errno != EINTR)) return false;
    if (n > 0) got += (size_t)n;
  }
  return true;
}

enum swathe_status sw_trial_child_start(struct sw_trial_bench *bench, const char *config,
                                        void (*work)(struct sw_trial_bench *, const char *,
                                                     int end),
                                        pid_t *pid, int *end)
{
  int ends[2];
  *pid = -1;
  *end = -1;
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends))
    return sw_fail(SWATHE_DEVICE, "no socket for a trial: %s", strerror(errno));
  fflush(NULL);
  const pid_t parent = getpid();
  *pid = fork();
  if (*pid < 0) {
    close(ends[0]);
    close(ends[1]);
    return sw_fail(SWATHE_DEVICE, "no process for a trial: %s", strerror(errno));
  }
  if (*pid == 0) {
    // a candidate that crashes must end here, whatever handlers the host program has
    static const int fatal[] = { SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT };
    for (size_t i = 0; i < sizeof fatal / sizeof *fatal; i++) signal(fatal[i], SIG_DFL);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(0);
    signal(SIGINT, SIG_IGN);
    bench->context->db = NULL;  // the parent's connection; SQLite forbids using it here
    bench->context->apart.on = false;
    close(ends[0]);
    work(bench, config, ends[1]);
    _exit(0);
  }
  close(ends[1]);
  *end = ends[0];
  return SWATHE_OK;
}

int sw_trial_child_reap(pid_t pid)
{
  int state = 0;
  while (waitpid(pid, &state, 0) < 0 && errno == EINTR) continue;
  return state;
}

static double deadline_s(const struct sw_trial_bench *bench)
{
  return (bench->trial_s > 0 ? bench->trial_s : default_trial_s) + 200 * bench->default_us * 1e-6;
}

enum swathe_status sw_trial_child_hear(const struct sw_trial_bench *bench, pid_t pid, int end,
                                       void *report, size_t size, const volatile int *stop,
                                       enum sw_verdict *verdict, char words[SW_TRIAL_WORDS])
{
  const double limit_s = deadline_s(bench), until = sw_layer_now_s() + limit_s;
  size_t got = 0;
  bool closed = false, stopped = false;

  while (got < size && !closed && !stopped && sw_layer_now_s() < until) {
    struct pollfd ready = { .fd = end, .events = POLLIN };
    stopped = stop && *stop;
    if (stopped || poll(&ready, 1, 50) <= 0) continue;
    const ssize_t n = read(end, (char *)report + got, size - got);
    if (n > 0) got += (size_t)n;
    closed = n == 0 || (n < 0 && errno != EINTR);
  }
  *verdict = SW_VERDICT_OK;
  if (got == size) return SWATHE_OK;
  if (!closed) kill(pid, SIGKILL);
  const int state = sw_trial_child_reap(pid);
  if (stopped) return sw_fail(SWATHE_INTERRUPTED, "stopped during a trial");
  *verdict = closed ? SW_VERDICT_CRASH : SW_VERDICT_TIMEOUT;
  if (closed && WIFSIGNALED(state))
    snprintf(words, SW_TRIAL_WORDS, "killed by signal %d (%s)", WTERMSIG(state),
             strsignal(WTERMSIG(state)));
  else if (closed) snprintf(words, SW_TRIAL_WORDS, "ended with status %d", WEXITSTATUS(state));
  else snprintf(words, SW_TRIAL_WORDS, "not finished after %.0f s", limit_s);
  return SWATHE_OK;
}
