#include "elementwise/arithmetic.h"

#include <string>
#include <utility>


namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

// One loop for each way in which operands lie in a row, so that each is vector code. The output may
// be one of the operands.
template <typename T, typename Operation>
ONEFLOW_ACCEL_INLINE void for_rows(const T* a, const T* b, T* out, const Rows& rows,
                                   Operation operation) {
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

struct Add {
  ONEFLOW_ACCEL_INLINE float operator()(float x, float y) const { return x + y; }
};
struct Subtract {
  ONEFLOW_ACCEL_INLINE float operator()(float x, float y) const { return x - y; }
};
struct Multiply {
  ONEFLOW_ACCEL_INLINE float operator()(float x, float y) const { return x * y; }
};
struct Divide {
  ONEFLOW_ACCEL_INLINE float operator()(float x, float y) const { return x / y; }
};

template <typename T>
class BroadcastKernel final : public Kernel {
 public:
  BroadcastKernel(std::string a, std::string b, std::string out, RowsFunction<T> function)
      : a_(std::move(a)), b_(std::move(b)), out_(std::move(out)), function_(function) {}

 private:
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const auto* a = ctx->Tensor4ArgNameAndIndex(a_, 0);
    const auto* b = ctx->Tensor4ArgNameAndIndex(b_, 0);
    Broadcast(a->shape_view(), b->shape_view())
        .run(function_, static_cast<const T*>(a->raw_dptr()), static_cast<const T*>(b->raw_dptr()),
             static_cast<T*>(ctx->Tensor4ArgNameAndIndex(out_, 0)->mut_raw_dptr()));
  }

  std::string a_;
  std::string b_;
  std::string out_;
  RowsFunction<T> function_;
};

}  // namespace

void add_rows(const float* a, const float* b, float* out, const Rows& rows) {
  for_rows(a, b, out, rows, Add());
}
void add_rows(const Bfloat16* a, const Bfloat16* b, Bfloat16* out, const Rows& rows) {
  for_rows(a, b, out, rows, Add());
}
void subtract_rows(const float* a, const float* b, float* out, const Rows& rows) {
  for_rows(a, b, out, rows, Subtract());
}
void subtract_rows(const Bfloat16* a, const Bfloat16* b, Bfloat16* out, const Rows& rows) {
  for_rows(a, b, out, rows, Subtract());
}
void multiply_rows(const float* a, const float* b, float* out, const Rows& rows) {
  for_rows(a, b, out, rows, Multiply());
}
void multiply_rows(const Bfloat16* a, const Bfloat16* b, Bfloat16* out, const Rows& rows) {
  for_rows(a, b, out, rows, Multiply());
}
void divide_rows(const float* a, const float* b, float* out, const Rows& rows) {
  for_rows(a, b, out, rows, Divide());
}
void divide_rows(const Bfloat16* a, const Bfloat16* b, Bfloat16* out, const Rows& rows) {
  for_rows(a, b, out, rows, Divide());
}

template <typename T>
user_op::OpKernelCreateFn broadcast_kernel(const char* a, const char* b, const char* out,
                                           RowsFunction<T> function) {
  return [=] { return user_op::NewOpKernel<BroadcastKernel<T>>(a, b, out, function); };
}
template user_op::OpKernelCreateFn broadcast_kernel(const char*, const char*, const char*,
                                                    RowsFunction<float>);
template user_op::OpKernelCreateFn broadcast_kernel(const char*, const char*, const char*,
                                                    RowsFunction<Bfloat16>);

}  // namespace oneflow_accel
