// bench.c: the verb `bench`: ways of sharing one layer, side by side in one run: what a rank
// receives and holds, what a pass takes and how much of that is communication.
#include "bench.h"
#include "paper.h"
#include "report.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

// ---- Options ------------------------------------------------------------------------------------

// --strategies halo,ring -> the contestants, each once; without it all of them.
static enum cli_exit read_strategies(const struct cli_args *args, struct cli_contest *contest)
{
  const char *text = args->value[CLI_STRATEGIES];

  for (int s = 0; !text && s < CLI_CONTEST_MOST; s++)
    contest->contestants[contest->count++].strategy = (enum swathe_strategy)s;
  while (text && *text) {
    const size_t length = strcspn(text, ",");
    enum swathe_strategy strategy;
    char name[32];
    snprintf(name, sizeof name, "%.*s", length < sizeof name ? (int)length : (int)sizeof name - 1,
             text);
    const enum swathe_status status = swathe_strategy_parse(name, &strategy);
    if (status) {
      (void)cli_fail_library(status, "--strategies %s", args->value[CLI_STRATEGIES]);
      return CLI_BAD_USE;
    }
    for (int i = 0; i < contest->count; i++)
      if (contest->contestants[i].strategy == strategy)
        return cli_fail(CLI_BAD_USE, "--strategies %s: %s stands there twice",
                        args->value[CLI_STRATEGIES], name);
    contest->contestants[contest->count++].strategy = strategy;
    text += length;
    if (*text == ',' && !*++text)
      return cli_fail(CLI_BAD_USE, "--strategies %s ends in a comma", args->value[CLI_STRATEGIES]);
  }
  return CLI_OK;
}

static enum cli_exit read_options(const struct cli_args *args, struct cli_contest *contest)
{
  contest->rounds = 5;
  contest->seed = 1;
  contest->backward = !args->value[CLI_FORWARD];
  enum cli_exit code = read_strategies(args, contest);
  if (!code) code = cli_args_integer(args, CLI_ROUNDS, 1, 100000, &contest->rounds);
  if (!code) code = cli_args_integer(args, CLI_SEED, 0, INT32_MAX, &contest->seed);
  return code;
}

// ---- Medians ------------------------------------------------------------------------------------

static int compare_doubles(const void *a, const void *b)
{
  const double one = *(const double *)a, other = *(const double *)b;
  return (one > other) - (one < other);
}

// Sorts the values.
static double median(double *values, int64_t count)
{
  qsort(values, (size_t)count, sizeof *values, compare_doubles);
  return count % 2 ? values[count / 2] : (values[count / 2 - 1] + values[count / 2]) / 2;
}

static void make_row(const struct cli_contest *contest, const struct cli_contestant *contestant,
                     double *values, struct cli_bench_row *row)
{
  const int64_t rounds = contest->rounds;
  double *const *with = contestant->us, *const *without = contestant->mute_us;
  const int passes = 1 + contest->backward;

  *row = (struct cli_bench_row){ .contestant = contestant };
  for (int d = 0; d < passes; d++) {
    memcpy(values, with[d], (size_t)rounds * sizeof *values);
    row->us[d] = median(values, rounds);
    row->received_bytes += contestant->received_bytes[d];
  }
  for (int64_t i = 0; i < rounds; i++) values[i] = with[0][i] + with[1][i];
  row->total_us = median(values, rounds);
  for (int64_t i = 0; i < rounds; i++) values[i] = without[0][i] + without[1][i];
  row->compute_us = median(values, rounds);
  for (int64_t i = 0; i < rounds; i++)
    values[i] = contestant->wait_us[0][i] + contestant->wait_us[1][i];
  row->wait_us = median(values, rounds);
  for (int64_t i = 0; i < rounds; i++)
    values[i] = with[0][i] + with[1][i] - without[0][i] - without[1][i];
  row->exposed_us = median(values, rounds);
}

// What the plan says of the bytes that were counted.
static enum cli_exit plan_bytes(struct cli_bench *bench)
{
  static const struct cli_paper_cluster any = { { 1, 0 }, { 1, 0 }, 1, 0, 0 };
  const struct cli_given *given = bench->contest->given;
  struct cli_paper paper;
  const enum cli_exit code = cli_paper_make(&given->problem, &given->sharding, &any, &paper);

  bench->halo_exact = true;
  for (int i = 0; i < bench->count && !code; i++) {
    struct cli_bench_row *row = &bench->rows[i];
    const enum swathe_strategy strategy = row->contestant->strategy;
    for (int d = 0; d < 1 + bench->contest->backward; d++) {
      const int64_t planned = paper.rows[strategy].received_bytes[d];
      row->planned_bytes += planned;
      if (strategy == SWATHE_HALO && row->contestant->received_bytes[d] != planned)
        bench->halo_exact = false;
    }
  }
  return code;
}

static enum cli_exit make_rows(struct cli_bench *bench)
{
  double *values = calloc((size_t)bench->contest->rounds, sizeof *values);
  if (!values) return cli_fail(CLI_FAILED, "out of memory for the rounds");
  for (int c = 0; c < bench->contest->count; c++) {
    const struct cli_contestant *contestant = &bench->contest->contestants[c];
    if (*contestant->refused) continue;
    make_row(bench->contest, contestant, values, &bench->rows[bench->count++]);
  }
  free(values);
  return plan_bytes(bench);
}

static const struct cli_bench_row *halo_of(const struct cli_bench *bench)
{
  for (int i = 0; i < bench->count; i++)
    if (bench->rows[i].contestant->strategy == SWATHE_HALO) return &bench->rows[i];
  return NULL;
}

// ---- JSON ---------------------------------------------------------------------------------------

static json_t *rounds_json(const double *us, int64_t rounds)
{
  json_t *array = json_array();
  for (int64_t i = 0; i < rounds; i++) json_array_append_new(array, cli_report_real(us[i]));
  return array;
}

static json_t *pass_json(const struct cli_bench *bench, const struct cli_bench_row *row, int d)
{
  const int64_t rounds = bench->contest->rounds;
  return json_pack("{s:I, s:o, s:o, s:o, s:o}", "received_bytes",
                   (json_int_t)row->contestant->received_bytes[d], "median_us",
                   cli_report_real(row->us[d]), "runs_us",
                   rounds_json(row->contestant->us[d], rounds), "mute_runs_us",
                   rounds_json(row->contestant->mute_us[d], rounds), "wait_runs_us",
                   rounds_json(row->contestant->wait_us[d], rounds));
}

static json_t *row_json(const struct cli_bench *bench, const struct cli_bench_row *row)
{
  json_t *object = json_pack(
      "{s:s, s:n, s:I, s:I, s:I, s:o, s:o, s:o, s:o, s:o, s:o}", "strategy",
      swathe_strategy_name(row->contestant->strategy), "refused", "received_bytes",
      (json_int_t)row->received_bytes, "planned_bytes", (json_int_t)row->planned_bytes,
      "memory_bytes", (json_int_t)row->contestant->memory_bytes,
      "total_us", cli_report_real(row->total_us), "compute_us", cli_report_real(row->compute_us),
      "wait_us", cli_report_real(row->wait_us), "exposed_us", cli_report_real(row->exposed_us),
      "difference",
      cli_report_real(row->contestant->difference), "forward", pass_json(bench, row, 0));
  if (bench->contest->backward)
    json_object_set_new(object, "backward", pass_json(bench, row, 1));
  return object;
}

static enum cli_exit print_json(const struct cli_bench *bench, enum cli_exit code)
{
  const struct cli_given *given = bench->contest->given;
  json_t *strategies = json_array();

  for (int i = 0; i < bench->count; i++)
    json_array_append_new(strategies, row_json(bench, &bench->rows[i]));
  for (int c = 0; c < bench->contest->count; c++) {
    const struct cli_contestant *contestant = &bench->contest->contestants[c];
    if (*contestant->refused)
      json_array_append_new(strategies,
                            json_pack("{s:s, s:s}", "strategy",
                                      swathe_strategy_name(contestant->strategy), "refused",
                                      contestant->refused));
  }
  return cli_report_json(
      json_pack("{s:s, s:o, s:I, s:i, s:i, s:s, s:I, s:i, s:o}", "verb", "bench", "problem",
                cli_report_problem(&given->problem), "tokens", (json_int_t)given->sharding.tokens,
                "batch", given->sharding.batch, "ranks", given->sharding.ranks, "transport",
                bench->transport, "rounds", (json_int_t)bench->contest->rounds, "threads",
                given->threads, "strategies", strategies),
      code);
}

// ---- Text ---------------------------------------------------------------------------------------

static void add_ratio(struct cli_table *table, double value, double halo)
{
  if (halo > 0) cli_report_cell(table, "%.2fx", value / halo);
  else cli_report_cell(table, "-");
}

static void add_row(struct cli_table *table, const struct cli_bench *bench,
                    const struct cli_bench_row *row)
{
  const struct cli_bench_row *halo = halo_of(bench);

  cli_report_cell(table, "%s", swathe_strategy_name(row->contestant->strategy));
  cli_report_cell(table, "%s", cli_report_size(row->received_bytes).text);
  add_ratio(table, (double)row->received_bytes, halo ? (double)halo->received_bytes : 0);
  cli_report_cell(table, "%s", cli_report_size(row->contestant->memory_bytes).text);
  cli_report_cell(table, "%s", cli_report_time(row->us[0]).text);
  if (bench->contest->backward) cli_report_cell(table, "%s", cli_report_time(row->us[1]).text);
  else cli_report_cell(table, "-");
  cli_report_cell(table, "%s", cli_report_time(row->wait_us).text);
  cli_report_cell(table, "%s", cli_report_time(fmax(row->exposed_us, 0)).text);
  add_ratio(table, row->total_us, halo ? halo->total_us : 0);
}

static void print_text(const struct cli_bench *bench, const char *page)
{
  static const char *const titles[] = { "strategy", "received", "of halo", "memory",
                                        "forward",  "backward", "waited",  "exposed",
                                        "time of halo" };
  const struct cli_given *given = bench->contest->given;
  const struct swathe_sharding *sharding = &given->sharding;
  struct cli_table table = { .align = "lrrrrrrrr" };
  double difference = 0;

  printf("%s\n%" PRId64 " tokens, batch %" PRId32 ", %s over %" PRId32 " rank%s by %s, %" PRId64
         " round%s\n\n",
         cli_report_problem_words(&given->problem), sharding->tokens, sharding->batch,
         swathe_layout_name(sharding->layout), sharding->ranks, sharding->ranks == 1 ? "" : "s",
         bench->transport, bench->contest->rounds, bench->contest->rounds == 1 ? "" : "s");
  for (int i = 0; i < 9; i++) cli_report_cell(&table, "%s", titles[i]);
  for (int i = 0; i < bench->count; i++) {
    add_row(&table, bench, &bench->rows[i]);
    difference = fmax(difference, bench->rows[i].contestant->difference);
  }
  cli_report_table(&table);
  for (int c = 0; c < bench->contest->count; c++) {
    const struct cli_contestant *contestant = &bench->contest->contestants[c];
    if (*contestant->refused)
      printf("%-10s  %s\n", swathe_strategy_name(contestant->strategy), contestant->refused);
  }
  printf("\nreceived, memory: of the rank that has most in a pass, %s;\n"
         "forward, backward: medians of the slowest rank;\n"
         "waited: for the wire with nothing left to compute, by the rank that waited longest;\n"
         "exposed: with the exchange less the same launches with its result already there;\n"
         "memory: the layer's buffers and what it keeps for backward.\n"
         "%sResults differ from those of %s by %.2g at most.\n",
         bench->contest->backward ? "both passes together" : "forward only",
         halo_of(bench) && bench->halo_exact ? "The halo moved exactly the bytes of its formula.\n"
                                             : "",
         bench->count ? swathe_strategy_name(bench->rows[0].contestant->strategy) : "none",
         difference);
  if (page) printf("The picture is in %s\n", page);
}

// ---- The verb -----------------------------------------------------------------------------------

static enum cli_exit write_page(const struct cli_bench *bench, const char *path)
{
  struct cli_page page = { 0 };
  enum cli_exit code = cli_page_begin(&page);

  if (!code) cli_bench_page(&page, bench);
  if (!code) code = cli_page_end(&page);
  if (!code) code = cli_report_file(path, page.text, page.size);
  cli_page_free(&page);
  return code;
}

// The outcome, where it was asked for.
static enum cli_exit show(const struct cli_args *args, const struct cli_contest *contest,
                          const char *transport)
{
  struct cli_bench bench = { .contest = contest, .transport = transport };
  enum cli_exit code = make_rows(&bench);

  if (!code && args->value[CLI_HTML]) code = write_page(&bench, args->value[CLI_HTML]);
  if (code) return code;
  if (!bench.halo_exact)
    code = cli_fail(CLI_FAILED, "the bytes on the wire are not the halo's");
  if (args->value[CLI_JSON]) return print_json(&bench, code);
  print_text(&bench, args->value[CLI_HTML]);
  return code;
}

static enum cli_exit run(const struct cli_args *args)
{
  struct cli_given given = { 0 };
  struct cli_contest contest = { .given = &given };
  struct cli_ranks ranks = { 0 };
  const char *transport = args->value[CLI_TRANSPORT] ? args->value[CLI_TRANSPORT] : "threads";
  enum cli_exit code = cli_ranks_check(args, false);

  if (!code) code = read_options(args, &contest);
  if (!code) code = cli_given_read(args, true, NULL, &given);
  if (!code) code = cli_contest_begin(&contest);
  if (!code) code = cli_ranks_open(args, given.sharding.ranks, &ranks);
  if (!code) code = cli_contest_play(&contest, &ranks);
  if (!code && ranks.first == 0) code = show(args, &contest, transport);
  cli_ranks_close(&ranks);
  cli_contest_free(&contest);
  cli_given_close(&given);
  return code;
}

const struct cli_verb cli_verb_bench = {
  .name = "bench",
  .operands = "",
  .summary = "Measure ways of sharing a layer side by side.",
  .details =
      "The halo beside all_gather of K and V, all-to-all over heads, and rings of whole shares, as "
      "far as the window reaches and all the way round: the same kernels, transport and tensors, "
      "in turns, each with its exchange and without.",
  .options = CLI_COMMON_OPTIONS | CLI_PROBLEM_OPTIONS | CLI_CONTEXT_OPTIONS | CLI_BIT(STRATEGIES) |
             CLI_BIT(ROUNDS) | CLI_BIT(HTML) | CLI_BIT(SEED) | CLI_BIT(TRANSPORT) |
             CLI_BIT(DEADLINE) | CLI_BIT(FORWARD),
  .examples = { "all strategies of a preset over 4 ranks",
                "swathe bench --model gpt-oss-20b --tokens 32768 --ranks 4",
                "the same with a process per rank",
                "mpirun -n 4 swathe bench --model gpt-oss-20b --tokens 32768 --ranks 4 "
                "--transport mpi",
                "two of them, forward only, as a page with a picture",
                "swathe bench --model gemma-3-1b --tokens 8192 --ranks 4 --forward "
                "--strategies halo,all_gather --html bench.html",
                "how many times the halo's time each takes, for a script",
                "swathe bench --window 128 --tokens 16384 --ranks 2 --json | "
                "jq '.strategies[] | [.strategy, .total_us]'",
                NULL },
  .run = run,
};
