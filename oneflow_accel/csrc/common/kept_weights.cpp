#include "common/kept_weights.h"

#include <atomic>
#include <iterator>
#include <map>
#include <mutex>
#include <vector>

namespace oneflow_accel {

namespace {

struct Copies {
  const char* end;  // of the weights
  std::vector<dnnl::memory> layouts;
};

struct KeptWeights {
  std::mutex mutex;
  int64_t last_owner = 0;
  int64_t made = 0;
  // Where each owner's weights lie. Where they are gathered from several processes at every call,
  // that is somewhere else each time: copies would pile up if more than those of one place stayed.
  std::map<int64_t, const char*> owners;
  // None overlaps another.
  std::map<const char*, Copies> places;

  void drop(const char* begin, const char* end) {
    auto after = places.lower_bound(end);
    while (after != places.begin() && std::prev(after)->second.end > begin) {
      after = places.erase(std::prev(after));
    }
  }
};

// Leaked on purpose: OneFlow's threads may still run kernels while static objects are destroyed.
KeptWeights& all() {
  static auto* const instance = new KeptWeights;
  return *instance;
}

std::atomic<bool> g_any{false};

}  // namespace

bool keeps_weights() { return g_any.load(std::memory_order_relaxed); }

dnnl::memory kept_weights(int64_t owner, const void* weights, const dnnl::memory::desc& plain,
                          const dnnl::memory::desc& layout,
                          const std::function<void(const dnnl::memory&)>& copy) {
  const auto* place = static_cast<const char*>(weights);
  const std::lock_guard<std::mutex> lock(all().mutex);
  const auto found = all().owners.find(owner);
  if (found == all().owners.end()) { return {}; }
  if (found->second != place) { all().places.erase(found->second); }
  found->second = place;
  const char* const end = place + plain.get_size();
  const auto known = all().places.find(place);
  // Weights of another owner may be a part of these, or these of them.
  if (known == all().places.end() || known->second.end < end) { all().drop(place, end); }
  Copies& copies = all().places.try_emplace(place, Copies{end, {}}).first->second;
  for (const dnnl::memory& one : copies.layouts) {
    if (one.get_desc() == layout) { return one; }
  }
  g_any = true;
  const dnnl::memory memory(layout, cpu_engine());
  copy(memory);
  copies.layouts.push_back(memory);
  ++all().made;
  return memory;
}

void drop_copies_of(const void* data, int64_t bytes) {
  const auto* begin = static_cast<const char*>(data);
  const std::lock_guard<std::mutex> lock(all().mutex);
  all().drop(begin, begin + bytes);
  g_any = !all().places.empty();
}

}  // namespace oneflow_accel

extern "C" {

int64_t oneflow_accel_new_owner() {
  const std::lock_guard<std::mutex> lock(oneflow_accel::all().mutex);
  const int64_t owner = ++oneflow_accel::all().last_owner;
  oneflow_accel::all().owners[owner] = nullptr;
  return owner;
}

void oneflow_accel_release_weights(int64_t owner) {
  const std::lock_guard<std::mutex> lock(oneflow_accel::all().mutex);
  const auto found = oneflow_accel::all().owners.find(owner);
  oneflow_accel::all().places.erase(found->second);
  oneflow_accel::all().owners.erase(found);
}

// After these bytes were changed by no kernel.
void oneflow_accel_drop_copies(const void* data, int64_t bytes) {
  oneflow_accel::drop_copies_of(data, bytes);
}

// Of all owners; kernels make new copies when they need them.
void oneflow_accel_release_all_weights() {
  const std::lock_guard<std::mutex> lock(oneflow_accel::all().mutex);
  oneflow_accel::all().places.clear();
}

// For tests: how many bytes of copies there are, and how many copies have been made.
int64_t oneflow_accel_kept_bytes() {
  const std::lock_guard<std::mutex> lock(oneflow_accel::all().mutex);
  int64_t bytes = 0;
  for (const auto& [place, copies] : oneflow_accel::all().places) {
    for (const auto& one : copies.layouts) { bytes += one.get_desc().get_size(); }
  }
  return bytes;
}
int64_t oneflow_accel_kept_copies_made() {
  const std::lock_guard<std::mutex> lock(oneflow_accel::all().mutex);
  return oneflow_accel::all().made;
}

}  // extern "C"
