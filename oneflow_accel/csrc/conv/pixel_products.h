// The float32 gradient of the weights where oneDNN copies the input to a matrix first, which takes
// twice as long as the product: dilated convolutions, and those of images with few channels,
// channels last.
#pragma once

#include "conv/primitive.h"

namespace oneflow_accel {

bool has_pixel_products(const ConvGeometry& geometry, ConvRole result);

void pixel_products_filter_grad(const ConvGeometry& geometry, const ConvCall& call);

}  // namespace oneflow_accel
