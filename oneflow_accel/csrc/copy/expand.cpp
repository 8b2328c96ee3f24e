// expand: repeats dimensions of size 1, where OneFlow cannot return a view (in an nn.Graph).
#include "copy/elements.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

class ExpandKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const auto* in = ctx->Tensor4ArgNameAndIndex("in", 0);
    auto* out = ctx->Tensor4ArgNameAndIndex("out", 0);
    const auto& in_shape = in->shape_view();
    const auto& out_shape = out->shape_view();
    const auto from = contiguous_strides(in_shape);
    const auto to = contiguous_strides(out_shape);
    // Dimensions are matched from the last one on; the leading ones are new.
    const int64_t added = out_shape.NumAxes() - in_shape.NumAxes();
    std::vector<CopyDim> dims;
    for (int64_t k = 0; k < out_shape.NumAxes(); ++k) {
      const bool repeated = k < added || in_shape.At(k - added) == 1;
      dims.push_back({out_shape.At(k), repeated ? 0 : from[k - added], to[k]});
    }
    strided_copy(std::move(dims), element_bytes(*out), in->dptr(), out->mut_dptr());
  }
};

REGISTER_KERNEL("expand", make<ExpandKernel>, is_movable_on_cpu("in"));

}  // namespace

}  // namespace oneflow_accel
