// Which part of a global tensor a process holds.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "common/oneflow.h"
#include "oneflow/core/common/balanced_splitter.h"

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

// The range of an axis of the global tensor `name` that this process holds.
inline LocalRange local_range(user_op::KernelCacheContext* ctx, const std::string& name,
                              int64_t axis) {
  const auto& nd_sbp = ctx->NdSbp4ArgNameAndIndex(name, 0);
  const auto& hierarchy = *ctx->parallel_desc().hierarchy();
  const int64_t total = ctx->LogicalTensorDesc4ArgNameAndIndex(name, 0)->shape().At(axis);
  LocalRange range{0, total, total};
  // Each axis of the hierarchy splits what the ones before it have left. The digits of the
  // process's number are its places on the axes.
  for (int64_t i = 0; i < hierarchy.NumAxes(); ++i) {
    if (!is_split(nd_sbp.sbp_parallel(i), axis)) { continue; }
    const int64_t parts = hierarchy.At(i);
    const int64_t place = ctx->parallel_ctx().parallel_id() / hierarchy.Count(i + 1) % parts;
    const auto part = ::oneflow::BalancedSplitter(range.size, parts).At(place);
    range = {range.first + part.begin(), part.size(), total};
  }
  return range;
}

// Such ranges in a kernel's cache.
struct LocalRanges final : KernelCache {
  std::vector<LocalRange> of_axes;
};

// Of axes of the argument `name`, of which -1 is the last one; null in one process, which has all.
inline std::shared_ptr<LocalRanges> local_ranges(user_op::KernelCacheContext* ctx,
                                                 const std::string& name,
                                                 const std::vector<int64_t>& axes) {
  if (ctx->parallel_ctx().parallel_num() == 1) { return nullptr; }
  const int64_t rank = ctx->LogicalTensorDesc4ArgNameAndIndex(name, 0)->shape().NumAxes();
  auto ranges = std::make_shared<LocalRanges>();
  for (const int64_t axis : axes) {
    ranges->of_axes.push_back(local_range(ctx, name, axis < 0 ? axis + rank : axis));
  }
  return ranges;
}

// That of one of these axes, which has `size` elements here.
inline LocalRange range_in(const KernelCache* cache, std::size_t place, int64_t size) {
  return cache == nullptr ? LocalRange{0, size, size}
                          : static_cast<const LocalRanges*>(cache)->of_axes[place];
}

}  // namespace oneflow_accel
