// plan.c: the verb `plan`: who sends what to whom, and what other ways of sharing would move.
#include "paper_report.h"
#include "report.h"

#include <inttypes.h>
#include <stdlib.h>

struct plan {
  bool json, list_messages;
  const struct swathe_problem *problem;
  const struct swathe_sharding *sharding;
  struct swathe_traffic *traffic;  // [ranks]
  struct swathe_traffic total;     // sums; peers and hops: the largest
  struct cli_table messages;
  json_t *messages_json;
  int64_t message_count;
  json_t *paper;                   // with --link
};

static void visit(void *arg, const struct swathe_message *message)
{
  struct plan *plan = arg;

  plan->message_count++;
  if (!plan->list_messages) return;
  if (plan->json) {
    json_array_append_new(
        plan->messages_json,
        json_pack("{s:i, s:i, s:I, s:I, s:I, s:i}", "from", message->from, "to", message->to,
                  "document", (json_int_t)message->document, "position",
                  (json_int_t)message->position, "tokens", (json_int_t)message->tokens, "hops",
                  message->hops));
    return;
  }
  cli_report_cell(&plan->messages, "%" PRId32, message->from);
  cli_report_cell(&plan->messages, "%" PRId32, message->to);
  cli_report_cell(&plan->messages, "%" PRId64, message->document);
  cli_report_cell(&plan->messages, "%" PRId64, message->position);
  cli_report_cell(&plan->messages, "%" PRId64, message->tokens);
  cli_report_cell(&plan->messages, "%" PRId32, message->hops);
}

static void add_up(struct plan *plan)
{
  struct swathe_traffic *total = &plan->total;

  for (int32_t rank = 0; rank < plan->sharding->ranks; rank++) {
    const struct swathe_traffic *t = &plan->traffic[rank];
    total->rows += t->rows;
    total->spans += t->spans;
    total->halo_tokens += t->halo_tokens;
    total->send_tokens += t->send_tokens;
    total->own_tokens += t->own_tokens;
    total->receive_bytes += t->receive_bytes;
    total->send_bytes += t->send_bytes;
    total->all_gather_bytes += t->all_gather_bytes;
    total->ring_bytes += t->ring_bytes;
    total->ring_all_bytes += t->ring_all_bytes;
    if (t->peers > total->peers) total->peers = t->peers;
    if (t->hops > total->hops) total->hops = t->hops;
    if (t->a2a_bytes < 0) total->a2a_bytes = -1;
    else if (total->a2a_bytes >= 0) total->a2a_bytes += t->a2a_bytes;
  }
}

// ---- JSON ---------------------------------------------------------------------------------------

static json_t *traffic_json(const struct swathe_traffic *t)
{
  return json_pack(
      "{s:I, s:I, s:I, s:I, s:I, s:i, s:i, s:I, s:I, s:I, s:I, s:I, s:o}", "rows",
      (json_int_t)t->rows, "spans", (json_int_t)t->spans, "halo_tokens", (json_int_t)t->halo_tokens,
      "send_tokens", (json_int_t)t->send_tokens, "own_tokens", (json_int_t)t->own_tokens, "peers",
      t->peers, "hops", t->hops, "receive_bytes", (json_int_t)t->receive_bytes, "send_bytes",
      (json_int_t)t->send_bytes, "all_gather_bytes", (json_int_t)t->all_gather_bytes, "ring_bytes",
      (json_int_t)t->ring_bytes, "ring_all_bytes", (json_int_t)t->ring_all_bytes, "a2a_bytes",
      t->a2a_bytes < 0 ? json_null() : json_integer(t->a2a_bytes));
}

static enum cli_exit print_json(struct plan *plan)
{
  json_t *ranks = json_array();
  for (int32_t rank = 0; rank < plan->sharding->ranks; rank++) {
    json_t *row = traffic_json(&plan->traffic[rank]);
    json_object_set_new(row, "rank", json_integer(rank));
    json_array_append_new(ranks, row);
  }
  json_t *document = json_pack(
      "{s:s, s:o, s:I, s:i, s:I, s:o, s:o, s:I}", "verb", "plan", "problem",
      cli_report_problem(plan->problem), "tokens", (json_int_t)plan->sharding->tokens, "batch",
      plan->sharding->batch, "documents", (json_int_t)plan->sharding->documents, "ranks", ranks,
      "total", traffic_json(&plan->total), "message_count", (json_int_t)plan->message_count);
  if (plan->list_messages) {
    json_object_set_new(document, "messages", plan->messages_json);
    plan->messages_json = NULL;
  }
  if (plan->paper) json_object_set(document, "paper", plan->paper);
  return cli_report_json(document, CLI_OK);
}

// ---- Text ---------------------------------------------------------------------------------------

static void add_rank(struct cli_table *table, const char *name, const struct swathe_traffic *t)
{
  cli_report_cell(table, "%s", name);
  cli_report_cell(table, "%" PRId64, t->rows);
  cli_report_cell(table, "%" PRId64, t->spans);
  cli_report_cell(table, "%" PRId64, t->halo_tokens);
  cli_report_cell(table, "%s", cli_report_bytes(t->receive_bytes).text);
  cli_report_cell(table, "%s", cli_report_bytes(t->send_bytes).text);
  cli_report_cell(table, "%" PRId32, t->peers);
  cli_report_cell(table, "%" PRId32, t->hops);
  cli_report_cell(table, "%" PRId64, t->own_tokens);
}

static void print_ranks(const struct plan *plan)
{
  static const char *const titles[] = { "rank", "rows", "spans", "halo tokens", "bytes received",
                                        "bytes sent", "peers", "hops", "own" };
  struct cli_table table = { .align = "rrrrrrrrr" };
  char name[16];

  for (int i = 0; i < 9; i++) cli_report_cell(&table, "%s", titles[i]);
  for (int32_t rank = 0; rank < plan->sharding->ranks; rank++) {
    snprintf(name, sizeof name, "%" PRId32, rank);
    add_rank(&table, name, &plan->traffic[rank]);
  }
  add_rank(&table, "all", &plan->total);
  cli_report_table(&table);
  printf(
      "\nhalo tokens: keys a rank sees but does not hold; own: neighbours of a span that the rank "
      "itself holds;\nhops: how many shares away the farthest halo key lives (in 'all': the "
      "largest, as with peers).\n");
}

static void add_way(struct cli_table *table, const char *way, int64_t bytes, int64_t halo_bytes,
                    const char *otherwise)
{
  cli_report_cell(table, "%s", way);
  cli_report_cell(table, "%s", bytes < 0 ? "-" : cli_report_bytes(bytes).text);
  if (bytes < 0) cli_report_cell(table, "%s", otherwise);
  else if (halo_bytes > 0) cli_report_cell(table, "%.2fx", (double)bytes / (double)halo_bytes);
  else cli_report_cell(table, "-");
}

static void print_ways(const struct plan *plan)
{
  const struct swathe_traffic *total = &plan->total;
  struct cli_table table = { .align = "lrl" };

  printf("\nBytes received by all ranks together, forward, one layer:\n");
  add_way(&table, "  halo (swathe)", total->receive_bytes, total->receive_bytes, "");
  add_way(&table, "  all-gather of K and V", total->all_gather_bytes, total->receive_bytes, "");
  add_way(&table, "  ring, only as far as the window", total->ring_bytes, total->receive_bytes, "");
  add_way(&table, "  ring, all the way round", total->ring_all_bytes, total->receive_bytes, "");
  add_way(&table, "  all-to-all over heads", total->a2a_bytes, total->receive_bytes,
          "heads do not divide by the ranks");
  cli_report_table(&table);
}

static void print_text(struct plan *plan)
{
  const struct swathe_sharding *sharding = plan->sharding;

  printf("%s\n", cli_report_problem_words(plan->problem));
  printf("%" PRId64 " tokens, batch %" PRId32 ", ", sharding->tokens, sharding->batch);
  if (sharding->documents) printf("%" PRId64 " documents", sharding->documents);
  else printf("one document");
  printf(", %s over %" PRId32 " ranks, %" PRId64 " messages\n\n",
         swathe_layout_name(sharding->layout), sharding->ranks, plan->message_count);
  print_ranks(plan);
  print_ways(plan);
  if (!plan->list_messages) return;
  printf("\nMessages (position of the first key in its document):\n");
  if (plan->message_count) cli_report_table(&plan->messages);
  else printf("none: every rank holds all keys it sees\n");
}

static enum cli_exit print_plan(const struct cli_args *args, const struct cli_given *given,
                                const struct cli_paper_cluster *cluster)
{
  static const char *const titles[] = { "from", "to", "document", "position", "tokens", "hops" };
  struct plan plan = {
    .json = args->value[CLI_JSON],
    .list_messages = args->value[CLI_MESSAGES],
    .problem = &given->problem,
    .sharding = &given->sharding,
    .messages = { .align = "rrrrrr" },
    .traffic = calloc((size_t)given->sharding.ranks, sizeof *plan.traffic),
  };
  if (!plan.traffic)
    return cli_fail(CLI_FAILED, "out of memory for %d ranks", given->sharding.ranks);
  if (plan.json) plan.messages_json = json_array();
  for (int i = 0; plan.list_messages && i < 6; i++)
    cli_report_cell(&plan.messages, "%s", titles[i]);

  const enum swathe_status status =
      swathe_plan(plan.problem, plan.sharding, visit, &plan, plan.traffic);
  enum cli_exit code = CLI_OK;
  if (status) {
    code = cli_fail_library(status, "this sequence cannot be planned");
  } else {
    add_up(&plan);
    if (plan.json && args->value[CLI_LINK])
      code = cli_paper_report_json(given, cluster, &plan.paper);
    if (!code && plan.json) code = print_json(&plan);
    if (!code && !plan.json) print_text(&plan);
    if (!code && !plan.json && args->value[CLI_LINK])
      code = cli_paper_report_print(given, cluster);
  }
  json_decref(plan.paper);
  json_decref(plan.messages_json);
  cli_report_drop(&plan.messages);
  free(plan.traffic);
  return code;
}

static enum cli_exit run(const struct cli_args *args)
{
  struct cli_given given = { 0 };
  struct cli_paper_cluster cluster;
  enum cli_exit code = cli_paper_read(args, &cluster);
  if (!code) code = cli_given_read(args, false, NULL, &given);
  if (!code) code = print_plan(args, &given, &cluster);
  cli_given_close(&given);
  return code;
}

const struct cli_verb cli_verb_plan = {
  .name = "plan",
  .operands = "",
  .summary = "Show who sends what to whom.",
  .details =
      "Rows, halo, bytes and hops of each rank, beside what all-gather, all-to-all and ring would "
      "move.  With --link also how long each would take on a cluster that one describes, and where "
      "the halo matters.  Pure arithmetic; nothing runs.",
  .options = CLI_COMMON_OPTIONS | CLI_PROBLEM_OPTIONS | CLI_STORE_OPTIONS | CLI_BIT(MESSAGES) |
             CLI_BIT(LINK) | CLI_BIT(ATTENTION_US) | CLI_BIT(TFLOPS),
  .examples = { "a preset at 128k tokens over 8 ranks",
                "swathe plan --model gpt-oss-20b --tokens 131072 --ranks 8",
                "times over 50 GB/s between and 450 GB/s within nodes of 8 ranks",
                "swathe plan --model gpt-oss-20b --tokens 131072 --ranks 8 --tflops 500 "
                "--link '50,20;intra:450,8,8'",
                "packed documents, zigzag within each, every message",
                "swathe plan --model gemma-3-1b --documents 4096,512,9000 --ranks 4 "
                "--layout zigzag-doc --messages",
                "bytes of each rank, for a script",
                "swathe plan --window 4096 --tokens 65536 --ranks 16 --json | "
                "jq '.ranks[].receive_bytes'",
                NULL },
  .run = run,
};
