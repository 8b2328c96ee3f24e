// x sigmoid(x), which the kernels of silu and of convolutions share.
#pragma once

#include "common/simd_math.h"

namespace oneflow_accel {

ONEFLOW_ACCEL_INLINE float silu(float x) { return x * simd::sigmoid(x); }

}  // namespace oneflow_accel
