// chart.h: a history as a picture: one dot per sample, the best so far, the default.
#ifndef CLI_CHART_H
#define CLI_CHART_H

#include "history.h"
#include "page.h"

// Draws about `most_dots` of the samples at most: every so-manieth, and those that took the lead.
//   pick     config that layers use, or NULL
//   drawn    how many dots there are
//   beyond   how many of them are slower or faster than the scale shows and stand at its edge
struct cli_chart {
  const struct cli_history *history;
  const char *pick;
  int64_t most_dots;
  int64_t drawn, beyond;
};
void cli_chart_put(struct cli_page *page, struct cli_chart *chart);

#endif
