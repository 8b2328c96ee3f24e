// oneflow_accel_attention and its gradient: query, key and value are tensors of their own,
// [batch, heads, time, dim], of which keys and values may have fewer heads. float32 and
// bfloat16.
#include "attention/operators.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;
using ::oneflow::Error;
using ::oneflow::Maybe;
using ::oneflow::Shape;

bool divides(int64_t part, int64_t whole) {
  return part == whole || (part > 0 && whole % part == 0);
}

Maybe<void> infer(user_op::InferContext* ctx) {
  const Shape& q = ctx->InputShape("query", 0);
  const Shape& k = ctx->InputShape("key", 0);
  const Shape& v = ctx->InputShape("value", 0);
  if (q.NumAxes() != 4 || k.NumAxes() != 4 || k != v || q.At(0) != k.At(0) || q.At(3) != k.At(3)
      || !divides(k.At(1), q.At(1))) {
    return Error::RuntimeError()
           << "attention needs a query of (batch, heads, queries, dim) and a key and a value of "
              "(batch, heads, keys, dim), whose heads divide the query's, not "
           << q.ToString() << ", " << k.ToString() << " and " << v.ToString();
  }
  if (k.At(2) < (ctx->Attr<bool>("causal") ? std::max<int64_t>(q.At(2), 1) : 1)) {
    return Error::RuntimeError() << "attention needs a key, and causal attention no fewer keys "
                                    "than queries; there are "
                                 << q.At(2) << " queries and " << k.At(2) << " keys";
  }
  JUST(check_dropout(ctx));
  JUST(check_segments(ctx, q.At(0), q.At(2), k.At(2)));
  describe_output(ctx, "out", q);
  describe_output(ctx, "lse", Shape({q.At(0), q.At(1), q.At(2)}));
  return Maybe<void>::Ok();
}

Maybe<void> infer_types(user_op::InferContext* ctx) {
  const auto type = ctx->InputDType("query", 0);
  if (ctx->InputDType("key", 0) != type || ctx->InputDType("value", 0) != type) {
    return Error::RuntimeError() << "attention needs query, key and value of one dtype";
  }
  JUST(check_seed_type(ctx));
  ctx->SetOutputDType("out", 0, type);
  ctx->SetOutputDType("lse", 0, ::oneflow::DataType::kFloat);
  return Maybe<void>::Ok();
}

Maybe<void> infer_grad(user_op::InferContext* ctx) {
  JUST(check_dropout(ctx));
  describe_output(ctx, "query_grad", ctx->InputShape("query", 0));
  describe_output(ctx, "key_grad", ctx->InputShape("key", 0));
  describe_output(ctx, "value_grad", ctx->InputShape("value", 0));
  return Maybe<void>::Ok();
}

Maybe<void> infer_grad_types(user_op::InferContext* ctx) {
  JUST(check_seed_type(ctx));
  ctx->SetOutputDType("query_grad", 0, ctx->InputDType("query", 0));
  ctx->SetOutputDType("key_grad", 0, ctx->InputDType("key", 0));
  ctx->SetOutputDType("value_grad", 0, ctx->InputDType("value", 0));
  return Maybe<void>::Ok();
}

// Batch entries do not know of each other, nor do heads of keys and values with the heads of
// queries that share them: where some do, each process must get as many, or they would come apart.
Maybe<void> split_batch_or_heads(user_op::SbpContext* ctx) {
  split_all_but(ctx, 0, [](const std::string& name) { return name == "seed"; });
  const int64_t heads = ctx->LogicalTensorDesc4InputArgNameAndIndex("query", 0).shape().At(1);
  const int64_t kv_heads = ctx->LogicalTensorDesc4InputArgNameAndIndex("key", 0).shape().At(1);
  if (kv_heads == heads || kv_heads % ctx->parallel_num() == 0) {
    split_all_but(
        ctx, 1, [](const std::string& name) { return name == "seed" || name == "segments"; });
  }
  return Maybe<void>::Ok();
}

REGISTER_USER_OP("oneflow_accel_attention")
    .Input("query")
    .Input("key")
    .Input("value")
    .OptionalInput("seed")
    .OptionalInput("segments")
    .Output("out")
    .Output("lse")
    .Attr<bool>("causal", false)
    .Attr<double>("scale", 1.0)
    .Attr<double>("dropout", 0.0)
    .SetTensorDescInferFn(infer)
    .SetDataTypeInferFn(infer_types)
    .SetGetSbpFn(split_batch_or_heads);

REGISTER_USER_OP("oneflow_accel_attention_grad")
    .Input("out_grad")
    .Input("query")
    .Input("key")
    .Input("value")
    .Input("out")
    .Input("lse")
    .OptionalInput("seed")
    .OptionalInput("segments")
    .Output("query_grad")
    .Output("key_grad")
    .Output("value_grad")
    .Attr<bool>("causal", false)
    .Attr<double>("scale", 1.0)
    .Attr<double>("dropout", 0.0)
    .SetTensorDescInferFn(infer_grad)
    .SetDataTypeInferFn(infer_grad_types)
    .SetGetSbpFn(split_batch_or_heads);

AttentionShape shape_of(user_op::KernelComputeContext* ctx) {
  const auto& q = ctx->Tensor4ArgNameAndIndex("query", 0)->shape_view();
  const auto& k = ctx->Tensor4ArgNameAndIndex("key", 0)->shape_view();
  return attention_shape(ctx, q.At(0), q.At(1), k.At(1), q.At(2), k.At(2), q.At(3));
}

template <typename T>
Heads<T> heads_of(T* data, const ::oneflow::ShapeView& shape) {
  return {data, shape.At(1) * shape.At(2) * shape.At(3), shape.At(2) * shape.At(3), shape.At(3)};
}

template <typename T = float>
Heads<const T> input_heads(user_op::KernelComputeContext* ctx, const std::string& name) {
  return heads_of(input<T>(ctx, name), ctx->Tensor4ArgNameAndIndex(name, 0)->shape_view());
}

template <typename T = float>
Heads<T> output_heads(user_op::KernelComputeContext* ctx, const std::string& name) {
  return heads_of(output<T>(ctx, name), ctx->Tensor4ArgNameAndIndex(name, 0)->shape_view());
}

template <typename T>
class AttentionKernel final : public Kernel {
 public:
  std::shared_ptr<user_op::OpKernelCache> InitOpKernelCache(
      user_op::KernelCacheContext* ctx) const override {
    return first_head(ctx, "query", 0, 1);
  }

 private:
  void Compute(user_op::KernelComputeContext* ctx, user_op::OpKernelState*,
               const user_op::OpKernelCache* cache) const override {
    const AttentionShape shape = shape_of(ctx);
    const auto dropout = weight_dropout(ctx, cache);
    run_or_throw([&] { return describe(shape); }, [&] {
      attention(shape, input_heads<T>(ctx, "query"), input_heads<T>(ctx, "key"),
                input_heads<T>(ctx, "value"), dropout ? &*dropout : nullptr,
                output_heads<T>(ctx, "out"), output(ctx, "lse"));
    });
  }
};

template <typename T>
class AttentionGradKernel final : public Kernel {
 public:
  std::shared_ptr<user_op::OpKernelCache> InitOpKernelCache(
      user_op::KernelCacheContext* ctx) const override {
    return first_head(ctx, "query", 0, 1);
  }

 private:
  void Compute(user_op::KernelComputeContext* ctx, user_op::OpKernelState*,
               const user_op::OpKernelCache* cache) const override {
    const AttentionShape shape = shape_of(ctx);
    const auto dropout = weight_dropout(ctx, cache);
    run_or_throw([&] { return describe(shape); }, [&] {
      attention_grad<T>(
          shape,
          {input_heads<T>(ctx, "query"), input_heads<T>(ctx, "key"), input_heads<T>(ctx, "value"),
           input_heads<T>(ctx, "out"), input_heads<T>(ctx, "out_grad"), input(ctx, "lse")},
          dropout ? &*dropout : nullptr,
          {output_heads<T>(ctx, "query_grad"), output_heads<T>(ctx, "key_grad"),
           output_heads<T>(ctx, "value_grad")});
    });
  }
};

REGISTER_KERNEL("oneflow_accel_attention", make<AttentionKernel<float>>, is_float32_on_cpu("out"));
REGISTER_KERNEL("oneflow_accel_attention", make<AttentionKernel<Bfloat16>>,
                is_bfloat16_on_cpu("out"));
REGISTER_KERNEL("oneflow_accel_attention_grad", make<AttentionGradKernel<float>>,
                is_float32_on_cpu("query_grad"));
REGISTER_KERNEL("oneflow_accel_attention_grad", make<AttentionGradKernel<Bfloat16>>,
                is_bfloat16_on_cpu("query_grad"));

}  // namespace

}  // namespace oneflow_accel
