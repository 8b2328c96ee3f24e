// layer_norm: float32, float64 and bfloat16 (with float32 statistics).
#include "common/arguments.h"
#include "norm/row_norm.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

template <typename T>
class LayerNormKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    using Statistics = typename RowStatistics<T>::Type;
    const auto& shape = ctx->Tensor4ArgNameAndIndex("x", 0)->shape_view();
    int64_t axis = ctx->Attr<int64_t>("begin_norm_axis");
    if (axis < 0) { axis += shape.NumAxes(); }
    RowNorm<T> norm;
    norm.rows = shape.Count(0, axis);
    norm.n = shape.Count(axis);
    norm.epsilon = ctx->Attr<double>("epsilon");
    norm.x = input_or_null<T>(ctx, "x");
    norm.gamma = input_or_null<T>(ctx, "gamma");
    norm.beta = input_or_null<T>(ctx, "beta");
    norm.y = output_or_null<T>(ctx, "y");
    norm.mean = output_or_null<Statistics>(ctx, "mean");
    norm.inv_std = output_or_null<Statistics>(ctx, "inv_variance");
    row_norm(norm);
  }
};

REGISTER_KERNEL("layer_norm", make<LayerNormKernel<float>>, is_float32_on_cpu("x"));
REGISTER_KERNEL("layer_norm", make<LayerNormKernel<double>>,
                is_on_cpu("x", ::oneflow::DataType::kDouble));
REGISTER_KERNEL("layer_norm", make<LayerNormKernel<Bfloat16>>, is_bfloat16_on_cpu("x"));

}  // namespace

}  // namespace oneflow_accel
