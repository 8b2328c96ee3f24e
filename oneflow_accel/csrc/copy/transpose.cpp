// transpose: permute and transpose in an nn.Graph, where OneFlow has no views.
#include "copy/elements.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

class TransposeKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const auto* input = ctx->Tensor4ArgNameAndIndex("input", 0);
    auto* output = ctx->Tensor4ArgNameAndIndex("output", 0);
    const auto& perm = ctx->Attr<std::vector<int32_t>>("perm");
    const auto from = contiguous_strides(input->shape_view());
    const auto to = contiguous_strides(output->shape_view());
    std::vector<CopyDim> dims;
    for (std::size_t k = 0; k < perm.size(); ++k) {
      dims.push_back({output->shape_view().At(k), from[perm[k]], to[k]});
    }
    strided_copy(std::move(dims), element_bytes(*output), input->dptr(), output->mut_dptr());
  }
};

REGISTER_KERNEL("transpose", make<TransposeKernel>, is_movable_on_cpu("output"));

}  // namespace

}  // namespace oneflow_accel
