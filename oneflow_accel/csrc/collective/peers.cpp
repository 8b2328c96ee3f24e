#include "collective/peers.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "oneflow/core/common/singleton.h"
#include "oneflow/core/framework/dtype.h"
#include "oneflow/core/vm/vm_sync.h"

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
  static int64_t WorldSize();
};

}  // namespace oneflow

namespace oneflow_accel {

namespace {

using ::oneflow::CtrlClient;
using ::oneflow::GlobalProcessCtx;
using ::oneflow::Singleton;

// Seconds of waiting before a process says for whom, and for the word of one that has the plug-in.
std::atomic<int> g_patience{30};

std::mutex g_lost_mutex;
// Never destroyed: OneFlow's threads may outlive the library's variables.
std::string& g_lost = *new std::string;

[[noreturn]] void lose(const std::string& text) {
  const std::lock_guard<std::mutex> lock(g_lost_mutex);
  if (g_lost.empty()) { g_lost = text; }
  throw std::runtime_error(g_lost);
}

std::string rank_name(int64_t rank) { return "rank " + std::to_string(rank); }

// Of this start of this machine's system, and of one container in it: process numbers differ.
std::string machine() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  file >> id;
  char processes[64] = {};
  if (readlink("/proc/self/ns/pid", processes, sizeof(processes) - 1) < 0) { return id; }
  return id + processes;
}

const char* shared_memory() {
  const char* value = std::getenv("ONEFLOW_ACCEL_SHARED_MEMORY");
  return value == nullptr || std::strcmp(value, "off") != 0 ? "on" : "off";
}

struct flock first_byte(int16_t type) { return {type, SEEK_SET, 0, 1, 0}; }

// That of this process; -1 where there is none.
int g_file = -1;

std::string key_of(int64_t rank) { return "oneflow_accel/process " + std::to_string(rank); }

// When the library is loaded: what Peer::of reads.
const bool g_told = [] {
  if (GlobalProcessCtx::WorldSize() == 1) { return false; }
  g_file = make_file(1);
  auto lock = first_byte(F_WRLCK);
  // A lock ends with its process, and no child of it has it.
  const bool locked = g_file >= 0 && fcntl(g_file, F_SETLK, &lock) == 0;
  leave(key_of(this_rank()), machine() + " " + shared_memory() + " " + std::to_string(getpid())
                                 + " " + (locked ? path_of(g_file) : "none"));
  return true;
}();

}  // namespace

std::string Call::text() const {
  std::string name = CHECK_JUST(::oneflow::DType::Get(type))->name();
  name = name.substr(name.find('.') + 1);
  std::string text =
      std::string(kOperations[operation]) + " of " + std::to_string(numbers) + " " + name;
  return root < 0 ? text : text + " from rank " + std::to_string(root);
}

const Peer& Peer::of(int64_t rank, const Call& call) {
  static auto& known = *new std::map<int64_t, Peer>;
  const auto found = known.find(rank);
  if (found != known.end()) { return found->second; }
  const auto began = Clock::now();
  const std::string word = left(key_of(rank), [&] {
    if (Clock::now() - began < std::chrono::seconds(g_patience)) { return; }
    lose(rank_name(rank) + " has no CPU kernels of oneflow_accel, for which "
         + rank_name(this_rank()) + " waits in " + call.text()
         + ": ONEFLOW_ACCEL_PLUGIN=off, not built, or oneflow_accel not imported there; all "
           "processes of a job need them, or none");
  });
  Peer& peer = known[rank];
  std::string path;
  std::istringstream(word) >> peer.machine_ >> peer.allowed_ >> peer.pid_ >> path;
  peer.rank_ = rank;
  if (peer.machine_ == machine()) {
    peer.file_ = open_file(path);
    peer.was_gone_ = peer.file_ < 0 && errno == ENOENT && path != "none";
  }
  return peer;
}

std::string Peer::why_apart(const Peer& other) const {
  if (allowed_ == "off") { return "ONEFLOW_ACCEL_SHARED_MEMORY=off on " + name(); }
  if (machine_ == other.machine_) { return ""; }
  return name() + " and " + other.name() + " are on two machines or in two containers";
}

bool Peer::is_there() const {
  if (file_ < 0) { return !was_gone_; }
  auto lock = first_byte(F_WRLCK);
  // Of its own lock a process is not told.
  return rank_ == this_rank() || fcntl(file_, F_GETLK, &lock) != 0
         || lock.l_type != F_UNLCK;
}

void Wait::go_on() {
  const std::chrono::duration<double> waited = Clock::now() - began_;
  const int seconds = static_cast<int>(waited.count());
  // A watchdog would have said why it has ended, and have ended this process, by then.
  if (3 * seconds >= g_patience && !peer_.is_there()) {
    lose(peer_.name() + " has ended, and " + rank_name(this_rank()) + " waits for it in "
         + call_.text());
  }
  if (seconds < next_line_ * g_patience) { return; }
  next_line_ *= 2;
  std::fprintf(stderr, "oneflow_accel: rank %d has waited %d s for %s in %s\n",
               static_cast<int>(this_rank()), seconds, peer_.name().c_str(), call_.text().c_str());
}

int64_t this_rank() { return GlobalProcessCtx::Rank(); }

void leave(const std::string& key, const std::string& text) {
  Singleton<CtrlClient>::Get()->PushKV(key, text);
}

std::string left(const std::string& key, const std::function<void()>& every_second) {
  // OneFlow's wait has no end: where the text never comes, the thread stays in it.
  auto text = std::make_shared<std::promise<std::string>>();
  auto found = text->get_future();
  std::thread([key, text] {
    std::string answer;
    Singleton<CtrlClient>::Get()->PullKV(key, &answer);
    text->set_value(answer);
  }).detach();
  while (found.wait_for(std::chrono::seconds(1)) != std::future_status::ready) { every_second(); }
  return found.get();
}

void check_none_lost() {
  const std::lock_guard<std::mutex> lock(g_lost_mutex);
  if (!g_lost.empty()) { throw std::runtime_error(g_lost); }
}

int make_file(int64_t bytes) {
  const int file = memfd_create("oneflow_accel", MFD_CLOEXEC);
  int error = file < 0 ? errno : EINTR;
  // Without room now, a write would end the process later.
  while (error == EINTR) { error = posix_fallocate(file, 0, bytes); }
  if (file >= 0 && error != 0) { close(file); }
  return error == 0 ? file : -1;
}

std::string path_of(int file) {
  return "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(file);
}

int open_file(const std::string& path) { return open(path.c_str(), O_RDWR | O_CLOEXEC); }

}  // namespace oneflow_accel

extern "C" {

// To be called when the interpreter ends: once all that was asked for has run, the others need not
// wait for this process any more. Returns whether it has lost one of them, for which OneFlow's own
// end would wait.
int oneflow_accel_leave_peers() {
  using namespace oneflow_accel;
  if (g_file >= 0) {
    (void)::oneflow::vm::CurrentRankSync();
    auto lock = first_byte(F_UNLCK);
    fcntl(g_file, F_SETLK, &lock);
  }
  const std::lock_guard<std::mutex> lock(g_lost_mutex);
  return g_lost.empty() ? 0 : 1;
}

void oneflow_accel_set_patience(int seconds) { oneflow_accel::g_patience = seconds; }

}  // extern "C"
