#include "common/threads.h"

#include <omp.h>
#include <pthread.h>

#include <atomic>

namespace oneflow_accel {

namespace {

std::atomic<int> g_num_threads{1};
std::atomic<bool> g_forked{false};

void after_fork_in_child() { g_forked.store(true); }

// Registered when the library is loaded, before any kernel can have started a thread.
const int g_fork_handler = pthread_atfork(nullptr, nullptr, after_fork_in_child);

}  // namespace

int num_threads() { return g_forked.load() ? 1 : g_num_threads.load(); }

void set_num_threads(int n) { g_num_threads.store(n < 1 ? 1 : n); }

ThreadScope::ThreadScope()
    : saved_(omp_get_max_threads()), num_threads_(oneflow_accel::num_threads()) {
  if (saved_ != num_threads_) { omp_set_num_threads(num_threads_); }
}

ThreadScope::~ThreadScope() {
  if (saved_ != num_threads_) { omp_set_num_threads(saved_); }
}

}  // namespace oneflow_accel
