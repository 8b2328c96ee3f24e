#include "collective/group.h"

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
#include <map>
#include <mutex>
#include <random>
#include <set>

#include "common/waiting.h"
#include "oneflow/core/common/singleton.h"

namespace google {
namespace protobuf {
class Message;
}
}  // namespace google

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

constexpr const char* kVariable = "ONEFLOW_ACCEL_SHARED_MEMORY";
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
  const char* value = std::getenv(kVariable);
  return value == nullptr || std::strcmp(value, "off") != 0;
}

}  // namespace

struct Group::Member {
  // The last chunk that is in this member's slot; it has then read all before.
  alignas(64) std::atomic<uint32_t> written;
};

// The shared memory: how many sleep, the members, their slots.
struct Group::Segment {
  void* memory = MAP_FAILED;
  std::size_t bytes = 0;
  int members = 0;

  explicit Segment(int count)
      : bytes(64 + count * (sizeof(Member) + kSlots * kSlot)), members(count) {}
  ~Segment() {
    if (memory != MAP_FAILED) { munmap(memory, bytes); }
  }

  // Whether it could be made, or opened, and mapped.
  bool map(const std::string& name, bool make) {
    const int file = shm_open(name.c_str(), make ? O_CREAT | O_EXCL | O_RDWR : O_RDWR, 0600);
    if (file < 0) { return false; }
    struct stat status {};
    // Without room now, a write would end the process later.
    const bool ok = make ? posix_fallocate(file, 0, bytes) == 0
                         : fstat(file, &status) == 0
                               && status.st_size == static_cast<int64_t>(bytes);
    if (ok) { memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0); }
    close(file);
    return memory != MAP_FAILED;
  }

  std::atomic<uint32_t>& sleepers() const { return *static_cast<std::atomic<uint32_t>*>(memory); }
  Member& member(int index) const {
    return reinterpret_cast<Member*>(static_cast<char*>(memory) + 64)[index];
  }
  char* slot(int index, int number) const {
    char* slots = static_cast<char*>(memory) + 64 + members * sizeof(Member);
    return slots + (index * kSlots + number) * kSlot;
  }
};

Group::Group(int index, int count, std::unique_ptr<Segment> segment)
    : index_(index), count_(count), segment_(std::move(segment)) {}

Group::~Group() = default;

Group* Group::of(const std::vector<int64_t>& ranks) {
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
    group = make(ranks, static_cast<int>(here - ranks.begin()));
  }
  return group.get();
}

// The first member makes the memory and leaves its name; the others say whether they could open it;
// the first one says whether all could. Then the name is not needed any more.
std::unique_ptr<Group> Group::make(const std::vector<int64_t>& ranks, int index) {
  auto* others = ::oneflow::Singleton<::oneflow::CtrlClient>::Get();
  const int count = static_cast<int>(ranks.size());
  std::string prefix = "oneflow_accel/shared_memory";
  for (const int64_t rank : ranks) { prefix += "/" + std::to_string(rank); }
  auto segment = std::make_unique<Segment>(count);
  std::string answer;
  if (index == 0) {
    const std::string name = "/oneflow_accel_" + std::to_string(getpid()) + "_"
                             + std::to_string(std::random_device()());
    bool all = is_allowed() && segment->map(name, true);
    others->PushKV(prefix + " name", all ? machine() + " " + name : std::string());
    for (int member = 1; member < count; ++member) {
      others->PullKV(prefix + " opened " + std::to_string(member), &answer);
      all = all && answer == "yes";
    }
    shm_unlink(name.c_str());
    others->PushKV(prefix + " all", std::string(all ? "yes" : "no"));
    answer = all ? "yes" : "no";
  } else {
    others->PullKV(prefix + " name", &answer);
    const auto space = answer.find(' ');
    const bool opened = is_allowed() && space != std::string::npos
                        && answer.substr(0, space) == machine()
                        && segment->map(answer.substr(space + 1), false);
    others->PushKV(prefix + " opened " + std::to_string(index),
                   std::string(opened ? "yes" : "no"));
    others->PullKV(prefix + " all", &answer);
  }
  if (answer != "yes") { return nullptr; }
  return std::unique_ptr<Group>(new Group(index, count, std::move(segment)));
}

char* Group::slot(int member) const { return segment_->slot(member, chunk_ % kSlots); }

void Group::wait_for(int member, uint32_t chunk) const {
  const std::atomic<uint32_t>& written = segment_->member(member).written;
  // The numbers wrap around.
  const auto done = [&] { return static_cast<int32_t>(written.load() - chunk) >= 0; };
  if (comes_true_soon(done)) { return; }
  segment_->sleepers().fetch_add(1);
  while (true) {
    const uint32_t seen = written.load();
    if (static_cast<int32_t>(seen - chunk) >= 0) { break; }
    sleep_until_changed(written, seen);
  }
  segment_->sleepers().fetch_sub(1);
}

void Group::tell() {
  std::atomic<uint32_t>& written = segment_->member(index_).written;
  written.store(chunk_);
  if (segment_->sleepers().load() > 0) { wake_all(written); }
}

void Group::exchange(int wanted, const std::function<void(char*)>& write,
                     const std::function<void()>& read) {
  ++chunk_;
  if (write) {
    // Those that have come to the chunk before have read the one before it, which lies here.
    for (int member = 0; member < count_; ++member) { wait_for(member, chunk_ - 1); }
    write(slot(index_));
  }
  tell();
  for (int member = 0; member < count_; ++member) {
    if (wanted < 0 || wanted == member) { wait_for(member, chunk_); }
  }
  read();
}

void Group::all_gather(const char* in, char* out, int64_t bytes) {
  for (int64_t begin = 0; begin < bytes; begin += kSlot) {
    const int64_t size = std::min(kSlot, bytes - begin);
    exchange(
        -1, [&](char* own) { std::memcpy(own, in + begin, size); },
        [&] {
          for (int member = 0; member < count_; ++member) {
            std::memcpy(out + member * bytes + begin, slot(member), size);
          }
        });
  }
}

void Group::broadcast(const char* in, char* out, int64_t bytes, int root) {
  for (int64_t begin = 0; begin < bytes; begin += kSlot) {
    const int64_t size = std::min(kSlot, bytes - begin);
    if (index_ == root) {
      exchange(
          root, [&](char* own) { std::memcpy(own, in + begin, size); },
          [&] {
            if (out != in) { std::memmove(out + begin, in + begin, size); }
          });
    } else {
      exchange(root, nullptr, [&] { std::memcpy(out + begin, slot(root), size); });
    }
  }
}

template <typename T>
void Group::add_up(int64_t offset, int64_t size, T* sum) const {
  std::memcpy(sum, slot(0) + offset * sizeof(T), size * sizeof(T));
  for (int member = 1; member < count_; ++member) {
    const T* part = reinterpret_cast<const T*>(slot(member)) + offset;
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) { sum[i] += part[i]; }
  }
}

template <typename T>
void Group::all_reduce(const T* in, T* out, int64_t elements) {
  const int64_t most = kSlot / sizeof(T);
  for (int64_t begin = 0; begin < elements; begin += most) {
    const int64_t size = std::min(most, elements - begin);
    exchange(
        -1, [&](char* own) { std::memcpy(own, in + begin, size * sizeof(T)); },
        [&] { add_up(0, size, out + begin); });
  }
}

template <typename T>
void Group::reduce_scatter(const T* in, T* out, int64_t elements) {
  const int64_t most = std::max<int64_t>(kSlot / sizeof(T) / count_, 1);
  for (int64_t begin = 0; begin < elements; begin += most) {
    const int64_t size = std::min(most, elements - begin);
    exchange(
        -1,
        [&](char* own) {
          for (int member = 0; member < count_; ++member) {
            std::memcpy(own + member * size * sizeof(T), in + member * elements + begin,
                        size * sizeof(T));
          }
        },
        [&] { add_up(index_ * size, size, out + begin); });
  }
}

template void Group::all_reduce(const float*, float*, int64_t);
template void Group::all_reduce(const double*, double*, int64_t);
template void Group::all_reduce(const int32_t*, int32_t*, int64_t);
template void Group::all_reduce(const int64_t*, int64_t*, int64_t);
template void Group::reduce_scatter(const float*, float*, int64_t);
template void Group::reduce_scatter(const double*, double*, int64_t);
template void Group::reduce_scatter(const int32_t*, int32_t*, int64_t);
template void Group::reduce_scatter(const int64_t*, int64_t*, int64_t);

}  // namespace oneflow_accel
