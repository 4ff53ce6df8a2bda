// arrays.c: whole-sequence tensors from files or a seed, and back to files.  See arrays.h.
#include "arrays.h"
#include "npy.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char *const names[CLI_ARRAY_COUNT] = {
  [CLI_ARRAY_Q] = "q",       [CLI_ARRAY_K] = "k",   [CLI_ARRAY_V] = "v",
  [CLI_ARRAY_SINK] = "sink", [CLI_ARRAY_DOUT] = "dout", [CLI_ARRAY_OUT] = "out",
  [CLI_ARRAY_LSE] = "lse",   [CLI_ARRAY_DQ] = "dq", [CLI_ARRAY_DK] = "dk",
  [CLI_ARRAY_DV] = "dv",     [CLI_ARRAY_DSINK] = "dsink",
};

const char *cli_arrays_name(enum cli_array array)
{
  return names[array];
}

int64_t cli_arrays_row(const struct cli_arrays *arrays, enum cli_array array)
{
  return (int64_t)arrays->heads[array] * arrays->dims[array];
}

static bool has_tokens(enum cli_array array)
{
  return array != CLI_ARRAY_SINK && array != CLI_ARRAY_DSINK;
}

static int64_t element_count(const struct cli_arrays *arrays, enum cli_array array)
{
  const int64_t rows = has_tokens(array) ? arrays->batch * arrays->tokens : 1;
  return rows * cli_arrays_row(arrays, array);
}

static void set_shapes(const struct swathe_problem *p, struct cli_arrays *arrays)
{
  const struct {
    enum cli_array array;
    int32_t heads, dims;
  } shapes[] = {
    { CLI_ARRAY_Q, p->q_heads, p->head_dim_qk },   { CLI_ARRAY_K, p->kv_heads, p->head_dim_qk },
    { CLI_ARRAY_V, p->kv_heads, p->head_dim_v },   { CLI_ARRAY_SINK, p->q_heads, 1 },
    { CLI_ARRAY_DOUT, p->q_heads, p->head_dim_v }, { CLI_ARRAY_OUT, p->q_heads, p->head_dim_v },
    { CLI_ARRAY_LSE, p->q_heads, 1 },              { CLI_ARRAY_DQ, p->q_heads, p->head_dim_qk },
    { CLI_ARRAY_DK, p->kv_heads, p->head_dim_qk }, { CLI_ARRAY_DV, p->kv_heads, p->head_dim_v },
    { CLI_ARRAY_DSINK, p->q_heads, 1 },
  };
  for (int i = 0; i < CLI_ARRAY_COUNT; i++) {
    arrays->heads[shapes[i].array] = shapes[i].heads;
    arrays->dims[shapes[i].array] = shapes[i].dims;
  }
}

static enum cli_exit allocate(struct cli_arrays *arrays, enum cli_array array)
{
  const int64_t elements = element_count(arrays, array);
  const double wanted = (double)elements * sizeof(float);
  const double there = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);

  // Asking for more than there is would succeed, and the process be killed later.
  if (wanted < there) arrays->data[array] = calloc((size_t)elements, sizeof(float));
  if (arrays->data[array]) return CLI_OK;
  return cli_fail(CLI_FAILED, "%s needs %.1f GiB of memory, this machine has %.1f GiB; "
                  "fewer --tokens would do", names[array], wanted / 0x1p30, there / 0x1p30);
}

void cli_arrays_free(struct cli_arrays *arrays)
{
  for (int i = 0; i < CLI_ARRAY_COUNT; i++) free(arrays->data[i]);
  *arrays = (struct cli_arrays){ 0 };
}

// ---- Files --------------------------------------------------------------------------------------

struct input {
  enum cli_array array;
  enum cli_option option;
  struct cli_npy npy;  // its data moves to the arrays
  const char *path;    // NULL: not given
};
enum { INPUT_Q, INPUT_K, INPUT_V, INPUT_SINK, INPUT_DOUT, INPUT_COUNT };

static enum cli_exit misshapen(const struct input *input, const struct input *other,
                               const char *why)
{
  return cli_fail(CLI_FAILED, "%s %s and %s %s do not fit together: %s", input->path,
                  cli_npy_shape(&input->npy).text, other->path, cli_npy_shape(&other->npy).text,
                  why);
}

// From the last axis: 1 is dim, 2 heads, 3 tokens, 4 batch (1 where there is none).
static int64_t axis(const struct input *input, int from_end)
{
  return from_end > input->npy.axes ? 1 : input->npy.shape[input->npy.axes - from_end];
}

static enum cli_exit check_axes(const struct input *input, const struct input *q)
{
  enum { MOST_HEADS = 1 << 20 };

  if (input->npy.axes != 3 && input->npy.axes != 4)
    return cli_fail(CLI_FAILED,
                    "%s has the shape %s; [tokens, heads, dim] or [batch, tokens, heads, "
                    "dim] is read",
                    input->path, cli_npy_shape(&input->npy).text);
  if (axis(input, 2) > MOST_HEADS || axis(input, 1) > MOST_HEADS || axis(input, 4) > MOST_HEADS)
    return cli_fail(CLI_FAILED, "%s has the shape %s, beyond any layer's heads, dims and batch",
                    input->path, cli_npy_shape(&input->npy).text);
  if (input->npy.axes != q->npy.axes) return misshapen(input, q, "one has a batch axis");
  if (axis(input, 4) != axis(q, 4)) return misshapen(input, q, "the batches differ");
  if (axis(input, 3) != axis(q, 3)) return misshapen(input, q, "the tokens differ");
  return CLI_OK;
}

static enum cli_exit check_shapes(const struct input inputs[INPUT_COUNT])
{
  const struct input *q = &inputs[INPUT_Q], *k = &inputs[INPUT_K], *v = &inputs[INPUT_V];
  const struct input *sink = &inputs[INPUT_SINK], *dout = &inputs[INPUT_DOUT];
  enum cli_exit code = check_axes(q, q);

  if (!code) code = check_axes(k, q);
  if (!code) code = check_axes(v, q);
  if (!code && dout->path) code = check_axes(dout, q);
  if (code) return code;
  if (axis(k, 1) != axis(q, 1)) return misshapen(k, q, "their head dims differ");
  if (axis(v, 2) != axis(k, 2)) return misshapen(v, k, "their heads differ");
  if (axis(q, 2) % axis(k, 2))
    return misshapen(q, k, "the query heads cannot share the key heads evenly");
  if (dout->path && axis(dout, 2) != axis(q, 2)) return misshapen(dout, q, "their heads differ");
  if (dout->path && axis(dout, 1) != axis(v, 1))
    return misshapen(dout, v, "their head dims differ");
  if (sink->path && (sink->npy.axes != 1 || sink->npy.shape[0] != axis(q, 2)))
    return misshapen(sink, q, "a sink is one number per query head, [heads]");
  return CLI_OK;
}

static enum cli_exit read_inputs(const struct cli_args *args, struct input inputs[INPUT_COUNT])
{
  for (int i = 0; i < INPUT_COUNT; i++) {
    inputs[i].path = args->value[inputs[i].option];
    if (!inputs[i].path) continue;
    const enum cli_exit code = cli_npy_read(inputs[i].path, &inputs[i].npy);
    if (code) return code;
  }
  return check_shapes(inputs);
}

enum cli_exit cli_arrays_read(const struct cli_args *args, struct cli_arrays *arrays,
                              struct cli_given_files *files)
{
  struct input inputs[INPUT_COUNT] = {
    [INPUT_Q] = { .array = CLI_ARRAY_Q, .option = CLI_Q },
    [INPUT_K] = { .array = CLI_ARRAY_K, .option = CLI_K },
    [INPUT_V] = { .array = CLI_ARRAY_V, .option = CLI_V },
    [INPUT_SINK] = { .array = CLI_ARRAY_SINK, .option = CLI_SINK },
    [INPUT_DOUT] = { .array = CLI_ARRAY_DOUT, .option = CLI_DOUT },
  };
  const enum cli_exit code = read_inputs(args, inputs);

  *arrays = (struct cli_arrays){ .backward = inputs[INPUT_DOUT].path != NULL };
  for (int i = 0; i < INPUT_COUNT; i++) arrays->data[inputs[i].array] = inputs[i].npy.data;
  if (code) return code;
  const struct input *q = &inputs[INPUT_Q], *k = &inputs[INPUT_K], *v = &inputs[INPUT_V];
  arrays->batch = axis(q, 4);
  arrays->tokens = axis(q, 3);
  arrays->batch_axis = q->npy.axes == 4;
  *files = (struct cli_given_files){
    .batch = arrays->batch,
    .tokens = arrays->tokens,
    .q_heads = (int32_t)axis(q, 2),
    .kv_heads = (int32_t)axis(k, 2),
    .head_dim_qk = (int32_t)axis(q, 1),
    .head_dim_v = (int32_t)axis(v, 1),
    .sink = inputs[INPUT_SINK].path != NULL,
  };
  return CLI_OK;
}

static enum cli_exit write_array(const struct cli_arrays *arrays, enum cli_array array,
                                 const char *directory)
{
  struct cli_npy npy = { .elements = element_count(arrays, array), .data = arrays->data[array] };
  char *path = NULL;

  if (has_tokens(array)) {
    if (arrays->batch_axis) npy.shape[npy.axes++] = arrays->batch;
    npy.shape[npy.axes++] = arrays->tokens;
  }
  npy.shape[npy.axes++] = arrays->heads[array];
  if (has_tokens(array) && array != CLI_ARRAY_LSE) npy.shape[npy.axes++] = arrays->dims[array];
  if (asprintf(&path, "%s/%s.npy", directory, names[array]) < 0)
    return cli_fail(CLI_FAILED, "out of memory");
  const enum cli_exit code = cli_npy_write(path, &npy);
  free(path);
  return code;
}

enum cli_exit cli_arrays_write(const struct cli_arrays *arrays, const char *directory)
{
  enum cli_exit code = CLI_OK;

  if (mkdir(directory, 0777) && errno != EEXIST)
    return cli_fail(CLI_FAILED, "the directory %s cannot be made: %s", directory, strerror(errno));
  for (int i = CLI_ARRAY_OUT; i < CLI_ARRAY_COUNT && !code; i++)
    if (arrays->data[i]) code = write_array(arrays, (enum cli_array)i, directory);
  return code;
}

// ---- Numbers ------------------------------------------------------------------------------------

static uint16_t to_bf16(float value)
{
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if (isnan(value))
    return (uint16_t)(bits >> 16 | 0x40);  // stays a NaN, whatever the low half held
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float from_bf16(uint16_t half)
{
  const uint32_t bits = (uint32_t)half << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// By arithmetic: the nearest multiple of the last place there is at that size.
static uint16_t to_f16(float value)
{
  const uint16_t sign = signbit(value) ? 0x8000 : 0;
  int exponent;
  if (isnan(value)) return sign | 0x7e00;
  const float magnitude = fabsf(value);
  if (magnitude >= 65520) return sign | 0x7c00;
  frexpf(magnitude, &exponent);
  if (magnitude < 0x1p-14f) exponent = -13;  // there all steps are of 2^-24
  const int steps = (int)lrintf(ldexpf(magnitude, 11 - exponent));
  return (uint16_t)(sign | (((exponent + 13) << 10) + steps));
}

static float from_f16(uint16_t half)
{
  const int exponent = half >> 10 & 31, fraction = half & 0x3ff;
  float value = exponent == 31 && fraction ? NAN
                : exponent == 31           ? INFINITY
                : exponent                 ? ldexpf((float)(1024 + fraction), exponent - 25)
                                           : ldexpf((float)fraction, -24);
  return half & 0x8000 ? -value : value;
}

uint16_t cli_arrays_narrow(enum swathe_dtype dtype, float value)
{
  return dtype == SWATHE_F16 ? to_f16(value) : to_bf16(value);
}

float cli_arrays_widen(enum swathe_dtype dtype, uint16_t bits)
{
  return dtype == SWATHE_F16 ? from_f16(bits) : from_bf16(bits);
}

// SplitMix64's mixing of a counter.
uint64_t cli_arrays_mix(uint64_t x)
{
  x += 0x9e3779b97f4a7c15;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

// The sum of four uniform 16-bit numbers, centred and scaled to variance 1: near enough to a normal
// one.
static float like_normal(uint64_t bits)
{
  const int64_t sum = (int64_t)((bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) +
                                (bits >> 48));
  return (float)((double)(sum - 2 * 0xffff) * (1.7320508075688772 / 65536));
}

static enum cli_exit fill(struct cli_arrays *arrays, enum cli_array array, uint64_t seed)
{
  const enum cli_exit code = allocate(arrays, array);
  if (code) return code;
  const uint64_t stream = cli_arrays_mix(seed * CLI_ARRAY_COUNT + array);
  const int64_t elements = element_count(arrays, array);
  for (int64_t i = 0; i < elements; i++)
    arrays->data[array][i] = like_normal(cli_arrays_mix(stream + (uint64_t)i));
  return CLI_OK;
}

enum cli_exit cli_arrays_random(const struct cli_given *given, bool backward, uint64_t seed,
                                struct cli_arrays *arrays)
{
  *arrays = (struct cli_arrays){
    .batch = given->sharding.batch,
    .tokens = given->sharding.tokens,
    .batch_axis = given->sharding.batch > 1,
    .backward = backward,
  };
  set_shapes(&given->problem, arrays);
  enum cli_exit code = fill(arrays, CLI_ARRAY_Q, seed);
  if (!code) code = fill(arrays, CLI_ARRAY_K, seed);
  if (!code) code = fill(arrays, CLI_ARRAY_V, seed);
  if (!code && given->problem.sinks) code = fill(arrays, CLI_ARRAY_SINK, seed);
  if (!code && backward) code = fill(arrays, CLI_ARRAY_DOUT, seed);
  return code;
}

enum cli_exit cli_arrays_prepare(const struct swathe_problem *problem, struct cli_arrays *arrays)
{
  static const enum cli_array rounded[] = { CLI_ARRAY_Q, CLI_ARRAY_K, CLI_ARRAY_V, CLI_ARRAY_DOUT };
  static const enum cli_array gradients[] = { CLI_ARRAY_DQ, CLI_ARRAY_DK, CLI_ARRAY_DV };

  set_shapes(problem, arrays);
  for (int i = 0; i < 4 && problem->dtype != SWATHE_F32; i++) {
    float *data = arrays->data[rounded[i]];
    const int64_t elements = element_count(arrays, rounded[i]);
    for (int64_t e = 0; data && e < elements; e++)
      data[e] = cli_arrays_widen(problem->dtype, cli_arrays_narrow(problem->dtype, data[e]));
  }
  enum cli_exit code = allocate(arrays, CLI_ARRAY_OUT);
  if (!code) code = allocate(arrays, CLI_ARRAY_LSE);
  for (int i = 0; i < 3 && arrays->backward && !code; i++) code = allocate(arrays, gradients[i]);
  if (!code && arrays->backward && problem->sinks) code = allocate(arrays, CLI_ARRAY_DSINK);
  if (code) return code;
  const int64_t lse_elements = element_count(arrays, CLI_ARRAY_LSE);
  for (int64_t i = 0; i < lse_elements; i++) arrays->data[CLI_ARRAY_LSE][i] = -INFINITY;
  return CLI_OK;
}
