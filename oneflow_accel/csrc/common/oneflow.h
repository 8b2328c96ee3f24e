// OneFlow's kernel interface, and the few things that every kernel of the plug-in needs from it.
#pragma once

// Before OneFlow's headers: the wheel's include folder also holds a system include tree.
#include <immintrin.h>

#include "oneflow/core/framework/framework.h"
#include "oneflow/core/kernel/new_kernel_util.h"

namespace oneflow_accel {

// Above OneFlow's own kernels (0), so that the plug-in's are chosen wherever both match.
constexpr int kKernelPriority = ::oneflow::user_op::kKernelPriorityOptimized;

// Notes that the plug-in has a kernel for `op`, for Python to list, and returns `op`:
// REGISTER_USER_KERNEL(listed("relu")).
const std::string& listed(const std::string& op);

// Matches float32 tensors on the CPU; `name` is the argument whose type decides.
inline auto is_float32_on_cpu(const std::string& name) {
  namespace user_op = ::oneflow::user_op;
  return (user_op::HobDeviceType() == ::oneflow::DeviceType::kCPU)
         && (user_op::HobDataType(name, 0) == ::oneflow::DataType::kFloat);
}

}  // namespace oneflow_accel
