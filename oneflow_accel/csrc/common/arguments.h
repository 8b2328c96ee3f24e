// The data of a kernel's arguments by name.
#pragma once

#include <type_traits>

#include "common/bfloat16.h"
#include "common/oneflow.h"

namespace oneflow_accel {

// The dtype is checked, but for Bfloat16, which OneFlow knows under another name.
template <typename T = float>
const T* input(::oneflow::user_op::KernelComputeContext* ctx, const std::string& name) {
  const auto* tensor = ctx->Tensor4ArgNameAndIndex(name, 0);
  if constexpr (std::is_same_v<T, Bfloat16>) {
    return static_cast<const T*>(tensor->raw_dptr());
  } else {
    return tensor->dptr<T>();
  }
}

// Also of an input that the kernel changes in place.
template <typename T = float>
T* output(::oneflow::user_op::KernelComputeContext* ctx, const std::string& name) {
  auto* tensor = ctx->Tensor4ArgNameAndIndex(name, 0);
  if constexpr (std::is_same_v<T, Bfloat16>) {
    return static_cast<T*>(tensor->mut_raw_dptr());
  } else {
    return tensor->mut_dptr<T>();
  }
}

template <typename T = float>
const T* input_or_null(::oneflow::user_op::KernelComputeContext* ctx, const std::string& name) {
  return ctx->has_input(name, 0) ? input<T>(ctx, name) : nullptr;
}

template <typename T = float>
T* output_or_null(::oneflow::user_op::KernelComputeContext* ctx, const std::string& name) {
  return ctx->has_output(name, 0) ? output<T>(ctx, name) : nullptr;
}

}  // namespace oneflow_accel
