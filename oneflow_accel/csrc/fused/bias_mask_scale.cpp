// fused_bias_add_mask_scale, float32: (a + b) * scale where the mask is true, else 0, with b along
// any axis of a; plus _add_to_output, which nn.Graph fuses in. The gradient is dropout_grad's.
#include "common/arguments.h"
#include "fused/bias.h"
#include "random/keep.h"
#include "random/mask_bytes.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

class FusedBiasAddMaskScaleKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const auto* a = ctx->Tensor4ArgNameAndIndex("a", 0);
    const float* b = input(ctx, "b");
    const uint8_t* mask = random::mask_bytes(ctx->Tensor4ArgNameAndIndex("mask", 0));
    const float* addend = input_or_null(ctx, "_add_to_output");
    float* out = output(ctx, "out");
    const float scale = ctx->Attr<float>("scale");
    const fused::BiasAxis axis(a->shape_view(), ctx->Attr<int32_t>("axis"));
    fused::add_bias_then(
        axis, a->dptr<float>(), b, out, a->shape_view().elem_cnt(), [=](int64_t i, int64_t count) {
          if (addend == nullptr) {
            random::keep_and_scale(out + i, mask + i, scale, out + i, count);
          } else {
            random::keep_scale_and_add(out + i, mask + i, scale, addend + i, out + i, count);
          }
        });
  }
};

REGISTER_KERNEL("fused_bias_add_mask_scale", make<FusedBiasAddMaskScaleKernel>,
                is_float32_on_cpu("out"));

}  // namespace

}  // namespace oneflow_accel
