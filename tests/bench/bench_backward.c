// bench_backward.c: how fast the emitted backward kernel is, as a part of what this core can
// multiply and add.
//
//   bench_backward [ISA [PROBLEM [CONFIG]]]    default: a table of problems, their default configs
//
// One thread, 2048 positions in units of 1024.  Counted are 10 flops per pair of query and key that
// see each other, query head and dim; the time is thread CPU time, for each item the best of 5.
// The peak is measured in the same process with the same flags: multiply-adds of floats, or of
// pairs of bfloat16 where that is what the kernel does.
#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "measure.h"
#include "templates/kernel_abi.h"

enum { POSITIONS = 2048, UNIT = 1024, UNITS = POSITIONS / UNIT, REPEATS = 5 };

// [POSITIONS][heads][dim] elements, small and without pattern; bfloat16 where `elem_bytes` is 2.
static struct sw_view make_tensor(int heads, int dim, size_t elem_bytes, float size)
{
  const size_t count = (size_t)POSITIONS * (size_t)heads * (size_t)dim;
  struct sw_view view = { calloc(count, elem_bytes), (int64_t)heads * dim, dim, 0 };
  uint32_t state = 1;
  if (!view.data) exit(1);
  for (size_t i = 0; i < count; i++) {
    state = state * 1664525u + 1013904223u;
    const float x = size * ((float)(state >> 8) / 8388608.0f - 1);
    if (elem_bytes == 2) memcpy((char *)view.data + 2 * i, (const char *)&x + 2, 2);  // truncated
    else memcpy((char *)view.data + 4 * i, &x, 4);
  }
  return view;
}

static struct sw_view at_token(struct sw_view view, int64_t token, size_t elem_bytes)
{
  view.data = (char *)view.data + (size_t)(token * view.token) * elem_bytes;
  return view;
}

// Units of UNIT queries, each with one run of all the keys it sees.  Returns the most keys.
static int64_t cut_units(const struct swathe_problem *problem, struct sw_unit *units,
                         struct sw_run *runs, struct sw_view k, struct sw_view v)
{
  const size_t bytes = sw_problem_elem_bytes(problem);
  int64_t most = 0;
  for (int64_t u = 0; u < UNITS; u++) {
    int64_t first = 0, last = POSITIONS;
    if (problem->window_left < u * UNIT) first = u * UNIT - problem->window_left;
    if (problem->window_right < POSITIONS - (u + 1) * UNIT)
      last = (u + 1) * UNIT + problem->window_right;
    units[u] = (struct sw_unit){ u * UNIT, UNIT, u * UNIT, u, u + 1 };
    runs[u] = (struct sw_run){
      .position = first, .tokens = last - first,
      .k = at_token(k, first, bytes), .v = at_token(v, first, bytes),
      .dk = make_tensor(problem->kv_heads, problem->head_dim_qk, 4, 0),
      .dv = make_tensor(problem->kv_heads, problem->head_dim_v, 4, 0) };
    if (last - first > most) most = last - first;
  }
  return most;
}

static double count_flops(const struct swathe_problem *problem)
{
  double pairs = 0;
  for (int64_t i = 0; i < POSITIONS; i++) {
    const int64_t left = problem->window_left < i ? problem->window_left : i;
    const int64_t after = POSITIONS - 1 - i;
    pairs += (double)(left + 1 + (problem->window_right < after ? problem->window_right : after));
  }
  return pairs * problem->q_heads * (6.0 * problem->head_dim_qk + 4.0 * problem->head_dim_v);
}

// Thread CPU time of all items, each the best of REPEATS.
static double time_items(const struct swathe_problem *problem, struct sw_jit_image *image)
{
  const size_t bytes = sw_problem_elem_bytes(problem);
  const int q_heads = problem->q_heads, kv_heads = problem->kv_heads;
  const struct sw_view k = make_tensor(kv_heads, problem->head_dim_qk, bytes, 1.7f);
  const struct sw_view v = make_tensor(kv_heads, problem->head_dim_v, bytes, 1.7f);
  struct sw_unit units[UNITS];
  struct sw_run runs[UNITS];
  float *sinks = calloc((size_t)(q_heads * (UNITS + 1)), sizeof *sinks);
  const struct sw_attention_args args = {
    .units = units, .runs = runs, .batch = 1, .kv_heads = kv_heads,
    .max_keys = cut_units(problem, units, runs, k, v),
    .scale = (float)sw_problem_scale(problem), .softcap = (float)problem->softcap,
    .sink = sinks, .dsink = sinks + q_heads,
    .q = make_tensor(q_heads, problem->head_dim_qk, bytes, 1.7f),
    .out = make_tensor(q_heads, problem->head_dim_v, bytes, 0.1f),
    .dout = make_tensor(q_heads, problem->head_dim_v, bytes, 1.7f),
    .dq = make_tensor(q_heads, problem->head_dim_qk, bytes, 0),
    .lse = make_tensor(q_heads, 1, 4, 8),
  };
  const void *kernel_address = measure_symbol(image, "backward");
  const void *size_address = measure_symbol(image, "backward_workspace");
  sw_attention_kernel *backward;
  sw_workspace_query *workspace_bytes;
  memcpy(&backward, &kernel_address, sizeof backward);
  memcpy(&workspace_bytes, &size_address, sizeof workspace_bytes);
  void *workspace = aligned_alloc(64, ((size_t)workspace_bytes(args.max_keys) + 63) / 64 * 64);
  double total = 0;

  if (!sinks || !workspace) exit(1);
  for (int64_t item = 0; item < UNITS * kv_heads; item++) {
    double best = 1e9;
    for (int repeat = 0; repeat < REPEATS; repeat++) {
      const double begin = measure_cpu_s();
      backward(&args, item, item + 1, workspace);
      const double spent = measure_cpu_s() - begin;
      if (spent < best) best = spent;
    }
    total += best;
  }
  free(workspace);   // the tensors go with the process
  return total;
}

static void measure(struct sw_gen *gen, struct sw_jit *jit, const char *isa, const char *text,
                    const char *given_config)
{
  struct swathe_problem problem;
  const struct sw_gen_request request = { &problem, "backward", isa };
  struct sw_gen_source source;
  char config[SW_CONFIG_TEXT];
  double compile_s;

  swathe_problem_init(&problem);
  measure_stop_on(swathe_problem_parse(text, &problem), text);
  if (given_config) snprintf(config, sizeof config, "%s", given_config);
  else measure_stop_on(sw_gen_default(gen, &request, config), "default");
  measure_stop_on(sw_gen_emit(gen, &request, config, &source), "emit");
  struct sw_jit_image *image =
    measure_compile(jit, "backward", source.text, source.flags, isa, &compile_s);
  const bool pairs = strstr(source.text, "return dot_pair(");   // only where products are by pairs
  const double peak = measure_peak(jit, source.flags, isa, pairs);
  const double speed = count_flops(&problem) / time_items(&problem, image);
  printf("%s\n  %s\n  %.1f of %.1f Gflop/s = %.2f of the peak; compiled in %.2f s\n", text, config,
         speed / 1e9, peak / 1e9, speed / peak, compile_s);
  fflush(stdout);
  sw_jit_unload(image);
  sw_gen_source_free(&source);
}

// windows x dims x GQA ratios x dtypes
static void measure_table(struct sw_gen *gen, struct sw_jit *jit, const char *isa)
{
  static const int windows[] = { 128, 1024 }, dims[] = { 64, 128, 256 }, ratios[] = { 1, 4, 8 };
  static const char *const dtypes[] = { "f32", "bf16" };
  for (int i = 0; i < 2 * 3 * 3 * 2; i++) {
    const int window = windows[i / 18], dim = dims[i / 6 % 3], ratio = ratios[i / 2 % 3];
    char text[200];
    snprintf(text, sizeof text,
             "q_heads=%d,kv_heads=%d,head_dim_qk=%d,head_dim_v=%d,window_left=%d,dtype=%s",
             ratio == 1 ? 4 : ratio, ratio == 1 ? 4 : 1, dim, dim, window - 1, dtypes[i % 2]);
    measure(gen, jit, isa, text, NULL);
  }
}

int main(int argc, char **argv)
{
  const char *isa = argc > 1 ? argv[1] : "generic";
  struct sw_gen *gen;
  struct sw_jit *jit;
#if defined __x86_64__
  if (argc < 2 && __builtin_cpu_supports("avx2")) isa = "avx2";
  if (argc < 2 && __builtin_cpu_supports("avx512vl")) isa = "avx512";
  if (argc < 2 && __builtin_cpu_supports("avx512bf16")) isa = "avx512bf16";
#elif defined __aarch64__
  if (argc < 2) isa = "neon";
#endif
  measure_stop_on(sw_gen_open(NULL, &gen), "generator");
  measure_stop_on(sw_jit_open(NULL, NULL, &jit), "jit");
  if (argc > 2) measure(gen, jit, isa, argv[2], argc > 3 ? argv[3] : NULL);
  else measure_table(gen, jit, isa);
  sw_jit_close(jit);
  sw_gen_close(gen);
  return 0;
}
