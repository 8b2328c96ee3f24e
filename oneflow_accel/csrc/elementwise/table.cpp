// The operators of one or two inputs that have a formula for each element, float32 and bfloat16, and
// their gradients, of which OneFlow hands some x and others y.
#include "activation/formulas.h"
#include "elementwise/map.h"

namespace oneflow_accel {

namespace {

// NaN is kept, and passes its gradient, as in PyTorch.
REGISTER_MAP("relu", {"x", "y"}, [](float x) { return 0.0F > x ? 0.0F : x; }, in_place("y", "x"));
REGISTER_MAP("relu_grad", {"dy", "y", "dx"},
             [](float dy, float y) { return y <= 0.0F ? 0.0F : dy; }, in_place("dx", "dy"));

REGISTER_MAP("gelu", {"in", "out"}, [](float x) { return gelu(x); });
REGISTER_MAP("gelu_grad", {"dy", "x", "dx"}, [](float dy, float x) { return dy * gelu_slope(x); });

REGISTER_MAP("fast_gelu", {"in", "out"}, [](float x) { return fast_gelu(x); });
REGISTER_MAP("fast_gelu_grad", {"dy", "x", "dx"}, [](float dy, float x) {
  return dy * gated_slope(x, fast_gelu_gate(x),
                          kTwoSqrtTwoOverPi * (1.0F + 3.0F * kGeluCubic * x * x));
});

// x sigmoid(1.702 x).
constexpr float kSteepness = 1.702F;
REGISTER_MAP("quick_gelu", {"x", "y"}, [](float x) { return x * simd::sigmoid(kSteepness * x); });
REGISTER_MAP("quick_gelu_grad", {"dy", "x", "dx"},
             [](float dy, float x) { return dy * gated_slope(x, kSteepness * x, kSteepness); });

REGISTER_MAP("silu", {"in", "out"}, [](float x) { return silu(x); });
REGISTER_MAP("silu_grad", {"dy", "x", "dx"},
             [](float dy, float x) { return dy * gated_slope(x, x, 1.0F); });

REGISTER_MAP("sigmoid", {"x", "y"}, [](float x) { return simd::sigmoid(x); });
REGISTER_MAP("sigmoid_grad", {"dy", "y", "dx"},
             [](float dy, float y) { return dy * (y * (1.0F - y)); });

REGISTER_MAP("tanh", {"x", "y"}, [](float x) { return simd::tanh(x); });
REGISTER_MAP("tanh_grad", {"dy", "x", "dx"}, [](float dy, float x) {
  const float y = simd::tanh(x);
  return dy * (1.0F - y * y);
});

REGISTER_MAP("exp", {"x", "y"}, [](float x) { return simd::exp(x); });
REGISTER_MAP("exp_grad", {"x", "dy", "dx"}, [](float x, float dy) { return simd::exp(x) * dy; });

REGISTER_MAP("negative", {"x", "y"}, [](float x) { return -x; });

REGISTER_MAP("reciprocal", {"x", "y"}, [](float x) { return 1.0F / x; });
REGISTER_MAP("reciprocal_grad", {"x", "dy", "dx"},
             [](float x, float dy) { return -dy / (x * x); });

REGISTER_MAP("sqrt", {"x", "y"}, [](float x) { return __builtin_sqrtf(x); });
REGISTER_MAP("sqrt_grad", {"x", "dy", "dx"},
             [](float x, float dy) { return 0.5F * dy / __builtin_sqrtf(x); });

REGISTER_MAP("rsqrt", {"x", "y"}, [](float x) { return 1.0F / __builtin_sqrtf(x); });
REGISTER_MAP("rsqrt_grad", {"x", "dy", "dx"},
             [](float x, float dy) { return -0.5F * dy / (x * __builtin_sqrtf(x)); });

REGISTER_MAP("square", {"x", "y"}, [](float x) { return x * x; });
REGISTER_MAP("square_grad", {"x", "dy", "dx"}, [](float x, float dy) { return 2.0F * x * dy; });

// swiglu, silu(gate) up, is defined in activation/swiglu.cpp, with its gradient.
REGISTER_MAP("oneflow_accel_swiglu", {"gate", "up", "out"},
             [](float gate, float up) { return silu(gate) * up; });

}  // namespace

}  // namespace oneflow_accel
