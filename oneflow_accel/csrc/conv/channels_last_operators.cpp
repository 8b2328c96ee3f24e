// oneflow_accel_channels_last_conv2d and its gradients: activations (N, H, W, C) and weights in the
// standard order (O, C / groups, h, w), float32 and bfloat16. For models whose tokens (N, H W, C)
// are such activations already, and whose checkpoints hold standard weights.
#include "common/arguments.h"
#include "common/infer.h"
#include "common/threads.h"
#include "conv/convolution.h"
#include "conv/infer.h"
#include "conv/run.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;
using ::oneflow::Error;
using ::oneflow::Maybe;
using ::oneflow::Shape;

const char* const kName = "oneflow_accel_channels_last_conv2d";

Maybe<Shape> infer_out(user_op::InferContext* ctx) {
  return infer_conv2d(ctx, kName, ImageAxes(true), ImageAxes(false));
}

Maybe<void> infer(user_op::InferContext* ctx) {
  describe_output(ctx, "out", *JUST(infer_out(ctx)));
  return Maybe<void>::Ok();
}

Maybe<void> check_gradient(user_op::InferContext* ctx) {
  const Shape out = *JUST(infer_out(ctx));
  if (ctx->InputShape("out_grad", 0) != out) {
    return Error::RuntimeError() << kName << ": a gradient of " << out.ToString()
                                 << " is needed, not " << ctx->InputShape("out_grad", 0).ToString();
  }
  return Maybe<void>::Ok();
}

Maybe<void> infer_data_grad(user_op::InferContext* ctx) {
  JUST(check_gradient(ctx));
  describe_output(ctx, "in_grad", ctx->InputShape("in", 0));
  return Maybe<void>::Ok();
}

Maybe<void> infer_filter_grad(user_op::InferContext* ctx) {
  JUST(check_gradient(ctx));
  const Shape& weight = ctx->InputShape("weight", 0);
  describe_output(ctx, "weight_grad", weight);
  describe_output(ctx, "bias_grad", Shape({weight.At(0)}));
  return Maybe<void>::Ok();
}

Maybe<void> infer_types(user_op::InferContext* ctx) {
  return infer_one_dtype(ctx, kName);
}

const OpRegistration forward = conv2d_operator("oneflow_accel_channels_last_conv2d")
                                   .Input("in")
                                   .Input("weight")
                                   .OptionalInput("bias")
                                   .Output("out")
                                   .SetTensorDescInferFn(infer)
                                   .SetDataTypeInferFn(infer_types);

const OpRegistration data_grad = conv2d_operator("oneflow_accel_channels_last_conv2d_data_grad")
                                     .Input("out_grad")
                                     .Input("in")
                                     .Input("weight")
                                     .Output("in_grad")
                                     .SetTensorDescInferFn(infer_data_grad)
                                     .SetDataTypeInferFn(infer_types);

const OpRegistration filter_grad = conv2d_operator("oneflow_accel_channels_last_conv2d_filter_grad")
                                       .Input("out_grad")
                                       .Input("in")
                                       .Input("weight")
                                       .Output("weight_grad")
                                       .Output("bias_grad")
                                       .SetTensorDescInferFn(infer_filter_grad)
                                       .SetDataTypeInferFn(infer_types);

// Runs compute(geometry). `out` is the argument that has the output's shape.
template <typename T, typename Compute>
void run(user_op::KernelComputeContext* ctx, const char* out, const Compute& compute) {
  const ThreadScope threads;
  ConvGeometry geometry(*ctx, ctx->Tensor4ArgNameAndIndex("in", 0)->shape_view(),
                        ctx->Tensor4ArgNameAndIndex(out, 0)->shape_view(), true);
  geometry.weights_channels_last = false;
  geometry.data_type = kConvType<T>;
  run_or_zero<T>(ctx, geometry, kName, [&] { compute(geometry); });
}

template <typename T>
class ForwardKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    run<T>(ctx, "out", [&](const ConvGeometry& geometry) {
      convolution(geometry, input<T>(ctx, "in"), input<T>(ctx, "weight"),
                  FloatBias<T>(ctx, geometry).data(), output<T>(ctx, "out"));
    });
  }
};

template <typename T>
class DataGradKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    run<T>(ctx, "out_grad", [&](const ConvGeometry& geometry) {
      convolution_data_grad(geometry, input<T>(ctx, "out_grad"), input<T>(ctx, "weight"),
                            output<T>(ctx, "in_grad"));
    });
  }
};

template <typename T>
class FilterGradKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    run<T>(ctx, "out_grad", [&](const ConvGeometry& geometry) {
      convolution_filter_grad(geometry, input<T>(ctx, "in"), input<T>(ctx, "out_grad"),
                              output<T>(ctx, "weight_grad"), output<T>(ctx, "bias_grad"));
    });
  }
};

REGISTER_KERNEL("oneflow_accel_channels_last_conv2d", make<ForwardKernel<float>>,
                is_float32_on_cpu("out"));
REGISTER_KERNEL("oneflow_accel_channels_last_conv2d", make<ForwardKernel<Bfloat16>>,
                is_bfloat16_on_cpu("out"));
REGISTER_KERNEL("oneflow_accel_channels_last_conv2d_data_grad", make<DataGradKernel<float>>,
                is_float32_on_cpu("in_grad"));
REGISTER_KERNEL("oneflow_accel_channels_last_conv2d_data_grad", make<DataGradKernel<Bfloat16>>,
                is_bfloat16_on_cpu("in_grad"));
REGISTER_KERNEL("oneflow_accel_channels_last_conv2d_filter_grad", make<FilterGradKernel<float>>,
                is_float32_on_cpu("weight_grad"));
REGISTER_KERNEL("oneflow_accel_channels_last_conv2d_filter_grad", make<FilterGradKernel<Bfloat16>>,
                is_bfloat16_on_cpu("weight_grad"));

}  // namespace

}  // namespace oneflow_accel
