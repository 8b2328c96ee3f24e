// What Python calls of the plug-in, through ctypes. Kernels register themselves when the library
// is loaded.
#include <dnnl.hpp>

#include "common/bfloat16.h"
#include "common/threads.h"
#include "oneflow/core/common/singleton.h"
#include "oneflow/core/framework/stream_mgr.h"

extern "C" {

void oneflow_accel_set_num_threads(int n) { oneflow_accel::set_num_threads(n); }

int oneflow_accel_num_threads() { return oneflow_accel::num_threads(); }

// "3.2.0", the oneDNN the process really runs with.
const char* oneflow_accel_onednn_version() {
  static const std::string version = [] {
    const dnnl_version_t* v = dnnl_version();
    return std::to_string(v->major) + "." + std::to_string(v->minor) + "."
           + std::to_string(v->patch);
  }();
  return version.c_str();
}

int oneflow_accel_fast_bfloat16() { return oneflow_accel::has_bfloat16_products() ? 1 : 0; }

// How many streams OneFlow has: 0 until its first operation, or its first fork, makes one.
int oneflow_accel_streams() {
  const auto* manager = ::oneflow::Singleton<::oneflow::StreamMgr>::Get();
  return manager == nullptr ? 0 : static_cast<int>(manager->UniqueStreamSize());
}

}  // extern "C"
