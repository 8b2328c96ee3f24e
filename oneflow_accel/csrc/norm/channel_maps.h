// The elementwise passes of a normalization, with per-channel coefficients, float32 and bfloat16.
#pragma once

#include "common/bfloat16.h"
#include "norm/channel_view.h"

namespace oneflow_accel {

// y = (x - mean[c]) * scale[c] + shift[c] + addend. `addend` may be null, or y itself.
//
// With `mask`, y is then replaced by max(y, 0), and bit i % 32 of mask[i / 32] says whether the
// gradient of y's element i (in memory order) passes; the spare bits of the last word are 0.
template <typename T>
void normalize(const ChannelView& view, const T* x, const float* mean, const float* scale,
               const float* shift, const T* addend, T* y, int32_t* mask);

// out = dy where the mask made by normalize() has a 1, else 0; n elements.
template <typename T>
void apply_mask(const T* dy, const int32_t* mask, T* out, int64_t n);

// dx = dy * dy_scale[c] + (x - mean[c]) * x_scale[c] + shift[c]. dx may be dy itself.
template <typename T>
void input_gradient(const ChannelView& view, const T* dy, const T* x, const float* mean,
                    const float* dy_scale, const float* x_scale, const float* shift, T* dx);

}  // namespace oneflow_accel
