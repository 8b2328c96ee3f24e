// Every kernel of the plug-in inside one that catches its exceptions.
#pragma once

#include "oneflow/core/framework/framework.h"

namespace oneflow_accel {

// Kernels of `op` made by `create`, whose exceptions become failures (failures.h) and zeros in
// their outputs. The optimizers' operators do nothing while a failure waits for Python, so that no
// parameter is changed by gradients that came of it.
::oneflow::user_op::OpKernelCreateFn guarded(const std::string& op,
                                             ::oneflow::user_op::OpKernelCreateFn create);

// Registers a kernel, guarded.
struct KernelRegistration {
  KernelRegistration(::oneflow::user_op::OpKernelRegistry& registry);  // NOLINT: converts
};

}  // namespace oneflow_accel

// As OneFlow's own, but guarded.
#undef REGISTER_USER_KERNEL
#define REGISTER_USER_KERNEL(name)                                                               \
  static const ::oneflow_accel::KernelRegistration OF_PP_CAT(g_kernel_registration, __COUNTER__) \
      = ::oneflow::user_op::UserOpRegistryMgr::Get().CheckAndGetOpKernelRegistry(name)
