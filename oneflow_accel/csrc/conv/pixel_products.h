// The float32 gradient of the weights where oneDNN copies the input to a matrix first, which takes
// twice as long as the product: dilated convolutions, and those of images with few channels,
// channels last.
#pragma once

#include "conv/geometry.h"

namespace oneflow_accel {

bool has_pixel_products(const ConvGeometry& geometry);

// `bias_grad` may be null.
void pixel_products_filter_grad(const ConvGeometry& geometry, const float* in,
                                const float* out_grad, float* weights_grad, float* bias_grad);

}  // namespace oneflow_accel
