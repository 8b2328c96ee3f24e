#include "monarch/factor_grads.h"

#include <algorithm>

#include "common/simd.h"
#include "monarch/tiles.h"

namespace oneflow_accel {

namespace {

// Rows that a product sums over: what it reads stays in a core's caches.
constexpr int64_t kDepth = 128;
// Rows of the left-hand side, values of du or columns of dy, at a time. Their sums stay in the
// second-level cache while all rows pass.
constexpr int64_t kLeft = 192;

// Sums of products with a right-hand side of `columns` columns.
struct Sums {
  int64_t columns;
  float* data;
  // Space for the right-hand side, where its rows are not whole vectors.
  float* packed;

  int64_t stride() const { return padded(columns); }
};

// The rows of sums from `row` on (+)= a b, `depth` being at most kDepth.
void sum_product(int64_t rows, int64_t depth, const Strided& a, const float* b, int64_t b_stride,
                 const Sums& sums, int64_t row, bool accumulate) {
  const bool whole = sums.columns % kVectorWidth == 0;
  const Panels panels{sums.packed, depth, sums.stride()};
  if (!whole) { pack(b, b_stride, sums.columns, panels); }
  for (int64_t j = 0; j < sums.columns; j += kPanelWidth) {
    panel_product(rows, std::min(kPanelWidth, sums.columns - j), depth, a,
                  whole ? b + j : panels.at(0, j), whole ? b_stride : panels.width(j),
                  sums.data + row * sums.stride() + j, sums.stride(), accumulate);
  }
}

// to[i] (+)= from[i].
ONEFLOW_ACCEL_SIMD
void store(const float* from, int64_t n, bool accumulate, float* to) {
  if (accumulate) {
    for (int64_t i = 0; i < n; ++i) { to[i] += from[i]; }
  } else {
    std::copy_n(from, n, to);
  }
}

// sums[i] (+)= the sum of row i.
ONEFLOW_ACCEL_SIMD
void sum_rows(const float* x, int64_t stride, int64_t rows, int64_t columns, bool accumulate,
              float* sums) {
  for (int64_t i = 0; i < rows; ++i) {
    float sum = 0.0F;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < columns; ++j) { sum += x[i * stride + j]; }
    sums[i] = accumulate ? sums[i] + sum : sum;
  }
}

// Columns of dy, transposed. A few rows at a time, read along: a row's part is some cache lines.
void load_columns(const float* y_grad, int64_t stride, int64_t rows, int64_t columns, float* to) {
  constexpr int64_t kRows = 16;
  for (int64_t i = 0; i < rows; i += kRows) {
    transpose(y_grad + i * stride, stride, std::min(kRows, rows - i), columns, to + i, kDepth);
  }
}

int64_t grain(int64_t rows, int64_t each) {
  return std::max<int64_t>(1, kGrainSize / std::max<int64_t>(1, rows * each));
}

}  // namespace

void first_factor_grad(const MonarchShape& s, const FirstFactorRows& rows, bool accumulate,
                       float* a_grad) {
  parallel_for(s.middle(), grain(rows.count, s.p), [&](int64_t begin, int64_t end) {
    Carver carver((kLeft + kDepth) * padded(s.p) + 2 * kVectorWidth);
    float* data = carver.take(kLeft * padded(s.p));
    float* packed = carver.take(kDepth * padded(s.p));
    for (int64_t slot = begin; slot < end;) {
      const int64_t block = slot / s.q;
      const int64_t count = std::min({end, (block + 1) * s.q, slot + kLeft}) - slot;
      const Sums sums{s.width(block), data, packed};
      for (int64_t i = 0; i < rows.count; i += kDepth) {
        sum_product(count, std::min(kDepth, rows.count - i),
                    {rows.u_grad + slot * rows.stride + i, rows.stride, 1},
                    rows.x + (rows.begin + i) * s.in_features + block * s.p, s.in_features, sums, 0,
                    i > 0);
      }
      for (int64_t i = 0; i < count; ++i) {
        float* to = a_grad + (slot + i) * s.p;
        store(data + i * sums.stride(), sums.columns, accumulate, to);
        // What would multiply missing values of x.
        std::fill(to + sums.columns, to + s.p, 0.0F);
      }
      slot += count;
    }
  });
}

void second_factor_grad(const MonarchShape& s, const SecondFactorRows& rows, bool accumulate,
                        float* b_grad, float* bias_grad) {
  const int64_t step = std::min(s.s, rows_at_once(kLeft, s.l));
  parallel_for(s.s, grain(rows.count, s.l * s.r), [&](int64_t begin, int64_t end) {
    Carver carver(step * s.l * (padded(s.r) + kDepth) + kDepth * padded(s.r) + 3 * kVectorWidth);
    float* data = carver.take(step * s.l * padded(s.r));
    float* packed = carver.take(kDepth * padded(s.r));
    float* grads = carver.take(step * s.l * kDepth);
    const Sums sums{s.r, data, packed};
    for (int64_t first = begin; first < end; first += step) {
      const int64_t count = std::min(step, end - first);
      const int64_t column = first * s.l;
      // Those after them were cut off: their gradient is 0.
      const int64_t columns = std::clamp<int64_t>(s.out_features - column, 0, count * s.l);
      std::fill(grads + columns * kDepth, grads + count * s.l * kDepth, 0.0F);
      for (int64_t i = 0; i < rows.count; i += kDepth) {
        const int64_t depth = std::min(kDepth, rows.count - i);
        const int64_t row = rows.begin + i;
        load_columns(rows.y_grad + row * s.out_features + column, s.out_features, depth, columns,
                     grads);
        sum_rows(grads, kDepth, columns, depth, accumulate || i > 0, bias_grad + column);
        for (int64_t j = 0; j < s.l; ++j) {
          sum_product(count, depth, {grads + j * kDepth, s.l * kDepth, 1},
                      rows.middle + row * s.middle() + j * s.r, s.middle(), sums, j * count, i > 0);
        }
      }
      for (int64_t j = 0; j < s.l; ++j) {
        for (int64_t i = 0; i < count; ++i) {
          store(data + (j * count + i) * sums.stride(), s.r, accumulate,
                b_grad + (j * s.s + first + i) * s.r);
        }
      }
    }
  });
}

}  // namespace oneflow_accel
