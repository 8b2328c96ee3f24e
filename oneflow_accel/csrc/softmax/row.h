// Softmax of one row, for loops that become vector code.
//
// The largest element is taken off first, so that nothing overflows. As in PyTorch, a row with a
// NaN, with +infinity, or with nothing but -infinity gives NaN everywhere.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "common/bfloat16.h"
#include "common/simd_math.h"
#include "common/threads.h"

namespace oneflow_accel::row {

// Elements that are added up in float32, in SIMD lanes, before they go into a double.
constexpr int64_t kBlock = 2048;

// Elements of a row as functions of their index, for the functions below: they may do more to an
// element as they read or write it. What is read and what is stored may be one row: store(i, ...)
// comes after all that is read at i, and after the sums over the row.
template <typename T>
ONEFLOW_ACCEL_INLINE auto values_of(const T* x) {
  return [=](int64_t i) { return to_float(x[i]); };
}
template <typename T>
ONEFLOW_ACCEL_INLINE auto rounded_to(T* y) {
  return [=](int64_t i, float value) { y[i] = from_float<T>(value); };
}

// The largest x(i) of i < n, NaN left out; -infinity where there is none.
template <typename Load>
ONEFLOW_ACCEL_INLINE float maximum_of(int64_t n, const Load& x) {
  float largest = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < n; ++i) {
    const float value = x(i);
    largest = value > largest ? value : largest;
  }
  return largest;
}

template <typename T>
ONEFLOW_ACCEL_INLINE float maximum(const T* x, int64_t n) {
  return maximum_of(n, values_of(x));
}

// e^x for x <= 0 (a little above is fine), cheaper than simd::exp: below 2^-126 the result is 0.
ONEFLOW_ACCEL_INLINE float exp_of_nonpositive(float x) {
  // From here down n is -127, whose power of two comes out as 0.
  const auto [value, exponent] = simd::scaled_exp(x < -88.0F ? -88.0F : x);
  return value * simd::power_of_two(exponent);
}

// The sum of term(i) for i < n.
template <typename Term>
ONEFLOW_ACCEL_INLINE double sum_of(int64_t n, const Term& term) {
  double total = 0.0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = std::min(n, begin + kBlock);
    float sum = 0.0F;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = begin; i < end; ++i) { sum += term(i); }
    total += sum;
  }
  return total;
}

// The sum of e^(x - shift), shift being the largest.
template <typename T>
ONEFLOW_ACCEL_INLINE double sum_exp(const T* x, int64_t n, float shift) {
  return sum_of(n, [=](int64_t i) { return exp_of_nonpositive(to_float(x[i]) - shift); });
}

// y = e^(x - shift), shift being the largest, and its sum. y may be x.
ONEFLOW_ACCEL_INLINE double exp_and_sum(const float* x, float* y, int64_t n, float shift) {
  return sum_of(n, [=](int64_t i) { return y[i] = exp_of_nonpositive(x[i] - shift); });
}

// Sets padded[i] = x(i) for i < n, n <= kBlock, and -infinity up to a whole number of vectors, so
// that no loop of exponentials has a scalar rest: in rows of some hundred elements that would take
// a third of the time. Returns the padded length.
template <typename Load>
ONEFLOW_ACCEL_INLINE int64_t copy_padded(const Load& x, int64_t n, float* padded) {
  constexpr int64_t kLanes = 16;
  const int64_t length = round_up(n, kLanes);
  for (int64_t i = length - kLanes; i < length; ++i) {
    padded[i] = -std::numeric_limits<float>::infinity();
  }
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { padded[i] = x(i); }
  return length;
}

// Calls store(i, e^x(i) / sum(e^x)); elements of long rows are read several times.
template <typename Load, typename Store>
ONEFLOW_ACCEL_INLINE void softmax(int64_t n, const Load& x, const Store& store) {
  if (n <= kBlock) {
    alignas(64) float values[kBlock];
    const int64_t length = copy_padded(x, n, values);
    const double sum = exp_and_sum(values, values, length, maximum(values, length));
    const auto scale = static_cast<float>(1.0 / sum);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) { store(i, values[i] * scale); }
    return;
  }
  // Long rows: computing the exponentials twice is cheaper than another pass over memory.
  const float shift = maximum_of(n, x);
  const double sum = sum_of(n, [=](int64_t i) { return exp_of_nonpositive(x(i) - shift); });
  const auto scale = static_cast<float>(1.0 / sum);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { store(i, exp_of_nonpositive(x(i) - shift) * scale); }
}

// Calls store(i, y(i) (dy(i) - sum(dy y))), the gradient by x where y = softmax(x).
template <typename Y, typename Dy, typename Store>
ONEFLOW_ACCEL_INLINE void softmax_grad(int64_t n, const Y& y, const Dy& dy, const Store& store) {
  const auto mean = static_cast<float>(sum_of(n, [=](int64_t i) { return dy(i) * y(i); }));
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { store(i, y(i) * (dy(i) - mean)); }
}

// y = x - log(sum(e^x)). y may be x.
template <typename T>
ONEFLOW_ACCEL_INLINE void log_softmax(const T* x, T* y, int64_t n) {
  float shift;
  double sum;
  if (n <= kBlock) {
    alignas(64) float values[kBlock];
    const int64_t length = copy_padded(values_of(x), n, values);
    shift = maximum(values, length);
    sum = sum_exp(values, length, shift);
  } else {
    shift = maximum(x, n);
    sum = sum_exp(x, n, shift);
  }
  const auto log_sum = static_cast<float>(std::log(sum));
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { y[i] = from_float<T>((to_float(x[i]) - shift) - log_sum); }
}

}  // namespace oneflow_accel::row
