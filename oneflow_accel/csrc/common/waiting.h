// Waiting for another thread or process without keeping it from its core.
#pragma once

#include <immintrin.h>

#include "oneflow/core/common/maybe.h"
#include "oneflow/core/common/spin_counter.h"

namespace oneflow_accel {

// Looks at `done` this often before it asks the system: some microseconds.
constexpr int kLooks = 200;

// Whether `done()` came true while looking at it for some microseconds.
template <typename Done>
bool comes_true_soon(const Done& done) {
  for (int looks = 0; looks < kLooks; ++looks) {
    if (done()) { return true; }
    _mm_pause();
  }
  return false;
}

// SpinCounter::WaitUntilCntEqualZero(), which looks at its counter in an empty loop: the last step
// of .numpy() and .item(), while OneFlow copies the values. Where more threads are ready than there
// are cores, as with several processes, the system has often put the thread that looks in the place
// of the one that copies, and it would look for a whole time slice at what cannot change.
::oneflow::Maybe<void> wait_until_zero(const ::oneflow::SpinCounter& counter);

}  // namespace oneflow_accel
