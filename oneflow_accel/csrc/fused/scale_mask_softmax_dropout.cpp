// fused_scale_mask_softmax_dropout, fused_bias_add_scale_mask_softmax_dropout and the gradient that
// both have, float32: the masked softmax, of x or x + bias, and dropout with a given mask. Mask and
// bias are broadcast to x.
#include <optional>

#include "common/arguments.h"
#include "fused/bias.h"
#include "fused/broadcast_rows.h"
#include "fused/softmax_rows.h"
#include "random/keep.h"
#include "random/mask_bytes.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

// Serves the operators with and without the input "bias".
class FusedScaleMaskSoftmaxDropoutKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const auto* x = ctx->Tensor4ArgNameAndIndex("x", 0);
    const auto* mask = ctx->Tensor4ArgNameAndIndex("mask", 0);
    const uint8_t* mask_values = random::mask_bytes(mask);
    const uint8_t* keep = random::mask_bytes(ctx->Tensor4ArgNameAndIndex("dropout_mask", 0));
    const float* in = x->dptr<float>();
    float* softmax_y = output(ctx, "softmax_y");
    float* y = output(ctx, "y");
    const float scale = ctx->Attr<float>("scale_value");
    const float fill = ctx->Attr<float>("mask_fill_value");
    const float dropout_scale = ctx->Attr<float>("dropout_scale_value");
    const auto& shape = x->shape_view();
    const int64_t n = shape.At(shape.NumAxes() - 1);
    const fused::BroadcastRows mask_rows(shape, mask->shape_view());
    const float* bias = nullptr;
    std::optional<fused::BroadcastRows> bias_rows;
    if (ctx->has_input("bias", 0)) {
      bias = input(ctx, "bias");
      bias_rows.emplace(shape, ctx->Tensor4ArgNameAndIndex("bias", 0)->shape_view());
    }
    fused::for_each_row(shape.elem_cnt() / n, n, [&](int64_t row) {
      const int64_t i = row * n;
      const float* source = in + i;
      if (bias_rows) {
        const float* bias_row = bias + bias_rows->offset(row);
        if (bias_rows->single_value()) {
          fused::add_value(source, *bias_row, softmax_y + i, n);
        } else {
          fused::add_row(source, bias_row, softmax_y + i, n);
        }
        source = softmax_y + i;
      }
      fused::masked_softmax(source, mask_values + mask_rows.offset(row), scale, fill,
                            softmax_y + i, n);
      random::keep_and_scale(softmax_y + i, keep + i, dropout_scale, y + i, n);
    });
  }
};

class FusedScaleMaskSoftmaxDropoutGradKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const auto* softmax_y = ctx->Tensor4ArgNameAndIndex("softmax_y", 0);
    const auto* mask = ctx->Tensor4ArgNameAndIndex("mask", 0);
    const uint8_t* mask_values = random::mask_bytes(mask);
    const uint8_t* keep = random::mask_bytes(ctx->Tensor4ArgNameAndIndex("dropout_mask", 0));
    const float* out = softmax_y->dptr<float>();
    const float* dy = input(ctx, "dy");
    float* dx = output(ctx, "dx");
    const float scale = ctx->Attr<float>("scale_value");
    const float dropout_scale = ctx->Attr<float>("dropout_scale_value");
    const auto& shape = softmax_y->shape_view();
    const int64_t n = shape.At(shape.NumAxes() - 1);
    const fused::BroadcastRows mask_rows(shape, mask->shape_view());
    fused::for_each_row(shape.elem_cnt() / n, n, [&](int64_t row) {
      const int64_t i = row * n;
      random::keep_and_scale(dy + i, keep + i, dropout_scale, dx + i, n);
      fused::masked_softmax_grad(out + i, dx + i, mask_values + mask_rows.offset(row), scale,
                                 dx + i, n);
    });
  }
};

REGISTER_KERNEL("fused_scale_mask_softmax_dropout", make<FusedScaleMaskSoftmaxDropoutKernel>,
                is_float32_on_cpu("x"));

// OneFlow lets the mask of this one be of an integer type as well.
REGISTER_KERNEL("fused_bias_add_scale_mask_softmax_dropout",
                make<FusedScaleMaskSoftmaxDropoutKernel>,
                is_float32_on_cpu("x") && user_op::HobDataType("mask", 0) == ::oneflow::DataType::kBool);
REGISTER_KERNEL("fused_scale_mask_softmax_dropout_grad",
                make<FusedScaleMaskSoftmaxDropoutGradKernel>, is_float32_on_cpu("dx"));

}  // namespace

}  // namespace oneflow_accel
