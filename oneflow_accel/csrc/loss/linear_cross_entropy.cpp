// Cross entropies of the logits x weight^T, float32, of which only those of some rows exist at a
// time: oneflow_accel_linear_cross_entropy gives a loss for each row, and its gradient computes the
// logits again; oneflow_accel_linear_cross_entropy_sum adds the losses up and gives the sum's
// gradients at once, for which each row's factor is 1.
#include <algorithm>

#include "common/arguments.h"
#include "common/guard.h"
#include "common/onednn.h"
#include "loss/row_losses.h"
#include "matmul/product.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;
using ::oneflow::Error;
using ::oneflow::Maybe;
using ::oneflow::Shape;

// Logits that exist at a time, 72 MiB. Each chunk packs the whole weight anew and adds to all of its
// gradient, so smaller chunks, which would stay in a cache, cost more than they save. Of a Llama's
// 32,000 tokens these are 589 rows: up to 512, oneDNN's product takes a sixth longer for each.
constexpr int64_t kChunkElements = 18 * 1024 * 1024;

Maybe<void> check(user_op::InferContext* ctx) {
  const Shape& x = ctx->InputShape("x", 0);
  const Shape& weight = ctx->InputShape("weight", 0);
  if (x.NumAxes() != 2 || weight.NumAxes() != 2 || x.At(1) != weight.At(1)
      || weight.elem_cnt() == 0 || ctx->InputShape("label", 0) != Shape({x.At(0)})) {
    return Error::RuntimeError()
           << "a linear cross entropy needs x of (rows, width), weights of (classes, width) and "
              "labels of (rows), not "
           << x.ToString() << ", " << weight.ToString() << " and "
           << ctx->InputShape("label", 0).ToString();
  }
  return Maybe<void>::Ok();
}

Maybe<void> infer(user_op::InferContext* ctx) {
  JUST(check(ctx));
  describe_losses(ctx, ctx->InputShape("x", 0).At(0));
  return Maybe<void>::Ok();
}

Maybe<void> infer_grad(user_op::InferContext* ctx) {
  JUST(check(ctx));
  describe_output(ctx, "x_grad", ctx->InputShape("x", 0));
  describe_output(ctx, "weight_grad", ctx->InputShape("weight", 0));
  return Maybe<void>::Ok();
}

Maybe<void> infer_sum(user_op::InferContext* ctx) {
  JUST(infer_grad(ctx));
  describe_output(ctx, "total", Shape({}));
  describe_output(ctx, "count", Shape({}));
  return Maybe<void>::Ok();
}

Maybe<void> infer_types(user_op::InferContext* ctx) {
  const auto type = ctx->InputDType("x", 0);
  if (ctx->InputDType("weight", 0) != type) {
    return Error::RuntimeError() << "a linear cross entropy needs x and weights of one dtype";
  }
  for (const auto& [name, index] : ctx->outputs()) { ctx->SetOutputDType(name, index, type); }
  return Maybe<void>::Ok();
}

// Rows do not know of each other; the weight is the same for all of them. Classes are not split, as
// in cross_entropy.cpp.
Maybe<void> split_rows(user_op::SbpContext* ctx) {
  split_all_but(ctx, 0, [](const std::string& name) {
    return name.find("weight") == 0 || name == "total" || name == "count";
  });
  return Maybe<void>::Ok();
}

REGISTER_USER_OP("oneflow_accel_linear_cross_entropy")
    .Input("x").Input("weight").Input("label").Output("losses").Output("lse")
    .Attr<int64_t>("ignore_index").Attr<int64_t>("chunk_rows")
    .SetTensorDescInferFn(infer).SetDataTypeInferFn(infer_types).SetGetSbpFn(split_rows);

REGISTER_USER_OP("oneflow_accel_linear_cross_entropy_grad")
    .Input("losses_grad").Input("x").Input("weight").Input("label").Input("lse")
    .Output("x_grad").Output("weight_grad")
    .Attr<int64_t>("ignore_index").Attr<int64_t>("chunk_rows")
    .SetTensorDescInferFn(infer_grad).SetDataTypeInferFn(infer_types).SetGetSbpFn(split_rows);

REGISTER_USER_OP("oneflow_accel_linear_cross_entropy_sum")
    .Input("x").Input("weight").Input("label")
    .Output("total").Output("count").Output("x_grad").Output("weight_grad")
    .Attr<int64_t>("ignore_index").Attr<int64_t>("chunk_rows")
    .SetTensorDescInferFn(infer_sum).SetDataTypeInferFn(infer_types).SetGetSbpFn(split_rows);

// One call: its inputs, and the rows it takes at a time.
class Head {
 public:
  explicit Head(user_op::KernelComputeContext* ctx)
      : x_(input(ctx, "x")), weight_(input(ctx, "weight")), x_rows_(ctx, "x") {
    classes_ = ctx->Tensor4ArgNameAndIndex("weight", 0)->shape_view().At(0);
    const int64_t asked = ctx->Attr<int64_t>("chunk_rows");
    chunk_ = asked > 0 ? asked : std::max<int64_t>(1, kChunkElements / classes_);
  }

  Labels labels(user_op::KernelComputeContext* ctx) const { return targets_of(ctx, classes_); }

  std::string describe() const {
    return "cross entropy of " + std::to_string(x_rows_.count) + " rows of "
           + std::to_string(x_rows_.n) + " and " + std::to_string(classes_) + " classes";
  }

  // Calls fn(rows, logits), where the second are those of the rows and may be written to, for chunk
  // after chunk: the same whatever the number of threads, as sums over the rows depend on them.
  template <typename Fn>
  void for_each_chunk(const Fn& fn) const {
    for (int64_t first = 0; first < x_rows_.count; first += chunk_) {
      const int64_t count = std::min(chunk_, x_rows_.count - first);
      auto* logits = static_cast<float*>(scratch(
          ScratchSlot::kSource, std::min(chunk_, x_rows_.count) * classes_ * sizeof(float)));
      Product product;
      product.a = {count, x_rows_.n};
      product.b = {classes_, x_rows_.n};
      product.out = {count, classes_};
      product.transpose_b = true;
      multiply(product, x_ + first * x_rows_.n, weight_, nullptr, logits);
      fn(LogitRows<float>{first, {count, classes_}, logits}, logits);
    }
  }

  // The gradients by x and the weight, from that of the logits of some rows; the weight's has those
  // of the chunks before added.
  void add_grads(int64_t first, int64_t count, const float* logits_grad, float* x_grad,
                 float* weight_grad) const {
    Product product;
    product.a = {count, classes_};
    product.b = {classes_, x_rows_.n};
    product.out = {count, x_rows_.n};
    multiply(product, logits_grad, weight_, nullptr, x_grad + first * x_rows_.n);
    product.b = {count, x_rows_.n};
    product.out = {classes_, x_rows_.n};
    product.transpose_a = true;
    product.accumulate = first > 0;
    multiply(product, logits_grad, x_ + first * x_rows_.n, nullptr, weight_grad);
  }

  // The gradients of all chunks; make_grads(rows, logits) turns their logits into what add_grads
  // wants.
  template <typename MakeGrads>
  void grads(user_op::KernelComputeContext* ctx, const MakeGrads& make_grads) const {
    float* x_grad = output(ctx, "x_grad");
    float* weight_grad = output(ctx, "weight_grad");
    const ThreadScope threads;
    if (x_rows_.count == 0) { std::fill_n(weight_grad, classes_ * x_rows_.n, 0.0F); }
    run_or_throw([&] { return "gradient of " + describe(); }, [&] {
      for_each_chunk([&](const LogitRows<float>& rows, float* logits) {
        make_grads(rows, logits);
        add_grads(rows.first, rows.rows.count, logits, x_grad, weight_grad);
      });
    });
  }

 private:
  const float* x_;
  const float* weight_;
  Rows x_rows_;
  int64_t classes_;
  int64_t chunk_;
};

class LinearCrossEntropyKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const Head head(ctx);
    const Labels labels = head.labels(ctx);
    labels.check();
    float* losses = output(ctx, "losses");
    auto* lse = reinterpret_cast<LogSumExp*>(output(ctx, "lse"));
    const ThreadScope threads;
    run_or_throw([&] { return head.describe(); }, [&] {
      head.for_each_chunk([&](const LogitRows<float>& rows, float*) {
        rows.losses(labels, losses + rows.first, lse + rows.first);
      });
    });
  }
};

class LinearCrossEntropyGradKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const Head head(ctx);
    const Labels labels = head.labels(ctx);
    labels.check();
    const float* losses_grad = input(ctx, "losses_grad");
    const auto* lse = reinterpret_cast<const LogSumExp*>(input(ctx, "lse"));
    head.grads(ctx, [&](const LogitRows<float>& rows, float* logits) {
      rows.grads(labels, lse + rows.first, losses_grad + rows.first, logits);
    });
  }
};

// The loss of a row that counts, whose logits become its gradient.
float loss_and_grad(float* x, int64_t n, int64_t label) {
  const float logit = x[label];
  const float shift = row::maximum(x, n);
  const double sum = row::exp_and_sum(x, x, n, shift);
  const float loss = LogSumExp{shift, static_cast<float>(std::log(sum))}.loss_of(logit);
  const auto factor = static_cast<float>(1.0 / sum);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { x[i] *= factor; }
  x[label] = std::expm1(-loss);
  return loss;
}

class LinearCrossEntropySumKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const Head head(ctx);
    const Labels labels = head.labels(ctx);
    const int64_t counted = labels.check();
    double total = 0.0;
    head.grads(ctx, [&](const LogitRows<float>& some, float* logits) {
      auto* losses = static_cast<float*>(
          scratch(ScratchSlot::kReduction, some.rows.count * sizeof(float)));
      some.rows.for_each(1, [&](int64_t i, int64_t at) {
        const int64_t row = some.first + i;
        if (labels.counts(row)) {
          losses[i] = loss_and_grad(logits + at, some.rows.n, labels.at(row));
        } else {
          std::fill_n(logits + at, some.rows.n, 0.0F);
          losses[i] = 0.0F;
        }
      });
      for (int64_t i = 0; i < some.rows.count; ++i) { total += losses[i]; }
    });
    *output(ctx, "total") = static_cast<float>(total);
    *output(ctx, "count") = static_cast<float>(counted);
  }
};

REGISTER_KERNEL("oneflow_accel_linear_cross_entropy", make<LinearCrossEntropyKernel>,
                is_float32_on_cpu("losses") && is_label("label"));
REGISTER_KERNEL("oneflow_accel_linear_cross_entropy_grad", make<LinearCrossEntropyGradKernel>,
                is_float32_on_cpu("x_grad") && is_label("label"));
REGISTER_KERNEL("oneflow_accel_linear_cross_entropy_sum", make<LinearCrossEntropySumKernel>,
                is_float32_on_cpu("total") && is_label("label"));

}  // namespace

}  // namespace oneflow_accel
