// Kernels whose output has one element for each element of their inputs, all of one shape.
#pragma once

#include <array>
#include <type_traits>
#include <vector>

#include "common/oneflow.h"
#include "common/threads.h"

namespace oneflow_accel {

// out[i] = formula(in[i]...) for i < n, in float, in parallel; `out` may be one of the inputs.
template <typename T, typename Formula, typename... In>
void map(int64_t n, T* out, const Formula& formula, const In*... in) {
  parallel_for(n, kGrainSize, [=](int64_t begin, int64_t end) {
    const Formula f = formula;
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) { out[i] = from_float<T>(f(to_float(in[i])...)); }
  });
}

// The same for all elements of arguments, by their names.
template <typename T, typename Formula, typename... Name>
void map(user_op::KernelComputeContext* ctx, const char* out, const Formula& formula, Name... in) {
  map(ctx->Tensor4ArgNameAndIndex(out, 0)->shape_view().elem_cnt(), output<T>(ctx, out), formula,
      input<T>(ctx, in)...);
}

// The names of one or two inputs, then that of the output.
using MapArguments = std::array<const char*, 3>;

template <typename Formula>
constexpr int kMapInputs = std::is_invocable_v<Formula, float> ? 1 : 2;

// out = formula(in), or formula(a, b).
template <typename T, typename Formula>
class MapKernel final : public Kernel {
 public:
  MapKernel(const MapArguments& names, const Formula& formula) : names_(names), formula_(formula) {}

 private:
  void Compute(user_op::KernelComputeContext* ctx) const override {
    if constexpr (kMapInputs<Formula> == 1) {
      map<T>(ctx, names_[1], formula_, names_[0]);
    } else {
      map<T>(ctx, names_[2], formula_, names_[0], names_[1]);
    }
  }

  const MapArguments names_;
  const Formula formula_;
};

// Such kernels for tensors of each of the types.
template <typename... T, typename Formula>
std::vector<KernelRegistration> map_kernels(
    const char* op, const MapArguments& names, const Formula& formula,
    const InPlace& in_place = {}) {
  return {KernelRegistration(
      registry(op, [=] { return user_op::NewOpKernel<MapKernel<T, Formula>>(names, formula); },
               is_on_cpu(names[kMapInputs<Formula>], kDataType<T>), in_place))...};
}

}  // namespace oneflow_accel

#define REGISTER_MAP(...) \
  static const auto OF_PP_CAT(g_map, __COUNTER__) = \
      ::oneflow_accel::map_kernels<float, ::oneflow_accel::Bfloat16>(__VA_ARGS__)
