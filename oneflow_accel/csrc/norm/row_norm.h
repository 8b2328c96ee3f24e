// Normalization of rows: what layer_norm and rms_norm compute on [rows, n], row-major. T is float,
// double or Bfloat16; what is kept for the gradients, and sums, are float32 for bfloat16.
//
// Results do not depend on the number of threads.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/bfloat16.h"

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

template <typename T>
void row_norm(RowNorm<T> norm);

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

// With g = dy * gamma and x_hat = (x - mean) * inv_std:
//   dx = inv_std * (g - mean(g) - x_hat * mean(g * x_hat)) + addend,
// without mean(g) in RMS normalization. gamma is [n], or null for ones, addend [rows, n], or null
// for zeros; dx may be dy or addend.
template <typename T>
void row_norm_grad(const RowNormGrad<T>& norm, const T* gamma, const T* addend, T* dx);

// gamma_diff = sum of dy * x_hat over the rows, beta_diff = sum of dy; each [n], or null where it
// is not wanted.
template <typename T>
void row_norm_param_grad(const RowNormGrad<T>& norm, T* gamma_diff, T* beta_diff);

}  // namespace oneflow_accel
