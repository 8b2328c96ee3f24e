#include <algorithm>
#include <vector>

#include "monarch/interleave.h"
#include "monarch/tiles.h"

namespace oneflow_accel {

namespace {

// Rows that the products of the factors' gradients sum over: their right-hand sides stay in the
// first-level cache.
constexpr int64_t kDepth = 128;

// Gradients of what lies between the factors, of all rows: of z, (l, s), and of u, (k, q).
struct InnerGrads {
  float* z;
  float* u;
};

// For some rows: dz from dy, dv[j] = dz[j] B[j], du from dv, and dx[i] = du[i] A[i].
void tile_grads(const MonarchShape& s, const std::vector<Panels>& factors, const float* y_grad,
                int64_t begin, int64_t rows, const InnerGrads& grads, float* x_grad) {
  const int64_t results = s.l * s.s;
  // Products write whole vectors, in an order in which what is beyond their columns is the next
  // one's: each row has room for the last one's.
  const int64_t v_stride = padded(s.middle() + kVectorWidth);
  const int64_t x_stride = padded(s.in_features + kVectorWidth);
  Carver carver(rows * std::max(v_stride + x_stride, padded(results)) + 2 * kVectorWidth);
  const float* dy = y_grad + begin * s.out_features;
  float* dz = grads.z + begin * results;
  float* du = grads.u + begin * s.middle();
  if (s.out_features == results) {
    deinterleave({dy, results, dz, results, rows}, s.s, s.l);
  } else {
    // Results that were cut off have no gradient.
    float* whole = Carver(carver).take(rows * results);
    std::fill_n(whole, rows * results, 0.0F);
    copy_rows(dy, s.out_features, rows, s.out_features, 1.0F, whole, results);
    deinterleave({whole, results, dz, results, rows}, s.s, s.l);
  }
  float* dv = carver.take(rows * v_stride);
  for (int64_t j = 0; j < s.l; ++j) {
    block_product(rows, s.r, s.s, {dz + j * s.s, results, 1}, factors[s.k + j], 0, 0,
                  dv + j * s.r, v_stride, false);
  }
  interleave({dv, v_stride, du, s.middle(), rows}, s.r, s.l, s.middle(), nullptr);
  float* dx = carver.take(rows * x_stride);
  for (int64_t block = 0; block < s.k && s.width(block) > 0; ++block) {
    block_product(rows, s.width(block), s.q, {du + block * s.q, s.middle(), 1}, factors[block], 0,
                  0, dx + block * s.p, x_stride, false);
  }
  copy_rows(dx, x_stride, rows, s.in_features, 1.0F, x_grad + begin * s.in_features,
            s.in_features);
}

// The gradient of one factor, `blocks` matrices of (outer, inner): sums over the rows of products of
// an element of `left`, (blocks, outer), and one of `right`, the first `width` of (blocks, inner).
struct FactorGrad {
  int64_t blocks, outer, inner;
  const float* left;
  const float* right;
  int64_t width;
  float* out;  // in rows of whole vectors
};

void factor_grad(int64_t rows, const FactorGrad& g, bool tiles, bool accumulate) {
  const int64_t stride = padded(g.inner);
  const int64_t all = g.blocks * g.outer;
  parallel_for(all, grain_of(rows * g.inner), [&](int64_t begin, int64_t end) {
    Carver carver(kDepth * stride + kVectorWidth);
    Panels right = carver.take_panels(kDepth, stride, tiles);
    for (int64_t first = begin; first < end;) {
      const int64_t block = first / g.outer;
      const int64_t last = std::min(end, (block + 1) * g.outer);
      float* out = g.out + first * stride;
      const int64_t columns = std::clamp<int64_t>(g.width - block * g.inner, 0, g.inner);
      right.columns = padded(columns);
      for (int64_t row = 0; columns > 0 && row < rows; row += kDepth) {
        right.rows = std::min(kDepth, rows - row);
        pack(g.right + row * g.width + block * g.inner, g.width, columns, right);
        block_product(last - first, columns, right.rows, {g.left + row * all + first, 1, all},
                      right, 0, 0, out, stride, accumulate || row > 0);
      }
      for (; first < last; ++first, out += stride) {
        std::fill(out + columns, out + g.inner, 0.0F);
      }
    }
  });
}

}  // namespace

void monarch_grad(const MonarchShape& s, const MonarchInputs& in, const float* middle,
                  const float* y_grad, const MonarchGrads& out, bool accumulate) {
  const std::vector<Panels> factors = packed_factors(s, in, false);
  auto* dz = scratch<float>(ScratchSlot::kReduction, s.rows * (s.l * s.s + s.middle()));
  const InnerGrads grads{dz, dz + s.rows * s.l * s.s};
  for_each_tile(s.rows, s.factors(), [&](int64_t begin, int64_t rows) {
    tile_grads(s, factors, y_grad, begin, rows, grads, out.x);
  });
  factor_grad(s.rows, {s.k, s.q, s.p, grads.u, in.x, s.in_features, out.a}, in.tiles, accumulate);
  factor_grad(s.rows, {s.l, s.s, s.r, grads.z, middle, s.middle(), out.b}, in.tiles, accumulate);
  parallel_for(s.out_features, grain_of(s.rows), [&](int64_t begin, int64_t end) {
    float ones[kDepth];
    std::fill_n(ones, kDepth, 1.0F);
    for (int64_t row = 0; row < s.rows; row += kDepth) {
      weighted_sum(ones, y_grad + row * s.out_features + begin, s.out_features,
                   std::min(kDepth, s.rows - row), end - begin, out.bias + begin,
                   accumulate || row > 0);
    }
  });
}

}  // namespace oneflow_accel
