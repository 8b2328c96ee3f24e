// A convolution over a part of the images at a time.
#pragma once

#include <algorithm>

#include "common/threads.h"
#include "conv/select.h"

namespace oneflow_accel {

// What a primitive's layout costs is a copy of each activation: so much of them exists at a time,
// enough for each thread to be busy.
constexpr int64_t kCopiedBytesPerThread = 16 << 20;

// How many images of a convolution are copied at a time: all, or as many as fit, and then rather a
// divisor of all, so that there is one primitive for all parts.
inline int64_t images_at_a_time(const ConvGeometry& geometry, ActivationLayout layout) {
  const int64_t images = geometry.in[0];
  if (layout == ActivationLayout::kPlain) { return images; }
  const int64_t elements = geometry.in_image() + geometry.out_image();
  const auto bytes = static_cast<int64_t>(dnnl::memory::data_type_size(geometry.data_type));
  const int64_t most = std::max<int64_t>(
      1, num_threads() * kCopiedBytesPerThread / (elements * bytes));
  if (most >= images) { return images; }
  for (int64_t count = most; count > most / 2; --count) {
    if (images % count == 0) { return count; }
  }
  return most;
}

// Calls fn(part, first) for parts of the batch, `first` being the number of a part's first image.
// A sum over the images is not among what can be done so.
template <typename Fn>
void for_parts(const ConvGeometry& geometry, ActivationLayout layout, const Fn& fn) {
  const int64_t images = geometry.in[0];
  const int64_t step = images_at_a_time(geometry, layout);
  for (int64_t first = 0; first < images; first += step) {
    ConvGeometry part = geometry;
    part.in[0] = part.out[0] = std::min(step, images - first);
    fn(part, first);
  }
}

}  // namespace oneflow_accel
