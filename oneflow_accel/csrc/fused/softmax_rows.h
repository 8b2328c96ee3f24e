// Softmax of one row with what the fused operators do before and after it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/threads.h"

namespace oneflow_accel::fused {

// y = softmax(z), where z = x * scale if the mask is 1 and `fill` if it is 0. y may be x.
void masked_softmax(const float* x, const uint8_t* mask, float scale, float fill, float* y,
                    int64_t n);

// The gradient by x, given y and dy. dx may be dy.
void masked_softmax_grad(const float* y, const float* dy, const uint8_t* mask, float scale,
                         float* dx, int64_t n);

// As above where the mask is 1 for the first `kept` elements (0 <= kept <= n) and 0 for the rest.
void leading_softmax(const float* x, int64_t kept, float scale, float fill, float* y, int64_t n);
void leading_softmax_grad(const float* y, const float* dy, int64_t kept, float scale, float* dx,
                          int64_t n);

// Calls fn(row) for every row, in parallel.
template <typename Fn>
void for_each_row(int64_t rows, int64_t columns, const Fn& fn) {
  // An element of softmax is some ten operations.
  constexpr int64_t kGrainElements = kGrainSize / 8;
  const int64_t grain = std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, columns));
  parallel_for(rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) { fn(row); }
  });
}

}  // namespace oneflow_accel::fused
