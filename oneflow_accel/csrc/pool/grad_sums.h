// Where gradients of pooling are added up: float32 in dx itself; bfloat16, which would be rounded
// for each window that covers a pixel, in float32 that is rounded once.
#pragma once

#include <algorithm>
#include <type_traits>

#include "common/bfloat16.h"
#include "common/onednn.h"

namespace oneflow_accel {

// The channels [begin, end) of one image, which has `pixels` of `channels` each. A plane is an
// image of one channel. A thread has one of these at a time: its scratch memory is the sums'.
template <typename T>
class GradSums {
 public:
  GradSums(T* dx, int64_t pixels, int64_t channels, int64_t begin, int64_t end)
      : dx_(dx), pixels_(pixels), channels_(channels), begin_(begin), end_(end) {
    if constexpr (std::is_same_v<T, float>) {
      sums_ = dx;
    } else {
      sums_ = static_cast<float*>(
          scratch(ScratchSlot::kDestination, pixels * channels * sizeof(float)));
    }
  }
  GradSums(T* dx, int64_t pixels) : GradSums(dx, pixels, 1, 0, 1) { clear_up_to(pixels); }

  float* data() const { return sums_; }

  // Zeros in the pixels before `pixel` that were not cleared yet.
  void clear_up_to(int64_t pixel) {
    for_each_range(cleared_, pixel, [this](int64_t begin, int64_t end) {
      std::fill(sums_ + begin, sums_ + end, 0.0F);
    });
    cleared_ = std::max(cleared_, pixel);
  }

  // When all is added up.
  void store() {
    clear_up_to(pixels_);
    if constexpr (!std::is_same_v<T, float>) {
      for_each_range(0, pixels_, [from = sums_, to = dx_](int64_t begin, int64_t end) {
#pragma omp simd
        for (int64_t i = begin; i < end; ++i) { to[i] = from_float<T>(from[i]); }
      });
    }
  }

 private:
  // Calls fn(begin, end) for what the pixels [first, last) have of the channels, in one piece where
  // these are all of them.
  template <typename Fn>
  void for_each_range(int64_t first, int64_t last, const Fn& fn) const {
    if (end_ - begin_ == channels_) {
      if (first < last) { fn(first * channels_, last * channels_); }
      return;
    }
    for (int64_t p = first; p < last; ++p) { fn(p * channels_ + begin_, p * channels_ + end_); }
  }

  T* dx_;
  float* sums_;
  int64_t pixels_, channels_, begin_, end_;
  int64_t cleared_ = 0;
};

}  // namespace oneflow_accel
