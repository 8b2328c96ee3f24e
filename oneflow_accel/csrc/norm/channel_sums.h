// The reductions of a normalization: sums over every axis but the channel axis.
//
// The tensor is cut into chunks whose size depends on its shape only, each chunk is summed up by
// one thread, and the chunks are put together in order: results do not depend on the number of
// threads.
#pragma once

#include "common/bfloat16.h"
#include "norm/channel_view.h"

namespace oneflow_accel {

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
