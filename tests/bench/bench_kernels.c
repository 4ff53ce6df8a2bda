// bench_kernels.c: how fast the emitted kernels are, as a part of what this core can multiply and
// add, beside the shares that are aimed at.
//
//   bench_kernels [forward|backward] [--isa ISA] [--problem TEXT [--config TEXT]...] [--seconds S]
//
// Without --problem a table of windows, head dims, GQA ratios and dtypes, 8192 tokens; without
// --config each problem's default.  Several configs take turns, a round each, so that none meets
// what another left in the caches.  Counted are the useful operations: for each pair of query and
// key that see each other, each query head and dim, 4 flops forward and 10 backward (with two head
// dims 2 and 2, 6 and 4).
//
// One thread.  The time is thread CPU time, of each item (1024 queries of a key head) the best of
// at least 5 rounds over all of them; there are more, for at most S seconds a config (6), until 15
// in a row gained nothing: on a shared machine the first few may all meet others at work.  The peak
// is the highest that was measured between these rounds, with the same flags: multiply-adds of
// floats, or of pairs of bfloat16 where the kernels do those.
#include <getopt.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "measure.h"
#include "templates/kernel_abi.h"

enum { UNIT = 1024, UNITS = 8, LEAST_ROUNDS = 5, PATIENCE = 15 };
enum { MOST_CONFIGS = 32, MOST_KV_HEADS = 8, FLAGS = 1024 };
enum { TOKENS = UNITS * UNIT };

static const char *const names[] = { "forward", "backward" };

struct asked {
  struct sw_gen *gen;
  struct sw_jit *jit;
  const char *isa, *configs[MOST_CONFIGS];   // without any: the default
  int count;
  double seconds;
};

// ---- A launch ----------------------------------------------------------------------------------

// A launch over one document, and the arrays to free after it.
struct launch {
  struct sw_attention_args args;
  void *arrays[16 + MOST_CONFIGS];
  int count;
};

static void *make(struct launch *launch, size_t bytes)
{
  void *array = aligned_alloc(64, (bytes + 64) / 64 * 64);   // whole cache lines
  if (!array) exit(1);
  memset(array, 0, bytes);
  launch->arrays[launch->count++] = array;
  return array;
}

// [tokens][heads][dim] elements below `size`, without pattern; bfloat16 where `elem_bytes` is 2.
static struct sw_view make_tensor(struct launch *launch, int heads, int dim, size_t elem_bytes,
                                  float size)
{
  const size_t count = (size_t)TOKENS * (size_t)heads * (size_t)dim;
  struct sw_view view = { make(launch, count * elem_bytes), (int64_t)heads * dim, dim, 0 };
  uint32_t state = 1;
  for (size_t i = 0; i < count; i++) {
    state = state * 1664525u + 1013904223u;
    const float x = size * ((float)(state >> 8) / 8388608.0f - 1);
    memcpy((char *)view.data + elem_bytes * i, (const char *)&x + sizeof x - elem_bytes,
           elem_bytes);   // truncated
  }
  return view;
}

static struct sw_view at_token(struct sw_view view, int64_t token, size_t elem_bytes)
{
  view.data = (char *)view.data + (size_t)(token * view.token) * elem_bytes;
  return view;
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Units of UNIT queries, each with one run of all the keys it sees.
static void cut_units(struct launch *launch, const struct swathe_problem *problem,
                      struct sw_view k, struct sw_view v, bool backward)
{
  const size_t bytes = sw_problem_elem_bytes(problem);
  struct sw_unit *units = make(launch, (size_t)UNITS * sizeof *units);
  struct sw_run *runs = make(launch, (size_t)UNITS * sizeof *runs);
  struct sw_view dk = { 0 }, dv = { 0 };
  if (backward) {   // the sums of a unit are no other's: one array serves all, in turn
    dk = make_tensor(launch, problem->kv_heads, problem->head_dim_qk, 4, 0);
    dv = make_tensor(launch, problem->kv_heads, problem->head_dim_v, 4, 0);
  }
  for (int64_t u = 0; u < UNITS; u++) {
    const int64_t begin = u * UNIT, end = begin + UNIT;
    const int64_t first = begin - least(begin, problem->window_left);
    const int64_t last = end + least(TOKENS - end, problem->window_right);
    units[u] = (struct sw_unit){ begin, UNIT, begin, u, u + 1 };
    runs[u] = (struct sw_run){ .position = first, .tokens = last - first, .dk = dk, .dv = dv,
                               .k = at_token(k, first, bytes), .v = at_token(v, first, bytes) };
    if (last - first > launch->args.max_keys) launch->args.max_keys = last - first;
  }
  launch->args.units = units;
  launch->args.runs = runs;
}

static void make_launch(struct launch *launch, const struct swathe_problem *problem, bool backward)
{
  const size_t bytes = sw_problem_elem_bytes(problem);
  const int q_heads = problem->q_heads, kv_heads = problem->kv_heads;
  const int qk = problem->head_dim_qk, v = problem->head_dim_v;
  memset(launch, 0, sizeof *launch);
  launch->args = (struct sw_attention_args){
    .batch = 1, .kv_heads = kv_heads,
    .scale = (float)sw_problem_scale(problem), .softcap = (float)problem->softcap,
    .sink = make(launch, (size_t)q_heads * sizeof(float)),
    .dsink = make(launch, (size_t)(q_heads * UNITS) * sizeof(float)),
    .q = make_tensor(launch, q_heads, qk, bytes, 1.7f),
    .out = make_tensor(launch, q_heads, v, bytes, 0.1f),
    .lse = make_tensor(launch, q_heads, 1, 4, 8),
  };
  if (backward) {
    launch->args.dout = make_tensor(launch, q_heads, v, bytes, 1.7f);
    launch->args.dq = make_tensor(launch, q_heads, qk, bytes, 0);
  }
  const struct sw_view keys = make_tensor(launch, kv_heads, qk, bytes, 1.7f);
  cut_units(launch, problem, keys, make_tensor(launch, kv_heads, v, bytes, 1.7f), backward);
}

static void free_launch(struct launch *launch)
{
  for (int i = 0; i < launch->count; i++) free(launch->arrays[i]);
}

static double count_flops(const struct swathe_problem *problem, bool backward)
{
  const double qk = problem->head_dim_qk, v = problem->head_dim_v;
  double pairs = 0;
  for (int64_t i = 0; i < TOKENS; i++)
    pairs += (double)(least(i, problem->window_left) + 1 +
                      least(TOKENS - 1 - i, problem->window_right));
  return pairs * problem->q_heads * (backward ? 6 * qk + 4 * v : 2 * (qk + v));
}

// ---- Time --------------------------------------------------------------------------------------

struct candidate {
  char config[SW_CONFIG_TEXT];
  bool pairs;                          // whether its products are by pairs of bfloat16
  struct sw_jit_image *image;
  sw_attention_kernel *kernel;
  void *workspace;
  double best[UNITS * MOST_KV_HEADS];  // seconds of each item
  double seconds;                      // of all
};

static void make_candidate(const struct asked *asked, const struct sw_gen_request *request,
                           const char *config, struct launch *launch, struct candidate *candidate,
                           char flags[FLAGS])
{
  struct sw_gen_source source;
  char name[64];
  snprintf(candidate->config, sizeof candidate->config, "%s", config);
  measure_stop_on(sw_gen_emit(asked->gen, request, config, &source), config);
  candidate->image = measure_compile(asked->jit, request->kernel, source.text, source.flags,
                                     asked->isa, NULL);
  candidate->pairs = strstr(source.text, "return dot_pair(");   // only where products are by pairs
  snprintf(flags, FLAGS, "%s", source.flags);
  sw_gen_source_free(&source);
  snprintf(name, sizeof name, "%s_workspace", request->kernel);
  const void *kernel_address = measure_symbol(candidate->image, request->kernel);
  const void *size_address = measure_symbol(candidate->image, name);
  sw_workspace_query *workspace_bytes;
  memcpy(&candidate->kernel, &kernel_address, sizeof candidate->kernel);
  memcpy(&workspace_bytes, &size_address, sizeof workspace_bytes);
  candidate->workspace = make(launch, (size_t)workspace_bytes(launch->args.max_keys));
  candidate->seconds = 1e30;
}

// Seconds of all items, each its best so far, after one more of each.
static double time_round(struct candidate *candidates, int count, const struct launch *launch,
                         int round)
{
  double sum = 0;
  for (struct candidate *c = candidates; c < candidates + count; c++) {
    c->seconds = 0;
    for (int64_t item = 0; item < UNITS * launch->args.kv_heads; item++) {
      const double begin = measure_cpu_s();
      c->kernel(&launch->args, item, item + 1, c->workspace);
      const double spent = measure_cpu_s() - begin;
      if (round == 0 || spent < c->best[item]) c->best[item] = spent;
      c->seconds += c->best[item];
    }
    sum += c->seconds;
  }
  return sum;
}

// `peaks`: of floats, and of pairs where a candidate has them.
static void time_candidates(const struct asked *asked, struct candidate *candidates, int count,
                            const struct launch *launch, const char *flags, double peaks[2])
{
  const double begin = measure_cpu_s(), most_s = asked->seconds * count;
  double least_sum = 1e30;
  bool wanted[2] = { false, false };

  for (int i = 0; i < count; i++) wanted[candidates[i].pairs] = true;
  peaks[0] = peaks[1] = 0;
  for (int round = 0, idle = 0;
       round < LEAST_ROUNDS || (idle < PATIENCE && measure_cpu_s() - begin < most_s); round++) {
    for (int pairs = 0; pairs < 2; pairs++) {
      const double peak = wanted[pairs] ? measure_peak(asked->jit, flags, asked->isa, pairs) : 0;
      if (peak > peaks[pairs]) peaks[pairs] = peak;
    }
    const double sum = time_round(candidates, count, launch, round);
    idle = sum < 0.998 * least_sum ? 0 : idle + 1;
    if (idle == 0) least_sum = sum;
  }
}

// ---- What is aimed at --------------------------------------------------------------------------

// Shares of the peak: `at_least` and `aim`, by direction, dtype, and of four kinds of problem.
struct bar { double at_least, aim; };

static struct bar bar_of(const struct swathe_problem *problem, bool backward)
{
  static const struct bar bars[2][2][4] = {   // window >= 1024: GQA >= 4, 1; 128: GQA >= 4, 1
    { { { .85, .92 }, { .80, .90 }, { .72, .82 }, { .60, .70 } },
      { { .78, .88 }, { .78, .86 }, { .66, .76 }, { .52, .62 } } },
    { { { .80, .90 }, { .74, .85 }, { .64, .78 }, { .50, .65 } },
      { { .70, .85 }, { .62, .78 }, { .55, .70 }, { .40, .55 } } },
  };
  const bool half = problem->dtype != SWATHE_F32, narrow = problem->window_left < 1023;
  const bool shared = problem->q_heads >= 4 * problem->kv_heads;
  struct bar bar = bars[backward][half][2 * narrow + !shared];
  if (!backward && !narrow && shared && problem->head_dim_qk <= 64)
    bar.at_least = half ? .75 : .82;
  return bar;
}

// The share of the last config.
static double measure(const struct asked *asked, bool backward, const char *text)
{
  static struct candidate candidates[MOST_CONFIGS];
  struct swathe_problem problem;
  const struct sw_gen_request request = { &problem, names[backward], asked->isa };
  struct launch launch;
  char config[SW_CONFIG_TEXT], flags[FLAGS];
  const int count = asked->count ? asked->count : 1;
  double peaks[2], share = 0;

  swathe_problem_init(&problem);
  measure_stop_on(swathe_problem_parse(text, &problem), text);
  if (problem.kv_heads > MOST_KV_HEADS) {
    fprintf(stderr, "bench_kernels: at most %d key heads\n", MOST_KV_HEADS);
    exit(2);
  }
  make_launch(&launch, &problem, backward);
  if (!asked->count) measure_stop_on(sw_gen_default(asked->gen, &request, config), "default");
  for (int i = 0; i < count; i++)
    make_candidate(asked, &request, asked->count ? asked->configs[i] : config, &launch,
                   &candidates[i], flags);
  time_candidates(asked, candidates, count, &launch, flags, peaks);
  const struct bar bar = bar_of(&problem, backward);
  for (int i = 0; i < count; i++) {
    const struct candidate *c = &candidates[i];
    share = count_flops(&problem, backward) / c->seconds / peaks[c->pairs];
    printf("%-8s %.3f of %.1f Gflop/s%s  at least %.2f, aim %.2f%s  %s  %s\n", names[backward],
           share, peaks[c->pairs] / 1e9, c->pairs ? " by pairs" : "", bar.at_least, bar.aim,
           share < bar.at_least - 0.005 ? "  BELOW" : "", text, c->config);
    fflush(stdout);
    sw_jit_unload(c->image);
  }
  free_launch(&launch);
  return share;
}

// windows x dims x GQA ratios x dtypes
static void measure_table(const struct asked *asked, bool backward)
{
  static const int windows[] = { 128, 1024, 4096 }, dims[] = { 64, 128, 256 };
  static const int ratios[] = { 1, 4, 8 };
  static const char *const dtypes[] = { "f32", "bf16" };
  double shares[54];
  for (int i = 0; i < 54; i++) {
    const int window = windows[i / 18], dim = dims[i / 6 % 3], ratio = ratios[i % 3];
    char text[200];
    snprintf(text, sizeof text,
             "q_heads=%d,kv_heads=%d,head_dim_qk=%d,head_dim_v=%d,window_left=%d,dtype=%s",
             ratio == 1 ? 2 : ratio, ratio == 1 ? 2 : 1, dim, dim, window - 1, dtypes[i / 3 % 2]);
    shares[i] = measure(asked, backward, text);
  }
  printf("\n| %s, window, head dim | f32, GQA 1 / 4 / 8 | bf16, GQA 1 / 4 / 8 |\n|---|---|---|\n",
         names[backward]);
  for (int i = 0; i < 54; i += 6)
    printf("| %d, %d | %.2f / %.2f / %.2f | %.2f / %.2f / %.2f |\n", windows[i / 18],
           dims[i / 6 % 3], shares[i], shares[i + 1], shares[i + 2], shares[i + 3], shares[i + 4],
           shares[i + 5]);
  printf("\n");
}

// ---- Command line ------------------------------------------------------------------------------

static const char *best_isa(void)
{
#if defined __x86_64__
  if (__builtin_cpu_supports("avx512bf16")) return "avx512bf16";
  if (__builtin_cpu_supports("avx512vl")) return "avx512";
  if (__builtin_cpu_supports("avx2")) return "avx2";
#elif defined __aarch64__
  return "neon";
#endif
  return "generic";
}

int main(int argc, char **argv)
{
  static const struct option options[] = {
    { "isa", required_argument, NULL, 'i' },    { "problem", required_argument, NULL, 'p' },
    { "config", required_argument, NULL, 'c' }, { "seconds", required_argument, NULL, 's' },
    { NULL, 0, NULL, 0 }
  };
  struct asked asked = { .isa = best_isa(), .seconds = 6 };
  const char *problem = NULL;
  bool wanted[2] = { true, true };

  for (int option; (option = getopt_long(argc, argv, "", options, NULL)) != -1;) {
    if (option == 'i') asked.isa = optarg;
    else if (option == 'p') problem = optarg;
    else if (option == 'c' && asked.count < MOST_CONFIGS) asked.configs[asked.count++] = optarg;
    else if (option == 's') asked.seconds = atof(optarg);
    else return 2;
  }
  if (optind < argc) {
    for (int d = 0; d < 2; d++) wanted[d] = !strcmp(argv[optind], names[d]);
    if (!wanted[0] && !wanted[1]) {
      fprintf(stderr, "bench_kernels: %s is neither forward nor backward\n", argv[optind]);
      return 2;
    }
  }
  measure_stop_on(sw_gen_open(getenv("SWATHE_GENERATOR_DIR"), &asked.gen), "generator");
  measure_stop_on(sw_jit_open(NULL, NULL, &asked.jit), "jit");
  for (int d = 0; d < 2; d++)
    if (wanted[d] && problem) measure(&asked, d, problem);
    else if (wanted[d]) measure_table(&asked, d);
  sw_jit_close(asked.jit);
  sw_gen_close(asked.gen);
  return 0;
}
