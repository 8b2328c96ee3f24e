// Keeps OneFlow's scheduler thread off the cores that kernels need.
//
// While an nn.Graph runs, the scheduler thread polls for its end and calls sched_yield() between
// two looks, for as long as the step takes: the system gives it up to half of a core that belongs
// to a kernel's team, and the whole team waits. So the entry for sched_yield in liboneflow's
// procedure linkage table leads to the function below, which sleeps where a thread does nothing
// but yield.
//
// Only while a graph runs: an eager operation may be over in 2 us, and would wait for the end of a
// nap. There a program's kernels run on the scheduler thread itself (backends/cpu.py), which then
// has no time to poll.
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include "common/graph_queue.h"
#include "common/redirect.h"

namespace oneflow_accel {

namespace {

using Clock = std::chrono::steady_clock;

// A small graph is over by then, and its end noticed as fast as before.
constexpr auto kPollingTime = std::chrono::microseconds(100);
// A nap is this part of the time already waited, so that the end of a graph is noticed little later
// than it comes, and at most kLongestNap.
constexpr int kNapDivisor = 16;
constexpr Clock::duration kLongestNap = std::chrono::microseconds(500);
// Work between two yields that ends a run of them.
constexpr auto kWork = std::chrono::microseconds(20);

std::atomic<int64_t> g_naps{0};

int yield_or_nap() {
  if (!a_graph_is_under_way()) { return ::sched_yield(); }
  thread_local Clock::time_point first{};
  thread_local Clock::time_point last{};
  const Clock::time_point now = Clock::now();
  if (now - last > kWork) { first = now; }
  const Clock::duration waited = now - first;
  if (waited > kPollingTime) {
    g_naps.fetch_add(1, std::memory_order_relaxed);
    std::this_thread::sleep_for(std::min(waited / kNapDivisor, kLongestNap));
  } else {
    ::sched_yield();
  }
  last = Clock::now();
  return 0;
}

// When the library is loaded.
const bool g_yields = redirect_in_oneflow("sched_yield", yield_or_nap);

}  // namespace

}  // namespace oneflow_accel

// How often a thread has slept instead of yielding: for tests.
extern "C" int64_t oneflow_accel_naps() { return oneflow_accel::g_naps.load(); }
