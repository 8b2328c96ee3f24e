// A convolution, float32 and bfloat16, any layout and number of groups, and what its kernels share.
#pragma once

#include <memory>

#include "common/arguments.h"
#include "common/threads.h"
#include "conv/geometry.h"

namespace oneflow_accel {

// The type that a geometry of such tensors has.
template <typename T>
constexpr dnnl::memory::data_type kConvType =
    sizeof(T) == sizeof(float) ? dnnl::memory::data_type::f32 : dnnl::memory::data_type::bf16;

inline bool is_channels_last(::oneflow::user_op::KernelComputeContext* ctx) {
  return ctx->Attr<std::string>("data_format") == "channels_last";
}

// The caller holds a ThreadScope, and no size is 0. Sums are float32. What oneDNN has no bfloat16
// for (a CPU without such products, groups of a few channels) runs on float32 copies. `bias` may be
// null.
template <typename T>
void convolution(const ConvGeometry& geometry, const T* in, const T* weights, const float* bias,
                 T* out);

// What a convolution of no terms gives, where the input or the weights have no element: the bias,
// or zeros without one.
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

inline ConvGeometry float32_geometry(ConvGeometry geometry) {
  geometry.data_type = dnnl::memory::data_type::f32;
  return geometry;
}

// A float32 copy of a tensor, for convolutions that are not computed in bfloat16. Not in scratch
// memory, which the convolutions use themselves.
class FloatCopy {
 public:
  explicit FloatCopy(int64_t n) : n_(n), data_(new float[n]) {}
  template <typename T>
  FloatCopy(const T* from, int64_t n) : FloatCopy(n) {
    parallel_for(n, kGrainSize, [from, to = data()](int64_t begin, int64_t end) {
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) { to[i] = to_float(from[i]); }
    });
  }

  float* data() const { return data_.get(); }

  template <typename T>
  void round_to(T* to) const {
    parallel_for(n_, kGrainSize, [from = data(), to](int64_t begin, int64_t end) {
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) { to[i] = from_float<T>(from[i]); }
    });
  }

 private:
  int64_t n_;
  std::unique_ptr<float[]> data_;
};

}  // namespace oneflow_accel
