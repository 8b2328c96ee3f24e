// Which part of a global tensor's axis a process holds.
#pragma once

#include <algorithm>
#include <string>

#include "common/oneflow.h"

namespace oneflow_accel {

// Elements [first, first + size) of `total` along one axis.
struct LocalRange {
  int64_t first;
  int64_t size;
  int64_t total;
};

inline bool is_split(const ::oneflow::SbpParallel& sbp, int64_t axis) {
  return sbp.has_split_parallel() && sbp.split_parallel().axis() == axis;
}

// Whether argument `name` is split along `axis` over some of the processes.
inline bool is_split(::oneflow::user_op::KernelCacheContext* ctx, const std::string& name,
                     int64_t axis) {
  const auto& sbp = ctx->NdSbp4ArgNameAndIndex(name, 0).sbp_parallel();
  return std::any_of(sbp.begin(), sbp.end(), [=](const auto& one) { return is_split(one, axis); });
}

// The range of `axis` that the calling process holds of argument `name`.
inline LocalRange local_range(::oneflow::user_op::KernelCacheContext* ctx, const std::string& name,
                              int64_t axis) {
  const int64_t total = ctx->LogicalTensorDesc4ArgNameAndIndex(name, 0)->shape().At(axis);
  LocalRange range{0, total, total};
  const auto& sbp = ctx->NdSbp4ArgNameAndIndex(name, 0);
  const ::oneflow::Shape& hierarchy = *ctx->parallel_desc().hierarchy();
  int64_t processes = ctx->parallel_ctx().parallel_num();
  int64_t rank = ctx->parallel_ctx().parallel_id();
  for (int64_t k = 0; k < hierarchy.NumAxes(); ++k) {
    const int64_t parts = hierarchy.At(k);
    processes /= parts;
    const int64_t part = rank / processes;
    rank %= processes;
    if (!is_split(sbp.sbp_parallel(k), axis)) { continue; }
    // The first `longer` parts have one element more.
    const int64_t longer = range.size % parts;
    range.first += part * (range.size / parts) + std::min(part, longer);
    range.size = range.size / parts + (part < longer ? 1 : 0);
  }
  return range;
}

}  // namespace oneflow_accel
