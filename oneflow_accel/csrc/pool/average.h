// Average pooling in two dimensions, float32, both layouts.
#pragma once

#include "pool/geometry.h"

namespace oneflow_accel {

// What the sum over a window is divided by.
struct PoolDivisor {
  int64_t fixed;       // this, unless it is 0;
  bool count_padding;  // else the window's size with the padding it covers, or without

  float operator()(const PoolWindow& row, const PoolWindow& column) const;
};

void average_pool(const PoolGeometry& geometry, const PoolDivisor& divisor, const float* x,
                  float* y);

void average_pool_grad(const PoolGeometry& geometry, const PoolDivisor& divisor, const float* dy,
                       float* dx);

}  // namespace oneflow_accel
