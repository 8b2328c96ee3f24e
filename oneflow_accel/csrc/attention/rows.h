// What attention does to rows and blocks between its matrix products.
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention/block_product.h"
#include "common/bfloat16.h"
#include "copy/transpose_tile.h"

namespace oneflow_accel {

// panels[j, d] = x[j * stride + d] for j < panels.rows and d < columns; 0 in the padding.
template <typename T>
void pack(const T* x, int64_t stride, int64_t columns, const Panels& panels) {
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

// panels[d, j] = x[j * stride + d] for j < columns and d < panels.rows; 0 in the padding.
template <typename T>
void pack_transposed(const T* x, int64_t stride, int64_t columns, const Panels& panels) {
  for (int64_t column = 0; column < panels.columns; column += kPanelWidth) {
    const int64_t width = panels.width(column);
    const int64_t filled = std::min(width, columns - column);
    const T* from = x + column * stride;
    float* to = panels.at(0, column);
    if constexpr (std::is_same_v<T, float>) {
      transpose_tile(from, stride, to, width, filled, panels.rows);
    } else {
      for (int64_t j = 0; j < filled; ++j) {
        for (int64_t d = 0; d < panels.rows; ++d) {
          to[d * width + j] = to_float(from[j * stride + d]);
        }
      }
    }
    for (int64_t d = 0; d < panels.rows; ++d) {
      std::fill(to + d * width + filled, to + (d + 1) * width, 0.0F);
    }
  }
}

// to[d] = from[d] * factor, in the type of `to`.
template <typename From, typename To>
void copy_row(const From* from, int64_t columns, float factor, To* to) {
#pragma omp simd
  for (int64_t d = 0; d < columns; ++d) { to[d] = from_float<To>(to_float(from[d]) * factor); }
}

// The same for rows that lie `stride` and `to_stride` elements apart.
template <typename From, typename To>
void copy_rows(const From* from, int64_t stride, int64_t rows, int64_t columns, float factor,
               To* to, int64_t to_stride) {
  for (int64_t i = 0; i < rows; ++i) {
    copy_row(from + i * stride, columns, factor, to + i * to_stride);
  }
}

// sum over d of a[d] b[d].
template <typename A, typename B>
float dot(const A* a, const B* b, int64_t n) {
  float sum = 0.0F;
#pragma omp simd reduction(+ : sum)
  for (int64_t d = 0; d < n; ++d) { sum += to_float(a[d]) * to_float(b[d]); }
  return sum;
}

// out[d] (+)= sum over j < rows of weights[j] values[j * stride + d]. Four rows at a time: `out` is
// read and written once for them.
template <typename T>
void weighted_sum(const float* weights, const T* values, int64_t stride, int64_t rows,
                  int64_t columns, float* out, bool accumulate) {
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

// How many of the keys of a block the rows of a block see: row i sees first + i * step of them.
struct Visible {
  int64_t first;
  int64_t step;

  int64_t keys(int64_t row, int64_t all) const {
    const int64_t n = first + row * step;
    return n < 0 ? 0 : n > all ? all : n;
  }
};

}  // namespace oneflow_accel
