// oneflow_accel_cross_entropy and its gradient: losses, float32, of rows of logits, float32 or
// bfloat16, against class indices. Keeps two floats a row for the gradient, which is one pass over
// the logits and of their type.
#include "common/float_kernels.h"
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
  describe_losses(ctx, ctx->InputShape("logits", 0).At(0));
  return Maybe<void>::Ok();
}

Maybe<void> infer_grad(user_op::InferContext* ctx) {
  JUST(check(ctx));
  describe_output(ctx, "logits_grad", ctx->InputShape("logits", 0));
  return Maybe<void>::Ok();
}

Maybe<void> infer_types(user_op::InferContext* ctx) {
  ctx->SetOutputDType("losses", 0, ::oneflow::DataType::kFloat);
  ctx->SetOutputDType("lse", 0, ::oneflow::DataType::kFloat);
  return Maybe<void>::Ok();
}

Maybe<void> infer_grad_types(user_op::InferContext* ctx) {
  ctx->SetOutputDType("logits_grad", 0, ctx->InputDType("logits", 0));
  return Maybe<void>::Ok();
}

// Rows do not know of each other. Classes are not split: each row's sum would have to be exchanged,
// and OneFlow gathers them instead.
Maybe<void> split_rows(user_op::SbpContext* ctx) {
  split_all_but(ctx, 0, [](const std::string&) { return false; });
  return Maybe<void>::Ok();
}

REGISTER_USER_OP("oneflow_accel_cross_entropy")
    .Input("logits").Input("label").Output("losses").Output("lse").Attr<int64_t>("ignore_index")
    .SetTensorDescInferFn(infer).SetDataTypeInferFn(infer_types).SetGetSbpFn(split_rows);

REGISTER_USER_OP("oneflow_accel_cross_entropy_grad")
    .Input("losses_grad").Input("logits").Input("label").Input("lse").Output("logits_grad")
    .Attr<int64_t>("ignore_index")
    .SetTensorDescInferFn(infer_grad).SetDataTypeInferFn(infer_grad_types).SetGetSbpFn(split_rows);

template <typename T>
class CrossEntropyKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const LogitRows<T> rows{0, Rows(ctx, "logits"), input<T>(ctx, "logits")};
    const Labels labels = targets_of(ctx, rows.rows.n);
    labels.check();
    rows.losses(labels, output(ctx, "losses"), reinterpret_cast<LogSumExp*>(output(ctx, "lse")));
  }
};

template <typename T>
class CrossEntropyGradKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const LogitRows<T> rows{0, Rows(ctx, "logits"), input<T>(ctx, "logits")};
    const Labels labels = targets_of(ctx, rows.rows.n);
    labels.check();
    rows.grads(labels, reinterpret_cast<const LogSumExp*>(input(ctx, "lse")),
               input(ctx, "losses_grad"), output<T>(ctx, "logits_grad"));
  }
};

REGISTER_FLOAT_KERNELS(CrossEntropyKernel, "oneflow_accel_cross_entropy", "logits",
                       is_label("label"));
REGISTER_FLOAT_KERNELS(CrossEntropyGradKernel, "oneflow_accel_cross_entropy_grad", "logits_grad",
                       is_label("label"));

}  // namespace

}  // namespace oneflow_accel
