// How many threads a kernel of the plug-in uses, and how it sets them.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>

namespace oneflow_accel {

// Threads per kernel: what Python has set, or 1 in a process forked after the
// plug-in was loaded. libgomp's worker threads do not survive fork(): a forked DataLoader worker
// that entered a parallel region of more than one thread would wait for them for ever.
int num_threads();

// OneFlow runs kernels on several of its own threads, each with its own OpenMP setting. A kernel
// holds one of these for as long as it runs, so that oneDNN primitives are made and run under one
// thread count (run under another, they write past their scratchpad).
class ThreadScope {
 public:
  ThreadScope() : saved_(omp_get_max_threads()) { omp_set_num_threads(num_threads()); }
  ~ThreadScope() { omp_set_num_threads(saved_); }
  ThreadScope(const ThreadScope&) = delete;
  ThreadScope& operator=(const ThreadScope&) = delete;

 private:
  int saved_;
};

// Below this many float operations per thread, waking another thread costs more than it saves.
constexpr int64_t kGrainSize = 16 * 1024;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Calls fn(id, count) on each of `count` threads at once, id from 0; count is `threads`, at most
// num_threads(), or fewer where libgomp has fewer to give. The team is always of num_threads():
// libgomp ends threads where a team is smaller than the one before, and makes new ones where it is
// larger.
template <typename Fn>
void run_team(int threads, const Fn& fn) {
  if (threads <= 1) { return fn(int64_t{0}, int64_t{1}); }
#pragma omp parallel num_threads(num_threads())
  {
    const int64_t shares = std::min(threads, omp_get_num_threads());
    const int64_t id = omp_get_thread_num();
    if (id < shares) { fn(id, shares); }
  }
}

// Calls fn(begin, end) on disjoint ranges that cover [0, n), at least `grain` long, in parallel.
// The first exception of several is thrown again: one that left a team would end the process.
template <typename Fn>
void parallel_for(int64_t n, int64_t grain, const Fn& fn) {
  if (n <= 0) { return; }
  const int64_t most = ceil_div(n, grain);
  const int threads = static_cast<int>(std::min<int64_t>(num_threads(), most));
  if (threads <= 1) { return fn(int64_t{0}, n); }
  std::atomic<bool> failed{false};
  std::exception_ptr first;
  run_team(threads, [&](int64_t id, int64_t count) {
    const int64_t begin = n * id / count;
    const int64_t end = n * (id + 1) / count;
    if (begin == end) { return; }
    try {
      fn(begin, end);
    } catch (...) {
      if (!failed.exchange(true)) { first = std::current_exception(); }
    }
  });
  if (first) { std::rethrow_exception(first); }
}

// How many items, each of `work` operations or so, are worth a thread.
constexpr int64_t grain_of(int64_t work) {
  return std::max<int64_t>(1, kGrainSize / std::max<int64_t>(1, work));
}

// Calls fn(block) for each of `blocks`, in parallel; one is of `work` operations or so.
template <typename Fn>
void for_each_block(int64_t blocks, int64_t work, const Fn& fn) {
  parallel_for(blocks, grain_of(work), [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) { fn(block); }
  });
}

}  // namespace oneflow_accel
