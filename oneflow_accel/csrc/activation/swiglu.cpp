// oneflow_accel_swiglu (float32, bfloat16) and its gradient (float32): silu(gate) up (Shazeer 2020,
// "GLU Variants Improve Transformer"). The gradient computes silu again from the inputs.
#include "activation/gate.h"
#include "activation/silu.h"
#include "common/arguments.h"
#include "common/infer.h"
#include "elementwise/map.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;
using ::oneflow::Error;
using ::oneflow::Maybe;

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

Maybe<void> infer_types(user_op::InferContext* ctx) { return infer_one_dtype(ctx, "swiglu"); }

Maybe<void> split_any_axis(user_op::SbpContext* ctx) {
  const int64_t axes = ctx->LogicalTensorDesc4InputArgNameAndIndex("gate", 0).shape().NumAxes();
  for (int64_t axis = 0; axis < axes; ++axis) {
    ctx->NewBuilder().Split(ctx->inputs(), axis).Split(ctx->outputs(), axis).Build();
  }
  return Maybe<void>::Ok();
}

REGISTER_USER_OP("oneflow_accel_swiglu")
    .Input("gate")
    .Input("up")
    .Output("out")
    .SetTensorDescInferFn(infer)
    .SetDataTypeInferFn(infer_types)
    .SetGetSbpFn(split_any_axis);

REGISTER_USER_OP("oneflow_accel_swiglu_grad")
    .Input("out_grad")
    .Input("gate")
    .Input("up")
    .Output("gate_grad")
    .Output("up_grad")
    .SetTensorDescInferFn(infer)
    .SetDataTypeInferFn(infer_types)
    .SetGetSbpFn(split_any_axis);

void swiglu_float32(const float* gate, const float* up, float* out, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { out[i] = silu(gate[i]) * up[i]; }
}

void swiglu_bfloat16(const Bfloat16* gate, const Bfloat16* up, Bfloat16* out, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    out[i] = from_float<Bfloat16>(silu(to_float(gate[i])) * to_float(up[i]));
  }
}

void swiglu_grad(const float* out_grad, const float* gate, const float* up, float* gate_grad,
                 float* up_grad, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float x = gate[i];
    const float d = out_grad[i];
    gate_grad[i] = d * up[i] * gated_slope(x, x, 1.0F);
    up_grad[i] = d * silu(x);
  }
}

class SwigluGradKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const float* out_grad = input(ctx, "out_grad");
    const float* gate = input(ctx, "gate");
    const float* up = input(ctx, "up");
    float* gate_grad = output(ctx, "gate_grad");
    float* up_grad = output(ctx, "up_grad");
    const int64_t n = ctx->Tensor4ArgNameAndIndex("gate", 0)->shape_view().elem_cnt();
    parallel_for(n, kGrainSize, [=](int64_t begin, int64_t end) {
      swiglu_grad(out_grad + begin, gate + begin, up + begin, gate_grad + begin, up_grad + begin,
                  end - begin);
    });
  }
};

REGISTER_KERNEL("oneflow_accel_swiglu", map_kernel("gate", "up", "out", swiglu_float32),
                is_float32_on_cpu("out"));
REGISTER_KERNEL("oneflow_accel_swiglu", map_kernel("gate", "up", "out", swiglu_bfloat16),
                is_bfloat16_on_cpu("out"));
REGISTER_KERNEL("oneflow_accel_swiglu_grad", make<SwigluGradKernel>,
                is_float32_on_cpu("gate_grad"));

}  // namespace

}  // namespace oneflow_accel
