// Waiting for another thread or process without keeping it from its core.
#pragma once

#include <immintrin.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <thread>

namespace oneflow_accel {

using Clock = std::chrono::steady_clock;

// Between two looks, `waited` after the first one: leaves the core to others, and after `polling`
// sleeps for a `part`-th of that time, so that the end is noticed little later than it comes. True
// where it has slept.
inline bool give_way(Clock::duration waited, Clock::duration polling, int part) {
  constexpr Clock::duration kLongest = std::chrono::microseconds(500);
  if (waited <= polling) {
    ::sched_yield();
    return false;
  }
  std::this_thread::sleep_for(std::min(waited / part, kLongest));
  return true;
}

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
