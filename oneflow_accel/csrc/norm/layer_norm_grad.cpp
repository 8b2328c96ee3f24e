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
REGISTER_KERNEL("layer_norm_grad", make<LayerNormGradKernel<float>>, is_float32_on_cpu("dy"),
                in_place("dx", "_add_to_output"));
REGISTER_KERNEL("layer_norm_grad", make<LayerNormGradKernel<double>>,
                is_on_cpu("dy", ::oneflow::DataType::kDouble), in_place("dx", "_add_to_output"));
REGISTER_KERNEL("layer_norm_param_grad", make<LayerNormParamGradKernel<float>>,
                is_float32_on_cpu("dy"));
REGISTER_KERNEL("layer_norm_param_grad", make<LayerNormParamGradKernel<double>>,
                is_on_cpu("dy", ::oneflow::DataType::kDouble));

}  // namespace

}  // namespace oneflow_accel
