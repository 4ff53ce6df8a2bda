// page.h: one HTML page from the pieces of templates/*.html.  All markup stands in the templates,
// and every value is escaped on its way in: a text of a shared database can say anything and change
// nothing.
//
// The template is pieces.  A line "<!--@ NAME -->" begins one, the line break before the next such
// line ends it; $(name) in it is a value's place.
#ifndef CLI_PAGE_H
#define CLI_PAGE_H

#include "fail.h"

#include <stdio.h>

// Text that grows.  `failed`: memory was short, or a piece and its values do not fit together.
struct cli_page {
  FILE *file;
  char *text;
  size_t size;  // of what was put so far
  bool failed;
};
enum cli_exit cli_page_begin(struct cli_page *page);
// Appends a piece.  The values are pairs of texts, a name and what it stands for, ended by NULL.
void cli_page_put(struct cli_page *page, const char *piece, ...) __attribute__((sentinel));
// Appends the other page as it stands.
void cli_page_join(struct cli_page *page, const struct cli_page *other);
// Makes `text` and `size` whole.  Words if anything failed.
enum cli_exit cli_page_end(struct cli_page *page);
// A zeroed page is fine.
void cli_page_free(struct cli_page *page);

#endif
