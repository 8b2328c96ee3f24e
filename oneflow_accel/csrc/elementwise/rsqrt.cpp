// rsqrt and rsqrt_grad, float32: 1 / sqrt(x).
#include "elementwise/map.h"

namespace oneflow_accel {

namespace {

void rsqrt(const float* in, float* out, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float x = in[i];
    out[i] = 1.0F / __builtin_sqrtf(x);
  }
}

void rsqrt_grad(const float* in, const float* out_grad, float* in_grad, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float x = in[i];
    const float dy = out_grad[i];
    in_grad[i] = -0.5F * dy / (x * __builtin_sqrtf(x));
  }
}

REGISTER_KERNEL("rsqrt", map_kernel("x", "y", rsqrt), is_float32_on_cpu("y"));
REGISTER_KERNEL("rsqrt_grad", map_kernel("x", "dy", "dx", rsqrt_grad), is_float32_on_cpu("dx"));

}  // namespace

}  // namespace oneflow_accel
