#include "norm/row_norm.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "common/onednn.h"
#include "common/threads.h"

namespace oneflow_accel {

namespace {

// Elements that are added up in SIMD lanes before they go into a double.
constexpr int64_t kBlock = 1024;

ONEFLOW_ACCEL_INLINE double widen(double x) { return x; }
ONEFLOW_ACCEL_INLINE float widen(float x) { return x; }
ONEFLOW_ACCEL_INLINE float widen(Bfloat16 x) { return to_float(x); }

template <typename T>
ONEFLOW_ACCEL_INLINE T narrow(typename RowStatistics<T>::Type x) {
  if constexpr (std::is_same_v<T, Bfloat16>) {
    return from_float<Bfloat16>(x);
  } else {
    return x;
  }
}

template <typename T>
ONEFLOW_ACCEL_INLINE double sum_of(const T* x, int64_t n) {
  using Float = typename RowStatistics<T>::Type;
  double total = 0.0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = std::min(n, begin + kBlock);
    Float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = begin; i < end; ++i) { sum += widen(x[i]); }
    total += sum;
  }
  return total;
}

struct Moments {
  double mean;
  double variance;
};

// Two passes; the second takes differences from the rounded mean of the first, and what they sum
// up to corrects both results (Chan, Golub, LeVeque, "Algorithms for computing the sample
// variance", 1983).
template <typename T>
ONEFLOW_ACCEL_INLINE Moments moments_of(const T* x, int64_t n) {
  using Float = typename RowStatistics<T>::Type;
  const auto shift = static_cast<Float>(sum_of(x, n) / n);
  double total = 0.0;
  double squares = 0.0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = std::min(n, begin + kBlock);
    Float sum = 0;
    Float square = 0;
#pragma omp simd reduction(+ : sum, square)
    for (int64_t i = begin; i < end; ++i) {
      const Float d = widen(x[i]) - shift;
      sum += d;
      square += d * d;
    }
    total += sum;
    squares += square;
  }
  const double variance = (squares - total * total / n) / n;
  // Not std::max, which would turn NaN into 0.
  return {shift + total / n, variance < 0.0 ? 0.0 : variance};
}

template <typename T>
ONEFLOW_ACCEL_INLINE double mean_square_of(const T* x, int64_t n) {
  using Float = typename RowStatistics<T>::Type;
  double squares = 0.0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = std::min(n, begin + kBlock);
    Float square = 0;
#pragma omp simd reduction(+ : square)
    for (int64_t i = begin; i < end; ++i) {
      const Float value = widen(x[i]);
      square += value * value;
    }
    squares += square;
  }
  return squares / n;
}

template <typename T>
ONEFLOW_ACCEL_INLINE void norm_rows(const RowNorm<T>& norm, int64_t first, int64_t last) {
  using Float = typename RowStatistics<T>::Type;
  const int64_t n = norm.n;
  const T* gamma = norm.gamma;
  const T* beta = norm.beta;
  for (int64_t row = first; row < last; ++row) {
    const T* x = norm.x + row * n;
    T* y = norm.y + row * n;
    const Moments moments =
        norm.mean == nullptr ? Moments{0.0, mean_square_of(x, n)} : moments_of(x, n);
    const double inv_std = 1.0 / std::sqrt(moments.variance + norm.epsilon);
    const auto mean = static_cast<Float>(moments.mean);
    const auto scale = static_cast<Float>(inv_std);
    // What rounding the mean lost: not small against the deviation where the mean is large.
    const auto shift = static_cast<Float>((mean - moments.mean) * inv_std);
    if (norm.mean != nullptr) { norm.mean[row] = mean; }
    norm.inv_std[row] = scale;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      const Float x_hat = (widen(x[i]) - mean) * scale + shift;
      y[i] = narrow<T>(x_hat * widen(gamma[i]) + widen(beta[i]));
    }
  }
}

void norm_range(const RowNorm<float>& norm, int64_t first, int64_t last) {
  norm_rows(norm, first, last);
}
void norm_range(const RowNorm<double>& norm, int64_t first, int64_t last) {
  norm_rows(norm, first, last);
}
void norm_range(const RowNorm<Bfloat16>& norm, int64_t first, int64_t last) {
  norm_rows(norm, first, last);
}

template <typename T>
ONEFLOW_ACCEL_INLINE void grad_rows(const RowNormGrad<T>& norm, int64_t first, int64_t last) {
  const int64_t n = norm.n;
  const T* gamma = norm.gamma;
  for (int64_t row = first; row < last; ++row) {
    const T* dy = norm.dy + row * n;
    const T* x = norm.x + row * n;
    T* dx = norm.dx + row * n;
    const T mean = norm.mean == nullptr ? 0 : norm.mean[row];
    const T inv_std = norm.inv_std[row];
    double total = 0.0;
    double product = 0.0;
    for (int64_t begin = 0; begin < n; begin += kBlock) {
      const int64_t end = std::min(n, begin + kBlock);
      T part = 0;
      T part_product = 0;
#pragma omp simd reduction(+ : part, part_product)
      for (int64_t i = begin; i < end; ++i) {
        const T g = dy[i] * gamma[i];
        part += g;
        part_product += g * (x[i] - mean);
      }
      total += part;
      product += part_product;
    }
    const double inv = inv_std;
    const auto x_scale = static_cast<T>(-inv * inv * inv * product / n);
    const auto shift = static_cast<T>(norm.mean == nullptr ? 0.0 : -inv * total / n);
    if (norm.addend == nullptr) {
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) {
        dx[i] = dy[i] * gamma[i] * inv_std + ((x[i] - mean) * x_scale + shift);
      }
    } else {
      const T* addend = norm.addend + row * n;
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) {
        dx[i] = dy[i] * gamma[i] * inv_std + ((x[i] - mean) * x_scale + shift) + addend[i];
      }
    }
  }
}

void grad_range(const RowNormGrad<float>& norm, int64_t first, int64_t last) {
  grad_rows(norm, first, last);
}
void grad_range(const RowNormGrad<double>& norm, int64_t first, int64_t last) {
  grad_rows(norm, first, last);
}

// `values`, or n copies of `value` in a buffer of the calling thread.
template <typename T>
const T* or_constant(const T* values, int64_t n, T value, ScratchSlot slot) {
  if (values != nullptr) { return values; }
  auto* buffer = static_cast<T*>(scratch(slot, n * sizeof(T)));
  std::fill_n(buffer, n, value);
  return buffer;
}

template <typename T>
void forward(RowNorm<T> norm) {
  norm.gamma = or_constant(norm.gamma, norm.n, narrow<T>(1), ScratchSlot::kWeights);
  norm.beta = or_constant(norm.beta, norm.n, narrow<T>(0), ScratchSlot::kSource);
  parallel_for(norm.rows, std::max<int64_t>(1, kGrainSize / std::max<int64_t>(1, norm.n)),
               [&](int64_t first, int64_t last) { norm_range(norm, first, last); });
}

template <typename T>
void backward(RowNormGrad<T> norm) {
  norm.gamma = or_constant(norm.gamma, norm.n, T(1), ScratchSlot::kWeights);
  parallel_for(norm.rows, std::max<int64_t>(1, kGrainSize / std::max<int64_t>(1, norm.n)),
               [&](int64_t first, int64_t last) { grad_range(norm, first, last); });
}

}  // namespace

void row_norm(const RowNorm<float>& norm) { forward(norm); }
void row_norm(const RowNorm<double>& norm) { forward(norm); }
void row_norm(const RowNorm<Bfloat16>& norm) { forward(norm); }

void row_norm_grad(const RowNormGrad<float>& norm) { backward(norm); }
void row_norm_grad(const RowNormGrad<double>& norm) { backward(norm); }

}  // namespace oneflow_accel
