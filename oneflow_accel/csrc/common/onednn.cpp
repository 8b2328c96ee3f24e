#include "common/onednn.h"

#include <array>
#include <cstdlib>
#include <new>

#include "common/threads.h"

namespace oneflow_accel {

namespace {

constexpr std::size_t kAlignment = 64;

struct Buffer {
  void* data = nullptr;
  std::size_t bytes = 0;
  ~Buffer() { std::free(data); }
};

}  // namespace

const dnnl::engine& cpu_engine() {
  // Leaked on purpose: OneFlow's own threads may still run kernels while static objects are
  // destroyed at exit.
  static const auto* engine = new dnnl::engine(dnnl::engine::kind::cpu, 0);
  return *engine;
}

dnnl::stream& cpu_stream() {
  thread_local dnnl::stream stream(cpu_engine());
  return stream;
}

void* scratch(ScratchSlot slot, std::size_t bytes) {
  thread_local std::array<Buffer, static_cast<std::size_t>(ScratchSlot::kCount)> buffers;
  Buffer& buffer = buffers[static_cast<std::size_t>(slot)];
  if (buffer.bytes < bytes) {
    std::free(buffer.data);
    buffer.bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    buffer.data = std::aligned_alloc(kAlignment, buffer.bytes);
    if (buffer.data == nullptr) {
      buffer.bytes = 0;
      throw std::bad_alloc();
    }
  }
  return buffer.data;
}

KeyBuilder::KeyBuilder(const char* operation) : key_(operation) {
  key_.push_back('\0');
  add(num_threads());
}

KeyBuilder& KeyBuilder::add(int64_t value) {
  key_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  return *this;
}

dnnl::primitive_attr user_scratchpad_attr() {
  dnnl::primitive_attr attr;
  attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  return attr;
}

dnnl::memory scratchpad_memory(const dnnl::memory::desc& desc) {
  return dnnl::memory(desc, cpu_engine(), scratch(ScratchSlot::kPrimitive, desc.get_size()));
}

}  // namespace oneflow_accel
