// simulated.c: see simulated.h.
#include "simulated.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const double tau = 6.283185307179586;

static uint64_t next(uint64_t *random)
{
  *random ^= *random >> 12;
  *random ^= *random << 25;
  *random ^= *random >> 27;
  return *random * 2685821657736338717u;
}

double simulated_uniform(uint64_t *random)
{
  return (double)(next(random) >> 11) / 9007199254740992.0;
}

// Box and Muller's; never infinite.
static double normal(uint64_t *random)
{
  const double u = 1 - simulated_uniform(random), v = simulated_uniform(random);
  return sqrt(-2 * log(u)) * cos(tau * v);
}

// ---- Operations -------------------------------------------------------------------------------

static double speed_factor(const struct simulated *device, bool *seen)
{
  const double t = device->clock_s;
  double factor = 1;
  if (device->drift_s > 0) factor += device->drift * sin(tau * t / device->drift_s);
  if (t < device->ramp_s) factor /= 0.5 + 0.5 * t / device->ramp_s;
  for (int i = 0; i < SIMULATED_EVENTS; i++) {
    const struct simulated_event *event = &device->events[i];
    if (t < event->begin_s || t >= event->end_s) continue;
    factor *= event->factor;
    *seen |= event->seen;
  }
  return factor;
}

static double run(struct simulated *device, int64_t candidate, enum sw_search_stage stage,
                  bool *seen)
{
  const double *truth =
      stage == SW_SEARCH_LOADED && device->loaded_us ? device->loaded_us : device->alone_us;
  const bool spell =
      device->spell_every_s > 0 && fmod(device->clock_s, device->spell_every_s) < device->spell_s;
  const double noise = device->noise + (spell ? device->spell_noise : 0);
  double us = truth[candidate] * speed_factor(device, seen) * exp(noise * normal(&device->random));
  *seen |= spell && device->spell_seen;
  if (candidate != device->last) us *= 1 + device->cold * simulated_uniform(&device->random);
  if (simulated_uniform(&device->random) < device->outliers)
    us *= 1.1 + 0.4 * simulated_uniform(&device->random);
  device->last = candidate;
  device->launches++;
  device->loaded_launches += stage == SW_SEARCH_LOADED;
  device->clock_s += 1e-6 * us;
  return us;
}

static void foretell(struct simulated *device)
{
  const struct sw_search *search = device->search;
  if (!search || device->foretold_at_s > 0) return;
  if (10 * search->tried < search->count &&
      10 * (device->clock_s - search->begin_s) < search->end_s - search->begin_s)
    return;
  device->foretold_at_s = device->clock_s;
  device->foretold_left_s = sw_search_left_s(search);
}

static enum swathe_status measure(void *arg, struct sw_search_round *round)
{
  struct simulated *device = arg;
  foretell(device);
  round->noisy = false;
  device->clock_s += device->round_s;
  for (int32_t i = 0; i < round->count; i++) {
    const int64_t candidate = round->order[i];
    const bool late = device->late && device->launches >= device->late_launches;
    round->verdicts[i] = late ? device->late[candidate] : SW_VERDICT_OK;
    if (round->verdicts[i]) {
      if (round->verdicts[i] == SW_VERDICT_TIMEOUT) device->clock_s += device->hang_s;
      while (++i < round->count) round->verdicts[i] = SW_VERDICT_UNTRIED;
      return SWATHE_OK;
    }
    round->us[i] =
        run(device, candidate, round->stage, &round->noisy) * (1 + device->tilt * i / round->count);
  }
  return SWATHE_OK;
}

static enum swathe_status prepare(void *arg, const int64_t *candidates, int32_t count,
                                  enum sw_verdict *verdicts)
{
  struct simulated *device = arg;
  for (int32_t i = 0; i < count; i++) {
    if (device->interrupt_after && device->prepared >= device->interrupt_after)
      return sw_fail(SWATHE_INTERRUPTED, "stopped");
    device->prepared++;
    device->clock_s += device->prepare_s;
    if (device->times_prepared) device->times_prepared[candidates[i]]++;
    verdicts[i] = device->fault ? device->fault[candidates[i]] : SW_VERDICT_OK;
    if (verdicts[i] == SW_VERDICT_TIMEOUT) device->clock_s += device->hang_s;
  }
  return SWATHE_OK;
}

static enum swathe_status note(void *arg, const struct sw_search_runs *runs)
{
  struct simulated *device = arg;
  device->notes++;
  device->noisy_notes += runs->noisy > 0;
  return SWATHE_OK;
}

static enum swathe_status lead(void *arg)
{
  ((struct simulated *)arg)->leads++;
  return SWATHE_OK;
}

static double now_s(void *arg) { return ((const struct simulated *)arg)->clock_s; }

const struct sw_search_operations simulated_operations = {
  .prepare = prepare, .measure = measure, .note = note, .lead = lead, .now_s = now_s
};

// ---- Costs ------------------------------------------------------------------------------------

static void begin(struct simulated *device, int64_t count, uint64_t seed)
{
  *device =
      (struct simulated){ .count = count, .random = seed * 0x9e3779b97f4a7c15u + 1, .last = -1 };
  device->alone_us = calloc((size_t)count, sizeof *device->alone_us);
  if (!device->alone_us) abort();
}

void simulated_shuffled(struct simulated *device, int64_t count, int64_t near, uint64_t seed)
{
  begin(device, count, seed);
  for (int64_t i = 0; i < count; i++)
    device->alone_us[i] = 20000 * (i < near ? 1 + 0.05 * (double)i / (double)(near - 1)
                                            : 1.06 + 0.54 * simulated_uniform(&device->random));
  for (int64_t i = count - 1; i > 0; i--) {
    const int64_t j = (int64_t)(next(&device->random) % (uint64_t)(i + 1));
    const double swapped = device->alone_us[i];
    device->alone_us[i] = device->alone_us[j];
    device->alone_us[j] = swapped;
  }
  // the default is one of the slow ones
  for (int64_t i = 1; i < count && device->alone_us[0] < 20000 * 1.055; i++) {
    const double swapped = device->alone_us[0];
    device->alone_us[0] = device->alone_us[i];
    device->alone_us[i] = swapped;
  }
}

enum { MOST_KNOBS = 8 };

void simulated_surface(struct simulated *device, int knobs, int values, uint64_t seed)
{
  double factor[MOST_KNOBS][64], together[MOST_KNOBS];
  int64_t count = 1;
  for (int k = 0; k < knobs; k++) count *= values;
  begin(device, count, seed);
  for (int k = 0; k < knobs; k++) {
    const double width = k < 2 ? 0.3 : 0.06;  // two knobs matter
    for (int v = 0; v < values; v++) factor[k][v] = width * simulated_uniform(&device->random);
    together[k] = 0.02 * simulated_uniform(&device->random);
  }
  for (int64_t i = 0; i < count; i++) {
    double sum = 0;
    int before = 0;
    int64_t rest = i;
    for (int k = 0; k < knobs; k++) {
      const int v = (int)(rest % values);
      rest /= values;
      sum += factor[k][v] + (k && (v + before) % 3 == 0 ? together[k] : 0);
      before = v;
    }
    device->alone_us[i] = 20000 * exp(sum);
  }
}

struct sw_search_candidate *simulated_candidates(const struct simulated *device)
{
  struct sw_search_candidate *candidates = calloc((size_t)device->count, sizeof *candidates);
  int base = 2;
  if (!candidates) abort();
  while (pow(base, 4) < (double)device->count) base++;  // four knobs name them all
  for (int64_t i = 0; i < device->count; i++) {
    char *text = NULL;
    const int64_t square = (int64_t)base * base;
    if (asprintf(&text, "a=%lld,b=%lld,c=%lld,d=%lld", (long long)(i % base),
                 (long long)(i / base % base), (long long)(i / square % base),
                 (long long)(i / square / base)) < 0)
      abort();
    candidates[i] = (struct sw_search_candidate){ .config = text,
                                                  .bytes = device->bytes ? device->bytes[i] : 0,
                                                  .verdict = SW_VERDICT_UNTRIED };
  }
  return candidates;
}

void simulated_free_candidates(const struct simulated *device,
                               struct sw_search_candidate *candidates)
{
  for (int64_t i = 0; i < device->count; i++) free((char *)(uintptr_t)candidates[i].config);
  free(candidates);
}

void simulated_free(struct simulated *device)
{
  free(device->alone_us);
  free(device->loaded_us);
  free(device->bytes);
  free(device->fault);
  free(device->late);
  free(device->times_prepared);
}

double simulated_regret(const struct simulated *device, int64_t candidate, bool loaded)
{
  const double *truth = loaded && device->loaded_us ? device->loaded_us : device->alone_us;
  double best = truth[0];
  for (int64_t i = 0; i < device->count; i++) best = truth[i] < best ? truth[i] : best;
  return truth[candidate] / best - 1;
}
