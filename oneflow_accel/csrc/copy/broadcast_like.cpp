// broadcast_like: the gradient of sums and means, repeated along the axes that they went over.
#include "copy/elements.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

class BroadcastLikeKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const auto* x = ctx->Tensor4ArgNameAndIndex("x", 0);
    auto* y = ctx->Tensor4ArgNameAndIndex("y", 0);
    const auto& axes = ctx->Attr<std::vector<int32_t>>("broadcast_axes");
    const auto& shape = y->shape_view();
    const int64_t rank = shape.NumAxes();
    // No axis stands for all of them. x may have these as axes of size 1, or not at all.
    std::vector<bool> repeated(rank, axes.empty());
    for (const int64_t axis : axes) { repeated[axis < 0 ? axis + rank : axis] = true; }
    const auto to = contiguous_strides(shape);
    std::vector<CopyDim> dims(rank);
    int64_t stride = 1;
    for (int64_t k = rank - 1; k >= 0; --k) {
      dims[k] = {shape.At(k), repeated[k] ? 0 : stride, to[k]};
      if (!repeated[k]) { stride *= shape.At(k); }
    }
    strided_copy(std::move(dims), element_bytes(*y), x->dptr(), y->mut_dptr());
  }
};

REGISTER_KERNEL("broadcast_like", make<BroadcastLikeKernel>, is_movable_on_cpu("y"));

}  // namespace

}  // namespace oneflow_accel
