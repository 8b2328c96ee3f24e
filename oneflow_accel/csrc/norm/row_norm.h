// Normalization of rows: what layer_norm and rms_norm compute on [rows, n], row-major. T is float,
// double or Bfloat16; what is kept for the gradients, and sums, are float32 for bfloat16.
//
// Results do not depend on the number of threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "common/bfloat16.h"
#include "common/scratch.h"
#include "common/threads.h"

namespace oneflow_accel {

// The type that statistics of T are kept in.
template <typename T>
using RowStatistics = std::conditional_t<std::is_same_v<T, double>, double, float>;

// y = (x - mean) * inv_std * gamma + beta, where inv_std = 1 / sqrt(variance + epsilon) of the row,
// with the biased variance. A row with a NaN or an infinity gives NaN.
template <typename T>
struct RowNorm {
  int64_t rows;
  int64_t n;
  double epsilon;
  const T* x;
  const T* gamma;             // [n], or null for ones
  const T* beta;              // [n], or null for zeros
  T* y;                       // may be x
  RowStatistics<T>* mean;     // [rows], written; null for RMS normalization, where it counts as 0
  RowStatistics<T>* inv_std;  // [rows], written
};

// What both gradients are computed from.
template <typename T>
struct RowNormGrad {
  int64_t rows;
  int64_t n;
  const T* dy;
  const T* x;
  const RowStatistics<T>* mean;     // [rows], or null for RMS normalization
  const RowStatistics<T>* inv_std;  // [rows]
};

template <typename T, typename Float>
ONEFLOW_ACCEL_INLINE T narrow(Float x) {
  if constexpr (std::is_same_v<T, Bfloat16>) {
    return from_float<T>(static_cast<float>(x));
  } else {
    return static_cast<T>(x);
  }
}

// Elements of one channel or row that are added up in SIMD lanes before they go into a double.
constexpr int64_t kSegment = 1024;

// Two sums over i < n, of the `first` and `second` that fn(i, first, second) adds to, which are T.
template <typename T, typename Fn>
ONEFLOW_ACCEL_INLINE void add_up(int64_t n, double* firsts, double* seconds, const Fn& fn) {
  for (int64_t begin = 0; begin < n; begin += kSegment) {
    const int64_t end = std::min(n, begin + kSegment);
    T first = 0;
    T second = 0;
#pragma omp simd reduction(+ : first, second)
    for (int64_t i = begin; i < end; ++i) { fn(i, first, second); }
    *firsts += first;
    *seconds += second;
  }
}

struct Moments {
  double mean;
  double variance;
};

// Around the mean, or around 0 unless `centered`. Two passes; the second takes differences from the
// rounded mean of the first, and what they sum up to corrects both results (Chan, Golub, LeVeque,
// "Algorithms for computing the sample variance", 1983).
template <typename T>
ONEFLOW_ACCEL_INLINE Moments moments_of(const T* x, int64_t n, bool centered) {
  using Float = RowStatistics<T>;
  double sum = 0.0;
  double total = 0.0;
  double squares = 0.0;
  if (centered) {
    add_up<Float>(n, &sum, &squares,
                  [=](int64_t i, Float& first, Float&) { first += to_float(x[i]); });
  }
  const auto shift = static_cast<Float>(sum / n);
  add_up<Float>(n, &total, &squares, [=](int64_t i, Float& first, Float& second) {
    const Float d = to_float(x[i]) - shift;
    first += d;
    second += d * d;
  });
  if (!centered) { return {0.0, squares / n}; }
  const double variance = (squares - total * total / n) / n;
  // Not std::max, which would turn NaN into 0.
  return {shift + total / n, variance < 0.0 ? 0.0 : variance};
}

// `values`, or n copies of `value` in a buffer of the calling thread.
template <typename T>
const T* or_constant(const T* values, int64_t n, float value, ScratchSlot slot) {
  if (values != nullptr) { return values; }
  T* buffer = scratch<T>(slot, n);
  std::fill_n(buffer, n, narrow<T>(value));
  return buffer;
}

// gamma_sum[c] += dy * (x - mean) * inv_std, beta_sum[c] += dy over `rows` rows (1 or 4: the sums
// are read and written less often) from `row` on, for n columns from `column` on.
template <int rows, typename T, typename Float>
ONEFLOW_ACCEL_INLINE void add_rows(const RowNormGrad<T>& norm, int64_t row, int64_t column,
                                   int64_t n, Float* gamma_sum, Float* beta_sum) {
  const int64_t stride = norm.n;
  const T* dy = norm.dy + row * stride + column;
  const T* x = norm.x + row * stride + column;
  Float mean[rows];
  Float inv_std[rows];
  for (int r = 0; r < rows; ++r) {
    mean[r] = norm.mean == nullptr ? 0 : norm.mean[row + r];
    inv_std[r] = norm.inv_std[row + r];
  }
  const auto grad = [=](int r, int64_t c) { return to_float(dy[r * stride + c]); };
  const auto product = [=](int r, int64_t c) {
    return to_float(dy[r * stride + c]) * ((to_float(x[r * stride + c]) - mean[r]) * inv_std[r]);
  };
#pragma omp simd
  for (int64_t c = 0; c < n; ++c) {
    if constexpr (rows == 4) {
      gamma_sum[c] += (product(0, c) + product(1, c)) + (product(2, c) + product(3, c));
      beta_sum[c] += (grad(0, c) + grad(1, c)) + (grad(2, c) + grad(3, c));
    } else {
      gamma_sum[c] += product(0, c);
      beta_sum[c] += grad(0, c);
    }
  }
}

// out[c] = the sum of parts[chunk * stride + c] over the chunks, for n columns.
template <typename T, typename Float>
void add_chunks(const Float* parts, int64_t chunks, int64_t stride, int64_t n, T* out) {
  constexpr int64_t kColumns = 32;
  for (int64_t begin = 0; begin < n; begin += kColumns) {
    const int64_t count = std::min(kColumns, n - begin);
    double sums[kColumns] = {};
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const Float* part = parts + chunk * stride + begin;
#pragma omp simd
      for (int64_t c = 0; c < count; ++c) { sums[c] += part[c]; }
    }
    for (int64_t c = 0; c < count; ++c) { out[begin + c] = narrow<T>(sums[c]); }
  }
}

template <typename T>
void row_norm(RowNorm<T> norm) {
  using Float = RowStatistics<T>;
  const int64_t n = norm.n;
  const T* gamma = or_constant(norm.gamma, n, 1.0F, ScratchSlot::kWeights);
  const T* beta = or_constant(norm.beta, n, 0.0F, ScratchSlot::kSource);
  for_each_block(norm.rows, n, [=](int64_t row) {
    const T* x = norm.x + row * n;
    T* y = norm.y + row * n;
    const Moments moments = moments_of(x, n, norm.mean != nullptr);
    const double inv_std = 1.0 / std::sqrt(moments.variance + norm.epsilon);
    const auto mean = static_cast<Float>(moments.mean);
    const auto scale = static_cast<Float>(inv_std);
    // What rounding the mean lost: not small against the deviation where the mean is large.
    const auto shift = static_cast<Float>((mean - moments.mean) * inv_std);
    if (norm.mean != nullptr) { norm.mean[row] = mean; }
    norm.inv_std[row] = scale;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      const Float x_hat = (to_float(x[i]) - mean) * scale + shift;
      y[i] = narrow<T>(x_hat * to_float(gamma[i]) + to_float(beta[i]));
    }
  });
}

// With g = dy * gamma and x_hat = (x - mean) * inv_std:
//   dx = inv_std * (g - mean(g) - x_hat * mean(g * x_hat)) + addend,
// without mean(g) in RMS normalization. gamma is [n], or null for ones, addend [rows, n], or null
// for zeros; dx may be dy or addend.
template <typename T>
void row_norm_grad(const RowNormGrad<T>& norm, const T* gamma, const T* addend, T* dx) {
  using Float = RowStatistics<T>;
  const int64_t n = norm.n;
  gamma = or_constant(gamma, n, 1.0F, ScratchSlot::kWeights);
  for_each_block(norm.rows, n, [=](int64_t row) {
    const T* dy = norm.dy + row * n;
    const T* x = norm.x + row * n;
    T* out = dx + row * n;
    const Float mean = norm.mean == nullptr ? 0 : norm.mean[row];
    const Float inv_std = norm.inv_std[row];
    double total = 0.0;
    double product = 0.0;
    add_up<Float>(n, &total, &product, [=](int64_t i, Float& first, Float& second) {
      const Float g = to_float(dy[i]) * to_float(gamma[i]);
      first += g;
      second += g * (to_float(x[i]) - mean);
    });
    const double inv = inv_std;
    const auto x_scale = static_cast<Float>(-inv * inv * inv * product / n);
    const auto shift = static_cast<Float>(norm.mean == nullptr ? 0.0 : -inv * total / n);
    const auto grad = [=](int64_t i) {
      return to_float(dy[i]) * to_float(gamma[i]) * inv_std
             + ((to_float(x[i]) - mean) * x_scale + shift);
    };
    if (addend == nullptr) {
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) { out[i] = narrow<T>(grad(i)); }
    } else {
      const T* added = addend + row * n;
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) { out[i] = narrow<T>(grad(i) + to_float(added[i])); }
    }
  });
}

// gamma_diff = sum of dy * x_hat over the rows, beta_diff = sum of dy; each [n], or null where it
// is not wanted.
//
// The rows are cut into chunks by their number only, each summed up by one thread, and the chunks
// are put together in order: results do not depend on the number of threads.
template <typename T>
void row_norm_param_grad(const RowNormGrad<T>& norm, T* gamma_diff, T* beta_diff) {
  // Enough chunks for many threads, and long enough that putting them together takes no time.
  constexpr int64_t kMaxRowChunks = 64;
  constexpr int64_t kMinChunkRows = 32;
  // Columns whose running sums stay in the first-level cache.
  constexpr int64_t kStrip = 1024;
  using Float = RowStatistics<T>;
  const int64_t n = norm.n;
  const int64_t size = std::max(kMinChunkRows, ceil_div(norm.rows, kMaxRowChunks));
  const int64_t chunks = ceil_div(norm.rows, size);
  // Those of gamma, then those of beta.
  const int64_t stride = 2 * n;
  auto* parts = scratch<Float>(ScratchSlot::kReduction, chunks * stride);
  for_each_block(chunks, size * n, [=](int64_t chunk) {
    Float* sums = parts + chunk * stride;
    std::fill_n(sums, stride, Float(0));
    const int64_t last = std::min((chunk + 1) * size, norm.rows);
    for (int64_t c = 0; c < n; c += kStrip) {
      const int64_t columns = std::min(kStrip, n - c);
      int64_t row = chunk * size;
      for (; row + 4 <= last; row += 4) {
        add_rows<4>(norm, row, c, columns, sums + c, sums + n + c);
      }
      for (; row < last; ++row) { add_rows<1>(norm, row, c, columns, sums + c, sums + n + c); }
    }
  });
  parallel_for(n, kGrainSize / kMaxRowChunks, [=](int64_t begin, int64_t end) {
    if (gamma_diff != nullptr) {
      add_chunks(parts + begin, chunks, stride, end - begin, gamma_diff + begin);
    }
    if (beta_diff != nullptr) {
      add_chunks(parts + n + begin, chunks, stride, end - begin, beta_diff + begin);
    }
  });
}

}  // namespace oneflow_accel
