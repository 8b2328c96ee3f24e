// A bias along one axis of a tensor.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/oneflow.h"
#include "common/threads.h"

namespace oneflow_accel::fused {

// Element i of the tensor belongs to b[(i / inner) % channels].
struct BiasAxis {
  int64_t channels;
  int64_t inner;
  BiasAxis(const ::oneflow::ShapeView& shape, int64_t axis)
      : channels(shape.At(axis)), inner(shape.Count(axis + 1)) {}
};

// out = a + b, where b is a row or one value. out may be a.
void add_row(const float* a, const float* b, float* out, int64_t n);
void add_value(const float* a, float b, float* out, int64_t n);

// out = a + b on the elements [begin, end) of a, with b along the axis.
void add_bias(const BiasAxis& axis, const float* a, const float* b, float* out, int64_t begin,
              int64_t end);

// Writes a + b to `out` and calls finish(begin, count) on every stretch of it, in parallel, while
// the stretch is still in the nearest cache.
template <typename Finish>
void add_bias_then(const BiasAxis& axis, const float* a, const float* b, float* out, int64_t n,
                   const Finish& finish) {
  constexpr int64_t kStretch = 2048;
  parallel_for(n, kGrainSize, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += kStretch) {
      const int64_t count = std::min(kStretch, end - i);
      add_bias(axis, a, b, out, i, i + count);
      finish(i, count);
    }
  });
}

}  // namespace oneflow_accel::fused
