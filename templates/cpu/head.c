// $(KERNEL): $(SUMMARY)
// Made from $(SOURCES); change those, not this.  To make it again:
//   $(COMMAND)
// Costs: $(COSTS).

enum {
//@ for _, constant in ipairs(CONSTANTS) do
  $(constant.name) = $(constant.value),  // $(constant.note)
//@ end
};

