// quick_gelu (float32, bfloat16) and quick_gelu_grad (float32): x sigmoid(1.702 x).
#include "activation/gate.h"
#include "common/simd_math.h"
#include "elementwise/map.h"

namespace oneflow_accel {

namespace {

constexpr float kSteepness = 1.702F;

ONEFLOW_ACCEL_INLINE float quick_gelu(float x) { return x * simd::sigmoid(kSteepness * x); }

ONEFLOW_ACCEL_INLINE float quick_gelu_slope(float x) {
  return gated_slope(x, kSteepness * x, kSteepness);
}

void quick_gelu_float32(const float* x, float* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { y[i] = quick_gelu(x[i]); }
}

void quick_gelu_bfloat16(const Bfloat16* x, Bfloat16* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { y[i] = from_float<Bfloat16>(quick_gelu(to_float(x[i]))); }
}

void quick_gelu_grad(const float* dy, const float* x, float* dx, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { dx[i] = dy[i] * quick_gelu_slope(x[i]); }
}

REGISTER_KERNEL("quick_gelu", map_kernel("x", "y", quick_gelu_float32), is_float32_on_cpu("y"));
REGISTER_KERNEL("quick_gelu", map_kernel("x", "y", quick_gelu_bfloat16), is_bfloat16_on_cpu("y"));
REGISTER_KERNEL("quick_gelu_grad", map_kernel("dy", "x", "dx", quick_gelu_grad),
                is_float32_on_cpu("dx"));

}  // namespace

}  // namespace oneflow_accel
