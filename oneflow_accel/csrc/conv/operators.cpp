// Our own operators of convolutions, and a shape rule of OneFlow's that is replaced.
#include <string>
#include <vector>

#include "common/infer.h"

namespace oneflow_accel {

namespace {

using ::oneflow::DimVector;
using ::oneflow::Shape;
// CHECK_OR_RETURN names these without a namespace.
using ::oneflow::ErrorStackFrame;
using ::oneflow::SymbolOf;

using Sizes = std::vector<int32_t>;

// The axes of channels and rows of (N, C, H, W) or (N, H, W, C).
int channel_axis(bool channels_last) { return channels_last ? 3 : 1; }
int row_axis(bool channels_last) { return channels_last ? 1 : 2; }

// The output's shape of the operator `name`, from its inputs "in", "weight" and, where it is there,
// "bias" (checked), and from its attributes kernel_size, padding_before, strides, dilation_rate and
// groups.
Maybe<Shape> infer_conv2d(user_op::InferContext* ctx, const std::string& name, bool channels_last,
                          bool weights_channels_last) {
  constexpr int kSpatialDims = 2;
  const Shape& in = ctx->InputShape("in", 0);
  const Shape& weight = ctx->InputShape("weight", 0);
  CHECK_EQ_OR_RETURN(in.NumAxes(), kSpatialDims + 2) << name << ": axes of in";
  CHECK_EQ_OR_RETURN(weight.NumAxes(), kSpatialDims + 2) << name << ": axes of weight";
  const int64_t groups = ctx->Attr<int32_t>("groups");
  const int64_t in_channels = in.At(channel_axis(channels_last));
  const int64_t out_channels = weight.At(0);
  CHECK_OR_RETURN(groups > 0 && out_channels % groups == 0
                  && in_channels == weight.At(channel_axis(weights_channels_last)) * groups)
      << name << ": " << in_channels << " input channels, weight " << weight.ToString() << " and "
      << groups << " groups do not fit";
  const auto& kernel = ctx->Attr<Sizes>("kernel_size");
  const auto& padding = ctx->Attr<Sizes>("padding_before");
  const auto& strides = ctx->Attr<Sizes>("strides");
  const auto& dilation = ctx->Attr<Sizes>("dilation_rate");
  DimVector out(kSpatialDims + 2);
  out[0] = in.At(0);
  out[channel_axis(channels_last)] = out_channels;
  for (int i = 0; i < kSpatialDims; ++i) {
    const int axis = row_axis(channels_last) + i;
    CHECK_EQ_OR_RETURN(weight.At(row_axis(weights_channels_last) + i), kernel.at(i))
        << name << ": kernel_size";
    const int64_t reach = int64_t{dilation.at(i)} * (kernel.at(i) - 1) + 1;
    const int64_t room = in.At(axis) + 2 * padding.at(i) - reach;
    // Of an image without pixels there is nothing to convolve, as in OneFlow's own conv2d.
    CHECK_OR_RETURN(room >= 0 || in.At(axis) == 0)
        << name << ": the kernel is larger than the input " << in.ToString();
    out[axis] = room < 0 ? 0 : room / strides.at(i) + 1;
  }
  if (ctx->has_input("bias", 0)) {
    CHECK_EQ_OR_RETURN(ctx->InputShape("bias", 0), Shape({out_channels}))
        << name << ": shape of bias";
  }
  return Shape(out);
}

// The operator `name` with the attributes of a convolution. Images do not know of each other;
// weights are the same for all, their gradients sums over them.
user_op::OpRegistry conv2d_operator(const std::string& name, const char* inputs,
                                    const char* outputs,
                                    const user_op::TensorDescInferFn& infer_shapes,
                                    const user_op::DataTypeInferFn& infer_types) {
  return new_operator(name, inputs, outputs, infer_shapes, infer_types,
                      split_first_axis("weight bias"))
      .Attr<Sizes>("kernel_size").Attr<Sizes>("strides").Attr<Sizes>("padding_before")
      .Attr<Sizes>("dilation_rate").Attr<int32_t>("groups");
}

// oneflow_accel_conv2d, for inference: y = f(conv2d(in, weight) + bias + summand), where
// `activation` names f: "relu", "silu", or "" for nothing. It has no gradient.
//
// in: (N, C, H, W) or (N, H, W, C), float32 or bfloat16; weight: (O, C / groups, h, w) or
// (O, h, w, C / groups), of the same type; bias: (O), float32; summand: like the output.
Maybe<void> infer_fused_shape(user_op::InferContext* ctx) {
  const bool last = ctx->Attr<std::string>("data_format") == "channels_last";
  const Shape out = *JUST(infer_conv2d(ctx, "oneflow_accel_conv2d", last, last));
  const auto& activation = ctx->Attr<std::string>("activation");
  CHECK_OR_RETURN(activation.empty() || activation == "relu" || activation == "silu")
      << "oneflow_accel_conv2d: there is no activation '" << activation << "'";
  if (ctx->has_input("summand", 0)) {
    CHECK_EQ_OR_RETURN(ctx->InputShape("summand", 0), out)
        << "oneflow_accel_conv2d: shape of summand";
  }
  describe_output(ctx, "out", out);
  return Maybe<void>::Ok();
}

Maybe<void> infer_fused_types(user_op::InferContext* ctx) {
  if (ctx->has_input("bias", 0)) {
    CHECK_EQ_OR_RETURN(ctx->InputDType("bias", 0), DataType::kFloat)
        << "oneflow_accel_conv2d: bias is float32";
  }
  return infer_one_dtype(ctx, "oneflow_accel_conv2d", {"bias"});
}

const NewOperator g_fused =
    conv2d_operator("oneflow_accel_conv2d", "in weight bias? summand?", "out", infer_fused_shape,
                    infer_fused_types)
        .Attr<std::string>("data_format").Attr<std::string>("activation")
        // Whose weights they are (see kept_weights.h); 0 where no copy is kept.
        .Attr<int64_t>("owner").NoGrad();

// oneflow_accel_channels_last_conv2d and its gradients: activations (N, H, W, C) and weights in the
// standard order (O, C / groups, h, w).
const std::string kName = "oneflow_accel_channels_last_conv2d";

Maybe<void> infer_shapes(user_op::InferContext* ctx) {
  const Shape out = *JUST(infer_conv2d(ctx, kName, /*channels_last=*/true,
                                       /*weights_channels_last=*/false));
  if (ctx->has_input("out_grad", 0) && ctx->InputShape("out_grad", 0) != out) {
    return Error::RuntimeError() << kName << ": a gradient of " << out.ToString()
                                 << " is needed, not " << ctx->InputShape("out_grad", 0).ToString();
  }
  if (ctx->has_output("out", 0)) { describe_output(ctx, "out", out); }
  if (ctx->has_output("bias_grad", 0)) {
    describe_output(ctx, "bias_grad", Shape({ctx->InputShape("weight", 0).At(0)}));
  }
  return describe_gradients(ctx);
}

const auto kTypes = one_dtype(kName);

const NewOperator g_operators[] = {
    conv2d_operator(kName, "in weight bias?", "out", infer_shapes, kTypes),
    conv2d_operator(kName + "_data_grad", "out_grad in weight", "in_grad", infer_shapes, kTypes),
    conv2d_operator(kName + "_filter_grad", "out_grad in weight", "weight_grad bias_grad",
                    infer_shapes, kTypes)};

// The shape rule of conv_filter_grad. OneFlow 0.9.0 refuses groups > 1 with data_format
// channels_last there, though its conv2d takes them: a grouped convolution in NHWC could not be
// trained. The kernels can do it, so the rule is replaced in the operator registry when the plug-in
// is loaded, before any operation is built.
Maybe<void> infer_conv_filter_grad(user_op::InferContext* ctx) {
  const Shape& x = ctx->InputShape("x", 0);
  const Shape& dy = ctx->InputShape("dy", 0);
  const int64_t spatial_dims = ctx->Attr<int32_t>("num_spatial_dims");
  const int64_t groups = ctx->Attr<int32_t>("groups");
  const auto& kernel = ctx->Attr<Sizes>("kernel_size");
  const bool channels_last = ctx->Attr<std::string>("data_format") == "channels_last";
  CHECK_OR_RETURN(spatial_dims >= 1 && spatial_dims <= 3)
      << "conv_filter_grad: " << spatial_dims << " spatial dimensions";
  CHECK_EQ_OR_RETURN(kernel.size(), spatial_dims) << "conv_filter_grad: length of kernel_size";
  CHECK_EQ_OR_RETURN(x.NumAxes(), spatial_dims + 2) << "conv_filter_grad: axes of x";
  CHECK_EQ_OR_RETURN(dy.NumAxes(), spatial_dims + 2) << "conv_filter_grad: axes of dy";
  const int64_t channel_axis = channels_last ? spatial_dims + 1 : 1;
  const int64_t in_channels = x.At(channel_axis);
  const int64_t out_channels = dy.At(channel_axis);
  CHECK_OR_RETURN(groups > 0 && in_channels % groups == 0 && out_channels % groups == 0)
      << "conv_filter_grad: " << groups << " groups do not divide " << in_channels
      << " input channels and " << out_channels << " output channels";
  DimVector weights(kernel.begin(), kernel.end());
  weights.insert(channels_last ? weights.end() : weights.begin(), in_channels / groups);
  weights.insert(weights.begin(), out_channels);
  describe_output(ctx, "filter_diff", Shape(weights));
  return Maybe<void>::Ok();
}

bool replace_shape_rule() {
  const auto* rules = user_op::UserOpRegistryMgr::Get().GetOpRegistryResult("conv_filter_grad");
  CHECK_NOTNULL(rules);
  // OneFlow hands out a const view of its table and has no call to change an entry.
  auto* entry = const_cast<user_op::OpRegistryResult*>(rules);
  entry->logical_tensor_desc_infer_fn = infer_conv_filter_grad;
  entry->physical_tensor_desc_infer_fn = infer_conv_filter_grad;
  return true;
}

const bool g_replaced = replace_shape_rule();

}  // namespace

}  // namespace oneflow_accel
