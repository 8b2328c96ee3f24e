#include "common/waiting.h"

#include <sched.h>

#include <atomic>
#include <cstdint>

#include "common/python.h"

namespace oneflow_accel {

namespace {

using ::oneflow::Maybe;
using ::oneflow::SpinCounter;

// An explicit instantiation may name what is private.
template <std::atomic<int64_t> SpinCounter::*member>
struct PrivateMember {
  friend const std::atomic<int64_t>& count_of(const SpinCounter& counter) {
    return counter.*member;
  }
};
const std::atomic<int64_t>& count_of(const SpinCounter& counter);
template struct PrivateMember<&SpinCounter::cnt_val_>;

}  // namespace

Maybe<void> wait_until_zero(const SpinCounter& counter) {
  const std::atomic<int64_t>& count = count_of(counter);
  const auto done = [&] { return count <= 0; };
  if (done()) { return Maybe<void>::Ok(); }
  // Without Python's lock, as OneFlow's function does it.
  void* const thread = PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr;
  if (!comes_true_soon(done)) {
    while (!done()) { ::sched_yield(); }
  }
  if (thread != nullptr) { PyEval_RestoreThread(thread); }
  return Maybe<void>::Ok();
}

}  // namespace oneflow_accel
