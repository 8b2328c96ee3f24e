// cast between float32 and the types that models convert: bfloat16 and float64 both ways, integers
// and bool to float32.
#include "elementwise/map.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

template <typename From>
ONEFLOW_ACCEL_INLINE void convert_to_float(const From* x, float* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { y[i] = static_cast<float>(x[i]); }
}

void to_float32(const double* x, float* y, int64_t n) { convert_to_float(x, y, n); }
void to_float32(const int64_t* x, float* y, int64_t n) { convert_to_float(x, y, n); }
void to_float32(const int32_t* x, float* y, int64_t n) { convert_to_float(x, y, n); }
void to_float32(const int8_t* x, float* y, int64_t n) { convert_to_float(x, y, n); }
void to_float32(const uint8_t* x, float* y, int64_t n) { convert_to_float(x, y, n); }
void to_float32(const Bfloat16* x, float* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { y[i] = to_float(x[i]); }
}

void to_float64(const float* x, double* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { y[i] = x[i]; }
}

void to_bfloat16(const float* x, Bfloat16* y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { y[i] = from_float<Bfloat16>(x[i]); }
}

auto is_cast(::oneflow::DataType from, ::oneflow::DataType to) {
  return is_on_cpu("out", to) && (user_op::HobDataType("in", 0) == from);
}

REGISTER_KERNEL("cast", map_kernel<double, float>("in", "out", to_float32),
                is_cast(::oneflow::kDouble, ::oneflow::kFloat));
REGISTER_KERNEL("cast", map_kernel<int64_t, float>("in", "out", to_float32),
                is_cast(::oneflow::kInt64, ::oneflow::kFloat));
REGISTER_KERNEL("cast", map_kernel<int32_t, float>("in", "out", to_float32),
                is_cast(::oneflow::kInt32, ::oneflow::kFloat));
REGISTER_KERNEL("cast", map_kernel<int8_t, float>("in", "out", to_float32),
                is_cast(::oneflow::kInt8, ::oneflow::kFloat));
REGISTER_KERNEL("cast", map_kernel<uint8_t, float>("in", "out", to_float32),
                is_cast(::oneflow::kUInt8, ::oneflow::kFloat));

// A bool is a byte of 0 or 1.
REGISTER_KERNEL("cast", map_kernel<uint8_t, float>("in", "out", to_float32),
                is_cast(::oneflow::kBool, ::oneflow::kFloat));
REGISTER_KERNEL("cast", map_kernel<Bfloat16, float>("in", "out", to_float32),
                is_cast(::oneflow::kBFloat16, ::oneflow::kFloat));
REGISTER_KERNEL("cast", map_kernel("in", "out", to_float64),
                is_cast(::oneflow::kFloat, ::oneflow::kDouble));
REGISTER_KERNEL("cast", map_kernel("in", "out", to_bfloat16),
                is_cast(::oneflow::kFloat, ::oneflow::kBFloat16));

}  // namespace

}  // namespace oneflow_accel
