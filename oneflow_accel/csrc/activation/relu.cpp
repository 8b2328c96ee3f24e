// relu (float32, bfloat16) and relu_grad (float32).
#include "elementwise/map.h"

namespace oneflow_accel {

namespace {

// max(x, 0), NaN kept.
ONEFLOW_ACCEL_INLINE float relu(float x) { return 0.0F > x ? 0.0F : x; }

void relu_float32(const float* x, float* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { y[i] = relu(x[i]); }
}

void relu_bfloat16(const Bfloat16* x, Bfloat16* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { y[i] = from_float<Bfloat16>(relu(to_float(x[i]))); }
}

// dx = dy where y > 0, else 0. Where y is NaN the gradient passes, as in PyTorch.
void relu_grad(const float* dy, const float* y, float* dx, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { dx[i] = y[i] <= 0.0F ? 0.0F : dy[i]; }
}

REGISTER_KERNEL("relu", map_kernel("x", "y", relu_float32), is_float32_on_cpu("y"),
                in_place("y", "x"));
REGISTER_KERNEL("relu", map_kernel("x", "y", relu_bfloat16), is_bfloat16_on_cpu("y"),
                in_place("y", "x"));
REGISTER_KERNEL("relu_grad", map_kernel("dy", "y", "dx", relu_grad), is_float32_on_cpu("dx"),
                in_place("dx", "dy"));

}  // namespace

}  // namespace oneflow_accel
