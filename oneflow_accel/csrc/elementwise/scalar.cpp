// scalar_add, scalar_mul and scalar_div (what OneFlow emits for x + 1.0, x - 1.0, x * 0.5 and
// x / 2.0), scalar_pow and scalar_pow_grad, float32 and bfloat16. The number is float32 whatever
// the tensor is.
#include <cmath>
#include <functional>
#include <limits>

#include "common/oneflow.h"
#include "elementwise/map.h"

namespace oneflow_accel {

namespace {

double scalar_operand(const user_op::KernelComputeContext* ctx) {
  return ctx->Attr<bool>("has_int_operand") ? static_cast<double>(ctx->Attr<int64_t>("int_operand"))
                                            : ctx->Attr<double>("float_operand");
}

template <typename T, typename Operation>
class ScalarKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const auto y = static_cast<float>(scalar_operand(ctx));
    map<T>(ctx, "out", [=](float x) { return Operation()(x, y); }, "in");
  }
};

template <typename T>
using ScalarAddKernel = ScalarKernel<T, std::plus<float>>;
template <typename T>
using ScalarMulKernel = ScalarKernel<T, std::multiplies<float>>;
template <typename T>
using ScalarDivKernel = ScalarKernel<T, std::divides<float>>;

// Calls fn(power) with power(x) = x^e. The exponents that models use (squares, cubes, roots) are
// vector code, the others one call of std::pow per element.
template <typename Fn>
void with_power(double e, const Fn& fn) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  // As std::pow has it, and unlike a root, the power 0.5 of -infinity is infinity.
  const auto root = [=](float x) { return __builtin_sqrtf(x == -kInfinity ? kInfinity : x); };
  const auto exponent = static_cast<float>(e);
  if (exponent == 2.0F) {
    fn([](float x) { return x * x; });
  } else if (exponent == 3.0F) {
    fn([](float x) { return x * x * x; });
  } else if (exponent == 0.5F) {
    fn(root);
  } else if (exponent == -0.5F) {
    fn([=](float x) { return 1.0F / root(x); });
  } else if (exponent == -1.0F) {
    fn([](float x) { return 1.0F / x; });
  } else if (exponent == 1.0F) {
    fn([](float x) { return x; });
  } else {
    fn([=](float x) { return std::pow(x, exponent); });
  }
}

template <typename T>
class ScalarPowKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    with_power(scalar_operand(ctx), [=](auto power) { map<T>(ctx, "out", power, "in"); });
  }
};

// dx = dy e x^(e - 1).
template <typename T>
class ScalarPowGradKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const double exponent = scalar_operand(ctx);
    // At x = 0 as well.
    if (exponent == 0.0) { return map<T>(ctx, "dx", [](float) { return 0.0F; }, "x"); }
    with_power(exponent - 1.0, [=](auto power) {
      const auto scale = static_cast<float>(exponent);
      map<T>(ctx, "dx", [=](float x, float dy) { return power(x) * (scale * dy); }, "x", "dy");
    });
  }
};

REGISTER_KERNELS(ScalarAddKernel, float, Bfloat16)("scalar_add", "out", in_place("out", "in"));
REGISTER_KERNELS(ScalarMulKernel, float, Bfloat16)("scalar_mul", "out", in_place("out", "in"));
REGISTER_KERNELS(ScalarDivKernel, float, Bfloat16)("scalar_div", "out", in_place("out", "in"));
REGISTER_KERNELS(ScalarPowKernel, float, Bfloat16)("scalar_pow", "out", in_place("out", "in"));
REGISTER_KERNELS(ScalarPowGradKernel, float, Bfloat16)("scalar_pow_grad", "dx");

}  // namespace

}  // namespace oneflow_accel
