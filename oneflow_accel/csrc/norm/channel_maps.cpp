#include "norm/channel_maps.h"

#include <algorithm>

#include "common/threads.h"

namespace oneflow_accel {

namespace {

// Elements per word of a mask.
constexpr int64_t kWord = 32;

// Below, functions of "rows" take whole rows of a channels-last tensor, with n coefficients, and
// functions of a "plane" take n elements of one channel, with one coefficient each. `omp simd` says
// that outputs overlap inputs element by element at most.

template <bool adds, typename T>
void normalize_rows(const T* x, int64_t rows, int64_t n, const float* mean, const float* scale,
                    const float* shift, const T* addend, T* y) {
  for (int64_t row = 0; row < rows; ++row, x += n, y += n) {
#pragma omp simd
    for (int64_t c = 0; c < n; ++c) {
      const float z = (to_float(x[c]) - mean[c]) * scale[c] + shift[c];
      y[c] = from_float<T>(adds ? z + to_float(addend[row * n + c]) : z);
    }
  }
}

template <bool adds, typename T>
void normalize_plane(const T* x, int64_t n, float mean, float scale, float shift, const T* addend,
                     T* y) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float z = (to_float(x[i]) - mean) * scale + shift;
    y[i] = from_float<T>(adds ? z + to_float(addend[i]) : z);
  }
}

template <typename T>
void input_gradient_rows(const T* dy, const T* x, int64_t rows, int64_t n, const float* mean,
                         const float* dy_scale, const float* x_scale, const float* shift, T* dx) {
  for (int64_t row = 0; row < rows; ++row, dy += n, x += n, dx += n) {
#pragma omp simd
    for (int64_t c = 0; c < n; ++c) {
      dx[c] = from_float<T>(to_float(dy[c]) * dy_scale[c]
                            + (to_float(x[c]) - mean[c]) * x_scale[c] + shift[c]);
    }
  }
}

template <typename T>
void input_gradient_plane(const T* dy, const T* x, int64_t n, float mean, float dy_scale,
                          float x_scale, float shift, T* dx) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    dx[i] = from_float<T>(to_float(dy[i]) * dy_scale + (to_float(x[i]) - mean) * x_scale + shift);
  }
}

// relu in place, with its mask. NaN stays, and its gradient passes.
template <typename T>
void relu_with_mask(T* y, int32_t* mask, int64_t n) {
  const int64_t words = n / kWord;
  for (int64_t w = 0; w < words; ++w) {
    T* block = y + w * kWord;
    uint32_t bits = 0;
#pragma omp simd reduction(| : bits)
    for (uint32_t i = 0; i < kWord; ++i) {
      const float value = to_float(block[i]);
      bits |= value <= 0.0F ? 0U : 1U << i;
      block[i] = from_float<T>(value <= 0.0F ? 0.0F : value);
    }
    mask[w] = static_cast<int32_t>(bits);
  }
  if (words * kWord < n) {
    uint32_t bits = 0;
    for (int64_t i = words * kWord; i < n; ++i) {
      if (to_float(y[i]) <= 0.0F) {
        y[i] = T{};
      } else {
        bits |= 1U << (i % kWord);
      }
    }
    mask[words] = static_cast<int32_t>(bits);
  }
}

// By way of float32, as of bfloat16 alone GCC makes no vector code.
template <typename T>
void apply_mask_words(const T* dy, const int32_t* mask, T* out, int64_t n) {
  const int64_t words = n / kWord;
  for (int64_t w = 0; w < words; ++w) {
    const auto bits = static_cast<uint32_t>(mask[w]);
#pragma omp simd
    for (uint32_t i = 0; i < kWord; ++i) {
      const float value = to_float(dy[w * kWord + i]);
      out[w * kWord + i] = from_float<T>(((bits >> i) & 1U) != 0 ? value : 0.0F);
    }
  }
  for (int64_t i = words * kWord; i < n; ++i) {
    out[i] = ((static_cast<uint32_t>(mask[words]) >> (i % kWord)) & 1U) != 0 ? dy[i] : T{};
  }
}

// A slice is a row of a channels-last tensor or a plane of a channels-first one.
int64_t num_slices(const ChannelView& view) {
  return view.channels_last() ? view.outer : view.outer * view.channels;
}

int64_t slice_size(const ChannelView& view) {
  return view.channels_last() ? view.channels : view.inner;
}

// The slices [begin, end).
template <bool adds, typename T>
void normalize_slices(const ChannelView& view, int64_t begin, int64_t end, const T* x,
                      const float* mean, const float* scale, const float* shift, const T* addend,
                      T* y) {
  const int64_t n = slice_size(view);
  const auto addend_at = [&](int64_t start) { return adds ? addend + start : nullptr; };
  if (view.channels_last()) {
    const int64_t start = begin * n;
    return normalize_rows<adds>(x + start, end - begin, n, mean, scale, shift, addend_at(start),
                                y + start);
  }
  for (int64_t i = begin; i < end; ++i) {
    const int64_t c = i % view.channels;
    const int64_t start = i * n;
    normalize_plane<adds>(x + start, n, mean[c], scale[c], shift[c], addend_at(start), y + start);
  }
}

}  // namespace

template <typename T>
void normalize(const ChannelView& view, const T* x, const float* mean, const float* scale,
               const float* shift, const T* addend, T* y, int32_t* mask) {
  if (view.elements() == 0) { return; }
  const int64_t slices = num_slices(view);
  const int64_t n = slice_size(view);
  const auto run = [&](int64_t begin, int64_t end) {
    if (addend == nullptr) {
      normalize_slices<false>(view, begin, end, x, mean, scale, shift, addend, y);
    } else {
      normalize_slices<true>(view, begin, end, x, mean, scale, shift, addend, y);
    }
  };
  if (mask == nullptr) {
    return parallel_for(slices, std::max<int64_t>(1, kGrainSize / n), run);
  }
  // kWord slices are a whole number of mask words, so that no two threads share one; and y is
  // still in the cache when its signs are looked at.
  parallel_for((slices + kWord - 1) / kWord, std::max<int64_t>(1, kGrainSize / (kWord * n)),
               [&](int64_t begin, int64_t end) {
                 for (int64_t first = begin * kWord; first < std::min(slices, end * kWord);
                      first += kWord) {
                   const int64_t last = std::min(slices, first + kWord);
                   run(first, last);
                   relu_with_mask(y + first * n, mask + first * n / kWord, (last - first) * n);
                 }
               });
}

template <typename T>
void apply_mask(const T* dy, const int32_t* mask, T* out, int64_t n) {
  parallel_for((n + kWord - 1) / kWord, kGrainSize / kWord, [=](int64_t begin, int64_t end) {
    const int64_t first = begin * kWord;
    apply_mask_words(dy + first, mask + begin, out + first, std::min(n, end * kWord) - first);
  });
}

template <typename T>
void input_gradient(const ChannelView& view, const T* dy, const T* x, const float* mean,
                    const float* dy_scale, const float* x_scale, const float* shift, T* dx) {
  if (view.elements() == 0) { return; }
  const int64_t n = slice_size(view);
  parallel_for(num_slices(view), std::max<int64_t>(1, kGrainSize / n),
               [&](int64_t begin, int64_t end) {
                 if (view.channels_last()) {
                   const int64_t start = begin * n;
                   input_gradient_rows(dy + start, x + start, end - begin, n, mean, dy_scale,
                                       x_scale, shift, dx + start);
                   return;
                 }
                 for (int64_t i = begin; i < end; ++i) {
                   const int64_t c = i % view.channels;
                   const int64_t start = i * n;
                   input_gradient_plane(dy + start, x + start, n, mean[c], dy_scale[c], x_scale[c],
                                        shift[c], dx + start);
                 }
               });
}

template void normalize(const ChannelView&, const float*, const float*, const float*, const float*,
                        const float*, float*, int32_t*);
template void apply_mask(const float*, const int32_t*, float*, int64_t);
template void input_gradient(const ChannelView&, const float*, const float*, const float*,
                             const float*, const float*, const float*, float*);
template void normalize(const ChannelView&, const Bfloat16*, const float*, const float*,
                        const float*, const Bfloat16*, Bfloat16*, int32_t*);
template void apply_mask(const Bfloat16*, const int32_t*, Bfloat16*, int64_t);
template void input_gradient(const ChannelView&, const Bfloat16*, const Bfloat16*, const float*,
                             const float*, const float*, const float*, Bfloat16*);

}  // namespace oneflow_accel
