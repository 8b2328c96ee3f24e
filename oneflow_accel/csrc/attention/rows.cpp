#include "attention/rows.h"

#include <type_traits>
#include <utility>

#include "common/simd_math.h"
#include "common/vector.h"

namespace oneflow_accel {

namespace {

template <typename T>
ONEFLOW_ACCEL_INLINE void pack_any(const T* x, int64_t stride, int64_t columns,
                                   const Panels& panels) {
  for (int64_t column = 0; column < panels.columns; column += kPanelWidth) {
    const int64_t width = panels.width(column);
    const int64_t filled = std::min(width, columns - column);
    for (int64_t j = 0; j < panels.rows; ++j) {
      const T* from = x + j * stride + column;
      float* to = panels.at(j, column);
      int64_t d = 0;
      // Vector by vector: GCC would call memcpy for each of the short rows.
      for (; d + kVectorWidth <= filled; d += kVectorWidth) {
        for (int64_t e = 0; e < kVectorWidth; ++e) { to[d + e] = to_float(from[d + e]); }
      }
      for (; d < filled; ++d) { to[d] = to_float(from[d]); }
      for (; d < width; ++d) { to[d] = 0.0F; }
    }
  }
}

// Transposed in registers at a time: a square that AVX2 has registers for too.
constexpr int64_t kSquare = 8;
typedef float SquareRow __attribute__((vector_size(4 * kSquare), aligned(4), may_alias));
using Lanes = std::make_integer_sequence<int, kSquare>;

// Of the 2 x 2 blocks of `size` elements that the rows i and i + size form, swaps the two that are
// not on the diagonal.
template <int size, int... lane>
ONEFLOW_ACCEL_INLINE void swap_blocks(SquareRow (&rows)[kSquare],
                                      std::integer_sequence<int, lane...>) {
#pragma GCC unroll 8
  for (int i = 0; i < kSquare; ++i) {
    if ((i & size) == 0) {
      const SquareRow above = rows[i];
      const SquareRow below = rows[i + size];
      rows[i] = ONEFLOW_ACCEL_SHUFFLE(
          above, below, ((lane & size) != 0 ? kSquare + lane - size : lane)...);
      rows[i + size] = ONEFLOW_ACCEL_SHUFFLE(
          above, below, ((lane & size) != 0 ? kSquare + lane : lane + size)...);
    }
  }
}

// to[k * to_stride + i] = from[i * stride + k] for i and k < kSquare, in registers.
ONEFLOW_ACCEL_INLINE void transpose_square(const float* from, int64_t stride, float* to,
                                         int64_t to_stride) {
  SquareRow rows[kSquare];
#pragma GCC unroll 8
  for (int i = 0; i < kSquare; ++i) {
    rows[i] = *reinterpret_cast<const SquareRow*>(from + i * stride);
  }
  swap_blocks<4>(rows, Lanes());
  swap_blocks<2>(rows, Lanes());
  swap_blocks<1>(rows, Lanes());
#pragma GCC unroll 8
  for (int i = 0; i < kSquare; ++i) {
    *reinterpret_cast<SquareRow*>(to + i * to_stride) = rows[i];
  }
}

template <typename T>
ONEFLOW_ACCEL_INLINE void pack_transposed_any(const T* x, int64_t stride, int64_t columns,
                                              const Panels& panels) {
  for (int64_t column = 0; column < panels.columns; column += kPanelWidth) {
    const int64_t width = panels.width(column);
    for (int64_t j = 0; j < width; j += kSquare) {
      const int64_t filled = std::min(kSquare, columns - column - j);
      for (int64_t d = 0; d < panels.rows; d += kSquare) {
        const int64_t depth = std::min(kSquare, panels.rows - d);
        const T* from = x + (column + j) * stride + d;
        float* to = panels.at(d, column) + j;
        if constexpr (std::is_same_v<T, float>) {
          if (filled == kSquare && depth == kSquare) {
            transpose_square(from, stride, to, width);
            continue;
          }
        }
        for (int64_t i = 0; i < kSquare; ++i) {
          for (int64_t k = 0; k < depth; ++k) {
            to[k * width + i] = i < filled ? to_float(from[i * stride + k]) : 0.0F;
          }
        }
      }
    }
  }
}

template <typename T>
ONEFLOW_ACCEL_INLINE void copy_scaled_any(const T* x, int64_t stride, int64_t rows,
                                          int64_t columns, float factor, float* y) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t d = 0; d < columns; ++d) {
      y[i * columns + d] = to_float(x[i * stride + d]) * factor;
    }
  }
}

template <typename T>
ONEFLOW_ACCEL_INLINE void scores_of_any(const float* query, const T* keys, int64_t stride,
                                        int64_t rows, int64_t columns, float* scores) {
  for (int64_t j = 0; j < rows; ++j) {
    float sum = 0.0F;
#pragma omp simd reduction(+ : sum)
    for (int64_t d = 0; d < columns; ++d) { sum += query[d] * to_float(keys[j * stride + d]); }
    scores[j] = sum;
  }
}

// Four rows at a time: `out` is read and written once for them.
template <typename T>
ONEFLOW_ACCEL_INLINE void weighted_sum_any(const float* weights, const T* values, int64_t stride,
                                           int64_t rows, int64_t columns, float* out,
                                           bool accumulate) {
  if (!accumulate) { std::fill_n(out, columns, 0.0F); }
  int64_t j = 0;
  for (; j + 4 <= rows; j += 4) {
    const float* w = weights + j;
    const T* a = values + j * stride;
    const T* b = a + stride;
    const T* c = b + stride;
    const T* e = c + stride;
#pragma omp simd
    for (int64_t d = 0; d < columns; ++d) {
      out[d] += (w[0] * to_float(a[d]) + w[1] * to_float(b[d]))
                + (w[2] * to_float(c[d]) + w[3] * to_float(e[d]));
    }
  }
  for (; j < rows; ++j) {
#pragma omp simd
    for (int64_t d = 0; d < columns; ++d) {
      out[d] += weights[j] * to_float(values[j * stride + d]);
    }
  }
}

// Where all scores of a row are -infinity, its softmax is NaN, as the formula says.
ONEFLOW_ACCEL_INLINE void softmax_row(float* scores, int64_t visible, int64_t keys,
                                      float* largest, float* sum, float* out,
                                      int64_t out_columns) {
  float most = *largest;
#pragma omp simd reduction(max : most)
  for (int64_t j = 0; j < visible; ++j) { most = scores[j] > most ? scores[j] : most; }
  float total = 0.0F;
#pragma omp simd reduction(+ : total)
  for (int64_t j = 0; j < visible; ++j) {
    scores[j] = simd::exp(scores[j] - most);
    total += scores[j];
  }
  for (int64_t j = visible; j < keys; ++j) { scores[j] = 0.0F; }
  if (most > *largest) {
    const float factor = simd::exp(*largest - most);
    *sum *= factor;
    for (int64_t d = 0; d < out_columns; ++d) { out[d] *= factor; }
    *largest = most;
  }
  *sum += total;
}

}  // namespace

void pack(const float* x, int64_t stride, int64_t columns, const Panels& panels) {
  pack_any(x, stride, columns, panels);
}

void pack(const Bfloat16* x, int64_t stride, int64_t columns, const Panels& panels) {
  pack_any(x, stride, columns, panels);
}

void pack_transposed(const float* x, int64_t stride, int64_t columns, const Panels& panels) {
  pack_transposed_any(x, stride, columns, panels);
}

void pack_transposed(const Bfloat16* x, int64_t stride, int64_t columns, const Panels& panels) {
  pack_transposed_any(x, stride, columns, panels);
}

void copy_scaled(const float* x, int64_t stride, int64_t rows, int64_t columns, float factor,
                 float* y) {
  copy_scaled_any(x, stride, rows, columns, factor, y);
}

void copy_scaled(const Bfloat16* x, int64_t stride, int64_t rows, int64_t columns, float factor,
                 float* y) {
  copy_scaled_any(x, stride, rows, columns, factor, y);
}

void store_scaled(const float* x, int64_t columns, float factor, float* y) {
  for (int64_t d = 0; d < columns; ++d) { y[d] = x[d] * factor; }
}

void store_scaled(const float* x, int64_t columns, float factor, Bfloat16* y) {
  for (int64_t d = 0; d < columns; ++d) { y[d] = from_float<Bfloat16>(x[d] * factor); }
}

void scores_of(const float* query, const float* keys, int64_t stride, int64_t rows, int64_t columns,
               float* scores) {
  scores_of_any(query, keys, stride, rows, columns, scores);
}

void scores_of(const float* query, const Bfloat16* keys, int64_t stride, int64_t rows,
               int64_t columns, float* scores) {
  scores_of_any(query, keys, stride, rows, columns, scores);
}

void weighted_sum(const float* weights, const float* values, int64_t stride, int64_t rows,
                  int64_t columns, float* out, bool accumulate) {
  weighted_sum_any(weights, values, stride, rows, columns, out, accumulate);
}

void weighted_sum(const float* weights, const Bfloat16* values, int64_t stride, int64_t rows,
                  int64_t columns, float* out, bool accumulate) {
  weighted_sum_any(weights, values, stride, rows, columns, out, accumulate);
}

void softmax_block(float* scores, int64_t stride, int64_t rows, int64_t keys, Visible visible,
                   const Softmax& softmax) {
  for (int64_t i = 0; i < rows; ++i) {
    softmax_row(scores + i * stride, visible.keys(i, keys), keys, softmax.largest + i,
                softmax.sum + i, softmax.out + i * softmax.out_stride, softmax.out_stride);
  }
}

void softmax_grad_block(float* scores, float* score_grads, int64_t stride, int64_t rows,
                        int64_t keys, Visible visible, const float* lse, const float* delta) {
  for (int64_t i = 0; i < rows; ++i) {
    float* p = scores + i * stride;
    float* ds = score_grads + i * stride;
    const float row_lse = lse[i];
    const float row_delta = delta[i];
    const int64_t n = visible.keys(i, keys);
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) {
      p[j] = simd::exp(p[j] - row_lse);
      ds[j] = p[j] * (ds[j] - row_delta);
    }
    for (int64_t j = n; j < keys; ++j) { p[j] = ds[j] = 0.0F; }
  }
}

}  // namespace oneflow_accel
