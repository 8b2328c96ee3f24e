#include "optimizer/update.h"

namespace oneflow_accel {

namespace user_op = ::oneflow::user_op;

float input_or(user_op::KernelComputeContext* ctx, const char* name, float value) {
  return ctx->has_input(name, 0) ? *input(ctx, name) : value;
}

Update read_update(user_op::KernelComputeContext* ctx) {
  Update update{};
  update.terms.scale =
      static_cast<float>(ctx->Attr<double>("scale")) * input_or(ctx, "scale_by_tensor", 1.0F);
  update.terms.l1 = ctx->Attr<float>("l1");
  update.terms.l2 = ctx->Attr<float>("l2");
  update.learning_rate = input_or(ctx, "learning_rate", ctx->Attr<float>("learning_rate_val"))
                         * ctx->Attr<float>("learning_rate_scale");
  update.weight_decay = ctx->Attr<float>("weight_decay");
  update.skip = ctx->has_input("skip_if", 0)
                && *input<int64_t>(ctx, "skip_if") != 0;
  update.count = ctx->Tensor4ArgNameAndIndex("model", 0)->shape_view().elem_cnt();
  return update;
}

}  // namespace oneflow_accel
