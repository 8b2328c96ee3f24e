// reduce_sum (sum, and the first step of mean) and reduce_sum_like (the gradient of an operand that
// was broadcast), float32, bfloat16 and float64.
#include "common/arguments.h"
#include "reduce/sum.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

template <typename T>
class ReduceSumKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const auto* x = ctx->Tensor4ArgNameAndIndex("input_tensor", 0);
    sum_over(x->shape_view(), ctx->Attr<std::vector<int32_t>>("axis"), input<T>(ctx, "input_tensor"),
             output<T>(ctx, "output_tensor"));
  }
};

template <typename T>
class ReduceSumLikeKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const auto* x = ctx->Tensor4ArgNameAndIndex("x", 0);
    sum_over(x->shape_view(), ctx->Attr<std::vector<int32_t>>("axis"), input<T>(ctx, "x"),
             output<T>(ctx, "y"));
  }
};

REGISTER_KERNEL("reduce_sum", make<ReduceSumKernel<float>>, is_float32_on_cpu("output_tensor"));
REGISTER_KERNEL("reduce_sum", make<ReduceSumKernel<double>>,
                is_on_cpu("output_tensor", ::oneflow::DataType::kDouble));
REGISTER_KERNEL("reduce_sum", make<ReduceSumKernel<Bfloat16>>, is_bfloat16_on_cpu("output_tensor"));
REGISTER_KERNEL("reduce_sum_like", make<ReduceSumLikeKernel<float>>, is_float32_on_cpu("y"));
REGISTER_KERNEL("reduce_sum_like", make<ReduceSumLikeKernel<Bfloat16>>, is_bfloat16_on_cpu("y"));
REGISTER_KERNEL("reduce_sum_like", make<ReduceSumLikeKernel<double>>,
                is_on_cpu("y", ::oneflow::DataType::kDouble));

}  // namespace

}  // namespace oneflow_accel
