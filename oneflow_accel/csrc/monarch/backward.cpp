#include <algorithm>

#include "monarch/tiles.h"

namespace oneflow_accel {

namespace {

// Values of i (see monarch.h) that products with the second factor sum over at a time: their
// right-hand sides stay in the first-level cache, or nearly.
constexpr int64_t kGradDepth = 192;

// Rows that the products of the factors' gradients sum over: their right-hand sides stay in the
// first-level cache.
constexpr int64_t kDepth = 128;
// Columns of dy at a time. What belongs to them, and the sums, stay in the second-level cache while
// all rows pass.
constexpr int64_t kColumnsAtOnce = 768;

// The gradient of v: l matrices of (count, r), whose rows lie `stride` floats apart.
struct MiddleGrads {
  int64_t count;
  int64_t stride;
  float* data;

  float* at(int64_t j, int64_t row) const { return data + (j * count + row) * stride; }
  // A run's values, as columns of a matrix, or as rows.
  Strided values_by_row(const Run& run, int64_t row) const {
    return {at(run.j, row) + run.first, stride, run.j_step * count * stride + run.step};
  }
  Strided rows_by_value(const Run& run, int64_t row) const {
    return {at(run.j, row) + run.first, run.j_step * count * stride + run.step, stride};
  }
};

// dv[j] = sum over i of dz[j, i] B[j, i].
void middle_grads(const MonarchShape& s, const float* b, const float* y_grad, int64_t begin,
                  int64_t count, const MiddleGrads& dv, float* space) {
  for (int64_t first = 0; first < s.s; first += kGradDepth) {
    for (int64_t j = 0; j < s.l; ++j) {
      // Results that were cut off have no gradient.
      const int64_t depth = std::clamp<int64_t>(s.results(j) - first, 0, kGradDepth);
      const Strided rows{y_grad + begin * s.out_features + first * s.l + j,
                         s.out_features, s.l};
      for (int64_t column = 0; column < s.r; column += kPanelWidth) {
        const int64_t columns = std::min(kPanelWidth, s.r - column);
        const Right right(b + (j * s.s + first) * s.r + column, s.r, depth, columns, space);
        panel_product(count, columns, depth, rows, right.data, right.stride,
                      dv.at(j, begin) + column, dv.stride, first > 0);
      }
    }
  }
}

// dx[block] = sum over i of du[block, i] A[block, i].
void input_grads(const MonarchShape& s, const float* a, const MiddleGrads& dv, int64_t begin,
                 int64_t count, float* x_grad, float* space, float* out_space) {
  for (int64_t block = 0; block < s.k; ++block) {
    const int64_t width = s.width(block);
    for (int64_t column = 0; column < width; column += kPanelWidth) {
      const int64_t columns = std::min(kPanelWidth, width - column);
      float* to = x_grad + begin * s.in_features + block * s.p + column;
      // Products write whole vectors.
      const bool whole = columns % kVectorWidth == 0;
      bool accumulate = false;
      for_each_run(s, block, [&](const Run& run) {
        const Right right(a + (block * s.q + run.i) * s.p + column, run.i_step * s.p, run.count,
                          columns, space);
        panel_product(count, columns, run.count, dv.values_by_row(run, begin), right.data,
                      right.stride, whole ? to : out_space,
                      whole ? s.in_features : padded(columns), accumulate);
        accumulate = true;
      });
      for (int64_t i = 0; !whole && i < count; ++i) {
        std::copy_n(out_space + i * padded(columns), columns, to + i * s.in_features);
      }
    }
  }
}

// a_grad[block, i] is the sum over the rows of du[block, i] x[block], or has it added. Shared out,
// as the next, by what it is a gradient of.
void first_factor_grad(const MonarchShape& s, const MiddleGrads& dv, const float* x,
                       bool accumulate, float* a_grad) {
  // Blocks feed all threads where there are enough; else panels of their columns are shared out too,
  // and dv is read again for each.
  const int64_t panels = ceil_div(s.p, kPanelWidth);
  const int64_t threads = num_threads();
  const int64_t parts = s.k % threads == 0 || s.k >= 4 * threads ? 1 : panels;
  const int64_t most = std::min(s.p, (panels / parts) * kPanelWidth);
  const int64_t stride = padded(s.p);
  parallel_for(s.k * parts, grain_of(dv.count * s.q * most), [&](int64_t begin, int64_t end) {
    Carver carver(kDepth * padded(most) + kVectorWidth);
    float* right = carver.take(kDepth * padded(most));
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t block = unit / parts;
      const int64_t column = unit % parts * kPanelWidth;
      const int64_t all = std::min(most, s.p - column);
      // The others would multiply missing values of x.
      const int64_t columns = std::clamp<int64_t>(s.width(block) - column, 0, all);
      float* grads = a_grad + block * s.q * stride + column;
      for (int64_t row = 0; columns > 0 && row < dv.count; row += kDepth) {
        const Panels some{right, std::min(kDepth, dv.count - row), padded(columns)};
        pack(x + row * s.in_features + block * s.p + column, s.in_features, columns, some);
        for_each_run(s, block, [&](const Run& run) {
          block_product(run.count, columns, some.rows, dv.rows_by_value(run, row), some, 0, 0,
                        grads + run.i * stride, run.i_step * stride, accumulate || row > 0);
        });
      }
      for (int64_t i = 0; i < s.q; ++i) {
        std::fill(grads + i * stride + columns, grads + i * stride + all, 0.0F);
      }
    }
  });
}

// b_grad[j, i] is the sum over the rows of dz[j, i] v[j], and bias_grad the sum of dy, or they have
// it added.
void second_factor_grad(const MonarchShape& s, const float* middle, const float* y_grad,
                        bool accumulate, float* b_grad, float* bias_grad) {
  const int64_t step = std::min(s.s, rows_at_once(kColumnsAtOnce, s.l));
  const int64_t stride = padded(s.r);
  parallel_for(s.s, grain_of(s.rows * s.l * s.r), [&](int64_t begin, int64_t end) {
    Carver carver(kDepth * kPanelWidth + kVectorWidth);
    float* right = carver.take(kDepth * kPanelWidth);
    float ones[kDepth];
    std::fill_n(ones, kDepth, 1.0F);
    for (int64_t first = begin; first < end; first += step) {
      const int64_t last = std::min(first + step, end);
      const int64_t columns = std::max<int64_t>(
          0, std::min(last * s.l, s.out_features) - first * s.l);
      for (int64_t i = 0; i < s.rows; i += kDepth) {
        const int64_t depth = std::min(kDepth, s.rows - i);
        const float* grads = y_grad + i * s.out_features + first * s.l;
        // It also brings them into the cache.
        weighted_sum(ones, grads, s.out_features, depth, columns, bias_grad + first * s.l,
                     accumulate || i > 0);
        for (int64_t j = 0; j < s.l; ++j) {
          for (int64_t column = 0; column < s.r; column += kPanelWidth) {
            const int64_t width = std::min(kPanelWidth, s.r - column);
            pack(middle + i * s.middle() + j * s.r + column, s.middle(), width,
                 {right, depth, padded(width)});
            panel_product(std::min(last, s.results(j)) - first, width, depth,
                          {grads + j, s.l, s.out_features}, right, padded(width),
                          b_grad + (j * s.s + first) * stride + column, stride,
                          accumulate || i > 0);
          }
        }
      }
    }
  });
  // Results that were cut off have none.
  for (int64_t j = 0; j < s.l; ++j) {
    std::fill(b_grad + (j * s.s + s.results(j)) * stride, b_grad + (j + 1) * s.s * stride, 0.0F);
  }
}

}  // namespace

void monarch_grad(const MonarchShape& s, const MonarchInputs& in, const float* middle,
                  const float* y_grad, const MonarchGrads& out, bool accumulate) {
  MiddleGrads dv{s.rows, padded(s.r), nullptr};
  dv.data = scratch<float>(ScratchSlot::kReduction, s.l * dv.count * dv.stride);
  for_each_tile(s.rows, s.factors(), [&](int64_t begin, int64_t count) {
    const int64_t depth = std::max(kGradDepth, s.q);
    Carver carver((depth + kTileRows) * kPanelWidth + 2 * kVectorWidth);
    float* space = carver.take(depth * kPanelWidth);
    middle_grads(s, in.b, y_grad, begin, count, dv, space);
    input_grads(s, in.a, dv, begin, count, out.x, space, carver.take(kTileRows * kPanelWidth));
  });
  first_factor_grad(s, dv, in.x, accumulate, out.a);
  second_factor_grad(s, middle, y_grad, accumulate, out.b, out.bias);
}

}  // namespace oneflow_accel
