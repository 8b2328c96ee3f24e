// Failures inside a kernel.
#pragma once

#include <exception>

#include "oneflow/core/common/util.h"

namespace oneflow_accel {

// Calls fn(). OneFlow catches no C++ exception that a kernel throws: the process would end with
// the exception's text alone. This ends it with a message that starts with describe(), a string
// that names the operation and its shapes.
template <typename Describe, typename Fn>
void run_or_abort(const Describe& describe, const Fn& fn) {
  try {
    fn();
  } catch (const std::exception& error) {
    LOG(FATAL) << "oneflow_accel: " << describe() << " failed: " << error.what();
  }
}

}  // namespace oneflow_accel
