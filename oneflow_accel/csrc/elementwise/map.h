// Kernels whose output has one element for each element of their inputs, all of one shape.
#pragma once

#include <string>

#include "common/bfloat16.h"
#include "common/oneflow.h"
#include "common/threads.h"

namespace oneflow_accel {

// What runs over a range of elements. Loops in such functions are marked `omp simd`: the output may be
// one of the inputs, and no iteration depends on another.
template <typename In, typename Out = In>
using UnaryMap = void (*)(const In* x, Out* y, int64_t n);
template <typename T>
using BinaryMap = void (*)(const T* a, const T* b, T* out, int64_t n);

// out = map(in), element by element.
template <typename In, typename Out = In>
class UnaryMapKernel final : public Kernel {
 public:
  UnaryMapKernel(std::string in, std::string out, UnaryMap<In, Out> map)
      : in_(std::move(in)), out_(std::move(out)), map_(map) {}

 private:
  void Compute(::oneflow::user_op::KernelComputeContext* ctx) const override {
    auto* tensor = ctx->Tensor4ArgNameAndIndex(out_, 0);
    const auto* x = static_cast<const In*>(ctx->Tensor4ArgNameAndIndex(in_, 0)->raw_dptr());
    auto* y = static_cast<Out*>(tensor->mut_raw_dptr());
    parallel_for(tensor->shape_view().elem_cnt(), kGrainSize,
                 [=](int64_t begin, int64_t end) { map_(x + begin, y + begin, end - begin); });
  }

  std::string in_;
  std::string out_;
  UnaryMap<In, Out> map_;
};

// out = map(a, b), element by element.
template <typename T>
class BinaryMapKernel final : public Kernel {
 public:
  BinaryMapKernel(std::string a, std::string b, std::string out, BinaryMap<T> map)
      : a_(std::move(a)), b_(std::move(b)), out_(std::move(out)), map_(map) {}

 private:
  void Compute(::oneflow::user_op::KernelComputeContext* ctx) const override {
    auto* tensor = ctx->Tensor4ArgNameAndIndex(out_, 0);
    const auto* a = static_cast<const T*>(ctx->Tensor4ArgNameAndIndex(a_, 0)->raw_dptr());
    const auto* b = static_cast<const T*>(ctx->Tensor4ArgNameAndIndex(b_, 0)->raw_dptr());
    auto* out = static_cast<T*>(tensor->mut_raw_dptr());
    parallel_for(tensor->shape_view().elem_cnt(), kGrainSize, [=](int64_t begin, int64_t end) {
      map_(a + begin, b + begin, out + begin, end - begin);
    });
  }

  std::string a_;
  std::string b_;
  std::string out_;
  BinaryMap<T> map_;
};

// Arguments of SetCreateFn.
template <typename In, typename Out>
::oneflow::user_op::OpKernelCreateFn map_kernel(const char* in, const char* out,
                                                void (*map)(const In*, Out*, int64_t)) {
  return [=] { return ::oneflow::user_op::NewOpKernel<UnaryMapKernel<In, Out>>(in, out, map); };
}
template <typename T>
::oneflow::user_op::OpKernelCreateFn map_kernel(const char* a, const char* b, const char* out,
                                                BinaryMap<T> map) {
  return [=] { return ::oneflow::user_op::NewOpKernel<BinaryMapKernel<T>>(a, b, out, map); };
}

}  // namespace oneflow_accel
