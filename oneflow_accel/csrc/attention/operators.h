// What the definitions of the attention operators share.
#pragma once

#include <string>

#include "attention/attention.h"
#include "common/guard.h"
#include "common/infer.h"

namespace oneflow_accel {

inline AttentionShape attention_shape(::oneflow::user_op::KernelComputeContext* ctx, int64_t batch,
                                      int64_t heads, int64_t queries, int64_t keys, int64_t dim) {
  return {batch, heads, queries, keys, dim, ctx->Attr<bool>("causal"),
          static_cast<float>(ctx->Attr<double>("scale"))};
}

inline std::string describe(const AttentionShape& shape) {
  return "attention of " + std::to_string(shape.batch) + " x " + std::to_string(shape.heads)
         + " heads, " + std::to_string(shape.queries) + " queries, " + std::to_string(shape.keys)
         + " keys, " + std::to_string(shape.dim) + " dimensions";
}

}  // namespace oneflow_accel
