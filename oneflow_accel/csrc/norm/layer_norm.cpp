// layer_norm, rms_norm and their gradients: float32, float64 and bfloat16 (statistics in float32).
#include "common/arguments.h"
#include "common/typed_kernels.h"
#include "norm/row_norm.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

// How an operator's tensors lie in rows.
struct RowView {
  int64_t rows;
  int64_t n;

  // Rows are the axes from that of the attribute `axis` on.
  static RowView from(user_op::KernelComputeContext* ctx, const char* tensor, const char* axis) {
    const auto& shape = ctx->Tensor4ArgNameAndIndex(tensor, 0)->shape_view();
    const int64_t first = ctx->Attr<int64_t>(axis);
    const int64_t begin = first < 0 ? first + shape.NumAxes() : first;
    return {shape.Count(0, begin), shape.Count(begin)};
  }
  // Rows are the axes of x that inv_rms lacks.
  static RowView of_rms(user_op::KernelComputeContext* ctx) {
    const auto& inv_rms = ctx->Tensor4ArgNameAndIndex("inv_rms", 0)->shape_view();
    const auto& x = ctx->Tensor4ArgNameAndIndex("x", 0)->shape_view();
    return {inv_rms.elem_cnt(), x.Count(inv_rms.NumAxes())};
  }
};

template <typename T>
RowNormGrad<T> grad_of(user_op::KernelComputeContext* ctx, const RowView& view, const char* mean,
                       const char* inv_std) {
  using Float = RowStatistics<T>;
  return {view.rows, view.n, input_or_null<T>(ctx, "dy"), input_or_null<T>(ctx, "x"),
          mean == nullptr ? nullptr : input<Float>(ctx, mean), input<Float>(ctx, inv_std)};
}

template <typename T>
class LayerNormKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const RowView view = RowView::from(ctx, "x", "begin_norm_axis");
    row_norm<T>({view.rows, view.n, ctx->Attr<double>("epsilon"), input<T>(ctx, "x"),
                 input_or_null<T>(ctx, "gamma"), input_or_null<T>(ctx, "beta"), output<T>(ctx, "y"),
                 output<RowStatistics<T>>(ctx, "mean"),
                 output<RowStatistics<T>>(ctx, "inv_variance")});
  }
};

template <typename T>
class LayerNormGradKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const RowView view = RowView::from(ctx, "dy", "begin_norm_axis");
    row_norm_grad(grad_of<T>(ctx, view, "mean", "inv_variance"), input_or_null<T>(ctx, "gamma"),
                  input_or_null<T>(ctx, "_add_to_output"), output<T>(ctx, "dx"));
  }
};

template <typename T>
class LayerNormParamGradKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const RowView view = RowView::from(ctx, "dy", "begin_params_axis");
    row_norm_param_grad(grad_of<T>(ctx, view, "mean", "inv_variance"),
                        output_or_null<T>(ctx, "gamma_diff"), output_or_null<T>(ctx, "beta_diff"));
  }
};

template <typename T>
class RmsNormKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const RowView view = RowView::of_rms(ctx);
    row_norm<T>({view.rows, view.n, ctx->Attr<float>("epsilon"), input<T>(ctx, "x"),
                 input_or_null<T>(ctx, "weight"), nullptr, output<T>(ctx, "y"), nullptr,
                 output<RowStatistics<T>>(ctx, "inv_rms")});
  }
};

template <typename T>
class RmsNormGradKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    row_norm_grad<T>(grad_of<T>(ctx, RowView::of_rms(ctx), nullptr, "inv_rms"),
                     input_or_null<T>(ctx, "weight"), nullptr, output<T>(ctx, "dx"));
  }
};

template <typename T>
class RmsNormParamGradKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    row_norm_param_grad<T>(grad_of<T>(ctx, RowView::of_rms(ctx), nullptr, "inv_rms"),
                           output<T>(ctx, "weight_grad"), nullptr);
  }
};

REGISTER_KERNELS(LayerNormKernel, float, double, Bfloat16)("layer_norm", "x");
// nn.Graph adds another gradient of x here where there is one, and dx then takes its memory.
REGISTER_KERNELS(LayerNormGradKernel, float, double, Bfloat16)
("layer_norm_grad", "dy", in_place("dx", "_add_to_output"));
REGISTER_KERNELS(LayerNormParamGradKernel, float, double, Bfloat16)("layer_norm_param_grad", "dy");
REGISTER_KERNELS(RmsNormKernel, float, double, Bfloat16)("rms_norm", "x");
REGISTER_KERNELS(RmsNormGradKernel, float, double, Bfloat16)("rms_norm_grad", "dx");
REGISTER_KERNELS(RmsNormParamGradKernel, float, double, Bfloat16)("rms_norm_param_grad", "dy");

}  // namespace

}  // namespace oneflow_accel
