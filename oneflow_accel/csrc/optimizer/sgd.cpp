// sgd_update and momentum_update, float32: one pass over parameters, gradients and momenta.
#include "common/threads.h"
#include "optimizer/update.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

void sgd(const float* gradients, float* parameters, int64_t n, const Update& update) {
  const GradientTerms terms = update.terms;
  const float rate = update.learning_rate;
  const float decay = update.weight_decay;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float p = parameters[i];
    parameters[i] = p - rate * (regularized(gradients[i], p, terms) + decay * p);
  }
}

struct Momentum {
  float beta;
  float gradient_weight;  // 1 - dampening
  // The step is momentum_weight * momentum + nesterov_weight * gradient.
  float momentum_weight;
  float nesterov_weight;
  float signed_rate;  // negative unless `maximize`
};

void momentum_sgd(const float* gradients, float* parameters, float* momenta, int64_t n,
                  const Update& update, const Momentum& momentum) {
  const GradientTerms terms = update.terms;
  const Momentum factors = momentum;
  const float decay = update.learning_rate * update.weight_decay;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float p = parameters[i];
    const float g = regularized(gradients[i], p, terms);
    const float m = factors.beta * momenta[i] + factors.gradient_weight * g;
    const float step = factors.momentum_weight * m + factors.nesterov_weight * g;
    momenta[i] = m;
    parameters[i] = p + factors.signed_rate * step - decay * p;
  }
}

class SgdKernel final : public UpdateKernel {
  void apply(user_op::KernelComputeContext* ctx, const Update& update) const override {
    const float* gradients = input(ctx, "model_diff");
    float* parameters = output(ctx, "model");
    parallel_for(update.count, kGrainSize, [&](int64_t begin, int64_t end) {
      sgd(gradients + begin, parameters + begin, end - begin, update);
    });
  }
};

class MomentumKernel final : public UpdateKernel {
  void apply(user_op::KernelComputeContext* ctx, const Update& update) const override {
    const float beta = ctx->Attr<float>("beta");
    const bool nesterov = ctx->Attr<bool>("nesterov");
    const float rate = update.learning_rate;
    const Momentum momentum{beta, 1.0F - ctx->Attr<float>("dampening"), nesterov ? beta : 1.0F,
                            nesterov ? 1.0F : 0.0F, ctx->Attr<bool>("maximize") ? rate : -rate};
    const float* gradients = input(ctx, "model_diff");
    float* parameters = output(ctx, "model");
    float* momenta = output(ctx, "momentum");
    parallel_for(update.count, kGrainSize, [&](int64_t begin, int64_t end) {
      momentum_sgd(gradients + begin, parameters + begin, momenta + begin, end - begin, update,
                   momentum);
    });
  }
};

REGISTER_KERNEL("sgd_update", make<SgdKernel>, is_float32_update());
REGISTER_KERNEL("momentum_update", make<MomentumKernel>, is_float32_update());

}  // namespace

}  // namespace oneflow_accel
