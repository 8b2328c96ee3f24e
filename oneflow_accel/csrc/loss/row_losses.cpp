#include "loss/row_losses.h"

#include <algorithm>
#include <cmath>

#include "common/threads.h"
#include "softmax/row.h"

namespace oneflow_accel {

namespace {

float largest_of(const float* x, int64_t n) { return row::maximum(x, n); }

double sum_of_exp(const float* x, int64_t n, float shift) { return row::sum_exp(x, n, shift); }

double exp_in_place(float* x, int64_t n, float shift) { return row::exp_and_sum(x, x, n, shift); }

void scale_in_place(float* x, int64_t n, float factor) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { x[i] *= factor; }
}

// y = factor * e^(x - log(sum(e^x))). y may be x.
void scaled_softmax(const float* x, LogSumExp sum, float factor, float* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    y[i] = factor * row::exp_of_nonpositive((x[i] - sum.shift) - sum.log_sum);
  }
}

float loss_of(float logit, LogSumExp sum) { return (sum.shift - logit) + sum.log_sum; }

template <typename Fn>
void for_each_row(const LogitRows& rows, const Fn& fn) {
  parallel_for(rows.count, std::max<int64_t>(1, kGrainSize / rows.classes),
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) { fn(i, rows.logits + i * rows.classes); }
               });
}

}  // namespace

Targets::Targets(::oneflow::user_op::KernelComputeContext* ctx, int64_t classes)
    : labels_(ctx->Tensor4ArgNameAndIndex("label", 0), classes),
      rows_(ctx->Tensor4ArgNameAndIndex("label", 0)->shape_view().elem_cnt()),
      ignored_(ctx->Attr<int64_t>("ignore_index")) {
  for (int64_t row = 0; row < rows_; ++row) {
    if (counts(row)) { labels_.checked(row); }
  }
}

int64_t Targets::counted() const {
  int64_t count = 0;
  for (int64_t row = 0; row < rows_; ++row) { count += counts(row) ? 1 : 0; }
  return count;
}

void row_losses(const LogitRows& rows, const Targets& targets, float* losses, LogSumExp* sums) {
  const int64_t n = rows.classes;
  for_each_row(rows, [&](int64_t i, const float* x) {
    const float shift = largest_of(x, n);
    sums[i] = {shift, static_cast<float>(std::log(sum_of_exp(x, n, shift)))};
    const int64_t row = rows.first + i;
    losses[i] = targets.counts(row) ? loss_of(x[targets.at(row)], sums[i]) : 0.0F;
  });
}

void row_loss_grads(const LogitRows& rows, const Targets& targets, const LogSumExp* sums,
                    const float* loss_grads, float* grads) {
  const int64_t n = rows.classes;
  for_each_row(rows, [&](int64_t i, const float* x) {
    float* to = grads + i * n;
    const int64_t row = rows.first + i;
    if (!targets.counts(row)) {
      std::fill_n(to, n, 0.0F);
      return;
    }
    const int64_t label = targets.at(row);
    // Not the probability less 1: near 1 that is all rounding.
    const float at_label = loss_grads[i] * std::expm1(-loss_of(x[label], sums[i]));
    scaled_softmax(x, sums[i], loss_grads[i], to, n);
    to[label] = at_label;
  });
}

void row_losses_and_grads(const LogitRows& rows, const Targets& targets, float* losses) {
  const int64_t n = rows.classes;
  for_each_row(rows, [&](int64_t i, float* x) {
    const int64_t row = rows.first + i;
    if (!targets.counts(row)) {
      std::fill_n(x, n, 0.0F);
      losses[i] = 0.0F;
      return;
    }
    const int64_t label = targets.at(row);
    const float logit = x[label];
    const float shift = largest_of(x, n);
    const double sum = exp_in_place(x, n, shift);
    losses[i] = loss_of(logit, {shift, static_cast<float>(std::log(sum))});
    scale_in_place(x, n, static_cast<float>(1.0 / sum));
    x[label] = std::expm1(-losses[i]);
  });
}

}  // namespace oneflow_accel
