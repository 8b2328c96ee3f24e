// scalar_add, scalar_mul and scalar_div, float32 and bfloat16: what OneFlow emits for x + 1.0,
// x - 1.0, x * 0.5 and x / 2.0. The number is float32 whatever the tensor is.
#include "common/bfloat16.h"
#include "common/threads.h"
#include "elementwise/scalar.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

template <typename T>
using ScalarMap = void (*)(const T* x, float scalar, T* y, int64_t n);

void add(const float* x, float scalar, float* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { y[i] = x[i] + scalar; }
}
void add(const Bfloat16* x, float scalar, Bfloat16* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { y[i] = from_float<Bfloat16>(to_float(x[i]) + scalar); }
}

void multiply(const float* x, float scalar, float* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { y[i] = x[i] * scalar; }
}
void multiply(const Bfloat16* x, float scalar, Bfloat16* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { y[i] = from_float<Bfloat16>(to_float(x[i]) * scalar); }
}

void divide(const float* x, float scalar, float* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { y[i] = x[i] / scalar; }
}
void divide(const Bfloat16* x, float scalar, Bfloat16* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { y[i] = from_float<Bfloat16>(to_float(x[i]) / scalar); }
}

template <typename T>
class ScalarMathKernel final : public Kernel {
 public:
  explicit ScalarMathKernel(ScalarMap<T> map) : map_(map) {}

 private:
  void Compute(user_op::KernelComputeContext* ctx) const override {
    auto* out = ctx->Tensor4ArgNameAndIndex("out", 0);
    const auto scalar = static_cast<float>(scalar_operand(ctx));
    const auto* x = static_cast<const T*>(ctx->Tensor4ArgNameAndIndex("in", 0)->raw_dptr());
    auto* y = static_cast<T*>(out->mut_raw_dptr());
    parallel_for(out->shape_view().elem_cnt(), kGrainSize, [=](int64_t begin, int64_t end) {
      map_(x + begin, scalar, y + begin, end - begin);
    });
  }

  ScalarMap<T> map_;
};

template <typename T>
user_op::OpKernelCreateFn scalar_kernel(ScalarMap<T> map) {
  return [=] { return user_op::NewOpKernel<ScalarMathKernel<T>>(map); };
}

REGISTER_KERNEL("scalar_add", scalar_kernel<float>(add), is_float32_on_cpu("out"),
                in_place("out", "in"));
REGISTER_KERNEL("scalar_add", scalar_kernel<Bfloat16>(add), is_bfloat16_on_cpu("out"),
                in_place("out", "in"));
REGISTER_KERNEL("scalar_mul", scalar_kernel<float>(multiply), is_float32_on_cpu("out"),
                in_place("out", "in"));
REGISTER_KERNEL("scalar_mul", scalar_kernel<Bfloat16>(multiply), is_bfloat16_on_cpu("out"),
                in_place("out", "in"));
REGISTER_KERNEL("scalar_div", scalar_kernel<float>(divide), is_float32_on_cpu("out"),
                in_place("out", "in"));
REGISTER_KERNEL("scalar_div", scalar_kernel<Bfloat16>(divide), is_bfloat16_on_cpu("out"),
                in_place("out", "in"));

}  // namespace

}  // namespace oneflow_accel
