// log_softmax and log_softmax_grad, float32, over the last axis.
#include "softmax/row.h"
#include "softmax/row_kernel.h"

namespace oneflow_accel {

namespace {

void log_softmax_rows(const float* x, float* y, int64_t rows, int64_t n) {
  for (int64_t i = 0; i < rows; ++i) { row::log_softmax(x + i * n, y + i * n, n); }
}

void log_softmax_grad_rows(const float* y, const float* dy, float* dx, int64_t rows, int64_t n) {
  for (int64_t i = 0; i < rows; ++i) {
    row::log_softmax_grad(y + i * n, dy + i * n, dx + i * n, n);
  }
}

REGISTER_KERNEL("log_softmax", row_map_kernel("in", "prob", log_softmax_rows),
                is_float32_on_cpu("prob"));
REGISTER_KERNEL("log_softmax_grad", row_gradient_kernel("prob", log_softmax_grad_rows),
                is_float32_on_cpu("dx"));

}  // namespace

}  // namespace oneflow_accel
