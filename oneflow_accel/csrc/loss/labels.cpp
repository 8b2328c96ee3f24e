#include "loss/labels.h"

#include <stdexcept>
#include <string>

#include "oneflow/core/common/balanced_splitter.h"

namespace oneflow_accel {

void Labels::fail(int64_t row) const {
  throw std::out_of_range("label " + std::to_string(at(row)) + " of row " + std::to_string(row)
                          + " is out of range for " + std::to_string(classes_) + " classes");
}

std::shared_ptr<ClassRange> class_range(::oneflow::user_op::KernelCacheContext* ctx,
                                        const std::string& name) {
  if (ctx->parallel_ctx().parallel_num() == 1) { return nullptr; }
  const auto& shape = ctx->LogicalTensorDesc4ArgNameAndIndex(name, 0)->shape();
  const int64_t axis = shape.NumAxes() - 1;
  const auto& nd_sbp = ctx->NdSbp4ArgNameAndIndex(name, 0);
  const auto& hierarchy = *ctx->parallel_desc().hierarchy();
  int64_t begin = 0;
  int64_t classes = shape.At(axis);
  // Each axis of the hierarchy splits what the ones before it have left. The digits of the
  // process's number are its places on the axes.
  for (int64_t i = 0; i < hierarchy.NumAxes(); ++i) {
    const auto& sbp = nd_sbp.sbp_parallel(i);
    if (!sbp.has_split_parallel() || sbp.split_parallel().axis() != axis) { continue; }
    const int64_t place = ctx->parallel_ctx().parallel_id() / hierarchy.Count(i + 1);
    const auto part =
        ::oneflow::BalancedSplitter(classes, hierarchy.At(i)).At(place % hierarchy.At(i));
    begin += part.begin();
    classes = part.size();
  }
  if (classes == shape.At(axis)) { return nullptr; }
  return std::make_shared<ClassRange>(begin, shape.At(axis));
}

}  // namespace oneflow_accel
