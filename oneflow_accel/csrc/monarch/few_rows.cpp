#include <algorithm>

#include "attention/buffer.h"
#include "common/threads.h"
#include "matmul/few_rows.h"
#include "monarch/monarch.h"

namespace oneflow_accel {

namespace {

int64_t grain(const MonarchShape& s, int64_t depth) {
  return std::max<int64_t>(1, kGrainSize / (s.rows * depth));
}

// u, (rows, k q), from x in blocks of (rows, p).
void first_factor(const MonarchShape& s, const float* a, const float* x, float* u) {
  parallel_for(s.middle(), grain(s, s.p), [&](int64_t begin, int64_t end) {
    for (int64_t slot = begin; slot < end;) {
      const int64_t block = slot / s.q;
      const int64_t stop = std::min(end, (block + 1) * s.q);
      few_rows_product(s.rows, stop - slot, s.p, x + block * s.rows * s.p, a + slot * s.p,
                       u + slot, s.middle());
      slot = stop;
    }
  });
}

// y from v in blocks of (rows, r).
void second_factor(const MonarchShape& s, const float* b, const float* bias, const float* v,
                   float* y) {
  parallel_for(s.l * s.s, grain(s, s.r), [&](int64_t begin, int64_t end) {
    auto* z = static_cast<float*>(
        scratch(ScratchSlot::kDestination, s.rows * s.s * sizeof(float)));
    for (int64_t first = begin; first < end;) {
      const int64_t block = first / s.s;
      const int64_t stop = std::min(end, (block + 1) * s.s);
      few_rows_product(s.rows, stop - first, s.r, v + block * s.rows * s.r, b + first * s.r, z,
                       s.s);
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
  Carver carver(s.rows * (s.k * s.p + 2 * s.middle()) + 3 * kVectorWidth);
  float* x = carver.take(s.rows * s.k * s.p);
  float* u = carver.take(s.rows * s.middle());
  float* v = carver.take(s.rows * s.middle());
  for (int64_t block = 0; block < s.k; ++block) {
    for (int64_t row = 0; row < s.rows; ++row) {
      const float* from = in.x + row * s.in_features + block * s.p;
      float* to = x + (block * s.rows + row) * s.p;
      std::copy_n(from, s.width(block), to);
      std::fill(to + s.width(block), to + s.p, 0.0F);
    }
  }
  first_factor(s, in.a, x, u);
  for (int64_t row = 0; row < s.rows; ++row) {
    for (int64_t j = 0; j < s.l; ++j) {
      float* to = v + (j * s.rows + row) * s.r;
      for (int64_t i = 0; i < s.r; ++i) { to[i] = u[row * s.middle() + i * s.l + j]; }
      if (middle != nullptr) { std::copy_n(to, s.r, middle + row * s.middle() + j * s.r); }
    }
  }
  second_factor(s, in.b, bias, v, y);
}

}  // namespace oneflow_accel
