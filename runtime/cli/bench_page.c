// bench_page.c: a bench as a page with a picture: a bar per strategy for the bytes a rank receives,
// for its time, computing and exposed communication apart, and for its memory.  Markup stands in
// templates/bench.html; lengths are in units of the drawing, y points down.
#include "bench.h"

#include "report.h"

#include <inttypes.h>
#include <math.h>

enum { LEFT = 96, WIDTH = 440, TITLE = 30, ROW = 24, BAR = 16, GAP = 6, BELOW = 14 };

static struct cli_text number(double value) { return cli_report_number(1, value); }

// "12.3x", or nothing where there is no halo to compare with.
static struct cli_text times(double value, double halo)
{
  struct cli_text text = { "" };
  if (value > 0 && halo > 0) snprintf(text.text, sizeof text.text, "%.2fx", value / halo);
  return text;
}

static const struct cli_bench_row *halo_row(const struct cli_bench *bench)
{
  for (int i = 0; i < bench->count; i++)
    if (bench->rows[i].contestant->strategy == SWATHE_HALO) return &bench->rows[i];
  return NULL;
}

// ---- The picture --------------------------------------------------------------------------------

enum measure { BYTES, TIME, MEMORY, MEASURES };

static const char *const titles[MEASURES] = {
  [BYTES] = "Bytes a rank receives (log scale, a line at every power of ten)",
  [TIME] = "Time of the slowest rank: computing, and on top of it exposed communication",
  [MEMORY] = "Memory of a rank's layer beside its tensors (log scale, lines as above)",
};

static double value_of(const struct cli_bench_row *row, enum measure measure)
{
  switch (measure) {
  case BYTES: return (double)row->received_bytes;
  case TIME: return fmax(row->total_us, row->compute_us);
  default: return (double)row->contestant->memory_bytes;
  }
}

static struct cli_text words_of(const struct cli_bench_row *row, enum measure measure)
{
  struct cli_text text;
  if (measure != TIME) return cli_report_size((int64_t)value_of(row, measure));
  const struct cli_text all = cli_report_time(row->total_us);
  const struct cli_text exposed = cli_report_time(fmax(row->exposed_us, 0));
  snprintf(text.text, sizeof text.text, "%.20s, exposed %.20s", all.text, exposed.text);
  return text;
}

// Largest value, and on a log scale the power of ten below the smallest.
struct scale {
  double low, high;
};

static struct scale scale_of(const struct cli_bench *bench, enum measure measure)
{
  struct scale scale = { 0, 0 };
  double least = INFINITY;
  for (int i = 0; i < bench->count; i++) {
    const double value = value_of(&bench->rows[i], measure);
    if (value > scale.high) scale.high = value;
    if (value > 0 && value < least) least = value;
  }
  if (measure != TIME && isfinite(least)) scale.low = pow(10, floor(log10(least) - 0.3));
  return scale;
}

static double width_of(const struct scale *scale, double value)
{
  if (!(value > 0)) return 0;
  if (scale->low > 0)
    return WIDTH * log(value / scale->low) / log(scale->high / scale->low);
  return WIDTH * value / scale->high;
}

static void put_bar(struct cli_page *page, const struct cli_bench_row *row, enum measure measure,
                    const struct scale *scale, int y)
{
  const double value = value_of(row, measure), whole = width_of(scale, value);
  const bool time = measure == TIME;
  const double computing = time ? width_of(scale, fmin(row->compute_us, value)) : whole;
  const struct cli_text words = words_of(row, measure);
  const char *strategy = swathe_strategy_name(row->contestant->strategy);

  cli_page_put(page, time ? "bench_bar_time" : "bench_bar", "strategy", strategy, "x",
               number(LEFT).text, "y", number(y).text, "middle", number(y + BAR / 2).text, "height",
               number(BAR).text, "width", number(computing).text, "x_exposed",
               number(LEFT + computing).text, "exposed", number(whole - computing).text, "x_words",
               number(LEFT + whole + GAP).text, "words", words.text, NULL);
}

// A line at every power of ten that a log scale shows.
static void put_lines(struct cli_page *page, const struct cli_bench *bench,
                      const struct scale *scale, int y)
{
  if (!(scale->low > 0)) return;
  for (double ten = pow(10, ceil(log10(scale->low))); ten <= scale->high; ten *= 10)
    cli_page_put(page, "bench_line", "x", number(LEFT + width_of(scale, ten)).text, "top",
                 number(y - 2).text, "bottom", number(y + ROW * bench->count).text, NULL);
}

static void put_picture(struct cli_page *page, const struct cli_bench *bench)
{
  const int panel = TITLE + ROW * bench->count + BELOW;

  cli_page_put(page, "bench_picture", "height", number(MEASURES * panel).text, NULL);
  for (int m = 0; m < MEASURES; m++) {
    const struct scale scale = scale_of(bench, (enum measure)m);
    cli_page_put(page, "bench_panel", "y", number(m * panel + TITLE - 10).text, "title", titles[m],
                 NULL);
    put_lines(page, bench, &scale, m * panel + TITLE);
    for (int i = 0; i < bench->count; i++)
      put_bar(page, &bench->rows[i], (enum measure)m, &scale, m * panel + TITLE + ROW * i);
  }
  cli_page_put(page, "bench_picture_end", NULL);
}

// ---- The table ----------------------------------------------------------------------------------

static void put_rows(struct cli_page *page, const struct cli_bench *bench)
{
  const struct cli_bench_row *halo = halo_row(bench);
  const bool backward = bench->contest->backward;

  for (int i = 0; i < bench->count; i++) {
    const struct cli_bench_row *row = &bench->rows[i];
    cli_page_put(
        page, "bench_row", "strategy", swathe_strategy_name(row->contestant->strategy), "bytes",
        cli_report_size(row->received_bytes).text, "bytes_ratio",
        times((double)row->received_bytes, halo ? (double)halo->received_bytes : 0).text, "memory",
        cli_report_size(row->contestant->memory_bytes).text, "forward",
        cli_report_time(row->us[0]).text, "backward",
        backward ? cli_report_time(row->us[1]).text : "", "exposed",
        cli_report_time(fmax(row->exposed_us, 0)).text, "time_ratio",
        times(row->total_us, halo ? halo->total_us : 0).text, NULL);
  }
  for (int c = 0; c < bench->contest->count; c++) {
    const struct cli_contestant *contestant = &bench->contest->contestants[c];
    if (*contestant->refused)
      cli_page_put(page, "bench_refused", "strategy", swathe_strategy_name(contestant->strategy),
                   "words", contestant->refused, NULL);
  }
}

void cli_bench_page(struct cli_page *page, const struct cli_bench *bench)
{
  const struct cli_given *given = bench->contest->given;
  char sequence[256];

  snprintf(sequence, sizeof sequence,
           "%" PRId64 " tokens, batch %" PRId32 ", %s over %" PRId32 " ranks by %s; medians of %"
           PRId64 " rounds",
           given->sharding.tokens, given->sharding.batch, swathe_layout_name(given->problem.layout),
           given->sharding.ranks, bench->transport, bench->contest->rounds);
  cli_page_put(page, "bench_page", "version", SWATHE_VERSION, "problem",
               cli_report_problem_words(&given->problem), "sequence", sequence, "passes",
               bench->contest->backward ? "forward and backward" : "forward", NULL);
  put_picture(page, bench);
  cli_page_put(page, "bench_table", NULL);
  put_rows(page, bench);
  cli_page_put(page, "bench_end", NULL);
}
