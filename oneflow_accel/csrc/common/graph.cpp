// What the plug-in mends in how an nn.Graph is run: its end waits for its beginning, and OneFlow's
// scheduler thread leaves the cores to the kernels.
//
// To run an nn.Graph, OneFlow 0.9.0 starts the job and then enters the graph into a queue; when the
// job has ended, one of the job's threads takes the front off that queue. A small graph can end
// before it is entered: std::queue::pop() of an empty queue then breaks the heap, and the process
// dies somewhere else, later. (LaunchLazyJobInstructionPolicy::Compute; about 1 in 12 runs of a
// training with two small graphs on two cores.) So the two calls lead to the functions below, and
// so does the one before them, which tells what was begun before the plug-in was loaded. They
// therefore also know when a graph is under way.
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "common/redirect.h"
#include "common/waiting.h"
#include "oneflow/core/common/notifier.h"

namespace oneflow {
class NNGraphIf;
}

namespace oneflow::vm {

// The header is not among those of the wheel. Only these three functions of it are called.
class LazyJobStreamPolicy {
 public:
  void WaitUntilQueueEmptyIfFrontNNGraphNotEquals(const std::shared_ptr<NNGraphIf>& nn_graph);
  void EnqueueNNGraph(const std::shared_ptr<NNGraphIf>& nn_graph);
  void DequeueNNGraph();
};

}  // namespace oneflow::vm

namespace oneflow_accel {

namespace {

using ::oneflow::NNGraphIf;
using ::oneflow::Notifier;
using ::oneflow::NotifierStatus;
using ::oneflow::vm::LazyJobStreamPolicy;

std::atomic<int> g_delay_ms{0};
std::atomic<int> g_waits{0};
std::atomic<int> g_under_way{0};

// Graphs of a queue that have not ended: those that were begun since the plug-in was loaded, and
// how many of these have been entered.
struct Graphs {
  int begun = 0;
  int entered = 0;
};

struct Queues {
  std::mutex mutex;
  std::condition_variable changed;
  std::unordered_map<const LazyJobStreamPolicy*, Graphs> graphs;
};

// Never destroyed: a graph's threads may outlive the library's variables.
Queues& g_queues = *new Queues;

// What the scheduler thread has to look at: ends of graphs, and what was asked for while one ran.
std::atomic<uint64_t> g_news{0};

void wake_scheduler() {
  {
    const std::lock_guard<std::mutex> lock(g_queues.mutex);
    g_news.fetch_add(1, std::memory_order_relaxed);
  }
  g_queues.changed.notify_all();
}

void begin(LazyJobStreamPolicy* queue, const std::shared_ptr<NNGraphIf>& graph) {
  {
    const std::lock_guard<std::mutex> lock(g_queues.mutex);
    ++g_queues.graphs[queue].begun;
    g_under_way.fetch_add(1, std::memory_order_relaxed);
  }
  queue->WaitUntilQueueEmptyIfFrontNNGraphNotEquals(graph);
}

void enqueue(LazyJobStreamPolicy* queue, const std::shared_ptr<NNGraphIf>& graph) {
  const int delay = g_delay_ms.load();
  if (delay > 0) { std::this_thread::sleep_for(std::chrono::milliseconds(delay)); }
  queue->EnqueueNNGraph(graph);
  {
    const std::lock_guard<std::mutex> lock(g_queues.mutex);
    Graphs& graphs = g_queues.graphs[queue];
    graphs.entered = std::min(graphs.entered + 1, graphs.begun);
  }
  g_queues.changed.notify_all();
}

void dequeue(LazyJobStreamPolicy* queue) {
  {
    std::unique_lock<std::mutex> lock(g_queues.mutex);
    Graphs& graphs = g_queues.graphs[queue];
    // Where none is counted, the graph was under way when the plug-in was loaded.
    if (graphs.begun > 0) {
      if (graphs.entered == 0) { g_waits.fetch_add(1); }
      g_queues.changed.wait(lock, [&] { return graphs.entered > 0; });
      --graphs.entered;
      --graphs.begun;
      g_under_way.fetch_sub(1, std::memory_order_relaxed);
    }
  }
  queue->DequeueNNGraph();
  wake_scheduler();
}

// When the library is loaded. None without the ones before: a graph's end would wait for what is
// not counted.
const bool g_closes_safely =
    redirect_in_oneflow(
        "_ZN7oneflow2vm19LazyJobStreamPolicy42WaitUntilQueueEmptyIfFrontNNGraphNotEqualsERKSt10"
        "shared_ptrINS_9NNGraphIfEE",
        begin)
    && redirect_in_oneflow(
        "_ZN7oneflow2vm19LazyJobStreamPolicy14EnqueueNNGraphERKSt10shared_ptrINS_9NNGraphIfEE",
        enqueue)
    && redirect_in_oneflow("_ZN7oneflow2vm19LazyJobStreamPolicy14DequeueNNGraphEv", dequeue);

// Keeps OneFlow's scheduler thread off the cores that kernels need.
//
// While an nn.Graph runs, the scheduler thread polls for its end and calls sched_yield() between
// two looks, for as long as the step takes: the system gives it up to half of a core that belongs
// to a kernel's team, and the whole team waits. So the entry for sched_yield in liboneflow's
// procedure linkage table leads to the function below, which sleeps where a thread does nothing
// but yield.
//
// Only while a graph runs: an eager operation may be over in 2 us, and would wait for the end of a
// nap. There a program's kernels run on the scheduler thread itself (backends/cpu.py), which then
// has no time to poll.
// A small graph is over by then, and its end noticed as fast as before.
constexpr auto kPollingTime = std::chrono::microseconds(100);
// A graph's end and what is asked for while it runs wake the thread; only an eager operation on a
// thread of its own ends without a word.
constexpr auto kLongestNap = std::chrono::milliseconds(20);
// Work between two yields that ends a run of them.
constexpr auto kWork = std::chrono::microseconds(20);

std::atomic<int64_t> g_naps{0};

int yield_or_nap() {
  if (g_under_way.load(std::memory_order_relaxed) == 0) { return ::sched_yield(); }
  thread_local Clock::time_point first{};
  thread_local Clock::time_point last{};
  thread_local uint64_t seen = 0;
  const Clock::time_point now = Clock::now();
  if (now - last > kWork) { first = now; }
  bool woken = false;
  const auto sleep = [&](Clock::duration time) {
    std::unique_lock<std::mutex> lock(g_queues.mutex);
    woken = g_queues.changed.wait_for(lock, time, [&] { return g_news.load() != seen; });
  };
  if (give_way(now - first, kPollingTime, 4, kLongestNap, sleep)) {
    g_naps.fetch_add(1, std::memory_order_relaxed);
  }
  // Before the thread looks: what comes from here on ends its next nap.
  seen = g_news.load();
  last = Clock::now();
  // What follows comes soon.
  if (woken) { first = last; }
  return 0;
}

// In place of Notifier::Notify(), which says that instructions wait in the scheduler's list.
NotifierStatus notify(Notifier* notifier) {
  const NotifierStatus status = notifier->Notify();
  if (g_under_way.load(std::memory_order_relaxed) > 0) { wake_scheduler(); }
  return status;
}

// When the library is loaded.
const bool g_yields = redirect_in_oneflow("_ZN7oneflow8Notifier6NotifyEv", notify)
                      && redirect_in_oneflow("sched_yield", yield_or_nap);

}  // namespace

}  // namespace oneflow_accel

// For tests: how long to wait before a graph is entered, and how often a graph's end has waited.
extern "C" void oneflow_accel_delay_graphs(int milliseconds) {
  oneflow_accel::g_delay_ms.store(milliseconds);
}
extern "C" int oneflow_accel_graph_waits() { return oneflow_accel::g_waits.load(); }
// How often a thread has slept instead of yielding: for tests.
extern "C" int64_t oneflow_accel_naps() { return oneflow_accel::g_naps.load(); }
