// jit_cc.h: running the system's C compiler.  Private to jit*.c.
//
// A compiler is a command of one or more words; a run is one process of it in a private directory
// of its own, which goes when the run is finished or killed.  What is left where this process is
// killed itself, sw_jit_cc_tidy of a later one removes.
#ifndef SW_JIT_CC_H
#define SW_JIT_CC_H

#include "error.h"

struct sw_jit_cc;

// Seconds of a clock that only goes forward; what every deadline below counts from.
double sw_jit_cc_now(void);

// From now on this thread gives a compiler up (SWATHE_INTERRUPTED) once *stop is not 0.  NULL: it
// does not look.  Returns what it looked at before.
const volatile int *sw_jit_cc_heed(const volatile int *stop);
bool sw_jit_cc_stopped(void);

// The compiler that `command` names, found through PATH: as many of its words as are a program's
// name or path, which may hold spaces; the rest are arguments.  SWATHE_COMPILE if it is not there.
enum swathe_status sw_jit_cc_find(const char *command, struct sw_jit_cc **cc);
void sw_jit_cc_free(struct sw_jit_cc *cc);

const char *sw_jit_cc_path(const struct sw_jit_cc *cc);  // absolute
// The command's words after the program, "" if there are none.
const char *sw_jit_cc_arguments(const struct sw_jit_cc *cc);
// Path, size, time and inode of every program the command names: changes when one of them is
// replaced.
const char *sw_jit_cc_stamp(const struct sw_jit_cc *cc);

// The first line the compiler prints when it is given `option`.
enum swathe_status sw_jit_cc_ask(const struct sw_jit_cc *cc, const char *option, double deadline_s,
                                 char *line, size_t size);

// `last_resort` (or NULL): a directory to work in when there is no usable temporary directory.
// `name` names the source in the compiler's messages: "forward" gives "forward.c:12:3: error: ...".
struct sw_jit_cc_run;
enum swathe_status sw_jit_cc_start(const struct sw_jit_cc *cc, const char *name, const char *source,
                                   const char *flags, const char *last_resort,
                                   struct sw_jit_cc_run **run);
bool sw_jit_cc_done(struct sw_jit_cc_run *run);  // without waiting
// Waits, kills the process group at the deadline (SWATHE_TIMEOUT), and frees the run.  *bytes is to
// be freed; so is *log, the compiler's output, which only a failure gives (NULL otherwise).
enum swathe_status sw_jit_cc_finish(struct sw_jit_cc_run *run, double deadline_s,
                                    unsigned char **bytes, size_t *size, double *seconds,
                                    char **log);
void sw_jit_cc_kill(struct sw_jit_cc_run *run);  // and frees it

// Removes the private directories of killed processes, a day old, wherever a run with that
// `last_resort` might work.
void sw_jit_cc_tidy(const char *last_resort);

#endif
