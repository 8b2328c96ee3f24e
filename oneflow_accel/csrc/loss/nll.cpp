// nll and nll_grad, float32: the second half of F.cross_entropy, after log_softmax.
#include <algorithm>

#include "common/arguments.h"
#include "common/threads.h"
#include "loss/labels.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

// The rows of one call. Forward and gradient agree on which element of a row counts, and how much.
class NllTargets {
 public:
  NllTargets(user_op::KernelComputeContext* ctx, const user_op::OpKernelCache* cache, int64_t classes)
      : range_(static_cast<const ClassRange*>(cache)),
        classes_(classes),
        labels_(ctx->Tensor4ArgNameAndIndex("target", 0),
                range_ == nullptr ? classes : range_->classes),
        ignored_(ctx->Attr<int64_t>("ignore_index")),
        weight_(input_or_null(ctx, "weight")) {}

  // The row's class among those of this process; -1 where its label is ignored or elsewhere.
  int64_t class_of(int64_t row) const {
    if (labels_.at(row) == ignored_) { return -1; }
    const int64_t label = labels_.checked(row) - (range_ == nullptr ? 0 : range_->begin);
    return label < classes_ ? std::max<int64_t>(label, -1) : -1;
  }

  float weight_of(int64_t label) const { return weight_ == nullptr ? 1.0F : weight_[label]; }

 private:
  const ClassRange* range_;
  int64_t classes_;
  Labels labels_;
  int64_t ignored_;
  const float* weight_;
};

class NllKernel final : public Kernel {
 public:
  std::shared_ptr<user_op::OpKernelCache> InitOpKernelCache(
      user_op::KernelCacheContext* ctx) const override {
    return class_range(ctx, "input");
  }

 private:
  void Compute(user_op::KernelComputeContext* ctx, user_op::OpKernelState*,
               const user_op::OpKernelCache* cache) const override {
    const auto* input = ctx->Tensor4ArgNameAndIndex("input", 0);
    const float* x = input->dptr<float>();
    float* y = ctx->Tensor4ArgNameAndIndex("output", 0)->mut_dptr<float>();
    float* out_weight = ctx->Tensor4ArgNameAndIndex("out_weight", 0)->mut_dptr<float>();
    const int64_t n = input->shape_view().At(input->shape_view().NumAxes() - 1);
    const int64_t rows = ctx->Tensor4ArgNameAndIndex("target", 0)->shape_view().elem_cnt();
    const NllTargets targets(ctx, cache, n);
    parallel_for(rows, kGrainSize / 8, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const int64_t label = targets.class_of(row);
        out_weight[row] = label < 0 ? 0.0F : targets.weight_of(label);
        y[row] = label < 0 ? 0.0F : -x[row * n + label] * out_weight[row];
      }
    });
  }
};

class NllGradKernel final : public Kernel {
 public:
  std::shared_ptr<user_op::OpKernelCache> InitOpKernelCache(
      user_op::KernelCacheContext* ctx) const override {
    return class_range(ctx, "input");
  }

 private:
  void Compute(user_op::KernelComputeContext* ctx, user_op::OpKernelState*,
               const user_op::OpKernelCache* cache) const override {
    auto* in_grad = ctx->Tensor4ArgNameAndIndex("in_grad", 0);
    float* dx = in_grad->mut_dptr<float>();
    const float* dy = ctx->Tensor4ArgNameAndIndex("out_grad", 0)->dptr<float>();
    const int64_t n = in_grad->shape_view().At(in_grad->shape_view().NumAxes() - 1);
    const int64_t rows = in_grad->shape_view().elem_cnt() / n;
    const NllTargets targets(ctx, cache, n);
    parallel_for(rows, std::max<int64_t>(1, kGrainSize / n), [&](int64_t begin, int64_t end) {
      std::fill(dx + begin * n, dx + end * n, 0.0F);
      for (int64_t row = begin; row < end; ++row) {
        const int64_t label = targets.class_of(row);
        if (label >= 0) { dx[row * n + label] = -dy[row] * targets.weight_of(label); }
      }
    });
  }
};

REGISTER_KERNEL("nll", make<NllKernel>, is_float32_on_cpu("input") && is_label("target"));
REGISTER_KERNEL("nll_grad", make<NllGradKernel>,
                is_float32_on_cpu("in_grad") && is_label("target"));

}  // namespace

}  // namespace oneflow_accel
