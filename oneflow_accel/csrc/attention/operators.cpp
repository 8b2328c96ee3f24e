#include "attention/operators.h"

#include "common/arguments.h"
#include "oneflow/core/common/balanced_splitter.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;
using ::oneflow::Error;
using ::oneflow::Maybe;

}  // namespace

Maybe<void> check_dropout(user_op::InferContext* ctx) {
  const double rate = ctx->Attr<double>("dropout");
  const bool has_seed = ctx->has_input("seed", 0);
  if (!(rate >= 0.0 && rate < 1.0) || (rate > 0.0 && !has_seed)
      || (has_seed && ctx->InputShape("seed", 0).elem_cnt() != 1)) {
    return Error::RuntimeError()
           << "attention drops out weights at a rate of at least 0 and below 1, by a seed of one "
              "element; the rate is "
           << rate;
  }
  return Maybe<void>::Ok();
}

Maybe<void> check_seed_type(user_op::InferContext* ctx) {
  if (ctx->has_input("seed", 0) && ctx->InputDType("seed", 0) != ::oneflow::DataType::kInt64) {
    return Error::RuntimeError() << "the seed of attention's dropout must be int64";
  }
  return Maybe<void>::Ok();
}

std::shared_ptr<FirstHead> first_head(user_op::KernelCacheContext* ctx, const std::string& name,
                                      int64_t batch_axis, int64_t head_axis) {
  if (ctx->parallel_ctx().parallel_num() == 1) { return nullptr; }
  const auto& shape = ctx->LogicalTensorDesc4ArgNameAndIndex(name, 0)->shape();
  const auto& nd_sbp = ctx->NdSbp4ArgNameAndIndex(name, 0);
  const auto& hierarchy = *ctx->parallel_desc().hierarchy();
  // Each axis of the hierarchy splits what the ones before it have left. The digits of the
  // process's number are its places on the axes.
  const auto first = [&](int64_t axis) {
    int64_t begin = 0;
    int64_t size = shape.At(axis);
    for (int64_t i = 0; i < hierarchy.NumAxes(); ++i) {
      const auto& sbp = nd_sbp.sbp_parallel(i);
      if (!sbp.has_split_parallel() || sbp.split_parallel().axis() != axis) { continue; }
      const int64_t place = ctx->parallel_ctx().parallel_id() / hierarchy.Count(i + 1);
      const auto part
          = ::oneflow::BalancedSplitter(size, hierarchy.At(i)).At(place % hierarchy.At(i));
      begin += part.begin();
      size = part.size();
    }
    return begin;
  };
  return std::make_shared<FirstHead>(first(batch_axis), first(head_axis));
}

std::optional<WeightDropout> weight_dropout(user_op::KernelComputeContext* ctx,
                                            const user_op::OpKernelCache* first_head) {
  const double rate = ctx->Attr<double>("dropout");
  if (rate == 0.0) { return std::nullopt; }
  const auto* first = dynamic_cast<const FirstHead*>(first_head);
  return WeightDropout(*input<int64_t>(ctx, "seed"), rate, first == nullptr ? 0 : first->batch,
                       first == nullptr ? 0 : first->head);
}

}  // namespace oneflow_accel
