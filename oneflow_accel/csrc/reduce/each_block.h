// Blocks of work that do not depend on each other.
#pragma once

#include <algorithm>

#include "common/threads.h"

namespace oneflow_accel {

// Calls fn(block) for each of `blocks`, in parallel; one is of `work` operations or so.
template <typename Fn>
void for_each_block(int64_t blocks, int64_t work, const Fn& fn) {
  parallel_for(blocks, std::max<int64_t>(1, kGrainSize / std::max<int64_t>(1, work)),
               [&](int64_t begin, int64_t end) {
                 for (int64_t block = begin; block < end; ++block) { fn(block); }
               });
}

}  // namespace oneflow_accel
