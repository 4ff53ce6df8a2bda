// tune.c: the verb `tune`: measures candidates on this machine and keeps the fastest.
#include "given.h"
#include "progress.h"
#include "ranks.h"
#include "report.h"

#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

static const char *const direction_names[] = { [SWATHE_FORWARD] = "forward",
                                               [SWATHE_BACKWARD] = "backward" };

// Set by the signal handler, read by the library between candidates.
static volatile int stop;

// The second signal is often the first one again, passed on by whoever started this; the third
// means it.
static void on_signal(int signal_number)
{
  (void)signal_number;
  stop = stop + 1;
  if (stop > 2) _exit(CLI_FAILED);
}

static void catch_signals(void)
{
  struct sigaction action = { .sa_handler = on_signal };
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, NULL);
  sigaction(SIGTERM, &action, NULL);
}

// ---- What the rules of the space turned away ----------------------------------------------------

struct refused {
  json_t *rules;  // [{"rule", "points"}]
  int64_t points;
};

static bool pass_by(void *arg, const char *config)
{
  (void)arg;
  (void)config;
  return true;
}

static void take_refused(void *arg, const char *rule, int64_t points)
{
  struct refused *refused = arg;
  if (!points) return;
  refused->points += points;
  json_array_append_new(refused->rules, json_pack("{s:s, s:I}", "rule", rule, "points",
                                                  (json_int_t)points));
}

// Tuning is over, so a walk that fails only means that there is nothing to tell.
static struct refused find_refused(const struct cli_args *args, const struct cli_given *given,
                                   enum swathe_direction direction)
{
  struct refused refused = { .rules = json_array() };
  (void)swathe_configs(given->context, &given->problem, direction, NULL,
                       args->value[CLI_EXHAUSTIVE] != NULL, pass_by, take_refused, &refused);
  return refused;
}

static void print_refused(const struct refused *refused, bool verbose)
{
  size_t index;
  json_t *rule;

  if (!refused->points) return;
  printf("  rules     turned away %" PRId64 " points of the space%s\n", refused->points,
         verbose ? ":" : "; --verbose lists them");
  json_array_foreach(refused->rules, index, rule)
  {
    if (!verbose) break;
    const int at = printf("  %14" JSON_INTEGER_FORMAT "  ",
                          json_integer_value(json_object_get(rule, "points")));
    cli_report_wrapped(at, at, json_string_value(json_object_get(rule, "rule")));
  }
}

// ---- What was found -----------------------------------------------------------------------------

static json_t *tuned_json(enum swathe_direction direction, const struct swathe_tuned *tuned,
                          const struct refused *refused)
{
  return json_pack("{s:s, s:s, s:o, s:o, s:o, s:I, s:I, s:I, s:b, s:o, s:b, s:O}", "kernel",
                   direction_names[direction], "config", tuned->config, "best_us",
                   cli_report_real(tuned->best_us), "default_us",
                   cli_report_real(tuned->default_us), "ratio", cli_report_real(tuned->ratio),
                   "tried", (json_int_t)tuned->tried, "rejected", (json_int_t)tuned->rejected,
                   "failed", (json_int_t)tuned->failed, "reused", tuned->reused, "limit_share",
                   cli_report_real(tuned->limit_share), "noisy", tuned->noisy, "refused",
                   refused->rules);
}

static void print_measured(const struct swathe_tuned *tuned)
{
  if (!*tuned->config) {
    printf("  nothing was measured to the end\n");
    return;
  }
  printf("  config    ");
  cli_report_wrapped(12, 12, tuned->config);
  if (tuned->best_us > 0)
    printf("  time      %s, %.3f of the default's %s\n", cli_report_time(tuned->best_us).text,
           tuned->ratio, cli_report_time(tuned->default_us).text);
  if (tuned->limit_share > 0)
    printf("  limit     %.2f of this machine's multiply-add or memory peak%s\n", tuned->limit_share,
           tuned->good_enough ? ": good enough to end" : "");
  if (tuned->noisy)
    printf("  noise     others used the machine meanwhile; tune again when it is quiet\n");
  if (tuned->reused)
    printf("  measured  before: the database had it; a longer --budget goes on, --again measures "
           "anew\n");
  else
    printf("  measured  %" PRId64 " candidates, %" PRId64 " rejected (wrong result), %" PRId64
           " failed\n",
           tuned->tried, tuned->rejected, tuned->failed);
}

static void print_tuned(enum swathe_direction direction, const struct swathe_tuned *tuned,
                        enum swathe_target target)
{
  printf("%s\n", direction_names[direction]);
  print_measured(tuned);
  if (target == SWATHE_CUDA && *tuned->config)
    printf("  limit     not known: the peaks of a GPU are not measured\n");
}

// ---- The exchange -------------------------------------------------------------------------------

// A rank that is here.
struct member {
  pthread_t thread;
  const struct cli_given *given;
  const struct swathe_tune_options *options;
  struct swathe_transport *transport;
  struct swathe_tuned tuned;
  enum swathe_status status;
  char words[4096];
};

static void *tune_rank(void *arg)
{
  struct member *member = arg;
  member->status = swathe_tune_exchange(member->given->context, &member->given->problem,
                                        member->transport, member->options, &member->tuned);
  if (!member->status) return NULL;
  snprintf(member->words, sizeof member->words, "%s", swathe_error());
  swathe_transport_abort(member->transport, member->words);
  return NULL;
}

// Where rank 0 is, the first failure that is no consequence of another's.
static enum cli_exit run_members(struct member *members, const struct cli_ranks *ranks)
{
  int32_t started = 0;
  for (; started < ranks->count; started++)
    if (pthread_create(&members[started].thread, NULL, tune_rank, &members[started])) break;
  if (started < ranks->count)
    swathe_transport_abort(members[started].transport, "a rank got no thread");
  for (int32_t i = 0; i < started; i++) pthread_join(members[i].thread, NULL);
  if (started < ranks->count)
    return cli_fail(CLI_FAILED, "rank %" PRId32 " gets no thread", ranks->first + started);
  const struct member *first = NULL;
  for (int32_t i = 0; i < started; i++)
    if (members[i].status && (!first || first->status == SWATHE_TRANSPORT)) first = &members[i];
  if (!first) return CLI_OK;
  if (first->status == SWATHE_INTERRUPTED)
    return cli_fail(CLI_FAILED, "interrupted; what was measured is kept");
  return cli_fail(first->status == SWATHE_BAD_USE ? CLI_BAD_USE : CLI_FAILED,
                  "this exchange cannot be tuned\n  %s", first->words);
}

static enum cli_exit report_exchange(const struct cli_args *args, const struct cli_given *given,
                                     const struct swathe_tuned *tuned)
{
  const char *database = swathe_database_path(given->context);
  if (args->value[CLI_JSON])
    return cli_report_json(
        json_pack("{s:s, s:o, s:s, s:s, s:o, s:o, s:o, s:I, s:I, s:b, s:s}", "verb", "tune",
                  "problem", cli_report_problem(&given->problem), "kernel", "exchange", "config",
                  tuned->config, "best_us", cli_report_real(tuned->best_us), "default_us",
                  cli_report_real(tuned->default_us), "ratio", cli_report_real(tuned->ratio),
                  "tried", (json_int_t)tuned->tried, "rejected", (json_int_t)tuned->rejected,
                  "reused", tuned->reused, "database", database),
        CLI_OK);
  printf("exchange, forward and backward of the slowest rank\n");
  print_measured(tuned);
  printf("database    %s\n", database);
  return CLI_OK;
}

static enum cli_exit tune_exchange(const struct cli_args *args, const struct cli_given *given,
                                   const struct swathe_tune_options *options)
{
  struct cli_ranks ranks = { 0 };
  enum cli_exit code = cli_ranks_check(args, false);
  if (!code) code = cli_ranks_open(args, given->sharding.ranks, &ranks);
  if (code) return code;
  struct member *members = calloc((size_t)ranks.count, sizeof *members);
  for (int32_t i = 0; members && i < ranks.count; i++) {
    members[i].given = given;
    members[i].options = options;
    members[i].transport = cli_ranks_transport(&ranks, ranks.first + i);
  }
  if (members) code = run_members(members, &ranks);
  else code = cli_fail(CLI_FAILED, "out of memory for %" PRId32 " ranks", ranks.count);
  if (members && !code && ranks.first == 0) code = report_exchange(args, given, &members[0].tuned);
  free(members);
  cli_ranks_close(&ranks);
  return code;
}

static enum cli_exit tune(const struct cli_args *args, const struct cli_given *given)
{
  struct cli_progress progress;
  struct swathe_tuned tuned[2] = { 0 };
  struct swathe_tune_options options = {
    .budget_s = 60,
    .forward = args->value[CLI_FORWARD],
    .backward = args->value[CLI_BACKWARD],
    .exhaustive = args->value[CLI_EXHAUSTIVE],
    .again = args->value[CLI_AGAIN],
    .progress = cli_progress_show,
    .arg = &progress,
    .stop = &stop,
  };
  enum cli_exit code = cli_args_real(args, CLI_BUDGET, &options.budget_s);
  if (!code && !(options.budget_s > 0))
    code = cli_fail(CLI_BAD_USE, "--budget %s: more than 0 seconds", args->value[CLI_BUDGET]);
  if (code) return code;

  const char *database = swathe_database_path(given->context);
  catch_signals();
  if (args->value[CLI_TRANSPORT]) return tune_exchange(args, given, &options);
  cli_progress_begin(&progress, stderr);
  const enum swathe_status status = swathe_tune(given->context, &given->problem, &options, tuned);
  cli_progress_end(&progress);
  if (status == SWATHE_INTERRUPTED)
    code = cli_fail(CLI_FAILED, "interrupted; what was measured is kept");
  else if (status)
    return cli_fail_library(status, "this problem cannot be tuned");

  json_t *kernels = json_array();
  for (int i = 0; i < 2; i++) {
    const bool wanted = (i == SWATHE_FORWARD ? options.forward : options.backward) ||
                        (!options.forward && !options.backward);
    if (!wanted) continue;
    const struct refused refused = find_refused(args, given, (enum swathe_direction)i);
    if (args->value[CLI_JSON]) {
      json_array_append_new(kernels, tuned_json((enum swathe_direction)i, &tuned[i], &refused));
    } else {
      print_tuned((enum swathe_direction)i, &tuned[i], given->problem.target);
      print_refused(&refused, args->value[CLI_VERBOSE]);
    }
    json_decref(refused.rules);
  }
  if (args->value[CLI_JSON])
    return cli_report_json(json_pack("{s:s, s:o, s:o, s:s, s:b}", "verb", "tune", "problem",
                                     cli_report_problem(&given->problem), "kernels", kernels,
                                     "database", database, "interrupted",
                                     status == SWATHE_INTERRUPTED),
                           code);
  json_decref(kernels);
  printf("database    %s\n", database);
  return code;
}

static enum cli_exit run(const struct cli_args *args)
{
  struct cli_given given = { 0 };
  enum cli_exit code = cli_given_read(args, true, NULL, &given);
  if (!code) code = tune(args, &given);
  cli_given_close(&given);
  return code;
}

const struct cli_verb cli_verb_tune = {
  .name = "tune",
  .operands = "",
  .summary = "Measure one problem's kernels on this machine and keep the fastest.",
  .details =
      "Every candidate must match the reference before it may win.  An interrupted call keeps what "
      "it measured and the next one goes on from there; so does one with a longer --budget than "
      "the last had.\n\n"
      "With --transport the ranks meet and tune how they exchange the halo, with communication and "
      "all; the slowest rank's time counts, and the pick is kept with rank 0.",
  .options = CLI_COMMON_OPTIONS | CLI_PROBLEM_OPTIONS | CLI_CONTEXT_OPTIONS | CLI_BIT(BUDGET) |
             CLI_BIT(EXHAUSTIVE) | CLI_BIT(AGAIN) | CLI_BIT(VERBOSE) | CLI_BIT(FORWARD) |
             CLI_BIT(BACKWARD) | CLI_BIT(TRANSPORT) | CLI_BIT(DEADLINE),
  .examples = { "one rank's share of a preset, for a minute",
                "swathe tune --model gpt-oss-20b --tokens 32768 --ranks 8",
                "everything there is, into a database to pass around",
                "swathe tune --model gemma-3-1b --exhaustive --budget 3600 --database cluster.db",
                "the exchange of four hosts",
                "mpirun -n 4 swathe tune --model gpt-oss-20b --ranks 4 --transport mpi",
                NULL },
  .run = run,
};
