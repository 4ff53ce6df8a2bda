// progress.c: draws tuning progress.  See progress.h.
#include "progress.h"

#include <inttypes.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

static const double redraw_s = 0.1;  // on a terminal
static const double line_s = 5;      // elsewhere

void cli_progress_begin(struct cli_progress *progress, FILE *file)
{
  *progress = (struct cli_progress){ .file = file, .drawn_s = -line_s };
  progress->terminal = isatty(fileno(file)) == 1;
}

static int terminal_columns(FILE *file)
{
  struct winsize size;
  if (ioctl(fileno(file), TIOCGWINSZ, &size) || size.ws_col < 20) return 80;
  return size.ws_col;
}

// How far the direction is, by what comes first: the candidates' end or the budget's.
static double fraction_done(const struct swathe_progress *now)
{
  const double whole = now->elapsed_s + now->left_s;
  return whole > 0 ? now->elapsed_s / whole : 0;
}

// "forward 42 of 310, 0:31 left, best 0.81 of default".  The candidates' count is an upper bound.
static void describe(const struct swathe_progress *now, char *text, size_t size)
{
  const int left_s = (int)(now->left_s + 0.5);
  const char *name = now->direction == SWATHE_BACKWARD ? "backward" : "forward";
  const int used = snprintf(text, size, "%s %" PRId64 " of %" PRId64 " tried, %d:%02d left", name,
                            now->tried, now->total, left_s / 60, left_s % 60);

  if (used < 0 || (size_t)used >= size || !(now->default_us > 0) || !(now->best_us > 0)) return;
  snprintf(text + used, size - (size_t)used, ", best %.1f us (%.3f of default)", now->best_us,
           now->best_us / now->default_us);
}

static void draw_bar(struct cli_progress *progress, const struct swathe_progress *now)
{
  enum { MOST_BAR = 24, LEAST_BAR = 6, MOST_COLUMNS = 400 };
  char text[256], bar[MOST_BAR + 1];
  int columns = terminal_columns(progress->file);

  if (columns > MOST_COLUMNS) columns = MOST_COLUMNS;
  describe(now, text, sizeof text);
  int width = columns - 4 - (int)strlen(text);
  if (width > MOST_BAR) width = MOST_BAR;
  if (width < LEAST_BAR) {
    fprintf(progress->file, "\r\033[K%.*s", columns - 1, text);
  } else {
    const int full = (int)(fraction_done(now) * width);
    for (int i = 0; i < width; i++) bar[i] = i < full ? '#' : '.';
    bar[width] = 0;
    fprintf(progress->file, "\r\033[K[%s] %s", bar, text);
  }
  fflush(progress->file);
  progress->drawn = true;
}

void cli_progress_show(void *arg, const struct swathe_progress *now)
{
  struct cli_progress *progress = arg;
  // A clock that went back belongs to another direction or call.
  const bool turned =
      now->direction != progress->direction || now->elapsed_s < progress->drawn_s;
  const bool improved = now->best_us > 0 && (turned || progress->best_us <= 0 ||
                                             now->best_us < progress->best_us);
  const double since_s = now->elapsed_s - progress->drawn_s;
  char text[256];

  if (progress->terminal) {
    if (since_s < redraw_s && !improved && !turned) return;
    draw_bar(progress, now);
  } else {
    if (since_s < line_s && !improved && !turned) return;
    describe(now, text, sizeof text);
    fprintf(progress->file, "%s%s%s\n", text, improved && now->best ? ": " : "",
            improved && now->best ? now->best : "");
    fflush(progress->file);
  }
  progress->direction = now->direction;
  progress->drawn_s = now->elapsed_s;
  progress->best_us = now->best_us;
}

void cli_progress_end(struct cli_progress *progress)
{
  if (!progress->drawn) return;
  fputs("\r\033[K", progress->file);
  fflush(progress->file);
  progress->drawn = false;
}
