// Kernels that are templates over float and Bfloat16.
#pragma once

#include "common/arguments.h"

namespace oneflow_accel {

// Registers K<float> and K<Bfloat16> for an operator; the type of its argument `name` decides.
template <template <typename> class K>
struct FloatKernels {
  FloatKernels(const char* op, const char* name,
               const ::oneflow::user_op::InplaceProposalFn& in_place = nullptr) {
    KernelRegistration(registry(op, make<K<float>>, is_float32_on_cpu(name), in_place));
    KernelRegistration(registry(op, make<K<Bfloat16>>, is_bfloat16_on_cpu(name), in_place));
  }
  // Where `also` matches too.
  template <typename Match>
  FloatKernels(const char* op, const char* name, const Match& also) {
    KernelRegistration(registry(op, make<K<float>>, is_float32_on_cpu(name) && also));
    KernelRegistration(registry(op, make<K<Bfloat16>>, is_bfloat16_on_cpu(name) && also));
  }
};

}  // namespace oneflow_accel

#define REGISTER_FLOAT_KERNELS(kernel, ...) \
  static const ::oneflow_accel::FloatKernels<kernel> OF_PP_CAT(g_float_kernels, __COUNTER__)( \
      __VA_ARGS__)
