// What attention does to rows and blocks between its matrix products.
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention/block_product.h"
#include "common/bfloat16.h"
#include "copy/transpose_tile.h"

namespace oneflow_accel {

ONEFLOW_ACCEL_INLINE Bfloat16 to_bfloat16(Bfloat16 x) { return x; }
ONEFLOW_ACCEL_INLINE Bfloat16 to_bfloat16(float x) { return from_float<Bfloat16>(x); }

// Two values as Panels of bfloat16 have them.
template <typename T>
ONEFLOW_ACCEL_INLINE float word_of(T low, T high) {
  return __builtin_bit_cast(
      float, to_bfloat16(low).bits | static_cast<uint32_t>(to_bfloat16(high).bits) << 16U);
}

// pack() where the panels are bfloat16.
template <typename T>
void pack_words(const T* x, int64_t stride, int64_t columns, const Panels& panels) {
  for (int64_t column = 0; column < panels.columns; column += kPanelWidth) {
    const int64_t width = panels.width(column);
    const int64_t filled = std::min(width, columns - column);
    for (int64_t j = 0; j < 2 * panels.stored_rows(); j += 2) {
      const T* low = x + j * stride + column;
      const T* high = low + stride;
      float* to = panels.at(j, column);
      int64_t d = 0;
      if (j + 1 < panels.rows) {
#pragma omp simd
        for (d = 0; d < filled; ++d) { to[d] = word_of(low[d], high[d]); }
        d = filled;
      } else if (j < panels.rows) {
        for (; d < filled; ++d) { to[d] = word_of(low[d], T{}); }
      }
      std::fill(to + d, to + width, 0.0F);
    }
  }
}

// pack_transposed() where the panels are bfloat16.
template <typename T>
void pack_transposed_words(const T* x, int64_t stride, int64_t columns, const Panels& panels) {
  const int64_t pairs = panels.rows / 2;
  for (int64_t column = 0; column < panels.columns; column += kPanelWidth) {
    const int64_t width = panels.width(column);
    const int64_t filled = std::min(width, columns - column);
    const T* from = x + column * stride;
    float* to = panels.at(0, column);
    std::fill_n(to, panels.stored_rows() * width, 0.0F);
    // Two values of a row are a word as they lie.
    if (sizeof(T) == 2 && stride % 2 == 0 && reinterpret_cast<uintptr_t>(x) % sizeof(float) == 0) {
      transpose_tile(reinterpret_cast<const float*>(from), stride / 2, to, width, filled, pairs);
    } else {
      for (int64_t j = 0; j < filled; ++j) {
        const T* row = from + j * stride;
        for (int64_t p = 0; p < pairs; ++p) {
          to[p * width + j] = word_of(row[2 * p], row[2 * p + 1]);
        }
      }
    }
    for (int64_t j = 0; panels.rows % 2 == 1 && j < filled; ++j) {
      to[pairs * width + j] = word_of(from[j * stride + panels.rows - 1], T{});
    }
  }
}

// panels[j, d] = x[j * stride + d] for j < panels.rows and d < columns; 0 in the padding.
template <typename T>
void pack(const T* x, int64_t stride, int64_t columns, const Panels& panels) {
  if (panels.bfloat16) { return pack_words(x, stride, columns, panels); }
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
  if (panels.bfloat16) { return pack_transposed_words(x, stride, columns, panels); }
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

// Whether no value is NaN or infinite: such a one times 0 is NaN.
template <typename T>
bool is_finite(const T* x, int64_t stride, int64_t rows, int64_t columns) {
  float sum = 0.0F;
  for (int64_t i = 0; i < rows; ++i) {
#pragma omp simd reduction(+ : sum)
    for (int64_t d = 0; d < columns; ++d) { sum += to_float(x[i * stride + d]) * 0.0F; }
  }
  return sum == 0.0F;
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
