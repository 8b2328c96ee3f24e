// Convolutions and their gradients as oneDNN computes them, or products of ours in its place.
#pragma once

#include <string>

#include "activation/formulas.h"
#include "conv/geometry.h"

namespace oneflow_accel {

// The function that a convolution of inference applies to its results.
enum class Activation { kNone, kRelu, kSilu };

// Of "", "relu" or "silu", which the operator has checked.
inline Activation activation_of(const std::string& name) {
  if (name == "relu") { return Activation::kRelu; }
  return name == "silu" ? Activation::kSilu : Activation::kNone;
}

// Calls fn(f), where f is the function of one float.
template <typename Fn>
void with_activation(Activation activation, const Fn& fn) {
  switch (activation) {
    case Activation::kNone:
      return fn([](float x) { return x; });
    // NaN is kept.
    case Activation::kRelu:
      return fn([](float x) { return x < 0.0F ? 0.0F : x; });
    case Activation::kSilu:
      return fn([](float x) { return silu(x); });
  }
}

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

// The float32 gradient of the weights where oneDNN copies the input to a matrix first, which takes
// twice as long as the product: dilated convolutions, and those of images with few channels,
// channels last.
bool has_pixel_products(const ConvGeometry& geometry, ConvRole result);

void pixel_products_filter_grad(const ConvGeometry& geometry, const ConvCall& call);

}  // namespace oneflow_accel
