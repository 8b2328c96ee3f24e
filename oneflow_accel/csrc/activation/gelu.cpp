// gelu (float32, bfloat16) and gelu_grad (float32): x Phi(x), Phi the normal distribution function.
#include "activation/gelu.h"
#include "elementwise/map.h"

namespace oneflow_accel {

namespace {

void gelu_float32(const float* x, float* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { y[i] = gelu(x[i]); }
}

void gelu_bfloat16(const Bfloat16* x, Bfloat16* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { y[i] = from_float<Bfloat16>(gelu(to_float(x[i]))); }
}

void gelu_grad(const float* dy, const float* x, float* dx, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { dx[i] = dy[i] * gelu_slope(x[i]); }
}

REGISTER_KERNEL("gelu", map_kernel("in", "out", gelu_float32), is_float32_on_cpu("out"));
REGISTER_KERNEL("gelu", map_kernel("in", "out", gelu_bfloat16), is_bfloat16_on_cpu("out"));
REGISTER_KERNEL("gelu_grad", map_kernel("dy", "x", "dx", gelu_grad), is_float32_on_cpu("dx"));

}  // namespace

}  // namespace oneflow_accel
