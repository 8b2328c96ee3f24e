#pragma once

#include <algorithm>

#include "common/threads.h"

namespace oneflow_accel {

// Threads share the channels of a pixel out in pieces of this many: whole cache lines.
constexpr int64_t kPoolStrip = 64;

template <typename Fn>
void for_each_channels_last_task(int64_t tasks, int64_t channels, int64_t work_per_channel,
                                 const Fn& fn) {
  if (tasks == 0 || channels == 0) { return; }
  const int64_t strips = (channels + kPoolStrip - 1) / kPoolStrip;
  const int64_t parts = std::clamp<int64_t>(num_threads() / tasks, 1, strips);
  const int64_t work = std::max<int64_t>(1, work_per_channel * channels / parts);
  parallel_for(tasks * parts, std::max<int64_t>(1, kGrainSize / work),
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) {
                   const int64_t part = i % parts;
                   const int64_t first = strips * part / parts * kPoolStrip;
                   const int64_t last = strips * (part + 1) / parts * kPoolStrip;
                   fn(i / parts, first, std::min(last, channels));
                 }
               });
}

}  // namespace oneflow_accel
