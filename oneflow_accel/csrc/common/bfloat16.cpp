#include "common/bfloat16.h"

#include <atomic>
#include <dnnl.hpp>

namespace oneflow_accel {

namespace {

std::atomic<bool> g_rounds_products{false};

}  // namespace

bool float32_products_in_bfloat16() { return g_rounds_products.load(std::memory_order_relaxed); }

bool has_bfloat16_products() {
  static const bool has = [] {
    constexpr unsigned kNeeded = dnnl_cpu_isa_avx512_core_bf16;
    return (dnnl_get_effective_cpu_isa() & kNeeded) == kNeeded;
  }();
  return has;
}

}  // namespace oneflow_accel

// Returns what was so before. 1 needs has_bfloat16_products().
extern "C" int oneflow_accel_set_bfloat16_products(int on) {
  return oneflow_accel::g_rounds_products.exchange(on != 0) ? 1 : 0;
}
