// fused_scale_mask_softmax and its gradient, float32: softmax over the last axis of x * scale where
// the mask is true and of a fill value where it is false. The mask is broadcast to x.
#include "common/arguments.h"
#include "fused/broadcast_rows.h"
#include "fused/softmax_rows.h"
#include "random/mask_bytes.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

class FusedScaleMaskSoftmaxKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const auto* x = ctx->Tensor4ArgNameAndIndex("x", 0);
    const auto* mask = ctx->Tensor4ArgNameAndIndex("mask", 0);
    const uint8_t* mask_values = random::mask_bytes(mask);
    const float* in = x->dptr<float>();
    float* y = output(ctx, "y");
    const float scale = ctx->Attr<float>("scale_value");
    const float fill = ctx->Attr<float>("mask_fill_value");
    const auto& shape = x->shape_view();
    const fused::BroadcastRows mask_rows(shape, mask->shape_view());
    const int64_t n = shape.At(shape.NumAxes() - 1);
    fused::for_each_row(shape.elem_cnt() / n, n, [&](int64_t row) {
      const int64_t i = row * n;
      fused::masked_softmax(in + i, mask_values + mask_rows.offset(row), scale, fill, y + i, n);
    });
  }
};

class FusedScaleMaskSoftmaxGradKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const auto* y = ctx->Tensor4ArgNameAndIndex("y", 0);
    const auto* mask = ctx->Tensor4ArgNameAndIndex("mask", 0);
    const uint8_t* mask_values = random::mask_bytes(mask);
    const float* out = y->dptr<float>();
    const float* dy = input(ctx, "dy");
    float* dx = output(ctx, "dx");
    const float scale = ctx->Attr<float>("scale_value");
    const auto& shape = y->shape_view();
    const fused::BroadcastRows mask_rows(shape, mask->shape_view());
    const int64_t n = shape.At(shape.NumAxes() - 1);
    fused::for_each_row(shape.elem_cnt() / n, n, [&](int64_t row) {
      const int64_t i = row * n;
      fused::masked_softmax_grad(out + i, dy + i, mask_values + mask_rows.offset(row), scale,
                                 dx + i, n);
    });
  }
};

REGISTER_KERNEL("fused_scale_mask_softmax", make<FusedScaleMaskSoftmaxKernel>,
                is_float32_on_cpu("x"));
REGISTER_KERNEL("fused_scale_mask_softmax_grad", make<FusedScaleMaskSoftmaxGradKernel>,
                is_float32_on_cpu("dy"));

}  // namespace

}  // namespace oneflow_accel
