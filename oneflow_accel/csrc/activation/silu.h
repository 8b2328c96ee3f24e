// x sigmoid(x), which the kernels of silu and of convolutions share, and the gradient of
// x sigmoid(u(x)), which silu, quick_gelu and the tanh form of gelu share.
#pragma once

#include "common/simd_math.h"

namespace oneflow_accel {

ONEFLOW_ACCEL_INLINE float silu(float x) { return x * simd::sigmoid(x); }

// s + x u' s (1 - s) with s = sigmoid(u). 1 - s is e^-u s, which keeps its digits where s is
// near 1. NaN where x is infinite, as the formula has it.
ONEFLOW_ACCEL_INLINE float gated_slope(float x, float u, float u_slope) {
  // From here on it is level in float32: 0 or 1. What is left of e^-u would not be small times a
  // huge x.
  constexpr float kLevel = 87.0F;
  const float e = simd::exp(-u);
  const float s = 1.0F / (1.0F + e);
  const float slope = s + x * u_slope * (e * s * s);
  const float from_below = u < -kLevel ? 0.0F : slope;
  return (u > kLevel ? 1.0F : from_below) + (x - x);
}

}  // namespace oneflow_accel
