// Which input elements each output element of a 2-D pooling covers, and how threads share them out.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "common/bfloat16.h"
#include "common/onednn.h"
#include "common/threads.h"

namespace oneflow_accel {

// What one output index covers on one axis: begin, begin + step, ... below end, all inside the
// input. `full` also counts the positions that lie in the padding.
struct PoolWindow {
  int64_t begin;
  int64_t end;
  int64_t step;
  int64_t full;

  int64_t count() const { return ceil_div(end - begin, step); }
};

struct PoolGeometry {
  bool channels_last;
  int64_t batch;
  int64_t channels;
  int64_t height;
  int64_t width;
  std::vector<PoolWindow> rows;     // one per output row
  std::vector<PoolWindow> columns;  // one per output column
  // What an average divides its sum by: this, unless it is 0; else the window's size with the
  // padding it covers, or without.
  int64_t fixed_divisor = 0;
  bool counts_padding = false;

  int64_t in_pixels() const { return height * width; }
  int64_t out_height() const { return static_cast<int64_t>(rows.size()); }
  int64_t out_pixels() const { return out_height() * static_cast<int64_t>(columns.size()); }

  float divisor(const PoolWindow& row, const PoolWindow& column) const {
    if (fixed_divisor != 0) { return static_cast<float>(fixed_divisor); }
    const int64_t size = counts_padding ? row.full * column.full : row.count() * column.count();
    return static_cast<float>(std::max<int64_t>(size, 1));  // an empty window's average is 0
  }
};

// The pixels that one output pixel of a channels-last image covers, row by row, as offsets from the
// image's start.
class PoolTaps {
 public:
  void find(const PoolGeometry& g, const PoolWindow& row, const PoolWindow& column) {
    offsets_.clear();
    for (int64_t h = row.begin; h < row.end; h += row.step) {
      for (int64_t w = column.begin; w < column.end; w += column.step) {
        offsets_.push_back((h * g.width + w) * g.channels);
      }
    }
  }
  int64_t count() const { return static_cast<int64_t>(offsets_.size()); }
  int64_t operator[](int64_t k) const { return offsets_[k]; }

 private:
  std::vector<int64_t> offsets_;
};

// Some of the channels of an image, and where it begins in the input and in the output.
struct PoolPart {
  int64_t begin;
  int64_t end;
  int64_t in;
  int64_t out;

  int64_t channels() const { return end - begin; }
};

// Channels first: calls fn(offset in the input, offset in the output) for each plane.
template <typename Fn>
void for_each_plane(const PoolGeometry& g, const Fn& fn) {
  for_each_block(g.batch * g.channels, g.in_pixels(),
                 [&](int64_t plane) { fn(plane * g.in_pixels(), plane * g.out_pixels()); });
}

// Channels last: calls fn(row, part) for images cut into `rows`, which is 1 or their output's rows:
// the part's output begins at that row. Threads that are more than those share out channels.
template <typename Fn>
void for_each_part(const PoolGeometry& g, int64_t rows, const Fn& fn) {
  // In pieces of this many: whole cache lines.
  constexpr int64_t kStrip = 64;
  const int64_t tasks = g.batch * rows;
  if (tasks == 0 || g.channels == 0) { return; }
  const int64_t strips = ceil_div(g.channels, kStrip);
  const int64_t parts = std::clamp<int64_t>(num_threads() / tasks, 1, strips);
  for_each_block(tasks * parts, g.in_pixels() / rows * g.channels / parts, [&](int64_t i) {
    const int64_t task = i / parts;
    const int64_t part = i % parts;
    const int64_t end = strips * (part + 1) / parts * kStrip;
    fn(task % rows, PoolPart{strips * part / parts * kStrip, std::min(end, g.channels),
                             task / rows * g.in_pixels() * g.channels,
                             task * (g.out_pixels() / rows) * g.channels});
  });
}

// Where gradients are added up: float32 in dx itself; bfloat16, which would be rounded for each
// window that covers a pixel, in float32 that is rounded once. They are the channels [begin, end)
// of one image, which has `pixels` of `channels` each; a plane is an image of one channel. A thread
// has one of these at a time: its scratch memory is the sums'.
template <typename T>
class GradSums {
 public:
  GradSums(T* dx, int64_t pixels, int64_t channels, int64_t begin, int64_t end)
      : dx_(dx), pixels_(pixels), channels_(channels), begin_(begin), end_(end) {
    if constexpr (std::is_same_v<T, float>) {
      sums_ = dx;
    } else {
      sums_ = scratch<float>(ScratchSlot::kDestination, pixels * channels);
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
