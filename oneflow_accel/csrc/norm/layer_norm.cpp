// layer_norm, rms_norm and their gradients: float32, float64 and bfloat16 (statistics in float32).
#include "common/oneflow.h"
#include "norm/row_norm.h"

namespace oneflow_accel {

namespace {

// How an operator's tensors lie in rows, and what it calls its arguments.
struct RowOperator {
  bool rms;
  int64_t rows;
  int64_t n;
  const char* gamma;
  const char* gamma_diff;
  const char* inv_std;

  // Rows are the axes of `tensor` from that of the attribute `axis` on; rms_norm has none: they are
  // the axes of x that inv_rms lacks.
  RowOperator(Context* ctx, const char* tensor, const char* axis)
      : rms(ctx->has_input("inv_rms", 0) || ctx->has_output("inv_rms", 0)),
        gamma(rms ? "weight" : "gamma"),
        gamma_diff(rms ? "weight_grad" : "gamma_diff"),
        inv_std(rms ? "inv_rms" : "inv_variance") {
    const auto& shape = shape_of(ctx, rms ? "x" : tensor);
    const int64_t first = rms ? shape_of(ctx, inv_std).NumAxes() : ctx->Attr<int64_t>(axis);
    const int64_t begin = first < 0 ? first + shape.NumAxes() : first;
    rows = shape.Count(0, begin);
    n = shape.Count(begin);
  }
};

template <typename T>
RowNormGrad<T> grad_of(Context* ctx, const RowOperator& op) {
  using Float = RowStatistics<T>;
  return {op.rows, op.n, input_or_null<T>(ctx, "dy"), input_or_null<T>(ctx, "x"),
          input_or_null<Float>(ctx, "mean"), input<Float>(ctx, op.inv_std)};
}

template <typename T>
void row_norm_kernel(Context* ctx) {
  const RowOperator op(ctx, "x", "begin_norm_axis");
  row_norm<T>({op.rows, op.n, op.rms ? ctx->Attr<float>("epsilon") : ctx->Attr<double>("epsilon"),
               input<T>(ctx, "x"), input_or_null<T>(ctx, op.gamma), input_or_null<T>(ctx, "beta"),
               output<T>(ctx, "y"), output_or_null<RowStatistics<T>>(ctx, "mean"),
               output<RowStatistics<T>>(ctx, op.inv_std)});
}

template <typename T>
void row_norm_grad_kernel(Context* ctx) {
  const RowOperator op(ctx, "dy", "begin_norm_axis");
  row_norm_grad(grad_of<T>(ctx, op), input_or_null<T>(ctx, op.gamma),
                input_or_null<T>(ctx, "_add_to_output"), output<T>(ctx, "dx"));
}

template <typename T>
void row_norm_param_grad_kernel(Context* ctx) {
  const RowOperator op(ctx, "dy", "begin_params_axis");
  row_norm_param_grad(grad_of<T>(ctx, op), output_or_null<T>(ctx, op.gamma_diff),
                      output_or_null<T>(ctx, "beta_diff"));
}

#define REGISTER_FOR_ROWS(...) REGISTER_TYPED_KERNELS((float, double, Bfloat16), __VA_ARGS__)
REGISTER_FOR_ROWS(row_norm_kernel, "layer_norm rms_norm", "x");
// nn.Graph adds another gradient of x here where there is one, and dx then takes its memory.
REGISTER_FOR_ROWS(row_norm_grad_kernel, "layer_norm_grad", "dy", in_place("dx", "_add_to_output"));
REGISTER_FOR_ROWS(row_norm_grad_kernel, "rms_norm_grad", "dx");
REGISTER_FOR_ROWS(row_norm_param_grad_kernel, "layer_norm_param_grad rms_norm_param_grad", "dy");

}  // namespace

}  // namespace oneflow_accel
