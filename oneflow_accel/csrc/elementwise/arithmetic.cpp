// The four operations of arithmetic, float32 and bfloat16: broadcast_add, _sub, _mul and _div;
// scalar_add_by_tensor and so on, whose second operand has one element (OneFlow's graphs emit them,
// for instance to scale gradients); and bias_add, whose second operand lies along one axis.
#include <functional>
#include <string>
#include <vector>

#include "common/oneflow.h"
#include "elementwise/broadcast.h"

namespace oneflow_accel {

namespace {

// One loop for each way in which operands lie in a row, so that each is vector code. The output may
// be one of the operands.
template <typename T, typename Operation>
void for_rows(const T* a, const T* b, T* out, const Rows& rows) {
  const Operation operation;
  const int64_t n = rows.length;
  for (int64_t r = 0; r < rows.count; ++r, a += rows.a_row, b += rows.b_row, out += n) {
    if (rows.b_is_scalar) {
      const float y = to_float(*b);
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) { out[i] = from_float<T>(operation(to_float(a[i]), y)); }
    } else if (rows.a_is_scalar) {
      const float x = to_float(*a);
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) { out[i] = from_float<T>(operation(x, to_float(b[i]))); }
    } else {
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) {
        out[i] = from_float<T>(operation(to_float(a[i]), to_float(b[i])));
      }
    }
  }
}

template <typename T, typename Operation>
void compute(user_op::KernelComputeContext* ctx, const Broadcast& broadcast, const char* a,
             const char* b, const char* out) {
  broadcast.run(input<T>(ctx, a), input<T>(ctx, b), output<T>(ctx, out),
                [](const T* x, const T* y, T* z, const Rows& rows) {
                  for_rows<T, Operation>(x, y, z, rows);
                });
}

// out = operation(a, b), the shapes of a and b broadcast.
template <typename T, typename Operation>
class ArithmeticKernel final : public Kernel {
 public:
  ArithmeticKernel(const char* a, const char* b, const char* out) : a_(a), b_(b), out_(out) {}

 private:
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const Broadcast broadcast(ctx->Tensor4ArgNameAndIndex(a_, 0)->shape_view(),
                              ctx->Tensor4ArgNameAndIndex(b_, 0)->shape_view());
    compute<T, Operation>(ctx, broadcast, a_, b_, out_);
  }

  const char* const a_;
  const char* const b_;
  const char* const out_;
};

template <typename T>
class BiasAddKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const auto& a = ctx->Tensor4ArgNameAndIndex("a", 0)->shape_view();
    const auto axis = ctx->Attr<int32_t>("axis");
    const Broadcast broadcast(a.Count(0, axis), a.At(axis), a.Count(axis + 1));
    compute<T, std::plus<float>>(ctx, broadcast, "a", "b", "out");
  }
};
REGISTER_KERNELS(BiasAddKernel, float, Bfloat16)("bias_add", "out", in_place("out", "a"));

template <typename T, typename Operation>
std::vector<KernelRegistration> arithmetic(const std::string& name) {
  const auto kernel = [](const char* a, const char* b, const char* out) {
    return [=] { return user_op::NewOpKernel<ArithmeticKernel<T, Operation>>(a, b, out); };
  };
  const auto type = kDataType<T>;
  return {KernelRegistration(registry("broadcast_" + name, kernel("x", "y", "z"),
                                      is_on_cpu("x", type) && is_on_cpu("z", type),
                                      in_place("z", "x"))),
          KernelRegistration(registry("scalar_" + name + "_by_tensor", kernel("x", "scalar", "y"),
                                      is_on_cpu("y", type), in_place("y", "x")))};
}
const std::vector<KernelRegistration> g_arithmetic[] = {
    arithmetic<float, std::plus<float>>("add"),
    arithmetic<float, std::minus<float>>("sub"),
    arithmetic<float, std::multiplies<float>>("mul"),
    arithmetic<float, std::divides<float>>("div"),
    arithmetic<Bfloat16, std::plus<float>>("add"),
    arithmetic<Bfloat16, std::minus<float>>("sub"),
    arithmetic<Bfloat16, std::multiplies<float>>("mul"),
    arithmetic<Bfloat16, std::divides<float>>("div"),
};

}  // namespace

}  // namespace oneflow_accel
