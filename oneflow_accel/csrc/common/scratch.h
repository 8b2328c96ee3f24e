// Scratch memory, which stays with the thread between calls.
#pragma once

#include <cstddef>
#include <shared_mutex>

namespace oneflow_accel {

// A buffer of the calling thread that grows and is kept: kernels ask for scratch memory at every
// call, and fresh pages from the system would cost more than the work. `slot` names independent
// buffers that one kernel needs at the same time. Aligned to 64 bytes; valid until the thread's
// next call with the same slot.
enum class ScratchSlot {
  kPrimitive,
  kSource,
  kWeights,
  kDestination,
  kReduction,
  kRoundedA,
  kRoundedB,
  kCount
};
void* scratch(ScratchSlot slot, std::size_t bytes);

// The same, of n elements.
template <typename T>
T* scratch(ScratchSlot slot, std::size_t n) {
  return static_cast<T*>(scratch(slot, n * sizeof(T)));
}

// Held while a kernel runs: what it uses is not given back meanwhile. At its end all threads'
// scratch memory goes back to the system if it has become more than the limit.
class ScratchUse {
 public:
  ScratchUse();
  ~ScratchUse();
  ScratchUse(const ScratchUse&) = delete;
  ScratchUse& operator=(const ScratchUse&) = delete;

 private:
  std::shared_lock<std::shared_mutex> lock_;
};

}  // namespace oneflow_accel
