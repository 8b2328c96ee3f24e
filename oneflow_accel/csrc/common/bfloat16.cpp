#include "common/bfloat16.h"

#include <dnnl.hpp>

namespace oneflow_accel {

bool has_bfloat16_products() {
  static const bool has = [] {
    constexpr unsigned kNeeded = dnnl_cpu_isa_avx512_core_bf16;
    return (dnnl_get_effective_cpu_isa() & kNeeded) == kNeeded;
  }();
  return has;
}

}  // namespace oneflow_accel
