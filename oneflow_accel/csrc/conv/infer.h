// Attributes, shapes and splits of convolutions of two spatial dimensions, for our own operators.
#pragma once

#include <string>
#include <vector>

#include "common/infer.h"

namespace oneflow_accel {

// Axes of (N, C, H, W) or (N, H, W, C).
struct ImageAxes {
  int channel;
  int first_spatial;

  explicit ImageAxes(bool channels_last)
      : channel(channels_last ? 3 : 1), first_spatial(channels_last ? 1 : 2) {}
};

// The output's shape of the operator `name`, from its inputs "in", "weight" and, where it is there,
// "bias" (checked), and from its attributes kernel_size, padding_before, strides, dilation_rate and
// groups.
inline ::oneflow::Maybe<::oneflow::Shape> infer_conv2d(::oneflow::user_op::InferContext* ctx,
                                                       const std::string& name, ImageAxes image,
                                                       ImageAxes kernel_axes) {
  // CHECK_OR_RETURN names these without a namespace.
  using ::oneflow::Error;
  using ::oneflow::ErrorStackFrame;
  using ::oneflow::Maybe;
  using ::oneflow::SymbolOf;
  using ::oneflow::Shape;
  constexpr int kSpatialDims = 2;

  const Shape& in = ctx->InputShape("in", 0);
  const Shape& weight = ctx->InputShape("weight", 0);
  CHECK_EQ_OR_RETURN(in.NumAxes(), kSpatialDims + 2) << name << ": axes of in";
  CHECK_EQ_OR_RETURN(weight.NumAxes(), kSpatialDims + 2) << name << ": axes of weight";
  const int64_t groups = ctx->Attr<int32_t>("groups");
  const int64_t out_channels = weight.At(0);
  CHECK_OR_RETURN(groups > 0 && out_channels % groups == 0
                  && in.At(image.channel) == weight.At(kernel_axes.channel) * groups)
      << name << ": " << in.At(image.channel) << " input channels, weight " << weight.ToString()
      << " and " << groups << " groups do not fit";
  const auto& kernel = ctx->Attr<std::vector<int32_t>>("kernel_size");
  const auto& padding = ctx->Attr<std::vector<int32_t>>("padding_before");
  const auto& strides = ctx->Attr<std::vector<int32_t>>("strides");
  const auto& dilation = ctx->Attr<std::vector<int32_t>>("dilation_rate");
  ::oneflow::DimVector out(kSpatialDims + 2);
  out[0] = in.At(0);
  out[image.channel] = out_channels;
  for (int i = 0; i < kSpatialDims; ++i) {
    const int axis = image.first_spatial + i;
    CHECK_EQ_OR_RETURN(weight.At(kernel_axes.first_spatial + i), kernel.at(i))
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

// Images do not know of each other; weights are the same for all, their gradients sums over them.
inline ::oneflow::Maybe<void> split_images(::oneflow::user_op::SbpContext* ctx) {
  split_all_but(ctx, 0, [](const std::string& name) {
    return name.find("weight") == 0 || name.find("bias") == 0;
  });
  return ::oneflow::Maybe<void>::Ok();
}

// What an operator is registered with; it registers when it is made.
using OpRegistration = ::oneflow::user_op::UserOpRegisterTrigger<::oneflow::user_op::OpRegistry>;

// The operator `name` with the attributes of a convolution, which splits along the images.
inline ::oneflow::user_op::OpRegistry conv2d_operator(const std::string& name) {
  using Sizes = std::vector<int32_t>;
  return ::oneflow::user_op::UserOpRegistryMgr::Get()
      .CheckAndGetOpRegistry(name)
      .Attr<Sizes>("kernel_size")
      .Attr<Sizes>("strides")
      .Attr<Sizes>("padding_before")
      .Attr<Sizes>("dilation_rate")
      .Attr<int32_t>("groups")
      .SetGetSbpFn(split_images);
}

}  // namespace oneflow_accel
