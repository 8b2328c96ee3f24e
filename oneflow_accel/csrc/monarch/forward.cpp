#include <algorithm>
#include <vector>

#include "matmul/product.h"
#include "monarch/interleave.h"
#include "monarch/tiles.h"

namespace oneflow_accel {

namespace {

// Columns of y that are computed and then stored together. With kTileRows they fill a part of a
// second-level cache; a store should write whole cache lines of y.
constexpr int64_t kColumns = 384;

void tile_forward(const MonarchShape& s, const MonarchInputs& in,
                  const std::vector<Panels>& factors, const float* bias, float* middle, float* y,
                  int64_t begin, int64_t rows) {
  // Values of i (see monarch.h) that are computed at a time: whole panels, or all.
  const int64_t step =
      std::min(padded(s.s), std::max(kColumns / s.l / kPanelWidth, int64_t{1}) * kPanelWidth);
  // Rows of u, the products of which write whole vectors, and of z[j, i] for all j and `step`
  // values of i.
  const int64_t u_stride = padded(s.middle() + kVectorWidth);
  const int64_t z_stride = s.l * step;
  Carver carver(kTileRows * (u_stride + s.middle() + z_stride) + 3 * kVectorWidth);
  float* u = carver.take(kTileRows * u_stride);
  float* z = carver.take(kTileRows * z_stride);
  float* v = middle == nullptr ? carver.take(kTileRows * s.middle())
                               : middle + begin * s.middle();
  for (int64_t block = 0; block < s.k; ++block) {
    // In this order: what a product writes beyond its columns is the next one's.
    block_product(rows, s.q, s.width(block),
                  {in.x + begin * s.in_features + block * s.p, s.in_features, 1},
                  factors[block], 0, 0, u + block * s.q, u_stride, false);
  }
  deinterleave({u, u_stride, v, s.middle(), rows}, s.r, s.l);
  for (int64_t first = 0; first * s.l < s.out_features; first += step) {
    const int64_t count = std::min(step, s.s - first);
    for (int64_t j = 0; j < s.l; ++j) {
      block_product(rows, count, s.r, {v + j * s.r, s.middle(), 1}, factors[s.k + j], 0,
                    first, z + j * step, z_stride, false);
    }
    const int64_t column = first * s.l;
    interleave({z, z_stride, y + begin * s.out_features + column, s.out_features, rows},
               step, s.l, std::min(count * s.l, s.out_features - column),
               bias == nullptr ? nullptr : bias + column);
  }
}

}  // namespace

std::string MonarchShape::describe() const {
  const auto factor = [](int64_t blocks, int64_t outer, int64_t inner) {
    return std::to_string(blocks) + " blocks of " + std::to_string(outer) + " x "
           + std::to_string(inner);
  };
  return "Monarch product of " + std::to_string(rows) + " x " + std::to_string(in_features)
         + " with " + factor(k, q, p) + " and " + factor(l, s, r) + " to "
         + std::to_string(out_features) + " columns";
}

void monarch(const MonarchShape& shape, const MonarchInputs& in, const float* bias, float* middle,
             float* y) {
  if (shape.rows <= kMostFewRows) { return monarch_few_rows(shape, in, bias, middle, y); }
  const std::vector<Panels> factors = packed_factors(shape, in, true);
  for_each_tile(shape.rows, shape.factors(), [&](int64_t begin, int64_t rows) {
    tile_forward(shape, in, factors, bias, middle, y, begin, rows);
  });
}

}  // namespace oneflow_accel
