// Max pooling in two dimensions, both layouts, float32; forward also bfloat16 (T is float or
// Bfloat16). A window's maximum is its first one, as in
// PyTorch, or NaN if it has any; an empty window's is -inf.
#pragma once

#include "common/bfloat16.h"
#include "pool/geometry.h"

namespace oneflow_accel {

// `index`, if not null, gets where each maximum was found: its offset in its plane (channels
// first) or in its image (channels last), -1 for an empty window.
template <typename T>
void max_pool(const PoolGeometry& geometry, const T* x, T* y, int64_t* index);

// The gradient where max_pool's `index` is at hand.
void max_pool_grad(const PoolGeometry& geometry, const float* dy, const int64_t* index, float* dx);

// The same from the input alone, which finds the maxima again: the output may have been changed in
// place since.
void max_pool_grad_from_input(const PoolGeometry& geometry, const float* x, const float* dy,
                              float* dx);

}  // namespace oneflow_accel
