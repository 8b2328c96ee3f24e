// Products of small matrices that fit into a core's caches.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "common/bfloat16.h"
#include "common/scratch.h"
#include "common/threads.h"
#include "common/vector.h"

namespace oneflow_accel {

// Floats in the widest SIMD register: matrices that vectors are read from or written to have rows
// of a multiple of it.
constexpr int64_t kVectorWidth = 16;
constexpr int64_t kPanelWidth = 64;

constexpr int64_t padded(int64_t columns) { return round_up(columns, kVectorWidth); }

// Values of bfloat16 in a row of a tile of AMX (tile_product.cpp).
constexpr int64_t kTileDepth = 32;

// The right-hand side of a product: [rows, columns] cut into panels of kPanelWidth columns, each
// stored row by row, so that what a product reads is contiguous. `columns` is padded.
//
// With `bfloat16`, whose products are those of tiles, a word of 32 bits has the values of two rows,
// the first of them in its lower half, and rows of zeros follow up to a multiple of kTileDepth.
struct Panels {
  float* data;
  int64_t rows;
  int64_t columns;
  bool bfloat16 = false;

  // Rows of words.
  int64_t stored_rows() const { return bfloat16 ? round_up(rows, kTileDepth) / 2 : rows; }
  int64_t size() const { return stored_rows() * columns; }
  int64_t width(int64_t column) const { return std::min(kPanelWidth, columns - column); }
  // `column` is a multiple of kPanelWidth, and `row` of 2 in bfloat16.
  float* at(int64_t row, int64_t column) const {
    return data + column * stored_rows() + (bfloat16 ? row / 2 : row) * width(column);
  }
};

// Whether this processor multiplies bfloat16, or a test asks for the same without.
bool has_tiles();

// Whether products of values of type T are those of tile_product().
template <typename T>
bool by_tiles() {
  return std::is_same_v<T, Bfloat16> && has_tiles();
}

// The left-hand side: element (i, k) is data[i * row_stride + k * column_stride].
struct Strided {
  const Aliased<float>* data;
  int64_t row_stride;
  int64_t column_stride;
};

// c[i, j] (+)= sum over k < depth of a[i, k] b[row + k, column + j], for i < rows and j < columns.
// Whole vectors of c are written: its rows have space for padded(columns) floats. Where b is
// bfloat16, a is rounded to it, and sums are float32. `column` is a multiple of kPanelWidth.
void block_product(int64_t rows, int64_t columns, int64_t depth, const Strided& a, const Panels& b,
                   int64_t row, int64_t column, float* c, int64_t c_stride, bool accumulate);

// The same where b is bfloat16. One of a's strides is 1.
void tile_product(int64_t rows, int64_t columns, int64_t depth, const Strided& a, const Panels& b,
                  int64_t row, int64_t column, float* c, int64_t c_stride, bool accumulate);

// The same for at most kPanelWidth columns of rows of b that lie b_stride floats apart. Whole vectors
// of b are read, too. With `pairs`, depth, a and b are of words of two values of bfloat16 each.
void panel_product(int64_t rows, int64_t columns, int64_t depth, const Strided& a, const float* b,
                   int64_t b_stride, float* c, int64_t c_stride, bool accumulate,
                   bool pairs = false);

// One scratch buffer, handed out in parts. Parts are aligned to a vector; `floats` has to hold
// kVectorWidth more for each part. Uses the calling thread's ScratchSlot::kSource.
class Carver {
 public:
  explicit Carver(int64_t floats) : base_(scratch<float>(ScratchSlot::kSource, floats)) {}

  // Calls lay_out(carver), which takes all parts, twice: to see how much they are, and with a
  // buffer of this size.
  template <typename LayOut>
  static void carve(const LayOut& lay_out) {
    Carver counting;
    lay_out(&counting);
    Carver carver(counting.taken_);
    lay_out(&carver);
  }

  float* take(int64_t floats) {
    float* part = base_ == nullptr ? nullptr : base_ + taken_;
    taken_ += padded(floats);
    return part;
  }
  Panels take_panels(int64_t rows, int64_t columns, bool bfloat16 = false) {
    Panels panels{nullptr, rows, columns, bfloat16};
    panels.data = take(panels.size());
    return panels;
  }

 private:
  Carver() = default;

  float* base_ = nullptr;
  int64_t taken_ = 0;
};

}  // namespace oneflow_accel
