// broadcast_add, _sub, _mul and _div, float32 and bfloat16.
#include "elementwise/arithmetic.h"

namespace oneflow_accel {

namespace {

REGISTER_USER_KERNEL(listed("broadcast_add"))
    .SetCreateFn(broadcast_kernel<float>("x", "y", "z", add_rows))
    .SetIsMatchedHob(is_float32_on_cpu("x") && is_float32_on_cpu("z"))
    .SetPriority(kKernelPriority);

REGISTER_USER_KERNEL(listed("broadcast_add"))
    .SetCreateFn(broadcast_kernel<Bfloat16>("x", "y", "z", add_rows))
    .SetIsMatchedHob(is_bfloat16_on_cpu("x") && is_bfloat16_on_cpu("z"))
    .SetPriority(kKernelPriority);

REGISTER_USER_KERNEL(listed("broadcast_sub"))
    .SetCreateFn(broadcast_kernel<float>("x", "y", "z", subtract_rows))
    .SetIsMatchedHob(is_float32_on_cpu("x") && is_float32_on_cpu("z"))
    .SetPriority(kKernelPriority);

REGISTER_USER_KERNEL(listed("broadcast_sub"))
    .SetCreateFn(broadcast_kernel<Bfloat16>("x", "y", "z", subtract_rows))
    .SetIsMatchedHob(is_bfloat16_on_cpu("x") && is_bfloat16_on_cpu("z"))
    .SetPriority(kKernelPriority);

REGISTER_USER_KERNEL(listed("broadcast_mul"))
    .SetCreateFn(broadcast_kernel<float>("x", "y", "z", multiply_rows))
    .SetIsMatchedHob(is_float32_on_cpu("x") && is_float32_on_cpu("z"))
    .SetPriority(kKernelPriority);

REGISTER_USER_KERNEL(listed("broadcast_mul"))
    .SetCreateFn(broadcast_kernel<Bfloat16>("x", "y", "z", multiply_rows))
    .SetIsMatchedHob(is_bfloat16_on_cpu("x") && is_bfloat16_on_cpu("z"))
    .SetPriority(kKernelPriority);

REGISTER_USER_KERNEL(listed("broadcast_div"))
    .SetCreateFn(broadcast_kernel<float>("x", "y", "z", divide_rows))
    .SetIsMatchedHob(is_float32_on_cpu("x") && is_float32_on_cpu("z"))
    .SetPriority(kKernelPriority);

REGISTER_USER_KERNEL(listed("broadcast_div"))
    .SetCreateFn(broadcast_kernel<Bfloat16>("x", "y", "z", divide_rows))
    .SetIsMatchedHob(is_bfloat16_on_cpu("x") && is_bfloat16_on_cpu("z"))
    .SetPriority(kKernelPriority);

}  // namespace

}  // namespace oneflow_accel
