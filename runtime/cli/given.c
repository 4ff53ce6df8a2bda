// given.c: options -> context, problem, sequence and sharding.  See given.h.
#include "given.h"
#include "ranks.h"

#include <inttypes.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

// Fields of --problem that an option sets too.
static const struct rival {
  const char *field;
  enum cli_option option;
} rivals[] = {
  { "window_left", CLI_WINDOW },         { "window_left", CLI_WINDOW_LEFT },
  { "window_right", CLI_WINDOW },        { "window_right", CLI_WINDOW_RIGHT },
  { "dtype", CLI_DTYPE },                { "halo_gradient", CLI_HALO_GRADIENT },
  { "softcap", CLI_SOFTCAP },            { "scale", CLI_SCALE },
  { "target", CLI_TARGET },              { "layout", CLI_LAYOUT },
  { "ranks", CLI_RANKS },                { "sinks", CLI_SINK },
  { "tokens_per_rank", CLI_TOKENS },     { "tokens_per_rank", CLI_DOCUMENTS },
};

enum { MOST_RANKS = 1 << 16, MOST_BATCH = 1 << 20 };
// Far above any sequence; sums of lengths stay below 2^63.
static const int64_t most_tokens = INT64_C(1) << 52;

int32_t cli_given_processors(void)
{
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set)) return 1;
  const int count = CPU_COUNT(&set);
  return count < 1 ? 1 : count;
}

// ---- Contradictions -----------------------------------------------------------------------------

// The value of `field` in --problem, up to the next comma; NULL when it is not there.
static const char *problem_field(const struct cli_args *args, const char *field)
{
  const size_t length = strlen(field);
  const char *at = args->value[CLI_PROBLEM];

  while (at && *at) {
    if (!strncmp(at, field, length) && at[length] == '=') return at + length + 1;
    at = strchr(at, ',');
    if (at) at++;
  }
  return NULL;
}

static enum cli_exit check_repeated_fields(const struct cli_args *args)
{
  for (const char *at = args->value[CLI_PROBLEM]; at && *at;) {
    const size_t length = strcspn(at, "=,");
    const char *next = strchr(at, ',');
    for (const char *other = next ? next + 1 : NULL; other && *other;) {
      if (strcspn(other, "=,") == length && !memcmp(at, other, length))
        return cli_fail(CLI_BAD_USE, "--problem sets %.*s twice", (int)length, at);
      other = strchr(other, ',');
      if (other) other++;
    }
    at = next ? next + 1 : NULL;
  }
  return CLI_OK;
}

static enum cli_exit check_contradictions(const struct cli_args *args)
{
  static const char window_words[] =
      "--window N is causal and means --window-left N-1 --window-right 0";
  enum cli_exit code = cli_args_exclude(args, CLI_WINDOW, CLI_WINDOW_LEFT, window_words);

  if (!code) code = cli_args_exclude(args, CLI_WINDOW, CLI_WINDOW_RIGHT, window_words);
  if (!code) code = check_repeated_fields(args);
  for (size_t i = 0; !code && i < sizeof rivals / sizeof rivals[0]; i++)
    if (args->value[rivals[i].option] && problem_field(args, rivals[i].field))
      code = cli_fail(CLI_BAD_USE, "--problem sets %s, and so does %s", rivals[i].field,
                      cli_args_name(rivals[i].option));
  return code;
}

static enum cli_exit check_files(const struct cli_args *args)
{
  static const char *const fields[] = { "q_heads", "kv_heads", "head_dim_qk", "head_dim_v",
                                        "tokens_per_rank" };
  static const char words[] = "the files say how long and how many";
  enum cli_exit code = cli_args_exclude(args, CLI_Q, CLI_TOKENS, words);

  if (!code) code = cli_args_exclude(args, CLI_Q, CLI_BATCH, words);
  for (size_t i = 0; !code && i < sizeof fields / sizeof fields[0]; i++)
    if (problem_field(args, fields[i]))
      code = cli_fail(CLI_BAD_USE, "--problem sets %s, and so do the files of --q, --k and --v",
                      fields[i]);
  return code;
}

// ---- Context ------------------------------------------------------------------------------------

enum cli_exit cli_given_open(const struct cli_args *args, int32_t threads, struct cli_given *given)
{
  int64_t wanted = threads;
  const enum cli_exit code = cli_args_integer(args, CLI_THREADS, 1, 1 << 16, &wanted);
  if (code) return code;

  given->threads = (int32_t)wanted;
  struct swathe_options options = {
    .database = args->value[CLI_DATABASE],
    .cache = args->value[CLI_CACHE],
    .mode = SWATHE_REPLAY,
    .threads = given->threads,
    .isa = args->value[CLI_ISA],
    .arch = args->value[CLI_ARCH],
  };
  enum swathe_status status = swathe_open(&options, &given->context);
  // Verbs with --config only make a kernel, also for processors that this machine does not have.
  if (status == SWATHE_UNSUPPORTED && args->verb->options & CLI_BIT(CONFIG)) {
    options.isa = NULL;
    status = swathe_open(&options, &given->context);
  }
  return status ? cli_fail_library(status, "swathe cannot start") : CLI_OK;
}

void cli_given_close(struct cli_given *given)
{
  if (given->context) swathe_close(given->context);
  free(given->document_starts);
  *given = (struct cli_given){ 0 };
}

// ---- Problem ------------------------------------------------------------------------------------

static enum cli_exit read_window(const struct cli_args *args, enum cli_option option,
                                 int64_t *window)
{
  const char *text = args->value[option];
  if (!text || strcmp(text, "unlimited"))
    return cli_args_integer(args, option, 0, INT32_MAX, window);
  *window = SWATHE_UNLIMITED;
  return CLI_OK;
}

static enum cli_exit read_windows(const struct cli_args *args, struct swathe_problem *problem)
{
  int64_t window = 0;
  enum cli_exit code = cli_args_integer(args, CLI_WINDOW, 1, INT32_MAX, &window);

  if (!code && window) {
    problem->window_left = window - 1;
    problem->window_right = 0;
  }
  if (!code) code = read_window(args, CLI_WINDOW_LEFT, &problem->window_left);
  if (!code) code = read_window(args, CLI_WINDOW_RIGHT, &problem->window_right);
  return code;
}

static enum cli_exit read_names(const struct cli_args *args, struct swathe_problem *problem)
{
  enum swathe_status status = SWATHE_OK;
  enum cli_option option = CLI_DTYPE;

  if (args->value[CLI_DTYPE]) status = swathe_dtype_parse(args->value[CLI_DTYPE], &problem->dtype);
  if (!status && args->value[CLI_HALO_GRADIENT]) {
    option = CLI_HALO_GRADIENT;
    status = swathe_dtype_parse(args->value[CLI_HALO_GRADIENT], &problem->halo_gradient);
  }
  if (!status && args->value[CLI_TARGET]) {
    option = CLI_TARGET;
    status = swathe_target_parse(args->value[CLI_TARGET], &problem->target);
  }
  if (!status && args->value[CLI_LAYOUT]) {
    option = CLI_LAYOUT;
    status = swathe_layout_parse(args->value[CLI_LAYOUT], &problem->layout);
  }
  if (!status) return CLI_OK;
  (void)cli_fail_library(status, "%s %s", cli_args_name(option), args->value[option]);
  return CLI_BAD_USE;
}

// Everything but the sequence: preset, then --problem, then the options that name one field.
static enum cli_exit read_problem(const struct cli_args *args, struct cli_given *given)
{
  struct swathe_problem *problem = &given->problem;
  const char *model = args->value[CLI_MODEL], *text = args->value[CLI_PROBLEM];
  int64_t ranks = 0;

  swathe_problem_init(problem);
  if (model) {
    const enum swathe_status status = swathe_model_problem(given->context, model, problem);
    if (status) {
      const enum cli_exit code = cli_fail_library(status, "--model %s", model);
      return status == SWATHE_NOT_FOUND ? CLI_BAD_USE : code;
    }
  }
  if (text) {
    const enum swathe_status status = swathe_problem_parse(text, problem);
    if (status) {
      (void)cli_fail_library(status, "--problem %s", text);
      return CLI_BAD_USE;
    }
  }
  enum cli_exit code = read_windows(args, problem);
  if (!code) code = read_names(args, problem);
  if (!code) code = cli_args_real(args, CLI_SOFTCAP, &problem->softcap);
  if (!code) code = cli_args_real(args, CLI_SCALE, &problem->scale);
  if (!code) code = cli_args_integer(args, CLI_RANKS, 1, MOST_RANKS, &ranks);
  if (!code && ranks) problem->ranks = (int32_t)ranks;
  if (!code && problem->layout == SWATHE_SPANS)
    code =
        cli_fail(CLI_BAD_USE, "the layout 'spans' needs a list of spans, which only a program can "
                              "give; choose contiguous, zigzag or zigzag-doc");
  return code;
}

// ---- Sequence -----------------------------------------------------------------------------------

// --documents 512,1024 -> cumulative starts { 0, 512, 1536 }.
static enum cli_exit read_documents(const struct cli_args *args, struct cli_given *given)
{
  const char *text = args->value[CLI_DOCUMENTS];
  int64_t count = 1, total = 0;

  for (const char *c = text; *c; c++) count += *c == ',';
  int64_t *starts = calloc((size_t)count + 1, sizeof *starts);
  if (!starts) return cli_fail(CLI_FAILED, "out of memory for %" PRId64 " documents", count);
  given->document_starts = starts;
  for (int64_t i = 0; i < count; i++) {
    int64_t length = 0;
    if (!cli_args_number(text, &length, &text) || (*text && *text != ','))
      return cli_fail(CLI_BAD_USE, "--documents %s: the %" PRId64 ". length is not a whole number",
                      args->value[CLI_DOCUMENTS], i + 1);
    if (length < 0 || length > most_tokens - total)
      return cli_fail(CLI_BAD_USE, "--documents %s: the %" PRId64 ". length is out of range",
                      args->value[CLI_DOCUMENTS], i + 1);
    total += length;
    starts[i + 1] = total;
    if (*text) text++;
  }
  given->sharding.documents = count;
  given->sharding.document_starts = starts;
  return CLI_OK;
}

// Tokens of the sequence and of a rank's typical share, after documents and files.
static enum cli_exit read_tokens(const struct cli_args *args, const struct cli_given_files *files,
                                 struct cli_given *given)
{
  struct swathe_problem *problem = &given->problem;
  struct swathe_sharding *sharding = &given->sharding;
  const int64_t documents_sum =
      given->document_starts ? given->document_starts[sharding->documents] : 0;
  int64_t batch = files ? files->batch : 1;
  enum cli_exit code = cli_args_integer(args, CLI_BATCH, 1, MOST_BATCH, &batch);
  if (code) return code;

  const bool said = args->value[CLI_TOKENS] || files || given->document_starts;
  int64_t tokens = files ? files->tokens : documents_sum;
  if (!said) {
    if (problem->tokens_per_rank > most_tokens / problem->ranks)
      return cli_fail(CLI_BAD_USE, "--problem tokens_per_rank is out of range");
    tokens = problem->tokens_per_rank * problem->ranks / batch;
  }
  code = cli_args_integer(args, CLI_TOKENS, 1, most_tokens, &tokens);
  if (code) return code;
  if (tokens < 1) return cli_fail(CLI_BAD_USE, "the sequence has no tokens; see --tokens");
  if (tokens < documents_sum)
    return cli_fail(CLI_BAD_USE,
                    "--documents are %" PRId64 " tokens together, but the sequence has %" PRId64,
                    documents_sum, tokens);
  sharding->tokens = tokens;
  sharding->batch = (int32_t)batch;
  sharding->ranks = problem->ranks;
  sharding->layout = problem->layout;
  problem->tokens_per_rank = (tokens + problem->ranks - 1) / problem->ranks * batch;
  return CLI_OK;
}

static enum cli_exit take_files(const struct cli_args *args, const struct cli_given_files *files,
                                struct swathe_problem *problem)
{
  if (problem->sinks && !files->sink)
    return cli_fail(CLI_BAD_USE,
                    "%s has sinks: give their logits with --sink FILE, or leave them out "
                    "with --problem sinks=0",
                    args->value[CLI_MODEL] ? args->value[CLI_MODEL] : "the problem");
  problem->sinks = files->sink;
  problem->q_heads = files->q_heads;
  problem->kv_heads = files->kv_heads;
  problem->head_dim_qk = files->head_dim_qk;
  problem->head_dim_v = files->head_dim_v;
  return CLI_OK;
}

// Ranks as the options say, before there is a context to ask for a preset; presets say 1.
static enum cli_exit read_ranks_early(const struct cli_args *args, int64_t *ranks)
{
  const char *field = problem_field(args, "ranks"), *end = NULL;
  *ranks = 1;
  if (field && (!cli_args_number(field, ranks, &end) || *ranks < 1 || *ranks > MOST_RANKS))
    *ranks = 1;  // the parser of problems will say what is wrong
  return cli_args_integer(args, CLI_RANKS, 1, MOST_RANKS, ranks);
}

enum cli_exit cli_given_read(const struct cli_args *args, bool share_processors,
                             const struct cli_given_files *files, struct cli_given *given)
{
  int64_t ranks = 1;
  enum cli_exit code = check_contradictions(args);

  if (!code && files) code = check_files(args);
  if (!code) code = read_ranks_early(args, &ranks);
  if (code) return code;
  const int32_t processors = cli_given_processors();
  const int32_t share = processors / cli_ranks_sharing(args, (int32_t)ranks, processors);
  code = cli_given_open(args, !share_processors ? 0 : share < 1 ? 1 : share, given);
  if (!code) code = read_problem(args, given);
  if (!code && files) code = take_files(args, files, &given->problem);
  if (!code && args->value[CLI_DOCUMENTS]) code = read_documents(args, given);
  if (!code) code = read_tokens(args, files, given);
  if (code) return code;
  const enum swathe_status status = swathe_problem_check(&given->problem);
  return status ? cli_fail_library(status, "this problem cannot be served") : CLI_OK;
}
