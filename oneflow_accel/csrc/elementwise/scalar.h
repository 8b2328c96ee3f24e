// The number that OneFlow's scalar operators (scalar_add, scalar_pow, ...) carry as attributes.
#pragma once

#include "common/oneflow.h"

namespace oneflow_accel {

inline double scalar_operand(const ::oneflow::user_op::KernelComputeContext* ctx) {
  return ctx->Attr<bool>("has_int_operand") ? static_cast<double>(ctx->Attr<int64_t>("int_operand"))
                                            : ctx->Attr<double>("float_operand");
}

}  // namespace oneflow_accel
