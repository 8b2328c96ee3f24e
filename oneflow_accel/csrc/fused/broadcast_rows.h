// The rows of a tensor that is broadcast to the shape of another one.
#pragma once

#include <array>
#include <cstdint>

#include "common/oneflow.h"

namespace oneflow_accel::fused {

// Axes are aligned at the last one, as in NumPy; an axis of size 1 serves every index.
class BroadcastRows {
 public:
  // Ends the process where `part` cannot be broadcast to `shape`: OneFlow's operators compare the
  // last axes only, and a kernel that went on would read beyond the mask.
  BroadcastRows(const ::oneflow::ShapeView& shape, const ::oneflow::ShapeView& part);

  // Where the values of row `row` of `shape` start in `part`.
  int64_t offset(int64_t row) const;

  // Whether a row has one value for all its elements.
  bool single_value() const { return single_value_; }

 private:
  static constexpr int kMostAxes = 16;
  int leading_ = 0;
  std::array<int64_t, kMostAxes> sizes_{};
  std::array<int64_t, kMostAxes> strides_{};
  bool single_value_ = false;
};

}  // namespace oneflow_accel::fused
