// narrow and narrow_grad: a range of one dimension.
#include "copy/elements.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

// The part that both tensors share: (outer, range, inner), where the inner dimensions are
// contiguous in both. `source_range` and `destination_range` are the sizes of the narrowed
// dimension in each, `length` what is copied of it.
std::vector<CopyDim> range_dims(const ::oneflow::ShapeView& shape, int64_t dim, int64_t length,
                                int64_t source_range, int64_t destination_range) {
  const int64_t inner = shape.Count(dim + 1);
  return {{shape.Count(0, dim), source_range * inner, destination_range * inner},
          {length * inner, 1, 1}};
}

class NarrowKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const auto* in = ctx->Tensor4ArgNameAndIndex("in", 0);
    auto* out = ctx->Tensor4ArgNameAndIndex("out", 0);
    const auto dim = ctx->Attr<int64_t>("dim");
    const int64_t offset = ctx->Attr<int64_t>("start") * in->shape_view().Count(dim + 1);
    const int64_t length = out->shape_view().At(dim);
    strided_copy(range_dims(out->shape_view(), dim, length, in->shape_view().At(dim), length),
                 element_bytes(*out), in->dptr<char>() + offset * element_bytes(*in),
                 out->mut_dptr());
  }
};

class NarrowGradKernel final : public Kernel {
  void Compute(user_op::KernelComputeContext* ctx) const override {
    const auto* dy = ctx->Tensor4ArgNameAndIndex("dy", 0);
    auto* dx = ctx->Tensor4ArgNameAndIndex("dx", 0);
    const auto dim = ctx->Attr<int64_t>("dim");
    const int64_t offset = ctx->Attr<int64_t>("start") * dx->shape_view().Count(dim + 1);
    const int64_t length = dy->shape_view().At(dim);
    zero_fill(dx->mut_dptr(), bytes_of(*dx));
    strided_copy(range_dims(dy->shape_view(), dim, length, length, dx->shape_view().At(dim)),
                 element_bytes(*dx), dy->dptr(),
                 dx->mut_dptr<char>() + offset * element_bytes(*dx));
  }
};

REGISTER_KERNEL("narrow", make<NarrowKernel>, is_movable_on_cpu("in"));
REGISTER_KERNEL("narrow_grad", make<NarrowGradKernel>, is_movable_on_cpu("dy"));

}  // namespace

}  // namespace oneflow_accel
