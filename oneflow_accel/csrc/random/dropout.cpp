// dropout and dropout_grad, float32.
#include "common/arguments.h"
#include "common/threads.h"
#include "random/generator_state.h"
#include "random/keep.h"
#include "random/mask_bytes.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;
using State = ::oneflow::FusedDropoutKernelState;

class DropoutKernel final : public Kernel {
 public:
  // For an nn.Graph. In eager mode OneFlow hands over the generator that the call names.
  std::shared_ptr<user_op::OpKernelState> CreateOpKernelState(
      user_op::KernelInitContext*) const override {
    return std::make_shared<State>(
        CHECK_JUST(::oneflow::one::MakeGenerator(::oneflow::DeviceType::kCPU)));
  }

 private:
  void Compute(user_op::KernelComputeContext* ctx, user_op::OpKernelState* state,
               const user_op::OpKernelCache*) const override {
    const auto* in = ctx->Tensor4ArgNameAndIndex("in", 0);
    const float rate = ctx->Attr<float>("rate");
    const float scale = rate < 1.0F ? 1.0F / (1.0F - rate) : 0.0F;
    random::draw_dropout(random::engine_of<State>(state), random::at_least(rate), scale,
                         in->dptr<float>(), input_or_null(ctx, "_add_to_output"),
                         random::mut_mask_bytes(ctx->Tensor4ArgNameAndIndex("mask", 0)),
                         output(ctx, "out"), in->shape_view().elem_cnt());
  }
};

class DropoutGradKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const auto* dy = ctx->Tensor4ArgNameAndIndex("dy", 0);
    const float* grad = dy->dptr<float>();
    const uint8_t* mask = random::mask_bytes(ctx->Tensor4ArgNameAndIndex("mask", 0));
    const float scale = ctx->Attr<float>("scale");
    float* dx = output(ctx, "dx");
    parallel_for(dy->shape_view().elem_cnt(), kGrainSize, [=](int64_t begin, int64_t end) {
      random::keep_and_scale(grad + begin, mask + begin, scale, dx + begin, end - begin);
    });
  }
};

REGISTER_KERNEL("dropout", make<DropoutKernel>, is_float32_on_cpu("out"), in_place("out", "in"));
REGISTER_KERNEL("dropout_grad", make<DropoutGradKernel>, is_float32_on_cpu("dx"),
                in_place("dx", "dy"));

}  // namespace

}  // namespace oneflow_accel
