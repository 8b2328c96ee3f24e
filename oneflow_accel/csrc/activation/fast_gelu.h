// GELU in its form with tanh, of one float: x sigmoid(2 u) with u = sqrt(2 / pi) (x + 0.044715 x^3).
// Written so, it loses no digits where tanh is near -1.
#pragma once

#include "common/simd_math.h"

namespace oneflow_accel {

constexpr float kTwoSqrtTwoOverPi = 1.59576912F;
// The value that OneFlow and ONNX Runtime use.
constexpr float kGeluCubic = 0.044714998453855515F;

// 2 u.
ONEFLOW_ACCEL_INLINE float fast_gelu_gate(float x) {
  return kTwoSqrtTwoOverPi * x * (1.0F + kGeluCubic * x * x);
}

ONEFLOW_ACCEL_INLINE float fast_gelu(float x) { return x * simd::sigmoid(fast_gelu_gate(x)); }

}  // namespace oneflow_accel
