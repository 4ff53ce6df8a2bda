// bench.h: what `swathe bench` makes of a contest, for its three ways of showing it.
#ifndef CLI_BENCH_H
#define CLI_BENCH_H

#include "contest.h"
#include "page.h"

// Medians over the rounds, of all passes together and, [2], by direction.
struct cli_bench_row {
  const struct cli_contestant *contestant;
  double us[2], total_us, compute_us;  // compute: without exchange
  double wait_us;
  double exposed_us;                   // median of the rounds' differences; noise may be below 0
  int64_t received_bytes, planned_bytes;  // planned: by the formulas, for even shares
};

struct cli_bench {
  const struct cli_contest *contest;
  const char *transport;
  bool halo_exact;                     // each pass of the halo moved what the formula says
  int count;
  struct cli_bench_row rows[CLI_CONTEST_MOST];
};

// Draws the rows: bytes, time and memory of a rank.
void cli_bench_page(struct cli_page *page, const struct cli_bench *bench);

#endif
