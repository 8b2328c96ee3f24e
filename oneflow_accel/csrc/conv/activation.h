// The function that a convolution of inference applies to its results.
#pragma once

#include <cstdint>
#include <string>

namespace oneflow_accel {

enum class Activation { kNone, kRelu, kSilu };

// Of "", "relu" or "silu", which the operator has checked.
Activation activation_of(const std::string& name);

// x[i] = activation(x[i] + addend).
void activate(Activation activation, float addend, int64_t n, float* x);

}  // namespace oneflow_accel
