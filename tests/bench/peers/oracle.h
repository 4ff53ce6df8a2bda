// oracle.h: the data of one case, attention in double for a few of its rows, and how far results
// are off.
#ifndef PEERS_ORACLE_H
#define PEERS_ORACLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct peers_case {
  bool backward, bf16;
  int64_t tokens, window;       // keys a query sees, its own included; causal
  int dim, q_heads, kv_heads;
};

// Floats of q, and of k; a results file holds q's (forward) or q's + 2 k's (backward).
size_t oracle_q_count(const struct peers_case *given);
size_t oracle_kv_count(const struct peers_case *given);
size_t oracle_result_count(const struct peers_case *given);

// Query and key that see each other, times query heads.
double oracle_pairs(const struct peers_case *given);

// q, k, v, dout one after the other, about normal, every value a bfloat16.  free() it.
float *oracle_data(const struct peers_case *given);

// Largest difference from attention in double, divided by max(1, |value|): out of 8 tokens, or dq
// of 8 tokens and dk, dv of the last 3 tokens, all heads.  Infinity if a value is not finite.
double oracle_error(const struct peers_case *given, const float *data, const float *results);

// The same between two results, every value.
double oracle_distance(const struct peers_case *given, const float *a, const float *b);

#endif
