// A tensor seen by a normalization over one of its axes.
#pragma once

#include "common/oneflow.h"

namespace oneflow_accel {

// [outer, channels, inner], row-major: the axes before, at and after the channel axis. NCHW has
// inner = H * W; NHWC and (N, C) have inner = 1, so that every row of `channels` is contiguous.
struct ChannelView {
  int64_t outer;
  int64_t channels;
  int64_t inner;

  ChannelView(const ::oneflow::ShapeView& shape, int32_t axis)
      : outer(shape.Count(0, axis)), channels(shape.At(axis)), inner(shape.Count(axis + 1)) {}

  bool channels_last() const { return inner == 1; }
  int64_t elements() const { return outer * channels * inner; }
  int64_t elements_per_channel() const { return outer * inner; }
};

}  // namespace oneflow_accel
