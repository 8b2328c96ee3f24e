// Functions of one float that GCC turns into vector code inside loops:
// no branch, no call, no table. NaN gives NaN; infinities give the limits.
//
// The coefficients are fits of our own (least squares, reweighted until the largest relative error
// is smallest). Largest relative errors against float64, in units of the float32 epsilon (1.2e-7):
// exp 1, tanh 3, sigmoid 2.
#pragma once

#include <cstdint>

#define ONEFLOW_ACCEL_INLINE inline __attribute__((always_inline))

namespace oneflow_accel::simd {

ONEFLOW_ACCEL_INLINE float clamp(float x, float low, float high) {
  x = x < low ? low : x;
  return x > high ? high : x;
}

// 2^n for -126 <= n <= 127.
ONEFLOW_ACCEL_INLINE float power_of_two(int32_t n) {
  return __builtin_bit_cast(float, (n + 127) << 23);
}

// e^x = 2^n e^r with n = round(x / ln 2), |r| <= ln 2 / 2. Beyond the clamp's ends the result is 0
// or infinity; between, subnormal results are right as well, as 2^n is applied in two halves.
ONEFLOW_ACCEL_INLINE float exp(float x) {
  constexpr float kLog2E = 1.44269504F;
  // ln 2 in two parts: n times the first is exact.
  constexpr float kLn2High = 0.693359375F;
  constexpr float kLn2Low = -2.12194440e-4F;
  // Adding it rounds to a whole number, which stands in the low bits.
  constexpr float kRound = 12582912.0F;  // 1.5 * 2^23
  const float c = clamp(x, -105.0F, 89.0F);
  const float shifted = c * kLog2E + kRound;
  const float n = shifted - kRound;
  const int32_t exponent = __builtin_bit_cast(int32_t, shifted) - 0x4B400000;
  const float r = (c - n * kLn2High) - n * kLn2Low;
  float p = 0.00138145394F;
  p = p * r + 0.00836874545F;
  p = p * r + 0.0416683890F;
  p = p * r + 0.166665211F;
  p = p * r + 0.499999940F;
  p = p * r * r + r + 1.0F;
  const int32_t half = exponent >> 1;
  return p * power_of_two(half) * power_of_two(exponent - half);
}

// x P(x^2) / Q(x^2); from 9 on tanh is 1 in float32.
ONEFLOW_ACCEL_INLINE float tanh(float x) {
  const float c = clamp(x, -9.0F, 9.0F);
  const float t = c * c;
  float p = -1.22464061e-11F;
  p = p * t + 3.06427950e-8F;
  p = p * t + 2.80314416e-5F;
  p = p * t + 3.86951491e-3F;
  p = p * t + 0.136808619F;
  p = p * t + 1.0F;
  float q = 1.28904355e-6F;
  q = q * t + 3.94072529e-4F;
  q = q * t + 2.72501819e-2F;
  q = q * t + 0.470141947F;
  q = q * t + 1.0F;
  return clamp(c * p / q, -1.0F, 1.0F);
}

ONEFLOW_ACCEL_INLINE float sigmoid(float x) { return 1.0F / (1.0F + exp(-x)); }

}  // namespace oneflow_accel::simd
