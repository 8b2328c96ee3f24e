// What the inference functions of new operators share.
#pragma once

#include <algorithm>
#include <set>
#include <string>

#include "common/oneflow.h"

namespace oneflow_accel {

// An output's description: contiguous, static.
inline void describe_output(user_op::InferContext* ctx, const std::string& name,
                            const ::oneflow::Shape& shape) {
  auto* desc = ctx->MutOutputTensorDesc(name, 0);
  desc->set_shape(shape);
  desc->set_stride(::oneflow::Stride(shape));
  desc->set_is_dynamic(false);
}

// Gives all outputs the dtype of the inputs, which have to have one. `what` begins the complaint.
// Inputs in `apart` have a dtype of their own, and outputs in it are float32.
inline Maybe<void> infer_one_dtype(user_op::InferContext* ctx, const std::string& what,
                                   const std::set<std::string>& apart = {}) {
  // They come in no order that could be relied on.
  const auto first =
      std::find_if(ctx->inputs().begin(), ctx->inputs().end(),
                   [&](const auto& input) { return apart.count(input.first) == 0; });
  const auto type = ctx->InputDType(first->first, first->second);
  for (const auto& [name, index] : ctx->inputs()) {
    if (apart.count(name) == 0 && ctx->InputDType(name, index) != type) {
      return Error::RuntimeError() << what << " needs tensors of one dtype";
    }
  }
  for (const auto& [name, index] : ctx->outputs()) {
    ctx->SetOutputDType(name, index, apart.count(name) == 0 ? type : DataType::kFloat);
  }
  return Maybe<void>::Ok();
}

constexpr int64_t kWhole = -1;

// Lets arguments be split along axis_of(name), where that is not kWhole: such inputs are the same
// for every part, and such outputs are sums over the parts.
template <typename AxisOf>
void split_along(user_op::SbpContext* ctx, const AxisOf& axis_of) {
  auto builder = ctx->NewBuilder();
  for (const auto* arguments : {&ctx->inputs(), &ctx->outputs()}) {
    for (const auto& [name, index] : *arguments) {
      const user_op::OpArg argument{std::string(name), index};
      const int64_t axis = axis_of(name);
      if (axis != kWhole) {
        builder.Split(argument, axis);
      } else if (arguments == &ctx->inputs()) {
        builder.Broadcast(argument);
      } else {
        builder.PartialSum(argument);
      }
    }
  }
  builder.Build();
}

// Lets one axis be split of all arguments but those for which `of_all(name)` holds.
template <typename OfAll>
void split_all_but(user_op::SbpContext* ctx, int64_t axis, const OfAll& of_all) {
  split_along(ctx, [&](const std::string& name) { return of_all(name) ? kWhole : axis; });
}

}  // namespace oneflow_accel
