// launch.h: a whole launch over the processors of the machine.
#ifndef EMULATOR_LAUNCH_H
#define EMULATOR_LAUNCH_H
#include "code.h"

struct launch_request {
  const struct code *code;
  uint32_t grid[3], threads[3];
  uint32_t dynamic_shared_bytes;
  unsigned char *params;       // as many bytes as the kernel has
  int device;
};

// Of all launches so far; `what` as emulator_count has it.
uint64_t launch_count(const char *what);

// Runs all blocks, in an order that the seed gives; 0, or a CUresult whose words were printed.
// `peers`: a bit for each device whose memory may be touched as well.
int launch_run(const struct launch_request *request, uint64_t peers, uint64_t seed, bool watch);

#endif
