#include "common/scratch.h"

#include <array>
#include <atomic>
#include <cstdlib>
#include <limits>
#include <mutex>
#include <new>
#include <set>
#include <stdexcept>

#include "common/memory.h"

namespace oneflow_accel {

namespace {

constexpr std::size_t kAlignment = 64;

std::atomic<int64_t> g_bytes{0};
std::atomic<int64_t> g_limit{std::numeric_limits<int64_t>::max()};
std::atomic<int> g_failures{0};

struct Buffer {
  void* data = nullptr;
  int64_t bytes = 0;

  void release() {
    std::free(data);
    g_bytes -= bytes;
    data = nullptr;
    bytes = 0;
  }

  void allocate(int64_t wanted) {
    if (g_failures > 0 && g_failures-- > 0) { throw std::bad_alloc(); }
    if (const auto lack = lack_of_memory(wanted); !lack.empty()) { throw std::runtime_error(lack); }
    data = std::aligned_alloc(kAlignment, wanted);
    if (data == nullptr) { throw std::bad_alloc(); }
    bytes = wanted;
    g_bytes += bytes;
  }
};

struct Arena;

// Shared while a kernel runs, exclusive while memory is given back. Never destroyed: OneFlow's
// threads may outlive the library's variables.
struct Arenas {
  std::shared_mutex use;
  std::mutex mutex;
  std::set<Arena*> all;
};

Arenas& arenas() {
  static auto* const it = new Arenas;
  return *it;
}

struct Arena {
  std::array<Buffer, static_cast<std::size_t>(ScratchSlot::kCount)> buffers;

  Arena() {
    const std::lock_guard<std::mutex> lock(arenas().mutex);
    arenas().all.insert(this);
  }
  ~Arena() {
    const std::lock_guard<std::mutex> lock(arenas().mutex);
    arenas().all.erase(this);
    release();
  }
  void release() {
    for (Buffer& buffer : buffers) { buffer.release(); }
  }
};

// Gives all threads' scratch memory back. False where a kernel runs: nothing is given back then.
bool release_scratch() {
  const std::unique_lock<std::shared_mutex> unused(arenas().use, std::try_to_lock);
  if (!unused.owns_lock()) { return false; }
  const std::lock_guard<std::mutex> lock(arenas().mutex);
  for (Arena* arena : arenas().all) { arena->release(); }
  return true;
}

}  // namespace

void* scratch(ScratchSlot slot, std::size_t bytes) {
  thread_local Arena arena;
  Buffer& buffer = arena.buffers[static_cast<std::size_t>(slot)];
  if (buffer.bytes < static_cast<int64_t>(bytes)) {
    buffer.release();
    buffer.allocate((bytes + kAlignment - 1) / kAlignment * kAlignment);
  }
  return buffer.data;
}

ScratchUse::ScratchUse() : lock_(arenas().use) {}

ScratchUse::~ScratchUse() {
  lock_.unlock();
  // Where another kernel runs, the end of that one comes here too.
  if (g_bytes.load(std::memory_order_relaxed) > g_limit.load(std::memory_order_relaxed)) {
    release_scratch();
  }
}

}  // namespace oneflow_accel

extern "C" {

// The most bytes that stay with the kernels of this process between calls.
void oneflow_accel_set_scratch_limit(int64_t bytes) { oneflow_accel::g_limit.store(bytes); }

int64_t oneflow_accel_scratch_bytes() { return oneflow_accel::g_bytes.load(); }

// 0 where a kernel runs, and nothing is given back.
int oneflow_accel_release_scratch() { return oneflow_accel::release_scratch() ? 1 : 0; }

// For tests: the next `times` that scratch memory grows, it fails.
void oneflow_accel_fail_scratch(int times) { oneflow_accel::g_failures.store(times); }

}  // extern "C"
