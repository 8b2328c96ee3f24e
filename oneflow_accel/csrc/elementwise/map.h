// Kernels whose output has one element for each element of their inputs, all of one shape.
#pragma once

#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include "common/bfloat16.h"
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

// map() of a formula and a type, of one or two inputs: b is a where there is one.
using MapSignature = void(int64_t n, const void* a, const void* b, void* out);

// `arguments` names the inputs, then the output.
class MapKernel final : public Kernel {
 public:
  MapKernel(std::vector<std::string> arguments, std::function<MapSignature> map)
      : arguments_(std::move(arguments)), map_(std::move(map)) {}

 private:
  void Compute(::oneflow::user_op::KernelComputeContext* ctx) const override {
    const auto* a = ctx->Tensor4ArgNameAndIndex(arguments_.front(), 0);
    const auto* b = ctx->Tensor4ArgNameAndIndex(arguments_[arguments_.size() - 2], 0);
    auto* out = ctx->Tensor4ArgNameAndIndex(arguments_.back(), 0);
    map_(out->shape_view().elem_cnt(), a->raw_dptr(), b->raw_dptr(), out->mut_raw_dptr());
  }

  const std::vector<std::string> arguments_;
  const std::function<MapSignature> map_;
};

template <typename T, typename Formula>
std::function<MapSignature> map_of(const Formula& formula) {
  return [=](int64_t n, const void* a, const void* b, void* out) {
    if constexpr (std::is_invocable_v<Formula, float>) {
      map(n, static_cast<T*>(out), formula, static_cast<const T*>(a));
    } else {
      map(n, static_cast<T*>(out), formula, static_cast<const T*>(a), static_cast<const T*>(b));
    }
  };
}

// Such kernels for float32 and bfloat16: out = formula(in), or formula(a, b).
template <typename Formula>
std::vector<KernelRegistration> map_kernels(
    const char* op, const std::vector<std::string>& arguments, const Formula& formula,
    const ::oneflow::user_op::InplaceProposalFn& in_place = nullptr) {
  const auto kernel = [&](const std::function<MapSignature>& map, const auto& matches) {
    const auto make = [=] { return ::oneflow::user_op::NewOpKernel<MapKernel>(arguments, map); };
    return KernelRegistration(registry(op, make, matches(arguments.back()), in_place));
  };
  return {kernel(map_of<float>(formula), is_float32_on_cpu),
          kernel(map_of<Bfloat16>(formula), is_bfloat16_on_cpu)};
}

}  // namespace oneflow_accel

#define REGISTER_MAP(...) \
  static const auto OF_PP_CAT(g_map, __COUNTER__) = ::oneflow_accel::map_kernels(__VA_ARGS__)
