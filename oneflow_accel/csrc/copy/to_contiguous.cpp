// to_contiguous: what OneFlow emits in eager mode before an operator reads a view (permute, chunk,
// slice, expand), and for Tensor.contiguous().
#include "copy/elements.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

class ToContiguousKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const auto* in = ctx->Tensor4ArgNameAndIndex("in", 0);
    auto* out = ctx->Tensor4ArgNameAndIndex("out", 0);
    const auto to = contiguous_strides(out->shape_view());
    std::vector<CopyDim> dims;
    for (std::size_t k = 0; k < to.size(); ++k) {
      dims.push_back({out->shape_view().At(k), in->stride().at(k), to[k]});
    }
    strided_copy(std::move(dims), element_bytes(*out), in->raw_dptr(), out->mut_raw_dptr());
  }
};

REGISTER_KERNEL("to_contiguous", make<ToContiguousKernel>, is_movable_on_cpu("in"));

}  // namespace

}  // namespace oneflow_accel
