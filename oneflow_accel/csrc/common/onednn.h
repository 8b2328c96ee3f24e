// oneDNN as the kernels use it: one engine, one stream per thread, and a cache of primitives.
#pragma once

#include <dnnl.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>

#include "common/scratch.h"

namespace oneflow_accel {

const dnnl::engine& cpu_engine();

// The calling thread's stream. CPU streams run in order and in place: execute() has finished when
// it returns.
dnnl::stream& cpu_stream();

// A key that identifies a primitive: operation, shapes, attributes and thread count.
class KeyBuilder {
 public:
  explicit KeyBuilder(const char* operation);
  template <typename... Value>
  KeyBuilder& add(Value... values) {
    (append(static_cast<int64_t>(values)), ...);
    return *this;
  }
  template <typename Range>
  KeyBuilder& add_all(const Range& values) {
    for (const auto value : values) { add(value); }
    return add(kSeparator);
  }
  const std::string& str() const { return key_; }

 private:
  static constexpr int64_t kSeparator = INT64_MIN;
  void append(int64_t value);
  std::string key_;
};

// Primitives by key, per calling thread: creating one costs milliseconds (code generation), and a
// model has some dozens. Thread-local, so looking one up takes no lock. When `capacity` is reached
// the whole cache is dropped: shapes that change at every call are rare, and oneDNN keeps a cache
// of its own below this one.
template <typename Entry>
class PrimitiveCache {
 public:
  static Entry& get_or_create(const std::string& key, const std::function<Entry()>& create) {
    thread_local std::unordered_map<std::string, std::unique_ptr<Entry>> entries;
    auto it = entries.find(key);
    if (it != entries.end()) { return *it->second; }
    if (entries.size() >= kCapacity) { entries.clear(); }
    return *entries.emplace(key, std::make_unique<Entry>(create())).first->second;
  }

 private:
  static constexpr std::size_t kCapacity = 1024;
};

int64_t count(const dnnl::memory::dims& sizes);
std::string text(const dnnl::memory::dims& sizes);

// Attributes with a caller-owned scratchpad, which every primitive of the plug-in uses.
dnnl::primitive_attr user_scratchpad_attr();

// Memory over the calling thread's scratchpad buffer for `desc`.
dnnl::memory scratchpad_memory(const dnnl::memory::desc& desc);

// The plug-in's float32 memory over data that OneFlow owns. OneFlow hands inputs as const.
inline dnnl::memory wrap(const dnnl::memory::desc& desc, const void* data) {
  return dnnl::memory(desc, cpu_engine(), const_cast<void*>(data));
}

}  // namespace oneflow_accel
