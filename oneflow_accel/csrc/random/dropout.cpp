// dropout and dropout_grad, float32.
#include "common/oneflow.h"
#include "common/threads.h"
#include "random/generator_state.h"
#include "random/keep.h"
#include "random/mask_bytes.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;
using State = ::oneflow::FusedDropoutKernelState;

class DropoutKernel final : public user_op::OpKernel {
 public:
  bool AlwaysComputeWhenAllOutputsEmpty() const override { return false; }

  // For an nn.Graph. In eager mode OneFlow hands over the generator that the call names.
  std::shared_ptr<user_op::OpKernelState> CreateOpKernelState(
      user_op::KernelInitContext*) const override {
    return std::make_shared<State>(
        CHECK_JUST(::oneflow::one::MakeGenerator(::oneflow::DeviceType::kCPU)));
  }

 private:
  using user_op::OpKernel::Compute;
  void Compute(user_op::KernelComputeContext* ctx, user_op::OpKernelState* state,
               const user_op::OpKernelCache*) const override {
    const auto* in = ctx->Tensor4ArgNameAndIndex("in", 0);
    const float rate = ctx->Attr<float>("rate");
    const float scale = rate < 1.0F ? 1.0F / (1.0F - rate) : 0.0F;
    const float* addend =
        ctx->has_input("_add_to_output", 0)
            ? ctx->Tensor4ArgNameAndIndex("_add_to_output", 0)->dptr<float>()
            : nullptr;
    random::draw_dropout(random::engine_of<State>(state), random::at_least(rate), scale,
                         in->dptr<float>(), addend,
                         random::mut_mask_bytes(ctx->Tensor4ArgNameAndIndex("mask", 0)),
                         ctx->Tensor4ArgNameAndIndex("out", 0)->mut_dptr<float>(),
                         in->shape_view().elem_cnt());
  }
};

class DropoutGradKernel final : public user_op::OpKernel {
 public:
  bool AlwaysComputeWhenAllOutputsEmpty() const override { return false; }

 private:
  using user_op::OpKernel::Compute;
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const auto* dy = ctx->Tensor4ArgNameAndIndex("dy", 0);
    const float* grad = dy->dptr<float>();
    const uint8_t* mask = random::mask_bytes(ctx->Tensor4ArgNameAndIndex("mask", 0));
    const float scale = ctx->Attr<float>("scale");
    float* dx = ctx->Tensor4ArgNameAndIndex("dx", 0)->mut_dptr<float>();
    parallel_for(dy->shape_view().elem_cnt(), kGrainSize, [=](int64_t begin, int64_t end) {
      random::keep_and_scale(grad + begin, mask + begin, scale, dx + begin, end - begin);
    });
  }
};

REGISTER_USER_KERNEL(listed("dropout"))
    .SetCreateFn<DropoutKernel>()
    .SetIsMatchedHob(is_float32_on_cpu("out"))
    .SetInplaceProposalFn([](const user_op::InferContext&,
                             const user_op::AddInplaceArgPair& add) -> ::oneflow::Maybe<void> {
      return add("out", 0, "in", 0, true);
    })
    .SetPriority(kKernelPriority);

REGISTER_USER_KERNEL(listed("dropout_grad"))
    .SetCreateFn<DropoutGradKernel>()
    .SetIsMatchedHob(is_float32_on_cpu("dx"))
    .SetInplaceProposalFn([](const user_op::InferContext&,
                             const user_op::AddInplaceArgPair& add) -> ::oneflow::Maybe<void> {
      return add("dx", 0, "dy", 0, true);
    })
    .SetPriority(kKernelPriority);

}  // namespace

}  // namespace oneflow_accel
