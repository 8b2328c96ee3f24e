// Dropout of weights by a seed, as operators have it.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "attention/weight_dropout.h"
#include "common/infer.h"
#include "common/oneflow.h"

namespace oneflow_accel {

// The attribute `dropout`, and the input `seed`, one int64, that it needs where it is above 0.
Maybe<void> check_dropout(user_op::InferContext* ctx);
Maybe<void> check_seed_type(user_op::InferContext* ctx);

// Which batch entry and head of a global tensor come first in a process's part.
struct FirstHead final : user_op::OpKernelCache {
  int64_t batch = 0;
  int64_t head = 0;
};

// Of the argument `name`; null where each process holds all of it.
std::shared_ptr<FirstHead> first_head(user_op::KernelCacheContext* ctx,
                                      const std::string& name, int64_t batch_axis,
                                      int64_t head_axis);

// What a call drops out, if it does.
std::optional<WeightDropout> weight_dropout(user_op::KernelComputeContext* ctx,
                                            const user_op::OpKernelCache* first_head);

}  // namespace oneflow_accel
