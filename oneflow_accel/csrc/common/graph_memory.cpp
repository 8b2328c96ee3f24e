// Lets operators of an nn.Graph on a CPU write where outputs lay that nothing reads any more.
//
// OneFlow 0.9.0 shares memory among a graph's outputs on other devices only
// (IntraJobMemSharingUtil): on a CPU each output keeps a place of its own, which has left the
// caches whenever its turn comes again, and a graph holds as much memory as all its outputs
// together. So the plug-in shares memory on CPUs when OneFlow has done so elsewhere.
//
// An output may lie where another did if all that reads the other must have ended, by the graph's
// edges alone, before its own operator begins. One more edge, from a block's first operator to what
// reads its last output, keeps the next run of the graph from writing into a block that this one
// still reads. Where the operator itself is the last to read the other and its kernel can work in
// place (InPlace), as eager `x += y` does, it does so; and what only has another shape than its
// input lies where that does, as an eager view.
//
// On a CPU, OneFlow writes an output's shape once before its data and reads it there ever after. So
// that outputs of different shapes can share a block, shapes get places of their own.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>
#include <numeric>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/oneflow.h"
#include "common/redirect.h"
#include "oneflow/core/job/id_manager.h"
#include "oneflow/core/job/intra_job_mem_sharing_util.h"
#include "oneflow/core/job/plan_util.h"
#include "oneflow/core/register/blob_desc.h"

namespace oneflow {

// Of a header that is not among those of the wheel.
RegstDescProto* FindOrCreateProducedCtrlRegstDesc(TaskProto* task, const std::string& name);
RegstDescIdSet* FindOrCreateConsumedCtrlRegstDescIdSet(TaskProto* task, const std::string& name);

}  // namespace oneflow

#define BLOB_CONSTRUCTOR "_ZN7oneflow4BlobC1ERKNS_10MemoryCaseEPKNS_8BlobDescEPcS7_"

namespace oneflow_accel {

namespace {

using ::oneflow::BlobDesc;

// Of a class that is not among those of the wheel, either.
extern "C" void blob_constructor(void* blob, const ::oneflow::MemoryCase& memory,
                                 const BlobDesc* description, char* header,
                                 char* body) asm(BLOB_CONSTRUCTOR);

using ::oneflow::RegstDescProto;
using ::oneflow::TaskProto;
using Reaches = std::function<bool(const std::string&, const std::string&)>;

// Tasks of a graph, of all its processes, with which `Order` takes 128 MB: it grows with the square.
constexpr int kMostTasks = 1 << 15;

std::atomic<int64_t> g_shared_outputs{0};

bool runs_on_cpu(const TaskProto& task) {
  return task.task_type() == ::oneflow::TaskType::kNormalForward
         && ::oneflow::PlanUtil::GetStreamId(task).device_id().device_type()
                == ::oneflow::DeviceType::kCPU;
}

// The tasks of a graph in an order in which each comes after those that it waits for, and which
// those are: a bit per task.
class Order {
 public:
  explicit Order(::oneflow::Plan* plan) {
    for (TaskProto& task : *plan->mutable_task()) { tasks_.push_back(&task); }
    std::sort(tasks_.begin(), tasks_.end(), [](const TaskProto* a, const TaskProto* b) {
      return a->task_set_info().order_in_graph() < b->task_set_info().order_in_graph();
    });
    for (int64_t i = 0; i < size(); ++i) { places_[tasks_[i]->task_id()] = i; }
    const int64_t words = (size() + 63) / 64;
    earlier_.assign(size(), std::vector<uint64_t>(words));
    for (int64_t i = 0; i < size(); ++i) {
      for (const auto& output : tasks_[i]->produced_regst_desc()) {
        for (int64_t id : output.second.consumer_task_id()) {
          const int64_t reader = place(id);
          if (reader <= i) { continue; }
          for (int64_t w = 0; w < words; ++w) { earlier_[reader][w] |= earlier_[i][w]; }
          earlier_[reader][i / 64] |= uint64_t{1} << (i % 64);
        }
      }
    }
  }

  int64_t size() const { return static_cast<int64_t>(tasks_.size()); }
  TaskProto* task(int64_t place) const { return tasks_[place]; }
  int64_t place(int64_t task_id) const { return places_.at(task_id); }
  // Whether `first` has always ended when `second` begins.
  bool ends_before(int64_t first, int64_t second) const {
    return (earlier_[second][first / 64] >> (first % 64) & 1) != 0;
  }

 private:
  std::vector<TaskProto*> tasks_;
  std::unordered_map<int64_t, int64_t> places_;
  std::vector<std::vector<uint64_t>> earlier_;
};

// The machine and the memory of an output that may share a block; empty where it may not: it is not
// plain numbers of a fixed shape that one run of the graph writes once, for kernels on the CPU of
// this process.
std::string memory_of(const Order& order, const TaskProto& task, const RegstDescProto& output) {
  if (!output.enable_reuse_mem() || output.register_num() != 1 || output.mem_block_id() != -1
      || output.inplace_consumed_regst_desc_id() != -1
      || output.inplace_info_type_case() != RegstDescProto::INPLACE_INFO_TYPE_NOT_SET
      || !output.regst_desc_type().has_data_regst_desc()) {
    return {};
  }
  const auto& data = output.regst_desc_type().data_regst_desc();
  const auto& times = data.time_shape().dim();
  if (data.lbi2blob_desc_size() != 1
      || !std::all_of(times.begin(), times.end(), [](int64_t count) { return count == 1; })) {
    return {};
  }
  const auto& blob = data.lbi2blob_desc(0).blob_desc();
  if (blob.is_dynamic() || blob.data_type() == ::oneflow::DataType::kTensorBuffer
      || blob.data_type() == ::oneflow::DataType::kOFRecord) {
    return {};
  }
  for (int64_t id : output.consumer_task_id()) {
    const TaskProto& reader = *order.task(order.place(id));
    if (!runs_on_cpu(reader) || reader.machine_id() != task.machine_id()) { return {}; }
  }
  return std::to_string(task.machine_id()) + '/' + output.mem_case().SerializeAsString();
}

int64_t bytes_of(const RegstDescProto& output) {
  const auto& blob = output.regst_desc_type().data_regst_desc().lbi2blob_desc(0).blob_desc();
  const auto& shape = blob.shape().dim();
  return std::accumulate(shape.begin(), shape.end(),
                         static_cast<int64_t>(::oneflow::GetSizeOfDataType(blob.data_type())),
                         std::multiplies<>());
}

// The output in whose place the kernel of `task` can put `output` although it reads it.
struct Source {
  int64_t id = -1;
  // Whether its data stay as they are.
  bool is_kept = false;
};

Source source_of(const ::oneflow::Plan* plan, const TaskProto& task,
                 const RegstDescProto& output) {
  if (task.exec_sequence().exec_node_size() != 1) { return {}; }
  const auto& node = task.exec_sequence().exec_node(0);
  const auto& op =
      ::oneflow::PlanUtil::GetOpAttribute(plan, task.job_id(), node.kernel_conf()).op_conf();
  if (!op.has_user_conf()) { return {}; }
  const InPlace pair = in_place_of(op.user_conf().op_type_name());
  if (pair.out == nullptr) { return {}; }
  const auto& tensors = node.bn_in_op2regst_desc_id();
  const auto out = tensors.find(pair.out + std::string("_0"));
  const auto in = tensors.find(pair.in + std::string("_0"));
  if (out == tensors.end() || out->second != output.regst_desc_id() || in == tensors.end()) {
    return {};
  }
  if (!pair.changes) { return {in->second, true}; }
  // Kernels of other types are OneFlow's.
  const auto& data = output.regst_desc_type().data_regst_desc();
  const auto type = data.lbi2blob_desc(0).blob_desc().data_type();
  if (type != DataType::kFloat && type != DataType::kBFloat16) { return {}; }
  // Another argument may be read in another order.
  const auto uses = std::count_if(tensors.begin(), tensors.end(),
                                  [&](const auto& tensor) { return tensor.second == in->second; });
  return uses == 1 ? Source{in->second, false} : Source{};
}

// Memory that outputs share: the place of the task that writes it first; those of the tasks that
// read what it holds, or have written it where none reads it; its first output; the id and the
// bytes of what it holds; and its own bytes.
struct Block {
  int64_t first;
  std::vector<int64_t> last;
  RegstDescProto* output;
  int64_t holds;
  int64_t held;
  int64_t size;

  int64_t read_until() const { return *std::max_element(last.begin(), last.end()); }
};

// Which of two free blocks suits an output of so many bytes better: that of its size, else that
// which was read last, as it is the likeliest to be in a cache.
bool suits_better(const Block& block, const Block& other, int64_t bytes) {
  const int64_t gap = std::abs(block.size - bytes);
  const int64_t other_gap = std::abs(other.size - bytes);
  return gap != other_gap ? gap < other_gap : block.read_until() > other.read_until();
}

// A block for `output`, which the task at `place` writes; nullptr where none suits.
Block* find_block(std::vector<Block>* blocks, const Order& order, int64_t place, int64_t bytes,
                  const Source& source) {
  Block* found = nullptr;
  for (Block& block : *blocks) {
    const bool is_source = block.holds == source.id && block.held == bytes;
    if (is_source && source.is_kept) { return &block; }
    const bool is_free = std::all_of(block.last.begin(), block.last.end(), [&](int64_t last) {
      return order.ends_before(last, place) || (is_source && last == place);
    });
    if (!is_free) { continue; }
    if (is_source) { return &block; }
    // Of much less or more, it would be missed by others.
    const bool is_alike = block.size <= 2 * bytes && bytes <= 2 * block.size;
    if (is_alike && (found == nullptr || suits_better(block, *found, bytes))) { found = &block; }
  }
  return found;
}

void lay(RegstDescProto* output, int64_t block) {
  output->set_mem_block_id(block);
  output->set_mem_block_offset(0);
}

// Lets the next run of `first` wait until `last` has ended.
void guard(TaskProto* first, TaskProto* last) {
  RegstDescProto* edge =
      ::oneflow::FindOrCreateProducedCtrlRegstDesc(first, "out_ctrl_shared_memory");
  const auto& readers = edge->consumer_task_id();
  if (std::find(readers.begin(), readers.end(), last->task_id()) != readers.end()) { return; }
  edge->add_consumer_task_id(last->task_id());
  ::oneflow::FindOrCreateConsumedCtrlRegstDescIdSet(last, "in_ctrl")
      ->add_regst_desc_id(edge->regst_desc_id());
}

void share_memory(::oneflow::Plan* plan) {
  if (plan->task_size() > kMostTasks) { return; }
  const Order order(plan);
  std::unordered_map<std::string, std::vector<Block>> blocks;
  for (int64_t place = 0; place < order.size(); ++place) {
    TaskProto* task = order.task(place);
    if (!runs_on_cpu(*task)) { continue; }
    for (auto& named : *task->mutable_produced_regst_desc()) {
      RegstDescProto& output = named.second;
      const std::string memory = memory_of(order, *task, output);
      if (memory.empty()) { continue; }
      std::vector<int64_t> readers;
      for (int64_t id : output.consumer_task_id()) { readers.push_back(order.place(id)); }
      if (readers.empty()) { readers.push_back(place); }
      const int64_t bytes = bytes_of(output);
      const Source source = source_of(plan, *task, output);
      Block* const free = find_block(&blocks[memory], order, place, bytes, source);
      if (free == nullptr) {
        blocks[memory].push_back(
            {place, std::move(readers), &output, output.regst_desc_id(), bytes, bytes});
        continue;
      }
      if (source.is_kept && free->holds == source.id) {
        // Both are read.
        readers.insert(readers.end(), free->last.begin(), free->last.end());
      }
      if (free->output->mem_block_id() == -1) {
        lay(free->output, ::oneflow::Singleton<::oneflow::IDMgr>::Get()->NewMemBlockId());
      }
      lay(&output, free->output->mem_block_id());
      free->last = std::move(readers);
      free->holds = output.regst_desc_id();
      free->held = bytes;
      free->size = std::max(free->size, bytes);
      g_shared_outputs.fetch_add(1, std::memory_order_relaxed);
    }
  }
  for (const auto& memory : blocks) {
    for (const Block& block : memory.second) {
      if (block.output->mem_block_id() == -1) { continue; }
      for (int64_t last : block.last) { guard(order.task(block.first), order.task(last)); }
    }
  }
}

void infer_memory(::oneflow::Plan* plan, const Reaches& reaches) {
  ::oneflow::IntraJobMemSharingUtil::InferMemBlockId4MemReusedRegst(plan, reaches);
  share_memory(plan);
}

// A shape's numbers, as an output's header has them; kept for ever, as those of one shape are alike.
char* header_of(const ::oneflow::Shape& shape) {
  static std::mutex mutex;
  static auto& headers = *new std::map<std::vector<int64_t>, std::vector<int64_t>>;
  std::vector<int64_t> dims(shape.begin(), shape.end());
  const std::lock_guard<std::mutex> lock(mutex);
  std::vector<int64_t>& header = headers[dims];
  if (header.empty()) { header.resize(dims.size() + 1); }
  return reinterpret_cast<char*>(header.data());
}

// In place of the constructor of an output's Blob.
void construct_blob(void* blob, const ::oneflow::MemoryCase& memory, const BlobDesc* description,
                    char* header, char* body) {
  const bool is_before_data =
      body != nullptr && body == header + description->AlignedByteSizeOfBlobHeader();
  if (is_before_data && !description->is_dynamic()) { header = header_of(description->shape()); }
  blob_constructor(blob, memory, description, header, body);
}

// When the library is loaded. Not the second without the first: shapes would overwrite each other.
const bool g_shares =
    redirect_in_oneflow(BLOB_CONSTRUCTOR, construct_blob)
    && redirect_in_oneflow(
    "_ZN7oneflow22IntraJobMemSharingUtil30InferMemBlockId4MemReusedRegstEPNS_4PlanERKSt8function"
    "IFbRKSsS5_EE",
    infer_memory);

}  // namespace

}  // namespace oneflow_accel

// For tests: how many outputs of graphs lie where others of the same graph lay before.
extern "C" int64_t oneflow_accel_shared_outputs() { return oneflow_accel::g_shared_outputs.load(); }
