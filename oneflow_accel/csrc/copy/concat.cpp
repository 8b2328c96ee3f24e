// concat (cat) and split_like (chunk and split in an nn.Graph, and the gradient of concat).
#include "copy/elements.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

class ConcatKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    auto* out = ctx->Tensor4ArgNameAndIndex("out", 0);
    const auto axis = ctx->Attr<int64_t>("axis");
    const int64_t rows = out->shape_view().Count(0, axis);
    const int64_t out_columns = out->shape_view().Count(axis);
    const auto bytes = static_cast<int64_t>(element_bytes(*out));
    auto* destination = out->mut_dptr<char>();
    for (const auto& name : ctx->inputs()) {
      const auto* in = ctx->Tensor4ArgNameAndIndex(name.first, name.second);
      const int64_t columns = in->shape_view().Count(axis);
      strided_copy({{rows, columns, out_columns}, {columns, 1, 1}}, bytes, in->dptr(),
                   destination);
      destination += columns * bytes;
    }
  }
};

class SplitLikeKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const auto* in = ctx->Tensor4ArgNameAndIndex("in", 0);
    const auto axis = ctx->Attr<int64_t>("axis");
    const int64_t rows = in->shape_view().Count(0, axis);
    const int64_t in_columns = in->shape_view().Count(axis);
    const auto bytes = static_cast<int64_t>(element_bytes(*in));
    const auto* source = in->dptr<char>();
    for (const auto& name : ctx->outputs()) {
      auto* out = ctx->Tensor4ArgNameAndIndex(name.first, name.second);
      const int64_t columns = out->shape_view().Count(axis);
      strided_copy({{rows, in_columns, columns}, {columns, 1, 1}}, bytes, source, out->mut_dptr());
      source += columns * bytes;
    }
  }
};

REGISTER_KERNEL("concat", make<ConcatKernel>, is_movable_on_cpu("out"));
REGISTER_KERNEL("split_like", make<SplitLikeKernel>, is_movable_on_cpu("in"));

}  // namespace

}  // namespace oneflow_accel
