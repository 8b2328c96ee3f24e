// Products of a few rows with a large matrix, as generating text token by token has them.
#pragma once

#include "matmul/product.h"

namespace oneflow_accel {

// Whether multiply_few_rows() takes this product and is the faster way.
bool has_few_rows(const Product& product);

// out = alpha a op(b) (+ bias) (+ what out holds), as multiply() does it.
void multiply_few_rows(const Product& product, const float* a, const float* b, const float* bias,
                       float* out);

}  // namespace oneflow_accel
