// The other processes of a job: what they tell each other once, by name, and whether they are still
// there for whoever waits for them.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "common/oneflow.h"
#include "common/waiting.h"

namespace oneflow_accel {

enum Operation : int { kAllGather, kAllReduce, kReduceScatter, kBroadcast };
constexpr const char* kOperations[] = {"all_gather", "all_reduce", "reduce_scatter", "broadcast"};

// What a member of a group does, which all of them do alike. `operation` is a place in kOperations,
// `root` the rank that a broadcast comes from, else -1.
struct Call {
  int operation;
  DataType type;
  int64_t numbers;
  int64_t root;
  // "all_reduce of 4 float32"
  std::string text() const;
};

// A process of the job, as it has told the others.
class Peer {
 public:
  // That of a rank. Waits for its word, `call` being why; throws where there is none, as there is
  // none without the plug-in.
  static const Peer& of(int64_t rank, const Call& call);

  // "rank 1 (process 123)"
  std::string name() const { return "rank " + std::to_string(rank_) + " (process " + pid_ + ")"; }
  // Why it cannot have memory in common with another one; empty where it may.
  std::string why_apart(const Peer& other) const;
  // False once its program has ended, in whatever way; true where nobody can know.
  bool is_there() const;

 private:
  int64_t rank_ = 0;
  std::string machine_, allowed_, pid_;
  // Its file, whose first byte it has locked while its program runs; -1 where it cannot be had.
  int file_ = -1;
  bool was_gone_ = false;
};

// A wait for a process, in a call.
class Wait {
 public:
  Wait(const Peer& peer, const Call& call) : peer_(peer), call_(call) {}
  // Comes every second: says once in a while who is waited for, and throws where it has ended and
  // nobody else has said so.
  void go_on();

 private:
  const Peer& peer_;
  const Call& call_;
  const Clock::time_point began_ = Clock::now();
  int next_line_ = 1;
};

int64_t this_rank();

// Leaves a text for all processes of the job.
void leave(const std::string& key, const std::string& text);
// The text that one of them leaves; calls `every_second` while it is not there.
std::string left(const std::string& key, const std::function<void()>& every_second);

// Throws where a call has lost a member before: what this process has in common with the others is
// in no order that they know then.
void check_none_lost();

// Memory in a file that has no name in any folder, and so ends with the processes that have it; -1
// if it cannot be made. And a path by which other processes of this machine open it.
int make_file(int64_t bytes);
std::string path_of(int file);
// As open(2), to read and to write.
int open_file(const std::string& path);

}  // namespace oneflow_accel
