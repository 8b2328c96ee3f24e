// conv1d, conv2d and conv3d and oneflow_accel_channels_last_conv2d with their gradients, float32
// and bfloat16, any number of groups.
#include "conv/convolution.h"

#include <stdexcept>

#include "common/guard.h"
#include "conv/grouped.h"
#include "conv/pixel_products.h"
#include "conv/primitive.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

using Context = user_op::KernelComputeContext;

bool is_convolved_in_float32(const ConvGeometry& geometry) {
  return !has_bfloat16_products() || grouped_shape(geometry).has_value();
}

void run_or_complain(const ConvGeometry& geometry, const ConvCall& call) {
  if (!run_primitive(geometry, call)) {
    throw std::runtime_error("oneDNN has no such convolution");
  }
}

template <typename T>
void convolution_data_grad(const ConvGeometry& geometry, const T* out_grad, const T* weights,
                           T* in_grad) {
  if constexpr (std::is_same_v<T, Bfloat16>) {
    if (is_convolved_in_float32(geometry)) {
      const FloatCopy sums(geometry.in_count());
      convolution_data_grad(float32_geometry(geometry),
                            FloatCopy(out_grad, geometry.out_count()).data(),
                            FloatCopy(weights, geometry.weight_count()).data(), sums.data());
      return sums.round_to(in_grad);
    }
  } else if (const auto shape = grouped_shape(geometry)) {
    return grouped_convolution_data_grad(*shape, out_grad, weights, in_grad);
  }
  run_or_complain(geometry, {ConvResult::kIn, in_grad, weights, out_grad});
}

// `bias_grad` may be null.
template <typename T>
void convolution_filter_grad(const ConvGeometry& geometry, const T* in, const T* out_grad,
                             T* weights_grad, T* bias_grad) {
  if constexpr (std::is_same_v<T, Bfloat16>) {
    if (is_convolved_in_float32(geometry)) {
      const FloatCopy weight_sums(geometry.weight_count());
      const FloatCopy bias_sums(bias_grad == nullptr ? 0 : geometry.out[1]);
      convolution_filter_grad(
          float32_geometry(geometry), FloatCopy(in, geometry.in_count()).data(),
          FloatCopy(out_grad, geometry.out_count()).data(), weight_sums.data(),
          bias_grad == nullptr ? nullptr : bias_sums.data());
      weight_sums.round_to(weights_grad);
      return bias_sums.round_to(bias_grad);
    }
  } else if (const auto shape = grouped_shape(geometry)) {
    return grouped_convolution_filter_grad(*shape, in, out_grad, weights_grad, bias_grad);
  } else if (has_pixel_products(geometry)) {
    return pixel_products_filter_grad(geometry, in, out_grad, weights_grad, bias_grad);
  }
  run_or_complain(geometry, {ConvResult::kWeights, in, weights_grad, out_grad, bias_grad});
}

// output += `_add_to_output`, where the operator has it. OneFlow never gives both one memory: our
// kernels propose no in-place pair.
template <typename T>
void add_to_output(Context* ctx, const char* name) {
  if (!ctx->has_input("_add_to_output", 0)) { return; }
  const T* addend = input<T>(ctx, "_add_to_output");
  T* sum = output<T>(ctx, name);
  const int64_t n = ctx->Tensor4ArgNameAndIndex(name, 0)->shape_view().elem_cnt();
  parallel_for(n, kGrainSize, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      sum[i] = from_float<T>(to_float(sum[i]) + to_float(addend[i]));
    }
  });
}

// An operator that computes `result`, and the names it has for the tensors of the convolution, or
// their gradients.
struct ConvOperator {
  const char* op;
  ConvResult result;
  const char* in;
  const char* weights;
  const char* out;
  // Of one layout: activations (N, H, W, C) and weights in the standard order (O, C / groups, h,
  // w), for models whose tokens (N, H W, C) are such activations already, and whose checkpoints
  // hold standard weights.
  bool standard_weights = false;

  const char* result_name() const {
    if (result == ConvResult::kOut) { return out; }
    return result == ConvResult::kIn ? in : weights;
  }
};

template <typename T>
class ConvKernel final : public Kernel {
 public:
  explicit ConvKernel(const ConvOperator& op) : op_(op) {}

 private:
  void Compute(Context* ctx) const override {
    const ThreadScope threads;
    ConvGeometry geometry(ctx, op_.in, op_.out, kConvType<T>,
                          op_.standard_weights || is_channels_last(ctx));
    if (op_.standard_weights) { geometry.weights_channels_last = false; }
    run_or_throw([&] { return geometry.describe(op_.op); }, [&] { run(ctx, geometry); });
    add_to_output<T>(ctx, op_.result_name());
  }

  void run(Context* ctx, const ConvGeometry& geometry) const {
    if (op_.result == ConvResult::kOut) {
      std::vector<float> bias;
      if (const T* values = input_or_null<T>(ctx, "bias")) {
        bias.resize(geometry.out[1]);
        std::transform(values, values + bias.size(), bias.begin(),
                       [](T value) { return to_float(value); });
      }
      const float* bias_data = bias.empty() ? nullptr : bias.data();
      T* out = output<T>(ctx, op_.out);
      if (geometry.is_empty()) { return fill_with_bias(geometry, bias_data, out); }
      return convolution(geometry, input<T>(ctx, op_.in), input<T>(ctx, op_.weights), bias_data,
                         out);
    }
    T* bias_grad = output_or_null<T>(ctx, "bias_grad");
    T* result = output<T>(ctx, op_.result_name());
    if (geometry.is_empty()) {
      // Sums of no terms.
      const bool of_in = op_.result == ConvResult::kIn;
      std::fill_n(result, of_in ? geometry.in_count() : geometry.weight_count(), T{});
      if (bias_grad != nullptr) { std::fill_n(bias_grad, geometry.out[1], T{}); }
      return;
    }
    const T* out_grad = input<T>(ctx, op_.out);
    if (op_.result == ConvResult::kIn) {
      return convolution_data_grad(geometry, out_grad, input<T>(ctx, op_.weights), result);
    }
    convolution_filter_grad(geometry, input<T>(ctx, op_.in), out_grad, result, bias_grad);
  }

  const ConvOperator op_;
};

// Registers its kernels for float32 and bfloat16.
struct ConvRegistration {
  KernelRegistration float32;
  KernelRegistration bfloat16;

  explicit ConvRegistration(const ConvOperator& op)
      : float32(registry(op.op, create<float>(op), is_float32_on_cpu(op.in))),
        bfloat16(registry(op.op, create<Bfloat16>(op), is_bfloat16_on_cpu(op.in))) {}

 private:
  template <typename T>
  static user_op::OpKernelCreateFn create(const ConvOperator& op) {
    return [=] { return user_op::NewOpKernel<ConvKernel<T>>(op); };
  }
};

const ConvRegistration g_convolutions[] = {
    ConvRegistration({"conv1d", ConvResult::kOut, "in", "weight", "out"}),
    ConvRegistration({"conv2d", ConvResult::kOut, "in", "weight", "out"}),
    ConvRegistration({"conv3d", ConvResult::kOut, "in", "weight", "out"}),
    ConvRegistration({"conv_data_grad", ConvResult::kIn, "dx", "filter", "dy"}),
    ConvRegistration({"conv_filter_grad", ConvResult::kWeights, "x", "filter_diff", "dy"}),
    ConvRegistration({"oneflow_accel_channels_last_conv2d", ConvResult::kOut, "in", "weight", "out",
                      /*standard_weights=*/true}),
    ConvRegistration({"oneflow_accel_channels_last_conv2d_data_grad", ConvResult::kIn, "in_grad",
                      "weight", "out_grad", /*standard_weights=*/true}),
    ConvRegistration({"oneflow_accel_channels_last_conv2d_filter_grad", ConvResult::kWeights, "in",
                      "weight_grad", "out_grad", /*standard_weights=*/true}),
};

}  // namespace

template <typename T>
void convolution(const ConvGeometry& geometry, const T* in, const T* weights, const float* bias,
                 T* out) {
  if constexpr (std::is_same_v<T, Bfloat16>) {
    if (is_convolved_in_float32(geometry)) {
      const FloatCopy sums(geometry.out_count());
      convolution(float32_geometry(geometry), FloatCopy(in, geometry.in_count()).data(),
                  FloatCopy(weights, geometry.weight_count()).data(), bias, sums.data());
      return sums.round_to(out);
    }
  } else if (const auto shape = grouped_shape(geometry)) {
    return grouped_convolution(*shape, in, weights, bias, Activation::kNone, out);
  }
  run_or_complain(geometry, {ConvResult::kOut, in, weights, out, bias});
}

}  // namespace oneflow_accel
