// oneflow_accel_rope (float32, bfloat16 by float32 cosines): rotary position embedding (Su et al.
// 2021, "RoFormer", section 3.2). x is [before, time, between, dim] with time at `axis`; cosines
// and sines are [time, dim / 2]. Pairs of numbers turn by an angle: i and i + dim / 2, or
// neighbours where `interleaved`. With `inverse` they turn back, which is the gradient.
#include <algorithm>

#include "common/arguments.h"
#include "common/infer.h"
#include "common/simd_math.h"
#include "common/threads.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;
using ::oneflow::Error;
using ::oneflow::Maybe;
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
    if (ctx->InputDType(name, 0) != ::oneflow::DataType::kFloat) {
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
  const user_op::OpArg cosines("cosines", 0);
  const user_op::OpArg sines("sines", 0);
  for (int64_t axis = 0; axis + 1 < axes; ++axis) {
    auto builder = ctx->NewBuilder();
    builder.Split(user_op::OpArg("x", 0), axis).Split(user_op::OpArg("y", 0), axis);
    if (axis == time) {
      builder.Split(cosines, 0).Split(sines, 0);
    } else {
      builder.Broadcast(cosines).Broadcast(sines);
    }
    builder.Build();
  }
  return Maybe<void>::Ok();
}

REGISTER_USER_OP("oneflow_accel_rope")
    .Input("x")
    .Input("cosines")
    .Input("sines")
    .Output("y")
    .Attr<int64_t>("axis", 1)
    .Attr<bool>("interleaved", false)
    .Attr<bool>("inverse", false)
    .SetTensorDescInferFn(infer)
    .SetDataTypeInferFn(infer_types)
    .SetGetSbpFn(split);

// One row of x, of 2 n numbers.
template <typename T>
ONEFLOW_ACCEL_INLINE void turn_halves(const T* x, const float* cosines, const float* sines,
                                      float sign, T* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float a = to_float(x[i]);
    const float b = to_float(x[i + n]);
    const float sine = sign * sines[i];
    y[i] = from_float<T>(a * cosines[i] - b * sine);
    y[i + n] = from_float<T>(b * cosines[i] + a * sine);
  }
}

template <typename T>
ONEFLOW_ACCEL_INLINE void turn_neighbours(const T* x, const float* cosines, const float* sines,
                                          float sign, T* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float a = to_float(x[2 * i]);
    const float b = to_float(x[2 * i + 1]);
    const float sine = sign * sines[i];
    y[2 * i] = from_float<T>(a * cosines[i] - b * sine);
    y[2 * i + 1] = from_float<T>(b * cosines[i] + a * sine);
  }
}

template <typename T>
struct Rows {
  const T* x;
  const float* cosines;
  const float* sines;
  T* y;
  int64_t time;
  int64_t between;
  int64_t half;
  float sign;
  bool interleaved;
};

// Rows of one time turn alike, and lie together.
template <typename T>
ONEFLOW_ACCEL_INLINE void turn(const Rows<T>& rows, int64_t begin, int64_t end) {
  const int64_t half = rows.half;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t angle = row / rows.between % rows.time * half;
    const T* x = rows.x + row * 2 * half;
    T* y = rows.y + row * 2 * half;
    if (rows.interleaved) {
      turn_neighbours(x, rows.cosines + angle, rows.sines + angle, rows.sign, y, half);
    } else {
      turn_halves(x, rows.cosines + angle, rows.sines + angle, rows.sign, y, half);
    }
  }
}

void turn_rows(const Rows<float>& rows, int64_t begin, int64_t end) { turn(rows, begin, end); }
void turn_rows(const Rows<Bfloat16>& rows, int64_t begin, int64_t end) { turn(rows, begin, end); }

template <typename T>
class RopeKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const auto& shape = ctx->Tensor4ArgNameAndIndex("x", 0)->shape_view();
    const int64_t axis = ctx->Attr<int64_t>("axis");
    const int64_t axes = shape.NumAxes();
    Rows<T> rows;
    rows.x = input<T>(ctx, "x");
    rows.cosines = input(ctx, "cosines");
    rows.sines = input(ctx, "sines");
    rows.y = output<T>(ctx, "y");
    rows.time = shape.At(axis);
    rows.between = shape.Count(axis + 1, axes - 1);
    rows.half = shape.At(axes - 1) / 2;
    rows.sign = ctx->Attr<bool>("inverse") ? -1.0F : 1.0F;
    rows.interleaved = ctx->Attr<bool>("interleaved");
    if (shape.elem_cnt() == 0) { return; }
    parallel_for(shape.Count(0, axes - 1), std::max<int64_t>(1, kGrainSize / (2 * rows.half)),
                 [&](int64_t begin, int64_t end) { turn_rows(rows, begin, end); });
  }
};

REGISTER_KERNEL("oneflow_accel_rope", make<RopeKernel<float>>, is_float32_on_cpu("y"));
REGISTER_KERNEL("oneflow_accel_rope", make<RopeKernel<Bfloat16>>, is_bfloat16_on_cpu("y"));

}  // namespace

}  // namespace oneflow_accel
