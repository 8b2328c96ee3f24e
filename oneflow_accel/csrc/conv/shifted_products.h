// Products of a small matrix with the rows of a plane, read from several places of it: the inner
// loops of convolutions whose channels are planes.
#pragma once

#include <cstdint>

namespace oneflow_accel {

// sums[i * sums_row + j] = sum over k < depth of a[i * depth + k] x[offsets[k] + j], for i < rows
// and j < length. Whole vectors of x are read and of sums written: up to padded(length).
struct ShiftedProduct {
  const float* a;
  int64_t rows;
  int64_t depth;
  const float* x;
  const int64_t* offsets;
  int64_t length;
  float* sums;
  int64_t sums_row;
};
void shifted_product(const ShiftedProduct& product);

// Sums over j < length of d[i * d_row + j] x[offsets[k] + j] for i < rows and k < depth, added to
// the sum of the kVectorWidth floats at sums + (i * depth + k) * kVectorWidth. `depth` is a multiple
// of kShiftedDots, and whole vectors of d and x are read.
struct ShiftedDots {
  const float* d;
  int64_t rows;
  int64_t d_row;
  const float* x;
  const int64_t* offsets;
  int64_t depth;
  int64_t length;
  float* sums;
};
constexpr int64_t kShiftedDots = 6;
void shifted_dots(const ShiftedDots& dots);

}  // namespace oneflow_accel
