// Which part of a global tensor a process holds.
#pragma once

#include <string>

#include "common/oneflow.h"
#include "oneflow/core/common/balanced_splitter.h"

namespace oneflow_accel {

// Where this process's part of the global tensor `name` begins along an axis.
inline int64_t part_begin(::oneflow::user_op::KernelCacheContext* ctx, const std::string& name,
                          int64_t axis) {
  const auto& nd_sbp = ctx->NdSbp4ArgNameAndIndex(name, 0);
  const auto& hierarchy = *ctx->parallel_desc().hierarchy();
  int64_t begin = 0;
  int64_t size = ctx->LogicalTensorDesc4ArgNameAndIndex(name, 0)->shape().At(axis);
  // Each axis of the hierarchy splits what the ones before it have left. The digits of the
  // process's number are its places on the axes.
  for (int64_t i = 0; i < hierarchy.NumAxes(); ++i) {
    const auto& sbp = nd_sbp.sbp_parallel(i);
    if (!sbp.has_split_parallel() || sbp.split_parallel().axis() != axis) { continue; }
    const int64_t place = ctx->parallel_ctx().parallel_id() / hierarchy.Count(i + 1);
    const auto part =
        ::oneflow::BalancedSplitter(size, hierarchy.At(i)).At(place % hierarchy.At(i));
    begin += part.begin();
    size = part.size();
  }
  return begin;
}

}  // namespace oneflow_accel
