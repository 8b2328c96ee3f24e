// conv1d, conv2d and conv3d and oneflow_accel_channels_last_conv2d with their gradients, float32
// and bfloat16, any number of groups.
#include "conv/convolution.h"

#include <stdexcept>

#include "common/oneflow.h"
#include "conv/grouped.h"
#include "conv/primitive.h"

namespace oneflow_accel {

void convolve(const ConvGeometry& geometry, const ConvCall& call) {
  if (const auto shape = grouped_shape(geometry)) { return run_grouped<float>(*shape, call); }
  if (has_pixel_products(geometry, call.result)) {
    return pixel_products_filter_grad(geometry, call);
  }
  if (!run_primitive(geometry, call)) {
    throw std::runtime_error("oneDNN has no such convolution");
  }
}

namespace {

// The same of bfloat16 tensors. What runs in a form of ours, or what oneDNN has no bfloat16 for that
// we want, runs on float32 copies.
void convolve_bfloat16(const ConvGeometry& geometry, const ConvCall& call) {
  const bool is_ours = grouped_shape(geometry) || has_pixel_products(geometry, call.result);
  if (!is_ours && run_primitive(geometry, call)) { return; }
  const auto copy = [&](ConvRole role) {
    const int64_t n = geometry.count(role);
    return role == call.result ? FloatCopy(n) : FloatCopy(call.tensor<Bfloat16>(role), n);
  };
  const FloatCopy copies[] = {copy(kConvIn), copy(kConvWeights), copy(kConvOut)};
  // A bias is float32 as it is.
  const bool has_bias_grad = call.result == kConvWeights && call.bias != nullptr;
  const FloatCopy bias_grad(has_bias_grad ? geometry.out[1] : 0);
  convolve(float32_geometry(geometry),
           {call.result,
            {copies[kConvIn].data(), copies[kConvWeights].data(), copies[kConvOut].data()},
            has_bias_grad ? bias_grad.data() : call.bias,
            call.inference});
  copies[call.result].round_to(call.tensor<Bfloat16>(call.result));
  if (has_bias_grad) { bias_grad.round_to(static_cast<Bfloat16*>(call.bias)); }
}

// Sums of no terms.
template <typename T>
void fill_result(const ConvGeometry& geometry, const ConvCall& call) {
  T* result = call.tensor<T>(call.result);
  if (call.result == kConvOut) {
    return fill_with_bias(geometry, static_cast<const float*>(call.bias), result);
  }
  std::fill_n(result, geometry.count(call.result), T{});
  if (call.bias != nullptr) { std::fill_n(static_cast<T*>(call.bias), geometry.out[1], T{}); }
}

// output += `_add_to_output`, where the operator has it. OneFlow never gives both one memory: our
// kernels propose no in-place pair.
template <typename T>
void add_to_output(Context* ctx, const char* name) {
  if (!ctx->has_input("_add_to_output", 0)) { return; }
  T* sum = output<T>(ctx, name);
  map(
      shape_of(ctx, name).elem_cnt(), sum, [](float a, float b) { return a + b; }, sum,
      input<T>(ctx, "_add_to_output"));
}

// An operator that computes `result`, and the names it has for the tensors of the convolution, or
// their gradients, in the order of ConvRole.
struct ConvOperator {
  std::string op;
  ConvRole result;
  const char* names[3];
  // Of one layout: activations (N, H, W, C) and weights in the standard order (O, C / groups, h,
  // w), for models whose tokens (N, H W, C) are such activations already, and whose checkpoints
  // hold standard weights.
  bool standard_weights = false;
};

template <typename T>
void run_conv(Context* ctx, const ConvOperator& op, const ConvGeometry& geometry) {
  ConvCall call{op.result};
  std::transform(op.names, op.names + 3, call.data,
                 [&](const char* name) { return data_of(ctx, name); });
  std::vector<float> bias;
  if (const T* values = input_or_null<T>(ctx, "bias")) {
    bias.resize(geometry.out[1]);
    std::transform(values, values + bias.size(), bias.begin(),
                   [](T value) { return to_float(value); });
  }
  call.bias = bias.data();
  if (op.result == kConvWeights) { call.bias = output_or_null<T>(ctx, "bias_grad"); }
  if (geometry.is_empty()) { return fill_result<T>(geometry, call); }
  if constexpr (std::is_same_v<T, float>) {
    convolve(geometry, call);
  } else {
    convolve_bfloat16(geometry, call);
  }
}

template <typename T>
void conv_kernel(Context* ctx, const ConvOperator& op) {
  const ThreadScope threads;
  ConvGeometry geometry(ctx, op.names[kConvIn], op.names[kConvOut], kConvType<T>,
                        op.standard_weights || is_channels_last(ctx));
  if (op.standard_weights) { geometry.weights_channels_last = false; }
  run_or_throw([&] { return geometry.describe(op.op.c_str()); },
               [&] { run_conv<T>(ctx, op, geometry); });
  add_to_output<T>(ctx, op.names[op.result]);
}

const bool g_registered = [] {
  const std::string channels_last = "oneflow_accel_channels_last_conv2d";
  const ConvOperator operators[] = {
      {"conv1d", kConvOut, {"in", "weight", "out"}},
      {"conv2d", kConvOut, {"in", "weight", "out"}},
      {"conv3d", kConvOut, {"in", "weight", "out"}},
      {"conv_data_grad", kConvIn, {"dx", "filter", "dy"}},
      {"conv_filter_grad", kConvWeights, {"x", "filter_diff", "dy"}},
      {channels_last, kConvOut, {"in", "weight", "out"}, true},
      {channels_last + "_data_grad", kConvIn, {"in_grad", "weight", "out_grad"}, true},
      {channels_last + "_filter_grad", kConvWeights, {"in", "weight_grad", "out_grad"}, true}};
  for (const ConvOperator& op : operators) {
    const auto typed = [&](auto zero) {
      return [=](Context* ctx) { conv_kernel<decltype(zero)>(ctx, op); };
    };
    register_typed_kernels<float, Bfloat16>(typed, op.op.c_str(), op.names[kConvIn]);
  }
  return true;
}();

}  // namespace

}  // namespace oneflow_accel
