// cast between float32 and the types that models convert: bfloat16 and float64 both ways, integers
// and bool to float32.
#include "common/arguments.h"
#include "common/bfloat16.h"
#include "common/threads.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

template <typename To, typename From>
ONEFLOW_ACCEL_INLINE To converted(From x) {
  if constexpr (std::is_same_v<From, Bfloat16>) {
    return to_float(x);
  } else if constexpr (std::is_same_v<To, Bfloat16>) {
    return from_float<To>(x);
  } else {
    return static_cast<To>(x);
  }
}

template <typename From, typename To>
class CastKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    auto* out = ctx->Tensor4ArgNameAndIndex("out", 0);
    const auto* x = static_cast<const From*>(ctx->Tensor4ArgNameAndIndex("in", 0)->raw_dptr());
    auto* y = static_cast<To*>(out->mut_raw_dptr());
    parallel_for(out->shape_view().elem_cnt(), kGrainSize, [=](int64_t begin, int64_t end) {
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) { y[i] = converted<To>(x[i]); }
    });
  }
};

template <typename From, typename To>
KernelRegistration cast_kernel(::oneflow::DataType from, ::oneflow::DataType to) {
  return KernelRegistration(
      registry("cast", make<CastKernel<From, To>>,
               is_on_cpu("out", to) && (user_op::HobDataType("in", 0) == from)));
}

const KernelRegistration g_casts[] = {
    cast_kernel<double, float>(::oneflow::kDouble, ::oneflow::kFloat),
    cast_kernel<int64_t, float>(::oneflow::kInt64, ::oneflow::kFloat),
    cast_kernel<int32_t, float>(::oneflow::kInt32, ::oneflow::kFloat),
    cast_kernel<int8_t, float>(::oneflow::kInt8, ::oneflow::kFloat),
    cast_kernel<uint8_t, float>(::oneflow::kUInt8, ::oneflow::kFloat),
    // A bool is a byte of 0 or 1.
    cast_kernel<uint8_t, float>(::oneflow::kBool, ::oneflow::kFloat),
    cast_kernel<Bfloat16, float>(::oneflow::kBFloat16, ::oneflow::kFloat),
    cast_kernel<float, double>(::oneflow::kFloat, ::oneflow::kDouble),
    cast_kernel<float, Bfloat16>(::oneflow::kFloat, ::oneflow::kBFloat16),
};

}  // namespace

}  // namespace oneflow_accel
