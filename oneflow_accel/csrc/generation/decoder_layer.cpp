// oneflow_accel_decoder_layer: what a GPT-2 block does to one more token of each sequence, float32.
//
// One operator in place of a dozen: at one row the products are bound by memory, and starting the
// operators between them would take the processors' time from them.
#include "activation/formulas.h"
#include "attention/attention.h"
#include "common/infer.h"
#include "common/oneflow.h"
#include "common/threads.h"
#include "matmul/product.h"
#include "norm/row_norm.h"
#include "softmax/row_set.h"

namespace oneflow_accel {

namespace decoder_layer {

using ::oneflow::Shape;

struct Sizes {
  int64_t batch;
  int64_t width;
  int64_t heads;
  int64_t head_size;
  int64_t inner;
  // Tokens before this one.
  int64_t past;
};

template <typename View>
Sizes sizes_of(const View& x, const View& keys, const View& inner_weight) {
  return {x.At(0), x.At(2), keys.At(1), keys.At(3), inner_weight.At(0), keys.At(2)};
}

Maybe<void> infer(user_op::InferContext* ctx) {
  const Shape& x = ctx->InputShape("x", 0);
  const Shape& keys = ctx->InputShape("keys", 0);
  const Shape& inner_weight = ctx->InputShape("inner_weight", 0);
  if (x.NumAxes() != 3 || x.At(1) != 1 || keys.NumAxes() != 4 || keys.At(0) != x.At(0)
      || keys != ctx->InputShape("values", 0) || inner_weight.NumAxes() != 2) {
    return Error::RuntimeError()
           << "a decoder layer needs x (batch, 1, width), keys and values (batch, heads, past, head "
              "size) and inner_weight (inner, width), not "
           << x.ToString() << ", " << keys.ToString() << ", "
           << ctx->InputShape("values", 0).ToString() << " and " << inner_weight.ToString();
  }
  const Sizes n = sizes_of(x, keys, inner_weight);
  const int64_t attended = n.heads * n.head_size;
  const std::pair<const char*, Shape> wanted[] = {
      {"input_norm_weight", Shape({n.width})}, {"input_norm_bias", Shape({n.width})},
      {"qkv_weight", Shape({3 * attended, n.width})}, {"qkv_bias", Shape({3 * attended})},
      {"dense_weight", Shape({n.width, attended})}, {"dense_bias", Shape({n.width})},
      {"post_norm_weight", Shape({n.width})}, {"post_norm_bias", Shape({n.width})},
      {"inner_weight", Shape({n.inner, n.width})}, {"inner_bias", Shape({n.inner})},
      {"outer_weight", Shape({n.width, n.inner})}, {"outer_bias", Shape({n.width})}};
  for (const auto& [name, shape] : wanted) {
    if (ctx->InputShape(name, 0) != shape) {
      return Error::RuntimeError() << "a decoder layer of " << x.ToString() << " after "
                                   << keys.ToString() << " needs " << name << " of "
                                   << shape.ToString() << ", not "
                                   << ctx->InputShape(name, 0).ToString();
    }
  }
  Shape longer = keys;
  longer.Set(2, keys.At(2) + 1);
  describe_output(ctx, "y", x);
  describe_output(ctx, "new_keys", longer);
  describe_output(ctx, "new_values", longer);
  return Maybe<void>::Ok();
}

// Sequences do not know of each other.
const NewOperator g_operator =
    new_operator("oneflow_accel_decoder_layer",
                 "x keys values input_norm_weight input_norm_bias qkv_weight qkv_bias dense_weight "
                 "dense_bias post_norm_weight post_norm_bias inner_weight inner_bias outer_weight "
                 "outer_bias",
                 "y new_keys new_values", infer, one_dtype("a decoder layer"),
                 split_first_axis("weight bias"))
        .Attr<double>("scale", 1.0).Attr<double>("epsilon", 1e-5).Attr<bool>("tanh", true);

template <float activate(float)>
void activate_in_place(float* x, int64_t n) {
  parallel_for(n, kGrainSize / 16, [=](int64_t begin, int64_t end) {
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) { x[i] = activate(x[i]); }
  });
}

// The past of each head, and the part of each row of qkv from `offset` on after it.
void append(const Sizes& n, const float* past, const float* qkv, int64_t offset, float* all) {
  const int64_t held = n.past * n.head_size;
  RowSet(n.batch * n.heads, held + n.head_size).for_each(1, [&](int64_t head, int64_t first) {
    std::copy_n(past + head * held, held, all + first);
    std::copy_n(qkv + 3 * head * n.head_size + offset, n.head_size, all + first + held);
  });
}

void decoder_layer_kernel(Context* ctx) {
  const auto in = [&](const std::string& name) { return input(ctx, name); };
  const auto view = [&](const std::string& name) { return shape_of(ctx, name); };
  const Sizes n = sizes_of(view("x"), view("keys"), view("inner_weight"));
  if (n.batch == 0) { return; }
  const ThreadScope threads;
  const int64_t attended = n.heads * n.head_size;
  float* normed = output(ctx, "tmp_buffer");
  float* qkv = normed + n.batch * n.width;
  float* context = qkv + n.batch * 3 * attended;
  float* inner = context + n.batch * attended;
  float* lse = inner + n.batch * n.inner;
  float* mean = lse + n.batch * n.heads;
  float* inv_std = mean + n.batch;
  float* y = output(ctx, "y");

  const auto norm = [&](const float* from, const std::string& name) {
    row_norm<float>({n.batch, n.width, ctx->Attr<double>("epsilon"), from, in(name + "_weight"),
                     in(name + "_bias"), normed, mean, inv_std});
  };
  const auto add_product = [&](const float* from, int64_t k, const std::string& name, int64_t to_n,
                               float* to, bool accumulate) {
    Product product{{n.batch, k}, {to_n, k}, {n.batch, to_n}, false, true};
    product.accumulate = accumulate;
    run_or_throw([&] { return product.describe(); },
                 [&] { multiply(product, from, in(name + "_weight"), in(name + "_bias"), to); });
  };

  norm(in("x"), "input_norm");
  add_product(normed, n.width, "qkv", 3 * attended, qkv, false);
  float* keys = output(ctx, "new_keys");
  float* values = output(ctx, "new_values");
  append(n, in("keys"), qkv, n.head_size, keys);
  append(n, in("values"), qkv, 2 * n.head_size, values);
  const int64_t all = (n.past + 1) * n.head_size;
  const AttentionShape shape{
      n.batch,    n.heads,     n.heads, 1,
      n.past + 1, n.head_size, false,   static_cast<float>(ctx->Attr<double>("scale"))};
  attention<float>(
      shape, {qkv, 3 * attended, 3 * n.head_size, 0}, {keys, n.heads * all, all, n.head_size},
      {values, n.heads * all, all, n.head_size}, nullptr, {context, attended, n.head_size, 0}, lse);
  std::copy_n(in("x"), n.batch * n.width, y);
  add_product(context, attended, "dense", n.width, y, true);
  norm(y, "post_norm");
  add_product(normed, n.width, "inner", n.inner, inner, false);
  const auto activate =
      ctx->Attr<bool>("tanh") ? activate_in_place<fast_gelu> : activate_in_place<gelu>;
  activate(inner, n.batch * n.inner);
  add_product(inner, n.inner, "outer", n.width, y, true);
}

// Of what is computed on the way.
std::size_t scratch_bytes(user_op::InferContext* ctx) {
  const auto shape = [=](const char* name) { return ctx->InputShape(name, 0); };
  const Sizes n = sizes_of(shape("x"), shape("keys"), shape("inner_weight"));
  return n.batch * (n.width + 4 * n.heads * n.head_size + n.inner + n.heads + 2) * sizeof(float);
}

REGISTER_FLOAT_KERNEL(decoder_layer_kernel, "oneflow_accel_decoder_layer", "y", InPlace{},
                      scratch_bytes);

}  // namespace decoder_layer

}  // namespace oneflow_accel
