// An accelerator that is emulated: OneFlow's device type `mock`, which it reserves and leaves empty,
// filled from outside under the name "emulated". Its memory is its own, its kernels are the CPU's.
#pragma once

// Before OneFlow's headers: one of them has a name of immintrin.h's.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

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

// What the program wants, in the order of `_Options` in backends/emulated.py.
struct Options {
  int64_t devices = 1, bytes = int64_t{8} << 30;
  // Whether streams have threads of their own.
  int64_t is_asynchronous = 1;
  // Faults: which launch of which operator fails, counted from 1, and which operation on a stream is
  // the first that finds its device lost; 0 for none.
  int64_t fails_at = 0, lost_at = 0;
  // Of copies between host and device and of collectives, 0 for no limit; and what each operation on
  // a stream waits for before it begins. In seconds.
  double bytes_per_second = 0, latency = 0, delay = 0;
  const char* failing = "";
};
Options& options();

// What the CPU plug-in does for the device; its functions of the same names say more.
struct Host {
  void (*drop_copies)(const void* data, int64_t bytes);
  bool (*may_write)(const void* data, int64_t bytes);
  void (*promise)(void* data, int64_t bytes, const char* lack);
  void (*withdraw)(const void* data);
  void (*fail)(const char* message);
  void (*wait_also)(void (*wait)());
  bool (*redirect)(const char* library, const char* function, void* replacement);
};
Host& host();

// A stream of `device` that computes on one of `cpu`, and an event.
ep::Stream* make_stream(ep::Device* device, ep::Device* cpu);
ep::Event* make_event();

// The stream of the CPU on which kernels of `stream`, one of this device, compute.
ep::Stream* cpu_stream(ep::Stream* stream);

// Runs `work` after all that was given to the stream before: on the stream's thread, where it has
// one, or in this call. It is left out where the device is lost.
void run(ep::Stream* stream, std::function<void()> work);
void run_in_call(ep::Stream* stream, const std::function<void()>& work);

// Leads OneFlow to what it has for CPUs where it knows CPUs and GPUs only.
void pass_for_cpu();

// Waits until all that was given to any stream has been done.
void drain_all();

// Whether the launch of `op` that begins now is the one that fails; Python will be told.
bool fails(const std::string& op);

// Takes the time that `bytes` need between host and device, or between processes.
void pass_link(std::size_t bytes);

// Numbers that the device counts, in the order of `Counters` in backends/emulated.py.
enum class Counter { kLaunches, kToDevice, kToHost, kOnDevice, kStreams, kOfCpu, kHere, kCount };
void count(Counter counter);

}  // namespace oneflow_accel::emulated
