// child.h: a worker process and what is said to it; see worker.h for the words.
#ifndef PEERS_CHILD_H
#define PEERS_CHILD_H

#include <stdbool.h>
#include <stdio.h>
#include <sys/types.h>

struct child {
  pid_t process;      // 0: none
  int to, from;       // its stdin and stdout
  char words[512];    // the last line it said, without the newline
};

// Starts `arguments` (NULL-terminated) with `environment` ("NAME=value" or "-NAME" to unset,
// NULL-terminated, beside what this process has).  False if it could not be started.
bool child_start(struct child *child, char *const *arguments, const char *const *environment);

// Sends `line` (NULL: nothing) and waits for one line of answer, at most `limit_s`.  False: it
// ended or hung.
bool child_ask(struct child *child, const char *line, int limit_s);

// Ends it and waits for that.
void child_stop(struct child *child);

#endif
