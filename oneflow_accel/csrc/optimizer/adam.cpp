// adam_update, float32: Adam and AdamW, one pass over parameters, gradients and moments.
#include <cmath>

#include "common/threads.h"
#include "optimizer/update.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

struct Adam {
  float beta1;
  float beta2;
  float epsilon;
  float step_size;            // learning rate / bias correction of the first moment
  float second_moment_scale;  // 1 / sqrt(bias correction of the second moment)
};

struct Moments {
  float* first;
  float* second;
  float* largest_second;  // of AMSGrad, else null
};

// The step's direction, as torch.optim.Adam defines it; `second` is the second moment or, with
// AMSGrad, its largest value so far.
ONEFLOW_ACCEL_INLINE float next_parameter(float p, float first, float second, float decay,
                                          Adam adam) {
  const float denominator = std::sqrt(second) * adam.second_moment_scale + adam.epsilon;
  return p - adam.step_size * (first / denominator) - decay * p;
}

void adam_step(const float* gradients, float* parameters, float* firsts, float* seconds, int64_t n,
               const Update& update, const Adam& factors) {
  const GradientTerms terms = update.terms;
  const float decay = update.learning_rate * update.weight_decay;
  const Adam adam = factors;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float p = parameters[i];
    const float g = regularized(gradients[i], p, terms);
    const float first = adam.beta1 * firsts[i] + (1.0F - adam.beta1) * g;
    const float second = adam.beta2 * seconds[i] + (1.0F - adam.beta2) * g * g;
    firsts[i] = first;
    seconds[i] = second;
    parameters[i] = next_parameter(p, first, second, decay, adam);
  }
}

void amsgrad_step(const float* gradients, float* parameters, float* firsts, float* seconds,
                  float* largest_seconds, int64_t n, const Update& update, const Adam& factors) {
  const GradientTerms terms = update.terms;
  const float decay = update.learning_rate * update.weight_decay;
  const Adam adam = factors;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float p = parameters[i];
    const float g = regularized(gradients[i], p, terms);
    const float first = adam.beta1 * firsts[i] + (1.0F - adam.beta1) * g;
    const float second = adam.beta2 * seconds[i] + (1.0F - adam.beta2) * g * g;
    const float largest = largest_seconds[i] > second ? largest_seconds[i] : second;
    firsts[i] = first;
    seconds[i] = second;
    largest_seconds[i] = largest;
    parameters[i] = next_parameter(p, first, largest, decay, adam);
  }
}

class AdamKernel final : public UpdateKernel {
  void apply(user_op::KernelComputeContext* ctx, const Update& update) const override {
    const float correction1 =
        input_or(ctx, "bias_correction1", ctx->Attr<float>("bias_correction1_val"));
    const float correction2 =
        input_or(ctx, "bias_correction2", ctx->Attr<float>("bias_correction2_val"));
    const Adam adam{ctx->Attr<float>("beta1"), ctx->Attr<float>("beta2"),
                    ctx->Attr<float>("epsilon"), update.learning_rate / correction1,
                    1.0F / std::sqrt(correction2)};
    const float* gradients = input(ctx, "model_diff");
    float* parameters = output(ctx, "model");
    const bool amsgrad = ctx->Attr<bool>("amsgrad");
    const Moments moments{output(ctx, "m"), output(ctx, "v"),
                          amsgrad ? output(ctx, "max_v") : nullptr};
    parallel_for(update.count, kGrainSize, [&](int64_t begin, int64_t end) {
      if (amsgrad) {
        amsgrad_step(gradients + begin, parameters + begin, moments.first + begin,
                     moments.second + begin, moments.largest_second + begin, end - begin, update,
                     adam);
      } else {
        adam_step(gradients + begin, parameters + begin, moments.first + begin,
                  moments.second + begin, end - begin, update, adam);
      }
    });
  }
};

REGISTER_KERNEL("adam_update", make<AdamKernel>, is_float32_update());

}  // namespace

}  // namespace oneflow_accel
