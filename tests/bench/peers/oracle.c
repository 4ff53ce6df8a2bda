// oracle.c: naive attention in double for a few rows; it knows nothing of any peer.
#include "oracle.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { SOME_TOKENS = 8, LAST_KEYS = 3 };

// Pointers into the data of one case.
struct inputs {
  const struct peers_case *given;
  const float *q, *k, *v, *dout;
};

size_t oracle_q_count(const struct peers_case *given)
{
  return (size_t)given->tokens * (size_t)given->q_heads * (size_t)given->dim;
}

size_t oracle_kv_count(const struct peers_case *given)
{
  return (size_t)given->tokens * (size_t)given->kv_heads * (size_t)given->dim;
}

size_t oracle_result_count(const struct peers_case *given)
{
  return oracle_q_count(given) + (given->backward ? 2 * oracle_kv_count(given) : 0);
}

double oracle_pairs(const struct peers_case *given)
{
  double pairs = 0;
  for (int64_t i = 0; i < given->tokens; i++)
    pairs += (double)(i + 1 < given->window ? i + 1 : given->window);
  return pairs * given->q_heads;
}

float *oracle_data(const struct peers_case *given)
{
  const size_t count = 2 * oracle_q_count(given) + 2 * oracle_kv_count(given);
  float *data = malloc(count * sizeof *data);
  uint32_t state = 1;
  for (size_t i = 0; data && i < count; i++) {
    double sum = 0;   // four uniform numbers, variance 1 together
    uint32_t bits;
    for (int draw = 0; draw < 4; draw++) {
      state = state * 1664525u + 1013904223u;
      sum += (double)(state >> 8) / 16777216 - 0.5;
    }
    data[i] = (float)(sum * sqrt(3));
    memcpy(&bits, &data[i], sizeof bits);
    bits &= 0xffff0000u;
    memcpy(&data[i], &bits, sizeof bits);
  }
  return data;
}

static double dot(const float *a, const float *b, int dim)
{
  double sum = 0;
  for (int d = 0; d < dim; d++) sum += (double)a[d] * (double)b[d];
  return sum;
}

static const float *row(const float *tensor, int64_t token, int heads, int head, int dim)
{
  return tensor + (token * heads + head) * dim;
}

static int64_t first_key(const struct peers_case *given, int64_t token)
{
  return token - given->window + 1 > 0 ? token - given->window + 1 : 0;
}

// weights [keys] of one query, first_key first; returns their number.
static int64_t weigh(const struct inputs *in, int64_t token, int head, double *weights)
{
  const struct peers_case *given = in->given;
  const int dim = given->dim, kv_head = head / (given->q_heads / given->kv_heads);
  const int64_t low = first_key(given, token), keys = token + 1 - low;
  double top = -INFINITY, sum = 0;
  for (int64_t j = 0; j < keys; j++) {
    weights[j] = dot(row(in->q, token, given->q_heads, head, dim),
                     row(in->k, low + j, given->kv_heads, kv_head, dim), dim) / sqrt(dim);
    if (weights[j] > top) top = weights[j];
  }
  for (int64_t j = 0; j < keys; j++) sum += weights[j] = exp(weights[j] - top);
  for (int64_t j = 0; j < keys; j++) weights[j] /= sum;
  return keys;
}

// Weights of one query to the gradients of its scores, in `slopes` [keys].
static void slope(const struct inputs *in, int64_t token, int head, const double *weights,
                  int64_t keys, double *slopes)
{
  const struct peers_case *given = in->given;
  const int dim = given->dim, kv_head = head / (given->q_heads / given->kv_heads);
  const int64_t low = first_key(given, token);
  double delta = 0;
  for (int64_t j = 0; j < keys; j++) {
    slopes[j] = dot(row(in->dout, token, given->q_heads, head, dim),
                    row(in->v, low + j, given->kv_heads, kv_head, dim), dim);
    delta += weights[j] * slopes[j];
  }
  for (int64_t j = 0; j < keys; j++) slopes[j] = weights[j] * (slopes[j] - delta) / sqrt(dim);
}

static void worsen(double *worst, double result, double right)
{
  const double error = fabs(result - right) / fmax(1, fabs(right));
  if (!(error <= *worst)) *worst = isfinite(error) ? error : INFINITY;
}

// out, or dq, of one query head: a sum of values, or keys, by weights, or slopes.
static void compare_query(const struct inputs *in, int64_t token, int head, const double *factors,
                          int64_t keys, const float *result, double *worst)
{
  const struct peers_case *given = in->given;
  const int dim = given->dim, kv_head = head / (given->q_heads / given->kv_heads);
  const float *summed = given->backward ? in->k : in->v;
  for (int d = 0; d < dim; d++) {
    const int64_t low = first_key(given, token);
    double sum = 0;
    for (int64_t j = 0; j < keys; j++)
      sum += factors[j] * (double)row(summed, low + j, given->kv_heads, kv_head, dim)[d];
    worsen(worst, (double)result[d], sum);
  }
}

// dk and dv of one of the last keys: only the few queries after it see it.
static void compare_key(const struct inputs *in, int64_t key, int kv_head, const float *dk,
                        const float *dv, double *weights, double *slopes, double *worst)
{
  const struct peers_case *given = in->given;
  const int dim = given->dim, group = given->q_heads / given->kv_heads;
  double key_sum[256] = { 0 }, value_sum[256] = { 0 };
  for (int64_t token = key; token < given->tokens; token++)
    for (int head = kv_head * group; head < (kv_head + 1) * group; head++) {
      const int64_t keys = weigh(in, token, head, weights), j = key - first_key(given, token);
      slope(in, token, head, weights, keys, slopes);
      for (int d = 0; d < dim; d++) {
        key_sum[d] += slopes[j] * (double)row(in->q, token, given->q_heads, head, dim)[d];
        value_sum[d] += weights[j] * (double)row(in->dout, token, given->q_heads, head, dim)[d];
      }
    }
  for (int d = 0; d < dim; d++) {
    worsen(worst, (double)dk[d], key_sum[d]);
    worsen(worst, (double)dv[d], value_sum[d]);
  }
}

double oracle_error(const struct peers_case *given, const float *data, const float *results)
{
  const size_t q_count = oracle_q_count(given), kv_count = oracle_kv_count(given);
  const struct inputs in = { given, data, data + q_count, data + q_count + kv_count,
                             data + q_count + 2 * kv_count };
  double *weights = malloc((size_t)given->tokens * sizeof *weights);
  double *slopes = malloc((size_t)given->tokens * sizeof *slopes);
  double worst = 0;
  if (!weights || !slopes) abort();
  for (int i = 0; i < SOME_TOKENS; i++) {
    const int64_t token = (given->tokens - 1) * i / (SOME_TOKENS - 1);
    for (int head = 0; head < given->q_heads; head++) {
      const int64_t keys = weigh(&in, token, head, weights);
      if (given->backward) slope(&in, token, head, weights, keys, slopes);
      compare_query(&in, token, head, given->backward ? slopes : weights, keys,
                    row(results, token, given->q_heads, head, given->dim), &worst);
    }
  }
  for (int64_t key = given->tokens - LAST_KEYS; given->backward && key < given->tokens; key++)
    for (int head = 0; head < given->kv_heads; head++) {
      const float *dk = row(results + q_count, key, given->kv_heads, head, given->dim);
      compare_key(&in, key, head, dk, dk + kv_count, weights, slopes, &worst);
    }
  free(weights);
  free(slopes);
  return worst;
}

double oracle_distance(const struct peers_case *given, const float *a, const float *b)
{
  double worst = 0;
  for (size_t i = 0; i < oracle_result_count(given); i++)
    worsen(&worst, (double)a[i], (double)b[i]);
  return worst;
}
