// Kernels whose output has one element for each element of their inputs, all of one shape.
#pragma once

#include <initializer_list>
#include <string>
#include <type_traits>
#include <vector>

#include "common/bfloat16.h"
#include "common/oneflow.h"
#include "common/threads.h"

namespace oneflow_accel {

// out = formula(in), or formula(a, b), element by element, in float; the output may be one of the
// inputs. `arguments` names the inputs, then the output.
template <typename T, typename Formula>
class MapKernel final : public Kernel {
 public:
  MapKernel(std::vector<std::string> arguments, Formula formula)
      : arguments_(std::move(arguments)), formula_(formula) {}

 private:
  void Compute(::oneflow::user_op::KernelComputeContext* ctx) const override {
    auto* tensor = ctx->Tensor4ArgNameAndIndex(arguments_.back(), 0);
    auto* out = static_cast<T*>(tensor->mut_raw_dptr());
    const auto in = [&](std::size_t i) {
      return static_cast<const T*>(ctx->Tensor4ArgNameAndIndex(arguments_[i], 0)->raw_dptr());
    };
    const T* a = in(0);
    const T* b = in(arguments_.size() - 2);
    parallel_for(tensor->shape_view().elem_cnt(), kGrainSize,
                 [=](int64_t begin, int64_t end) { run(a, b, out, begin, end); });
  }

  void run(const T* a, const T* b, T* out, int64_t begin, int64_t end) const {
    const Formula formula = formula_;
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) {
      if constexpr (std::is_invocable_v<Formula, float>) {
        out[i] = from_float<T>(formula(to_float(a[i])));
      } else {
        out[i] = from_float<T>(formula(to_float(a[i]), to_float(b[i])));
      }
    }
  }

  std::vector<std::string> arguments_;
  Formula formula_;
};

// Registers such kernels for float32 and bfloat16.
template <typename Formula>
struct MapRegistration {
  KernelRegistration float32;
  KernelRegistration bfloat16;

  MapRegistration(const char* op, std::initializer_list<const char*> arguments, Formula formula,
                  ::oneflow::user_op::InplaceProposalFn in_place = nullptr)
      : float32(registry(op, create<float>(arguments, formula),
                         is_float32_on_cpu(*(arguments.end() - 1)), in_place)),
        bfloat16(registry(op, create<Bfloat16>(arguments, formula),
                          is_bfloat16_on_cpu(*(arguments.end() - 1)), in_place)) {}

 private:
  template <typename T>
  static ::oneflow::user_op::OpKernelCreateFn create(std::initializer_list<const char*> arguments,
                                                     Formula formula) {
    const std::vector<std::string> names(arguments.begin(), arguments.end());
    return [=] { return ::oneflow::user_op::NewOpKernel<MapKernel<T, Formula>>(names, formula); };
  }
};

}  // namespace oneflow_accel

#define REGISTER_MAP(...) \
  static const ::oneflow_accel::MapRegistration OF_PP_CAT(g_map, __COUNTER__)(__VA_ARGS__)
