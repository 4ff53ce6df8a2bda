// problem.c: a layer's shape: is it sound, and its one canonical text.  The first stop on the way
// of the data; nothing here knows kernels, ranks' data or databases.
#include "problem.h"

#include <assert.h>
#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <locale.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const dtype_names[] = {
  [SWATHE_F32] = "f32",
  [SWATHE_BF16] = "bf16",
  [SWATHE_F16] = "f16",
};
static const char *const target_names[] = { [SWATHE_CPU] = "cpu", [SWATHE_CUDA] = "cuda" };
static const char *const layout_names[] = {
  [SWATHE_CONTIGUOUS] = "contiguous",
  [SWATHE_ZIGZAG] = "zigzag",
  [SWATHE_ZIGZAG_DOCUMENT] = "zigzag-doc",
  [SWATHE_SPANS] = "spans",
};

static const char *const strategy_names[] = {
  [SWATHE_HALO] = "halo", [SWATHE_ALL_GATHER] = "all_gather", [SWATHE_A2A] = "a2a",
  [SWATHE_RING] = "ring", [SWATHE_RING_ALL] = "ring_all",
};

#define COUNT(array) ((int)(sizeof(array) / sizeof(array)[0]))

const char *swathe_dtype_name(enum swathe_dtype dtype)
{
  return (unsigned)dtype < (unsigned)COUNT(dtype_names) ? dtype_names[dtype] : "?";
}

const char *swathe_target_name(enum swathe_target target)
{
  return (unsigned)target < (unsigned)COUNT(target_names) ? target_names[target] : "?";
}

const char *swathe_layout_name(enum swathe_layout layout)
{
  return (unsigned)layout < (unsigned)COUNT(layout_names) ? layout_names[layout] : "?";
}

const char *swathe_strategy_name(enum swathe_strategy strategy)
{
  return (unsigned)strategy < (unsigned)COUNT(strategy_names) ? strategy_names[strategy] : "?";
}

// Index of `name` in `names`, or SWATHE_NOT_FOUND with the names there are.
static enum swathe_status name_index(const char *what, const char *const *names, int count,
                                     const char *name, int *index)
{
  char list[128] = "";
  for (int i = 0; i < count; i++) {
    if (!strcmp(names[i], name)) {
      *index = i;
      return SWATHE_OK;
    }
    strncat(list, i ? ", " : "", sizeof list - strlen(list) - 1);
    strncat(list, names[i], sizeof list - strlen(list) - 1);
  }
  return sw_fail(SWATHE_NOT_FOUND, "no %s is called '%s'; there are %s", what, name, list);
}

enum swathe_status swathe_dtype_parse(const char *name, enum swathe_dtype *dtype)
{
  int index = 0;
  const enum swathe_status status =
      name_index("dtype", dtype_names, COUNT(dtype_names), name, &index);
  if (!status) *dtype = (enum swathe_dtype)index;
  return status;
}

enum swathe_status swathe_target_parse(const char *name, enum swathe_target *target)
{
  int index = 0;
  const enum swathe_status status =
      name_index("target", target_names, COUNT(target_names), name, &index);
  if (!status) *target = (enum swathe_target)index;
  return status;
}

enum swathe_status swathe_layout_parse(const char *name, enum swathe_layout *layout)
{
  int index = 0;
  const enum swathe_status status =
      name_index("layout", layout_names, COUNT(layout_names), name, &index);
  if (!status) *layout = (enum swathe_layout)index;
  return status;
}

enum swathe_status swathe_strategy_parse(const char *name, enum swathe_strategy *strategy)
{
  int index = 0;
  const enum swathe_status status =
      name_index("strategy", strategy_names, COUNT(strategy_names), name, &index);
  if (!status) *strategy = (enum swathe_strategy)index;
  return status;
}

void swathe_problem_init(struct swathe_problem *problem)
{
  *problem = (struct swathe_problem){
    .q_heads = 1,
    .kv_heads = 1,
    .head_dim_qk = 64,
    .head_dim_v = 64,
    .window_left = SWATHE_UNLIMITED,
    .dtype = SWATHE_F32,
    .target = SWATHE_CPU,
    .layout = SWATHE_CONTIGUOUS,
    .ranks = 1,
    .tokens_per_rank = 4096,
  };
}

size_t sw_problem_elem_bytes(const struct swathe_problem *problem)
{
  return problem->dtype == SWATHE_F32 ? 4 : 2;
}

int64_t sw_problem_token_bytes(const struct swathe_problem *problem)
{
  return (int64_t)problem->kv_heads * (problem->head_dim_qk + problem->head_dim_v) *
         (int64_t)sw_problem_elem_bytes(problem);
}

double sw_problem_scale(const struct swathe_problem *problem)
{
  return problem->scale != 0 ? problem->scale : 1 / sqrt(problem->head_dim_qk);
}

uint16_t sw_problem_to_bf16(float value)
{
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if (value != value) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float sw_problem_from_bf16(uint16_t half)
{
  const uint32_t bits = (uint32_t)half << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

uint16_t sw_problem_to_f16(float value)
{
  enum { SIGN = 0x8000, INFINITE = 0x7c00, QUIET = 0x0200 };
  const float magnitude = fabsf(value);
  uint32_t bits;
  memcpy(&bits, &magnitude, sizeof bits);
  uint32_t half = (bits - (112u << 23) + 0xfff + (bits >> 13 & 1)) >> 13;
  if (magnitude < 0x1p-14f) half = (uint32_t)lrintf(magnitude * 0x1p24f);  // counts of 2^-24
  if (magnitude >= 65520.0f) half = INFINITE;
  if (value != value) half = INFINITE | QUIET;
  return (uint16_t)(half | (signbit(value) ? SIGN : 0));
}

float sw_problem_from_f16(uint16_t half)
{
  const uint32_t exponent = half >> 10 & 31, fraction = half & 0x3ff;
  const uint32_t bits = (exponent == 31 ? 255u : exponent + 112) << 23 | fraction << 13;
  float value;
  memcpy(&value, &bits, sizeof value);
  if (exponent == 0) value = (float)fraction * 0x1p-24f;
  return half & 0x8000 ? -value : value;
}

uint16_t sw_problem_narrow(enum swathe_dtype dtype, float value)
{
  assert(dtype != SWATHE_F32);
  return dtype == SWATHE_BF16 ? sw_problem_to_bf16(value) : sw_problem_to_f16(value);
}

float sw_problem_widen(enum swathe_dtype dtype, uint16_t bits)
{
  assert(dtype != SWATHE_F32);
  return dtype == SWATHE_BF16 ? sw_problem_from_bf16(bits) : sw_problem_from_f16(bits);
}

static enum swathe_status check_heads(const struct swathe_problem *p)
{
  enum { MOST_HEADS = 1 << 20, MOST_HEAD_DIM = 256 };

  if (p->q_heads < 1 || p->kv_heads < 1 || p->q_heads > MOST_HEADS)
    return sw_fail(SWATHE_BAD_PROBLEM, "%d query heads and %d key heads: each must be from 1 to %d",
                   p->q_heads, p->kv_heads, MOST_HEADS);
  if (p->q_heads % p->kv_heads)
    return sw_fail(SWATHE_BAD_PROBLEM, "%d query heads cannot share %d key heads evenly",
                   p->q_heads, p->kv_heads);
  if (p->head_dim_qk < 1 || p->head_dim_qk > MOST_HEAD_DIM || p->head_dim_v < 1 ||
      p->head_dim_v > MOST_HEAD_DIM)
    return sw_fail(SWATHE_BAD_PROBLEM, "head dims %d and %d: each must be from 1 to %d",
                   p->head_dim_qk, p->head_dim_v, MOST_HEAD_DIM);
  return SWATHE_OK;
}

static enum swathe_status check_window(const char *name, int64_t window)
{
  if (window < 0)
    return sw_fail(SWATHE_BAD_PROBLEM,
                   "%s is %" PRId64 ": a window counts tokens beside the query's own, from 0 on; "
                   "say 'unlimited' for none",
                   name, window);
  if (window > INT32_MAX && window != SWATHE_UNLIMITED)
    return sw_fail(SWATHE_BAD_PROBLEM, "%s is %" PRId64 ": above 2^31-1 say 'unlimited'", name,
                   window);
  return SWATHE_OK;
}

enum swathe_status swathe_problem_check(const struct swathe_problem *p)
{
  enum { MOST_RANKS = 1 << 16 };
  enum swathe_status status = check_heads(p);

  if (!status) status = check_window("window_left", p->window_left);
  if (!status) status = check_window("window_right", p->window_right);
  if (status) return status;
  if ((unsigned)p->dtype >= (unsigned)COUNT(dtype_names))
    return sw_fail(SWATHE_BAD_PROBLEM, "dtype %d is not one of enum swathe_dtype", (int)p->dtype);
  if ((unsigned)p->halo_gradient >= (unsigned)COUNT(dtype_names))
    return sw_fail(SWATHE_BAD_PROBLEM, "halo_gradient %d is not one of enum swathe_dtype",
                   (int)p->halo_gradient);
  if (p->halo_gradient == SWATHE_F16)
    return sw_fail(SWATHE_BAD_PROBLEM,
                   "halo_gradient f16: sums travel as f32 or bf16; f16 would overflow where a sum "
                   "does not");
  if ((unsigned)p->target >= (unsigned)COUNT(target_names))
    return sw_fail(SWATHE_BAD_PROBLEM, "target %d is not one of enum swathe_target",
                   (int)p->target);
  if ((unsigned)p->layout >= (unsigned)COUNT(layout_names))
    return sw_fail(SWATHE_BAD_PROBLEM, "layout %d is not one of enum swathe_layout",
                   (int)p->layout);
  if (!(p->softcap >= 0 && p->softcap < 1e6))
    return sw_fail(SWATHE_BAD_PROBLEM, "softcap %g: it must be 0 (off) or positive and below 1e6",
                   p->softcap);
  if (!(fabs(p->scale) < 1e6))
    return sw_fail(SWATHE_BAD_PROBLEM, "scale %g: it must be finite; 0 means 1/sqrt(head_dim_qk)",
                   p->scale);
  if (p->ranks < 1 || p->ranks > MOST_RANKS)
    return sw_fail(SWATHE_BAD_PROBLEM, "%d ranks: from 1 to %d", p->ranks, MOST_RANKS);
  if (p->tokens_per_rank < 1)
    return sw_fail(SWATHE_BAD_PROBLEM, "%" PRId64 " tokens per rank: at least 1",
                   p->tokens_per_rank);
  return SWATHE_OK;
}

// ---- Text --------------------------------------------------------------------------------------

// The fields of a problem, each once: its name in text and its kind.
#define FIELDS(X)           \
  X(q_heads, integer32)     \
  X(kv_heads, integer32)    \
  X(head_dim_qk, integer32) \
  X(head_dim_v, integer32)  \
  X(window_left, window)    \
  X(window_right, window)   \
  X(dtype, dtype)           \
  X(sinks, flag)            \
  X(softcap, real)          \
  X(scale, real)            \
  X(halo_gradient, dtype)   \
  X(target, target)         \
  X(layout, layout)         \
  X(ranks, integer32)       \
  X(tokens_per_rank, integer64)

void sw_problem_put(struct sw_problem_writer *writer, const char *format, ...)
{
  const bool room = writer->used < writer->size;
  va_list args;
  va_start(args, format);
  const int length = vsnprintf(room ? writer->text + writer->used : NULL,
                               room ? writer->size - writer->used : 0, format, args);
  va_end(args);
  if (length > 0) writer->used += (size_t)length;
}

static void put_integer32(struct sw_problem_writer *w, int32_t value)
{
  sw_problem_put(w, "%" PRId32, value);
}
static void put_integer64(struct sw_problem_writer *w, int64_t value)
{
  sw_problem_put(w, "%" PRId64, value);
}
static void put_flag(struct sw_problem_writer *w, bool value) { sw_problem_put(w, "%d", value); }
static void put_dtype(struct sw_problem_writer *w, enum swathe_dtype v)
{
  sw_problem_put(w, "%s", swathe_dtype_name(v));
}
static void put_target(struct sw_problem_writer *w, enum swathe_target v)
{
  sw_problem_put(w, "%s", swathe_target_name(v));
}
static void put_layout(struct sw_problem_writer *w, enum swathe_layout v)
{
  sw_problem_put(w, "%s", swathe_layout_name(v));
}

static void put_window(struct sw_problem_writer *w, int64_t value)
{
  if (value == SWATHE_UNLIMITED) sw_problem_put(w, "unlimited");
  else sw_problem_put(w, "%" PRId64, value);
}

// The shorter of 6 and 17 significant digits that reads back as the same number; '.' in any locale.
static void put_real(struct sw_problem_writer *w, double value)
{
  char text[40];
  if (value == 0) value = 0;  // -0 is the same problem
  snprintf(text, sizeof text, "%g", value);
  if (strtod(text, NULL) != value) snprintf(text, sizeof text, "%.17g", value);
  for (char *c = text; *c; c++)
    if (*c == ',') *c = '.';
  sw_problem_put(w, "%s", text);
}

size_t swathe_problem_format(const struct swathe_problem *problem, char *text, size_t size)
{
  struct sw_problem_writer writer = { text, size, 0 };
#define PUT_FIELD(name, kind)                                   \
  sw_problem_put(&writer, writer.used ? ",%s=" : "%s=", #name); \
  put_##kind(&writer, problem->name);
  FIELDS(PUT_FIELD)
#undef PUT_FIELD
  return writer.used;
}

static enum swathe_status take_integer64(const char *name, const char *text, int64_t *value)
{
  char *end;
  errno = 0;
  const long long parsed = strtoll(text, &end, 10);
  if (end == text || *end || errno || isspace((unsigned char)*text))
    return sw_fail(SWATHE_BAD_PROBLEM, "%s=%s: not a whole number", name, text);
  *value = parsed;
  return SWATHE_OK;
}

static enum swathe_status take_integer32(const char *name, const char *text, int32_t *value)
{
  int64_t wide = 0;
  const enum swathe_status status = take_integer64(name, text, &wide);
  if (status) return status;
  if (wide < INT32_MIN || wide > INT32_MAX)
    return sw_fail(SWATHE_BAD_PROBLEM, "%s=%s: too large", name, text);
  *value = (int32_t)wide;
  return SWATHE_OK;
}

static enum swathe_status take_window(const char *name, const char *text, int64_t *value)
{
  if (!strcmp(text, "unlimited")) {
    *value = SWATHE_UNLIMITED;
    return SWATHE_OK;
  }
  return take_integer64(name, text, value);
}

static enum swathe_status take_flag(const char *name, const char *text, bool *value)
{
  if (strcmp(text, "0") && strcmp(text, "1"))
    return sw_fail(SWATHE_BAD_PROBLEM, "%s=%s: 0 or 1", name, text);
  *value = *text == '1';
  return SWATHE_OK;
}

static enum swathe_status take_real(const char *name, const char *text, double *value)
{
  char *end;
  const locale_t plain = newlocale(LC_ALL_MASK, "C", (locale_t)0);
  if (!plain) return sw_fail(SWATHE_NO_MEMORY, "no memory for the C locale");
  const double parsed = strtod_l(text, &end, plain);
  freelocale(plain);
  if (end == text || *end || isspace((unsigned char)*text))
    return sw_fail(SWATHE_BAD_PROBLEM, "%s=%s: not a number", name, text);
  *value = parsed;
  return SWATHE_OK;
}

static enum swathe_status take_dtype(const char *name, const char *text, enum swathe_dtype *value)
{
  const enum swathe_status status = swathe_dtype_parse(text, value);
  return status ? sw_within(status, "in %s", name) : SWATHE_OK;
}

static enum swathe_status take_target(const char *name, const char *text, enum swathe_target *value)
{
  const enum swathe_status status = swathe_target_parse(text, value);
  return status ? sw_within(status, "in %s", name) : SWATHE_OK;
}

static enum swathe_status take_layout(const char *name, const char *text, enum swathe_layout *value)
{
  const enum swathe_status status = swathe_layout_parse(text, value);
  return status ? sw_within(status, "in %s", name) : SWATHE_OK;
}

static enum swathe_status take_field(struct swathe_problem *problem, const char *name,
                                     const char *value)
{
#define TAKE_FIELD(field, kind) \
  if (!strcmp(name, #field)) return take_##kind(name, value, &problem->field);
  FIELDS(TAKE_FIELD)
#undef TAKE_FIELD
#define FIELD_NAME(field, kind) " " #field
  return sw_fail(SWATHE_BAD_PROBLEM, "a problem has no field '%s'; there are%s", name,
                 FIELDS(FIELD_NAME));
#undef FIELD_NAME
}

enum swathe_status swathe_problem_parse(const char *text, struct swathe_problem *problem)
{
  struct swathe_problem parsed = *problem;
  enum swathe_status status = SWATHE_OK;
  char buffer[SW_PROBLEM_TEXT], *next = buffer;

  if (strlen(text) >= sizeof buffer)
    return sw_fail(SWATHE_BAD_PROBLEM, "the problem's text is longer than %d bytes",
                   SW_PROBLEM_TEXT - 1);
  strcpy(buffer, text);
  while (next && *next && !status) {
    char *name = next;
    next = strchr(name, ',');
    if (next) *next++ = 0;
    char *value = strchr(name, '=');
    if (!value) return sw_fail(SWATHE_BAD_PROBLEM, "'%s' in the problem is not name=value", name);
    *value++ = 0;
    status = take_field(&parsed, name, value);
  }
  if (!status) status = swathe_problem_check(&parsed);
  if (!status) *problem = parsed;
  return status;
}
