// The reductions of a normalization: sums over every axis but the channel axis.
//
// The tensor is cut into chunks whose size depends on its shape only, each chunk is summed up by
// one thread, and the chunks are put together in order: results do not depend on the number of
// threads.
#pragma once

#include "common/bfloat16.h"
#include "common/oneflow.h"

namespace oneflow_accel {

// A tensor seen by a normalization over one of its axes: [outer, channels, inner], row-major, the
// axes before, at and after the channel axis. NCHW has inner = H * W; NHWC and (N, C) have
// inner = 1, so that every row of `channels` is contiguous.
struct ChannelView {
  int64_t outer;
  int64_t channels;
  int64_t inner;

  ChannelView(const ::oneflow::ShapeView& shape, int32_t axis)
      : outer(shape.Count(0, axis)), channels(shape.At(axis)), inner(shape.Count(axis + 1)) {}

  bool channels_last() const { return inner == 1; }
  int64_t elements() const { return outer * channels * inner; }
  int64_t elements_per_channel() const { return outer * inner; }
  // Elements of a row of a channels-last tensor, or of a plane of a channels-first one.
  int64_t slice() const { return channels_last() ? channels : inner; }
};

// Mean and biased variance of each channel of `x`, both of length view.channels. Zeros where a
// channel has no element.
//
// One pass over memory, and stable where the mean is large against the standard deviation: a chunk
// is summed up as differences from the mean of its own first elements, and chunks are merged by
// their means and centered sums of squares (Chan, Golub, LeVeque, "Algorithms for computing the
// sample variance", 1983), in double precision.
template <typename T>
void channel_moments(const ChannelView& view, const T* x, double* mean, double* variance);

// sum(dy) and sum(dy * (x - mean)) of each channel, all of length view.channels.
template <typename T>
void channel_gradient_sums(const ChannelView& view, const T* dy, const T* x, const float* mean,
                           double* sum_dy, double* sum_dy_centered);

}  // namespace oneflow_accel
