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

void normalize_rows(const float* x, int64_t rows, int64_t n, const float* mean, const float* scale,
                    const float* shift, float* y) {
  for (int64_t row = 0; row < rows; ++row, x += n, y += n) {
#pragma omp simd
    for (int64_t c = 0; c < n; ++c) { y[c] = (x[c] - mean[c]) * scale[c] + shift[c]; }
  }
}

void normalize_add_rows(const float* x, int64_t rows, int64_t n, const float* mean,
                        const float* scale, const float* shift, const float* addend, float* y) {
  for (int64_t row = 0; row < rows; ++row, x += n, addend += n, y += n) {
#pragma omp simd
    for (int64_t c = 0; c < n; ++c) {
      y[c] = (x[c] - mean[c]) * scale[c] + shift[c] + addend[c];
    }
  }
}

void normalize_plane(const float* x, int64_t n, float mean, float scale, float shift, float* y) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { y[i] = (x[i] - mean) * scale + shift; }
}

void normalize_add_plane(const float* x, int64_t n, float mean, float scale, float shift,
                         const float* addend, float* y) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { y[i] = (x[i] - mean) * scale + shift + addend[i]; }
}

void input_gradient_rows(const float* dy, const float* x, int64_t rows, int64_t n,
                         const float* mean, const float* dy_scale, const float* x_scale,
                         const float* shift, float* dx) {
  for (int64_t row = 0; row < rows; ++row, dy += n, x += n, dx += n) {
#pragma omp simd
    for (int64_t c = 0; c < n; ++c) {
      dx[c] = dy[c] * dy_scale[c] + (x[c] - mean[c]) * x_scale[c] + shift[c];
    }
  }
}

void input_gradient_plane(const float* dy, const float* x, int64_t n, float mean, float dy_scale,
                          float x_scale, float shift, float* dx) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    dx[i] = dy[i] * dy_scale + (x[i] - mean) * x_scale + shift;
  }
}

// relu in place, with its mask. NaN stays, and its gradient passes.
void relu_with_mask(float* y, int32_t* mask, int64_t n) {
  const int64_t words = n / kWord;
  for (int64_t w = 0; w < words; ++w) {
    float* block = y + w * kWord;
    uint32_t bits = 0;
#pragma omp simd reduction(| : bits)
    for (uint32_t i = 0; i < kWord; ++i) {
      const float value = block[i];
      bits |= value <= 0.0F ? 0U : 1U << i;
      block[i] = value <= 0.0F ? 0.0F : value;
    }
    mask[w] = static_cast<int32_t>(bits);
  }
  if (words * kWord < n) {
    uint32_t bits = 0;
    for (int64_t i = words * kWord; i < n; ++i) {
      if (y[i] <= 0.0F) {
        y[i] = 0.0F;
      } else {
        bits |= 1U << (i % kWord);
      }
    }
    mask[words] = static_cast<int32_t>(bits);
  }
}

void apply_mask_words(const float* dy, const int32_t* mask, float* out, int64_t n) {
  const int64_t words = n / kWord;
  for (int64_t w = 0; w < words; ++w) {
    const auto bits = static_cast<uint32_t>(mask[w]);
#pragma omp simd
    for (uint32_t i = 0; i < kWord; ++i) {
      out[w * kWord + i] = ((bits >> i) & 1U) != 0 ? dy[w * kWord + i] : 0.0F;
    }
  }
  for (int64_t i = words * kWord; i < n; ++i) {
    out[i] = ((static_cast<uint32_t>(mask[words]) >> (i % kWord)) & 1U) != 0 ? dy[i] : 0.0F;
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
void normalize_slices(const ChannelView& view, int64_t begin, int64_t end, const float* x,
                      const float* mean, const float* scale, const float* shift,
                      const float* addend, float* y) {
  const int64_t n = slice_size(view);
  if (view.channels_last()) {
    const int64_t start = begin * n;
    if (addend == nullptr) {
      normalize_rows(x + start, end - begin, n, mean, scale, shift, y + start);
    } else {
      normalize_add_rows(x + start, end - begin, n, mean, scale, shift, addend + start, y + start);
    }
    return;
  }
  for (int64_t i = begin; i < end; ++i) {
    const int64_t c = i % view.channels;
    const int64_t start = i * n;
    if (addend == nullptr) {
      normalize_plane(x + start, n, mean[c], scale[c], shift[c], y + start);
    } else {
      normalize_add_plane(x + start, n, mean[c], scale[c], shift[c], addend + start, y + start);
    }
  }
}

}  // namespace

void normalize(const ChannelView& view, const float* x, const float* mean, const float* scale,
               const float* shift, const float* addend, float* y, int32_t* mask) {
  if (view.elements() == 0) { return; }
  const int64_t slices = num_slices(view);
  const int64_t n = slice_size(view);
  if (mask == nullptr) {
    parallel_for(slices, std::max<int64_t>(1, kGrainSize / n), [&](int64_t begin, int64_t end) {
      normalize_slices(view, begin, end, x, mean, scale, shift, addend, y);
    });
    return;
  }
  // kWord slices are a whole number of mask words, so that no two threads share one; and y is
  // still in the cache when its signs are looked at.
  parallel_for((slices + kWord - 1) / kWord, std::max<int64_t>(1, kGrainSize / (kWord * n)),
               [&](int64_t begin, int64_t end) {
                 for (int64_t first = begin * kWord; first < std::min(slices, end * kWord);
                      first += kWord) {
                   const int64_t last = std::min(slices, first + kWord);
                   normalize_slices(view, first, last, x, mean, scale, shift, addend, y);
                   relu_with_mask(y + first * n, mask + first * n / kWord, (last - first) * n);
                 }
               });
}

void apply_mask(const float* dy, const int32_t* mask, float* out, int64_t n) {
  parallel_for((n + kWord - 1) / kWord, kGrainSize / kWord, [=](int64_t begin, int64_t end) {
    const int64_t first = begin * kWord;
    apply_mask_words(dy + first, mask + begin, out + first, std::min(n, end * kWord) - first);
  });
}

void input_gradient(const ChannelView& view, const float* dy, const float* x, const float* mean,
                    const float* dy_scale, const float* x_scale, const float* shift, float* dx) {
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

}  // namespace oneflow_accel
