// Products of a small matrix with the rows of a plane, read from several places of it: the inner
// loops of convolutions whose channels are planes.
#pragma once

#include <type_traits>

#include "attention/block_product.h"
#include "common/threads.h"
#include "common/vector.h"

namespace oneflow_accel {

// Calls fn(n) with n, which is from 1 to `most`, as a constant.
template <int most, typename Fn>
ONEFLOW_ACCEL_INLINE void with_constant(int64_t n, const Fn& fn) {
  if constexpr (most > 1) {
    if (n < most) { return with_constant<most - 1>(n, fn); }
  }
  fn(std::integral_constant<int, most>());
}

// Cuts `n` rows into parts of at most `most`, of one size or nearly, and calls fn(first row, rows)
// with the constant number of rows of each.
template <int most, typename Fn>
ONEFLOW_ACCEL_INLINE void for_parts_of_rows(int64_t n, const Fn& fn) {
  const int64_t parts = ceil_div(n, most);
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t row = n * part / parts;
    with_constant<most>(n * (part + 1) / parts - row, [&](auto rows) { fn(row, rows); });
  }
}

// sums[i * sums_row + j] = sum over k < depth of a[i * depth + k] x[offsets[k] + j], for i < rows
// and j < length. Whole vectors of x are read and of sums written: up to padded(length).
struct ShiftedProduct {
  const float* a;
  int64_t rows;
  int64_t depth;
  const float* x;
  const int64_t* offsets;
  int64_t length;
  float* sums;
  int64_t sums_row;
};

template <int rows, int vectors>
ONEFLOW_ACCEL_INLINE void shifted_block(const ShiftedProduct& p, int64_t row, int64_t column) {
  Vector<kFloats> sums[rows][vectors] = {};
  const float* a = p.a + row * p.depth;
  const float* x = p.x + column;
  for (int64_t k = 0; k < p.depth; ++k) {
    Vector<kFloats> right[vectors];
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) { right[v] = *vector_at<kFloats>(x + p.offsets[k], v); }
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i) {
      const float left = a[i * p.depth + k];
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) { sums[i][v] += left * right[v]; }
    }
  }
  float* to = p.sums + row * p.sums_row + column;
#pragma GCC unroll 8
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) { *vector_at<kFloats>(to + i * p.sums_row, v) = sums[i][v]; }
  }
}

// Six rows at a time: with the vectors that are read and their sums they fill the registers.
template <int vectors>
ONEFLOW_ACCEL_INLINE void shifted_rows(const ShiftedProduct& p, int64_t column) {
  for_parts_of_rows<6>(p.rows, [&](int64_t row, auto rows) {
    shifted_block<rows, vectors>(p, row, column);
  });
}

inline void shifted_product(const ShiftedProduct& p) {
  constexpr int kVectors = kRegisters / 8;
  const int64_t length = padded(p.length);
  int64_t column = 0;
  for (; column + kFloats * kVectors <= length; column += kFloats * kVectors) {
    shifted_rows<kVectors>(p, column);
  }
  for (; column < length; column += kFloats) { shifted_rows<1>(p, column); }
}

// Sums over j < length of d[i * d_row + j] x[offsets[k] + j] for i < rows and k < depth, added to
// the sum of the kVectorWidth floats at sums + (i * depth + k) * kVectorWidth. `depth` is a
// multiple of kShiftedDots, and whole vectors of d and x are read.
struct ShiftedDots {
  const float* d;
  int64_t rows;
  int64_t d_row;
  const float* x;
  const int64_t* offsets;
  int64_t depth;
  int64_t length;
  float* sums;
};
constexpr int64_t kShiftedDots = 6;

template <int rows, int columns>
ONEFLOW_ACCEL_INLINE void dots_block(const ShiftedDots& s, int64_t row, int64_t column) {
  Vector<kFloats> sums[rows][columns] = {};
  const float* d = s.d + row * s.d_row;
  const float* x[columns];
#pragma GCC unroll 8
  for (int k = 0; k < columns; ++k) { x[k] = s.x + s.offsets[column + k]; }
  for (int64_t j = 0; j < s.length; j += kFloats) {
    Vector<kFloats> left[rows];
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i) { left[i] = *vector_at<kFloats>(d + i * s.d_row + j, 0); }
#pragma GCC unroll 8
    for (int k = 0; k < columns; ++k) {
      const Vector<kFloats> right = *vector_at<kFloats>(x[k] + j, 0);
#pragma GCC unroll 8
      for (int i = 0; i < rows; ++i) { sums[i][k] += left[i] * right; }
    }
  }
  float* to = s.sums + (row * s.depth + column) * kVectorWidth;
#pragma GCC unroll 8
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 8
    for (int k = 0; k < columns; ++k) {
      *vector_at<kFloats>(to + (i * s.depth + k) * kVectorWidth, 0) += sums[i][k];
    }
  }
}

// Four rows at a time, as above.
inline void shifted_dots(const ShiftedDots& s) {
  constexpr int kColumns = kRegisters == 32 ? 6 : 2;
  static_assert(kShiftedDots % kColumns == 0);
  for_parts_of_rows<4>(s.rows, [&](int64_t row, auto rows) {
    for (int64_t column = 0; column < s.depth; column += kColumns) {
      dots_block<rows, kColumns>(s, row, column);
    }
  });
}

}  // namespace oneflow_accel
