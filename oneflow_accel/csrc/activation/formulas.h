// GELU of one float, exact (Hendrycks and Gimpel 2016, section 2) and in its form with tanh, and
// SiLU.
//
// Phi(x) - 1/2 and the slope less 1/2 are odd functions of x that level off: each is
// x P(x^2) / Q(x^2) up to where it is level in float32, and that value beyond. The coefficients are
// fits of our own (least squares, reweighted until the largest error is smallest). Largest errors:
// 3.3e-7 in Phi, 3e-7 in the slope.
#pragma once

#include "common/simd_math.h"

namespace oneflow_accel {

// Phi(x).
ONEFLOW_ACCEL_INLINE float normal_distribution(float x) {
  const float c = simd::clamp(x, -5.4F, 5.4F);
  const float t = c * c;
  const float p = simd::polynomial(t, 2.29307311e-8F, 6.42749501e-6F, 1.71670705e-4F,
                                   4.69517289e-3F, 3.40737663e-2F, 0.398942173F);
  const float q = simd::polynomial(t, 1.20835045e-6F, 7.48542880e-5F, 1.90022308e-3F,
                                   2.87838392e-2F, 0.252075583F, 1.0F);
  const float phi = 0.5F + c * p / q;
  // What rounding leaves at the end: x times it would grow with -x.
  return phi < 1.3e-7F ? 0.0F : phi;
}

// x Phi(x).
ONEFLOW_ACCEL_INLINE float gelu(float x) { return x * normal_distribution(x); }

// Its derivative: Phi(x) + x phi(x), phi the normal density. NaN where x is infinite, as the
// formula has it.
ONEFLOW_ACCEL_INLINE float gelu_slope(float x) {
  const float c = simd::clamp(x, -5.8F, 5.8F);
  const float t = c * c;
  const float p = simd::polynomial(t, 1.92928653e-7F, 3.59559344e-5F, 1.92239040e-5F,
                                   1.42302951e-2F, -3.09956744e-2F, 0.797885358F);
  const float q = simd::polynomial(t, 8.95239918e-6F, 1.92037609e-4F, 3.52304056e-3F,
                                   4.09802757e-2F, 0.294494271F, 1.0F);
  return 0.5F + c * p / q + (x - x);
}

// GELU in its form with tanh: x sigmoid(2 u) with u = sqrt(2 / pi) (x + 0.044715 x^3). Written so,
// it loses no digits where tanh is near -1.
constexpr float kTwoSqrtTwoOverPi = 1.59576912F;
// The value that OneFlow and ONNX Runtime use.
constexpr float kGeluCubic = 0.044714998453855515F;

// 2 u.
ONEFLOW_ACCEL_INLINE float fast_gelu_gate(float x) {
  return kTwoSqrtTwoOverPi * x * (1.0F + kGeluCubic * x * x);
}

ONEFLOW_ACCEL_INLINE float fast_gelu(float x) { return x * simd::sigmoid(fast_gelu_gate(x)); }

// x sigmoid(x), which the kernels of silu and of convolutions share, and the gradient of
// x sigmoid(u(x)), which silu, quick_gelu and the tanh form of gelu share.
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
