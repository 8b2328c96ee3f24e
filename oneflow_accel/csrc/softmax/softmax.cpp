// softmax (float32, bfloat16) and softmax_grad (float32) over the last axis.
#include "softmax/row.h"
#include "softmax/row_kernel.h"

namespace oneflow_accel {

namespace {

void softmax_float32(const float* x, float* y, int64_t rows, int64_t n) {
  for (int64_t i = 0; i < rows; ++i) { row::softmax(x + i * n, y + i * n, n); }
}

void softmax_bfloat16(const Bfloat16* x, Bfloat16* y, int64_t rows, int64_t n) {
  for (int64_t i = 0; i < rows; ++i) { row::softmax(x + i * n, y + i * n, n); }
}

void softmax_grad_rows(const float* y, const float* dy, float* dx, int64_t rows, int64_t n) {
  for (int64_t i = 0; i < rows; ++i) {
    row::softmax_grad(y + i * n, dy + i * n, dx + i * n, n);
  }
}

REGISTER_KERNEL("softmax", row_map_kernel("in", "out", softmax_float32), is_float32_on_cpu("out"));
REGISTER_KERNEL("softmax", row_map_kernel("in", "out", softmax_bfloat16),
                is_bfloat16_on_cpu("out"));
REGISTER_KERNEL("softmax_grad", row_gradient_kernel("y", softmax_grad_rows),
                is_float32_on_cpu("dx"));

}  // namespace

}  // namespace oneflow_accel
