// child.c: starting a worker, one question and one answer at a time, stopping it.
#include "child.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static void become(char *const *arguments, const char *const *environment, int in, int out)
{
  dup2(in, STDIN_FILENO);
  dup2(out, STDOUT_FILENO);
  for (; *environment; environment++) {
    char *setting = strdup(*environment);
    if (!setting) _exit(127);
    if (*setting == '-') unsetenv(setting + 1);
    else putenv(setting);
  }
  execvp(arguments[0], arguments);
  _exit(127);
}

bool child_start(struct child *child, char *const *arguments, const char *const *environment)
{
  int in[2], out[2];
  *child = (struct child){ 0 };
  if (pipe2(in, O_CLOEXEC)) return false;
  if (pipe2(out, O_CLOEXEC)) {
    close(in[0]);
    close(in[1]);
    return false;
  }
  fflush(NULL);
  child->process = fork();
  if (!child->process) become(arguments, environment, in[0], out[1]);
  close(in[0]);
  close(out[1]);
  child->to = in[1], child->from = out[0];
  if (child->process > 0) return true;
  close(child->to);
  close(child->from);
  child->process = 0;
  return false;
}

bool child_ask(struct child *child, const char *line, int limit_s)
{
  const time_t deadline = time(NULL) + limit_s;
  size_t length = 0;
  if (!child->process) return false;
  if (line && write(child->to, line, strlen(line)) != (ssize_t)strlen(line)) return false;
  while (length + 1 < sizeof child->words) {
    struct pollfd answer = { child->from, POLLIN, 0 };
    const time_t left = deadline - time(NULL);
    if (left <= 0 || poll(&answer, 1, (int)left * 1000) <= 0) {
      snprintf(child->words, sizeof child->words, "no answer in %d s", limit_s);
      return false;
    }
    if (read(child->from, &child->words[length], 1) != 1) {
      snprintf(child->words, sizeof child->words, "ended without an answer");
      return false;
    }
    if (child->words[length] == '\n') break;
    length++;
  }
  child->words[length] = 0;
  return true;
}

void child_stop(struct child *child)
{
  if (!child->process) return;
  close(child->to);
  close(child->from);
  kill(child->process, SIGKILL);
  waitpid(child->process, NULL, 0);
  child->process = 0;
}
