// chart.c: draws a history as SVG.  See chart.h.  Lengths are in units of the drawing, which
// templates/report.html scales; y points down, times are ratios to the default on a log scale.
#include "chart.h"

#include "report.h"

#include <math.h>
#include <string.h>
#include <time.h>

enum {
  LEFT = 62,
  RIGHT = 748,  // of the plot; templates/report.html knows them too
  TOP = 20,
  BOTTOM = 220,  // of the times; lanes of those without a time stand below
  LANE = 18,
  TICK_GAP = 20,
  LABEL_GAP = 150,
  MARK_GAP = 6,
  MOST_STEPS = 400,  // corners of the line
};
static const double least_ratio = 1. / 64, most_ratio = 4;  // that a scale shows
static const double pause_s = 600;                          // longer without a sample: a mark

struct scale {
  int64_t count;
  double log_low, log_high;     // ratios at the bottom and the top
  int lane[CLI_VERDICT_COUNT];  // y of the lane; 0: none
  int height;
};

static struct cli_text number(double value) { return cli_report_number(1, value); }

static double x_of(const struct scale *scale, int64_t index)
{
  return LEFT + ((double)index + 0.5) * (RIGHT - LEFT) / (double)scale->count;
}

static double y_of(const struct scale *scale, double ratio)
{
  const double at = (scale->log_high - log(ratio)) / (scale->log_high - scale->log_low);
  return TOP + fmin(fmax(at, 0), 1) * (BOTTOM - TOP);
}

static struct scale make_scale(const struct cli_history *history)
{
  double low = 0.95, high = 1.1;
  struct scale scale = { .count = history->count, .height = BOTTOM };

  for (int64_t i = 0; i < history->count; i++) {
    const double ratio = history->samples[i].ratio;
    if (ratio > 0 && ratio * 0.97 < low) low = ratio * 0.97;
    if (ratio * 1.03 > high) high = ratio * 1.03;
  }
  scale.log_low = log(fmax(low, least_ratio));
  scale.log_high = log(fmin(high, most_ratio));
  for (int v = CLI_RIGHT + 1; v < CLI_VERDICT_COUNT; v++)
    if (history->verdicts[v]) scale.lane[v] = scale.height += LANE;
  return scale;
}

// ---- Axes ---------------------------------------------------------------------------------------

// The most telling ratios first; those too near to one that is there already are left out.
static void put_ratios(struct cli_page *page, const struct scale *scale)
{
  static const double wanted[] = { 1,    0.5, 2,   4,   0.25, 0.8,  1.5,  3,    0.7, 0.1,
                                   0.05, 0.9, 1.2, 0.6, 1.1,  0.95, 1.05, 0.02, 0.4, 0.3 };
  enum { WANTED = sizeof wanted / sizeof wanted[0] };
  double taken[WANTED];
  int count = 0;

  for (int i = 0; i < WANTED; i++) {
    const double y = y_of(scale, wanted[i]);
    bool fits = log(wanted[i]) >= scale->log_low && log(wanted[i]) <= scale->log_high;
    for (int t = 0; t < count; t++) fits = fits && fabs(taken[t] - y) >= TICK_GAP;
    if (!fits) continue;
    taken[count++] = y;
    cli_page_put(page, "chart_ratio", "y", number(y).text, "ratio",
                 cli_report_number(2, wanted[i]).text, NULL);
  }
}

static void put_lanes(struct cli_page *page, const struct scale *scale)
{
  for (int v = CLI_RIGHT + 1; v < CLI_VERDICT_COUNT; v++)
    if (scale->lane[v])
      cli_page_put(page, "chart_lane", "y", number(scale->lane[v]).text, "verdict",
                   cli_history_verdict_name((enum cli_verdict)v), NULL);
}

// Numbers of samples below the plot: round ones, at most about eight.
static void put_numbers(struct cli_page *page, const struct scale *scale)
{
  static const int round_steps[] = { 1, 2, 5 };
  const struct cli_text below = number(scale->height + LANE);
  int64_t step = 1;

  for (int64_t i = 0, ten = 1; scale->count / step > 8; i++) {
    if (i && i % 3 == 0) ten *= 10;
    step = ten * round_steps[i % 3];
  }
  for (int64_t sample = step; sample <= scale->count; sample += step)
    cli_page_put(page, "chart_number", "x", number(x_of(scale, sample - 1)).text, "y", below.text,
                 "number", cli_report_number(0, (double)sample).text, NULL);
}

static double seconds(const char *when)
{
  struct tm time = { 0 };
  return strptime(when, "%Y-%m-%dT%H:%M:%SZ", &time) ? (double)timegm(&time) : 0;
}

// Where tuning stopped and went on later, with the time it went on.
static void put_pauses(struct cli_page *page, const struct cli_history *history,
                       const struct scale *scale)
{
  double mark_x = LEFT, label_x = -LABEL_GAP;

  for (int64_t i = 1; i < history->count; i++) {
    const char *when = history->samples[i].when;
    const double x = x_of(scale, i) - 0.5 * (RIGHT - LEFT) / (double)scale->count;
    if (seconds(when) - seconds(history->samples[i - 1].when) < pause_s || x - mark_x < MARK_GAP)
      continue;
    const bool room = x - label_x >= LABEL_GAP && x < RIGHT - LABEL_GAP;
    cli_page_put(page, "chart_pause", "x", number(x).text, "height", number(scale->height).text,
                 "when", room ? when : "", NULL);
    mark_x = x;
    if (room) label_x = x;
  }
}

// ---- Samples ------------------------------------------------------------------------------------

static bool leads(const struct cli_history *history, int64_t i)
{
  const double before = i ? history->samples[i - 1].best : 0;
  return history->samples[i].best > 0 && (before == 0 || history->samples[i].best < before);
}

static void put_dot(struct cli_page *page, const struct cli_history *history,
                    const struct scale *scale, int64_t i)
{
  const struct cli_history_sample *sample = &history->samples[i];
  const char *verdict = cli_history_verdict_name(sample->verdict);
  const bool timed = sample->verdict == CLI_RIGHT;
  const double y = timed ? y_of(scale, sample->ratio) : scale->lane[sample->verdict];
  const struct cli_text time = cli_report_time(sample->median_us);
  char words[128];

  if (timed)
    snprintf(words, sizeof words, "%s, %.3f of the default%s", time.text, sample->ratio,
             sample->noisy ? ", noisy" : "");
  else snprintf(words, sizeof words, "%s", verdict);
  cli_page_put(page, sample->noisy ? "chart_dot_noisy" : "chart_dot", "verdict", verdict, "x",
               number(x_of(scale, i)).text, "y", number(y).text, "number",
               cli_report_number(0, (double)i + 1).text, "words", words, "config", sample->config,
               "when", sample->when, NULL);
}

static void put_dots(struct cli_page *page, struct cli_chart *chart, const struct scale *scale)
{
  const struct cli_history *history = chart->history;
  const int64_t stride = (history->count + chart->most_dots - 1) / chart->most_dots;
  int64_t leaders = 0;

  for (int64_t i = 0; i < history->count; i++) {
    const struct cli_history_sample *sample = &history->samples[i];
    const bool lead = leads(history, i) && leaders++ < chart->most_dots / 4;
    if (i % stride && !lead) continue;
    put_dot(page, history, scale, i);
    chart->drawn++;
    chart->beyond += sample->verdict == CLI_RIGHT &&
                     (log(sample->ratio) > scale->log_high || log(sample->ratio) < scale->log_low);
  }
}

// Steps: it holds until a sample changes it.
static void put_best(struct cli_page *page, const struct cli_history *history,
                     const struct scale *scale)
{
  int64_t changes = 0, seen = 0, first = -1;

  for (int64_t i = 0; i < history->count; i++) {
    if (history->samples[i].best > 0 && first < 0) first = i;
    changes += i && history->samples[i].best != history->samples[i - 1].best;
  }
  if (first < 0) return;
  const int64_t stride = changes / MOST_STEPS + 1;
  cli_page_put(page, "chart_best", "x", number(x_of(scale, first)).text, "y",
               number(y_of(scale, history->samples[first].best)).text, NULL);
  for (int64_t i = first + 1; i < history->count; i++) {
    const double best = history->samples[i].best;
    const bool changed = best != history->samples[i - 1].best;
    if (best > 0 && (i + 1 == history->count || (changed && seen++ % stride == 0)))
      cli_page_put(page, "chart_best_step", "x", number(x_of(scale, i)).text, "y",
                   number(y_of(scale, best)).text, NULL);
  }
  cli_page_put(page, "chart_best_end", NULL);
}

// A ring around the newest sample of what layers use.
static void put_pick(struct cli_page *page, const struct cli_chart *chart,
                     const struct scale *scale)
{
  const struct cli_history *history = chart->history;
  for (int64_t r = 0; chart->pick && r < history->ranked; r++) {
    const int64_t i = history->ranking[r];
    if (strcmp(history->samples[i].config, chart->pick)) continue;
    cli_page_put(page, "chart_pick", "x", number(x_of(scale, i)).text, "y",
                 number(y_of(scale, history->samples[i].ratio)).text, NULL);
  }
}

void cli_chart_put(struct cli_page *page, struct cli_chart *chart)
{
  const struct cli_history *history = chart->history;
  const struct scale scale = make_scale(history);

  chart->drawn = chart->beyond = 0;
  cli_page_put(page, "chart", "kernel", history->kernel, "height",
               number(scale.height + 3 * LANE).text, NULL);
  put_ratios(page, &scale);
  put_lanes(page, &scale);
  put_numbers(page, &scale);
  put_pauses(page, history, &scale);
  cli_page_put(page, "chart_default", "y", number(y_of(&scale, 1)).text, NULL);
  put_dots(page, chart, &scale);
  put_best(page, history, &scale);
  put_pick(page, chart, &scale);
  cli_page_put(page, "chart_end", "below", number(scale.height + 2 * LANE).text, NULL);
}
