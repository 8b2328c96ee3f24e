// eager_ccl_all_gather, _all_reduce, _reduce_scatter and _broadcast between processes of one
// machine: through memory that they share, where OneFlow's go through TCP on the loopback device
// and take milliseconds each.
//
// OneFlow's kernels stay, inside ours: for processes on several machines, and for sums of data
// types that nobody sums up here.
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "collective/peers.h"
#include "common/bfloat16.h"
#include "common/oneflow.h"
#include "common/waiting.h"
#include "oneflow/core/common/protobuf.h"
#include "oneflow/core/job/parallel_desc.h"

namespace oneflow_accel {

namespace {

// A slot's bytes: small enough for a core's cache, large enough that waking the others, some
// microseconds, counts for little.
constexpr int64_t kSlot = 256 * 1024;
// A member writes its next chunk while the others still read the one before.
constexpr int kSlots = 2;

// For a second at most; false where that has passed.
bool sleep_until_changed(const std::atomic<uint32_t>& value, uint32_t from) {
  constexpr timespec kSecond{1, 0};
  return syscall(SYS_futex, &value, FUTEX_WAIT, from, &kSecond, nullptr, 0) == 0
         || errno != ETIMEDOUT;
}

void wake_all(const std::atomic<uint32_t>& value) {
  syscall(SYS_futex, &value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

struct Slot {
  // The call that the chunk is of.
  Call call;
  alignas(64) char data[kSlot];
};

struct Member {
  // The last chunk that is in this member's slots; it has then read all before.
  alignas(64) std::atomic<uint32_t> written;
  // How many sleep until that changes.
  std::atomic<uint32_t> sleepers;
  alignas(64) Slot slots[kSlots];
};

// The members make the same calls in the same order: their first chunks are compared. What is long
// goes through in chunks.
class Group {
  static constexpr int kAll = -1;

  static auto copy_from(const char* in) {
    return [in](char* own, int64_t begin, int64_t size) { std::memcpy(own, in + begin, size); };
  }

 public:
  // Makes `bytes` of the sums of the `count` parts' numbers, which are of one type and rounded once.
  using Add = void (*)(const char* const* parts, int count, char* sum, int64_t bytes);

  Group(std::vector<const Peer*> peers, int index)
      : peers_(std::move(peers)), index_(index), count_(static_cast<int>(peers_.size())) {}
  ~Group() {
    if (members_ != nullptr) { munmap(members_, bytes_); }
  }

  int64_t bytes() const { return bytes_; }

  // Comes before all else: whether that file's memory, if it is one, could be mapped.
  bool map(int file) {
    struct stat status {};
    const bool ok = file >= 0 && fstat(file, &status) == 0 && status.st_size == bytes_;
    void* memory =
        ok ? mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) : MAP_FAILED;
    if (memory != MAP_FAILED) { members_ = static_cast<Member*>(memory); }
    return members_ != nullptr;
  }

  int index() const { return index_; }

  // `out` gets the members' `bytes` of `in`, one after the other.
  void all_gather(const Call& call, const char* in, char* out, int64_t bytes) {
    exchange(call, bytes, kSlot, kAll, copy_from(in), [&](int64_t begin, int64_t size) {
      for (int member = 0; member < count_; ++member) {
        std::memcpy(out + member * bytes + begin, slot(member), size);
      }
    });
  }

  // `out` gets `bytes` of the member `root`'s `in`.
  void broadcast(const Call& call, const char* in, char* out, int64_t bytes, int root) {
    exchange(call, bytes, kSlot, root, copy_from(in), [&](int64_t begin, int64_t size) {
      if (index_ != root) {
        std::memcpy(out + begin, slot(root), size);
      } else if (out != in) {
        std::memmove(out + begin, in + begin, size);
      }
    });
  }

  // The sums over the members, added in their order: the same bits for all. `out` may be `in`.
  void all_reduce(const Call& call, const char* in, char* out, int64_t bytes, Add add) {
    exchange(call, bytes, kSlot, kAll, copy_from(in), [&](int64_t begin, int64_t size) {
      add_up(0, size, out + begin, add);
    });
  }

  // The sums of this member's part, `bytes` of all members' as many parts.
  void reduce_scatter(const Call& call, const char* in, char* out, int64_t bytes, Add add) {
    // Whole numbers of any type.
    const int64_t most = std::max<int64_t>(kSlot / count_ / 64, 1) * 64;
    const auto write = [&](char* own, int64_t begin, int64_t size) {
      for (int member = 0; member < count_; ++member) {
        std::memcpy(own + member * size, in + member * bytes + begin, size);
      }
    };
    exchange(call, bytes, most, kAll, write, [&](int64_t begin, int64_t size) {
      add_up(index_ * size, size, out + begin, add);
    });
  }

  // Throws, in all members, where they are not about to make the same call.
  void compare(const Call& call) {
    const auto nothing = [](auto...) {};
    exchange(call, 1, 1, kAll, nothing, nothing);
  }

 private:
  // Where a member writes this chunk.
  char* slot(int member) const { return members_[member].slots[chunk_ % kSlots].data; }
  Call& call_of(int member) const { return members_[member].slots[chunk_ % kSlots].call; }

  void wait_for(int member, uint32_t chunk, const Call& call) const {
    Member& other = members_[member];
    // The numbers wrap around.
    const auto is_there = [&](uint32_t seen) { return static_cast<int32_t>(seen - chunk) >= 0; };
    if (comes_true_soon([&] { return is_there(other.written.load()); })) { return; }
    Wait wait(*peers_[member], call);
    other.sleepers.fetch_add(1);
    for (uint32_t seen = other.written.load(); !is_there(seen); seen = other.written.load()) {
      // It may have come just before it ended.
      if (!sleep_until_changed(other.written, seen) && seen == other.written.load()) {
        wait.go_on();
      }
    }
    other.sleepers.fetch_sub(1);
  }

  // Each chunk of at most `most` of the `bytes`: waits until this member's slot is free, calls
  // write(slot, begin, size), tells the others, waits for them, and calls read(begin, size). `from`
  // is the one member that writes, and that the others wait for, or kAll. In the first chunk all
  // wait for all, and compare what they are about to do.
  template <typename Write, typename Read>
  void exchange(const Call& call, int64_t bytes, int64_t most, int from, const Write& write,
                const Read& read) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Member& own = members_[index_];
    for (int64_t begin = 0; begin < bytes; begin += most) {
      const int64_t size = std::min(most, bytes - begin);
      const bool all = from == kAll || begin == 0;
      ++chunk_;
      if (all || from == index_) {
        // Those that have come to the chunk before have read the one before it, which lies here.
        for (int member = 0; member < count_; ++member) { wait_for(member, chunk_ - 1, call); }
        call_of(index_) = call;
        if (from == kAll || from == index_) { write(slot(index_), begin, size); }
      }
      own.written.store(chunk_);
      if (own.sleepers.load() > 0) { wake_all(own.written); }
      for (int member = 0; member < count_; ++member) {
        if (all || from == member) { wait_for(member, chunk_, call); }
      }
      if (begin == 0) { check_same(call); }
      read(begin, size);
    }
  }

  // All throw where one has another call, and are at the same chunk then: they can go on.
  void check_same(const Call& call) const {
    for (int member = 0; member < count_; ++member) {
      const Call& other = call_of(member);
      if (std::memcmp(&other, &call, sizeof(Call)) == 0) { continue; }
      throw std::runtime_error(call.text() + " on " + peers_[index_]->name() + ", and "
                               + other.text() + " on " + peers_[member]->name()
                               + ": all processes have to make the same calls in the same order, "
                                 "with the same sizes and data types");
    }
  }

  // `sum` gets the sums of what the members' slots hold from `offset` on, in their order.
  void add_up(int64_t offset, int64_t bytes, char* sum, Add add) const {
    std::vector<const char*> parts;
    for (int member = 0; member < count_; ++member) { parts.push_back(slot(member) + offset); }
    add(parts.data(), count_, sum, bytes);
  }

  const std::vector<const Peer*> peers_;
  const int index_;
  const int count_;
  // OneFlow may run kernels on several threads.
  std::mutex mutex_;
  const int64_t bytes_ = count_ * sizeof(Member);
  Member* members_ = nullptr;
  // Number of the chunk; it may wrap around.
  uint32_t chunk_ = 0;
};

// Says once why tensors go through TCP, as in stock OneFlow.
void say_apart(const std::string& why) {
  static std::once_flag said;
  std::call_once(said, [&] {
    std::fprintf(stderr, "oneflow_accel: processes exchange tensors through TCP: %s\n",
                 why.c_str());
  });
}

// The first member makes the memory and says where; the others say whether they have it; the first
// one says whether all have.
std::unique_ptr<Group> make_group(const std::vector<int64_t>& ranks, int index, const Call& call) {
  std::vector<const Peer*> peers;
  std::string prefix = "oneflow_accel/shared_memory";
  for (const int64_t rank : ranks) {
    peers.push_back(&Peer::of(rank, call));
    prefix += "/" + std::to_string(rank);
  }
  const auto told_by = [&](int member, const std::string& key) {
    Wait wait(*peers[member], call);
    return left(prefix + key, [&] { wait.go_on(); });
  };
  std::string why;
  // What they have told is the same for all.
  for (const Peer* peer : peers) {
    if (why.empty()) { why = peer->why_apart(*peers[0]); }
  }
  auto group = std::make_unique<Group>(peers, index);
  if (why.empty()) {
    const int file = index == 0 ? make_file(group->bytes()) : open_file(told_by(0, " path"));
    bool all = group->map(file);
    if (index == 0) {
      leave(prefix + " path", all ? path_of(file) : "");
      for (int member = 1; member < static_cast<int>(peers.size()); ++member) {
        all = told_by(member, " has " + std::to_string(member)) == "yes" && all;
      }
      leave(prefix + " all", all ? "yes" : "no");
    } else {
      leave(prefix + " has " + std::to_string(index), all ? "yes" : "no");
      all = told_by(0, " all") == "yes";
    }
    if (file >= 0) { close(file); }
    if (all) { return group; }
    why = "memory that all have could not be made";
  }
  if (index == 0) { say_apart(why); }
  return nullptr;
}

// The group of these ranks, in this order, this process among them; the first call asks all of them
// and waits for their answers. Null where they are one process, are not on one machine, or may not
// share memory (ONEFLOW_ACCEL_SHARED_MEMORY=off, no room): the same answer for all.
Group* group_of(const std::vector<int64_t>& ranks, const Call& call) {
  // Never destroyed: OneFlow's threads may outlive the library's variables.
  static auto& groups = *new std::map<std::vector<int64_t>, std::unique_ptr<Group>>;
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto known = groups.find(ranks);
  if (known != groups.end()) { return known->second.get(); }
  std::unique_ptr<Group> made;
  const std::set<int64_t> different(ranks.begin(), ranks.end());
  const auto here = std::find(ranks.begin(), ranks.end(), this_rank());
  if (ranks.size() > 1 && different.size() == ranks.size() && here != ranks.end()) {
    made = make_group(ranks, static_cast<int>(here - ranks.begin()), call);
  }
  return (groups[ranks] = std::move(made)).get();
}

template <typename T>
void add_numbers(const char* const* parts, int count, char* sum, int64_t bytes) {
  using Total = std::conditional_t<std::is_same_v<T, Bfloat16>, float, T>;
  const auto of = [parts](int part, int64_t i) {
    if constexpr (std::is_same_v<T, Bfloat16>) {
      return to_float(reinterpret_cast<const T*>(parts[part])[i]);
    } else {
      return reinterpret_cast<const T*>(parts[part])[i];
    }
  };
  // So many at a time, which stay in the cache while all parts are added to them.
  constexpr int64_t kNumbers = 1024;
  Total totals[kNumbers];
  auto* to = reinterpret_cast<T*>(sum);
  const auto numbers = bytes / static_cast<int64_t>(sizeof(T));
  for (int64_t begin = 0; begin < numbers; begin += kNumbers) {
    const int64_t size = std::min(kNumbers, numbers - begin);
    for (int64_t i = 0; i < size; ++i) { totals[i] = of(0, begin + i); }
    for (int part = 1; part < count; ++part) {
#pragma omp simd
      for (int64_t i = 0; i < size; ++i) { totals[i] += of(part, begin + i); }
    }
    for (int64_t i = 0; i < size; ++i) {
      if constexpr (std::is_same_v<T, Bfloat16>) {
        to[begin + i] = from_float<T>(totals[i]);
      } else {
        to[begin + i] = totals[i];
      }
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

void broadcast(Group& group, Call call, int place, Context* ctx) {
  for (int i = 0; i < ctx->input_size("in"); ++i) {
    auto* out = argument(ctx, "out", i);
    const char* in = nullptr;
    if (place == group.index()) { in = argument(ctx, "in", i)->dptr<char>(); }
    call.type = out->data_type();
    call.numbers = out->shape_view().elem_cnt();
    group.broadcast(call, in, out->mut_dptr<char>(), bytes_of(*out), place);
  }
}

// Of both kernels; that of OneFlow's is made once for a placement, and so is this one.
struct Cache final : public KernelCache {
  std::vector<int64_t> ranks;
  std::shared_ptr<KernelCache> stock;
};

class Collective final : public user_op::OpKernel {
 public:
  // `operation` is a place in kOperations.
  Collective(int operation, const user_op::OpKernel* stock)
      : operation_(operation), stock_(stock) {}

  bool AlwaysComputeWhenAllOutputsEmpty() const override {
    return stock_->AlwaysComputeWhenAllOutputsEmpty();
  }
  void InitOpKernelCacheWithFlags(user_op::KernelCacheContext* ctx, int8_t flag,
                                  std::shared_ptr<KernelCache>* cache) const override {
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
  void Compute(Context* ctx, user_op::OpKernelState* state,
               const KernelCache* cache) const override {
    const auto& ours = static_cast<const Cache&>(*cache);
    if (ours.ranks.empty() || !run(ours.ranks, ctx)) {
      stock_->Compute(ctx, state, ours.stock.get());
    }
  }

 private:
  using user_op::OpKernel::Compute;
  // Whether it could be done here.
  bool run(const std::vector<int64_t>& ranks, Context* ctx) const {
    check_none_lost();
    const bool broadcasts = operation_ == kBroadcast;
    auto* out = argument(ctx, "out");
    const auto* in = broadcasts ? out : argument(ctx, "in");
    const Call call{operation_, in->data_type(), in->shape_view().elem_cnt(),
                    broadcasts ? ctx->Attr<int64_t>("root") : -1};
    Group* group = group_of(ranks, call);
    if (group == nullptr) { return false; }
    if (broadcasts) {
      const auto root = std::find(ranks.begin(), ranks.end(), call.root);
      if (root == ranks.end()) { return false; }
      broadcast(*group, call, static_cast<int>(root - ranks.begin()), ctx);
      return true;
    }
    const auto* from = in->dptr<char>();
    auto* to = out->mut_dptr<char>();
    const Group::Add add = add_of(in->data_type());
    if (operation_ == kAllGather) {
      group->all_gather(call, from, to, bytes_of(*in));
    } else if (add == nullptr) {
      group->compare(call);
      return false;
    } else if (operation_ == kAllReduce) {
      group->all_reduce(call, from, to, bytes_of(*out), add);
    } else {
      group->reduce_scatter(call, from, to, bytes_of(*out), add);
    }
    return true;
  }

  const int operation_;
  const std::unique_ptr<const user_op::OpKernel> stock_;
};

// When the library is loaded; 102: before failures.cpp guards kernels, these among them.
__attribute__((constructor(102))) void wrap_collectives() {
  for (int operation = 0; operation < static_cast<int>(std::size(kOperations)); ++operation) {
    for (auto& kernel : all_kernels()[std::string("eager_ccl_") + kOperations[operation]]) {
      kernel.create_fn = [operation,
                          create = std::move(kernel.create_fn)]() -> const user_op::OpKernel* {
        return user_op::NewOpKernel<Collective>(operation, create());
      };
    }
  }
}

}  // namespace

}  // namespace oneflow_accel
