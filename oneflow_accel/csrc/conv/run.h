// What the kernels of convolutions do around their computation.
#pragma once

#include <algorithm>

#include "common/guard.h"
#include "conv/geometry.h"

namespace oneflow_accel {

// Runs compute(), or fills the float32 outputs with zeros where a size is 0: they are sums of no
// terms then. `what` begins the text of a failure.
template <typename Compute>
void run_or_zero(::oneflow::user_op::KernelComputeContext* ctx, const ConvGeometry& geometry,
                 const char* what, const Compute& compute) {
  if (!geometry.is_empty()) {
    return run_or_abort([&] { return geometry.describe(what); }, compute);
  }
  for (const auto& [name, index] : ctx->outputs()) {
    ::oneflow::user_op::Tensor* tensor = ctx->Tensor4ArgNameAndIndex(name, index);
    std::fill_n(tensor->mut_dptr<float>(), tensor->shape_view().elem_cnt(), 0.0F);
  }
}

}  // namespace oneflow_accel
