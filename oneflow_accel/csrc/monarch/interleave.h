// The permutations of a Monarch product: short rows are read as matrices and transposed.
#pragma once

#include <cstdint>

namespace oneflow_accel {

// Rows of a source and where they go; strides are from one row to the next.
struct RowCopy {
  const float* from;
  int64_t from_stride;
  float* to;
  int64_t to_stride;
  int64_t rows;
};

// to[j * n + i] = from[i * l + j] in each row, for i < n and j < l.
void deinterleave(const RowCopy& copy, int64_t n, int64_t l);

// to[i * l + j] = from[j * n + i] in each row, for j < l and as far as i * l + j < columns, with
// addend[i * l + j] added if that is not null.
void interleave(const RowCopy& copy, int64_t n, int64_t l, int64_t columns, const float* addend);

}  // namespace oneflow_accel
