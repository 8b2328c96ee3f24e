// oneflow_accel_rope (float32, bfloat16 by float32 cosines): rotary position embedding (Su et al.
// 2021, "RoFormer", section 3.2). x is [before, time, between, dim] with time at `axis`; cosines
// and sines are [time, dim / 2]. Pairs of numbers turn by an angle: i and i + dim / 2, or
// neighbours where `interleaved`. With `inverse` they turn back, which is the gradient.
#include "common/infer.h"
#include "common/oneflow.h"
#include "softmax/row_set.h"

namespace oneflow_accel {

namespace rope {

// In a unity build it shares a file with other operators, whose rules are called the same.

using ::oneflow::Shape;

Maybe<void> infer(user_op::InferContext* ctx) {
  const Shape& x = ctx->InputShape("x", 0);
  const Shape& cosines = ctx->InputShape("cosines", 0);
  const int64_t axis = ctx->Attr<int64_t>("axis");
  if (axis < 0 || axis >= x.NumAxes() - 1 || x.At(x.NumAxes() - 1) % 2 != 0
      || cosines != Shape({x.At(axis), x.At(x.NumAxes() - 1) / 2})
      || ctx->InputShape("sines", 0) != cosines) {
    return Error::RuntimeError() << "rope along axis " << axis
                                 << " needs x of an even last axis, and cosines and sines of "
                                    "(time, dim / 2), not "
                                 << x.ToString() << ", " << cosines.ToString() << " and "
                                 << ctx->InputShape("sines", 0).ToString();
  }
  describe_output(ctx, "y", x);
  return Maybe<void>::Ok();
}

Maybe<void> infer_types(user_op::InferContext* ctx) {
  for (const char* name : {"cosines", "sines"}) {
    if (ctx->InputDType(name, 0) != DataType::kFloat) {
      return Error::RuntimeError() << "rope needs cosines and sines in float32";
    }
  }
  ctx->SetOutputDType("y", 0, ctx->InputDType("x", 0));
  return Maybe<void>::Ok();
}

// All axes but the last; cosines and sines go with the time.
Maybe<void> split(user_op::SbpContext* ctx) {
  const int64_t axes = ctx->LogicalTensorDesc4InputArgNameAndIndex("x", 0).shape().NumAxes();
  const int64_t time = ctx->Attr<int64_t>("axis");
  for (int64_t axis = 0; axis + 1 < axes; ++axis) {
    split_along(ctx, [=](const std::string& name) {
      return name == "x" || name == "y" ? axis : axis == time ? 0 : kWhole;
    });
  }
  return Maybe<void>::Ok();
}

const NewOperator g_operator =
    new_operator("oneflow_accel_rope", "x cosines sines", "y", infer, infer_types, split)
        .Attr<int64_t>("axis", 1).Attr<bool>("interleaved", false).Attr<bool>("inverse", false);

// One row of x, of 2 n numbers.
template <bool interleaved, typename T>
void turn(const T* x, const float* cosines, const float* sines, float sign, T* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const int64_t first = interleaved ? 2 * i : i;
    const int64_t second = interleaved ? 2 * i + 1 : i + n;
    const float a = to_float(x[first]);
    const float b = to_float(x[second]);
    const float sine = sign * sines[i];
    y[first] = from_float<T>(a * cosines[i] - b * sine);
    y[second] = from_float<T>(b * cosines[i] + a * sine);
  }
}

template <typename T>
void rope_kernel(Context* ctx) {
  const auto& shape = shape_of(ctx, "x");
  const auto axis = ctx->Attr<int64_t>("axis");
  const T* x = input<T>(ctx, "x");
  const float* cosines = input(ctx, "cosines");
  const float* sines = input(ctx, "sines");
  T* y = output<T>(ctx, "y");
  const int64_t time = shape.At(axis);
  const int64_t between = shape.Count(axis + 1, shape.NumAxes() - 1);
  const int64_t half = shape.At(shape.NumAxes() - 1) / 2;
  const float sign = ctx->Attr<bool>("inverse") ? -1.0F : 1.0F;
  const auto turn_row = ctx->Attr<bool>("interleaved") ? turn<true, T> : turn<false, T>;
  RowSet(ctx, "x").for_each(1, [=](int64_t row, int64_t first) {
    const int64_t angle = row / between % time * half;
    turn_row(x + first, cosines + angle, sines + angle, sign, y + first, half);
  });
}

REGISTER_KERNELS(rope_kernel, "oneflow_accel_rope", "y");

}  // namespace rope

}  // namespace oneflow_accel
