#include <algorithm>

#include "matmul/product.h"
#include "monarch/interleave.h"
#include "monarch/tiles.h"

namespace oneflow_accel {

namespace {

// u, (rows, k q).
void first_factor(const MonarchShape& s, const MonarchInputs& in, float* u) {
  parallel_for(s.middle(), grain_of(s.rows * s.p), [&](int64_t begin, int64_t end) {
    for (int64_t slot = begin; slot < end;) {
      const int64_t block = slot / s.q;
      const int64_t stop = std::min(end, (block + 1) * s.q);
      few_rows_product(s.rows, stop - slot, s.width(block), in.x + block * s.p, s.in_features,
                       in.a + slot * s.p, s.p, u + slot, s.middle());
      slot = stop;
    }
  });
}

// y from v, (rows, l r).
void second_factor(const MonarchShape& s, const float* b, const float* bias, const float* v,
                   float* y) {
  parallel_for(s.l * s.s, grain_of(s.rows * s.r), [&](int64_t begin, int64_t end) {
    auto* z = scratch<float>(ScratchSlot::kDestination, s.rows * s.s);
    for (int64_t first = begin; first < end;) {
      const int64_t block = first / s.s;
      const int64_t stop = std::min(end, (block + 1) * s.s);
      few_rows_product(s.rows, stop - first, s.r, v + block * s.r, s.middle(), b + first * s.r,
                       s.r, z, s.s);
      const int64_t column = (first - block * s.s) * s.l + block;
      for (int64_t row = 0; row < s.rows; ++row) {
        const float* from = z + row * s.s;
        for (int64_t c = column; c < std::min(s.out_features, column + (stop - first) * s.l);
             c += s.l) {
          y[row * s.out_features + c] = *from++ + (bias == nullptr ? 0.0F : bias[c]);
        }
      }
      first = stop;
    }
  });
}

}  // namespace

void monarch_few_rows(const MonarchShape& s, const MonarchInputs& in, const float* bias,
                      float* middle, float* y) {
  Carver carver(2 * s.rows * s.middle() + 2 * kVectorWidth);
  float* u = carver.take(s.rows * s.middle());
  float* v = middle == nullptr ? carver.take(s.rows * s.middle()) : middle;
  first_factor(s, in, u);
  deinterleave({u, s.middle(), v, s.middle(), s.rows}, s.r, s.l);
  second_factor(s, in.b, bias, v, y);
}

}  // namespace oneflow_accel
