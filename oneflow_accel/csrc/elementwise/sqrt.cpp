// sqrt and sqrt_grad, float32: the square root.
#include "elementwise/map.h"

namespace oneflow_accel {

namespace {

void sqrt(const float* in, float* out, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float x = in[i];
    out[i] = __builtin_sqrtf(x);
  }
}

void sqrt_grad(const float* in, const float* out_grad, float* in_grad, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float x = in[i];
    const float dy = out_grad[i];
    in_grad[i] = 0.5F * dy / __builtin_sqrtf(x);
  }
}

REGISTER_KERNEL("sqrt", map_kernel("x", "y", sqrt), is_float32_on_cpu("y"));
REGISTER_KERNEL("sqrt_grad", map_kernel("x", "dy", "dx", sqrt_grad), is_float32_on_cpu("dx"));

}  // namespace

}  // namespace oneflow_accel
