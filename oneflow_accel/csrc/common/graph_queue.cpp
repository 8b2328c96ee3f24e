// Lets a graph's end wait for its beginning.
//
// To run an nn.Graph, OneFlow 0.9.0 starts the job and then enters the graph into a queue; when the
// job has ended, one of the job's threads takes the front off that queue. A small graph can end
// before it is entered: std::queue::pop() of an empty queue then breaks the heap, and the process
// dies somewhere else, later. (LaunchLazyJobInstructionPolicy::Compute; about 1 in 12 runs of a
// training with two small graphs on two cores.) So the two calls lead to the functions below, and
// so does the one before them, which tells what was begun before the plug-in was loaded. They
// therefore also know when a graph is under way.
#include "common/graph_queue.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "common/redirect.h"

namespace oneflow {

class NNGraphIf;

namespace vm {

// The header is not among those of the wheel. Only these three functions of it are called.
class LazyJobStreamPolicy {
 public:
  void WaitUntilQueueEmptyIfFrontNNGraphNotEquals(const std::shared_ptr<NNGraphIf>& nn_graph);
  void EnqueueNNGraph(const std::shared_ptr<NNGraphIf>& nn_graph);
  void DequeueNNGraph();
};

}  // namespace vm

}  // namespace oneflow

namespace oneflow_accel {

namespace {

using ::oneflow::NNGraphIf;
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
Queues& queues() {
  static auto* const it = new Queues;
  return *it;
}

void begin(LazyJobStreamPolicy* queue, const std::shared_ptr<NNGraphIf>& graph) {
  {
    const std::lock_guard<std::mutex> lock(queues().mutex);
    ++queues().graphs[queue].begun;
    g_under_way.fetch_add(1, std::memory_order_relaxed);
  }
  queue->WaitUntilQueueEmptyIfFrontNNGraphNotEquals(graph);
}

void enqueue(LazyJobStreamPolicy* queue, const std::shared_ptr<NNGraphIf>& graph) {
  const int delay = g_delay_ms.load();
  if (delay > 0) { std::this_thread::sleep_for(std::chrono::milliseconds(delay)); }
  queue->EnqueueNNGraph(graph);
  {
    const std::lock_guard<std::mutex> lock(queues().mutex);
    Graphs& graphs = queues().graphs[queue];
    graphs.entered = std::min(graphs.entered + 1, graphs.begun);
  }
  queues().changed.notify_all();
}

void dequeue(LazyJobStreamPolicy* queue) {
  {
    std::unique_lock<std::mutex> lock(queues().mutex);
    Graphs& graphs = queues().graphs[queue];
    // Where none is counted, the graph was under way when the plug-in was loaded.
    if (graphs.begun > 0) {
      if (graphs.entered == 0) { g_waits.fetch_add(1); }
      queues().changed.wait(lock, [&] { return graphs.entered > 0; });
      --graphs.entered;
      --graphs.begun;
      g_under_way.fetch_sub(1, std::memory_order_relaxed);
    }
  }
  queue->DequeueNNGraph();
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

}  // namespace

bool a_graph_is_under_way() { return g_under_way.load(std::memory_order_relaxed) > 0; }

}  // namespace oneflow_accel

// For tests: how long to wait before a graph is entered, and how often a graph's end has waited.
extern "C" void oneflow_accel_delay_graphs(int milliseconds) {
  oneflow_accel::g_delay_ms.store(milliseconds);
}
extern "C" int oneflow_accel_graph_waits() { return oneflow_accel::g_waits.load(); }
