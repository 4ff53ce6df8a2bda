// paper_report.c: the strategies on paper as a table, with the formulas, and where among other
// numbers of ranks the halo makes a difference.  See paper_report.h.
#include "paper_report.h"

#include "report.h"

#include <inttypes.h>

enum { MOST_GROUPS = 8, LEAST_RANKS = 2, FAR_RANKS = 64 };

// The same sequence over 2, 4, 8, ... ranks, up to 64 or as many as were asked for.
struct groups {
  int count;
  struct cli_paper papers[2 * MOST_GROUPS];
};

static enum cli_exit make_groups(const struct cli_given *given,
                                 const struct cli_paper_cluster *cluster, struct groups *groups)
{
  const int32_t most = given->sharding.ranks > FAR_RANKS ? given->sharding.ranks : FAR_RANKS;
  enum cli_exit code = CLI_OK;

  groups->count = 0;
  for (int32_t ranks = LEAST_RANKS;
       ranks <= most && ranks <= given->sharding.tokens && !code && groups->count < 2 * MOST_GROUPS;
       ranks *= 2) {
    struct swathe_problem problem = given->problem;
    struct swathe_sharding sharding = given->sharding;
    problem.ranks = sharding.ranks = ranks;
    code = cli_paper_make(&problem, &sharding, cluster, &groups->papers[groups->count++]);
  }
  return code;
}

static const char *verdict_of(const struct cli_paper *paper)
{
  return cli_paper_matters(paper) ? "matters" : "does not matter";
}

// ---- Text ---------------------------------------------------------------------------------------

static void print_links(const struct cli_paper_cluster *cluster)
{
  printf("\nOn paper, %g GB/s and %g us %s", cluster->far.bytes_per_us / 1e3, cluster->far.us,
         cluster->node_ranks > 1 ? "between nodes" : "between any two ranks");
  if (cluster->node_ranks > 1)
    printf(", %g GB/s and %g us within nodes of %" PRId32 " ranks",
           cluster->near.bytes_per_us / 1e3, cluster->near.us, cluster->node_ranks);
  printf(":\n");
}

static void print_rows(const struct cli_paper *paper)
{
  static const char *const titles[] = { "  strategy", "received fwd", "bwd",        "time fwd",
                                        "bwd",        "exposed",      "time of halo" };
  const double halo_us = cli_paper_total_us(paper, &paper->rows[SWATHE_HALO]);
  struct cli_table table = { .align = "lrrrrrr" };

  for (int i = 0; i < 7; i++) cli_report_cell(&table, "%s", titles[i]);
  for (int s = 0; s < CLI_PAPER_STRATEGIES; s++) {
    const struct cli_paper_row *row = &paper->rows[s];
    cli_report_cell(&table, "  %s", swathe_strategy_name(row->strategy));
    if (row->refused) {
      for (int i = 0; i < 5; i++) cli_report_cell(&table, "-");
      cli_report_cell(&table, "refused");
      continue;
    }
    for (int d = 0; d < 2; d++)
      cli_report_cell(&table, "%s", cli_report_size(row->received_bytes[d]).text);
    for (int d = 0; d < 2; d++) cli_report_cell(&table, "%s", cli_report_time(row->us[d]).text);
    cli_report_cell(&table, "%s",
                    cli_report_time(row->exposed_us[0] + row->exposed_us[1]).text);
    if (halo_us > 0) cli_report_cell(&table, "%.2fx", cli_paper_total_us(paper, row) / halo_us);
    else cli_report_cell(&table, "-");
  }
  cli_report_table(&table);
  if (paper->rows[SWATHE_A2A].refused)
    printf("  a2a is refused: the heads do not divide by %" PRId32 " ranks\n", paper->ranks);
}

static void print_formulas(const struct cli_paper *paper, const struct cli_paper_cluster *cluster)
{
  printf("\nFormulas (alpha us of a message, beta bytes per us; the slowest rank and link):\n"
         "  halo        alpha + bytes / beta: all messages of a rank at once, per link\n"
         "  all_gather, ring_all\n"
         "              (ranks - 1) * (alpha + share bytes / beta): rounds of a ring\n"
         "  ring        the same, as many rounds as ranks the window reaches%s\n"
         "  a2a         (ranks - 1) * alpha + bytes / beta: rounds of pairs\n",
         cluster->node_ranks > 1 ? "" : "; both ways at once share a link");
  if (paper->attention_us[0] > 0)
    printf("  exposed     what is longer than the part of attention that needs no other rank, "
           "%.0f%%\n              (1 - halo tokens / share); a2a: all of it\n"
           "  attention   %s forward, %s backward, of the largest share\n",
           100 * paper->hideable, cli_report_time(paper->attention_us[0]).text,
           cli_report_time(paper->attention_us[1]).text);
  else
    printf("  exposed     all of it: nothing hides it unless --attention-us or --tflops says how "
           "long\n              attention takes\n");
  printf("  backward    with what forward received kept: the sums of gradients go home, in the "
         "dtype of\n              --halo-gradient; a2a: dout in, dq, dk and dv back\n");
}

static void print_verdict(const struct cli_paper *paper)
{
  const struct cli_paper_row *halo = &paper->rows[SWATHE_HALO];
  const double exposed_us = halo->exposed_us[0] + halo->exposed_us[1];

  printf("\nWith %" PRId32 " ranks the halo %s: ", paper->ranks, verdict_of(paper));
  if (!(halo->us[0] > 0)) {
    printf("nothing has to travel.\n");
    return;
  }
  printf("the best other way, %s, takes %.2fx its time%s.\n", swathe_strategy_name(paper->best),
         paper->ratio, paper->attention_us[0] > 0 ? ", attention included" : " on the wire");
  if (paper->attention_us[0] > 0 && exposed_us > 0)
    printf("Of the halo's exchange %s is not hidden: the shares are short beside the window.\n",
           cli_report_time(exposed_us).text);
}

static void print_groups(const struct groups *groups, const struct cli_given *given)
{
  static const char *const titles[] = { "  ranks",    "share",   "attention",     "halo exposed",
                                        "best other", "exposed", "time of halo", "the halo" };
  struct cli_table table = { .align = "rrrrlrrl" };

  printf("\nThe same %" PRId64 " tokens over other numbers of ranks, both passes:\n",
         given->sharding.tokens);
  for (int i = 0; i < 8; i++) cli_report_cell(&table, "%s", titles[i]);
  for (int i = 0; i < groups->count; i++) {
    const struct cli_paper *paper = &groups->papers[i];
    const struct cli_paper_row *halo = &paper->rows[SWATHE_HALO];
    const struct cli_paper_row *best = &paper->rows[paper->best];
    cli_report_cell(&table, "%" PRId32, paper->ranks);
    cli_report_cell(&table, "%" PRId64, paper->share_tokens);
    if (paper->attention_us[0] > 0)
      cli_report_cell(&table, "%s",
                      cli_report_time(paper->attention_us[0] + paper->attention_us[1]).text);
    else cli_report_cell(&table, "-");
    cli_report_cell(&table, "%s",
                    cli_report_time(halo->exposed_us[0] + halo->exposed_us[1]).text);
    cli_report_cell(&table, "%s", swathe_strategy_name(paper->best));
    cli_report_cell(&table, "%s",
                    cli_report_time(best->exposed_us[0] + best->exposed_us[1]).text);
    if (paper->ratio > 0) cli_report_cell(&table, "%.2fx", paper->ratio);
    else cli_report_cell(&table, "-");
    cli_report_cell(&table, "%s", verdict_of(paper));
  }
  cli_report_table(&table);
}

enum cli_exit cli_paper_report_print(const struct cli_given *given,
                                     const struct cli_paper_cluster *cluster)
{
  struct cli_paper paper;
  struct groups groups;
  enum cli_exit code = cli_paper_make(&given->problem, &given->sharding, cluster, &paper);

  if (!code) code = make_groups(given, cluster, &groups);
  if (code) return code;
  print_links(cluster);
  print_rows(&paper);
  print_formulas(&paper, cluster);
  print_verdict(&paper);
  print_groups(&groups, given);
  return CLI_OK;
}

// ---- JSON ---------------------------------------------------------------------------------------

static json_t *pass_json(const struct cli_paper_row *row, int d)
{
  return json_pack("{s:I, s:o, s:o}", "received_bytes", (json_int_t)row->received_bytes[d],
                   "time_us", cli_report_real(row->us[d]), "exposed_us",
                   cli_report_real(row->exposed_us[d]));
}

static json_t *paper_json(const struct cli_paper *paper)
{
  json_t *strategies = json_array();
  for (int s = 0; s < CLI_PAPER_STRATEGIES; s++) {
    const struct cli_paper_row *row = &paper->rows[s];
    json_array_append_new(
        strategies, row->refused
                        ? json_pack("{s:s, s:b}", "strategy", swathe_strategy_name(row->strategy),
                                    "refused", 1)
                        : json_pack("{s:s, s:b, s:o, s:o, s:o}", "strategy",
                                    swathe_strategy_name(row->strategy), "refused", 0, "forward",
                                    pass_json(row, 0), "backward", pass_json(row, 1), "total_us",
                                    cli_report_real(cli_paper_total_us(paper, row))));
  }
  return json_pack("{s:i, s:I, s:o, s:o, s:o, s:o, s:s, s:o, s:b}", "ranks", paper->ranks,
                   "share_tokens", (json_int_t)paper->share_tokens, "attention_forward_us",
                   cli_report_real(paper->attention_us[0]), "attention_backward_us",
                   cli_report_real(paper->attention_us[1]), "hideable",
                   cli_report_real(paper->hideable), "strategies", strategies, "best_other",
                   swathe_strategy_name(paper->best), "ratio", cli_report_real(paper->ratio),
                   "halo_matters", cli_paper_matters(paper));
}

static json_t *link_json(const struct cli_paper_link *link)
{
  return json_pack("{s:o, s:o}", "bytes_per_us", cli_report_real(link->bytes_per_us), "message_us",
                   cli_report_real(link->us));
}

enum cli_exit cli_paper_report_json(const struct cli_given *given,
                                    const struct cli_paper_cluster *cluster, json_t **object)
{
  struct cli_paper paper;
  struct groups groups;
  enum cli_exit code = cli_paper_make(&given->problem, &given->sharding, cluster, &paper);

  if (!code) code = make_groups(given, cluster, &groups);
  if (code) return code;
  json_t *others = json_array();
  for (int i = 0; i < groups.count; i++)
    json_array_append_new(others, paper_json(&groups.papers[i]));
  *object = paper_json(&paper);
  json_object_set_new(*object, "link", link_json(&cluster->far));
  json_object_set_new(*object, "intra",
                      cluster->node_ranks > 1 ? link_json(&cluster->near) : json_null());
  json_object_set_new(*object, "node_ranks", json_integer(cluster->node_ranks));
  json_object_set_new(*object, "over_ranks", others);
  return CLI_OK;
}
