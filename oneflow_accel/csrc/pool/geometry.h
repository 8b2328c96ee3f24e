// Which input elements each output element of a 2-D pooling covers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/oneflow.h"

namespace oneflow_accel {

// What one output index covers on one axis: begin, begin + step, ... below end, all inside the
// input. `full` also counts the positions that lie in the padding.
struct PoolWindow {
  int64_t begin;
  int64_t end;
  int64_t step;
  int64_t full;

  int64_t count() const { return (end - begin + step - 1) / step; }
};

// One axis of a sliding window. `padding_after` bounds `full` only: the number of outputs is
// OneFlow's choice, and a window beyond the input is empty.
struct SlidingAxis {
  int64_t kernel;
  int64_t stride;
  int64_t padding_before;
  int64_t padding_after;
  int64_t dilation;
};

struct PoolGeometry {
  bool channels_last;
  int64_t batch;
  int64_t channels;
  int64_t height;
  int64_t width;
  std::vector<PoolWindow> rows;     // one per output row
  std::vector<PoolWindow> columns;  // one per output column

  int64_t in_pixels() const { return height * width; }
  int64_t out_pixels() const { return static_cast<int64_t>(rows.size() * columns.size()); }
};

// `x` and `y`: shapes of the input and the output. `data_format`: "channels_first" (N, C, H, W) or
// "channels_last" (N, H, W, C).
PoolGeometry sliding_geometry(const ::oneflow::ShapeView& x, const ::oneflow::ShapeView& y,
                              const std::string& data_format, const SlidingAxis& vertical,
                              const SlidingAxis& horizontal);

// Output index i covers floor(i * in / out) up to ceil((i + 1) * in / out); (N, C, H, W).
PoolGeometry adaptive_geometry(const ::oneflow::ShapeView& x, const ::oneflow::ShapeView& y);

// The pixels that one output pixel of a channels-last image covers, row by row, as offsets from the
// image's start.
using PoolTaps = std::vector<int64_t>;
void find_taps(const PoolGeometry& geometry, const PoolWindow& row, const PoolWindow& column,
               PoolTaps* taps);

// Channels-last kernels run in parallel over `tasks` (images or output rows) and, where those are
// fewer than the threads, over ranges of channels: calls fn(task, first channel, end channel).
template <typename Fn>
void for_each_channels_last_task(int64_t tasks, int64_t channels, int64_t work_per_channel,
                                 const Fn& fn);

}  // namespace oneflow_accel

#include "pool/geometry_inl.h"
