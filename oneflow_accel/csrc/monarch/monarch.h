// The product with a Monarch matrix, y = x M^T (+ bias), and its gradient. M is given by two
// block-diagonal factors with a permutation between them.
//
// Both work on tiles of rows, so that what lies between the factors stays in a core's cache, and the
// permutations only choose where products are read and written.
//
// Formulas: Dao et al., "Monarch: Expressive Structured Matrices for Efficient and Accurate
// Training" (2022), section 3.1.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "common/threads.h"

namespace oneflow_accel {

// With x[i] the blocks of p values of a row of x, missing values being 0:
//   u[i] = A[i] x[i]         for i < k, A of (k, q, p)
//   v[j, i] = u[i l + j]     for j < l and i < r, u read as one row of k q values
//   z[j] = B[j] v[j]         for j < l, B of (l, s, r)
//   y[i l + j] = z[j, i]     for i < s, as far as y has place
struct MonarchShape {
  int64_t rows;
  int64_t in_features;
  int64_t out_features;
  int64_t k, q, p;
  int64_t l, s, r;

  // Values between the factors.
  int64_t middle() const { return k * q; }
  // Elements of the factors.
  int64_t a_size() const { return k * q * p; }
  int64_t b_size() const { return l * s * r; }
  // Elements of both, and multiply-accumulates of one row.
  int64_t factors() const { return a_size() + b_size(); }
  // How many values of a block of x there are.
  int64_t width(int64_t block) const {
    return std::clamp<int64_t>(in_features - block * p, 0, p);
  }
  // How many values of z[j] are results.
  int64_t results(int64_t j) const {
    return std::clamp<int64_t>(ceil_div(out_features - j, l), 0, s);
  }
  std::string describe() const;
};

struct MonarchInputs {
  const float* x;
  const float* a;
  const float* b;
  // Whether products are those of tiles, which round these values to bfloat16.
  bool tiles = false;
};

// `bias` may be null. `middle`, null where nobody needs it, becomes v, a row of (l, r) for each row.
void monarch(const MonarchShape& shape, const MonarchInputs& in, const float* bias, float* middle,
             float* y);

// The same for at most kMostFewRows rows, as answering a request has them: reading the factors is
// what they cost then.
void monarch_few_rows(const MonarchShape& shape, const MonarchInputs& in, const float* bias,
                      float* middle, float* y);

// Rows of the factors' gradients are whole vectors, as products write them: padded(p) floats apart,
// and padded(r).
struct MonarchGrads {
  float* x;
  float* a;
  float* b;
  float* bias;
};

// The gradients of factors and bias are sums over the rows, and with `accumulate` added to what is
// there.
void monarch_grad(const MonarchShape& shape, const MonarchInputs& in, const float* middle,
                  const float* y_grad, const MonarchGrads& out, bool accumulate);

}  // namespace oneflow_accel
