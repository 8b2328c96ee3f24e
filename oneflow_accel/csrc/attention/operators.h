// What the definitions of the attention operators share.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "attention/attention.h"
#include "common/arguments.h"
#include "common/guard.h"
#include "common/infer.h"

namespace oneflow_accel {

inline AttentionShape attention_shape(::oneflow::user_op::KernelComputeContext* ctx, int64_t batch,
                                      int64_t heads, int64_t kv_heads, int64_t queries,
                                      int64_t keys, int64_t dim) {
  const auto scale = static_cast<float>(ctx->Attr<double>("scale"));
  AttentionShape shape{batch, heads, kv_heads, queries, keys, dim, ctx->Attr<bool>("causal"), scale};
  if (ctx->has_input("segments", 0)) {
    shape.spans = spans_of(input<int64_t>(ctx, "segments"), batch, queries);
  }
  return shape;
}

inline std::string describe(const AttentionShape& shape) {
  return "attention of " + std::to_string(shape.batch) + " x " + std::to_string(shape.heads)
         + " heads, " + std::to_string(shape.queries) + " queries, " + std::to_string(shape.keys)
         + " keys, " + std::to_string(shape.dim) + " dimensions";
}

// The input `segments`, if there is one: int64 (batch, time), with as many keys as queries.
::oneflow::Maybe<void> check_segments(::oneflow::user_op::InferContext* ctx, int64_t batch,
                                      int64_t queries, int64_t keys);

// The attribute `dropout`, and the input `seed`, one int64, that it needs where it is above 0.
::oneflow::Maybe<void> check_dropout(::oneflow::user_op::InferContext* ctx);
::oneflow::Maybe<void> check_seed_type(::oneflow::user_op::InferContext* ctx);

// Which batch entry and head of a global tensor come first in a process's part.
class FirstHead final : public ::oneflow::user_op::OpKernelCache {
 public:
  FirstHead(int64_t batch, int64_t head) : batch(batch), head(head) {}

  const int64_t batch;
  const int64_t head;
};

// Of the argument `name`; null where each process holds all of it.
std::shared_ptr<FirstHead> first_head(::oneflow::user_op::KernelCacheContext* ctx,
                                      const std::string& name, int64_t batch_axis,
                                      int64_t head_axis);

// What a call drops out, if it does.
std::optional<WeightDropout> weight_dropout(::oneflow::user_op::KernelComputeContext* ctx,
                                            const ::oneflow::user_op::OpKernelCache* first_head);

}  // namespace oneflow_accel
