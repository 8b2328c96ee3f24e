#include <algorithm>

#include "monarch/few_rows.h"
#include "monarch/tiles.h"

namespace oneflow_accel {

namespace {

// Columns of y that are computed and then stored together. With kTileRows they fill a part of a
// second-level cache; a store should write whole cache lines of y.
constexpr int64_t kColumns = 384;

struct Workspace {
  // A block of x, all of v, some columns of y; transposed, in panels.
  float* x;
  float* middle;
  float* y;
  // Values of i (see monarch.h) that have a row of y's panel.
  int64_t step;

  explicit Workspace(const MonarchShape& s) : step(std::min(s.s, rows_at_once(kColumns, s.l))) {
    Carver carver(kTileRows * (s.p + s.middle() + step * s.l) + 3 * kVectorWidth);
    x = carver.take(kTileRows * s.p);
    middle = carver.take(kTileRows * s.middle());
    y = carver.take(kTileRows * step * s.l);
  }
};

void first_factor(const MonarchShape& s, const MonarchInputs& in, const RowTile& tile,
                  const Workspace& w) {
  for (int64_t block = 0; block < s.k; ++block) {
    const int64_t width = s.width(block);
    for (int64_t n = 0; n < tile.panels(); ++n) {
      load_panel(in.x + tile.first_row(n) * s.in_features + block * s.p, s.in_features, width, tile,
                 n, w.x + n * kPanelWidth * s.p);
    }
    for_each_run(s, block, [&](const Run& run) {
      const Strided rows{in.a + (block * s.q + run.i) * s.p, run.i_step * s.p, 1};
      for (int64_t n = 0; n < tile.panels(); ++n) {
        const int64_t stride = tile.width(n);
        panel_product(run.count, stride, width, rows, w.x + n * kPanelWidth * s.p, stride,
                      w.middle + n * kPanelWidth * s.middle() + (run.j * s.r + run.first) * stride,
                      (run.j_step * s.r + run.step) * stride, false);
      }
    });
  }
}

// `count` values of i from `first` on, for all j: `count` x l columns of y.
void second_factor(const MonarchShape& s, const float* b, const float* bias, int64_t first,
                   int64_t count, const RowTile& tile, const Workspace& w, float* y) {
  const int64_t column = first * s.l;
  const int64_t columns = std::min(count * s.l, s.out_features - column);
  for (int64_t j = 0; j < s.l; ++j) {
    const Strided rows{b + (j * s.s + first) * s.r, s.r, 1};
    for (int64_t n = 0; n < tile.panels(); ++n) {
      const int64_t stride = tile.width(n);
      panel_product(count, stride, s.r, rows,
                    w.middle + n * kPanelWidth * s.middle() + j * s.r * stride, stride,
                    w.y + n * kPanelWidth * w.step * s.l + j * stride, s.l * stride, false);
    }
  }
  for (int64_t n = 0; n < tile.panels(); ++n) {
    transpose(w.y + n * kPanelWidth * w.step * s.l, tile.width(n), columns, tile.rows(n),
              y + tile.first_row(n) * s.out_features + column, s.out_features,
              bias == nullptr ? nullptr : bias + column);
  }
}

void tile_forward(const MonarchShape& s, const MonarchInputs& in, const float* bias, float* middle,
                  float* y, const RowTile& tile) {
  const Workspace w(s);
  first_factor(s, in, tile, w);
  if (middle != nullptr) {
    for (int64_t n = 0; n < tile.panels(); ++n) {
      transpose(w.middle + n * kPanelWidth * s.middle(), tile.width(n), s.middle(), tile.rows(n),
                middle + tile.first_row(n) * s.middle(), s.middle());
    }
  }
  for (int64_t first = 0; first * s.l < s.out_features; first += w.step) {
    second_factor(s, in.b, bias, first, std::min(w.step, s.s - first), tile, w, y);
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
  for_each_tile<kVectorWidth>(shape.rows, shape.work(), [&](const RowTile& tile) {
    tile_forward(shape, in, bias, middle, y, tile);
  });
}

}  // namespace oneflow_accel
