// oneflow_accel_add_rms_norm and its gradient, float32 and bfloat16: sum = dropout(x) + residual,
// and y = sum / sqrt(mean(sum^2) + epsilon) weight of each row (Zhang and Sennrich 2019). One pass
// over what memory holds, each way; kept are the sum and a number for each row. Dropout draws again
// for the gradient, oneflow_accel_add_rms_norm_x_grad: of x [batch, time, ..., n] the element i of
// a row is that of key i, of head time, in attention's weights.
#include <algorithm>

#include "attention/operators.h"
#include "common/infer.h"
#include "common/oneflow.h"
#include "common/scratch.h"
#include "common/threads.h"
#include "norm/row_norm.h"

namespace oneflow_accel {

namespace {

using ::oneflow::Shape;

Maybe<void> infer(user_op::InferContext* ctx) {
  const Shape& x = ctx->InputShape("x", 0);
  const Shape& weight = ctx->InputShape("weight", 0);
  if (x.NumAxes() < 2 || weight.NumAxes() != 1 || weight.At(0) != x.At(x.NumAxes() - 1)
      || ctx->InputShape("residual", 0) != x) {
    return Error::RuntimeError()
           << "add_rms_norm needs x and a residual of one shape (..., n) and a weight of (n), not "
           << x.ToString() << ", " << ctx->InputShape("residual", 0).ToString() << " and "
           << weight.ToString();
  }
  JUST(check_dropout(ctx));
  describe_output(ctx, "y", x);
  describe_output(ctx, "sum", x);
  const auto& sizes = x.dim_vec();
  describe_output(ctx, "inv_rms", Shape(::oneflow::DimVector(sizes.begin(), sizes.end() - 1)));
  return Maybe<void>::Ok();
}

Maybe<void> infer_grad(user_op::InferContext* ctx) {
  describe_output(ctx, "residual_grad", ctx->InputShape("sum", 0));
  describe_output(ctx, "weight_grad", ctx->InputShape("weight", 0));
  return Maybe<void>::Ok();
}

Maybe<void> infer_x_grad(user_op::InferContext* ctx) {
  JUST(check_dropout(ctx));
  describe_output(ctx, "x_grad", ctx->InputShape("residual_grad", 0));
  return Maybe<void>::Ok();
}

// What is kept of a row is float32 whatever the tensors are.
Maybe<void> infer_types(user_op::InferContext* ctx) {
  JUST(check_seed_type(ctx));
  return infer_one_dtype(ctx, "add_rms_norm", {"seed", "inv_rms"});
}

// Rows do not know of each other; the weight's gradient is a sum over them.
Maybe<void> split_rows(user_op::SbpContext* ctx) {
  int64_t axes = 0;
  for (const auto& [name, index] : ctx->inputs()) {
    const auto& shape = ctx->LogicalTensorDesc4InputArgNameAndIndex(name, index).shape();
    axes = std::max(axes, shape.NumAxes());
  }
  // Dropout knows the place of two axes only.
  if (ctx->Attr<double>("dropout") > 0.0) { axes = std::min<int64_t>(axes, 3); }
  for (int64_t axis = 0; axis + 1 < axes; ++axis) { split_all_but(ctx, axis, "weight seed"); }
  return Maybe<void>::Ok();
}

// The gradient of the residual is that of x too where nothing is dropped.
const NewOperator g_operators[] = {
    new_operator("oneflow_accel_add_rms_norm", "x residual weight seed?", "y sum inv_rms", infer,
                 infer_types, split_rows)
        .Attr<double>("epsilon").Attr<double>("dropout", 0.0),
    new_operator("oneflow_accel_add_rms_norm_grad", "y_grad sum_grad sum inv_rms weight",
                 "residual_grad weight_grad", infer_grad, infer_types, split_rows)
        .Attr<double>("dropout", 0.0),
    new_operator("oneflow_accel_add_rms_norm_x_grad", "residual_grad seed", "x_grad", infer_x_grad,
                 infer_types, split_rows)
        .Attr<double>("dropout", 0.0)};

// Calls fn(row, n, factors) for the rows of the argument `name`, in parallel. `factors` is what
// dropout multiplies the row's n elements by, and may be changed; it is null without dropout.
template <typename Fn>
void for_each_row(Context* ctx, const KernelCache* ranges, const std::string& name, const Fn& fn) {
  const auto dropout = weight_dropout(ctx, ranges);
  const auto& shape = shape_of(ctx, name);
  const int64_t axes = shape.NumAxes();
  const int64_t n = shape.At(axes - 1);
  const int64_t time = axes > 2 ? shape.At(1) : 1;
  const int64_t inner = axes > 3 ? shape.Count(2, axes - 1) : 1;
  for_each_block(shape.Count(0, axes - 1), n, [&](int64_t row) {
    float* factors = nullptr;
    if (dropout) {
      factors = scratch<float>(ScratchSlot::kSource, round_up(n, kWeightGroup));
      const int64_t place = row / inner;
      weight_factors(*dropout, {place / time, place % time, row % inner, 0}, 1, n, {n, 0}, factors,
                     n);
    }
    fn(row, n, factors);
  });
}

// out = x factors.
template <typename T, typename Out>
void multiply(const T* x, const float* factors, int64_t n, Out* out) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { out[i] = from_float<Out>(to_float(x[i]) * factors[i]); }
}

// sum = x + residual; returns the sum of the squares of what `sum` holds.
template <typename X, typename T>
double add(const X* x, const T* residual, int64_t n, T* sum) {
  // A strip's squares are summed up in float32, the strips in float64.
  constexpr int64_t kStrip = 256;
  double squares = 0;
  for (int64_t first = 0; first < n; first += kStrip) {
    const int64_t last = std::min(n, first + kStrip);
    float part = 0;
#pragma omp simd reduction(+ : part)
    for (int64_t i = first; i < last; ++i) {
      sum[i] = from_float<T>(to_float(x[i]) + to_float(residual[i]));
      part += to_float(sum[i]) * to_float(sum[i]);
    }
    squares += part;
  }
  return squares;
}

template <typename T>
void add_rms_norm_kernel(Context* ctx, const KernelCache* cache) {
  const T* x = input<T>(ctx, "x");
  const T* residual = input<T>(ctx, "residual");
  const T* weight = input<T>(ctx, "weight");
  T* y = output<T>(ctx, "y");
  T* sum = output<T>(ctx, "sum");
  float* inv_rms = output(ctx, "inv_rms");
  const double epsilon = ctx->Attr<double>("epsilon");
  for_each_row(ctx, cache, "x", [=](int64_t row, int64_t n, float* kept) {
    T* total = sum + row * n;
    double squares = 0;
    if (kept != nullptr) {
      multiply(x + row * n, kept, n, kept);
      squares = add(kept, residual + row * n, n, total);
    } else {
      squares = add(x + row * n, residual + row * n, n, total);
    }
    const auto scale = static_cast<float>(1.0 / __builtin_sqrt(squares / n + epsilon));
    inv_rms[row] = scale;
    T* out = y + row * n;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      out[i] = from_float<T>(to_float(total[i]) * scale * to_float(weight[i]));
    }
  });
}

template <typename T>
void add_rms_norm_x_grad_kernel(Context* ctx, const KernelCache* cache) {
  const T* residual_grad = input<T>(ctx, "residual_grad");
  T* x_grad = output<T>(ctx, "x_grad");
  for_each_row(ctx, cache, "residual_grad", [=](int64_t row, int64_t n, const float* kept) {
    multiply(residual_grad + row * n, kept, n, x_grad + row * n);
  });
}

template <typename T>
void add_rms_norm_grad_kernel(Context* ctx) {
  const auto& shape = shape_of(ctx, "sum");
  const RowNormGrad<T> norm{shape.Count(0, shape.NumAxes() - 1),
                            shape.At(shape.NumAxes() - 1),
                            input<T>(ctx, "y_grad"),
                            input<T>(ctx, "sum"),
                            nullptr,
                            input(ctx, "inv_rms")};
  row_norm_grad(norm, input<T>(ctx, "weight"), input<T>(ctx, "sum_grad"),
                output<T>(ctx, "residual_grad"));
  row_norm_param_grad<T>(norm, output<T>(ctx, "weight_grad"), nullptr);
}

// Of the rows that dropout counts.
std::shared_ptr<KernelCache> row_cache(user_op::KernelCacheContext* ctx) {
  return local_ranges(ctx, ctx->has_input("x", 0) ? "x" : "residual_grad", {0, 1});
}

REGISTER_KERNELS(add_rms_norm_kernel, row_cache, "oneflow_accel_add_rms_norm", "y");
REGISTER_KERNELS(add_rms_norm_grad_kernel, "oneflow_accel_add_rms_norm_grad", "residual_grad");
REGISTER_KERNELS(add_rms_norm_x_grad_kernel, row_cache, "oneflow_accel_add_rms_norm_x_grad",
                 "x_grad");

}  // namespace

}  // namespace oneflow_accel
