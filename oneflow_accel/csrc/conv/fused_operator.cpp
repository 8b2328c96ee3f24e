// The operator oneflow_accel_conv2d, for inference: y = f(conv2d(in, weight) + bias + summand), where
// `activation` names f: "relu", "silu", or "" for nothing. It has no gradient.
//
// in: (N, C, H, W) or (N, H, W, C), float32 or bfloat16; weight: (O, C / groups, h, w) or
// (O, h, w, C / groups), of the same type; bias: (O), float32; summand: like the output.
#include <vector>

#include "conv/infer.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

using ::oneflow::DataType;
using ::oneflow::Maybe;
using ::oneflow::Shape;
// CHECK_OR_RETURN names these without a namespace.
using ::oneflow::Error;
using ::oneflow::ErrorStackFrame;
using ::oneflow::SymbolOf;

Maybe<void> infer_shape(user_op::InferContext* ctx) {
  const ImageAxes axes(ctx->Attr<std::string>("data_format") == "channels_last");
  const Shape out = *JUST(infer_conv2d(ctx, "oneflow_accel_conv2d", axes, axes));
  const auto& activation = ctx->Attr<std::string>("activation");
  CHECK_OR_RETURN(activation.empty() || activation == "relu" || activation == "silu")
      << "oneflow_accel_conv2d: there is no activation '" << activation << "'";
  if (ctx->has_input("summand", 0)) {
    CHECK_EQ_OR_RETURN(ctx->InputShape("summand", 0), out)
        << "oneflow_accel_conv2d: shape of summand";
  }
  ctx->SetOutputShape("out", 0, out);
  ctx->SetOutputIsDynamic("out", 0, ctx->InputIsDynamic("in", 0));
  return Maybe<void>::Ok();
}

Maybe<void> infer_data_type(user_op::InferContext* ctx) {
  const DataType type = ctx->InputDType("in", 0);
  CHECK_EQ_OR_RETURN(ctx->InputDType("weight", 0), type) << "oneflow_accel_conv2d: type of weight";
  if (ctx->has_input("bias", 0)) {
    CHECK_EQ_OR_RETURN(ctx->InputDType("bias", 0), DataType::kFloat)
        << "oneflow_accel_conv2d: bias is float32";
  }
  if (ctx->has_input("summand", 0)) {
    CHECK_EQ_OR_RETURN(ctx->InputDType("summand", 0), type)
        << "oneflow_accel_conv2d: type of summand";
  }
  ctx->SetOutputDType("out", 0, type);
  return Maybe<void>::Ok();
}

const OpRegistration fused = conv2d_operator("oneflow_accel_conv2d")
                                 .Input("in")
                                 .Input("weight")
                                 .OptionalInput("bias")
                                 .OptionalInput("summand")
                                 .Output("out")
                                 .Attr<std::string>("data_format")
                                 .Attr<std::string>("activation")
                                 // Whose constant weights they are (see kept_weights.h); 0 where
                                 // they may change.
                                 .Attr<int64_t>("owner")
                                 .NoGrad()
                                 .SetTensorDescInferFn(infer_shape)
                                 .SetDataTypeInferFn(infer_data_type);

}  // namespace

}  // namespace oneflow_accel
