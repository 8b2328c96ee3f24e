// The kernels that OneFlow has registered, to change them: no interface of its shows them all.
#pragma once

#include <string>
#include <vector>

#include "oneflow/core/framework/user_op_registry_manager.h"

namespace oneflow_accel {

using Kernels =
    ::oneflow::HashMap<std::string,
                       std::vector<::oneflow::user_op::OpKernelRegistryResult>>;

// By operator: OneFlow's own and, once they are registered, the plug-in's.
Kernels& all_kernels();

}  // namespace oneflow_accel
