// embedded.h: texts built into the library by generator/embed.cmake.  Whoever includes this asks for one table.
#ifndef SW_EMBEDDED_H
#define SW_EMBEDDED_H

#include <stddef.h>

struct sw_embedded {
  const char *name;  // path below the top of the sources, "generator/emit.lua"; NULL ends the table
  const char *text;
  size_t bytes;
};

// Every generator/*.lua and everything in templates/.
extern const struct sw_embedded sw_embedded_generator[];

#endif
