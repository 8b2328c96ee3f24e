// softmax, log_softmax and their gradients over the last axis, float32 and bfloat16.
#include "common/oneflow.h"
#include "softmax/row.h"
#include "softmax/row_set.h"

namespace oneflow_accel {

namespace {

template <typename T>
void softmax_kernel(Context* ctx) {
  const bool logarithm = ctx->op_type_name() == "log_softmax";
  const RowSet rows(ctx, "in");
  const T* in = input<T>(ctx, "in");
  T* out = output<T>(ctx, logarithm ? "prob" : "out");
  rows.for_each(1, [=](int64_t, int64_t first) {
    const T* x = in + first;
    T* y = out + first;
    if (logarithm) {
      row::log_softmax(x, y, rows.n);
    } else {
      row::softmax(rows.n, row::values_of(x), row::rounded_to(y));
    }
  });
}

template <typename T>
void softmax_grad_kernel(Context* ctx) {
  const bool logarithm = ctx->op_type_name() == "log_softmax_grad";
  const RowSet rows(ctx, "dy");
  const T* out = input<T>(ctx, logarithm ? "prob" : "y");
  const T* out_grad = input<T>(ctx, "dy");
  T* in_grad = output<T>(ctx, "dx");
  rows.for_each(1, [=](int64_t, int64_t first) {
    const auto y = row::values_of(out + first);
    const auto dy = row::values_of(out_grad + first);
    const auto dx = row::rounded_to(in_grad + first);
    if (logarithm) {
      // dy - e^y sum(dy).
      const auto sum = static_cast<float>(row::sum_of(rows.n, dy));
#pragma omp simd
      for (int64_t i = 0; i < rows.n; ++i) { dx(i, dy(i) - row::exp_of_nonpositive(y(i)) * sum); }
    } else {
      row::softmax_grad(rows.n, y, dy, dx);
    }
  });
}

REGISTER_KERNELS(softmax_kernel, "softmax log_softmax", "in");
REGISTER_KERNELS(softmax_grad_kernel, "softmax_grad log_softmax_grad", "dx");

}  // namespace

}  // namespace oneflow_accel
