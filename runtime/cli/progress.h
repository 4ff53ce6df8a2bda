// progress.h: how far tuning is: one line that is redrawn on a terminal, plain lines elsewhere.
#ifndef CLI_PROGRESS_H
#define CLI_PROGRESS_H

#include "../swathe.h"

#include <stdio.h>

struct cli_progress {
  FILE *file;              // stderr
  bool terminal, drawn;
  double drawn_s;          // when the last line was drawn, on the tuning's own clock
  double best_us;          // of the last line
  enum swathe_direction direction;
};

void cli_progress_begin(struct cli_progress *progress, FILE *file);
// The callback of swathe_tune_options; `arg` is the struct.
void cli_progress_show(void *arg, const struct swathe_progress *now);
// Leaves the cursor on a fresh line.
void cli_progress_end(struct cli_progress *progress);

#endif
