// oneflow_accel_packed_attention and its gradient: query, key and value are the parts of one
// projection, [batch, time, 3, heads, dim], read where they lie; the output is
// [batch, time, heads, dim]. float32 and bfloat16.
#include "attention/operators.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;
using ::oneflow::Error;
using ::oneflow::Maybe;
using ::oneflow::Shape;

Maybe<void> infer(user_op::InferContext* ctx) {
  const Shape& qkv = ctx->InputShape("qkv", 0);
  if (qkv.NumAxes() != 5 || qkv.At(2) != 3) {
    return Error::RuntimeError()
           << "packed attention needs a projection of (batch, time, 3, heads, dim), not "
           << qkv.ToString();
  }
  JUST(check_dropout(ctx));
  JUST(check_segments(ctx, qkv.At(0), qkv.At(1), qkv.At(1)));
  describe_output(ctx, "out", Shape({qkv.At(0), qkv.At(1), qkv.At(3), qkv.At(4)}));
  describe_output(ctx, "lse", Shape({qkv.At(0), qkv.At(3), qkv.At(1)}));
  return Maybe<void>::Ok();
}

Maybe<void> infer_types(user_op::InferContext* ctx) {
  JUST(check_seed_type(ctx));
  ctx->SetOutputDType("out", 0, ctx->InputDType("qkv", 0));
  ctx->SetOutputDType("lse", 0, ::oneflow::DataType::kFloat);
  return Maybe<void>::Ok();
}

Maybe<void> infer_grad(user_op::InferContext* ctx) {
  JUST(check_dropout(ctx));
  describe_output(ctx, "qkv_grad", ctx->InputShape("qkv", 0));
  return Maybe<void>::Ok();
}

Maybe<void> infer_grad_types(user_op::InferContext* ctx) {
  JUST(check_seed_type(ctx));
  ctx->SetOutputDType("qkv_grad", 0, ctx->InputDType("qkv", 0));
  return Maybe<void>::Ok();
}

// Batch entries and heads do not know of each other.
Maybe<void> split(user_op::SbpContext* ctx) {
  split_all_but(ctx, 0, [](const std::string& name) { return name == "seed"; });
  auto heads = ctx->NewBuilder();
  for (const auto* arguments : {&ctx->inputs(), &ctx->outputs()}) {
    for (const auto& [name, index] : *arguments) {
      const user_op::OpArg argument{std::string(name), index};
      if (name == "seed" || name == "segments") {
        heads.Broadcast(argument);
      } else {
        const bool is_projection = name == "qkv" || name == "qkv_grad";
        heads.Split(argument, is_projection ? 3 : name == "lse" ? 1 : 2);
      }
    }
  }
  heads.Build();
  return Maybe<void>::Ok();
}

REGISTER_USER_OP("oneflow_accel_packed_attention")
    .Input("qkv")
    .OptionalInput("seed")
    .OptionalInput("segments")
    .Output("out")
    .Output("lse")
    .Attr<bool>("causal", false)
    .Attr<double>("scale", 1.0)
    .Attr<double>("dropout", 0.0)
    .SetTensorDescInferFn(infer)
    .SetDataTypeInferFn(infer_types)
    .SetGetSbpFn(split);

REGISTER_USER_OP("oneflow_accel_packed_attention_grad")
    .Input("out_grad")
    .Input("qkv")
    .Input("out")
    .Input("lse")
    .OptionalInput("seed")
    .OptionalInput("segments")
    .Output("qkv_grad")
    .Attr<bool>("causal", false)
    .Attr<double>("scale", 1.0)
    .Attr<double>("dropout", 0.0)
    .SetTensorDescInferFn(infer_grad)
    .SetDataTypeInferFn(infer_grad_types)
    .SetGetSbpFn(split);

AttentionShape shape_of(user_op::KernelComputeContext* ctx, const ::oneflow::ShapeView& qkv) {
  return attention_shape(ctx, qkv.At(0), qkv.At(3), qkv.At(3), qkv.At(1), qkv.At(1), qkv.At(4));
}

// One of the parts (0: query, 1: key, 2: value) of a projection, or its gradient.
template <typename T>
Heads<T> part_of(T* qkv, int64_t part, const AttentionShape& shape) {
  const int64_t width = shape.heads * shape.dim;
  return {qkv + part * width, 3 * width * shape.queries, shape.dim, 3 * width};
}

template <typename T>
Heads<T> out_of(T* out, const AttentionShape& shape) {
  const int64_t width = shape.heads * shape.dim;
  return {out, width * shape.queries, shape.dim, width};
}

template <typename T>
class PackedAttentionKernel final : public Kernel {
 public:
  std::shared_ptr<user_op::OpKernelCache> InitOpKernelCache(
      user_op::KernelCacheContext* ctx) const override {
    return first_head(ctx, "qkv", 0, 3);
  }

 private:
  void Compute(user_op::KernelComputeContext* ctx, user_op::OpKernelState*,
               const user_op::OpKernelCache* cache) const override {
    const auto* projection = ctx->Tensor4ArgNameAndIndex("qkv", 0);
    const AttentionShape shape = shape_of(ctx, projection->shape_view());
    const auto dropout = weight_dropout(ctx, cache);
    const T* qkv = static_cast<const T*>(projection->raw_dptr());
    T* out = output<T>(ctx, "out");
    run_or_throw([&] { return describe(shape); }, [&] {
      attention(shape, part_of(qkv, 0, shape), part_of(qkv, 1, shape), part_of(qkv, 2, shape),
                dropout ? &*dropout : nullptr, out_of(out, shape), output(ctx, "lse"));
    });
  }
};

template <typename T>
class PackedAttentionGradKernel final : public Kernel {
 public:
  std::shared_ptr<user_op::OpKernelCache> InitOpKernelCache(
      user_op::KernelCacheContext* ctx) const override {
    return first_head(ctx, "qkv", 0, 3);
  }

 private:
  void Compute(user_op::KernelComputeContext* ctx, user_op::OpKernelState*,
               const user_op::OpKernelCache* cache) const override {
    const auto* projection = ctx->Tensor4ArgNameAndIndex("qkv", 0);
    const AttentionShape shape = shape_of(ctx, projection->shape_view());
    const auto dropout = weight_dropout(ctx, cache);
    const T* qkv = input<T>(ctx, "qkv");
    const T* out = input<T>(ctx, "out");
    const T* out_grad = input<T>(ctx, "out_grad");
    T* qkv_grad = output<T>(ctx, "qkv_grad");
    run_or_throw([&] { return describe(shape); }, [&] {
      attention_grad<T>(shape,
                        {part_of(qkv, 0, shape), part_of(qkv, 1, shape), part_of(qkv, 2, shape),
                         out_of(out, shape), out_of(out_grad, shape), input(ctx, "lse")},
                        dropout ? &*dropout : nullptr,
                        {part_of(qkv_grad, 0, shape), part_of(qkv_grad, 1, shape),
                         part_of(qkv_grad, 2, shape)});
    });
  }
};

REGISTER_KERNEL("oneflow_accel_packed_attention", make<PackedAttentionKernel<float>>,
                is_float32_on_cpu("out"));
REGISTER_KERNEL("oneflow_accel_packed_attention", make<PackedAttentionKernel<Bfloat16>>,
                is_bfloat16_on_cpu("out"));
REGISTER_KERNEL("oneflow_accel_packed_attention_grad", make<PackedAttentionGradKernel<float>>,
                is_float32_on_cpu("qkv_grad"));
REGISTER_KERNEL("oneflow_accel_packed_attention_grad", make<PackedAttentionGradKernel<Bfloat16>>,
                is_bfloat16_on_cpu("qkv_grad"));

}  // namespace

}  // namespace oneflow_accel
