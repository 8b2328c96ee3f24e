// Channels of an image as planes of floats, each in one piece of memory, with room for borders.
#pragma once

#include <cstdint>

#include "common/bfloat16.h"

namespace oneflow_accel {

// One image of a tensor (N, C, H, W) or (N, H, W, C), float32 or bfloat16.
template <typename T>
struct ImageView {
  T* data;
  int64_t channels;
  int64_t height, width;
  bool channels_last;
};

// How the pixels of a plane lie.
struct PlaneLayout {
  int64_t first;  // Of pixel (0, 0).
  int64_t row;    // Floats from one row to the next.
  int64_t size;   // Floats of a plane.
};

// Floats of the space that the functions below need for `channels` channels at a time.
int64_t planes_space(int64_t channels, int64_t height, int64_t width, bool channels_last);

// Sets the pixels of `count` planes, from `channel` on, and leaves what lies between them.
template <typename T>
void load_planes(const ImageView<const T>& image, int64_t channel, int64_t count,
                 const PlaneLayout& layout, float* space, float* planes);

// The way back, with bias[channel] added; null for nothing to add.
template <typename T>
void store_planes(const float* planes, const PlaneLayout& layout, int64_t channel, int64_t count,
                  const float* bias, float* space, const ImageView<T>& image);

}  // namespace oneflow_accel
