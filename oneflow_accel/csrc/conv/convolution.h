// A convolution and its gradients, float32, any layout and number of groups. The caller holds a
// ThreadScope, and no size is 0.
#pragma once

#include "conv/geometry.h"

namespace oneflow_accel {

// `bias` may be null.
void convolution(const ConvGeometry& geometry, const float* in, const float* weights,
                 const float* bias, float* out);

void convolution_data_grad(const ConvGeometry& geometry, const float* out_grad,
                           const float* weights, float* in_grad);

// `bias_grad` may be null.
void convolution_filter_grad(const ConvGeometry& geometry, const float* in, const float* out_grad,
                             float* weights_grad, float* bias_grad);

}  // namespace oneflow_accel
