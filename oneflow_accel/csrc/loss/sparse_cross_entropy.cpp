// sparse_cross_entropy, sparse_cross_entropy_ms (classes split over processes) and their
// gradients, float32: out = -log(prediction[label]).
#include <algorithm>
#include <cmath>

#include "common/oneflow.h"
#include "common/threads.h"
#include "loss/labels.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

// Probabilities below count as this much, as in OneFlow's own kernels.
constexpr float kSmallest = 1e-20F;

// Not std::max: NaN stays.
float at_least_smallest(float prob) { return prob < kSmallest ? kSmallest : prob; }

// The labels of one call, and which of their classes are here.
struct ClassTargets {
  Labels labels;
  int64_t first;
  int64_t n;

  ClassTargets(user_op::KernelComputeContext* ctx, const user_op::OpKernelCache* cache, int64_t n)
      : labels(ctx->Tensor4ArgNameAndIndex("label", 0),
               cache == nullptr ? n : static_cast<const ClassRange*>(cache)->classes),
        first(cache == nullptr ? 0 : static_cast<const ClassRange*>(cache)->begin),
        n(n) {}

  // Offset of the row's label in the prediction, or -1 where another process holds its class.
  int64_t offset(int64_t row) const {
    const int64_t label = labels.checked(row) - first;
    return label >= 0 && label < n ? row * n + label : -1;
  }
};

class SparseCrossEntropyKernel final : public Kernel {
 public:
  std::shared_ptr<user_op::OpKernelCache> InitOpKernelCache(
      user_op::KernelCacheContext* ctx) const override {
    return class_range(ctx, "prediction");
  }

 private:
  void Compute(user_op::KernelComputeContext* ctx, user_op::OpKernelState*,
               const user_op::OpKernelCache* cache) const override {
    const auto* prediction = ctx->Tensor4ArgNameAndIndex("prediction", 0);
    const float* prob = prediction->dptr<float>();
    auto* output = ctx->Tensor4ArgNameAndIndex("out", 0);
    float* out = output->mut_dptr<float>();
    const auto& shape = prediction->shape_view();
    const ClassTargets targets(ctx, cache, shape.At(shape.NumAxes() - 1));
    parallel_for(output->shape_view().elem_cnt(), kGrainSize / 8,
                 [&](int64_t begin, int64_t end) {
                   for (int64_t row = begin; row < end; ++row) {
                     const int64_t at = targets.offset(row);
                     out[row] = at < 0 ? 0.0F : -std::log(at_least_smallest(prob[at]));
                   }
                 });
  }
};

class SparseCrossEntropyGradKernel final : public Kernel {
 public:
  std::shared_ptr<user_op::OpKernelCache> InitOpKernelCache(
      user_op::KernelCacheContext* ctx) const override {
    return class_range(ctx, "prediction");
  }

 private:
  void Compute(user_op::KernelComputeContext* ctx, user_op::OpKernelState*,
               const user_op::OpKernelCache* cache) const override {
    const float* prob = ctx->Tensor4ArgNameAndIndex("prediction", 0)->dptr<float>();
    const float* dy = ctx->Tensor4ArgNameAndIndex("dy", 0)->dptr<float>();
    auto* prediction_diff = ctx->Tensor4ArgNameAndIndex("prediction_diff", 0);
    float* dx = prediction_diff->mut_dptr<float>();
    const auto& shape = prediction_diff->shape_view();
    const int64_t n = shape.At(shape.NumAxes() - 1);
    const ClassTargets targets(ctx, cache, n);
    parallel_for(shape.elem_cnt() / n, std::max<int64_t>(1, kGrainSize / n),
                 [&](int64_t begin, int64_t end) {
                   std::fill(dx + begin * n, dx + end * n, 0.0F);
                   for (int64_t row = begin; row < end; ++row) {
                     const int64_t at = targets.offset(row);
                     if (at >= 0) { dx[at] = -dy[row] / at_least_smallest(prob[at]); }
                   }
                 });
  }
};

REGISTER_KERNEL("sparse_cross_entropy", make<SparseCrossEntropyKernel>,
                is_float32_on_cpu("out") && is_label("label"));
REGISTER_KERNEL("sparse_cross_entropy_ms", make<SparseCrossEntropyKernel>,
                is_float32_on_cpu("out") && is_label("label"));
REGISTER_KERNEL("sparse_cross_entropy_grad", make<SparseCrossEntropyGradKernel>,
                is_float32_on_cpu("prediction_diff") && is_label("label"));
REGISTER_KERNEL("sparse_cross_entropy_ms_grad", make<SparseCrossEntropyGradKernel>,
                is_float32_on_cpu("prediction_diff") && is_label("label"));

}  // namespace

}  // namespace oneflow_accel
