// The memory of emulated devices.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

namespace oneflow_accel::emulated {

// How many devices there are and how many bytes each has; to be set before the first is used.
struct Sizes {
  std::size_t devices = 1;
  std::size_t bytes = std::size_t{8} << 30;
};
Sizes& sizes();

// One device's memory: the first gap that is large enough.
class Heap {
 public:
  explicit Heap(std::size_t device);

  // nullptr where no gap is large enough.
  void* allocate(std::size_t bytes);
  // Memory that is not there: it reads as zeros and cannot be written.
  void* promise(std::size_t bytes, const std::string& lack);
  void free(void* data);

  int64_t used();
  // Since the last reset_peak().
  int64_t peak();
  void reset_peak();

 private:
  std::mutex mutex_;
  char* const begin_;
  // Bytes by where they begin.
  std::map<std::size_t, std::size_t> gaps_;
  std::map<std::size_t, std::size_t> pieces_;
  std::size_t used_ = 0;
  std::size_t peak_ = 0;
};

}  // namespace oneflow_accel::emulated
