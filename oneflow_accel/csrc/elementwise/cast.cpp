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
void cast_kernel(Context* ctx) {
  auto* out = argument(ctx, "out");
  // A bool is a byte of 0 or 1.
  const auto* x = static_cast<const From*>(argument(ctx, "in")->raw_dptr());
  auto* y = static_cast<To*>(out->mut_raw_dptr());
  parallel_for(out->shape_view().elem_cnt(), kGrainSize, [=](int64_t begin, int64_t end) {
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) { y[i] = converted<To>(x[i]); }
  });
}

template <typename From, typename To>
bool register_cast(DataType from = kDataType<From>) {
  return register_kernels("cast", kernel(cast_kernel<From, To>),
                          is_on_cpu("out", kDataType<To>) && is_on_cpu("in", from));
}

const bool g_casts[] = {
    register_cast<double, float>(),   register_cast<int64_t, float>(),
    register_cast<int32_t, float>(),  register_cast<int8_t, float>(),
    register_cast<uint8_t, float>(),  register_cast<uint8_t, float>(::oneflow::kBool),
    register_cast<Bfloat16, float>(), register_cast<float, double>(),
    register_cast<float, Bfloat16>()};

}  // namespace

}  // namespace oneflow_accel
