// gather and the gradient of it, unsorted_segment_sum_like, and unsorted_segment_sum.
#include "copy/elements.h"
#include "gather/rows.h"

namespace oneflow_accel {

namespace {

namespace user_op = ::oneflow::user_op;

TableShape table_shape(const ::oneflow::ShapeView& shape, int64_t axis,
                       const user_op::OpKernelCache* cache) {
  const int64_t first = cache ? dynamic_cast<const RowRange&>(*cache).first : 0;
  if (shape.NumAxes() == 0) { return {1, 1, 1, first}; }
  return {shape.Count(0, axis), shape.At(axis), shape.Count(axis + 1), first};
}

class GatherKernel final : public Kernel {
 public:
  std::shared_ptr<user_op::OpKernelCache> InitOpKernelCache(
      user_op::KernelCacheContext* ctx) const override {
    return RowRange::of(ctx, "in");
  }

 private:
  void Compute(user_op::KernelComputeContext* ctx, user_op::OpKernelState*,
               const user_op::OpKernelCache* cache) const override {
    const auto* in = ctx->Tensor4ArgNameAndIndex("in", 0);
    const Indices indices(*ctx->Tensor4ArgNameAndIndex("indices", 0));
    auto* out = ctx->Tensor4ArgNameAndIndex("out", 0);
    const TableShape shape = table_shape(in->shape_view(), ctx->Attr<int64_t>("axis"), cache);
    indices.check(cache ? dynamic_cast<const RowRange&>(*cache).total : shape.rows);
    gather_rows(shape, indices, element_bytes(*in), in->dptr(), out->mut_dptr());
  }
};

template <typename T>
class SegmentSumKernel final : public Kernel {
 public:
  std::shared_ptr<user_op::OpKernelCache> InitOpKernelCache(
      user_op::KernelCacheContext* ctx) const override {
    return RowRange::of(ctx, "out");
  }

 private:
  void Compute(user_op::KernelComputeContext* ctx, user_op::OpKernelState*,
               const user_op::OpKernelCache* cache) const override {
    const auto* data = ctx->Tensor4ArgNameAndIndex("data", 0);
    const Indices segments(*ctx->Tensor4ArgNameAndIndex("segment_ids", 0));
    auto* out = ctx->Tensor4ArgNameAndIndex("out", 0);
    sum_rows_by_index(table_shape(out->shape_view(), ctx->Attr<int64_t>("axis"), cache), segments,
                      data->dptr<T>(), out->mut_dptr<T>());
  }
};

REGISTER_KERNEL("gather", make<GatherKernel>, is_movable_on_cpu("in"));
REGISTER_KERNEL("unsorted_segment_sum", make<SegmentSumKernel<float>>, is_float32_on_cpu("out"));
REGISTER_KERNEL("unsorted_segment_sum_like", make<SegmentSumKernel<float>>,
                is_float32_on_cpu("out"));
REGISTER_KERNEL("unsorted_segment_sum_like", make<SegmentSumKernel<double>>,
                is_on_cpu("out", ::oneflow::DataType::kDouble));

}  // namespace

}  // namespace oneflow_accel
