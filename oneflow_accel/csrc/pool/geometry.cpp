#include "pool/geometry.h"

namespace oneflow_accel {

namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

std::vector<PoolWindow> sliding_windows(int64_t input, int64_t output, const SlidingAxis& axis) {
  std::vector<PoolWindow> windows;
  windows.reserve(output);
  for (int64_t i = 0; i < output; ++i) {
    const int64_t start = i * axis.stride - axis.padding_before;
    const int64_t stop = start + (axis.kernel - 1) * axis.dilation + 1;
    const int64_t full = std::min(stop, input + axis.padding_after) - start;
    // The first position of the window that is not in the padding.
    const int64_t begin =
        start >= 0 ? start : start + ceil_div(-start, axis.dilation) * axis.dilation;
    const int64_t end = std::min(stop, input);
    if (begin < end) {
      windows.push_back({begin, end, axis.dilation, full});
    } else {
      windows.push_back({0, 0, axis.dilation, full});
    }
  }
  return windows;
}

std::vector<PoolWindow> adaptive_windows(int64_t input, int64_t output) {
  std::vector<PoolWindow> windows;
  windows.reserve(output);
  for (int64_t i = 0; i < output; ++i) {
    const int64_t begin = i * input / output;
    const int64_t end = ceil_div((i + 1) * input, output);
    windows.push_back({begin, end, 1, end - begin});
  }
  return windows;
}

}  // namespace

PoolGeometry sliding_geometry(const ::oneflow::ShapeView& x, const ::oneflow::ShapeView& y,
                              const std::string& data_format, const SlidingAxis& vertical,
                              const SlidingAxis& horizontal) {
  const bool last = data_format == "channels_last";
  const int first = last ? 1 : 2;  // the axis of the height
  return {last,
          x.At(0),
          x.At(last ? 3 : 1),
          x.At(first),
          x.At(first + 1),
          sliding_windows(x.At(first), y.At(first), vertical),
          sliding_windows(x.At(first + 1), y.At(first + 1), horizontal)};
}

PoolGeometry adaptive_geometry(const ::oneflow::ShapeView& x, const ::oneflow::ShapeView& y) {
  return {false,
          x.At(0),
          x.At(1),
          x.At(2),
          x.At(3),
          adaptive_windows(x.At(2), y.At(2)),
          adaptive_windows(x.At(3), y.At(3))};
}

void find_taps(const PoolGeometry& g, const PoolWindow& row, const PoolWindow& column,
               PoolTaps* taps) {
  taps->clear();
  for (int64_t h = row.begin; h < row.end; h += row.step) {
    for (int64_t w = column.begin; w < column.end; w += column.step) {
      taps->push_back((h * g.width + w) * g.channels);
    }
  }
}

}  // namespace oneflow_accel
