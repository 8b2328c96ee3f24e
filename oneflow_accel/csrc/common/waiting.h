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
// sleeps, by `sleep`, for a `part`-th of that time, `longest` at most, so that the end is noticed
// little later than it comes. True where it has slept. Whoever wakes up takes a core from a kernel's
// thread, for which the rest of its team waits: twice in a millisecond cost 5 % of a step.
template <typename Sleep>
bool give_way(Clock::duration waited, Clock::duration polling, int part, Clock::duration longest,
              const Sleep& sleep) {
  if (waited <= polling) {
    ::sched_yield();
    return false;
  }
  sleep(std::min(waited / part, longest));
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
