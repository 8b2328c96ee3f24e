// Channels of an image as planes of floats, each in one piece of memory, with room for borders.
#pragma once

#include <algorithm>
#include <cstring>

#include "common/bfloat16.h"
#include "copy/transpose_tile.h"

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

// Rows of one plane between two layouts.
template <typename From, typename To>
void copy_rows(const From* from, int64_t from_row, int64_t height, int64_t width, float addend,
               To* to, int64_t to_row) {
  for (int64_t y = 0; y < height; ++y) {
    const From* source = from + y * from_row;
    To* target = to + y * to_row;
    for (int64_t x = 0; x < width; ++x) {
      target[x] = from_float<To>(to_float(source[x]) + addend);
    }
  }
}

// Pixels and channels that are transposed at a time, in registers: no copy between.
using TransposedLanes = TransposeBlock<float>;
constexpr int kLanes = TransposedLanes::kLanes;

template <typename From, typename To>
ONEFLOW_ACCEL_INLINE void convert(const From* from, int64_t count, To* to) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) { to[i] = from_float<To>(to_float(from[i])); }
}

// The same with kLanes as a constant, where it is the count.
template <typename From, typename To>
ONEFLOW_ACCEL_INLINE void convert_lanes(const From* from, int64_t count, To* to) {
  if (count == kLanes) { return convert(from, kLanes, to); }
  convert(from, count, to);
}

// Up to kLanes pixels, one after the other in the image, in a plane: the rows that they are parts
// of.
struct Segments {
  using Mask __attribute__((vector_size(4 * kLanes))) = int32_t;

  int64_t pixels;
  int64_t count = 0;
  Mask lanes[kLanes];
  // Where lane 0 would lie, if the row reached as far.
  int64_t offset[kLanes];

  Segments(int64_t pixel, int64_t height, int64_t width, const PlaneLayout& layout)
      : pixels(std::min<int64_t>(kLanes, height * width - pixel)) {
    Mask index;
    for (int lane = 0; lane < kLanes; ++lane) { index[lane] = lane; }
    for (int64_t lane = 0; lane < pixels; ++count) {
      const int64_t y = (pixel + lane) / width;
      const int64_t x = (pixel + lane) % width;
      const int64_t end = std::min(pixels, lane + width - x);
      lanes[count] = (index >= static_cast<int32_t>(lane)) & (index < static_cast<int32_t>(end));
      offset[count] = layout.first + y * layout.row + x - lane;
      lane = end;
    }
  }
};

// All channels of some pixels before the next pixels, as they lie together. Whole vectors of the
// planes are read and written: what does not change is written again.
template <typename T>
void load_transposed(const ImageView<const T>& image, int64_t channel, int64_t count,
                     const PlaneLayout& layout, float* planes) {
  for (int64_t pixel = 0; pixel < image.height * image.width; pixel += kLanes) {
    const Segments segments(pixel, image.height, image.width, layout);
    for (int64_t c = 0; c < count; c += kLanes) {
      const int64_t channels = std::min<int64_t>(kLanes, count - c);
      const T* from = image.data + pixel * image.channels + channel + c;
      TransposedLanes::Vector rows[kLanes] = {};
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        if (i < segments.pixels) {
          convert_lanes(from + i * image.channels, channels, reinterpret_cast<float*>(&rows[i]));
        }
        // The next pixels: they lie too far apart for the processor to see it coming.
        __builtin_prefetch(from + (i + kLanes) * image.channels);
      }
      TransposedLanes::transpose(rows, rows);
      for (int64_t i = 0; i < channels; ++i) {
        float* plane = planes + (c + i) * layout.size;
        for (int64_t s = 0; s < segments.count; ++s) {
          Vector<kLanes>& to = *vector_at<kLanes>(plane + segments.offset[s], 0);
          to = segments.lanes[s] ? rows[i] : to;
        }
      }
    }
  }
}

template <typename T>
void store_transposed(const float* planes, const PlaneLayout& layout, int64_t channel,
                      int64_t count, const float* bias, const ImageView<T>& image) {
  for (int64_t pixel = 0; pixel < image.height * image.width; pixel += kLanes) {
    const Segments segments(pixel, image.height, image.width, layout);
    for (int64_t c = 0; c < count; c += kLanes) {
      const int64_t channels = std::min<int64_t>(kLanes, count - c);
      TransposedLanes::Vector rows[kLanes] = {};
      T* to = image.data + pixel * image.channels + channel + c;
      for (int64_t i = 0; i < kLanes; ++i) {
        __builtin_prefetch(to + (i + kLanes) * image.channels, 1);
        const float* plane = planes + (c + i) * layout.size;
        for (int64_t s = 0; i < channels && s < segments.count; ++s) {
          rows[i] = segments.lanes[s] ? *vector_at<kLanes>(plane + segments.offset[s], 0) : rows[i];
        }
      }
      TransposedLanes::transpose(rows, rows);
      TransposedLanes::Vector addend = {};
      if (bias != nullptr) { std::memcpy(&addend, bias + channel + c, channels * sizeof(float)); }
      for (int64_t i = 0; i < segments.pixels; ++i) {
        const TransposedLanes::Vector sums = rows[i] + addend;
        convert_lanes(reinterpret_cast<const float*>(&sums), channels, to + i * image.channels);
      }
    }
  }
}

// Sets the pixels of `count` planes, from `channel` on, and leaves what lies between them.
template <typename T>
void load_planes(const ImageView<const T>& image, int64_t channel, int64_t count,
                 const PlaneLayout& layout, float* planes) {
  if (image.channels_last) {
    return load_transposed(image, channel, count, layout, planes);
  }
  const int64_t pixels = image.height * image.width;
  for (int64_t c = 0; c < count; ++c) {
    copy_rows(image.data + (channel + c) * pixels, image.width, image.height, image.width, 0.0F,
              planes + c * layout.size + layout.first, layout.row);
  }
}

// The way back, with bias[channel] added; null for nothing to add.
template <typename T>
void store_planes(const float* planes, const PlaneLayout& layout, int64_t channel, int64_t count,
                  const float* bias, const ImageView<T>& image) {
  if (image.channels_last) {
    return store_transposed(planes, layout, channel, count, bias, image);
  }
  const int64_t pixels = image.height * image.width;
  for (int64_t c = 0; c < count; ++c) {
    copy_rows(planes + c * layout.size + layout.first, layout.row, image.height, image.width,
              bias == nullptr ? 0.0F : bias[channel + c], image.data + (channel + c) * pixels,
              image.width);
  }
}

}  // namespace oneflow_accel
