#include "emulated/memory.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>

#include "emulated/emulated.h"

namespace oneflow_accel::emulated {

namespace {

bool is_in_arena(const void* data);

constexpr std::size_t kAlignment = ep::kMaxAlignmentRequirement;

// All devices' memory, one behind the other, in a file that exists in memory only and takes no more
// of it than is written.
struct Arena {
  int file = -1;
  char* device = nullptr;
  char* host = nullptr;
  std::size_t bytes = 0;
};

struct sigaction g_next_handler;

// Says what a program did that reads or writes device memory, and leaves the rest to the handler
// that was there before, or to the system.
void explain_fault(int signal, siginfo_t* info, void* context) {
  if (is_in_arena(info->si_addr)) {
    // Only what a signal handler may call.
    constexpr char kText[] =
        "oneflow_accel: the host reads or writes memory of an emulated device, which a GPU's or "
        "another card's host cannot: copy the tensor to the host first (tensor.cpu()), or run the "
        "work on the device\n";
    const auto written = ::write(STDERR_FILENO, kText, sizeof(kText) - 1);
    static_cast<void>(written);
  }
  if ((g_next_handler.sa_flags & SA_SIGINFO) != 0) {
    return g_next_handler.sa_sigaction(signal, info, context);
  }
  if (g_next_handler.sa_handler != SIG_DFL && g_next_handler.sa_handler != SIG_IGN) {
    return g_next_handler.sa_handler(signal);
  }
  // Faults again, and ends the process.
  ::signal(signal, SIG_DFL);
}

Arena make_arena() {
  Arena arena;
  arena.bytes = options().devices * options().bytes;
  arena.file = memfd_create("oneflow_accel_emulated", MFD_CLOEXEC);
  PCHECK(arena.file >= 0 && ftruncate(arena.file, static_cast<off_t>(arena.bytes)) == 0);
  const auto map = [&](int protection) {
    void* data =
        mmap(nullptr, arena.bytes, protection, MAP_SHARED | MAP_NORESERVE, arena.file, 0);
    PCHECK(data != MAP_FAILED) << arena.bytes << " bytes for emulated devices";
    return static_cast<char*>(data);
  };
  arena.device = map(PROT_NONE);
  arena.host = map(PROT_READ | PROT_WRITE);
  struct sigaction handler {};
  handler.sa_sigaction = explain_fault;
  handler.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &handler, &g_next_handler);
  return arena;
}

std::atomic<const Arena*> g_arena{nullptr};

// What was promised, by where it begins: its bytes.
struct Promises {
  std::mutex mutex;
  std::map<const char*, std::size_t> pieces;
};
Promises& g_promises = *new Promises;
std::atomic<bool> g_has_promised{false};

bool is_promised(const char* byte) {
  if (!g_has_promised.load(std::memory_order_acquire)) { return false; }
  const std::lock_guard<std::mutex> lock(g_promises.mutex);
  const auto next = g_promises.pieces.upper_bound(byte);
  return next != g_promises.pieces.begin()
         && byte < std::prev(next)->first + std::prev(next)->second;
}

const Arena& arena() {
  // Never unmapped: OneFlow's threads may outlive the library's variables.
  static const Arena* const made = [] {
    const auto* arena = new Arena(make_arena());
    g_arena.store(arena);
    return arena;
  }();
  return *made;
}

std::size_t rounded(std::size_t bytes) {
  return (std::max<std::size_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
}

bool is_in_arena(const void* data) {
  const Arena* arena = g_arena.load(std::memory_order_acquire);
  const auto* byte = static_cast<const char*>(data);
  return arena != nullptr && byte >= arena->device && byte < arena->device + arena->bytes;
}

}  // namespace

bool is_on_device(const void* data) {
  return is_in_arena(data) || is_promised(static_cast<const char*>(data));
}

void* host_view(void* data) {
  if (!is_in_arena(data)) { return data; }
  const Arena& all = arena();
  return all.host + (static_cast<char*>(data) - all.device);
}

Heap::Heap(std::size_t device) : begin_(arena().device + device * options().bytes) {
  gaps_[0] = options().bytes;
}

void* Heap::allocate(std::size_t bytes) {
  bytes = rounded(bytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto gap = std::find_if(gaps_.begin(), gaps_.end(),
                                [=](const auto& one) { return one.second >= bytes; });
  if (gap == gaps_.end()) { return nullptr; }
  const auto [at, size] = *gap;
  gaps_.erase(gap);
  if (size > bytes) { gaps_[at + bytes] = size - bytes; }
  pieces_[at] = bytes;
  used_ += bytes;
  peak_ = std::max(peak_, used_);
  return begin_ + at;
}

void* Heap::promise(std::size_t bytes, const std::string& lack) {
  void* data = mmap(nullptr, rounded(bytes), PROT_READ,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CHECK(data != MAP_FAILED) << lack;
  {
    const std::lock_guard<std::mutex> lock(g_promises.mutex);
    g_promises.pieces[static_cast<char*>(data)] = rounded(bytes);
    g_has_promised.store(true);
  }
  host().promise(data, static_cast<int64_t>(bytes), lack.c_str());
  return data;
}

void Heap::free(void* data) {
  if (!is_in_arena(data)) {
    const std::lock_guard<std::mutex> lock(g_promises.mutex);
    const auto piece = g_promises.pieces.find(static_cast<char*>(data));
    host().withdraw(data);
    munmap(data, piece->second);
    g_promises.pieces.erase(piece);
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto piece = pieces_.find(static_cast<char*>(data) - begin_);
  CHECK(piece != pieces_.end()) << "an emulated device frees what it has not allocated";
  std::size_t at = piece->first, size = piece->second;
  pieces_.erase(piece);
  used_ -= size;
  // Gives the pages back, and whoever reads them later finds zeros.
  fallocate(arena().file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
            static_cast<char*>(data) - arena().device, static_cast<off_t>(size));
  auto next = gaps_.lower_bound(at);
  if (next != gaps_.begin() && std::prev(next)->first + std::prev(next)->second == at) {
    at = std::prev(next)->first;
    size += std::prev(next)->second;
    gaps_.erase(std::prev(next));
  }
  if (next != gaps_.end() && next->first == at + size) {
    size += next->second;
    gaps_.erase(next);
  }
  gaps_[at] = size;
}

int64_t Heap::used() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int64_t>(used_);
}

int64_t Heap::peak() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int64_t>(peak_);
}

void Heap::reset_peak() {
  const std::lock_guard<std::mutex> lock(mutex_);
  peak_ = used_;
}

}  // namespace oneflow_accel::emulated
