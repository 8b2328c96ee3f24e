// eager_ccl_all_gather, _all_reduce, _reduce_scatter and _broadcast between processes of one
// machine: through memory that they share, where OneFlow's go through TCP on the loopback device
// and take milliseconds each.
//
// OneFlow's kernels stay, inside ours: for processes on several machines, and for sums of data
// types that nobody sums up here.
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

#include "common/bfloat16.h"
#include "common/oneflow.h"
#include "common/waiting.h"
#include "oneflow/core/common/protobuf.h"
#include "oneflow/core/common/singleton.h"
#include "oneflow/core/job/parallel_desc.h"

namespace google::protobuf {
class Message;
}

namespace oneflow {

// What all processes of a job can leave for each other, by name. The header is not among those of
// the wheel: the functions stand in the order of the virtual table, and two of them are called.
class CtrlClient {
 public:
  using Message = ::google::protobuf::Message;
  virtual ~CtrlClient() = 0;
  virtual void Barrier(const std::string& name) = 0;
  virtual void Barrier(const std::string& name, int32_t processes) = 0;
  virtual int TryLock(const std::string& name) = 0;
  virtual void NotifyDone(const std::string& name) = 0;
  virtual void WaitUntilDone(const std::string& name) = 0;
  virtual void PushKV(const std::string& key, std::function<void(std::string*)> set) = 0;
  virtual void PushKV(const std::string& key, const std::string& value) = 0;
  virtual void PushKV(const std::string& key, const Message& value) = 0;
  virtual void PushMasterKV(const std::string& key, const Message& value) = 0;
  virtual void ClearKV(const std::string& key) = 0;
  virtual void ClearMasterKV(const std::string& key) = 0;
  virtual void PullKV(const std::string& key, std::function<void(const std::string&)> get) = 0;
  virtual void PullKV(const std::string& key, std::string* value) = 0;
};

struct GlobalProcessCtx {
  static int64_t Rank();
};

}  // namespace oneflow

namespace oneflow_accel {

namespace {

// A slot's bytes: small enough for a core's cache, large enough that waking the others, some
// microseconds, counts for little.
constexpr int64_t kSlot = 256 * 1024;
// A member writes its next chunk while the others still read the one before.
constexpr int kSlots = 2;

void sleep_until_changed(const std::atomic<uint32_t>& value, uint32_t from) {
  syscall(SYS_futex, &value, FUTEX_WAIT, from, nullptr, nullptr, 0);
}

void wake_all(const std::atomic<uint32_t>& value) {
  syscall(SYS_futex, &value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Of this start of this machine's system.
std::string machine() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  file >> id;
  return id;
}

bool is_allowed() {
  const char* value = std::getenv("ONEFLOW_ACCEL_SHARED_MEMORY");
  return value == nullptr || std::strcmp(value, "off") != 0;
}

struct Member {
  // The last chunk that is in this member's slots; it has then read all before.
  alignas(64) std::atomic<uint32_t> written;
  // How many sleep until that changes.
  std::atomic<uint32_t> sleepers;
  alignas(64) char slots[kSlots][kSlot];
};

// The members call the same functions in the same order, each on tensors of the same sizes. What is
// long goes through in chunks. A group is used by one thread at a time.
class Group {
  static constexpr int kAll = -1;

  static auto copy_from(const char* in) {
    return [in](char* own, int64_t begin, int64_t size) { std::memcpy(own, in + begin, size); };
  }

 public:
  // Adds the numbers of one type that `bytes` of `part` are to those of `sum`.
  using Add = void (*)(const char* part, char* sum, int64_t bytes);

  Group(int index, int count) : index_(index), count_(count) {}
  ~Group() {
    if (members_ != nullptr) { munmap(members_, bytes_); }
  }

  // Comes before all else: whether the shared memory could be made, or opened, and mapped.
  bool map(const std::string& name, bool make) {
    const int file = shm_open(name.c_str(), make ? O_CREAT | O_EXCL | O_RDWR : O_RDWR, 0600);
    if (file < 0) { return false; }
    struct stat status {};
    // Without room now, a write would end the process later.
    const bool ok = make ? posix_fallocate(file, 0, bytes_) == 0
                         : fstat(file, &status) == 0 && status.st_size == bytes_;
    void* memory =
        ok ? mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) : MAP_FAILED;
    close(file);
    if (memory != MAP_FAILED) { members_ = static_cast<Member*>(memory); }
    return members_ != nullptr;
  }

  // Place of this process among the members.
  int index() const { return index_; }

  // `out` gets the members' `bytes` of `in`, one after the other.
  void all_gather(const char* in, char* out, int64_t bytes) {
    exchange(bytes, kSlot, kAll, copy_from(in), [&](int64_t begin, int64_t size) {
      for (int member = 0; member < count_; ++member) {
        std::memcpy(out + member * bytes + begin, slot(member), size);
      }
    });
  }

  // `out` gets `bytes` of the member `root`'s `in`.
  void broadcast(const char* in, char* out, int64_t bytes, int root) {
    exchange(bytes, kSlot, root, copy_from(in), [&](int64_t begin, int64_t size) {
      if (index_ != root) {
        std::memcpy(out + begin, slot(root), size);
      } else if (out != in) {
        std::memmove(out + begin, in + begin, size);
      }
    });
  }

  // The sums over the members, added in their order: the same bits for all. `out` may be `in`.
  void all_reduce(const char* in, char* out, int64_t bytes, Add add) {
    exchange(bytes, kSlot, kAll, copy_from(in), [&](int64_t begin, int64_t size) {
      add_up(0, size, out + begin, add);
    });
  }

  // The sums of this member's part, `bytes` of all members' as many parts.
  void reduce_scatter(const char* in, char* out, int64_t bytes, Add add) {
    // Whole numbers of any type.
    const int64_t most = std::max<int64_t>(kSlot / count_ / 64, 1) * 64;
    const auto write = [&](char* own, int64_t begin, int64_t size) {
      for (int member = 0; member < count_; ++member) {
        std::memcpy(own + member * size, in + member * bytes + begin, size);
      }
    };
    exchange(bytes, most, kAll, write, [&](int64_t begin, int64_t size) {
      add_up(index_ * size, size, out + begin, add);
    });
  }

 private:
  // Where a member writes this chunk.
  char* slot(int member) const { return members_[member].slots[chunk_ % kSlots]; }

  void wait_for(int member, uint32_t chunk) const {
    Member& other = members_[member];
    // The numbers wrap around.
    const auto is_there = [&](uint32_t seen) { return static_cast<int32_t>(seen - chunk) >= 0; };
    if (comes_true_soon([&] { return is_there(other.written.load()); })) { return; }
    other.sleepers.fetch_add(1);
    for (uint32_t seen = other.written.load(); !is_there(seen); seen = other.written.load()) {
      sleep_until_changed(other.written, seen);
    }
    other.sleepers.fetch_sub(1);
  }

  // Each chunk of at most `most` of the `bytes`: waits until this member's slot is free, calls
  // write(slot, begin, size), tells the others, waits for them, and calls read(begin, size). `from`
  // is the one member that writes, and that the others wait for, or kAll.
  template <typename Write, typename Read>
  void exchange(int64_t bytes, int64_t most, int from, const Write& write, const Read& read) {
    Member& own = members_[index_];
    for (int64_t begin = 0; begin < bytes; begin += most) {
      const int64_t size = std::min(most, bytes - begin);
      ++chunk_;
      if (from == kAll || from == index_) {
        // Those that have come to the chunk before have read the one before it, which lies here.
        for (int member = 0; member < count_; ++member) { wait_for(member, chunk_ - 1); }
        write(slot(index_), begin, size);
      }
      own.written.store(chunk_);
      if (own.sleepers.load() > 0) { wake_all(own.written); }
      for (int member = 0; member < count_; ++member) {
        if (from == kAll || from == member) { wait_for(member, chunk_); }
      }
      read(begin, size);
    }
  }

  // `sum` gets the sums of what the members' slots hold from `offset` on, in their order.
  void add_up(int64_t offset, int64_t bytes, char* sum, Add add) const {
    std::memcpy(sum, slot(0) + offset, bytes);
    for (int member = 1; member < count_; ++member) { add(slot(member) + offset, sum, bytes); }
  }

  const int index_;
  const int count_;
  const int64_t bytes_ = count_ * sizeof(Member);
  Member* members_ = nullptr;
  // Number of the chunk; it may wrap around.
  uint32_t chunk_ = 0;
};

// The first member makes the memory and leaves its name; the others say whether they could open it;
// the first one says whether all could. Then the name is not needed any more.
std::unique_ptr<Group> make_group(const std::vector<int64_t>& ranks, int index) {
  auto* others = ::oneflow::Singleton<::oneflow::CtrlClient>::Get();
  const int count = static_cast<int>(ranks.size());
  std::string prefix = "oneflow_accel/shared_memory";
  for (const int64_t rank : ranks) { prefix += "/" + std::to_string(rank); }
  auto group = std::make_unique<Group>(index, count);
  std::string answer;
  if (index == 0) {
    const std::string name = "/oneflow_accel_" + std::to_string(getpid()) + "_"
                             + std::to_string(std::random_device()());
    bool all = is_allowed() && group->map(name, true);
    others->PushKV(prefix + " name", all ? machine() + " " + name : std::string());
    for (int member = 1; member < count; ++member) {
      others->PullKV(prefix + " opened " + std::to_string(member), &answer);
      all = all && answer == "yes";
    }
    shm_unlink(name.c_str());
    answer = all ? "yes" : "no";
    others->PushKV(prefix + " all", answer);
  } else {
    others->PullKV(prefix + " name", &answer);
    const auto space = answer.find(' ');
    const bool opened = is_allowed() && space != std::string::npos
                        && answer.substr(0, space) == machine()
                        && group->map(answer.substr(space + 1), false);
    others->PushKV(prefix + " opened " + std::to_string(index),
                   std::string(opened ? "yes" : "no"));
    others->PullKV(prefix + " all", &answer);
  }
  return answer == "yes" ? std::move(group) : nullptr;
}

// The group of these ranks, in this order, this process among them; the first call asks all of them
// and waits for their answers. Null where they are one process, are not on one machine, or may not
// share memory (ONEFLOW_ACCEL_SHARED_MEMORY=off, no room): the same answer for all.
Group* group_of(const std::vector<int64_t>& ranks) {
  // Never destroyed: OneFlow's threads may outlive the library's variables.
  static auto& groups = *new std::map<std::vector<int64_t>, std::unique_ptr<Group>>;
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto known = groups.find(ranks);
  if (known != groups.end()) { return known->second.get(); }
  auto& group = groups[ranks];
  const std::set<int64_t> different(ranks.begin(), ranks.end());
  const auto here = std::find(ranks.begin(), ranks.end(), ::oneflow::GlobalProcessCtx::Rank());
  if (ranks.size() > 1 && different.size() == ranks.size() && here != ranks.end()) {
    group = make_group(ranks, static_cast<int>(here - ranks.begin()));
  }
  return group.get();
}

template <typename T>
void add_numbers(const char* part, char* sum, int64_t bytes) {
  const auto* from = reinterpret_cast<const T*>(part);
  auto* to = reinterpret_cast<T*>(sum);
#pragma omp simd
  for (int64_t i = 0; i < bytes / static_cast<int64_t>(sizeof(T)); ++i) {
    if constexpr (std::is_same_v<T, Bfloat16>) {
      to[i] = from_float<T>(to_float(to[i]) + to_float(from[i]));
    } else {
      to[i] += from[i];
    }
  }
}

// Null where sums of this type are OneFlow's.
Group::Add add_of(DataType type) {
  switch (type) {
    case DataType::kFloat: return add_numbers<float>;
    case DataType::kDouble: return add_numbers<double>;
    case DataType::kBFloat16: return add_numbers<Bfloat16>;
    case DataType::kInt32: return add_numbers<int32_t>;
    case DataType::kInt64: return add_numbers<int64_t>;
    default: return nullptr;
  }
}

bool broadcast(Group& group, const std::vector<int64_t>& ranks,
               user_op::KernelComputeContext* ctx) {
  const auto root = std::find(ranks.begin(), ranks.end(), ctx->Attr<int64_t>("root"));
  if (root == ranks.end()) { return false; }
  const int place = static_cast<int>(root - ranks.begin());
  for (int i = 0; i < ctx->input_size("in"); ++i) {
    auto* out = ctx->Tensor4ArgNameAndIndex("out", i);
    const char* in = nullptr;
    if (place == group.index()) { in = ctx->Tensor4ArgNameAndIndex("in", i)->dptr<char>(); }
    group.broadcast(in, out->mut_dptr<char>(), bytes_of(*out), place);
  }
  return true;
}

// Of both kernels; that of OneFlow's is made once for a placement, and so is this one.
struct Cache final : public user_op::OpKernelCache {
  std::vector<int64_t> ranks;
  std::shared_ptr<user_op::OpKernelCache> stock;
};

class Collective final : public user_op::OpKernel {
 public:
  Collective(std::string op, const user_op::OpKernel* stock)
      : op_(std::move(op)), stock_(stock) {}

  bool AlwaysComputeWhenAllOutputsEmpty() const override {
    return stock_->AlwaysComputeWhenAllOutputsEmpty();
  }
  void InitOpKernelCacheWithFlags(user_op::KernelCacheContext* ctx, int8_t flag,
                                  std::shared_ptr<user_op::OpKernelCache>* cache) const override {
    if (*cache != nullptr) { return; }
    auto made = std::make_shared<Cache>();
    ::oneflow::ParallelConf conf;
    CHECK(::oneflow::TxtString2PbMessage(ctx->Attr<std::string>("parallel_conf"), &conf));
    if (ctx->device_type() == ::oneflow::DeviceType::kCPU) {
      made->ranks = ::oneflow::ParallelDesc(conf).parallel_id2machine_id();
    }
    stock_->InitOpKernelCacheWithFlags(ctx, flag, &made->stock);
    *cache = std::move(made);
  }
  void Compute(user_op::KernelComputeContext* ctx, user_op::OpKernelState* state,
               const user_op::OpKernelCache* cache) const override {
    const auto& ours = static_cast<const Cache&>(*cache);
    Group* group = ours.ranks.empty() ? nullptr : group_of(ours.ranks);
    if (group != nullptr && run(*group, ours.ranks, ctx)) { return; }
    stock_->Compute(ctx, state, ours.stock.get());
  }

 private:
  using user_op::OpKernel::Compute;
  // Whether it could be done here.
  bool run(Group& group, const std::vector<int64_t>& ranks,
           user_op::KernelComputeContext* ctx) const {
    if (op_ == "eager_ccl_broadcast") { return broadcast(group, ranks, ctx); }
    const auto* in = ctx->Tensor4ArgNameAndIndex("in", 0);
    auto* out = ctx->Tensor4ArgNameAndIndex("out", 0);
    const auto* from = in->dptr<char>();
    auto* to = out->mut_dptr<char>();
    const Group::Add add = add_of(in->data_type());
    if (op_ == "eager_ccl_all_gather") {
      group.all_gather(from, to, bytes_of(*in));
    } else if (add == nullptr) {
      return false;
    } else if (op_ == "eager_ccl_all_reduce") {
      group.all_reduce(from, to, bytes_of(*out), add);
    } else {
      group.reduce_scatter(from, to, bytes_of(*out), add);
    }
    return true;
  }

  const std::string op_;
  const std::unique_ptr<const user_op::OpKernel> stock_;
};

// When the library is loaded.
const bool g_wrapped = [] {
  for (const char* op : {"eager_ccl_all_gather", "eager_ccl_all_reduce",
                         "eager_ccl_reduce_scatter", "eager_ccl_broadcast"}) {
    for (auto& kernel : all_kernels()[op]) {
      kernel.create_fn = [op, create = std::move(kernel.create_fn)]() -> const user_op::OpKernel* {
        return user_op::NewOpKernel<Collective>(op, create());
      };
    }
  }
  return true;
}();

}  // namespace

}  // namespace oneflow_accel
