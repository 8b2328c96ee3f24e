#pragma once

#include <omp.h>

#include <algorithm>

namespace oneflow_accel {

template <typename Fn>
void parallel_for(int64_t n, int64_t grain, const Fn& fn) {
  if (n <= 0) { return; }
  const int64_t most = (n + grain - 1) / std::max<int64_t>(grain, 1);
  const int threads = static_cast<int>(std::min<int64_t>(num_threads(), most));
  if (threads <= 1) {
    fn(int64_t{0}, n);
    return;
  }
#pragma omp parallel num_threads(threads)
  {
    const int64_t id = omp_get_thread_num();
    const int64_t count = omp_get_num_threads();
    const int64_t begin = n * id / count;
    const int64_t end = n * (id + 1) / count;
    if (begin < end) { fn(begin, end); }
  }
}

}  // namespace oneflow_accel
