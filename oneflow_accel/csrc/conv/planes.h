// Channels of an image as planes of floats, each in one piece of memory, with room for borders.
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention/block_product.h"
#include "common/bfloat16.h"
#include "common/onednn.h"
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

struct PlaneLayout {
  int64_t first;  // Of pixel (0, 0).
  int64_t row;    // Floats from one row to the next.
  int64_t size;   // Floats of a plane.
};

// Rows of one plane between two layouts.
template <typename From, typename To>
void copy_plane(const From* from, int64_t from_row, int64_t height, int64_t width, float addend,
                To* to, int64_t to_row) {
  for (int64_t y = 0; y < height; ++y) {
    const From* source = from + y * from_row;
    To* target = to + y * to_row;
    for (int64_t x = 0; x < width; ++x) {
      target[x] = from_float<To>(to_float(source[x]) + addend);
    }
  }
}

#ifdef __AVX512F__
constexpr int kLanes = 16;

ONEFLOW_ACCEL_INLINE __mmask16 first_lanes(int64_t count) {
  return static_cast<__mmask16>((1U << count) - 1);
}

ONEFLOW_ACCEL_INLINE __m512 load_lanes(__mmask16 lanes, const float* from) {
  return _mm512_maskz_loadu_ps(lanes, from);
}
ONEFLOW_ACCEL_INLINE __m512 load_lanes(__mmask16 lanes, const Bfloat16* from) {
  const __m512i bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

ONEFLOW_ACCEL_INLINE void store_lanes(__mmask16 lanes, __m512 x, float* to) {
  _mm512_mask_storeu_ps(to, lanes, x);
}
// Rounds as from_float<Bfloat16>() does.
ONEFLOW_ACCEL_INLINE void store_lanes(__mmask16 lanes, __m512 x, Bfloat16* to) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, half), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  _mm256_mask_storeu_epi16(
      to, lanes,
      _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7FC0))));
}

// Up to 16 pixels, one after the other in the image, in a plane: the rows that they are parts of.
struct Segments {
  int64_t pixels;
  int64_t count = 0;
  __mmask16 lanes[kLanes];
  // Where lane 0 would lie, if the row reached as far.
  int64_t offset[kLanes];

  Segments(int64_t pixel, int64_t height, int64_t width, const PlaneLayout& layout)
      : pixels(std::min<int64_t>(kLanes, height * width - pixel)) {
    for (int64_t lane = 0; lane < pixels; ++count) {
      const int64_t y = (pixel + lane) / width;
      const int64_t x = (pixel + lane) % width;
      const int64_t end = std::min(pixels, lane + width - x);
      lanes[count] = static_cast<__mmask16>(first_lanes(end) & ~first_lanes(lane));
      offset[count] = layout.first + y * layout.row + x - lane;
      lane = end;
    }
  }
};

// 16 pixels of 16 channels at a time, in registers: no copy between. All channels of some pixels
// before the next pixels, as they lie together.
template <typename T>
void load_transposed(const ImageView<const T>& image, int64_t channel, int64_t count,
                     const PlaneLayout& layout, float* planes) {
  for (int64_t pixel = 0; pixel < image.height * image.width; pixel += kLanes) {
    const Segments segments(pixel, image.height, image.width, layout);
    for (int64_t c = 0; c < count; c += kLanes) {
      const int64_t channels = std::min<int64_t>(kLanes, count - c);
      const __mmask16 lanes = first_lanes(channels);
      const T* from = image.data + pixel * image.channels + channel + c;
      TransposeBlock<float>::Vector rows[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        rows[i] = load_lanes(i < segments.pixels ? lanes : 0, from + i * image.channels);
        // The next pixels: they lie too far apart for the processor to see it coming.
        __builtin_prefetch(from + (i + kLanes) * image.channels);
      }
      TransposeBlock<float>::transpose(rows);
      for (int64_t i = 0; i < channels; ++i) {
        float* plane = planes + (c + i) * layout.size;
        for (int64_t s = 0; s < segments.count; ++s) {
          _mm512_mask_storeu_ps(plane + segments.offset[s], segments.lanes[s], rows[i]);
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
      const __mmask16 lanes = first_lanes(channels);
      TransposeBlock<float>::Vector rows[kLanes];
      T* to = image.data + pixel * image.channels + channel + c;
      for (int64_t i = 0; i < kLanes; ++i) {
        __builtin_prefetch(to + (i + kLanes) * image.channels, 1);
        rows[i] = _mm512_setzero_ps();
        const float* plane = planes + (c + i) * layout.size;
        for (int64_t s = 0; i < channels && s < segments.count; ++s) {
          rows[i] = _mm512_mask_loadu_ps(rows[i], segments.lanes[s], plane + segments.offset[s]);
        }
      }
      TransposeBlock<float>::transpose(rows);
      const __m512 addend = bias == nullptr ? _mm512_setzero_ps()
                                            : _mm512_maskz_loadu_ps(lanes, bias + channel + c);
      for (int64_t i = 0; i < segments.pixels; ++i) {
        store_lanes(lanes, _mm512_add_ps(rows[i], addend), to + i * image.channels);
      }
    }
  }
}

#else

// Floats from one plane to the next without borders: whole vectors, and not a power of two.
inline int64_t dense_size(int64_t pixels) { return padded(pixels) + kVectorWidth; }

// Planes without borders, in scratch memory.
inline float* dense_planes(int64_t count, int64_t pixels) {
  return scratch<float>(ScratchSlot::kDestination, count * dense_size(pixels));
}

// to[c * to_row + r] = from[r * from_row + c]. On these CPUs nobody asks for bfloat16 to be fast.
template <typename From, typename To>
void transpose_values(const From* from, int64_t from_row, To* to, int64_t to_row, int64_t rows,
                      int64_t columns) {
  if constexpr (std::is_same_v<From, To>) {
    return transpose_tile(from, from_row, to, to_row, rows, columns);
  }
  for (int64_t c = 0; c < columns; ++c) {
    for (int64_t r = 0; r < rows; ++r) {
      to[c * to_row + r] = from_float<To>(to_float(from[r * from_row + c]));
    }
  }
}

// The same for channels that lie last, by way of planes without borders.
template <typename T>
void load_transposed(const ImageView<const T>& image, int64_t channel, int64_t count,
                     const PlaneLayout& layout, float* planes) {
  const int64_t pixels = image.height * image.width;
  const int64_t size = dense_size(pixels);
  float* dense = dense_planes(count, pixels);
  transpose_values(image.data + channel, image.channels, dense, size, pixels, count);
  for (int64_t c = 0; c < count; ++c) {
    copy_plane(dense + c * size, image.width, image.height, image.width, 0.0F,
               planes + c * layout.size + layout.first, layout.row);
  }
}

template <typename T>
void store_transposed(const float* planes, const PlaneLayout& layout, int64_t channel,
                      int64_t count, const float* bias, const ImageView<T>& image) {
  const int64_t pixels = image.height * image.width;
  const int64_t size = dense_size(pixels);
  float* dense = dense_planes(count, pixels);
  for (int64_t c = 0; c < count; ++c) {
    copy_plane(planes + c * layout.size + layout.first, layout.row, image.height, image.width,
               bias == nullptr ? 0.0F : bias[channel + c], dense + c * size, image.width);
  }
  transpose_values(dense, size, image.data + channel, image.channels, count, pixels);
}

#endif

// Sets the pixels of `count` planes, from `channel` on, and leaves what lies between them.
template <typename T>
void load_planes(const ImageView<const T>& image, int64_t channel, int64_t count,
                 const PlaneLayout& layout, float* planes) {
  if (image.channels_last) {
    return load_transposed(image, channel, count, layout, planes);
  }
  const int64_t pixels = image.height * image.width;
  for (int64_t c = 0; c < count; ++c) {
    copy_plane(image.data + (channel + c) * pixels, image.width, image.height, image.width, 0.0F,
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
    copy_plane(planes + c * layout.size + layout.first, layout.row, image.height, image.width,
               bias == nullptr ? 0.0F : bias[channel + c], image.data + (channel + c) * pixels,
               image.width);
  }
}

}  // namespace oneflow_accel
