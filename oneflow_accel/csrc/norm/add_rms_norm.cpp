// oneflow_accel_add_rms_norm and its gradient, float32: sum = dropout(x) + residual, and
// y = sum / sqrt(mean(sum^2) + epsilon) weight of each row (Zhang and Sennrich 2019). One pass over
// what memory holds, each way; kept are the sum and a number for each row. Dropout draws again for
// the gradient, oneflow_accel_add_rms_norm_x_grad: of x [batch, time, ..., n] the element i of a row
// is that of key i, of head time, in attention's weights.
#include <algorithm>

#include "attention/operators.h"
#include "common/arguments.h"
#include "common/infer.h"
#include "common/simd_math.h"
#include "common/threads.h"
#include "norm/row_norm.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;
using ::oneflow::Error;
using ::oneflow::Maybe;
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
  ::oneflow::DimVector rows;
  for (int64_t axis = 0; axis + 1 < x.NumAxes(); ++axis) { rows.push_back(x.At(axis)); }
  describe_output(ctx, "inv_rms", Shape(rows));
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

Maybe<void> infer_types(user_op::InferContext* ctx) {
  JUST(check_seed_type(ctx));
  auto type = ::oneflow::DataType::kInvalidDataType;
  for (const auto& [name, index] : ctx->inputs()) {
    if (name == "seed") { continue; }
    if (type != ::oneflow::DataType::kInvalidDataType && ctx->InputDType(name, index) != type) {
      return Error::RuntimeError() << "add_rms_norm needs tensors of one dtype";
    }
    type = ctx->InputDType(name, index);
  }
  for (const auto& [name, index] : ctx->outputs()) { ctx->SetOutputDType(name, index, type); }
  return Maybe<void>::Ok();
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
  for (int64_t axis = 0; axis + 1 < axes; ++axis) {
    split_all_but(ctx, axis, [](const std::string& name) {
      return name == "weight" || name == "weight_grad" || name == "seed";
    });
  }
  return Maybe<void>::Ok();
}

REGISTER_USER_OP("oneflow_accel_add_rms_norm")
    .Input("x")
    .Input("residual")
    .Input("weight")
    .OptionalInput("seed")
    .Output("y")
    .Output("sum")
    .Output("inv_rms")
    .Attr<double>("epsilon")
    .Attr<double>("dropout", 0.0)
    .SetTensorDescInferFn(infer)
    .SetDataTypeInferFn(infer_types)
    .SetGetSbpFn(split_rows);

// The gradient of the residual is that of x too where nothing is dropped.
REGISTER_USER_OP("oneflow_accel_add_rms_norm_grad")
    .Input("y_grad")
    .Input("sum_grad")
    .Input("sum")
    .Input("inv_rms")
    .Input("weight")
    .Output("residual_grad")
    .Output("weight_grad")
    .Attr<double>("dropout", 0.0)
    .SetTensorDescInferFn(infer_grad)
    .SetDataTypeInferFn(infer_types)
    .SetGetSbpFn(split_rows);

REGISTER_USER_OP("oneflow_accel_add_rms_norm_x_grad")
    .Input("residual_grad")
    .Input("seed")
    .Output("x_grad")
    .Attr<double>("dropout", 0.0)
    .SetTensorDescInferFn(infer_x_grad)
    .SetDataTypeInferFn(infer_types)
    .SetGetSbpFn(split_rows);

// What each element of a row is multiplied by.
class RowDropout {
 public:
  RowDropout(user_op::KernelComputeContext* ctx, const user_op::OpKernelCache* first,
             const ::oneflow::ShapeView& shape)
      : dropout_(weight_dropout(ctx, first)),
        n_(shape.At(shape.NumAxes() - 1)),
        time_(shape.NumAxes() > 2 ? shape.At(1) : 1),
        inner_(shape.NumAxes() > 3 ? shape.Count(2, shape.NumAxes() - 1) : 1) {}

  explicit operator bool() const { return dropout_.has_value(); }

  std::vector<float> buffer() const {
    return std::vector<float>(dropout_ ? (n_ + kWeightGroup - 1) / kWeightGroup * kWeightGroup : 0);
  }

  void factors(int64_t row, float* factors) const {
    const int64_t place = row / inner_;
    weight_factors(*dropout_, {place / time_, place % time_, row % inner_, 0}, 1, n_, {n_, 0},
                   factors, n_);
  }

 private:
  std::optional<WeightDropout> dropout_;
  int64_t n_;
  int64_t time_;
  int64_t inner_;
};

struct Rows {
  const float* x;
  const float* residual;
  const float* weight;
  float* y;
  float* sum;
  float* inv_rms;
  int64_t n;
  double epsilon;
};

// out = x factors.
void multiply(const float* x, const float* factors, int64_t n, float* out) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { out[i] = x[i] * factors[i]; }
}

// Of the rows from `begin` to `end`, where those of x begin at `x`.
void add_and_normalize(const Rows& rows, const float* x, int64_t begin, int64_t end) {
  // A strip's squares are summed up in float32, the strips in float64.
  constexpr int64_t kStrip = 256;
  const int64_t n = rows.n;
  for (int64_t row = begin; row < end; ++row, x += n) {
    const float* residual = rows.residual + row * n;
    float* sum = rows.sum + row * n;
    double squares = 0;
    for (int64_t first = 0; first < n; first += kStrip) {
      const int64_t last = first + kStrip < n ? first + kStrip : n;
      float part = 0;
#pragma omp simd reduction(+ : part)
      for (int64_t i = first; i < last; ++i) {
        sum[i] = x[i] + residual[i];
        part += sum[i] * sum[i];
      }
      squares += part;
    }
    const auto scale = static_cast<float>(1.0 / __builtin_sqrt(squares / n + rows.epsilon));
    rows.inv_rms[row] = scale;
    float* y = rows.y + row * n;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) { y[i] = sum[i] * scale * rows.weight[i]; }
  }
}

class AddRmsNormKernel final : public Kernel {
 public:
  std::shared_ptr<user_op::OpKernelCache> InitOpKernelCache(
      user_op::KernelCacheContext* ctx) const override {
    return first_head(ctx, "x", 0, 1);
  }

 private:
  void Compute(user_op::KernelComputeContext* ctx, user_op::OpKernelState*,
               const user_op::OpKernelCache* cache) const override {
    const auto& shape = ctx->Tensor4ArgNameAndIndex("x", 0)->shape_view();
    Rows rows;
    rows.x = input(ctx, "x");
    rows.residual = input(ctx, "residual");
    rows.weight = input(ctx, "weight");
    rows.y = output(ctx, "y");
    rows.sum = output(ctx, "sum");
    rows.inv_rms = output(ctx, "inv_rms");
    rows.n = shape.At(shape.NumAxes() - 1);
    rows.epsilon = ctx->Attr<double>("epsilon");
    const RowDropout dropout(ctx, cache, shape);
    parallel_for(shape.Count(0, shape.NumAxes() - 1),
                 std::max<int64_t>(1, kGrainSize / std::max<int64_t>(1, rows.n)),
                 [&](int64_t begin, int64_t end) {
                   if (!dropout) {
                     add_and_normalize(rows, rows.x + begin * rows.n, begin, end);
                     return;
                   }
                   auto kept = dropout.buffer();
                   for (int64_t row = begin; row < end; ++row) {
                     dropout.factors(row, kept.data());
                     multiply(rows.x + row * rows.n, kept.data(), rows.n, kept.data());
                     add_and_normalize(rows, kept.data(), row, row + 1);
                   }
                 });
  }
};

class AddRmsNormXGradKernel final : public Kernel {
 public:
  std::shared_ptr<user_op::OpKernelCache> InitOpKernelCache(
      user_op::KernelCacheContext* ctx) const override {
    return first_head(ctx, "residual_grad", 0, 1);
  }

 private:
  void Compute(user_op::KernelComputeContext* ctx, user_op::OpKernelState*,
               const user_op::OpKernelCache* cache) const override {
    const auto& shape = ctx->Tensor4ArgNameAndIndex("residual_grad", 0)->shape_view();
    const RowDropout dropout(ctx, cache, shape);
    const float* residual_grad = input(ctx, "residual_grad");
    float* x_grad = output(ctx, "x_grad");
    const int64_t n = shape.At(shape.NumAxes() - 1);
    parallel_for(shape.Count(0, shape.NumAxes() - 1),
                 std::max<int64_t>(1, kGrainSize / std::max<int64_t>(1, n)),
                 [&](int64_t begin, int64_t end) {
                   auto kept = dropout.buffer();
                   for (int64_t row = begin; row < end; ++row) {
                     dropout.factors(row, kept.data());
                     multiply(residual_grad + row * n, kept.data(), n, x_grad + row * n);
                   }
                 });
  }
};

class AddRmsNormGradKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    RowNormGrad<float> norm;
    const auto& shape = ctx->Tensor4ArgNameAndIndex("sum", 0)->shape_view();
    norm.rows = shape.Count(0, shape.NumAxes() - 1);
    norm.n = shape.At(shape.NumAxes() - 1);
    norm.dy = input(ctx, "y_grad");
    norm.x = input(ctx, "sum");
    norm.mean = nullptr;
    norm.inv_std = input(ctx, "inv_rms");
    norm.gamma = input(ctx, "weight");
    norm.addend = input(ctx, "sum_grad");
    norm.dx = output(ctx, "residual_grad");
    row_norm_grad(norm);
    row_norm_param_grad(RowNormParamGrad<float>{norm.rows, norm.n, norm.dy, norm.x, nullptr,
                                                norm.inv_std, output(ctx, "weight_grad"),
                                                nullptr});
  }
};

REGISTER_KERNEL("oneflow_accel_add_rms_norm", make<AddRmsNormKernel>, is_float32_on_cpu("y"));
REGISTER_KERNEL("oneflow_accel_add_rms_norm_grad", make<AddRmsNormGradKernel>,
                is_float32_on_cpu("residual_grad"));
REGISTER_KERNEL("oneflow_accel_add_rms_norm_x_grad", make<AddRmsNormXGradKernel>,
                is_float32_on_cpu("x_grad"));

}  // namespace

}  // namespace oneflow_accel
