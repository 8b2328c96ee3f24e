// When scratch memory (onednn.h) is given back.
#pragma once

#include <cstdint>
#include <shared_mutex>

namespace oneflow_accel {

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

// Gives all threads' scratch memory back. False where a kernel runs: nothing is given back then.
bool release_scratch();

}  // namespace oneflow_accel
