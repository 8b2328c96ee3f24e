// constant (zeros, ones, full) and zero_like: on all threads, which also share the work of the
// system that hands out the pages.
#include <algorithm>

#include "common/threads.h"
#include "copy/elements.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

template <typename T>
class ConstantKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    auto* out = ctx->Tensor4ArgNameAndIndex("out", 0);
    const T value = ctx->Attr<bool>("is_floating_value")
                        ? static_cast<T>(ctx->Attr<double>("floating_value"))
                        : static_cast<T>(ctx->Attr<int64_t>("integer_value"));
    T* to = out->mut_dptr<T>();
    parallel_for(out->shape_view().elem_cnt(), kGrainSize, [=](int64_t begin, int64_t end) {
      std::fill(to + begin, to + end, value);
    });
  }
};

class ZeroLikeKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    zero_fill(ctx->Tensor4ArgNameAndIndex("out", 0));
  }
};

REGISTER_KERNEL("constant", make<ConstantKernel<float>>, is_float32_on_cpu("out"));
REGISTER_KERNEL("constant", make<ConstantKernel<double>>,
                is_on_cpu("out", ::oneflow::DataType::kDouble));
REGISTER_KERNEL("constant", make<ConstantKernel<int64_t>>,
                is_on_cpu("out", ::oneflow::DataType::kInt64));
REGISTER_KERNEL("zero_like", make<ZeroLikeKernel>, is_movable_on_cpu("out"));

}  // namespace

}  // namespace oneflow_accel
