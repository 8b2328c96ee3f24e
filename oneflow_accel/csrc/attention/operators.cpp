// The attention operators and their gradients, float32 and bfloat16.
//   oneflow_accel_attention: query, key and value are tensors of their own,
//     [batch, heads, time, dim], of which keys and values may have fewer heads.
//   oneflow_accel_packed_attention: they are the parts of one projection,
//     [batch, time, 3, heads, dim], read where they lie; the output is [batch, time, heads, dim].
#include "attention/operators.h"

#include <stdexcept>

#include "attention/attention.h"
#include "common/oneflow.h"

namespace oneflow_accel {

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
  const std::pair<const char*, const char*> texts[] = {
      {"seed", "the seed of dropout"}, {"segments", "segments of packed sequences"}};
  for (const auto& [name, text] : texts) {
    if (ctx->has_input(name, 0) && ctx->InputDType(name, 0) != DataType::kInt64) {
      return Error::RuntimeError() << text << " must be int64";
    }
  }
  return Maybe<void>::Ok();
}

std::optional<WeightDropout> weight_dropout(Context* ctx, const KernelCache* ranges) {
  const double rate = ctx->Attr<double>("dropout");
  if (rate == 0.0) { return std::nullopt; }
  return WeightDropout(*input<int64_t>(ctx, "seed"), rate, range_in(ranges, 0, 0).first,
                       range_in(ranges, 1, 0).first);
}

namespace {

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

// The outputs, and what both operators check. The input `segments`, if there is one, is int64
// (batch, time), with as many keys as queries.
Maybe<void> infer_outputs(user_op::InferContext* ctx, const Shape& out, const Shape& lse,
                          int64_t keys) {
  JUST(check_dropout(ctx));
  const int64_t queries = lse.At(2);
  if (ctx->has_input("segments", 0)
      && (ctx->InputShape("segments", 0) != Shape({lse.At(0), queries}) || queries != keys)) {
    return Error::RuntimeError()
           << "segments of packed sequences must be (batch, time), with as many keys as queries, "
              "not "
           << ctx->InputShape("segments", 0).ToString() << " for " << queries << " queries and "
           << keys << " keys";
  }
  describe_output(ctx, "out", out);
  describe_output(ctx, "lse", lse);
  return Maybe<void>::Ok();
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
  return infer_outputs(ctx, q, Shape({q.At(0), q.At(1), q.At(2)}), k.At(2));
}

Maybe<void> infer_packed(user_op::InferContext* ctx) {
  const Shape& qkv = ctx->InputShape("qkv", 0);
  if (qkv.NumAxes() != 5 || qkv.At(2) != 3) {
    return Error::RuntimeError()
           << "packed attention needs a projection of (batch, time, 3, heads, dim), not "
           << qkv.ToString();
  }
  return infer_outputs(ctx, Shape({qkv.At(0), qkv.At(1), qkv.At(3), qkv.At(4)}),
                       Shape({qkv.At(0), qkv.At(3), qkv.At(1)}), qkv.At(1));
}

Maybe<void> infer_grad(user_op::InferContext* ctx) {
  JUST(check_dropout(ctx));
  return describe_gradients(ctx);
}

Maybe<void> infer_types(user_op::InferContext* ctx) {
  JUST(check_seed_type(ctx));
  return infer_one_dtype(ctx, "attention", {"seed", "segments", "lse"});
}

// Batch entries do not know of each other, nor do heads of keys and values with the heads of
// queries that share them: where some do, each process must get as many, or they would come apart.
Maybe<void> split(user_op::SbpContext* ctx) {
  split_all_but(ctx, 0, "seed");
  const bool packed = ctx->user_op_conf().has_input("qkv", 0);
  if (!packed) {
    const int64_t heads = ctx->LogicalTensorDesc4InputArgNameAndIndex("query", 0).shape().At(1);
    const int64_t kv_heads = ctx->LogicalTensorDesc4InputArgNameAndIndex("key", 0).shape().At(1);
    if (kv_heads != heads && kv_heads % ctx->parallel_num() != 0) { return Maybe<void>::Ok(); }
  }
  split_along(ctx, [&](const std::string& name) -> int64_t {
    if (name == "seed" || name == "segments") { return kWhole; }
    if (name == "qkv" || name == "qkv_grad") { return 3; }
    return packed && name != "lse" ? 2 : 1;
  });
  return Maybe<void>::Ok();
}

user_op::OpRegistry attention_operator(const char* name, const char* inputs, const char* outputs,
                                       const user_op::TensorDescInferFn& infer_shapes) {
  return new_operator(name, inputs, outputs, infer_shapes, infer_types, split)
      .Attr<bool>("causal", false).Attr<double>("scale", 1.0).Attr<double>("dropout", 0.0);
}

const NewOperator g_operators[] = {
    attention_operator("oneflow_accel_attention", "query key value seed? segments?", "out lse",
                       infer),
    attention_operator("oneflow_accel_attention_grad",
                       "out_grad query key value out lse seed? segments?",
                       "query_grad key_grad value_grad", infer_grad),
    attention_operator("oneflow_accel_packed_attention", "qkv seed? segments?", "out lse",
                       infer_packed),
    attention_operator("oneflow_accel_packed_attention_grad",
                       "out_grad qkv out lse seed? segments?", "qkv_grad", infer_grad)};

std::string describe(const AttentionShape& shape) {
  return "attention of " + std::to_string(shape.batch) + " x " + std::to_string(shape.heads)
         + " heads, " + std::to_string(shape.queries) + " queries, " + std::to_string(shape.keys)
         + " keys, " + std::to_string(shape.dim) + " dimensions";
}

// Whether queries, keys and values are the parts of one projection.
template <typename AnyContext>
bool is_packed(const AnyContext* ctx) {
  return ctx->has_input("qkv", 0);
}

AttentionShape attention_shape(Context* ctx) {
  const auto causal = ctx->Attr<bool>("causal");
  const auto scale = static_cast<float>(ctx->Attr<double>("scale"));
  if (is_packed(ctx)) {
    const auto& qkv = shape_of(ctx, "qkv");
    return {qkv.At(0), qkv.At(3), qkv.At(3), qkv.At(1), qkv.At(1), qkv.At(4), causal, scale};
  }
  const auto& q = shape_of(ctx, "query");
  const auto& k = shape_of(ctx, "key");
  return {q.At(0), q.At(1), k.At(1), q.At(2), k.At(2), q.At(3), causal, scale};
}

// Where "query", "key", "value" or "out" lies or, with a suffix, its gradient. T is const for an
// input.
template <typename T>
Heads<T> heads_of(Context* ctx, const std::string& name, const char* suffix = "") {
  const bool in_projection = is_packed(ctx) && name != "out";
  const auto* tensor = argument(ctx, (in_projection ? "qkv" : name) + suffix);
  auto* data = static_cast<T*>(const_cast<void*>(tensor->raw_dptr()));
  const auto& shape = tensor->shape_view();
  if (!is_packed(ctx)) { return {data, shape.Count(1), shape.Count(2), shape.Count(3)}; }
  // By batch entry, head and time, of [batch, time, heads, dim] or [batch, time, 3, heads, dim].
  const int64_t dim = shape.At(shape.NumAxes() - 1);
  if (!in_projection) { return {data, shape.Count(1), dim, shape.Count(2)}; }
  const int64_t part = name == "query" ? 0 : name == "key" ? 1 : 2;
  return {data + part * shape.Count(3), shape.Count(1), dim, shape.Count(2)};
}

std::shared_ptr<KernelCache> head_cache(user_op::KernelCacheContext* ctx) {
  return is_packed(ctx) ? local_ranges(ctx, "qkv", {0, 3}) : local_ranges(ctx, "query", {0, 1});
}

// Calls compute(shape, dropout), where `dropout` may be null.
template <typename Compute>
void of_heads(Context* ctx, const KernelCache* cache, const Compute& compute) {
  AttentionShape shape = attention_shape(ctx);
  if (ctx->has_input("segments", 0)) {
    shape.spans = spans_of(input<int64_t>(ctx, "segments"), shape.batch, shape.queries);
  }
  const auto dropout = weight_dropout(ctx, cache);
  run_or_throw([&] { return describe(shape); },
               [&] { compute(shape, dropout ? &*dropout : nullptr); });
}

template <typename T>
void attention_kernel(Context* ctx, const KernelCache* cache) {
  const auto in = [=](const char* name) { return heads_of<const T>(ctx, name); };
  of_heads(ctx, cache, [&](const AttentionShape& shape, const WeightDropout* dropout) {
    attention(shape, in("query"), in("key"), in("value"), dropout, heads_of<T>(ctx, "out"),
              output(ctx, "lse"));
  });
}

template <typename T>
void attention_grad_kernel(Context* ctx, const KernelCache* cache) {
  const auto in = [=](const char* name) { return heads_of<const T>(ctx, name); };
  const auto grad = [=](const char* name) { return heads_of<T>(ctx, name, "_grad"); };
  of_heads(ctx, cache, [&](const AttentionShape& shape, const WeightDropout* dropout) {
    attention_grad<T>(shape,
                      {in("query"), in("key"), in("value"), in("out"),
                       heads_of<const T>(ctx, "out", "_grad"), input(ctx, "lse")},
                      dropout, {grad("query"), grad("key"), grad("value")});
  });
}

REGISTER_KERNELS(attention_kernel, head_cache,
                 "oneflow_accel_attention oneflow_accel_packed_attention", "out");
REGISTER_KERNELS(attention_grad_kernel, head_cache,
                 "oneflow_accel_attention_grad oneflow_accel_packed_attention_grad", "out_grad");

}  // namespace

}  // namespace oneflow_accel
