// identity: what OneFlow's autograd keeps a gradient with, at every backward pass a copy of the
// gradients of all parameters.
#include <cstring>

#include "common/threads.h"
#include "copy/elements.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

class IdentityKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const auto* in = ctx->Tensor4ArgNameAndIndex("in", 0);
    auto* out = ctx->Tensor4ArgNameAndIndex("out", 0);
    const auto* from = static_cast<const char*>(in->raw_dptr());
    auto* to = static_cast<char*>(out->mut_raw_dptr());
    // In nn.Graph they may be one buffer.
    if (from == to) { return; }
    parallel_for(bytes_of(*out), kGrainSize * sizeof(float), [=](int64_t begin, int64_t end) {
      std::memcpy(to + begin, from + begin, end - begin);
    });
  }
};

REGISTER_KERNEL("identity", make<IdentityKernel>, is_movable_on_cpu("in"),
                in_place("out", "in", /*changes=*/false));

}  // namespace

}  // namespace oneflow_accel
