// A convolution and its gradients, float32 and bfloat16, any layout and number of groups. The caller
// holds a ThreadScope, and no size is 0. Sums are float32. What oneDNN has no bfloat16 for (a CPU
// without such products, groups of a few channels) runs on float32 copies.
#pragma once

#include "common/bfloat16.h"
#include "conv/geometry.h"

namespace oneflow_accel {

// The type that a geometry of such tensors has.
template <typename T>
constexpr dnnl::memory::data_type kConvType =
    sizeof(T) == sizeof(float) ? dnnl::memory::data_type::f32 : dnnl::memory::data_type::bf16;

// `bias` may be null.
template <typename T>
void convolution(const ConvGeometry& geometry, const T* in, const T* weights, const float* bias,
                 T* out);

template <typename T>
void convolution_data_grad(const ConvGeometry& geometry, const T* out_grad, const T* weights,
                           T* in_grad);

// `bias_grad` may be null.
template <typename T>
void convolution_filter_grad(const ConvGeometry& geometry, const T* in, const T* out_grad,
                             T* weights_grad, T* bias_grad);

}  // namespace oneflow_accel
