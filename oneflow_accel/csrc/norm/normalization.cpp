// normalization (inference and training), normalization_add_relu and their gradients, float32 and
// bfloat16, any channel axis. Statistics and parameters are float32.
#include <algorithm>
#include <cmath>
#include <vector>

#include "common/oneflow.h"
#include "norm/channel_maps.h"

namespace oneflow_accel {

namespace {

// The coefficients of y = (x - mean) * scale + shift.
struct Coefficients {
  std::vector<float> mean;
  std::vector<float> scale;
  std::vector<float> shift;

  Coefficients(Context* ctx, int64_t channels)
      : mean(channels),
        scale(channels),
        shift(channels),
        epsilon_(ctx->Attr<float>("epsilon")),
        gamma_(input_or_null(ctx, "gamma")),
        beta_(input_or_null(ctx, "beta")) {}

  // Of a channel with these moments; returns 1 / its standard deviation.
  double set(int64_t c, double exact_mean, double variance) {
    const double inv_std = 1.0 / std::sqrt(variance + epsilon_);
    const double factor = inv_std * gamma_[c];
    mean[c] = static_cast<float>(exact_mean);
    scale[c] = static_cast<float>(factor);
    // What rounding the mean lost goes here: it is not small against the standard deviation where
    // the mean is large. Of an infinite mean or factor there is nothing: it is in (x - mean) * scale.
    const double lost = (mean[c] - exact_mean) * factor;
    shift[c] = static_cast<float>(std::isfinite(lost) ? beta_[c] + lost : beta_[c]);
    return inv_std;
  }

 private:
  double epsilon_;
  const float* gamma_;
  const float* beta_;
};

void set_for_inference(Context* ctx, Coefficients* coefficients) {
  const float* mean = input_or_null(ctx, "moving_mean");
  const float* variance = input_or_null(ctx, "moving_variance");
  for (std::size_t c = 0; c < coefficients->mean.size(); ++c) {
    coefficients->set(c, mean[c], variance[c]);
  }
}

// moving = moving * momentum + batch * (1 - momentum), with the unbiased batch variance. One
// element has none: its variance counts as 0, where oneflow's own kernel makes moving_variance NaN
// for good. An empty batch leaves both as they are.
void update_moving_statistics(Context* ctx, const ChannelView& view, const ChannelPairs& moments) {
  const int64_t n = view.elements_per_channel();
  if (!ctx->has_input("moving_mean", 0) || n == 0) { return; }
  const double momentum = ctx->Attr<float>("momentum");
  const double unbias = static_cast<double>(n) / std::max<int64_t>(n - 1, 1);
  float* moving_mean = output(ctx, "moving_mean");
  float* moving_variance = output(ctx, "moving_variance");
  for (int64_t c = 0; c < view.channels; ++c) {
    moving_mean[c] =
        static_cast<float>(moving_mean[c] * momentum + moments.first[c] * (1.0 - momentum));
    moving_variance[c] = static_cast<float>(moving_variance[c] * momentum
                                            + moments.second[c] * unbias * (1.0 - momentum));
  }
}

template <typename T>
void set_for_training(Context* ctx, const ChannelView& view, Coefficients* coefficients) {
  float* saved_mean = output(ctx, "mean");
  float* saved_inv_std = output(ctx, "inv_variance");
  const ChannelPairs moments = channel_moments(view, input_or_null<T>(ctx, "x"));
  for (int64_t c = 0; c < view.channels; ++c) {
    const double inv_std = coefficients->set(c, moments.first[c], moments.second[c]);
    saved_mean[c] = coefficients->mean[c];
    saved_inv_std[c] = static_cast<float>(inv_std);
  }
  update_moving_statistics(ctx, view, moments);
}

ChannelView view_of(Context* ctx) { return {shape_of(ctx, "x"), ctx->Attr<int32_t>("axis")}; }

template <typename T>
void normalization_kernel(Context* ctx) {
  // Of normalization_add_relu, which OneFlow emits for training only: inference is normalization,
  // add_n and relu.
  auto* mask = output_or_null<int32_t>(ctx, "reserve_space");
  const ChannelView view = view_of(ctx);
  Coefficients coefficients(ctx, view.channels);
  if (mask != nullptr || ctx->Attr<bool>("training")) {
    set_for_training<T>(ctx, view, &coefficients);
  } else {
    set_for_inference(ctx, &coefficients);
  }
  normalize(view, input_or_null<T>(ctx, "x"), coefficients.mean.data(), coefficients.scale.data(),
            coefficients.shift.data(),
            input_or_null<T>(ctx, mask == nullptr ? "_add_to_output" : "addend"),
            output<T>(ctx, "y"), mask);
}

// With x_hat = (x - mean) * inv_std over n elements per channel:
//   beta_diff = sum(dy), gamma_diff = sum(dy * x_hat),
//   dx = gamma * inv_std * (dy - beta_diff / n - x_hat * gamma_diff / n).
template <typename T>
void normalization_grad_kernel(Context* ctx) {
  const ChannelView view = view_of(ctx);
  const T* dy = input<T>(ctx, "dy");
  if (const auto* mask = input_or_null<int32_t>(ctx, "reserve_space")) {
    // The gradient behind the relu is the addend's gradient; without one, dx holds it meanwhile.
    T* masked = output<T>(ctx, ctx->has_output("addend_diff", 0) ? "addend_diff" : "dx");
    apply_mask(dy, mask, masked, view.elements());
    dy = masked;
  }
  const T* x = input<T>(ctx, "x");
  const float* mean = input(ctx, "mean");
  const float* inv_std = input(ctx, "inv_variance");
  const float* gamma = input(ctx, "gamma");
  float* gamma_diff = output(ctx, "gamma_diff");
  float* beta_diff = output(ctx, "beta_diff");
  const ChannelPairs sums = channel_gradient_sums(view, dy, x, mean);

  const auto n = static_cast<double>(view.elements_per_channel());
  std::vector<float> dy_scale(view.channels);
  std::vector<float> x_scale(view.channels);
  std::vector<float> shift(view.channels);
  for (int64_t c = 0; c < view.channels; ++c) {
    const double inv = inv_std[c];
    const double scale = gamma[c] * inv;
    gamma_diff[c] = static_cast<float>(sums.second[c] * inv);
    beta_diff[c] = static_cast<float>(sums.first[c]);
    dy_scale[c] = static_cast<float>(scale);
    x_scale[c] = static_cast<float>(-scale * inv * inv * sums.second[c] / n);
    shift[c] = static_cast<float>(-scale * sums.first[c] / n);
  }
  input_gradient(view, dy, x, mean, dy_scale.data(), x_scale.data(), shift.data(),
                 output<T>(ctx, "dx"));
}

REGISTER_KERNELS(normalization_kernel, "normalization", "y", in_place("y", "_add_to_output"));
REGISTER_KERNELS(normalization_kernel, "normalization_add_relu", "y");
REGISTER_KERNELS(normalization_grad_kernel, "normalization_grad normalization_add_relu_grad", "dx");

}  // namespace

}  // namespace oneflow_accel
