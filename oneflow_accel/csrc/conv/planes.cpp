#include "conv/planes.h"

#include <algorithm>

#include "attention/block_product.h"
#include "common/vector.h"
#include "copy/transpose_tile.h"

namespace oneflow_accel {

namespace {

// Floats from one plane to the next without borders: whole vectors, and not a power of two.
int64_t dense_size(int64_t height, int64_t width) { return padded(height * width) + kVectorWidth; }

// Rows of one plane between two layouts.
template <typename From, typename To>
void copy_rows(const From* from, int64_t from_row, int64_t height, int64_t width, float addend,
               To* to, int64_t to_row) {
  for (int64_t y = 0; y < height; ++y) {
    const From* source = from + y * from_row;
    To* target = to + y * to_row;
    for (int64_t x = 0; x < width; ++x) { target[x] = from_float<To>(to_float(source[x]) + addend); }
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
ONEFLOW_ACCEL_INLINE __m512 load_lanes(__mmask16 lanes,
                                                            const Bfloat16* from) {
  const __m512i bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

ONEFLOW_ACCEL_INLINE void store_lanes(__mmask16 lanes, __m512 x, float* to) {
  _mm512_mask_storeu_ps(to, lanes, x);
}
// Rounds as from_float<Bfloat16>() does.
ONEFLOW_ACCEL_INLINE void store_lanes(__mmask16 lanes, __m512 x,
                                                           Bfloat16* to) {
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
                 const PlaneLayout& layout, float*, float* planes) {
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
      TransposeBlock<float>::transpose(rows, rows);
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
void store_transposed(const float* planes, const PlaneLayout& layout, int64_t channel, int64_t count,
                  const float* bias, float*, const ImageView<T>& image) {
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
      TransposeBlock<float>::transpose(rows, rows);
      const __m512 addend = bias == nullptr ? _mm512_setzero_ps()
                                            : _mm512_maskz_loadu_ps(lanes, bias + channel + c);
      for (int64_t i = 0; i < segments.pixels; ++i) {
        store_lanes(lanes, _mm512_add_ps(rows[i], addend), to + i * image.channels);
      }
    }
  }
}

#else

// The same for channels that lie last, by way of planes without borders in `space`.
void load_transposed(const ImageView<const float>& image, int64_t channel, int64_t count,
                     const PlaneLayout& layout, float* space, float* planes) {
  const int64_t plane = dense_size(image.height, image.width);
  transpose_tile(image.data + channel, image.channels, space, plane, image.height * image.width,
                 count);
  for (int64_t c = 0; c < count; ++c) {
    copy_rows(space + c * plane, image.width, image.height, image.width, 0.0F,
              planes + c * layout.size + layout.first, layout.row);
  }
}

void store_transposed(const float* planes, const PlaneLayout& layout, int64_t channel,
                      int64_t count, const float* bias, float* space,
                      const ImageView<float>& image) {
  const int64_t plane = dense_size(image.height, image.width);
  for (int64_t c = 0; c < count; ++c) {
    copy_rows(planes + c * layout.size + layout.first, layout.row, image.height, image.width,
              bias == nullptr ? 0.0F : bias[channel + c], space + c * plane, image.width);
  }
  transpose_tile(space, plane, image.data + channel, image.channels, count,
                 image.height * image.width);
}

// On these CPUs nobody asks for bfloat16 to be fast.
void load_transposed(const ImageView<const Bfloat16>& image, int64_t channel, int64_t count,
                     const PlaneLayout& layout, float*, float* planes) {
  for (int64_t c = 0; c < count; ++c) {
    float* plane = planes + c * layout.size + layout.first;
    const Bfloat16* from = image.data + channel + c;
    for (int64_t y = 0; y < image.height; ++y) {
      for (int64_t x = 0; x < image.width; ++x, from += image.channels) {
        plane[y * layout.row + x] = to_float(*from);
      }
    }
  }
}

void store_transposed(const float* planes, const PlaneLayout& layout, int64_t channel,
                      int64_t count, const float* bias, float*, const ImageView<Bfloat16>& image) {
  for (int64_t c = 0; c < count; ++c) {
    const float* plane = planes + c * layout.size + layout.first;
    const float addend = bias == nullptr ? 0.0F : bias[channel + c];
    Bfloat16* to = image.data + channel + c;
    for (int64_t y = 0; y < image.height; ++y) {
      for (int64_t x = 0; x < image.width; ++x, to += image.channels) {
        *to = from_float<Bfloat16>(plane[y * layout.row + x] + addend);
      }
    }
  }
}

#endif

}  // namespace

int64_t planes_space(int64_t channels, int64_t height, int64_t width, bool channels_last) {
  return channels_last ? channels * dense_size(height, width) : 0;
}

template <typename T>
void load_planes(const ImageView<const T>& image, int64_t channel, int64_t count,
                 const PlaneLayout& layout, float* space, float* planes) {
  if (image.channels_last) {
    return load_transposed(image, channel, count, layout, space, planes);
  }
  const int64_t pixels = image.height * image.width;
  for (int64_t c = 0; c < count; ++c) {
    copy_rows(image.data + (channel + c) * pixels, image.width, image.height, image.width, 0.0F,
              planes + c * layout.size + layout.first, layout.row);
  }
}

template <typename T>
void store_planes(const float* planes, const PlaneLayout& layout, int64_t channel, int64_t count,
                  const float* bias, float* space, const ImageView<T>& image) {
  if (image.channels_last) {
    return store_transposed(planes, layout, channel, count, bias, space, image);
  }
  const int64_t pixels = image.height * image.width;
  for (int64_t c = 0; c < count; ++c) {
    copy_rows(planes + c * layout.size + layout.first, layout.row, image.height, image.width,
              bias == nullptr ? 0.0F : bias[channel + c], image.data + (channel + c) * pixels,
              image.width);
  }
}

template void load_planes(const ImageView<const float>&, int64_t, int64_t, const PlaneLayout&,
                          float*, float*);
template void load_planes(const ImageView<const Bfloat16>&, int64_t, int64_t, const PlaneLayout&,
                          float*, float*);
template void store_planes(const float*, const PlaneLayout&, int64_t, int64_t, const float*, float*,
                           const ImageView<float>&);
template void store_planes(const float*, const PlaneLayout&, int64_t, int64_t, const float*, float*,
                           const ImageView<Bfloat16>&);

}  // namespace oneflow_accel
