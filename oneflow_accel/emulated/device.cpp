// Devices, and how OneFlow finds them.
#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/python.h"
#include "emulated/emulated.h"
#include "emulated/memory.h"
#include "oneflow/core/common/error.h"
#include "oneflow/core/ep/include/device_manager_factory.h"
#include "oneflow/core/ep/include/device_manager_registry.h"

// Of DeviceManagerRegistry::Impl, a class that has no header.
using Factories = std::vector<std::unique_ptr<oneflow::ep::DeviceManagerFactory>>;
using Names = oneflow::HashMap<std::string, oneflow::DeviceType>;
#define REGISTRY "_ZZN7oneflow2ep21DeviceManagerRegistry4Impl"
extern Factories registered_factories asm(REGISTRY "9factoriesEvE13factories_vec");
extern std::mutex registered_mutex asm(REGISTRY "15factories_mutexEvE5mutex");
extern Names registered_names asm(REGISTRY
                                  "32device_type_name2device_type_mapEvE28device_type_name2device_"
                                  "type");

namespace oneflow_accel::emulated {

namespace {

constexpr const char* kName = "emulated";

std::array<std::atomic<int64_t>, static_cast<std::size_t>(Counter::kCount)> g_counters{};

std::string mebibytes(std::size_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

class Device final : public ep::Device {
 public:
  Device(ep::DeviceManager* manager, std::shared_ptr<ep::Device> cpu, std::size_t index)
      : manager_(manager), cpu_(std::move(cpu)), index_(index), heap_(index) {}

  void SetAsActiveDevice() override { manager_->SetActiveDeviceByIndex(index_); }
  DeviceType device_type() const override { return kDevice; }
  std::size_t device_index() const override { return index_; }
  ep::DeviceManager* device_manager() const override { return manager_; }

  ep::Stream* CreateStream() override {
    count(Counter::kStreams);
    return make_stream(this, cpu_.get());
  }
  void DestroyStream(ep::Stream* stream) override { delete stream; }
  void CreateEvents(ep::Event** events, std::size_t count) override {
    for (std::size_t i = 0; i < count; ++i) { events[i] = make_event(); }
  }
  void DestroyEvents(ep::Event** events, std::size_t count) override {
    for (std::size_t i = 0; i < count; ++i) { delete events[i]; }
  }

  Maybe<void> Alloc(const ep::AllocationOptions& how, void** data, std::size_t bytes) override {
    CHECK_OR_RETURN(!how.HasPinnedDevice());
    *data = heap_.allocate(bytes);
    if (*data != nullptr) { return Maybe<void>::Ok(); }
    const auto left = static_cast<std::size_t>(options().bytes - heap_.used());
    const std::string lack = "out of memory: " + mebibytes(bytes) + " were asked for, and "
                             + mebibytes(left) + " of the " + mebibytes(options().bytes) + " of "
                             + kName + ":" + std::to_string(index_)
                             + " are left, perhaps not in one piece";
    // A call from Python raises it. OneFlow's other threads would end the process.
    if (PyGILState_GetThisThreadState() != nullptr) {
      return Error::OutOfMemoryError() << lack;
    }
    *data = heap_.promise(bytes, lack);
    return Maybe<void>::Ok();
  }
  // Work that was given to a stream may still use it, as on a GPU.
  void Free(const ep::AllocationOptions&, void* data) override {
    drain_all();
    heap_.free(data);
  }
  // Of the host, for copies to and from the device.
  Maybe<void> AllocPinned(const ep::AllocationOptions& how, void** data,
                          std::size_t bytes) override {
    return cpu_->AllocPinned(how, data, bytes);
  }
  void FreePinned(const ep::AllocationOptions& how, void* data) override {
    cpu_->FreePinned(how, data);
  }

  Heap& heap() { return heap_; }

 private:
  ep::DeviceManager* const manager_;
  const std::shared_ptr<ep::Device> cpu_;
  const std::size_t index_;
  Heap heap_;
};

class Manager;
std::atomic<Manager*> g_manager{nullptr};

class Manager final : public ep::DeviceManager {
 public:
  explicit Manager(ep::DeviceManagerRegistry* registry)
      : registry_(registry), devices_(options().devices) {
    g_manager.store(this);
  }

  ep::DeviceManagerRegistry* registry() const override { return registry_; }
  std::shared_ptr<ep::Device> GetDevice(std::size_t index) override { return device(index); }
  std::shared_ptr<Device> device(std::size_t index) {
    CHECK_LT(index, devices_.size())
        << kName << ":" << index << ": there are " << devices_.size() << " devices";
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& device = devices_[index];
    if (!device) {
      device = std::make_shared<Device>(this, registry_->GetDevice(DeviceType::kCPU, 0), index);
    }
    return device;
  }
  std::size_t GetDeviceCount(std::size_t) override { return devices_.size(); }
  std::size_t GetDeviceCount() override { return devices_.size(); }
  std::size_t GetActiveDeviceIndex() override { return active(); }
  void SetActiveDeviceByIndex(std::size_t index) override { active() = index; }

 private:
  static std::size_t& active() {
    static thread_local std::size_t index = 0;
    return index;
  }

  ep::DeviceManagerRegistry* const registry_;
  std::mutex mutex_;
  std::vector<std::shared_ptr<Device>> devices_;
};

class Factory final : public ep::DeviceManagerFactory {
 public:
  std::unique_ptr<ep::DeviceManager> NewDeviceManager(
      ep::DeviceManagerRegistry* registry) override {
    return std::make_unique<Manager>(registry);
  }
  DeviceType device_type() const override { return kDevice; }
  std::string device_type_name() const override { return kName; }
};

// When the library is loaded: OneFlow has given the type to a manager of CPUs, and can only add
// others.
const bool g_has_devices = [] {
  const std::lock_guard<std::mutex> lock(registered_mutex);
  auto& factory = registered_factories.at(kDevice);
  registered_names.erase(factory->device_type_name());
  factory = std::make_unique<Factory>();
  registered_names[kName] = kDevice;
  return true;
}();

}  // namespace

Options& options() {
  static Options options;
  return options;
}

Host& host() {
  static Host host;
  return host;
}

void count(Counter counter) {
  g_counters[static_cast<std::size_t>(counter)].fetch_add(1, std::memory_order_relaxed);
}

}  // namespace oneflow_accel::emulated

using namespace oneflow_accel::emulated;

extern "C" {

// To be called before the first operation on a device. Returns whether the operator that is to fail
// exists.
bool oneflow_accel_emulated_start(const Options* wanted, const Host* functions) {
  static const std::string failing = wanted->failing;
  options() = *wanted;
  options().failing = failing.c_str();
  host() = *functions;
  host().wait_also(drain_all);
  pass_for_cpu();
  return options().fails_at == 0
         || user_op::UserOpRegistryMgr::Get().GetOpRegistryResult(failing) != nullptr;
}

int64_t oneflow_accel_emulated_counter(int64_t which) { return g_counters.at(which).load(); }

// Bytes of a device that are in use, and the most that have been since the last reset; 0 where none
// has been used.
int64_t oneflow_accel_emulated_used(int64_t device) {
  Manager* manager = g_manager.load();
  return manager == nullptr ? 0 : manager->device(device)->heap().used();
}
int64_t oneflow_accel_emulated_peak(int64_t device) {
  Manager* manager = g_manager.load();
  return manager == nullptr ? 0 : manager->device(device)->heap().peak();
}
void oneflow_accel_emulated_reset_peak(int64_t device) {
  Manager* manager = g_manager.load();
  if (manager != nullptr) { manager->device(device)->heap().reset_peak(); }
}

}  // extern "C"
