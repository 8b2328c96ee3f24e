// Functions of one float that GCC turns into vector code inside loops:
// no branch, no call, no table. NaN gives NaN; infinities give the limits.
//
// The coefficients are fits of our own (least squares, reweighted until the largest relative error
// is smallest). Largest relative errors against float64, in units of the float32 epsilon (1.2e-7):
// exp 1, tanh 3, sigmoid 2.
#pragma once

#include <cstdint>
#include <utility>

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

// A polynomial of t, by Horner's method: the coefficients from that of the highest power on.
template <typename... Coefficients>
ONEFLOW_ACCEL_INLINE float polynomial(float t, float p, Coefficients... coefficients) {
  ((p = p * t + coefficients), ...);
  return p;
}

// e^x = 2^n e^r with n = round(x / ln 2), |r| <= ln 2 / 2: e^r and n.
ONEFLOW_ACCEL_INLINE std::pair<float, int32_t> scaled_exp(float x) {
  constexpr float kLog2E = 1.44269504F;
  // ln 2 in two parts: n times the first is exact.
  constexpr float kLn2High = 0.693359375F;
  constexpr float kLn2Low = -2.12194440e-4F;
  // Adding it rounds to a whole number, which stands in the low bits.
  constexpr float kRound = 12582912.0F;  // 1.5 * 2^23
  const float shifted = x * kLog2E + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * kLn2High) - n * kLn2Low;
  const float p =
      polynomial(r, 0.00138145394F, 0.00836874545F, 0.0416683890F, 0.166665211F, 0.499999940F);
  return {p * r * r + r + 1.0F, __builtin_bit_cast(int32_t, shifted) - 0x4B400000};
}

// Beyond the clamp's ends the result is 0 or infinity; between, subnormal results are right as
// well, as 2^n is applied in two halves.
ONEFLOW_ACCEL_INLINE float exp(float x) {
  const auto [value, exponent] = scaled_exp(clamp(x, -105.0F, 89.0F));
  const int32_t half = exponent >> 1;
  return value * power_of_two(half) * power_of_two(exponent - half);
}

// x P(x^2) / Q(x^2); from 9 on tanh is 1 in float32.
ONEFLOW_ACCEL_INLINE float tanh(float x) {
  const float c = clamp(x, -9.0F, 9.0F);
  const float t = c * c;
  const float p = polynomial(t, -1.22464061e-11F, 3.06427950e-8F, 2.80314416e-5F, 3.86951491e-3F,
                             0.136808619F, 1.0F);
  const float q =
      polynomial(t, 1.28904355e-6F, 3.94072529e-4F, 2.72501819e-2F, 0.470141947F, 1.0F);
  return clamp(c * p / q, -1.0F, 1.0F);
}

ONEFLOW_ACCEL_INLINE float sigmoid(float x) { return 1.0F / (1.0F + exp(-x)); }

}  // namespace oneflow_accel::simd
