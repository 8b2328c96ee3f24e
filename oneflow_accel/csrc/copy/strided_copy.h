// Copies between strided arrays of any element type: what permute, contiguous, expand, slice,
// narrow, concat and split come down to, and tensors whose elements a kernel only moves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/oneflow.h"

namespace oneflow_accel {

// One dimension that source and destination share; strides count elements. A source stride is 0
// where an element is repeated and negative where a slice walks backwards.
struct CopyDim {
  int64_t size;
  int64_t source_stride;
  int64_t destination_stride;
};

// Copies every element, on all threads. The order of `dims` does not matter; without any, one
// element is copied. `element_bytes` is 1, 2, 4 or 8. Source and destination must not overlap.
void strided_copy(std::vector<CopyDim> dims, std::size_t element_bytes, const void* source,
                  void* destination);

// Sets `bytes` bytes to 0, on all threads.
void zero_fill(void* destination, int64_t bytes);

// Matches tensors on the CPU whose elements can be moved as bytes: numbers, those of 16 bits
// included, and booleans.
inline auto is_movable_on_cpu(const std::string& name) {
  return is_on_cpu()
         && ::oneflow::hob::make_custom(
             "elements are plain data", [name](const user_op::KernelRegContext& ctx) {
               const auto type = ctx.TensorDesc4ArgNameAndIndex(name, 0)->data_type();
               return ::oneflow::IsPODAndHalfDataType(type)
                      && ::oneflow::GetSizeOfDataType(type) <= 8;
             });
}

inline std::size_t element_bytes(const user_op::Tensor& tensor) {
  return ::oneflow::GetSizeOfDataType(tensor.data_type());
}

inline void zero_fill(user_op::Tensor* tensor) {
  zero_fill(tensor->mut_raw_dptr(), bytes_of(*tensor));
}

inline std::vector<int64_t> contiguous_strides(const ::oneflow::ShapeView& shape) {
  std::vector<int64_t> strides(shape.NumAxes(), 1);
  for (int64_t k = shape.NumAxes() - 2; k >= 0; --k) {
    strides[k] = strides[k + 1] * shape.At(k + 1);
  }
  return strides;
}

// Copies `dims` from element `first` of `in` on to element `first_out` of `out` on.
inline void copy_elements(const user_op::Tensor& in, user_op::Tensor* out,
                          std::vector<CopyDim> dims, int64_t first = 0, int64_t first_out = 0) {
  const auto bytes = static_cast<int64_t>(element_bytes(*out));
  strided_copy(std::move(dims), bytes, static_cast<const char*>(in.raw_dptr()) + first * bytes,
               static_cast<char*>(out->mut_raw_dptr()) + first_out * bytes);
}

}  // namespace oneflow_accel
