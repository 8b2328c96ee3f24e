// softmax_cross_entropy and its gradient, float32: labels are a distribution over the classes.
#include <cmath>

#include "common/oneflow.h"
#include "softmax/row.h"
#include "softmax/row_set.h"

namespace oneflow_accel {

namespace {

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

void softmax_cross_entropy_kernel(Context* ctx) {
  const RowSet rows(ctx, "prediction");
  const float* x = input(ctx, "prediction");
  const float* label = input(ctx, "label");
  float* prob = output(ctx, "prob");
  float* out = output(ctx, "out");
  rows.for_each(1, [=](int64_t row, int64_t first) {
    out[row] = cross_entropy_row(x + first, label + first, prob + first, rows.n);
  });
}

void softmax_cross_entropy_grad_kernel(Context* ctx) {
  const RowSet rows(ctx, "prob");
  const float* all_labels = input(ctx, "label");
  const float* all_probs = input(ctx, "prob");
  const float* dy = input(ctx, "dy");
  float* prediction_diff = output(ctx, "prediction_diff");
  rows.for_each(1, [=](int64_t row, int64_t first) {
    const float factor = dy[row];
    const float* prob = all_probs + first;
    const float* label = all_labels + first;
    float* dx = prediction_diff + first;  // may be prob
#pragma omp simd
    for (int64_t i = 0; i < rows.n; ++i) { dx[i] = factor * (prob[i] - label[i]); }
  });
}

REGISTER_FLOAT_KERNEL(softmax_cross_entropy_kernel, "softmax_cross_entropy", "out");
REGISTER_FLOAT_KERNEL(softmax_cross_entropy_grad_kernel, "softmax_cross_entropy_grad",
                      "prediction_diff", in_place("prediction_diff", "prob"));

}  // namespace

}  // namespace oneflow_accel
