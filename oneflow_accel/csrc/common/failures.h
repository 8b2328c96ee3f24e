// Failures of kernels, on their way to Python.
//
// OneFlow runs kernels on threads of its own, some time after Python has asked for them, and
// catches nothing there: an exception would end the process. So a kernel that throws leaves zeros
// in its outputs (guarded_kernel.h), and the first message is kept here until Python next waits for
// a result: .item(), .numpy() or a synchronisation raises it then, once.
#pragma once

#include <string>

namespace oneflow_accel {

// Notes the exception that is being handled; only the first of several is kept. To Python a
// std::out_of_range is an IndexError, anything else a RuntimeError. Ends the process with the
// message where OneFlow's waiting could not be redirected, so that nothing would ever raise it.
void record_failure(const std::string& op) noexcept;

// Whether a failure waits to be raised. What has run since then may be wrong.
bool failure_pending();

}  // namespace oneflow_accel
