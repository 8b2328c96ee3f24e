#include "conv/geometry.h"

#include <algorithm>
#include <vector>

namespace oneflow_accel {

namespace {

using dims = dnnl::memory::dims;

dims to_dims(const std::vector<int32_t>& values) { return dims(values.begin(), values.end()); }

// (N, C, spatial...) of an activation.
dims logical_order(const ::oneflow::ShapeView& shape, bool channels_last) {
  dims sizes(shape.NumAxes());
  for (int64_t i = 0; i < shape.NumAxes(); ++i) { sizes[i] = shape.At(i); }
  if (channels_last) { std::rotate(sizes.begin() + 1, sizes.end() - 1, sizes.end()); }
  return sizes;
}

// Contiguous memory of logical dims, where the dim at `channel` is stored last if channels_last.
dnnl::memory::desc dense(const dims& sizes, dnnl::memory::data_type type, std::size_t channel,
                         bool channels_last) {
  dims strides(sizes.size());
  int64_t stride = 1;
  const auto put_before = [&](std::size_t i) {
    strides[i] = stride;
    stride *= sizes[i];
  };
  if (channels_last) { put_before(channel); }
  for (std::size_t i = sizes.size(); i-- > 0;) {
    if (!(channels_last && i == channel)) { put_before(i); }
  }
  return dnnl::memory::desc(sizes, type, strides);
}

}  // namespace

ConvGeometry::ConvGeometry(Context* ctx, const char* in_name, const char* out_name,
                           dnnl::memory::data_type type, bool last)
    : channels_last(last),
      weights_channels_last(last),
      data_type(type),
      in(logical_order(shape_of(ctx, in_name), last)),
      out(logical_order(shape_of(ctx, out_name), last)),
      strides(to_dims(ctx->Attr<std::vector<int32_t>>("strides"))),
      dilation(to_dims(ctx->Attr<std::vector<int32_t>>("dilation_rate"))),
      padding(to_dims(ctx->Attr<std::vector<int32_t>>("padding_before"))) {
  for (auto& rate : dilation) { rate -= 1; }
  const int64_t groups = ctx->Attr<int32_t>("groups");
  weights = {groups, out[1] / groups, in[1] / groups};
  const auto& kernel = ctx->Attr<std::vector<int32_t>>("kernel_size");
  weights.insert(weights.end(), kernel.begin(), kernel.end());
}

bool ConvGeometry::is_pointwise() const {
  return std::all_of(weights.begin() + 3, weights.end(), [](int64_t size) { return size == 1; });
}

int64_t ConvGeometry::count(ConvRole role) const {
  return oneflow_accel::count(role == kConvIn ? in : role == kConvOut ? out : weights);
}

bool ConvGeometry::is_empty() const {
  return count(kConvIn) == 0 || count(kConvOut) == 0 || count(kConvWeights) == 0;
}

dnnl::memory::desc ConvGeometry::desc(ConvRole role) const {
  if (role != kConvWeights) {
    return dense(role == kConvIn ? in : out, data_type, 1, channels_last);
  }
  if (groups() > 1) { return dense(weights, data_type, 2, weights_channels_last); }
  // (O, I, kernel...) of one group: oneDNN has faster kernels for it.
  return dense(dims(weights.begin() + 1, weights.end()), data_type, 1, weights_channels_last);
}

dnnl::memory::desc ConvGeometry::any_layout(const dims& sizes) const {
  return dnnl::memory::desc(sizes, data_type, dnnl::memory::format_tag::any);
}

KeyBuilder ConvGeometry::key(const char* operation) const {
  KeyBuilder key(operation);
  key.add(channels_last, weights_channels_last, data_type);
  for (const dims* sizes : {&in, &out, &weights, &strides, &dilation, &padding}) {
    key.add_all(*sizes);
  }
  return key;
}

std::string ConvGeometry::describe(const char* operation) const {
  return std::string(operation) + " (channels " + (channels_last ? "last" : "first")
         + ") of input (N, C, spatial...) " + text(in) + ", weights " + text(weights)
         + " in (groups, O / groups, I / groups, kernel...), output " + text(out) + ", strides "
         + text(strides) + ", dilation - 1 " + text(dilation) + ", padding " + text(padding);
}

}  // namespace oneflow_accel
