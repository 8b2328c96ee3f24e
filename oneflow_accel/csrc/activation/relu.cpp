// relu (float32, bfloat16) and relu_grad (float32).
#include "elementwise/map.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

// max(x, 0), NaN kept.
ONEFLOW_ACCEL_INLINE float relu(float x) { return 0.0F > x ? 0.0F : x; }

ONEFLOW_ACCEL_SIMD
void relu_float32(const float* x, float* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { y[i] = relu(x[i]); }
}

ONEFLOW_ACCEL_SIMD
void relu_bfloat16(const Bfloat16* x, Bfloat16* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { y[i] = from_float<Bfloat16>(relu(to_float(x[i]))); }
}

// dx = dy where y > 0, else 0. Where y is NaN the gradient passes, as in PyTorch.
ONEFLOW_ACCEL_SIMD
void relu_grad(const float* dy, const float* y, float* dx, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { dx[i] = y[i] <= 0.0F ? 0.0F : dy[i]; }
}

::oneflow::Maybe<void> y_in_place_of_x(const user_op::InferContext&,
                                       const user_op::AddInplaceArgPair& add) {
  return add("y", 0, "x", 0, true);
}

REGISTER_USER_KERNEL(listed("relu"))
    .SetCreateFn(map_kernel("x", "y", relu_float32))
    .SetIsMatchedHob(is_float32_on_cpu("y"))
    .SetInplaceProposalFn(y_in_place_of_x)
    .SetPriority(kKernelPriority);

REGISTER_USER_KERNEL(listed("relu"))
    .SetCreateFn(map_kernel("x", "y", relu_bfloat16))
    .SetIsMatchedHob(is_bfloat16_on_cpu("y"))
    .SetInplaceProposalFn(y_in_place_of_x)
    .SetPriority(kKernelPriority);

REGISTER_USER_KERNEL(listed("relu_grad"))
    .SetCreateFn(map_kernel("dy", "y", "dx", relu_grad))
    .SetIsMatchedHob(is_float32_on_cpu("dx"))
    .SetInplaceProposalFn([](const user_op::InferContext&,
                             const user_op::AddInplaceArgPair& add) -> ::oneflow::Maybe<void> {
      return add("dx", 0, "dy", 0, true);
    })
    .SetPriority(kKernelPriority);

}  // namespace

}  // namespace oneflow_accel
