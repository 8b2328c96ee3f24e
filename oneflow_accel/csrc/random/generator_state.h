// What OneFlow's functional API hands to kernels that draw random numbers. The wheel does not ship
// the headers of these two classes: they are declared here as they are in oneflow 0.9.0, under the
// same names, so that dynamic_cast knows the objects that OneFlow makes.
#pragma once

#include <memory>

#include "common/oneflow.h"
#include "oneflow/core/framework/random_generator.h"

namespace oneflow {

class FusedDropoutKernelState : public user_op::OpKernelState {
 public:
  explicit FusedDropoutKernelState(const std::shared_ptr<one::Generator>& generator)
      : generator_(generator) {}
  const std::shared_ptr<one::Generator>& generator() const { return generator_; }

 private:
  std::shared_ptr<one::Generator> generator_;
};

class RandomMaskLikeKernelState : public user_op::OpKernelState {
 public:
  explicit RandomMaskLikeKernelState(const std::shared_ptr<one::Generator>& generator)
      : generator_(generator) {}
  const std::shared_ptr<one::Generator>& generator() const { return generator_; }

 private:
  std::shared_ptr<one::Generator> generator_;
};

}  // namespace oneflow

namespace oneflow_accel::random {

// The engine of a kernel's state, which is a `State` or a mistake of OneFlow's.
template <typename State>
std::mt19937& engine_of(::oneflow::user_op::OpKernelState* state) {
  auto* own = CHECK_NOTNULL(dynamic_cast<State*>(state));
  return CHECK_JUST(own->generator()->template Get<::oneflow::one::CPUGeneratorImpl>())->engine();
}

}  // namespace oneflow_accel::random
