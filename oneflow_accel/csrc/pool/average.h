// Average pooling in two dimensions, both layouts, float32 and bfloat16 (T is float or Bfloat16).
#pragma once

#include "common/bfloat16.h"
#include "pool/geometry.h"

namespace oneflow_accel {

// What the sum over a window is divided by.
struct PoolDivisor {
  int64_t fixed;       // this, unless it is 0;
  bool count_padding;  // else the window's size with the padding it covers, or without

  float operator()(const PoolWindow& row, const PoolWindow& column) const;
};

template <typename T>
void average_pool(const PoolGeometry& geometry, const PoolDivisor& divisor, const T* x, T* y);

template <typename T>
void average_pool_grad(const PoolGeometry& geometry, const PoolDivisor& divisor, const T* dy,
                       T* dx);

}  // namespace oneflow_accel
