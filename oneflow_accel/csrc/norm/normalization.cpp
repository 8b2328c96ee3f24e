// normalization (inference and training) and normalization_add_relu, float32 and bfloat16, any
// channel axis. Statistics and parameters are float32.
#include <algorithm>
#include <cmath>
#include <vector>

#include "common/arguments.h"
#include "norm/channel_maps.h"
#include "norm/channel_sums.h"
#include "norm/channel_view.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

// The coefficients of y = (x - mean) * scale + shift.
struct Coefficients {
  std::vector<float> mean;
  std::vector<float> scale;
  std::vector<float> shift;

  explicit Coefficients(int64_t channels) : mean(channels), scale(channels), shift(channels) {}

  void set(int64_t c, double batch_mean, double inv_std, float gamma, float beta) {
    const double factor = inv_std * gamma;
    mean[c] = static_cast<float>(batch_mean);
    scale[c] = static_cast<float>(factor);
    // What rounding the mean lost goes here: it is not small against the standard deviation where
    // the mean is large. Of an infinite mean or factor there is nothing: it is in (x - mean) * scale.
    const double lost = (mean[c] - batch_mean) * factor;
    shift[c] = static_cast<float>(std::isfinite(lost) ? beta + lost : beta);
  }
};

Coefficients inference_coefficients(user_op::KernelComputeContext* ctx, const ChannelView& view) {
  const double epsilon = ctx->Attr<float>("epsilon");
  const float* gamma = input_or_null(ctx, "gamma");
  const float* beta = input_or_null(ctx, "beta");
  const float* mean = input_or_null(ctx, "moving_mean");
  const float* variance = input_or_null(ctx, "moving_variance");
  Coefficients coefficients(view.channels);
  for (int64_t c = 0; c < view.channels; ++c) {
    coefficients.set(c, mean[c], 1.0 / std::sqrt(variance[c] + epsilon), gamma[c], beta[c]);
  }
  return coefficients;
}

// moving = moving * momentum + batch * (1 - momentum), with the unbiased batch variance. One
// element has none: its variance counts as 0, where oneflow's own kernel makes moving_variance NaN
// for good. An empty batch leaves both as they are.
void update_moving_statistics(user_op::KernelComputeContext* ctx, const ChannelView& view,
                              const std::vector<double>& mean,
                              const std::vector<double>& variance) {
  const int64_t n = view.elements_per_channel();
  if (!ctx->has_input("moving_mean", 0) || n == 0) { return; }
  const double momentum = ctx->Attr<float>("momentum");
  const double unbias = static_cast<double>(n) / std::max<int64_t>(n - 1, 1);
  float* moving_mean = output(ctx, "moving_mean");
  float* moving_variance = output(ctx, "moving_variance");
  for (int64_t c = 0; c < view.channels; ++c) {
    moving_mean[c] =
        static_cast<float>(moving_mean[c] * momentum + mean[c] * (1.0 - momentum));
    moving_variance[c] = static_cast<float>(moving_variance[c] * momentum
                                            + variance[c] * unbias * (1.0 - momentum));
  }
}

template <typename T>
Coefficients training_coefficients(user_op::KernelComputeContext* ctx, const ChannelView& view) {
  const double epsilon = ctx->Attr<float>("epsilon");
  const float* gamma = input_or_null(ctx, "gamma");
  const float* beta = input_or_null(ctx, "beta");
  float* saved_mean = output(ctx, "mean");
  float* saved_inv_std = output(ctx, "inv_variance");
  std::vector<double> mean(view.channels);
  std::vector<double> variance(view.channels);
  channel_moments(view, input_or_null<T>(ctx, "x"), mean.data(), variance.data());
  Coefficients coefficients(view.channels);
  for (int64_t c = 0; c < view.channels; ++c) {
    const double inv_std = 1.0 / std::sqrt(variance[c] + epsilon);
    coefficients.set(c, mean[c], inv_std, gamma[c], beta[c]);
    saved_mean[c] = coefficients.mean[c];
    saved_inv_std[c] = static_cast<float>(inv_std);
  }
  update_moving_statistics(ctx, view, mean, variance);
  return coefficients;
}

template <typename T>
void compute(user_op::KernelComputeContext* ctx, bool training, const T* addend, int32_t* mask) {
  const ChannelView view(ctx->Tensor4ArgNameAndIndex("x", 0)->shape_view(),
                         ctx->Attr<int32_t>("axis"));
  const Coefficients coefficients =
      training ? training_coefficients<T>(ctx, view) : inference_coefficients(ctx, view);
  normalize(view, input_or_null<T>(ctx, "x"), coefficients.mean.data(), coefficients.scale.data(),
            coefficients.shift.data(), addend, output<T>(ctx, "y"), mask);
}

template <typename T>
class NormalizationKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    compute(ctx, ctx->Attr<bool>("training"), input_or_null<T>(ctx, "_add_to_output"), nullptr);
  }
};

// OneFlow emits this operator for training only: inference is normalization, add_n and relu.
template <typename T>
class NormalizationAddReluKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    auto* mask = output<int32_t>(ctx, "reserve_space");
    compute(ctx, true, input_or_null<T>(ctx, "addend"), mask);
  }
};

REGISTER_KERNEL("normalization", make<NormalizationKernel<float>>, is_float32_on_cpu("y"),
                in_place("y", "_add_to_output"));
REGISTER_KERNEL("normalization", make<NormalizationKernel<Bfloat16>>, is_bfloat16_on_cpu("y"),
                in_place("y", "_add_to_output"));
REGISTER_KERNEL("normalization_add_relu", make<NormalizationAddReluKernel<float>>,
                is_float32_on_cpu("y"));
REGISTER_KERNEL("normalization_add_relu", make<NormalizationAddReluKernel<Bfloat16>>,
                is_bfloat16_on_cpu("y"));

}  // namespace

}  // namespace oneflow_accel
