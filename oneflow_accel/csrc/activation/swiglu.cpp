// oneflow_accel_swiglu, whose kernel is in elementwise/table.cpp, and its gradient, float32 and
// bfloat16: silu(gate) up (Shazeer 2020, "GLU Variants Improve Transformer"). The gradient computes
// silu again from the inputs.
#include "activation/formulas.h"
#include "common/infer.h"
#include "common/oneflow.h"
#include "common/threads.h"

namespace oneflow_accel {

namespace {

Maybe<void> infer(user_op::InferContext* ctx) {
  const auto& shape = ctx->InputShape("gate", 0);
  if (ctx->InputShape("up", 0) != shape) {
    return Error::RuntimeError() << "swiglu needs a gate and a factor of one shape, not "
                                 << shape.ToString() << " and "
                                 << ctx->InputShape("up", 0).ToString();
  }
  for (const auto& [name, index] : ctx->outputs()) { describe_output(ctx, name, shape); }
  return Maybe<void>::Ok();
}

Maybe<void> split_any_axis(user_op::SbpContext* ctx) {
  const int64_t axes = ctx->LogicalTensorDesc4InputArgNameAndIndex("gate", 0).shape().NumAxes();
  for (int64_t axis = 0; axis < axes; ++axis) {
    ctx->NewBuilder().Split(ctx->inputs(), axis).Split(ctx->outputs(), axis).Build();
  }
  return Maybe<void>::Ok();
}

const NewOperator g_operators[] = {
    new_operator("oneflow_accel_swiglu", "gate up", "out", infer, one_dtype("swiglu"),
                 split_any_axis),
    new_operator("oneflow_accel_swiglu_grad", "out_grad gate up", "gate_grad up_grad", infer,
                 one_dtype("swiglu"), split_any_axis)};

template <typename T>
void swiglu_grad_kernel(Context* ctx) {
  const T* out_grad = input<T>(ctx, "out_grad");
  const T* gate = input<T>(ctx, "gate");
  const T* up = input<T>(ctx, "up");
  T* gate_grad = output<T>(ctx, "gate_grad");
  T* up_grad = output<T>(ctx, "up_grad");
  const int64_t n = shape_of(ctx, "gate").elem_cnt();
  parallel_for(n, kGrainSize, [=](int64_t begin, int64_t end) {
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) {
      const float x = to_float(gate[i]);
      const float d = to_float(out_grad[i]);
      gate_grad[i] = from_float<T>(d * to_float(up[i]) * gated_slope(x, x, 1.0F));
      up_grad[i] = from_float<T>(d * silu(x));
    }
  });
}

REGISTER_KERNELS(swiglu_grad_kernel, "oneflow_accel_swiglu_grad", "gate_grad");

}  // namespace

}  // namespace oneflow_accel
