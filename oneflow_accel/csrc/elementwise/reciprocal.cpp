// reciprocal and reciprocal_grad, float32: 1 / x.
#include "elementwise/map.h"

namespace oneflow_accel {

namespace {

void reciprocal(const float* in, float* out, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float x = in[i];
    out[i] = 1.0F / x;
  }
}

void reciprocal_grad(const float* in, const float* out_grad, float* in_grad, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float x = in[i];
    const float dy = out_grad[i];
    in_grad[i] = -dy / (x * x);
  }
}

REGISTER_KERNEL("reciprocal", map_kernel("x", "y", reciprocal), is_float32_on_cpu("y"));
REGISTER_KERNEL("reciprocal_grad", map_kernel("x", "dy", "dx", reciprocal_grad),
                is_float32_on_cpu("dx"));

}  // namespace

}  // namespace oneflow_accel
