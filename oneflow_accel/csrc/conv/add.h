// The optional `_add_to_output` argument of the convolutions.
#pragma once

#include "common/arguments.h"
#include "common/threads.h"

namespace oneflow_accel {

// output += `_add_to_output`, where the operator has it. OneFlow never gives both one memory: our
// kernels propose no in-place pair.
template <typename T>
void add_to_output(::oneflow::user_op::KernelComputeContext* ctx, const char* name) {
  if (!ctx->has_input("_add_to_output", 0)) { return; }
  const T* addend = input<T>(ctx, "_add_to_output");
  T* sum = output<T>(ctx, name);
  const int64_t n = ctx->Tensor4ArgNameAndIndex(name, 0)->shape_view().elem_cnt();
  parallel_for(n, kGrainSize, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      sum[i] = from_float<T>(to_float(sum[i]) + to_float(addend[i]));
    }
  });
}

}  // namespace oneflow_accel
