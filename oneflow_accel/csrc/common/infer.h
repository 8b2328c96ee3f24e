// What the inference functions of new operators share.
#pragma once

#include <string>

#include "common/oneflow.h"

namespace oneflow_accel {

// An output's description: contiguous, static.
inline void describe_output(::oneflow::user_op::InferContext* ctx, const std::string& name,
                            const ::oneflow::Shape& shape) {
  auto* desc = ctx->MutOutputTensorDesc(name, 0);
  desc->set_shape(shape);
  desc->set_stride(::oneflow::Stride(shape));
  desc->set_is_dynamic(false);
}

}  // namespace oneflow_accel
