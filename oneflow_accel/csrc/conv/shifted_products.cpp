#include "conv/shifted_products.h"

#include "attention/block_product.h"
#include "common/vector.h"

namespace oneflow_accel {

namespace {

// Rows that are computed at a time. With the vectors or columns that are taken, their sums, and what
// they are made from, fill the registers.
constexpr int64_t kProductRows = 6;
constexpr int64_t kDotRows = 4;

// Rows cut into parts of at most `most`, of one size or nearly.
struct Parts {
  int64_t rows;
  int64_t count;

  ONEFLOW_ACCEL_INLINE Parts(int64_t rows, int64_t most)
      : rows(rows), count((rows + most - 1) / most) {}
  ONEFLOW_ACCEL_INLINE int64_t begin(int64_t part) const { return rows * part / count; }
};

template <int floats, int rows, int vectors>
ONEFLOW_ACCEL_INLINE void multiply(const ShiftedProduct& p, int64_t row, int64_t column) {
  Vector<floats> sums[rows][vectors] = {};
  const float* a = p.a + row * p.depth;
  const float* x = p.x + column;
  for (int64_t k = 0; k < p.depth; ++k) {
    Vector<floats> right[vectors];
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) { right[v] = *vector_at<floats>(x + p.offsets[k], v); }
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
    for (int v = 0; v < vectors; ++v) { *vector_at<floats>(to + i * p.sums_row, v) = sums[i][v]; }
  }
}

template <int floats, int vectors>
ONEFLOW_ACCEL_INLINE void multiply_rows(const ShiftedProduct& p, int64_t column) {
  const Parts parts(p.rows, kProductRows);
  for (int64_t part = 0; part < parts.count; ++part) {
    const int64_t row = parts.begin(part);
    switch (parts.begin(part + 1) - row) {
      case 1: multiply<floats, 1, vectors>(p, row, column); break;
      case 2: multiply<floats, 2, vectors>(p, row, column); break;
      case 3: multiply<floats, 3, vectors>(p, row, column); break;
      case 4: multiply<floats, 4, vectors>(p, row, column); break;
      case 5: multiply<floats, 5, vectors>(p, row, column); break;
      default: multiply<floats, 6, vectors>(p, row, column); break;
    }
  }
}

template <int floats, int vectors>
ONEFLOW_ACCEL_INLINE void multiply_all(const ShiftedProduct& p) {
  const int64_t length = padded(p.length);
  int64_t column = 0;
  for (; column + floats * vectors <= length; column += floats * vectors) {
    multiply_rows<floats, vectors>(p, column);
  }
  for (; column < length; column += floats) { multiply_rows<floats, 1>(p, column); }
}

template <int floats, int rows, int columns>
ONEFLOW_ACCEL_INLINE void dots(const ShiftedDots& s, int64_t row, int64_t column) {
  Vector<floats> sums[rows][columns];
  float* at = s.sums + (row * s.depth + column) * kVectorWidth;
#pragma GCC unroll 8
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 8
    for (int k = 0; k < columns; ++k) {
      sums[i][k] = *vector_at<floats>(at + (i * s.depth + k) * kVectorWidth, 0);
    }
  }
  const float* d = s.d + row * s.d_row;
  const float* x[columns];
#pragma GCC unroll 8
  for (int k = 0; k < columns; ++k) { x[k] = s.x + s.offsets[column + k]; }
  for (int64_t j = 0; j < s.length; j += floats) {
    Vector<floats> left[rows];
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i) { left[i] = *vector_at<floats>(d + i * s.d_row + j, 0); }
#pragma GCC unroll 8
    for (int k = 0; k < columns; ++k) {
      const Vector<floats> right = *vector_at<floats>(x[k] + j, 0);
#pragma GCC unroll 8
      for (int i = 0; i < rows; ++i) { sums[i][k] += left[i] * right; }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 8
    for (int k = 0; k < columns; ++k) {
      *vector_at<floats>(at + (i * s.depth + k) * kVectorWidth, 0) = sums[i][k];
    }
  }
}

template <int floats, int columns>
ONEFLOW_ACCEL_INLINE void all_dots(const ShiftedDots& s) {
  static_assert(kShiftedDots % columns == 0);
  const Parts parts(s.rows, kDotRows);
  for (int64_t part = 0; part < parts.count; ++part) {
    const int64_t row = parts.begin(part);
    const int64_t count = parts.begin(part + 1) - row;
    for (int64_t column = 0; column < s.depth; column += columns) {
      switch (count) {
        case 1: dots<floats, 1, columns>(s, row, column); break;
        case 2: dots<floats, 2, columns>(s, row, column); break;
        case 3: dots<floats, 3, columns>(s, row, column); break;
        default: dots<floats, 4, columns>(s, row, column); break;
      }
    }
  }
}

}  // namespace

void shifted_product(const ShiftedProduct& product) {
  multiply_all<kFloats, kRegisters / 8>(product);
}

void shifted_dots(const ShiftedDots& dots) {
  all_dots<kFloats, kRegisters == 32 ? 6 : 2>(dots);
}

}  // namespace oneflow_accel
