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

template <int floats, int rows, int vectors>
ONEFLOW_ACCEL_INLINE void multiply(const Tile& t) {
  Vector<floats> sums[rows][vectors];
#pragma GCC unroll 8
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) {
      sums[i][v] = t.accumulate ? *vector_at<floats>(t.c + i * t.c_stride, v) : Vector<floats>{};
    }
  }
  const float* a = t.a;
  const float* b = t.b;
  for (int64_t k = 0; k < t.depth; ++k) {
    Vector<floats> right[vectors];
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) { right[v] = *vector_at<floats>(b, v); }
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
    for (int v = 0; v < vectors; ++v) { *vector_at<floats>(t.c + i * t.c_stride, v) = sums[i][v]; }
  }
}

template <int floats, int vectors>
ONEFLOW_ACCEL_INLINE void multiply_rows(const Tile& tile, int64_t rows) {
  switch (rows) {
    case 1: return multiply<floats, 1, vectors>(tile);
    case 2: return multiply<floats, 2, vectors>(tile);
    case 3: return multiply<floats, 3, vectors>(tile);
    case 4: return multiply<floats, 4, vectors>(tile);
    case 5: return multiply<floats, 5, vectors>(tile);
    default: return multiply<floats, kRows, vectors>(tile);
  }
}

// `vectors` of vectors of the columns from `column` on.
template <int floats, int vectors>
ONEFLOW_ACCEL_INLINE void multiply_columns(Tile tile, int64_t rows, int64_t column) {
  tile.b += column;
  tile.c += column;
  multiply_rows<floats, vectors>(tile, rows);
}

// All rows of c, for `columns` columns of one panel, a multiple of kVectorWidth.
template <int floats, int vectors>
ONEFLOW_ACCEL_INLINE void multiply_panel(Tile tile, int64_t rows, int64_t columns) {
  constexpr int kColumns = floats * vectors;
  for (int64_t i = 0; i < rows; i += kRows) {
    int64_t j = 0;
    for (; j + kColumns <= columns; j += kColumns) {
      multiply_columns<floats, vectors>(tile, rows - i, j);
    }
    if constexpr (kColumns > kVectorWidth) {
      switch ((columns - j) / floats) {
        case 1: multiply_columns<floats, 1>(tile, rows - i, j); break;
        case 2: multiply_columns<floats, 2>(tile, rows - i, j); break;
        case 3: multiply_columns<floats, 3>(tile, rows - i, j); break;
        default: break;
      }
    }
    tile.a += kRows * tile.a_row;
    tile.c += kRows * tile.c_stride;
  }
}

}  // namespace

void panel_product(int64_t rows, int64_t columns, int64_t depth, const Strided& a, const float* b,
                   int64_t b_stride, float* c, int64_t c_stride, bool accumulate) {
  const Tile tile{a.data, a.row_stride, a.column_stride, b,         b_stride,
                  depth,  c,            c_stride,        accumulate};
  multiply_panel<kFloats, kTileVectors>(tile, rows, padded(columns));
}

void block_product(int64_t rows, int64_t columns, int64_t depth, const Strided& a, const Panels& b,
                   int64_t row, int64_t column, float* c, int64_t c_stride, bool accumulate) {
  for (int64_t j = 0; j < columns; j += kPanelWidth) {
    panel_product(rows, std::min(kPanelWidth, columns - j), depth, a, b.at(row, column + j),
                  b.width(column + j), c + j, c_stride, accumulate);
  }
}

}  // namespace oneflow_accel
