#include "conv/kept_weights.h"

#include <algorithm>
#include <mutex>
#include <vector>

namespace oneflow_accel {

namespace {

// Copies of one owner. Weights that are gathered from several processes at every call lie somewhere
// else each time: without a bound their copies would pile up until the owner goes.
constexpr std::size_t kMostCopies = 8;

struct Copy {
  const void* weights;
  dnnl::memory memory;
};

struct Copies {
  std::mutex mutex;
  std::unordered_map<int64_t, std::vector<Copy>> of_owner;
};

// Leaked on purpose: OneFlow's threads may still run kernels while static objects are destroyed.
Copies& copies() {
  static auto* instance = new Copies;
  return *instance;
}

}  // namespace

dnnl::memory kept_weights(int64_t owner, const void* weights, const dnnl::memory::desc& layout,
                          const std::function<void(const dnnl::memory&)>& copy) {
  const std::lock_guard<std::mutex> lock(copies().mutex);
  // The last used comes last.
  std::vector<Copy>& mine = copies().of_owner[owner];
  const auto found = std::find_if(mine.begin(), mine.end(), [&](const Copy& one) {
    return one.weights == weights && one.memory.get_desc() == layout;
  });
  if (found != mine.end()) {
    std::rotate(found, found + 1, mine.end());
    return mine.back().memory;
  }
  if (mine.size() >= kMostCopies) { mine.erase(mine.begin()); }
  const dnnl::memory memory(layout, cpu_engine());
  copy(memory);
  mine.push_back({weights, memory});
  return memory;
}

}  // namespace oneflow_accel

extern "C" {

void oneflow_accel_release_weights(int64_t owner) {
  const std::lock_guard<std::mutex> lock(oneflow_accel::copies().mutex);
  oneflow_accel::copies().of_owner.erase(owner);
}

// Of all owners; kernels make new copies when they need them.
void oneflow_accel_release_all_weights() {
  const std::lock_guard<std::mutex> lock(oneflow_accel::copies().mutex);
  oneflow_accel::copies().of_owner.clear();
}

// How many copies there are of an owner's weights.
int64_t oneflow_accel_kept_weights(int64_t owner) {
  const std::lock_guard<std::mutex> lock(oneflow_accel::copies().mutex);
  const auto found = oneflow_accel::copies().of_owner.find(owner);
  return found == oneflow_accel::copies().of_owner.end()
             ? 0
             : static_cast<int64_t>(found->second.size());
}

}  // extern "C"
