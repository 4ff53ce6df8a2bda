// page.c: puts pieces of templates/*.html together.  See page.h.
#include "page.h"

#include "report.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

// Made by scripts/embed.cmake.
struct sw_embedded {
  const char *name;
  const char *text;
  size_t size;
};
extern const struct sw_embedded cli_page_texts[];

static const char mark[] = "<!--@ ";

// A piece of a template without its last line break; NULL if there is no such piece.
static const char *find_piece_in(const struct sw_embedded *text, const char *name, size_t *size)
{
  const size_t length = strlen(name);
  const char *at = text->text, *end = at + text->size;

  while ((at = memmem(at, (size_t)(end - at), mark, sizeof mark - 1))) {
    at += sizeof mark - 1;
    if ((size_t)(end - at) < length + 5 || memcmp(at, name, length) ||
        memcmp(at + length, " -->\n", 5))
      continue;
    at += length + 5;
    const char *next = memmem(at, (size_t)(end - at), mark, sizeof mark - 1);
    *size = (size_t)((next ? next : end) - at) - 1;
    return at;
  }
  return NULL;
}

static const char *find_piece(const char *name, size_t *size)
{
  const char *piece = NULL;
  for (const struct sw_embedded *text = cli_page_texts; text->name && !piece; text++)
    piece = find_piece_in(text, name, size);
  return piece;
}

enum cli_exit cli_page_begin(struct cli_page *page)
{
  *page = (struct cli_page){ 0 };
  page->file = open_memstream(&page->text, &page->size);
  return page->file ? CLI_OK : cli_fail(CLI_FAILED, "out of memory for the page");
}

// As text of an element or of a quoted attribute.  What is not printable becomes U+FFFD.
static void put_escaped(FILE *file, const char *text)
{
  while (*text) {
    const int length = cli_report_utf8(text);
    if (*text == '&') fputs("&amp;", file);
    else if (*text == '<') fputs("&lt;", file);
    else if (*text == '>') fputs("&gt;", file);
    else if (*text == '"') fputs("&quot;", file);
    else if (*text == '\'') fputs("&#39;", file);
    else if (length || *text == '\n') fwrite(text, 1, (size_t)(length ? length : 1), file);
    else fputs("\xef\xbf\xbd", file);
    text += length ? length : 1;
  }
}

// The value called by the first `length` bytes of `name`; NULL if there is none.
static const char *find_value(va_list values, const char *name, size_t length)
{
  va_list at;
  const char *given, *found = NULL;

  va_copy(at, values);
  while (!found && (given = va_arg(at, const char *))) {
    const char *value = va_arg(at, const char *);
    if (strlen(given) == length && !memcmp(given, name, length)) found = value;
  }
  va_end(at);
  return found;
}

void cli_page_put(struct cli_page *page, const char *piece, ...)
{
  size_t size = 0;
  const char *at = find_piece(piece, &size), *end = at ? at + size : NULL;
  va_list values;

  if (!at) page->failed = true;
  va_start(values, piece);
  while (at && at < end) {
    const char *splice = memmem(at, (size_t)(end - at), "$(", 2);
    const char *close = splice ? memchr(splice, ')', (size_t)(end - splice)) : NULL;
    fwrite(at, 1, (size_t)((close ? splice : end) - at), page->file);
    if (!close) break;
    const char *value = find_value(values, splice + 2, (size_t)(close - splice - 2));
    if (value) put_escaped(page->file, value);
    else page->failed = true;
    at = close + 1;
  }
  va_end(values);
  if (fflush(page->file)) page->failed = true;
}

void cli_page_join(struct cli_page *page, const struct cli_page *other)
{
  if (fwrite(other->text, 1, other->size, page->file) != other->size) page->failed = true;
  page->failed |= other->failed;
}

enum cli_exit cli_page_end(struct cli_page *page)
{
  if (fflush(page->file)) page->failed = true;
  return page->failed ? cli_fail(CLI_FAILED, "the page could not be put together") : CLI_OK;
}

void cli_page_free(struct cli_page *page)
{
  if (page->file) fclose(page->file);
  free(page->text);
  *page = (struct cli_page){ 0 };
}
