// One call of a matrix product: out = alpha op(a) op(b) (+ bias) (+ what out holds).
#pragma once

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

// How many elements an array of this shape has.
int64_t count(const dnnl::memory::dims& sizes);

// `bias`, null for none, has n elements and is added to every row. a or b may be empty,
// `out` is not.
void multiply(const Product& product, const float* a, const float* b, const float* bias,
              float* out);
// Products are added up in float32 and rounded once. With a bias alpha is 1.
void multiply(const Product& product, const Bfloat16* a, const Bfloat16* b, const Bfloat16* bias,
              Bfloat16* out);

// Runs the product with oneDNN's matmul primitive: a and b are `operands`, bias and out `result`.
// False, and nothing done, where oneDNN has none for this processor. No operand is empty, and with
// a bias alpha is 1.
bool multiply_by_primitive(const Product& product, dnnl::memory::data_type operands,
                           dnnl::memory::data_type result, const void* a, const void* b,
                           const void* bias, void* out);

}  // namespace oneflow_accel
