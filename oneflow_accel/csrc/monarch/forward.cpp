#include <algorithm>

#include "matmul/few_rows.h"
#include "monarch/interleave.h"
#include "monarch/tiles.h"

namespace oneflow_accel {

namespace {

// Columns of y that are computed and then stored together. With kTileRows they fill a part of a
// second-level cache; a store should write whole cache lines of y.
constexpr int64_t kColumns = 384;

// Both factors, transposed, in panels: what products read of them is contiguous then.
struct PackedFactors {
  Panels a;
  Panels b;

  explicit PackedFactors(const MonarchShape& s)
      : a{nullptr, s.p, padded(s.q)}, b{nullptr, s.r, padded(s.s)} {
    const int64_t floats = s.k * a.size() + s.l * b.size();
    a.data = static_cast<float*>(scratch(ScratchSlot::kWeights, floats * sizeof(float)));
    b.data = a.data + s.k * a.size();
  }

  Panels a_block(int64_t block) const { return {a.data + block * a.size(), a.rows, a.columns}; }
  Panels b_block(int64_t j) const { return {b.data + j * b.size(), b.rows, b.columns}; }

  void fill(const MonarchShape& s, const MonarchInputs& in) const {
    const int64_t floats = std::max(a.size(), b.size());
    parallel_for(s.k + s.l, kGrainSize / floats + 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        if (i < s.k) {
          pack_transposed(in.a + i * s.q * s.p, s.p, s.q, a_block(i));
        } else {
          pack_transposed(in.b + (i - s.k) * s.s * s.r, s.r, s.s, b_block(i - s.k));
        }
      }
    });
  }
};

// What a tile of rows needs between its inputs and its outputs, row by row.
struct Workspace {
  // Values of i (see monarch.h) that are computed at a time: whole panels, or all.
  int64_t step;
  // u and v of a row. The products that make u write whole vectors.
  int64_t u_stride;
  float* u;
  float* v;
  // z[j, i] for all j and `step` values of i.
  int64_t z_stride;
  float* z;

  explicit Workspace(const MonarchShape& s)
      : step(std::min(padded(s.s), std::max(kColumns / s.l / kPanelWidth, int64_t{1}) * kPanelWidth)),
        u_stride(padded(s.middle() + kVectorWidth)),
        z_stride(s.l * step) {
    Carver carver(kTileRows * (u_stride + s.middle() + z_stride) + 3 * kVectorWidth);
    u = carver.take(kTileRows * u_stride);
    v = carver.take(kTileRows * s.middle());
    z = carver.take(kTileRows * z_stride);
  }
};

void tile_forward(const MonarchShape& s, const MonarchInputs& in, const PackedFactors& factors,
                  const float* bias, float* middle, float* y, const RowTile& tile) {
  const Workspace w(s);
  for (int64_t block = 0; block < s.k; ++block) {
    // In this order: what a product writes beyond its columns is the next one's.
    block_product(tile.count, s.q, s.width(block),
                  {in.x + tile.begin * s.in_features + block * s.p, s.in_features, 1},
                  factors.a_block(block), 0, 0, w.u + block * s.q, w.u_stride, false);
  }
  float* v = middle == nullptr ? w.v : middle + tile.begin * s.middle();
  deinterleave({w.u, w.u_stride, v, s.middle(), tile.count}, s.r, s.l);
  for (int64_t first = 0; first * s.l < s.out_features; first += w.step) {
    const int64_t count = std::min(w.step, s.s - first);
    for (int64_t j = 0; j < s.l; ++j) {
      block_product(tile.count, count, s.r, {v + j * s.r, s.middle(), 1}, factors.b_block(j), 0,
                    first, w.z + j * w.step, w.z_stride, false);
    }
    const int64_t column = first * s.l;
    interleave({w.z, w.z_stride, y + tile.begin * s.out_features + column, s.out_features,
                tile.count},
               w.step, s.l, std::min(count * s.l, s.out_features - column),
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
  const PackedFactors factors(shape);
  factors.fill(shape, in);
  for_each_tile(shape.rows, shape.factors(), [&](const RowTile& tile) {
    tile_forward(shape, in, factors, bias, middle, y, tile);
  });
}

}  // namespace oneflow_accel
