// paper.c: communication of each strategy by the alpha-beta model.  See paper.h.  The formulas are
// those that `swathe plan --link` prints; the bytes are those that a layer moves.
#include "paper.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static const double matters_from = 1.05;  // less than 5% is not worth a choice

static double larger(double a, double b) { return a > b ? a : b; }

// ---- Options ------------------------------------------------------------------------------------

// A number and the mark behind it; false if it is not there, negative or not finite.
static bool read_number(const char **text, char mark, double *value)
{
  char *end;
  *value = strtod(*text, &end);
  if (end == *text || !isfinite(*value) || *value < 0 || *end != mark) return false;
  *text = end + (mark != 0);
  return true;
}

static enum cli_exit refuse_link(const char *text)
{
  return cli_fail(CLI_BAD_USE,
                  "--link %s: not GB/s,us or GB/s,us;intra:GB/s,us,RANKS-PER-NODE, such as "
                  "50,20;intra:450,8,8",
                  text);
}

static enum cli_exit read_link(const char *given, struct cli_paper_cluster *cluster)
{
  static const char intra[] = "intra:";
  const bool nodes = strchr(given, ';') != NULL;
  const char *text = given;
  double far_gb, near_gb, ranks;

  *cluster = (struct cli_paper_cluster){ .node_ranks = 1 };
  if (!read_number(&text, ',', &far_gb) || !read_number(&text, nodes ? ';' : 0, &cluster->far.us))
    return refuse_link(given);
  cluster->near = cluster->far;
  near_gb = far_gb;
  if (nodes) {
    if (strncmp(text, intra, strlen(intra))) return refuse_link(given);
    text += strlen(intra);
    if (!read_number(&text, ',', &near_gb) || !read_number(&text, ',', &cluster->near.us) ||
        !read_number(&text, 0, &ranks))
      return refuse_link(given);
    if (ranks < 2 || ranks > 65536 || ranks != floor(ranks))
      return cli_fail(CLI_BAD_USE, "--link %s: %g ranks per node; a whole number from 2 on", given,
                      ranks);
    cluster->node_ranks = (int32_t)ranks;
  }
  if (far_gb <= 0 || near_gb <= 0)
    return cli_fail(CLI_BAD_USE, "--link %s: a link needs some bandwidth", given);
  cluster->far.bytes_per_us = 1e3 * far_gb;
  cluster->near.bytes_per_us = 1e3 * near_gb;
  return CLI_OK;
}

enum cli_exit cli_paper_read(const struct cli_args *args, struct cli_paper_cluster *cluster)
{
  static const enum cli_option positive[] = { CLI_ATTENTION_US, CLI_TFLOPS };
  enum cli_exit code = cli_args_exclude(args, CLI_ATTENTION_US, CLI_TFLOPS,
                                        "both say how long attention takes");

  for (int i = 0; i < 2 && !code; i++)
    if (args->value[positive[i]] && !args->value[CLI_LINK])
      code = cli_fail(CLI_BAD_USE, "%s needs --link too", cli_args_name(positive[i]));
  if (!code && args->value[CLI_LINK]) code = read_link(args->value[CLI_LINK], cluster);
  if (!code) code = cli_args_real(args, CLI_ATTENTION_US, &cluster->attention_us);
  if (!code) code = cli_args_real(args, CLI_TFLOPS, &cluster->tflops);
  for (int i = 0; i < 2 && !code; i++) {
    const double value = i ? cluster->tflops : cluster->attention_us;
    if (args->value[positive[i]] && value <= 0)
      code = cli_fail(CLI_BAD_USE, "%s %s: more than 0", cli_args_name(positive[i]),
                      args->value[positive[i]]);
  }
  return code;
}

// ---- Attention ----------------------------------------------------------------------------------

// Sum of min(i, window) over i in [0, count).
static double visible(int64_t count, int64_t window)
{
  const double n = (double)count, w = (double)window;
  if (window == SWATHE_UNLIMITED || window >= count) return n * (n - 1) / 2;
  return w * (w + 1) / 2 + (n - w - 1) * w;
}

// Pairs of query and key that the span's queries see.
static double span_pairs(const struct swathe_problem *p, const struct swathe_sharding *sharding,
                         const struct swathe_span *span)
{
  const int64_t *starts = sharding->document_starts;
  const int64_t length = sharding->documents
                             ? starts[span->document + 1] - starts[span->document]
                             : sharding->tokens;
  const int64_t begin = span->position, end = begin + span->tokens;
  return (double)span->tokens + visible(end, p->window_left) - visible(begin, p->window_left) +
         visible(length - begin, p->window_right) - visible(length - end, p->window_right);
}

// Of the rank with most.
static enum cli_exit most_pairs(const struct swathe_problem *problem,
                                const struct swathe_sharding *sharding, double *most)
{
  struct swathe_span *spans = NULL;
  int64_t capacity = 0;
  enum swathe_status status = SWATHE_OK;

  *most = 0;
  for (int32_t r = 0; r < sharding->ranks && !status; r++) {
    int64_t count = 0;
    double pairs = 0;
    status = swathe_sharding_spans(sharding, r, spans, capacity, &count);
    if (!status && count > capacity) {
      free(spans);
      capacity = count;
      spans = calloc((size_t)capacity, sizeof *spans);
      if (!spans) return cli_fail(CLI_FAILED, "out of memory for the spans of rank %" PRId32, r);
      status = swathe_sharding_spans(sharding, r, spans, capacity, &count);
    }
    for (int64_t i = 0; i < count && !status; i++)
      pairs += span_pairs(problem, sharding, &spans[i]);
    *most = larger(*most, pairs * sharding->batch);
  }
  free(spans);
  return status ? cli_fail_library(status, "this sequence cannot be shared") : CLI_OK;
}

// Forward has two products of a pair's rows, q.k and p.v; backward has five: q.k again, dout.v,
// p.dout, ds.k and ds.q.
static enum cli_exit find_attention(const struct swathe_problem *p,
                                    const struct swathe_sharding *sharding,
                                    const struct cli_paper_cluster *cluster,
                                    struct cli_paper *paper)
{
  const double forward = p->head_dim_qk + p->head_dim_v;
  const double backward = 3. * p->head_dim_qk + 2. * p->head_dim_v;
  double pairs = 0;

  if (cluster->attention_us > 0) {
    paper->attention_us[0] = cluster->attention_us;
    paper->attention_us[1] = cluster->attention_us * backward / forward;
    return CLI_OK;
  }
  if (!(cluster->tflops > 0)) return CLI_OK;
  const enum cli_exit code = most_pairs(p, sharding, &pairs);
  const double per_dim_us = 2 * pairs * p->q_heads / (1e6 * cluster->tflops);
  paper->attention_us[0] = per_dim_us * forward;
  paper->attention_us[1] = per_dim_us * backward;
  return code;
}

// ---- Communication ------------------------------------------------------------------------------

enum { FAR, NEAR, LINKS };

// What the messages of the halo say of each rank and of the rings.
struct survey {
  const struct cli_paper_cluster *cluster;
  int64_t (*tokens)[2][LINKS];  // [ranks] received, sent, by link
  int32_t reach[2];             // hops of a bounded ring, to later and to earlier ranks
};

static int link_between(const struct cli_paper_cluster *cluster, int32_t a, int32_t b)
{
  return a / cluster->node_ranks == b / cluster->node_ranks ? NEAR : FAR;
}

static void survey_message(void *arg, const struct swathe_message *message)
{
  struct survey *survey = arg;
  const int link = link_between(survey->cluster, message->from, message->to);
  const int32_t hops = message->to - message->from;
  const int way = hops > 0 ? 0 : 1;

  survey->tokens[message->to][0][link] += message->tokens;
  survey->tokens[message->from][1][link] += message->tokens;
  if (abs(hops) > survey->reach[way]) survey->reach[way] = abs(hops);
}

static double link_us(const struct cli_paper_link *link, double bytes)
{
  return bytes > 0 ? link->us + bytes / link->bytes_per_us : 0;
}

// All messages of a rank at once: of each link, one latency and all bytes; the slowest rank.
static double halo_us(const struct survey *survey, int32_t ranks, double token_bytes)
{
  const struct cli_paper_cluster *cluster = survey->cluster;
  double us = 0;
  for (int32_t r = 0; r < ranks; r++)
    for (int way = 0; way < 2; way++) {
      us = larger(us, link_us(&cluster->far, token_bytes * (double)survey->tokens[r][way][FAR]));
      us = larger(us, link_us(&cluster->near, token_bytes * (double)survey->tokens[r][way][NEAR]));
    }
  return us;
}

// Rounds in which every rank passes blocks on, `both` ways or one: as slow as the slowest link.  A
// rank at the end of its node has one neighbour on each link.
static double ring_us(const struct cli_paper_cluster *cluster, int32_t ranks, int32_t rounds,
                      bool both, double block_bytes)
{
  const double ways = both ? 2 : 1;
  double round_us;
  if (ranks <= cluster->node_ranks) round_us = link_us(&cluster->near, ways * block_bytes);
  else if (cluster->node_ranks == 1) round_us = link_us(&cluster->far, ways * block_bytes);
  else round_us = larger(link_us(&cluster->far, block_bytes), link_us(&cluster->near, block_bytes));
  return rounds * round_us;
}

// Rounds of pairs, each with a pair that lies farthest apart.
static double pairs_us(const struct cli_paper_cluster *cluster, int32_t ranks, double bytes)
{
  const struct cli_paper_link *link =
      ranks <= cluster->node_ranks ? &cluster->near : &cluster->far;
  return (ranks - 1) * link->us + bytes / link->bytes_per_us;
}

// What all-to-all brings a rank, by direction, as baselines of a layer move it: beside q, k, v and
// out also lse; then dout, and dq, dk, dv back.
static void count_all_to_all(const struct swathe_problem *p, const struct swathe_sharding *sharding,
                             const struct swathe_traffic *traffic, int64_t all_rows, int64_t elem,
                             int64_t bytes[2])
{
  const int64_t ranks = sharding->ranks, batch = sharding->batch;
  const int64_t kv = p->kv_heads / ranks * (p->head_dim_qk + p->head_dim_v);
  const int64_t heads = p->q_heads / ranks, others = all_rows - traffic->rows;
  const int64_t back = traffic->rows * (ranks - 1) * batch;
  bytes[0] = traffic->a2a_bytes + back * heads * 4;
  bytes[1] = others * batch * heads * p->head_dim_v * elem +
             back * (heads * p->head_dim_qk + kv) * elem;
}

static int64_t dtype_bytes(enum swathe_dtype dtype) { return dtype == SWATHE_F32 ? 4 : 2; }

static void fill_row(const struct swathe_problem *p, const struct swathe_sharding *sharding,
                     const struct survey *survey, const struct swathe_traffic *traffic,
                     struct cli_paper_row *row)
{
  const struct cli_paper_cluster *cluster = survey->cluster;
  const int32_t ranks = sharding->ranks;
  const int64_t elements = (int64_t)p->kv_heads * (p->head_dim_qk + p->head_dim_v) *
                           sharding->batch;
  const int64_t elem[2] = { dtype_bytes(p->dtype), dtype_bytes(p->halo_gradient) };
  const int32_t reach = survey->reach[0] > survey->reach[1] ? survey->reach[0] : survey->reach[1];
  const bool both = survey->reach[0] && survey->reach[1];
  int64_t all_rows = 0, most_rows = 0;

  for (int32_t r = 0; r < ranks; r++) {
    all_rows += traffic[r].rows;
    if (traffic[r].rows > most_rows) most_rows = traffic[r].rows;
  }
  row->refused = row->strategy == SWATHE_A2A && traffic[0].a2a_bytes < 0;
  for (int d = 0; d < 2 && !row->refused; d++) {
    const double block = (double)(most_rows * elements * elem[d]);
    for (int32_t r = 0; r < ranks; r++) {
      const struct swathe_traffic *t = &traffic[r];
      const int64_t halo = (d ? t->send_tokens : t->halo_tokens) * elements * elem[d];
      int64_t both_ways[2] = { 0, 0 }, bytes = 0;
      if (row->strategy == SWATHE_A2A)
        count_all_to_all(p, sharding, t, all_rows, elem[0], both_ways);
      switch (row->strategy) {
      case SWATHE_HALO: bytes = halo; break;
      case SWATHE_A2A: bytes = both_ways[d]; break;
      case SWATHE_RING: bytes = t->ring_bytes / elem[0] * elem[d]; break;
      default: bytes = (all_rows - t->rows) * elements * elem[d];
      }
      if (bytes > row->received_bytes[d]) row->received_bytes[d] = bytes;
    }
    switch (row->strategy) {
    case SWATHE_HALO: row->us[d] = halo_us(survey, ranks, (double)(elements * elem[d])); break;
    case SWATHE_A2A: row->us[d] = pairs_us(cluster, ranks, (double)row->received_bytes[d]); break;
    case SWATHE_RING: row->us[d] = ring_us(cluster, ranks, reach, both, block); break;
    default: row->us[d] = ring_us(cluster, ranks, ranks - 1, false, block);
    }
  }
}

// ---- The whole ----------------------------------------------------------------------------------

double cli_paper_total_us(const struct cli_paper *paper, const struct cli_paper_row *row)
{
  double us = 0;
  for (int d = 0; d < 2; d++) us += paper->attention_us[d] + row->exposed_us[d];
  return us;
}

bool cli_paper_matters(const struct cli_paper *paper) { return paper->ratio >= matters_from; }

static void compare(struct cli_paper *paper)
{
  const double halo = cli_paper_total_us(paper, &paper->rows[SWATHE_HALO]);
  double least = INFINITY;

  for (int s = 0; s < CLI_PAPER_STRATEGIES; s++) {
    const struct cli_paper_row *row = &paper->rows[s];
    if (row->refused || s == SWATHE_HALO || cli_paper_total_us(paper, row) >= least) continue;
    least = cli_paper_total_us(paper, row);
    paper->best = row->strategy;
  }
  paper->ratio = halo > 0 ? least / halo : 0;
}

enum cli_exit cli_paper_make(const struct swathe_problem *problem,
                             const struct swathe_sharding *sharding,
                             const struct cli_paper_cluster *cluster, struct cli_paper *paper)
{
  const size_t ranks = (size_t)sharding->ranks;
  struct swathe_traffic *traffic = calloc(ranks, sizeof *traffic);
  struct survey survey = { .cluster = cluster, .tokens = calloc(ranks, sizeof *survey.tokens) };
  enum cli_exit code = CLI_OK;

  *paper = (struct cli_paper){ .ranks = sharding->ranks, .hideable = 1 };
  if (!traffic || !survey.tokens) code = cli_fail(CLI_FAILED, "out of memory for the ranks");
  if (!code) {
    const enum swathe_status status =
        swathe_plan(problem, sharding, survey_message, &survey, traffic);
    if (status) code = cli_fail_library(status, "this sequence cannot be planned");
  }
  if (!code) code = find_attention(problem, sharding, cluster, paper);
  for (int32_t r = 0; r < sharding->ranks && !code; r++) {
    const double rows = (double)traffic[r].rows, halo = (double)traffic[r].halo_tokens;
    if (traffic[r].rows > paper->share_tokens) paper->share_tokens = traffic[r].rows;
    if (rows > 0) paper->hideable = fmin(paper->hideable, 1 - fmin(halo / rows, 1));
  }
  for (int s = 0; s < CLI_PAPER_STRATEGIES && !code; s++) {
    struct cli_paper_row *row = &paper->rows[s];
    row->strategy = (enum swathe_strategy)s;
    fill_row(problem, sharding, &survey, traffic, row);
    const double hidden = s == SWATHE_A2A ? 0 : paper->hideable;
    for (int d = 0; d < 2; d++)
      row->exposed_us[d] = larger(0, row->us[d] - hidden * paper->attention_us[d]);
  }
  if (!code) compare(paper);
  free(survey.tokens);
  free(traffic);
  return code;
}
