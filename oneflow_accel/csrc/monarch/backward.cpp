#include <algorithm>

#include "monarch/factor_grads.h"
#include "monarch/tiles.h"

namespace oneflow_accel {

namespace {

// Values of i (see monarch.h) that products with the second factor sum over at a time: their
// right-hand sides stay in the first-level cache, or nearly.
constexpr int64_t kGradDepth = 192;

// Rows that are worked on before the next ones: the gradient of v is kept for so many.
constexpr int64_t kMostRowsAtOnce = 1024;

// dv[j] = sum over i of dz[j, i] B[j, i].
void middle_grads(const MonarchShape& s, const float* b, const float* y_grad, const RowTile& tile,
                  const MiddleGrads& dv, float* space) {
  for (int64_t first = 0; first < s.s; first += kGradDepth) {
    for (int64_t j = 0; j < s.l; ++j) {
      // Results that were cut off have no gradient.
      const int64_t depth = std::clamp<int64_t>(s.results(j) - first, 0, kGradDepth);
      const Strided rows{y_grad + (dv.begin + tile.begin) * s.out_features + first * s.l + j,
                         s.out_features, s.l};
      for (int64_t column = 0; column < s.r; column += kPanelWidth) {
        const int64_t columns = std::min(kPanelWidth, s.r - column);
        const Right right(b + (j * s.s + first) * s.r + column, s.r, depth, columns, space);
        panel_product(tile.count, columns, depth, rows, right.data, right.stride,
                      dv.at(j, tile.begin) + column, dv.stride, first > 0);
      }
    }
  }
}

// dx[block] = sum over i of du[block, i] A[block, i].
void input_grads(const MonarchShape& s, const float* a, const MiddleGrads& dv, const RowTile& tile,
                 float* x_grad, float* space, float* out_space) {
  for (int64_t block = 0; block < s.k; ++block) {
    const int64_t width = s.width(block);
    for (int64_t column = 0; column < width; column += kPanelWidth) {
      const int64_t columns = std::min(kPanelWidth, width - column);
      float* to = x_grad + (dv.begin + tile.begin) * s.in_features + block * s.p + column;
      // Products write whole vectors.
      const bool whole = columns % kVectorWidth == 0;
      bool accumulate = false;
      for_each_run(s, block, [&](const Run& run) {
        const Right right(a + (block * s.q + run.i) * s.p + column, run.i_step * s.p, run.count,
                          columns, space);
        panel_product(tile.count, columns, run.count, dv.values_by_row(run, tile.begin), right.data,
                      right.stride, whole ? to : out_space,
                      whole ? s.in_features : padded(columns), accumulate);
        accumulate = true;
      });
      for (int64_t i = 0; !whole && i < tile.count; ++i) {
        std::copy_n(out_space + i * padded(columns), columns, to + i * s.in_features);
      }
    }
  }
}

}  // namespace

void monarch_grad(const MonarchShape& s, const MonarchInputs& in, const float* middle,
                  const float* y_grad, const MonarchGrads& out) {
  if (s.rows == 0) {
    std::fill_n(out.a, s.k * s.q * s.p, 0.0F);
    std::fill_n(out.b, s.l * s.s * s.r, 0.0F);
    std::fill_n(out.bias, s.out_features, 0.0F);
  }
  // Of one size, or nearly, and the same whatever the number of threads.
  const int64_t parts = (s.rows + kMostRowsAtOnce - 1) / kMostRowsAtOnce;
  for (int64_t part = 0; part < parts; ++part) {
    MiddleGrads dv;
    dv.begin = s.rows * part / parts;
    dv.count = s.rows * (part + 1) / parts - dv.begin;
    dv.stride = padded(s.r);
    dv.data = static_cast<float*>(
        scratch(ScratchSlot::kReduction, s.l * dv.count * dv.stride * sizeof(float)));
    for_each_tile(dv.count, s.work(), [&](const RowTile& tile) {
      const int64_t depth = std::max(kGradDepth, s.q);
      Carver carver((depth + kTileRows) * kPanelWidth + 2 * kVectorWidth);
      float* space = carver.take(depth * kPanelWidth);
      middle_grads(s, in.b, y_grad, tile, dv, space);
      input_grads(s, in.a, dv, tile, out.x, space, carver.take(kTileRows * kPanelWidth));
    });
    first_factor_grad(s, dv, in.x, part > 0, out.a);
    second_factor_grad(s, {dv.begin, dv.count}, middle, y_grad, part > 0, out.b, out.bias);
  }
}

}  // namespace oneflow_accel
