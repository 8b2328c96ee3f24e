// scalar_add_by_tensor, _sub_, _mul_ and _div_by_tensor, float32: the second operand has one
// element. OneFlow's graphs emit them, for instance to scale gradients.
#include "elementwise/arithmetic.h"

namespace oneflow_accel {

namespace {

REGISTER_KERNEL("scalar_add_by_tensor", broadcast_kernel<float>("x", "scalar", "y", add_rows),
                is_float32_on_cpu("y"), in_place("y", "x"));
REGISTER_KERNEL("scalar_sub_by_tensor", broadcast_kernel<float>("x", "scalar", "y", subtract_rows),
                is_float32_on_cpu("y"), in_place("y", "x"));
REGISTER_KERNEL("scalar_mul_by_tensor", broadcast_kernel<float>("x", "scalar", "y", multiply_rows),
                is_float32_on_cpu("y"), in_place("y", "x"));
REGISTER_KERNEL("scalar_div_by_tensor", broadcast_kernel<float>("x", "scalar", "y", divide_rows),
                is_float32_on_cpu("y"), in_place("y", "x"));

}  // namespace

}  // namespace oneflow_accel
