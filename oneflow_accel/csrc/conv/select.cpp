#include "conv/select.h"

namespace oneflow_accel {

namespace {

// Pixels of one output image from which on a GEMM per image beats copying to a blocked layout.
constexpr int64_t kLargeImage = 28 * 28;

// Vector length of the blocked layouts: fewer input channels fill them with zeros.
constexpr int64_t kChannelBlock = 16;

bool is_large_pointwise(const ConvGeometry& geometry) {
  int64_t pixels = 1;
  for (std::size_t i = 2; i < geometry.out.size(); ++i) { pixels *= geometry.out[i]; }
  return geometry.groups() == 1 && geometry.is_pointwise() && pixels >= kLargeImage;
}

ActivationLayout plain_if(bool condition) {
  return condition ? ActivationLayout::kPlain : ActivationLayout::kAny;
}

}  // namespace

ActivationLayout forward_layout(const ConvGeometry& geometry) {
  return plain_if(geometry.channels_last || is_large_pointwise(geometry));
}

ActivationLayout data_grad_layout(const ConvGeometry& geometry) {
  const bool few_channels = geometry.groups() == 1 && geometry.in[1] < kChannelBlock;
  return plain_if(geometry.channels_last || is_large_pointwise(geometry) || few_channels);
}

ActivationLayout filter_grad_layout(const ConvGeometry& geometry) {
  return plain_if(geometry.channels_last);
}

dnnl::memory::desc in_desc(const ConvGeometry& geometry, ActivationLayout layout) {
  return layout == ActivationLayout::kPlain ? geometry.in_desc() : geometry.any_layout(geometry.in);
}

dnnl::memory::desc out_desc(const ConvGeometry& geometry, ActivationLayout layout) {
  return layout == ActivationLayout::kPlain ? geometry.out_desc() : geometry.any_layout(geometry.out);
}

dnnl::memory::desc any_weights(const ConvGeometry& geometry) {
  return geometry.any_layout(geometry.weights_desc().get_dims());
}

}  // namespace oneflow_accel
