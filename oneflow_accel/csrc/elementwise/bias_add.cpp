// bias_add, float32 and bfloat16: out = a + b, where b lies along one axis of a.
#include "elementwise/arithmetic.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

template <typename T>
class BiasAddKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const auto* a = ctx->Tensor4ArgNameAndIndex("a", 0);
    const auto* b = ctx->Tensor4ArgNameAndIndex("b", 0);
    const auto axis = ctx->Attr<int32_t>("axis");
    const auto& shape = a->shape_view();
    Broadcast(shape.Count(0, axis), shape.At(axis), shape.Count(axis + 1))
        .run<T>(add_rows, static_cast<const T*>(a->raw_dptr()),
                static_cast<const T*>(b->raw_dptr()),
                static_cast<T*>(ctx->Tensor4ArgNameAndIndex("out", 0)->mut_raw_dptr()));
  }
};

REGISTER_KERNEL("bias_add", make<BiasAddKernel<float>>, is_float32_on_cpu("out"),
                in_place("out", "a"));
REGISTER_KERNEL("bias_add", make<BiasAddKernel<Bfloat16>>, is_bfloat16_on_cpu("out"),
                in_place("out", "a"));

}  // namespace

}  // namespace oneflow_accel
