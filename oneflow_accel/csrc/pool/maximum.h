// Max pooling in two dimensions, both layouts, float32 and bfloat16 (T is float or Bfloat16). A
// window's maximum is its first one, as in PyTorch, or NaN if it has any; an empty window's is
// -inf.
#pragma once

#include "common/bfloat16.h"
#include "pool/geometry.h"

namespace oneflow_accel {

// `index`, if not null, gets where each maximum was found: its offset in its plane (channels
// first) or in its image (channels last), -1 for an empty window.
template <typename T>
void max_pool(const PoolGeometry& geometry, const T* x, T* y, int64_t* index);

// The gradient where max_pool's `index` is at hand.
template <typename T>
void max_pool_grad(const PoolGeometry& geometry, const T* dy, const int64_t* index, T* dx);

// The same from the input alone, which finds the maxima again: the output may have been changed in
// place since.
template <typename T>
void max_pool_grad_from_input(const PoolGeometry& geometry, const T* x, const T* dy, T* dx);

}  // namespace oneflow_accel
