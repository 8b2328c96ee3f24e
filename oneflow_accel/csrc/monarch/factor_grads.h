// Gradients of the factors: sums over all rows, shared out by what they are gradients of.
#pragma once

#include "monarch/monarch.h"

namespace oneflow_accel {

// Some of the rows of x, from `begin` on, and u's gradient transposed: value t of row `begin + i` is
// u_grad[t * stride + i].
struct FirstFactorRows {
  int64_t begin;
  int64_t count;
  const float* x;
  const float* u_grad;
  int64_t stride;
};

// a_grad[i, t] is the sum over these rows of du[i, t] x[i], or has it added.
void first_factor_grad(const MonarchShape& shape, const FirstFactorRows& rows, bool accumulate,
                       float* a_grad);

// Some of the rows of v and of y's gradient, from `begin` on.
struct SecondFactorRows {
  int64_t begin;
  int64_t count;
  const float* middle;
  const float* y_grad;
};

// b_grad[j, i] is the sum over these rows of dz[j, i] v[j], and bias_grad the sum of dy, or they
// have it added.
void second_factor_grad(const MonarchShape& shape, const SecondFactorRows& rows, bool accumulate,
                        float* b_grad, float* bias_grad);

}  // namespace oneflow_accel
