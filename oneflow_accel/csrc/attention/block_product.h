// Products of small matrices that fit into a core's caches.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/threads.h"

namespace oneflow_accel {

// Floats in the widest SIMD register: matrices that vectors are read from or written to have rows
// of a multiple of it.
constexpr int64_t kVectorWidth = 16;
// Columns of a panel.
constexpr int64_t kPanelWidth = 64;

constexpr int64_t padded(int64_t columns) { return round_up(columns, kVectorWidth); }

// The right-hand side of a product: [rows, columns] cut into panels of kPanelWidth columns, each
// stored row by row, so that what a product reads is contiguous. `columns` is padded.
struct Panels {
  float* data;
  int64_t rows;
  int64_t columns;

  int64_t size() const { return rows * columns; }
  int64_t width(int64_t column) const { return std::min(kPanelWidth, columns - column); }
  // `column` is a multiple of kPanelWidth.
  float* at(int64_t row, int64_t column) const {
    return data + column * rows + row * width(column);
  }
};

// The left-hand side: element (i, k) is data[i * row_stride + k * column_stride].
struct Strided {
  const float* data;
  int64_t row_stride;
  int64_t column_stride;
};

// c[i, j] (+)= sum over k < depth of a[i, k] b[row + k, column + j], for i < rows and j < columns.
// Whole vectors of c are written: its rows have space for padded(columns) floats.
void block_product(int64_t rows, int64_t columns, int64_t depth, const Strided& a, const Panels& b,
                   int64_t row, int64_t column, float* c, int64_t c_stride, bool accumulate);

// The same for at most kPanelWidth columns of rows of b that lie b_stride floats apart. Whole vectors
// of b are read, too.
void panel_product(int64_t rows, int64_t columns, int64_t depth, const Strided& a, const float* b,
                   int64_t b_stride, float* c, int64_t c_stride, bool accumulate);

}  // namespace oneflow_accel
