// reduce_sum (sum, and the first step of mean) and reduce_sum_like (the gradient of an operand that
// was broadcast), float32 and float64.
#include "reduce/sum.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

template <typename T>
class ReduceSumKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const auto* x = ctx->Tensor4ArgNameAndIndex("input_tensor", 0);
    sum_over(x->shape_view(), ctx->Attr<std::vector<int32_t>>("axis"), x->dptr<T>(),
             ctx->Tensor4ArgNameAndIndex("output_tensor", 0)->mut_dptr<T>());
  }
};

template <typename T>
class ReduceSumLikeKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const auto* x = ctx->Tensor4ArgNameAndIndex("x", 0);
    sum_over(x->shape_view(), ctx->Attr<std::vector<int32_t>>("axis"), x->dptr<T>(),
             ctx->Tensor4ArgNameAndIndex("y", 0)->mut_dptr<T>());
  }
};

REGISTER_USER_KERNEL(listed("reduce_sum"))
    .SetCreateFn<ReduceSumKernel<float>>()
    .SetIsMatchedHob(is_float32_on_cpu("output_tensor"))
    .SetPriority(kKernelPriority);

REGISTER_USER_KERNEL(listed("reduce_sum"))
    .SetCreateFn<ReduceSumKernel<double>>()
    .SetIsMatchedHob(is_on_cpu("output_tensor", ::oneflow::DataType::kDouble))
    .SetPriority(kKernelPriority);

REGISTER_USER_KERNEL(listed("reduce_sum_like"))
    .SetCreateFn<ReduceSumLikeKernel<float>>()
    .SetIsMatchedHob(is_float32_on_cpu("y"))
    .SetPriority(kKernelPriority);

REGISTER_USER_KERNEL(listed("reduce_sum_like"))
    .SetCreateFn<ReduceSumLikeKernel<double>>()
    .SetIsMatchedHob(is_on_cpu("y", ::oneflow::DataType::kDouble))
    .SetPriority(kKernelPriority);

}  // namespace

}  // namespace oneflow_accel
