// The streams of an nn.Graph's tasks: on the device, all of them its compute stream.
#include "emulated/emulated.h"
#include "oneflow/core/graph/stream_id.h"
#include "oneflow/core/job/task.pb.h"

namespace oneflow {

// Of headers that are not among those of the wheel: as much as is called here.
class StreamIndexGenerator;

StreamId::stream_index_t GenerateComputeTaskStreamIndex(DeviceType device_type,
                                                        StreamIndexGenerator* generator);

class TaskStreamIndexGetterRegistry final {
 public:
  using key_t = std::pair<DeviceType, TaskType>;
  using stream_index_getter = std::function<StreamId::stream_index_t(StreamIndexGenerator*)>;

  static TaskStreamIndexGetterRegistry& Instance() {
    static TaskStreamIndexGetterRegistry registry;
    return registry;
  }
  void Register(const key_t& key, const stream_index_getter& getter);

 private:
  HashMap<key_t, stream_index_getter> getters_;
};

}  // namespace oneflow

namespace oneflow_accel::emulated {

namespace {

const bool g_has_streams = [] {
  for (const auto task :
       {TaskType::kAcc, TaskType::kAccCtrlTick, TaskType::kAccTick, TaskType::kDeviceTick,
        TaskType::kDistributeConcat, TaskType::kDistributeSplit, TaskType::kNormalForward,
        TaskType::kPack, TaskType::kRepeat, TaskType::kSspVariableProxy, TaskType::kUnpack}) {
    TaskStreamIndexGetterRegistry::Instance().Register(
        {kDevice, task}, [](StreamIndexGenerator* generator) {
          return GenerateComputeTaskStreamIndex(kDevice, generator);
        });
  }
  return true;
}();

}  // namespace

}  // namespace oneflow_accel::emulated
