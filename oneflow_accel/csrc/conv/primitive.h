// Convolutions and their gradients as oneDNN computes them.
#pragma once

#include "conv/activation.h"
#include "conv/geometry.h"

namespace oneflow_accel {

// Tensors of the geometry's data type by their roles, of which `result` is written. What comes
// after them may be missing.
struct ConvCall {
  ConvRole result;
  void* data[3];
  // float32; for kConvWeights its gradient, which is computed as well, of the geometry's data type.
  void* bias = nullptr;
  // No gradient will follow: oneDNN has other kernels for some of these.
  bool inference = false;
  // What a forward convolution does in the same pass: out = activation(convolution + summand).
  const void* summand = nullptr;
  Activation activation = Activation::kNone;
  // Whose weights they are (see kept_weights.h); 0 where no copy is kept.
  int64_t owner = 0;

  template <typename T>
  T* tensor(ConvRole role) const {
    return static_cast<T*>(data[role]);
  }
};

// False where oneDNN, on this processor, has no such convolution that we want, or has run one of
// bfloat16 through which NaN or infinity may have spread. The caller holds a ThreadScope, and no
// size is 0.
bool run_primitive(const ConvGeometry& geometry, const ConvCall& call);

}  // namespace oneflow_accel
