// Vectors of floats in registers, for kernels that need them by hand: GCC turns arithmetic on them
// into the instructions of the function's target.
#pragma once

#include <cstdint>

#include "common/simd_math.h"

namespace oneflow_accel {

// Floats of one SIMD register, and how many registers there are.
#ifdef __AVX512F__
constexpr int kFloats = 16;
constexpr int kRegisters = 32;
#else
constexpr int kFloats = 8;
constexpr int kRegisters = 16;
#endif

// A T that is read where values of another type were written, such as a word of two bfloat16.
template <typename T>
using Aliased __attribute__((may_alias)) = T;

template <int floats>
using Vector __attribute__((vector_size(4 * floats), aligned(4), may_alias)) = float;

template <int floats>
ONEFLOW_ACCEL_INLINE Vector<floats>* vector_at(float* data, int64_t i) {
  return reinterpret_cast<Vector<floats>*>(data) + i;
}
template <int floats>
ONEFLOW_ACCEL_INLINE const Vector<floats>* vector_at(const float* data, int64_t i) {
  return reinterpret_cast<const Vector<floats>*>(data) + i;
}

// The elements of the vectors a and b, one after the other, that the indices (constants) name.
// A comparison gives integers as wide as the elements.
#define ONEFLOW_ACCEL_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, decltype((a) < (b)){__VA_ARGS__})

}  // namespace oneflow_accel
