// normalization_grad and normalization_add_relu_grad, float32 and bfloat16, any channel axis.
#include <vector>

#include "common/arguments.h"
#include "norm/channel_maps.h"
#include "norm/channel_sums.h"
#include "norm/channel_view.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

// With x_hat = (x - mean) * inv_std over n elements per channel:
//   beta_diff = sum(dy), gamma_diff = sum(dy * x_hat),
//   dx = gamma * inv_std * (dy - beta_diff / n - x_hat * gamma_diff / n).
template <typename T>
void compute(user_op::KernelComputeContext* ctx, const ChannelView& view, const T* dy) {
  const T* x = input<T>(ctx, "x");
  const float* mean = input(ctx, "mean");
  const float* inv_std = input(ctx, "inv_variance");
  const float* gamma = input(ctx, "gamma");
  float* gamma_diff = output(ctx, "gamma_diff");
  float* beta_diff = output(ctx, "beta_diff");
  std::vector<double> sum_dy(view.channels);
  std::vector<double> sum_dy_centered(view.channels);
  channel_gradient_sums(view, dy, x, mean, sum_dy.data(), sum_dy_centered.data());

  const auto n = static_cast<double>(view.elements_per_channel());
  std::vector<float> dy_scale(view.channels);
  std::vector<float> x_scale(view.channels);
  std::vector<float> shift(view.channels);
  for (int64_t c = 0; c < view.channels; ++c) {
    const double inv = inv_std[c];
    const double scale = gamma[c] * inv;
    gamma_diff[c] = static_cast<float>(sum_dy_centered[c] * inv);
    beta_diff[c] = static_cast<float>(sum_dy[c]);
    dy_scale[c] = static_cast<float>(scale);
    x_scale[c] = static_cast<float>(-scale * inv * inv * sum_dy_centered[c] / n);
    shift[c] = static_cast<float>(-scale * sum_dy[c] / n);
  }
  input_gradient(view, dy, x, mean, dy_scale.data(), x_scale.data(), shift.data(),
                 output<T>(ctx, "dx"));
}

ChannelView view_of(user_op::KernelComputeContext* ctx) {
  return {ctx->Tensor4ArgNameAndIndex("x", 0)->shape_view(), ctx->Attr<int32_t>("axis")};
}

template <typename T>
class NormalizationGradKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    compute(ctx, view_of(ctx), input<T>(ctx, "dy"));
  }
};

template <typename T>
class NormalizationAddReluGradKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const ChannelView view = view_of(ctx);
    const auto* mask = input<int32_t>(ctx, "reserve_space");
    // The gradient behind the relu is the addend's gradient; without one, dx holds it meanwhile.
    T* masked = output<T>(ctx, ctx->has_output("addend_diff", 0) ? "addend_diff" : "dx");
    apply_mask(input<T>(ctx, "dy"), mask, masked, view.elements());
    compute(ctx, view, masked);
  }
};

REGISTER_KERNEL("normalization_grad", make<NormalizationGradKernel<float>>,
                is_float32_on_cpu("dx"));
REGISTER_KERNEL("normalization_grad", make<NormalizationGradKernel<Bfloat16>>,
                is_bfloat16_on_cpu("dx"));
REGISTER_KERNEL("normalization_add_relu_grad", make<NormalizationAddReluGradKernel<float>>,
                is_float32_on_cpu("dx"));
REGISTER_KERNEL("normalization_add_relu_grad", make<NormalizationAddReluGradKernel<Bfloat16>>,
                is_bfloat16_on_cpu("dx"));

}  // namespace

}  // namespace oneflow_accel
