// OneFlow's losses of rows against class indices, float32, and their gradients:
//   nll, the second half of F.cross_entropy, after log_softmax;
//   sparse_cross_entropy, -log(prediction[label]);
//   sparse_softmax_cross_entropy, whose `prob` holds log(softmax(prediction)), as in OneFlow's own.
// ..._ms are for classes split over processes. sparse_softmax_cross_entropy_ms is replaced by small
// operators before it would run; what of it remains is sparse_softmax_cross_entropy_ms_grad, whose
// `prob` is the softmax, and sparse_cross_entropy_ms.
#include <algorithm>
#include <cmath>

#include "common/arguments.h"
#include "loss/labels.h"
#include "softmax/row.h"
#include "softmax/row_set.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

using Function = void (*)(user_op::KernelComputeContext* ctx, const RowSet& rows,
                          const Labels& labels);

// A kernel of rows of which each process may hold some of the classes: those of the argument
// `classes`. `ignores` where the operator says which label does not count.
class IndexLossKernel final : public Kernel {
 public:
  IndexLossKernel(const char* classes, const char* label, bool ignores, Function function)
      : classes_(classes), label_(label), ignores_(ignores), function_(function) {}

  std::shared_ptr<user_op::OpKernelCache> InitOpKernelCache(
      user_op::KernelCacheContext* ctx) const override {
    if (ctx->parallel_ctx().parallel_num() == 1) { return nullptr; }
    return std::make_shared<ClassRange>(ctx, classes_);
  }

 private:
  void Compute(user_op::KernelComputeContext* ctx, user_op::OpKernelState*,
               const user_op::OpKernelCache* range) const override {
    std::optional<int64_t> ignored;
    if (ignores_) { ignored = ctx->Attr<int64_t>("ignore_index"); }
    const RowSet rows(ctx, classes_);
    function_(ctx, rows, Labels(ctx, label_, rows.n, range, ignored));
  }

  const char* classes_;
  const char* label_;
  bool ignores_;
  Function function_;
};

user_op::OpKernelCreateFn kernel(const char* classes, const char* label, Function function,
                                 bool ignores = false) {
  return [=] { return user_op::NewOpKernel<IndexLossKernel>(classes, label, ignores, function); };
}

// loss[row] = of_label(row, index of the row's label), 0 where its label is not here.
template <typename OfLabel>
void losses_of(const RowSet& rows, const Labels& labels, float* loss, const OfLabel& of_label) {
  parallel_for(rows.count, kGrainSize / 8, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t place = labels.place(row);
      loss[row] = place < 0 ? 0.0F : of_label(row, row * rows.n + place);
    }
  });
}

// grad = 0 but at the rows' labels, where it is of_label(row, index).
template <typename OfLabel>
void grads_of(const RowSet& rows, const Labels& labels, float* grad, const OfLabel& of_label) {
  rows.for_each(1, [&](int64_t row, int64_t first) {
    std::fill_n(grad + first, rows.n, 0.0F);
    const int64_t place = labels.place(row);
    if (place >= 0) { grad[first + place] = of_label(row, first + place); }
  });
}

void nll(user_op::KernelComputeContext* ctx, const RowSet& rows, const Labels& labels) {
  const float* x = input(ctx, "input");
  const float* weight = input_or_null(ctx, "weight");
  float* out_weight = output(ctx, "out_weight");
  losses_of(rows, labels, out_weight, [=](int64_t, int64_t at) {
    return weight == nullptr ? 1.0F : weight[at % rows.n];
  });
  losses_of(rows, labels, output(ctx, "output"),
            [=](int64_t row, int64_t at) { return -x[at] * out_weight[row]; });
}

void nll_grad(user_op::KernelComputeContext* ctx, const RowSet& rows, const Labels& labels) {
  const float* dy = input(ctx, "out_grad");
  const float* weight = input_or_null(ctx, "weight");
  grads_of(rows, labels, output(ctx, "in_grad"), [=](int64_t row, int64_t at) {
    return -dy[row] * (weight == nullptr ? 1.0F : weight[at % rows.n]);
  });
}

// Probabilities below 1e-20 count as this much, as in OneFlow's own kernels. Not std::max: NaN
// stays.
float at_least_smallest(float prob) { return prob < 1e-20F ? 1e-20F : prob; }

void sparse(user_op::KernelComputeContext* ctx, const RowSet& rows, const Labels& labels) {
  const float* prob = input(ctx, "prediction");
  losses_of(rows, labels, output(ctx, "out"),
            [=](int64_t, int64_t at) { return -std::log(at_least_smallest(prob[at])); });
}

void sparse_grad(user_op::KernelComputeContext* ctx, const RowSet& rows, const Labels& labels) {
  const float* prob = input(ctx, "prediction");
  const float* dy = input(ctx, "dy");
  grads_of(rows, labels, output(ctx, "prediction_diff"),
           [=](int64_t row, int64_t at) { return -dy[row] / at_least_smallest(prob[at]); });
}

void sparse_softmax(user_op::KernelComputeContext* ctx, const RowSet& rows, const Labels& labels) {
  const float* x = input(ctx, "prediction");
  float* prob = output(ctx, "prob");
  float* out = output(ctx, "out");
  rows.for_each(1, [&](int64_t row, int64_t first) {
    const int64_t target = labels.checked(row);
    row::log_softmax(x + first, prob + first, rows.n);
    out[row] = -prob[first + target];
  });
}

void sparse_softmax_grad(user_op::KernelComputeContext* ctx, const RowSet& rows,
                         const Labels& labels) {
  const float* prob = input(ctx, "prob");
  const float* dy = input(ctx, "dy");
  float* grad = output(ctx, "prediction_diff");
  rows.for_each(1, [&](int64_t row, int64_t first) {
    const float factor = dy[row];
    const int64_t target = labels.checked(row);
    const float* y = prob + first;
    float* dx = grad + first;  // may be y
    const float at_target = factor * std::expm1(y[target]);
#pragma omp simd
    for (int64_t i = 0; i < rows.n; ++i) { dx[i] = factor * row::exp_of_nonpositive(y[i]); }
    dx[target] = at_target;
  });
}

void sparse_softmax_ms_grad(user_op::KernelComputeContext* ctx, const RowSet& rows,
                            const Labels& labels) {
  const float* prob = input(ctx, "prob");
  const float* dy = input(ctx, "dy");
  float* grad = output(ctx, "prediction_diff");
  rows.for_each(1, [&](int64_t row, int64_t first) {
    const float factor = dy[row];
    const int64_t place = labels.place(row);
    const float* y = prob + first;
    float* dx = grad + first;  // may be y
#pragma omp simd
    for (int64_t i = 0; i < rows.n; ++i) { dx[i] = factor * y[i]; }
    if (place >= 0) { dx[place] -= factor; }
  });
}

REGISTER_KERNEL("nll", kernel("input", "target", nll, true),
                is_float32_on_cpu("input") && is_label("target"));
REGISTER_KERNEL("nll_grad", kernel("input", "target", nll_grad, true),
                is_float32_on_cpu("in_grad") && is_label("target"));
REGISTER_KERNEL("sparse_cross_entropy", kernel("prediction", "label", sparse),
                is_float32_on_cpu("out") && is_label("label"));
REGISTER_KERNEL("sparse_cross_entropy_ms", kernel("prediction", "label", sparse),
                is_float32_on_cpu("out") && is_label("label"));
REGISTER_KERNEL("sparse_cross_entropy_grad", kernel("prediction", "label", sparse_grad),
                is_float32_on_cpu("prediction_diff") && is_label("label"));
REGISTER_KERNEL("sparse_cross_entropy_ms_grad", kernel("prediction", "label", sparse_grad),
                is_float32_on_cpu("prediction_diff") && is_label("label"));
REGISTER_KERNEL("sparse_softmax_cross_entropy", kernel("prediction", "label", sparse_softmax),
                is_float32_on_cpu("out") && is_label("label"));
REGISTER_KERNEL("sparse_softmax_cross_entropy_grad", kernel("prob", "label", sparse_softmax_grad),
                is_float32_on_cpu("prediction_diff") && is_label("label"),
                in_place("prediction_diff", "prob"));
REGISTER_KERNEL("sparse_softmax_cross_entropy_ms_grad",
                kernel("prob", "label", sparse_softmax_ms_grad),
                is_float32_on_cpu("prediction_diff") && is_label("label"),
                in_place("prediction_diff", "prob"));

}  // namespace

}  // namespace oneflow_accel
