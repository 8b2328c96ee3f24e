// What OneFlow knows for CPUs and GPUs only, and refuses or leaves out on any other device.
#include <string>

#include "common/redirect.h"
#include "emulated/emulated.h"
#include "oneflow/core/framework/autocast.h"
#include "oneflow/core/framework/random_generator.h"

namespace oneflow_accel::emulated {

namespace {

// Autocast casts the tensors of one kind of device; where that is the CPU, this device's and no
// CPU's.
DeviceType device_type_of_autocast() {
  const DeviceType type = autocast::get_autocast_device_type();
  return type == DeviceType::kCPU ? kDevice : type;
}

// Its random operators, the CPU's, draw from a CPU's generator.
Maybe<one::Generator> make_generator(DeviceType type, int index) {
  return one::MakeGenerator(type == kDevice ? DeviceType::kCPU : type, index);
}

template <typename Function>
void redirect(const char* function, Function* replacement) {
  host().redirect(kOneFlowLibrary, function, reinterpret_cast<void*>(replacement));
}

}  // namespace

void pass_for_cpu() {
  redirect("_ZN7oneflow8autocast24get_autocast_device_typeEv", device_type_of_autocast);
  redirect("_ZN7oneflow3one13MakeGeneratorENS_10DeviceTypeEi", make_generator);
}

}  // namespace oneflow_accel::emulated
