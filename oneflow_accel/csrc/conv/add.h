// The optional `_add_to_output` argument of the convolutions.
#pragma once

#include "common/arguments.h"
#include "common/threads.h"

namespace oneflow_accel {

// output += `_add_to_output`, where the operator has it. OneFlow never gives both one memory: our
// kernels propose no in-place pair.
inline void add_to_output(::oneflow::user_op::KernelComputeContext* ctx,
                          ::oneflow::user_op::Tensor* output) {
  if (!ctx->has_input("_add_to_output", 0)) { return; }
  const float* addend = input(ctx, "_add_to_output");
  float* sum = output->mut_dptr<float>();
  parallel_for(output->shape_view().elem_cnt(), kGrainSize, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) { sum[i] += addend[i]; }
  });
}

}  // namespace oneflow_accel
