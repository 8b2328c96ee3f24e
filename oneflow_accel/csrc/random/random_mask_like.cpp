// random_mask_like: the mask of OneFlow's fused dropout operators. It depends on the shape of its
// input only, so it serves every data type.
#include "common/oneflow.h"
#include "random/generator_state.h"
#include "random/keep.h"
#include "random/mask_bytes.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;
using MaskState = ::oneflow::RandomMaskLikeKernelState;

class RandomMaskLikeKernel final : public Kernel {
 public:
  // For an nn.Graph. In eager mode OneFlow hands over the generator that the call names.
  std::shared_ptr<user_op::OpKernelState> CreateOpKernelState(
      user_op::KernelInitContext* ctx) const override {
    const auto generator =
        CHECK_JUST(::oneflow::one::MakeGenerator(::oneflow::DeviceType::kCPU));
    generator->set_current_seed(ctx->Attr<int64_t>("seed"));
    return std::make_shared<MaskState>(generator);
  }

 private:
  void Compute(user_op::KernelComputeContext* ctx, user_op::OpKernelState* state,
               const user_op::OpKernelCache*) const override {
    auto* out = ctx->Tensor4ArgNameAndIndex("out", 0);
    random::draw_mask(random::engine_of<MaskState>(state), random::above(ctx->Attr<float>("rate")),
                      random::mut_mask_bytes(out), out->shape_view().elem_cnt());
  }
};

REGISTER_KERNEL("random_mask_like", make<RandomMaskLikeKernel>,
                is_on_cpu("out", ::oneflow::DataType::kBool));

}  // namespace

}  // namespace oneflow_accel
