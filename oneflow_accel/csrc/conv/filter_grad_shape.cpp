// The shape rule of conv_filter_grad for groups in channels last.
//
// OneFlow 0.9.0 refuses groups > 1 with data_format channels_last there, though its conv2d takes
// them: a grouped convolution in NHWC could not be trained. The kernels can do it, so the rule is
// replaced in the operator registry when the plug-in is loaded, before any operation is built.
#include <vector>

#include "common/oneflow.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

using ::oneflow::DimVector;
using ::oneflow::Maybe;
using ::oneflow::Shape;
// CHECK_OR_RETURN names these without a namespace.
using ::oneflow::Error;
using ::oneflow::ErrorStackFrame;
using ::oneflow::SymbolOf;

Maybe<void> infer_filter_grad_shape(user_op::InferContext* ctx) {
  const Shape& x = ctx->InputShape("x", 0);
  const Shape& dy = ctx->InputShape("dy", 0);
  const int64_t spatial_dims = ctx->Attr<int32_t>("num_spatial_dims");
  const int64_t groups = ctx->Attr<int32_t>("groups");
  const auto& kernel = ctx->Attr<std::vector<int32_t>>("kernel_size");
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
  ctx->SetOutputShape("filter_diff", 0, Shape(weights));
  ctx->SetOutputIsDynamic("filter_diff", 0, false);
  return Maybe<void>::Ok();
}

bool replace_shape_rule() {
  const auto* rules = user_op::UserOpRegistryMgr::Get().GetOpRegistryResult("conv_filter_grad");
  CHECK_NOTNULL(rules);
  // OneFlow hands out a const view of its table and has no call to change an entry.
  auto* entry = const_cast<user_op::OpRegistryResult*>(rules);
  entry->logical_tensor_desc_infer_fn = infer_filter_grad_shape;
  entry->physical_tensor_desc_infer_fn = infer_filter_grad_shape;
  return true;
}

const bool g_replaced = replace_shape_rule();

}  // namespace

}  // namespace oneflow_accel
