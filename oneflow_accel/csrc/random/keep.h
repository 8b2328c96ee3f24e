// What dropout does to the elements of a mask.
#pragma once

#include "common/oneflow.h"

namespace oneflow_accel::random {

// Tensors of truth values as loops want them: bytes that are 0 or 1.
inline const uint8_t* mask_bytes(Context* ctx, const std::string& name) {
  return reinterpret_cast<const uint8_t*>(input<bool>(ctx, name));
}

// What an element is multiplied by: not left out, as NaN stays NaN.
ONEFLOW_ACCEL_INLINE float kept(uint8_t mask, float scale) { return mask != 0 ? scale : 0.0F; }

// y = x * scale where mask is 1, else 0, plus `addend` unless it is null, on the calling thread. y
// may be x or addend.
template <typename X, typename T>
void keep_and_scale(const X* x, const uint8_t* mask, float scale, const T* addend, T* y,
                    int64_t n) {
  if (addend == nullptr) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) { y[i] = from_float<T>(to_float(x[i]) * kept(mask[i], scale)); }
  } else {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      y[i] = from_float<T>(to_float(x[i]) * kept(mask[i], scale) + to_float(addend[i]));
    }
  }
}

}  // namespace oneflow_accel::random
