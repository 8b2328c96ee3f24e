// Products of a few rows with a large matrix, as generating text token by token has them.
#pragma once

#include "matmul/product.h"

namespace oneflow_accel {

// Whether multiply_few_rows() takes this product and is the faster way.
bool has_few_rows(const Product& product);

// out = alpha a op(b) (+ bias) (+ what out holds), as multiply() does it.
void multiply_few_rows(const Product& product, const float* a, const float* b, const float* bias,
                       float* out);

// Rows that both functions here take at most.
constexpr int kMostFewRows = 8;

// out[i * out_stride + j] = sum over d < depth of a[i * a_stride + d] b[j * b_stride + d] for
// i < rows and j < columns, on the calling thread.
void few_rows_product(int64_t rows, int64_t columns, int64_t depth, const float* a,
                      int64_t a_stride, const float* b, int64_t b_stride, float* out,
                      int64_t out_stride);

}  // namespace oneflow_accel
