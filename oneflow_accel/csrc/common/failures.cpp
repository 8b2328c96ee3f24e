#include "common/failures.h"

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <new>
#include <stdexcept>

#include "common/oneflow.h"
#include "common/redirect.h"
#include "common/waiting.h"
#include "oneflow/core/common/maybe.h"
#include "oneflow/core/common/spin_counter.h"
#include "oneflow/core/vm/vm_sync.h"

namespace oneflow_accel {

namespace {

using ::oneflow::Error;
using ::oneflow::Maybe;
using ::oneflow::SpinCounter;

std::atomic<bool> g_pending{false};
// The program has come to its end; OneFlow still synchronizes, where nobody would see an exception.
std::atomic<bool> g_ending{false};

struct Failure {
  std::mutex mutex;
  bool is_index = false;
  std::string message;
};

// Never destroyed: OneFlow's threads may outlive the library's variables.
Failure& first() {
  static auto* const it = new Failure;
  return *it;
}

// What Python is told if a failure waits for it.
Maybe<void> raise_pending() {
  if (!g_pending.load(std::memory_order_acquire) || g_ending.load()) {
    return Maybe<void>::Ok();
  }
  // What has been asked for in the meantime may fail in the wake of it, and optimizers have to be
  // kept from stepping: all of it belongs to this one failure.
  const auto rest = ::oneflow::vm::CurrentRankSync();
  std::string message;
  bool is_index = false;
  {
    const std::lock_guard<std::mutex> lock(first().mutex);
    // Another thread may have raised it while this one waited.
    if (!g_pending.load()) { return Maybe<void>::Ok(); }
    message.swap(first().message);
    is_index = first().is_index;
    g_pending.store(false);
  }
  if (is_index) { return Error::IndexError() << message; }
  return Error::RuntimeError() << message;
}

// In place of SpinCounter::WaitUntilCntEqualZero(), the last step of whatever hands a tensor's data
// to Python.
Maybe<void> wait_for_data(const SpinCounter* counter) {
  auto waited = wait_until_zero(*counter);
  return waited.IsOk() ? raise_pending() : waited;
}

// In place of vm::CurrentRankSync(), as Python calls it: synchronize(), empty_cache().
Maybe<void> synchronize() {
  auto waited = ::oneflow::vm::CurrentRankSync();
  return waited.IsOk() ? raise_pending() : waited;
}

constexpr const char* kWaitForData = "_ZNK7oneflow11SpinCounter21WaitUntilCntEqualZeroEv";

// When the library is loaded.
const bool g_redirected = redirect_in_oneflow(kWaitForData, wait_for_data)
                          && redirect_in_python_module(kWaitForData, wait_for_data);
const bool g_sync_redirected =
    redirect_in_python_module("_ZN7oneflow2vm15CurrentRankSyncEv", synchronize);

// A process that ends before it has waited for a result must not look like a success. It comes
// after OneFlow's own end, which waits for all kernels.
void at_exit(int status, void*) {
  if (!g_pending.load()) { return; }
  std::fprintf(stderr, "%s\n", first().message.c_str());
  if (status != 0) { return; }
  std::fflush(nullptr);
  _exit(EXIT_FAILURE);
}

const int g_exit_handler = on_exit(at_exit, nullptr);

}  // namespace

bool failure_pending() { return g_pending.load(std::memory_order_acquire); }

void record_failure(const std::string& op) noexcept {
  const std::string prefix = "oneflow_accel: " + op + ": ";
  std::string message;
  bool is_index = false;
  try {
    throw;
  } catch (const std::out_of_range& error) {
    is_index = true;
    message = prefix + error.what();
  } catch (const std::bad_alloc&) {
    message = prefix + "not enough memory";
  } catch (const std::exception& error) {
    message = prefix + error.what();
  } catch (...) {
    message = prefix + "an unknown exception";
  }
  if (!g_redirected) { LOG(FATAL) << message; }
  const std::lock_guard<std::mutex> lock(first().mutex);
  if (g_pending.load()) { return; }
  first().message = message;
  first().is_index = is_index;
  g_pending.store(true, std::memory_order_release);
}

}  // namespace oneflow_accel

// To be called when the interpreter ends, before OneFlow does: no failure is raised from then on;
// one that nobody has asked for is printed at the very end.
extern "C" void oneflow_accel_program_ends() { oneflow_accel::g_ending.store(true); }
