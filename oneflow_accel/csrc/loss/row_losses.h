// Cross entropies of rows of logits against class indices, of which one may mean "not counted".
#pragma once

#include <algorithm>
#include <cmath>

#include "common/infer.h"
#include "loss/labels.h"
#include "softmax/row.h"
#include "softmax/row_kernel.h"

namespace oneflow_accel {

// The labels of one call: its input "label" and its attribute "ignore_index".
inline Labels targets_of(::oneflow::user_op::KernelComputeContext* ctx, int64_t classes) {
  return Labels(ctx, "label", classes, nullptr, ctx->Attr<int64_t>("ignore_index"));
}

// log(sum(e^x)) of a row is shift + log_sum. Both are kept: their sum in one float has an error of
// 5e-4 beside logits of 1e4, which each probability would have too.
struct LogSumExp {
  float shift;
  float log_sum;

  float loss_of(float logit) const { return (shift - logit) + log_sum; }
};

// The outputs "losses" and "lse", floats for `rows` rows, of which the second has two for each.
inline void describe_losses(::oneflow::user_op::InferContext* ctx, int64_t rows) {
  describe_output(ctx, "losses", ::oneflow::Shape({rows}));
  describe_output(ctx, "lse", ::oneflow::Shape({rows, 2}));
}

// Some of the rows of a call, from `first` on; `logits` and the results are those of `first`. The
// labels are checked.
template <typename T>
struct LogitRows {
  int64_t first;
  Rows rows;
  const T* logits;

  // The losses, 0 where a row is not counted, and what the gradient needs of each row.
  void losses(const Labels& labels, float* losses, LogSumExp* sums) const {
    rows.for_each(1, [&](int64_t i, int64_t at) {
      const T* x = logits + at;
      const float shift = row::maximum(x, rows.n);
      sums[i] = {shift, static_cast<float>(std::log(row::sum_exp(x, rows.n, shift)))};
      const int64_t row = first + i;
      losses[i] = labels.counts(row) ? sums[i].loss_of(to_float(x[labels.at(row)])) : 0.0F;
    });
  }

  // grads = loss_grads * (softmax(logits) - one_hot(label)), 0 where a row is not counted. `grads`
  // may be the logits.
  void grads(const Labels& labels, const LogSumExp* sums, const float* loss_grads, T* grads) const {
    rows.for_each(1, [&](int64_t i, int64_t at) {
      const T* x = logits + at;
      T* to = grads + at;
      const int64_t row = first + i;
      if (!labels.counts(row)) {
        std::fill_n(to, rows.n, T{});
        return;
      }
      const int64_t label = labels.at(row);
      const LogSumExp sum = sums[i];
      const float factor = loss_grads[i];
      // Not the probability less 1: near 1 that is all rounding.
      const float at_label = factor * std::expm1(-sum.loss_of(to_float(x[label])));
#pragma omp simd
      for (int64_t j = 0; j < rows.n; ++j) {
        const float shifted = (to_float(x[j]) - sum.shift) - sum.log_sum;
        to[j] = from_float<T>(factor * row::exp_of_nonpositive(shifted));
      }
      to[label] = from_float<T>(at_label);
    });
  }
};

}  // namespace oneflow_accel
