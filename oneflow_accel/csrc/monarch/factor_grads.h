// Gradients of the factors: sums over all rows, shared out by what they are gradients of.
#pragma once

#include "monarch/tiles.h"

namespace oneflow_accel {

// The gradient of v for some of the rows, from `begin` on: l matrices of (count, r), whose rows lie
// `stride` floats apart.
struct MiddleGrads {
  int64_t begin;
  int64_t count;
  int64_t stride;
  float* data;

  float* at(int64_t j, int64_t row) const { return data + (j * count + row) * stride; }
  // A run's values, as columns of a matrix, or as rows.
  Strided values_by_row(const Run& run, int64_t row) const {
    return {at(run.j, row) + run.first, stride, run.j_step * count * stride + run.step};
  }
  Strided rows_by_value(const Run& run, int64_t row) const {
    return {at(run.j, row) + run.first, run.j_step * count * stride + run.step, stride};
  }
};

// a_grad[block, i] is the sum over these rows of du[block, i] x[block], or has it added.
void first_factor_grad(const MonarchShape& shape, const MiddleGrads& dv, const float* x,
                       bool accumulate, float* a_grad);

struct Rows {
  int64_t begin;
  int64_t count;
};

// b_grad[j, i] is the sum over these rows of dz[j, i] v[j], and bias_grad the sum of dy, or they
// have it added.
void second_factor_grad(const MonarchShape& shape, const Rows& rows, const float* middle,
                        const float* y_grad, bool accumulate, float* b_grad, float* bias_grad);

}  // namespace oneflow_accel
