// silu (float32, bfloat16) and silu_grad (float32): x sigmoid(x).
#include "activation/silu.h"

#include "activation/gate.h"
#include "elementwise/map.h"

namespace oneflow_accel {

namespace {

ONEFLOW_ACCEL_INLINE float silu_slope(float x) { return gated_slope(x, x, 1.0F); }

void silu_float32(const float* x, float* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { y[i] = silu(x[i]); }
}

void silu_bfloat16(const Bfloat16* x, Bfloat16* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { y[i] = from_float<Bfloat16>(silu(to_float(x[i]))); }
}

void silu_grad(const float* dy, const float* x, float* dx, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { dx[i] = dy[i] * silu_slope(x[i]); }
}

REGISTER_KERNEL("silu", map_kernel("in", "out", silu_float32), is_float32_on_cpu("out"));
REGISTER_KERNEL("silu", map_kernel("in", "out", silu_bfloat16), is_bfloat16_on_cpu("out"));
REGISTER_KERNEL("silu_grad", map_kernel("dy", "x", "dx", silu_grad), is_float32_on_cpu("dx"));

}  // namespace

}  // namespace oneflow_accel
