// A convolution, float32 and bfloat16, any layout and number of groups, and what its kernels share.
#pragma once

#include <memory>

#include "common/oneflow.h"
#include "conv/primitive.h"
#include "elementwise/map.h"

namespace oneflow_accel {

// The type that a geometry of such tensors has.
template <typename T>
constexpr dnnl::memory::data_type kConvType =
    sizeof(T) == sizeof(float) ? dnnl::memory::data_type::f32 : dnnl::memory::data_type::bf16;

inline bool is_channels_last(Context* ctx) {
  return ctx->Attr<std::string>("data_format") == "channels_last";
}

inline void* data_of(Context* ctx, const char* name) { return argument(ctx, name)->mut_raw_dptr(); }

// A convolution of float32 tensors, or a gradient of one, by the fastest way there is, without what
// a ConvCall may have after the bias. The caller holds a ThreadScope, and no size is 0.
void convolve(const ConvGeometry& geometry, const ConvCall& call);

// What a convolution of no terms gives, where the input or the weights have no element: the bias,
// or zeros without one.
template <typename T>
void fill_with_bias(const ConvGeometry& geometry, const float* bias, T* out) {
  const int64_t n = geometry.count(kConvOut);
  if (n == 0) { return; }
  const int64_t pixels = geometry.channels_last ? 1 : geometry.out_pixels();
  for (int64_t i = 0; i < n; ++i) {
    out[i] = from_float<T>(bias == nullptr ? 0.0F : bias[i / pixels % geometry.out[1]]);
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
    convert(from, data(), n);
  }

  float* data() const { return data_.get(); }

  template <typename T>
  void round_to(T* to) const {
    convert(data(), to, n_);
  }

 private:
  int64_t n_;
  std::unique_ptr<float[]> data_;
};

}  // namespace oneflow_accel
