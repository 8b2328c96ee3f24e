// What attention does to rows and blocks between its matrix products.
#pragma once

#include <cstdint>

#include "attention/block_product.h"
#include "common/bfloat16.h"

namespace oneflow_accel {

// panels[j, d] = x[j * stride + d] for j < panels.rows and d < columns; 0 in the padding.
void pack(const float* x, int64_t stride, int64_t columns, const Panels& panels);
void pack(const Bfloat16* x, int64_t stride, int64_t columns, const Panels& panels);

// panels[d, j] = x[j * stride + d] for j < columns and d < panels.rows; 0 in the padding.
void pack_transposed(const float* x, int64_t stride, int64_t columns, const Panels& panels);
void pack_transposed(const Bfloat16* x, int64_t stride, int64_t columns, const Panels& panels);

// y[i * columns + d] = x[i * stride + d] * factor.
void copy_scaled(const float* x, int64_t stride, int64_t rows, int64_t columns, float factor,
                 float* y);
void copy_scaled(const Bfloat16* x, int64_t stride, int64_t rows, int64_t columns, float factor,
                 float* y);

// y[d] = x[d] * factor, in y's type.
void store_scaled(const float* x, int64_t columns, float factor, float* y);
void store_scaled(const float* x, int64_t columns, float factor, Bfloat16* y);

// scores[j] = sum over d of query[d] keys[j * stride + d], for j < rows.
void scores_of(const float* query, const float* keys, int64_t stride, int64_t rows, int64_t columns,
               float* scores);
void scores_of(const float* query, const Bfloat16* keys, int64_t stride, int64_t rows,
               int64_t columns, float* scores);

// out[d] (+)= sum over j < rows of weights[j] values[j * stride + d].
void weighted_sum(const float* weights, const float* values, int64_t stride, int64_t rows,
                  int64_t columns, float* out, bool accumulate);
void weighted_sum(const float* weights, const Bfloat16* values, int64_t stride, int64_t rows,
                  int64_t columns, float* out, bool accumulate);

// How many of the keys of a block the rows of a block see: row i sees first + i * step of them.
struct Visible {
  int64_t first;
  int64_t step;

  int64_t keys(int64_t row, int64_t all) const {
    const int64_t n = first + row * step;
    return n < 0 ? 0 : n > all ? all : n;
  }
};

// A block of scores, [rows, keys], and the softmax of its rows as far as it is known: the largest
// score, the sum of e^(score - largest), and the output that belongs to them, not yet divided by
// the sum. Scores become e^(score - largest), 0 where a key is not visible.
struct Softmax {
  float* largest;
  float* sum;
  float* out;
  int64_t out_stride;
};
void softmax_block(float* scores, int64_t stride, int64_t rows, int64_t keys, Visible visible,
                   const Softmax& softmax);

// scores becomes p = e^(score - lse), score_grads, which holds dp, becomes p (dp - delta).
void softmax_grad_block(float* scores, float* score_grads, int64_t stride, int64_t rows,
                        int64_t keys, Visible visible, const float* lse, const float* delta);

// sum over d of a[d] b[d].
template <typename T>
float dot(const T* a, const T* b, int64_t n) {
  float sum = 0.0F;
#pragma omp simd reduction(+ : sum)
  for (int64_t d = 0; d < n; ++d) { sum += to_float(a[d]) * to_float(b[d]); }
  return sum;
}

}  // namespace oneflow_accel
