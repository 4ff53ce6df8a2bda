// bench_tuning.c: what tuning is worth.  For each problem: the pick of a search that may try a
// tenth of the space, beside the best and the worst of all configs (or of as many, drawn at random,
// as the time allows), the default, and what the search picked for the problem before.
//
//   bench_tuning FILE [--budget SECONDS] [--problems NAME,...] [--threads N]
//
// Each problem is a line of FILE when it is done; those that FILE has are not measured again, so a
// run may be cut into several.  The budget (1500 s) is shared evenly by what is left; a problem
// that would get less than 40 s is left for the next run.  At the end the table of all of FILE.
//
// The space is what tuning searches.  The worst is that of the sweep and of a few configs drawn
// from all that could run, also those that `prefer` rules turn away.
//
// Only times of the same round are compared, as ratios: all configs in question take turns, and
// the median of the rounds counts.  The best and the worst of the sweep meet the others once more.
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "runtime/trial.h"

enum { HEAT = 8, SWEEP_ROUNDS = 3, FINAL_ROUNDS = 15, NEAREST = 4, DRAWN = 16 };
enum { NAME = 64, MOST = 1 << 15 };
enum { SEARCHED, DEFAULT, WORST, OTHER, BEST, FINALISTS = BEST + NEAREST };

static const double least_s = 40, search_share = 0.4, sweep_share = 0.85;

static const struct { const char *name, *model, *text; } shapes[] = {
  { "gpt-oss-20b", "gpt-oss-20b", "" },
  { "gemma-3-4b", "gemma-3-4b", "" },
  { "mistral-7b", "mistral-7b-v0.1", "" },
  { "mimo-v2-flash", "mimo-v2-flash", "" },
  { "fp32 W 128 D 64 GQA 1", NULL, "q_heads=8,kv_heads=8,window_left=127" },
  { "fp32 W 1024 D 128 GQA 4", NULL,
    "q_heads=8,kv_heads=2,head_dim_qk=128,head_dim_v=128,window_left=1023" },
};

// A line of the file.
struct row {
  char name[NAME];
  int backward;
  int64_t space, swept, refused, searched;
  double ratios[5];  // to the best that was seen; of OTHER 0: there was none, or it does not fit
  char pick[SW_CONFIG_TEXT];
};

struct listing { char (*configs)[SW_CONFIG_TEXT]; int64_t count; };

static void stop_on(enum swathe_status status, const char *what)
{
  if (!status) return;
  fprintf(stderr, "bench_tuning: %s: %s\n", what, swathe_error());
  exit(1);
}

static double now_s(void)
{
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

// ---- The file ----------------------------------------------------------------------------------

static void write_row(const char *path, const struct row *row)
{
  FILE *file = fopen(path, "a");
  if (!file) { perror(path); exit(1); }
  fprintf(file, "%s\t%d\t%" PRId64 "\t%" PRId64 "\t%" PRId64 "\t%" PRId64, row->name,
          row->backward, row->space, row->swept, row->refused, row->searched);
  for (int i = 0; i < 5; i++) fprintf(file, "\t%.5f", row->ratios[i]);
  fprintf(file, "\t%s\n", row->pick);
  if (fclose(file)) { perror(path); exit(1); }
}

static bool read_row(FILE *file, struct row *row)
{
  return fscanf(file, "%63[^\t]\t%d\t%" SCNd64 "\t%" SCNd64 "\t%" SCNd64 "\t%" SCNd64
                "\t%lf\t%lf\t%lf\t%lf\t%lf\t%511[^\n]\n", row->name, &row->backward, &row->space,
                &row->swept, &row->refused, &row->searched, &row->ratios[0], &row->ratios[1],
                &row->ratios[2], &row->ratios[3], &row->ratios[4], row->pick) == 12;
}

// Is there a row of this name and direction?  `last`: the newest of the direction.
static bool find_row(const char *path, const char *name, int backward, struct row *last)
{
  FILE *file = fopen(path, "r");
  struct row row;
  bool found = false;
  *last->pick = 0;
  while (file && read_row(file, &row)) {
    found |= row.backward == backward && !strcmp(row.name, name);
    if (row.backward == backward) *last = row;
  }
  if (file) fclose(file);
  return found;
}

static void print_table(const char *path)
{
  FILE *file = fopen(path, "r");
  struct row row;
  printf("\nTime over that of the best config that was seen:\n\n"
         "| problem | | space | swept | searched | found | default | worst | another's pick |\n"
         "|---|---|---|---|---|---|---|---|---|\n");
  while (file && read_row(file, &row)) {
    printf("| %s | %s | %" PRId64 " | %s%" PRId64 " | %" PRId64 " | %.3f | %.3f | %.2f | ",
           row.name, row.backward ? "backward" : "forward", row.space,
           row.swept + row.refused < row.space ? "a sample of " : "all ", row.swept, row.searched,
           row.ratios[SEARCHED], row.ratios[DEFAULT], row.ratios[WORST]);
    printf(row.ratios[OTHER] > 0 ? "%.2f |\n" : "- |\n", row.ratios[OTHER]);
  }
  if (file) fclose(file);
}

// ---- Candidates --------------------------------------------------------------------------------

static bool list_config(void *arg, const char *config)
{
  struct listing *listing = arg;
  snprintf(listing->configs[listing->count++], SW_CONFIG_TEXT, "%s", config);
  return listing->count < MOST;
}

static uint64_t next_random(uint64_t *state)
{
  *state ^= *state << 13, *state ^= *state >> 7, *state ^= *state << 17;  // xorshift64 (Marsaglia)
  return *state;
}

// A few of all that are visited, each as likely as any other.
struct drawn { char configs[DRAWN][SW_CONFIG_TEXT]; int64_t visited; uint64_t random; };

static bool draw_config(void *arg, const char *config)
{
  struct drawn *drawn = arg;
  const int64_t i = drawn->visited++;
  const int64_t at = i < DRAWN ? i : (int64_t)(next_random(&drawn->random) % (uint64_t)(i + 1));
  if (at < DRAWN) snprintf(drawn->configs[at], SW_CONFIG_TEXT, "%s", config);
  return true;
}

// In an order of its own: a part of them is a fair sample.
static void shuffle(struct listing *listing)
{
  uint64_t state = 88172645463325252u;
  for (int64_t i = listing->count - 1; i > 0; i--) {
    char swapped[SW_CONFIG_TEXT];
    const int64_t j = (int64_t)(next_random(&state) % (uint64_t)(i + 1));
    memcpy(swapped, listing->configs[i], sizeof swapped);
    memcpy(listing->configs[i], listing->configs[j], sizeof swapped);
    memcpy(listing->configs[j], swapped, sizeof swapped);
  }
}

// What one problem is measured with.
struct contest {
  struct swathe_context *context;
  struct swathe_problem problem;
  enum swathe_direction direction;
  struct sw_trial_bench *bench;
};

struct compiling { const struct contest *contest; const char *config; pthread_t thread; };

static void *compile(void *arg)
{
  const struct compiling *compiling = arg;
  struct swathe_compiled compiled;
  swathe_compile(compiling->contest->context, &compiling->contest->problem,
                 compiling->contest->direction, NULL, compiling->config, &compiled);
  return NULL;  // what failed fails its check, too
}

// Compiles all and checks each; `right`.
static void prepare(const struct contest *contest, const char *const *configs, int count,
                    bool *right)
{
  struct compiling compiling[FINALISTS + HEAT];
  sw_trial_end_racers(contest->bench);
  for (int i = 0; i < count; i++) {
    compiling[i] = (struct compiling){ .contest = contest, .config = configs[i] };
    if (pthread_create(&compiling[i].thread, NULL, compile, &compiling[i])) exit(1);
  }
  for (int i = 0; i < count; i++) pthread_join(compiling[i].thread, NULL);
  for (int i = 0; i < count; i++) {
    char words[SW_TRIAL_WORDS];
    enum sw_verdict verdict = SW_VERDICT_OK;
    stop_on(sw_trial_check(contest->bench, configs[i], NULL, &verdict, words), configs[i]);
    right[i] = verdict == SW_VERDICT_OK;
    if (!right[i]) printf("  %s: %s: %s\n", configs[i], sw_verdict_name(verdict), words);
  }
}

// Rounds in which all run in turn; each one's median ratio to [0]; 0: it has none.
static void race(const struct contest *contest, const char *const *configs, int count, int rounds,
                 double *ratios)
{
  double all[FINALISTS + HEAT][FINAL_ROUNDS];
  bool right[FINALISTS + HEAT];
  int runs[FINALISTS + HEAT] = { 0 };

  prepare(contest, configs, count, right);
  for (int round = 0; round < rounds && right[0]; round++) {
    struct sw_trial_slot slots[FINALISTS + HEAT];
    int place[FINALISTS + HEAT], n = 0;
    bool noisy;
    for (int i = 0; i < count; i++) {  // begins elsewhere in every round
      const int at = (i + round) % count;
      if (right[at]) slots[n].config = configs[at], place[n++] = at;
    }
    stop_on(sw_trial_round(contest->bench, slots, n, false, NULL, &noisy), "a round");
    double us[FINALISTS + HEAT] = { 0 };
    for (int i = 0; i < n; i++) {
      if (slots[i].verdict == SW_VERDICT_OK) us[place[i]] = slots[i].us;
      else if (slots[i].verdict != SW_VERDICT_UNTRIED) right[place[i]] = false;
    }
    for (int i = 0; i < count && us[0] > 0; i++)
      if (us[i] > 0) all[i][runs[i]++] = us[i] / us[0];
  }
  for (int i = 0; i < count; i++)
    ratios[i] = right[i] ? sw_search_median(all[i], runs[i]) : 0;
}

// ---- One problem -------------------------------------------------------------------------------

struct limit { int64_t most; volatile int stop; };

static void watch(void *arg, const struct swathe_progress *progress)
{
  struct limit *limit = arg;
  if (progress->tried >= limit->most) limit->stop = 1;
}

// The tuner as it is, but for the bound on what it tries.
static void search(const struct contest *contest, double budget_s, struct row *row)
{
  struct limit limit = { .most = row->space / 10 > 2 ? row->space / 10 : 2 };
  struct swathe_tuned tuned[2];
  const bool backward = contest->direction == SWATHE_BACKWARD;
  const struct swathe_tune_options options = { .budget_s = budget_s,
                                               .forward = !backward,
                                               .backward = backward,
                                               .again = true,
                                               .good_enough = -1,
                                               .progress = watch,
                                               .arg = &limit,
                                               .stop = &limit.stop };
  const enum swathe_status status =
      swathe_tune(contest->context, &contest->problem, &options, tuned);
  if (status != SWATHE_INTERRUPTED) stop_on(status, "the search");
  row->searched = tuned[backward].tried;
  snprintf(row->pick, sizeof row->pick, "%s", tuned[backward].config);
}

// The sweep keeps the NEAREST best and the worst.
struct sweep {
  char best[NEAREST][SW_CONFIG_TEXT], worst[SW_CONFIG_TEXT];
  double best_ratio[NEAREST], worst_ratio;
};

static void keep(struct sweep *sweep, const char *config, double ratio)
{
  if (ratio > sweep->worst_ratio) {
    sweep->worst_ratio = ratio;
    snprintf(sweep->worst, sizeof sweep->worst, "%s", config);
  }
  int at = NEAREST;
  while (at > 0 && (!(sweep->best_ratio[at - 1] > 0) || ratio < sweep->best_ratio[at - 1])) at--;
  if (at == NEAREST) return;
  for (int i = NEAREST - 1; i > at; i--) {
    memcpy(sweep->best[i], sweep->best[i - 1], SW_CONFIG_TEXT);
    sweep->best_ratio[i] = sweep->best_ratio[i - 1];
  }
  snprintf(sweep->best[at], SW_CONFIG_TEXT, "%s", config);
  sweep->best_ratio[at] = ratio;
}

static void run_sweep(const struct contest *contest, const struct listing *listing,
                      const char *fallback, double end_s, struct row *row, struct sweep *sweep)
{
  for (int64_t i = 0; i < listing->count && now_s() < end_s; i += HEAT) {
    const char *configs[1 + HEAT] = { fallback };
    double ratios[1 + HEAT];
    int count = 1;
    for (; count <= HEAT && i + count - 1 < listing->count; count++)
      configs[count] = listing->configs[i + count - 1];
    race(contest, configs, count, SWEEP_ROUNDS, ratios);
    for (int c = 1; c < count; c++) {
      row->swept += ratios[c] > 0;
      row->refused += !(ratios[c] > 0);
      if (ratios[c] > 0) keep(sweep, configs[c], ratios[c]);
    }
  }
}

// A few configs of all that could run, for the worst.
static void race_drawn(const struct contest *contest, const char *fallback, struct sweep *sweep)
{
  struct drawn drawn = { .random = 88172645463325252u };
  stop_on(swathe_configs(contest->context, &contest->problem, contest->direction, NULL, true,
                         draw_config, NULL, &drawn), "space");
  const int most = drawn.visited < DRAWN ? (int)drawn.visited : DRAWN;
  for (int i = 0; i < most; i += HEAT) {
    const char *configs[1 + HEAT] = { fallback };
    double ratios[1 + HEAT];
    int count = 1;
    for (; count <= HEAT && i + count - 1 < most; count++)
      configs[count] = drawn.configs[i + count - 1];
    race(contest, configs, count, SWEEP_ROUNDS, ratios);
    for (int c = 1; c < count; c++)
      if (ratios[c] > 0) keep(sweep, configs[c], ratios[c]);
  }
}

// All in question once more; the least of all is what the others are told as ratios of.
static void run_final(const struct contest *contest, const char *fallback, const char *other,
                      const struct sweep *sweep, struct row *row)
{
  const char *configs[FINALISTS] = { row->pick, fallback, sweep->worst_ratio > 0 ? sweep->worst
                                                                                 : fallback,
                                     *other ? other : fallback };
  double ratios[FINALISTS], least = 1;
  int count = BEST;
  for (int i = 0; i < NEAREST; i++)
    if (sweep->best_ratio[i] > 0) configs[count++] = sweep->best[i];
  race(contest, configs, count, FINAL_ROUNDS, ratios);
  for (int i = 0; i < count; i++)
    if (ratios[i] > 0 && ratios[i] < least) least = ratios[i];
  for (int i = 0; i < BEST; i++) row->ratios[i] = ratios[i] / least;
  if (!*other) row->ratios[OTHER] = 0;
  row->ratios[BEST] = 1;
}

static void measure(struct contest *contest, const char *path, double budget_s, const char *other,
                    struct row *row)
{
  struct listing listing = { .configs = calloc(MOST, SW_CONFIG_TEXT) };
  struct sweep sweep = { .worst_ratio = 0 };
  const double begin = now_s();
  const char *kernel = sw_context_kernel_name(contest->direction);
  char fallback[SW_CONFIG_TEXT], fitting[SW_CONFIG_TEXT] = "";
  struct sw_aim aim;

  if (!listing.configs) exit(1);
  stop_on(sw_context_aim(contest->context, &contest->problem, NULL, &aim), "isa");
  const struct sw_gen_request request = { &contest->problem, kernel, aim.isa };
  stop_on(sw_gen_default(contest->context->gen, &request, fallback), "default");
  stop_on(swathe_configs(contest->context, &contest->problem, contest->direction, NULL, false,
                         list_config, NULL, &listing), "space");
  if (*other && sw_gen_check(contest->context->gen, &request, other, fitting)) *fitting = 0;
  row->space = listing.count;
  shuffle(&listing);
  search(contest, search_share * budget_s, row);
  const struct sw_trial_options options = { .default_config = fallback, .memory_bytes = 1 << 30 };
  stop_on(sw_trial_prepare(contest->context, &contest->problem, contest->direction, &options,
                           &contest->bench), "inputs");
  race_drawn(contest, fallback, &sweep);
  run_sweep(contest, &listing, fallback, begin + sweep_share * budget_s, row, &sweep);
  run_final(contest, fallback, fitting, &sweep, row);
  sw_trial_free(contest->bench);
  free(listing.configs);
  write_row(path, row);
  printf("%s, %s: found %.3f, default %.3f, worst %.2f of the best; %" PRId64 " of %" PRId64
         " swept, %" PRId64 " searched, in %.0f s\n", row->name, kernel, row->ratios[SEARCHED],
         row->ratios[DEFAULT], row->ratios[WORST], row->swept, row->space, row->searched,
         now_s() - begin);
  fflush(stdout);
}

static void make_problem(struct swathe_context *context, size_t shape,
                         struct swathe_problem *problem)
{
  const char *model = shapes[shape].model;
  swathe_problem_init(problem);
  if (model) stop_on(swathe_model_problem(context, model, problem), model);
  else stop_on(swathe_problem_parse(shapes[shape].text, problem), shapes[shape].text);
  problem->tokens_per_rank = 8192;
}

int main(int argc, char **argv)
{
  enum { SHAPES = sizeof shapes / sizeof *shapes };
  const char *path = argc > 1 ? argv[1] : NULL, *only = NULL;
  double budget_s = 1500;
  char database[] = "/tmp/swathe_bench_tuning_XXXXXX";
  struct swathe_options options = { .threads = 1, .database = database };
  struct contest contest;
  int left = 0;

  for (int i = 2; i + 1 < argc; i += 2) {
    if (!strcmp(argv[i], "--budget")) budget_s = atof(argv[i + 1]);
    else if (!strcmp(argv[i], "--problems")) only = argv[i + 1];
    else if (!strcmp(argv[i], "--threads")) options.threads = atoi(argv[i + 1]);
    else path = NULL;
  }
  if (!path || *path == '-' || argc % 2) {
    fprintf(stderr, "bench_tuning FILE [--budget SECONDS] [--problems NAME,...] [--threads N]\n");
    return 2;
  }
  if (!mkdtemp(database)) { perror(database); return 1; }
  char file[64], clean[128];
  snprintf(file, sizeof file, "%s/tuning.db", database);
  options.database = file;
  stop_on(swathe_open(&options, &contest.context), "open");
  const double end = now_s() + budget_s;
  for (int pass = 0; pass < 2; pass++)  // how many are left, then those
    for (int i = 0; i < 2 * SHAPES; i++) {
      struct row row = { .backward = i % 2 }, last = { .backward = 0 };
      snprintf(row.name, sizeof row.name, "%s", shapes[i / 2].name);
      if (only && !strstr(only, row.name)) continue;
      if (find_row(path, row.name, row.backward, &last)) continue;
      if (pass == 0) { left++; continue; }
      const double each = (end - now_s()) / left--;
      if (each < least_s) continue;
      make_problem(contest.context, (size_t)i / 2, &contest.problem);
      contest.direction = row.backward ? SWATHE_BACKWARD : SWATHE_FORWARD;
      measure(&contest, path, each, last.pick, &row);
    }
  swathe_close(contest.context);
  print_table(path);
  snprintf(clean, sizeof clean, "rm -rf '%s'", database);
  return system(clean) != 0;
}
