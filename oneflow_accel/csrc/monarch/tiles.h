// Tiles of rows, and what products need of them.
#pragma once

#include "attention/buffer.h"
#include "attention/rows.h"
#include "common/threads.h"
#include "monarch/monarch.h"

namespace oneflow_accel {

// Rows that a thread works on at a time. With more, factors would be read less often; with less, a
// smaller cache would do.
constexpr int64_t kTileRows = 128;

// Rows that a product computes at a time; tiles begin at multiples of two such groups.
constexpr int64_t kProductRows = 6;

// Calls fn(begin, count) for tiles, of at most kTileRows rows, that cover the rows [0, rows), in
// parallel; `work` is what a row costs.
template <typename Fn>
void for_each_tile(int64_t rows, int64_t work, const Fn& fn) {
  constexpr int64_t kGroup = 2 * kProductRows;
  constexpr int64_t kTileGroups = kTileRows / kGroup;
  const int64_t groups = ceil_div(rows, kGroup);
  parallel_for(groups, grain_of(kGroup * work), [&](int64_t first, int64_t last) {
    // Of one size, or nearly: a last tile of a few rows would read the factors for little.
    const int64_t tiles = ceil_div(last - first, kTileGroups);
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t begin = (first + (last - first) * i / tiles) * kGroup;
      const int64_t end = (first + (last - first) * (i + 1) / tiles) * kGroup;
      fn(begin, std::min(end, rows) - begin);
    }
  });
}

// Values u[block, i], u[block, i + i_step]... that are v[j, first], v[j + j_step, first + step]...
struct Run {
  int64_t i;
  int64_t i_step;
  int64_t j;
  int64_t j_step;
  int64_t first;
  int64_t step;
  int64_t count;
};

// Calls fn(run) for runs that are all of u[block]: there are two ways to cut it, of which the one
// with the longer runs is taken.
template <typename Fn>
void for_each_run(const MonarchShape& s, int64_t block, const Fn& fn) {
  if (s.q >= s.l * s.l) {
    for (int64_t i = 0; i < s.l; ++i) {
      const int64_t slot = block * s.q + i;
      fn(Run{i, s.l, slot % s.l, 0, slot / s.l, 1, ceil_div(s.q - i, s.l)});
    }
  } else {
    for (int64_t i = 0; i < s.q;) {
      const int64_t slot = block * s.q + i;
      const int64_t count = std::min(s.q - i, s.l - slot % s.l);
      fn(Run{i, 1, slot % s.l, 1, slot / s.l, 0, count});
      i += count;
    }
  }
}

// A right-hand side of a product, `columns` of it from the given one on: as it lies, or where that
// will not do, copied to `space` for depth x padded(columns) floats.
struct Right {
  const float* data;
  int64_t stride;

  Right(const float* x, int64_t x_stride, int64_t depth, int64_t columns, float* space)
      : data(x), stride(x_stride) {
    // Whole vectors are read. Rows that are a multiple of 1 KiB apart share a few sets of a cache.
    if (columns % kVectorWidth == 0 && x_stride % 256 != 0) { return; }
    pack(x, x_stride, columns, {space, depth, padded(columns)});
    data = space;
    stride = padded(columns);
  }
};

// Rows of a product's left-hand side to take at a time where they cost `each` and `most` is to
// spend: whole tiles of the product, if there is room for one.
inline int64_t rows_at_once(int64_t most, int64_t each) {
  const int64_t rows = std::max<int64_t>(1, most / each);
  return rows < kProductRows ? rows : rows / kProductRows * kProductRows;
}

}  // namespace oneflow_accel
