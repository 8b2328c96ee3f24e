// oneflow_accel_performer and its gradient: key, query and value are the parts of one projection,
// [batch, time, 3 x dim], in this order, and the matrix w of random features is constant. The value
// is an output too, because models add it to what they make of the attention. float32.
#include "attention/performer.h"
#include "common/arguments.h"
#include "common/guard.h"
#include "common/infer.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;
using ::oneflow::Error;
using ::oneflow::Maybe;
using ::oneflow::Shape;

Maybe<void> infer(user_op::InferContext* ctx) {
  const Shape& kqv = ctx->InputShape("kqv", 0);
  const Shape& w = ctx->InputShape("w", 0);
  if (kqv.NumAxes() != 3 || w.NumAxes() != 2 || kqv.At(2) != 3 * w.At(1) || w.elem_cnt() == 0) {
    return Error::RuntimeError() << "a performer needs a projection of (batch, time, 3 x dim) and "
                                    "random features of (features, dim), not "
                                 << kqv.ToString() << " and " << w.ToString();
  }
  for (const char* name : {"out", "value"}) {
    describe_output(ctx, name, Shape({kqv.At(0), kqv.At(1), w.At(1)}));
  }
  describe_output(ctx, "summary", Shape({kqv.At(0), w.At(0), w.At(1) + 1}));
  return Maybe<void>::Ok();
}

Maybe<void> infer_grad(user_op::InferContext* ctx) {
  describe_output(ctx, "kqv_grad", ctx->InputShape("kqv", 0));
  return Maybe<void>::Ok();
}

Maybe<void> infer_types(user_op::InferContext* ctx) {
  return infer_one_dtype(ctx, "a performer");
}

// Batch entries do not know of each other.
Maybe<void> split(user_op::SbpContext* ctx) {
  split_all_but(ctx, 0, [](const std::string& name) { return name == "w"; });
  return Maybe<void>::Ok();
}

REGISTER_USER_OP("oneflow_accel_performer")
    .Input("kqv")
    .Input("w")
    .Output("out")
    .Output("value")
    .Output("summary")
    .Attr<double>("epsilon")
    .SetTensorDescInferFn(infer)
    .SetDataTypeInferFn(infer_types)
    .SetGetSbpFn(split);

REGISTER_USER_OP("oneflow_accel_performer_grad")
    .Input("out_grad")
    .Input("value_grad")
    .Input("kqv")
    .Input("w")
    .Input("out")
    .Input("summary")
    .Output("kqv_grad")
    .Attr<double>("epsilon")
    .SetTensorDescInferFn(infer_grad)
    .SetDataTypeInferFn(infer_types)
    .SetGetSbpFn(split);

PerformerShape shape_of(user_op::KernelComputeContext* ctx) {
  const auto& kqv = ctx->Tensor4ArgNameAndIndex("kqv", 0)->shape_view();
  const auto& w = ctx->Tensor4ArgNameAndIndex("w", 0)->shape_view();
  return {kqv.At(0), kqv.At(1), w.At(1), w.At(0),
          static_cast<float>(ctx->Attr<double>("epsilon"))};
}

class PerformerKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const PerformerShape shape = shape_of(ctx);
    run_or_throw([&] { return shape.describe(); }, [&] {
      performer(shape, input(ctx, "kqv"), input(ctx, "w"), output(ctx, "out"),
                output(ctx, "value"), output(ctx, "summary"));
    });
  }
};

class PerformerGradKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const PerformerShape shape = shape_of(ctx);
    run_or_throw([&] { return "gradient of a " + shape.describe(); }, [&] {
      performer_grad(shape,
                     {input(ctx, "out_grad"), input(ctx, "value_grad"), input(ctx, "kqv"),
                      input(ctx, "w"), input(ctx, "out"), input(ctx, "summary")},
                     output(ctx, "kqv_grad"));
    });
  }
};

REGISTER_KERNEL("oneflow_accel_performer", make<PerformerKernel>, is_float32_on_cpu("out"));
REGISTER_KERNEL("oneflow_accel_performer_grad", make<PerformerGradKernel>,
                is_float32_on_cpu("kqv_grad"));

}  // namespace

}  // namespace oneflow_accel
