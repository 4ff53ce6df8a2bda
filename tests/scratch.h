// scratch.h: part of every test program: a directory of its own, and what tests do with it.
#ifndef TEST_SCRATCH_H
#define TEST_SCRATCH_H

// Makes /tmp/swathe-test-ROOM-XXXXXX; its path, or NULL.  One a program.
const char *scratch_make(const char *room);
// With all that is in it.  0, or not: for cmocka's tear-down.
int scratch_remove(void **state);

// Makes it, goes there and calls it home, so that the `swathe` binary finds nothing of the user's.
// The binary's path from $TEST_COMMAND, absolute; NULL: there is none, or no directory.
const char *scratch_home(const char *room);

// Runs a command of at most 2 KiB; the test fails unless it succeeds.
void scratch_shell(const char *format, ...) __attribute__((format(printf, 1, 2)));

// A whole file, zero-terminated, to be freed; the test fails if there is none.
char *scratch_read(const char *path);

#endif
