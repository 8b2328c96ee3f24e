// Failures of kernels, on their way to Python.
//
// OneFlow runs kernels on threads of its own, some time after Python has asked for them, and
// catches nothing there: an exception would end the process. So every kernel is put inside one that
// does, leaves zeros in the outputs and keeps the first message here until Python next waits for a
// result: .item(), .numpy() or a synchronisation raises it then, once.
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>

#include "common/kept_weights.h"
#include "common/memory.h"
#include "common/oneflow.h"
#include "common/python.h"
#include "common/redirect.h"
#include "common/scratch.h"
#include "common/waiting.h"
#include "oneflow/core/common/exception.h"
#include "oneflow/core/common/maybe.h"
#include "oneflow/core/common/spin_counter.h"
#include "oneflow/core/vm/vm_sync.h"

namespace oneflow_accel {

namespace {

using ::oneflow::SpinCounter;

std::atomic<bool> g_pending{false};
// What waits for Python is that memory has run out: tensors may have none to write to. Whether it
// ever has.
std::atomic<bool> g_starved{false}, g_has_starved{false};
// Waits for the work of another device, which OneFlow does not do when it synchronizes.
std::atomic<void (*)()> g_wait_for_device{nullptr};
// The program has come to its end; OneFlow still synchronizes, where nobody would see an exception.
std::atomic<bool> g_ending{false};

struct Failure {
  std::mutex mutex;
  bool is_index = false;
  std::string message;
};

// Never destroyed: OneFlow's threads may outlive the library's variables.
Failure& g_first = *new Failure;

// For all that OneFlow has been asked to do.
Maybe<void> wait_for_all() {
  auto waited = ::oneflow::vm::CurrentRankSync();
  if (auto* const wait = g_wait_for_device.load()) { wait(); }
  return waited;
}

// Tells Python if a failure waits for it, by the exceptions that OneFlow's own errors end in: made of
// an Error their text would have colours for a terminal.
Maybe<void> raise_pending() {
  if (!g_pending.load(std::memory_order_acquire) || g_ending.load()) {
    return Maybe<void>::Ok();
  }
  // What has been asked for in the meantime may fail in the wake of it, and optimizers have to be
  // kept from stepping: all of it belongs to this one failure.
  const auto rest = wait_for_all();
  const std::lock_guard<std::mutex> lock(g_first.mutex);
  // Another thread may have raised it while this one waited.
  if (!g_pending.load()) { return Maybe<void>::Ok(); }
  g_starved.store(false);
  g_pending.store(false);
  if (g_first.is_index) { throw ::oneflow::IndexException(g_first.message); }
  throw ::oneflow::RuntimeException(g_first.message);
}

// An explicit instantiation may name what is private.
template <std::atomic<int64_t> SpinCounter::*member>
struct PrivateCounter {
  friend const std::atomic<int64_t>& count_of(const SpinCounter& counter) {
    return counter.*member;
  }
};
const std::atomic<int64_t>& count_of(const SpinCounter& counter);
template struct PrivateCounter<&SpinCounter::cnt_val_>;

// In place of SpinCounter::WaitUntilCntEqualZero(), which looks at its counter in an empty loop:
// the last step of whatever hands a tensor's data to Python, .numpy() and .item(), while OneFlow
// copies the values. Where more threads are ready than there are cores, as with several processes,
// the system has often put the thread that looks in the place of the one that copies, or of one of a
// kernel's team, and it would look for a whole time slice at what cannot change.
Maybe<void> wait_for_data(const SpinCounter* counter) {
  const std::atomic<int64_t>& count = count_of(*counter);
  const auto done = [&] { return count <= 0; };
  if (!done()) {
    // Without Python's lock, as OneFlow's function does it.
    void* const thread = PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr;
    if (!comes_true_soon(done)) {
      const auto first = Clock::now();
      while (!done()) {
        give_way(Clock::now() - first, std::chrono::milliseconds(4), 64,
                 std::chrono::milliseconds(2),
                 [](Clock::duration time) { std::this_thread::sleep_for(time); });
      }
    }
    if (thread != nullptr) { PyEval_RestoreThread(thread); }
  }
  return raise_pending();
}

// In place of vm::CurrentRankSync(), as Python calls it: synchronize(), empty_cache().
Maybe<void> synchronize() {
  auto waited = wait_for_all();
  return waited.IsOk() ? raise_pending() : waited;
}

constexpr const char* kWaitForData = "_ZNK7oneflow11SpinCounter21WaitUntilCntEqualZeroEv";

// When the library is loaded.
const bool g_redirected = redirect_in_oneflow(kWaitForData, wait_for_data)
                          && redirect_in_oneflow(kWaitForData, wait_for_data, kPythonModule);
const bool g_sync_redirected =
    redirect_in_oneflow("_ZN7oneflow2vm15CurrentRankSyncEv", synchronize, kPythonModule);

// A process that ends before it has waited for a result must not look like a success. It comes
// after OneFlow's own end, which waits for all kernels.
void at_exit(int status, void*) {
  if (!g_pending.load()) { return; }
  std::fprintf(stderr, "%s\n", g_first.message.c_str());
  if (status != 0) { return; }
  std::fflush(nullptr);
  _exit(EXIT_FAILURE);
}

const int g_exit_handler = on_exit(at_exit, nullptr);

// Only the first of several is kept. Ends the process with the message where OneFlow's waiting could
// not be redirected, so that nothing would ever raise it.
void record(const std::string& message, bool is_index) noexcept {
  if (!g_redirected) { LOG(FATAL) << message; }
  const std::lock_guard<std::mutex> lock(g_first.mutex);
  if (g_pending.load()) { return; }
  g_first.message = message;
  g_first.is_index = is_index;
  g_pending.store(true, std::memory_order_release);
}

// Notes the exception that is being handled. To Python a std::out_of_range is an IndexError,
// anything else a RuntimeError.
void record_failure(const std::string& op) noexcept {
  std::string message = "oneflow_accel: " + op + ": ";
  bool is_index = false;
  try {
    throw;
  } catch (const std::bad_alloc&) {
    message += "not enough memory";
  } catch (const std::exception& error) {
    is_index = dynamic_cast<const std::out_of_range*>(&error) != nullptr;
    message += error.what();
  } catch (...) {
    message += "an unknown exception";
  }
  record(message, is_index);
}

// Whether a kernel may run: after a lack of memory none does until it has been raised.
bool has_memory(user_op::KernelComputeContext* ctx) {
  if (!has_starved()) { return true; }
  bool has = !starved();
  for (const auto& [name, index] : ctx->outputs()) {
    const auto* tensor = has ? ctx->Tensor4ArgNameAndIndex(name, index) : nullptr;
    has = has && (tensor == nullptr || may_write(tensor->raw_dptr(), bytes_of(*tensor)));
  }
  return has;
}

// The operators of OneFlow's optimizers. They change parameters in place and have no output, and do
// nothing while a failure waits for Python, so that no parameter is changed by gradients that came
// of it.
const std::set<std::string>& updates() {
  static const std::set<std::string> names = {
      "adadelta_update", "adagrad_update", "adam_update", "ftrl_update", "lamb_update",
      "lars_update", "momentum_update", "rmsprop_update", "sgd_update", "indexed_slices_sgd_update",
      "indexed_slices_adam_update", "indexed_slices_momentum_update"};
  return names;
}

void zero_outputs(user_op::KernelComputeContext* ctx) {
  for (const auto& [name, index] : ctx->outputs()) {
    auto* tensor = ctx->Tensor4ArgNameAndIndex(name, index);
    if (tensor == nullptr || tensor->mut_raw_dptr() == nullptr) { continue; }
    std::memset(tensor->mut_raw_dptr(), 0, bytes_of(*tensor));
  }
}

// What a kernel writes to may be weights of inference that are kept in another layout. It is asked
// here, where all writes come in their order: Python is ahead of them.
void drop_copies_of_outputs(user_op::KernelComputeContext* ctx, bool changes_inputs) {
  const auto drop = [&](const auto& arguments) {
    for (const auto& [name, index] : arguments) {
      const auto* tensor = ctx->Tensor4ArgNameAndIndex(name, index);
      if (tensor != nullptr) { drop_copies_of(tensor->raw_dptr(), bytes_of(*tensor)); }
    }
  };
  drop(ctx->outputs());
  if (changes_inputs) { drop(ctx->inputs()); }
}

class GuardedKernel : public user_op::OpKernel {
 public:
  GuardedKernel(const user_op::OpKernel* kernel, const std::string& op)
      : kernel_(kernel),
        is_update_(updates().count(op) > 0),
        changes_inputs_(CHECK_NOTNULL(user_op::UserOpRegistryMgr::Get().GetOpRegistryResult(op))
                            ->input_arg_modify_fn
                        != nullptr) {}

  bool AlwaysComputeWhenAllOutputsEmpty() const final {
    return kernel_->AlwaysComputeWhenAllOutputsEmpty();
  }
  bool IsKernelLaunchSynchronized() const final { return kernel_->IsKernelLaunchSynchronized(); }
  void InferShape(user_op::KernelInferContext* ctx) const final { kernel_->InferShape(ctx); }
  void Compute(user_op::KernelComputeContext* ctx, user_op::OpKernelState* state,
               const user_op::OpKernelCache* cache) const final {
    if ((is_update_ && g_pending.load(std::memory_order_acquire)) || !has_memory(ctx)) { return; }
    const ScratchUse scratch;
    if (keeps_weights()) { drop_copies_of_outputs(ctx, changes_inputs_); }
    try {
      kernel_->Compute(ctx, state, cache);
    } catch (...) {
      record_failure(ctx->op_type_name());
      zero_outputs(ctx);
    }
  }

 protected:
  const std::unique_ptr<const user_op::OpKernel> kernel_;

 private:
  using user_op::OpKernel::Compute;
  const bool is_update_;
  const bool changes_inputs_;
};

// OneFlow asks a kernel for a state or a cache only if its class has functions for them.
class GuardedKernelWithState final : public GuardedKernel {
 public:
  using GuardedKernel::GuardedKernel;
  std::shared_ptr<user_op::OpKernelState> CreateOpKernelState(
      user_op::KernelInitContext* ctx) const override {
    return kernel_->CreateOpKernelState(ctx);
  }
  std::shared_ptr<user_op::OpKernelCache> InitOpKernelCache(
      user_op::KernelCacheContext* ctx) const override {
    return kernel_->InitOpKernelCache(ctx);
  }
  void InitOpKernelCacheWithFlags(user_op::KernelCacheContext* ctx, int8_t flag,
                                  std::shared_ptr<user_op::OpKernelCache>* cache) const override {
    kernel_->InitOpKernelCacheWithFlags(ctx, flag, cache);
  }
};

// Kernels of `op` made by `create`, whose exceptions become failures and zeros in their outputs.
user_op::OpKernelCreateFn guarded(const std::string& op, user_op::OpKernelCreateFn create) {
  return [op, create = std::move(create)]() -> const user_op::OpKernel* {
    const user_op::OpKernel* kernel = create();
    if (kernel->has_state_or_cache()) {
      return user_op::NewOpKernel<GuardedKernelWithState>(kernel, op);
    }
    return user_op::NewOpKernel<GuardedKernel>(kernel, op);
  };
}

}  // namespace

void record_lack_of_memory(const std::string& message) {
  g_has_starved.store(true, std::memory_order_release);
  g_starved.store(true, std::memory_order_release);
  record(message, false);
}

bool starved() { return g_starved.load(std::memory_order_acquire); }
bool has_starved() { return g_has_starved.load(std::memory_order_acquire); }

}  // namespace oneflow_accel

extern "C" {

// To be called when the library is loaded: by then files have registered their kernels, or put them
// around OneFlow's own. Those are guarded too: its optimizers must not step while a failure waits, and
// all of them may write to weights.
void oneflow_accel_guard_kernels() {
  for (auto& [op, kernels] : oneflow_accel::all_kernels()) {
    for (auto& kernel : kernels) {
      if (oneflow_accel::updates().count(op) == 0 && !oneflow_accel::may_run_on_cpu(kernel)) {
        continue;
      }
      kernel.create_fn = oneflow_accel::guarded(op, std::move(kernel.create_fn));
    }
  }
}

// For the emulated device: what has failed there, to be raised as failures of kernels are, and how to
// wait for it.
void oneflow_accel_fail(const char* message) {
  oneflow_accel::record(std::string("oneflow_accel: ") + message, false);
}
void oneflow_accel_wait_also(void (*wait)()) { oneflow_accel::g_wait_for_device.store(wait); }

// To be called when the interpreter ends, before OneFlow does: no failure is raised from then on;
// one that nobody has asked for is printed at the very end.
void oneflow_accel_program_ends() { oneflow_accel::g_ending.store(true); }

}  // extern "C"
