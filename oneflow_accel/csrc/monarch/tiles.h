// Tiles of rows, and what products need of them.
#pragma once

#include <utility>
#include <vector>

#include "attention/block_product.h"
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

// The blocks of both factors in panels: what products read of them is contiguous then. `transposed`
// as right-hand sides of products with x and v, else with their gradients.
inline std::vector<Panels> packed_factors(const MonarchShape& s, const MonarchInputs& in,
                                          bool transposed) {
  const auto sides = [&](int64_t i) {
    return i < s.k ? std::pair(s.q, s.p) : std::pair(s.s, s.r);
  };
  std::vector<Panels> blocks;
  int64_t floats = 0;
  for (int64_t i = 0; i < s.k + s.l; ++i) {
    const auto [outer, inner] = sides(i);
    blocks.push_back({nullptr, transposed ? inner : outer, padded(transposed ? outer : inner),
                      in.tiles});
    floats += blocks.back().size();
  }
  auto* data = scratch<float>(ScratchSlot::kWeights, floats);
  for (Panels& block : blocks) {
    block.data = data;
    data += block.size();
  }
  for_each_block(s.k + s.l, s.factors() / (s.k + s.l), [&](int64_t i) {
    const float* factor = i < s.k ? in.a + i * s.q * s.p : in.b + (i - s.k) * s.s * s.r;
    const auto [outer, inner] = sides(i);
    if (transposed) {
      pack_transposed(factor, inner, outer, blocks[i]);
    } else {
      pack(factor, inner, inner, blocks[i]);
    }
  });
  return blocks;
}

}  // namespace oneflow_accel
