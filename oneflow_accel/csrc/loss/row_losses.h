// Cross entropies of rows of logits against class indices, of which one may mean "not counted".
#pragma once

#include "loss/labels.h"

namespace oneflow_accel {

// The labels of one call: its input "label" and its attribute "ignore_index".
class Targets {
 public:
  // Throws std::out_of_range where a label is neither a class nor ignored: before any work is done,
  // and so that the loops below need not look.
  Targets(::oneflow::user_op::KernelComputeContext* ctx, int64_t classes);

  int64_t rows() const { return rows_; }
  bool counts(int64_t row) const { return labels_.at(row) != ignored_; }
  int64_t at(int64_t row) const { return labels_.at(row); }
  int64_t counted() const;

 private:
  Labels labels_;
  int64_t rows_;
  int64_t ignored_;
};

// log(sum(e^x)) of a row is shift + log_sum. Both are kept: their sum in one float has an error of
// 5e-4 beside logits of 1e4, which each probability would have too.
struct LogSumExp {
  float shift;
  float log_sum;
};
// How many floats it takes in a tensor.
constexpr int64_t kLogSumExpSize = 2;

// `count` of the rows of a call, from `first` on; `logits` and the results are those of `first`.
struct LogitRows {
  int64_t first;
  int64_t count;
  int64_t classes;
  float* logits;
};

// The losses, 0 where a row is not counted, and what the gradient needs of each row.
void row_losses(const LogitRows& rows, const Targets& targets, float* losses, LogSumExp* sums);

// grads = loss_grads * (softmax(logits) - one_hot(label)), 0 where a row is not counted. `grads` may
// be the logits.
void row_loss_grads(const LogitRows& rows, const Targets& targets, const LogSumExp* sums,
                    const float* loss_grads, float* grads);

// Both at once, for a gradient of 1 for each loss: the logits become it.
void row_losses_and_grads(const LogitRows& rows, const Targets& targets, float* losses);

}  // namespace oneflow_accel
