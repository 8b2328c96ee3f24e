// fused_bias_add_gelu and its gradient, float32: gelu(a + b) in its exact form (erf), b along any
// axis of a.
#include "activation/gelu.h"
#include "common/arguments.h"
#include "fused/bias.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

void gelu_in_place(float* z, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { z[i] = gelu(z[i]); }
}

// z becomes dy * gelu'(z).
void gelu_grad_in_place(const float* dy, float* z, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { z[i] = dy[i] * gelu_slope(z[i]); }
}

class FusedBiasAddGeluKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const auto* a = ctx->Tensor4ArgNameAndIndex("a", 0);
    const float* b = input(ctx, "b");
    float* out = output(ctx, "out");
    const fused::BiasAxis axis(a->shape_view(), ctx->Attr<int32_t>("axis"));
    fused::add_bias_then(axis, a->dptr<float>(), b, out, a->shape_view().elem_cnt(),
                         [=](int64_t i, int64_t count) { gelu_in_place(out + i, count); });
  }
};

class FusedBiasAddGeluGradKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const auto* a = ctx->Tensor4ArgNameAndIndex("a", 0);
    const float* b = input(ctx, "b");
    const float* dy = input(ctx, "dy");
    float* dx = output(ctx, "dx");
    const fused::BiasAxis axis(a->shape_view(), ctx->Attr<int32_t>("axis"));
    fused::add_bias_then(
        axis, a->dptr<float>(), b, dx, a->shape_view().elem_cnt(),
        [=](int64_t i, int64_t count) { gelu_grad_in_place(dy + i, dx + i, count); });
  }
};

REGISTER_KERNEL("fused_bias_add_gelu", make<FusedBiasAddGeluKernel>, is_float32_on_cpu("out"));
REGISTER_KERNEL("fused_bias_add_gelu_grad", make<FusedBiasAddGeluGradKernel>,
                is_float32_on_cpu("dx"));

}  // namespace

}  // namespace oneflow_accel
