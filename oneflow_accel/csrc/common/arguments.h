// The data of a kernel's arguments by name.
#pragma once

#include "common/oneflow.h"

namespace oneflow_accel {

template <typename T = float>
const T* input(user_op::KernelComputeContext* ctx, const std::string& name) {
  return ctx->Tensor4ArgNameAndIndex(name, 0)->dptr<T>();
}

// Also of an input that the kernel changes in place.
template <typename T = float>
T* output(user_op::KernelComputeContext* ctx, const std::string& name) {
  return ctx->Tensor4ArgNameAndIndex(name, 0)->mut_dptr<T>();
}

template <typename T = float>
const T* input_or_null(user_op::KernelComputeContext* ctx, const std::string& name) {
  return ctx->has_input(name, 0) ? input<T>(ctx, name) : nullptr;
}

template <typename T = float>
T* output_or_null(user_op::KernelComputeContext* ctx, const std::string& name) {
  return ctx->has_output(name, 0) ? output<T>(ctx, name) : nullptr;
}

}  // namespace oneflow_accel
