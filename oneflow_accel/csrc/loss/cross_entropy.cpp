// Cross entropies of rows of logits against class indices, of which one may mean "not counted", and
// their gradients.
//   oneflow_accel_cross_entropy: losses, float32, of logits, float32 or bfloat16. Keeps two floats
//     a row for the gradient, which is one pass over the logits and of their type.
//   oneflow_accel_linear_cross_entropy: of the logits x weight^T, float32, of which only those of
//     some rows exist at a time. Gives a loss for each row; its gradient computes the logits again.
//   oneflow_accel_linear_cross_entropy_sum adds these losses up and gives the sum's gradients at
//     once, for which each row's factor is 1.
#include <algorithm>
#include <cmath>

#include "common/infer.h"
#include "common/onednn.h"
#include "common/oneflow.h"
#include "loss/labels.h"
#include "matmul/product.h"
#include "softmax/row.h"
#include "softmax/row_set.h"

namespace oneflow_accel {

namespace {

using ::oneflow::Shape;

// Losses and two floats more for each of `rows` rows, or sums of them; and gradients.
Maybe<void> describe_outputs(user_op::InferContext* ctx, int64_t rows) {
  for (const auto& [name, index] : ctx->outputs()) {
    describe_output(ctx, name,
                    name == "losses" ? Shape({rows})
                    : name == "lse"  ? Shape({rows, 2})
                                     : Shape({}));
  }
  return describe_gradients(ctx);
}

Maybe<void> infer(user_op::InferContext* ctx) {
  const Shape& logits = ctx->InputShape("logits", 0);
  const Shape& label = ctx->InputShape("label", 0);
  if (logits.NumAxes() != 2 || logits.At(1) < 1 || label != Shape({logits.At(0)})) {
    return Error::RuntimeError() << "a cross entropy needs logits of (rows, classes) and labels of "
                                    "(rows), not "
                                 << logits.ToString() << " and " << label.ToString();
  }
  return describe_outputs(ctx, logits.At(0));
}

Maybe<void> infer_linear(user_op::InferContext* ctx) {
  const Shape& x = ctx->InputShape("x", 0);
  const Shape& weight = ctx->InputShape("weight", 0);
  const Shape& label = ctx->InputShape("label", 0);
  if (x.NumAxes() != 2 || weight.NumAxes() != 2 || x.At(1) != weight.At(1)
      || weight.elem_cnt() == 0 || label != Shape({x.At(0)})) {
    return Error::RuntimeError()
           << "a linear cross entropy needs x of (rows, width), weights of (classes, width) and "
              "labels of (rows), not "
           << x.ToString() << ", " << weight.ToString() << " and " << label.ToString();
  }
  return describe_outputs(ctx, x.At(0));
}

Maybe<void> infer_types(user_op::InferContext* ctx) {
  const auto label = ctx->InputDType("label", 0);
  if (label != DataType::kInt32 && label != DataType::kInt64) {
    return Error::RuntimeError() << "a cross entropy needs labels of int32 or int64";
  }
  return infer_one_dtype(ctx, "a cross entropy",
                         {"label", "losses", "losses_grad", "lse", "total", "count"});
}

// Rows do not know of each other; the weight is the same for all of them. Classes are not split:
// each row's sum would have to be exchanged, and OneFlow gathers them instead.
user_op::OpRegistry loss_operator(const std::string& name, const char* inputs, const char* outputs,
                                  const user_op::TensorDescInferFn& infer_shapes = infer) {
  return new_operator(name, inputs, outputs, infer_shapes, infer_types,
                      split_first_axis("weight total count"))
      .Attr<int64_t>("ignore_index");
}

user_op::OpRegistry linear_operator(const char* end, const char* inputs, const char* outputs) {
  return loss_operator(std::string("oneflow_accel_linear_cross_entropy") + end, inputs, outputs,
                       infer_linear)
      .Attr<int64_t>("chunk_rows");
}

const NewOperator g_operators[] = {
    loss_operator("oneflow_accel_cross_entropy", "logits label", "losses lse"),
    loss_operator("oneflow_accel_cross_entropy_grad", "losses_grad logits label lse",
                  "logits_grad"),
    linear_operator("", "x weight label", "losses lse"),
    linear_operator("_grad", "losses_grad x weight label lse", "x_grad weight_grad"),
    linear_operator("_sum", "x weight label", "total count x_grad weight_grad")};

// The labels of one call, checked: its input "label" and its attribute "ignore_index".
Labels targets_of(Context* ctx, int64_t classes) {
  const Labels labels(ctx, "label", classes, nullptr, ctx->Attr<int64_t>("ignore_index"));
  labels.check();
  return labels;
}

// log(sum(e^x)) of a row is shift + log_sum. Both are kept: their sum in one float has an error of
// 5e-4 beside logits of 1e4, which each probability would have too.
struct LogSumExp {
  float shift;
  float log_sum;

  float loss_of(float logit) const { return (shift - logit) + log_sum; }
};

// Some of the rows of a call, from `first` on; `logits` and the results are those of `first`. The
// labels are checked.
template <typename T>
struct LogitRows {
  int64_t first;
  RowSet rows;
  const T* logits;
  const Labels& labels;

  // The losses, 0 where a row is not counted, and what the gradient needs of each row.
  void losses(float* losses, LogSumExp* sums) const {
    rows.for_each(1, [&](int64_t i, int64_t at) {
      const T* x = logits + at;
      const float shift = row::maximum(x, rows.n);
      sums[i] = {shift, static_cast<float>(std::log(row::sum_exp(x, rows.n, shift)))};
      const int64_t row = first + i;
      losses[i] = labels.counts(row) ? sums[i].loss_of(to_float(x[labels.at(row)])) : 0.0F;
    });
  }

  // grads = loss_grads * (softmax(logits) - one_hot(label)), 0 where a row is not counted. `grads`
  // may be the logits.
  void grads(const LogSumExp* sums, const float* loss_grads, T* grads) const {
    rows.for_each(1, [&](int64_t i, int64_t at) {
      const T* x = logits + at;
      T* to = grads + at;
      const int64_t row = first + i;
      if (!labels.counts(row)) {
        std::fill_n(to, rows.n, T{});
        return;
      }
      const int64_t label = labels.at(row);
      const LogSumExp sum = sums[i];
      const float factor = loss_grads[i];
      // Not the probability less 1: near 1 that is all rounding.
      const float at_label = factor * std::expm1(-sum.loss_of(to_float(x[label])));
#pragma omp simd
      for (int64_t j = 0; j < rows.n; ++j) {
        const float shifted = (to_float(x[j]) - sum.shift) - sum.log_sum;
        to[j] = from_float<T>(factor * row::exp_of_nonpositive(shifted));
      }
      to[label] = from_float<T>(at_label);
    });
  }
};

template <typename T>
void cross_entropy_kernel(Context* ctx) {
  const RowSet rows(ctx, "logits");
  const Labels labels = targets_of(ctx, rows.n);
  LogitRows<T>{0, rows, input<T>(ctx, "logits"), labels}.losses(
      output(ctx, "losses"), reinterpret_cast<LogSumExp*>(output(ctx, "lse")));
}

template <typename T>
void cross_entropy_grad_kernel(Context* ctx) {
  const RowSet rows(ctx, "logits");
  const Labels labels = targets_of(ctx, rows.n);
  LogitRows<T>{0, rows, input<T>(ctx, "logits"), labels}.grads(
      reinterpret_cast<const LogSumExp*>(input(ctx, "lse")), input(ctx, "losses_grad"),
      output<T>(ctx, "logits_grad"));
}

// Logits that exist at a time, 72 MiB. Each chunk packs the whole weight anew and adds to all of its
// gradient, so smaller chunks, which would stay in a cache, cost more than they save. Of a Llama's
// 32,000 tokens these are 589 rows: up to 512, oneDNN's product takes a sixth longer for each.
constexpr int64_t kChunkElements = 18 * 1024 * 1024;

// Calls fn(rows, logits, rounded) for chunk after chunk: the same whatever the number of threads, as
// sums over the rows depend on them. The logits are those of the rows and may be written to; rounded
// is rounded_copy() of the weight, as rounding 64,320 x 2,048 for each product took a second of ten.
template <typename Fn>
void for_each_chunk(Context* ctx, const Fn& fn) {
  const RowSet all(ctx, "x");
  const float* x = input(ctx, "x");
  const float* weight = input(ctx, "weight");
  const int64_t classes = shape_of(ctx, "weight").At(0);
  const Labels labels = targets_of(ctx, classes);
  const int64_t asked = ctx->Attr<int64_t>("chunk_rows");
  const int64_t most =
      std::min(all.count, asked > 0 ? asked : std::max<int64_t>(1, kChunkElements / classes));
  const auto describe = [&] {
    return "cross entropy of " + std::to_string(all.count) + " rows of " + std::to_string(all.n)
           + " and " + std::to_string(classes) + " classes";
  };
  const ThreadScope threads;
  run_or_throw(describe, [&] {
    // Products of few rows take the weight as it is.
    const auto* rounded = most > kMostFewRows ? rounded_copy(weight, classes * all.n) : nullptr;
    for (int64_t first = 0; first < all.count; first += most) {
      const int64_t count = std::min(most, all.count - first);
      auto* logits = scratch<float>(ScratchSlot::kSource, most * classes);
      multiply({{count, all.n}, {classes, all.n}, {count, classes}, false, true},
               x + first * all.n, weight, nullptr, logits, rounded);
      fn(LogitRows<float>{first, {count, classes}, logits, labels}, logits, rounded);
    }
  });
}

// The gradients by x and the weight; make_grads(rows, logits) turns the logits of some rows into
// their gradient. The weight's has those of the chunks before added.
template <typename MakeGrads>
void linear_grads(Context* ctx, const MakeGrads& make_grads) {
  const RowSet all(ctx, "x");
  const int64_t width = all.n;
  const auto& weight = *argument(ctx, "weight");
  float* x_grad = output(ctx, "x_grad");
  float* weight_grad = output(ctx, "weight_grad");
  if (all.count == 0) { std::fill_n(weight_grad, weight.shape_view().elem_cnt(), 0.0F); }
  for_each_chunk(ctx, [&](const LogitRows<float>& rows, float* logits, const Bfloat16* rounded) {
    make_grads(rows, logits);
    const int64_t count = rows.rows.count;
    const int64_t classes = rows.rows.n;
    const int64_t begin = rows.first * width;
    const Product by_x{{count, classes}, {classes, width}, {count, width}};
    multiply(by_x, logits, weight.dptr<float>(), nullptr, x_grad + begin, rounded);
    Product by_weight{{count, classes}, {count, width}, {classes, width}, true};
    by_weight.accumulate = rows.first > 0;
    multiply(by_weight, logits, input(ctx, "x") + begin, nullptr, weight_grad);
  });
}

void linear_cross_entropy_kernel(Context* ctx) {
  float* losses = output(ctx, "losses");
  auto* lse = reinterpret_cast<LogSumExp*>(output(ctx, "lse"));
  for_each_chunk(ctx, [&](const LogitRows<float>& rows, const auto&...) {
    rows.losses(losses + rows.first, lse + rows.first);
  });
}

void linear_cross_entropy_grad_kernel(Context* ctx) {
  const float* losses_grad = input(ctx, "losses_grad");
  const auto* lse = reinterpret_cast<const LogSumExp*>(input(ctx, "lse"));
  linear_grads(ctx, [&](const LogitRows<float>& rows, float* logits) {
    rows.grads(lse + rows.first, losses_grad + rows.first, logits);
  });
}

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

void linear_cross_entropy_sum_kernel(Context* ctx) {
  double total = 0.0;
  int64_t counted = 0;
  linear_grads(ctx, [&](const LogitRows<float>& some, float* logits) {
    auto* losses = scratch<float>(ScratchSlot::kReduction, some.rows.count);
    some.rows.for_each(1, [&](int64_t i, int64_t at) {
      const int64_t row = some.first + i;
      const bool counts = some.labels.counts(row);
      losses[i] = counts ? loss_and_grad(logits + at, some.rows.n, some.labels.at(row)) : 0.0F;
      if (!counts) { std::fill_n(logits + at, some.rows.n, 0.0F); }
    });
    for (int64_t i = 0; i < some.rows.count; ++i) {
      total += losses[i];
      counted += some.labels.counts(some.first + i) ? 1 : 0;
    }
  });
  *output(ctx, "total") = static_cast<float>(total);
  *output(ctx, "count") = static_cast<float>(counted);
}

REGISTER_KERNELS(cross_entropy_kernel, "oneflow_accel_cross_entropy", "logits");
REGISTER_KERNELS(cross_entropy_grad_kernel, "oneflow_accel_cross_entropy_grad", "logits");
REGISTER_FLOAT_KERNEL(linear_cross_entropy_kernel, "oneflow_accel_linear_cross_entropy", "x");
REGISTER_FLOAT_KERNEL(linear_cross_entropy_grad_kernel, "oneflow_accel_linear_cross_entropy_grad",
                      "x");
REGISTER_FLOAT_KERNEL(linear_cross_entropy_sum_kernel, "oneflow_accel_linear_cross_entropy_sum",
                      "x");

}  // namespace

}  // namespace oneflow_accel
