// tanh (float32, bfloat16) and tanh_grad (float32), which OneFlow gives x and not y.
#include "common/simd_math.h"
#include "elementwise/map.h"

namespace oneflow_accel {

namespace {

ONEFLOW_ACCEL_INLINE float tanh(float x) { return simd::tanh(x); }

ONEFLOW_ACCEL_INLINE float tanh_slope(float x) {
  const float y = simd::tanh(x);
  return 1.0F - y * y;
}

void tanh_float32(const float* x, float* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { y[i] = tanh(x[i]); }
}

void tanh_bfloat16(const Bfloat16* x, Bfloat16* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { y[i] = from_float<Bfloat16>(tanh(to_float(x[i]))); }
}

void tanh_grad(const float* dy, const float* x, float* dx, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { dx[i] = dy[i] * tanh_slope(x[i]); }
}

REGISTER_KERNEL("tanh", map_kernel("x", "y", tanh_float32), is_float32_on_cpu("y"));
REGISTER_KERNEL("tanh", map_kernel("x", "y", tanh_bfloat16), is_bfloat16_on_cpu("y"));
REGISTER_KERNEL("tanh_grad", map_kernel("dy", "x", "dx", tanh_grad), is_float32_on_cpu("dx"));

}  // namespace

}  // namespace oneflow_accel
