// cast between float32 and the types that models convert: bfloat16 and float64 both ways, integers
// and bool to float32.
#include "common/oneflow.h"
#include "common/threads.h"

namespace oneflow_accel {

namespace {

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
    // A bool is a byte of 0 or 1.
    const auto* x = static_cast<const From*>(ctx->Tensor4ArgNameAndIndex("in", 0)->raw_dptr());
    auto* y = static_cast<To*>(out->mut_raw_dptr());
    parallel_for(out->shape_view().elem_cnt(), kGrainSize, [=](int64_t begin, int64_t end) {
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) { y[i] = converted<To>(x[i]); }
    });
  }
};

template <typename From, typename To>
KernelRegistration cast_kernel(DataType from = kDataType<From>) {
  return KernelRegistration(
      registry("cast", make<CastKernel<From, To>>,
               is_on_cpu("out", kDataType<To>) && (user_op::HobDataType("in", 0) == from)));
}

const KernelRegistration g_casts[] = {
    cast_kernel<double, float>(),
    cast_kernel<int64_t, float>(),
    cast_kernel<int32_t, float>(),
    cast_kernel<int8_t, float>(),
    cast_kernel<uint8_t, float>(),
    cast_kernel<uint8_t, float>(::oneflow::kBool),
    cast_kernel<Bfloat16, float>(),
    cast_kernel<float, double>(),
    cast_kernel<float, Bfloat16>(),
};

}  // namespace

}  // namespace oneflow_accel
