// Normalization of rows: what layer_norm and rms_norm compute on [rows, n], row-major.
//
// Results do not depend on the number of threads.
#pragma once

#include <cstdint>

#include "common/bfloat16.h"

namespace oneflow_accel {

// The type that statistics of T are kept in.
template <typename T>
struct RowStatistics {
  using Type = T;
};
template <>
struct RowStatistics<Bfloat16> {
  using Type = float;
};

// y = (x - mean) * inv_std * gamma + beta, where inv_std = 1 / sqrt(variance + epsilon) of the row,
// with the biased variance. A row with a NaN or an infinity gives NaN.
template <typename T>
struct RowNorm {
  using Statistics = typename RowStatistics<T>::Type;

  int64_t rows;
  int64_t n;
  double epsilon;
  const T* x;
  const T* gamma;       // [n], or null for ones
  const T* beta;        // [n], or null for zeros
  T* y;                 // may be x
  Statistics* mean;     // [rows], written; null for RMS normalization, where it counts as 0
  Statistics* inv_std;  // [rows], written
};

void row_norm(const RowNorm<float>& norm);
void row_norm(const RowNorm<double>& norm);
void row_norm(const RowNorm<Bfloat16>& norm);

// With g = dy * gamma and x_hat = (x - mean) * inv_std:
//   dx = inv_std * (g - mean(g) - x_hat * mean(g * x_hat)) + addend,
// without mean(g) where `mean` is null.
template <typename T>
struct RowNormGrad {
  int64_t rows;
  int64_t n;
  const T* dy;
  const T* x;
  const T* mean;     // [rows], or null for RMS normalization
  const T* inv_std;  // [rows]
  const T* gamma;    // [n], or null for ones
  const T* addend;   // [rows, n], or null for zeros
  T* dx;             // may be dy or addend
};

void row_norm_grad(const RowNormGrad<float>& norm);
void row_norm_grad(const RowNormGrad<double>& norm);

// gamma_diff = sum of dy * x_hat over the rows, beta_diff = sum of dy; each [n], or null where it
// is not wanted.
template <typename T>
struct RowNormParamGrad {
  int64_t rows;
  int64_t n;
  const T* dy;
  const T* x;
  const T* mean;     // [rows], or null for RMS normalization
  const T* inv_std;  // [rows]
  T* gamma_diff;
  T* beta_diff;
};

void row_norm_param_grad(const RowNormParamGrad<float>& norm);
void row_norm_param_grad(const RowNormParamGrad<double>& norm);

}  // namespace oneflow_accel
