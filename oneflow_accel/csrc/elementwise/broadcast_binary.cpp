// broadcast_add, _sub, _mul and _div, float32 and bfloat16.
#include "elementwise/arithmetic.h"

namespace oneflow_accel {

namespace {

REGISTER_KERNEL("broadcast_add", broadcast_kernel<float>("x", "y", "z", add_rows),
                is_float32_on_cpu("x") && is_float32_on_cpu("z"));
REGISTER_KERNEL("broadcast_add", broadcast_kernel<Bfloat16>("x", "y", "z", add_rows),
                is_bfloat16_on_cpu("x") && is_bfloat16_on_cpu("z"));
REGISTER_KERNEL("broadcast_sub", broadcast_kernel<float>("x", "y", "z", subtract_rows),
                is_float32_on_cpu("x") && is_float32_on_cpu("z"));
REGISTER_KERNEL("broadcast_sub", broadcast_kernel<Bfloat16>("x", "y", "z", subtract_rows),
                is_bfloat16_on_cpu("x") && is_bfloat16_on_cpu("z"));
REGISTER_KERNEL("broadcast_mul", broadcast_kernel<float>("x", "y", "z", multiply_rows),
                is_float32_on_cpu("x") && is_float32_on_cpu("z"));
REGISTER_KERNEL("broadcast_mul", broadcast_kernel<Bfloat16>("x", "y", "z", multiply_rows),
                is_bfloat16_on_cpu("x") && is_bfloat16_on_cpu("z"));
REGISTER_KERNEL("broadcast_div", broadcast_kernel<float>("x", "y", "z", divide_rows),
                is_float32_on_cpu("x") && is_float32_on_cpu("z"));
REGISTER_KERNEL("broadcast_div", broadcast_kernel<Bfloat16>("x", "y", "z", divide_rows),
                is_bfloat16_on_cpu("x") && is_bfloat16_on_cpu("z"));

}  // namespace

}  // namespace oneflow_accel
