// Registers a kernel that is a template over the type of its tensors' elements.
#pragma once

#include <type_traits>
#include <vector>

#include "common/bfloat16.h"
#include "common/oneflow.h"

namespace oneflow_accel {

// OneFlow's name of T.
template <typename T>
constexpr ::oneflow::DataType data_type() {
  if constexpr (std::is_same_v<T, Bfloat16>) {
    return ::oneflow::DataType::kBFloat16;
  } else {
    return ::oneflow::GetDataType<T>::value;
  }
}

// The operator's kernels for tensors of each of the types: that of the argument `decides`.
template <template <typename> class TypedKernel, typename... T>
std::vector<KernelRegistration> typed_kernels(
    const char* op, const char* decides, ::oneflow::user_op::InplaceProposalFn in_place = nullptr) {
  return {KernelRegistration(
      registry(op, make<TypedKernel<T>>, is_on_cpu(decides, data_type<T>()), in_place))...};
}

}  // namespace oneflow_accel

// REGISTER_KERNELS(the template, its types)(the operator, the argument that decides, in place).
#define REGISTER_KERNELS(...) \
  static const auto OF_PP_CAT(g_typed_kernels, __COUNTER__) = \
      ::oneflow_accel::typed_kernels<__VA_ARGS__>
