// search.c: the tuner's decisions.  See search.h for the way of a search.
//
// Times are only ever compared within a round, as ratios: the machine's speed drifts, and a round
// sees one speed.  The best so far runs first and last in each round; when its two runs differ
// much, something disturbed the round, and it is run again.
#include "search.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
  SCREEN_ROUNDS = 3,        // before half of a heat leaves
  SCREEN_MOST_ROUNDS = 11,  // of the last challenger of a heat
  FINAL_BLOCK = 4,          // rounds between two looks at the final
  FINAL_MOST_ROUNDS = 40,
  FINALISTS = 12,
  FINAL_TIES = 6,  // finalists that stay to the end
  LEAST_MATCH_ROUNDS = 8,
  MATCH_ROUNDS = 20,  // of the last match
  LEAST_ROUNDS = 3,   // fewer say nothing
  KNOBS = 32,
  VALUES = 64,
};

static const double disturbed = 0.05;  // relative difference of the two runs of the best in a round
static const double clearly_slower = 1.04;  // leaves a heat at once
static const double final_margin = 1.03;    // as near to the best as this joins the final
static const double band_least = 0.002, band_most = 0.008;  // configs this near are equal

const char *sw_verdict_name(enum sw_verdict verdict)
{
  static const char *const names[] = { "ok",      "wrong", "crash",  "timeout",
                                       "compile", "oom",   "untried" };
  return names[verdict];
}

// ---- Statistics -------------------------------------------------------------------------------

static int ascending(const void *a, const void *b)
{
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

double sw_search_median(double *values, int32_t count)
{
  if (count == 0) return 0;
  qsort(values, (size_t)count, sizeof *values, ascending);
  return count % 2 ? values[count / 2] : (values[count / 2 - 1] + values[count / 2]) / 2;
}

static double smaller(double a, double b) { return a < b ? a : b; }
static double larger(double a, double b) { return a > b ? a : b; }

// A median and half the width of its 95% confidence interval.
struct estimate {
  double value, margin;
};

// The spread is estimated by the median absolute deviation, which outliers do not move: of a normal
// distribution it is 1/1.4826 of the deviation, and a median's deviation is 1.2533 times a mean's.
static struct estimate estimate(double *values, int32_t count)
{
  double apart[SW_SEARCH_MOST_RUNS];
  const double middle = sw_search_median(values, count);
  for (int32_t i = 0; i < count; i++) apart[i] = fabs(values[i] - middle);
  const double deviation = 1.4826 * sw_search_median(apart, count);
  const double margin = count >= LEAST_ROUNDS ? 1.96 * 1.2533 * deviation / sqrt(count) : INFINITY;
  return (struct estimate){ middle, margin };
}

// ---- Knobs ------------------------------------------------------------------------------------

// Every candidate's knob values as indices, and what each value seems to cost: the logarithm of
// its factor.
struct sw_search_knobs {
  int32_t knobs;
  uint8_t *value;                   // [count][knobs]
  const char *text[KNOBS][VALUES];  // borrowed, ends at ',' or 0
  int32_t values[KNOBS];
  double effect[KNOBS][VALUES];
  int32_t known[KNOBS][VALUES];  // candidates timed with it
  int64_t *timed, timed_count;   // candidates that are OK and have a ratio
};

// The index of the part at `text` among the knob's values; the last one stands for all beyond
// VALUES.
static uint8_t value_index(struct sw_search_knobs *knobs, int knob, const char *text, size_t length)
{
  int v = 0;
  while (v < knobs->values[knob] &&
         (strncmp(knobs->text[knob][v], text, length) ||
          (knobs->text[knob][v][length] != ',' && knobs->text[knob][v][length])))
    v++;
  if (v == VALUES) return VALUES - 1;
  if (v == knobs->values[knob]) {
    knobs->text[knob][v] = text;
    knobs->values[knob]++;
  }
  return (uint8_t)v;
}

static enum swathe_status read_knobs(struct sw_search *search)
{
  struct sw_search_knobs *knobs = calloc(1, sizeof *knobs);
  search->knobs = knobs;
  if (knobs) knobs->value = calloc((size_t)search->count * KNOBS, 1);
  if (knobs) knobs->timed = calloc((size_t)search->count, sizeof *knobs->timed);
  if (!knobs || !knobs->value || !knobs->timed)
    return sw_fail(SWATHE_NO_MEMORY, "no memory to search");
  for (int64_t i = 0; i < search->count; i++) {
    const char *at = search->candidates[i].config;
    for (int k = 0; k < KNOBS && *at; k++) {
      const size_t length = strcspn(at, ",");
      knobs->value[i * KNOBS + k] = value_index(knobs, k, at, length);
      if (k >= knobs->knobs) knobs->knobs = k + 1;
      at += length + (at[length] == ',');
    }
  }
  return SWATHE_OK;
}

// A value that nobody tried is taken to be a little better than the best of its knob.
static void be_curious(struct sw_search_knobs *knobs)
{
  static const double curiosity = 0.01;
  for (int k = 0; k < knobs->knobs; k++) {
    double best = INFINITY;
    for (int v = 0; v < knobs->values[k]; v++)
      if (knobs->known[k][v]) best = smaller(best, knobs->effect[k][v]);
    for (int v = 0; v < knobs->values[k] && best < INFINITY; v++)
      if (!knobs->known[k][v]) knobs->effect[k][v] = best - curiosity;
  }
}

// Fits log(ratio) = sum of the values' effects to all that was timed, drawn towards 0 where
// little is known.  A few sweeps of coordinate descent are enough to rank by.
static void fit_effects(struct sw_search *search)
{
  enum { SWEEPS = 8 };
  static const double draw = 0.5;
  struct sw_search_knobs *knobs = search->knobs;

  memset(knobs->effect, 0, sizeof knobs->effect);
  knobs->timed_count = 0;
  for (int64_t i = 0; i < search->count; i++)
    if (search->candidates[i].verdict == SW_VERDICT_OK && search->candidates[i].ratio > 0)
      knobs->timed[knobs->timed_count++] = i;
  for (int sweep = 0; sweep < SWEEPS; sweep++)
    for (int k = 0; k < knobs->knobs; k++) {
      double sum[VALUES] = { 0 };
      memset(knobs->known[k], 0, sizeof knobs->known[k]);
      for (int64_t i = 0; i < knobs->timed_count; i++) {
        const uint8_t *value = &knobs->value[knobs->timed[i] * KNOBS];
        double rest = log(search->candidates[knobs->timed[i]].ratio);
        for (int other = 0; other < knobs->knobs; other++)
          if (other != k) rest -= knobs->effect[other][value[other]];
        sum[value[k]] += rest;
        knobs->known[k][value[k]]++;
      }
      for (int v = 0; v < knobs->values[k]; v++)
        knobs->effect[k][v] = sum[v] / (knobs->known[k][v] + draw);
    }
  be_curious(knobs);
}

// How promising an untried candidate is; smaller is better.  Each step away from the best makes
// the sum of effects less sure; a higher bound leaves less to win.
static double promise(const struct sw_search *search, int64_t candidate)
{
  static const double doubt = 0.03;
  const struct sw_search_knobs *knobs = search->knobs;
  const uint8_t *mine = &knobs->value[candidate * KNOBS],
                *best = &knobs->value[search->best * KNOBS];
  const double bound = search->candidates[candidate].bound_us, least_bound = search->least_bound_us;
  double sum = bound > 0 && least_bound > 0 ? 0.5 * log(bound / least_bound) : 0;
  for (int k = 0; k < knobs->knobs; k++) {
    sum += knobs->effect[k][mine[k]];
    if (mine[k] != best[k]) sum += doubt;
  }
  return sum;
}

// ---- Races ------------------------------------------------------------------------------------

// Rounds of a few candidates; [0] is the anchor, which runs first and last.
struct race {
  struct sw_search *search;
  enum sw_search_stage stage;
  int32_t count, rounds, quiet;
  int64_t entrant[SW_SEARCH_MOST_SLOTS];
  bool out[SW_SEARCH_MOST_SLOTS];
  double us[SW_SEARCH_MOST_RUNS][SW_SEARCH_MOST_SLOTS];  // 0: did not run
  bool noisy[SW_SEARCH_MOST_RUNS];
};

static double now(const struct sw_search *search) { return search->operations->now_s(search->arg); }

static bool untried(const struct sw_search *search, int64_t i)
{
  return search->candidates[i].verdict == SW_VERDICT_UNTRIED;
}

// xorshift64* (Vigna 2016).
static uint64_t next_random(uint64_t *state)
{
  *state ^= *state >> 12;
  *state ^= *state << 25;
  *state ^= *state >> 27;
  return *state * 2685821657736338717u;
}

static void enter(struct race *race, int64_t candidate)
{
  for (int32_t i = 0; i < race->count; i++)
    if (race->entrant[i] == candidate) return;
  if (race->count < SW_SEARCH_MOST_SLOTS - 1) race->entrant[race->count++] = candidate;
}

static int32_t racing(const struct race *race)
{
  int32_t count = 0;
  for (int32_t i = 0; i < race->count; i++) count += !race->out[i];
  return count;
}

// Who runs in a round: the anchor, the others in random order, the anchor again.  slot[i]:
// entrant of place i.
static int32_t draw_order(struct race *race, int32_t slot[SW_SEARCH_MOST_SLOTS])
{
  int32_t count = 1;
  slot[0] = 0;
  for (int32_t i = 1; i < race->count; i++)
    if (!race->out[i]) slot[count++] = i;
  for (int32_t i = count - 1; i > 1; i--) {
    const int32_t j = 1 + (int32_t)(next_random(&race->search->seed) % (uint64_t)i);
    const int32_t swapped = slot[i];
    slot[i] = slot[j];
    slot[j] = swapped;
  }
  slot[count++] = 0;
  return count;
}

// An entrant that fails while it is timed is out for good; *failed.
static enum swathe_status drop_failed(struct race *race, const struct sw_search_round *round,
                                      const int32_t *slot, bool *failed)
{
  struct sw_search *search = race->search;
  *failed = false;
  for (int32_t i = 0; i < round->count; i++) {
    const enum sw_verdict verdict = round->verdicts[i];
    if (verdict == SW_VERDICT_OK) continue;
    *failed = true;
    if (verdict == SW_VERDICT_UNTRIED) continue;
    race->out[slot[i]] = true;
    search->tried += untried(search, race->entrant[slot[i]]);
    search->candidates[race->entrant[slot[i]]].verdict = verdict;
    if (race->entrant[slot[i]] == 0)
      return sw_fail(SWATHE_WRONG_RESULT, "the default config failed while it was timed (%s)",
                     sw_verdict_name(verdict));
  }
  if (race->out[0]) {  // the anchor: nothing to compare with is left
    for (int32_t i = 0; i < race->count; i++) race->out[i] = true;
    if (search->best == race->entrant[0]) search->best = search->holder = 0, search->best_ratio = 1;
  }
  return SWATHE_OK;
}

// What the default takes, by every round's anchor: a mean over all speeds that the machine has had.
static void take_pace(struct sw_search *search, double us, int64_t anchor)
{
  const double ratio = search->candidates[anchor].ratio;
  search->pace_rounds++;
  search->pace_us += (us / (ratio > 0 ? ratio : 1) - search->pace_us) / (double)search->pace_rounds;
}

static enum swathe_status run_round(struct race *race)
{
  struct sw_search *search = race->search;
  int32_t slot[SW_SEARCH_MOST_SLOTS];
  int64_t order[SW_SEARCH_MOST_SLOTS];
  const double begin = now(search);
  struct sw_search_round round = { .order = order,
                                   .count = draw_order(race, slot),
                                   .stage = race->stage };
  bool failed;

  for (int32_t i = 0; i < round.count; i++) order[i] = race->entrant[slot[i]];
  enum swathe_status status = search->operations->measure(search->arg, &round);
  if (!status) status = drop_failed(race, &round, slot, &failed);
  if (status || failed) return status;
  const double slot_s = (now(search) - begin) / round.count;
  search->slot_s = search->slot_s > 0 ? 0.8 * search->slot_s + 0.2 * slot_s : slot_s;

  double *us = race->us[race->rounds];
  for (int32_t i = 0; i < round.count; i++) us[slot[i]] = round.us[i];
  const double first = round.us[0], last = round.us[round.count - 1];
  us[0] = (first + last) / 2;
  race->noisy[race->rounds] = round.noisy || fabs(first - last) > disturbed * smaller(first, last);
  race->quiet += !race->noisy[race->rounds];
  search->noise += 0.1 * (race->noisy[race->rounds] - search->noise);
  race->rounds++;
  take_pace(search, us[0], race->entrant[0]);
  return SWATHE_OK;
}

// Runs `rounds` more; a noisy one is run again, up to twice as many in all, but the less the longer
// the noise has lasted: it will not go away then.
static enum swathe_status run_rounds(struct race *race, int32_t rounds)
{
  const int32_t again = (int32_t)((1 - race->search->noise) * rounds);
  const int32_t wanted = race->quiet + rounds, most = race->rounds + rounds + again;
  enum swathe_status status = SWATHE_OK;
  while (!status && race->quiet < wanted && race->rounds < most &&
         race->rounds < SW_SEARCH_MOST_RUNS && racing(race) > 1 &&
         now(race->search) < race->search->end_s)
    status = run_round(race);
  return status;
}

// Only quiet rounds count, if there are enough.
static bool counts(const struct race *race, int32_t round)
{
  return !race->noisy[round] || race->quiet < LEAST_ROUNDS || 3 * race->quiet < race->rounds;
}

static bool decided_by_noise(const struct race *race)
{
  return race->quiet < LEAST_ROUNDS || 3 * race->quiet < race->rounds;
}

// a / b over the rounds that both ran in.
static struct estimate compare(const struct race *race, int32_t a, int32_t b)
{
  double ratios[SW_SEARCH_MOST_RUNS];
  int32_t count = 0;
  for (int32_t r = 0; r < race->rounds; r++)
    if (race->us[r][a] > 0 && race->us[r][b] > 0 && counts(race, r))
      ratios[count++] = race->us[r][a] / race->us[r][b];
  return estimate(ratios, count);
}

// The entrant's standing: the median of its ratio to the median of those still racing, round by
// round.
static double standing(const struct race *race, int32_t entrant)
{
  double ratios[SW_SEARCH_MOST_RUNS];
  int32_t count = 0;
  for (int32_t r = 0; r < race->rounds; r++) {
    double all[SW_SEARCH_MOST_SLOTS];
    int32_t n = 0;
    if (!counts(race, r)) continue;
    for (int32_t i = 0; i < race->count; i++)
      if (!race->out[i]) all[n++] = race->us[r][i];
    ratios[count++] = race->us[r][entrant] / sw_search_median(all, n);
  }
  return sw_search_median(ratios, count);
}

// The best `keep` stay; the anchor always does.
static void keep_best(struct race *race, int32_t keep)
{
  double standings[SW_SEARCH_MOST_SLOTS];
  for (int32_t i = 0; i < race->count; i++)
    standings[i] = race->out[i] ? INFINITY : standing(race, i);
  while (racing(race) > keep) {
    int32_t worst = 0;
    for (int32_t i = 1; i < race->count; i++)
      if (!race->out[i] && (worst == 0 || standings[i] > standings[worst])) worst = i;
    if (worst == 0) return;
    race->out[worst] = true;
  }
}

static int32_t fastest(const struct race *race)
{
  int32_t best = 0;
  double least = INFINITY;
  for (int32_t i = 0; i < race->count; i++) {
    const double mine = race->out[i] ? INFINITY : standing(race, i);
    if (mine < least) least = mine, best = i;
  }
  return best;
}

// Takes the entrants' ratios to the default from the race (the anchor's is known) and hands their
// times on.
static enum swathe_status note_race(struct race *race)
{
  struct sw_search *search = race->search;
  const double anchor_ratio = search->candidates[race->entrant[0]].ratio;
  enum swathe_status status = SWATHE_OK;

  for (int32_t i = 1; i < race->count && !status; i++) {
    struct sw_search_candidate *candidate = &search->candidates[race->entrant[i]];
    struct sw_search_runs runs = { .candidate = race->entrant[i], .beside = race->entrant[0] };
    for (int32_t r = 0; r < race->rounds; r++) {
      if (!(race->us[r][i] > 0)) continue;
      runs.us[runs.runs] = race->us[r][i];
      runs.beside_us[runs.runs++] = race->us[r][0];
      runs.noisy += race->noisy[r];
    }
    if (candidate->verdict != SW_VERDICT_OK && candidate->verdict != SW_VERDICT_UNTRIED) continue;
    if (!runs.runs) continue;
    search->tried += candidate->verdict == SW_VERDICT_UNTRIED;
    candidate->verdict = SW_VERDICT_OK;
    if (race->entrant[i] != 0) candidate->ratio = compare(race, i, 0).value * anchor_ratio;
    runs.ratio = candidate->ratio;
    status = search->operations->note(search->arg, &runs);
  }
  return status;
}

// ---- Heats ------------------------------------------------------------------------------------

static double reserve_s(const struct sw_search *search);

// Nothing of this bound can beat the best.
static bool hopeless(const struct sw_search *search, int64_t i)
{
  return search->trust * search->candidates[i].bound_us >= search->pace_us * search->best_ratio;
}

// Bounds rest on peaks that were measured: whoever ran faster than its own shows by how much all of
// them are too high.
static void weigh_bounds(struct sw_search *search)
{
  search->least_bound_us = 0;
  search->trust = 1;
  for (int64_t i = 0; i < search->count; i++) {
    const struct sw_search_candidate *candidate = &search->candidates[i];
    const bool ok = candidate->verdict == SW_VERDICT_OK;
    const double us = search->pace_us * candidate->ratio;
    if (!(candidate->bound_us > 0) || (!ok && !untried(search, i))) continue;
    if (ok && us > 0) search->trust = smaller(search->trust, us / candidate->bound_us);
    if (!(search->least_bound_us > 0) || candidate->bound_us < search->least_bound_us)
      search->least_bound_us = candidate->bound_us;
  }
}

// The most promising untried candidates, best first; among equals in an order that is fixed but
// not that of the space, so that a short search is not stuck in one corner.
static int32_t choose_heat(struct sw_search *search, int32_t most,
                           int64_t chosen[SW_SEARCH_MOST_HEAT])
{
  double promises[SW_SEARCH_MOST_HEAT];
  int32_t count = 0;

  fit_effects(search);
  weigh_bounds(search);
  for (int64_t i = 0; i < search->count; i++) {
    if (!untried(search, i) || hopeless(search, i)) continue;
    // 2^64 / golden ratio spreads indices; far below any difference that means something
    const double spread = 1e-9 * (double)(((uint64_t)i * 0x9e3779b97f4a7c15u) >> 32) / 4294967296.0;
    const double mine = promise(search, i) + spread;
    if (count == most && mine >= promises[most - 1]) continue;
    int32_t at = count < most ? count++ : most - 1;
    for (; at > 0 && promises[at - 1] > mine; at--) {
      promises[at] = promises[at - 1];
      chosen[at] = chosen[at - 1];
    }
    promises[at] = mine;
    chosen[at] = i;
  }
  return count;
}

// Prepares candidates that are not ready; those that fail get their verdict.
static enum swathe_status prepare(struct sw_search *search, const int64_t *candidates,
                                  int32_t count)
{
  int64_t wanted[SW_SEARCH_MOST_SLOTS];
  enum sw_verdict verdicts[SW_SEARCH_MOST_SLOTS];
  int32_t n = 0;

  for (int32_t i = 0; i < count; i++)
    if (!search->candidates[candidates[i]].ready) wanted[n++] = candidates[i];
  if (!n) return SWATHE_OK;
  for (int32_t i = 0; i < n; i++) verdicts[i] = SW_VERDICT_UNTRIED;
  const enum swathe_status status = search->operations->prepare(search->arg, wanted, n, verdicts);
  for (int32_t i = 0; i < n; i++) {
    struct sw_search_candidate *candidate = &search->candidates[wanted[i]];
    candidate->ready = verdicts[i] == SW_VERDICT_OK;
    if (candidate->ready || verdicts[i] == SW_VERDICT_UNTRIED) continue;
    if (candidate->verdict == SW_VERDICT_UNTRIED) search->tried++;
    candidate->verdict = verdicts[i];
  }
  return status;
}

// The challenger that is certainly faster than the anchor leads from now on.
static enum swathe_status take_lead(struct race *race)
{
  struct sw_search *search = race->search;
  const int32_t best = fastest(race);
  const struct estimate ratio = compare(race, best, 0);
  if (best == 0 || ratio.value + larger(ratio.margin, band_least) >= 1) return SWATHE_OK;
  search->best = race->entrant[best];
  search->best_ratio = search->candidates[search->best].ratio;
  search->since_gain = 0;
  return search->operations->lead(search->arg);
}

// Is there an entrant of which it is not known yet whether it beats the anchor by more than `band`?
static bool undecided(const struct race *race, double band)
{
  for (int32_t i = 1; i < race->count; i++) {
    const struct estimate ratio = compare(race, i, 0);
    if (!race->out[i] && fabs(ratio.value - (1 - band)) < larger(ratio.margin, band_least))
      return true;
  }
  return false;
}

static enum swathe_status screen(struct race *race)
{
  enum swathe_status status = run_rounds(race, SCREEN_ROUNDS);
  for (int32_t i = 1; i < race->count; i++)
    if (!race->out[i] && race->rounds && compare(race, i, 0).value > clearly_slower)
      race->out[i] = true;
  while (!status && racing(race) > 2 && race->rounds < SCREEN_MOST_ROUNDS &&
         now(race->search) < race->search->end_s) {
    keep_best(race, 1 + racing(race) / 2);
    status = run_rounds(race, SCREEN_ROUNDS);
  }
  while (!status && racing(race) == 2 && race->rounds < SCREEN_MOST_ROUNDS && undecided(race, 0) &&
         now(race->search) < race->search->end_s)
    status = run_rounds(race, SCREEN_ROUNDS);
  return status;
}

// How many candidates fit the time that is left: a few until their cost is known.
static int32_t affordable(const struct sw_search *search)
{
  const double left = search->end_s - reserve_s(search) - now(search);
  int32_t most = search->heat < 1                     ? 1
                 : search->heat > SW_SEARCH_MOST_HEAT ? SW_SEARCH_MOST_HEAT
                                                      : search->heat;
  if (left <= 0) return 0;
  if (!(search->candidate_s > 0)) return most < 4 ? most : 4;
  const double fit = left / search->candidate_s;
  return fit < most ? (int32_t)fit : most;
}

static enum swathe_status run_heat(struct sw_search *search, const int64_t *chosen, int32_t count)
{
  struct race race = { .search = search, .stage = SW_SEARCH_ALONE };
  const double begin = now(search);
  const int64_t tried_before = search->tried;
  enum swathe_status status = prepare(search, chosen, count);
  if (status) return status;
  const double prepare_s = (now(search) - begin) / count;
  search->prepare_s = search->prepare_s > 0 ? (search->prepare_s + prepare_s) / 2 : prepare_s;
  search->since_gain += count;
  enter(&race, search->best);
  for (int32_t i = 0; i < count; i++)
    if (search->candidates[chosen[i]].ready) enter(&race, chosen[i]);
  if (race.count > 1) {
    status = screen(&race);
    const enum swathe_status noted = note_race(&race);
    if (!status) status = noted;
    if (!status && race.rounds) status = take_lead(&race);
  }
  const int64_t done = search->tried - tried_before;
  const double cost = (now(search) - begin) / (double)(done > 0 ? done : 1);
  search->candidate_s = search->candidate_s > 0 ? (search->candidate_s + cost) / 2 : cost;
  return status;
}

static bool good_enough(struct sw_search *search)
{
  const double bound = search->trust * search->least_bound_us;
  const double best_us = search->pace_us * search->best_ratio;
  if (!(search->good_enough > 0) || !(bound > 0) || bound < search->good_enough * best_us)
    return false;
  return search->ended_good = true;
}

// *exhausted: there is nothing more to try, whatever the budget.
static enum swathe_status explore(struct sw_search *search, bool *exhausted)
{
  int64_t chosen[SW_SEARCH_MOST_HEAT];
  enum swathe_status status = SWATHE_OK;

  *exhausted = false;
  while (!status) {
    const int32_t most = affordable(search);
    if (most < 1) return SWATHE_OK;
    const int32_t count = choose_heat(search, most, chosen);
    *exhausted = !count || good_enough(search) ||
                 (search->patience && search->since_gain >= search->patience);
    if (*exhausted) return SWATHE_OK;
    const int64_t tried = search->tried;
    status = run_heat(search, chosen, count);
    if (search->tried == tried) return status;  // the time is up
  }
  return status;
}

// ---- The final --------------------------------------------------------------------------------

static bool contends(const struct sw_search *search, int64_t i)
{
  const struct sw_search_candidate *candidate = &search->candidates[i];
  return candidate->verdict == SW_VERDICT_OK && !candidate->settled && candidate->ratio > 0 &&
         i != search->best && candidate->ratio < final_margin * search->best_ratio;
}

// Anchor, challenger, anchor again, and the default if it is neither.
static double match_s(const struct sw_search *search)
{
  return 1.1 * search->slot_s * MATCH_ROUNDS * (search->holder ? 4 : 3);
}

// Time to be kept for the final and the last match.
static double reserve_s(const struct sw_search *search)
{
  enum { RUNS_OF_ONE = 16 };
  int32_t contenders = 0;
  for (int64_t i = 0; i < search->count; i++) contenders += contends(search, i);
  if (contenders > FINALISTS) contenders = FINALISTS;
  const double all = search->end_s - search->begin_s;
  return smaller(match_s(search), 0.2 * all) +
         (contenders ? smaller(search->slot_s * RUNS_OF_ONE * (contenders + 2), 0.25 * all) : 0);
}

// The nearest contenders join; at least three, so that one that is best beside an exchange is
// among them.
static void enter_contenders(struct race *race)
{
  struct sw_search *search = race->search;
  while (race->count <= FINALISTS) {
    int64_t nearest = -1;
    for (int64_t i = 0; i < search->count; i++) {
      const struct sw_search_candidate *candidate = &search->candidates[i];
      bool entered =
          candidate->verdict != SW_VERDICT_OK || candidate->settled || !(candidate->ratio > 0);
      for (int32_t e = 0; e < race->count && !entered; e++) entered = race->entrant[e] == i;
      if (entered || (race->count > 4 && !contends(search, i))) continue;
      if (nearest < 0 || candidate->ratio < search->candidates[nearest].ratio) nearest = i;
    }
    if (nearest < 0) return;
    enter(race, nearest);
  }
}

// Leave: who is slower than the fastest beyond doubt and band, and the slower half of many.
static void thin_out(struct race *race)
{
  const int32_t lead = fastest(race);
  for (int32_t i = 1; i < race->count; i++) {
    if (race->out[i] || i == lead) continue;
    const struct estimate ratio = compare(race, i, lead);
    if (ratio.value - ratio.margin > 1 + band_most) race->out[i] = true;
  }
  if (race->rounds >= 2 * FINAL_BLOCK && racing(race) > FINAL_TIES)
    keep_best(race, racing(race) / 2 > FINAL_TIES ? racing(race) / 2 : FINAL_TIES);
}

static double clamp_band(double margin) { return smaller(larger(margin, band_least), band_most); }

// Is every entrant either known to be slower than the fastest or known to be its equal?
static bool separated(const struct race *race)
{
  const int32_t lead = fastest(race);
  for (int32_t i = 0; i < race->count; i++) {
    if (race->out[i] || i == lead) continue;
    const struct estimate ratio = compare(race, i, lead);
    if (ratio.margin > band_least && ratio.value - ratio.margin < 1 + band_most) return false;
  }
  return true;
}

// Of equals the one that works in fewer bytes comes first, then the order of their texts.
static bool comes_before(const struct sw_search_candidate *a, const struct sw_search_candidate *b)
{
  return a->bytes != b->bytes ? a->bytes < b->bytes : strcmp(a->config, b->config) < 0;
}

// Equals are told apart by what they are, not by their times, so that two searches agree.
static int32_t winner_of(const struct race *race)
{
  const int32_t lead = fastest(race);
  const struct sw_search *search = race->search;
  int32_t winner = lead;
  for (int32_t i = 0; i < race->count; i++) {
    if (race->out[i] || i == lead) continue;
    const struct estimate ratio = compare(race, i, lead);
    if (ratio.value > 1 + clamp_band(1.0 * ratio.margin)) continue;
    if (race->entrant[i] == search->holder) return i;
    if (race->entrant[winner] != search->holder &&
        comes_before(&search->candidates[race->entrant[i]],
                     &search->candidates[race->entrant[winner]]))
      winner = i;
  }
  return winner;
}

static enum swathe_status run_final(struct sw_search *search)
{
  struct race race = { .search = search, .stage = SW_SEARCH_LOADED };
  enum swathe_status status;

  enter(&race, search->best);
  if (search->candidates[search->holder].verdict == SW_VERDICT_OK) enter(&race, search->holder);
  enter_contenders(&race);
  status = prepare(search, race.entrant, race.count);
  for (int32_t i = 0; i < race.count; i++) race.out[i] = !search->candidates[race.entrant[i]].ready;
  if (status || race.out[0]) return status;
  const double end = search->end_s;
  search->end_s -= smaller(match_s(search), 0.2 * (end - search->begin_s));
  do {
    status = run_rounds(&race, FINAL_BLOCK);
    if (race.rounds >= LEAST_ROUNDS) thin_out(&race);
  } while (!status && racing(&race) > 1 && race.rounds < FINAL_MOST_ROUNDS && !separated(&race) &&
           now(search) < search->end_s);
  search->end_s = end;
  const enum swathe_status noted = note_race(&race);
  if (!status) status = noted;
  if (status || race.rounds < LEAST_ROUNDS) return status;
  const int64_t winner = race.entrant[winner_of(&race)];
  for (int32_t i = 0; i < race.count; i++)
    search->candidates[race.entrant[i]].settled = race.entrant[i] != winner;
  search->noisy = decided_by_noise(&race);
  if (winner == search->best) return SWATHE_OK;
  search->best = winner;
  search->best_ratio = search->candidates[winner].ratio;
  return search->operations->lead(search->arg);
}

// The last match: new pairs of the winner, the holder and the default.  The holder keeps the pick
// unless it is beaten by more than the band.
static enum swathe_status run_match(struct sw_search *search)
{
  struct race race = { .search = search, .stage = SW_SEARCH_LOADED };
  const int64_t challenger = search->best, holder = search->holder;
  enum swathe_status status;

  if (challenger == 0 && holder == 0) return SWATHE_OK;
  enter(&race, holder);
  enter(&race, challenger);
  enter(&race, 0);
  status = prepare(search, race.entrant, race.count);
  for (int32_t i = 0; i < race.count; i++) race.out[i] = !search->candidates[race.entrant[i]].ready;
  if (status || race.out[0]) return status;
  do status = run_rounds(&race, FINAL_BLOCK);
  while (!status && racing(&race) > 1 && race.rounds < MATCH_ROUNDS &&
         now(search) < search->end_s &&
         (race.rounds < LEAST_MATCH_ROUNDS || undecided(&race, band_most)));
  const enum swathe_status noted = note_race(&race);
  if (!status) status = noted;
  if (status || race.out[0]) return status;

  const int32_t of_default =
      race.count - 1;  // also right when the holder is the default: it is [0]
  const bool noisy = decided_by_noise(&race);
  bool beaten = search->best != holder && !search->holder_quiet;  // what heats and final say
  if (race.rounds >= LEAST_ROUNDS) {
    const struct estimate ratio = compare(&race, 1, 0);
    beaten = challenger != holder && !race.out[1] && ratio.value < 1 - clamp_band(ratio.margin) &&
             !(noisy && search->holder_quiet);
    search->noisy = noisy;
  }
  search->best = beaten ? challenger : holder;
  search->best_ratio = search->candidates[search->best].ratio;
  if (race.rounds >= LEAST_ROUNDS)
    search->best_ratio = compare(&race, beaten ? 1 : 0, holder == 0 ? 0 : of_default).value;
  return search->operations->lead(search->arg);
}

// ---- The whole --------------------------------------------------------------------------------

// The default alone: it must be right, and its time is what every ratio is of.  Where that takes
// half of the time, fewer runs must do.
static enum swathe_status try_default(struct sw_search *search)
{
  enum { RUNS = 5 };
  struct race race = { .search = search, .stage = SW_SEARCH_ALONE, .count = 1 };
  const int64_t first = 0;
  double us[RUNS];
  const bool new = untried(search, 0);
  enum swathe_status status = prepare(search, &first, 1);

  if (status) return status;
  if (!search->candidates[0].ready)
    return sw_fail(SWATHE_WRONG_RESULT, "the default config %s failed its check (%s)",
                   search->candidates[0].config, sw_verdict_name(search->candidates[0].verdict));
  const double half = (search->begin_s + search->end_s) / 2;
  int32_t count = 0;
  while (!status && count < RUNS && (count < LEAST_ROUNDS || now(search) < half)) {
    race.rounds = 0;
    status = run_round(&race);
    us[count++] = race.us[0][0];
  }
  if (status) return status;
  struct sw_search_runs runs = { .runs = count, .ratio = 1 };
  memcpy(runs.us, us, (size_t)count * sizeof *us);
  memcpy(runs.beside_us, us, (size_t)count * sizeof *us);
  runs.noisy = count - race.quiet;
  search->candidates[0].verdict = SW_VERDICT_OK;
  search->candidates[0].ratio = 1;
  search->default_us = sw_search_median(us, count);
  search->noisy = race.quiet < LEAST_ROUNDS;
  search->tried += new;
  return search->operations->note(search->arg, &runs);
}

// Where an earlier search stopped, or the holder, leads at first, if it is still any good.
static enum swathe_status take_up(struct sw_search *search)
{
  int64_t start = search->holder;
  for (int64_t i = 0; i < search->count; i++) {
    const struct sw_search_candidate *candidate = &search->candidates[i];
    if (candidate->verdict == SW_VERDICT_OK && candidate->ratio > 0 &&
        candidate->ratio <
            (search->candidates[start].ratio > 0 ? search->candidates[start].ratio : 1))
      start = i;
  }
  if (start == 0) return search->operations->lead(search->arg);
  const enum swathe_status status = prepare(search, &start, 1);
  if (status) return status;
  if (!search->candidates[start].ready) {
    if (search->holder == start) search->holder = 0;
    return search->operations->lead(search->arg);
  }
  return run_heat(search, &start, 1);
}

static enum swathe_status run_all(struct sw_search *search)
{
  bool exhausted = false;
  enum swathe_status status = try_default(search);
  if (!status) status = take_up(search);
  while (!status && !exhausted) {
    const int64_t tried = search->tried;
    status = explore(search, &exhausted);
    if (!status) status = run_final(search);
    if (search->tried == tried) break;  // the budget is spent
  }
  return status ? status : run_match(search);
}

enum swathe_status sw_search_run(struct sw_search *search)
{
  search->best = 0;
  search->best_ratio = 1;
  search->begin_s = now(search);
  if (!search->seed) search->seed = 1;
  for (int64_t i = 0; i < search->count; i++) search->tried += !untried(search, i);
  enum swathe_status status = read_knobs(search);
  if (!status) status = run_all(search);
  if (search->knobs) {
    free(search->knobs->value);
    free(search->knobs->timed);
  }
  free(search->knobs);
  search->knobs = NULL;
  return status;
}

// Of one more candidate: most heats are over after the first rounds, few near the best go on.
static double later_s(const struct sw_search *search)
{
  static const double go_on = 1.15;
  const double runs = SCREEN_ROUNDS * (1 + 2.0 / (search->heat > 0 ? search->heat : 1));
  return search->prepare_s + go_on * runs * search->slot_s;
}

double sw_search_left_s(const struct sw_search *search)
{
  const double left = larger(search->end_s - now(search), 0);
  const int64_t untried_ones = search->count - search->tried;
  const int64_t patience =
      search->patience > search->since_gain ? search->patience - search->since_gain : 0;
  const int64_t more = search->patience && patience < untried_ones ? patience : untried_ones;
  if (!(search->prepare_s > 0)) return left;
  return smaller(left, later_s(search) * (double)more + reserve_s(search));
}
