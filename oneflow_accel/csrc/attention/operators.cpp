// The attention operators and their gradients, float32 and bfloat16.
//   oneflow_accel_attention: query, key and value are tensors of their own,
//     [batch, heads, time, dim], of which keys and values may have fewer heads.
//   oneflow_accel_packed_attention: they are the parts of one projection,
//     [batch, time, 3, heads, dim], read where they lie; the output is [batch, time, heads, dim].
#include "attention/operators.h"

#include <stdexcept>

#include "attention/attention.h"
#include "common/arguments.h"
#include "common/part.h"
#include "common/typed_kernels.h"

namespace oneflow_accel {

namespace user_op = ::oneflow::user_op;
using ::oneflow::Error;
using ::oneflow::Maybe;
using ::oneflow::Shape;

Maybe<void> check_dropout(user_op::InferContext* ctx) {
  const double rate = ctx->Attr<double>("dropout");
  const bool has_seed = ctx->has_input("seed", 0);
  if (!(rate >= 0.0 && rate < 1.0) || (rate > 0.0 && !has_seed)
      || (has_seed && ctx->InputShape("seed", 0).elem_cnt() != 1)) {
    return Error::RuntimeError()
           << "dropout is at a rate of at least 0 and below 1, by a seed of one element; the rate is "
           << rate;
  }
  return Maybe<void>::Ok();
}

Maybe<void> check_seed_type(user_op::InferContext* ctx) {
  if (ctx->has_input("seed", 0) && ctx->InputDType("seed", 0) != ::oneflow::DataType::kInt64) {
    return Error::RuntimeError() << "the seed of dropout must be int64";
  }
  if (ctx->has_input("segments", 0)
      && ctx->InputDType("segments", 0) != ::oneflow::DataType::kInt64) {
    return Error::RuntimeError() << "segments of packed sequences must be int64";
  }
  return Maybe<void>::Ok();
}

std::shared_ptr<FirstHead> first_head(user_op::KernelCacheContext* ctx, const std::string& name,
                                      int64_t batch_axis, int64_t head_axis) {
  if (ctx->parallel_ctx().parallel_num() == 1) { return nullptr; }
  auto first = std::make_shared<FirstHead>();
  first->batch = part_begin(ctx, name, batch_axis);
  first->head = part_begin(ctx, name, head_axis);
  return first;
}

std::optional<WeightDropout> weight_dropout(user_op::KernelComputeContext* ctx,
                                            const user_op::OpKernelCache* first_head) {
  const double rate = ctx->Attr<double>("dropout");
  if (rate == 0.0) { return std::nullopt; }
  const auto* first = dynamic_cast<const FirstHead*>(first_head);
  return WeightDropout(*input<int64_t>(ctx, "seed"), rate, first == nullptr ? 0 : first->batch,
                       first == nullptr ? 0 : first->head);
}

namespace {

// The input `segments`, if there is one: int64 (batch, time), with as many keys as queries.
Maybe<void> check_segments(user_op::InferContext* ctx, int64_t batch, int64_t queries,
                           int64_t keys) {
  if (!ctx->has_input("segments", 0)) { return Maybe<void>::Ok(); }
  const auto& shape = ctx->InputShape("segments", 0);
  if (shape != ::oneflow::Shape({batch, queries}) || queries != keys) {
    return Error::RuntimeError()
           << "segments of packed sequences must be (batch, time), with as many keys as queries, "
              "not "
           << shape.ToString() << " for " << queries << " queries and " << keys << " keys";
  }
  return Maybe<void>::Ok();
}

// The runs of equal numbers in segments[batch, time].
std::vector<Span> spans_of(const int64_t* segments, int64_t batch, int64_t time) {
  std::vector<Span> spans;
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t* row = segments + b * time;
    for (int64_t begin = 0, end = 0; begin < time; begin = end) {
      while (end < time && row[end] == row[begin]) { ++end; }
      if (end < time && row[end] < row[begin]) {
        throw std::invalid_argument(
            "segments of packed sequences must not fall along the time: row " + std::to_string(b)
            + " has " + std::to_string(row[end]) + " after " + std::to_string(row[begin]));
      }
      spans.push_back({b, begin, end - begin});
    }
  }
  return spans;
}

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

Maybe<void> infer_packed(user_op::InferContext* ctx) {
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
  const auto type = ctx->InputDType(ctx->has_input("qkv", 0) ? "qkv" : "query", 0);
  for (const auto& [name, index] : ctx->inputs()) {
    if (name != "seed" && name != "segments" && ctx->InputDType(name, index) != type) {
      return Error::RuntimeError() << "attention needs query, key and value of one dtype";
    }
  }
  ctx->SetOutputDType("out", 0, type);
  ctx->SetOutputDType("lse", 0, ::oneflow::DataType::kFloat);
  return Maybe<void>::Ok();
}

// The input that the output NAME_grad belongs to.
std::string differentiated(const std::string& output) {
  return output.substr(0, output.size() - std::string("_grad").size());
}

Maybe<void> infer_grad(user_op::InferContext* ctx) {
  JUST(check_dropout(ctx));
  for (const auto& [name, index] : ctx->outputs()) {
    describe_output(ctx, name, ctx->InputShape(differentiated(name), 0));
  }
  return Maybe<void>::Ok();
}

Maybe<void> infer_grad_types(user_op::InferContext* ctx) {
  JUST(check_seed_type(ctx));
  for (const auto& [name, index] : ctx->outputs()) {
    ctx->SetOutputDType(name, index, ctx->InputDType(differentiated(name), 0));
  }
  return Maybe<void>::Ok();
}

// Batch entries do not know of each other, nor do heads of keys and values with the heads of
// queries that share them: where some do, each process must get as many, or they would come apart.
Maybe<void> split(user_op::SbpContext* ctx) {
  split_all_but(ctx, 0, [](const std::string& name) { return name == "seed"; });
  const int64_t heads = ctx->LogicalTensorDesc4InputArgNameAndIndex("query", 0).shape().At(1);
  const int64_t kv_heads = ctx->LogicalTensorDesc4InputArgNameAndIndex("key", 0).shape().At(1);
  if (kv_heads == heads || kv_heads % ctx->parallel_num() == 0) {
    split_all_but(
        ctx, 1, [](const std::string& name) { return name == "seed" || name == "segments"; });
  }
  return Maybe<void>::Ok();
}

Maybe<void> split_packed(user_op::SbpContext* ctx) {
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

REGISTER_USER_OP("oneflow_accel_attention")
    .Input("query").Input("key").Input("value").OptionalInput("seed").OptionalInput("segments")
    .Output("out").Output("lse")
    .Attr<bool>("causal", false).Attr<double>("scale", 1.0).Attr<double>("dropout", 0.0)
    .SetTensorDescInferFn(infer).SetDataTypeInferFn(infer_types).SetGetSbpFn(split);

REGISTER_USER_OP("oneflow_accel_attention_grad")
    .Input("out_grad").Input("query").Input("key").Input("value").Input("out").Input("lse")
    .OptionalInput("seed").OptionalInput("segments")
    .Output("query_grad").Output("key_grad").Output("value_grad")
    .Attr<bool>("causal", false).Attr<double>("scale", 1.0).Attr<double>("dropout", 0.0)
    .SetTensorDescInferFn(infer_grad).SetDataTypeInferFn(infer_grad_types).SetGetSbpFn(split);

REGISTER_USER_OP("oneflow_accel_packed_attention")
    .Input("qkv").OptionalInput("seed").OptionalInput("segments").Output("out").Output("lse")
    .Attr<bool>("causal", false).Attr<double>("scale", 1.0).Attr<double>("dropout", 0.0)
    .SetTensorDescInferFn(infer_packed).SetDataTypeInferFn(infer_types).SetGetSbpFn(split_packed);

REGISTER_USER_OP("oneflow_accel_packed_attention_grad")
    .Input("out_grad").Input("qkv").Input("out").Input("lse")
    .OptionalInput("seed").OptionalInput("segments").Output("qkv_grad")
    .Attr<bool>("causal", false).Attr<double>("scale", 1.0).Attr<double>("dropout", 0.0)
    .SetTensorDescInferFn(infer_grad).SetDataTypeInferFn(infer_grad_types)
    .SetGetSbpFn(split_packed);

std::string describe(const AttentionShape& shape) {
  return "attention of " + std::to_string(shape.batch) + " x " + std::to_string(shape.heads)
         + " heads, " + std::to_string(shape.queries) + " queries, " + std::to_string(shape.keys)
         + " keys, " + std::to_string(shape.dim) + " dimensions";
}

// T is const for an input.
template <typename T>
T* data_of(user_op::KernelComputeContext* ctx, const std::string& name) {
  if constexpr (std::is_const_v<T>) {
    return input<std::remove_const_t<T>>(ctx, name);
  } else {
    return output<T>(ctx, name);
  }
}

// Where the arguments are that an operator reads and writes: queries, keys, values and outputs, or,
// with a suffix, their gradients.
struct Separate {
  static constexpr const char* kSplit = "query";
  static constexpr int64_t kHeadAxis = 1;

  static AttentionShape sizes(user_op::KernelComputeContext* ctx) {
    const auto& q = ctx->Tensor4ArgNameAndIndex("query", 0)->shape_view();
    const auto& k = ctx->Tensor4ArgNameAndIndex("key", 0)->shape_view();
    return {q.At(0), q.At(1), k.At(1), q.At(2), k.At(2), q.At(3), false, 1.0F};
  }
  template <typename T>
  static Heads<T> of(user_op::KernelComputeContext* ctx, const std::string& name,
                     const char* suffix = "") {
    const auto& shape = ctx->Tensor4ArgNameAndIndex(name + suffix, 0)->shape_view();
    return {data_of<T>(ctx, name + suffix), shape.Count(1), shape.Count(2), shape.Count(3)};
  }
};

struct Packed {
  static constexpr const char* kSplit = "qkv";
  static constexpr int64_t kHeadAxis = 3;

  static AttentionShape sizes(user_op::KernelComputeContext* ctx) {
    const auto& qkv = ctx->Tensor4ArgNameAndIndex("qkv", 0)->shape_view();
    return {qkv.At(0), qkv.At(3), qkv.At(3), qkv.At(1), qkv.At(1), qkv.At(4), false, 1.0F};
  }
  template <typename T>
  static Heads<T> of(user_op::KernelComputeContext* ctx, const std::string& name,
                     const char* suffix = "") {
    const AttentionShape n = sizes(ctx);
    const int64_t width = n.heads * n.dim;
    if (name == "out") {
      return {data_of<T>(ctx, name + suffix), width * n.queries, n.dim, width};
    }
    const int64_t part = name == "query" ? 0 : name == "key" ? 1 : 2;
    T* qkv = data_of<T>(ctx, std::string("qkv") + suffix);
    return {qkv + part * width, 3 * width * n.queries, n.dim, 3 * width};
  }
};

template <typename Layout>
class OfHeads : public Kernel {
 public:
  std::shared_ptr<user_op::OpKernelCache> InitOpKernelCache(
      user_op::KernelCacheContext* ctx) const final {
    return first_head(ctx, Layout::kSplit, 0, Layout::kHeadAxis);
  }

 private:
  void Compute(user_op::KernelComputeContext* ctx, user_op::OpKernelState*,
               const user_op::OpKernelCache* cache) const final {
    AttentionShape shape = Layout::sizes(ctx);
    shape.causal = ctx->Attr<bool>("causal");
    shape.scale = static_cast<float>(ctx->Attr<double>("scale"));
    if (ctx->has_input("segments", 0)) {
      shape.spans = spans_of(input<int64_t>(ctx, "segments"), shape.batch, shape.queries);
    }
    const auto dropout = weight_dropout(ctx, cache);
    run_or_throw([&] { return describe(shape); },
                 [&] { compute(ctx, shape, dropout ? &*dropout : nullptr); });
  }
  virtual void compute(user_op::KernelComputeContext* ctx, const AttentionShape& shape,
                       const WeightDropout* dropout) const = 0;
};

template <typename T, typename Layout>
class AttentionKernel final : public OfHeads<Layout> {
  void compute(user_op::KernelComputeContext* ctx, const AttentionShape& shape,
               const WeightDropout* dropout) const override {
    const auto in = [=](const char* name) { return Layout::template of<const T>(ctx, name); };
    attention(shape, in("query"), in("key"), in("value"), dropout,
              Layout::template of<T>(ctx, "out"), output(ctx, "lse"));
  }
};

template <typename T, typename Layout>
class AttentionGradKernel final : public OfHeads<Layout> {
  void compute(user_op::KernelComputeContext* ctx, const AttentionShape& shape,
               const WeightDropout* dropout) const override {
    const auto in = [=](const char* name, const char* suffix = "") {
      return Layout::template of<const T>(ctx, name, suffix);
    };
    const auto grad = [=](const char* name) { return Layout::template of<T>(ctx, name, "_grad"); };
    attention_grad<T>(shape,
                      {in("query"), in("key"), in("value"), in("out"), in("out", "_grad"),
                       input(ctx, "lse")},
                      dropout, {grad("query"), grad("key"), grad("value")});
  }
};

template <typename T>
using Attention = AttentionKernel<T, Separate>;
template <typename T>
using AttentionGrad = AttentionGradKernel<T, Separate>;
template <typename T>
using PackedAttention = AttentionKernel<T, Packed>;
template <typename T>
using PackedAttentionGrad = AttentionGradKernel<T, Packed>;
REGISTER_KERNELS(Attention, float, Bfloat16)("oneflow_accel_attention", "out");
REGISTER_KERNELS(AttentionGrad, float, Bfloat16)("oneflow_accel_attention_grad", "query_grad");
REGISTER_KERNELS(PackedAttention, float, Bfloat16)("oneflow_accel_packed_attention", "out");
REGISTER_KERNELS(PackedAttentionGrad, float, Bfloat16)
("oneflow_accel_packed_attention_grad", "qkv_grad");

}  // namespace

}  // namespace oneflow_accel
