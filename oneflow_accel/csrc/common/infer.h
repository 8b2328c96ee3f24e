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

// The rule of operators that need no more.
inline user_op::DataTypeInferFn one_dtype(const std::string& what) {
  return [=](user_op::InferContext* ctx) { return infer_one_dtype(ctx, what); };
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

inline bool has_any_of(const std::string& text, const std::string& words) {
  const auto all = words_of(words);
  return std::any_of(all.begin(), all.end(),
                     [&](const std::string& word) { return text.find(word) != std::string::npos; });
}

// Lets one axis be split of all arguments but those with one of the words `whole` in their names.
inline void split_all_but(user_op::SbpContext* ctx, int64_t axis, const std::string& whole) {
  split_along(ctx,
              [&](const std::string& name) { return has_any_of(name, whole) ? kWhole : axis; });
}

// The rule of operators whose arguments are split so along their first axis.
inline user_op::GetSbpFn split_first_axis(const std::string& whole) {
  return [=](user_op::SbpContext* ctx) {
    split_all_but(ctx, 0, whole);
    return Maybe<void>::Ok();
  };
}

// Describes the gradients of inputs, outputs with their names and "_grad": each is like its input.
inline Maybe<void> describe_gradients(user_op::InferContext* ctx) {
  for (const auto& [name, index] : ctx->outputs()) {
    const auto suffix = name.rfind("_grad");
    const std::string input = name.substr(0, suffix);
    if (suffix != std::string::npos && ctx->has_input(input, 0)) {
      describe_output(ctx, name, ctx->InputShape(input, 0));
    }
  }
  return Maybe<void>::Ok();
}

// An operator that OneFlow has none for, whose registration begins here. `inputs` and `outputs` are
// the names of its arguments; one that may be missing has a '?' behind it.
inline user_op::OpRegistry new_operator(const std::string& name, const std::string& inputs,
                                        const std::string& outputs,
                                        const user_op::TensorDescInferFn& infer_shapes,
                                        const user_op::DataTypeInferFn& infer_types,
                                        const user_op::GetSbpFn& split) {
  auto made = user_op::UserOpRegistryMgr::Get().CheckAndGetOpRegistry(name);
  for (std::string& input : words_of(inputs)) {
    if (input.back() == '?') {
      input.pop_back();
      made.OptionalInput(input);
    } else {
      made.Input(input);
    }
  }
  for (const std::string& output : words_of(outputs)) { made.Output(output); }
  made.SetTensorDescInferFn(infer_shapes).SetDataTypeInferFn(infer_types).SetGetSbpFn(split);
  return made;
}

// Its end: registers it, when the library is loaded.
struct NewOperator {
  NewOperator(user_op::OpRegistry registry) {
    user_op::UserOpRegisterTrigger<user_op::OpRegistry>{registry};
  }
};

}  // namespace oneflow_accel
