// The gradients of gamma and beta: sums over the rows.
#include <algorithm>

#include "common/onednn.h"
#include "common/threads.h"
#include "norm/row_norm.h"

namespace oneflow_accel {

namespace {

// The rows are cut into chunks by their number only, each summed up by one thread, and the chunks
// are put together in order: results do not depend on the number of threads. Enough chunks for many
// threads, and long enough that putting them together takes no time.
constexpr int64_t kMaxRowChunks = 64;
constexpr int64_t kMinChunkRows = 32;
// Columns whose running sums stay in the first-level cache.
constexpr int64_t kStrip = 1024;

// gamma_sum[c] += dy * (x - mean) * inv_std, beta_sum[c] += dy over `rows` rows that are `stride`
// apart and have n columns here. Four rows at a time: the sums are read and written less often.
template <typename T>
ONEFLOW_ACCEL_INLINE void add_rows(const T* dy, const T* x, const T* mean, const T* inv_std,
                                   int64_t rows, int64_t stride, int64_t n, T* gamma_sum,
                                   T* beta_sum) {
  int64_t row = 0;
  for (; row + 4 <= rows; row += 4) {
    const T* dy0 = dy + row * stride;
    const T* dy1 = dy0 + stride;
    const T* dy2 = dy1 + stride;
    const T* dy3 = dy2 + stride;
    const T* x0 = x + row * stride;
    const T* x1 = x0 + stride;
    const T* x2 = x1 + stride;
    const T* x3 = x2 + stride;
    const T m0 = mean[row];
    const T m1 = mean[row + 1];
    const T m2 = mean[row + 2];
    const T m3 = mean[row + 3];
    const T s0 = inv_std[row];
    const T s1 = inv_std[row + 1];
    const T s2 = inv_std[row + 2];
    const T s3 = inv_std[row + 3];
#pragma omp simd
    for (int64_t c = 0; c < n; ++c) {
      gamma_sum[c] += (dy0[c] * ((x0[c] - m0) * s0) + dy1[c] * ((x1[c] - m1) * s1))
                      + (dy2[c] * ((x2[c] - m2) * s2) + dy3[c] * ((x3[c] - m3) * s3));
      beta_sum[c] += (dy0[c] + dy1[c]) + (dy2[c] + dy3[c]);
    }
  }
  for (; row < rows; ++row) {
    const T* dy0 = dy + row * stride;
    const T* x0 = x + row * stride;
    const T m0 = mean[row];
    const T s0 = inv_std[row];
#pragma omp simd
    for (int64_t c = 0; c < n; ++c) {
      gamma_sum[c] += dy0[c] * ((x0[c] - m0) * s0);
      beta_sum[c] += dy0[c];
    }
  }
}

void add_range(const float* dy, const float* x, const float* mean, const float* inv_std,
               int64_t rows, int64_t stride, int64_t n, float* gamma_sum, float* beta_sum) {
  add_rows(dy, x, mean, inv_std, rows, stride, n, gamma_sum, beta_sum);
}
void add_range(const double* dy, const double* x, const double* mean, const double* inv_std,
               int64_t rows, int64_t stride, int64_t n, double* gamma_sum, double* beta_sum) {
  add_rows(dy, x, mean, inv_std, rows, stride, n, gamma_sum, beta_sum);
}

// out[c] = the sum of parts[chunk * stride + c] over the chunks, for n columns.
template <typename T>
ONEFLOW_ACCEL_INLINE void add_chunks(const T* parts, int64_t chunks, int64_t stride, int64_t n,
                                     T* out) {
  constexpr int64_t kColumns = 32;
  for (int64_t begin = 0; begin < n; begin += kColumns) {
    const int64_t count = std::min(kColumns, n - begin);
    double sums[kColumns] = {};
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const T* part = parts + chunk * stride + begin;
#pragma omp simd
      for (int64_t c = 0; c < count; ++c) { sums[c] += part[c]; }
    }
    for (int64_t c = 0; c < count; ++c) { out[begin + c] = static_cast<T>(sums[c]); }
  }
}

void add_parts(const float* parts, int64_t chunks, int64_t stride, int64_t n, float* out) {
  add_chunks(parts, chunks, stride, n, out);
}
void add_parts(const double* parts, int64_t chunks, int64_t stride, int64_t n, double* out) {
  add_chunks(parts, chunks, stride, n, out);
}

template <typename T>
void param_grad(const RowNormParamGrad<T>& norm) {
  const int64_t n = norm.n;
  const int64_t size = std::max(kMinChunkRows, (norm.rows + kMaxRowChunks - 1) / kMaxRowChunks);
  const int64_t chunks = (norm.rows + size - 1) / size;
  const int64_t stride = 2 * n;
  auto* parts =
      static_cast<T*>(scratch(ScratchSlot::kReduction, chunks * stride * sizeof(T)));
  const T* mean = norm.mean;
  if (mean == nullptr) {
    auto* zeros = static_cast<T*>(scratch(ScratchSlot::kSource, norm.rows * sizeof(T)));
    std::fill_n(zeros, norm.rows, T(0));
    mean = zeros;
  }
  parallel_for(chunks, std::max<int64_t>(1, kGrainSize / std::max<int64_t>(1, size * n)),
               [&](int64_t first, int64_t last) {
                 std::fill(parts + first * stride, parts + last * stride, T(0));
                 for (int64_t chunk = first; chunk < last; ++chunk) {
                   const int64_t row = chunk * size;
                   const int64_t rows = std::min(size, norm.rows - row);
                   T* sums = parts + chunk * stride;
                   for (int64_t c = 0; c < n; c += kStrip) {
                     add_range(norm.dy + row * n + c, norm.x + row * n + c, mean + row,
                               norm.inv_std + row, rows, n, std::min(kStrip, n - c), sums + c,
                               sums + n + c);
                   }
                 }
               });
  parallel_for(n, kGrainSize / kMaxRowChunks, [&](int64_t begin, int64_t end) {
    if (norm.gamma_diff != nullptr) {
      add_parts(parts + begin, chunks, stride, end - begin, norm.gamma_diff + begin);
    }
    if (norm.beta_diff != nullptr) {
      add_parts(parts + n + begin, chunks, stride, end - begin, norm.beta_diff + begin);
    }
  });
}

}  // namespace

void row_norm_param_grad(const RowNormParamGrad<float>& norm) { param_grad(norm); }
void row_norm_param_grad(const RowNormParamGrad<double>& norm) { param_grad(norm); }

}  // namespace oneflow_accel
