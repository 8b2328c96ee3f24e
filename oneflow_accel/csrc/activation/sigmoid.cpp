// sigmoid (float32, bfloat16) and sigmoid_grad (float32), which OneFlow gives y and not x.
#include "common/simd_math.h"
#include "elementwise/map.h"

namespace oneflow_accel {

namespace {

ONEFLOW_ACCEL_INLINE float sigmoid(float x) { return simd::sigmoid(x); }

ONEFLOW_ACCEL_INLINE float sigmoid_slope(float y) { return y * (1.0F - y); }

void sigmoid_float32(const float* x, float* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { y[i] = sigmoid(x[i]); }
}

void sigmoid_bfloat16(const Bfloat16* x, Bfloat16* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { y[i] = from_float<Bfloat16>(sigmoid(to_float(x[i]))); }
}

void sigmoid_grad(const float* dy, const float* y, float* dx, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { dx[i] = dy[i] * sigmoid_slope(y[i]); }
}

REGISTER_KERNEL("sigmoid", map_kernel("x", "y", sigmoid_float32), is_float32_on_cpu("y"));
REGISTER_KERNEL("sigmoid", map_kernel("x", "y", sigmoid_bfloat16), is_bfloat16_on_cpu("y"));
REGISTER_KERNEL("sigmoid_grad", map_kernel("dy", "y", "dx", sigmoid_grad), is_float32_on_cpu("dx"));

}  // namespace

}  // namespace oneflow_accel
