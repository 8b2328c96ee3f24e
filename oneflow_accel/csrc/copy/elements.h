// Tensors whose elements a kernel only moves.
#pragma once

#include "common/oneflow.h"
#include "copy/strided_copy.h"

namespace oneflow_accel {

// Matches tensors on the CPU whose elements can be moved as bytes: numbers, those of 16 bits
// included, and booleans.
inline auto is_movable_on_cpu(const std::string& name) {
  namespace user_op = ::oneflow::user_op;
  return (user_op::HobDeviceType() == ::oneflow::DeviceType::kCPU)
         && ::oneflow::hob::make_custom(
             "elements are plain data", [name](const user_op::KernelRegContext& ctx) {
               const auto type = ctx.TensorDesc4ArgNameAndIndex(name, 0)->data_type();
               return plugin_kernels_match() && ::oneflow::IsPODAndHalfDataType(type)
                      && ::oneflow::GetSizeOfDataType(type) <= 8;
             });
}

inline std::size_t element_bytes(const ::oneflow::user_op::Tensor& tensor) {
  return ::oneflow::GetSizeOfDataType(tensor.data_type());
}

inline int64_t bytes_of(const ::oneflow::user_op::Tensor& tensor) {
  return tensor.shape_view().elem_cnt() * static_cast<int64_t>(element_bytes(tensor));
}

// Strides of a contiguous tensor of this shape.
inline std::vector<int64_t> contiguous_strides(const ::oneflow::ShapeView& shape) {
  std::vector<int64_t> strides(shape.NumAxes(), 1);
  for (int64_t k = shape.NumAxes() - 2; k >= 0; --k) {
    strides[k] = strides[k + 1] * shape.At(k + 1);
  }
  return strides;
}

}  // namespace oneflow_accel
