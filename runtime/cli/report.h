// report.h: how verbs print: aligned tables, bytes with a human unit, one JSON document.
#ifndef CLI_REPORT_H
#define CLI_REPORT_H

#include "args.h"

#include <jansson.h>
#include <stdio.h>

// "260096 (254.0 KiB)", or the number alone below 1 KiB.
struct cli_text { char text[64]; };
struct cli_text cli_report_bytes(int64_t bytes);
// The human unit alone: "254.0 KiB", "812 B".
struct cli_text cli_report_size(int64_t bytes);
// "812 us", "1.2 ms", "3.4 s".
struct cli_text cli_report_time(double us);
struct cli_text cli_report_number(int decimals, double value);

// Bytes of the character at `text` if it is UTF-8 and neither controls a terminal nor turns the
// direction of writing; else 0.  A text of the database may hold anything.
int cli_report_utf8(const char *text);

// Prints a text and ends the line; the cursor stands at column `at`.  On a terminal it is broken
// behind commas and blanks, each further line indented to `column`; a file gets it in one line.
void cli_report_wrapped(int at, int column, const char *text);

// Writes through a temporary name, so that the file is never half of the text.
enum cli_exit cli_report_file(const char *path, const char *text, size_t size);

// A table whose columns fit their cells.  `align` has a letter per column: l or r.  Cells are added
// in reading order; printing frees them.
struct cli_table {
  const char *align;
  char **cells;
  size_t count, capacity;
};
void cli_report_cell(struct cli_table *table, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
void cli_report_table(struct cli_table *table);
// Frees the cells without printing them.
void cli_report_drop(struct cli_table *table);

// A problem in words: "64 query and 8 key heads, dim 64, window 127 before and 0 after, bf16,
// sinks".
const char *cli_report_problem_words(const struct swathe_problem *problem);
// The rest of it: "4096 tokens a rank, 8 ranks, contiguous, cpu".
struct cli_text cli_report_group(const struct swathe_problem *problem);
// A problem: its fields by name, windows as numbers or "unlimited".
json_t *cli_report_problem(const struct swathe_problem *problem);
// The same as canonical text.  Both texts live until the thread's next call of the same name.
const char *cli_report_problem_text(const struct swathe_problem *problem);
// A text of the database: what is not printable UTF-8 becomes U+FFFD, as JSON has only UTF-8.
json_t *cli_report_string(const char *text);
// A number, or null where JSON has none (NaN, infinities).
json_t *cli_report_real(double value);

// Prints the document to stdout and lets go of it.  Returns `code`, or CLI_FAILED if it could not
// be made.
enum cli_exit cli_report_json(json_t *document, enum cli_exit code);
// The document of a failure, unless one was printed already: stdout holds exactly one.
void cli_report_json_failure(const char *verb, enum cli_exit code, const char *words);

#endif
