// sparse_softmax_cross_entropy and its gradient, float32. `prob` holds log(softmax(prediction)), as
// in OneFlow's own kernels.
//
// sparse_softmax_cross_entropy_ms, for classes split over processes, is replaced by small operators
// before it would run; what of it remains is sparse_softmax_cross_entropy_ms_grad, whose `prob` is
// the softmax, and sparse_cross_entropy_ms (sparse_cross_entropy.cpp).
#include <algorithm>
#include <cmath>

#include "common/arguments.h"
#include "common/threads.h"
#include "loss/labels.h"
#include "softmax/row.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

void log_softmax_row(const float* x, float* y, int64_t n) { row::log_softmax(x, y, n); }

// dx = dy * e^y, of which dx may be y.
void scaled_exp(const float* y, float dy, float* dx, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { dx[i] = dy * row::exp_of_nonpositive(y[i]); }
}

void scaled(const float* y, float dy, float* dx, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { dx[i] = dy * y[i]; }
}

class SparseSoftmaxCrossEntropyKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const auto* prediction = ctx->Tensor4ArgNameAndIndex("prediction", 0);
    const auto* label = ctx->Tensor4ArgNameAndIndex("label", 0);
    const float* x = prediction->dptr<float>();
    float* prob = output(ctx, "prob");
    float* out = output(ctx, "out");
    const int64_t n = prediction->shape_view().At(prediction->shape_view().NumAxes() - 1);
    const Labels labels(label, n);
    parallel_for(label->shape_view().elem_cnt(),
                 std::max<int64_t>(1, kGrainSize / std::max<int64_t>(n, 1)),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t row = begin; row < end; ++row) {
                     const int64_t target = labels.checked(row);
                     log_softmax_row(x + row * n, prob + row * n, n);
                     out[row] = -prob[row * n + target];
                   }
                 });
  }
};

class SparseSoftmaxCrossEntropyGradKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    auto* prediction_diff = ctx->Tensor4ArgNameAndIndex("prediction_diff", 0);
    const float* prob = input(ctx, "prob");
    const float* dy = input(ctx, "dy");
    float* dx = prediction_diff->mut_dptr<float>();
    const auto& shape = prediction_diff->shape_view();
    const int64_t n = shape.At(shape.NumAxes() - 1);
    const Labels labels(ctx->Tensor4ArgNameAndIndex("label", 0), n);
    parallel_for(shape.elem_cnt() / n, std::max<int64_t>(1, kGrainSize / n),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t row = begin; row < end; ++row) {
                     const int64_t target = row * n + labels.checked(row);
                     const float at_target = dy[row] * std::expm1(prob[target]);
                     scaled_exp(prob + row * n, dy[row], dx + row * n, n);
                     dx[target] = at_target;
                   }
                 });
  }
};

class SparseSoftmaxCrossEntropyMsGradKernel final : public Kernel {
 public:
  std::shared_ptr<user_op::OpKernelCache> InitOpKernelCache(
      user_op::KernelCacheContext* ctx) const override {
    return class_range(ctx, "prob");
  }

 private:
  void Compute(user_op::KernelComputeContext* ctx, user_op::OpKernelState*,
               const user_op::OpKernelCache* cache) const override {
    const auto* range = static_cast<const ClassRange*>(cache);
    auto* prediction_diff = ctx->Tensor4ArgNameAndIndex("prediction_diff", 0);
    const float* prob = input(ctx, "prob");
    const float* dy = input(ctx, "dy");
    float* dx = prediction_diff->mut_dptr<float>();
    const auto& shape = prediction_diff->shape_view();
    const int64_t n = shape.At(shape.NumAxes() - 1);
    const int64_t first = range == nullptr ? 0 : range->begin;
    const Labels labels(ctx->Tensor4ArgNameAndIndex("label", 0),
                        range == nullptr ? n : range->classes);
    parallel_for(shape.elem_cnt() / n, std::max<int64_t>(1, kGrainSize / n),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t row = begin; row < end; ++row) {
                     const int64_t target = labels.checked(row) - first;
                     scaled(prob + row * n, dy[row], dx + row * n, n);
                     if (target >= 0 && target < n) { dx[row * n + target] -= dy[row]; }
                   }
                 });
  }
};

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
