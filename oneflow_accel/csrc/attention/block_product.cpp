#include "attention/block_product.h"

#include "common/vector.h"

namespace oneflow_accel {

namespace {

// Rows and vectors of a tile of c: its sums, a row of b and an element of a fill the registers.
constexpr int kRows = 6;
constexpr int kTileVectors = kRegisters / 8;

// What one tile of c is made from.
struct Tile {
  const float* a;
  int64_t a_row;
  int64_t a_column;
  const float* b;
  int64_t b_stride;
  int64_t depth;
  float* c;
  int64_t c_stride;
  bool accumulate;
};

template <int rows, int vectors>
ONEFLOW_ACCEL_INLINE void multiply(const Tile& t) {
  Vector<kFloats> sums[rows][vectors];
#pragma GCC unroll 8
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) {
      sums[i][v] = t.accumulate ? *vector_at<kFloats>(t.c + i * t.c_stride, v) : Vector<kFloats>{};
    }
  }
  const float* a = t.a;
  const float* b = t.b;
  for (int64_t k = 0; k < t.depth; ++k) {
    Vector<kFloats> right[vectors];
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) { right[v] = *vector_at<kFloats>(b, v); }
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i) {
      const float left = a[i * t.a_row];
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) { sums[i][v] += left * right[v]; }
    }
    a += t.a_column;
    b += t.b_stride;
  }
#pragma GCC unroll 8
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) { *vector_at<kFloats>(t.c + i * t.c_stride, v) = sums[i][v]; }
  }
}

// As many of kRows rows as there are.
template <int vectors, int rows = kRows>
ONEFLOW_ACCEL_INLINE void multiply_rows(const Tile& tile, int64_t count) {
  if constexpr (rows > 1) {
    if (count < rows) { return multiply_rows<vectors, rows - 1>(tile, count); }
  }
  multiply<rows, vectors>(tile);
}

// As many of kTileVectors vectors as there are of the columns from `column` on.
template <int vectors = kTileVectors>
ONEFLOW_ACCEL_INLINE void multiply_columns(Tile tile, int64_t rows, int64_t column,
                                           int64_t columns) {
  if constexpr (vectors > 1) {
    if (columns - column < vectors * kFloats) {
      return multiply_columns<vectors - 1>(tile, rows, column, columns);
    }
  }
  tile.b += column;
  tile.c += column;
  multiply_rows<vectors>(tile, rows);
}

}  // namespace

void panel_product(int64_t rows, int64_t columns, int64_t depth, const Strided& a, const float* b,
                   int64_t b_stride, float* c, int64_t c_stride, bool accumulate) {
  Tile tile{a.data, a.row_stride, a.column_stride, b, b_stride, depth, c, c_stride, accumulate};
  for (int64_t i = 0; i < rows; i += kRows) {
    for (int64_t j = 0; j < padded(columns); j += kTileVectors * kFloats) {
      multiply_columns(tile, rows - i, j, padded(columns));
    }
    tile.a += kRows * tile.a_row;
    tile.c += kRows * tile.c_stride;
  }
}

void block_product(int64_t rows, int64_t columns, int64_t depth, const Strided& a, const Panels& b,
                   int64_t row, int64_t column, float* c, int64_t c_stride, bool accumulate) {
  for (int64_t j = 0; j < columns; j += kPanelWidth) {
    panel_product(rows, std::min(kPanelWidth, columns - j), depth, a, b.at(row, column + j),
                  b.width(column + j), c + j, c_stride, accumulate);
  }
}

}  // namespace oneflow_accel
