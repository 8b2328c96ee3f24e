// One call of a matrix product: out = alpha op(a) op(b) (+ bias) (+ what out holds).
#pragma once

#include <functional>
#include <string>

#include "common/bfloat16.h"
#include "common/oneflow.h"
#include "common/onednn.h"

namespace oneflow_accel {

// Shapes are those in memory, all of one rank: (batch..., rows, columns), contiguous. A batch
// dimension of a or b that is 1 is repeated as `out` needs it.
struct Product {
  dnnl::memory::dims a;
  dnnl::memory::dims b;
  dnnl::memory::dims out;
  bool transpose_a = false;
  bool transpose_b = false;
  float alpha = 1.0F;
  // Whether the product is added to what `out` holds, or replaces it.
  bool accumulate = false;

  int64_t m() const { return out[out.size() - 2]; }
  int64_t n() const { return out.back(); }
  int64_t k() const { return transpose_a ? a[a.size() - 2] : a.back(); }
  int64_t batch() const;
  // Whether an operand is empty, so that the product is zero: k is 0, or (OneFlow infers a batch of
  // one where 0 meets 1) there is no matrix to take.
  bool adds_up_nothing() const;
  // The same product with fewer dimensions: batch dimensions become rows of a and out, where one
  // matrix b serves all of them.
  Product folded() const;
  std::string describe() const;
};

// `bias`, null for none, has n elements and is added to every row. a or b may be empty,
// `out` is not. `rounded_b` may be rounded_copy() of b.
void multiply(const Product& product, const float* a, const float* b, const float* bias,
              float* out, const Bfloat16* rounded_b = nullptr);
// The copy of b that multiply() makes where products round, made once for many products: in
// ScratchSlot::kWeights, or null.
const Bfloat16* rounded_copy(const float* b, int64_t n);
// Products are added up in float32 and rounded once. With a bias alpha is 1.
void multiply(const Product& product, const Bfloat16* a, const Bfloat16* b, const Bfloat16* bias,
              Bfloat16* out);

// Runs the product with oneDNN's matmul primitive: a and b are `operands`, bias and out `result`.
// False, and nothing done, where oneDNN has none for this processor. No operand is empty, and with
// a bias alpha is 1.
bool multiply_by_primitive(const Product& product, dnnl::memory::data_type operands,
                           dnnl::memory::data_type result, const void* a, const void* b,
                           const void* bias, void* out);

// A matrix whose rows lie `stride` floats apart, or its transpose.
struct Matrix {
  const float* data;
  int64_t stride;
  bool transposed = false;
};

// out (m, n) = alpha a b (+ what out holds) on `threads` threads: those of for_each_matrix(). Its
// rows are `out_stride` apart.
void sgemm(int64_t m, int64_t n, int64_t k, float alpha, const Matrix& a, const Matrix& b,
           bool accumulate, float* out, int64_t out_stride, int threads);

// Calls fn(i, threads) for i < count, where each takes `work` multiply-accumulates, on that many
// threads: a matrix for each is best, unless some would be left without work for long.
void for_each_matrix(int64_t count, int64_t work,
                     const std::function<void(int64_t i, int threads)>& fn);

// Products of a few rows with a large matrix, as generating text token by token has them.

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
