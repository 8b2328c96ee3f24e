// exp and exp_grad, float32: e^x.
#include "common/simd_math.h"
#include "elementwise/map.h"

namespace oneflow_accel {

namespace {

void exp(const float* in, float* out, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float x = in[i];
    out[i] = simd::exp(x);
  }
}

void exp_grad(const float* in, const float* out_grad, float* in_grad, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float x = in[i];
    const float dy = out_grad[i];
    in_grad[i] = simd::exp(x) * dy;
  }
}

REGISTER_KERNEL("exp", map_kernel("x", "y", exp), is_float32_on_cpu("y"));
REGISTER_KERNEL("exp_grad", map_kernel("x", "dy", "dx", exp_grad), is_float32_on_cpu("dx"));

}  // namespace

}  // namespace oneflow_accel
