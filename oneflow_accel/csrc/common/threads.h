// How many threads a kernel of the plug-in uses, and how it sets them.
#pragma once

#include <cstdint>

namespace oneflow_accel {

// Threads per kernel: what set_num_threads() was given, or 1 in a process forked after the
// plug-in was loaded. libgomp's worker threads do not survive fork(): a forked DataLoader worker
// that entered a parallel region of more than one thread would wait for them for ever.
int num_threads();

// n >= 1. Called once from Python, before the first operation runs.
void set_num_threads(int n);

// OneFlow runs kernels on several of its own threads, each with its own OpenMP setting. A kernel
// holds one of these for as long as it runs, so that oneDNN primitives are made and run under one
// thread count (run under another, they write past their scratchpad).
class ThreadScope {
 public:
  ThreadScope();
  ~ThreadScope();
  ThreadScope(const ThreadScope&) = delete;
  ThreadScope& operator=(const ThreadScope&) = delete;
  int num_threads() const { return num_threads_; }

 private:
  int saved_;
  int num_threads_;
};

// Below this many float operations per thread, waking another thread costs more than it saves.
constexpr int64_t kGrainSize = 16 * 1024;

// Calls fn(begin, end) on disjoint ranges that cover [0, n), at least `grain` long, in parallel.
template <typename Fn>
void parallel_for(int64_t n, int64_t grain, const Fn& fn);

// Calls fn(id, count) on each of `count` threads at once, id from 0; count is `threads`, at most
// num_threads(), or fewer where libgomp has fewer to give.
template <typename Fn>
void run_team(int threads, const Fn& fn);

// Calls body(data, id, count) on each of num_threads() threads. Always of all of them: libgomp ends
// threads where a team is smaller than the one before, and makes new ones where it is larger.
void start_team(void (*body)(const void* data, int id, int count), const void* data);

}  // namespace oneflow_accel

#include "common/threads_inl.h"
