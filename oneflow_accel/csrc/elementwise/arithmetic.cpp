// The four operations of arithmetic, float32 and bfloat16: broadcast_add, _sub, _mul and _div;
// scalar_add_by_tensor and so on, whose second operand has one element (OneFlow's graphs emit them,
// for instance to scale gradients); and bias_add, whose second operand lies along one axis.
#include <functional>
#include <string>

#include "common/oneflow.h"
#include "elementwise/broadcast.h"

namespace oneflow_accel {

namespace {

template <typename T, typename Operation>
void compute(Context* ctx, const Broadcast& broadcast, const char* a, const char* b,
             const char* out) {
  broadcast.run(
      input<T>(ctx, a), input<T>(ctx, b), output<T>(ctx, out),
      [](const T* x, const T* y, T* z, const Rows& rows) { for_rows(Operation(), x, y, z, rows); });
}

// out = operation(a, b), the shapes of a and b broadcast.
template <typename T, typename Operation>
KernelFunction arithmetic_kernel(const char* a, const char* b, const char* out) {
  return [=](Context* ctx) {
    compute<T, Operation>(ctx, Broadcast(shape_of(ctx, a), shape_of(ctx, b)), a, b, out);
  };
}

template <typename T>
void bias_add_kernel(Context* ctx) {
  const Broadcast broadcast(shape_of(ctx, "a"), ctx->Attr<int32_t>("axis"));
  compute<T, std::plus<float>>(ctx, broadcast, "a", "b", "out");
}

REGISTER_KERNELS(bias_add_kernel, "bias_add", "out", in_place("out", "a"));

template <typename T, typename Operation>
bool register_arithmetic(const std::string& name) {
  const auto type = kDataType<T>;
  return register_kernels("broadcast_" + name,
                          kernel(arithmetic_kernel<T, Operation>("x", "y", "z")),
                          is_on_cpu("x", type) && is_on_cpu("z", type), in_place("z", "x"))
         && register_kernels("scalar_" + name + "_by_tensor",
                             kernel(arithmetic_kernel<T, Operation>("x", "scalar", "y")),
                             is_on_cpu("y", type), in_place("y", "x"));
}

template <typename T>
bool register_all() {
  return register_arithmetic<T, std::plus<float>>("add")
         && register_arithmetic<T, std::minus<float>>("sub")
         && register_arithmetic<T, std::multiplies<float>>("mul")
         && register_arithmetic<T, std::divides<float>>("div");
}
const bool g_arithmetic = register_all<float>() && register_all<Bfloat16>();

}  // namespace

}  // namespace oneflow_accel
