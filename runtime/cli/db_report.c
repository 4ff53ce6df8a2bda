// db_report.c: the verb `db report`: the tuning database as one page that needs nothing beside it.
// The samples come sorted by kernel, so one history at a time is in memory; the index of all is put
// together beside the sections and stands before them.
#include "chart.h"
#include "given.h"
#include "report.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum {
  MOST_DOTS = 6000,  // of the whole page, shared out by numbers of samples
  LEAST_CHART_DOTS = 60,
  MOST_CHART_DOTS = 1500,
  MOST_RIVALS = 10,               // rows of the table of configs
  MOST_REFUSED = 8,               // rows of the table of rejected ones
  MOST_WORDS = 300,               // bytes of a reason
  MOST_SECTIONS_BYTES = 3 << 20,  // no further section begins beyond it
  MOST_INDEX_BYTES = 3 << 19,
};

// ---- Which problems -----------------------------------------------------------------------------

// Fields of a problem and the options that say them.  A preset says what a model is, not how it is
// run.
static const struct field {
  const char *name;
  uint64_t options;
} fields[] = {
  { "q_heads", CLI_BIT(MODEL) },
  { "kv_heads", CLI_BIT(MODEL) },
  { "head_dim_qk", CLI_BIT(MODEL) },
  { "head_dim_v", CLI_BIT(MODEL) },
  { "window_left", CLI_BIT(MODEL) | CLI_BIT(WINDOW) | CLI_BIT(WINDOW_LEFT) },
  { "window_right", CLI_BIT(MODEL) | CLI_BIT(WINDOW) | CLI_BIT(WINDOW_RIGHT) },
  { "dtype", CLI_BIT(MODEL) | CLI_BIT(DTYPE) },
  { "sinks", CLI_BIT(MODEL) },
  { "softcap", CLI_BIT(MODEL) | CLI_BIT(SOFTCAP) },
  { "scale", CLI_BIT(MODEL) | CLI_BIT(SCALE) },
  { "halo_gradient", CLI_BIT(HALO_GRADIENT) },
  { "target", CLI_BIT(TARGET) },
  { "layout", CLI_BIT(LAYOUT) },
  { "ranks", CLI_BIT(RANKS) },
  { "tokens_per_rank", CLI_BIT(TOKENS) },
};

// The first `length` bytes of `name` name a field that the command line says.
static bool is_said(const struct cli_args *args, const char *name, size_t length)
{
  for (const char *at = args->value[CLI_PROBLEM]; at && *at;) {
    if (strcspn(at, "=,") == length && !strncmp(at, name, length)) return true;
    at = strchr(at, ',');
    if (at) at++;
  }
  for (size_t f = 0; f < sizeof fields / sizeof fields[0]; f++) {
    if (strlen(fields[f].name) != length || strncmp(fields[f].name, name, length)) continue;
    for (int option = 0; option < CLI_OPTION_COUNT; option++)
      if (args->value[option] && fields[f].options >> option & 1) return true;
  }
  return false;
}

// Canonical texts have the same fields in the same order; those that were said must be equal.
static bool is_wanted(const struct cli_args *args, const char *wanted, const char *problem)
{
  while (*wanted && *problem) {
    const size_t length = strcspn(wanted, ","), other_length = strcspn(problem, ",");
    const bool equal = length == other_length && !strncmp(wanted, problem, length);
    if (!equal && is_said(args, wanted, strcspn(wanted, "="))) return false;
    wanted += length + (wanted[length] == ',');
    problem += other_length + (problem[other_length] == ',');
  }
  return true;
}

// ---- State --------------------------------------------------------------------------------------

struct pick {
  char *problem, *kernel, *environment, *generator, *config;
  double best_us, ratio, limit_share;
  bool shown;
};

struct report {
  const struct cli_args *args;
  const char *wanted;  // canonical text of the problem that was given
  enum cli_exit code;  // of the first failure during a walk
  struct pick *picks;
  int64_t pick_count, pick_capacity;
  struct cli_page index, sections;
  struct cli_history history;  // that samples are added to
  char problem[1024];          // of the last row of the index
  char section_problem[1024];  // of the last section
  int64_t samples, problems, kernels, unshown;
  char first[24], last[24];  // times of the oldest and the newest sample
};

static struct cli_text count(int64_t value) { return cli_report_number(0, (double)value); }

static void add_pick(void *arg, const struct swathe_pick *pick)
{
  struct report *report = arg;

  if (report->code || !is_wanted(report->args, report->wanted, pick->problem)) return;
  if (report->pick_count == report->pick_capacity) {
    const int64_t capacity = report->pick_capacity ? 2 * report->pick_capacity : 64;
    struct pick *grown = realloc(report->picks, (size_t)capacity * sizeof *grown);
    if (!grown) {
      report->code = cli_fail(CLI_FAILED, "out of memory for the picks");
      return;
    }
    report->picks = grown;
    report->pick_capacity = capacity;
  }
  struct pick *copy = &report->picks[report->pick_count++];
  *copy = (struct pick){ strdup(pick->problem),
                         strdup(pick->kernel),
                         strdup(pick->environment),
                         strdup(pick->generator),
                         strdup(pick->config),
                         pick->best_us,
                         pick->ratio,
                         pick->limit_share,
                         false };
  if (!copy->problem || !copy->kernel || !copy->environment || !copy->generator || !copy->config)
    report->code = cli_fail(CLI_FAILED, "out of memory for the picks");
}

static struct pick *find_pick(const struct report *report, const struct cli_history *history)
{
  for (int64_t i = 0; i < report->pick_count; i++) {
    struct pick *pick = &report->picks[i];
    if (!strcmp(pick->problem, history->problem) && !strcmp(pick->kernel, history->kernel) &&
        !strcmp(pick->environment, history->environment) &&
        !strcmp(pick->generator, history->generator))
      return pick;
  }
  return NULL;
}

static void free_report(struct report *report)
{
  for (int64_t i = 0; i < report->pick_count; i++) {
    const struct pick *pick = &report->picks[i];
    free(pick->problem);
    free(pick->kernel);
    free(pick->environment);
    free(pick->generator);
    free(pick->config);
  }
  free(report->picks);
  cli_page_free(&report->index);
  cli_page_free(&report->sections);
  cli_history_clear(&report->history);
}

// ---- Words --------------------------------------------------------------------------------------

// "64 query and 8 key heads, ..." of a canonical text, which the database has judged.
static const char *shape_words(const char *text)
{
  struct swathe_problem problem;
  swathe_problem_init(&problem);
  return swathe_problem_parse(text, &problem) ? text : cli_report_problem_words(&problem);
}

static struct cli_text group_words(const char *text)
{
  struct swathe_problem problem;
  swathe_problem_init(&problem);
  return swathe_problem_parse(text, &problem) ? (struct cli_text){ "" }
                                              : cli_report_group(&problem);
}

// The beginning of a reason, cut between characters.
static void cut_words(const char *words, char cut[MOST_WORDS + 8])
{
  size_t used = 0;
  while (words[used] && used < MOST_WORDS) {
    const int length = cli_report_utf8(words + used);
    used += (size_t)(length ? length : 1);
  }
  snprintf(cut, MOST_WORDS + 8, "%.*s%s", (int)used, words, words[used] ? "..." : "");
}

// ---- One section --------------------------------------------------------------------------------

// A config or a problem, to be broken behind commas; parts that differ from the first one's stand
// out.
static void put_config(struct cli_page *page, const char *config, const char *first)
{
  char part[512];

  while (*config) {
    const size_t length = strcspn(config, ","), first_length = strcspn(first, ",");
    const bool same = length == first_length && !strncmp(config, first, length);
    snprintf(part, sizeof part, "%.*s", (int)length, config);
    cli_page_put(page, same ? "knob" : "knob_differs", "knob", part, "comma",
                 config[length] ? "," : "", NULL);
    config += length + (config[length] == ',');
    first += first_length + (first[first_length] == ',');
  }
}

static void put_rival(struct cli_page *page, const struct cli_history *history, int64_t rank,
                      const struct pick *pick)
{
  const struct cli_history_sample *sample = &history->samples[history->ranking[rank]];
  const bool used = pick && !strcmp(sample->config, pick->config);

  cli_page_put(page, used ? "rival_used" : "rival", "rank", count(rank + 1).text, "ratio",
               cli_report_number(3, sample->ratio).text, "low",
               cli_report_number(3, sample->low).text, "high",
               cli_report_number(3, sample->high).text, "time",
               cli_report_time(sample->median_us).text, "runs", count(sample->runs).text, "noise",
               sample->noisy ? ", noisy" : "", NULL);
  put_config(page, sample->config, history->samples[history->ranking[0]].config);
  cli_page_put(page, "rival_end", "when", sample->when, NULL);
}

static void put_rivals(struct cli_page *page, const struct cli_history *history,
                       const struct pick *pick)
{
  const int64_t shown = history->ranked < MOST_RIVALS ? history->ranked : MOST_RIVALS;

  if (!history->ranked) {
    cli_page_put(page, "no_rivals", NULL);
    return;
  }
  cli_page_put(page, "rivals", "shown", count(shown).text, "ranked", count(history->ranked).text,
               NULL);
  for (int64_t rank = 0; rank < history->ranked; rank++) {
    const char *config = history->samples[history->ranking[rank]].config;
    if (rank < MOST_RIVALS || (pick && !strcmp(config, pick->config)))
      put_rival(page, history, rank, pick);
  }
  cli_page_put(page, "rivals_end", NULL);
}

// What was rejected and why, the newest first.
static void put_refused(struct cli_page *page, const struct cli_history *history)
{
  const int64_t refused = history->count - history->verdicts[CLI_RIGHT];
  int64_t shown = 0;

  if (!refused) return;
  cli_page_put(page, "refused", "refused", count(refused).text, "shown",
               count(refused < MOST_REFUSED ? refused : MOST_REFUSED).text, NULL);
  for (int64_t i = history->count - 1; i >= 0 && shown < MOST_REFUSED; i--) {
    const struct cli_history_sample *sample = &history->samples[i];
    char words[MOST_WORDS + 8];
    if (sample->verdict == CLI_RIGHT) continue;
    cut_words(sample->words, words);
    cli_page_put(page, "refused_row", "verdict", cli_history_verdict_name(sample->verdict), "words",
                 words, NULL);
    put_config(page, sample->config, sample->config);
    cli_page_put(page, "refused_row_end", NULL);
    shown++;
  }
  cli_page_put(page, "refused_end", NULL);
}

static void put_section(struct report *report, const struct cli_history *history,
                        const struct pick *pick)
{
  struct cli_page *page = &report->sections;
  const double default_us = cli_history_default_us(history);
  int64_t noisy = 0;
  for (int64_t i = 0; i < history->count; i++) noisy += history->samples[i].noisy;
  int64_t share = report->samples ? MOST_DOTS * history->count / report->samples : 0;
  if (share < LEAST_CHART_DOTS) share = LEAST_CHART_DOTS;
  if (share > MOST_CHART_DOTS) share = MOST_CHART_DOTS;
  struct cli_chart chart = { .history = history,
                             .pick = pick ? pick->config : NULL,
                             .most_dots = share };

  if (strcmp(report->section_problem, history->problem)) {
    cli_page_put(page, "problem", "words", shape_words(history->problem), "group",
                 group_words(history->problem).text, NULL);
    put_config(page, history->problem, history->problem);
    cli_page_put(page, "problem_end", NULL);
    snprintf(report->section_problem, sizeof report->section_problem, "%s", history->problem);
  }
  cli_page_put(page, "section", "number", count(report->kernels).text, "kernel", history->kernel,
               "environment", history->environment, "generator", history->generator, "first",
               history->samples[0].when, "last", history->samples[history->count - 1].when,
               "samples", count(history->count).text, NULL);
  for (int v = 0; v < CLI_VERDICT_COUNT; v++)
    if (history->verdicts[v])
      cli_page_put(page, "count", "verdict", cli_history_verdict_name((enum cli_verdict)v),
                   "samples", count(history->verdicts[v]).text, NULL);
  cli_page_put(page, "counts_end", "time",
               default_us > 0 ? cli_report_time(default_us).text : "not measured", NULL);
  if (pick) cli_page_put(page, "counts_pick", NULL);
  if (pick && pick->limit_share > 0)
    cli_page_put(page, "counts_limit", "share", cli_report_number(2, pick->limit_share).text, NULL);
  if (noisy) cli_page_put(page, "counts_noisy", "samples", count(noisy).text, NULL);
  cli_page_put(page, "figure", NULL);
  cli_chart_put(page, &chart);
  if (chart.drawn < history->count)
    cli_page_put(page, "thinned", "drawn", count(chart.drawn).text, "samples",
                 count(history->count).text, NULL);
  if (chart.beyond) cli_page_put(page, "beyond", "dots", count(chart.beyond).text, NULL);
  cli_page_put(page, "figure_end", NULL);
  put_rivals(page, history, pick);
  put_refused(page, history);
  cli_page_put(page, "section_end", NULL);
}

// ---- Index --------------------------------------------------------------------------------------

static void put_index_row(struct report *report, const struct cli_history *history,
                          const struct pick *pick, bool linked)
{
  struct cli_page *page = &report->index;
  const struct cli_history_sample *best =
      history->ranked ? &history->samples[history->ranking[0]] : NULL;
  const double ratio = pick ? pick->ratio : best ? best->ratio : 0;
  const double us = pick ? pick->best_us : best ? best->median_us : 0;

  if (strcmp(report->problem, history->problem))
    cli_page_put(page, "index_problem", "words", shape_words(history->problem), "group",
                 group_words(history->problem).text, NULL);
  cli_page_put(page, linked ? "index_row" : "index_row_alone", "number",
               count(report->kernels).text, "kernel", history->kernel, "environment",
               history->environment, "ratio", us > 0 ? cli_report_number(3, ratio).text : "-",
               "time", us > 0 ? cli_report_time(us).text : "-", "use",
               pick   ? "in use"
               : best ? "best yet"
                      : "none right",
               "samples", count(history->count).text, "refused",
               count(history->count - history->verdicts[CLI_RIGHT]).text, "last",
               history->samples[history->count - 1].when, NULL);
}

// The history is whole: puts its row and its section, and empties it.
static void finish_history(struct report *report)
{
  struct cli_history *history = &report->history;

  if (!history->count || report->code) return;
  report->code = cli_history_settle(history);
  if (report->code) return;
  struct pick *pick = find_pick(report, history);
  const bool row = report->index.size < MOST_INDEX_BYTES;
  const bool section = row && report->sections.size < MOST_SECTIONS_BYTES;
  report->kernels++;
  report->problems += strcmp(report->problem, history->problem) != 0;
  if (row) put_index_row(report, history, pick, section);
  if (section) put_section(report, history, pick);
  else report->unshown++;
  if (pick) pick->shown = true;
  snprintf(report->problem, sizeof report->problem, "%s", history->problem);
  cli_history_clear(history);
}

// Picks whose samples stayed behind, as in a file made to be passed on.
static void put_lone_picks(struct report *report)
{
  bool titled = false;
  for (int64_t i = 0; i < report->pick_count; i++) {
    const struct pick *pick = &report->picks[i];
    if (pick->shown || report->index.size >= MOST_INDEX_BYTES) continue;
    if (!titled) cli_page_put(&report->index, "index_lone", NULL);
    titled = true;
    cli_page_put(&report->index, "index_lone_row", "problem", pick->problem, "kernel", pick->kernel,
                 "environment", pick->environment, "ratio", cli_report_number(3, pick->ratio).text,
                 "time", cli_report_time(pick->best_us).text, "config", pick->config, NULL);
  }
}

// ---- Walks --------------------------------------------------------------------------------------

static void count_sample(void *arg, const struct swathe_sample *sample)
{
  struct report *report = arg;
  if (!is_wanted(report->args, report->wanted, sample->problem)) return;
  report->samples++;
  if (!*report->first || strcmp(sample->when, report->first) < 0)
    snprintf(report->first, sizeof report->first, "%s", sample->when);
  if (strcmp(sample->when, report->last) > 0)
    snprintf(report->last, sizeof report->last, "%s", sample->when);
}

static void take_sample(void *arg, const struct swathe_sample *sample)
{
  struct report *report = arg;
  if (report->code || !is_wanted(report->args, report->wanted, sample->problem)) return;
  if (!cli_history_takes(&report->history, sample)) finish_history(report);
  if (!report->code) report->code = cli_history_add(&report->history, sample);
}

static enum cli_exit read_database(struct report *report, struct swathe_context *context)
{
  enum swathe_status status = swathe_db_list(context, add_pick, report);
  if (!status && !report->code) status = swathe_db_samples(context, count_sample, report);
  if (!status && !report->code) status = swathe_db_samples(context, take_sample, report);
  if (status) return cli_fail_library(status, "the samples cannot be read");
  if (!report->code) finish_history(report);
  if (!report->code) put_lone_picks(report);
  return report->code;
}

static enum cli_exit assemble(struct report *report, struct cli_page *page)
{
  const char *database = report->args->value[CLI_DATABASE];
  const bool empty = !report->kernels && !report->pick_count;
  enum cli_exit code = cli_page_begin(page);

  if (code) return code;
  cli_page_put(page, "page", "version", SWATHE_VERSION, "database",
               database ? database : "the default database", NULL);
  cli_page_put(page,
               empty             ? "nothing"
               : report->kernels ? "summary"
                                 : "summary_picks",
               "samples", count(report->samples).text, "kernels", count(report->kernels).text,
               "problems", count(report->problems).text, "first", report->first, "last",
               report->last, NULL);
  if (report->unshown) cli_page_put(page, "unshown", "unshown", count(report->unshown).text, NULL);
  if (!empty) {
    if (!code) code = cli_page_end(&report->index);
    if (!code) code = cli_page_end(&report->sections);
    cli_page_put(page, "index", NULL);
    cli_page_join(page, &report->index);
    cli_page_put(page, "index_end", NULL);
    cli_page_join(page, &report->sections);
  }
  cli_page_put(page, "page_end", NULL);
  return code ? code : cli_page_end(page);
}

// ---- The verb -----------------------------------------------------------------------------------

static enum cli_exit deliver(const struct report *report, const struct cli_page *page)
{
  const char *output = report->args->value[CLI_OUTPUT];
  enum cli_exit code = output ? cli_report_file(output, page->text, page->size) : CLI_OK;

  if (code) return code;
  if (report->args->value[CLI_JSON])
    return cli_report_json(json_pack("{s:s, s:I, s:I, s:I, s:I, s:s?, s:s?}", "verb", "db report",
                                     "problems", (json_int_t)report->problems, "kernels",
                                     (json_int_t)report->kernels, "samples",
                                     (json_int_t)report->samples, "bytes", (json_int_t)page->size,
                                     "output", output, "page", output ? NULL : page->text),
                           CLI_OK);
  if (output)
    printf("%s\n  problems %" PRId64 ", kernels %" PRId64 ", samples %" PRId64 ", bytes %s\n",
           output, report->problems, report->kernels, report->samples,
           cli_report_bytes((int64_t)page->size).text);
  else fwrite(page->text, 1, page->size, stdout);
  return CLI_OK;
}

static enum cli_exit run(const struct cli_args *args)
{
  struct cli_given given = { 0 };
  struct report report = { .args = args };
  struct cli_page page = { 0 };
  char wanted[1024];
  enum cli_exit code = CLI_OK;

  if (args->value[CLI_TOKENS] && !args->value[CLI_RANKS])
    code = cli_fail(CLI_BAD_USE, "--tokens needs --ranks too: problems are kept by a rank's share");
  if (!code) code = cli_given_read(args, false, NULL, &given);
  if (!code) swathe_problem_format(&given.problem, wanted, sizeof wanted);
  report.wanted = wanted;
  if (!code) code = cli_page_begin(&report.index);
  if (!code) code = cli_page_begin(&report.sections);
  if (!code) code = read_database(&report, given.context);
  if (!code) code = assemble(&report, &page);
  if (!code) code = deliver(&report, &page);
  cli_page_free(&page);
  free_report(&report);
  cli_given_close(&given);
  return code;
}

const struct cli_verb cli_verb_db_report = {
  .name = "db report",
  .operands = "",
  .summary = "Write what tuning measured as one HTML page that needs nothing beside it.",
  .details =
      "Without options of a problem the page shows every problem.  They choose: a preset "
      "stands for its heads, dims, windows, dtype, sinks, softcap and scale, over any number "
      "of ranks; --problem for the fields that it names.",
  .options = CLI_COMMON_OPTIONS | CLI_STORE_OPTIONS | CLI_BIT(OUTPUT) |
             (CLI_PROBLEM_OPTIONS & ~(CLI_BIT(DOCUMENTS) | CLI_BIT(BATCH))),
  .examples = { "everything that a database holds",
                "swathe db report --database cluster.db --output report.html",
                "one model, over any number of ranks",
                "swathe db report --model gpt-oss-20b --output gpt-oss.html", NULL },
  .run = run,
};
