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
  explicit KernelRegistration(::oneflow::user_op::OpKernelRegistry registry);
};

}  // namespace oneflow_accel
