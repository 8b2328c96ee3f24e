// Tells Python that memory has run out, with what was asked for and what there is, where OneFlow
// 0.9.0 ends the process in an exception of its own, or the system kills it: that promises more
// than it has.
//
// OneFlow allocates an nn.Graph's memory in a call from Python, which raises what is wrong. All else it
// allocates on a thread that catches nothing. There a failed allocation gets memory that nobody
// writes to: the failure is recorded, and no kernel runs until Python has raised it. Pages that
// nobody writes to take no place.
#include "common/memory.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <mutex>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "common/python.h"
#include "common/redirect.h"
#include "oneflow/core/common/error.h"

namespace oneflow_accel {

namespace {

// Less than this is never what does not fit.
constexpr std::size_t kLeast = std::size_t{1} << 20;
// What is left to all that does not ask here, such as Python's arrays: a part of the limit, up to so
// much.
constexpr int64_t kReservedPart = 32, kMostReserved = int64_t{1} << 29;
constexpr const char* kMachine = "/proc/meminfo";

struct Piece {
  char* data;
  int64_t bytes;
  // Of another device's memory: what is said of it. That of the CPU may be there later.
  std::string lack;
};

struct Memory {
  std::mutex mutex;
  // A container's: its limit, files that say how much is used and what for, and names there.
  int64_t limit = std::numeric_limits<int64_t>::max();
  std::string usage, statistics;
  std::set<std::string> droppable;
  // Given out though there is no room.
  std::vector<Piece> promised;
  // May be given out before it is looked again: reading what is left takes some 0.1 ms.
  int64_t unasked = 0;
};

// Never destroyed: OneFlow's threads may outlive the library's variables.
Memory& memory() {
  static auto* const it = new Memory;
  return *it;
}

// The sum of the numbers after any of `names` in a file.
int64_t sum_of(const std::string& file, const std::set<std::string>& names) {
  std::ifstream words(file);
  int64_t sum = 0, number = 0;
  for (std::string word; words >> word;) {
    if (names.count(word) > 0 && words >> number) { sum += number; }
  }
  return sum;
}

std::string amount(int64_t bytes) {
  const bool large = bytes >= int64_t{1} << 30;
  char text[24];
  std::snprintf(text, sizeof(text), large ? "%.1f GiB" : "%.0f MiB",
                std::max<int64_t>(bytes, 0) / (large ? 1073741824.0 : 1048576.0));
  return text;
}

// What to say where `bytes` more do not fit, or could not be had; empty where they fit.
std::string lack_of(Memory& all, int64_t bytes, bool refused) {
  if (bytes <= all.unasked && !refused) {
    all.unasked -= bytes;
    return {};
  }
  // Pages of files count as left: the kernel drops them.
  const int64_t swap = sum_of(kMachine, {"SwapFree:"}) * 1024;
  int64_t left = sum_of(kMachine, {"MemAvailable:"}) * 1024 + swap;
  if (left == swap && !refused) { return {}; }  // A system that does not say.
  int64_t limit = sum_of(kMachine, {"MemTotal:"}) * 1024;
  const char* whose = "the machine's";
  const auto consider = [&](int64_t other, int64_t other_limit, const char* other_whose) {
    if (other < left) { std::tie(left, limit, whose) = std::tie(other, other_limit, other_whose); }
  };
  int64_t used = 0, addresses = 0, resident = 0, files = 0;
  if (std::ifstream(all.usage) >> used) {
    consider(all.limit - used + sum_of(all.statistics, all.droppable) + swap, all.limit,
             "the container's");
  }
  std::ifstream("/proc/self/statm") >> addresses >> resident >> files;
  const int64_t page = sysconf(_SC_PAGESIZE);
  rlimit most{};
  getrlimit(RLIMIT_AS, &most);
  if (most.rlim_cur != RLIM_INFINITY) {
    const auto may = static_cast<int64_t>(most.rlim_cur);
    consider(may - addresses * page, may, "ulimit -v's");
  }
  left -= std::min(limit / kReservedPart, kMostReserved);
  if (bytes <= left && !refused) {
    all.unasked = (left - bytes) / 2;
    return {};
  }
  return "out of memory: " + amount(bytes) + " were asked for, and " + amount(left) + " of " + whose
         + ' ' + amount(limit) + " are left; this process holds "
         + amount((resident - files) * page);
}

// The memory that this thread got last of what is not there, and what it lacked in a call from Python.
thread_local void* t_not_written = nullptr;
thread_local std::string t_lack;

// All of it is filled at once. A graph's outputs lie far apart: with pages of 4 KiB a step of a ViT
// took 5 % longer than eagerly.
void* in_large_pages(std::size_t alignment, std::size_t bytes) {
  constexpr std::size_t kLarge = std::size_t{1} << 21;
  if (bytes < kLarge) { return std::aligned_alloc(alignment, bytes); }
  void* data = std::aligned_alloc(kLarge, bytes);
  if (data != nullptr) { (void)madvise(data, bytes, MADV_HUGEPAGE); }
  return data;
}

// In place of aligned_alloc(), by which OneFlow gets the memory of all tensors on a CPU, in blocks
// that it keeps.
void* allocate(std::size_t alignment, std::size_t bytes) {
  if (bytes < kLeast) { return std::aligned_alloc(alignment, bytes); }
  Memory& all = memory();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const bool called = PyGILState_GetThisThreadState() != nullptr;
  std::string lack = lack_of(all, bytes, false);
  // In the wake of a failure, small blocks would fill the rest.
  if (lack.empty() && !called && starved()) { lack = "out of memory"; }
  void* data = lack.empty() ? in_large_pages(alignment, bytes) : nullptr;
  if (data != nullptr) { return data; }
  if (lack.empty()) { lack = lack_of(all, bytes, true); }
  if (called) {
    t_lack = lack;
    return nullptr;
  }
  record_lack_of_memory(lack);
  // Of more than the machine has, the system does not even promise it.
  const std::size_t most = sum_of(kMachine, {"MemTotal:"}) * 1024 / 4 * 3;
  data = std::aligned_alloc(alignment, std::min(bytes, most));
  if (data == nullptr) {
    std::fprintf(stderr, "%s\n", lack.c_str());
    std::fflush(nullptr);
    _exit(2);
  }
  all.promised.push_back({static_cast<char*>(data), static_cast<int64_t>(bytes), {}});
  t_not_written = data;
  return data;
}

// In place of memset(), by which OneFlow fills all that it has got.
void* fill(void* data, int value, std::size_t bytes) {
  if (data == nullptr || data != t_not_written) { return std::memset(data, value, bytes); }
  t_not_written = nullptr;
  return data;
}

// In place of memcpy(), by which OneFlow fills tensors from arrays.
void* copy(void* to, const void* from, std::size_t bytes) {
  return bytes < kLeast || may_write(to, bytes) ? std::memcpy(to, from, bytes) : to;
}

// In place of Error::RuntimeError(), of which OneFlow makes "allocate failed".
::oneflow::Error runtime_error() {
  auto error = ::oneflow::Error::RuntimeError();
  if (!t_lack.empty()) { error << std::exchange(t_lack, {}) + '\n'; }
  return error;
}

// When the library is loaded.
const bool g_allocates = redirect_in_oneflow("aligned_alloc", allocate)
                         && redirect_in_oneflow("memset", fill)
                         && redirect_in_oneflow("memcpy", copy)
                         && redirect_in_oneflow("_ZN7oneflow5Error12RuntimeErrorEv", runtime_error);

}  // namespace

std::string lack_of_memory(int64_t bytes) {
  const std::lock_guard<std::mutex> lock(memory().mutex);
  return lack_of(memory(), bytes, false);
}

bool may_write(const void* data, int64_t bytes) {
  if (!has_starved()) { return true; }
  Memory& all = memory();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto in = [data](const Piece& piece) {
    return data >= piece.data && data < piece.data + piece.bytes;
  };
  const auto piece = std::find_if(all.promised.begin(), all.promised.end(), in);
  if (piece == all.promised.end()) { return true; }
  const std::string lack = piece->lack.empty() ? lack_of(all, bytes, false) : piece->lack;
  if (!lack.empty()) { record_lack_of_memory(lack); }
  return lack.empty() && !starved();
}

}  // namespace oneflow_accel

extern "C" {

// For the emulated device: its memory has run out, of which `data`, whose bytes nobody can write,
// was given; and it was given back.
void oneflow_accel_promise(void* data, int64_t bytes, const char* lack) {
  oneflow_accel::record_lack_of_memory(lack);
  auto& all = oneflow_accel::memory();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.promised.push_back({static_cast<char*>(data), bytes, lack});
}
void oneflow_accel_withdraw(const void* data) {
  auto& all = oneflow_accel::memory();
  const std::lock_guard<std::mutex> lock(all.mutex);
  auto& pieces = all.promised;
  const auto is_it = [data](const auto& piece) { return piece.data == data; };
  pieces.erase(std::remove_if(pieces.begin(), pieces.end(), is_it), pieces.end());
}
bool oneflow_accel_may_write(const void* data, int64_t bytes) {
  return oneflow_accel::may_write(data, bytes);
}

// The limit of a container's memory, files that say how much is used and what for, and the names of
// two numbers there that can be dropped.
void oneflow_accel_limit_memory(int64_t bytes, const char* usage, const char* statistics,
                                const char* inactive, const char* active) {
  auto& all = oneflow_accel::memory();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.limit = bytes;
  all.usage = usage;
  all.statistics = statistics;
  all.droppable = {inactive, active};
  all.unasked = 0;
}

}  // extern "C"
