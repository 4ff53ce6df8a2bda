// trial_tensors.h: the tensors that a trial runs on, on the host and where its target has them.
// Private to trial*.c.
#ifndef SW_TRIAL_TENSORS_H
#define SW_TRIAL_TENSORS_H

#include "layer.h"

// Tensors of one problem, rows packed [row][head][dim].
struct sw_trial_tensors {
  struct swathe_problem problem;
  int64_t rows;
  void *q, *k, *v, *out, *dout, *dq, *dk, *dv;  // elem
  float *lse, *sink, *dsink;
};

enum { SW_TRIAL_ARRAYS = 11 };

// Tensors where the target's kernels read and write them: on the CPU where they are.
struct sw_trial_placed {
  struct sw_trial_tensors *host;
  struct swathe_tensors call;
  void *memory[SW_TRIAL_ARRAYS];  // of the device
};

// Random inputs, and outputs of zero.  To be freed after a failure too.
enum swathe_status sw_trial_tensors_make(struct sw_trial_tensors *t,
                                         const struct swathe_problem *problem, int64_t rows);
void sw_trial_tensors_free(struct sw_trial_tensors *t);

double sw_trial_tensors_element(const struct swathe_problem *problem, const void *data,
                                int64_t index);

// A call on the host.
struct swathe_tensors sw_trial_tensors_call(struct sw_trial_tensors *t);

// Copies them to the target; to be unplaced after a failure too.
enum swathe_status sw_trial_tensors_place(struct swathe_context *context,
                                          struct sw_trial_tensors *t,
                                          struct sw_trial_placed *placed);
// Brings what kernels wrote to the host.
enum swathe_status sw_trial_tensors_fetch(struct swathe_context *context,
                                          struct sw_trial_placed *placed);
void sw_trial_tensors_unplace(struct swathe_context *context, struct sw_trial_placed *placed);

#endif
