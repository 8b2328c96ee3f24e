// scalar_add_by_tensor, _sub_, _mul_ and _div_by_tensor, float32: the second operand has one
// element. OneFlow's graphs emit them, for instance to scale gradients.
#include "elementwise/arithmetic.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

::oneflow::Maybe<void> y_in_place_of_x(const user_op::InferContext&,
                                       const user_op::AddInplaceArgPair& add) {
  return add("y", 0, "x", 0, true);
}

REGISTER_USER_KERNEL(listed("scalar_add_by_tensor"))
    .SetCreateFn(broadcast_kernel<float>("x", "scalar", "y", add_rows))
    .SetIsMatchedHob(is_float32_on_cpu("y"))
    .SetInplaceProposalFn(y_in_place_of_x)
    .SetPriority(kKernelPriority);

REGISTER_USER_KERNEL(listed("scalar_sub_by_tensor"))
    .SetCreateFn(broadcast_kernel<float>("x", "scalar", "y", subtract_rows))
    .SetIsMatchedHob(is_float32_on_cpu("y"))
    .SetInplaceProposalFn(y_in_place_of_x)
    .SetPriority(kKernelPriority);

REGISTER_USER_KERNEL(listed("scalar_mul_by_tensor"))
    .SetCreateFn(broadcast_kernel<float>("x", "scalar", "y", multiply_rows))
    .SetIsMatchedHob(is_float32_on_cpu("y"))
    .SetInplaceProposalFn(y_in_place_of_x)
    .SetPriority(kKernelPriority);

REGISTER_USER_KERNEL(listed("scalar_div_by_tensor"))
    .SetCreateFn(broadcast_kernel<float>("x", "scalar", "y", divide_rows))
    .SetIsMatchedHob(is_float32_on_cpu("y"))
    .SetInplaceProposalFn(y_in_place_of_x)
    .SetPriority(kKernelPriority);

}  // namespace

}  // namespace oneflow_accel
