#pragma once

#include <algorithm>
#include <atomic>
#include <exception>

namespace oneflow_accel {

// The first exception of several threads. One that left a parallel region would end the process.
class FirstException {
 public:
  template <typename Fn>
  void catch_in(const Fn& fn) {
    try {
      fn();
    } catch (...) {
      if (!taken_.exchange(true)) { first_ = std::current_exception(); }
    }
  }
  void rethrow() const {
    if (first_) { std::rethrow_exception(first_); }
  }

 private:
  std::atomic<bool> taken_{false};
  std::exception_ptr first_;
};

template <typename Fn>
void run_team(int threads, const Fn& fn) {
  if (threads <= 1) { return fn(int64_t{0}, int64_t{1}); }
  const auto share = [&](int id, int count) {
    const int shares = std::min(threads, count);
    if (id < shares) { fn(int64_t{id}, int64_t{shares}); }
  };
  start_team([](const void* data, int id,
                int count) { (*static_cast<const decltype(share)*>(data))(id, count); },
             &share);
}

template <typename Fn>
void parallel_for(int64_t n, int64_t grain, const Fn& fn) {
  if (n <= 0) { return; }
  const int64_t most = (n + grain - 1) / std::max<int64_t>(grain, 1);
  const int threads = static_cast<int>(std::min<int64_t>(num_threads(), most));
  if (threads <= 1) {
    fn(int64_t{0}, n);
    return;
  }
  FirstException exception;
  run_team(threads, [&](int64_t id, int64_t count) {
    const int64_t begin = n * id / count;
    const int64_t end = n * (id + 1) / count;
    if (begin < end) {
      exception.catch_in([&] { fn(begin, end); });
    }
  });
  exception.rethrow();
}

}  // namespace oneflow_accel
