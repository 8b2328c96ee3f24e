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

double scalar_operand(const Context* ctx) {
  return ctx->Attr<bool>("has_int_operand") ? static_cast<double>(ctx->Attr<int64_t>("int_operand"))
                                            : ctx->Attr<double>("float_operand");
}

template <typename T, typename Operation>
void scalar_kernel(Context* ctx) {
  const auto y = static_cast<float>(scalar_operand(ctx));
  map<T>(ctx, "out", [=](float x) { return Operation()(x, y); }, "in");
}

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
void scalar_pow_kernel(Context* ctx) {
  with_power(scalar_operand(ctx), [=](auto power) { map<T>(ctx, "out", power, "in"); });
}

// dx = dy e x^(e - 1).
template <typename T>
void scalar_pow_grad_kernel(Context* ctx) {
  const double exponent = scalar_operand(ctx);
  // At x = 0 as well.
  if (exponent == 0.0) {
    return map<T>(ctx, "dx", [](float) { return 0.0F; }, "x");
  }
  with_power(exponent - 1.0, [=](auto power) {
    const auto scale = static_cast<float>(exponent);
    map<T>(ctx, "dx", [=](float x, float dy) { return power(x) * (scale * dy); }, "x", "dy");
  });
}

template <typename Operation>
bool register_scalar(const char* op) {
  const auto typed = [](auto zero) { return scalar_kernel<decltype(zero), Operation>; };
  return register_typed_kernels<float, Bfloat16>(typed, op, "out", in_place("out", "in"));
}
const bool g_scalar[] = {register_scalar<std::plus<float>>("scalar_add"),
                         register_scalar<std::multiplies<float>>("scalar_mul"),
                         register_scalar<std::divides<float>>("scalar_div")};

REGISTER_KERNELS(scalar_pow_kernel, "scalar_pow", "out", in_place("out", "in"));
REGISTER_KERNELS(scalar_pow_grad_kernel, "scalar_pow_grad", "dx");

}  // namespace

}  // namespace oneflow_accel
