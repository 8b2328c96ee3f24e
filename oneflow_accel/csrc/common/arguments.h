// The data of a kernel's arguments by name.
#pragma once

#include <type_traits>

#include "common/bfloat16.h"
#include "common/oneflow.h"

namespace oneflow_accel {

// What OneFlow checks the dtype by: nothing for Bfloat16, which it knows under another name.
template <typename T>
using Checked = std::conditional_t<std::is_same_v<T, Bfloat16>, char, T>;

template <typename T = float>
const T* input(::oneflow::user_op::KernelComputeContext* ctx, const std::string& name) {
  return reinterpret_cast<const T*>(ctx->Tensor4ArgNameAndIndex(name, 0)->dptr<Checked<T>>());
}

// Also of an input that the kernel changes in place.
template <typename T = float>
T* output(::oneflow::user_op::KernelComputeContext* ctx, const std::string& name) {
  return reinterpret_cast<T*>(ctx->Tensor4ArgNameAndIndex(name, 0)->mut_dptr<Checked<T>>());
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
