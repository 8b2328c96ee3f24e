// oneflow_accel_cross_entropy and its gradient, float32: losses of rows of logits against class
// indices. Keeps two floats a row for the gradient, which is one pass over the logits.
#include "common/arguments.h"
#include "common/infer.h"
#include "loss/row_losses.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;
using ::oneflow::Error;
using ::oneflow::Maybe;
using ::oneflow::Shape;

Maybe<void> check(user_op::InferContext* ctx) {
  const Shape& logits = ctx->InputShape("logits", 0);
  if (logits.NumAxes() != 2 || logits.At(1) < 1
      || ctx->InputShape("label", 0) != Shape({logits.At(0)})) {
    return Error::RuntimeError() << "a cross entropy needs logits of (rows, classes) and labels of "
                                    "(rows), not "
                                 << logits.ToString() << " and "
                                 << ctx->InputShape("label", 0).ToString();
  }
  return Maybe<void>::Ok();
}

Maybe<void> infer(user_op::InferContext* ctx) {
  JUST(check(ctx));
  const int64_t rows = ctx->InputShape("logits", 0).At(0);
  describe_output(ctx, "losses", Shape({rows}));
  describe_output(ctx, "lse", Shape({rows, kLogSumExpSize}));
  return Maybe<void>::Ok();
}

Maybe<void> infer_grad(user_op::InferContext* ctx) {
  JUST(check(ctx));
  describe_output(ctx, "logits_grad", ctx->InputShape("logits", 0));
  return Maybe<void>::Ok();
}

Maybe<void> infer_types(user_op::InferContext* ctx) {
  for (const auto& [name, index] : ctx->outputs()) {
    ctx->SetOutputDType(name, index, ctx->InputDType("logits", 0));
  }
  return Maybe<void>::Ok();
}

// Rows do not know of each other. Classes are not split: each row's sum would have to be exchanged,
// and OneFlow gathers them instead.
Maybe<void> split_rows(user_op::SbpContext* ctx) {
  split_all_but(ctx, 0, [](const std::string&) { return false; });
  return Maybe<void>::Ok();
}

REGISTER_USER_OP("oneflow_accel_cross_entropy")
    .Input("logits")
    .Input("label")
    .Output("losses")
    .Output("lse")
    .Attr<int64_t>("ignore_index")
    .SetTensorDescInferFn(infer)
    .SetDataTypeInferFn(infer_types)
    .SetGetSbpFn(split_rows);

REGISTER_USER_OP("oneflow_accel_cross_entropy_grad")
    .Input("losses_grad")
    .Input("logits")
    .Input("label")
    .Input("lse")
    .Output("logits_grad")
    .Attr<int64_t>("ignore_index")
    .SetTensorDescInferFn(infer_grad)
    .SetDataTypeInferFn(infer_types)
    .SetGetSbpFn(split_rows);

LogitRows all_rows(user_op::KernelComputeContext* ctx) {
  const auto* logits = ctx->Tensor4ArgNameAndIndex("logits", 0);
  const auto& shape = logits->shape_view();
  // The functions that take them do not write to them here.
  return {0, shape.At(0), shape.At(1), const_cast<float*>(logits->dptr<float>())};
}

class CrossEntropyKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const LogitRows rows = all_rows(ctx);
    row_losses(rows, Targets(ctx, rows.classes), output(ctx, "losses"),
               reinterpret_cast<LogSumExp*>(output(ctx, "lse")));
  }
};

class CrossEntropyGradKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const LogitRows rows = all_rows(ctx);
    row_loss_grads(rows, Targets(ctx, rows.classes),
                   reinterpret_cast<const LogSumExp*>(input(ctx, "lse")),
                   input(ctx, "losses_grad"), output(ctx, "logits_grad"));
  }
};

REGISTER_KERNEL("oneflow_accel_cross_entropy", make<CrossEntropyKernel>,
                is_float32_on_cpu("losses") && is_label("label"));
REGISTER_KERNEL("oneflow_accel_cross_entropy_grad", make<CrossEntropyGradKernel>,
                is_float32_on_cpu("logits_grad") && is_label("label"));

}  // namespace

}  // namespace oneflow_accel
