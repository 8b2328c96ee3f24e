// Failures inside a kernel.
#pragma once

#include <exception>
#include <stdexcept>

namespace oneflow_accel {

// Calls fn(). An exception becomes one whose text starts with describe(), a string that names the
// operation and its shapes.
template <typename Describe, typename Fn>
void run_or_throw(const Describe& describe, const Fn& fn) {
  try {
    fn();
  } catch (const std::exception& error) {
    throw std::runtime_error(describe() + " failed: " + error.what());
  }
}

}  // namespace oneflow_accel
