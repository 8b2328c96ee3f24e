#include "conv/activation.h"

#include "activation/silu.h"

namespace oneflow_accel {

namespace {

void add(float addend, int64_t n, float* x) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { x[i] += addend; }
}

// NaN is kept.
void add_and_relu(float addend, int64_t n, float* x) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float sum = x[i] + addend;
    x[i] = sum < 0.0F ? 0.0F : sum;
  }
}

void add_and_silu(float addend, int64_t n, float* x) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) { x[i] = silu(x[i] + addend); }
}

}  // namespace

Activation activation_of(const std::string& name) {
  if (name == "relu") { return Activation::kRelu; }
  return name == "silu" ? Activation::kSilu : Activation::kNone;
}

void activate(Activation activation, float addend, int64_t n, float* x) {
  switch (activation) {
    case Activation::kNone: return add(addend, n, x);
    case Activation::kRelu: return add_and_relu(addend, n, x);
    case Activation::kSilu: return add_and_silu(addend, n, x);
  }
}

}  // namespace oneflow_accel
