// One scratch buffer, handed out in parts.
#pragma once

#include "attention/block_product.h"
#include "common/onednn.h"

namespace oneflow_accel {

// Parts are aligned to a vector; `floats` has to hold kVectorWidth more for each part. Uses the
// calling thread's ScratchSlot::kSource.
class Carver {
 public:
  explicit Carver(int64_t floats)
      : next_(static_cast<float*>(scratch(ScratchSlot::kSource, floats * sizeof(float)))) {}

  float* take(int64_t floats) {
    float* part = next_;
    next_ += padded(floats);
    return part;
  }

 private:
  float* next_;
};

}  // namespace oneflow_accel
