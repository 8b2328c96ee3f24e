// negative, float32; its gradient is negative again.
#include "elementwise/map.h"

namespace oneflow_accel {

namespace {

void negative(const float* x, float* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { y[i] = -x[i]; }
}

REGISTER_KERNEL("negative", map_kernel("x", "y", negative), is_float32_on_cpu("y"));

}  // namespace

}  // namespace oneflow_accel
