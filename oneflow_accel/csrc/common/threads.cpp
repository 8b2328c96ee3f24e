#include "common/threads.h"

#include <pthread.h>

#include <atomic>

namespace oneflow_accel {

namespace {

std::atomic<int> g_num_threads{1};

// Registered when the library is loaded, before any kernel can have started a thread.
const int g_fork_handler =
    pthread_atfork(nullptr, nullptr, [] { g_num_threads.store(1); });

}  // namespace

int num_threads() { return g_num_threads.load(); }

}  // namespace oneflow_accel

// n >= 1. Called once from Python, before the first operation runs.
extern "C" void oneflow_accel_set_num_threads(int n) { oneflow_accel::g_num_threads.store(n); }
