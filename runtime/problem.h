// problem.h: the private side of the problem room: derived sizes that several rooms need.
#ifndef SW_PROBLEM_H
#define SW_PROBLEM_H

#include "error.h"

// Bytes of one element of q, k, v, out.
size_t sw_problem_elem_bytes(const struct swathe_problem *problem);

// Bytes of one token's K and V, all heads: what one halo token costs on the wire.
int64_t sw_problem_token_bytes(const struct swathe_problem *problem);

// The factor on q.k: problem->scale, or 1/sqrt(head_dim_qk).
double sw_problem_scale(const struct swathe_problem *problem);

// Text of bounded size, as snprintf counts it: `used` is what all of it needs and may pass `size`.
struct sw_problem_writer {
  char *text;
  size_t size, used;
};
void sw_problem_put(struct sw_problem_writer *writer, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

// bfloat16, the upper half of a float: round to nearest even; NaN stays NaN.
uint16_t sw_problem_to_bf16(float value);
float sw_problem_from_bf16(uint16_t bits);

// IEEE half precision, likewise; from 65520 on it is infinity.
uint16_t sw_problem_to_f16(float value);
float sw_problem_from_f16(uint16_t bits);

// Between float and a dtype of 16 bits.
uint16_t sw_problem_narrow(enum swathe_dtype dtype, float value);
float sw_problem_widen(enum swathe_dtype dtype, uint16_t bits);

// Longest canonical key plus its final zero.
enum { SW_PROBLEM_TEXT = 512 };

#endif
