// oneDNN's matmul primitive for a Product.
#pragma once

#include "matmul/product.h"

namespace oneflow_accel {

// Runs the product with oneDNN's matmul primitive; a, b, bias (null for none) and out are all of
// `type`. False, and nothing done, where oneDNN has none for this processor. No operand is empty, and
// with a bias alpha is 1.
bool multiply_by_primitive(const Product& product, dnnl::memory::data_type type, const void* a,
                           const void* b, const void* bias, void* out);

}  // namespace oneflow_accel
