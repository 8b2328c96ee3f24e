// square and square_grad, float32: x^2.
#include "elementwise/map.h"

namespace oneflow_accel {

namespace {

void square(const float* in, float* out, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float x = in[i];
    out[i] = x * x;
  }
}

void square_grad(const float* in, const float* out_grad, float* in_grad, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float x = in[i];
    const float dy = out_grad[i];
    in_grad[i] = 2.0F * x * dy;
  }
}

REGISTER_KERNEL("square", map_kernel("x", "y", square), is_float32_on_cpu("y"));
REGISTER_KERNEL("square_grad", map_kernel("x", "dy", "dx", square_grad), is_float32_on_cpu("dx"));

}  // namespace

}  // namespace oneflow_accel
