// bfloat16 as the kernels see it: the upper half of a float32. Arithmetic is done in float32.
#pragma once

#include <cstdint>

#include "common/simd_math.h"

namespace oneflow_accel {

// Bits of a bfloat16; what `dptr<oneflow::bfloat16>()` points to.
struct Bfloat16 {
  uint16_t bits;
};

// Whether oneDNN finds instructions that multiply bfloat16, within ONEDNN_MAX_CPU_ISA. Without them
// AVX-512 processors do it in several steps, in which infinity becomes NaN.
bool has_bfloat16_products();

// Whether products of float32 matrices are to round their operands to bfloat16, which the CPU
// multiplies faster; sums stay in float32. Off unless a program asks for it.
bool float32_products_in_bfloat16();

// What T is counted with in.
ONEFLOW_ACCEL_INLINE double to_float(double x) { return x; }
ONEFLOW_ACCEL_INLINE float to_float(float x) { return x; }
ONEFLOW_ACCEL_INLINE float to_float(Bfloat16 x) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(x.bits) << 16);
}

template <typename T>
T from_float(float x);
template <>
ONEFLOW_ACCEL_INLINE float from_float<float>(float x) {
  return x;
}
// Rounds to nearest, ties to even; NaN stays NaN.
template <>
ONEFLOW_ACCEL_INLINE Bfloat16 from_float<Bfloat16>(float x) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, x);
  const uint32_t rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
  return {static_cast<uint16_t>(x != x ? 0x7FC0U : rounded)};
}

}  // namespace oneflow_accel
