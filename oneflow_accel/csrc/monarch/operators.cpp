// oneflow_accel_monarch, which computes y = x M^T (+ bias), oneflow_accel_monarch_keeping, which
// also gives what the gradient needs, and the gradient. float32.
#include "common/arguments.h"
#include "common/guard.h"
#include "common/infer.h"
#include "monarch/monarch.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;
using ::oneflow::Error;
using ::oneflow::Maybe;
using ::oneflow::Shape;

template <typename View>
MonarchShape shape_of(const View& x, const View& a, const View& b, int64_t out_features) {
  int64_t rows = 1;
  for (int64_t axis = 0; axis + 1 < x.NumAxes(); ++axis) { rows *= x.At(axis); }
  return {rows,    x.At(x.NumAxes() - 1), out_features, a.At(0), a.At(1),
          a.At(2), b.At(0),               b.At(1),      b.At(2)};
}

// The shape of x with another length of its rows.
Shape rows_of(const Shape& x, int64_t length) {
  Shape shape = x;
  shape.Set(x.NumAxes() - 1, length);
  return shape;
}

Maybe<void> check(const Shape& x, const Shape& a, const Shape& b, int64_t out_features) {
  const bool factors = a.NumAxes() == 3 && b.NumAxes() == 3 && a.elem_cnt() > 0 && b.elem_cnt() > 0
                       && a.At(0) * a.At(1) == b.At(0) * b.At(2);
  if (!factors || x.NumAxes() < 1 || x.At(x.NumAxes() - 1) < 1
      || x.At(x.NumAxes() - 1) > a.At(0) * a.At(2) || out_features < 1
      || out_features > b.At(0) * b.At(1)) {
    return Error::RuntimeError()
           << "a Monarch product needs factors of (k, q, p) and (l, s, r) with k q = l r, rows of "
              "at most k p and at most l s results, not "
           << a.ToString() << ", " << b.ToString() << ", rows of " << x.ToString() << " and "
           << out_features << " results";
  }
  return Maybe<void>::Ok();
}

Maybe<void> infer(user_op::InferContext* ctx) {
  const Shape& x = ctx->InputShape("x", 0);
  const int64_t out_features = ctx->Attr<int64_t>("out_features");
  JUST(check(x, ctx->InputShape("blkdiag1", 0), ctx->InputShape("blkdiag2", 0), out_features));
  if (ctx->has_input("bias", 0) && ctx->InputShape("bias", 0) != Shape({out_features})) {
    return Error::RuntimeError() << "a Monarch product to " << out_features
                                 << " columns needs as long a bias, not "
                                 << ctx->InputShape("bias", 0).ToString();
  }
  describe_output(ctx, "y", rows_of(x, out_features));
  return Maybe<void>::Ok();
}

Maybe<void> infer_keeping(user_op::InferContext* ctx) {
  JUST(infer(ctx));
  const Shape& a = ctx->InputShape("blkdiag1", 0);
  describe_output(ctx, "middle", rows_of(ctx->InputShape("x", 0), a.At(0) * a.At(1)));
  return Maybe<void>::Ok();
}

Maybe<void> infer_grad(user_op::InferContext* ctx) {
  const Shape& y_grad = ctx->InputShape("y_grad", 0);
  const int64_t out_features = y_grad.At(y_grad.NumAxes() - 1);
  const Shape& x = ctx->InputShape("x", 0);
  const Shape& a = ctx->InputShape("blkdiag1", 0);
  const Shape& b = ctx->InputShape("blkdiag2", 0);
  JUST(check(x, a, b, out_features));
  if (y_grad != rows_of(x, out_features)
      || ctx->InputShape("middle", 0) != rows_of(x, a.At(0) * a.At(1))) {
    return Error::RuntimeError() << "the gradient of a Monarch product of " << x.ToString()
                                 << " needs as many rows of the others, not " << y_grad.ToString()
                                 << " and " << ctx->InputShape("middle", 0).ToString();
  }
  describe_output(ctx, "x_grad", x);
  describe_output(ctx, "blkdiag1_grad", a);
  describe_output(ctx, "blkdiag2_grad", b);
  describe_output(ctx, "bias_grad", Shape({out_features}));
  return Maybe<void>::Ok();
}

Maybe<void> infer_types(user_op::InferContext* ctx) {
  return infer_one_dtype(ctx, "a Monarch product");
}

// Rows do not know of each other; factors and bias are the same for all of them, and their
// gradients are sums over the rows.
Maybe<void> split_rows(user_op::SbpContext* ctx) {
  const int64_t axes = ctx->LogicalTensorDesc4InputArgNameAndIndex("x", 0).shape().NumAxes();
  for (int64_t axis = 0; axis + 1 < axes; ++axis) {
    split_all_but(ctx, axis, [](const std::string& name) {
      return name.find("blkdiag") == 0 || name.find("bias") == 0;
    });
  }
  return Maybe<void>::Ok();
}

REGISTER_USER_OP("oneflow_accel_monarch")
    .Input("x")
    .Input("blkdiag1")
    .Input("blkdiag2")
    .OptionalInput("bias")
    .Output("y")
    .Attr<int64_t>("out_features")
    .SetTensorDescInferFn(infer)
    .SetDataTypeInferFn(infer_types)
    .SetGetSbpFn(split_rows);

REGISTER_USER_OP("oneflow_accel_monarch_keeping")
    .Input("x")
    .Input("blkdiag1")
    .Input("blkdiag2")
    .OptionalInput("bias")
    .Output("y")
    .Output("middle")
    .Attr<int64_t>("out_features")
    .SetTensorDescInferFn(infer_keeping)
    .SetDataTypeInferFn(infer_types)
    .SetGetSbpFn(split_rows);

REGISTER_USER_OP("oneflow_accel_monarch_grad")
    .Input("y_grad")
    .Input("x")
    .Input("blkdiag1")
    .Input("blkdiag2")
    .Input("middle")
    .Output("x_grad")
    .Output("blkdiag1_grad")
    .Output("blkdiag2_grad")
    .Output("bias_grad")
    .SetTensorDescInferFn(infer_grad)
    .SetDataTypeInferFn(infer_types)
    .SetGetSbpFn(split_rows);

MonarchShape shape_of(user_op::KernelComputeContext* ctx, int64_t out_features) {
  const auto view = [&](const char* name) {
    return ctx->Tensor4ArgNameAndIndex(name, 0)->shape_view();
  };
  return shape_of(view("x"), view("blkdiag1"), view("blkdiag2"), out_features);
}

class MonarchKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const MonarchShape shape = shape_of(ctx, ctx->Attr<int64_t>("out_features"));
    if (shape.rows == 0) { return; }
    run_or_throw([&] { return shape.describe(); }, [&] {
      monarch(shape, {input(ctx, "x"), input(ctx, "blkdiag1"), input(ctx, "blkdiag2")},
              input_or_null(ctx, "bias"), output_or_null(ctx, "middle"), output(ctx, "y"));
    });
  }
};

class MonarchGradKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const auto& y_grad = ctx->Tensor4ArgNameAndIndex("y_grad", 0)->shape_view();
    const MonarchShape shape = shape_of(ctx, y_grad.At(y_grad.NumAxes() - 1));
    run_or_throw([&] { return "gradient of " + shape.describe(); }, [&] {
      monarch_grad(shape, {input(ctx, "x"), input(ctx, "blkdiag1"), input(ctx, "blkdiag2")},
                   input(ctx, "middle"), input(ctx, "y_grad"),
                   {output(ctx, "x_grad"), output(ctx, "blkdiag1_grad"),
                    output(ctx, "blkdiag2_grad"), output(ctx, "bias_grad")});
    });
  }
};

REGISTER_KERNEL("oneflow_accel_monarch", make<MonarchKernel>, is_float32_on_cpu("y"));
REGISTER_KERNEL("oneflow_accel_monarch_keeping", make<MonarchKernel>, is_float32_on_cpu("y"));
REGISTER_KERNEL("oneflow_accel_monarch_grad", make<MonarchGradKernel>, is_float32_on_cpu("x_grad"));

}  // namespace

}  // namespace oneflow_accel
