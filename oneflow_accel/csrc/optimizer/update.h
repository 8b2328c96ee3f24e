// What the parameter updates (sgd_update, momentum_update, adam_update) have in common.
#pragma once

#include <cstdint>

#include "common/arguments.h"
#include "common/simd_math.h"

namespace oneflow_accel {

// How a gradient becomes the one that the update uses: scale * g + l1 * sign(p) + l2 * p.
struct GradientTerms {
  float scale;
  float l1;
  float l2;
};

ONEFLOW_ACCEL_INLINE float regularized(float gradient, float parameter, GradientTerms terms) {
  const float sign = static_cast<float>((parameter >= 0.0F) - (parameter <= 0.0F));
  return gradient * terms.scale + terms.l1 * sign + terms.l2 * parameter;
}

// The attributes and the optional inputs of every update operator, read once per call.
struct Update {
  GradientTerms terms;
  float learning_rate;
  float weight_decay;
  // A mixed-precision step with infinite gradients: nothing may change.
  bool skip;
  int64_t count;
};

Update read_update(::oneflow::user_op::KernelComputeContext* ctx);

// The optional one-element input `name`, or else `value`.
float input_or(::oneflow::user_op::KernelComputeContext* ctx, const char* name, float value);

// One parameter's step.
class UpdateKernel : public ::oneflow::user_op::OpKernel {
 public:
  // The operators have no outputs, so that OneFlow counts all of them as empty.
  bool AlwaysComputeWhenAllOutputsEmpty() const final { return true; }

 private:
  using ::oneflow::user_op::OpKernel::Compute;
  void Compute(::oneflow::user_op::KernelComputeContext* ctx) const final {
    const Update update = read_update(ctx);
    if (!update.skip) { apply(ctx, update); }
  }

  virtual void apply(::oneflow::user_op::KernelComputeContext* ctx, const Update& update) const = 0;
};

// Matches float32 parameters and gradients on the CPU. A parameter with a float16 copy to keep
// (model_copy) stays with OneFlow's kernel.
inline auto is_float32_update() {
  namespace user_op = ::oneflow::user_op;
  return is_float32_on_cpu("model")
         && (user_op::HobDataType("model_diff", 0) == ::oneflow::DataType::kFloat)
         && (user_op::HobInputSize("model_copy") == 0);
}

}  // namespace oneflow_accel
