// layer_norm_grad and layer_norm_param_grad, float32 and float64.
#include "common/arguments.h"
#include "norm/row_norm.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

template <typename T>
class LayerNormGradKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const auto& shape = ctx->Tensor4ArgNameAndIndex("dy", 0)->shape_view();
    const int64_t axis = ctx->Attr<int64_t>("begin_norm_axis");
    RowNormGrad<T> norm;
    norm.rows = shape.Count(0, axis);
    norm.n = shape.Count(axis);
    norm.dy = input_or_null<T>(ctx, "dy");
    norm.x = input_or_null<T>(ctx, "x");
    norm.mean = input_or_null<T>(ctx, "mean");
    norm.inv_std = input_or_null<T>(ctx, "inv_variance");
    norm.gamma = input_or_null<T>(ctx, "gamma");
    norm.addend = input_or_null<T>(ctx, "_add_to_output");
    norm.dx = output_or_null<T>(ctx, "dx");
    row_norm_grad(norm);
  }
};

template <typename T>
class LayerNormParamGradKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const auto& shape = ctx->Tensor4ArgNameAndIndex("dy", 0)->shape_view();
    const int64_t axis = ctx->Attr<int64_t>("begin_params_axis");
    RowNormParamGrad<T> norm;
    norm.rows = shape.Count(0, axis);
    norm.n = shape.Count(axis);
    norm.dy = input_or_null<T>(ctx, "dy");
    norm.x = input_or_null<T>(ctx, "x");
    norm.mean = input_or_null<T>(ctx, "mean");
    norm.inv_std = input_or_null<T>(ctx, "inv_variance");
    norm.gamma_diff = output_or_null<T>(ctx, "gamma_diff");
    norm.beta_diff = output_or_null<T>(ctx, "beta_diff");
    row_norm_param_grad(norm);
  }
};

// nn.Graph adds another gradient of x here where there is one, and dx then takes its memory.
::oneflow::Maybe<void> add_in_place(const user_op::InferContext& ctx,
                                    const user_op::AddInplaceArgPair& add) {
  if (!ctx.has_input("_add_to_output", 0)) { return ::oneflow::Maybe<void>::Ok(); }
  return add("dx", 0, "_add_to_output", 0, true);
}

REGISTER_USER_KERNEL(listed("layer_norm_grad"))
    .SetCreateFn<LayerNormGradKernel<float>>()
    .SetIsMatchedHob(is_float32_on_cpu("dy"))
    .SetInplaceProposalFn(add_in_place)
    .SetPriority(kKernelPriority);

REGISTER_USER_KERNEL(listed("layer_norm_grad"))
    .SetCreateFn<LayerNormGradKernel<double>>()
    .SetIsMatchedHob(is_on_cpu("dy", ::oneflow::DataType::kDouble))
    .SetInplaceProposalFn(add_in_place)
    .SetPriority(kKernelPriority);

REGISTER_USER_KERNEL(listed("layer_norm_param_grad"))
    .SetCreateFn<LayerNormParamGradKernel<float>>()
    .SetIsMatchedHob(is_float32_on_cpu("dy"))
    .SetPriority(kKernelPriority);

REGISTER_USER_KERNEL(listed("layer_norm_param_grad"))
    .SetCreateFn<LayerNormParamGradKernel<double>>()
    .SetIsMatchedHob(is_on_cpu("dy", ::oneflow::DataType::kDouble))
    .SetPriority(kKernelPriority);

}  // namespace

}  // namespace oneflow_accel
