// The function that a convolution of inference applies to its results.
#pragma once

#include <string>

#include "activation/silu.h"

namespace oneflow_accel {

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
    case Activation::kNone: return fn([](float x) { return x; });
    // NaN is kept.
    case Activation::kRelu: return fn([](float x) { return x < 0.0F ? 0.0F : x; });
    case Activation::kSilu: return fn([](float x) { return silu(x); });
  }
}

}  // namespace oneflow_accel
