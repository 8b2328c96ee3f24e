// The gradient of x sigmoid(u(x)), which silu, quick_gelu and the tanh form of gelu share.
#pragma once

#include "common/simd_math.h"

namespace oneflow_accel {

// s + x u' s (1 - s) with s = sigmoid(u). 1 - s is e^-u s, which keeps its digits where s is
// near 1.
ONEFLOW_ACCEL_INLINE float gated_slope(float x, float u, float u_slope) {
  // Beyond, e^-u is infinite; s is 0 long before.
  const float e = simd::exp(-(u < -87.0F ? -87.0F : u));
  const float s = 1.0F / (1.0F + e);
  return s + x * u_slope * (e * s * s);
}

}  // namespace oneflow_accel
