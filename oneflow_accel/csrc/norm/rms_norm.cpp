// rms_norm (float32, float64, bfloat16 with float32 statistics), rms_norm_grad and
// rms_norm_param_grad (float32, float64).
#include "common/arguments.h"
#include "norm/row_norm.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

// Elements of one row: the axes of x that inv_rms lacks.
int64_t row_size(user_op::KernelComputeContext* ctx) {
  return ctx->Tensor4ArgNameAndIndex("x", 0)->shape_view().Count(
      ctx->Tensor4ArgNameAndIndex("inv_rms", 0)->shape_view().NumAxes());
}

int64_t num_rows(user_op::KernelComputeContext* ctx) {
  return ctx->Tensor4ArgNameAndIndex("inv_rms", 0)->shape_view().elem_cnt();
}

template <typename T>
class RmsNormKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    RowNorm<T> norm;
    norm.rows = num_rows(ctx);
    norm.n = row_size(ctx);
    norm.epsilon = ctx->Attr<float>("epsilon");
    norm.x = input_or_null<T>(ctx, "x");
    norm.gamma = input_or_null<T>(ctx, "weight");
    norm.beta = nullptr;
    norm.y = output_or_null<T>(ctx, "y");
    norm.mean = nullptr;
    norm.inv_std = output_or_null<typename RowStatistics<T>::Type>(ctx, "inv_rms");
    row_norm(norm);
  }
};

template <typename T>
class RmsNormGradKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    RowNormGrad<T> norm;
    norm.rows = num_rows(ctx);
    norm.n = row_size(ctx);
    norm.dy = input_or_null<T>(ctx, "dy");
    norm.x = input_or_null<T>(ctx, "x");
    norm.mean = nullptr;
    norm.inv_std = input_or_null<T>(ctx, "inv_rms");
    norm.gamma = input_or_null<T>(ctx, "weight");
    norm.addend = nullptr;
    norm.dx = output_or_null<T>(ctx, "dx");
    row_norm_grad(norm);
  }
};

template <typename T>
class RmsNormParamGradKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    RowNormParamGrad<T> norm;
    norm.rows = num_rows(ctx);
    norm.n = row_size(ctx);
    norm.dy = input_or_null<T>(ctx, "dy");
    norm.x = input_or_null<T>(ctx, "x");
    norm.mean = nullptr;
    norm.inv_std = input_or_null<T>(ctx, "inv_rms");
    norm.gamma_diff = output_or_null<T>(ctx, "weight_grad");
    norm.beta_diff = nullptr;
    row_norm_param_grad(norm);
  }
};

REGISTER_KERNEL("rms_norm", make<RmsNormKernel<float>>, is_float32_on_cpu("x"));
REGISTER_KERNEL("rms_norm", make<RmsNormKernel<double>>,
                is_on_cpu("x", ::oneflow::DataType::kDouble));
REGISTER_KERNEL("rms_norm", make<RmsNormKernel<Bfloat16>>, is_bfloat16_on_cpu("x"));
REGISTER_KERNEL("rms_norm_grad", make<RmsNormGradKernel<float>>, is_float32_on_cpu("dx"));
REGISTER_KERNEL("rms_norm_grad", make<RmsNormGradKernel<double>>,
                is_on_cpu("dx", ::oneflow::DataType::kDouble));
REGISTER_KERNEL("rms_norm_param_grad", make<RmsNormParamGradKernel<float>>,
                is_float32_on_cpu("dy"));
REGISTER_KERNEL("rms_norm_param_grad", make<RmsNormParamGradKernel<double>>,
                is_on_cpu("dy", ::oneflow::DataType::kDouble));

}  // namespace

}  // namespace oneflow_accel
