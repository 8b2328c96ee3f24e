// oneDNN's matmul primitive for a Product.
#pragma once

#include "matmul/product.h"

namespace oneflow_accel {

// The types of a and b, and of bias and out.
struct ProductTypes {
  dnnl::memory::data_type operands;
  dnnl::memory::data_type out;
};

// Runs the product with oneDNN's matmul primitive, `bias` being null for none. False, and nothing done, where oneDNN has none for this processor. No operand is empty, and
// with a bias alpha is 1.
bool multiply_by_primitive(const Product& product, ProductTypes types, const void* a, const void* b,
                           const void* bias, void* out);

// The same product of float32 matrices that are rounded to bfloat16 first, in slots of their own: a,
// b and out may be scratch memory of the caller's.
bool multiply_rounded(const Product& product, const float* a, const float* b, const float* bias,
                      float* out);

}  // namespace oneflow_accel
