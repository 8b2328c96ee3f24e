// What the kernels of convolutions do around their computation.
#pragma once

#include <algorithm>
#include <vector>

#include "common/arguments.h"
#include "common/guard.h"
#include "conv/geometry.h"

namespace oneflow_accel {

// What a convolution of no terms gives, where the input or the weights have no element: the bias, or
// zeros without one.
template <typename T>
void fill_with_bias(const ConvGeometry& geometry, const float* bias, T* out) {
  const int64_t channels = geometry.out[1];
  int64_t pixels = 1;
  for (std::size_t i = 2; i < geometry.out.size(); ++i) { pixels *= geometry.out[i]; }
  for (int64_t i = 0; i < geometry.out[0] * channels * pixels; ++i) {
    const int64_t channel = (geometry.channels_last ? i : i / pixels) % channels;
    out[i] = from_float<T>(bias == nullptr ? 0.0F : bias[channel]);
  }
}

// The operator's input "bias", of type T, in float32.
template <typename T>
class FloatBias {
 public:
  FloatBias(::oneflow::user_op::KernelComputeContext* ctx, const ConvGeometry& geometry)
      : bias_(input_or_null<T>(ctx, "bias")) {
    if (bias_ == nullptr) { return; }
    values_.resize(geometry.out[1]);
    for (std::size_t i = 0; i < values_.size(); ++i) { values_[i] = to_float(bias_[i]); }
  }
  const float* data() const { return bias_ == nullptr ? nullptr : values_.data(); }

 private:
  const T* bias_;
  std::vector<float> values_;
};

// Runs compute(), or fills the outputs, of type T, with what sums of no terms are where a size is
// 0: the output "out" with the bias, gradients with zeros. `what` begins the text of a failure.
template <typename T, typename Compute>
void run_or_zero(::oneflow::user_op::KernelComputeContext* ctx, const ConvGeometry& geometry,
                 const char* what, const Compute& compute) {
  if (!geometry.is_empty()) {
    return run_or_throw([&] { return geometry.describe(what); }, compute);
  }
  for (const auto& [name, index] : ctx->outputs()) {
    ::oneflow::user_op::Tensor* tensor = ctx->Tensor4ArgNameAndIndex(name, index);
    if (name == "out") {
      fill_with_bias(geometry, FloatBias<T>(ctx, geometry).data(), output<T>(ctx, name));
    } else {
      std::fill_n(output<T>(ctx, name), tensor->shape_view().elem_cnt(), T{});
    }
  }
}

}  // namespace oneflow_accel
