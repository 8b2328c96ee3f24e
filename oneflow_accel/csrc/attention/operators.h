// Dropout of weights by a seed, as operators have it.
#pragma once

#include <optional>

#include "attention/weight_dropout.h"
#include "common/infer.h"
#include "common/part.h"

namespace oneflow_accel {

// The attribute `dropout`, and the input `seed`, one int64, that it needs where it is above 0.
Maybe<void> check_dropout(user_op::InferContext* ctx);
Maybe<void> check_seed_type(user_op::InferContext* ctx);

// What a call drops out, if it does. Of a global tensor `ranges` are a process's batch entries and
// heads.
std::optional<WeightDropout> weight_dropout(Context* ctx, const KernelCache* ranges);

}  // namespace oneflow_accel
