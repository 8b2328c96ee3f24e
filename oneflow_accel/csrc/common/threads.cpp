#include "common/threads.h"

#include <pthread.h>

#include <atomic>

// Of libgomp, whose threads oneDNN uses too. Called by name, and not by `#pragma omp parallel`, as
// Clang makes calls of its own libomp from that: a second set of threads, in which libgomp's
// omp_get_thread_num() is 0 everywhere.
extern "C" {
void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags);
int omp_get_max_threads();
void omp_set_num_threads(int threads);
int omp_get_thread_num();
int omp_get_num_threads();
}

namespace oneflow_accel {

namespace {

std::atomic<int> g_num_threads{1};

// Registered when the library is loaded, before any kernel can have started a thread.
const int g_fork_handler =
    pthread_atfork(nullptr, nullptr, [] { g_num_threads.store(1); });

}  // namespace

int num_threads() { return g_num_threads.load(); }

void set_num_threads(int n) { g_num_threads.store(n < 1 ? 1 : n); }

ThreadScope::ThreadScope() : saved_(omp_get_max_threads()) { omp_set_num_threads(num_threads()); }

ThreadScope::~ThreadScope() { omp_set_num_threads(saved_); }

void start_team(void (*body)(const void* data, int id, int count), const void* data) {
  struct Call {
    void (*body)(const void*, int, int);
    const void* data;
  } call{body, data};
  GOMP_parallel(
      [](void* argument) {
        const Call& call = *static_cast<const Call*>(argument);
        call.body(call.data, omp_get_thread_num(), omp_get_num_threads());
      },
      &call, static_cast<unsigned>(num_threads()), 0);
}

}  // namespace oneflow_accel
