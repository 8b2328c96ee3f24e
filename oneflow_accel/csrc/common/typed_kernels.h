// Registers a kernel that is a template over the type of its tensors' elements.
#pragma once

#include <vector>

#include "common/oneflow.h"

namespace oneflow_accel {

// The operator's kernels for tensors of each of the types: that of the argument `decides`.
template <template <typename> class TypedKernel, typename... T>
std::vector<KernelRegistration> typed_kernels(const char* op, const char* decides,
                                              user_op::InplaceProposalFn in_place = nullptr) {
  return {KernelRegistration(
      registry(op, make<TypedKernel<T>>, is_on_cpu(decides, kDataType<T>), in_place))...};
}

}  // namespace oneflow_accel

// REGISTER_KERNELS(the template, its types)(the operator, the argument that decides, in place).
#define REGISTER_KERNELS(...) \
  static const auto OF_PP_CAT(g_typed_kernels, __COUNTER__) = \
      ::oneflow_accel::typed_kernels<__VA_ARGS__>
