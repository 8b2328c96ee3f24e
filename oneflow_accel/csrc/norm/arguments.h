// The tensors of a kernel that works on rows, some of which are optional.
#pragma once

#include "common/oneflow.h"

namespace oneflow_accel {

// T may be Bfloat16, which OneFlow knows under another name.
template <typename T>
const T* input_or_null(::oneflow::user_op::KernelComputeContext* ctx, const std::string& name) {
  if (!ctx->has_input(name, 0)) { return nullptr; }
  return static_cast<const T*>(ctx->Tensor4ArgNameAndIndex(name, 0)->raw_dptr());
}

template <typename T>
T* output_or_null(::oneflow::user_op::KernelComputeContext* ctx, const std::string& name) {
  if (!ctx->has_output(name, 0)) { return nullptr; }
  return static_cast<T*>(ctx->Tensor4ArgNameAndIndex(name, 0)->mut_raw_dptr());
}

}  // namespace oneflow_accel
