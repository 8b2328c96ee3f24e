// fast_gelu (float32, bfloat16) and fast_gelu_grad (float32): the form of gelu with tanh.
#include "activation/fast_gelu.h"
#include "activation/gate.h"
#include "elementwise/map.h"

namespace oneflow_accel {

namespace {

ONEFLOW_ACCEL_INLINE float fast_gelu_slope(float x) {
  const float gate_slope = kTwoSqrtTwoOverPi * (1.0F + 3.0F * kGeluCubic * x * x);
  return gated_slope(x, fast_gelu_gate(x), gate_slope);
}

void fast_gelu_float32(const float* x, float* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { y[i] = fast_gelu(x[i]); }
}

void fast_gelu_bfloat16(const Bfloat16* x, Bfloat16* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { y[i] = from_float<Bfloat16>(fast_gelu(to_float(x[i]))); }
}

void fast_gelu_grad(const float* dy, const float* x, float* dx, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { dx[i] = dy[i] * fast_gelu_slope(x[i]); }
}

REGISTER_KERNEL("fast_gelu", map_kernel("in", "out", fast_gelu_float32), is_float32_on_cpu("out"));
REGISTER_KERNEL("fast_gelu", map_kernel("in", "out", fast_gelu_bfloat16),
                is_bfloat16_on_cpu("out"));
REGISTER_KERNEL("fast_gelu_grad", map_kernel("dy", "x", "dx", fast_gelu_grad),
                is_float32_on_cpu("dx"));

}  // namespace

}  // namespace oneflow_accel
