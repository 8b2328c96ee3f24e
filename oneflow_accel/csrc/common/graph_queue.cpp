// Lets a graph's end wait for its beginning.
//
// To run an nn.Graph, OneFlow 0.9.0 starts the job and then enters the graph into a queue; when the
// job has ended, one of the job's threads takes the front off that queue. A small graph can end
// before it is entered: std::queue::pop() of an empty queue then breaks the heap, and the process
// dies somewhere else, later. (LaunchLazyJobInstructionPolicy::Compute; about 1 in 12 runs of a
// training with two small graphs on two cores.) So the two calls lead to the functions below.
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

// The header is not among those of the wheel. Only these two functions of it are called.
class LazyJobStreamPolicy {
 public:
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

// Graphs in each queue.
struct Entered {
  std::mutex mutex;
  std::condition_variable changed;
  std::unordered_map<const LazyJobStreamPolicy*, int> graphs;
};

// Never destroyed: a graph's threads may outlive the library's variables.
Entered& entered() {
  static auto* const it = new Entered;
  return *it;
}

void enqueue(LazyJobStreamPolicy* queue, const std::shared_ptr<NNGraphIf>& graph) {
  const int delay = g_delay_ms.load();
  if (delay > 0) { std::this_thread::sleep_for(std::chrono::milliseconds(delay)); }
  queue->EnqueueNNGraph(graph);
  {
    const std::lock_guard<std::mutex> lock(entered().mutex);
    ++entered().graphs[queue];
  }
  entered().changed.notify_all();
}

void dequeue(LazyJobStreamPolicy* queue) {
  {
    std::unique_lock<std::mutex> lock(entered().mutex);
    int& graphs = entered().graphs[queue];
    if (graphs == 0) { g_waits.fetch_add(1); }
    entered().changed.wait(lock, [&] { return graphs > 0; });
    --graphs;
  }
  queue->DequeueNNGraph();
}

// When the library is loaded. Not one without the other: nothing would ever be entered.
const bool g_redirected =
    redirect_in_oneflow(
        "_ZN7oneflow2vm19LazyJobStreamPolicy14EnqueueNNGraphERKSt10shared_ptrINS_9NNGraphIfEE",
        enqueue)
    && redirect_in_oneflow("_ZN7oneflow2vm19LazyJobStreamPolicy14DequeueNNGraphEv", dequeue);

}  // namespace

}  // namespace oneflow_accel

// For tests: how long to wait before a graph is entered, and how often a graph's end has waited.
extern "C" void oneflow_accel_delay_graphs(int milliseconds) {
  oneflow_accel::g_delay_ms.store(milliseconds);
}
extern "C" int oneflow_accel_graph_waits() { return oneflow_accel::g_waits.load(); }
