// An accelerator that is emulated: OneFlow's device type `mock`, which it reserves and leaves empty,
// filled from outside under the name "emulated". Its memory is its own, its kernels are the CPU's.
#pragma once

// Before OneFlow's headers: one of them has a name of immintrin.h's.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <functional>

#include "oneflow/core/ep/include/device.h"
#include "oneflow/core/ep/include/stream.h"
#include "oneflow/core/framework/framework.h"

namespace oneflow_accel::emulated {

// Its macros need its names.
using namespace ::oneflow;

constexpr DeviceType kDevice = DeviceType::kMockDevice;

// Device memory is mapped twice. Programs get addresses of the first mapping, which nobody may read
// or write; kernels, those of the second one, by these functions. Addresses of other memory stay as
// they are.
bool is_on_device(const void* data);
void* host_view(void* data);
inline const void* host_view(const void* data) { return host_view(const_cast<void*>(data)); }

// The stream of the CPU on which kernels of `stream`, one of this device, compute.
ep::Stream* cpu_stream(ep::Stream* stream);

// Runs `work` after all that was given to the stream before.
void run(ep::Stream* stream, const std::function<void()>& work);

// What the CPU plug-in does for the device; its functions of the same names say more.
struct Host {
  void (*drop_copies)(const void* data, int64_t bytes);
  bool (*may_write)(const void* data, int64_t bytes);
  void (*promise)(void* data, int64_t bytes, const char* lack);
  void (*withdraw)(const void* data);
};
Host& host();

// Numbers that the device counts, in the order of `Counters` in backends/emulated.py.
enum class Counter { kLaunches, kToDevice, kToHost, kOnDevice, kStreams, kCount };
void count(Counter counter);

}  // namespace oneflow_accel::emulated
