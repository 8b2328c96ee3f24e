// relu and relu_grad, float32.
#include "common/oneflow.h"
#include "common/simd.h"
#include "common/threads.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

// y = max(x, 0), NaN kept. x and y may be the same array, as dy and dx may be below: `omp simd`
// says that no iteration depends on another one.
ONEFLOW_ACCEL_SIMD
void relu(const float* x, float* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { y[i] = x[i] < 0.0F ? 0.0F : x[i]; }
}

// dx = dy where y > 0, else 0. Where y is NaN the gradient passes, as in PyTorch.
ONEFLOW_ACCEL_SIMD
void relu_grad(const float* dy, const float* y, float* dx, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { dx[i] = y[i] <= 0.0F ? 0.0F : dy[i]; }
}

class ReluKernel final : public user_op::OpKernel {
 public:
  bool AlwaysComputeWhenAllOutputsEmpty() const override { return false; }

 private:
  using user_op::OpKernel::Compute;
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const auto* x = ctx->Tensor4ArgNameAndIndex("x", 0);
    const float* in = x->dptr<float>();
    float* out = ctx->Tensor4ArgNameAndIndex("y", 0)->mut_dptr<float>();
    parallel_for(x->shape_view().elem_cnt(), kGrainSize,
                 [=](int64_t begin, int64_t end) { relu(in + begin, out + begin, end - begin); });
  }
};

class ReluGradKernel final : public user_op::OpKernel {
 public:
  bool AlwaysComputeWhenAllOutputsEmpty() const override { return false; }

 private:
  using user_op::OpKernel::Compute;
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const auto* dy = ctx->Tensor4ArgNameAndIndex("dy", 0);
    const float* grad = dy->dptr<float>();
    const float* y = ctx->Tensor4ArgNameAndIndex("y", 0)->dptr<float>();
    float* dx = ctx->Tensor4ArgNameAndIndex("dx", 0)->mut_dptr<float>();
    parallel_for(dy->shape_view().elem_cnt(), kGrainSize, [=](int64_t begin, int64_t end) {
      relu_grad(grad + begin, y + begin, dx + begin, end - begin);
    });
  }
};

REGISTER_USER_KERNEL(listed("relu"))
    .SetCreateFn<ReluKernel>()
    .SetIsMatchedHob(is_float32_on_cpu("y"))
    .SetInplaceProposalFn([](const user_op::InferContext&,
                             const user_op::AddInplaceArgPair& add) -> ::oneflow::Maybe<void> {
      return add("y", 0, "x", 0, true);
    })
    .SetPriority(kKernelPriority);

REGISTER_USER_KERNEL(listed("relu_grad"))
    .SetCreateFn<ReluGradKernel>()
    .SetIsMatchedHob(is_float32_on_cpu("dx"))
    .SetInplaceProposalFn([](const user_op::InferContext&,
                             const user_op::AddInplaceArgPair& add) -> ::oneflow::Maybe<void> {
      return add("dx", 0, "dy", 0, true);
    })
    .SetPriority(kKernelPriority);

}  // namespace

}  // namespace oneflow_accel
