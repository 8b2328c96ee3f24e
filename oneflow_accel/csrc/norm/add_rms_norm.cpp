// oneflow_accel_add_rms_norm and its gradient, float32: sum = x + residual, and
// y = sum / sqrt(mean(sum^2) + epsilon) weight of each row (Zhang and Sennrich 2019). One pass over
// what memory holds, each way; kept are the sum and a number for each row.
#include <algorithm>

#include "common/arguments.h"
#include "common/infer.h"
#include "common/simd.h"
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
  describe_output(ctx, "y", x);
  describe_output(ctx, "sum", x);
  ::oneflow::DimVector rows;
  for (int64_t axis = 0; axis + 1 < x.NumAxes(); ++axis) { rows.push_back(x.At(axis)); }
  describe_output(ctx, "inv_rms", Shape(rows));
  return Maybe<void>::Ok();
}

Maybe<void> infer_grad(user_op::InferContext* ctx) {
  describe_output(ctx, "x_grad", ctx->InputShape("sum", 0));
  describe_output(ctx, "weight_grad", ctx->InputShape("weight", 0));
  return Maybe<void>::Ok();
}

Maybe<void> infer_types(user_op::InferContext* ctx) {
  return infer_one_dtype(ctx, "add_rms_norm");
}

// Rows do not know of each other; the weight's gradient is a sum over them.
Maybe<void> split_rows(user_op::SbpContext* ctx) {
  const user_op::OpArg argument = ctx->inputs().size() == 3 ? user_op::OpArg("residual", 0)
                                                            : user_op::OpArg("sum", 0);
  const int64_t axes = ctx->LogicalTensorDesc4InputArgNameAndIndex(argument.name(), 0)
                           .shape()
                           .NumAxes();
  for (int64_t axis = 0; axis + 1 < axes; ++axis) {
    split_all_but(ctx, axis, [](const std::string& name) {
      return name == "weight" || name == "weight_grad";
    });
  }
  return Maybe<void>::Ok();
}

REGISTER_USER_OP("oneflow_accel_add_rms_norm")
    .Input("x")
    .Input("residual")
    .Input("weight")
    .Output("y")
    .Output("sum")
    .Output("inv_rms")
    .Attr<double>("epsilon")
    .SetTensorDescInferFn(infer)
    .SetDataTypeInferFn(infer_types)
    .SetGetSbpFn(split_rows);

// The gradient of x, which is that of the residual too.
REGISTER_USER_OP("oneflow_accel_add_rms_norm_grad")
    .Input("y_grad")
    .Input("sum_grad")
    .Input("sum")
    .Input("inv_rms")
    .Input("weight")
    .Output("x_grad")
    .Output("weight_grad")
    .SetTensorDescInferFn(infer_grad)
    .SetDataTypeInferFn(infer_types)
    .SetGetSbpFn(split_rows);

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

ONEFLOW_ACCEL_SIMD
void add_and_normalize(const Rows& rows, int64_t begin, int64_t end) {
  // A strip's squares are summed up in float32, the strips in float64.
  constexpr int64_t kStrip = 256;
  const int64_t n = rows.n;
  for (int64_t row = begin; row < end; ++row) {
    const float* x = rows.x + row * n;
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
  void Compute(user_op::KernelComputeContext* ctx) const override {
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
    parallel_for(shape.Count(0, shape.NumAxes() - 1),
                 std::max<int64_t>(1, kGrainSize / std::max<int64_t>(1, rows.n)),
                 [&](int64_t begin, int64_t end) { add_and_normalize(rows, begin, end); });
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
    norm.dx = output(ctx, "x_grad");
    row_norm_grad(norm);
    row_norm_param_grad(RowNormParamGrad<float>{norm.rows, norm.n, norm.dy, norm.x, nullptr,
                                                norm.inv_std, output(ctx, "weight_grad"),
                                                nullptr});
  }
};

REGISTER_USER_KERNEL(listed("oneflow_accel_add_rms_norm"))
    .SetCreateFn<AddRmsNormKernel>()
    .SetIsMatchedHob(is_float32_on_cpu("y"))
    .SetPriority(kKernelPriority);
REGISTER_USER_KERNEL(listed("oneflow_accel_add_rms_norm_grad"))
    .SetCreateFn<AddRmsNormGradKernel>()
    .SetIsMatchedHob(is_float32_on_cpu("x_grad"))
    .SetPriority(kKernelPriority);

}  // namespace

}  // namespace oneflow_accel
