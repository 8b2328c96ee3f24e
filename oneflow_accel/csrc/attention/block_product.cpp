#include "attention/block_product.h"

#include "common/vector.h"

namespace oneflow_accel {

namespace {

// Rows and vectors of a tile of c: its sums, a row of b and an element of a fill the registers.
constexpr int kRows = 6;
constexpr int kTileVectors = kRegisters / 8;

// sum + a b; of words of two values of bfloat16 each, both products (AVX-512 BF16).
template <bool pairs>
ONEFLOW_ACCEL_INLINE void add_product(Vector<kFloats>& sum, float a, const Vector<kFloats>& b) {
  if constexpr (pairs) {
    // The sum of a float and zeros might have other bits.
    using Words __attribute__((vector_size(4 * kFloats))) = int32_t;
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(b), "v"(Words{} + __builtin_bit_cast(int32_t, a)));
  } else {
    sum += a * b;
  }
}

// What one tile of c is made from.
struct Tile {
  const Aliased<float>* a;
  int64_t a_row;
  int64_t a_column;
  const float* b;
  int64_t b_stride;
  int64_t depth;
  float* c;
  int64_t c_stride;
  bool accumulate;
};

template <bool pairs, int rows, int vectors>
ONEFLOW_ACCEL_INLINE void multiply(const Tile& t) {
  Vector<kFloats> sums[rows][vectors];
#pragma GCC unroll 8
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) {
      sums[i][v] = t.accumulate ? *vector_at<kFloats>(t.c + i * t.c_stride, v) : Vector<kFloats>{};
    }
  }
  const Aliased<float>* a = t.a;
  const float* b = t.b;
  for (int64_t k = 0; k < t.depth; ++k) {
    Vector<kFloats> right[vectors];
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) { right[v] = *vector_at<kFloats>(b, v); }
#pragma GCC unroll 8
    for (int i = 0; i < rows; ++i) {
      const float left = a[i * t.a_row];
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) { add_product<pairs>(sums[i][v], left, right[v]); }
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

// As many of kRows rows, and of kTileVectors vectors, as there are.
template <bool pairs, int rows = kRows, int vectors = kTileVectors>
void multiply_part(const Tile& tile, int64_t rows_left, int64_t columns_left) {
  if constexpr (rows > 1 && vectors == kTileVectors) {
    if (rows_left < rows) { return multiply_part<pairs, rows - 1>(tile, rows_left, columns_left); }
  }
  if constexpr (vectors > 1) {
    if (columns_left < vectors * kFloats) {
      return multiply_part<pairs, rows, vectors - 1>(tile, rows_left, columns_left);
    }
  }
  multiply<pairs, rows, vectors>(tile);
}

}  // namespace

void panel_product(int64_t rows, int64_t columns, int64_t depth, const Strided& a, const float* b,
                   int64_t b_stride, float* c, int64_t c_stride, bool accumulate, bool pairs) {
  const auto multiply = pairs ? multiply_part<true> : multiply_part<false>;
  for (int64_t i = 0; i < rows; i += kRows) {
    for (int64_t j = 0; j < padded(columns); j += kTileVectors * kFloats) {
      multiply({a.data + i * a.row_stride, a.row_stride, a.column_stride, b + j, b_stride, depth,
                c + i * c_stride + j, c_stride, accumulate},
               rows - i, padded(columns) - j);
    }
  }
}

void block_product(int64_t rows, int64_t columns, int64_t depth, const Strided& a, const Panels& b,
                   int64_t row, int64_t column, float* c, int64_t c_stride, bool accumulate) {
  if (b.bfloat16) {
    return tile_product(rows, columns, depth, a, b, row, column, c, c_stride, accumulate);
  }
  for (int64_t j = 0; j < columns; j += kPanelWidth) {
    panel_product(rows, std::min(kPanelWidth, columns - j), depth, a, b.at(row, column + j),
                  b.width(column + j), c + j, c_stride, accumulate);
  }
}

}  // namespace oneflow_accel
