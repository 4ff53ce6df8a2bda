// bench_forward.c: how fast the emitted forward kernel is, as a part of what this core can multiply
// and add.
//
//   bench_forward [ISA [PROBLEM [CONFIG]]]    default: every problem of a table, its default config
//
// One thread, units of 1024 queries, window + 2048 positions.  Counted are 2 flops per dim of a key
// and of a value, for each pair of query and key that see each other and each query head; the time
// is thread CPU time, for each item the best of 5.  The peak is measured in the same process with
// the same flags: multiply-adds of floats, or of pairs of bfloat16 where the kernel does those.
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "measure.h"
#include "templates/kernel_abi.h"

enum { UNIT = 1024, MOST_UNITS = 64, REPEATS = 5 };

// [positions][heads][dim] elements below 1.7, without pattern; bfloat16 where `elem_bytes` is 2.
static struct sw_view make_tensor(int64_t positions, int heads, int dim, size_t elem_bytes)
{
  const size_t count = (size_t)positions * (size_t)heads * (size_t)dim;
  const size_t bytes = (count * elem_bytes + 63) / 64 * 64;   // whole cache lines
  struct sw_view view = { aligned_alloc(64, bytes), (int64_t)heads * dim, dim, 0 };
  uint32_t state = 1;
  if (!view.data) exit(1);
  for (size_t i = 0; i < count; i++) {
    state = state * 1664525u + 1013904223u;
    const float x = 1.7f * ((float)(state >> 8) / 8388608.0f - 1);
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

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Units of UNIT queries (the last one less), each with one run of all the keys it sees.  Returns
// how many; `*most_keys` is what the widest of them sees.
static int cut_units(const struct swathe_problem *problem, int64_t positions, struct sw_view k,
                     struct sw_view v, struct sw_unit *units, struct sw_run *runs,
                     int64_t *most_keys)
{
  const size_t bytes = sw_problem_elem_bytes(problem);
  int count = 0;
  *most_keys = 0;
  for (int64_t begin = 0; begin < positions && count < MOST_UNITS; begin += UNIT, count++) {
    const int64_t end = least(begin + UNIT, positions);
    const int64_t first = begin - least(begin, problem->window_left);
    const int64_t last = end + least(positions - end, problem->window_right);
    units[count] = (struct sw_unit){ begin, end - begin, begin, count, count + 1 };
    runs[count] = (struct sw_run){ .position = first, .tokens = last - first,
                                   .k = at_token(k, first, bytes), .v = at_token(v, first, bytes) };
    if (last - first > *most_keys) *most_keys = last - first;
  }
  return count;
}

static double count_flops(const struct swathe_problem *problem, int64_t positions)
{
  double pairs = 0;
  for (int64_t i = 0; i < positions; i++)
    pairs += (double)(least(i, problem->window_left) + 1 +
                      least(positions - 1 - i, problem->window_right));
  return pairs * problem->q_heads * 2.0 * (problem->head_dim_qk + problem->head_dim_v);
}

// Thread CPU time of all items, each the best of REPEATS.
static double time_items(const struct swathe_problem *problem, int64_t positions,
                         struct sw_jit_image *image)
{
  const size_t bytes = sw_problem_elem_bytes(problem);
  const int q_heads = problem->q_heads, kv_heads = problem->kv_heads;
  const struct sw_view k = make_tensor(positions, kv_heads, problem->head_dim_qk, bytes);
  const struct sw_view v = make_tensor(positions, kv_heads, problem->head_dim_v, bytes);
  struct sw_unit units[MOST_UNITS];
  struct sw_run runs[MOST_UNITS];
  struct sw_attention_args args = {
    .units = units, .runs = runs, .batch = 1, .kv_heads = kv_heads,
    .scale = (float)sw_problem_scale(problem), .softcap = (float)problem->softcap,
    .sink = calloc((size_t)q_heads, sizeof(float)),
    .q = make_tensor(positions, q_heads, problem->head_dim_qk, bytes),
    .out = make_tensor(positions, q_heads, problem->head_dim_v, bytes),
    .lse = make_tensor(positions, q_heads, 1, 4),
  };
  const int unit_count = cut_units(problem, positions, k, v, units, runs, &args.max_keys);
  const void *kernel_address = measure_symbol(image, "forward");
  const void *size_address = measure_symbol(image, "forward_workspace");
  sw_attention_kernel *forward;
  sw_workspace_query *workspace_bytes;
  memcpy(&forward, &kernel_address, sizeof forward);
  memcpy(&workspace_bytes, &size_address, sizeof workspace_bytes);
  void *workspace = aligned_alloc(64, ((size_t)workspace_bytes(args.max_keys) + 63) / 64 * 64);
  void *const tensors[] = { k.data, v.data, args.q.data, args.out.data, args.lse.data, workspace,
                            (void *)(uintptr_t)args.sink };
  double total = 0;

  if (!args.sink || !workspace) exit(1);
  for (int64_t item = 0; item < (int64_t)unit_count * kv_heads; item++) {
    double best = 1e9;
    for (int repeat = 0; repeat < REPEATS; repeat++) {
      const double begin = measure_cpu_s();
      forward(&args, item, item + 1, workspace);
      const double spent = measure_cpu_s() - begin;
      if (spent < best) best = spent;
    }
    total += best;
  }
  for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) free(tensors[i]);
  return total;
}

static void measure(struct sw_gen *gen, struct sw_jit *jit, const char *isa, const char *text,
                    const char *given_config)
{
  struct swathe_problem problem;
  const struct sw_gen_request request = { &problem, "forward", isa };
  struct sw_gen_source source;
  char config[SW_CONFIG_TEXT];

  swathe_problem_init(&problem);
  measure_stop_on(swathe_problem_parse(text, &problem), text);
  if (given_config) snprintf(config, sizeof config, "%s", given_config);
  else measure_stop_on(sw_gen_default(gen, &request, config), "default");
  measure_stop_on(sw_gen_emit(gen, &request, config, &source), "emit");
  struct sw_jit_image *image =
    measure_compile(jit, "forward", source.text, source.flags, isa, NULL);
  const bool pairs = problem.dtype == SWATHE_BF16 && !strcmp(isa, "avx512bf16");
  const int64_t positions = least(problem.window_left, (MOST_UNITS - 2) * UNIT) + 2 * UNIT;
  const double peak = measure_peak(jit, source.flags, isa, pairs);
  const double speed =
    count_flops(&problem, positions) / time_items(&problem, positions, image);
  printf("%.2f of %.1f Gflop/s  %s  %s\n", speed / peak, peak / 1e9, text, config);
  fflush(stdout);
  sw_jit_unload(image);
  sw_gen_source_free(&source);
}

// windows x dims x GQA ratios x dtypes
static void measure_table(struct sw_gen *gen, struct sw_jit *jit, const char *isa)
{
  static const int windows[] = { 128, 1024, 4096 }, dims[] = { 64, 128, 256 };
  static const int ratios[] = { 1, 4, 8 };
  static const char *const dtypes[] = { "f32", "bf16" };
  for (int i = 0; i < 3 * 3 * 3 * 2; i++) {
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
