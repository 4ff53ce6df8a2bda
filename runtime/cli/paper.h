// paper.h: ways of sharing a layer on a cluster that one does not have: bytes from the plan, times
// from latency and bandwidth (alpha-beta), attention from what the caller says of it.
#ifndef CLI_PAPER_H
#define CLI_PAPER_H

#include "given.h"

enum { CLI_PAPER_STRATEGIES = SWATHE_RING_ALL + 1 };

struct cli_paper_link {
  double bytes_per_us, us;     // us: of a message
};

// --link, --attention-us, --tflops.
struct cli_paper_cluster {
  struct cli_paper_link far;   // between nodes, or everywhere
  struct cli_paper_link near;  // within a node
  int32_t node_ranks;          // 1: there is no other link
  double attention_us;         // forward, of a rank; 0: see tflops
  double tflops;               // useful ones; 0: nothing is known of attention
};
enum cli_exit cli_paper_read(const struct cli_args *args, struct cli_paper_cluster *cluster);

struct cli_paper_row {
  enum swathe_strategy strategy;
  bool refused;                // the ranks do not divide the heads
  int64_t received_bytes[2];   // by direction, of the rank with most
  double us[2], exposed_us[2]; // communication; what attention does not hide
};

struct cli_paper {
  int32_t ranks;
  int64_t share_tokens;        // of the largest rank
  double attention_us[2];      // of the largest rank; 0: not known
  double hideable;             // part of it that needs nothing of other ranks
  struct cli_paper_row rows[CLI_PAPER_STRATEGIES];
  // Beside the halo: the best of the others, and how many times the halo's time the layer takes
  // with it (communication alone, where nothing is known of attention; 0: neither takes any).
  enum swathe_strategy best;
  double ratio;
};
enum cli_exit cli_paper_make(const struct swathe_problem *problem,
                             const struct swathe_sharding *sharding,
                             const struct cli_paper_cluster *cluster, struct cli_paper *paper);

// Attention, if it is known, and the exposed communication of both passes.
double cli_paper_total_us(const struct cli_paper *paper, const struct cli_paper_row *row);
// Whether the best of the others takes noticeably longer than the halo.
bool cli_paper_matters(const struct cli_paper *paper);

#endif
