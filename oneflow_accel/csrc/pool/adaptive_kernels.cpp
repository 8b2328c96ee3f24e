// adaptive_avg_pool2d and its gradient. OneFlow 0.9.0 has this operator for (N, C, H, W) only.
#include "common/arguments.h"
#include "pool/average.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

PoolGeometry geometry(user_op::KernelComputeContext* ctx, const char* x, const char* y) {
  return adaptive_geometry(ctx->Tensor4ArgNameAndIndex(x, 0)->shape_view(),
                           ctx->Tensor4ArgNameAndIndex(y, 0)->shape_view());
}

template <typename T>
class AdaptiveAveragePoolKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    average_pool(geometry(ctx, "x", "y"), PoolDivisor{0, false}, input<T>(ctx, "x"),
                 output<T>(ctx, "y"));
  }
};

template <typename T>
class AdaptiveAveragePoolGradKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    average_pool_grad(geometry(ctx, "dx", "dy"), PoolDivisor{0, false}, input<T>(ctx, "dy"),
                      output<T>(ctx, "dx"));
  }
};

REGISTER_KERNEL("adaptive_avg_pool2d", make<AdaptiveAveragePoolKernel<float>>,
                is_float32_on_cpu("y"));
REGISTER_KERNEL("adaptive_avg_pool2d", make<AdaptiveAveragePoolKernel<Bfloat16>>,
                is_bfloat16_on_cpu("y"));
REGISTER_KERNEL("adaptive_avg_pool2d_grad", make<AdaptiveAveragePoolGradKernel<float>>,
                is_float32_on_cpu("dx"));
REGISTER_KERNEL("adaptive_avg_pool2d_grad", make<AdaptiveAveragePoolGradKernel<Bfloat16>>,
                is_bfloat16_on_cpu("dx"));

}  // namespace

}  // namespace oneflow_accel
