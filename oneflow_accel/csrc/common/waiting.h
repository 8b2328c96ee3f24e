// Waiting for another thread or process without keeping it from its core.
#pragma once

#include <immintrin.h>

namespace oneflow_accel {

// Whether `done()` came true while looking at it for some microseconds.
template <typename Done>
bool comes_true_soon(const Done& done) {
  for (int looks = 0; looks < 200; ++looks) {
    if (done()) { return true; }
    _mm_pause();
  }
  return false;
}

}  // namespace oneflow_accel
