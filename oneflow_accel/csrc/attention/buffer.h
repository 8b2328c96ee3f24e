// One scratch buffer, handed out in parts.
#pragma once

#include "attention/block_product.h"
#include "common/onednn.h"

namespace oneflow_accel {

// Parts are aligned to a vector; `floats` has to hold kVectorWidth more for each part. Uses the
// calling thread's ScratchSlot::kSource.
class Carver {
 public:
  explicit Carver(int64_t floats) : base_(scratch<float>(ScratchSlot::kSource, floats)) {}

  // Calls lay_out(carver), which takes all parts, twice: to see how much they are, and with a
  // buffer of this size.
  template <typename LayOut>
  static void carve(const LayOut& lay_out) {
    Carver counting;
    lay_out(&counting);
    Carver carver(counting.taken_);
    lay_out(&carver);
  }

  float* take(int64_t floats) {
    float* part = base_ == nullptr ? nullptr : base_ + taken_;
    taken_ += padded(floats);
    return part;
  }
  Panels take_panels(int64_t rows, int64_t columns, bool bfloat16 = false) {
    Panels panels{nullptr, rows, columns, bfloat16};
    panels.data = take(panels.size());
    return panels;
  }

 private:
  Carver() = default;

  float* base_ = nullptr;
  int64_t taken_ = 0;
};

}  // namespace oneflow_accel
