// Which part of a global tensor's axis a process holds.
#pragma once

#include <string>

#include "common/oneflow.h"

namespace oneflow_accel {

// Elements [first, first + size) of `total` along one axis.
struct LocalRange {
  int64_t first;
  int64_t size;
  int64_t total;
};

// Whether argument `name` is split along `axis` over some of the processes.
bool is_split(::oneflow::user_op::KernelCacheContext* ctx, const std::string& name, int64_t axis);

// The range of `axis` that the calling process holds of argument `name`.
LocalRange local_range(::oneflow::user_op::KernelCacheContext* ctx, const std::string& name,
                       int64_t axis);

}  // namespace oneflow_accel
