#include "fused/broadcast_rows.h"

#include <stdexcept>

namespace oneflow_accel::fused {

BroadcastRows::BroadcastRows(const ::oneflow::ShapeView& shape, const ::oneflow::ShapeView& part) {
  const int axes = static_cast<int>(shape.NumAxes());
  const int missing = axes - static_cast<int>(part.NumAxes());
  const auto size_of_part = [&](int axis) { return axis < missing ? 1 : part.At(axis - missing); };
  bool fits = axes >= 1 && axes <= kMostAxes && missing >= 0;
  for (int axis = 0; fits && axis < axes; ++axis) {
    fits = size_of_part(axis) == 1 || size_of_part(axis) == shape.At(axis);
  }
  if (!fits) {
    throw std::invalid_argument("a mask or bias of shape " + part.ToString()
                                + " cannot be broadcast to " + shape.ToString());
  }
  leading_ = axes - 1;
  single_value_ = size_of_part(leading_) != shape.At(leading_);
  int64_t stride = size_of_part(leading_);
  for (int axis = leading_ - 1; axis >= 0; --axis) {
    sizes_[axis] = shape.At(axis);
    strides_[axis] = size_of_part(axis) == 1 ? 0 : stride;
    stride *= size_of_part(axis);
  }
}

int64_t BroadcastRows::offset(int64_t row) const {
  int64_t offset = 0;
  for (int axis = leading_ - 1; axis >= 0; --axis) {
    offset += row % sizes_[axis] * strides_[axis];
    row /= sizes_[axis];
  }
  return offset;
}

}  // namespace oneflow_accel::fused
