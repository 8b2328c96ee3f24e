// scalar_pow and scalar_pow_grad, float32: x ** e for a number e. The exponents that models use
// (squares, cubes, roots) are vector code, the others one call of std::pow per element.
#include <algorithm>
#include <cmath>
#include <limits>

#include "common/arguments.h"
#include "common/threads.h"
#include "elementwise/scalar.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// y = x^e. As std::pow has it, and unlike a root, the power 0.5 of -infinity is infinity. The exponent is tested once: each branch is a loop of its own.
void power(const float* x, float exponent, float* y, int64_t n) {
  if (exponent == 2.0F) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) { y[i] = x[i] * x[i]; }
  } else if (exponent == 3.0F) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) { y[i] = x[i] * x[i] * x[i]; }
  } else if (exponent == 0.5F) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) { y[i] = __builtin_sqrtf(x[i] == -kInfinity ? kInfinity : x[i]); }
  } else if (exponent == -0.5F) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      y[i] = 1.0F / __builtin_sqrtf(x[i] == -kInfinity ? kInfinity : x[i]);
    }
  } else if (exponent == -1.0F) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) { y[i] = 1.0F / x[i]; }
  } else if (exponent == 1.0F) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) { y[i] = x[i]; }
  } else {
    for (int64_t i = 0; i < n; ++i) { y[i] = std::pow(x[i], exponent); }
  }
}

void scale_by(const float* factor, float scale, float* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { y[i] *= scale * factor[i]; }
}

class ScalarPowKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    auto* out = ctx->Tensor4ArgNameAndIndex("out", 0);
    const auto exponent = static_cast<float>(scalar_operand(ctx));
    const float* x = input(ctx, "in");
    float* y = out->mut_dptr<float>();
    parallel_for(out->shape_view().elem_cnt(), kGrainSize, [=](int64_t begin, int64_t end) {
      power(x + begin, exponent, y + begin, end - begin);
    });
  }
};

// dx = dy e x^(e - 1).
class ScalarPowGradKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    // What is in the cache when it is needed again.
    constexpr int64_t kBlock = 1024;
    auto* out = ctx->Tensor4ArgNameAndIndex("dx", 0);
    const double exponent = scalar_operand(ctx);
    const float* x = input(ctx, "x");
    const float* dy = input(ctx, "dy");
    float* dx = out->mut_dptr<float>();
    parallel_for(out->shape_view().elem_cnt(), kGrainSize, [=](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i += kBlock) {
        const int64_t n = std::min(kBlock, end - i);
        if (exponent == 0.0) {
          std::fill_n(dx + i, n, 0.0F);  // At x = 0 as well.
          continue;
        }
        power(x + i, static_cast<float>(exponent - 1.0), dx + i, n);
        scale_by(dy + i, static_cast<float>(exponent), dx + i, n);
      }
    });
  }
};

REGISTER_KERNEL("scalar_pow", make<ScalarPowKernel>, is_float32_on_cpu("out"),
                in_place("out", "in"));
REGISTER_KERNEL("scalar_pow_grad", make<ScalarPowGradKernel>, is_float32_on_cpu("dx"));

}  // namespace

}  // namespace oneflow_accel
