// $(KERNEL): $(SUMMARY)
// Made from $(SOURCES); change those, not this.  To make it again:
//   $(COMMAND)
// Costs: $(COSTS).

// NVRTC has no name of its own for the type that kernel_abi.h counts in.
#ifndef __INT64_TYPE__
#define __INT64_TYPE__ long long
#endif

enum {
//@ for _, constant in ipairs(CONSTANTS) do
  $(constant.name) = $(constant.value),  // $(constant.note)
//@ end
};

