#include <algorithm>

#include "monarch/factor_grads.h"
#include "monarch/tiles.h"

namespace oneflow_accel {

namespace {

// As in the forward. Here the columns of y's gradient are what products sum over, and the more of
// them, the less often the sums are loaded and stored.
constexpr int64_t kColumns = 768;

// Rows that are worked on before the next ones: the gradient of u is kept for so many.
constexpr int64_t kMostRowsAtOnce = 2048;

// The gradient of u of some rows, transposed: value t of row `begin + i` is data[t * stride + i].
struct MiddleGrads {
  int64_t begin;
  int64_t count;
  int64_t stride;
  float* data;
};

struct Workspace {
  // A block of x's gradient, and some columns of y's; transposed, in panels.
  float* x;
  float* y;
  int64_t step;

  explicit Workspace(const MonarchShape& s) : step(std::min(s.s, rows_at_once(kColumns, s.l))) {
    Carver carver(kTileRows * (s.p + step * s.l) + 2 * kVectorWidth);
    x = carver.take(kTileRows * s.p);
    y = carver.take(kTileRows * step * s.l);
  }
};

// dv[j] = sum over i of dz[j, i] B[j, i], where du needs it: dv[j, i] is du[i l + j].
void middle_grads(const MonarchShape& s, const float* b, const float* y_grad, const RowTile& tile,
                  const Workspace& w, const MiddleGrads& du) {
  for (int64_t first = 0; first < s.s; first += w.step) {
    const int64_t count = std::min(w.step, s.s - first);
    const int64_t column = first * s.l;
    const int64_t columns = std::clamp<int64_t>(s.out_features - column, 0, count * s.l);
    for (int64_t n = 0; n < tile.panels(); ++n) {
      float* panel = w.y + n * kPanelWidth * w.step * s.l;
      const int64_t width = tile.width(n);
      load_panel(y_grad + (du.begin + tile.first_row(n)) * s.out_features + column, s.out_features,
                 columns, tile, n, panel);
      std::fill(panel + columns * width, panel + count * s.l * width, 0.0F);
    }
    for (int64_t j = 0; j < s.l; ++j) {
      const Strided transposed{b + (j * s.s + first) * s.r, 1, s.r};
      for (int64_t n = 0; n < tile.panels(); ++n) {
        const int64_t width = tile.width(n);
        panel_product(s.r, width, count, transposed,
                      w.y + n * kPanelWidth * w.step * s.l + j * width, s.l * width,
                      du.data + j * du.stride + tile.first_row(n), s.l * du.stride, first > 0);
      }
    }
  }
}

// dx[i] = sum over t of du[i, t] A[i, t].
void input_grads(const MonarchShape& s, const float* a, const MiddleGrads& du, const RowTile& tile,
                 const Workspace& w, float* x_grad) {
  for (int64_t block = 0; block < s.k; ++block) {
    const int64_t features = s.width(block);
    const Strided transposed{a + block * s.q * s.p, 1, s.p};
    for (int64_t n = 0; n < tile.panels(); ++n) {
      const int64_t width = tile.width(n);
      panel_product(features, width, s.q, transposed,
                    du.data + block * s.q * du.stride + tile.first_row(n), du.stride,
                    w.x + n * kPanelWidth * s.p, width, false);
      transpose(w.x + n * kPanelWidth * s.p, width, features, tile.rows(n),
                x_grad + (du.begin + tile.first_row(n)) * s.in_features + block * s.p,
                s.in_features);
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
    MiddleGrads du;
    du.begin = s.rows * part / parts;
    du.count = s.rows * (part + 1) / parts - du.begin;
    // An odd number of vectors: a power of two would put all rows into the same lines of a cache.
    du.stride = (padded(du.count) / kVectorWidth | 1) * kVectorWidth;
    du.data = static_cast<float*>(
        scratch(ScratchSlot::kReduction, s.middle() * du.stride * sizeof(float)));
    for_each_tile(du.count, s.work(), [&](const RowTile& tile) {
      const Workspace w(s);
      middle_grads(s, in.b, y_grad, tile, w, du);
      input_grads(s, in.a, du, tile, w, out.x);
    });
    const bool accumulate = part > 0;
    first_factor_grad(s, {du.begin, du.count, in.x, du.data, du.stride}, accumulate, out.a);
    second_factor_grad(s, {du.begin, du.count, middle, y_grad}, accumulate, out.b, out.bias);
  }
}

}  // namespace oneflow_accel
