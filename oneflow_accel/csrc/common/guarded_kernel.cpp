#include <cstring>
#include <memory>
#include <set>
#include <string>

#include "common/all_kernels.h"
#include "common/failures.h"
#include "common/oneflow.h"
#include "common/scratch.h"
#include "oneflow/core/common/registry_error.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

// The operators of OneFlow's optimizers. They change parameters in place and have no output.
const std::set<std::string>& updates() {
  static const std::set<std::string> names = {
      "adadelta_update",
      "adagrad_update",
      "adam_update",
      "ftrl_update",
      "indexed_slices_adam_update",
      "indexed_slices_momentum_update",
      "indexed_slices_sgd_update",
      "lamb_update",
      "lars_update",
      "momentum_update",
      "rmsprop_update",
      "sgd_update",
  };
  return names;
}

void zero_outputs(user_op::KernelComputeContext* ctx) {
  for (const auto& [name, index] : ctx->outputs()) {
    auto* tensor = ctx->Tensor4ArgNameAndIndex(name, index);
    if (tensor == nullptr || tensor->mut_raw_dptr() == nullptr) { continue; }
    std::memset(tensor->mut_raw_dptr(), 0,
                tensor->shape_view().elem_cnt()
                    * ::oneflow::GetSizeOfDataType(tensor->data_type()));
  }
}

class GuardedKernel : public user_op::OpKernel {
 public:
  GuardedKernel(const user_op::OpKernel* kernel, bool is_update)
      : kernel_(kernel), is_update_(is_update) {}

  bool AlwaysComputeWhenAllOutputsEmpty() const final {
    return kernel_->AlwaysComputeWhenAllOutputsEmpty();
  }
  bool IsKernelLaunchSynchronized() const final { return kernel_->IsKernelLaunchSynchronized(); }
  void InferShape(user_op::KernelInferContext* ctx) const final { kernel_->InferShape(ctx); }
  void Compute(user_op::KernelComputeContext* ctx, user_op::OpKernelState* state,
               const user_op::OpKernelCache* cache) const final {
    if (is_update_ && failure_pending()) { return; }
    const ScratchUse scratch;
    try {
      kernel_->Compute(ctx, state, cache);
    } catch (...) {
      record_failure(ctx->op_type_name());
      zero_outputs(ctx);
    }
  }

 protected:
  const std::unique_ptr<const user_op::OpKernel> kernel_;

 private:
  using user_op::OpKernel::Compute;
  const bool is_update_;
};

// OneFlow asks a kernel for a state or a cache only if its class has functions for them.
class GuardedKernelWithState final : public GuardedKernel {
 public:
  using GuardedKernel::GuardedKernel;
  std::shared_ptr<user_op::OpKernelState> CreateOpKernelState(
      user_op::KernelInitContext* ctx) const override {
    return kernel_->CreateOpKernelState(ctx);
  }
  std::shared_ptr<user_op::OpKernelCache> InitOpKernelCache(
      user_op::KernelCacheContext* ctx) const override {
    return kernel_->InitOpKernelCache(ctx);
  }
  void InitOpKernelCacheWithFlags(user_op::KernelCacheContext* ctx, int8_t flag,
                                  std::shared_ptr<user_op::OpKernelCache>* cache) const override {
    kernel_->InitOpKernelCacheWithFlags(ctx, flag, cache);
  }
};

}  // namespace

user_op::OpKernelCreateFn guarded(const std::string& op, user_op::OpKernelCreateFn create) {
  const bool update = updates().count(op) > 0;
  return [update, create = std::move(create)]() -> const user_op::OpKernel* {
    const user_op::OpKernel* kernel = create();
    if (kernel->has_state_or_cache()) {
      return user_op::NewOpKernel<GuardedKernelWithState>(kernel, update);
    }
    return user_op::NewOpKernel<GuardedKernel>(kernel, update);
  };
}

KernelRegistration::KernelRegistration(user_op::OpKernelRegistry registry) {
  ::oneflow::CatchRegistryError([&]() -> ::oneflow::Maybe<void> {
    auto result = JUST(registry.Finish()).GetResult();
    result.create_fn = guarded(result.op_type_name, std::move(result.create_fn));
    return user_op::UserOpRegistryMgr::Get().Register(std::move(result));
  });
}

namespace {

// The optimizers that are OneFlow's own must not step either while a failure waits. When the
// library is loaded.
bool guard_stock_updates() {
  for (auto& [op, kernels] : all_kernels()) {
    if (updates().count(op) == 0) { continue; }
    for (user_op::OpKernelRegistryResult& kernel : kernels) {
      if (kernel.priority >= kKernelPriority) { continue; }  // ours
      kernel.create_fn = guarded(op, std::move(kernel.create_fn));
    }
  }
  return true;
}

const bool g_stock_updates_guarded = guard_stock_updates();

}  // namespace

}  // namespace oneflow_accel
