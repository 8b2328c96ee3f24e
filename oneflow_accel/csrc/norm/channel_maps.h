// The elementwise passes of a normalization, with per-channel coefficients, float32 and bfloat16.
#pragma once

#include <algorithm>

#include "common/bfloat16.h"
#include "common/threads.h"
#include "norm/channel_sums.h"

namespace oneflow_accel {

// A coefficient for the elements of a slice: one for each where the slice is a row of a
// channels-last tensor (`last`), one for all where it is a plane of a channels-first one.
template <bool last>
class Coefficient {
 public:
  Coefficient(const float* of_channels, int64_t channel)
      : each_(of_channels), all_(of_channels[channel]) {}
  ONEFLOW_ACCEL_INLINE float operator[](int64_t i) const { return last ? each_[i] : all_; }

 private:
  const float* each_;
  float all_;
};

// Calls fn(last, begin, end) for slices, in parallel; `last` is std::true_type or std::false_type.
template <typename Fn>
void for_slices(const ChannelView& view, int64_t slices_at_once, const Fn& fn) {
  if (view.elements() == 0) { return; }
  const int64_t slices = view.channels_last() ? view.outer : view.outer * view.channels;
  const int64_t units = ceil_div(slices, slices_at_once);
  parallel_for(units, grain_of(slices_at_once * view.slice()), [&](int64_t begin, int64_t end) {
    const int64_t last = std::min(slices, end * slices_at_once);
    if (view.channels_last()) {
      fn(std::true_type(), begin * slices_at_once, last);
    } else {
      fn(std::false_type(), begin * slices_at_once, last);
    }
  });
}

// Elements per word of a mask.
constexpr int64_t kMaskWord = 32;

// relu in place of n <= kMaskWord elements, and their word. NaN stays, and its gradient passes.
template <typename T>
ONEFLOW_ACCEL_INLINE uint32_t relu_of_word(T* y, int64_t n) {
  uint32_t bits = 0;
#pragma omp simd reduction(| : bits)
  for (int64_t i = 0; i < n; ++i) {
    const float value = to_float(y[i]);
    bits |= value <= 0.0F ? 0U : 1U << static_cast<uint32_t>(i);
    y[i] = from_float<T>(value <= 0.0F ? 0.0F : value);
  }
  return bits;
}

// By way of float32, as of bfloat16 alone GCC makes no vector code.
template <typename T>
ONEFLOW_ACCEL_INLINE void apply_word(const T* dy, uint32_t bits, int64_t n, T* out) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float value = to_float(dy[i]);
    out[i] = from_float<T>(((bits >> static_cast<uint32_t>(i)) & 1U) != 0 ? value : 0.0F);
  }
}

// Calls fn(word, its first element, how many it has) for n elements: with kMaskWord as a constant
// for all words but the last.
template <typename Fn>
ONEFLOW_ACCEL_INLINE void for_words(int64_t n, const Fn& fn) {
  const int64_t words = n / kMaskWord;
  for (int64_t w = 0; w < words; ++w) { fn(w, w * kMaskWord, kMaskWord); }
  if (words * kMaskWord < n) { fn(words, words * kMaskWord, n - words * kMaskWord); }
}

// y = (x - mean[c]) * scale[c] + shift[c] + addend. `addend` may be null, or y itself.
//
// With `mask`, y is then replaced by max(y, 0), and bit i % 32 of mask[i / 32] says whether the
// gradient of y's element i (in memory order) passes; the spare bits of the last word are 0.
template <typename T>
void normalize(const ChannelView& view, const T* x, const float* mean, const float* scale,
               const float* shift, const T* addend, T* y, int32_t* mask) {
  const int64_t n = view.slice();
  const auto of_slice = [=](auto last, auto adds, int64_t slice) {
    const int64_t channel = last ? 0 : slice % view.channels;
    const Coefficient<last> means(mean, channel);
    const Coefficient<last> scales(scale, channel);
    const Coefficient<last> shifts(shift, channel);
    const T* from = x + slice * n;
    const T* added = adds ? addend + slice * n : nullptr;
    T* to = y + slice * n;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      const float z = (to_float(from[i]) - means[i]) * scales[i] + shifts[i];
      to[i] = from_float<T>(adds ? z + to_float(added[i]) : z);
    }
  };
  const auto of_slices = [=](auto last, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (addend == nullptr) {
        of_slice(last, std::false_type(), i);
      } else {
        of_slice(last, std::true_type(), i);
      }
    }
  };
  if (mask == nullptr) { return for_slices(view, 1, of_slices); }
  // kMaskWord slices are a whole number of mask words, so that no two threads share one; and y is
  // still in the cache when its signs are looked at.
  for_slices(view, kMaskWord, [=](auto last, int64_t begin, int64_t end) {
    for (int64_t first = begin; first < end; first += kMaskWord) {
      const int64_t stop = std::min(end, first + kMaskWord);
      of_slices(last, first, stop);
      T* block = y + first * n;
      int32_t* words = mask + first * n / kMaskWord;
      for_words((stop - first) * n, [=](int64_t word, int64_t i, int64_t count) {
        words[word] = static_cast<int32_t>(relu_of_word(block + i, count));
      });
    }
  });
}

// out = dy where the mask made by normalize() has a 1, else 0; n elements.
template <typename T>
void apply_mask(const T* dy, const int32_t* mask, T* out, int64_t n) {
  parallel_for(ceil_div(n, kMaskWord), grain_of(kMaskWord), [=](int64_t begin, int64_t end) {
    const int64_t first = begin * kMaskWord;
    for_words(std::min(n, end * kMaskWord) - first, [=](int64_t word, int64_t i, int64_t count) {
      apply_word(dy + first + i, static_cast<uint32_t>(mask[begin + word]), count,
                 out + first + i);
    });
  });
}

// dx = dy * dy_scale[c] + (x - mean[c]) * x_scale[c] + shift[c]. dx may be dy itself.
template <typename T>
void input_gradient(const ChannelView& view, const T* dy, const T* x, const float* mean,
                    const float* dy_scale, const float* x_scale, const float* shift, T* dx) {
  const int64_t n = view.slice();
  for_slices(view, 1, [=](auto last, int64_t begin, int64_t end) {
    for (int64_t slice = begin; slice < end; ++slice) {
      const int64_t channel = last ? 0 : slice % view.channels;
      const Coefficient<last> means(mean, channel);
      const Coefficient<last> dy_scales(dy_scale, channel);
      const Coefficient<last> x_scales(x_scale, channel);
      const Coefficient<last> shifts(shift, channel);
      const T* grad = dy + slice * n;
      const T* from = x + slice * n;
      T* to = dx + slice * n;
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) {
        to[i] = from_float<T>(to_float(grad[i]) * dy_scales[i]
                              + (to_float(from[i]) - means[i]) * x_scales[i] + shifts[i]);
      }
    }
  });
}

}  // namespace oneflow_accel
