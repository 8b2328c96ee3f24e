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
#include "softmax/row_kernel.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

// A kernel of rows of which each process may hold some of the classes: those of the argument
// `classes`.
class OfClasses : public Kernel {
 public:
  OfClasses(const char* classes, const char* label) : classes_(classes), label_(label) {}

  std::shared_ptr<user_op::OpKernelCache> InitOpKernelCache(
      user_op::KernelCacheContext* ctx) const final {
    if (ctx->parallel_ctx().parallel_num() == 1) { return nullptr; }
    return std::make_shared<ClassRange>(ctx, classes_);
  }

 private:
  void Compute(user_op::KernelComputeContext* ctx, user_op::OpKernelState*,
               const user_op::OpKernelCache* range) const final {
    const Rows rows(ctx, classes_);
    compute(ctx, rows, Labels(ctx, label_, rows.n, range, ignored(ctx)));
  }
  virtual std::optional<int64_t> ignored(user_op::KernelComputeContext*) const { return {}; }
  virtual void compute(user_op::KernelComputeContext* ctx, const Rows& rows,
                       const Labels& labels) const = 0;

  const char* classes_;
  const char* label_;
};

// loss[row] = of_label(row, index of the row's label), 0 where its label is not here.
template <typename OfLabel>
void losses_of(const Rows& rows, const Labels& labels, float* loss, const OfLabel& of_label) {
  parallel_for(rows.count, kGrainSize / 8, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t place = labels.place(row);
      loss[row] = place < 0 ? 0.0F : of_label(row, row * rows.n + place);
    }
  });
}

// grad = 0 but at the rows' labels, where it is of_label(row, index).
template <typename OfLabel>
void grads_of(const Rows& rows, const Labels& labels, float* grad, const OfLabel& of_label) {
  rows.for_each(1, [&](int64_t row, int64_t first) {
    std::fill_n(grad + first, rows.n, 0.0F);
    const int64_t place = labels.place(row);
    if (place >= 0) { grad[first + place] = of_label(row, first + place); }
  });
}

class NllBase : public OfClasses {
 public:
  NllBase() : OfClasses("input", "target") {}

 private:
  std::optional<int64_t> ignored(user_op::KernelComputeContext* ctx) const final {
    return ctx->Attr<int64_t>("ignore_index");
  }
};

class NllKernel final : public NllBase {
  void compute(user_op::KernelComputeContext* ctx, const Rows& rows,
               const Labels& labels) const override {
    const float* x = input(ctx, "input");
    const float* weight = input_or_null(ctx, "weight");
    float* out_weight = output(ctx, "out_weight");
    losses_of(rows, labels, out_weight, [=](int64_t, int64_t at) {
      return weight == nullptr ? 1.0F : weight[at % rows.n];
    });
    losses_of(rows, labels, output(ctx, "output"),
              [=](int64_t row, int64_t at) { return -x[at] * out_weight[row]; });
  }
};

class NllGradKernel final : public NllBase {
  void compute(user_op::KernelComputeContext* ctx, const Rows& rows,
               const Labels& labels) const override {
    const float* dy = input(ctx, "out_grad");
    const float* weight = input_or_null(ctx, "weight");
    grads_of(rows, labels, output(ctx, "in_grad"), [=](int64_t row, int64_t at) {
      return -dy[row] * (weight == nullptr ? 1.0F : weight[at % rows.n]);
    });
  }
};

// Probabilities below 1e-20 count as this much, as in OneFlow's own kernels. Not std::max: NaN stays.
float at_least_smallest(float prob) { return prob < 1e-20F ? 1e-20F : prob; }

class SparseCrossEntropyKernel final : public OfClasses {
 public:
  SparseCrossEntropyKernel() : OfClasses("prediction", "label") {}

 private:
  void compute(user_op::KernelComputeContext* ctx, const Rows& rows,
               const Labels& labels) const override {
    const float* prob = input(ctx, "prediction");
    losses_of(rows, labels, output(ctx, "out"),
              [=](int64_t, int64_t at) { return -std::log(at_least_smallest(prob[at])); });
  }
};

class SparseCrossEntropyGradKernel final : public OfClasses {
 public:
  SparseCrossEntropyGradKernel() : OfClasses("prediction", "label") {}

 private:
  void compute(user_op::KernelComputeContext* ctx, const Rows& rows,
               const Labels& labels) const override {
    const float* prob = input(ctx, "prediction");
    const float* dy = input(ctx, "dy");
    grads_of(rows, labels, output(ctx, "prediction_diff"),
             [=](int64_t row, int64_t at) { return -dy[row] / at_least_smallest(prob[at]); });
  }
};

class SparseSoftmaxCrossEntropyKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const Rows rows(ctx, "prediction");
    const Labels labels(ctx, "label", rows.n);
    const float* x = input(ctx, "prediction");
    float* prob = output(ctx, "prob");
    float* out = output(ctx, "out");
    rows.for_each(1, [&](int64_t row, int64_t first) {
      const int64_t target = labels.checked(row);
      row::log_softmax(x + first, prob + first, rows.n);
      out[row] = -prob[first + target];
    });
  }
};

class SparseSoftmaxCrossEntropyGradKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const Rows rows(ctx, "prob");
    const Labels labels(ctx, "label", rows.n);
    const float* prob = input(ctx, "prob");
    const float* dy = input(ctx, "dy");
    float* grad = output(ctx, "prediction_diff");
    rows.for_each(1, [&](int64_t row, int64_t first) {
      const float factor = dy[row];
      const int64_t target = first + labels.checked(row);
      const float at_target = factor * std::expm1(prob[target]);
      const float* y = prob + first;
      float* dx = grad + first;  // may be y
#pragma omp simd
      for (int64_t i = 0; i < rows.n; ++i) { dx[i] = factor * row::exp_of_nonpositive(y[i]); }
      grad[target] = at_target;
    });
  }
};

class SparseSoftmaxCrossEntropyMsGradKernel final : public OfClasses {
 public:
  SparseSoftmaxCrossEntropyMsGradKernel() : OfClasses("prob", "label") {}

 private:
  void compute(user_op::KernelComputeContext* ctx, const Rows& rows,
               const Labels& labels) const override {
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
};

REGISTER_KERNEL("nll", make<NllKernel>, is_float32_on_cpu("input") && is_label("target"));
REGISTER_KERNEL("nll_grad", make<NllGradKernel>,
                is_float32_on_cpu("in_grad") && is_label("target"));
REGISTER_KERNEL("sparse_cross_entropy", make<SparseCrossEntropyKernel>,
                is_float32_on_cpu("out") && is_label("label"));
REGISTER_KERNEL("sparse_cross_entropy_ms", make<SparseCrossEntropyKernel>,
                is_float32_on_cpu("out") && is_label("label"));
REGISTER_KERNEL("sparse_cross_entropy_grad", make<SparseCrossEntropyGradKernel>,
                is_float32_on_cpu("prediction_diff") && is_label("label"));
REGISTER_KERNEL("sparse_cross_entropy_ms_grad", make<SparseCrossEntropyGradKernel>,
                is_float32_on_cpu("prediction_diff") && is_label("label"));
REGISTER_KERNEL("sparse_softmax_cross_entropy", make<SparseSoftmaxCrossEntropyKernel>,
                is_float32_on_cpu("out") && is_label("label"));
REGISTER_KERNEL("sparse_softmax_cross_entropy_grad", make<SparseSoftmaxCrossEntropyGradKernel>,
                is_float32_on_cpu("prediction_diff") && is_label("label"),
                in_place("prediction_diff", "prob"));
REGISTER_KERNEL("sparse_softmax_cross_entropy_ms_grad", make<SparseSoftmaxCrossEntropyMsGradKernel>,
                is_float32_on_cpu("prediction_diff") && is_label("label"),
                in_place("prediction_diff", "prob"));

}  // namespace

}  // namespace oneflow_accel
