// choose.c: which config a layer uses.  The ladder: the exact pick of the database, a near one
// (bounded, same number of hops), the default.  Every row is validated by the generator before it
// counts, and what was passed over is said.
#include "layer.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

// A near pick may differ by this factor in tokens per rank; beyond it other tiles tend to win.
static const double near_factor = 4;

int32_t sw_choose_hops(const struct swathe_problem *problem)
{
  const int64_t window =
      problem->window_left > problem->window_right ? problem->window_left : problem->window_right;
  const int64_t chunks = problem->layout == SWATHE_CONTIGUOUS ? 1 : 2;
  const int64_t share = (problem->tokens_per_rank + chunks - 1) / chunks;
  const int64_t most = problem->ranks * chunks - 1;

  if (window == SWATHE_UNLIMITED || window / share >= most) return (int32_t)most;
  return (int32_t)((window + share - 1) / share);
}

struct ladder {
  struct swathe_context *context;
  const struct swathe_problem *problem;
  const struct sw_gen_request *request;
  const struct sw_db_environment *environment;
  bool required;          // as the context's mode says
  struct sw_choice *choice;
  char passed_over[160];  // why the last better row did not serve
  bool found;
};

static void pass_over(struct ladder *ladder, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
static void pass_over(struct ladder *ladder, const char *format, ...)
{
  va_list args;
  va_start(args, format);
  vsnprintf(ladder->passed_over, sizeof ladder->passed_over, format, args);
  va_end(args);
}

// Takes the row if it may serve; false stops the walk.
static bool consider(void *arg, const struct sw_db_found *row)
{
  struct ladder *ladder = arg;
  struct sw_choice *choice = ladder->choice;
  const double factor =
      (double)row->problem.tokens_per_rank / (double)ladder->problem->tokens_per_rank;

  if (!row->exact && fabs(log2(factor)) > log2(near_factor)) {
    pass_over(ladder, "a pick for %lld tokens per rank is beyond the bound of %gx",
              (long long)row->problem.tokens_per_rank, near_factor);
    return true;
  }
  if (!row->exact && sw_choose_hops(&row->problem) != sw_choose_hops(ladder->problem)) {
    pass_over(ladder, "a pick for %lld tokens per rank has %d hops, this has %d",
              (long long)row->problem.tokens_per_rank, sw_choose_hops(&row->problem),
              sw_choose_hops(ladder->problem));
    return true;
  }
  if (sw_gen_check(ladder->context->gen, ladder->request, row->config, choice->config)) {
    pass_over(ladder, "a pick was refused: %s", swathe_error());
    return true;
  }
  ladder->found = true;
  if (row->exact)
    snprintf(choice->why, sizeof choice->why, "exact pick of %s%s, %.3gx the default's time",
             row->when, row->complete ? "" : " (search not finished)", row->ratio);
  else
    snprintf(choice->why, sizeof choice->why,
             "near pick of %s: tuned for %lld tokens per rank, %d ranks, %s, same hops", row->when,
             (long long)row->problem.tokens_per_rank, row->problem.ranks,
             swathe_layout_name(row->problem.layout));
  return false;
}

// The command that would give an exact pick.
static void advise(const struct ladder *ladder, char *text, size_t size)
{
  char problem[SW_PROBLEM_TEXT];
  swathe_problem_format(ladder->problem, problem, sizeof problem);
  snprintf(text, size, "swathe tune --problem %s", problem);
}

static enum swathe_status climb(struct ladder *ladder)
{
  struct swathe_context *context = ladder->context;
  struct sw_choice *choice = ladder->choice;
  enum swathe_status status;

  if (context->db) {
    status = sw_db_find(context->db, ladder->problem, ladder->request->kernel,
                        ladder->environment, consider, ladder);
    if (status) pass_over(ladder, "%s", swathe_error());
    if (ladder->found) return SWATHE_OK;
  } else if (context->db_failed) {
    pass_over(ladder, "%s", context->db_words);
  }
  if (ladder->required) {
    char command[SW_PROBLEM_TEXT + 32];
    advise(ladder, command, sizeof command);
    return sw_fail(SWATHE_NOT_FOUND, "no tuned config for %s%s%s%s; make one with: %s",
                   ladder->request->kernel, *ladder->passed_over ? " (" : "", ladder->passed_over,
                   *ladder->passed_over ? ")" : "", command);
  }
  status = sw_gen_default(context->gen, ladder->request, choice->config);
  if (status) return status;
  snprintf(choice->why, sizeof choice->why, "default: %s",
           *ladder->passed_over ? ladder->passed_over
                                : "the database has no pick for this problem");
  return SWATHE_OK;
}

enum swathe_status sw_choose(struct swathe_context *context, const struct swathe_problem *problem,
                             enum swathe_direction direction, const struct sw_aim *aim,
                             struct sw_choice *choice)
{
  const struct sw_gen_request request = { .problem = problem,
                                          .kernel = sw_context_kernel_name(direction),
                                          .isa = aim->isa };
  struct sw_db_environment environment;
  struct ladder ladder = { .context = context,
                           .problem = problem,
                           .request = &request,
                           .environment = &environment,
                           .required = context->mode == SWATHE_REQUIRE,
                           .choice = choice };
  pthread_mutex_lock(&context->mutex);
  sw_context_environment(context, aim, &environment);
  const enum swathe_status status = climb(&ladder);
  pthread_mutex_unlock(&context->mutex);
  return status;
}

void sw_choose_exchange_place(const struct swathe_context *context, const struct sw_aim *aim,
                              const struct swathe_transport *transport,
                              struct sw_exchange_place *place)
{
  sw_context_environment(context, aim, &place->environment);
  snprintf(place->isa, sizeof place->isa, "%.15s+%.15s", aim->isa,
           transport ? transport->name : "alone");
  place->environment.isa = place->isa;
}

enum swathe_status sw_choose_exchange(struct swathe_context *context,
                                      const struct swathe_problem *problem,
                                      const struct sw_aim *aim,
                                      const struct swathe_transport *transport,
                                      struct sw_choice *choice)
{
  const struct sw_gen_request request = { .problem = problem,
                                          .kernel = sw_exchange_kernel,
                                          .isa = aim->isa };
  struct sw_exchange_place place;
  struct ladder ladder = { .context = context,
                           .problem = problem,
                           .request = &request,
                           .environment = &place.environment,
                           .choice = choice };
  pthread_mutex_lock(&context->mutex);
  sw_choose_exchange_place(context, aim, transport, &place);
  const enum swathe_status status = climb(&ladder);
  pthread_mutex_unlock(&context->mutex);
  return status;
}
