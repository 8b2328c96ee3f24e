// negative, float32; its gradient is negative again.
#include "elementwise/map.h"

namespace oneflow_accel {

namespace {

ONEFLOW_ACCEL_SIMD
void negative(const float* x, float* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { y[i] = -x[i]; }
}

REGISTER_USER_KERNEL(listed("negative"))
    .SetCreateFn(map_kernel("x", "y", negative))
    .SetIsMatchedHob(is_float32_on_cpu("y"))
    .SetPriority(kKernelPriority);

}  // namespace

}  // namespace oneflow_accel
