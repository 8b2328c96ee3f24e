// Gradients of the factors: sums over all rows, shared out by what they are gradients of.
#pragma once

#include "monarch/monarch.h"

namespace oneflow_accel {

// The rows [begin, begin + count) of x, and u's gradient transposed: value t of row `begin + i` is
// u_grad[t * stride + i].
struct FirstFactorRows {
  int64_t begin;
  int64_t count;
  const float* x;
  const float* u_grad;
  int64_t stride;
};

// a_grad[i, t] += sum over these rows of du[i, t] x[i].
void add_first_factor_grad(const MonarchShape& shape, const FirstFactorRows& rows, float* a_grad);

// The rows [begin, begin + count) of v and of y's gradient.
struct SecondFactorRows {
  int64_t begin;
  int64_t count;
  const float* middle;
  const float* y_grad;
};

// b_grad[j, i] += sum over these rows of dz[j, i] v[j], and bias_grad += sum of dy.
void add_second_factor_grad(const MonarchShape& shape, const SecondFactorRows& rows, float* b_grad,
                            float* bias_grad);

}  // namespace oneflow_accel
