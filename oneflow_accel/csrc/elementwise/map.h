// Kernels whose output has one element for each element of their inputs, all of one shape.
#pragma once

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

// out = formula(in), or formula(a, b). `arguments` names the inputs, then the output.
template <typename T, typename Formula>
class MapKernel final : public Kernel {
 public:
  MapKernel(std::vector<std::string> arguments, Formula formula)
      : arguments_(std::move(arguments)), formula_(formula) {}

 private:
  void Compute(::oneflow::user_op::KernelComputeContext* ctx) const override {
    auto* tensor = ctx->Tensor4ArgNameAndIndex(arguments_.back(), 0);
    auto* out = static_cast<T*>(tensor->mut_raw_dptr());
    const int64_t n = tensor->shape_view().elem_cnt();
    const auto in = [&](std::size_t i) {
      return static_cast<const T*>(ctx->Tensor4ArgNameAndIndex(arguments_[i], 0)->raw_dptr());
    };
    if constexpr (std::is_invocable_v<Formula, float>) {
      map(n, out, formula_, in(0));
    } else {
      map(n, out, formula_, in(0), in(1));
    }
  }

  std::vector<std::string> arguments_;
  Formula formula_;
};

// Such kernels for float32 and bfloat16.
template <typename Formula>
std::vector<KernelRegistration> map_kernels(
    const char* op, const std::vector<std::string>& arguments, Formula formula,
    ::oneflow::user_op::InplaceProposalFn in_place = nullptr) {
  using ::oneflow::user_op::NewOpKernel;
  const std::string& out = arguments.back();
  return {
      KernelRegistration(registry(
          op, [=] { return NewOpKernel<MapKernel<float, Formula>>(arguments, formula); },
          is_float32_on_cpu(out), in_place)),
      KernelRegistration(registry(
          op, [=] { return NewOpKernel<MapKernel<Bfloat16, Formula>>(arguments, formula); },
          is_bfloat16_on_cpu(out), in_place)),
  };
}

}  // namespace oneflow_accel

#define REGISTER_MAP(...) \
  static const auto OF_PP_CAT(g_map, __COUNTER__) = ::oneflow_accel::map_kernels(__VA_ARGS__)
