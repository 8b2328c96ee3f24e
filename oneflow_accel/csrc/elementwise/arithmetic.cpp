// The four operations of arithmetic, float32 and bfloat16: broadcast_add, _sub, _mul and _div;
// scalar_add_by_tensor and so on, whose second operand has one element (OneFlow's graphs emit them,
// for instance to scale gradients); and bias_add, whose second operand lies along one axis.
#include <string>
#include <utility>

#include "common/typed_kernels.h"
#include "elementwise/broadcast.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

// One loop for each way in which operands lie in a row, so that each is vector code. The output may
// be one of the operands.
template <typename T, typename Operation>
void for_rows(const T* a, const T* b, T* out, const Rows& rows, Operation operation) {
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

struct Arguments {
  const char* a;
  const char* b;
  const char* out;
};

// out = operation(a, b), the shapes of a and b broadcast, or b along the attribute `axis` of a.
template <typename T, typename Operation>
class ArithmeticKernel final : public Kernel {
 public:
  ArithmeticKernel(Arguments arguments, Operation operation, bool along_axis)
      : arguments_(arguments), operation_(operation), along_axis_(along_axis) {}

 private:
  Broadcast broadcast(user_op::KernelComputeContext* ctx) const {
    const auto& a = ctx->Tensor4ArgNameAndIndex(arguments_.a, 0)->shape_view();
    if (along_axis_) {
      const auto axis = ctx->Attr<int32_t>("axis");
      return {a.Count(0, axis), a.At(axis), a.Count(axis + 1)};
    }
    return {a, ctx->Tensor4ArgNameAndIndex(arguments_.b, 0)->shape_view()};
  }

  void Compute(user_op::KernelComputeContext* ctx) const override {
    const auto in = [&](const char* name) {
      return static_cast<const T*>(ctx->Tensor4ArgNameAndIndex(name, 0)->raw_dptr());
    };
    auto* out = ctx->Tensor4ArgNameAndIndex(arguments_.out, 0);
    broadcast(ctx).run(in(arguments_.a), in(arguments_.b), static_cast<T*>(out->mut_raw_dptr()),
                       [operation = operation_](const T* a, const T* b, T* y, const Rows& rows) {
                         for_rows(a, b, y, rows, operation);
                       });
  }

  Arguments arguments_;
  Operation operation_;
  bool along_axis_;
};

template <typename T, typename Operation>
user_op::OpKernelCreateFn create(Arguments arguments, Operation operation,
                                 bool along_axis = false) {
  return [=] {
    return user_op::NewOpKernel<ArithmeticKernel<T, Operation>>(arguments, operation, along_axis);
  };
}

const auto kAdd = [](float x, float y) { return x + y; };

class Registrations {
 public:
  Registrations() {
    add("add", kAdd);
    add("sub", [](float x, float y) { return x - y; });
    add("mul", [](float x, float y) { return x * y; });
    add("div", [](float x, float y) { return x / y; });
    add_bias<float>();
    add_bias<Bfloat16>();
  }

 private:
  template <typename Operation>
  void add(const std::string& name, Operation operation) {
    add_typed<float>(name, operation);
    add_typed<Bfloat16>(name, operation);
  }
  template <typename T, typename Operation>
  void add_typed(const std::string& name, Operation operation) {
    const auto type = data_type<T>();
    all_.emplace_back(registry(("broadcast_" + name).c_str(), create<T>({"x", "y", "z"}, operation),
                               is_on_cpu("x", type) && is_on_cpu("z", type)));
    all_.emplace_back(registry(("scalar_" + name + "_by_tensor").c_str(),
                               create<T>({"x", "scalar", "y"}, operation), is_on_cpu("y", type),
                               in_place("y", "x")));
  }
  template <typename T>
  void add_bias() {
    all_.emplace_back(registry("bias_add", create<T>({"a", "b", "out"}, kAdd, true),
                               is_on_cpu("out", data_type<T>()), in_place("out", "a")));
  }

  std::vector<KernelRegistration> all_;
};
const Registrations g_arithmetic;

}  // namespace

}  // namespace oneflow_accel
