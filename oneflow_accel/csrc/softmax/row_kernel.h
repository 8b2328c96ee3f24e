// Kernels that treat each row of the last axis by itself.
#pragma once

#include <algorithm>
#include <string>

#include "common/oneflow.h"
#include "common/threads.h"

namespace oneflow_accel {

// Functions of these types treat `rows` rows of `n` elements each.
template <typename T>
using RowMap = void (*)(const T* x, T* y, int64_t rows, int64_t n);
template <typename T>
using RowGradient = void (*)(const T* y, const T* dy, T* dx, int64_t rows, int64_t n);

// fn(first element, rows, n) on ranges of the rows of a tensor, on all threads.
template <typename Fn>
void for_rows_of(const ::oneflow::user_op::Tensor& tensor, const Fn& fn) {
  const auto& shape = tensor.shape_view();
  const int64_t n = shape.At(shape.NumAxes() - 1);
  parallel_for(shape.elem_cnt() / n, std::max<int64_t>(1, kGrainSize / n),
               [&](int64_t begin, int64_t end) { fn(begin * n, end - begin, n); });
}

// out = map(in), row by row.
template <typename T>
class RowMapKernel final : public Kernel {
 public:
  RowMapKernel(std::string in, std::string out, RowMap<T> map)
      : in_(std::move(in)), out_(std::move(out)), map_(map) {}

 private:
  void Compute(::oneflow::user_op::KernelComputeContext* ctx) const override {
    const auto* in = ctx->Tensor4ArgNameAndIndex(in_, 0);
    const auto* x = static_cast<const T*>(in->raw_dptr());
    auto* y = static_cast<T*>(ctx->Tensor4ArgNameAndIndex(out_, 0)->mut_raw_dptr());
    for_rows_of(*in, [&](int64_t first, int64_t rows, int64_t n) {
      map_(x + first, y + first, rows, n);
    });
  }

  std::string in_;
  std::string out_;
  RowMap<T> map_;
};

// dx = gradient(y, dy), row by row; `y` is the name of the forward's output.
template <typename T>
class RowGradientKernel final : public Kernel {
 public:
  RowGradientKernel(std::string y, RowGradient<T> gradient)
      : y_(std::move(y)), gradient_(gradient) {}

 private:
  void Compute(::oneflow::user_op::KernelComputeContext* ctx) const override {
    const auto* out = ctx->Tensor4ArgNameAndIndex(y_, 0);
    const auto* y = static_cast<const T*>(out->raw_dptr());
    const auto* dy = static_cast<const T*>(ctx->Tensor4ArgNameAndIndex("dy", 0)->raw_dptr());
    auto* dx = static_cast<T*>(ctx->Tensor4ArgNameAndIndex("dx", 0)->mut_raw_dptr());
    for_rows_of(*out, [&](int64_t first, int64_t rows, int64_t n) {
      gradient_(y + first, dy + first, dx + first, rows, n);
    });
  }

  std::string y_;
  RowGradient<T> gradient_;
};

// Arguments of SetCreateFn.
template <typename T>
::oneflow::user_op::OpKernelCreateFn row_map_kernel(const char* in, const char* out,
                                                    RowMap<T> map) {
  return [=] { return ::oneflow::user_op::NewOpKernel<RowMapKernel<T>>(in, out, map); };
}
template <typename T>
::oneflow::user_op::OpKernelCreateFn row_gradient_kernel(const char* y, RowGradient<T> gradient) {
  return [=] { return ::oneflow::user_op::NewOpKernel<RowGradientKernel<T>>(y, gradient); };
}

}  // namespace oneflow_accel
