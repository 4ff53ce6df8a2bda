// run.c: the verb `run`: a layer over ranks of this machine, on random data or on tensors from
// files, with its bytes, its times and, with --check, its errors.
#include "check_report.h"
#include "group.h"
#include "report.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

// ---- What was moved -----------------------------------------------------------------------------

// Planned bytes beside those that the ranks counted on the wire.
struct moved {
  int64_t element_bytes;       // of keys and values
  int64_t halo_tokens;         // all ranks
  int64_t halo_bytes;          // all ranks, forward
  int64_t gradient_bytes;      // all ranks, backward: the sums that go home
  int64_t all_gather_bytes, ring_bytes;
  bool forward_exact, backward_exact;  // every rank counted what the formula says, both ways
};

static int64_t token_elements(const struct swathe_problem *problem)
{
  return (int64_t)problem->kv_heads * (problem->head_dim_qk + problem->head_dim_v);
}

static int64_t dtype_bytes(enum swathe_dtype dtype)
{
  return dtype == SWATHE_F32 ? 4 : 2;
}

static struct moved moved_bytes(const struct cli_group *group)
{
  const struct swathe_problem *problem = &group->given->problem;
  const int64_t elements = token_elements(problem) * group->given->sharding.batch;
  const int64_t sum_bytes = dtype_bytes(problem->halo_gradient);
  struct moved moved = { .element_bytes = dtype_bytes(problem->dtype),
                         .forward_exact = true,
                         .backward_exact = true };

  for (int32_t r = 0; r < group->given->sharding.ranks; r++) {
    const struct swathe_traffic *planned = &group->traffic[r];
    const int64_t received = planned->halo_tokens * elements,
                  sent = planned->send_tokens * elements;
    const struct swathe_timing *forward = &group->forward[r], *backward = &group->backward[r];
    moved.halo_tokens += planned->halo_tokens;
    moved.halo_bytes += received * moved.element_bytes;
    moved.gradient_bytes += received * sum_bytes;
    moved.all_gather_bytes += planned->all_gather_bytes;
    moved.ring_bytes += planned->ring_bytes;
    if (forward->received_bytes != received * moved.element_bytes ||
        forward->sent_bytes != sent * moved.element_bytes)
      moved.forward_exact = false;
    // Homewards: a rank sends for the keys it had received.
    if (backward->sent_bytes != received * sum_bytes ||
        backward->received_bytes != sent * sum_bytes)
      moved.backward_exact = false;
  }
  return moved;
}

// ---- Times --------------------------------------------------------------------------------------

struct times {
  double best_us, median_us, wait_us;  // wait: of the best repetition
};

static int compare_times(const void *a, const void *b)
{
  const double one = *(const double *)a, other = *(const double *)b;
  return (one > other) - (one < other);
}

static struct times summarize(const double *us, const double *wait_us, int64_t count)
{
  struct times times = { us[0], us[0], wait_us[0] };
  double *sorted = malloc((size_t)count * sizeof *sorted);

  for (int64_t i = 1; i < count; i++)
    if (us[i] < times.best_us) {
      times.best_us = us[i];
      times.wait_us = wait_us[i];
    }
  times.median_us = times.best_us;
  if (!sorted) return times;
  memcpy(sorted, us, (size_t)count * sizeof *sorted);
  qsort(sorted, (size_t)count, sizeof *sorted, compare_times);
  times.median_us = (sorted[(count - 1) / 2] + sorted[count / 2]) / 2;
  free(sorted);
  return times;
}

// ---- JSON ---------------------------------------------------------------------------------------

static json_t *times_json(const double *us, const double *wait_us, int64_t count)
{
  const struct times times = summarize(us, wait_us, count);
  return json_pack("{s:o, s:o, s:o}", "best_us", cli_report_real(times.best_us), "median_us",
                   cli_report_real(times.median_us), "wait_us", cli_report_real(times.wait_us));
}

static json_t *ranks_json(const struct cli_group *group)
{
  json_t *ranks = json_array();

  for (int32_t r = 0; r < group->given->sharding.ranks; r++) {
    const struct swathe_traffic *planned = &group->traffic[r];
    const struct swathe_timing *forward = &group->forward[r], *backward = &group->backward[r];
    json_t *rank = json_pack(
        "{s:i, s:I, s:I, s:I, s:I, s:I, s:I, s:o}", "rank", r, "rows", (json_int_t)planned->rows,
        "halo_tokens", (json_int_t)planned->halo_tokens, "receive_bytes",
        (json_int_t)planned->receive_bytes, "send_bytes", (json_int_t)planned->send_bytes,
        "forward_received_bytes", (json_int_t)forward->received_bytes, "forward_sent_bytes",
        (json_int_t)forward->sent_bytes, "forward_us", cli_report_real(forward->total_us));
    json_object_set_new(rank, "memory_bytes", json_integer(group->memory_bytes[r]));
    if (group->arrays->backward) {
      json_object_set_new(rank, "backward_received_bytes", json_integer(backward->received_bytes));
      json_object_set_new(rank, "backward_sent_bytes", json_integer(backward->sent_bytes));
      json_object_set_new(rank, "backward_us", cli_report_real(backward->total_us));
    }
    json_array_append_new(ranks, rank);
  }
  return ranks;
}

static enum cli_exit print_json(const struct cli_args *args, const struct cli_group *group,
                                const struct cli_check *check, enum cli_exit code)
{
  const struct moved moved = moved_bytes(group);
  const struct swathe_sharding *sharding = &group->given->sharding;
  json_t *document = json_pack(
      "{s:s, s:o, s:I, s:i, s:I, s:i, s:s, s:I, s:I, s:o}", "verb", "run", "problem",
      cli_report_problem(&group->given->problem), "tokens", (json_int_t)sharding->tokens, "batch",
      sharding->batch, "documents", (json_int_t)sharding->documents, "threads_per_rank",
      group->given->threads, "explain", group->explain, "kernels_compiled",
      (json_int_t)group->compiled, "kernels_loaded", (json_int_t)group->loaded, "ranks",
      ranks_json(group));
  json_t *bytes = json_pack(
      "{s:I, s:I, s:b, s:I, s:I}", "halo_tokens", (json_int_t)moved.halo_tokens, "halo_bytes",
      (json_int_t)moved.halo_bytes, "forward_exact", moved.forward_exact, "all_gather_bytes",
      (json_int_t)moved.all_gather_bytes, "ring_bytes", (json_int_t)moved.ring_bytes);

  if (group->arrays->backward) {
    json_object_set_new(bytes, "gradient_bytes", json_integer(moved.gradient_bytes));
    json_object_set_new(bytes, "backward_exact", json_boolean(moved.backward_exact));
  }
  json_object_set_new(document, "bytes", bytes);
  json_object_set_new(document, "forward",
                      times_json(group->forward_us, group->forward_wait_us, group->repeat));
  if (group->arrays->backward)
    json_object_set_new(document, "backward",
                        times_json(group->backward_us, group->backward_wait_us, group->repeat));
  if (check) json_object_set_new(document, "check", cli_check_report_json(check));
  if (args->value[CLI_OUT]) json_object_set_new(document, "out", json_string(args->value[CLI_OUT]));
  return cli_report_json(document, code);
}

// ---- Text ---------------------------------------------------------------------------------------

static void print_config(const struct cli_group *group)
{
  const struct swathe_sharding *sharding = &group->given->sharding;

  printf("%s\n", cli_report_problem_words(&group->given->problem));
  printf("%" PRId64 " tokens, batch %" PRId32 ", %s over %" PRId32 " rank%s", sharding->tokens,
         sharding->batch, swathe_layout_name(sharding->layout), sharding->ranks,
         sharding->ranks == 1 ? "" : "s");
  if (group->given->problem.target == SWATHE_CPU)
    printf(" of %" PRId32 " compute thread%s", group->given->threads,
           group->given->threads == 1 ? "" : "s");
  printf("\n\nRank 0 says:\n");
  for (const char *line = group->explain; *line;) {
    char text[1024];
    const size_t length = strcspn(line, "\n");
    snprintf(text, sizeof text, "%.*s", (int)length, line);
    printf("  ");
    cli_report_wrapped(2, 12, text);
    line += length + (line[length] == '\n');
  }
  printf("  kernels   %" PRId64 " compiled, %" PRId64 " loaded from the cache\n\n", group->compiled,
         group->loaded);
}

static void print_ranks(const struct cli_group *group)
{
  static const char *const titles[] = { "  rank", "rows", "halo tokens", "received", "sent",
                                        "forward", "backward" };
  struct cli_table table = { .align = "rrrrrrr" };

  printf("Bytes on the wire, forward, as each rank counted them, and its last times:\n");
  for (int i = 0; i < 7; i++) cli_report_cell(&table, "%s", titles[i]);
  for (int32_t r = 0; r < group->given->sharding.ranks; r++) {
    cli_report_cell(&table, "%" PRId32, r);
    cli_report_cell(&table, "%" PRId64, group->traffic[r].rows);
    cli_report_cell(&table, "%" PRId64, group->traffic[r].halo_tokens);
    cli_report_cell(&table, "%s", cli_report_bytes(group->forward[r].received_bytes).text);
    cli_report_cell(&table, "%s", cli_report_bytes(group->forward[r].sent_bytes).text);
    cli_report_cell(&table, "%s", cli_report_time(group->forward[r].total_us).text);
    if (group->arrays->backward)
      cli_report_cell(&table, "%s", cli_report_time(group->backward[r].total_us).text);
    else
      cli_report_cell(&table, "-");
  }
  cli_report_table(&table);
}

static struct cli_text ratio_text(int64_t bytes, int64_t halo_bytes)
{
  struct cli_text text = { "" };
  if (halo_bytes > 0)
    snprintf(text.text, sizeof text.text, ", %.2fx the halo", (double)bytes / (double)halo_bytes);
  return text;
}

static void print_bytes(const struct cli_group *group)
{
  const struct swathe_problem *p = &group->given->problem;
  const int32_t batch = group->given->sharding.batch;
  const struct moved moved = moved_bytes(group);

  printf("  halo bytes = halo_tokens * kv_heads * (head_dim_qk + head_dim_v) * bytes%s\n"
         "  all ranks:   %" PRId64 " * %" PRId32 " * (%" PRId32 " + %" PRId32 ") * %" PRId64,
         batch > 1 ? " * batch" : "", moved.halo_tokens, p->kv_heads, p->head_dim_qk, p->head_dim_v,
         moved.element_bytes);
  if (batch > 1) printf(" * %" PRId32, batch);
  printf(" = %s\n", cli_report_bytes(moved.halo_bytes).text);
  printf("  forward    %s\n", moved.forward_exact ? "every rank sent and received exactly that"
                                                  : "THE RANKS COUNTED OTHERWISE");
  if (group->arrays->backward)
    printf("  backward   %s of gradients (%s sums) went home; %s\n",
           cli_report_bytes(moved.gradient_bytes).text, swathe_dtype_name(p->halo_gradient),
           moved.backward_exact ? "exactly that was counted" : "THE RANKS COUNTED OTHERWISE");
  int64_t most = 0;
  for (int32_t r = 0; r < group->given->sharding.ranks; r++)
    if (group->memory_bytes[r] > most) most = group->memory_bytes[r];
  printf("  memory     at most %s of a rank, beside its tensors\n", cli_report_bytes(most).text);
  printf("  all-gather of K and V would receive %s%s\n",
         cli_report_bytes(moved.all_gather_bytes).text,
         ratio_text(moved.all_gather_bytes, moved.halo_bytes).text);
  printf("  a ring as far as the window reaches %s%s\n\n", cli_report_bytes(moved.ring_bytes).text,
         ratio_text(moved.ring_bytes, moved.halo_bytes).text);
}

static void print_times(const char *name, const double *us, const double *wait_us, int64_t repeat)
{
  const struct times times = summarize(us, wait_us, repeat);

  printf("  %-9s %s", name, cli_report_time(times.best_us).text);
  if (repeat > 1)
    printf(" best, %s median of %" PRId64, cli_report_time(times.median_us).text, repeat);
  if (isnan(times.wait_us)) printf("; streams wait for the wire, which is not measured\n");
  else printf("; waited for the wire %s\n", cli_report_time(times.wait_us).text);
}

static void print_text(const struct cli_args *args, const struct cli_group *group,
                       const struct cli_check *check)
{
  print_config(group);
  print_ranks(group);
  print_bytes(group);
  printf("Time of the slowest rank, and the longest wait with nothing left to compute:\n");
  print_times("forward", group->forward_us, group->forward_wait_us, group->repeat);
  if (group->arrays->backward)
    print_times("backward", group->backward_us, group->backward_wait_us, group->repeat);
  if (check) {
    putchar('\n');
    cli_check_report_print(check);
  }
  if (args->value[CLI_OUT]) printf("\nwritten to %s\n", args->value[CLI_OUT]);
}

// ---- The run ------------------------------------------------------------------------------------

// Options that make no sense together, before anything is read.
static enum cli_exit check_options(const struct cli_args *args)
{
  static const enum cli_option with_q[] = { CLI_K, CLI_V, CLI_SINK, CLI_DOUT };
  enum cli_exit code = cli_args_exclude(args, CLI_FORWARD, CLI_DOUT, "only backward reads dout");

  for (int i = 0; i < 4 && !code; i++)
    if (args->value[with_q[i]] && !args->value[CLI_Q])
      code = cli_fail(CLI_BAD_USE, "%s needs --q too", cli_args_name(with_q[i]));
  for (int i = 0; i < 2 && !code; i++)
    if (args->value[CLI_Q] && !args->value[with_q[i]])
      code = cli_fail(CLI_BAD_USE, "--q needs %s too", cli_args_name(with_q[i]));
  if (!code) code = cli_ranks_check(args, true);
  return code;
}

static enum cli_exit read_data(const struct cli_args *args, uint64_t seed, struct cli_given *given,
                               struct cli_arrays *arrays)
{
  struct cli_given_files files;
  enum cli_exit code;

  if (args->value[CLI_Q]) {
    code = cli_arrays_read(args, arrays, &files);
    if (!code) code = cli_given_read(args, true, &files, given);
  } else {
    code = cli_given_read(args, true, NULL, given);
    if (!code) code = cli_arrays_random(given, !args->value[CLI_FORWARD], seed, arrays);
  }
  return code ? code : cli_arrays_prepare(&given->problem, arrays);
}

static enum cli_exit run_and_check(const struct cli_args *args, struct cli_group *group,
                                   uint64_t seed)
{
  struct cli_check check = { .given = group->given, .arrays = group->arrays, .seed = seed };
  const bool wanted = args->value[CLI_CHECK];
  enum cli_exit code = cli_group_run(group);
  if (code || group->ranks.first > 0) return code;  // the rest is rank 0's

  if (args->value[CLI_OUT]) code = cli_arrays_write(group->arrays, args->value[CLI_OUT]);
  if (!code && wanted) code = cli_check_run(&check);
  if (code) return code;
  const struct moved moved = moved_bytes(group);
  if (wanted && !check.passed)
    code = cli_fail(CLI_FAILED, "the results differ from the reference by more than the limit");
  else if (!moved.forward_exact || (group->arrays->backward && !moved.backward_exact))
    code = cli_fail(CLI_FAILED, "the bytes on the wire are not the halo's");
  if (args->value[CLI_JSON]) return print_json(args, group, wanted ? &check : NULL, code);
  print_text(args, group, wanted ? &check : NULL);
  return code;
}

static enum cli_exit run(const struct cli_args *args)
{
  struct cli_given given = { 0 };
  struct cli_arrays arrays = { 0 };
  struct cli_group group = { .args = args, .given = &given, .arrays = &arrays, .repeat = 1 };
  int64_t seed = 1;
  enum cli_exit code = check_options(args);

  if (!code) code = cli_args_integer(args, CLI_SEED, 0, INT32_MAX, &seed);
  if (!code) code = cli_args_integer(args, CLI_REPEAT, 1, 1000000, &group.repeat);
  if (!code) code = read_data(args, (uint64_t)seed, &given, &arrays);
  if (!code && args->value[CLI_TRANSPORT] && !strcmp(args->value[CLI_TRANSPORT], "nccl") &&
      given.problem.target != SWATHE_CUDA)
    code = cli_fail(CLI_BAD_USE, "--transport nccl is for --target cuda");
  if (!code) code = run_and_check(args, &group, (uint64_t)seed);
  cli_group_free(&group);
  cli_arrays_free(&arrays);
  cli_given_close(&given);
  return code;
}

const struct cli_verb cli_verb_run = {
  .name = "run",
  .operands = "",
  .summary = "Run a layer over ranks of this machine; check it, or replay tensors.",
  .details = "Forward and backward on seeded random data, or on .npy files of the whole sequence, "
             "which is "
             "sharded, run and put together again.",
  .options = CLI_COMMON_OPTIONS | CLI_PROBLEM_OPTIONS | CLI_CONTEXT_OPTIONS | CLI_BIT(Q) |
             CLI_BIT(K) | CLI_BIT(V) | CLI_BIT(SINK) | CLI_BIT(DOUT) | CLI_BIT(OUT) |
             CLI_BIT(CHECK) | CLI_BIT(SEED) | CLI_BIT(REPEAT) | CLI_BIT(TRANSPORT) |
             CLI_BIT(DEADLINE) | CLI_BIT(EXCHANGE) | CLI_BIT(FORWARD),
  .examples = { "a preset over 4 ranks, compared with the reference",
                "swathe run --model gpt-oss-20b --tokens 4096 --ranks 4 --check",
                "the same with a process per rank",
                "mpirun -n 4 swathe run --model gpt-oss-20b --tokens 4096 --ranks 4 --check "
                "--transport mpi",
                "tensors dumped from training, forward and backward, results in ./results",
                "swathe run --q q.npy --k k.npy --v v.npy --dout do.npy --window 128 --ranks 2 "
                "--out results",
                "the best of 20 times, for a script",
                "swathe run --model gemma-3-1b --tokens 8192 --ranks 2 --repeat 20 --json | "
                "jq .forward.best_us",
                NULL },
  .run = run,
};
