// softmax_cross_entropy and its gradient, float32: labels are a distribution over the classes.
#include <algorithm>
#include <cmath>

#include "common/oneflow.h"
#include "common/threads.h"
#include "softmax/row.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

// Probabilities below 1e-20 count as this much, as in OneFlow's own kernels.
constexpr float kLogSmallest = -46.0517019F;

// prob = softmax(x); returns -sum(label * log(prob)).
float cross_entropy_row(const float* x, const float* label, float* prob, int64_t n) {
  const float shift = row::maximum(x, n);
  const double sum = row::exp_and_sum(x, prob, n, shift);
  const auto log_sum = static_cast<float>(std::log(sum));
  const auto scale = static_cast<float>(1.0 / sum);
  float loss = 0.0F;
#pragma omp simd reduction(+ : loss)
  for (int64_t i = 0; i < n; ++i) {
    const float log_prob = (x[i] - shift) - log_sum;
    prob[i] *= scale;
    loss -= label[i] * (log_prob < kLogSmallest ? kLogSmallest : log_prob);
  }
  return loss;
}

// dx may be prob.
void cross_entropy_grad_row(const float* prob, const float* label, float dy, float* dx,
                            int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { dx[i] = dy * (prob[i] - label[i]); }
}

class SoftmaxCrossEntropyKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const auto* prediction = ctx->Tensor4ArgNameAndIndex("prediction", 0);
    const float* x = prediction->dptr<float>();
    const float* label = ctx->Tensor4ArgNameAndIndex("label", 0)->dptr<float>();
    float* prob = ctx->Tensor4ArgNameAndIndex("prob", 0)->mut_dptr<float>();
    auto* output = ctx->Tensor4ArgNameAndIndex("out", 0);
    float* out = output->mut_dptr<float>();
    const auto& shape = prediction->shape_view();
    const int64_t n = shape.At(shape.NumAxes() - 1);
    parallel_for(output->shape_view().elem_cnt(),
                 std::max<int64_t>(1, kGrainSize / std::max<int64_t>(n, 1)),
                 [=](int64_t begin, int64_t end) {
                   for (int64_t row = begin; row < end; ++row) {
                     const int64_t first = row * n;
                     out[row] = cross_entropy_row(x + first, label + first, prob + first, n);
                   }
                 });
  }
};

class SoftmaxCrossEntropyGradKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const float* label = ctx->Tensor4ArgNameAndIndex("label", 0)->dptr<float>();
    const float* prob = ctx->Tensor4ArgNameAndIndex("prob", 0)->dptr<float>();
    const float* dy = ctx->Tensor4ArgNameAndIndex("dy", 0)->dptr<float>();
    auto* prediction_diff = ctx->Tensor4ArgNameAndIndex("prediction_diff", 0);
    float* dx = prediction_diff->mut_dptr<float>();
    const auto& shape = prediction_diff->shape_view();
    const int64_t n = shape.At(shape.NumAxes() - 1);
    parallel_for(shape.elem_cnt() / n, std::max<int64_t>(1, kGrainSize / n),
                 [=](int64_t begin, int64_t end) {
                   for (int64_t row = begin; row < end; ++row) {
                     const int64_t first = row * n;
                     cross_entropy_grad_row(prob + first, label + first, dy[row], dx + first, n);
                   }
                 });
  }
};

REGISTER_KERNEL("softmax_cross_entropy", make<SoftmaxCrossEntropyKernel>, is_float32_on_cpu("out"));
REGISTER_KERNEL("softmax_cross_entropy_grad", make<SoftmaxCrossEntropyGradKernel>,
                is_float32_on_cpu("prediction_diff"), in_place("prediction_diff", "prob"));

}  // namespace

}  // namespace oneflow_accel
