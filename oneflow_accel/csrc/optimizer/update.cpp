// sgd_update, momentum_update and adam_update (Adam and AdamW), float32: one pass over parameters,
// gradients and moments. And l1_l2_regularize_gradient: how nn.Graph adds SGD's weight decay to a
// gradient before it is clipped.
#include <cmath>

#include "common/oneflow.h"
#include "common/threads.h"
#include "elementwise/map.h"

namespace oneflow_accel {

namespace {

// How a gradient becomes the one that the update uses: scale * g + l1 * sign(p) + l2 * p.
struct GradientTerms {
  float scale;
  float l1;
  float l2;

  ONEFLOW_ACCEL_INLINE float regularized(float gradient, float parameter) const {
    const float sign = static_cast<float>((parameter >= 0.0F) - (parameter <= 0.0F));
    return gradient * scale + l1 * sign + l2 * parameter;
  }
};

// The optional one-element input `name`, or else `value`.
float input_or(Context* ctx, const char* name, float value) {
  return ctx->has_input(name, 0) ? *input(ctx, name) : value;
}

// The attributes and the optional inputs of every update operator, read once per call.
struct Update {
  GradientTerms terms;
  float learning_rate;
  float weight_decay;
  int64_t count;
  const float* gradients;
  float* parameters;

  explicit Update(Context* ctx)
      : terms{static_cast<float>(ctx->Attr<double>("scale"))
                  * input_or(ctx, "scale_by_tensor", 1.0F),
              ctx->Attr<float>("l1"), ctx->Attr<float>("l2")},
        learning_rate(input_or(ctx, "learning_rate", ctx->Attr<float>("learning_rate_val"))
                      * ctx->Attr<float>("learning_rate_scale")),
        weight_decay(ctx->Attr<float>("weight_decay")),
        count(shape_of(ctx, "model").elem_cnt()),
        gradients(input(ctx, "model_diff")),
        parameters(output(ctx, "model")) {}

  // p = step(i, p, g) for each parameter and its gradient, in parallel.
  template <typename Step>
  void apply(const Step& step) const {
    parallel_for(count, kGrainSize, [&](int64_t begin, int64_t end) {
      const Step of_one = step;
      const GradientTerms t = terms;
      const float* from = gradients;
      float* to = parameters;
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) {
        to[i] = of_one(i, to[i], t.regularized(from[i], to[i]));
      }
    });
  }
};

// A kernel that updates parameters by calling `step`.
template <void step(Context* ctx, const Update& update)>
class UpdateKernel final : public user_op::OpKernel {
 public:
  // The operators have no outputs, so that OneFlow counts all of them as empty.
  bool AlwaysComputeWhenAllOutputsEmpty() const override { return true; }

 private:
  using user_op::OpKernel::Compute;
  void Compute(Context* ctx) const override {
    // A mixed-precision step with infinite gradients: nothing may change.
    if (ctx->has_input("skip_if", 0) && *input<int64_t>(ctx, "skip_if") != 0) { return; }
    step(ctx, Update(ctx));
  }
};

void sgd(Context*, const Update& update) {
  const float rate = update.learning_rate;
  const float decay = update.weight_decay;
  update.apply([=](int64_t, float p, float g) { return p - rate * (g + decay * p); });
}

void momentum(Context* ctx, const Update& update) {
  const float beta = ctx->Attr<float>("beta");
  const float gradient_weight = 1.0F - ctx->Attr<float>("dampening");
  // The step is momentum_weight * momentum + nesterov_weight * gradient.
  const bool nesterov = ctx->Attr<bool>("nesterov");
  const float momentum_weight = nesterov ? beta : 1.0F;
  const float nesterov_weight = nesterov ? 1.0F : 0.0F;
  const float rate = ctx->Attr<bool>("maximize") ? update.learning_rate : -update.learning_rate;
  const float decay = update.learning_rate * update.weight_decay;
  float* momenta = output(ctx, "momentum");
  update.apply([=](int64_t i, float p, float g) {
    const float m = beta * momenta[i] + gradient_weight * g;
    momenta[i] = m;
    return p + rate * (momentum_weight * m + nesterov_weight * g) - decay * p;
  });
}

// The step's direction is as torch.optim.Adam defines it.
void adam(Context* ctx, const Update& update) {
  const float correction1 =
      input_or(ctx, "bias_correction1", ctx->Attr<float>("bias_correction1_val"));
  const float correction2 =
      input_or(ctx, "bias_correction2", ctx->Attr<float>("bias_correction2_val"));
  const float beta1 = ctx->Attr<float>("beta1");
  const float beta2 = ctx->Attr<float>("beta2");
  const float epsilon = ctx->Attr<float>("epsilon");
  const float step_size = update.learning_rate / correction1;
  const float second_scale = 1.0F / std::sqrt(correction2);
  const float decay = update.learning_rate * update.weight_decay;
  float* firsts = output(ctx, "m");
  float* seconds = output(ctx, "v");
  const auto step = [=](int64_t i, float p, float g, auto largest_of) {
    const float first = beta1 * firsts[i] + (1.0F - beta1) * g;
    const float second = beta2 * seconds[i] + (1.0F - beta2) * g * g;
    firsts[i] = first;
    seconds[i] = second;
    const float denominator = std::sqrt(largest_of(i, second)) * second_scale + epsilon;
    return p - step_size * (first / denominator) - decay * p;
  };
  if (!ctx->Attr<bool>("amsgrad")) {
    return update.apply([=](int64_t i, float p, float g) {
      return step(i, p, g, [](int64_t, float second) { return second; });
    });
  }
  float* largest_seconds = output(ctx, "max_v");
  update.apply([=](int64_t i, float p, float g) {
    return step(i, p, g, [=](int64_t j, float second) {
      const float largest = largest_seconds[j] > second ? largest_seconds[j] : second;
      largest_seconds[j] = largest;
      return largest;
    });
  });
}

void regularize_kernel(Context* ctx) {
  const GradientTerms terms{1.0F, ctx->Attr<float>("l1"), ctx->Attr<float>("l2")};
  map(
      shape_of(ctx, "model").elem_cnt(), output(ctx, "out"),
      [=](float gradient, float parameter) { return terms.regularized(gradient, parameter); },
      input(ctx, "model_diff"), input(ctx, "model"));
}

// Matches float32 parameters and gradients on the CPU. A parameter with a float16 copy to keep
// (model_copy) stays with OneFlow's kernel.
auto is_float32_update() {
  return is_float32_on_cpu("model")
         && (user_op::HobDataType("model_diff", 0) == DataType::kFloat)
         && (user_op::HobInputSize("model_copy") == 0);
}

REGISTER_KERNEL("sgd_update", make<UpdateKernel<sgd>>, is_float32_update());
REGISTER_KERNEL("momentum_update", make<UpdateKernel<momentum>>, is_float32_update());
REGISTER_KERNEL("adam_update", make<UpdateKernel<adam>>, is_float32_update());
REGISTER_FLOAT_KERNEL(regularize_kernel, "l1_l2_regularize_gradient", "out",
                      in_place("out", "model_diff"));

}  // namespace

}  // namespace oneflow_accel
