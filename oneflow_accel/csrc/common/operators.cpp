#include <set>
#include <string>

#include "common/oneflow.h"

namespace oneflow_accel {

namespace {

// A function's static, not a global: kernels register themselves while the library is loaded, in
// no particular order of files.
std::set<std::string>& operators() {
  static std::set<std::string> names;
  return names;
}

}  // namespace

const std::string& listed(const std::string& op) { return *operators().insert(op).first; }

}  // namespace oneflow_accel

extern "C" {

// The operators that have kernels here, sorted, separated by spaces.
const char* oneflow_accel_operators() {
  static const std::string names = [] {
    std::string all;
    for (const std::string& name : oneflow_accel::operators()) {
      if (!all.empty()) { all += ' '; }
      all += name;
    }
    return all;
  }();
  return names.c_str();
}

}  // extern "C"
