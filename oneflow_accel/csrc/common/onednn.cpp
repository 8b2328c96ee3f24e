#include "common/onednn.h"

#include "common/threads.h"

namespace oneflow_accel {

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
