#include "common/onednn.h"

#include <atomic>
#include <functional>
#include <numeric>

#include "common/bfloat16.h"
#include "common/threads.h"

namespace oneflow_accel {

namespace {

std::atomic<bool> g_rounds_products{false};

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

KeyBuilder::KeyBuilder(const char* operation) : key_(operation) {
  key_.push_back('\0');
  add(num_threads());
}

void KeyBuilder::append(int64_t value) {
  key_.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

int64_t count(const dnnl::memory::dims& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

std::string text(const dnnl::memory::dims& sizes) {
  std::string list;
  for (const int64_t size : sizes) { list += (list.empty() ? "" : ", ") + std::to_string(size); }
  return "(" + list + ")";
}

dnnl::primitive_attr user_scratchpad_attr() {
  dnnl::primitive_attr attr;
  attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  return attr;
}

dnnl::memory scratchpad_memory(const dnnl::memory::desc& desc) {
  return dnnl::memory(desc, cpu_engine(), scratch(ScratchSlot::kPrimitive, desc.get_size()));
}

bool float32_products_in_bfloat16() { return g_rounds_products.load(std::memory_order_relaxed); }

bool may_use(unsigned isa) { return (dnnl_get_effective_cpu_isa() & isa) == isa; }

bool has_bfloat16_products() {
  static const bool has = may_use(dnnl_cpu_isa_avx512_core_bf16);
  return has;
}

}  // namespace oneflow_accel

extern "C" {

// Returns what was so before.
int oneflow_accel_set_bfloat16_products(int on) {
  return oneflow_accel::g_rounds_products.exchange(on != 0) ? 1 : 0;
}

// What multiplies bfloat16 here: 0 nothing, 1 AVX-512 BF16, 2 AMX, if the system lets this process.
int oneflow_accel_bfloat16_products() {
  if (oneflow_accel::may_use(dnnl_cpu_isa_avx512_core_amx)) { return 2; }
  return oneflow_accel::has_bfloat16_products() ? 1 : 0;
}

// "3.2.0", the oneDNN the process really runs with.
const char* oneflow_accel_onednn_version() {
  static const std::string version = [] {
    const dnnl_version_t* v = dnnl_version();
    return std::to_string(v->major) + "." + std::to_string(v->minor) + "."
           + std::to_string(v->patch);
  }();
  return version.c_str();
}

}  // extern "C"
