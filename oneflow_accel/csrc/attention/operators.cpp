#include "attention/operators.h"

#include <stdexcept>

#include "oneflow/core/common/balanced_splitter.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;
using ::oneflow::Error;
using ::oneflow::Maybe;

}  // namespace

std::vector<Span> spans_of(const int64_t* segments, int64_t batch, int64_t time) {
  std::vector<Span> spans;
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t* row = segments + b * time;
    for (int64_t begin = 0, end = 0; begin < time; begin = end) {
      while (end < time && row[end] == row[begin]) { ++end; }
      if (end < time && row[end] < row[begin]) {
        throw std::invalid_argument(
            "segments of packed sequences must not fall along the time: row " + std::to_string(b)
            + " has " + std::to_string(row[end]) + " after " + std::to_string(row[begin]));
      }
      spans.push_back({b, begin, end - begin});
    }
  }
  return spans;
}

Maybe<void> check_segments(user_op::InferContext* ctx, int64_t batch, int64_t queries,
                           int64_t keys) {
  if (!ctx->has_input("segments", 0)) { return Maybe<void>::Ok(); }
  const auto& shape = ctx->InputShape("segments", 0);
  if (shape != ::oneflow::Shape({batch, queries}) || queries != keys) {
    return Error::RuntimeError()
           << "segments of packed sequences must be (batch, time), with as many keys as queries, "
              "not "
           << shape.ToString() << " for " << queries << " queries and " << keys << " keys";
  }
  return Maybe<void>::Ok();
}

Maybe<void> check_dropout(user_op::InferContext* ctx) {
  const double rate = ctx->Attr<double>("dropout");
  const bool has_seed = ctx->has_input("seed", 0);
  if (!(rate >= 0.0 && rate < 1.0) || (rate > 0.0 && !has_seed)
      || (has_seed && ctx->InputShape("seed", 0).elem_cnt() != 1)) {
    return Error::RuntimeError()
           << "dropout is at a rate of at least 0 and below 1, by a seed of one element; the rate is "
           << rate;
  }
  return Maybe<void>::Ok();
}

Maybe<void> check_seed_type(user_op::InferContext* ctx) {
  if (ctx->has_input("seed", 0) && ctx->InputDType("seed", 0) != ::oneflow::DataType::kInt64) {
    return Error::RuntimeError() << "the seed of dropout must be int64";
  }
  if (ctx->has_input("segments", 0)
      && ctx->InputDType("segments", 0) != ::oneflow::DataType::kInt64) {
    return Error::RuntimeError() << "segments of packed sequences must be int64";
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
