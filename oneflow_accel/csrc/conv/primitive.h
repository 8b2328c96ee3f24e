// Convolutions and their gradients as oneDNN computes them.
#pragma once

#include "conv/activation.h"
#include "conv/geometry.h"

namespace oneflow_accel {

// Which of a convolution's three tensors, or its gradient, is computed from the two others.
enum class ConvResult { kOut, kIn, kWeights };

// Tensors of the geometry's data type, of which oneDNN writes `result`, whatever the pointer says.
// What comes after `out` may be missing.
struct ConvCall {
  ConvResult result;
  const void* in;
  const void* weights;
  const void* out;
  // float32; for kWeights its gradient, which is computed as well, of the geometry's data type.
  const void* bias = nullptr;
  // No gradient will follow: oneDNN has other kernels for some of these.
  bool inference = false;
  // What a forward convolution does in the same pass: out = activation(convolution + summand).
  const void* summand = nullptr;
  Activation activation = Activation::kNone;
  // Whose constant weights they are (see kept_weights.h); 0 where they may change.
  int64_t owner = 0;
};

// False where oneDNN, on this processor, has no such forward convolution that we want. The caller
// holds a ThreadScope, and no size is 0.
bool run_primitive(const ConvGeometry& geometry, const ConvCall& call);

}  // namespace oneflow_accel
