// report.c: aligned tables, numbers with units and JSON.  See report.h.
#include "report.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

struct cli_text cli_report_size(int64_t bytes)
{
  static const char *const units[] = { "KiB", "MiB", "GiB", "TiB", "PiB", "EiB" };
  struct cli_text text;
  double value = (double)bytes / 1024;
  int unit = 0;

  if (bytes < 1024) {
    snprintf(text.text, sizeof text.text, "%" PRId64 " B", bytes);
    return text;
  }
  for (; value >= 1024 && unit < 5; unit++) value /= 1024;
  snprintf(text.text, sizeof text.text, "%.1f %s", value, units[unit]);
  return text;
}

struct cli_text cli_report_bytes(int64_t bytes)
{
  struct cli_text text;
  if (bytes < 1024) snprintf(text.text, sizeof text.text, "%" PRId64, bytes);
  else
    snprintf(text.text, sizeof text.text, "%" PRId64 " (%.24s)", bytes,
             cli_report_size(bytes).text);
  return text;
}

struct cli_text cli_report_time(double us)
{
  struct cli_text text;
  if (us < 1e3) snprintf(text.text, sizeof text.text, "%.1f us", us);
  else if (us < 1e6) snprintf(text.text, sizeof text.text, "%.2f ms", us / 1e3);
  else snprintf(text.text, sizeof text.text, "%.2f s", us / 1e6);
  return text;
}

struct cli_text cli_report_number(int decimals, double value)
{
  struct cli_text text;
  snprintf(text.text, sizeof text.text, "%.*f", decimals, value);
  return text;
}

int cli_report_utf8(const char *text)
{
  static const uint32_t least[] = { 0, 0x20, 0xa0, 0x800, 0x10000 };  // by length
  const unsigned char first = (unsigned char)*text;
  const int length = first < 0x80 ? 1 : first < 0xc0 ? 0 : first < 0xe0 ? 2 : first < 0xf0 ? 3
                     : first < 0xf8 ? 4 : 0;
  uint32_t code = length < 2 ? first : first & (0x7fu >> length);

  for (int i = 1; i < length; i++) {
    if (((unsigned char)text[i] & 0xc0) != 0x80) return 0;
    code = code << 6 | ((unsigned char)text[i] & 0x3f);
  }
  const bool surrogate = code >= 0xd800 && code < 0xe000;
  const bool turns = (code >= 0x202a && code <= 0x202e) || (code >= 0x2066 && code <= 0x2069);
  const bool fine = code >= least[length] && code != 0x7f && code <= 0x10ffff;
  return fine && !surrogate && !turns ? length : 0;
}

// Columns of the terminal that stdout is; INT_MAX: it is none.
static int terminal_columns(void)
{
  struct winsize size;
  if (!isatty(STDOUT_FILENO)) return INT_MAX;
  return ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) || size.ws_col < 40 ? 80 : size.ws_col;
}

// A character of several bytes takes one column here, which is right for what machines write.
void cli_report_wrapped(int at, int column, const char *text)
{
  const int columns = terminal_columns();

  while (*text) {
    size_t bytes = 0;
    int width = 0;
    while (text[bytes]) {  // up to the next place to break
      const int length = cli_report_utf8(text + bytes);
      const char last = text[bytes];
      bytes += (size_t)(length ? length : 1);
      width++;
      if (last == ',' || last == ' ' || last == '\n') break;
    }
    const bool blank = bytes && (text[bytes - 1] == ' ' || text[bytes - 1] == '\n');
    if (at > column && at + width - blank > columns) {
      printf("\n%*s", column, "");
      at = column;
    }
    for (size_t i = 0; i < bytes;) {
      const int length = cli_report_utf8(text + i);
      if (length) fwrite(text + i, 1, (size_t)length, stdout);
      else putchar(text[i] == '\n' ? ' ' : '?');
      i += (size_t)(length ? length : 1);
    }
    at += width;
    text += bytes;
  }
  putchar('\n');
}

enum cli_exit cli_report_file(const char *path, const char *text, size_t size)
{
  char *temporary = NULL;
  if (asprintf(&temporary, "%s.%ld.tmp", path, (long)getpid()) < 0)
    return cli_fail(CLI_FAILED, "out of memory");

  FILE *file = fopen(temporary, "wb");
  bool written = file && fwrite(text, 1, size, file) == size;
  if (file && fclose(file)) written = false;
  if (written && rename(temporary, path)) written = false;
  const int reason = errno;
  if (!written) unlink(temporary);
  free(temporary);
  return written ? CLI_OK
                 : cli_fail(CLI_FAILED, "%s cannot be written: %s", path, strerror(reason));
}

// ---- Tables -------------------------------------------------------------------------------------

// A cell that memory does not suffice for is shown as "?".
void cli_report_cell(struct cli_table *table, const char *format, ...)
{
  if (table->count == table->capacity) {
    const size_t capacity = table->capacity ? 2 * table->capacity : 64;
    char **cells = realloc(table->cells, capacity * sizeof *cells);
    if (!cells) return;
    table->cells = cells;
    table->capacity = capacity;
  }
  char *cell = NULL;
  va_list args;
  va_start(args, format);
  if (vasprintf(&cell, format, args) < 0) cell = NULL;
  va_end(args);
  table->cells[table->count++] = cell;
}

static const char *cell_text(const struct cli_table *table, size_t index)
{
  return table->cells[index] ? table->cells[index] : "?";
}

// The last column is never padded, so that no line ends in blanks.
void cli_report_table(struct cli_table *table)
{
  enum { MOST_COLUMNS = 16 };
  const size_t columns = strlen(table->align);
  int widths[MOST_COLUMNS] = { 0 };

  for (size_t i = 0; i < table->count; i++) {
    const int width = (int)strlen(cell_text(table, i));
    int *widest = &widths[i % columns % MOST_COLUMNS];
    if (width > *widest) *widest = width;
  }
  for (size_t i = 0; i < table->count; i++) {
    const size_t column = i % columns;
    const int width = widths[column % MOST_COLUMNS];
    const bool last = column + 1 == columns;
    if (column) fputs("  ", stdout);
    if (table->align[column] == 'r') printf("%*s", width, cell_text(table, i));
    else printf("%-*s", last ? 0 : width, cell_text(table, i));
    if (last) putchar('\n');
  }
  cli_report_drop(table);
}

void cli_report_drop(struct cli_table *table)
{
  for (size_t i = 0; i < table->count; i++) free(table->cells[i]);
  free(table->cells);
  *table = (struct cli_table){ .align = table->align };
}

// ---- JSON ---------------------------------------------------------------------------------------

const char *cli_report_problem_text(const struct swathe_problem *problem)
{
  static _Thread_local char text[1024];
  swathe_problem_format(problem, text, sizeof text);
  return text;
}

static struct cli_text window_words(int64_t window)
{
  struct cli_text text = { "all" };
  if (window != SWATHE_UNLIMITED) snprintf(text.text, sizeof text.text, "%" PRId64, window);
  return text;
}

const char *cli_report_problem_words(const struct swathe_problem *p)
{
  static _Thread_local char text[512];
  char dims[48], softcap[48] = "", scale[48] = "", home[48] = "";

  snprintf(dims, sizeof dims, "dim %" PRId32, p->head_dim_qk);
  if (p->head_dim_qk != p->head_dim_v)
    snprintf(dims, sizeof dims, "dims %" PRId32 " (q, k) and %" PRId32 " (v)", p->head_dim_qk,
             p->head_dim_v);
  if (p->softcap > 0) snprintf(softcap, sizeof softcap, ", softcap %g", p->softcap);
  if (p->scale != 0) snprintf(scale, sizeof scale, ", scale %g", p->scale);
  if (p->halo_gradient != SWATHE_F32)
    snprintf(home, sizeof home, ", gradients home in %s", swathe_dtype_name(p->halo_gradient));
  snprintf(text, sizeof text,
           "%" PRId32 " query and %" PRId32
           " key heads, %s, window %s before and %s after, %s%s%s%s%s",
           p->q_heads, p->kv_heads, dims, window_words(p->window_left).text,
           window_words(p->window_right).text, swathe_dtype_name(p->dtype),
           p->sinks ? ", sinks" : "", softcap, scale, home);
  return text;
}

struct cli_text cli_report_group(const struct swathe_problem *p)
{
  struct cli_text text;
  snprintf(text.text, sizeof text.text, "%" PRId64 " tokens a rank, %" PRId32 " rank%s, %s, %s",
           p->tokens_per_rank, p->ranks, p->ranks == 1 ? "" : "s", swathe_layout_name(p->layout),
           swathe_target_name(p->target));
  return text;
}

json_t *cli_report_real(double value)
{
  return isfinite(value) ? json_real(value) : json_null();
}

json_t *cli_report_string(const char *text)
{
  char *clean = malloc(3 * strlen(text) + 1);
  size_t used = 0;

  if (!clean) return NULL;
  while (*text) {
    const int length = cli_report_utf8(text);
    const bool keep = length || *text == '\n';
    const size_t bytes = keep ? (size_t)(length ? length : 1) : 3;
    memcpy(clean + used, keep ? text : "\xef\xbf\xbd", bytes);
    used += bytes;
    text += length ? length : 1;
  }
  clean[used] = 0;
  json_t *string = json_string(clean);
  free(clean);
  return string;
}

static json_t *window_json(int64_t window)
{
  return window == SWATHE_UNLIMITED ? json_string("unlimited") : json_integer(window);
}

json_t *cli_report_problem(const struct swathe_problem *p)
{
  return json_pack(
      "{s:i, s:i, s:i, s:i, s:o, s:o, s:s, s:b, s:o, s:o, s:s, s:s, s:s, s:i, s:I, s:s}", "q_heads",
      p->q_heads, "kv_heads", p->kv_heads, "head_dim_qk", p->head_dim_qk, "head_dim_v",
      p->head_dim_v, "window_left", window_json(p->window_left), "window_right",
      window_json(p->window_right), "dtype", swathe_dtype_name(p->dtype), "sinks", p->sinks,
      "softcap", cli_report_real(p->softcap), "scale", cli_report_real(p->scale), "halo_gradient",
      swathe_dtype_name(p->halo_gradient), "target", swathe_target_name(p->target), "layout",
      swathe_layout_name(p->layout), "ranks", p->ranks, "tokens_per_rank",
      (json_int_t)p->tokens_per_rank, "text", cli_report_problem_text(p));
}

static bool document_printed;

enum cli_exit cli_report_json(json_t *document, enum cli_exit code)
{
  if (!document) return cli_fail(CLI_FAILED, "the result cannot be written as JSON");
  const int failed = json_dumpf(document, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(9));
  json_decref(document);
  document_printed = true;
  putchar('\n');
  return failed ? cli_fail(CLI_FAILED, "stdout could not be written") : code;
}

void cli_report_json_failure(const char *verb, enum cli_exit code, const char *words)
{
  if (document_printed) return;
  (void)cli_report_json(
      json_pack("{s:s, s:s, s:i}", "verb", verb, "error", words, "exit", (int)code), code);
}
